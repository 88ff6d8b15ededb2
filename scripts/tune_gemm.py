#!/usr/bin/env python
"""Measure the table by which `matmul` chooses its kernel, on the Hopper GPU here, beside cuBLAS. Needs PyTorch.

    python scripts/tune_gemm.py --json docs/results/h200_gemm.json

writes numba_tma/kernels/gemm/tuned.json, and the times of all shapes to the file named.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from numba_tma import launch, suite
from numba_tma.kernels.gemm import choice, tuning

_TRIED_OTHERS = 2


def main() -> int:
    """Measure and write; the exit status is 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the times of all shapes go")
    parser.add_argument("--keep-costs", action="store_true", help="measure shapes alone, with the costs that there are")
    parser.add_argument("--tried", type=int, default=5, help="configurations tried for a shape (default %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="compilers at once (default %(default)s)")
    options = parser.parse_args()
    start = time.perf_counter()
    everything = {**tuning.CUBES, **tuning.SHAPES}
    types = {tuning.types_of("bfloat16", shape) for shape in everything.values()}
    wanted = [(c, t) for t in types for c in choice.candidates() if c.fits(t)]
    for kind in tuning.OTHER_KINDS:
        for shape in tuning.CUBES.values():
            kind_types = tuning.types_of(kind[0], shape, kind[1])
            wanted += [(c, kind_types) for c in choice.best_candidates(kind_types, shape, _TRIED_OTHERS)]
    tuning.compile_all(wanted, options.workers)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    refusal = launch.gpu_refusal()
    if refusal:
        print(f"tune_gemm: {refusal}", file=sys.stderr)
        return 2
    circumstances = suite.circumstances()
    costs = json.loads(choice.TABLE.read_text())["costs"]
    if not options.keep_costs:
        costs = tuning.measure_costs()
        tuning.write_table(costs, [], circumstances)
        print(f"costs after {time.perf_counter() - start:.0f} s", flush=True)
    shapes = tuning.measure_shapes(everything, "bfloat16", tried=options.tried)
    for dtype, b_major in tuning.OTHER_KINDS:
        shapes += tuning.measure_shapes(tuning.CUBES, dtype, b_major=b_major, tried=_TRIED_OTHERS, repeats=5)
    tuning.write_table(costs, shapes, circumstances)
    if options.json:
        options.json.write_text(json.dumps({"circumstances": circumstances, "shapes": shapes}, indent=1) + "\n")
    print(f"finished after {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

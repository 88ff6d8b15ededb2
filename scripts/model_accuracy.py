#!/usr/bin/env python
"""Let the simulator's model of time say what the cases take that were measured on a GPU; no GPU is needed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from numba_tma import accuracy, suite
from numba_tma.kernels import select
from numba_tma.report import seconds
from numba_tma.sim.timing import default_device

# Of the multiply-adds per pair that `measure.py --only overlap` goes through.
WORKS = (0, 8, 16, 24, 32)


def main() -> int:
    """Model; the exit status is 0 unless a name is unknown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="PROBLEM[.VARIANT]", action="append", help="just this; may be repeated")
    parser.add_argument("--cases", choices=("default", "quick"), default="default", help="which of the GPU's cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    try:
        chosen = select(options.only)
    except KeyError as error:
        print(f"model_accuracy: {error.args[0]}", file=sys.stderr)
        return 2
    records: list[dict] = []
    overlap: list[dict] = []

    def keep() -> None:
        if options.json:
            kept = {"circumstances": suite.circumstances(), "device": default_device().as_dict()}
            options.json.write_text(json.dumps({**kept, "records": records, "overlap": overlap}, indent=1) + "\n")

    for problem, variants in chosen:
        for case in problem.cases[options.cases, "gpu"]:
            started = time.perf_counter()
            for record in accuracy.modelled(problem, case, variants):
                records.append(record)
                shape = "×".join(map(str, case.shape))
                name = f"{problem.name}.{record['variant']} {shape} {case.dtype} {record['options'] or ''}"
                spent = time.perf_counter() - started
                print(f"{name}: modelled {seconds(record['modelled']['seconds'])} ({spent:.1f} s)", flush=True)
                started = time.perf_counter()
                keep()
    if not options.only or "kv_stream" in options.only:
        for record in accuracy.overlap(WORKS):
            overlap.append(record)
            times = ", ".join(f"{name} {seconds(value)}" for name, value in record["seconds"].items())
            print(f"overlap, work {record['work']}: modelled {times}", flush=True)
            keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())

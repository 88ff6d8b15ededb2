#!/usr/bin/env python
"""Run every problem of the suite, check each variant against NumPy, and show what moves the data and how fast."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from numba_tma import launch, report, suite
from numba_tma.kernels import select


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=launch.BACKENDS, default=None, help="where to run (default: auto)")
    parser.add_argument("--only", metavar="PROBLEM[.VARIANT]", action="append", help="run just this; may be repeated")
    parser.add_argument("--list", action="store_true", help="list problems and variants (those of --only), and stop")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the results as a JSON list of records")
    parser.add_argument("--quick", action="store_true", help="smallest sizes only")
    parser.add_argument("--seed", type=int, default=None, help="seed of the inputs (default: a fresh one)")
    parser.add_argument(
        "--schedules", type=int, default=1, metavar="N", help="in the simulator: orders of copies and warps to try"
    )
    parser.add_argument("--model", action="store_true", help="in the simulator: times that its model of an H200 gives")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status is 0 when every check passed, 1 when one failed, 130 after Ctrl-C."""
    options = parse(arguments)
    try:
        chosen = select(options.only)
        wanted = options.backend or launch.backend()
    except (KeyError, ValueError) as error:
        print(f"run_all: {error.args[0]}", file=sys.stderr)
        return 2
    if options.list:
        for problem, variants in chosen:
            print(f"{problem.name}: {problem.title}")
            for variant in variants:
                print(f"  {problem.name}.{variant.name:<14} {variant.idea}")
        return 0
    refusal = launch.gpu_refusal()
    if wanted == "gpu" and refusal:
        print(f"run_all: --backend gpu: {refusal}; use --backend sim", file=sys.stderr)
        return 2
    backend = "sim" if wanted == "sim" or refusal else "gpu"
    if options.seed is not None and options.seed < 0:
        print(f"run_all: --seed {options.seed}: a seed is 0 or more", file=sys.stderr)
        return 2
    if options.schedules < 1:
        print(f"run_all: --schedules {options.schedules}: 1 or more", file=sys.stderr)
        return 2
    if options.schedules > 1 and backend == "gpu":
        print("run_all: --schedules: a GPU has one order, its own; use --backend sim", file=sys.stderr)
        return 2
    if options.model and backend == "gpu":
        print("run_all: --model: a GPU is measured, not modelled; use --backend sim", file=sys.stderr)
        return 2
    if options.json and (options.json.is_dir() or (options.json.parent.exists() and not options.json.parent.is_dir())):
        print(f"run_all: --json {options.json}: no file can be written there", file=sys.stderr)
        return 2
    seed = options.seed if options.seed is not None else time.time_ns() % (1 << 32)
    where = suite.circumstances()
    print(
        f"backend {backend}, device {where['device'] if backend == 'gpu' else suite.SIMULATOR}, seed {seed}",
        flush=True,
    )

    records: list[suite.Record] = []
    interrupted = False
    try:
        rate = suite.device_copy_rate() if backend == "gpu" else None
        if rate:
            print(f"the driver's device-to-device copy: {rate:,.0f} GB/s", flush=True)
        sizes = ("quick" if options.quick else "default", backend)
        for problem, variants in chosen:
            for case in problem.cases[sizes]:
                shape = "×".join(map(str, case.shape))
                started = time.perf_counter()
                for record in suite.run_case(
                    problem,
                    case,
                    variants,
                    backend,
                    seed=seed,
                    device_copy_rate=rate,
                    schedules=options.schedules,
                    model=options.model,
                ):
                    records.append(record)
                    verdict = "ok" if record.ok else "skipped" if record.skipped else "FAILED"
                    spent = time.perf_counter() - started
                    print(
                        f"  {verdict:<7} {problem.name}.{record.variant} {shape} {case.dtype} ({spent:.1f} s)",
                        flush=True,
                    )
    except KeyboardInterrupt:
        interrupted = True

    if records:
        print("\n" + report.table(records))
    if options.json:
        report.write_json(options.json, records, where)
    failed = report.failures(records)
    for line in failed:
        print(f"FAILED {line}", file=sys.stderr)
    if interrupted:
        print("run_all: interrupted; the table shows what had finished", file=sys.stderr)
        return 130
    if not records:
        print("run_all: nothing was run", file=sys.stderr)
        return 1
    if not failed:
        print(f"\nall {sum(record.ok for record in records)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

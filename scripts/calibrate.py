#!/usr/bin/env python
"""Measure what the model of time needs to know of a GPU, and make the model's constants from it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from numba_tma import launch, suite
from numba_tma.calibration import run
from numba_tma.calibration.probes import PROBES


def main() -> int:
    """Measure; the exit status is 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(PROBES), action="append", metavar="PROBE", help="may be repeated")
    parser.add_argument("--list", action="store_true", help="list the probes, and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name}: {probe.unit}" for name, probe in PROBES.items()))
        return 0
    refusal = launch.gpu_refusal()
    if refusal:
        print(f"calibrate: {refusal}", file=sys.stderr)
        return 2
    records = []
    for record in run.measure(options.only):
        records.append(record)
        print(", ".join(f"{key} {value}" for key, value in record.items()), flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(
                json.dumps({"circumstances": suite.circumstances(), "records": records}, indent=1) + "\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

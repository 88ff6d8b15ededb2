#!/usr/bin/env python
"""Run the benchmarks behind the documentation's figures on the GPU here, and keep them as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from numba_tma import launch, measurements, suite


def main() -> int:
    """Measure; the exit status is 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=sorted(measurements.ALL), action="append", help="just this one; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    refusal = launch.gpu_refusal()
    if refusal:
        print(f"measure: {refusal}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"circumstances": suite.circumstances()}
    for name in options.only or measurements.ALL:
        print(f"{name}:", flush=True)
        results[name] = []
        for record in measurements.ALL[name]():
            print("  " + ", ".join(f"{key} {value}" for key, value in record.items()), flush=True)
            results[name].append(record)
            if options.json:  # after each record, so that what was measured is there if the next is not waited for
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

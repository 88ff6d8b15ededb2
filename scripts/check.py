#!/usr/bin/env python
"""Check a kernel for hazards in the simulator: FILE.py[:KERNEL], or FILE.ptx with --launch DESCRIPTION.json.

The exit status is 0 when nothing was found, 1 when something was, 2 when the kernel could not be launched.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from numba_tma import check
from numba_tma.sim import PtxSyntaxError


def main(arguments: list[str] | None = None) -> int:
    """Check one kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", help="FILE.py, FILE.py:KERNEL or FILE.ptx")
    parser.add_argument(
        "--arguments", default="arguments", metavar="FUNCTION", help="makes a Python kernel's arguments"
    )
    parser.add_argument("--launch", type=Path, metavar="FILE", help="launch description of a PTX file (JSON)")
    parser.add_argument(
        "--schedules", type=int, default=8, metavar="N", help="orders of copies and warps to try (default 8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random schedules and inputs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings as JSON ('-' for stdout)")
    parser.add_argument("--warnings", action="store_true", help="let warnings count for the exit status")
    options = parser.parse_args(arguments)
    file, _, name = options.kernel.partition(":")
    try:
        if file.endswith(".ptx"):
            if options.launch is None:
                raise check.CheckError(f"{file}: a PTX file needs --launch DESCRIPTION.json")
            launch = check.ptx_launch(Path(file), options.launch, options.seed)
        else:
            launch = check.python_launch(Path(file), name or None, options.arguments)
        findings = check.check(launch, max(options.schedules, 1), options.seed)
    except check.CheckError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    except PtxSyntaxError as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    if options.json:
        text = check.as_json(findings) + "\n"
        sys.stdout.write(text) if str(options.json) == "-" else options.json.write_text(text)
    if str(options.json) != "-":
        for finding in findings:
            severity = "" if finding.message.startswith(finding.severity) else f"{finding.severity}: "
            alike = f", and {finding.alike} more like it" if finding.alike else ""
            print(f"{severity}{finding.message}\n  under schedule {finding.schedule}{alike}\n")
        print(f"{len(findings)} finding{'s' * (len(findings) != 1)} under {max(options.schedules, 1)} schedules")
    return int(any(options.warnings or finding.severity == "error" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Make the documentation's pictures in docs/pictures from docs/results and the simulator."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from numba_tma.pictures import attention_turns, pictures

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Draw and write; the exit status is 1 if --check finds one that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a picture is not up to date")
    parser.add_argument(
        "--model",
        action="store_true",
        help=f"model anew what docs/results/{attention_turns.FILE} keeps, the times of a model",
    )
    options = parser.parse_args()
    check = options.check
    if options.model and not check:
        attention_turns.model(ROOT / "docs" / "results")
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = pictures(ROOT / "docs" / "results")
    stale = [n for n, text in wanted.items() if not (folder / n).exists() or (folder / n).read_text() != text]
    extra = [path.name for path in folder.iterdir() if path.name not in wanted]
    if not check:
        for name in stale:
            (folder / name).write_text(wanted[name])
        for name in extra:
            (folder / name).unlink()
    for name in [*stale, *extra]:
        print(f"docs/pictures/{name}: {'stale' if check else 'updated'}")
    return 1 if check and (stale or extra) else 0


if __name__ == "__main__":
    sys.exit(main())

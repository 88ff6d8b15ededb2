#!/usr/bin/env python
"""Make the PTX reference in docs/ptx from the files in ptx/. --check: only say whether it is up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from numba_tma import ptx_pages

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Write the pages; the exit status is 1 if --check finds one that differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    check = parser.parse_args().check
    folder = ROOT / "docs" / "ptx"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = ptx_pages.pages(folder)
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    extra = [path for path in folder.glob("*.md") if path not in wanted]
    if not check:
        for path in stale:
            path.write_text(wanted[path])
        for path in extra:
            path.unlink()
    for path in [*stale, *extra]:
        print(f"{path.relative_to(ROOT)}: {'stale' if check else 'updated'}")
    return 1 if check and (stale or extra) else 0


if __name__ == "__main__":
    sys.exit(main())

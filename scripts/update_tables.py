#!/usr/bin/env python
"""Make the documentation's tables anew from docs/results/."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from numba_tma import tables

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Update, or with --check only say whether something would change (exit status 1)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        made = tables.update(text, ROOT / "docs" / "results")
        if made != text:
            stale.append(page)
            if not options.check:
                page.write_text(made)
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'stale' if options.check else 'updated'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python
"""Build the documentation as a site, into build/site. Needs the extra `docs`, and no network."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from numba_tma import site

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Assemble the pages and run the generator, which fails on any warning."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    site.assemble(ROOT, ROOT / "build" / "pages")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

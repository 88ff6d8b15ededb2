"""Cells of Markdown tables."""

from __future__ import annotations

import re


def row(table: str, first: str) -> list[str]:
    """The cells of the row that begins so, or the headers; how wide cells are does not matter."""
    return _cells(next(line for line in table.splitlines() if re.sub(" +", " ", line).startswith(f"| {first}")))


def rows(table: str) -> list[list[str]]:
    """The cells of all rows below the headers."""
    return [_cells(line) for line in table.splitlines()[2:]]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]

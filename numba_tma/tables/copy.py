"""Table of docs/copy.md beyond the suite's: rates by element type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..report import markdown
from .records import Record, load

RESULTS = "h200_copy.json"


def copy_types(records: Iterable[Record]) -> str:
    """Each variant of copy on 1 GiB of each type, as a share of the driver's copy in the same loop."""
    rows, names = [], []
    for record in records:
        found = record["gb_per_s"]
        names = [name for name in found if name != "driver"]
        shares = [f"{found[name] / found['driver']:.1%}" for name in names]
        rows.append([record["dtype"], f"{found['driver']:,.0f}", *shares])
    return markdown(rows, ["type", "driver, GB/s", *(f"`{name}`" for name in names)])


TABLES: dict[str, Callable[[Path], str]] = {
    "copy types": lambda results: copy_types(load(results, RESULTS)["copy_types"]),
}

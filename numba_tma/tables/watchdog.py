"""The table of docs/hangs.md: what a watchdog costs a kernel that does not hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..report import markdown, seconds
from .records import load

RESULTS = "h200_watchdog.json"


def _cost(results: Path) -> str:
    rows = []
    for r in load(results, RESULTS)["watchdog_cost"]:
        without, watched = r["seconds"], r["seconds_with_watchdog"]
        rows.append([f"`{r['what']}`", seconds(without), seconds(watched), f"{watched / without - 1:+.0%}"])
    return markdown(rows, ["", "without", "with a watchdog", ""])


TABLES: dict[str, Callable[[Path], str]] = {"watchdog cost": _cost}

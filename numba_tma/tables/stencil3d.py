"""Tables of docs/stencil3d.md: the fastest tiles of each step, and depths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..report import markdown
from .records import MOVEMENT, Record, best, load


def depths(records: Iterable[Record], tile: tuple[int, int] = (16, 128), rows: int = 4, points: int = 7) -> str:
    """GB/s of stencil3d with its planes in flight, over how far a block goes along z."""
    found: dict[str, dict[int, str]] = {}
    for record in records:
        options = record["options"]
        if record["variant"] not in ("tma", "stages") or record["points"] != points:
            continue
        if tuple(options["tile"]) == tile and options["rows"] == rows:
            name = f"`{record['variant']}`, {options.get('stages', 1)}"
            found.setdefault(name, {})[options["depth"]] = f"{record['gb_per_s']:,.0f}"
    columns = sorted({depth for row in found.values() for depth in row})
    table = [[name, *(row.get(depth, "") for depth in columns)] for name, row in found.items()]
    return markdown(table, ["planes in flight a block; GB/s at depth", *map(str, columns)])


TABLES: dict[str, Callable[[Path], str]] = {
    "stencil3d depths": lambda results: depths(load(results, MOVEMENT)["stencil3d_tiles"]),
    "stencil3d speed": lambda results: best(load(results, MOVEMENT)["stencil3d_tiles"], "points", "plain"),
}

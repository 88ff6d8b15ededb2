"""Benchmark of stencil3d for docs/stencil3d.md: its steps over tiles, stages and depths."""

from __future__ import annotations

import numpy as np

from ..device_array import DeviceArray
from ..kernels import Case, stencil3d
from .timing import Record, timed

# Rows and columns of a tile, and rows of a thread.
_TILES = (((16, 64), 2), ((32, 64), 4), ((16, 128), 2), ((16, 128), 4), ((32, 128), 4), ((8, 128), 1))


def stencil3d_tiles(size: int = 512) -> list[Record]:
    """Each step of stencil3d over tiles, stages and how far a block goes along z."""
    problem = stencil3d.PROBLEM
    shape = (size, size, size)
    arrays = {name: DeviceArray.empty(shape, np.dtype(np.float32)) for name in ("source", "out")}
    records = []
    for points in stencil3d.POINTS:
        rows: list[tuple[str, Record]] = [("plain", {})]
        for tile, per_thread in _TILES:
            for depth in (32, 64, 128, 256, 512):
                chosen = {"tile": tile, "rows": per_thread, "depth": depth}
                rows += [("shared", chosen), ("tma", chosen)]
                rows += [(name, {**chosen, "stages": n}) for name in ("stages", "ring") for n in (2, 4, 6)]
        launches = {
            str(number): problem.variant(name).bind(arrays, points=points, **chosen)
            for number, (name, chosen) in enumerate(rows)
        }
        case = Case(shape, "float32", {"points": points})
        records += timed(launches, rows, {"shape": list(shape), "points": points}, problem.bytes_moved(case))
    return records

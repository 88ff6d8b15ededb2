"""Benchmarks of moving data: what tiles, stages and blocks do to the rate of reading memory (docs/tile_sweep.md).

The instrument is kv_stream with a producer warp and no arithmetic: copies in, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import bench, driver, suite
from .arrays import reinterpret
from .device_array import DeviceArray
from .kernels import kv_stream

Record = dict[str, Any]

_ELEMENTS = 1 << 28  # of K and of V: 512 MB each, far more than the L2 cache holds
_SHARED = 227 * 1024

# (tile, stages, blocks on each SM)
_IN_FLIGHT = [((64, 64), stages, blocks) for blocks in (1, 2, 4, 8) for stages in (1, 2, 3, 4, 6, 8)]
_TILES = [
    (tile, stages, 1)
    for tile, stages in (
        ((8, 64), 32),
        ((16, 64), 16),
        ((32, 64), 8),
        ((64, 64), 4),
        ((128, 64), 2),
        ((256, 64), 1),
        ((64, 128), 2),
        ((32, 128), 4),
        ((64, 256), 1),
    )
]
_SHAPES = [((rows, 2048 // rows), 8, 1) for rows in (256, 128, 64, 32, 16, 8)]


def bytes_in_flight() -> list[Record]:
    """Rate of reading against the bytes that an SM has asked for: tiles of one size, more stages, more blocks."""
    return _rates(_IN_FLIGHT)


def tile_sizes() -> list[Record]:
    """The same bytes in flight, in fewer and larger tiles."""
    return _rates(_TILES)


def tile_shapes() -> list[Record]:
    """The same bytes in tiles of 4 KB, from 256 rows of 16 bytes to 8 rows of 512."""
    return _rates(_SHAPES)


def _rates(configurations: list[tuple[tuple[int, int], int, int]]) -> list[Record]:
    multiprocessors = driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device())
    whole = {name: DeviceArray(np.ones(_ELEMENTS, np.float16)) for name in ("k", "v")}
    launches: dict[str, Callable[[], object]] = {}
    records = []
    for tile, stages, blocks in configurations:
        stage_bytes = 2 * 2 * tile[0] * tile[1]  # a tile of K and one of V, two bytes an element
        if blocks * (stages * stage_bytes + 2048) > _SHARED:
            continue
        rows = tile[0] * multiprocessors * blocks
        columns = _ELEMENTS // rows // tile[1] * tile[1]
        arrays = {n: reinterpret(a, np.float16, (rows, columns), (2 * columns, 2)) for n, a in whole.items()}
        arrays["out"] = DeviceArray(np.zeros((1, rows), np.float32))
        threads = min(128, tile[0] * tile[1] // kv_stream.VECTOR)
        launch = kv_stream.PROBLEM.variant("tma_ring").bind(
            arrays, tile=tile, stages=stages, work=0, splits=1, threads=threads
        )
        launches[str(len(records))] = launch
        records.append(
            {
                "tile": tile,
                "stages": stages,
                "blocks": blocks,
                "in_flight": blocks * stages * stage_bytes,
                "bytes": 4 * rows * columns,
            }
        )
    timings = bench.time_launches(launches, repeats=7, warm_up=1)
    for record, timing in zip(records, timings.values(), strict=True):
        record["seconds"] = timing.median
        record["gb_per_s"] = record["bytes"] / timing.median / 1e9
        # Little's law: what is in flight is the rate times how long it takes.
        record["residence_ns"] = record["in_flight"] * multiprocessors * timing.median / record["bytes"] * 1e9
    rate = suite.device_copy_rate()
    return [{**record, "share_of_device_copy": record["gb_per_s"] / rate} for record in records]


ALL: dict[str, Callable[[], list[Record]]] = {
    "bytes_in_flight": bytes_in_flight,
    "tile_sizes": tile_sizes,
    "tile_shapes": tile_shapes,
}

"""Benchmarks for docs/tile_sweep.md: what tiles, stages, blocks and L2's fetches do to the rate of reading memory.

For the tiles the instrument is kv_stream with a producer warp and no arithmetic: copies in, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import cuda
from numba.cuda.types import uint32

from .. import bench, driver, ptx, suite
from ..arrays import reinterpret
from ..device_array import DeviceArray
from ..kernels import copy, kv_stream, multicast, stencil3d, transpose
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait, ring
from ..shared import Barriers, Shared, Tiles
from ..tensor_map import TensorMap
from .timing import Record

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
        launches[str(len(records))] = kv_stream.PROBLEM.variant("tma_ring").bind(
            arrays, tile=tile, stages=stages, work=0, splits=1, threads=threads
        )
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


_PROMOTIONS = ("none", "64B", "128B", "256B")


# What reads by tensor maps, as far as they are an option.
_BY_MAPS = (
    (copy.PROBLEM, ("tensor",)),
    (kv_stream.PROBLEM, ("tma", "tma_ring")),
    (transpose.PROBLEM, ("tma", "swizzle", "vector", "ring", "store")),
    (stencil3d.PROBLEM, ("tma", "stages", "ring")),
    (multicast.PROBLEM, ("tma", "multicast")),
)


def l2_promotion() -> list[Record]:
    """How much L2 fetches at a time for a tensor map: seconds of the suite's GPU cases for each of the choices."""
    records: list[Record] = []
    for problem, names in _BY_MAPS:
        for case in problem.cases["default", "gpu"]:
            arrays = {n: DeviceArray(a) for n, a in problem.inputs(case, np.random.default_rng(0)).items()}
            for name in names:
                options = case.options_of(name)
                launches = {
                    promotion: problem.variant(name).bind(arrays, **{**options, "l2_promotion": promotion})
                    for promotion in _PROMOTIONS
                }
                timings = bench.time_launches(launches, repeats=21, warm_up=2)
                records.append(
                    {
                        "problem": problem.name,
                        "variant": name,
                        "shape": list(case.shape),
                        "dtype": case.dtype,
                        "options": options,
                        "bytes": problem.bytes_moved(case),
                        "seconds": {promotion: timing.median for promotion, timing in timings.items()},
                    }
                )
    return records


_READER_STAGES, _READER_BLOCKS = 4, 2  # of each SM: 64 KB in flight there, with boxes of 8 KB
_READER_BOXES = ((128, 32), (64, 64), (32, 128), (16, 256))  # of float16: rows of 64 to 512 bytes


@functools.cache
def _make_reader(box: tuple[int, int], down: bool) -> Kernel:
    """Blocks that stay read a matrix box by box, taking turns along its rows of boxes or down its columns of them."""
    stages = _READER_STAGES
    smem = Shared(tile=Tiles(stages, box, np.float16), full=Barriers(stages))

    @kernel(threads=32, shared=smem)
    def read_boxes(x_map, rows, columns):
        """`rows` and `columns` count boxes."""
        if cuda.threadIdx.x == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            every, boxes = uint32(cuda.gridDim.x), uint32(rows * columns)
            ahead = uint32(cuda.blockIdx.x)
            asked, arrived = uint32(0), uint32(0)
            while arrived < asked or ahead < boxes:
                if ahead < boxes and uint32(asked - arrived) < uint32(stages):
                    stage, _ = ring(asked, stages)
                    if down:
                        row, column = uint32(ahead % rows), uint32(ahead // rows)
                    else:
                        row, column = uint32(ahead // columns), uint32(ahead % columns)
                    ptx.mbarrier_arrive_expect_tx(smem.full[stage], x_map.box_bytes)
                    ptx.cp_async_bulk_tensor_2d_shared_global(
                        smem.tile[stage],
                        x_map,
                        uint32(column * uint32(box[1])),
                        uint32(row * uint32(box[0])),
                        smem.full[stage],
                    )
                    ahead, asked = uint32(ahead + every), uint32(asked + uint32(1))
                else:
                    stage, phase = ring(arrived, stages)
                    mbarrier_wait(smem.full[stage], phase)
                    arrived = uint32(arrived + uint32(1))

    return read_boxes


def l2_promotion_of_boxes(shape: tuple[int, int] = (32768, 16384)) -> list[Record]:
    """Rate of reading a matrix of 1 GiB in boxes of narrower and wider rows, for each granularity of L2's fetches."""
    nbytes = 2 * shape[0] * shape[1]
    x = DeviceArray.empty(shape, np.float16)
    blocks = _READER_BLOCKS * driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device())
    launches: dict[str, Callable[[], object]] = {}
    records: list[Record] = []
    for box in _READER_BOXES:
        counts = [np.uint32(extent // side) for extent, side in zip(shape, box, strict=True)]
        for down in (False, True):
            for promotion in _PROMOTIONS:
                x_map = TensorMap(x, box, l2_promotion=promotion, store=False)
                launches[str(len(records))] = _make_reader(box, down)[blocks].bind(x_map, *counts)
                order = "down columns" if down else "along rows"
                records.append({"row_bytes": 2 * box[1], "order": order, "promotion": promotion, "bytes": nbytes})
    timings = bench.time_launches(launches, repeats=11, warm_up=1)
    for record, timing in zip(records, timings.values(), strict=True):
        record["seconds"], record["gb_per_s"] = timing.median, record["bytes"] / timing.median / 1e9
    return records

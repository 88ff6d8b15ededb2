"""Benchmarks of moving data: what tiles, stages and blocks do to the rate of reading memory (docs/tile_sweep.md), and
what the GPU's counters say of banks (docs/transpose.md) and of multicast (docs/multicast.md).

For the tiles the instrument is kv_stream with a producer warp and no arithmetic: copies in, and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import uint32

from .. import bench, counters, driver, launch, ptx, suite
from ..arrays import reinterpret
from ..device_array import DeviceArray
from ..kernels import Case, copy, kv_stream, multicast, stencil3d, transpose
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait, ring
from ..shared import Barriers, Shared, Tiles
from ..tensor_map import TensorMap

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


# Spans of 128 bytes each way, and threads.
_TRANSPOSE_TILES = (((1, 1), 64), ((2, 1), 128), ((1, 2), 128), ((2, 2), 256), ((2, 2), 128))


def transpose_tiles(side: int = 16384) -> list[Record]:
    """Each step of transpose for three element types, over tiles; PyTorch's copy of the transposed view beside them."""
    problem = transpose.PROBLEM
    records = []
    for dtype in ("float32", "float16", "int8"):
        case = Case((side, side), dtype)
        arrays = {name: DeviceArray.empty(case.shape, np.dtype(dtype)) for name in ("source", "target")}
        tiled = [{"tile": tile, "threads": threads} for tile, threads in _TRANSPOSE_TILES]
        options = {"vector": tiled, "ring": tiled, "store": tiled}
        rows = [(v, o) for v in problem.variants for o in options.get(v.name, [{}])]
        launches = {str(number): variant.bind(arrays, **chosen) for number, (variant, chosen) in enumerate(rows)}
        named = [(variant.name, chosen) for variant, chosen in rows]
        peer = problem.peers["torch"](arrays)
        if peer is not None:
            launches[str(len(rows))] = peer
            named.append(("torch", {}))
        records += _timed(launches, named, {"shape": list(case.shape), "dtype": dtype}, problem.bytes_moved(case))
    return records


# Rows and columns of a tile, and rows of a thread.
_STENCIL_TILES = (((16, 64), 2), ((32, 64), 4), ((16, 128), 2), ((16, 128), 4), ((32, 128), 4), ((8, 128), 1))


def stencil3d_tiles(size: int = 512) -> list[Record]:
    """Each step of stencil3d over tiles, stages and how far a block goes along z."""
    problem = stencil3d.PROBLEM
    shape = (size, size, size)
    arrays = {name: DeviceArray.empty(shape, np.dtype(np.float32)) for name in ("source", "out")}
    records = []
    for points in stencil3d.POINTS:
        rows: list[tuple[str, Record]] = [("plain", {})]
        for tile, per_thread in _STENCIL_TILES:
            for depth in (32, 64, 128, 256, 512):
                chosen = {"tile": tile, "rows": per_thread, "depth": depth}
                rows += [("shared", chosen), ("tma", chosen)]
                rows += [(name, {**chosen, "stages": n}) for name in ("stages", "ring") for n in (2, 4, 6)]
        launches = {
            str(number): problem.variant(name).bind(arrays, points=points, **chosen)
            for number, (name, chosen) in enumerate(rows)
        }
        case = Case(shape, "float32", {"points": points})
        records += _timed(launches, rows, {"shape": list(shape), "points": points}, problem.bytes_moved(case))
    return records


def _timed(
    launches: dict[str, Callable[[], object]], rows: list[tuple[str, Record]], common: Record, nbytes: int
) -> list[Record]:
    """A record for each launch: what it is, its time and rate, and the share of the driver's copy."""
    timings = bench.time_launches(launches, repeats=7, warm_up=1)
    rate = suite.device_copy_rate()
    records = []
    for (name, options), timing in zip(rows, timings.values(), strict=True):
        gb_per_s = nbytes / timing.median / 1e9
        record = {"variant": name, **common, "options": options, "seconds": timing.median}
        records.append({**record, "gb_per_s": gb_per_s, "share_of_device_copy": gb_per_s / rate})
    return records


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


_BANKS = {
    "ld_shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "st_shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
}


def bank_conflicts(size: int = 512) -> list[Record]:
    """Wavefronts of shared memory that each step of transpose takes: the simulator's beside the GPU's."""
    problem = transpose.PROBLEM
    targets = [
        counters.Target(problem.name, variant.name, (size, size), dtype)
        for dtype in ("float32", "float16", "int8")
        for variant in problem.variants
    ]
    records = []
    for target, found in zip(targets, counters.read(targets, list(_BANKS.values())), strict=True):
        host = problem.inputs(Case(target.shape, target.dtype), np.random.default_rng(0))
        with launch.use_backend("sim", banks=True, hazards=False):
            report = problem.variant(target.variant).bind(host)()
        record: Record = {"variant": target.variant, "shape": list(target.shape), "dtype": target.dtype}
        for direction, metric in _BANKS.items():
            use = report.banks[direction]
            record[direction] = {"gpu": found[metric], "simulator": use.wavefronts, "least": use.least}
        records.append(record)
    return records


_MULTICAST_SHAPE = (64, 1024, 4096)
_TRAFFIC = {
    "l2_sectors_read": "lts__t_sectors_op_read.sum",
    "l2_sectors_read_by_sms": "lts__t_sectors_srcunit_tex_op_read.sum",
    "bytes_into_sms": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "dram_bytes_read": "dram__bytes_read.sum",
}


def multicast_traffic(clusters: tuple[int, ...] = (2, 4, 8)) -> list[Record]:
    """What multicast does to the traffic between L2 and the SMs, and to the time, for clusters of several sizes."""
    ways: list[tuple[str, str, Record]] = [("each block for itself", "tma", {})]
    ways += [(f"clusters of {cluster}", "multicast", {"cluster": cluster}) for cluster in clusters]
    targets = [counters.Target("multicast", name, _MULTICAST_SHAPE, "float32", options) for _, name, options in ways]
    counted = counters.read(targets, list(_TRAFFIC.values()))
    case = Case(_MULTICAST_SHAPE, "float32")
    host = multicast.PROBLEM.inputs(case, np.random.default_rng(0))
    arrays = {name: DeviceArray(array) for name, array in host.items()}
    launches = {
        str(number): multicast.PROBLEM.variant(name).bind(arrays, **options)
        for number, (_, name, options) in enumerate(ways)
    }
    timings = bench.time_launches(launches, repeats=21, flush=False)  # x fits in the L2 cache, and stays there
    records = []
    for number, ((what, _, _), found) in enumerate(zip(ways, counted, strict=True)):
        records.append(
            {
                "what": what,
                "shape": list(_MULTICAST_SHAPE),
                "seconds": timings[str(number)].median,
                "bytes_into_shared_memory": multicast.PROBLEM.bytes_moved(case),
                **{what: found[metric] for what, metric in _TRAFFIC.items()},
            }
        )
    return records


ALL: dict[str, Callable[[], list[Record]]] = {
    "bytes_in_flight": bytes_in_flight,
    "tile_sizes": tile_sizes,
    "tile_shapes": tile_shapes,
    "transpose_tiles": transpose_tiles,
    "stencil3d_tiles": stencil3d_tiles,
    "l2_promotion": l2_promotion,
    "l2_promotion_of_boxes": l2_promotion_of_boxes,
    "bank_conflicts": bank_conflicts,
    "multicast_traffic": multicast_traffic,
}

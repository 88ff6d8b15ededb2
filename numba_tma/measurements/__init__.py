"""Benchmarks behind the documentation's figures, beyond what `run_all` times; each returns plain records.

Every function needs a GPU. Times are medians in seconds; candidates that are compared run in turn in one loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import uint32

from .. import bench, driver, ptx, suite
from ..device_array import DeviceArray
from ..kernels import kv_stream
from ..kernels.attention import decoding_figures, fp8_figures
from ..kernels.attention import figures as attention
from ..kernels.gemm import figures as gemm
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait, ring
from ..shared import Barriers, Shared, Tiles
from ..tensor_map import TensorMap
from . import memory, movement

Record = dict[str, Any]


def _matrices(rows: int, columns: int, seed: int = 0) -> dict[str, DeviceArray]:
    rng = np.random.default_rng(seed)
    return {
        name: DeviceArray(rng.standard_normal((rows, columns), np.float32).astype(np.float16)) for name in ("k", "v")
    }


def _outputs(arrays: dict[str, DeviceArray], splits: int) -> dict[str, DeviceArray]:
    rows = arrays["k"].shape[0]
    return {**arrays, "out": DeviceArray(np.zeros((splits, rows), np.float32))}


@kernel(threads=128)
def _three_arrays(a, b, c):
    pass


@kernel(threads=128)
def _two_maps(a_map, b_map, c, n):
    pass


def launch_overhead() -> list[Record]:
    """Host time of one launch of an empty kernel: our call, a bound call, and Numba's own launch."""
    host = np.zeros(1024, np.float32)
    array = DeviceArray(host)
    numba_array = cuda.to_device(host)
    tensor_map = TensorMap(DeviceArray(np.zeros((64, 64), np.float16)), (64, 64), store=False)
    count = np.uint32(3)
    numbas_own = cuda.jit(lambda a, b, c: None)[1, 128]
    calls: dict[str, Callable[[], object]] = {
        "call, 3 arrays": lambda: _three_arrays[1](array, array, array),
        "call, 3 Numba arrays": lambda: _three_arrays[1](numba_array, numba_array, numba_array),
        "call, 2 tensor maps, array, scalar": lambda: _two_maps[1](tensor_map, tensor_map, array, count),
        "bound, 3 arrays": _three_arrays[1].bind(array, array, array),
        "Numba's own launch, 3 arrays": lambda: numbas_own(numba_array, numba_array, numba_array),
    }
    try:
        import torch

        tensor = torch.zeros(1024, device="cuda")
        calls["call, 3 PyTorch tensors"] = lambda: _three_arrays[1](tensor, tensor, tensor)
    except ImportError:
        pass
    records = []
    for name, call in calls.items():
        call()
        timing = bench.host_overhead(call)
        records.append({"what": name, "seconds": timing.median, "seconds_fastest": timing.fastest})
    return records


def overlap(
    tile: tuple[int, int] = (64, 256),
    threads: int = 256,
    works: tuple[int, ...] = (0, 1, 4, 8, 12, 16, 20, 24, 28, 32),
) -> list[Record]:
    """One block per SM, more and more arithmetic: one buffer, two buffers, copy alone, compute alone, and plain Numba.

    Plain Numba's shared tiles end at 48 KB, so it takes tiles of half the columns.
    """
    rows = tile[0] * driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device())
    columns = 16384
    arrays = _outputs(_matrices(rows, columns), 1)
    tma = kv_stream.PROBLEM.variant("tma").bind
    plain_tile = (tile[0], tile[1] // 2)
    copy_alone = {
        "copy alone": tma(arrays, tile=tile, work=0, threads=threads),
        "plain, copy alone": kv_stream.PROBLEM.variant("plain").bind(arrays, tile=plain_tile, work=0, threads=threads),
    }
    records = []
    for work in works:
        launches = {
            "one buffer": kv_stream.bind_one_buffer(arrays, tile=tile, work=work, threads=threads),
            "two buffers": tma(arrays, tile=tile, work=work, threads=threads),
            "compute alone": kv_stream.bind_resident(arrays, tile=tile, work=work, threads=threads),
            "plain": kv_stream.PROBLEM.variant("plain").bind(arrays, tile=plain_tile, work=work, threads=threads),
            **copy_alone,
        }
        timings = bench.time_launches(launches, repeats=11, warm_up=1)
        records.append(
            {
                "shape": [rows, columns],
                "tile": tile,
                "threads": threads,
                "work": work,
                "seconds": {name: timing.median for name, timing in timings.items()},
            }
        )
    return records


def tile_sweep(size: int, top: int = 5) -> list[Record]:
    """kv_stream at size², work 1: the best tile, stages, threads and splits of each variant."""
    base = _matrices(size, size)
    nbytes = 4 * size * size
    copy_rate = suite.device_copy_rate()
    candidates: dict[tuple, Callable[[], object]] = {}
    for splits in (1, 2, 4, 8):
        arrays = _outputs(base, splits)
        for variant, shapes in _SWEEP.items():
            for options in shapes:
                bind = kv_stream.PROBLEM.variant(variant).bind
                try:
                    launch = bind(arrays, splits=splits, **options)
                except ValueError:
                    continue  # the tile does not divide among the threads
                candidates[(variant, splits, *options.items())] = launch
    timings = bench.time_launches(candidates, repeats=7, warm_up=1)
    records = []
    for variant in _SWEEP:
        own = sorted((timing.median, key) for key, timing in timings.items() if key[0] == variant)
        for seconds, key in own[:top]:
            records.append(
                {
                    "variant": variant,
                    "shape": [size, size],
                    "options": {"splits": key[1], **dict(key[2:])},
                    "seconds": seconds,
                    "gb_per_s": nbytes / seconds / 1e9,
                    "share_of_device_copy": nbytes / seconds / 1e9 / copy_rate,
                }
            )
    return records


_TILES = ((64, 64), (32, 64), (16, 128), (32, 128), (8, 256))
_SWEEP: dict[str, list[Record]] = {
    "plain": [{"tile": tile, "threads": 128} for tile in _TILES],
    "plain_vector": [{"tile": tile, "threads": threads} for tile in _TILES for threads in (128, 256)],
    "cp_async": [{"tile": tile, "stages": stages} for tile in _TILES for stages in (2, 3)],
    "tma": [
        {"tile": tile, "stages": stages, "l2_promotion": promotion}
        for tile in (*_TILES, (128, 64))
        for stages in (2, 3, 4)
        for promotion in ("128B", "256B")
    ],
    "tma_ring": [
        {"tile": tile, "stages": stages, "l2_promotion": promotion}
        for tile in _TILES
        for stages in (2, 3, 4)
        for promotion in ("128B", "256B")
    ],
}


def small_in_a_graph(size: int = 1024, splits: int = 8) -> list[Record]:
    """kv_stream at 1024² (4 MB), where launch and grid decide, timed within a CUDA graph, inputs in L2."""
    arrays = _outputs(_matrices(size, size), splits)
    records = []
    for variant in kv_stream.PROBLEM.variants:
        timing = bench.time_graph(lambda stream, v=variant: v.bind(arrays, splits=splits, stream=stream)())
        records.append(
            {
                "variant": variant.name,
                "shape": [size, size],
                "options": {"splits": splits},
                "seconds": timing.median,
                "gb_per_s": 4 * size * size / timing.median / 1e9,
            }
        )
    return records


@functools.cache
def _make_boxes(box: tuple[int, int], stages: int, acquire: bool) -> Kernel:
    smem = Shared(tile=Tiles(stages, box, np.float16), full=Barriers(stages))
    nbytes = box[0] * box[1] * 2

    @kernel(threads=32, shared=smem)
    def stream_boxes(x_map, steps):
        """`x_map` is a tensor map by value, or the address of one in global memory."""
        if cuda.threadIdx.x == 0:
            if acquire:
                ptx.fence_proxy_tensormap_acquire_gpu(x_map)
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            row = uint32(cuda.blockIdx.x) * uint32(box[0])
            for step in range(steps + stages):
                stage, phase = ring(step, stages)
                if step >= stages:
                    mbarrier_wait(smem.full[stage], phase ^ uint32(1))
                if step < steps:
                    ptx.mbarrier_arrive_expect_tx(smem.full[stage], nbytes)
                    column = uint32(step) * uint32(box[1])
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[stage], x_map, column, row, smem.full[stage])

    return stream_boxes


def descriptor_place() -> list[Record]:
    """A tensor map as a by-value parameter against one in global memory: a short kernel and a long one."""
    records = []
    for columns in (256, 16384):
        x = DeviceArray(np.ones((8448, columns), np.float16))
        tensor_map = TensorMap(x, (64, 64), store=False)
        kept = DeviceArray(np.frombuffer(tensor_map.encode(), np.uint8).copy())
        grid, steps = 8448 // 64, np.uint32(columns // 64)
        launches = {
            "by value": _make_boxes((64, 64), 4, False)[grid].bind(tensor_map, steps),
            "in global memory": _make_boxes((64, 64), 4, True)[grid].bind(np.uint64(kept.pointer), steps),
        }
        for name, timing in bench.time_launches(launches, repeats=21).items():
            records.append({"descriptor": name, "boxes_per_block": columns // 64, "seconds": timing.median})
    return records


def fence_cost(size: int = 4096) -> list[Record]:
    """kv_stream with two buffers, each stage handed back with the proxy fence and without."""
    arrays = _outputs(_matrices(size, size), 4)
    bind = kv_stream.PROBLEM.variant("tma").bind
    launches = {f"strict={strict}": bind(arrays, splits=4, strict=strict) for strict in (True, False)}
    timings = bench.time_launches(launches, repeats=41)
    return [{"what": name, "shape": [size, size], "seconds": timing.median} for name, timing in timings.items()]


ALL: dict[str, Callable[[], list[Record]]] = {
    "launch_overhead": launch_overhead,
    "overlap": overlap,
    "tile_sweep_4096": lambda: tile_sweep(4096),
    "tile_sweep_16384": lambda: tile_sweep(16384),
    "small_in_a_graph": small_in_a_graph,
    "descriptor_place": descriptor_place,
    "fence_cost": fence_cost,
    **memory.ALL,
    **movement.ALL,
    "gemm_host_overhead": gemm.host_overhead,
    "gemm_early_start": gemm.early_start,
    "gemm_code": gemm.code,
    **attention.ALL,
    **decoding_figures.ALL,
    **fp8_figures.ALL,
}

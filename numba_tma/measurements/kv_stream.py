"""Benchmarks of kv_stream for docs/kv_stream.md, and what its proxy fence costs, for docs/simulator.md."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import bench, driver, suite
from ..device_array import DeviceArray
from ..kernels import kv_stream
from .timing import Record


def _matrices(rows: int, columns: int, seed: int = 0) -> dict[str, DeviceArray]:
    rng = np.random.default_rng(seed)
    return {
        name: DeviceArray(rng.standard_normal((rows, columns), np.float32).astype(np.float16)) for name in ("k", "v")
    }


def _outputs(arrays: dict[str, DeviceArray], splits: int) -> dict[str, DeviceArray]:
    rows = arrays["k"].shape[0]
    return {**arrays, "out": DeviceArray(np.zeros((splits, rows), np.float32))}


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


def fence_cost(size: int = 4096) -> list[Record]:
    """kv_stream with two buffers, each stage handed back with the proxy fence and without."""
    arrays = _outputs(_matrices(size, size), 4)
    bind = kv_stream.PROBLEM.variant("tma").bind
    launches = {f"strict={strict}": bind(arrays, splits=4, strict=strict) for strict in (True, False)}
    timings = bench.time_launches(launches, repeats=41)
    return [{"what": name, "shape": [size, size], "seconds": timing.median} for name, timing in timings.items()]

"""Weighted sums of a matrix's rows: many blocks need the same tiles, and a cluster fetches each of them once.

The problem. y[b, c] = Σ_r w[b, r]·x[r, c] in float32, for B rows of weights. A block takes one of them and a strip of
columns, and walks down the rows of x tile by tile. So the B blocks of a strip all need the same tiles. (A product of
matrices would have each block use its tile for many rows of weights, as `gemm` does; here a tile is used but once, to
see what it costs to bring it.)

What moves the data: ordinary loads (plain), the copy engine with a ring for each block (tma), and the same with one
fetch for all blocks of a cluster (multicast): each of them asks for its part of the tile, and the copy engine writes
that part into the shared memory of all.

Costs: 2·B·R·C flops; x is read from memory once, 4·R·C bytes, if the L2 cache holds it; but 4·B·R·C bytes go from L2 to
the SMs, and that is what `bytes_moved` counts and what multicast divides by the cluster's size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32

from .. import ptx
from ..arrays import view
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait, ring
from ..pitch import pitched
from ..shared import Barriers, Shared, Tiles
from ..tensor_map import TensorMap
from ..unroll import unroll
from .calls import check_extents, check_written, in_boxes, viewed
from .problem import Case, Problem, Variant, check_options

VECTOR = 4  # float32 in 16 bytes: the columns of one thread
COLUMNS = 256  # of a strip, the widest box
THREADS = COLUMNS // VECTOR
L2_PROMOTION = "256B"  # what L2 fetches at a time: a little faster than 128 where x is large


@functools.cache
def make_plain() -> Kernel:
    """The baseline: a thread a column, which loads its elements one after the other."""

    @kernel(threads=COLUMNS)
    def multicast_plain(x, w, y):
        vector = uint32(cuda.blockIdx.x)
        column = uint32(uint32(cuda.blockIdx.y) * uint32(COLUMNS) + uint32(cuda.threadIdx.x))
        if column < x.shape[1]:
            total = float32(0)
            for row in range(x.shape[0]):
                total += w[vector, uint32(row)] * x[uint32(row), column]
            y[vector, column] = total

    return multicast_plain


def make_tile_sum(rows: int) -> Callable:
    """Add a tile's weighted rows to a thread's four sums."""

    @cuda.jit(device=True, forceinline=True)
    def tile_sum(tile, weights, column, sums):
        for i in range(rows // VECTOR):
            unroll()
            factors = ptx.ld_shared_v4_f32(weights.address_of(uint32(i * VECTOR)))
            for j in range(VECTOR):
                unroll()
                v0, v1, v2, v3 = ptx.ld_shared_v4_f32(tile.address_of(uint32(i * VECTOR + j), column))
                sums[0] += factors[j] * v0
                sums[1] += factors[j] * v1
                sums[2] += factors[j] * v2
                sums[3] += factors[j] * v3

    return tile_sum


@cuda.jit(device=True, forceinline=True)
def store(y, vector, column, sums):
    """Write a thread's four sums, as far as they lie in the matrix."""
    if vector < y.shape[0]:
        for j in range(VECTOR):
            unroll()
            if uint32(column + uint32(j)) < y.shape[1]:
                y[vector, uint32(column + uint32(j))] = sums[j]


def _plan(rows: int, stages: int) -> Shared:
    return Shared(
        x=Tiles(stages, (rows, COLUMNS), float32),
        w=Tiles(stages, (rows,), float32),
        full=Barriers(stages),
        empty=Barriers(stages),
    )


@functools.cache
def make_tma(rows: int = 16, stages: int = 4) -> Kernel:
    """Each block fetches all of its tiles: a producer warp, and a ring of stages."""
    smem = _plan(rows, stages)
    tile_sum = make_tile_sum(rows)

    @kernel(threads=THREADS + 32, shared=smem)
    def multicast_tma(x_map, w_map, y, tiles):
        thread = uint32(cuda.threadIdx.x)
        vector, first_column = uint32(cuda.blockIdx.x), uint32(uint32(cuda.blockIdx.y) * uint32(COLUMNS))
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], THREADS // 32)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()

        if thread >= THREADS:
            if thread == THREADS:
                for step in range(tiles):
                    stage, phase = ring(step, stages)
                    mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                    row, bar = uint32(uint32(step) * uint32(rows)), smem.full[stage]
                    ptx.mbarrier_arrive_expect_tx(bar, x_map.box_bytes + w_map.box_bytes)
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.x[stage], x_map, first_column, row, bar)
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.w[stage], w_map, row, vector, bar)
        else:
            sums = cuda.local.array(VECTOR, float32)
            for j in range(VECTOR):
                sums[j] = float32(0)
            column = uint32(thread * uint32(VECTOR))
            for step in range(tiles):
                stage, phase = ring(step, stages)
                mbarrier_wait(smem.full[stage], phase)
                tile_sum(smem.x[stage], smem.w[stage], column, sums)
                ptx.fence_proxy_async_shared_cta()
                cuda.syncwarp()
                if thread % uint32(32) == 0:
                    ptx.mbarrier_arrive(smem.empty[stage])
            store(y, vector, uint32(first_column + column), sums)

    return multicast_tma


@functools.cache
def make_multicast(rows: int = 16, stages: int = 4, cluster: int = 4) -> Kernel:
    """The blocks of a cluster share their tiles: each fetches rows / cluster rows of it for all of them."""
    smem = _plan(rows, stages)
    tile_sum = make_tile_sum(rows)
    part = rows // cluster
    everyone = (1 << cluster) - 1
    arrivals = THREADS // 32 * cluster
    expected = rows * COLUMNS * 4

    @kernel(threads=THREADS + 32, shared=smem, cluster=cluster)
    def multicast_shared(x_map, w_map, y, tiles):
        thread, rank = uint32(cuda.threadIdx.x), ptx.cluster_ctarank()
        vector, first_column = uint32(cuda.blockIdx.x), uint32(uint32(cuda.blockIdx.y) * uint32(COLUMNS))
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], arrivals)
            ptx.fence_mbarrier_init()
        ptx.barrier_cluster_arrive()  # a peer's copy may credit these barriers: they must be there
        ptx.barrier_cluster_wait()

        if thread >= THREADS:
            if thread == THREADS:
                for step in range(tiles):
                    stage, phase = ring(step, stages)
                    mbarrier_wait(smem.empty[stage], phase ^ uint32(1))  # in all blocks: all of them receive the part
                    row, bar = uint32(uint32(step) * uint32(rows)), smem.full[stage]
                    ptx.mbarrier_arrive_expect_tx(bar, expected + w_map.box_bytes)  # its own part and its peers'
                    ptx.cp_async_bulk_tensor_2d_shared_global_multicast(
                        smem.x[stage].address_of(rank * uint32(part), 0),
                        x_map,
                        first_column,
                        row + rank * uint32(part),
                        bar,
                        everyone,
                    )
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.w[stage], w_map, row, vector, bar)
        else:
            sums = cuda.local.array(VECTOR, float32)
            for j in range(VECTOR):
                sums[j] = float32(0)
            column = uint32(thread * uint32(VECTOR))
            for step in range(tiles):
                stage, phase = ring(step, stages)
                mbarrier_wait(smem.full[stage], phase)
                tile_sum(smem.x[stage], smem.w[stage], column, sums)
                ptx.fence_proxy_async_shared_cta()
                cuda.syncwarp()
                if thread % uint32(32) < cluster:  # every block of the cluster fills a part of this stage
                    peer = ptx.mapa_shared_cluster(smem.empty[stage], thread % uint32(32))
                    ptx.mbarrier_arrive_shared_cluster(peer)
            store(y, vector, uint32(first_column + column), sums)
        ptx.barrier_cluster_arrive()  # no block leaves while a peer may still arrive at its barriers
        ptx.barrier_cluster_wait()

    return multicast_shared


# ---------------------------------------------------------------------------------------------------------------------
# Host side.


def _bind_plain(arrays: Mapping[str, Any], *, stream: object = None) -> Callable[[], Any]:
    x, w, y = (arrays[name] for name in ("x", "w", "y"))
    grid = (view(w).shape[0], -(-view(x).shape[1] // COLUMNS))
    return make_plain()[grid, None, stream].bind(x, w, y)


def _bind_tma(
    arrays: Mapping[str, Any],
    *,
    rows: int = 16,
    stages: int = 4,
    l2_promotion: str = L2_PROMOTION,
    stream: object = None,
) -> Callable[[], Any]:
    x_map, w_map, tiles, grid = _maps(arrays, rows, 1, l2_promotion)
    return make_tma(rows, stages)[grid, None, stream].bind(x_map, w_map, arrays["y"], tiles)


def _bind_multicast(
    arrays: Mapping[str, Any],
    *,
    rows: int = 16,
    stages: int = 4,
    cluster: int = 4,
    l2_promotion: str = L2_PROMOTION,
    stream: object = None,
) -> Callable[[], Any]:
    x_map, w_map, tiles, grid = _maps(arrays, rows, cluster, l2_promotion)
    return make_multicast(rows, stages, cluster)[grid, None, stream].bind(x_map, w_map, arrays["y"], tiles)


def _maps(
    arrays: Mapping[str, Any], rows: int, cluster: int, l2_promotion: str
) -> tuple[TensorMap, TensorMap, np.uint32, tuple[int, int]]:
    """Maps of x and w, tiles of a strip, and the grid: whole clusters along the vectors, then strips."""
    _check(rows, cluster)
    x_map = TensorMap(arrays["x"], (rows // cluster, COLUMNS), l2_promotion=l2_promotion, store=False)
    w_map = TensorMap(arrays["w"], (1, rows), l2_promotion=l2_promotion, store=False)
    (x_rows, x_columns), vectors = x_map.view.shape, w_map.view.shape[0]
    grid = (-(-vectors // cluster) * cluster, -(-x_columns // COLUMNS))
    return x_map, w_map, np.uint32(-(-x_rows // rows)), grid


def _check(rows: int, cluster: int) -> None:
    if rows < VECTOR or rows % VECTOR or rows > 256:
        raise ValueError(f"rows {rows}: a tile has a multiple of {VECTOR} rows, at most 256")
    if rows % cluster:
        raise ValueError(f"rows {rows} do not divide among the {cluster} blocks of a cluster")


OPTIONS = {
    "plain": (),
    "tma": ("rows", "stages", "l2_promotion"),
    "multicast": ("rows", "stages", "cluster", "l2_promotion"),
}


def weighted_sums(x: Any, w: Any, y: Any, *, variant: str | None = None, **options: Any) -> None:
    """y[b, c] = sum over r of w[b, r] · x[r, c].

    Args:
        x: float32 (R, C). All variants but `plain` need contiguous rows of x and w that start on multiples of 16 bytes
            (`numba_tma.pitched` makes such).
        w: float32 (B, R).
        y: float32 (B, C), written.
        variant: plain, tma or multicast; by default multicast, or plain where rows of x or w are laid out otherwise.
        options: `rows` of a tile, `stages` of the ring, blocks of a `cluster`, the tensor maps' `l2_promotion`, and
            `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, element types or layouts do not fit, an extent is 2^31 or more, nothing to sum, y shares
            memory with x or w, or an option's value does not fit; the message says what would.
    """
    views = viewed("weighted_sums", x=x, w=w, y=y)
    for name, array in views.items():
        if array.dtype != np.float32 or len(array.shape) != 2:
            raise ValueError(f"weighted_sums: {name} is {array.dtype} {array.shape}; a float32 matrix expected")
    (rows, columns), vectors = views["x"].shape, views["w"].shape[0]
    if views["w"].shape[1] != rows or views["y"].shape != (vectors, columns):
        raise ValueError(
            f"weighted_sums: w is {views['w'].shape} and y {views['y'].shape}; for x of {views['x'].shape} "
            f"(any, {rows}) and (the same, {columns}) expected"
        )
    if not rows:
        raise ValueError("weighted_sums: x has no rows, so there is nothing to sum")
    check_extents("weighted_sums", views)
    check_written("weighted_sums", views, "y")
    variant = variant or ("multicast" if in_boxes(views["x"]) and in_boxes(views["w"]) else "plain")
    chosen = PROBLEM.variant(variant)
    check_options("weighted_sums", chosen, options, OPTIONS[variant])
    if views["y"].size:
        chosen.bind({"x": x, "w": w, "y": y}, **options)()


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    vectors, rows, columns = case.shape
    arrays = {"x": pitched((rows, columns), np.float32), "w": pitched((vectors, rows), np.float32)}
    for array in arrays.values():
        array[...] = rng.standard_normal(array.shape, np.float32)
    arrays["y"] = np.empty((vectors, columns), np.float32)
    return arrays


PROBLEM = Problem(
    name="multicast",
    title="weighted sums of rows: tiles that several blocks need, fetched once for a cluster",
    inputs=_inputs,
    outputs=("y",),
    reference=lambda arrays, case: {"y": arrays["w"].astype(np.float64) @ arrays["x"].astype(np.float64)},
    bytes_moved=lambda case: 4 * case.shape[0] * case.shape[1] * case.shape[2],
    flops=lambda case: 2 * case.shape[0] * case.shape[1] * case.shape[2],
    variants=(
        Variant("plain", "ld/st", "a thread a column", _bind_plain, baseline=True),
        Variant("tma", "TMA", "a producer warp and a ring; each block fetches for itself", _bind_tma),
        Variant("multicast", "TMA", "a cluster fetches each tile once", _bind_multicast),
    ),
    cases={
        ("default", "sim"): [Case((8, 96, 512), "float32"), Case((5, 50, 300), "float32")],
        ("quick", "sim"): [Case((4, 32, 256), "float32"), Case((5, 50, 300), "float32")],
        ("default", "gpu"): [Case((64, 1024, 4096), "float32"), Case((7, 1000, 3001), "float32")],
        ("quick", "gpu"): [Case((16, 512, 2048), "float32"), Case((7, 1000, 3001), "float32")],
    },
    # float32 sums of up to 1024 products against float64, relative to the largest.
    tolerance=1e-5,
)

"""A stencil on a grid in three dimensions: each point from its neighbours, with a halo that the copy engine brings.

The problem. For a float32 grid of any size

    out[z, y, x] = w0·own + w1·Σ faces + w2·Σ edges + w3·Σ corners

over the point's own value and its neighbours: the six that share a face with it (7-point), and also the twelve that
share an edge and the eight that share a corner (27-point). Outside the grid everything is `fill`: 0, or NaN.

What makes it hard. Each value is used 7 or 27 times, and memory pays if it is read but once. A block takes a tile of y
and x and goes along z, plane by plane. A plane contributes to three planes of the result: `own` to its own, `other` to
the one before and the one after. So each plane is looked at once, and two numbers a point wait in registers:

    own = w0·c + w1·f + w2·d        other = w1·c + w2·f + w3·d        out[z] = own[z] + other[z - 1] + other[z + 1]

with c the point, f the four beside it and d the four across from it in the plane. Tiles overlap by the halo: one row on
each side, and in x four columns, since a tensor copy begins at multiples of 16 bytes. The halo of neighbouring tiles
comes from the L2 cache, if they go along z together.

What moves the data: guarded loads (plain, shared), the copy engine (tma, stages, ring), which fills what lies outside
the grid, so that no thread asks where the grid ends before it stores.

Costs: 8 bytes a point if each value moves once; 8 flops a point (7-point), 30 (27-point).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from .. import ptx
from ..arrays import ArrayView, view
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait, release_to_async, ring
from ..pitch import pitched
from ..shared import Barriers, Buffer, Shared, Tiles
from ..tensor_map import TensorMap
from ..unroll import unroll
from .calls import aligned_rows, check_extents, check_written, in_boxes
from .copy import blocks_for
from .problem import Case, Problem, Variant, check_options

POINTS = (7, 27)
FILLS = {"zero": 0.0, "nan": float("nan")}
VECTOR = 4  # float32 in 16 bytes: what a thread takes of a row, and the halo in x
IN_FLIGHT = 40 * 1024  # bytes that each SM should have asked for: less leaves memory idle, more makes it slower
WEIGHTS = {7: (-6.0, 1.0, 0.0, 0.0), 27: (-64 / 15, 7 / 15, 1 / 10, 1 / 30)}  # Laplace's operator


def reference(source: np.ndarray, points: int, fill: str = "zero") -> np.ndarray:
    """float64 result for a grid of shape (z, y, x); plane by plane, so that large grids stay in the CPU's caches."""
    out = np.zeros(source.shape)
    outside = np.full((source.shape[1] + 2, source.shape[2] + 2), FILLS[fill])
    for z in range(-1, source.shape[0] + 1):
        plane = outside.copy()
        if 0 <= z < source.shape[0]:
            plane[1:-1, 1:-1] = source[z]
        sides = plane[:, :-2] + plane[:, 2:]
        own, faces = plane[1:-1, 1:-1], sides[1:-1] + (plane[:-2, 1:-1] + plane[2:, 1:-1])
        diagonals = sides[:-2] + sides[2:]
        for at in (z - 1, z, z + 1):
            if 0 <= at < source.shape[0]:
                for weight, term in zip(WEIGHTS[points][abs(at - z) :], (own, faces, diagonals), strict=False):
                    if weight:
                        out[at] += weight * term
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Plain Numba.


@cuda.jit(device=True, forceinline=True)
def value_at(source, z, y, x, fill):
    """A grid's value, or the fill outside; -1 as an unsigned number lies outside too."""
    if z < source.shape[0] and y < source.shape[1] and x < source.shape[2]:
        return source[z, y, x]
    return fill


@cuda.jit(device=True, forceinline=True)
def beside(source, z, y, x, fill):
    """Sum of the four neighbours in a plane that share a face."""
    one = uint32(1)
    in_row = value_at(source, z, y, uint32(x - one), fill) + value_at(source, z, y, uint32(x + one), fill)
    in_column = value_at(source, z, uint32(y - one), x, fill) + value_at(source, z, uint32(y + one), x, fill)
    return in_row + in_column


@cuda.jit(device=True, forceinline=True)
def across(source, z, y, x, fill):
    """Sum of the four neighbours in a plane that share no face."""
    one = uint32(1)
    before, after = uint32(y - one), uint32(y + one)
    left, right = uint32(x - one), uint32(x + one)
    return (value_at(source, z, before, left, fill) + value_at(source, z, before, right, fill)) + (
        value_at(source, z, after, left, fill) + value_at(source, z, after, right, fill)
    )


@functools.cache
def make_plain(points: int, threads: tuple[int, int] = (32, 8)) -> Kernel:
    """The baseline: a thread a point, which loads all of its neighbours and asks of each whether it exists."""
    corners = points == 27

    @kernel(threads=threads)
    def stencil3d_plain(source, out, fill, w0, w1, w2, w3):
        x = uint32(cuda.blockIdx.x) * uint32(threads[0]) + uint32(cuda.threadIdx.x)
        y = uint32(cuda.blockIdx.y) * uint32(threads[1]) + uint32(cuda.threadIdx.y)
        x, y, z = uint32(x), uint32(y), uint32(cuda.blockIdx.z)
        below, above = uint32(z - uint32(1)), uint32(z + uint32(1))
        if y < source.shape[1] and x < source.shape[2]:
            own = value_at(source, z, y, x, fill)
            faces = beside(source, z, y, x, fill)
            faces += value_at(source, below, y, x, fill) + value_at(source, above, y, x, fill)
            result = w0 * own + w1 * faces
            if corners:
                edges = across(source, z, y, x, fill)
                edges += beside(source, below, y, x, fill) + beside(source, above, y, x, fill)
                result += w2 * edges + w3 * (across(source, below, y, x, fill) + across(source, above, y, x, fill))
            out[z, y, x] = result

    return stencil3d_plain


# ---------------------------------------------------------------------------------------------------------------------
# Along z: what the other variants share.


def make_plane(points: int, rows: int) -> Callable:
    """What one plane adds; a thread has `rows` rows of four points, at row `r` and column `c` of the tile without halo.

    `waiting` holds, for each point, what the plane's own result lacks this plane for; `before` what the preceding plane
    gives to this one. `done` becomes the preceding plane's result.
    """
    corners = points == 27
    held = (rows + 2) * VECTOR

    @cuda.jit(device=True, forceinline=True)
    def plane(tile, r, c, waiting, before, done, w0, w1, w2, w3):
        own = cuda.local.array(held, float32)
        sides = cuda.local.array(held, float32)
        for j in range(rows + 2):
            unroll()
            row, column = uint32(r + uint32(j)), uint32(c + uint32(VECTOR))
            v0, v1, v2, v3 = ptx.ld_shared_v4_f32(tile.address_of(row, column))
            own[4 * j], own[4 * j + 1], own[4 * j + 2], own[4 * j + 3] = v0, v1, v2, v3
            if corners or 0 < j <= rows:
                left, right = tile[row, uint32(column - uint32(1))], tile[row, uint32(column + uint32(VECTOR))]
                sides[4 * j], sides[4 * j + 1], sides[4 * j + 2], sides[4 * j + 3] = (
                    left + v1,
                    v0 + v2,
                    v1 + v3,
                    v2 + right,
                )
        for i in range(rows * VECTOR):
            unroll()
            c_, f = own[i + 4], sides[i + 4] + (own[i] + own[i + 8])
            here, other = w0 * c_ + w1 * f, w1 * c_
            if corners:
                d = sides[i] + sides[i + 8]
                here += w2 * d
                other += w2 * f + w3 * d
            done[i] = waiting[i] + other
            waiting[i] = before[i] + here
            before[i] = other

    return plane


def make_write(rows: int) -> Callable:
    """Store a thread's rows of four points, as far as they lie in the grid."""

    @cuda.jit(device=True, forceinline=True)
    def write(out, z, y, x, done):
        for j in range(rows):
            unroll()
            at = uint32(y + uint32(j))
            if at < out.shape[1]:
                if uint32(x + uint32(VECTOR)) <= out.shape[2]:
                    address = ptx.global_address(out) + uint64(z) * uint64(out.strides[0])
                    address += uint64(at) * uint64(out.strides[1]) + uint64(x) * uint64(4)
                    ptx.st_global_v4_f32(address, done[4 * j], done[4 * j + 1], done[4 * j + 2], done[4 * j + 3])
                else:
                    for k in range(VECTOR):
                        unroll()
                        if uint32(x + uint32(k)) < out.shape[2]:
                            out[z, at, uint32(x + uint32(k))] = done[4 * j + k]

    return write


@cuda.jit(device=True, forceinline=True)
def stretch(extent, depth):
    """First plane of this block, and how many planes it looks at: its own and one on each side."""
    first = uint32(uint32(cuda.blockIdx.z) * uint32(depth))
    return first, uint32(min(uint32(depth), uint32(uint32(extent) - first)) + uint32(2))


def tile_shape(tile: tuple[int, int]) -> tuple[int, int]:
    """A tile of points with its halo: rows and columns in shared memory."""
    return tile[0] + 2, tile[1] + 2 * VECTOR


def threads_for(tile: tuple[int, int], rows: int) -> int:
    """Threads that take a tile, `rows` rows of four points each."""
    return tile[0] // rows * (tile[1] // VECTOR)


@functools.cache
def make_shared(points: int, tile: tuple[int, int] = (8, 64), rows: int = 1) -> Kernel:
    """A plane's tile and halo in shared memory, loaded by all threads with guards: load, barrier, compute, barrier."""
    threads, (height, width) = threads_for(tile, rows), tile_shape(tile)
    own_width = tile[1] + 2
    loads = -(-height * own_width // threads)
    lanes, count = tile[1] // VECTOR, rows * VECTOR
    smem = Shared(plane=Buffer((height, width), float32))
    plane, write = make_plane(points, rows), make_write(rows)

    @kernel(threads=threads, shared=smem)
    def stencil3d_shared(source, out, depth, fill, w0, w1, w2, w3):
        waiting, before = cuda.local.array(count, float32), cuda.local.array(count, float32)
        done = cuda.local.array(count, float32)
        for i in range(count):
            waiting[i], before[i] = float32(0), float32(0)
        thread = uint32(cuda.threadIdx.x)
        r, c = uint32(thread // uint32(lanes)) * uint32(rows), uint32(thread % uint32(lanes)) * uint32(VECTOR)
        r, c = uint32(r), uint32(c)
        y, x = uint32(cuda.blockIdx.y * uint32(tile[0])), uint32(cuda.blockIdx.x * uint32(tile[1]))
        first, steps = stretch(out.shape[0], depth)
        for step in range(steps):
            z = uint32(first + uint32(step))
            for i in range(loads):
                index = uint32(thread + uint32(i * threads))
                row, column = uint32(index // uint32(own_width)), uint32(index % uint32(own_width))
                if row < uint32(height):
                    at_y, at_x = uint32(y + row - uint32(1)), uint32(x + column - uint32(1))
                    value = value_at(source, uint32(z - uint32(1)), at_y, at_x, fill)
                    smem.plane[row, uint32(column + uint32(VECTOR - 1))] = value
            cuda.syncthreads()
            plane(smem.plane, r, c, waiting, before, done, w0, w1, w2, w3)
            cuda.syncthreads()
            if step >= 2:
                write(out, uint32(z - uint32(2)), uint32(y + r), uint32(x + c), done)

    return stencil3d_shared


# ---------------------------------------------------------------------------------------------------------------------
# TMA.


@functools.cache
def make_stages(points: int, tile: tuple[int, int] = (16, 128), rows: int = 4, stages: int = 2) -> Kernel:
    """The copy engine brings planes of the tile with their halo; one stage is no overlap, more are planes in flight."""
    threads, lanes, count = threads_for(tile, rows), tile[1] // VECTOR, rows * VECTOR
    smem = Shared(planes=Tiles(stages, tile_shape(tile), float32), full=Barriers(stages))
    plane, write = make_plane(points, rows), make_write(rows)

    @cuda.jit(device=True, forceinline=True)
    def fetch(source_map, stage, z, y, x):
        bar = smem.full[stage]
        ptx.mbarrier_arrive_expect_tx(bar, source_map.box_bytes)
        # The halo begins before the tile; where that is outside the grid, the engine fills.
        ptx.cp_async_bulk_tensor_3d_shared_global(
            smem.planes[stage], source_map, x - uint32(VECTOR), y - uint32(1), z - uint32(1), bar
        )

    @kernel(threads=threads, shared=smem)
    def stencil3d_stages(source_map, out, depth, w0, w1, w2, w3):
        waiting, before = cuda.local.array(count, float32), cuda.local.array(count, float32)
        done = cuda.local.array(count, float32)
        for i in range(count):
            waiting[i], before[i] = float32(0), float32(0)
        thread = uint32(cuda.threadIdx.x)
        leader = thread == 0
        r, c = uint32(thread // uint32(lanes)) * uint32(rows), uint32(thread % uint32(lanes)) * uint32(VECTOR)
        r, c = uint32(r), uint32(c)
        y, x = uint32(cuda.blockIdx.y * uint32(tile[0])), uint32(cuda.blockIdx.x * uint32(tile[1]))
        first, steps = stretch(out.shape[0], depth)
        if leader:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            for step in range(stages):
                if step < steps:
                    fetch(source_map, step, uint32(first + uint32(step)), y, x)
        cuda.syncthreads()
        for step in range(steps):
            stage, phase = ring(step, stages)
            z = uint32(first + uint32(step))
            mbarrier_wait(smem.full[stage], phase)
            plane(smem.planes[stage], r, c, waiting, before, done, w0, w1, w2, w3)
            release_to_async()
            if leader and step + stages < steps:
                fetch(source_map, stage, uint32(z + uint32(stages)), y, x)
            if step >= 2:
                write(out, uint32(z - uint32(2)), uint32(y + r), uint32(x + c), done)

    return stencil3d_stages


@functools.cache
def make_ring(points: int, tile: tuple[int, int] = (16, 128), rows: int = 4, stages: int = 2) -> Kernel:
    """A producer warp issues the copies; the others hand planes back by barriers, with no block barrier."""
    threads, lanes, count = threads_for(tile, rows), tile[1] // VECTOR, rows * VECTOR
    smem = Shared(planes=Tiles(stages, tile_shape(tile), float32), full=Barriers(stages), empty=Barriers(stages))
    plane, write = make_plane(points, rows), make_write(rows)

    @kernel(threads=threads + 32, shared=smem)
    def stencil3d_ring(source_map, out, depth, w0, w1, w2, w3):
        thread = uint32(cuda.threadIdx.x)
        y, x = uint32(cuda.blockIdx.y * uint32(tile[0])), uint32(cuda.blockIdx.x * uint32(tile[1]))
        first, steps = stretch(out.shape[0], depth)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], threads // 32)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()

        if thread >= threads:  # the producer warp, of which one thread issues
            if thread == threads:
                for step in range(steps):
                    stage, phase = ring(step, stages)
                    mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                    bar = smem.full[stage]
                    z = uint32(first + uint32(step))
                    ptx.mbarrier_arrive_expect_tx(bar, source_map.box_bytes)
                    ptx.cp_async_bulk_tensor_3d_shared_global(
                        smem.planes[stage], source_map, x - uint32(VECTOR), y - uint32(1), z - uint32(1), bar
                    )
        else:
            waiting, before = cuda.local.array(count, float32), cuda.local.array(count, float32)
            done = cuda.local.array(count, float32)
            for i in range(count):
                waiting[i], before[i] = float32(0), float32(0)
            r, c = uint32(thread // uint32(lanes)) * uint32(rows), uint32(thread % uint32(lanes)) * uint32(VECTOR)
            r, c = uint32(r), uint32(c)
            for step in range(steps):
                stage, phase = ring(step, stages)
                mbarrier_wait(smem.full[stage], phase)
                plane(smem.planes[stage], r, c, waiting, before, done, w0, w1, w2, w3)
                ptx.fence_proxy_async_shared_cta()
                cuda.syncwarp()
                if thread % uint32(32) == 0:
                    ptx.mbarrier_arrive(smem.empty[stage])
                if step >= 2:
                    write(out, uint32(first + uint32(step) - uint32(2)), uint32(y + r), uint32(x + c), done)

    return stencil3d_ring


# ---------------------------------------------------------------------------------------------------------------------
# Host side.


def check_tile(tile: tuple[int, int], rows: int) -> None:
    """See that a tile's rows and columns divide among whole warps and fit the copy engine's box.

    Raises:
        ValueError: they do not.
    """
    height, width = tile_shape(tile)
    if rows < 1 or tile[0] < rows or tile[0] % rows or tile[1] % VECTOR or threads_for(tile, rows) % 32:
        raise ValueError(
            f"tile {tile}: with {rows} rows of {VECTOR} points a thread, it must divide among whole warps of threads"
        )
    if height > 256 or width > 256:
        raise ValueError(f"tile {tile}: with its halo {height} × {width}; the copy engine's boxes end at 256 each way")


def _grid(shape: tuple[int, int, int], tile: tuple[int, int], depth: int) -> tuple[int, int, int]:
    """Blocks along x, y and z."""
    grid = (-(-shape[2] // tile[1]), -(-shape[1] // tile[0]), -(-shape[0] // depth))
    if max(grid[1:]) > 65535:
        raise ValueError(
            f"{shape} in tiles of {depth} × {tile[0]} × {tile[1]} are {grid[::-1]} blocks; the grid's y and z end at "
            f"65535: take larger tiles"
        )
    return grid


def default_depth(shape: tuple[int, int, int], tile: tuple[int, int], stages: int) -> int:
    """Planes along z for a block, so that the blocks of an SM have `IN_FLIGHT` bytes on their way at any time."""
    height, width = tile_shape(tile)
    resident = max(1, round(IN_FLIGHT / (4 * stages * height * width)))
    tiles = -(-shape[1] // tile[0]) * -(-shape[2] // tile[1])
    return -(-shape[0] // max(1, blocks_for(shape[0] * tiles, resident) // tiles))


def _weights(points: int) -> tuple[np.float32, ...]:
    if points not in POINTS:
        raise ValueError(f"points {points!r}: 7 or 27")
    return tuple(np.float32(weight) for weight in WEIGHTS[points])


def _fill(fill: str) -> float:
    if fill not in FILLS:
        raise ValueError(f"fill {fill!r}: choose one of {', '.join(map(repr, FILLS))}")
    return FILLS[fill]


def _bind_plain(
    arrays: Mapping[str, Any],
    *,
    points: int = 7,
    fill: str = "zero",
    threads: tuple[int, int] = (32, 8),
    stream: object = None,
) -> Callable[[], Any]:
    if not isinstance(threads, tuple) or len(threads) != 2:
        raise ValueError(f"threads {threads!r}: a tuple of two expected, along x and y")
    grid = _grid(view(arrays["source"]).shape, threads[::-1], 1)
    outside = np.float32(_fill(fill))
    return make_plain(points, threads)[grid, None, stream].bind(
        arrays["source"], arrays["out"], outside, *_weights(points)
    )


def _bind_shared(
    arrays: Mapping[str, Any],
    *,
    points: int = 7,
    fill: str = "zero",
    tile: tuple[int, int] = (8, 64),
    rows: int = 1,
    depth: int = 32,
    stream: object = None,
) -> Callable[[], Any]:
    check_tile(tile, rows)
    grid = _grid(view(arrays["source"]).shape, tile, depth)
    return make_shared(points, tile, rows)[grid, None, stream].bind(
        arrays["source"], arrays["out"], np.uint32(depth), np.float32(_fill(fill)), *_weights(points)
    )


def _bind_maps(make: Callable[..., Kernel], stages: int) -> Callable[..., Callable[[], Any]]:
    def bind(
        arrays: Mapping[str, Any],
        *,
        points: int = 7,
        fill: str = "zero",
        tile: tuple[int, int] = (16, 128),
        rows: int = 4,
        stages: int = stages,
        depth: int | None = None,
        l2_promotion: str = "128B",
        stream: object = None,
    ) -> Callable[[], Any]:
        check_tile(tile, rows)
        _fill(fill)
        depth = depth or default_depth(view(arrays["source"]).shape, tile, stages)
        source_map = TensorMap(
            arrays["source"], (1, *tile_shape(tile)), fill=fill, l2_promotion=l2_promotion, store=False
        )
        grid = _grid(view(arrays["source"]).shape, tile, depth)
        return make(points, tile, rows, stages)[grid, None, stream].bind(
            source_map, arrays["out"], np.uint32(depth), *_weights(points)
        )

    return bind


_TILED = ("tile", "rows", "depth")
OPTIONS = {
    "plain": ("threads",),
    "shared": _TILED,
    "tma": (*_TILED, "l2_promotion"),
    "stages": (*_TILED, "l2_promotion", "stages"),
    "ring": (*_TILED, "l2_promotion", "stages"),
}
_BY_VECTORS = ("shared", "tma", "stages", "ring")


def stencil3d(
    source: Any, out: Any, *, points: int = 7, fill: str = "zero", variant: str | None = None, **options: Any
) -> None:
    """out = Laplace's operator on `source`, as a stencil of 7 or 27 points (`WEIGHTS`).

    Args:
        source: float32 grid (z, y, x), on a GPU or in host memory. All variants but `plain` need contiguous rows that
            start on multiples of 16 bytes in both grids (`numba_tma.pitched` makes such).
        out: float32 of the same shape on the same device, written; not the source.
        points: 7 or 27.
        fill: what lies outside the grid, 'zero' or 'nan'.
        variant: plain, shared, tma, stages or ring; by default ring, or plain where rows are laid out otherwise.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, element types or layouts do not fit, an option's value does not, or the grids share memory.
    """
    a, b = view(source), view(out)
    if a is None or b is None:
        raise TypeError(f"stencil3d of a {type(source).__name__} to a {type(out).__name__}: two arrays expected")
    if len(a.shape) != 3 or a.shape != b.shape or a.dtype != np.float32 or b.dtype != np.float32:
        raise ValueError(
            f"source {a.dtype} {a.shape} and out {b.dtype} {b.shape}: two float32 grids (z, y, x) of one shape expected"
        )
    views = {"source": a, "out": b}
    check_extents("stencil3d", views)
    check_written("stencil3d", views, "out")
    _weights(points)
    _fill(fill)
    variant = variant or ("ring" if all(map(in_boxes, views.values())) else "plain")
    chosen = PROBLEM.variant(variant)
    check_options("stencil3d", chosen, options, OPTIONS[variant])
    for name, array in views.items():
        if variant in _BY_VECTORS and a.size:
            _check_layout(variant, name, array)
    if a.size:
        chosen.bind({"source": source, "out": out}, points=points, fill=fill, **options)()


def _check_layout(variant: str, name: str, array: ArrayView) -> None:
    if not aligned_rows(array):
        raise ValueError(
            f"stencil3d.{variant}: {name} has strides {array.strides} B at address {array.pointer:#x}; rows must be "
            f"contiguous and start on multiples of 16 B: copy it with numba_tma.pitched_copy, or take variant='plain'"
        )


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    arrays = {name: pitched(case.shape, np.float32) for name in ("source", "out")}
    arrays["source"][...] = rng.standard_normal(case.shape, np.float32)
    return arrays


def _case(shape: tuple[int, int, int], points: int, tuned: Mapping[str, Mapping[str, Any]] | None = None) -> Case:
    return Case(shape, "float32", {"points": points}, tuned or {})


def _points(case: Case) -> int:
    return int(np.prod(case.shape, dtype=np.int64))


PROBLEM = Problem(
    name="stencil3d",
    title="a stencil of 7 or 27 points on a grid in three dimensions",
    inputs=_inputs,
    outputs=("out",),
    reference=lambda arrays, case: {"out": reference(arrays["source"], case.options.get("points", 7))},
    bytes_moved=lambda case: 8 * _points(case),
    flops=lambda case: (8 if case.options.get("points", 7) == 7 else 30) * _points(case),
    variants=(
        Variant("plain", "ld/st", "a thread a point, each neighbour loaded with a guard", _bind_plain, baseline=True),
        Variant("shared", "ld/st", "along z; a plane's tile and halo in shared memory", _bind_shared),
        Variant("tma", "TMA", "3-D boxes; the copy engine fills the halo outside", _bind_maps(make_stages, 1)),
        Variant("stages", "TMA", "several planes in flight", _bind_maps(make_stages, 2)),
        Variant("ring", "TMA", "a producer warp, no block barrier", _bind_maps(make_ring, 2)),
    ),
    cases={
        ("default", "sim"): [_case((40, 40, 100), 7), _case((9, 21, 77), 27)],
        ("quick", "sim"): [_case((3, 9, 70), 27), _case((2, 17, 37), 7)],
        ("default", "gpu"): [
            _case((512, 512, 512), 7),
            _case((512, 512, 512), 27),
            _case((127, 253, 509), 7),
        ],
        ("quick", "gpu"): [_case((256, 256, 256), 7), _case((61, 127, 253), 27)],
    },
    # float32 sums of 7 or 27 products against float64, relative to the largest.
    tolerance=1e-5,
)

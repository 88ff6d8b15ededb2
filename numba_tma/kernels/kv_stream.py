"""Stream K and V through shared memory, tile by tile: the double-buffer exercise.

The problem. K and V are fp16 matrices of R rows and C columns, as an attention kernel would stream them. For every
row r:

    out[s, r] = sum over the columns c of segment s of  f(K[r, c], V[r, c]),    f(k, v) = k·v   when work = 1

One block takes a strip of rows and one of the `splits` segments of the columns, and walks it tile by tile: fetch a
tile of K and one of V into shared memory, then compute on them. `work` is the number of multiply-adds per pair; it
turns the problem from copy-bound (1) to compute-bound (64 and more), and the point of two buffers shows in between:
while the block computes on one, the next tile is on its way into the other. work = 0 copies and computes nothing.

What moves the data: ordinary loads and stores (plain, plain_vector), cp.async, the copy engine (tma, tma_ring).

Costs: 4·R·C bytes are read (two fp16 matrices), R·splits floats written, 2·work·R·C flops. With work = 1 that is
half a flop a byte: on an H200 (4.8 TB/s) purely a matter of moving bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import float16, float32, uint32, uint64

from .. import ptx, trace
from ..arrays import reinterpret
from ..arrays import view as array_view
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait, release_to_async, ring
from ..pitch import pitched
from ..shared import Barriers, Shared, Tiles
from ..tensor_map import TensorMap
from .calls import viewed
from .problem import Case, Problem, Variant, check_options

# f(k, v) adds work - 1 further multiply-adds to k·v, of a kind that neither grows nor can be folded away.
DECAY = 0.5
VECTOR = 8  # fp16 elements in 16 bytes, the widest access of one thread
L2_PROMOTION = "256B"  # what L2 fetches at a time: blocks that walk along rows bring their next tile along


def reference(k: np.ndarray, v: np.ndarray, work: int = 1, splits: int = 1, tile_columns: int = 64) -> np.ndarray:
    """float64 result of shape (splits, rows) for fp16 arrays of shape (rows, columns)."""
    k, v = k.astype(np.float64), v.astype(np.float64)
    pair = k * v if work else np.zeros_like(k)
    for _ in range(work - 1):
        pair = pair * DECAY + k
    width = segment(k.shape[1], splits, tile_columns)
    return np.stack([pair[:, s * width : (s + 1) * width].sum(axis=1) for s in range(splits)])


def segment(columns: int, splits: int, tile_columns: int) -> int:
    """Columns that one split takes: whole tiles."""
    tiles = -(-columns // tile_columns)
    return -(-tiles // splits) * tile_columns


# ---------------------------------------------------------------------------------------------------------------------
# The arithmetic, which all variants share.


def make_pair(work: int) -> Callable:
    """f(k, v) in float32 with `work` multiply-adds."""

    @cuda.jit(device=True, forceinline=True)
    def pair(k, v):
        result = k * v
        for _ in range(work - 1):
            result = result * float32(DECAY) + k
        return result

    return pair


def make_tile_sum(tile: tuple[int, int], threads: int, work: int) -> Callable:
    """Add a tile's pairs to `totals`; thread t reads 16-byte vector t, t + threads, … of the tile."""
    vectors = tile[1] // VECTOR
    passes = tile[0] * vectors // threads
    pair = make_pair(work)

    @cuda.jit(device=True, forceinline=True)
    def two_pairs(k, v):
        k_low, k_high = ptx.cvt_f32_f16x2(k)
        v_low, v_high = ptx.cvt_f32_f16x2(v)
        return pair(k_low, v_low) + pair(k_high, v_high)

    @cuda.jit(device=True, forceinline=True)
    def tile_sum(thread, k_tile, v_tile, totals):
        trace.begin("compute")
        for i in range(passes if work else 0):
            index = uint32(thread + uint32(i * threads))
            row, column = uint32(index // uint32(vectors)), uint32(index % uint32(vectors)) * uint32(VECTOR)
            k0, k1, k2, k3 = ptx.ld_shared_v4_u32(k_tile.address_of(row, column))
            v0, v1, v2, v3 = ptx.ld_shared_v4_u32(v_tile.address_of(row, column))
            totals[i] += (two_pairs(k0, v0) + two_pairs(k1, v1)) + (two_pairs(k2, v2) + two_pairs(k3, v3))
        trace.end("compute")

    return tile_sum


def make_store(tile: tuple[int, int], threads: int) -> Callable:
    """Sum `totals` over the threads that share a row, and write the strip's rows."""
    vectors = tile[1] // VECTOR
    passes = tile[0] * vectors // threads
    rows_apart = threads // vectors

    @cuda.jit(device=True, forceinline=True)
    def store(thread, totals, out, split, first_row):
        for i in range(passes):
            total = totals[i]
            lanes = vectors // 2
            while lanes > 0:
                total += cuda.shfl_xor_sync(0xFFFFFFFF, total, lanes)
                lanes //= 2
            row = uint32(first_row + thread // uint32(vectors) + uint32(i * rows_apart))
            if thread % uint32(vectors) == 0 and row < out.shape[1]:
                out[split, row] = total

    return store


def check_tile(tile: tuple[int, int], threads: int) -> None:
    """Raise ValueError for a tile that the thread mapping cannot cover."""
    rows, columns = tile
    vectors = columns // VECTOR
    if columns % VECTOR or vectors & (vectors - 1) or not 1 <= vectors <= 32:
        raise ValueError(f"tile {tile}: columns must be {VECTOR} times a power of two, at most 256; got {columns}")
    if threads % vectors or (rows * vectors) % threads:
        raise ValueError(
            f"tile {tile}: its {rows * vectors} 16-byte vectors do not divide among {threads} threads; take "
            f"a multiple of {max(threads // vectors, 1)} rows"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Plain Numba: load, barrier, compute, barrier.


@functools.cache
def make_plain(tile: tuple[int, int] = (64, 64), work: int = 1, threads: int = 128) -> Kernel:
    """The baseline as one would write it: every thread copies single fp16 elements."""
    check_tile(tile, threads)
    rows, columns = tile
    elements = rows * columns // threads
    vectors = columns // VECTOR
    passes = rows * vectors // threads
    pair = make_pair(work)
    store = make_store(tile, threads)

    @kernel(threads=threads)
    def kv_stream_plain(k, v, out, tiles_per_split):
        k_tile = cuda.shared.array(tile, float16)
        v_tile = cuda.shared.array(tile, float16)
        totals = cuda.local.array(passes, float32)
        for i in range(passes):
            totals[i] = float32(0)
        thread = uint32(cuda.threadIdx.x)
        first_row = uint32(cuda.blockIdx.x) * uint32(rows)
        first_column = uint32(cuda.blockIdx.y) * uint32(tiles_per_split) * uint32(columns)

        for step in range(tiles_per_split):
            trace.begin("load")
            for i in range(elements):
                index = uint32(thread + uint32(i * threads))
                r, c = uint32(index // uint32(columns)), uint32(index % uint32(columns))
                row = uint32(first_row + r)
                column = uint32(first_column + uint32(step) * uint32(columns) + c)
                inside = row < k.shape[0] and column < k.shape[1]
                k_tile[r, c] = k[row, column] if inside else float16(0)
                v_tile[r, c] = v[row, column] if inside else float16(0)
            cuda.syncthreads()
            trace.end("load")
            trace.begin("compute")
            for i in range(passes):
                index = uint32(thread + uint32(i * threads))
                r, c = uint32(index // uint32(vectors)), uint32(index % uint32(vectors)) * uint32(VECTOR)
                for j in range(VECTOR):
                    totals[i] += pair(float32(k_tile[r, c + uint32(j)]), float32(v_tile[r, c + uint32(j)]))
            trace.end("compute")
            cuda.syncthreads()
        store(thread, totals, out, uint32(cuda.blockIdx.y), first_row)

    return kv_stream_plain


@functools.cache
def make_plain_vector(tile: tuple[int, int] = (64, 64), work: int = 1, threads: int = 256) -> Kernel:
    """The best that plain Numba does: 8-byte loads of four elements, through shared memory seen under two types."""
    check_tile(tile, threads)
    rows, columns = tile
    words = columns // 4
    loads = rows * words // threads
    vectors = columns // VECTOR
    passes = rows * vectors // threads
    v_offset = rows * columns
    pair = make_pair(work)
    store = make_store(tile, threads)

    @kernel(threads=threads, shared=Shared(k=Tiles(1, tile, float16), v=Tiles(1, tile, float16)))
    def kv_stream_plain_vector(k, v, out, tiles_per_split, all_columns):
        # Both arrays are the same dynamic shared memory: written as words, read as halves.
        as_words = cuda.shared.array(0, uint64)
        as_halves = cuda.shared.array(0, float16)
        totals = cuda.local.array(passes, float32)
        for i in range(passes):
            totals[i] = float32(0)
        thread = uint32(cuda.threadIdx.x)
        first_row = uint32(cuda.blockIdx.x) * uint32(rows)
        first_column = uint32(cuda.blockIdx.y) * uint32(tiles_per_split) * uint32(columns)

        for step in range(tiles_per_split):
            trace.begin("load")
            for i in range(loads):
                index = uint32(thread + uint32(i * threads))
                row = uint32(first_row + index // uint32(words))
                column = uint32(first_column + uint32(step) * uint32(columns) + index % uint32(words) * uint32(4))
                k_word, v_word = uint64(0), uint64(0)
                if row < k.shape[0] and column < all_columns:
                    k_word, v_word = k[row, column // uint32(4)], v[row, column // uint32(4)]
                    left = uint32(all_columns) - column
                    if left < uint32(4):  # the word reaches into the padding behind the row
                        mask = (uint64(1) << uint64(left * uint32(16))) - uint64(1)
                        k_word, v_word = k_word & mask, v_word & mask
                as_words[index] = k_word
                as_words[index + uint32(v_offset // 4)] = v_word
            cuda.syncthreads()
            trace.end("load")
            trace.begin("compute")
            for i in range(passes):
                start = uint32(thread + uint32(i * threads)) * uint32(VECTOR)
                for j in range(VECTOR):
                    k_half = as_halves[start + uint32(j)]
                    v_half = as_halves[start + uint32(j + v_offset)]
                    totals[i] += pair(float32(k_half), float32(v_half))
            trace.end("compute")
            cuda.syncthreads()
        store(thread, totals, out, uint32(cuda.blockIdx.y), first_row)

    return kv_stream_plain_vector


# ---------------------------------------------------------------------------------------------------------------------
# Two buffers: while the block computes on one tile, the next is on its way.


@functools.cache
def make_cp_async(tile: tuple[int, int] = (64, 64), work: int = 1, threads: int = 128, stages: int = 2) -> Kernel:
    """cp.async (from sm_80 on): every thread issues 16-byte copies that do not pass through its registers."""
    check_tile(tile, threads)
    rows, columns = tile
    vectors = columns // VECTOR
    passes = rows * vectors // threads
    ahead_by = stages - 1
    smem = Shared(k=Tiles(stages, tile, float16), v=Tiles(stages, tile, float16))
    tile_sum = make_tile_sum(tile, threads, work)
    store = make_store(tile, threads)

    @cuda.jit(device=True, forceinline=True)
    def fetch(thread, matrix, buffer, first_row, first_column):
        for i in range(passes):
            index = uint32(thread + uint32(i * threads))
            r, c = uint32(index // uint32(vectors)), uint32(index % uint32(vectors)) * uint32(VECTOR)
            row, column = uint32(first_row + r), uint32(first_column + c)
            # Of the 16 bytes only those inside the matrix are read; the rest of the destination becomes zero.
            inside = uint32(0)
            if row < matrix.shape[0] and column < matrix.shape[1]:
                inside = uint32(min(uint32(matrix.shape[1] - column), uint32(VECTOR)) * uint32(2))
            else:
                row, column = uint32(0), uint32(0)
            source = ptx.global_address(matrix) + uint64(row) * uint64(matrix.strides[0]) + uint64(column) * uint64(2)
            ptx.cp_async_cg_16_zfill(buffer.address_of(r, c), source, inside)

    @kernel(threads=threads, shared=smem)
    def kv_stream_cp_async(k, v, out, tiles_per_split):
        totals = cuda.local.array(passes, float32)
        for i in range(passes):
            totals[i] = float32(0)
        thread = uint32(cuda.threadIdx.x)
        first_row = uint32(cuda.blockIdx.x) * uint32(rows)
        first_column = uint32(cuda.blockIdx.y) * uint32(tiles_per_split) * uint32(columns)
        for step in range(ahead_by):
            if step < tiles_per_split:
                column = uint32(first_column + uint32(step) * uint32(columns))
                fetch(thread, k, smem.k[step], first_row, column)
                fetch(thread, v, smem.v[step], first_row, column)
            ptx.cp_async_commit_group()

        for step in range(tiles_per_split):
            ahead = step + ahead_by
            if ahead < tiles_per_split:  # the other buffer fills …
                stage, _ = ring(ahead, stages)
                column = uint32(first_column + uint32(ahead) * uint32(columns))
                fetch(thread, k, smem.k[stage], first_row, column)
                fetch(thread, v, smem.v[stage], first_row, column)
            ptx.cp_async_commit_group()  # an empty group, where nothing is left, keeps the count
            ptx.cp_async_wait_group(ahead_by)  # … while this one is complete for this thread,
            cuda.syncthreads()  # and after the barrier for all of them
            stage, _ = ring(step, stages)
            tile_sum(thread, smem.k[stage], smem.v[stage], totals)
            cuda.syncthreads()
        store(thread, totals, out, uint32(cuda.blockIdx.y), first_row)

    return kv_stream_cp_async


@functools.cache
def make_tma(
    tile: tuple[int, int] = (64, 64), work: int = 1, threads: int = 128, stages: int = 2, strict: bool = True
) -> Kernel:
    """TMA: one thread asks the copy engine for whole tiles; a barrier counts their bytes. One stage is no overlap.

    Without `strict` a stage is handed back by the block barrier alone, as much code does; it is there to measure what
    the proxy fence costs.
    """
    check_tile(tile, threads)
    release = release_to_async if strict else cuda.syncthreads
    rows, columns = tile
    passes = rows * columns // VECTOR // threads
    smem = Shared(k=Tiles(stages, tile, float16), v=Tiles(stages, tile, float16), full=Barriers(stages))
    tile_sum = make_tile_sum(tile, threads, work)
    store = make_store(tile, threads)

    @cuda.jit(device=True, forceinline=True)
    def fetch(k_map, v_map, stage, row, column):
        bar = smem.full[stage]
        ptx.mbarrier_arrive_expect_tx(bar, k_map.box_bytes + v_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.k[stage], k_map, column, row, bar)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.v[stage], v_map, column, row, bar)

    @kernel(threads=threads, shared=smem)
    def kv_stream_tma(k_map, v_map, out, tiles_per_split):
        totals = cuda.local.array(passes, float32)
        for i in range(passes):
            totals[i] = float32(0)
        thread = uint32(cuda.threadIdx.x)
        leader = thread == 0
        first_row = uint32(cuda.blockIdx.x) * uint32(rows)
        first_column = uint32(cuda.blockIdx.y) * uint32(tiles_per_split) * uint32(columns)
        if leader:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if leader:
            for step in range(stages):
                if step < tiles_per_split:
                    fetch(k_map, v_map, step, first_row, uint32(first_column + uint32(step) * uint32(columns)))

        for step in range(tiles_per_split):
            stage, phase = ring(step, stages)
            mbarrier_wait(smem.full[stage], phase)  # this tile has landed; the others may still be under way
            tile_sum(thread, smem.k[stage], smem.v[stage], totals)
            release()
            ahead = step + stages
            if leader and ahead < tiles_per_split:
                fetch(k_map, v_map, stage, first_row, uint32(first_column + uint32(ahead) * uint32(columns)))
        store(thread, totals, out, uint32(cuda.blockIdx.y), first_row)

    return kv_stream_tma


@functools.cache
def make_tma_ring(tile: tuple[int, int] = (64, 64), work: int = 1, threads: int = 128, stages: int = 4) -> Kernel:
    """TMA with a producer warp: consumers hand each stage back by a barrier of its own, with no block barrier."""
    check_tile(tile, threads)
    rows, columns = tile
    passes = rows * columns // VECTOR // threads
    smem = Shared(
        k=Tiles(stages, tile, float16),
        v=Tiles(stages, tile, float16),
        full=Barriers(stages),
        empty=Barriers(stages),
    )
    tile_sum = make_tile_sum(tile, threads, work)
    store = make_store(tile, threads)

    @kernel(threads=threads + 32, shared=smem)
    def kv_stream_tma_ring(k_map, v_map, out, tiles_per_split):
        thread = uint32(cuda.threadIdx.x)
        first_row = uint32(cuda.blockIdx.x) * uint32(rows)
        first_column = uint32(cuda.blockIdx.y) * uint32(tiles_per_split) * uint32(columns)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], threads // 32)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()

        if thread >= threads:  # the producer warp, of which one thread issues
            if thread == threads:
                for step in range(tiles_per_split):
                    stage, phase = ring(step, stages)
                    mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                    column = uint32(first_column + uint32(step) * uint32(columns))
                    bar = smem.full[stage]
                    ptx.mbarrier_arrive_expect_tx(bar, k_map.box_bytes + v_map.box_bytes)
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.k[stage], k_map, column, first_row, bar)
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.v[stage], v_map, column, first_row, bar)
        else:
            totals = cuda.local.array(passes, float32)
            for i in range(passes):
                totals[i] = float32(0)
            for step in range(tiles_per_split):
                stage, phase = ring(step, stages)
                mbarrier_wait(smem.full[stage], phase)
                tile_sum(thread, smem.k[stage], smem.v[stage], totals)
                ptx.fence_proxy_async_shared_cta()
                cuda.syncwarp()
                if thread % uint32(32) == 0:
                    ptx.mbarrier_arrive(smem.empty[stage])
            store(thread, totals, out, uint32(cuda.blockIdx.y), first_row)

    return kv_stream_tma_ring


@functools.cache
def make_resident(tile: tuple[int, int] = (64, 64), work: int = 1, threads: int = 128) -> Kernel:
    """Compute alone, for measuring: two tiles are fetched, and summed in turn as often as there are tiles."""
    check_tile(tile, threads)
    rows, columns = tile
    passes = rows * columns // VECTOR // threads
    smem = Shared(k=Tiles(2, tile, float16), v=Tiles(2, tile, float16), full=Barriers(1))
    tile_sum = make_tile_sum(tile, threads, work)
    store = make_store(tile, threads)

    @kernel(threads=threads, shared=smem)
    def kv_stream_resident(k_map, v_map, out, tiles_per_split):
        totals = cuda.local.array(passes, float32)
        for i in range(passes):
            totals[i] = float32(0)
        thread = uint32(cuda.threadIdx.x)
        first_row = uint32(cuda.blockIdx.x) * uint32(rows)
        if thread == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(smem.full[0], 2 * (k_map.box_bytes + v_map.box_bytes))
            for stage in range(2):
                column = uint32(stage * columns)
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.k[stage], k_map, column, first_row, smem.full[0])
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.v[stage], v_map, column, first_row, smem.full[0])
        cuda.syncthreads()
        mbarrier_wait(smem.full[0], 0)
        for step in range(tiles_per_split):
            stage, _ = ring(step, 2)
            tile_sum(thread, smem.k[stage], smem.v[stage], totals)
            cuda.syncthreads()
        store(thread, totals, out, uint32(cuda.blockIdx.y), first_row)

    return kv_stream_resident


# ---------------------------------------------------------------------------------------------------------------------
# Host side.


def _grid(shape: tuple[int, int], tile: tuple[int, int], splits: int) -> tuple[tuple[int, int], int]:
    """Blocks (strips, splits) and the tiles that one split walks."""
    tiles = -(-shape[1] // tile[1])
    return (-(-shape[0] // tile[0]), splits), -(-tiles // splits)


def _launch_arrays(make: Callable[..., Kernel]) -> Callable[..., Callable[[], Any]]:
    """Bind a kernel that takes the matrices themselves."""

    def bind(
        arrays: Mapping[str, Any],
        *,
        tile: tuple[int, int] = (64, 64),
        work: int = 1,
        splits: int = 1,
        stream: object = None,
        **options: int,
    ) -> Callable[[], Any]:
        k, v, out = arrays["k"], arrays["v"], arrays["out"]
        grid, tiles_per_split = _grid(k.shape, tile, splits)
        return make(tile, work, **options)[grid, None, stream].bind(k, v, out, np.uint32(tiles_per_split))

    return bind


def _launch_words(
    arrays: Mapping[str, Any],
    *,
    tile: tuple[int, int] = (64, 64),
    work: int = 1,
    splits: int = 1,
    stream: object = None,
    threads: int = 256,
) -> Callable[[], Any]:
    """Bind plain_vector, which sees the matrices as 8-byte words."""
    k, v, out = (array_view(arrays[name]) for name in ("k", "v", "out"))
    words = (k.shape[0], -(-k.shape[1] // 4))
    as_words = [reinterpret(arrays[n], np.uint64, words, (d.strides[0], 8)) for n, d in (("k", k), ("v", v))]
    grid, tiles_per_split = _grid(k.shape, tile, splits)
    launcher = make_plain_vector(tile, work, threads)[grid, None, stream]
    return launcher.bind(*as_words, arrays["out"], np.uint32(tiles_per_split), np.uint32(k.shape[1]))


def _launch_maps(make: Callable[..., Kernel]) -> Callable[..., Callable[[], Any]]:
    """Bind a kernel that takes tensor maps."""

    def bind(
        arrays: Mapping[str, Any],
        *,
        tile: tuple[int, int] = (64, 64),
        work: int = 1,
        splits: int = 1,
        l2_promotion: str = L2_PROMOTION,
        stream: object = None,
        **options: int,
    ) -> Callable[[], Any]:
        k, v, out = arrays["k"], arrays["v"], arrays["out"]
        k_map, v_map = (TensorMap(matrix, tile, l2_promotion=l2_promotion, store=False) for matrix in (k, v))
        grid, tiles_per_split = _grid(k.shape, tile, splits)
        return make(tile, work, **options)[grid, None, stream].bind(k_map, v_map, out, np.uint32(tiles_per_split))

    return bind


bind_one_buffer = functools.partial(_launch_maps(make_tma), stages=1)
bind_resident = _launch_maps(make_resident)


OPTIONS = {
    "plain": ("threads",),
    "plain_vector": ("threads",),
    "cp_async": ("threads", "stages"),
    "tma": ("threads", "stages", "strict", "l2_promotion"),
    "tma_ring": ("threads", "stages", "l2_promotion"),
}


def kv_stream(
    k: Any,
    v: Any,
    out: Any,
    *,
    variant: str = "tma",
    work: int = 1,
    tile: tuple[int, int] = (64, 64),
    **options: Any,
) -> None:
    """out[s, r] = Σ f(k[r, c], v[r, c]) over the columns c of split s, by the variant named.

    Args:
        k, v: fp16 matrices of one shape (rows, columns) on one device (NumPy arrays run in the simulator, or are
            refused by `bind` on a GPU); each row must start on a multiple of 16 bytes (`numba_tma.pitched` makes such).
        out: float32 (splits, rows), written.
        variant: plain, plain_vector, cp_async, tma or tma_ring.
        work: multiply-adds per pair.
        tile: rows and columns of a tile; columns 8 times a power of two, at most 256.
        options: `splits` is taken from `out`; `stages`, `threads`, `l2_promotion` of the tensor maps and `stream`
            where the variant has them.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes, strides, work or the tile do not fit; the message says what would.
    """
    views = viewed("kv_stream", k=k, v=v, out=out)
    chosen = PROBLEM.variant(variant)
    if "splits" in options:
        raise TypeError("kv_stream: splits is the first extent of `out`; leave it out")
    check_options("kv_stream", chosen, options, OPTIONS[variant])
    if isinstance(work, bool) or not isinstance(work, (int, np.integer)) or work < 0:
        raise ValueError(f"kv_stream: work {work!r}; expected an integer of 0 or more")
    if views["k"].shape != views["v"].shape or len(views["k"].shape) != 2:
        raise ValueError(f"k {views['k'].shape} and v {views['v'].shape}: two matrices of one shape expected")
    if views["out"].dtype != np.float32 or views["out"].shape[1:] != views["k"].shape[:1]:
        raise ValueError(
            f"out {views['out'].dtype} {views['out'].shape}: float32 of shape (splits, {views['k'].shape[0]}) expected"
        )
    for name in ("k", "v"):
        if views[name].dtype != np.float16:
            raise ValueError(f"{name} is {views[name].dtype}; float16 expected")
        if views[name].strides[1] != 2 or views[name].strides[0] % 16 or views[name].pointer % 16:
            raise ValueError(
                f"{name}: strides {views[name].strides} B at address {views[name].pointer:#x}; rows must be contiguous "
                f"and start on multiples of 16 B: copy it with numba_tma.pitched_copy"
            )
    for name in ("k", "out"):
        if 0 in views[name].shape:
            raise ValueError(f"{name} has the shape {views[name].shape}: there is nothing to stream or to write")
    bound = chosen.bind
    bound({"k": k, "v": v, "out": out}, tile=tile, work=int(work), splits=views["out"].shape[0], **options)()


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    rows, columns = case.shape
    arrays = {}
    for name in ("k", "v"):
        arrays[name] = pitched((rows, columns), np.float16)
        arrays[name][...] = rng.standard_normal((rows, columns), np.float32)
    arrays["out"] = np.empty((case.options.get("splits", 1), rows), np.float32)
    return arrays


def _expected(arrays: Mapping[str, np.ndarray], case: Case) -> dict[str, np.ndarray]:
    options = case.options
    tile = options.get("tile", (64, 64))
    out = reference(arrays["k"], arrays["v"], options.get("work", 1), options.get("splits", 1), tile[1])
    return {"out": out}


def _case(rows: int, columns: int, tuned: Mapping[str, Mapping[str, Any]] | None = None, **options: Any) -> Case:
    return Case((rows, columns), "float16", options, tuned or {})


# The best that a sweep on an H200 found (scripts/measure.py); without these it is the exercise, 64 × 64, two buffers.
_TUNED_4096 = {
    "plain": {"tile": (16, 128)},
    "plain_vector": {"tile": (16, 128), "threads": 256},
    "cp_async": {"tile": (16, 128), "stages": 3},
    "tma": {"tile": (16, 128), "stages": 3},
    "tma_ring": {"tile": (32, 128), "stages": 2},
}
_TUNED_16384 = {
    "plain": {"tile": (8, 256)},
    "plain_vector": {"tile": (8, 256), "threads": 128},
    "cp_async": {"tile": (8, 256)},
    "tma": {"stages": 3},
    "tma_ring": {"tile": (32, 64), "stages": 3},
}


PROBLEM = Problem(
    name="kv_stream",
    title="stream K and V through shared memory, computing on one tile while the next one is copied",
    inputs=_inputs,
    outputs=("out",),
    reference=_expected,
    bytes_moved=lambda case: 4 * case.shape[0] * case.shape[1] + 4 * case.shape[0] * case.options.get("splits", 1),
    flops=lambda case: 2 * case.options.get("work", 1) * case.shape[0] * case.shape[1],
    variants=(
        Variant("plain", "ld/st", "load, barrier, compute, barrier", _launch_arrays(make_plain), baseline=True),
        Variant("plain_vector", "ld/st", "8-byte loads, the best of plain Numba", _launch_words),
        Variant(
            "cp_async",
            "cp.async",
            "two buffers; copies bypass registers (A100)",
            _launch_arrays(make_cp_async),
        ),
        Variant("tma", "TMA", "two buffers; one thread asks for whole tiles", _launch_maps(make_tma)),
        Variant("tma_ring", "TMA", "N stages, a producer warp, no block barrier", _launch_maps(make_tma_ring)),
    ),
    cases={
        ("default", "sim"): [_case(1024, 1024), _case(200, 333, work=3, splits=2)],
        ("quick", "sim"): [_case(128, 192), _case(70, 83, work=3, splits=2)],
        ("default", "gpu"): [
            _case(1024, 1024, splits=8),
            _case(4096, 4096),
            _case(4096, 4096, _TUNED_4096, splits=4),
            _case(16384, 16384),
            _case(16384, 16384, _TUNED_16384, splits=2),
            _case(1000, 3333, work=3, splits=2),
        ],
        ("quick", "gpu"): [_case(1024, 1024, splits=8), _case(1000, 3333, work=3, splits=2)],
    },
    # float32 sums of up to 16384 products, against float64, relative to the largest sum.
    tolerance=1e-4,
)

"""Transpose a matrix: read rows, write columns, with shared memory as the place where the one becomes the other.

The problem. target[c, r] = source[r, c], for matrices of any size, of elements of 1, 2 or 4 bytes. Nothing is computed:
the time is the bytes (each read once and written once) over the memory's rate, and a variant is as good as the share it
reaches of the driver's own device-to-device copy.

What makes it hard. Global memory wants neighbouring threads at neighbouring addresses, on both sides. So a tile goes
through shared memory, is written there by rows and read by columns. A column's elements lie one row apart, and rows of
128 bytes put all of a column into one of the 32 banks: 32 lanes are served one after the other. A padded row (padded)
or a swizzled one (swizzle) spreads the column over the banks. The copy engine cannot pad, but it swizzles for nothing.
Elements smaller than a bank's 4 bytes waste most of each access; so a thread takes a square of elements, as many as 16
bytes hold each way, and transposes it in its registers (vector).

What moves the data: ordinary loads and stores (naive, padded), the copy engine in (tma, swizzle, vector, ring), the
copy engine in and out (store).

Costs: 2·R·C·itemsize bytes, no flops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import uint32, uint64

from .. import dtypes, ptx
from ..arrays import ArrayView, reinterpret, view
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait, release_to_async, ring
from ..pitch import pitched
from ..shared import Barriers, Shared, Tiles
from ..tensor_map import TensorMap
from ..unroll import unroll
from .calls import aligned_rows, check_extents, check_written
from .copy import blocks_for
from .problem import Case, Problem, Variant, check_options

SPAN = 128  # bytes of a row in shared memory: all banks once, and the span of the widest swizzle
CHUNK = 16  # bytes of the widest access of one thread, which is also what a swizzle moves
SQUARES = 8  # chunks in a span: a square of spans holds 8 × 8 squares of one chunk each way
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # a transpose moves bits, whatever they mean


def reference(source: np.ndarray, block: int = 128) -> np.ndarray:
    """The transpose, block by block: several times faster than NumPy's copy of a large transposed view."""
    target = np.empty(source.shape[::-1], source.dtype)
    for r in range(0, source.shape[0], block):
        for c in range(0, source.shape[1], block):
            target[c : c + block, r : r + block] = source[r : r + block, c : c + block].T
    return target


def side_of(itemsize: int) -> int:
    """Elements in 16 bytes: the side of the square that a thread transposes in its registers."""
    return CHUNK // itemsize


# ---------------------------------------------------------------------------------------------------------------------
# What the variants share.


@cuda.jit(device=True, forceinline=True)
def tile_at(index, down):
    """Row and column of the tile taken as number `index`: down the columns, so that the target is written in order."""
    column = uint32(index // down)
    return uint32(index - column * down), column


@cuda.jit(device=True, forceinline=True)
def square_of(number, boxes):
    """Where in a tile the square with this number is: box, span of rows, and row and column among 8 × 8 squares there.

    Squares with neighbouring numbers lie along a diagonal. Eight neighbouring threads, who are served together, so read
    eight different rows of squares at eight different columns. The swizzle gives each of them banks of its own, and it
    does so again when they write the transpose.
    """
    which = uint32(number // uint32(SQUARES * SQUARES))
    row = uint32(number % uint32(SQUARES))
    column = uint32(row ^ uint32(uint32(number // uint32(SQUARES)) % uint32(SQUARES)))
    return uint32(which % uint32(boxes)), uint32(which // uint32(boxes)), row, column


def squares(tile: tuple[int, int]) -> int:
    """Squares of one chunk each way in a tile, which counts spans each way."""
    return tile[0] * tile[1] * SQUARES * SQUARES


def box_of(itemsize: int, spans: int) -> tuple[int, int]:
    """Rows and columns of one box: so many spans of rows, and one of columns."""
    width = SPAN // itemsize
    return spans * width, width


def make_turned(itemsize: int) -> Callable:
    """Word q of row j of a square's transpose, from the square's rows of four words each; j and q are constants."""
    byte_perm = cuda.libdevice.byte_perm

    @cuda.jit(device=True, forceinline=True)
    def turned_4(words, j, q):
        return words[4 * q + j]

    @cuda.jit(device=True, forceinline=True)
    def turned_2(words, j, q):
        upper, lower = words[8 * q + j // 2], words[8 * q + 4 + j // 2]
        return uint32(byte_perm(upper, lower, 0x5410 if j % 2 == 0 else 0x7632))

    @cuda.jit(device=True, forceinline=True)
    def turned_1(words, j, q):
        # Four rows, of each the byte j % 4: first the pairs of rows, then the two pairs.
        at = 16 * q + j // 4
        both = 0x5140 if j % 4 < 2 else 0x7362
        upper = byte_perm(words[at], words[at + 4], both)
        lower = byte_perm(words[at + 8], words[at + 12], both)
        return uint32(byte_perm(upper, lower, 0x5410 if j % 2 == 0 else 0x7632))

    return {1: turned_1, 2: turned_2, 4: turned_4}[itemsize]


def make_fetch(itemsize: int, smem: Shared, tile: tuple[int, int]) -> Callable:
    """Ask for a tile, one box for each span of its columns, into the stage named."""
    width = SPAN // itemsize
    rows, boxes = tile[0] * width, tile[1]

    @cuda.jit(device=True, forceinline=True)
    def fetch(source_map, stage, tile_row, tile_column):
        bar, row = smem.full[stage], uint32(tile_row * uint32(rows))
        ptx.mbarrier_arrive_expect_tx(bar, boxes * source_map.box_bytes)
        for box in range(boxes):
            column = uint32(tile_column * uint32(boxes * width) + uint32(box * width))
            slot = uint32(uint32(stage) * uint32(boxes) + uint32(box))
            ptx.cp_async_bulk_tensor_2d_shared_global(smem.source[slot], source_map, column, row, bar)

    return fetch


def make_load(itemsize: int) -> Callable:
    """Read a square of a tile, one access of 16 bytes a row, into an array of words."""
    side = side_of(itemsize)

    @cuda.jit(device=True, forceinline=True)
    def load(words, tile, row, column):
        for i in range(side):
            unroll()
            a, b, c, d = ptx.ld_shared_v4_u32(tile.address_of(uint32(row + uint32(i)), column))
            words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = a, b, c, d

    return load


def make_store_global(itemsize: int) -> Callable:
    """Write a square's transpose to the matrix, 16 bytes a row."""
    side = side_of(itemsize)
    turned = make_turned(itemsize)

    @cuda.jit(device=True, forceinline=True)
    def store(words, target, row, column):
        address = (
            ptx.global_address(target) + uint64(row) * uint64(target.strides[0]) + uint64(column) * uint64(itemsize)
        )
        for j in range(side):
            unroll()
            if uint32(row + uint32(j)) < target.shape[0]:
                ptx.st_global_v4_u32(
                    address, turned(words, j, 0), turned(words, j, 1), turned(words, j, 2), turned(words, j, 3)
                )
            address += uint64(target.strides[0])

    return store


def make_store_rest(itemsize: int) -> Callable:
    """Write what of a square's transpose lies in the matrix, element by element from the tile, where a row ends."""
    side = side_of(itemsize)

    @cuda.jit(device=True, forceinline=True)
    def store(tile, r, c, target, row, column):
        for j in range(side):
            unroll(1)
            for i in range(side):
                unroll(1)
                y, x = uint32(row + uint32(j)), uint32(column + uint32(i))
                if y < target.shape[0] and x < target.shape[1]:
                    target[y, x] = tile[uint32(r + uint32(i)), uint32(c + uint32(j))]

    return store


def make_store_shared(itemsize: int) -> Callable:
    """Write a square's transpose into a tile, 16 bytes a row."""
    side = side_of(itemsize)
    turned = make_turned(itemsize)

    @cuda.jit(device=True, forceinline=True)
    def store(words, tile, row, column):
        for j in range(side):
            unroll()
            ptx.st_shared_v4_u32(
                tile.address_of(uint32(row + uint32(j)), column),
                turned(words, j, 0),
                turned(words, j, 1),
                turned(words, j, 2),
                turned(words, j, 3),
            )

    return store


# ---------------------------------------------------------------------------------------------------------------------
# Plain Numba.

PLAIN_TILE, PLAIN_ROWS = 32, 8


@functools.cache
def make_naive(itemsize: int) -> Kernel:
    """The baseline: each thread copies elements; a warp reads along a row and writes down a column."""

    @kernel(threads=(PLAIN_TILE, PLAIN_ROWS))
    def transpose_naive(source, target, down):
        tile_row, tile_column = tile_at(uint32(cuda.blockIdx.x), down)
        column = uint32(tile_column * uint32(PLAIN_TILE) + uint32(cuda.threadIdx.x))
        for i in range(PLAIN_TILE // PLAIN_ROWS):
            row = uint32(tile_row * uint32(PLAIN_TILE) + uint32(cuda.threadIdx.y) + uint32(i * PLAIN_ROWS))
            if row < source.shape[0] and column < source.shape[1]:
                target[column, row] = source[row, column]

    return transpose_naive


@functools.cache
def make_padded(itemsize: int) -> Kernel:
    """Through a tile in shared memory, one word wider than it need be: a column then lies in 32 different banks."""
    element = dtypes.lookup(np.dtype(BITS[itemsize])).numba_type
    shape = (PLAIN_TILE, PLAIN_TILE + 4 // itemsize)

    @kernel(threads=(PLAIN_TILE, PLAIN_ROWS))
    def transpose_padded(source, target, down):
        tile = cuda.shared.array(shape, element)
        tile_row, tile_column = tile_at(uint32(cuda.blockIdx.x), down)
        x, y = uint32(cuda.threadIdx.x), uint32(cuda.threadIdx.y)
        first_row, first_column = uint32(tile_row * uint32(PLAIN_TILE)), uint32(tile_column * uint32(PLAIN_TILE))
        for i in range(PLAIN_TILE // PLAIN_ROWS):
            r = uint32(y + uint32(i * PLAIN_ROWS))
            row, column = uint32(first_row + r), uint32(first_column + x)
            if row < source.shape[0] and column < source.shape[1]:
                tile[r, x] = source[row, column]
        cuda.syncthreads()
        for i in range(PLAIN_TILE // PLAIN_ROWS):
            c = uint32(y + uint32(i * PLAIN_ROWS))
            row, column = uint32(first_row + x), uint32(first_column + c)
            if row < source.shape[0] and column < source.shape[1]:
                target[column, row] = tile[x, c]

    return transpose_padded


# ---------------------------------------------------------------------------------------------------------------------
# TMA.


@functools.cache
def make_by_columns(itemsize: int, swizzle: str, threads: int = 256) -> Kernel:
    """The copy engine brings the tile, one box; lanes read it down the columns, element by element."""
    width = SPAN // itemsize
    smem = Shared(tile=Tiles(1, (width, width), BITS[itemsize], swizzle), full=Barriers(1))

    @kernel(threads=threads, shared=smem)
    def transpose_by_columns(source_map, target, down):
        thread = uint32(cuda.threadIdx.x)
        tile_row, tile_column = tile_at(uint32(cuda.blockIdx.x), down)
        first_row, first_column = uint32(tile_row * uint32(width)), uint32(tile_column * uint32(width))
        if thread == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(smem.full[0], source_map.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], source_map, first_column, first_row, smem.full[0])
        cuda.syncthreads()
        mbarrier_wait(smem.full[0], 0)
        for i in range(width * width // threads):
            index = uint32(thread + uint32(i * threads))
            r, c = uint32(index % uint32(width)), uint32(index // uint32(width))
            row, column = uint32(first_row + r), uint32(first_column + c)
            if column < target.shape[0] and row < target.shape[1]:
                target[column, row] = smem.tile[0][r, c]

    return transpose_by_columns


def make_write(itemsize: int, smem: Shared, tile: tuple[int, int], threads: int) -> Callable:
    """Write the transpose of the tile in a stage, square by square: read, turn, write."""
    side, width = side_of(itemsize), SPAN // itemsize
    rows, boxes = tile[0] * width, tile[1]
    passes, held = squares(tile) // threads, 4 * side
    load, store, store_rest = make_load(itemsize), make_store_global(itemsize), make_store_rest(itemsize)

    @cuda.jit(device=True, forceinline=True)
    def write(thread, stage, target, tile_row, tile_column):
        words = cuda.local.array(held, uint32)
        for i in range(passes):
            box, part, row, column = square_of(uint32(thread + uint32(i * threads)), boxes)
            source = smem.source[uint32(uint32(stage) * uint32(boxes) + box)]
            r, c = uint32(part * uint32(width) + row * uint32(side)), uint32(column * uint32(side))
            y = uint32(tile_column * uint32(boxes * width) + box * uint32(width) + c)
            x = uint32(tile_row * uint32(rows) + r)
            if uint64(x) + uint64(side) <= uint64(target.shape[1]):
                load(words, source, r, c)
                store(words, target, y, x)
            else:
                store_rest(source, r, c, target, y, x)

    return write


@functools.cache
def make_vector(itemsize: int, tile: tuple[int, int] = (2, 2), threads: int = 256) -> Kernel:
    """Each thread reads a square by 16 bytes a row, transposes it in registers and writes 16 bytes a row.

    `tile` counts spans of 128 bytes: rows of the source (they make the target's rows), and columns.
    """
    smem = Shared(source=Tiles(tile[1], box_of(itemsize, tile[0]), BITS[itemsize], "128B"), full=Barriers(1))
    fetch, write = make_fetch(itemsize, smem, tile), make_write(itemsize, smem, tile, threads)

    @kernel(threads=threads, shared=smem)
    def transpose_vector(source_map, target, down):
        thread = uint32(cuda.threadIdx.x)
        tile_row, tile_column = tile_at(uint32(cuda.blockIdx.x), down)
        if thread == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
            fetch(source_map, 0, tile_row, tile_column)
        cuda.syncthreads()
        mbarrier_wait(smem.full[0], 0)
        write(thread, 0, target, tile_row, tile_column)

    return transpose_vector


@functools.cache
def make_ring(itemsize: int, tile: tuple[int, int] = (2, 2), threads: int = 256, stages: int = 2) -> Kernel:
    """Blocks that stay: while a block writes a tile, the next ones are on their way."""
    smem = Shared(
        source=Tiles(stages * tile[1], box_of(itemsize, tile[0]), BITS[itemsize], "128B"), full=Barriers(stages)
    )
    fetch, write = make_fetch(itemsize, smem, tile), make_write(itemsize, smem, tile, threads)

    @kernel(threads=threads, shared=smem)
    def transpose_ring(source_map, target, down, tiles):
        thread = uint32(cuda.threadIdx.x)
        index, every = uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            for stage in range(stages):
                ahead = uint32(index + uint32(stage) * every)
                if ahead < tiles:
                    tile_row, tile_column = tile_at(ahead, down)
                    fetch(source_map, stage, tile_row, tile_column)
        cuda.syncthreads()
        step = uint32(0)
        while index < tiles:
            stage, phase = ring(step, stages)
            tile_row, tile_column = tile_at(index, down)
            mbarrier_wait(smem.full[stage], phase)
            write(thread, stage, target, tile_row, tile_column)
            release_to_async()
            ahead = uint32(index + uint32(stages) * every)
            if thread == 0 and ahead < tiles:
                tile_row, tile_column = tile_at(ahead, down)
                fetch(source_map, stage, tile_row, tile_column)
            index, step = uint32(index + every), uint32(step + uint32(1))

    return transpose_ring


@functools.cache
def make_store(itemsize: int, tile: tuple[int, int] = (2, 1), threads: int = 128) -> Kernel:
    """The transposed tile goes back to shared memory, swizzled too, and the copy engine writes it to the matrix."""
    side, width = side_of(itemsize), SPAN // itemsize
    rows, boxes, out_boxes = tile[0] * width, tile[1], tile[0]
    passes, held = squares(tile) // threads, 4 * side
    smem = Shared(
        source=Tiles(boxes, box_of(itemsize, tile[0]), BITS[itemsize], "128B"),
        target=Tiles(out_boxes, box_of(itemsize, tile[1]), BITS[itemsize], "128B"),
        full=Barriers(1),
    )
    fetch, load, store = make_fetch(itemsize, smem, tile), make_load(itemsize), make_store_shared(itemsize)

    @kernel(threads=threads, shared=smem)
    def transpose_store(source_map, target_map, down):
        words = cuda.local.array(held, uint32)
        thread = uint32(cuda.threadIdx.x)
        tile_row, tile_column = tile_at(uint32(cuda.blockIdx.x), down)
        if thread == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
            fetch(source_map, 0, tile_row, tile_column)
        cuda.syncthreads()
        mbarrier_wait(smem.full[0], 0)
        for i in range(passes):
            box, part, row, column = square_of(uint32(thread + uint32(i * threads)), boxes)
            r, c = uint32(row * uint32(side)), uint32(column * uint32(side))
            load(words, smem.source[box], uint32(part * uint32(width) + r), c)
            store(words, smem.target[part], uint32(box * uint32(width) + c), r)
        ptx.fence_proxy_async_shared_cta()  # the engine must see what threads wrote
        cuda.syncthreads()
        if thread == 0:
            y = uint32(tile_column * uint32(boxes * width))
            for part in range(out_boxes):
                x = uint32(tile_row * uint32(rows) + uint32(part * width))
                ptx.cp_async_bulk_tensor_2d_global_shared(target_map, x, y, smem.target[part])
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group(0)  # shared memory must not be given away while the engine reads it

    return transpose_store


# ---------------------------------------------------------------------------------------------------------------------
# Host side.

NAMES = ("source", "target")
MAX_TILES = (1 << 31) - 1  # blocks of a grid along x
# Bytes that L2 fetches at a time: what lies beside a tile's rows is wanted by a block that comes soon, and while memory
# is written to, fewer and longer reads are better.
L2_PROMOTION = "256B"


def _as_bits(array: Any, whole_chunks: bool = False) -> Any:
    """The matrix as unsigned integers of the same size; with its rows' padding, up to a whole chunk."""
    described = view(array)
    bits = np.dtype(BITS[described.dtype.itemsize])
    rows, columns = described.shape
    if whole_chunks:
        side = side_of(bits.itemsize)
        columns = -(-columns // side) * side
    return reinterpret(array, bits, (rows, columns), described.strides)


def _tiles(shape: tuple[int, int], rows: int, columns: int) -> tuple[np.uint32, int]:
    """Tiles from top to bottom, and in all."""
    down, across = -(-shape[0] // rows), -(-shape[1] // columns)
    if down * across > MAX_TILES:
        raise ValueError(
            f"{shape} in tiles of {rows} × {columns} are {down * across:,} blocks; a grid ends at {MAX_TILES:,}"
        )
    return np.uint32(down), down * across


def _bind_plain(make: Callable[..., Kernel]) -> Callable[..., Callable[[], Any]]:
    def bind(arrays: Mapping[str, Any], *, stream: object = None) -> Callable[[], Any]:
        source, target = (_as_bits(arrays[name]) for name in NAMES)
        described = view(source)
        down, tiles = _tiles(described.shape, PLAIN_TILE, PLAIN_TILE)
        return make(described.dtype.itemsize)[tiles, None, stream].bind(source, target, down)

    return bind


def _bind_by_columns(swizzle: str) -> Callable[..., Callable[[], Any]]:
    def bind(
        arrays: Mapping[str, Any], *, threads: int = 256, l2_promotion: str = L2_PROMOTION, stream: object = None
    ) -> Callable[[], Any]:
        source, target = (_as_bits(arrays[name]) for name in NAMES)
        described = view(source)
        width = SPAN // described.dtype.itemsize
        if width * width % threads:
            raise ValueError(f"threads {threads}: the {width * width} elements of a tile do not divide among them")
        down, tiles = _tiles(described.shape, width, width)
        source_map = TensorMap(source, (width, width), swizzle=swizzle, l2_promotion=l2_promotion, store=False)
        made = make_by_columns(described.dtype.itemsize, swizzle, threads)
        return made[tiles, None, stream].bind(source_map, target, down)

    return bind


def _bind_vector(
    arrays: Mapping[str, Any],
    *,
    tile: tuple[int, int] = (2, 2),
    threads: int = 256,
    l2_promotion: str = L2_PROMOTION,
    stream: object = None,
) -> Callable[[], Any]:
    source_map, down, tiles = _source(arrays, tile, threads, l2_promotion)
    made = make_vector(source_map.element.size, tile, threads)
    return made[tiles, None, stream].bind(source_map, _as_bits(arrays["target"]), down)


def _bind_ring(
    arrays: Mapping[str, Any],
    *,
    tile: tuple[int, int] = (2, 2),
    threads: int = 256,
    stages: int = 2,
    per_multiprocessor: int = 4,
    l2_promotion: str = L2_PROMOTION,
    stream: object = None,
) -> Callable[[], Any]:
    source_map, down, tiles = _source(arrays, tile, threads, l2_promotion)
    made = make_ring(source_map.element.size, tile, threads, stages)
    launcher = made[blocks_for(tiles, per_multiprocessor), None, stream]
    return launcher.bind(source_map, _as_bits(arrays["target"]), down, np.uint32(tiles))


def _bind_store(
    arrays: Mapping[str, Any],
    *,
    tile: tuple[int, int] = (2, 1),
    threads: int = 128,
    l2_promotion: str = L2_PROMOTION,
    stream: object = None,
) -> Callable[[], Any]:
    source_map, down, tiles = _source(arrays, tile, threads, l2_promotion)
    itemsize = source_map.element.size
    target_map = TensorMap(_as_bits(arrays["target"], True), box_of(itemsize, tile[1]), swizzle="128B")
    return make_store(itemsize, tile, threads)[tiles, None, stream].bind(source_map, target_map, down)


def _source(
    arrays: Mapping[str, Any], tile: tuple[int, int], threads: int, l2_promotion: str
) -> tuple[TensorMap, np.uint32, int]:
    """The source's map, and its tiles from top to bottom and in all."""
    source = _as_bits(arrays["source"])
    described = view(source)
    itemsize = described.dtype.itemsize
    check_tile(tile, itemsize, threads)
    down, tiles = _tiles(described.shape, *(spans * SPAN // itemsize for spans in tile))
    source_map = TensorMap(source, box_of(itemsize, tile[0]), swizzle="128B", l2_promotion=l2_promotion, store=False)
    return source_map, down, tiles


def check_tile(tile: tuple[int, int], itemsize: int, threads: int) -> None:
    """See that a tile, counted in spans of 128 bytes each way, divides among the threads.

    Raises:
        ValueError: it does not, or its boxes are more than the copy engine's 256 rows.
    """
    width, count = SPAN // itemsize, squares(tile)
    if max(tile) * width > 256 or min(tile) < 1:
        raise ValueError(f"tile {tile}: the copy engine's boxes have 1 to 256 rows, so at most {256 // width} spans")
    if threads % 32 or count % threads:
        raise ValueError(f"tile {tile}: its {count} squares do not divide among {threads} threads")


OPTIONS = {
    "naive": (),
    "padded": (),
    "tma": ("threads", "l2_promotion"),
    "swizzle": ("threads", "l2_promotion"),
    "vector": ("tile", "threads", "l2_promotion"),
    "ring": ("tile", "threads", "stages", "per_multiprocessor", "l2_promotion"),
    "store": ("tile", "threads", "l2_promotion"),
}
_BY_TMA = ("tma", "swizzle", "vector", "ring", "store")


def transpose(source: Any, target: Any, *, variant: str | None = None, **options: Any) -> None:
    """target[c, r] = source[r, c].

    Args:
        source: a matrix (rows, columns) of elements of 1, 2 or 4 bytes, on a GPU or in host memory. `naive` and
            `padded` take any strides; the others need contiguous rows that start on multiples of 16 bytes
            (`numba_tma.pitched` makes such).
        target: a matrix (columns, rows) of the same element type on the same device, written. For all but `naive`,
            `padded`, `tma` and `swizzle` its rows are as the source's; `store` needs them to be whole multiples of 16
            bytes long too, since the copy engine writes no less.
        variant: naive, padded, tma, swizzle, vector, ring or store; by default the fastest that the layout allows.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, elements of another size, or an option that the variant has not.
        ValueError: shapes or element types differ, an extent of 2^31 or more, the layout does not fit the variant, or
            source and target share memory.
    """
    a, b = view(source), view(target)
    if a is None or b is None:
        raise TypeError(f"transpose of a {type(source).__name__} to a {type(target).__name__}: two arrays expected")
    if len(a.shape) != 2 or b.shape != a.shape[::-1] or a.dtype != b.dtype:
        raise ValueError(
            f"source {a.dtype} {a.shape} and target {b.dtype} {b.shape}: a matrix and one of the transposed shape and "
            f"the same dtype expected"
        )
    if a.dtype.itemsize not in BITS:
        raise TypeError(f"transpose of {a.dtype}: elements of {a.dtype.itemsize} bytes; 1, 2 and 4 are supported")
    views = {"source": a, "target": b}
    check_extents("transpose", views)
    check_written("transpose", views, "target")
    name = variant or next(name for name in ("store", "vector", "padded") if _unfit(name, a, b) is None)
    chosen = PROBLEM.variant(name)
    check_options("transpose", chosen, options, OPTIONS[name])
    unfit = _unfit(name, a, b)
    if unfit:
        raise ValueError(f"transpose.{name}: {unfit}")
    if a.size:
        chosen.bind({"source": source, "target": target}, **options)()


def _unfit(name: str, source: ArrayView, target: ArrayView) -> str | None:
    """Why a variant cannot take these matrices, or None."""
    if name not in _BY_TMA or not source.size:
        return None
    needed = {"source": source} if name in ("tma", "swizzle") else {"source": source, "target": target}
    for which, array in needed.items():
        if not aligned_rows(array):
            return (
                f"the {which} has strides {array.strides} B at address {array.pointer:#x}; rows must be contiguous and "
                f"start on multiples of 16 B: copy it with numba_tma.pitched_copy, or take variant='padded'"
            )
        by_map = which == "source" or name == "store"
        if by_map and array.shape[0] > 1 and array.strides[0] < array.shape[1] * array.dtype.itemsize:
            return (
                f"the {which}'s rows of {array.shape[1]} × {array.dtype} lie {array.strides[0]} B apart: they run "
                f"backwards or share memory, and a tensor map's cannot; copy it, or take variant='padded'"
            )
    if name == "store" and target.shape[1] * target.dtype.itemsize % CHUNK:
        return (
            f"the target's rows of {target.shape[1]} × {target.dtype} end within 16 B, and the copy engine would write "
            f"on to the next multiple: take variant='vector'"
        )
    return None


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    dtype = dtypes.lookup(case.dtype).numpy
    rows, columns = case.shape
    source = pitched((rows, columns), dtype)
    source.view(np.uint8)[...] = np.frombuffer(rng.bytes(rows * columns * dtype.itemsize), np.uint8).reshape(rows, -1)
    return {"source": source, "target": pitched((columns, rows), dtype)}


def _torch(arrays: Mapping[str, Any], **_: Any) -> Callable[[], Any] | None:
    """PyTorch's copy of the transposed view, or None: no PyTorch for CUDA here."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    source, target = (torch.as_tensor(arrays[name], device="cuda") for name in NAMES)
    return lambda: target.copy_(source.t())


def _case(rows: int, columns: int, dtype: str, tuned: Mapping[str, Mapping[str, Any]] | None = None) -> Case:
    return Case((rows, columns), dtype, {}, tuned or {})


PROBLEM = Problem(
    name="transpose",
    title="transpose a matrix through tiles in shared memory",
    inputs=_inputs,
    outputs=("target",),
    reference=lambda arrays, case: {"target": reference(arrays["source"])},
    bytes_moved=lambda case: 2 * case.shape[0] * case.shape[1] * dtypes.lookup(case.dtype).numpy.itemsize,
    flops=lambda case: 0,
    variants=(
        Variant("naive", "ld/st", "read rows, write columns", _bind_plain(make_naive), baseline=True),
        Variant("padded", "ld/st", "through a padded tile in shared memory", _bind_plain(make_padded)),
        Variant("tma", "TMA", "the copy engine fills the tile: columns in one bank", _bind_by_columns("none")),
        Variant("swizzle", "TMA", "128-byte swizzle: columns in eight banks", _bind_by_columns("128B")),
        Variant("vector", "TMA", "16 bytes an access, squares transposed in registers", _bind_vector),
        Variant("ring", "TMA", "several tiles in flight", _bind_ring),
        Variant("store", "TMA", "the copy engine writes the tile too", _bind_store),
    ),
    cases={
        ("default", "sim"): [_case(256, 384, "float16"), _case(130, 301, "int8")],
        ("quick", "sim"): [_case(70, 83, "float16"), _case(130, 301, "int8")],
        ("default", "gpu"): [
            _case(16384, 16384, "float32"),
            _case(16384, 16384, "float16"),
            _case(16384, 16384, "int8"),
            _case(1000, 3333, "float16"),
        ],
        ("quick", "gpu"): [_case(4096, 4096, "float32"), _case(1000, 3333, "float16"), _case(1000, 3333, "int8")],
    },
    peers={"torch": _torch},
)

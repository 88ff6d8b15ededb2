"""Tiles of steps 5 to 10: which one a number stands for, which keys it sees, and how O leaves the registers.

PTX ISA: "stmatrix", "cp.async.bulk.tensor".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import uint32

from ... import ptx
from ...unroll import unroll
from ...warpgroup import ROW_BYTES
from ..gemm.epilogue import make_pack
from ..gemm.warpgroup import BOX_COLUMNS, GROUP_ROWS, WARPGROUP
from .masks import Kind, make_tile_masks
from .packed import make_sequences


class Tile(NamedTuple):
    """Device functions for the tiles of `consumers` x 64 queries that a block goes through.

    place(tile, tiles_m, heads, all_heads, together)
        First row, head and batch. Tiles are gone through by `together` heads at a time, whose keys and values fit into
        the L2 cache; where rows see keys on their left alone, by length, the longest first.
    blocks(row, sq, skv, low, high)
        (first, end) of the blocks of keys, at least one.
    store(o, o_map, tile, thread, barrier, row, head, part, top, bottom)
        Multiply O's rows by `top` and `bottom`, and hand them to the copy engine through shared memory; `part` is
        `packed.Sequences`'.
    """

    place: Callable
    blocks: Callable
    store: Callable


@functools.cache
def make_tile(head_dim: int, dtype: str, kind: Kind, consumers: int, keys: int, packed: bool = False) -> Tile:
    """The functions for this type of O and this shape of tile."""
    boxes = -(-head_dim // BOX_COLUMNS)
    rows = GROUP_ROWS * consumers
    by_length = kind.right
    block_range = make_tile_masks(kind, rows, keys).block_range
    pack = make_pack(dtype)
    write = make_sequences(packed).write

    @cuda.jit(device=True, forceinline=True)
    def place(tile, tiles_m, heads, all_heads, together):
        first = uint32(tile // uint32(tiles_m * together)) * together
        within = uint32(tile - first * tiles_m)
        if by_length:
            width = min(uint32(all_heads - first), uint32(together))
            turn = uint32(within // width)
            every = uint32(first + within - turn * width)
            m = uint32(tiles_m - uint32(1) - turn)
        else:
            turn = uint32(within // tiles_m)
            m = uint32(within - turn * tiles_m)
            every = uint32(first + turn)
        batch = uint32(every // heads)
        return uint32(m * uint32(rows)), uint32(every - batch * heads), batch

    @cuda.jit(device=True, forceinline=True)
    def blocks(row, sq, skv, low, high):
        first, end = block_range(row, sq, skv, low, high)
        return first, max(end, uint32(first + uint32(1)))  # where nothing is seen, a block all of whose keys are hidden

    @cuda.jit(device=True, forceinline=True)
    def store(o, o_map, tile, thread, barrier, row, head, part, top, bottom):
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        line = uint32(ptx.shared_address(tile) + (warp * uint32(16) + lane % uint32(16)) * uint32(ROW_BYTES))
        swizzle, right = lane % uint32(8), lane // uint32(16)
        if thread == 0:
            ptx.cp_async_bulk_wait_group_read(0)  # the last tile's O has left
        ptx.bar_sync(barrier, WARPGROUP)
        for sixteenth in range(head_dim // 16):
            unroll()
            i = 8 * sixteenth
            unit = (uint32(sixteenth % 4 * 2) + right) ^ swizzle
            ptx.stmatrix_sync_x4(
                uint32(line + uint32(sixteenth // 4 * GROUP_ROWS * ROW_BYTES) + unit * uint32(16)),
                pack(o[i] * top, o[i + 1] * top),
                pack(o[i + 2] * bottom, o[i + 3] * bottom),
                pack(o[i + 4] * top, o[i + 5] * top),
                pack(o[i + 6] * bottom, o[i + 7] * bottom),
            )
        ptx.fence_proxy_async_shared_cta()
        ptx.bar_sync(barrier, WARPGROUP)
        if thread == 0:
            for box in range(boxes):
                unroll()
                start = uint32(ptx.shared_address(tile) + uint32(box * GROUP_ROWS * ROW_BYTES))
                write(o_map, 64 * box, head, row, part, start)
            ptx.cp_async_bulk_commit_group()

    return Tile(place, blocks, store)

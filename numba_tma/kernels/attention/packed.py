"""Which rows a sequence has: those of its batch, or some of many sequences packed one behind the other.

Packed, all rows of q are (total, Hq, D), those of k and v (total, Hkv, D), and sequence b has rows starts[b] to
starts[b + 1] - 1. Copies are then by `RaggedMap`s, which end where a sequence ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import int32, uint32

from ... import ptx
from ...ragged import ragged_row

_MOST = 1 << 30  # rows; sums with a window's sides stay within 31 bits


class Sequences(NamedTuple):
    """Device functions for what is a sequence's own.

    extents(batch, sq, skv, low, high, q_starts, kv_starts)
        (sq, skv, low, high, q_start, kv_start): how many queries and keys, its diagonals, and its first rows. Packed,
        the diagonals given are those of as many queries as keys.
    part(batch, start, length)
        What `load` and `write` take to find its rows.
    load(to, tensor_map, column, head, row, part, bar)
        Copy a box of one head to shared memory, whose bytes complete at `bar`.
    write(tensor_map, column, head, row, part, start)
        Copy a box of one head from shared memory; what lies behind the sequence's end stays.
    """

    extents: Callable
    part: Callable
    load: Callable
    write: Callable


@functools.cache
def make_sequences(packed: bool) -> Sequences:
    """The functions, for sequences of equal lengths or for packed ones."""
    if not packed:

        @cuda.jit(device=True, forceinline=True)
        def extents(batch, sq, skv, low, high, q_starts, kv_starts):
            return sq, skv, low, high, uint32(0), uint32(0)

        @cuda.jit(device=True, forceinline=True)
        def part(batch, start, length):
            return batch

        @cuda.jit(device=True, forceinline=True)
        def load(to, tensor_map, column, head, row, batch, bar):
            ptx.cp_async_bulk_tensor_4d_shared_global(to, tensor_map, column, head, row, batch, bar)

        @cuda.jit(device=True, forceinline=True)
        def write(tensor_map, column, head, row, batch, start):
            ptx.cp_async_bulk_tensor_4d_global_shared(tensor_map, column, head, row, batch, start)

        return Sequences(extents, part, load, write)

    @cuda.jit(device=True, forceinline=True)
    def rows_from(starts, batch, most):
        # Starts that fall or that are no rows' become the nearest ones, and so nothing is read but rows that there are.
        start = max(int32(starts[batch]), int32(0))
        end = min(int32(starts[uint32(batch + uint32(1))]), most)
        return uint32(start), uint32(int32(max(end, start) - start))

    @cuda.jit(device=True, forceinline=True)
    def packed_extents(batch, sq, skv, low, high, q_starts, kv_starts):
        # What lies behind the last row of q the maps leave out.
        q_start, queries = rows_from(q_starts, batch, int32(_MOST))
        kv_start, keys = rows_from(kv_starts, batch, int32(skv))
        ahead = int32(int32(keys) - int32(queries))  # both are aligned at their ends
        return queries, keys, int32(low + ahead), int32(high + ahead), q_start, kv_start

    @cuda.jit(device=True, forceinline=True)
    def rows_of(batch, start, length):
        return start, length

    @cuda.jit(device=True, forceinline=True)
    def load_packed(to, tensor_map, column, head, row, part, bar):
        x, y, z = ragged_row(part[0], part[1], row)
        ptx.cp_async_bulk_tensor_5d_shared_global(to, tensor_map, column, head, x, y, z, bar)

    @cuda.jit(device=True, forceinline=True)
    def write_packed(tensor_map, column, head, row, part, start):
        x, y, z = ragged_row(part[0], part[1], row)
        ptx.cp_async_bulk_tensor_5d_global_shared(tensor_map, column, head, x, y, z, start)

    return Sequences(packed_extents, rows_of, load_packed, write_packed)

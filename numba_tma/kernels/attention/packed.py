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

_MOST = 1 << 30  # rows; sums with a window's sides stay within 31 bits


class Sequences(NamedTuple):
    """Device functions for what is a sequence's own.

    extents(batch, sq, skv, low, high, q_starts, kv_starts)
        (sq, skv, low, high, q_start, kv_start): how many queries and keys, its diagonals, and its first rows. Packed,
        the diagonals given are those of as many queries as keys.
    part(batch, start, length)
        What a tile's `fetch` and `store` take to find its rows.
    """

    extents: Callable
    part: Callable


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

        return Sequences(extents, part)

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

    return Sequences(packed_extents, rows_of)

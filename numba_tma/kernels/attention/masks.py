"""Which keys a query sees, for whole tiles and for single elements of one.

Queries and keys are aligned at their ends: query i of `sq` stands beside key i + skv - sq of `skv`. A causal query sees
the keys up to that one; a window (left, right) shows it as many to either side. Both are a band of diagonals:

    query i sees key j   if   i + low <= j <= i + high,   low = skv - sq - left,   high = skv - sq + right

Whether a side is bounded at all is known to the compiler; where it is bounded is an argument, so that windows of all
widths share one kernel. `-1` stands for an unbounded side, as in FlashAttention's interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda.types import int32, uint32

UNBOUNDED = -1
MOST_KEYS = 1 << 30  # keys to a side; sums with rows and keys stay within 31 bits


@dataclass(frozen=True)
class Band:
    """How many keys a query sees on either side of the one beside it; `UNBOUNDED` is all of them."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED

    @staticmethod
    def of(causal: bool = False, window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)) -> Band:
        """The band of a causal mask, of a sliding window, or of both.

        Raises:
            ValueError: the window is no pair of numbers from -1 on.
        """
        sides = tuple(window) if isinstance(window, Sequence) and not isinstance(window, str) else ()
        if len(sides) != 2 or not all(isinstance(n, (int, np.integer)) and n >= UNBOUNDED for n in sides):
            raise ValueError(
                f"window {window!r}: expected (left, right), the keys seen before and behind the query's own place; "
                f"-1 for all"
            )
        left, right = (min(int(n), MOST_KEYS) for n in sides)
        return Band(left, 0 if causal else right)

    @property
    def kind(self) -> Kind:
        """Which sides are bounded: what a kernel is made for."""
        return Kind(self.left != UNBOUNDED, self.right != UNBOUNDED)

    def diagonals(self, sq: int, skv: int) -> tuple[np.int32, np.int32]:
        """`low` and `high` of the band: what a kernel of this kind is given. Unbounded sides are not looked at."""
        return np.int32(skv - sq - self.left), np.int32(skv - sq + self.right)

    def visible(self, sq: int, skv: int) -> np.ndarray:
        """The whole mask, bool (sq, skv): what the device functions below must agree with."""
        offset = np.arange(skv) - np.arange(sq)[:, None] - (skv - sq)
        seen = np.ones((sq, skv), bool)
        if self.left != UNBOUNDED:
            seen &= offset >= -self.left
        if self.right != UNBOUNDED:
            seen &= offset <= self.right
        return seen


class Kind(NamedTuple):
    """Which sides of a band are bounded."""

    left: bool
    right: bool


class TileMasks(NamedTuple):
    """Device functions for tiles of `rows` queries x `columns` keys; `first_row` is a tile's first query.

    block_range(first_row, sq, skv, low, high)
        (first, end): the blocks of keys from `first` on and before `end` hold all that the tile's queries see. Equal
        where they see none.
    full_range(first_row, first, end, skv, low, high)
        (first_full, end_full): of the blocks of such a range, those which every query of the tile sees wholly; the
        others need the mask. `first <= first_full <= end_full <= end`. Queries behind the last one count too.
    row_range(row, skv, low, high)
        (first, end): the keys that one query sees, int32; `end` may lie before `first`, where it sees none.
    sees(key, first, end)
        Whether a key, int32, lies in the range of a query. Taken relative to the first key of a block, all three turn
        the key of an accumulator's element into a constant.

    Blocks come as uint32; rows and extents are taken as uint32, `low` and `high` as int32.
    """

    block_range: Callable
    full_range: Callable
    row_range: Callable
    sees: Callable


def make_tile_masks(kind: Kind, rows: int, columns: int) -> TileMasks:
    """The device functions of a kind of band, for tiles of `rows` queries and `columns` keys."""

    @cuda.jit(device=True, forceinline=True)
    def block_range(first_row, sq, skv, low, high):
        start, end = int32(0), int32(skv)
        if kind.right:
            last_row = int32(min(int32(int32(first_row) + int32(rows)), int32(sq)) - int32(1))
            end = min(end, int32(int32(last_row + high) + int32(1)))
        if kind.left:
            start = max(start, int32(int32(first_row) + low))
        if end <= start:
            return uint32(0), uint32(0)
        return uint32(start) // uint32(columns), uint32(uint32(end) + uint32(columns - 1)) // uint32(columns)

    @cuda.jit(device=True, forceinline=True)
    def full_range(first_row, first, end, skv, low, high):
        first_full, end_full = first, uint32(uint32(skv) // uint32(columns))
        if kind.right:
            seen_by_first_row = max(int32(int32(int32(first_row) + high) + int32(1)), int32(0))
            end_full = min(end_full, uint32(seen_by_first_row) // uint32(columns))
        end_full = max(min(end_full, end), first)
        if kind.left:
            last_row = int32(int32(first_row) + int32(rows - 1))
            start = uint32(max(int32(last_row + low), int32(0)))
            first_full = max(first, uint32(uint32(start + uint32(columns - 1)) // uint32(columns)))
        return min(first_full, end_full), end_full

    @cuda.jit(device=True, forceinline=True)
    def row_range(row, skv, low, high):
        first, end = int32(0), int32(skv)
        if kind.right:
            end = min(end, int32(int32(int32(row) + high) + int32(1)))
        if kind.left:
            first = int32(int32(row) + low)
        return first, end

    @cuda.jit(device=True, forceinline=True)
    def sees(key, first, end):
        if kind.left:
            return first <= key and key < end
        return key < end

    return TileMasks(block_range, full_range, row_range, sees)

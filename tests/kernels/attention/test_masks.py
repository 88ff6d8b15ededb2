"""Masks on the device, put together as a kernel does, against the whole mask that NumPy makes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import int32, uint8, uint32

from numba_tma import kernel
from numba_tma.kernels.attention.masks import UNBOUNDED, Band, Kind, make_tile_masks

ROWS, COLUMNS = 16, 8
KINDS = [Kind(*sides) for sides in itertools.product((False, True), repeat=2)]


def make_paint(kind):
    masks = make_tile_masks(kind, ROWS, COLUMNS)

    @kernel(threads=ROWS)
    def paint(seen, ranges, low, high):
        """A block a tile of queries, a thread a query: 1 where a key is seen, by the cheapest way to know it."""
        tile, sq, skv = uint32(cuda.blockIdx.x), uint32(seen.shape[0]), uint32(seen.shape[1])
        first_row = uint32(tile * uint32(ROWS))
        row = uint32(first_row + cuda.threadIdx.x)
        first, end = masks.block_range(first_row, sq, skv, low, high)
        first_full, end_full = masks.full_range(first_row, first, end, skv, low, high)
        if cuda.threadIdx.x == 0:
            ranges[tile, 0], ranges[tile, 1], ranges[tile, 2], ranges[tile, 3] = first, end, first_full, end_full
        start, stop = masks.row_range(row, skv, low, high)
        if row < sq:
            for block in range(first, end):
                for i in range(COLUMNS):
                    key = uint32(uint32(block) * uint32(COLUMNS) + uint32(i))
                    if first_full <= block and block < end_full or masks.sees(int32(key), start, stop):
                        seen[row, key] = uint8(1)

    return paint


def blocks_of(seen, whole):
    """Indices of the blocks of keys of which a tile's queries see something, or all."""
    padded = np.zeros((len(seen), -(-seen.shape[1] // COLUMNS) * COLUMNS), bool)
    padded[:, : seen.shape[1]] = seen
    by_block = padded.reshape(len(seen), -1, COLUMNS)
    return np.flatnonzero(by_block.all((0, 2)) if whole else by_block.any((0, 2)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_tiles_are_visited_and_masked_as_they_must(kind, rng, in_simulator):
    paint = make_paint(kind)
    for _ in range(8):
        sq, skv = (int(n) for n in rng.integers(1, 90, 2))
        left, right = (int(rng.integers(0, 60)) if bounded else UNBOUNDED for bounded in kind)
        band = Band(left, right)
        expected = band.visible(sq, skv)
        tiles = -(-sq // ROWS)
        seen, ranges = np.zeros((sq, skv), np.uint8), np.zeros((tiles, 4), np.uint32)
        paint[tiles](seen, ranges, *band.diagonals(sq, skv))
        np.testing.assert_array_equal(seen, expected, err_msg=f"{sq} queries, {skv} keys, {band}")
        for tile, (first, end, first_full, end_full) in enumerate(ranges):
            queries = slice(tile * ROWS, (tile + 1) * ROWS)
            assert first <= first_full <= end_full <= end
            # Queries behind the last one count as any other, so whole blocks are found with them.
            with_all = band.visible(tiles * ROWS, skv + tiles * ROWS - sq)[queries, :skv]
            assert {*blocks_of(with_all, whole=True)} == {*range(first_full, end_full)}
            visited = blocks_of(expected[queries], whole=False)
            assert [*visited] == [*range(first, end)]


def test_a_window_is_a_pair_and_causal_bounds_its_right():
    assert Band.of() == Band(UNBOUNDED, UNBOUNDED)
    assert Band.of(causal=True, window=(7, 3)) == Band(7, 0)
    assert Band.of(window=(-1, 4)).kind == (False, True)
    np.testing.assert_array_equal(Band.of(causal=True).visible(2, 3), [[1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(Band.of(causal=True).visible(3, 2), [[0, 0], [1, 0], [1, 1]])
    for window in ((1,), (1, -2), (0.5, 1)):
        with pytest.raises(ValueError, match="-1 for all"):
            Band.of(window=window)

"""Which blocks of keys a tile of queries walks along under a causal mask: the limits are the device functions' own."""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda.types import uint32

from ..kernels.attention.masks import Band, make_tile_masks
from ..kernels.gemm.warpgroup import GROUP_ROWS
from ..launch import kernel, use_backend
from .svg import Picture

SQ, SKV = 384, 840
GROUPS, KEYS = 2, 128
ROWS = GROUP_ROWS * GROUPS
BAND = Band.of(causal=True)
_CELL = 92  # pixels of a block of keys, and of a tile
_masks = make_tile_masks(BAND.kind, ROWS, KEYS)


@kernel(threads=32)
def _limits(found, sq, skv, low, high):
    tile = uint32(cuda.threadIdx.x)
    if tile < found.shape[0]:
        row = uint32(tile * uint32(ROWS))
        first, end = _masks.block_range(row, sq, skv, low, high)
        first_full, end_full = _masks.full_range(row, first, end, skv, low, high)
        found[tile, 0], found[tile, 1], found[tile, 2], found[tile, 3] = first, first_full, end_full, end


def limits(sq: int, skv: int) -> np.ndarray:
    """(first, first_full, end_full, end) of the blocks of keys of each tile of queries, by the simulator: uint32."""
    found = np.zeros((-(-sq // ROWS), 4), np.uint32)
    with use_backend("sim"):
        _limits[1](found, np.uint32(sq), np.uint32(skv), *BAND.diagonals(sq, skv))
    return found


def walk(first: int, first_full: int, end_full: int, end: int) -> list[tuple[int, bool]]:
    """Blocks of keys in the order in which `make_overlapped` comes to them, and whether it masks them."""
    blocks = range(end - 1, first - 1, -1)
    return [(block, block == end - 1 or not first_full <= block < end_full) for block in blocks]


def draw() -> str:
    """The picture."""
    found = limits(SQ, SKV)
    tiles, blocks = len(found), -(-SKV // KEYS)
    left, top, scale = 132, 112, _CELL / KEYS
    picture = Picture(
        860,
        top + tiles * _CELL + 46,
        "Blocks of keys under a causal mask",
        f"{SQ} queries against {SKV} keys. Each tile of {ROWS} queries walks backwards along blocks of {KEYS} keys: "
        "blocks beyond the diagonal are skipped, those that it crosses are masked and come first, others are whole.",
    )
    picture.text(24, 34, "A causal mask, block by block", "ink head")
    shape = f"{SQ} queries and {SKV} keys, aligned at their ends: query i sees the keys up to i + {SKV - SQ}."
    picture.text(24, 54, shape, "muted")
    picture.text(836, 54, f"tiles of {ROWS} queries, blocks of {KEYS} keys", "muted", "end")
    kinds = [("c2", "masked"), ("c1", "whole: no mask"), ("empty", "skipped, not fetched")]
    picture.legend(24, 78, kinds)
    picture.text(836, 78, "numbers: the order of the walk", "muted", "end")
    picture.text(24, top - 8, "queries, a warpgroup", "muted small")
    picture.text(left + SKV * scale + 10, top - 8, "keys", "muted small")
    for block in range(blocks):
        right = min((block + 1) * KEYS, SKV)
        middle = left + (block * KEYS + right) / 2 * scale
        picture.text(middle, top - 8, f"{block * KEYS}–{right - 1}", "muted small", "middle")
    for tile, numbers in enumerate(found.tolist()):
        _tile(picture, left, top, tile, numbers, blocks)
    seen = BAND.visible(SQ, SKV).sum(axis=1)
    edge = [(left + n * scale, top + (row + i) * scale) for row, n in enumerate(seen.tolist()) for i in (0, 1)]
    picture.line([(left, top), *edge, (left, top + SQ * scale), (left, top)], "frame")
    computed = sum(len(walk(*numbers)) for numbers in found.tolist()) * ROWS * KEYS
    share = seen.sum() / computed
    words = f"Framed: what queries see, {share:.0%} of the scores that are computed."
    picture.text(left, top + SQ * scale + 26, words, "muted")
    return picture.svg()


def _tile(picture: Picture, left: float, top: float, tile: int, numbers: list[int], blocks: int) -> None:
    scale = _CELL / KEYS
    y, height = top + tile * ROWS * scale, ROWS * scale
    for group in range(GROUPS):
        start = tile * ROWS + group * GROUP_ROWS
        picture.text(24, y + (group + 0.5) * GROUP_ROWS * scale + 4, f"{start}–{start + GROUP_ROWS - 1}", "muted small")
    middle = y + height / 2
    order = {block: (turn, masked) for turn, (block, masked) in enumerate(walk(*numbers), 1)}
    for block in range(blocks):
        x, width = left + block * KEYS * scale, (min((block + 1) * KEYS, SKV) - block * KEYS) * scale
        turn, masked = order.get(block, (0, False))
        picture.rect(x + 1, y + 1, width - 2, height - 2, "empty" if not turn else "c2" if masked else "c1", 4)
        picture.line([(x + 1, middle), (x + width - 1, middle)], "edge dashed")
        if turn:
            picture.text(x + width / 2, middle + 5, f"{turn}", "ink head", "middle")

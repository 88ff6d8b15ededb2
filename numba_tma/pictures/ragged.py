"""What a `RaggedMap` lets a copy see: boxes are copied by the simulator, and what landed is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numba import cuda, float32

from .. import ptx
from ..launch import kernel, use_backend
from ..pipeline import mbarrier_wait
from ..ragged import RaggedMap, ragged_row
from ..shared import Barriers, Shared, Tiles
from .svg import Picture

LENGTHS = (6, 3, 5)  # rows of each sequence
ROWS, COLUMNS = 4, 4  # of a box
_EDGE = 1 << 30
_HEIGHT = 22
_TINTS = ("c0", "c2", "c4")
_smem = Shared(tile=Tiles(1, (ROWS, COLUMNS), float32), full=Barriers(1))


@kernel(threads=32, shared=_smem)
def _load(x_map, start, length, row, out, coordinates):
    thread = cuda.threadIdx.x
    x, y, z = ragged_row(start, length, row)
    if thread == 0:
        coordinates[0], coordinates[1], coordinates[2] = x, y, z
        ptx.mbarrier_init(_smem.full[0], 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_arrive_expect_tx(_smem.full[0], x_map.box_bytes)
        ptx.cp_async_bulk_tensor_4d_shared_global(_smem.tile[0], x_map, 0, x, y, z, _smem.full[0])
    cuda.syncthreads()
    mbarrier_wait(_smem.full[0], 0)
    if thread < ROWS:
        out[thread] = _smem.tile[0][thread, 0]


@dataclass(frozen=True)
class Copy:
    """A box from row `row` of the sequence that has `length` rows from row `start` on.

    `landed` is what the first element of each of its rows is in shared memory; `x`, `y` and `z` are its coordinates.
    """

    sequence: int
    start: int
    length: int
    row: int
    x: int
    y: int
    z: int
    landed: tuple[float, ...]


def copies(array: np.ndarray, lengths: tuple[int, ...]) -> Iterator[Copy]:
    """All boxes of all sequences, whose rows lie one behind the other in the float32 `array`, (rows, 4)."""
    x_map = RaggedMap(array, _smem.tile.shape)
    start = 0
    for sequence, length in enumerate(lengths):
        for row in range(0, length, ROWS):
            out, coordinates = np.empty(ROWS, np.float32), np.empty(3, np.uint32)
            with use_backend("sim"):
                _load[1](x_map, np.uint32(start), np.uint32(length), np.uint32(row), out, coordinates)
            yield Copy(sequence, start, length, row, *coordinates.tolist(), tuple(out.tolist()))
        start += length


def draw() -> str:
    """The picture."""
    rows = sum(LENGTHS)
    array = np.repeat(np.arange(1, rows + 1, dtype=np.float32)[:, None], COLUMNS, axis=1)
    left, top = 132, 132
    windows, apart = left + 150, 190
    bottom = top + (rows + ROWS - 1) * _HEIGHT
    picture = Picture(
        860,
        bottom + 26,
        "One tensor map for sequences of any lengths",
        "Rows of three sequences in memory, one behind the other, and for each sequence the window that the map shows "
        "a copy: 2 to the 30 rows that end where the sequence ends. Rows of a box behind that end arrive as zeros.",
    )
    picture.text(24, 34, "What a RaggedMap lets a copy see", "ink head")
    picture.text(
        24,
        54,
        f"Boxes of {ROWS} rows. The address of (x, y, z) is first + x · S + y · S + z · (2³⁴ − S), where S is a row's "
        "bytes:",
        "muted",
    )
    picture.text(
        24,
        70,
        "with z = 2³⁰ and modulo 2⁶⁴ that of row x + y − 2³⁰. x has an extent of 2³⁰, so y says where the window ends.",
        "muted",
    )
    picture.text(left, top - 12, "memory", "ink bold")
    for row in range(rows):
        sequence = int(np.searchsorted(np.cumsum(LENGTHS), row, side="right"))
        _row(picture, left, top + row * _HEIGHT, 110, f"row {row}", _TINTS[sequence])
    start = 0
    for sequence, length in enumerate(LENGTHS):
        picture.text(24, top + (start + length / 2) * _HEIGHT + 4, f"sequence {sequence}", "ink")
        _window(picture, windows + sequence * apart, top, start + length, sequence)
        start += length
    picture.text(24, top + (rows + 1.5) * _HEIGHT, "What lies behind a window's end is", "muted")
    picture.text(24, top + (rows + 2.3) * _HEIGHT, "zeros to a load, nothing to a store.", "muted")
    for copy in copies(array, LENGTHS):
        _box(picture, windows + copy.sequence * apart, top, copy)
    return picture.svg()


def _window(picture: Picture, x: float, top: float, end: int, sequence: int) -> None:
    """Where a sequence's window ends, and that it begins far above."""
    y = top + end * _HEIGHT
    picture.text(x, top - 28, f"sequence {sequence}'s window:", "ink bold")
    picture.text(x, top - 12, f"y = {end}; x = 0 lies 2³⁰ rows above", "muted small")
    picture.line([(x + 4, top - 6), (x + 4, y)], "tma line dashed")
    picture.line([(x, y), (x + 160, y)], "limit")
    picture.text(x + 160, y + 12, "x = 2³⁰", "warning small", "end")


def _box(picture: Picture, x: float, top: float, copy: Copy) -> None:
    """A box at the rows of memory that it would cover, with what landed."""
    y = top + (copy.start + copy.row) * _HEIGHT
    for row, value in enumerate(copy.landed):
        inside = bool(value)
        words = f"row {value - 1:.0f}" if inside else "zeros"
        _row(picture, x + 12, y + row * _HEIGHT, 62, words, _TINTS[copy.sequence] if inside else "empty", inside)
    picture.rect(x + 11.5, y - 0.5, 62, ROWS * _HEIGHT, "frame", 3)
    picture.text(x + 82, y + 14, f"x = 2³⁰ − {_EDGE - copy.x}", "muted small")


def _row(picture: Picture, x: float, y: float, width: float, words: str, tint: str, inside: bool = True) -> None:
    picture.rect(x, y, width - 1, _HEIGHT - 1, tint, 2)
    picture.text(x + width / 2, y + 15, words, "ink small" if inside else "warning small", "middle")

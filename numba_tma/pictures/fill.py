"""What a load gives for the part of a box that lies outside the array: a kernel is run, and what landed is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import cuda, float32

from .. import ptx
from ..launch import kernel, use_backend
from ..pipeline import mbarrier_wait
from ..shared import Barriers, Shared, Tiles
from ..tensor_map import TensorMap
from .svg import Picture

ROWS, COLUMNS = 6, 8
_CELL, _HEIGHT = 30, 20  # of a number in the picture
_smem = Shared(tile=Tiles(1, (ROWS, COLUMNS), float32), full=Barriers(1))


@dataclass(frozen=True)
class Box:
    """A box of 6 × 8 elements: where it begins in the array, what is asked for outside, and its colour."""

    name: str
    row: int
    column: int
    fill: str
    tint: str

    def covers(self, row: int, column: int) -> bool:
        """Whether an element of the array lies in it."""
        return self.row <= row < self.row + ROWS and self.column <= column < self.column + COLUMNS


@kernel(threads=32, shared=_smem)
def _load(x_map, column, row, out):
    thread = cuda.threadIdx.x
    if thread == 0:
        ptx.mbarrier_init(_smem.full[0], 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_arrive_expect_tx(_smem.full[0], x_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(_smem.tile[0], x_map, column, row, _smem.full[0])
    cuda.syncthreads()
    mbarrier_wait(_smem.full[0], 0)
    if thread < COLUMNS:
        for i in range(ROWS):
            out[i, thread] = _smem.tile[0][i, thread]


def landed(array: np.ndarray, column: int, row: int, fill: str) -> np.ndarray:
    """What the box at (row, column) of the float32 `array` holds in shared memory, by the simulator: (6, 8) float32."""
    out = np.empty((ROWS, COLUMNS), np.float32)
    with use_backend("sim"):
        _load[1](TensorMap(array, _smem.tile, fill=fill), np.int32(column), np.int32(row), out)
    return out


def draw() -> str:
    """The picture."""
    array = np.add.outer(20 * np.arange(8), np.arange(16)).astype(np.float32) + 100
    boxes = [Box("A", 0, 4, "zero", "c0"), Box("B", 4, 12, "zero", "c2"), Box("C", -2, -4, "nan", "c4")]
    picture = Picture(
        860,
        542,
        "What lies outside the array arrives as zeros or NaN",
        "An array of 8 by 16 numbers with three boxes of 6 by 8: one inside, one over its lower right corner, one that "
        "begins before its first element. Below it what each load wrote to shared memory.",
    )
    picture.text(24, 34, "Boxes over the edge", "ink head")
    nbytes = ROWS * COLUMNS * array.itemsize
    picture.text(
        24,
        54,
        f"An array of {array.shape[0]} × {array.shape[1]} float32 and three boxes of {ROWS} × {COLUMNS}. Each load "
        f"credits its barrier with {nbytes} bytes, whatever lies outside.",
        "muted",
    )
    _array(picture, 70, 96, array, boxes)
    for index, box in enumerate(boxes):
        _landing(picture, 24 + index * 286, 398, array, box)
    return picture.svg()


def _array(picture: Picture, x: float, y: float, array: np.ndarray, boxes: list[Box]) -> None:
    """The array, its boxes drawn around it; room for four columns and two rows is left before its first element."""
    left, top = x + 4 * _CELL, y + 2 * _HEIGHT
    for (row, column), value in np.ndenumerate(array):
        tint = next((box.tint for box in boxes if box.covers(row, column)), "empty")
        _number(picture, left + column * _CELL, top + row * _HEIGHT, value, tint)
    for box in boxes:
        at = left + box.column * _CELL - 0.5, top + box.row * _HEIGHT - 0.5
        picture.rect(*at, COLUMNS * _CELL, ROWS * _HEIGHT, "frame", 3)
        below = box.row + ROWS > array.shape[0]
        label = at[1] + (ROWS * _HEIGHT + 15 if below else -6)
        picture.text(at[0] + 2, label, f"{box.name}: row {box.row}, column {box.column}", "ink bold")


def _landing(picture: Picture, x: float, y: float, array: np.ndarray, box: Box) -> None:
    """What the box at its place in the array holds in shared memory."""
    picture.text(x, y - 10, f"{box.name} in shared memory, fill={box.fill!r}", "ink bold")
    for (row, column), value in np.ndenumerate(landed(array, box.column, box.row, box.fill)):
        inside = 0 <= box.row + row < array.shape[0] and 0 <= box.column + column < array.shape[1]
        tint, ink = (box.tint, "ink") if inside else ("empty", "warning bold")
        _number(picture, x + column * _CELL, y + row * _HEIGHT, value, tint, ink)


def _number(picture: Picture, x: float, y: float, value: float, tint: str, ink: str = "ink") -> None:
    picture.rect(x, y, _CELL - 1, _HEIGHT - 1, tint, 2)
    text = "NaN" if np.isnan(value) else f"{value:.0f}"
    picture.text(x + _CELL / 2 - 0.5, y + 14, text, f"{ink} small", "middle")

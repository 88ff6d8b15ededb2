"""How a box lies in shared memory under each swizzle, and what reading it costs in bank conflicts."""

from __future__ import annotations

import numpy as np

from ..sim import tensor
from ..sim.descriptor import DataType, Descriptor, Swizzle
from .svg import Picture

BANKS = 32
WORD = 4  # bytes of a bank's word
LINE = BANKS * WORD
CHUNK = tensor.CHUNK
_ROWS = 32


def box(row_bytes: int, swizzle: Swizzle) -> Descriptor:
    """A box of 32 rows of fp16, `row_bytes` wide."""
    columns = row_bytes // 2
    return Descriptor(
        DataType.FLOAT16, 0, sizes=(columns, _ROWS), strides=(row_bytes,), box=(columns, _ROWS), swizzle=swizzle
    )


def places(row_bytes: int, swizzle: Swizzle) -> np.ndarray:
    """Shared addresses of the box's 16-byte chunks, from a tile that begins at 0: an array (row, chunk)."""
    geometry = tensor.geometry(box(row_bytes, swizzle))
    return tensor.shared_addresses(0, geometry, tensor.whole(geometry)).reshape(_ROWS, row_bytes // CHUNK)


def passes(addresses: np.ndarray, nbytes: int) -> int:
    """How often shared memory is accessed for reading `nbytes` at each address: a bank gives one word at a time.

    1 is free of conflicts for accesses of 128 bytes in all.
    """
    words = np.unique(addresses[:, None] // WORD + np.arange(nbytes // WORD))
    return int(np.bincount(words % BANKS).max())


def costs(row_bytes: int, swizzle: Swizzle) -> tuple[int, int]:
    """Passes for 16 bytes of eight rows, as ldmatrix reads; and for four bytes of 32 rows, a thread each."""
    chunks = places(row_bytes, swizzle)
    return passes(chunks[:8, 0], CHUNK), passes(chunks[:, 0], WORD)


def draw() -> str:
    """The picture."""
    kinds = [(128, Swizzle.NONE), (128, Swizzle.B128), (64, Swizzle.B64), (32, Swizzle.B32)]
    picture = Picture(
        860,
        686,
        "A tile in shared memory under each swizzle",
        "Four grids of eight lines of 128 bytes. Without swizzle the first 16 bytes of every row lie in the same four "
        "banks. Under a swizzle they change places from line to line, so that reading down a column meets other banks.",
    )
    picture.text(24, 34, "Where TMA puts the rows of a tile", "ink head")
    picture.text(
        24,
        54,
        "Eight lines of 128 bytes of shared memory. A cell is 16 bytes: a row of the tile, and a letter for its place "
        "in that row. Column a is framed.",
        "muted",
    )
    for index, (row_bytes, swizzle) in enumerate(kinds):
        _panel(picture, 24 + index % 2 * 420, 92 + index // 2 * 312, row_bytes, swizzle)
    return picture.svg()


def _panel(picture: Picture, x: float, y: float, row_bytes: int, swizzle: Swizzle) -> None:
    cell, height, left = 42, 24, 34
    title = "no swizzle" if swizzle == Swizzle.NONE else f"swizzle {swizzle.span}B"
    picture.text(x, y, title, "ink head")
    picture.text(x + left + 8 * cell, y, f"rows of {row_bytes} bytes", "muted", "end")
    x += left
    for column in range(8):
        middle = x + (column + 0.5) * cell
        picture.text(middle, y + 20, f"{4 * column}–{4 * column + 3}", "muted small", "middle")
    picture.text(x - 6, y + 20, "bank", "muted small", "end")
    chunks = places(row_bytes, swizzle)
    top = y + 27
    framed = []
    for (row, column), address in np.ndenumerate(chunks):
        line, offset = divmod(int(address), LINE)
        if line >= 8:
            continue
        place = x + offset // CHUNK * cell, top + line * height
        picture.rect(*place, cell - 1, height - 1, f"c{column}", 2)
        picture.text(place[0] + cell / 2 - 0.5, place[1] + 16, f"{row}{'abcdefgh'[column]}", "ink mono", "middle")
        if column == 0:
            framed.append(place)
    for place in framed:
        picture.rect(place[0] - 0.5, place[1] - 0.5, cell, height, "frame", 3)
    for line in range(8):
        picture.text(x - 6, top + line * height + 16, f"{line * LINE}", "muted small", "end")
    plain = costs(row_bytes, Swizzle.NONE)
    below = top + 8 * height + 20
    reads = ("8 rows × 16 bytes (ldmatrix)", "32 rows × 4 bytes (a column)")
    for index, (what, count, before) in enumerate(zip(reads, costs(row_bytes, swizzle), plain, strict=True)):
        y = below + 18 * index
        picture.text(x, y, what, "muted")
        without = "" if swizzle == Swizzle.NONE else f", not {before}"
        picture.text(x + 8 * cell, y, f"{count} pass{'es' if count > 1 else ''}{without}", "ink bold", "end")

"""The arithmetic of im2col copies: which pixels a walk meets, and where their channels lie.

Pure functions, as in `tensor`; dimensions are counted innermost first: channels, width, (height, depth,) images. A walk
goes through the bounding box in that order, by the element strides, from the copy's coordinates on; at the end of the
box it goes on in the next image. The offsets move each pixel after that, and one that then lies outside the tensor
arrives as the fill.

Source: PTX ISA, "Im2col mode"; CUDA Driver API, ``cuTensorMapEncodeIm2col``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .descriptor import OFFSET_LIMITS, DataType, Descriptor, Swizzle
from .errors import OutOfBounds
from .tensor import Geometry, Window, clip


@dataclass(frozen=True)
class Run:
    """Pixels of a walk that lie beside each other in the width and inside the tensor.

    `pixel` is the first one's number in the walk. `address`, `shape` and `strides` (bytes) describe the uint8 array of
    their channels; `first` is the first byte of a pixel's place that they fill.
    """

    pixel: int
    first: int
    address: int
    shape: tuple[int, int]
    strides: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes from `address` to the end of the last pixel's."""
        return (self.shape[0] - 1) * self.strides[0] + self.shape[1]

    def of(self, view: np.ndarray) -> np.ndarray:
        """The run as an array on `view`, the `nbytes` bytes from `address` on."""
        return np.ndarray(self.shape, np.uint8, view, 0, self.strides)


@lru_cache(maxsize=256)
def geometry(desc: Descriptor) -> Geometry:
    """The geometry of a copy: a row of channels for each pixel."""
    size = DataType(desc.dtype).nbytes
    channels, pixels = desc.box
    row = channels * size
    pitch = row if desc.swizzle == Swizzle.NONE else max(row, Swizzle(desc.swizzle).span)
    return Geometry(size, (channels, pixels), (size, 0), row, pitch, pixels, pixels * row, desc.swizzle)


def walk(desc: Descriptor, coords: tuple[int, ...], offsets: tuple[int, ...]) -> list[Run]:
    """The runs of the walk that begins at `coords`, moved by `offsets`.

    Raises:
        OutOfBounds: it begins outside the bounding box, or an offset is more than an instruction holds.
    """
    spatial = range(1, desc.rank - 1)
    low = {d: desc.lower[d - 1] for d in spatial}
    high = {d: desc.sizes[d] - 1 + desc.upper[d - 1] for d in spatial}
    for d in spatial:
        if not low[d] <= coords[d] <= high[d]:
            raise OutOfBounds(
                f"an im2col copy begins at {coords[d]} in dimension {d}, outside the bounding box, {low[d]} to "
                f"{high[d]}; begin at lower corner + output position · stride, and give the tap as an offset"
            )
        if offsets[d - 1] > OFFSET_LIMITS[desc.rank]:
            raise OutOfBounds(
                f"an im2col copy's offset of {offsets[d - 1]} in dimension {d}; with {desc.rank} dimensions "
                f"machine code keeps 0 to {OFFSET_LIMITS[desc.rank]}"
            )
    size = DataType(desc.dtype).nbytes
    channels, pixels = desc.box
    first, last = clip(coords[0], 1, channels, desc.sizes[0])
    steps = desc.element_strides
    position = list(coords)
    runs, pixel = [], 0
    while pixel < pixels:
        count = min(pixels - pixel, (high[1] - position[1]) // steps[1] + 1)
        moved = [position[0] + first, *(position[d] + offsets[d - 1] for d in spatial), position[-1]]
        begin, end = clip(moved[1], steps[1], count, desc.sizes[1])
        outer = all(0 <= moved[d] < desc.sizes[d] for d in range(2, desc.rank))
        if outer and end > begin and last > first:
            moved[1] += begin * steps[1]
            address = desc.address + moved[0] * size
            address += sum(moved[d] * desc.strides[d - 1] for d in range(1, desc.rank))
            shape = end - begin, (last - first) * size
            runs.append(Run(pixel + begin, first * size, address, shape, (steps[1] * desc.strides[0], 1)))
        pixel += count
        position[1] = low[1]
        for d in range(2, desc.rank):
            if d == desc.rank - 1:
                position[d] += 1
                break
            position[d] += steps[d]
            if position[d] <= high[d]:
                break
            position[d] = low[d]
    return runs


def put(payload: np.ndarray, window: Window, run: Run, data: np.ndarray) -> None:
    """Write what of `data`, the run's bytes, belongs to `window`, a range of pixels or of one pixel's bytes."""
    start, count = window.start[1], window.count[1]
    begin, end = max(run.pixel, start), min(run.pixel + run.shape[0], start + count)
    if end <= begin:
        return
    width = payload.shape[-1]
    left = window.start[0] * (width // window.count[0])
    low, high = max(run.first, left), min(run.first + run.shape[1], left + width)
    if high > low:
        rows = data[begin - run.pixel : end - run.pixel, low - run.first : high - run.first]
        payload[begin - start : end - start, low - left : high - left] = rows

"""Arrays whose rows start at multiples of 16 bytes, as tensor maps need them, whatever their length.

The rows' ends are padding: `pitched((128, 1733), "float32")` is a view of 128 × 1733 elements into
128 × 1736. A tensor store through a map of it writes into that padding, which `TensorMap(…, store="padding")` allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arrays, dtypes


def pitched(shape: Sequence[int], dtype: object, *, empty: Callable[..., Any] = np.empty, alignment: int = 16) -> Any:
    """An array of `shape` with undefined contents, each of its rows starting at a multiple of `alignment`
    bytes; another library's array starts where its allocator puts it (on a GPU at a multiple of 256).

    Args:
        shape: extents, slowest dimension first; the last one is the rows'.
        dtype: what `empty` takes for its dtype, and `dtypes.lookup` too.
        empty: allocator, called as `empty(shape, dtype=dtype)`: numpy.empty, cupy.empty,
            numba.cuda.device_array, functools.partial(torch.empty, device="cuda"), …
        alignment: in bytes.

    Raises:
        TypeError: not an element type of the table.
        ValueError: alignment no multiple of the element's size, or no dimensions.
    """
    element = dtypes.lookup(dtype)
    if not shape:
        raise ValueError("pitched(()): an array without dimensions has no rows")
    if alignment < 1 or alignment % element.size:
        raise ValueError(
            f"alignment of {alignment} B: it must be a multiple of the {element.size} B of a {element} element"
        )
    multiple = alignment // element.size
    columns = shape[-1]
    padded = (*shape[:-1], -(-columns // multiple) * multiple)
    if empty is np.empty:
        return _aligned(padded, element.numpy, alignment)[..., :columns]
    return empty(padded, dtype=dtype)[..., :columns]


def _aligned(shape: Sequence[int], dtype: np.dtype, alignment: int) -> np.ndarray:
    """A NumPy array that starts at a multiple of `alignment` bytes, which NumPy itself promises for 16 at most."""
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def pitched_like(array: Any, *, empty: Callable[..., Any] = np.empty, alignment: int = 16) -> Any:
    """An array of `array`'s shape and type, as `pitched` makes it; contents undefined."""
    return pitched(tuple(array.shape), array.dtype, empty=empty, alignment=alignment)


def pitched_copy(array: Any, *, empty: Callable[..., Any] = np.empty, alignment: int = 16) -> Any:
    """A copy of `array` as `pitched` makes it; for a device array, `empty` is its library's allocator."""
    copy = pitched_like(array, empty=empty, alignment=alignment)
    copy[...] = array
    return copy


def is_pitched(array: Any, alignment: int = 16) -> bool:
    """Whether all of an array's rows start at multiples of `alignment` bytes (its own start included)."""
    view = arrays.view(array)
    if view is None:
        raise TypeError(f"{type(array).__name__} is not an array")
    steps = [s for s, n in zip(view.strides[:-1], view.shape[:-1], strict=True) if n > 1]
    return math.gcd(view.pointer, *steps) % alignment == 0

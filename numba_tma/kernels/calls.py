"""What a public function asks of its caller's arrays: layout, address, stream, and new ones of the same kind.

Functions that are called again and again with arrays like those before keep what they made of the first ones under
`layout`, and what is bound to addresses under `pointer`. What else is asked of them is checked once, if `remembered`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

import numpy as np

from .. import arrays
from ..arrays import ArrayView, DeviceView
from ..device_array import DeviceArray
from ..dtypes import ElementType

Made = TypeVar("Made")


def viewed(caller: str, **given: Any) -> dict[str, ArrayView]:
    """The arrays as the launcher sees them, by name.

    Raises:
        TypeError: not an array; the message names it and `caller`.
    """
    views = {}
    for name, array in given.items():
        found = arrays.view(array)
        if found is None:
            raise TypeError(f"{caller}: {name} is a {type(array).__name__}; an array is expected")
        views[name] = found
    return views


MAX_EXTENT = (1 << 31) - 1 - 256


def check_extents(caller: str, views: Mapping[str, ArrayView]) -> None:
    """See that coordinates, which are signed numbers of 32 bits, reach all of the arrays and a last tile beyond them.

    Raises:
        ValueError: one has an extent above `MAX_EXTENT`; the message names it and `caller`.
    """
    for name, view in views.items():
        if max(view.shape, default=0) > MAX_EXTENT:
            raise ValueError(
                f"{caller}: {name} has the shape {view.shape}; an extent above {MAX_EXTENT:,}, where coordinates end: "
                f"take it in parts"
            )


def check_written(caller: str, views: Mapping[str, ArrayView], *written: str) -> None:
    """See that the arrays that are to be written can be, each element by itself, while the others are read.

    Raises:
        ValueError: one is read-only, or its elements share memory, with each other or with another array's; the message
            names it and `caller`.
    """
    for name in written:
        view = views[name]
        if view.readonly:
            raise ValueError(f"{caller}: {name} is read-only, and is to be written: give another array, or a copy")
        if arrays.overlaps_itself(view):
            raise ValueError(
                f"{caller}: elements of {name}, of shape {view.shape} and strides {view.strides} B, share memory, and "
                f"all of them are to be written: give an array with a place for each"
            )
        for other, read in views.items():
            if other != name and arrays.share_memory(view, read):
                raise ValueError(
                    f"{caller}: {name} at {view.pointer:#x} and {other} at {read.pointer:#x} share memory; it would be "
                    f"written before it is read: give {name} memory of its own"
                )


def aligned_rows(view: ArrayView) -> bool:
    """Whether rows, along the last dimension, are contiguous and begin on multiples of 16 bytes, of whatever length.

    The stride of a dimension of one element means nothing.
    """
    *steps, inner = view.strides
    *counts, columns = view.shape
    contiguous = inner == view.dtype.itemsize or columns < 2
    return (
        contiguous and view.pointer % 16 == 0 and all(s % 16 == 0 for s, n in zip(steps, counts, strict=True) if n > 1)
    )


def in_boxes(view: ArrayView) -> bool:
    """Whether a tensor map can describe it: `aligned_rows`, none of which lies in or before the one in front."""
    forwards = all(step > 0 for step, count in zip(view.strides[:-1], view.shape[:-1], strict=True) if count > 1)
    return forwards and aligned_rows(view)


def in_vectors(view: ArrayView) -> bool:
    """Whether 16-byte accesses and bulk copies can take it row by row: `aligned_rows` of multiples of 16 bytes."""
    return view.shape[-1] * view.dtype.itemsize % 16 == 0 and aligned_rows(view)


def seen(array: Any, shape: tuple[int, ...] | None = None, strides: tuple[int, ...] | None = None) -> Any:
    """An array's memory, under another shape if one is given; of a GPU's the address alone."""
    view = arrays.view(array)
    shape, strides = shape or view.shape, strides or view.strides
    if view.host:
        return arrays.reinterpret(array, view.dtype, shape, strides)
    return DeviceView(None, view.pointer, shape, strides, view.dtype)


class Recent(dict):
    """What is kept for calls like one before, by what decides it. Where there are `most`, all go before another one.

    Most programs ask for the same few again and again. One whose shapes change all the time begins anew now and then.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self and len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)


def recent_plans() -> Recent:
    """Of what does not depend on where arrays lie."""
    return Recent(1024)


def remembered(make: Callable[..., Made]) -> Callable[..., Made]:
    """`make`, called for the same values again and again: what it made of them is kept.

    Of values that may change, such as a tensor of one number, nothing is kept, nor of what cannot be looked up.
    """
    known: dict[tuple, Made] = recent_plans()

    def get(*values: Any) -> Made:
        try:
            return known[values]
        except (KeyError, TypeError):  # new, or a list, say
            pass
        made = make(*values)
        if all(map(_is_constant, values)):
            known[values] = made
        return made

    return get


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    frozen = is_dataclass(type(value)) and type(value).__dataclass_params__.frozen
    return frozen or isinstance(value, (bool, int, float, str, np.generic, type(None)))


def recent_places() -> Recent:
    """Of launches for arrays where they were, which have nothing left to marshal."""
    return Recent(256)


def layout(array: Any, caller: str) -> object:
    """What of an array decides how it is treated, and is quick to get; None of None.

    Raises:
        TypeError: not an array; the message names `caller`.
    """
    if array is None:
        return None
    if arrays.is_torch(array):
        return (array.dtype, array.shape, array.stride(), array.data_ptr() % 16, array.device)
    view = arrays.view(array)
    if view is None:
        raise TypeError(f"{caller}: {type(array).__name__} is not an array")
    return (type(array), view.dtype, view.shape, view.strides, view.pointer % 16)


def pointer(array: Any) -> int:
    """Address of an array's first element."""
    return array.data_ptr() if arrays.is_torch(array) else arrays.view(array).pointer


def current_stream(array: Any) -> int:
    """The stream that the array's library enqueues on."""
    if arrays.is_torch(array):
        if not array.is_cuda:
            return 0
        torch = sys.modules["torch"]
        # What torch.cuda.current_stream(…).cuda_stream looks up, without the object around it.
        return torch._C._cuda_getCurrentRawStream(array.get_device())
    if type(array).__module__.split(".")[0] == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream().ptr
    return 0


def new_like(shape: tuple[int, ...], element: ElementType, like: Any) -> Any:
    """An array of undefined contents, of the library and on the device of another."""
    if arrays.is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, element.name), device=like.device)
    if isinstance(like, np.ndarray):
        return np.empty(shape, element.numpy)
    if type(like).__module__.split(".")[0] == "cupy":
        return sys.modules["cupy"].empty(shape, element.numpy)
    return DeviceArray.empty(shape, element.numpy)

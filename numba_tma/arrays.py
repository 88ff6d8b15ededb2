"""One view of every kind of array that a kernel takes: NumPy, Numba, CuPy, PyTorch and what speaks their protocols."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

# What NumPy itself has no name for, under the names that PyTorch and ml_dtypes share.
_EXTENDED = {name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}


@dataclass(frozen=True)
class ArrayView:
    """Where an array's elements are. `strides` are in bytes; `host` tells ordinary memory from a GPU's."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype
    host: bool
    readonly: bool

    @property
    def layout(self) -> str:
        """Numba's letter: 'C' row-major, 'F' column-major, 'A' neither."""
        return layout_of(self.shape, self.strides, self.dtype.itemsize)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


@functools.cache
def check_dtype(dtype: np.dtype) -> None:
    """See that a GPU can read elements of it.

    Raises:
        TypeError: they are Python objects, or in the other byte order.
    """
    if dtype.hasobject:
        raise TypeError(
            f"dtype {dtype}: the elements are Python objects, which a kernel cannot read; give the array a type of "
            f"numbers first (array.astype(np.float32))"
        )
    if not dtype.isnative:
        raise TypeError(
            f"dtype {dtype.str}: its bytes are in the other order than a GPU's; copy the array first "
            f"(array.astype(array.dtype.newbyteorder('=')))"
        )


def view(array: object) -> ArrayView | None:
    """Describe `array`, or None if it is no array.

    Takes NumPy arrays, PyTorch tensors (also bfloat16 and fp8, which have no array interface), and objects
    with `__cuda_array_interface__` or, failing that, DLPack.

    Raises:
        TypeError: an array of Python objects, or of numbers in the other byte order, or one with a mask.
    """
    if isinstance(array, np.ndarray):
        check_dtype(array.dtype)
        readonly = not array.flags.writeable
        return ArrayView(array.ctypes.data, array.shape, array.strides, array.dtype, True, readonly)
    if is_torch(array):
        size = array.element_size()
        strides = tuple(s * size for s in array.stride())
        return ArrayView(
            array.data_ptr(), tuple(array.shape), strides, torch_dtype(array.dtype), not array.is_cuda, False
        )
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        if interface.get("mask") is not None:
            raise TypeError(
                f"a {type(array).__name__} with a mask in its __cuda_array_interface__: a kernel would read the masked "
                f"elements as well; pass the array of the values, with what stands for the missing ones filled in"
            )
        shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
        strides = interface.get("strides") or contiguous_strides(shape, dtype.itemsize)
        pointer, readonly = interface["data"]
        own = getattr(array, "dtype", dtype)
        if isinstance(own, np.dtype) and own.itemsize == dtype.itemsize:
            dtype = own  # CuPy's bfloat16 travels as a plain two-byte type in the interface
        check_dtype(dtype)
        return ArrayView(pointer or 0, shape, tuple(strides), dtype, False, bool(readonly))
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array)
    return None


def is_torch(array: object) -> bool:
    """Whether `array` is a PyTorch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def torch_dtype(dtype: object) -> np.dtype:
    """NumPy's (or ml_dtypes') equal of a `torch.dtype`."""
    name = str(dtype).removeprefix("torch.")
    return _EXTENDED.get(name) or np.dtype(name)


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def layout_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> str:
    """'C', 'F' or 'A'; an axis of one element may have any stride."""
    for letter, axes in (("C", range(len(shape) - 1, -1, -1)), ("F", range(len(shape)))):
        step = itemsize
        for axis in axes:
            if shape[axis] != 1 and strides[axis] != step:
                break
            step *= shape[axis]
        else:
            return letter
    return "A" if 0 not in shape else "C"


def _from_dlpack(array: object) -> ArrayView:
    from cuda.core.utils import StridedMemoryView

    memory = StridedMemoryView.from_dlpack(array, stream_ptr=-1)
    dtype, shape = np.dtype(memory.dtype), tuple(memory.shape)
    strides = memory.strides
    in_bytes = tuple(s * dtype.itemsize for s in strides) if strides else contiguous_strides(shape, dtype.itemsize)
    return ArrayView(memory.ptr, shape, in_bytes, dtype, not memory.is_device_accessible, bool(memory.readonly))


class _HostView:
    """What `np.asarray` needs to look at host memory in another way; NumPy keeps this object, and it the owner."""

    def __init__(
        self,
        owner: object,
        described: ArrayView,
        dtype: np.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ):
        self.owner = owner
        self.__array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{dtype.itemsize}",
            "data": (described.pointer, described.readonly),
            "version": 3,
        }


def _reach(view: ArrayView) -> tuple[int, int]:
    """Address of an array's first byte, whatever the signs of its strides, and of the one behind its last."""
    steps = [(extent - 1) * stride for extent, stride in zip(view.shape, view.strides, strict=True)]
    low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    return view.pointer + low, view.pointer + high + view.dtype.itemsize


def share_memory(a: ArrayView, b: ArrayView) -> bool:
    """Whether two arrays have a byte in common. Nothing is read: they may be a GPU's."""
    if a.host != b.host or 0 in a.shape or 0 in b.shape:
        return False
    (low, high), (other_low, other_high) = _reach(a), _reach(b)
    if high <= other_low or other_high <= low:  # as is usual, and quicker to see than what NumPy is asked
        return False
    seen = [np.asarray(_HostView(None, view, view.dtype, view.shape, view.strides)) for view in (a, b)]
    try:
        return np.shares_memory(*seen, max_work=1 << 20)
    except np.exceptions.TooHardError:
        return np.may_share_memory(*seen)


def overlaps_itself(view: ArrayView) -> bool:
    """Whether elements of an array share memory, as a broadcast one's do; or lie within each other's strides."""
    reach = view.dtype.itemsize
    for stride, extent in sorted((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < reach:
            return view.size > 0
        reach += (extent - 1) * stride
    return False


class DeviceView:
    """An array in GPU memory seen with another shape, strides and dtype; it keeps the array alive."""

    def __init__(self, owner: object, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype):
        self.owner, self.shape, self.strides, self.dtype = owner, shape, strides, dtype
        self.__cuda_array_interface__ = {
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
            "data": (pointer, False),
            "version": 3,
        }

    def __getitem__(self, index: object) -> DeviceView:
        """A part of it; no copy."""
        return part(self, index)


def part(array: Any, index: Any) -> Any:
    """`array[index]` for an index of integers and slices; no copy. Device arrays give a `DeviceView`.

    Raises:
        TypeError: something else in the index.
        IndexError: an integer outside, or more of them than dimensions.
    """
    described, index = view(array), index if isinstance(index, tuple) else (index,)
    for one in index:
        if isinstance(one, (bool, np.bool_)) or not isinstance(one, (int, np.integer, slice, type(...))):
            raise TypeError(
                f"index {one!r} of a device array: integers and slices take a part of it; for others make a CuPy or "
                f"PyTorch array of it (cupy.asarray, torch.as_tensor), which costs no copy"
            )
    index = index if ... in index else (*index, ...)  # with it integers alone give an array too, of no dimensions
    if described.host:
        return array[index]
    # NumPy's own arithmetic on an array that is never touched.
    whole = np.lib.stride_tricks.as_strided(np.empty(1, described.dtype), described.shape, described.strides)
    selected = whole[index]
    offset = selected.ctypes.data - whole.ctypes.data
    return DeviceView(array, described.pointer + offset, selected.shape, selected.strides, described.dtype)


def reinterpret(array: object, dtype: np.dtype | type, shape: tuple[int, ...], strides: tuple[int, ...]) -> object:
    """The memory of `array`, from its first element on, under another dtype, shape and strides (bytes); no copy.

    The caller answers for staying inside the allocation. Host arrays give a NumPy array, device arrays a `DeviceView`.
    """
    described, dtype = view(array), np.dtype(dtype)
    if described.host:
        return np.asarray(_HostView(array, described, dtype, shape, strides)).view(dtype)
    return DeviceView(array, described.pointer, shape, strides, dtype)


def as_bytes(array: object) -> object:
    """A contiguous array as a 1-D uint8 array over the same memory.

    Raises:
        ValueError: the array is not row-major contiguous.
    """
    described = view(array)
    if described.layout != "C":
        raise ValueError(
            f"strides {described.strides} B of shape {described.shape} leave gaps or change the order; this needs a "
            f"row-major contiguous array: copy it first"
        )
    nbytes = described.size * described.dtype.itemsize
    return reinterpret(array, np.uint8, (nbytes,), (1,))

"""Kernel arguments: their Numba types, and the words that go into the kernel's parameters.

Numba passes an array as 5 + 2·ndim words (meminfo, parent, size, itemsize, data, shape…, strides…), a scalar as itself.
A tensor map is passed by value, 128 bytes. This runs at every launch, so what depends only on an array's dtype, shape
and strides is worked out once and looked up afterwards.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.cuda.np import numpy_support

from . import arrays, dtypes
from .compile import Compiled
from .tensor_map import TensorMap

_WORD = 0xFFFFFFFFFFFFFFFF
_DATA = 4  # where the pointer stands among an array's words
_MOST_LAYOUTS = 4096
_BIT_PATTERNS = frozenset(
    element.numpy for element in (dtypes.float16, dtypes.bfloat16, dtypes.float8_e4m3fn, dtypes.float8_e5m2)
)


class Argument(NamedTuple):
    """One marshalled argument: Numba type, words, the array or tensor map behind it, whether that is on the host."""

    numba_type: types.Type
    words: tuple
    value: object = None
    on_host: bool = False


class _Layout(NamedTuple):
    token: int  # the identity of the Numba type, of which there is one object
    head: tuple[int, ...]
    tail: tuple[int, ...]
    numba_type: types.Type


@functools.cache
def scalar_type(dtype: np.dtype) -> types.Type:
    """Numba's type of one element of a NumPy or ml_dtypes dtype.

    Raises:
        TypeError: numba-cuda has no such type.
    """
    try:
        return dtypes.lookup(dtype).numba_type
    except (TypeError, ValueError):
        pass
    try:
        return numpy_support.from_dtype(dtype)
    except Exception as error:
        raise TypeError(f"dtype {dtype}: Numba-CUDA kernels have no such type ({error})") from None


@functools.cache
def array_type(dtype: np.dtype, ndim: int, layout: str) -> types.Array:
    """Numba's array type; `layout` is 'C', 'F' or 'A'."""
    return types.Array(scalar_type(dtype), ndim, layout)


_layouts: dict[tuple, _Layout] = {}


def _array(value: object, pointer: int, shape: tuple, strides: tuple, dtype: Any, on_host: bool) -> Argument:
    """Marshal an array; `dtype` may be a torch.dtype, and `strides` are then in elements."""
    layout = _layouts.get((dtype, shape, strides))
    if layout is None:
        numpy_dtype, in_bytes = dtype, strides
        if not isinstance(dtype, np.dtype):
            numpy_dtype = arrays.torch_dtype(dtype)
            in_bytes = tuple(stride * numpy_dtype.itemsize for stride in strides)
        layout = _new_layout((dtype, shape, strides), numpy_dtype, tuple(shape), in_bytes)
    return Argument(layout.numba_type, (*layout.head, pointer, *layout.tail), value, on_host)


def _new_layout(key: tuple, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Layout:
    arrays.check_dtype(dtype)
    numba_type = array_type(dtype, len(shape), arrays.layout_of(shape, strides, dtype.itemsize))
    layout = _Layout(
        id(numba_type),
        (0, 0, math.prod(shape), dtype.itemsize),
        (*shape, *(stride & _WORD for stride in strides)),
        numba_type,
    )
    if len(_layouts) >= _MOST_LAYOUTS:
        _layouts.clear()
    _layouts[key] = layout
    return layout


def _interface(value: Any, name: str) -> Argument:
    """Marshal an array by its `__cuda_array_interface__`."""
    interface = value.__cuda_array_interface__
    key = (interface["typestr"], interface["shape"], interface.get("strides"), getattr(value, "dtype", None))
    layout = _layouts.get(key)
    if layout is None:
        view = arrays.view(value)
        layout = _new_layout(key, view.dtype, view.shape, view.strides)
    return Argument(layout.numba_type, (*layout.head, interface["data"][0] or 0, *layout.tail), value)


def _native(value: Any, name: str) -> Argument:
    """Marshal a CuPy or Numba array by its own attributes."""
    return _array(value, arrays.view(value).pointer, value.shape, value.strides, value.dtype, False)


def _numpy(value: np.ndarray, name: str) -> Argument:
    return _array(value, value.ctypes.data, value.shape, value.strides, value.dtype, True)


def _torch(value: Any, name: str) -> Argument:
    return _array(value, value.data_ptr(), value.shape, value.stride(), value.dtype, not value.is_cuda)


def _integer(value: int, name: str) -> Argument:
    if not -(1 << 63) <= value < 1 << 63:
        raise TypeError(f"argument {name}: {value} does not fit 64 bits; pass np.uint64({value}) if it should wrap")
    return Argument(types.int64, (value & _WORD,))


def _tensor_map(value: TensorMap, name: str) -> Argument:
    return Argument(value.numba_type, (), value, value.view.host)


def _bits(value: np.generic) -> int:
    """The bit pattern: how a kernel takes a 16- or 8-bit number."""
    return int.from_bytes(value.tobytes(), "little")


def _numpy_scalar(value: np.generic, name: str) -> Argument:
    arrays.check_dtype(value.dtype)
    if value.dtype in _BIT_PATTERNS:
        return Argument(scalar_type(value.dtype), (_bits(value),))
    word = value.item()
    if isinstance(word, int) and not isinstance(word, bool):
        word &= (1 << (8 * value.dtype.itemsize)) - 1
    elif not isinstance(word, (bool, float)):
        raise TypeError(f"argument {name}: a {value.dtype} scalar cannot be passed; put it into an array")
    return Argument(scalar_type(value.dtype), (word,))


def _tuple(value: tuple, name: str) -> Argument:
    members = [marshal(member, f"{name}[{i}]") for i, member in enumerate(value)]
    if not members or any(member.value is not None for member in members):
        raise TypeError(f"argument {name}: a tuple may hold numbers only; pass its arrays one by one")
    return Argument(
        types.BaseTuple.from_types([member.numba_type for member in members]),
        tuple(word for member in members for word in member.words),
    )


_BY_CLASS: dict[type, Callable[[Any, str], Argument]] = {
    bool: lambda value, name: Argument(types.boolean, (value,)),
    int: _integer,
    float: lambda value, name: Argument(types.float64, (value,)),
    np.ndarray: _numpy,
    tuple: _tuple,
    TensorMap: _tensor_map,
}


def marshal(value: object, name: str) -> Argument:
    """Type and words of one argument; an array's pointer is where it lies now, a tensor map has no words yet.

    Raises:
        TypeError: the object is none of: array, tensor map, number, bool, NumPy scalar, tuple of numbers.
    """
    known = _BY_CLASS.get(value.__class__)
    return known(value, name) if known else _other(value, name)


def _other(value: object, name: str) -> Argument:
    torch = sys.modules.get("torch")
    for base, marshal_one in ((np.generic, _numpy_scalar), (np.ndarray, _numpy), (TensorMap, _tensor_map)):
        if isinstance(value, base):
            _BY_CLASS[type(value)] = marshal_one
            return marshal_one(value, name)
    if torch is not None and isinstance(value, torch.Tensor):
        _BY_CLASS[type(value)] = _torch
        _learn(value)
        return _torch(value, name)
    # An IntEnum's member, or another subclass, is its number. After NumPy's: np.float64 is a float.
    if isinstance(value, int):
        return _integer(int(value), name)
    if isinstance(value, float):
        return _BY_CLASS[float](float(value), name)
    if hasattr(value, "__cuda_array_interface__"):
        _learn(value)
        _BY_CLASS[type(value)] = _native if _QUICK.get(type(value)) in (_quick_cupy, _quick_numba) else _interface
        return _BY_CLASS[type(value)](value, name)
    view = arrays.view(value)
    if view is None:
        raise TypeError(
            f"argument {name}: {type(value).__name__} cannot be passed to a kernel; pass an array (NumPy, Numba, CuPy, "
            f"PyTorch, DLPack), a TensorMap, a number, a bool or a tuple of numbers"
        )
    return _array(value, view.pointer, view.shape, view.strides, view.dtype, view.host)


def array_view(argument: Argument) -> arrays.ArrayView | None:
    """The array behind an argument: its own, or the one its tensor map describes."""
    if argument.value is None:
        return None
    return argument.value.view if isinstance(argument.value, TensorMap) else arrays.view(argument.value)


def moved(argument: Argument, pointer: int) -> tuple:
    """An array argument's words with its data at `pointer`."""
    return (*argument.words[:_DATA], pointer, *argument.words[_DATA + 1 :])


# The quick way, for arguments of a launch like one before: each function appends an argument's words and returns the
# identity of its Numba type. It raises KeyError for whatever it has not met; `marshal` then has the say.


def _quick_interface(value: Any, words: list) -> int:
    interface = value.__cuda_array_interface__
    key = (interface["typestr"], interface["shape"], interface["strides"], value.dtype)
    token, head, tail, _ = _layouts[key]
    words += (*head, interface["data"][0], *tail)
    return token


def _quick_torch(value: Any, words: list) -> int:
    if not value.is_cuda:
        raise KeyError
    token, head, tail, _ = _layouts[(value.dtype, value.shape, value.stride())]
    words += (*head, value.data_ptr(), *tail)
    return token


def _quick_cupy(value: Any, words: list) -> int:
    token, head, tail, _ = _layouts[(value.dtype, value.shape, value.strides)]
    words += (*head, value.data.ptr, *tail)
    return token


def _quick_numba(value: Any, words: list) -> int:
    token, head, tail, _ = _layouts[(value.dtype, value.shape, value.strides)]
    words += (*head, value.gpu_data.device_pointer_value or 0, *tail)
    return token


def _quick_tensor_map(value: TensorMap, words: list) -> int:
    if value.view.host:
        raise KeyError
    words.append(value.encode())
    return value.token


def _quick_scalar(numba_type: types.Type, mask: int | None) -> Callable[[Any, list], int]:
    token = id(numba_type)

    def integer(value: Any, words: list) -> int:
        words.append(int(value) & mask)
        return token

    def other(value: Any, words: list) -> int:
        words.append(value)
        return token

    return other if mask is None else integer


_QUICK: dict[type, Callable[[Any, list], int]] = {
    TensorMap: _quick_tensor_map,
    bool: _quick_scalar(types.boolean, None),
    float: _quick_scalar(types.float64, None),
    np.float32: _quick_scalar(types.float32, None),
    np.float64: _quick_scalar(types.float64, None),
    **{
        getattr(np, name): _quick_scalar(getattr(types, name), (1 << bits) - 1)
        for bits in (8, 16, 32, 64)
        for name in (f"int{bits}", f"uint{bits}")
    },
}


def _quick_python_integer(value: int, words: list) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise KeyError
    words.append(value & _WORD)
    return _INT64


_INT64 = id(types.int64)
_QUICK[int] = _quick_python_integer


def _learn(value: Any) -> None:
    """Remember the quick way for arrays of the class of `value`, which has been marshalled."""
    kind = type(value)
    module = kind.__module__.split(".")[0]
    if arrays.is_torch(value):
        _QUICK[kind] = _quick_torch
    elif module == "cupy":
        _QUICK[kind] = _quick_cupy
    elif module == "numba" and hasattr(value, "gpu_data"):
        _QUICK[kind] = _quick_numba
    elif hasattr(value, "__cuda_array_interface__") and hasattr(value, "dtype"):
        _QUICK[kind] = _quick_interface


def quick(values: Sequence, words: list) -> tuple[int, ...]:
    """Append the words of all arguments and return their types' identities.

    Raises:
        KeyError: an argument is unlike any before it, or in host memory.
    """
    return tuple([_QUICK[value.__class__](value, words) for value in values])


_FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q", 128: "128s"}
_FLOATS = {"f16": "e", "f32": "f", "f64": "d"}


class Packer:
    """Writes marshalled words into a kernel's parameter buffer."""

    def __init__(self, compiled: Compiled) -> None:
        codes, position = [], 0
        for parameter in compiled.parameters:
            codes.append("x" * (parameter.offset - position))
            codes.append(_FLOATS.get(parameter.type) or _FORMATS[parameter.size])
            position = parameter.offset + parameter.size
        packing = struct.Struct("<" + "".join(codes))
        self.nbytes = packing.size
        self._pack_into = packing.pack_into

    def pack_into(self, buffer: memoryview | bytearray, words: Sequence) -> None:
        """Fill `buffer` from words in parameter order; integers come in two's complement."""
        self._pack_into(buffer, 0, *words)

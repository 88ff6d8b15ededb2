"""Kernel arguments: their Numba types, and the words that go into the kernel's parameters.

Numba passes an array as 5 + 2·ndim words (meminfo, parent, size, itemsize, data, shape…, strides…), a scalar as itself.
A tensor map is passed by value, 128 bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import types
from numba.cuda.np import numpy_support

from . import arrays, dtypes
from .compile import Compiled
from .tensor_map import TensorMap


@dataclass(frozen=True)
class Argument:
    """One marshalled argument: its Numba type, and either scalar words, an array's view or a tensor map."""

    numba_type: types.Type
    words: tuple = ()
    array: arrays.ArrayView | None = None
    tensor_map: TensorMap | None = None
    owner: object = None


_SCALARS = {
    bool: types.boolean,
    int: types.int64,
    float: types.float64,
}


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
def array_type(dtype: np.dtype, ndim: int, layout: str, readonly: bool = False) -> types.Array:
    """Numba's array type; `layout` is 'C', 'F' or 'A'."""
    return types.Array(scalar_type(dtype), ndim, layout, readonly=readonly)


def marshal(value: object, name: str) -> Argument:
    """Type and words of one argument; array pointers are still the owner's own.

    Raises:
        TypeError: the object is none of: array, tensor map, number, bool, NumPy scalar, tuple of numbers.
    """
    if isinstance(value, TensorMap):
        return Argument(value.numba_type, tensor_map=value)
    kind = _SCALARS.get(type(value))
    if kind is not None:
        if kind is types.int64 and not -(1 << 63) <= value < 1 << 63:
            raise TypeError(f"argument {name}: {value} does not fit 64 bits; pass np.uint64({value}) if it should wrap")
        return Argument(kind, (value,))
    if isinstance(value, np.generic):
        return Argument(scalar_type(value.dtype), (value.item(),))
    view = arrays.view(value)
    if view is not None:
        return Argument(array_type(view.dtype, len(view.shape), view.layout), array=view, owner=value)
    if isinstance(value, tuple) and value:
        members = [marshal(member, f"{name}[{i}]") for i, member in enumerate(value)]
        if any(member.array or member.tensor_map for member in members):
            raise TypeError(f"argument {name}: a tuple may hold numbers only; pass its arrays one by one")
        return Argument(
            types.BaseTuple.from_types([member.numba_type for member in members]),
            tuple(word for member in members for word in member.words),
        )
    raise TypeError(
        f"argument {name}: {type(value).__name__} cannot be passed to a kernel; pass an array (NumPy, Numba, CuPy, "
        f"PyTorch, DLPack), a TensorMap, a number, a bool or a tuple of numbers"
    )


def array_words(view: arrays.ArrayView, pointer: int) -> tuple[int, ...]:
    """Numba's words for an array whose elements start at `pointer`."""
    return (0, 0, view.size, view.dtype.itemsize, pointer, *view.shape, *view.strides)


_FORMATS = {"b8": "B", "u8": "B", "s8": "b", "b16": "H", "u16": "H", "s16": "h", "f16": "e", "f32": "f", "f64": "d"}
_FORMATS |= {"b32": "I", "u32": "I", "s32": "i", "b64": "Q", "u64": "Q", "s64": "q"}
_MASKS = {"B": 0xFF, "H": 0xFFFF, "I": 0xFFFFFFFF, "Q": 0xFFFFFFFFFFFFFFFF}


class Packer:
    """Writes marshalled words into a kernel's parameter buffer."""

    def __init__(self, compiled: Compiled) -> None:
        codes, position = [], 0
        self._masks = []
        for parameter in compiled.parameters:
            codes.append("x" * (parameter.offset - position))
            code = "128s" if parameter.size == 128 else _FORMATS[parameter.type]
            codes.append(code)
            self._masks.append(_MASKS.get(code))
            position = parameter.offset + parameter.size
        self._struct = struct.Struct("<" + "".join(codes))
        self.nbytes = self._struct.size

    def pack_into(self, buffer: memoryview | bytearray, words: Sequence) -> None:
        """Fill `buffer` from words in parameter order; negative integers are stored in two's complement."""
        masked = [word if mask is None else word & mask for word, mask in zip(words, self._masks, strict=True)]
        self._struct.pack_into(buffer, 0, *masked)



"""Element types: one table from NumPy, ml_dtypes, PyTorch and Numba to the types that the copy engine knows.

The engine moves bits and has fewer types than NumPy: signed 8- and 16-bit integers and the 8-bit floats
travel as the unsigned integer of their size. A type matters to it for reductions, for the fill value and for
the `_FTZ` and TF32 variants of float32 (CUDA driver API, `CUtensorMapDataType`).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numba.cuda import types
from numba.cuda._internal.cuda_fp8 import fp8_e4m3, fp8_e5m2
from numba.cuda.extending import as_numba_type

from . import half  # noqa: F401 - gives kernels the table's 16- and 8-bit numbers


@dataclass(frozen=True)
class ElementType:
    """One element type.

    `name` is NumPy's or ml_dtypes' name, or for the engine's own float32 variants the driver's; `numpy` and
    `numba_type` are what arrays of it hold; `tensor_map_name` and `tensor_map_code` are its
    `CUtensorMapDataType`; `size` is in bytes; `floating` tells whether the engine knows a NaN of it.
    """

    name: str
    numpy: np.dtype
    numba_type: types.Type
    tensor_map_name: str
    tensor_map_code: int
    size: int
    floating: bool

    def __str__(self) -> str:
        return self.name


_PREFIX = "CU_TENSOR_MAP_DATA_TYPE_"
# The enumerators' order is the driver's; the packed 4- and 6-bit types that follow them are Blackwell's.
_CODES = {
    name: code
    for code, name in enumerate(
        (
            "UINT8",
            "UINT16",
            "UINT32",
            "INT32",
            "UINT64",
            "INT64",
            "FLOAT16",
            "FLOAT32",
            "FLOAT64",
            "BFLOAT16",
            "FLOAT32_FTZ",
            "TFLOAT32",
            "TFLOAT32_FTZ",
        )
    )
}


def _entry(name: str, engine: str, dtype: object, numba_type: types.Type, floating: bool = False) -> ElementType:
    dtype = np.dtype(dtype)
    return ElementType(name, dtype, numba_type, _PREFIX + engine, _CODES[engine], dtype.itemsize, floating)


uint8 = _entry("uint8", "UINT8", np.uint8, types.uint8)
int8 = _entry("int8", "UINT8", np.int8, types.int8)
uint16 = _entry("uint16", "UINT16", np.uint16, types.uint16)
int16 = _entry("int16", "UINT16", np.int16, types.int16)
uint32 = _entry("uint32", "UINT32", np.uint32, types.uint32)
int32 = _entry("int32", "INT32", np.int32, types.int32)
uint64 = _entry("uint64", "UINT64", np.uint64, types.uint64)
int64 = _entry("int64", "INT64", np.int64, types.int64)
float16 = _entry("float16", "FLOAT16", np.float16, types.float16, True)
bfloat16 = _entry("bfloat16", "BFLOAT16", ml_dtypes.bfloat16, types.bfloat16, True)
float32 = _entry("float32", "FLOAT32", np.float32, types.float32, True)
float32_ftz = _entry("float32_ftz", "FLOAT32_FTZ", np.float32, types.float32, True)
tfloat32 = _entry("tfloat32", "TFLOAT32", np.float32, types.float32, True)
tfloat32_ftz = _entry("tfloat32_ftz", "TFLOAT32_FTZ", np.float32, types.float32, True)
float64 = _entry("float64", "FLOAT64", np.float64, types.float64, True)
# Floating to the user, bytes to the engine, which therefore cannot fill them with NaN.
float8_e4m3fn = _entry("float8_e4m3fn", "UINT8", ml_dtypes.float8_e4m3fn, as_numba_type(fp8_e4m3))
float8_e5m2 = _entry("float8_e5m2", "UINT8", ml_dtypes.float8_e5m2, as_numba_type(fp8_e5m2))

TABLE: tuple[ElementType, ...] = (
    *(uint8, int8, uint16, int16, uint32, int32, uint64, int64),
    *(float16, bfloat16, float32, float32_ftz, tfloat32, tfloat32_ftz, float64),
    *(float8_e4m3fn, float8_e5m2),
)
_BY_NAME = {entry.name: entry for entry in TABLE}
# Reversed, so that of several with one dtype the table's first is kept: plain float32, not a variant of it.
_BY_NUMPY = {entry.numpy: entry for entry in reversed(TABLE)}
_BY_NUMBA = {entry.numba_type: entry for entry in reversed(TABLE)}


def lookup(dtype: object) -> ElementType:
    """The table's entry for a NumPy or ml_dtypes dtype or scalar class, `torch.dtype`, Numba type, or name.

    Names are those of NumPy and ml_dtypes, and `float32_ftz`, `tfloat32`, `tfloat32_ftz`.

    Raises:
        TypeError: no such element type; the message lists those that there are.
    """
    if isinstance(dtype, ElementType):
        return dtype
    if isinstance(dtype, types.Type):
        found = _BY_NUMBA.get(dtype)
    elif isinstance(dtype, str) or type(dtype).__module__ == "torch":
        found = _BY_NAME.get(str(dtype).removeprefix("torch."))
    else:
        found = _from_numpy(dtype)
    if found is None:
        raise TypeError(
            f"element type {dtype!s}: the copy engine has no such type; choose one of {', '.join(_BY_NAME)} "
            f"(as a name, NumPy or ml_dtypes dtype, torch.dtype or Numba type)"
        )
    return found


def _from_numpy(dtype: object) -> ElementType | None:
    # np.dtype() would turn None into float64 and Python's float and int into 64-bit types nobody asked for.
    if not (isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic))):
        return None
    return _BY_NUMPY.get(np.dtype(dtype))

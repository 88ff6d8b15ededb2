"""NumPy arrays over memory that something else owns, which they keep alive."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class _Memory:
    def __init__(self, owner: object, pointer: int, nbytes: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def window(owner: object, pointer: int, shape: Sequence[int], dtype: np.dtype | type | str) -> np.ndarray:
    """A row-major array at `pointer`. It, and every array made of it without a copy, keeps `owner` alive."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    # The array interface has no name for ml_dtypes' types: bytes, then.
    return np.asarray(_Memory(owner, pointer, nbytes)).view(dtype).reshape(shape)

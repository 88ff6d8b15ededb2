"""An array in GPU memory, with its host twin's row pitch: enough to run the suite without CuPy or PyTorch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np

from . import arrays, driver, staging


class DeviceArray:
    """GPU memory with a NumPy array's shape, strides and dtype; freed with the object.

    Speaks `__cuda_array_interface__`, so Numba, CuPy and PyTorch take it as it is.
    """

    def __init__(self, host: np.ndarray) -> None:
        """Copy `host` to the current GPU, padding between its rows included."""
        self.shape, self.strides, self.dtype = host.shape, host.strides, host.dtype
        self._allocation = 0
        stretches = staging.spans({"host": arrays.view(host)})
        span = stretches[0] if stretches else None
        self._lead = host.ctypes.data - span.low if span else 0
        if span:
            self._allocation = driver.allocate(span.nbytes)
            driver.copy_to_device(self._allocation, span.host_bytes())
            self._nbytes = span.nbytes
        self._publish()

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: np.dtype | type | str) -> DeviceArray:
        """Row-major memory on the current GPU, with whatever happens to be in it."""
        made = cls.__new__(cls)
        made.shape, made.dtype = tuple(shape), np.dtype(dtype)
        made.strides = arrays.contiguous_strides(made.shape, made.dtype.itemsize)
        made._allocation, made._lead = 0, 0
        made._nbytes = math.prod(made.shape) * made.dtype.itemsize
        if made._nbytes:
            made._allocation = driver.allocate(made._nbytes)
        made._publish()
        return made

    def _publish(self) -> None:
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
        }

    @property
    def pointer(self) -> int:
        """Address of the first element."""
        return self._allocation + self._lead

    def __getitem__(self, index: object) -> arrays.DeviceView:
        """A part of it, for an index of integers and slices; no copy."""
        return arrays.part(self, index)

    def __reduce__(self) -> str | tuple:
        # A copy with the same address would free the memory a second time, in another process somebody else's.
        raise TypeError(
            f"a DeviceArray of shape {self.shape} cannot be pickled or copied: its memory is this process's and freed "
            f"with it; send to_host(), and make DeviceArray(…) of it there"
        )

    def to_host(self) -> np.ndarray:
        """A NumPy array of the same shape, row-major; waits for the default stream."""
        if not self._allocation:
            return np.empty(self.shape, self.dtype)
        raw = driver.copy_to_host(self._allocation, self._nbytes)
        view = np.ndarray(self.shape, self.dtype, raw.data, self._lead, self.strides)
        return np.ascontiguousarray(view)

    def poison(self) -> None:
        """Fill with 0xFF bytes: NaN in every floating-point type, -1 or the largest value in an integer one."""
        if self._allocation:
            driver.fill(self._allocation, 0xFF, self._nbytes)

    def __del__(self) -> None:
        if getattr(self, "_allocation", 0):
            with contextlib.suppress(Exception):  # the driver may already be gone at interpreter exit
                driver.free(self._allocation)
            self._allocation = 0

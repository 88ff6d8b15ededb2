"""Arrays where the kernels run: GPU memory, or NumPy arrays for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import arrays, driver
from ..arrays import DeviceView
from ..device_array import DeviceArray
from ..launch import backend, gpu_refusal
from ..overlap.gpu import GpuEngines


def on_gpu() -> bool:
    """Whether kernels run on a GPU.

    Raises:
        LaunchError: the backend in force is the GPU's, and there is none.
    """
    refusal = gpu_refusal()
    if backend() == "gpu" and refusal:
        raise driver.LaunchError(f"{refusal}; use the simulator (NUMBA_TMA_BACKEND=sim)")
    return backend() != "sim" and not refusal


def upload(host: np.ndarray) -> Any:
    """A copy of a NumPy array, contiguous, where kernels run."""
    if not on_gpu():
        return np.array(host, order="C")
    array = DeviceArray(np.ascontiguousarray(host))
    _landed()
    return array


def empty(shape: Sequence[int], dtype: object) -> Any:
    """An array of undefined contents where kernels run."""
    return DeviceArray.empty(shape, dtype) if on_gpu() else np.empty(shape, dtype)


def zeros(shape: Sequence[int], dtype: object) -> Any:
    """Zeros where kernels run."""
    return upload(np.zeros(shape, dtype))


def reshaped(array: Any, shape: Sequence[int]) -> Any:
    """A contiguous array under another shape, a view."""
    view = arrays.view(array)
    if view.host:
        return array.reshape(shape)
    strides = arrays.contiguous_strides(tuple(shape), view.dtype.itemsize)
    return DeviceView(array, view.pointer, tuple(shape), strides, view.dtype)


def strided(array: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
    """The memory of an array from its first element on, seen with another shape and strides (elements)."""
    dtype = arrays.view(array).dtype
    return arrays.reinterpret(array, dtype, tuple(shape), tuple(step * dtype.itemsize for step in strides))


def to_host(array: Any, stream: int = 0) -> np.ndarray:
    """A NumPy copy of a contiguous array; waits for the stream."""
    view = arrays.view(array)
    if view.host:
        return np.array(array)
    driver.synchronize(stream)
    return driver.copy_to_host(view.pointer, view.size * view.dtype.itemsize).view(view.dtype).reshape(view.shape)


def write(array: Any, host: np.ndarray, stream: int = 0) -> None:
    """Overwrite a contiguous array; waits for the stream first, so that nothing still reads what was there."""
    view = arrays.view(array)
    if view.host:
        array[...] = host
        return
    driver.synchronize(stream)
    driver.copy_to_device(view.pointer, np.ascontiguousarray(np.broadcast_to(host, view.shape), view.dtype))
    _landed()


def _landed() -> None:
    """Wait for copies of pageable memory: they return when the host's memory may change, which is earlier, and streams
    that do not wait for the default stream would not wait for the rest."""
    driver.synchronize(0)


def copy_launch(target: Any, source: Any, stream: int) -> Callable[[], None]:
    """A function that enqueues a copy between contiguous arrays of equal size where kernels run."""
    to, what = arrays.view(target), arrays.view(source)
    if to.host:
        return lambda: np.copyto(target, source)
    from cuda.bindings import driver as cu

    nbytes = to.size * to.dtype.itemsize
    return lambda: driver.check(cu.cuMemcpyDtoDAsync(to.pointer, what.pointer, nbytes, stream), "cuMemcpyDtoDAsync")


def pinned(shape: Sequence[int], dtype: object) -> np.ndarray:
    """Host memory of undefined contents that the copy engines can reach, page-locked where there is a GPU."""
    return GpuEngines().host_array(tuple(shape), np.dtype(dtype), True) if on_gpu() else np.empty(shape, dtype)

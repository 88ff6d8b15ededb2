"""What a batch brings: its arrays by name, and where the copies to the device read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import arrays
from .gpu import GpuEngines, OnDevice
from .model import ModelEngines
from .ring import Spec

_DLPACK_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged


def named(batch: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a batch by input's name.

    Raises:
        ValueError: their names or their number are not the inputs'.
    """
    if isinstance(batch, Mapping):
        found = dict(batch)
    elif isinstance(batch, (tuple, list)):
        if len(batch) != len(inputs):
            raise ValueError(f"{len(batch)} arrays; the inputs are {', '.join(inputs)}")
        found = dict(zip(inputs, batch, strict=True))
    elif len(inputs) == 1:
        found = {next(iter(inputs)): batch}
    else:
        raise ValueError(f"a {type(batch).__name__}; expected a dict or a tuple of the inputs {', '.join(inputs)}")
    if found.keys() != inputs.keys():
        raise ValueError(f"arrays {', '.join(map(str, found))}; the inputs are {', '.join(inputs)}")
    return found


def sources_of(
    given: Mapping[str, Any],
    buffers: dict[str, np.ndarray],
    inputs: Mapping[str, Spec],
    engines: GpuEngines | ModelEngines,
    pinned: bool,
) -> dict[str, np.ndarray | OnDevice]:
    """Where the copies in read each input: arrays on a GPU or in page-locked memory as they are, others copied into the
    slot's buffers.

    Args:
        given: arrays by input's name.
        buffers: the slot's, by input's name.
        inputs: what the pipeline was made for.
        pinned: whether copies read page-locked memory only.

    Raises:
        ValueError: no such input, another shape or type, or memory that cannot be copied from where it is.
        TypeError: an array on a GPU, for a model of one.
    """
    sources = {}
    for name, value in given.items():
        if name not in inputs:
            raise ValueError(f"array {name!r}; the inputs are {', '.join(inputs)}")
        spec, array = inputs[name], _located(value)
        if array.shape != spec.shape or array.dtype != spec.dtype:
            raise ValueError(
                f"input {name!r}: {array.dtype} of shape {array.shape}; the pipeline was made for {spec.dtype} of "
                f"shape {spec.shape}: pad the batch, or make a pipeline for it"
            )
        if isinstance(array, arrays.ArrayView):
            sources[name] = _from_device(name, value, array, engines)
        elif array.flags.c_contiguous and (not pinned or engines.is_pinned(array)):
            sources[name] = array
        elif name not in buffers:
            raise ValueError(
                f"input {name!r} lies elsewhere, as was said, and in no page-locked memory, or not row by row: it "
                f"cannot be copied from there"
            )
        else:
            np.copyto(buffers[name], array)
            sources[name] = buffers[name]
    return sources


def _from_device(name: str, value: Any, view: arrays.ArrayView, engines: GpuEngines | ModelEngines) -> OnDevice:
    """An array that a GPU has, for the copy in."""
    if view.layout != "C":
        raise ValueError(
            f"input {name!r}: strides {view.strides} B of shape {view.shape} on a GPU leave gaps or change the "
            f"order; a copy engine reads row by row: make a contiguous copy there first"
        )
    if engines.modelled:
        raise TypeError(
            f"input {name!r} lies on a GPU, and this pipeline runs on a model of one, which takes arrays from host "
            f"memory: leave model=… out, or copy the array to the host"
        )
    return engines.on_device(value, view)


def _located(value: Any) -> np.ndarray | arrays.ArrayView:
    """A NumPy array over the memory of any host array; where an array on a GPU lies."""
    if isinstance(value, np.ndarray):
        return value
    if not (arrays.is_torch(value) or hasattr(value, "__cuda_array_interface__") or _on_gpu_by_dlpack(value)):
        return np.asarray(value)
    view = arrays.view(value)
    return arrays.reinterpret(value, view.dtype, view.shape, view.strides) if view.host else view


def _on_gpu_by_dlpack(value: Any) -> bool:
    kind = getattr(value, "__dlpack_device__", None)
    return kind is not None and int(kind()[0]) in _DLPACK_GPU

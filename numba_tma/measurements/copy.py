"""Benchmark of copy for docs/copy.md: rates by element type, in GB/s, bytes read plus bytes written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import bench, dtypes
from ..arrays import reinterpret
from ..device_array import DeviceArray
from ..kernels import copy
from .timing import Record

NBYTES = 1 << 30  # of an array
COPY_TYPES = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "float16",
    "bfloat16",
    "uint32",
    "int32",
    "float32",
    "int64",
    "float64",
)
REPEATS = 9


def copy_types() -> list[Record]:
    """1 GiB in every element type, by each variant of copy and by the driver."""
    source = DeviceArray(np.resize(np.arange(251, dtype=np.uint8), NBYTES))
    target = DeviceArray.empty((NBYTES,), np.uint8)
    copy_launch, free = bench.device_copy(NBYTES)
    records = []
    for dtype in COPY_TYPES:
        kind = dtypes.lookup(dtype).numpy
        shape, strides = (NBYTES // (8192 * kind.itemsize), 8192), (8192 * kind.itemsize, kind.itemsize)
        given: Mapping[str, Any] = {
            "source": reinterpret(source, kind, shape, strides),
            "target": reinterpret(target, kind, shape, strides),
        }
        launches = {"driver": copy_launch} | {v.name: v.bind(given) for v in copy.PROBLEM.variants}
        timings = bench.time_launches(launches, repeats=REPEATS)
        rates = {name: 2 * NBYTES / timing.median / 1e9 for name, timing in timings.items()}
        records.append({"dtype": dtype, "gb_per_s": rates})
    free()
    return records

"""Benchmarks behind docs/softmax.md and docs/copy.md, beyond what `run_all` times: rates over row lengths and types.

As in `measurements`, every function needs a GPU and returns plain records; rates are in GB/s, bytes read plus bytes
written, of medians of candidates that run in turn in one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import bench, dtypes
from .arrays import reinterpret
from .device_array import DeviceArray
from .kernels import copy
from .kernels.rows import binding, peers, rmsnorm, softmax

Record = dict[str, Any]

NBYTES = 1 << 30  # of a matrix
ROW_LENGTHS = (1 << 10, 1 << 12, 1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 18)
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
REPEATS = 11


def rows() -> list[Record]:
    """softmax and rmsnorm of 1 GiB in rows of 1k to 256k, beside PyTorch, its compiler and the driver's copy."""
    records = []
    for problem in (softmax.PROBLEM, rmsnorm.PROBLEM):
        for dtype in ("float32", "bfloat16"):
            records += _rows_of(problem.name, dtype)
    return records


def _rows_of(operation: str, dtype: str) -> list[Record]:
    kind = dtypes.lookup(dtype).numpy
    # A tenth of a million random numbers, over and over: what is in a row does not matter for its time.
    numbers = np.resize(np.random.default_rng(0).standard_normal(100_003, np.float32), NBYTES // kind.itemsize)
    flat, target = DeviceArray(numbers.astype(kind)), DeviceArray.empty((NBYTES // kind.itemsize,), kind)
    copy_launch, free = bench.device_copy(NBYTES)
    records = []
    for columns in ROW_LENGTHS:
        shape = (NBYTES // (columns * kind.itemsize), columns)
        strides = (columns * kind.itemsize, kind.itemsize)
        given = {"x": reinterpret(flat, kind, shape, strides), "out": reinterpret(target, kind, shape, strides)}
        epsilon = {}
        if operation == "rmsnorm":
            given["weight"] = reinterpret(flat, kind, (columns,), (kind.itemsize,))
            epsilon = {"epsilon": rmsnorm.EPSILON}
        launches: dict[str, Callable[[], object]] = {"driver's copy": copy_launch}
        variant, options = binding.choose(binding.operands(given))
        launches["chosen"] = binding.bind(operation, variant)(given, **options, **epsilon)
        launches |= peers.all_of(operation, given, **epsilon)
        timings = bench.time_launches(launches, repeats=REPEATS)
        rates = {name: 2 * NBYTES / timing.median / 1e9 for name, timing in timings.items()}
        records.append(
            {
                "operation": operation,
                "dtype": dtype,
                "columns": columns,
                "variant": variant,
                "options": options,
                "gb_per_s": rates,
            }
        )
    free()
    return records


def copy_types() -> list[Record]:
    """1 GiB in every element type, by each variant of copy and by the driver."""
    source, target = (DeviceArray(np.resize(np.arange(251, dtype=np.uint8), NBYTES)) for _ in range(2))
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


ALL: dict[str, Callable[[], list[Record]]] = {"rows": rows, "copy_types": copy_types}

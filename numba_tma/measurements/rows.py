"""Benchmarks of softmax and rmsnorm for docs/softmax.md: rates over row lengths, in GB/s, bytes read plus written."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import bench, dtypes
from ..arrays import reinterpret
from ..device_array import DeviceArray
from ..kernels.rows import binding, peers, rmsnorm
from ..kernels.rows.operands import operands
from .timing import Record

NBYTES = 1 << 30  # of a matrix
ROW_LENGTHS = tuple(1 << power for power in range(12, 19))
REPEATS = 9

# What is measured beside the choice for rows that a block holds, and for longer ones.
SHORT = (
    ("registers", {}),
    ("registers", {"keep": True}),
    ("bulk", {"keep": True}),
    ("cluster", {"parts": 1, "keep": True}),
    ("online", {"threads": 512, "vectors": 4, "min_blocks": 2, "keep": True}),
)
LONG = (
    ("cluster", {}),
    ("cluster", {"keep": True}),
    ("ring", {}),
    ("grid", {"keep": True}),
    ("online", {"threads": 512, "vectors": 4, "min_blocks": 2, "keep": True}),
)


def candidates(given: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Variants and options that are measured for these arrays, by name: what is chosen for them, and others."""
    o = operands(given)
    others = SHORT if o.columns * o.itemsize <= binding.PART_BYTES else LONG
    return {
        " ".join([variant, *(f"{option}={value}" for option, value in sorted(options.items()))]): (variant, options)
        for variant, options in (binding.choose(o), *others)
    }


def rows(compile_until: float = math.inf) -> list[Record]:
    """softmax and rmsnorm of 1 GiB in rows of 4k to 256k, beside PyTorch, its compiler and the driver's copy.

    PyTorch's compiler takes its time: after `compile_until`, of `time.monotonic`, it is left out.
    """
    records: list[Record] = []
    for dtype in ("float32", "bfloat16"):
        rows_of(dtype, records, compile_until)
    return records


def rows_of(dtype: str, records: list[Record], compile_until: float = math.inf) -> None:
    """`rows` of one type, each appended to `records` when it is there."""
    kind = dtypes.lookup(dtype).numpy
    # A tenth of a million random numbers, over and over: what is in a row does not matter for its time.
    numbers = np.resize(
        np.random.default_rng(0).standard_normal(100_003, np.float32).astype(kind), NBYTES // kind.itemsize
    )
    flat, target = DeviceArray(numbers), DeviceArray.empty((NBYTES // kind.itemsize,), kind)
    copy_launch, free = bench.device_copy(NBYTES)
    for columns, operation in itertools.product(ROW_LENGTHS, ("softmax", "rmsnorm")):
        shape = (NBYTES // (columns * kind.itemsize), columns)
        strides = (columns * kind.itemsize, kind.itemsize)
        given = {"x": reinterpret(flat, kind, shape, strides), "out": reinterpret(target, kind, shape, strides)}
        epsilon = {}
        if operation == "rmsnorm":
            given["weight"] = reinterpret(flat, kind, (columns,), (kind.itemsize,))
            epsilon = {"epsilon": rmsnorm.EPSILON}
        launches: dict[str, Callable[[], object]] = {"driver's copy": copy_launch}
        for name, (variant, options) in candidates(given).items():
            launches[name] = binding.bind(operation, variant)(given, **options, **epsilon)
        compiled = time.monotonic() < compile_until
        launches |= peers.all_of(operation, given, compiled=compiled, **epsilon)
        timings = bench.time_launches(launches, repeats=REPEATS)
        rates = {name: 2 * NBYTES / timing.median / 1e9 for name, timing in timings.items()}
        records.append({"operation": operation, "dtype": dtype, "columns": columns, "gb_per_s": rates})
    free()

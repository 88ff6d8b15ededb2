"""Benchmarks of softmax and rmsnorm for docs/softmax.md: rates over row lengths, in GB/s, bytes read plus written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .. import bench, dtypes
from ..arrays import reinterpret
from ..device_array import DeviceArray
from ..kernels.rows import binding, peers, rmsnorm
from ..kernels.rows.operands import operands
from .timing import Record

NBYTES = 1 << 30  # of a matrix
DTYPES = ("float32", "bfloat16")
ROW_LENGTHS = tuple(1 << power for power in range(12, 19))
OPERATIONS = ("softmax", "rmsnorm")
REPEATS = 9

Steps = tuple[tuple[str, dict[str, Any]], ...]

ONLINE = ("online", {"threads": 512, "vectors": 4, "min_blocks": 2, "keep": True})
# The ladder, for rows that a block holds and for longer ones.
SHORT: Steps = (("plain", {}), ONLINE, ("registers", {}))
LONG: Steps = (("plain", {}), ONLINE, ("ring", {}), ("grid", {"keep": True}))
# Threads of an SM that have registers for so many vectors of half as wide numbers each, and for as many weights.
HALF_HELD = {2: 1536, 4: 1024}
# Rows that are taken twice from shared memory: KB of a row in a block, blocks of a row at most, and the options.
PARTS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (64, 16, {}),
    (64, 16, {"threads": 256, "vectors": 4}),
)
WEIGHTED_PARTS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (64, 16, {}),
    (32, 16, {"threads": 256, "rows": 2, "ahead": 4}),
    (32, 8, {"threads": 256, "ahead": 2, "min_blocks": 4}),
    (16, 16, {"threads": 256, "rows": 2, "ahead": 2, "min_blocks": 4}),
)


def candidates(given: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Variants and options that are measured for these arrays, by name: what is chosen for them, and others."""
    o = operands(given)
    nbytes = o.vectors * binding.VECTOR
    weighted = o.weight is not None
    steps = [binding.choose(o)]
    if nbytes > binding.PART_BYTES:
        steps += LONG
    else:
        steps += [*SHORT, ("bulk", {"threads": min(512, o.vectors // 2), "keep": True})]
        for vectors, most in HALF_HELD.items() if weighted and o.itemsize == 2 else ():
            threads = min(1024, o.vectors // vectors)
            steps.append(("registers", {"threads": threads, "min_blocks": most // threads, "keep": True}))
    for kilobytes, most, options in WEIGHTED_PARTS if weighted else PARTS:
        parts = -(-nbytes // (kilobytes * 1024))
        if 2 * nbytes >= kilobytes * 1024 and parts <= most:
            steps.append(("cluster", {**options, "parts": parts, "keep": True}))
    found = {}
    for variant, options in steps:
        if options.get("parts") == binding.parts_of(options.get("rows", 1) * o.vectors, variant):
            options = {option: value for option, value in options.items() if option != "parts"}  # as without it
        name = " ".join([variant, *(f"{option}={value}" for option, value in sorted(options.items()))])
        found[name] = variant, options
    return found


def arrays_of(operation: str, columns: int, flat: DeviceArray, target: DeviceArray) -> dict[str, Any]:
    """The operation's arrays: rows of so many columns in `flat` and, for the results, in `target`."""
    kind = flat.dtype
    shape, strides = (flat.shape[0] // columns, columns), (columns * kind.itemsize, kind.itemsize)
    given = {"x": reinterpret(flat, kind, shape, strides), "out": reinterpret(target, kind, shape, strides)}
    if operation == "rmsnorm":
        given["weight"] = reinterpret(flat, kind, (columns,), (kind.itemsize,))
    return given


def epsilon_of(operation: str) -> dict[str, float]:
    """What the operation takes beside arrays."""
    return {"epsilon": rmsnorm.EPSILON} if operation == "rmsnorm" else {}


def rows() -> Iterator[Record]:
    """softmax and rmsnorm of 1 GiB in rows of 4k to 256k, beside PyTorch, its compiler and the driver's copy.

    A record comes when it is there: what PyTorch's compiler takes for each length may be longer than one waits.
    """
    copy_launch, free = bench.device_copy(NBYTES)
    try:
        for dtype in DTYPES:
            yield from _rows_of(dtypes.lookup(dtype).numpy, copy_launch)
    finally:
        free()


def _rows_of(kind: np.dtype, copy_launch: Callable[[], object]) -> Iterator[Record]:
    """`rows` of one type."""
    # A tenth of a million random numbers, over and over: what is in a row does not matter for its time.
    numbers = np.resize(
        np.random.default_rng(0).standard_normal(100_003, np.float32).astype(kind), NBYTES // kind.itemsize
    )
    flat, target = DeviceArray(numbers), DeviceArray.empty(numbers.shape, kind)
    for columns, operation in itertools.product(ROW_LENGTHS, OPERATIONS):
        given = arrays_of(operation, columns, flat, target)
        epsilon = epsilon_of(operation)
        launches: dict[str, Callable[[], object]] = {"driver's copy": copy_launch}
        for name, (variant, options) in candidates(given).items():
            launches[name] = binding.bind(operation, variant)(given, **options, **epsilon)
        launches |= peers.all_of(operation, given, **epsilon)
        timings = bench.time_launches(launches, repeats=REPEATS)
        rates = {name: 2 * NBYTES / timing.median / 1e9 for name, timing in timings.items()}
        yield {"operation": operation, "dtype": kind.name, "columns": columns, "gb_per_s": rates}

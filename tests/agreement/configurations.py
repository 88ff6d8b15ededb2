"""Random tensor copies: what a map describes, where its box lies, and what the engine shall do with it.

A configuration is made from a group's name and an index alone, with generators whose streams do not change between
versions of Python and NumPy, so that results recorded on a GPU can be compared anywhere. Dimensions are counted as
the hardware does, fastest first.
"""

from __future__ import annotations

import math
import random
import zlib
from dataclasses import dataclass, field

import numpy as np

from numba_tma import dtypes
from numba_tma.dtypes import ElementType
from numba_tma.shared import SWIZZLES

SEED = 20250611
SHARED_BYTES = 16384  # of the buffer that a copy lies in
_MOST_BOX_BYTES = 12288
_MOST_TENSOR_BYTES = 24576
_CHUNK = 16

LOAD, STORE = "load", "store"
REDUCTIONS = {
    "add": ("uint32", "int32", "uint64", "float16", "bfloat16", "float32", "float32_ftz"),
    "min": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "max": ("uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
    "inc": ("uint32",),
    "dec": ("uint32",),
    "and": ("uint32", "int32", "uint64", "int64"),
    "or": ("uint32", "int32", "uint64", "int64"),
    "xor": ("uint32", "int32", "uint64", "int64"),
}
OPERATIONS = (LOAD, STORE, *REDUCTIONS)
_DTYPES = tuple(e.name for e in dtypes.TABLE if e.name not in ("int8", "int16", "float8_e4m3fn", "float8_e5m2"))
_FLOAT_REDUCTIONS = tuple((op, d) for op in ("add", "min", "max") for d in REDUCTIONS[op] if "float" in d)

# How many configurations there are of each group.
GROUPS = {
    "ordinary": 2400,
    "strided stores": 120,
    "extreme coordinates": 120,
    "special values": 160,
    "loads between chunks": 160,
    "illegal stores": 24,
}


@dataclass(frozen=True)
class Configuration:
    """One copy.

    `sizes`, `box`, `element_strides` and `coordinates` have one entry a dimension (elements); `strides` are in bytes
    and lack the fastest dimension. `place` is the box's offset in the shared buffer, `lead` the tensor's behind a
    multiple of 256 B. `values` says what the memory holds: 'bytes' (anything), 'numbers' (normal floating-point
    numbers), 'specials' (NaN, infinities, zeros and subnormals among them), 'numbered' (see `contents`). `index` seeds
    the data, `given` overrides it: bytes of the tensor and of the shared buffer, from the first element and `place` on.
    `forced` replaces fields of the map's spec behind its checks. `expected` is what the barrier is told, by default
    the box's bytes.
    """

    operation: str
    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    coordinates: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: str = "none"
    fill: str = "zero"
    place: int = 0
    lead: int = 0
    l2_promotion: str = "none"
    values: str = "bytes"
    index: int = 0
    given: tuple[bytes, bytes] = (b"", b"")
    forced: tuple[tuple[str, object], ...] = ()
    expected: int | None = None
    steps: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", self.element_strides or (1,) * len(self.sizes))

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)

    @property
    def element(self) -> ElementType:
        """The element type."""
        return dtypes.lookup(self.dtype)

    @property
    def span(self) -> int:
        """Bytes from the tensor's first to the end of its last."""
        reach = sum((size - 1) * stride for size, stride in zip(self.sizes[1:], self.strides, strict=True))
        return reach + self.sizes[0] * self.element.size

    @property
    def faults(self) -> bool:
        """Whether the hardware ends the kernel with an illegal instruction, so that it needs a process of its own."""
        between = self.coordinates[0] * self.element.size % _CHUNK != 0
        before = self.operation != LOAD and min(self.coordinates) < 0
        signed_bits = self.operation in ("and", "or", "xor") and self.dtype == "int64"
        return between or before or signed_bits

    @property
    def tags(self) -> set[str]:
        """What is remarkable about it: differences are counted by these."""
        size = self.element.size
        row, end = self.box[0] * size, self.coordinates[0] + self.box[0]
        found = {self.operation, f"{self.operation} {self.dtype}", f"rank {self.rank}"}
        if self.swizzle != "none":
            found.add("swizzle")
            if row < SWIZZLES[self.swizzle].span:
                found.add("swizzle, narrow rows")
            if self.place % SWIZZLES[self.swizzle].alignment:
                found.add("swizzle, pattern not at the box's start")
        if set(self.steps) != {1}:
            found.add("element strides")
            if any(c < 0 and s > 1 for c, s in zip(self.coordinates, self.steps, strict=True)):
                found.add("element strides, negative start")
            if any(b % s for b, s in zip(self.box, self.steps, strict=True)):
                found.add("element strides, box no multiple")
        if self.coordinates[0] * size % _CHUNK:
            found.add("inner coordinate between chunks")
        if self.sizes[0] * size % _CHUNK and self.coordinates[0] < self.sizes[0] < end:
            found.add("row ends within a chunk")
        outside = [
            c < 0 or c + b > n for c, b, n in zip(self.coordinates, self.box, self.sizes, strict=True)
        ]  # also where the step jumps over what is outside
        if any(outside):
            found.add("partly outside, nan fill" if self.fill == "nan" else "partly outside")
        if min(self.coordinates) < 0:
            found.add("negative start")
        if any(stride < self.sizes[0] * size for stride in self.strides):
            found.add("overlap")
        if self.values != "bytes":
            found.add(self.values)
        return found


def group(name: str, seed: int = SEED) -> list[Configuration]:
    """The configurations of a group; the default seed's are those that were recorded."""
    return [_random(name, index, seed) for index in range(GROUPS[name])]


def _random(group_name: str, index: int, seed: int) -> Configuration:
    r = random.Random(f"{seed} {group_name} {index}")
    rank = 1 + index % 5
    stores_only = group_name in ("strided stores", "illegal stores")
    loads_only = group_name == "loads between chunks"
    if group_name == "special values":
        operation, dtype = r.choice(_FLOAT_REDUCTIONS)
    else:
        kind = r.random()
        if (kind < 0.4 and not stores_only) or loads_only:
            operation = LOAD
        elif kind < 0.65:
            operation = STORE
        else:
            operation = r.choice(tuple(REDUCTIONS))
        dtype = r.choice(_DTYPES if operation in (LOAD, STORE) else REDUCTIONS[operation])
    element = dtypes.lookup(dtype)
    if group_name == "strided stores":
        strided = True
    else:
        strided = operation == LOAD and r.random() < 0.3
    swizzle = r.choice(("none", "none", "32B", "64B", "128B"))
    box, steps = _box(r, rank, element.size, swizzle, strided)
    sizes = _sizes(r, box, element.size)
    strides = _strides(r, sizes, element.size, overlap=operation == LOAD and r.random() < 0.08)
    coordinates = tuple(_coordinate(r, n, b, operation == LOAD) for n, b in zip(sizes, box, strict=True))
    if group_name == "extreme coordinates":
        axis = r.randrange(rank)
        start = r.choice((2**31 - 1 - r.randrange(4), -(2**31) + r.randrange(4), r.randint(-(2**31), 2**31 - 1)))
        if operation != LOAD and start < 0:
            start += 2**31
        coordinates = coordinates[:axis] + (start,) + coordinates[axis + 1 :]
    # A copy must begin between two chunks of a row; some that do not have groups of their own.
    grain = _CHUNK // element.size
    coordinates = (coordinates[0] // grain * grain, *coordinates[1:])
    if loads_only and grain > 1:
        coordinates = (coordinates[0] + r.randrange(1, grain), *coordinates[1:])
    if group_name == "illegal stores":
        coordinates = _illegal(r, coordinates, box, grain)
    values = "bytes"
    if operation not in (LOAD, STORE) and element.floating:
        values = "specials" if group_name == "special values" else "numbers"
    return Configuration(
        operation=operation,
        dtype=dtype,
        sizes=sizes,
        strides=strides,
        box=box,
        coordinates=coordinates,
        element_strides=steps,
        swizzle=swizzle,
        fill="nan" if element.floating and operation == LOAD and r.random() < 0.5 else "zero",
        place=128 * r.choice((0, 0, 8, r.randrange(16), r.randrange(16))),
        lead=16 * r.choice((0, r.randrange(16))),
        l2_promotion=r.choice(("none", "64B", "128B", "256B")),
        values=values,
        index=zlib.crc32(f"{seed} {group_name} {index}".encode()),
    )


def _illegal(r: random.Random, coordinates: tuple[int, ...], box: tuple[int, ...], grain: int) -> tuple[int, ...]:
    """Coordinates at which no store may begin: inside a chunk, or before the tensor (also at a chunk's begin)."""
    if r.random() < 0.5:
        return (coordinates[0] + r.randrange(1, grain), *coordinates[1:])
    axis = r.randrange(len(box))
    start = -grain * r.randint(1, box[0] // grain) if axis == 0 else -r.randint(1, box[axis])
    return coordinates[:axis] + (start,) + coordinates[axis + 1 :]


def _box(
    r: random.Random, rank: int, size: int, swizzle: str, strided: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Box and element strides: a box that fits the shared buffer, with rows that the swizzle takes."""
    span = SWIZZLES[swizzle].span
    most = min(span or 256 * size, 256 * size, 1024) // _CHUNK
    chunks = most if span and r.random() < 0.6 else r.randint(1, most)
    pitch = max(chunks * _CHUNK, span)
    rows_left = _MOST_BOX_BYTES // pitch
    box, steps = [chunks * _CHUNK // size], [1]
    for dim in range(1, rank):
        share = max(1, int(rows_left ** (1 / (rank - dim))))
        moved = r.randint(1, min(rows_left, 2 * share, 64))
        rows_left //= moved
        step = r.choice((1, 2, 2, 3, 4, r.randint(1, 8))) if strided else 1
        moved = min(moved, 255 // step)
        box.append((moved - 1) * step + r.randint(1, step))
        steps.append(step)
    return tuple(box), tuple(steps)


def _sizes(r: random.Random, box: tuple[int, ...], size: int) -> tuple[int, ...]:
    sizes = [r.choice((b, r.randint(1, 2 * b + 3), r.randint(1, 2 * b + 3))) for b in box]
    while math.prod(sizes) * size > _MOST_TENSOR_BYTES:
        largest = max(range(len(sizes)), key=lambda d: sizes[d])
        sizes[largest] = max(1, sizes[largest] * 2 // 3)
    return tuple(sizes)


def _strides(r: random.Random, sizes: tuple[int, ...], size: int, overlap: bool) -> tuple[int, ...]:
    """Strides in bytes, with padding, the dimensions now and then in another order than the sizes'."""
    order = list(range(1, len(sizes)))
    if r.random() < 0.2:
        r.shuffle(order)
    strides = [0] * len(sizes)
    covered = sizes[0] * size
    for dim in order:
        strides[dim] = -(-covered // _CHUNK) * _CHUNK + _CHUNK * r.choice((0, 0, 1, r.randrange(4)))
        covered = strides[dim] * sizes[dim]
    if overlap and order:
        strides[r.choice(order)] = _CHUNK * r.randint(1, 4)
    return tuple(strides[1:])


def _coordinate(r: random.Random, size: int, box: int, negative: bool) -> int:
    """Where the box begins in one dimension: mostly inside, else over either end or beyond."""
    kind = r.random()
    if kind < 0.6:
        return r.randint(0, max(0, size - box))
    if kind < 0.8:
        return r.randint(max(0, size - box), size - 1)
    if kind < 0.94 and negative:
        return -r.randint(1, max(1, box - 1))
    if kind < 0.97 or not negative:
        return size + r.randrange(4) if kind > 0.9 else r.randint(0, size - 1)
    return -box - r.randrange(4)


def contents(configuration: Configuration, nbytes: int, stream: int) -> np.ndarray:
    """Initial bytes of the global (stream 0) or shared (stream 1) memory of a configuration.

    Numbered memory is, for a load, a tensor of 16-bit words that count from the slot's begin; for a store, a tensor of
    zeros and a shared buffer whose byte i is 1 + i mod 251.
    """
    if stream == 1 and configuration.operation == LOAD:
        return np.full(nbytes, configuration.index % 251 + 3, np.uint8)
    if configuration.values == "numbered":
        if configuration.operation == LOAD:
            return np.arange(nbytes // 2).astype("<u2").view(np.uint8)
        return (1 + np.arange(nbytes) % 251).astype(np.uint8) if stream else np.zeros(nbytes, np.uint8)
    raw = np.random.PCG64([SEED, configuration.index, stream]).random_raw(nbytes // 8).astype("<u8")
    if configuration.values == "bytes":
        if configuration.operation in ("inc", "dec", "min", "max"):  # small numbers too, so that some are equal
            words = raw.view("<u4")
            words[::2] &= 3
        return raw.view(np.uint8)
    return _floats(raw, configuration.element, configuration.values == "specials").view(np.uint8)


# Sign and exponent bits, mantissa bits, and the exponents (biased) of the numbers drawn.
_FORMATS = {
    "float16": ("<u2", 10, 5, 9, 21),
    "bfloat16": ("<u2", 7, 8, 119, 135),
    "float32": ("<u4", 23, 8, 117, 137),
    "float64": ("<u8", 52, 11, 1013, 1033),
}


def special_bits(dtype: str) -> list[int]:
    """Bit patterns of zeros, infinities, NaNs, subnormals and limits of a floating-point type."""
    _, mantissa, exponent, _, _ = _FORMATS[dtype]
    top, sign = ((1 << exponent) - 1) << mantissa, 1 << (mantissa + exponent)
    low = [0, top, top | 1 << (mantissa - 1), top | 1, top | (1 << mantissa) - 1]
    low += [1, (1 << mantissa) - 1, 1 << mantissa, top - 1]
    return low + [bits | sign for bits in low]


def _floats(raw: np.ndarray, element: ElementType, specials: bool) -> np.ndarray:
    name = np.dtype(element.numpy).name
    unsigned, mantissa, exponent, low, high = _FORMATS[name]
    bits = raw.view(unsigned).copy()
    one = bits.dtype.type
    fraction, sign = bits & one((1 << mantissa) - 1), bits & one(1 << (mantissa + exponent))
    biased = one(low) + (bits >> one(mantissa)) % one(high - low)
    numbers = sign | biased << one(mantissa) | fraction
    if specials:
        chosen = np.array(special_bits(name), bits.dtype)
        kind = bits % one(7)
        numbers = np.where(kind < 2, chosen[(bits >> one(3)) % one(len(chosen))], numbers)
        numbers = np.where(kind == 2, sign | fraction, numbers)  # any subnormal
    return np.ascontiguousarray(numbers, unsigned)

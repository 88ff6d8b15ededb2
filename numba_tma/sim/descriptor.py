"""The simulator's tensor map: 128 bytes that describe a tensor, a box and how one becomes the other.

On a GPU the 128 bytes are opaque and only the driver writes them. The simulator has a layout of its own, so
that a tensor map can be copied, passed as a parameter and edited by ``tensormap.replace`` like the real one:

======  =====  ==========================================================================================
offset  bytes  field (little-endian)
======  =====  ==========================================================================================
0       8      tag ``NUMBATMA``; tells a tensor map of the simulator from anything else
8       2      version of this layout, 1
10      1      element type, a ``CUtensorMapDataType`` value
11      1      rank - 1
12      1      interleave, a ``CUtensorMapInterleave`` value
13      1      swizzle, a ``CUtensorMapSwizzle`` value
14      1      L2 promotion, a ``CUtensorMapL2promotion`` value
15      1      out-of-bounds fill, a ``CUtensorMapFloatOOBfill`` value
16      8      global address
24      40     sizes of dimensions 0 to 4 in elements, innermost first
64      32     strides of dimensions 1 to 4 in bytes
96      10     box extents of dimensions 0 to 4 in elements; im2col: channels and pixels
106     5      element (traversal) strides of dimensions 0 to 4
111     1      mode: 0 tiled, 1 im2col
112     6      im2col: lower corner of the bounding box, dimensions 1 to 3, signed
118     6      im2col: upper corner of the bounding box, dimensions 1 to 3, signed
124     1      1: the bytes from a row's end to the next multiple of 16 are there to be overwritten by stores
125     3      zero
======  =====  ==========================================================================================

Dimensions from the rank upwards are ignored (zero as encoded). Sources: CUDA Driver API,
"Tensor Map Object Management" (``cuTensorMapEncodeTiled``, ``cuTensorMapEncodeIm2col``); PTX ISA, "Tensor-map",
"Im2col mode" and "tensormap.replace".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from .errors import SimError

NBYTES = 128
ALIGNMENT = 64
MAX_RANK = 5
MAX_PIXELS = 1024  # of one im2col copy
# Smallest and largest number in a corner of an im2col map's bounding box, by rank.
CORNER_LIMITS = {3: (-(1 << 15), (1 << 15) - 1), 4: (-(1 << 7), (1 << 7) - 1), 5: (-(1 << 4), (1 << 4) - 1)}
# Offsets of an im2col copy, by rank: machine code keeps those of all dimensions in one word of 16 bits.
OFFSET_LIMITS = {3: (1 << 16) - 1, 4: (1 << 8) - 1, 5: (1 << 5) - 1}
_MODE = 111  # offset of the mode
_TAG = b"NUMBATMA"
_VERSION = 1
_HEAD = struct.pack("<8sH", _TAG, _VERSION)
_FIELDS = struct.Struct("<6BQ5Q4Q5H5BB3h3hB3x")


class TensorMapError(SimError):
    """A tensor map that no driver would have encoded, or memory that holds no tensor map."""


class DataType(IntEnum):
    """``CUtensorMapDataType`` as far as Hopper has it."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return _ELEMENT_BYTES[self]

    @property
    def is_float(self) -> bool:
        """Whether the NaN fill is allowed."""
        return self >= DataType.FLOAT16


_ELEMENT_BYTES = {
    DataType.UINT8: 1,
    DataType.UINT16: 2,
    DataType.UINT32: 4,
    DataType.INT32: 4,
    DataType.UINT64: 8,
    DataType.INT64: 8,
    DataType.FLOAT16: 2,
    DataType.FLOAT32: 4,
    DataType.FLOAT64: 8,
    DataType.BFLOAT16: 2,
    DataType.FLOAT32_FTZ: 4,
    DataType.TFLOAT32: 4,
    DataType.TFLOAT32_FTZ: 4,
}


class Interleave(IntEnum):
    """``CUtensorMapInterleave``."""

    NONE = 0
    B16 = 1
    B32 = 2


class Swizzle(IntEnum):
    """``CUtensorMapSwizzle`` as far as Hopper has it."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3

    @property
    def span(self) -> int:
        """Bytes within which 16-byte chunks change places; 16 without swizzle."""
        return 16 << self


class L2Promotion(IntEnum):
    """``CUtensorMapL2promotion``."""

    NONE = 0
    B64 = 1
    B128 = 2
    B256 = 3


class Fill(IntEnum):
    """``CUtensorMapFloatOOBfill``: what a load delivers for elements outside the tensor."""

    ZERO = 0
    NAN = 1


# tensormap.replace has codes of its own for the element type (PTX ISA, "tensormap.replace", new_val).
_PTX_ELEMTYPE = (
    DataType.UINT8,
    DataType.UINT16,
    DataType.UINT32,
    DataType.INT32,
    DataType.UINT64,
    DataType.INT64,
    DataType.FLOAT16,
    DataType.FLOAT32,
    DataType.FLOAT32_FTZ,
    DataType.FLOAT64,
    DataType.BFLOAT16,
    DataType.TFLOAT32,
    DataType.TFLOAT32_FTZ,
)


@dataclass(frozen=True)
class Descriptor:
    """A tensor map, dimensions innermost first as the hardware counts them.

    `sizes`, `box` and `element_strides` have `rank` entries (elements); `strides` has `rank` - 1 (bytes, of
    dimensions 1 and up; the innermost dimension is contiguous). `address` is the global address of element
    (0, …, 0).

    With corners it is an im2col map: `box` is (channels, pixels), and the bounding box of the pixels goes, in each of
    the dimensions between the channels and the images, from `lower` to the tensor's last plus `upper`.

    `padding` is the simulator's own: stores may overwrite the bytes from a row's end to the next multiple of 16.
    """

    dtype: int
    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    interleave: int = Interleave.NONE
    swizzle: int = Swizzle.NONE
    l2_promotion: int = L2Promotion.NONE
    fill: int = Fill.ZERO
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()
    padding: bool = False

    def __post_init__(self) -> None:
        if not self.element_strides:
            object.__setattr__(self, "element_strides", (1,) * len(self.sizes))

    @property
    def rank(self) -> int:
        """Number of dimensions, 1 to 5."""
        return len(self.sizes)

    @property
    def im2col(self) -> bool:
        """Whether copies walk over pixels instead of taking a box."""
        return bool(self.lower or self.upper)


def encode(desc: Descriptor) -> bytes:
    """Return the 128 bytes of `desc`. Raises TensorMapError if a rule of the driver is broken."""
    check(desc)

    def padded(values: tuple[int, ...], length: int) -> tuple[int, ...]:
        return values + (0,) * (length - len(values))

    return _HEAD + _FIELDS.pack(
        desc.dtype,
        desc.rank - 1,
        desc.interleave,
        desc.swizzle,
        desc.l2_promotion,
        desc.fill,
        desc.address,
        *padded(desc.sizes, 5),
        *padded(desc.strides, 4),
        *padded(desc.box, 5),
        *padded(desc.element_strides, 5),
        desc.im2col,
        *padded(desc.lower, 3),
        *padded(desc.upper, 3),
        desc.padding,
    )


@lru_cache(maxsize=1024)
def decode(data: bytes) -> Descriptor:
    """Return the descriptor held in 128 bytes.

    Raises TensorMapError if they hold no tensor map of the simulator, or one that breaks a rule of the
    driver.
    """
    _check_tag(data)
    dtype, last, interleave, swizzle, l2_promotion, fill, address, *rest = _FIELDS.unpack_from(data, len(_HEAD))
    rank = last + 1
    im2col = rest[19]
    desc = Descriptor(
        dtype=dtype,
        address=address,
        sizes=tuple(rest[0:5][:rank]),
        strides=tuple(rest[5:9][: rank - 1]),
        box=tuple(rest[9:14][: 2 if im2col else rank]),
        element_strides=tuple(rest[14:19][:rank]),
        interleave=interleave,
        swizzle=swizzle,
        l2_promotion=l2_promotion,
        fill=fill,
        lower=tuple(rest[20:23][: rank - 2]) if im2col else (),
        upper=tuple(rest[23:26][: rank - 2]) if im2col else (),
        padding=bool(rest[26]),
    )
    check(desc)
    return desc


def check(desc: Descriptor) -> None:
    """Raise TensorMapError unless `desc` keeps every rule of ``cuTensorMapEncodeTiled`` or ``…Im2col``.

    Interleaved layouts are refused: the simulator does not model them.
    """
    _require(0 <= desc.dtype <= 12, f"element type {desc.dtype} is no CUtensorMapDataType of Hopper (0 to 12)")
    dtype = DataType(desc.dtype)
    rank = desc.rank
    _require(1 <= rank <= MAX_RANK, f"rank {rank} is not in 1 to {MAX_RANK}")
    lengths = len(desc.strides) + 1, len(desc.box), len(desc.element_strides)
    extents = 2 if desc.im2col else rank
    _require(
        lengths == (rank, extents, rank),
        f"rank {rank} needs {rank - 1} strides, {extents} box extents and {rank} element strides; "
        f"got {len(desc.strides)}, {len(desc.box)} and {len(desc.element_strides)}",
    )
    if desc.im2col:
        _check_corners(desc)
    _require(desc.interleave == Interleave.NONE, f"interleave {desc.interleave} is not modelled; use none (0)")
    _require(0 <= desc.swizzle <= 3, f"swizzle {desc.swizzle} does not exist on Hopper (0 to 3)")
    _require(0 <= desc.l2_promotion <= 3, f"L2 promotion {desc.l2_promotion} is not in 0 to 3")
    _require(0 <= desc.fill <= 1, f"out-of-bounds fill {desc.fill} is neither zero (0) nor NaN (1)")
    _require(
        desc.fill == Fill.ZERO or dtype.is_float,
        f"NaN fill is for floating-point elements, not {dtype.name}; use the zero fill",
    )
    _require(
        0 <= desc.address < 2**64 and desc.address % 16 == 0,
        f"global address {desc.address:#x} is not a multiple of 16 bytes",
    )
    for dim, size in enumerate(desc.sizes):
        _require(0 < size <= 2**32, f"size {size} of dimension {dim} is not in 1 to 2**32")
    for dim, stride in enumerate(desc.strides, start=1):
        _require(
            0 <= stride < 2**40 and stride % 16 == 0,
            f"stride {stride} B of dimension {dim} is not a multiple of 16 B below 2**40; pad the rows",
        )
    for dim, extent in enumerate(desc.box):
        limit = MAX_PIXELS if desc.im2col and dim else 256
        _require(0 < extent <= limit, f"box extent {extent} of dimension {dim} is not in 1 to {limit}")
    for dim, step in enumerate(desc.element_strides):
        _require(0 < step <= 8, f"element stride {step} of dimension {dim} is not in 1 to 8")
    inner = desc.box[0] * dtype.nbytes
    _require(
        inner % 16 == 0,
        f"the box is {desc.box[0]} elements = {inner} B wide, not a multiple of 16 B",
    )
    span = Swizzle(desc.swizzle).span
    _require(
        desc.swizzle == Swizzle.NONE or inner <= span,
        f"the box is {inner} B wide, more than the {span} B of its swizzle; narrow the box or take a wider swizzle",
    )


def _check_corners(desc: Descriptor) -> None:
    rank = desc.rank
    _require(rank >= 3, f"rank {rank} is not in 3 to {MAX_RANK}, as an im2col map's must be")
    _require(
        len(desc.lower) == len(desc.upper) == rank - 2,
        f"rank {rank} needs {rank - 2} numbers for each corner; got {len(desc.lower)} and {len(desc.upper)}",
    )
    low, high = CORNER_LIMITS[rank]
    for dim, (lower, upper) in enumerate(zip(desc.lower, desc.upper, strict=True), start=1):
        _require(
            low <= lower <= high and low <= upper <= high,
            f"corners {lower} and {upper} of dimension {dim} are not in {low} to {high}",
        )
        _require(
            desc.sizes[dim] + upper > lower,
            f"the bounding box of dimension {dim}, {lower} to {desc.sizes[dim] - 1 + upper}, is empty",
        )


def replace(data: bytes, field: str, ordinal: int | None, value: int) -> bytes:
    """Return `data` with one field changed, as ``tensormap.replace.tile`` does.

    `field` is the PTX name: global_address, rank, box_dim, global_dim, global_stride, element_stride,
    elemtype, interleave_layout, swizzle_mode or fill_mode. `ordinal` selects the dimension for the four
    fields that have one (else None); ordinal 0 of global_stride is the stride of dimension 1. `value` is
    coded as PTX codes it: the rank is one less than the number of dimensions, strides are in bytes, and the
    element type has numbers of its own, which are not those of the driver.

    128 zero bytes become a tensor map by their first replacement: kernels build one from nothing that way.
    Only the value itself is checked, since a map may be inconsistent between two replacements; `decode`
    checks the whole. Raises TensorMapError.
    """
    if len(data) == NBYTES and not any(data):
        data = _HEAD + bytes(NBYTES - len(_HEAD))
    _check_tag(data)
    _require(data[_MODE] == 0, "tensormap.replace.tile is for tiled tensor maps; this is an im2col map")
    _require(field in _REPLACEABLE, f"tensormap.replace: no field .{field}; there are {', '.join(_REPLACEABLE)}")
    code, offset, ordinals, limit = _REPLACEABLE[field]
    size = struct.calcsize(code)
    if ordinals:
        _require(
            ordinal is not None and 0 <= ordinal < ordinals,
            f"tensormap.replace .{field}: ordinal {ordinal} is not in 0 to {ordinals - 1}",
        )
        offset += size * ordinal
    else:
        _require(ordinal is None, f"tensormap.replace .{field} takes no ordinal, got {ordinal}")
    _require(0 <= value <= limit, f"tensormap.replace .{field}: value {value} is not in 0 to {limit}")
    if field == "elemtype":
        value = _PTX_ELEMTYPE[value]
    return data[:offset] + struct.pack(code, value) + data[offset + size :]


# field: struct code, offset, number of ordinals (0: the field takes none), largest value
_REPLACEABLE = {
    "global_address": ("<Q", 16, 0, 2**64 - 1),
    "rank": ("<B", 11, 0, MAX_RANK - 1),
    "box_dim": ("<H", 96, 5, 256),
    "global_dim": ("<Q", 24, 5, 2**32 - 1),
    "global_stride": ("<Q", 64, 4, 2**40 - 1),
    "element_stride": ("<B", 106, 5, 8),
    "elemtype": ("<B", 10, 0, len(_PTX_ELEMTYPE) - 1),
    "interleave_layout": ("<B", 12, 0, 2),
    "swizzle_mode": ("<B", 13, 0, 3),
    "fill_mode": ("<B", 15, 0, 1),
}


def _check_tag(data: bytes) -> None:
    _require(len(data) == NBYTES, f"a tensor map has {NBYTES} bytes, not {len(data)}")
    _require(
        data[:8] == _TAG,
        "these 128 bytes are no tensor map of the simulator (tag missing): the address is wrong, the map was "
        "overwritten, or it was encoded by the driver for a GPU",
    )
    version = int.from_bytes(data[8:10], "little")
    _require(version == _VERSION, f"tensor map of layout version {version}; this simulator reads {_VERSION}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TensorMapError(message)

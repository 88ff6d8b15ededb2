"""Index arithmetic of tensor copies: which global bytes a box covers and where they lie in shared memory.

Pure functions over a whole box at once. Dimensions are counted innermost first, as in the descriptor; array
shapes are in NumPy order, outermost first. A *payload* is the box's data in traversal order, a uint8 array of
shape (extent of the outermost dimension, …, extent of dimension 1, bytes of a row).

The part of a box that lies inside the tensor is always a box itself, so a copy is one strided region of
global memory, one slice of the payload and one permutation of 16-byte chunks in shared memory.

Sources: PTX ISA, "Tensors" (tiled mode, out-of-boundary access, swizzling modes); CUDA Driver API,
``cuTensorMapEncodeTiled``; CUDA C++ Programming Guide, "Tensor memory access".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from .descriptor import DataType, Descriptor, Fill, Swizzle
from .errors import SimError

CHUNK = 16  # bytes that swizzling keeps together, and the grain at which a store is clipped
SHARED_ALIGNMENT = 128
_PATTERN_PERIOD = 1024  # bytes after which the widest swizzle pattern repeats
_CHUNK_DTYPE = np.dtype("V16")

# Under NaN fill every 16-bit part of an element outside the tensor reads so: a NaN in each floating type.
_OOB_NAN = 0x7FF7


@dataclass(frozen=True)
class Geometry:
    """What a descriptor alone fixes about its copies.

    `extents`: elements moved along each dimension (⌈box / element stride⌉). `steps`: global bytes between
    neighbours of each dimension. `row_bytes`: bytes of dimension 0; `row_pitch`: bytes from row to row in
    shared memory; `rows`: number of rows. `nbytes`: what a copy adds to an mbarrier's transaction count.
    """

    element_bytes: int
    extents: tuple[int, ...]
    steps: tuple[int, ...]
    row_bytes: int
    row_pitch: int
    rows: int
    nbytes: int
    swizzle: int


@dataclass(frozen=True)
class Window:
    """Part of a box: `count` elements of each dimension from `start` on."""

    start: tuple[int, ...]
    count: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """Bytes of global memory and their place in a payload.

    `address` of the first byte, `nbytes` from it to the end of the last; `shape` and byte `strides` of the
    uint8 array that they form; `index` of that array in the payload.
    """

    address: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    index: tuple[slice, ...]

    def of(self, view: np.ndarray) -> np.ndarray:
        """Return the region as an array on `view`, the `nbytes` bytes from `address` on."""
        return np.ndarray(self.shape, np.uint8, view, 0, self.strides)


@lru_cache(maxsize=256)
def geometry(desc: Descriptor) -> Geometry:
    """Return the geometry of `desc`.

    Dimension 0 ignores its element stride (without interleave the engine has none there). A swizzled row
    takes at least the span of its swizzle, so rows narrower than the span lie apart by the span.
    """
    element_bytes = DataType(desc.dtype).nbytes
    extents = (desc.box[0],) + tuple(
        -(-box // step) for box, step in zip(desc.box[1:], desc.element_strides[1:], strict=True)
    )
    steps = (element_bytes,) + tuple(
        stride * step for stride, step in zip(desc.strides, desc.element_strides[1:], strict=True)
    )
    row_bytes = extents[0] * element_bytes
    rows = 1
    for extent in extents[1:]:
        rows *= extent
    row_pitch = row_bytes if desc.swizzle == Swizzle.NONE else max(row_bytes, Swizzle(desc.swizzle).span)
    return Geometry(element_bytes, extents, steps, row_bytes, row_pitch, rows, rows * row_bytes, desc.swizzle)


def whole(geo: Geometry) -> Window:
    """Return the window that is the whole box."""
    return Window((0,) * len(geo.extents), geo.extents)


def split(geo: Geometry, parts: int) -> list[Window]:
    """Cut the box into at most `parts` windows along its outermost dimension that has more than one element.

    A box of one row is cut into runs of whole 16-byte chunks.
    """
    dim = max((d for d, extent in enumerate(geo.extents) if extent > 1), default=0)
    grain = CHUNK // geo.element_bytes if dim == 0 else 1
    units = geo.extents[dim] // grain
    parts = min(parts, units)
    bounds = [grain * (units * part // parts) for part in range(parts + 1)]
    box = whole(geo)

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return values[:dim] + (value,) + values[dim + 1 :]

    return [
        Window(put(box.start, low), put(box.count, high - low)) for low, high in zip(bounds, bounds[1:], strict=False)
    ]


def payload_shape(geo: Geometry, window: Window) -> tuple[int, ...]:
    """Return the shape of the payload of `window`."""
    return window.count[:0:-1] + (window.count[0] * geo.element_bytes,)


def inside(desc: Descriptor, coords: tuple[int, ...], window: Window) -> Region | None:
    """Return the part of the box at `coords` that lies inside the tensor, or None if there is none.

    `coords`: signed, one for each dimension; they may be negative or beyond the tensor.
    """
    first, last = clip(coords[0] + window.start[0], 1, window.count[0], desc.sizes[0])
    size = geometry(desc).element_bytes
    return _region(desc, coords, window, first * size, last * size)


def overhang(desc: Descriptor, coords: tuple[int, ...], window: Window) -> Region | None:
    """Return the bytes past the tensor's inner edge that a store writes all the same, or None.

    The engine clips a store at 16-byte grain: where a row of the tensor ends inside a 16-byte chunk, the rest
    of the chunk is written too as far as the box covers it.
    """
    geo = geometry(desc)
    row_end = desc.sizes[0] * geo.element_bytes
    if row_end % CHUNK == 0 or coords[0] >= desc.sizes[0]:
        return None
    origin = (coords[0] + window.start[0]) * geo.element_bytes  # position in the row of the payload's begin
    first = max(row_end - origin, 0)
    last = min(-(-row_end // CHUNK) * CHUNK - origin, window.count[0] * geo.element_bytes)
    return _region(desc, coords, window, first, last)


def clip(start: int, step: int, count: int, size: int) -> tuple[int, int]:
    """Return the range of i below `count` with 0 <= start + i·step < size."""
    first = -(start // step) if start < 0 else 0
    last = -((start - size) // step) if start < size else 0
    return first, min(last, count)


def _region(
    desc: Descriptor, coords: tuple[int, ...], window: Window, first_byte: int, last_byte: int
) -> Region | None:
    """Return bytes `first_byte` to `last_byte` of those rows of the payload that lie inside the tensor."""
    if last_byte <= first_byte:
        return None
    geo = geometry(desc)
    width = last_byte - first_byte
    address = desc.address + (coords[0] + window.start[0]) * geo.element_bytes + first_byte
    nbytes = width
    shape, strides, index = [width], [1], [slice(first_byte, last_byte)]
    for dim in range(1, len(coords)):
        step = desc.element_strides[dim]
        start = coords[dim] + window.start[dim] * step
        first, last = clip(start, step, window.count[dim], desc.sizes[dim])
        if last <= first:
            return None
        address += (start + first * step) * desc.strides[dim - 1]
        nbytes += (last - first - 1) * geo.steps[dim]
        shape.append(last - first)
        strides.append(geo.steps[dim])
        index.append(slice(first, last))
    # The engine adds modulo 2**64: a ragged map's steps lead once around.
    return Region(address % 2**64, nbytes, tuple(shape[::-1]), tuple(strides[::-1]), tuple(index[::-1]))


def fill_payload(desc: Descriptor, window: Window, geo: Geometry | None = None) -> np.ndarray:
    """Return a payload of elements outside the tensor: zeros, or NaN where the descriptor says so.

    `geo` is the descriptor's geometry, where it is not the tiled one.
    """
    shape = payload_shape(geo or geometry(desc), window)
    if desc.fill == Fill.ZERO:
        return np.zeros(shape, np.uint8)
    halves = np.full(shape[:-1] + (shape[-1] // 2,), _OOB_NAN, np.uint16)
    return halves.view(np.uint8)


def loaded(desc: Descriptor, data: np.ndarray) -> np.ndarray:
    """Return `data` (uint8, elements of the tensor) as a load delivers it.

    A load of TF32 elements rounds to 10 bits of mantissa, to nearest even; all others deliver the bytes as
    they are, also those of the flushing types.
    """
    if desc.dtype not in (DataType.TFLOAT32, DataType.TFLOAT32_FTZ):
        return data
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = (bits + (0x0FFF + (bits >> 13 & 1)).astype(np.uint32)) & np.uint32(0xFFFFE000)
    special = (bits & 0x7F800000) == 0x7F800000
    nan = special & ((bits & 0x007FFFFF) != 0)
    result = np.where(special, bits, rounded)
    result[nan] = 0x7FFFE000
    return result.view(np.uint8)


def swizzled(address: int, swizzle: int) -> int:
    """Return where the byte of unswizzled shared `address` lies.

    Address bits 4 to 6 (128-byte swizzle), 4 to 5 (64) or 4 (32) are XORed with bits 7 and up. These are
    bits of the absolute address: the pattern does not begin with the tile. Works on arrays too.
    """
    return address ^ ((address >> 7 & (1 << swizzle) - 1) << 4)


def shared_extent(geo: Geometry, dst: int) -> int:
    """Return the number of bytes from `dst` to the end of the last byte that a box at `dst` touches."""
    return _extent(geo.swizzle, geo.row_bytes, geo.row_pitch, geo.rows, dst % _PATTERN_PERIOD)


def write_shared(shared: np.ndarray, dst: int, geo: Geometry, window: Window, payload: np.ndarray) -> None:
    """Write the payload of `window` into `shared` (uint8, one block's memory), the box being at `dst`."""
    memory = shared.view(_CHUNK_DTYPE)
    memory[_chunks(dst, geo, window)] = payload.reshape(-1).view(_CHUNK_DTYPE)


def read_shared(shared: np.ndarray, src: int, geo: Geometry, window: Window) -> np.ndarray:
    """Return the payload of `window` from `shared` (uint8, one block's memory), the box being at `src`."""
    chunks = _chunks(src, geo, window)
    data = shared.view(_CHUNK_DTYPE)[chunks]
    if isinstance(chunks, slice):  # a view so far: the payload must not change with the memory
        data = data.copy()
    return data.view(np.uint8).reshape(payload_shape(geo, window))


def shared_addresses(dst: int, geo: Geometry, window: Window) -> np.ndarray:
    """Return the shared byte offsets of the payload's 16-byte chunks, in payload order."""
    chunks = _chunks(dst, geo, window)
    if isinstance(chunks, slice):
        chunks = np.arange(chunks.start, chunks.stop)
    return chunks * CHUNK


def _chunks(dst: int, geo: Geometry, window: Window) -> np.ndarray | slice:
    """Return the 16-byte chunks of shared memory, by number, that the payload of `window` occupies."""
    phase = dst % _PATTERN_PERIOD
    base = (dst - phase) // CHUNK
    chunks = _pattern(geo.swizzle, geo.row_bytes, geo.row_pitch, geo.rows, phase)
    per_row = geo.row_bytes // CHUNK
    if window.count != geo.extents:
        first, last = _linear_range(geo, window, per_row)
        chunks = slice(chunks.start + first, chunks.start + last) if isinstance(chunks, slice) else chunks[first:last]
    if isinstance(chunks, slice):
        return slice(chunks.start + base, chunks.stop + base)
    return chunks + base


def _linear_range(geo: Geometry, window: Window, per_row: int) -> tuple[int, int]:
    """Return the range of chunks, counted along the whole box, that a window made by `split` covers."""
    first = window.start[0] * geo.element_bytes // CHUNK
    length = window.count[0] * geo.element_bytes // CHUNK
    scale = per_row
    for start, count, extent in zip(window.start[1:], window.count[1:], geo.extents[1:], strict=True):
        first += start * scale
        length *= count
        scale *= extent
    return first, first + length


@lru_cache(maxsize=256)
def _pattern(swizzle: int, row_bytes: int, pitch: int, rows: int, phase: int) -> np.ndarray | slice:
    """Return chunk indices of a box that begins `phase` bytes into the pattern's period."""
    if swizzle == Swizzle.NONE:
        return slice(phase // CHUNK, (phase + rows * row_bytes) // CHUNK)
    row = phase + np.arange(rows, dtype=np.intp)[:, None] * pitch
    address = row + np.arange(0, row_bytes, CHUNK, dtype=np.intp)
    return (swizzled(address, swizzle) // CHUNK).ravel()


@lru_cache(maxsize=256)
def _extent(swizzle: int, row_bytes: int, pitch: int, rows: int, phase: int) -> int:
    """Return the number of bytes from the begin of such a box to its last byte's end."""
    chunks = _pattern(swizzle, row_bytes, pitch, rows, phase)
    last = chunks.stop if isinstance(chunks, slice) else int(chunks.max()) + 1
    return last * CHUNK - phase


_REDUCTIONS = {
    "add": "u32 s32 u64 f16 bf16 f32 f64",
    "min": "u32 s32 u64 s64 f16 bf16",
    "max": "u32 s32 u64 s64 f16 bf16",
    "inc": "u32",
    "dec": "u32",
    "and": "b32 b64",
    "or": "b32 b64",
    "xor": "b32 b64",
}
_NUMPY_TYPES = {
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}
_TENSOR_TYPES = {
    DataType.UINT32: "u32",
    DataType.INT32: "s32",
    DataType.UINT64: "u64",
    DataType.INT64: "s64",
    DataType.FLOAT16: "f16",
    DataType.BFLOAT16: "bf16",
    DataType.FLOAT32: "f32",
    DataType.FLOAT32_FTZ: "f32",
    # The three below are in no manual; the hardware adds them, TF32 in full single precision.
    DataType.FLOAT64: "f64",
    DataType.TFLOAT32: "f32",
    DataType.TFLOAT32_FTZ: "f32",
}
_CANONICAL_NAN = {np.float16: 0x7FFF, ml_dtypes.bfloat16: 0x7FFF, np.float32: 0x7FFFFFFF}


def tensor_reduction_type(op: str, dtype: int) -> str:
    """Return the PTX type in which a tensor reduction works on elements of the CUtensorMapDataType `dtype`.

    Raises SimError if the engine has no such reduction.
    """
    name = _TENSOR_TYPES.get(DataType(dtype))
    if op in ("and", "or", "xor"):
        if name == "s64":
            raise SimError(
                f"a tensor reduction .{op} through a map of INT64 elements faults (illegal instruction); make the map "
                "for UINT64 elements"
            )
        name = {"u32": "b32", "s32": "b32", "u64": "b64"}.get(name)
    if name is None:
        raise SimError(f"a tensor reduction .{op} on {DataType(dtype).name} elements does not exist")
    check_reduction(op, name)
    return name


def check_reduction(op: str, ptx_type: str) -> None:
    """Raise SimError unless bulk reductions have `op` for the PTX type name `ptx_type`."""
    if op not in _REDUCTIONS:
        raise SimError(f"bulk reductions have no operation .{op}; there are {', '.join(_REDUCTIONS)}")
    if ptx_type not in _REDUCTIONS[op].split():
        raise SimError(f"bulk reduction .{op} has no type .{ptx_type}; there are {_REDUCTIONS[op]}")


def reduce(op: str, ptx_type: str, old: np.ndarray, new: np.ndarray, flush: bool = False) -> np.ndarray:
    """Return `old` reduced with `new`, both uint8 arrays of whole elements along the last axis.

    `flush` makes f32 additions flush subnormal inputs and results to zero of the same sign.
    """
    dtype = _NUMPY_TYPES[ptx_type]
    a = np.ascontiguousarray(old).view(dtype)
    b = np.ascontiguousarray(new).view(dtype)
    with np.errstate(all="ignore"):
        if op == "add":
            result = _flush(_flush(a) + _flush(b)) if flush else a + b
        elif op in ("min", "max"):
            result = _extremum(op, a, b)
        elif op == "inc":
            result = np.where(a >= b, np.uint32(0), a + np.uint32(1))
        elif op == "dec":
            result = np.where((a == 0) | (a > b), b, a - np.uint32(1))
        elif op == "and":
            result = a & b
        elif op == "or":
            result = a | b
        else:
            result = a ^ b
        result = np.ascontiguousarray(result, dtype)
        if dtype in _CANONICAL_NAN:
            bits = result.view(f"u{result.itemsize}")
            bits[np.isnan(result)] = _CANONICAL_NAN[dtype]
    return result.view(np.uint8)


def _extremum(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the lesser or greater of `a` and `b`: a number before NaN, and -0 less than +0."""
    if a.dtype.kind in "iu":
        return np.minimum(a, b) if op == "min" else np.maximum(a, b)
    result = np.fmin(a, b) if op == "min" else np.fmax(a, b)
    bits_a, bits_b = (x.view(f"u{x.itemsize}") for x in (a, b))
    zeros = bits_a | bits_b if op == "min" else bits_a & bits_b
    return np.where((a == 0) & (b == 0), zeros.view(a.dtype), result)


def _flush(values: np.ndarray) -> np.ndarray:
    """Return float32 `values` with subnormals replaced by zeros of the same sign."""
    tiny = np.abs(values) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), values), values)

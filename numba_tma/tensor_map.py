"""Tensor maps: a tensor in global memory, the box that one copy moves, and how the box lies in shared memory.

    k_map = TensorMap(k, box=(64, 64), swizzle="128B")
    k_map = TensorMap(k, smem.k)                          # box and swizzle of the tiles that it will fill

Dimensions are in NumPy's order here, slowest first; `TensorMap.spec` has them in the hardware's, fastest
first. Every rule of the CUDA driver is checked before the driver sees the map. A map goes to a kernel as an
argument by itself.
Sources: CUDA driver API, "Tensor Map Object Management" (cuTensorMapEncodeTiled); PTX ISA, "Tensors".
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import core_models, infer_getattr, lower_getattr_generic, register_model
from numba.cuda.typing.templates import AttributeTemplate

from . import arrays, dtypes, ptx
from .arrays import ArrayView
from .dtypes import ElementType
from .shared import CAPACITY, SWIZZLES, Tiles, TileType
from .sim import descriptor

MAX_RANK = 5
MAX_EXTENT = 1 << 32
MAX_STRIDE = 1 << 40  # exclusive
MAX_BOX = 256
MAX_ELEMENT_STRIDE = 8
_GRANULE = 16  # bytes; addresses, strides and the box's rows are multiples of it
_MAX_SHARED = max(CAPACITY.values())

TILED, IM2COL = "cuTensorMapEncodeTiled", "cuTensorMapEncodeIm2col"
L2_PROMOTION = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
FILL = {"zero": 0, "nan": 1}


class TensorMapError(ValueError):
    """A tensor map that breaks a rule: `rule` names it, the message adds the value and the way out."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


class StoreOverrunWarning(UserWarning):
    """The tensor's rows end between two 16-byte boundaries, and a store writes on to the next boundary.

    `TensorMap(…, store="padding")` says that the bytes between are there to be overwritten, `store=False` that kernels
    do not store through the map.
    """


@dataclass(frozen=True)
class TensorMapSpec:
    """A tensor map in the driver's terms, but for the address: plain integers, fastest dimension first.

    `dtype`, `interleave`, `swizzle`, `l2_promotion` and `fill` are values of the driver's enumerations.
    `sizes`, `box` and `element_strides` have one entry a dimension, in elements; `strides` are in bytes and
    lack the fastest dimension. Maps of im2col mode have corners, `lower` and `upper`, and (channels, pixels) as `box`.
    """

    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    fill: int
    lower: tuple[int, ...] = ()
    upper: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.sizes)


class TensorMap:
    """Describes a tensor and the box that one TMA instruction moves between it and shared memory.

    Args:
        array: NumPy array (for the simulator, or staged by the launcher), or a device array by
            `__cuda_array_interface__` or DLPack, PyTorch tensors of any of the table's types among them; rank
            1 to 5. The map keeps it alive.
        box: elements traversed along each dimension, slowest first, at most 256 each; or the `Tiles` of a
            shared-memory plan, whose shape and swizzle it then has. Dimensions that the tiles lack in front
            count one element.
        swizzle: 'none', '32B', '64B' or '128B'.
        element_strides: step along each dimension, 1 to 8, slowest first: of a box of 256 with step 2 every
            other element is moved, 128 of them. The last dimension has step 1.
        l2_promotion: granularity of L2 fetches, 'none', '64B', '128B' or '256B'. Streams of reads come slower with
            256 bytes; where boxes are narrow, and what lies beside them is wanted later, they may come faster.
        fill: what a load gives for elements outside the tensor, 'zero' or 'nan' (floating-point types only).
        interleave: 'none'; the 16- and 32-byte channel layouts are not supported.
        dtype: the engine's element type if it is not the array's own, of the same size ('tfloat32' of a
            float32 array).
        transpose: describe `array.T`, for a column-major array; box and coordinates are then those of
            `array.T`.
        overlap: allow dimensions that share memory (stride 0, sliding windows). Only for maps that are loaded
            from.
        store: whether kernels will store through the map. A store fills the unit of 16 bytes in which a row ends;
            where rows are no multiple of 16 bytes, 'padding' says that the rest of that unit is the caller's, to be
            overwritten in every row, as the padding that `pitched` makes is.

    Raises:
        TensorMapError: a rule is broken; `.rule` tells which.
        TypeError: not an array, or an element type that the engine has not.
        ValueError: `store` is none of True, False and 'padding'.

    Warns:
        StoreOverrunWarning: rows are no multiple of 16 bytes, and `store` is True.
    """

    _padding = False  # whether stores may fill what lies behind the rows' ends

    def __init__(
        self,
        array: object,
        box: Sequence[int] | Tiles,
        *,
        swizzle: str | None = None,
        element_strides: Sequence[int] | None = None,
        l2_promotion: str = "128B",
        fill: str = "zero",
        interleave: str = "none",
        dtype: object = None,
        transpose: bool = False,
        overlap: bool = False,
        store: bool | str = True,
    ) -> None:
        if store not in (True, False, "padding"):
            raise ValueError(f"store={store!r}: expected True, False or 'padding'")
        view = arrays.view(array)
        if view is None:
            raise TypeError(
                f"TensorMap of a {type(array).__name__}: expected a NumPy array, or a device array with "
                f"__cuda_array_interface__ or DLPack (Numba, CuPy, PyTorch)"
            )
        element = element_type(view, dtype)
        view = replace(view, dtype=element.numpy)
        if transpose:
            view = replace(view, shape=view.shape[::-1], strides=view.strides[::-1])
        if isinstance(box, Tiles):
            box, swizzle = _box_of_tiles(box, swizzle, element, len(view.shape))
        swizzle = "none" if swizzle is None else swizzle

        _check_rank(view)
        check_modes(element, swizzle, interleave, l2_promotion, fill)
        check_address(view)
        check_sizes(view)
        strides = checked_strides(view, transpose, overlap)
        box = checked_box(view, element, box, swizzle)
        steps = checked_element_strides(element_strides, len(box))

        self.array = array
        self.view = view
        self.element = element
        self.box = box
        self.element_strides = steps
        self.swizzle = swizzle
        self.spec = TensorMapSpec(
            dtype=element.tensor_map_code,
            sizes=view.shape[::-1],
            strides=strides[-2::-1],
            box=box[::-1],
            element_strides=steps[::-1],
            interleave=0,
            swizzle=SWIZZLES[swizzle].code,
            l2_promotion=L2_PROMOTION[l2_promotion],
            fill=FILL[fill],
        )
        self._check_tile()
        self._padding = store == "padding"
        if store == "padding":
            _check_padding(array, view, strides)
        elif store and not view.readonly:
            _warn_of_overrun(view)
        self.numba_type = TensorMapType(element, box, steps, swizzle)
        self.token = id(self.numba_type)  # types are unique; a launch tells variants apart by it
        self._encoded: tuple[int, bytes] | None = None

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """What one copy moves, slowest dimension first: the box, thinned by the element strides."""
        return _tile_shape(self.box, self.element_strides)

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy moves, wherever the box lies: what its barrier must expect."""
        return math.prod(self.tile_shape) * self.element.size

    @property
    def _numba_type_(self) -> TensorMapType:
        return self.numba_type

    def encode(self, address: int | None = None) -> bytes:
        """The 128 bytes that the GPU reads, from the driver.

        Args:
            address: where the tensor is in global memory; by default where its array is.

        Raises:
            TensorMapError: there is no driver, or it refused the map.
        """
        address = self.view.pointer if address is None else address
        if self._encoded is None or self._encoded[0] != address:
            self._encoded = (address, _driver_encode(self.spec, address, repr(self)))
        return self._encoded[1]

    def encode_sim(self, address: int | None = None) -> bytes:
        """The 128 bytes that the simulator reads; `address` as in `encode`."""
        spec = self.spec
        return descriptor.encode(
            descriptor.Descriptor(
                dtype=spec.dtype,
                address=self.view.pointer if address is None else address,
                sizes=spec.sizes,
                strides=spec.strides,
                box=spec.box,
                element_strides=spec.element_strides,
                interleave=spec.interleave,
                swizzle=spec.swizzle,
                l2_promotion=spec.l2_promotion,
                fill=spec.fill,
                lower=spec.lower,
                upper=spec.upper,
                padding=self._padding,
            )
        )

    def _check_tile(self) -> None:
        if self.box_bytes > _MAX_SHARED:
            raise TensorMapError(
                "box size",
                f"one box of {' × '.join(map(str, self.tile_shape))} {self.element} is {self.box_bytes:,} B; "
                f"a block has at most {_MAX_SHARED:,} B of shared memory; move it in several smaller boxes",
            )

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.view.shape))
        parts = [f"{self.element} {shape}", f"box={self.box}"]
        if any(step != 1 for step in self.element_strides):
            parts.append(f"element_strides={self.element_strides}")
        if self.swizzle != "none":
            parts.append(f"swizzle={self.swizzle!r}")
        return f"TensorMap({', '.join(parts)}, {self.box_bytes} B a copy)"


def _tile_shape(box: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-extent // step) for extent, step in zip(box, steps, strict=True))


def element_type(view: ArrayView, dtype: object) -> ElementType:
    if dtype is None:
        return dtypes.lookup(view.dtype)
    element = dtypes.lookup(dtype)
    if element.size != view.dtype.itemsize:
        raise TensorMapError(
            "element type",
            f"dtype={element} has {element.size} B, the array's {view.dtype} has {view.dtype.itemsize} B; "
            "take a type of the same size, or view the array as another type first",
        )
    return element


def _box_of_tiles(tiles: Tiles, swizzle: str | None, element: ElementType, rank: int) -> tuple[tuple[int, ...], str]:
    if tiles.dtype.numpy != element.numpy:
        raise TensorMapError(
            "element type", f"{tiles!r} cannot hold {element} elements; give tiles and array the same type"
        )
    if swizzle not in (None, tiles.swizzle):
        raise TensorMapError(
            "swizzle", f"{tiles!r} but swizzle={swizzle!r}; a map has its tiles' swizzle: leave it out here"
        )
    return (1,) * (rank - len(tiles.shape)) + tiles.shape, tiles.swizzle


def _check_rank(view: ArrayView) -> None:
    rank = len(view.shape)
    if not 1 <= rank <= MAX_RANK:
        raise TensorMapError(
            "rank",
            f"the array has {rank} dimensions; a tensor map has 1 to {MAX_RANK}: reshape or index it first",
        )


def check_modes(element: ElementType, swizzle: object, interleave: object, l2_promotion: object, fill: object) -> None:
    for rule, value, choices in (
        ("swizzle", swizzle, SWIZZLES),
        ("L2 promotion", l2_promotion, L2_PROMOTION),
        ("fill", fill, FILL),
    ):
        if not isinstance(value, str) or value not in choices:
            raise TensorMapError(rule, f"{value!r} is unknown; choose one of {', '.join(map(repr, choices))}")
    if interleave != "none":
        raise TensorMapError(
            "interleave",
            f"{interleave!r} is not supported; the layout supported is 'none': put the 16- or 32-byte "
            "channel block into a dimension of its own",
        )
    if fill == "nan" and not element.floating:
        raise TensorMapError(
            "NaN fill",
            f"{element} elements, which the engine moves as integers, have no NaN; use fill='zero'",
        )


def check_address(view: ArrayView) -> None:
    if view.pointer == 0:
        raise TensorMapError("base address", "the array's pointer is null; allocate the array first")
    if view.pointer % _GRANULE:
        raise TensorMapError(
            "base address",
            f"{view.pointer:#x} is {view.pointer % _GRANULE} B past a multiple of {_GRANULE} B, as a sliced "
            "view can be; describe the whole array and put the slice's start into the coordinates, or copy "
            "the slice",
        )


def check_sizes(view: ArrayView) -> None:
    for axis, size in enumerate(view.shape):
        if not 1 <= size <= MAX_EXTENT:
            raise TensorMapError(
                "tensor size",
                f"dimension {axis} has {size} elements; each dimension has 1 to 2^32"
                + (": an empty tensor has nothing to copy" if size == 0 else ": split it into two dimensions"),
            )


def checked_strides(view: ArrayView, transposed: bool, overlap: bool) -> tuple[int, ...]:
    """Strides in bytes; a dimension of one element, whose stride means nothing, is given a legal one."""
    item = view.dtype.itemsize
    strides = list(view.strides)
    if view.shape[-1] > 1 and strides[-1] != item:
        raise TensorMapError("inner stride", _inner_stride_message(view, transposed))
    strides[-1] = item
    for axis in range(len(strides) - 2, -1, -1):
        if view.shape[axis] == 1:
            covered = abs(strides[axis + 1]) * view.shape[axis + 1]
            strides[axis] = min(-(-covered // _GRANULE) * _GRANULE, MAX_STRIDE - _GRANULE)
        _check_stride(view, axis, strides[axis])
    if not overlap:
        _check_overlap(view, strides)
    return tuple(strides)


def _inner_stride_message(view: ArrayView, transposed: bool) -> str:
    item, stride = view.dtype.itemsize, view.strides[-1]
    found = f"neighbours along the last dimension lie {stride} B apart instead of {item} B"
    if transposed and view.strides[0] == item:
        way = "the array is row-major as it is: leave transpose=True out"
    elif view.strides[0] == item:
        way = (
            "the array is column-major: transpose=True describes its .T (box and coordinates too), or copy "
            "it row-major (np.ascontiguousarray)"
        )
    else:
        way = "the engine cannot step along it; copy the array row-major (np.ascontiguousarray)"
    return f"{found}; {way}"


def _check_stride(view: ArrayView, axis: int, stride: int) -> None:
    if stride < 0:
        raise TensorMapError(
            "stride sign",
            f"dimension {axis} runs backwards (stride {stride} B); describe the array unflipped",
        )
    if stride % _GRANULE:
        raise TensorMapError("stride alignment", _padding_message(view, axis, stride))
    if stride >= MAX_STRIDE:
        raise TensorMapError(
            "stride limit",
            f"dimension {axis} has a stride of {stride:,} B; it must be below 2^40; use a map for each part",
        )


def _padding_message(view: ArrayView, axis: int, stride: int) -> str:
    item, columns = view.dtype.itemsize, view.shape[-1]
    kind = "row stride" if axis == len(view.shape) - 2 else f"stride of dimension {axis},"
    message = f"{kind} {stride} B is not a multiple of {_GRANULE} B; "
    multiple = _GRANULE // math.gcd(_GRANULE, item)
    if axis == len(view.shape) - 2 and stride == columns * item:
        padded = -(-columns // multiple) * multiple
        return message + (
            f"pad the last dimension from {columns} to {padded} elements: "
            "numba_tma.pitched_copy(array) does, and pitched(shape, dtype) makes such an array"
        )
    return message + "numba_tma.pitched_copy(array) copies it into rows that start at multiples of 16 B"


def _check_overlap(view: ArrayView, strides: Sequence[int]) -> None:
    """No two elements may share memory. The order of the dimensions is free: a permuted tensor is as good."""
    reach, inner = view.dtype.itemsize, len(strides) - 1
    for stride, axis in sorted((strides[a], a) for a in range(len(strides)) if view.shape[a] > 1):
        if stride < reach:
            raise TensorMapError(
                "overlapping strides",
                f"dimension {axis} has a stride of {stride} B, less than the {reach} B that dimension "
                f"{inner} and those within it cover: its elements share memory, and stores through the map "
                "would race; pass overlap=True if kernels only load through it, or copy the array",
            )
        reach, inner = reach + (view.shape[axis] - 1) * stride, axis


def checked_box(view: ArrayView, element: ElementType, box: object, swizzle: str) -> tuple[int, ...]:
    extents = integers("box", box)
    if len(extents) != len(view.shape):
        raise TensorMapError(
            "box rank",
            f"the box {extents} has {len(extents)} dimensions, the tensor {len(view.shape)}; give one extent "
            "for each (1 where the box does not extend)",
        )
    for axis, extent in enumerate(extents):
        if not 1 <= extent <= MAX_BOX:
            raise TensorMapError(
                "box extent",
                f"{extent} along dimension {axis}; each box extent is 1 to {MAX_BOX}: move more in several copies",
            )
    inner, span = extents[-1] * element.size, SWIZZLES[swizzle].span
    row = f"the box's rows of {extents[-1]} × {element} = {inner} B"
    if inner % _GRANULE:
        multiple = _GRANULE // element.size
        raise TensorMapError(
            "inner box bytes",
            f"{row} are not a multiple of {_GRANULE} B; take {-(-extents[-1] // multiple) * multiple} elements",
        )
    if span and inner > span:
        raise TensorMapError(
            "inner box and swizzle",
            f"{row} do not fit the span of the {swizzle} swizzle; take at most {span // element.size} "
            f"elements, or {_wider_swizzle(inner)}",
        )
    return extents


def _wider_swizzle(inner: int) -> str:
    wide_enough = [mode.name for mode in SWIZZLES.values() if mode.span >= inner]
    return f"swizzle={wide_enough[0]!r}" if wide_enough else "no swizzle"


def checked_element_strides(element_strides: object, rank: int) -> tuple[int, ...]:
    if element_strides is None:
        return (1,) * rank
    steps = integers("element strides", element_strides)
    if len(steps) != rank:
        raise TensorMapError(
            "element strides",
            f"{steps} has {len(steps)} entries, the tensor {rank} dimensions; give one for each",
        )
    for axis, step in enumerate(steps):
        if not 1 <= step <= MAX_ELEMENT_STRIDE:
            raise TensorMapError("element strides", f"{step} along dimension {axis}; each is 1 to {MAX_ELEMENT_STRIDE}")
    if steps[-1] != 1:
        raise TensorMapError(
            "inner element stride",
            f"{steps[-1]} along the last dimension, where the engine ignores it; give 1 and skip elements in "
            "the kernel",
        )
    return steps


def integers(rule: str, values: object) -> tuple[int, ...]:
    if not isinstance(values, Sequence) or not all(hasattr(v, "__index__") for v in values):
        raise TensorMapError(rule, f"{values!r} is not a sequence of integers")
    return tuple(int(v) for v in values)


def _overrun(view: ArrayView) -> tuple[int, int]:
    """(bytes of a row, bytes that a store writes where its box reaches the row's end)."""
    row = view.shape[-1] * view.dtype.itemsize
    return row, -(-row // _GRANULE) * _GRANULE


def _warn_of_overrun(view: ArrayView) -> None:
    row, end = _overrun(view)
    if row != end:
        warnings.warn(
            f"rows of {view.shape[-1]} × {view.dtype} = {row} B are not a multiple of {_GRANULE} B: a store "
            f"through this map writes on to the next boundary, bytes {row} to {end - 1} of each row; pass "
            "store='padding' if they are there to be overwritten, as in an array that pitched made, or store=False if "
            "kernels only load through the map",
            StoreOverrunWarning,
            stacklevel=3,
        )


def _check_padding(array: object, view: ArrayView, strides: Sequence[int]) -> None:
    """See that the last row's padding is there, as far as the memory behind an array is known: that of NumPy's is.

    Between rows there is always room: they start at multiples of 16 bytes and do not overlap.
    """
    row, end = _overrun(view)
    owner = array
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if row == end or not isinstance(owner, np.ndarray) or owner.base is not None:
        return
    last = view.pointer + sum((n - 1) * s for n, s in zip(view.shape[:-1], strides[:-1], strict=True)) + end
    beyond = last - owner.ctypes.data - owner.nbytes
    if beyond > 0:
        raise TensorMapError(
            "store padding",
            f"the last row's padding, bytes {row} to {end - 1}, ends {beyond} B past the array's memory; "
            "numba_tma.pitched_copy(array) copies it into rows that have their padding, and pitched(shape, dtype) "
            "makes such an array",
        )


@functools.cache
def _driver_function(name: str) -> ctypes._CFuncPtr:
    """The encoder of that name itself; the result that its wrapper allocates need not be aligned as it must."""
    from cuda.bindings import driver

    status, pointer, _ = driver.cuGetProcAddress(name.encode(), 12000, 0)
    if int(status) != 0 or not pointer:
        raise TensorMapError("driver", f"it has no {name} ({status.name}); CUDA 12.0 or newer is needed")
    words, integers = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
    signed = ctypes.POINTER(ctypes.c_int)
    number, address, box = ctypes.c_uint32, ctypes.c_void_p, (integers,)
    if name == IM2COL:
        box = (signed, signed, number, number)
    modes = (ctypes.c_int,) * 4
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, address, ctypes.c_int, number, address, words, words, *box, integers, *modes
    )
    return prototype(int(pointer))


def _driver_encode(spec: TensorMapSpec, address: int, what: str) -> bytes:
    name = IM2COL if spec.lower else TILED
    try:
        function = _driver_function(name)
    except (ImportError, RuntimeError, OSError) as error:
        raise TensorMapError(
            "driver", f"there is no CUDA driver to encode the map ({error}); use the simulator"
        ) from None
    buffer = ctypes.create_string_buffer(descriptor.NBYTES + descriptor.ALIGNMENT)
    start = -ctypes.addressof(buffer) % descriptor.ALIGNMENT
    box: tuple = ((ctypes.c_uint32 * spec.rank)(*spec.box),)
    if spec.lower:
        corners = [(ctypes.c_int * len(spec.lower))(*corner) for corner in (spec.lower, spec.upper)]
        box = (*corners, *spec.box)
    status = function(
        ctypes.addressof(buffer) + start,
        spec.dtype,
        spec.rank,
        address,
        (ctypes.c_uint64 * spec.rank)(*spec.sizes),
        (ctypes.c_uint64 * MAX_RANK)(*spec.strides),
        *box,
        (ctypes.c_uint32 * spec.rank)(*spec.element_strides),
        spec.interleave,
        spec.swizzle,
        spec.l2_promotion,
        spec.fill,
    )
    if status != 0:
        from cuda.bindings import driver

        raise TensorMapError(
            "driver", f"{name} refused {what} at {address:#x} with {driver.CUresult(status).name}: {spec}"
        )
    return buffer.raw[start : start + descriptor.NBYTES]


class TensorMapType(types.Type):
    """Numba type of a tensor map argument; its value is the generic address of the 128 bytes.

    It carries what a kernel may rely on at compile time: element type, box, element strides and swizzle.
    Sizes, strides and address may change without compiling again.
    """

    def __init__(
        self,
        element: ElementType,
        box: tuple[int, ...],
        element_strides: tuple[int, ...],
        swizzle: str,
        im2col: bool = False,
    ) -> None:
        self.element, self.box, self.element_strides, self.swizzle = element, box, element_strides, swizzle
        self.im2col, self.rank = im2col, len(element_strides)
        steps = "" if set(element_strides) == {1} else f", element_strides={element_strides}"
        kind = f"Im2colMap(rank {self.rank}, " if im2col else "TensorMap("
        super().__init__(name=f"{kind}{element}, box={box}{steps}, swizzle={swizzle!r})")

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """What one copy moves."""
        return self.box if self.im2col else _tile_shape(self.box, self.element_strides)


@register_model(TensorMapType)
class _TensorMapModel(core_models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.IntType(64))


_CONSTANTS = {
    "rank": lambda owner: owner.rank,
    "box": lambda owner: owner.box,
    "tile_shape": lambda owner: owner.tile_shape,
    "box_bytes": lambda owner: math.prod(owner.tile_shape) * owner.element.size,
}


@infer_getattr
class _TensorMapAttributes(AttributeTemplate):
    key = TensorMapType

    def generic_resolve(self, owner, name):
        if name == "address":
            return types.uint64
        if name not in _CONSTANTS:
            raise TypingError(f"{owner} has no attribute {name!r}; it has {', '.join((*_CONSTANTS, 'address'))}")
        value = _CONSTANTS[name](owner)
        if isinstance(value, tuple):
            return types.BaseTuple.from_types([types.literal(v) for v in value])
        return types.literal(value)


@lower_getattr_generic(TensorMapType)
def _lower_attribute(context, builder, owner, value, name):
    if name == "address":
        return value
    constant = _CONSTANTS[name](owner)
    if isinstance(constant, tuple):
        members = [context.get_constant(types.intp, v) for v in constant]
        return context.make_tuple(builder, types.BaseTuple.from_types([types.literal(v) for v in constant]), members)
    return context.get_constant(types.intp, constant)


def _address(context, builder, numba_type, value):
    return value


ptx.accept("tensor_map", TensorMapType, _address)


_TENSOR_COPIES = ("cp_async_bulk_tensor_", "cp_async_bulk_prefetch_tensor_", "cp_reduce_async_bulk_tensor_")


def _check_copy(function: ptx.Function, found: dict[str, types.Type]) -> None:
    """See that a map has as many dimensions as the instruction, and that its box fits the tile given with it."""
    tensor_map = found["tensorMap"]
    if not isinstance(tensor_map, TensorMapType):
        return
    if tensor_map.im2col != ("im2col" in function.name):
        wanted = "an Im2colMap" if "im2col" in function.name else "a tiled TensorMap"
        raise TypingError(f"ptx.{function.name} takes {wanted}; found {tensor_map}")
    rank = sum(name[0] == "c" and name[1:].isdigit() for name in found)
    if rank != tensor_map.rank:
        raise TypingError(
            f"ptx.{function.name} is for maps of {rank} dimensions; found {tensor_map} of {tensor_map.rank}"
        )
    tile = found.get("dstMem", found.get("srcMem"))
    if not isinstance(tile, TileType):
        return
    for what, of_map, of_tile in (
        ("swizzle", tensor_map.swizzle, tile.swizzle.name),
        ("element type", tensor_map.element.numpy, tile.element.numpy),
    ):
        if of_map != of_tile:
            raise TypingError(
                f"ptx.{function.name}: the {what} is {of_map} in the map and {of_tile} in shared memory; describe both "
                f"alike, as TensorMap(array, smem.tiles) does; found {tensor_map} and {tile}"
            )
    nbytes = math.prod(tensor_map.tile_shape) * tensor_map.element.size
    if nbytes > tile.nbytes:
        raise TypingError(
            f"ptx.{function.name}: one box is {nbytes:,} B, the tile {tile.nbytes:,} B; found {tensor_map} and {tile}"
        )


for _prefix in _TENSOR_COPIES:
    ptx.check_call(_prefix, _check_copy)

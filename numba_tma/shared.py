"""The shared-memory plan of a kernel: tiles, barriers and buffers by name.

    smem = Shared(
        k=Tiles(2, (64, 64), "float16", swizzle="128B"), full=Barriers(2), sums=Buffer((4,), "float32")
    )

    @kernel(threads=128, shared=smem)
    def k(...):
        tile = smem.k[stage]                # a tile, also where a PTX instruction wants a shared address
        x = tile[row, column]               # one element, with the swizzle applied
        mbarrier_init(smem.full[stage], 1)
        smem.sums[warp] = x

A plan is a constant to the compiler: its offsets end up in the instructions. It is dynamic shared memory.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import LoweringError, TypingError
from numba.cuda.core.imputils import lower_constant
from numba.cuda.extending import (
    core_models,
    infer_getattr,
    lower_builtin,
    lower_getattr_generic,
    register_model,
)
from numba.cuda.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature

from . import dtypes, ptx
from .dtypes import ElementType

# Bytes of shared memory that one block may ask for (CUDA C++ Programming Guide, compute capabilities).
CAPACITY = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_87": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_103": 232_448,
    "sm_120": 101_376,
}
DEFAULT_ARCH = "sm_90"
SYMBOL = "numba_tma_shared"
_BASE_ALIGNMENT = 1024
_BARRIER_BYTES = 8
_BARRIER_ALIGNMENT = 8
_BUFFER_ALIGNMENT = 16  # what cp.async.bulk and 16-byte vectors need


@dataclass(frozen=True)
class Swizzle:
    """A swizzle mode of the copy engine: 16-byte chunks change places within `span` bytes, by their address.

    `code` is its `CUtensorMapSwizzle`; `alignment` is where the pattern repeats, in bytes; `mask` are the
    bits of a byte address that are XORed with those three places above (PTX ISA, "Swizzling Modes").
    """

    name: str
    code: int
    span: int
    alignment: int
    mask: int


SWIZZLES = {
    "none": Swizzle("none", 0, 0, 128, 0),
    "32B": Swizzle("32B", 1, 32, 256, 0x10),
    "64B": Swizzle("64B", 2, 64, 512, 0x30),
    "128B": Swizzle("128B", 3, 128, 1024, 0x70),
}
_SWIZZLE_SHIFT = 3


def swizzle_named(name: object) -> Swizzle:
    """The swizzle mode called `name`.

    Raises:
        ValueError: there is no such mode.
    """
    found = SWIZZLES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"swizzle {name!r}: choose one of {', '.join(repr(n) for n in SWIZZLES)}")
    return found


class SharedMemoryError(ValueError):
    """A shared-memory plan that breaks a rule; the message names rule, value and way out."""


def _extents(value: object, what: str) -> tuple[int, ...]:
    extents = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not extents or not all(hasattr(e, "__index__") and int(e) >= 1 for e in extents):
        raise SharedMemoryError(f"{what} {value!r}: expected one or more positive integers")
    return tuple(int(e) for e in extents)


def _count(value: object, what: str) -> int:
    if not hasattr(value, "__index__") or int(value) < 1:
        raise SharedMemoryError(f"{what} {value!r}: expected a positive integer")
    return int(value)


class Tiles:
    """`stages` tiles of `shape` (slowest dimension first), each where the copy engine and wgmma can take it.

    Args:
        stages: number of buffers, 1 or more.
        shape: extents in elements.
        dtype: anything that `dtypes.lookup` takes.
        swizzle: 'none', '32B', '64B' or '128B', as in the tensor map that fills the tile.

    Raises:
        SharedMemoryError: no stages, an extent below 1, or rows that do not fill the swizzle's span.
        TypeError: no such element type.
        ValueError: no such swizzle.
    """

    def __init__(self, stages: int, shape: Sequence[int], dtype: object, swizzle: str = "none") -> None:
        self.stages = _count(stages, "Tiles: stages")
        self.shape = _extents(shape, "Tiles: shape")
        self.dtype: ElementType = dtypes.lookup(dtype)
        self.swizzle = swizzle_named(swizzle).name
        mode, row = SWIZZLES[self.swizzle], self.shape[-1] * self.dtype.size
        # The engine takes shorter rows too, but lays them out a whole span apart.
        if mode.span and row != mode.span:
            raise SharedMemoryError(
                f"Tiles: rows of {self.shape[-1]} × {self.dtype} = {row} B under the {mode.name} swizzle; a "
                f"row must fill its span of {mode.span} B: take {mode.span // self.dtype.size} elements (for "
                "more, several tiles side by side), or the swizzle that fits"
            )

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile's elements: what a barrier has to expect for it."""
        return math.prod(self.shape) * self.dtype.size

    @property
    def stage_stride(self) -> int:
        """Bytes from one stage's start to the next's."""
        return _round_up(self.tile_bytes, self.alignment)

    @property
    def alignment(self) -> int:
        """Alignment of each stage in bytes: 128 for the copy engine, more for a swizzle pattern to begin."""
        return SWIZZLES[self.swizzle].alignment

    @property
    def nbytes(self) -> int:
        """Bytes of all stages; the last is padded to 128, the line within which a swizzle moves chunks."""
        return (self.stages - 1) * self.stage_stride + _round_up(self.tile_bytes, 128)

    def __repr__(self) -> str:
        return f"Tiles({self.stages}, {self.shape}, {self.dtype}, swizzle={self.swizzle!r})"


class Barriers:
    """`count` mbarriers of 8 bytes each.

    Raises:
        SharedMemoryError: count below 1.
    """

    alignment = _BARRIER_ALIGNMENT

    def __init__(self, count: int) -> None:
        self.count = _count(count, "Barriers: count")

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.count * _BARRIER_BYTES

    def __repr__(self) -> str:
        return f"Barriers({self.count})"


class Buffer:
    """An array of `shape` in shared memory, aligned to 16 bytes and not swizzled.

    Raises:
        SharedMemoryError: an extent below 1.
        TypeError: no such element type.
    """

    alignment = _BUFFER_ALIGNMENT

    def __init__(self, shape: Sequence[int] | int, dtype: object) -> None:
        self.shape = _extents(shape, "Buffer: shape")
        self.dtype: ElementType = dtypes.lookup(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.size

    def __repr__(self) -> str:
        return f"Buffer({self.shape}, {self.dtype})"


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Shared:
    """A kernel's shared memory: its members are `Tiles`, `Barriers` and `Buffer`s, by name.

    They are laid out by falling alignment, in the order given where that is equal; so barriers come last,
    behind all data. On the host `smem.NAME` is the member itself. In a kernel `smem.NAME[stage]` is a tile or
    barrier, and a buffer is `smem.NAME`.

    Raises:
        SharedMemoryError: no members, a name that the plan itself uses, something that is no member, or more
            bytes than any GPU gives one block; the last shows what takes how much.
    """

    def __init__(self, **members: Tiles | Barriers | Buffer) -> None:
        if not members:
            raise SharedMemoryError("Shared(): no members; give it Tiles, Barriers or Buffer by name")
        for name, member in members.items():
            if hasattr(type(self), name) or name.startswith("_") or keyword.iskeyword(name):
                raise SharedMemoryError(f"Shared({name}=…): the plan itself uses this name; choose another")
            if not isinstance(member, (Tiles, Barriers, Buffer)):
                raise SharedMemoryError(
                    f"Shared({name}={member!r}): expected Tiles(stages, shape, dtype), Barriers(count) or "
                    f"Buffer(shape, dtype)"
                )
        self._members = dict(members)
        self._offsets, self._nbytes = _lay_out(self._members)
        if self._nbytes > max(CAPACITY.values()):
            self.check()

    def __getattr__(self, name: str) -> Tiles | Barriers | Buffer:
        members = self.__dict__.get("_members", {})
        if name not in members:
            raise AttributeError(f"{type(self).__name__} has no member {name!r}; it has {', '.join(members)}")
        return members[name]

    @property
    def members(self) -> dict[str, Tiles | Barriers | Buffer]:
        """The members in the order given."""
        return dict(self._members)

    @property
    def nbytes(self) -> int:
        """Dynamic shared memory of one block, in bytes."""
        return self._nbytes

    @property
    def offsets(self) -> dict[str, int]:
        """Each member's first byte, from the start of dynamic shared memory."""
        return dict(self._offsets)

    def check(self, arch: str = DEFAULT_ARCH) -> None:
        """See that a block of a GPU of `arch` ('sm_80', 'sm_90a', …) may have this much.

        Raises:
            SharedMemoryError: it may not; the message shows what takes how much.
        """
        capacity = CAPACITY.get(arch.rstrip("af"))
        if capacity is None:
            raise SharedMemoryError(
                f"architecture {arch!r}: its shared memory is not known; known are {', '.join(CAPACITY)}"
            )
        if self._nbytes > capacity:
            raise SharedMemoryError(
                f"the plan takes {self._nbytes:,} B of shared memory, {self._nbytes - capacity:,} B more "
                f"than the {capacity:,} B that a block may have on {arch}; take fewer stages or smaller "
                f"tiles\n{self.table()}"
            )

    def table(self) -> str:
        """What takes how much, in order of offset."""
        rows = [("member", "offset", "bytes", "what")]
        end = 0
        for name, offset in sorted(self._offsets.items(), key=lambda item: item[1]):
            member = self._members[name]
            if offset > end:
                rows.append(("", f"{end:,}", f"{offset - end:,}", "padding"))
            rows.append((name, f"{offset:,}", f"{member.nbytes:,}", repr(member)))
            end = offset + member.nbytes
        rows.append(("total", "", f"{self._nbytes:,}", ""))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            f"{name:<{widths[0]}}  {offset:>{widths[1]}}  {size:>{widths[2]}}  {what}".rstrip()
            for name, offset, size, what in rows
        )

    def key(self) -> str:
        """A string equal for plans that compile to the same code."""
        return ", ".join(f"{name}@{self._offsets[name]}={member!r}" for name, member in self._members.items())

    @property
    def numba_type(self) -> SharedType:
        """The plan's Numba type."""
        return SharedType(self)

    _numba_type_ = numba_type

    def __repr__(self) -> str:
        return f"Shared({', '.join(f'{name}={member!r}' for name, member in self._members.items())})"


def _lay_out(members: dict[str, Tiles | Barriers | Buffer]) -> tuple[dict[str, int], int]:
    # By falling alignment a gap is left only behind a member that is no multiple of its own alignment.
    offsets, end = {}, 0
    for name in sorted(members, key=lambda n: -members[n].alignment):
        offsets[name] = _round_up(end, members[name].alignment)
        end = offsets[name] + members[name].nbytes
    return {name: offsets[name] for name in members}, end


# In a kernel. A plan and its rows of tiles or barriers are compile-time constants that carry their offsets in
# their types; a tile and a barrier are values: their address as a pointer into shared memory.

_BYTE_POINTER = ir.PointerType(ir.IntType(8), addrspace=3)
_U32, _U64 = ir.IntType(32), ir.IntType(64)


class SharedType(types.Type):
    """Numba type of a plan."""

    def __init__(self, plan: Shared) -> None:
        self.plan = plan
        super().__init__(name=f"Shared({plan.key()})")


class TilesType(types.Type):
    """Numba type of `smem.NAME` for `Tiles`; the offset is part of it."""

    def __init__(self, offset: int, tiles: Tiles) -> None:
        self.offset, self.tiles = offset, tiles
        super().__init__(name=f"{tiles!r}@{offset}")


class BarriersType(types.Type):
    """Numba type of `smem.NAME` for `Barriers`; the offset is part of it."""

    def __init__(self, offset: int, count: int) -> None:
        self.offset, self.count = offset, count
        super().__init__(name=f"Barriers({count})@{offset}")


class TileType(types.Type):
    """Numba type of one tile or buffer: shape, element type and swizzle; the address is its value."""

    def __init__(self, shape: tuple[int, ...], element: ElementType, swizzle: str) -> None:
        self.shape, self.element, self.swizzle = shape, element, SWIZZLES[swizzle]
        super().__init__(name=f"Tile({shape}, {element}, swizzle={swizzle!r})")

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.element.size

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each dimension, before the swizzle."""
        strides, step = [], self.element.size
        for extent in reversed(self.shape):
            strides.append(step)
            step *= extent
        return tuple(reversed(strides))


class BarrierType(types.Type):
    """Numba type of one mbarrier; the address is its value."""

    def __init__(self) -> None:
        super().__init__(name="Barrier")


barrier_type = BarrierType()

for _constant in (SharedType, TilesType, BarriersType):
    register_model(_constant)(core_models.OpaqueModel)


@register_model(TileType)
@register_model(BarrierType)
class _AddressModel(core_models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _BYTE_POINTER)


@lower_constant(SharedType)
def _lower_plan(context, builder, plan_type, plan):
    return context.get_dummy_value()


def _at(builder, offset: int):
    """Pointer to a byte of dynamic shared memory."""
    module = builder.module
    base = module.globals.get(SYMBOL)
    if base is None:
        base = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), SYMBOL, addrspace=3)
        base.linkage = "external"
        base.align = _BASE_ALIGNMENT
    return builder.gep(builder.bitcast(base, _BYTE_POINTER), [_U32(offset)])


def _address(context, builder, numba_type, pointer):
    """A pointer's 32-bit address in the shared window, as PTX instructions take it."""
    return builder.ptrtoint(pointer, _U32)


ptx.accept("shared", TileType, _address)
ptx.accept("shared", BarrierType, _address)
ptx.advise(BarriersType, "take one of them: full[0]")
ptx.advise(TilesType, "take one of them: tiles[0]")


def _unknown(what: str, name: str, known: Sequence[str]) -> TypingError:
    return TypingError(f"{what} has no attribute {name!r}; it has {', '.join(known)}")


@infer_getattr
class _PlanAttributes(AttributeTemplate):
    key = SharedType

    def generic_resolve(self, owner, name):
        plan = owner.plan
        if name == "nbytes":
            return types.literal(plan.nbytes)
        member = plan.members.get(name)
        if member is None:
            raise _unknown("the shared-memory plan", name, (*plan.members, "nbytes"))
        offset = plan.offsets[name]
        if isinstance(member, Tiles):
            return TilesType(offset, member)
        if isinstance(member, Barriers):
            return BarriersType(offset, member.count)
        return TileType(member.shape, member.dtype, "none")


@lower_getattr_generic(SharedType)
def _lower_plan_attribute(context, builder, owner, value, name):
    member = owner.plan.members.get(name)
    if isinstance(member, Buffer):
        return _at(builder, owner.plan.offsets[name])
    return context.get_dummy_value()


class _RowAttributes(AttributeTemplate):
    """Attributes of a row of tiles or barriers: constants, from a table by name."""

    constants: dict = {}

    def generic_resolve(self, owner, name):
        if name not in self.constants:
            raise _unknown(str(owner), name, tuple(self.constants))
        return self.constants[name](owner)


def _literals(values: Sequence[int]) -> types.BaseTuple:
    return types.BaseTuple.from_types([types.literal(v) for v in values])


@infer_getattr
class _TilesAttributes(_RowAttributes):
    key = TilesType
    constants = {
        "stages": lambda owner: types.literal(owner.tiles.stages),
        "shape": lambda owner: _literals(owner.tiles.shape),
        "nbytes": lambda owner: types.literal(owner.tiles.nbytes),
    }


@infer_getattr
class _BarriersAttributes(_RowAttributes):
    key = BarriersType
    constants = {"count": lambda owner: types.literal(owner.count)}


@infer_getattr
class _BarrierAttributes(_RowAttributes):
    key = BarrierType
    constants = {"address": lambda owner: types.uint32}


@infer_getattr
class _TileAttributes(_RowAttributes):
    key = TileType
    constants = {
        "shape": lambda owner: _literals(owner.shape),
        "ndim": lambda owner: types.literal(len(owner.shape)),
        "nbytes": lambda owner: types.literal(owner.nbytes),
        "address": lambda owner: types.uint32,
        "offset": lambda owner: types.BoundFunction(_TileOffset, owner),
        "address_of": lambda owner: types.BoundFunction(_TileAddressOf, owner),
    }


def _constant(context, builder, numba_type):
    """The value of a literal, or of a tuple of them."""
    if isinstance(numba_type, types.BaseTuple):
        return context.make_tuple(builder, numba_type, [_constant(context, builder, member) for member in numba_type])
    return context.get_constant(types.intp, numba_type.literal_value)


@lower_getattr_generic(TilesType)
@lower_getattr_generic(BarriersType)
@lower_getattr_generic(TileType)
@lower_getattr_generic(BarrierType)
def _lower_attribute(context, builder, owner, value, name):
    if name == "address":
        return _address(context, builder, owner, value)
    resolved = context.typing_context.resolve_getattr(owner, name)
    if isinstance(resolved, types.BoundFunction):
        return value
    return _constant(context, builder, resolved)


@infer_global(len)
class _Length(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 1 and isinstance(args[0], (TilesType, BarriersType, TileType)):
            return signature(types.intp, *args)
        return None


@lower_builtin(len, TilesType)
@lower_builtin(len, BarriersType)
@lower_builtin(len, TileType)
def _lower_length(context, builder, sig, args):
    owner = sig.args[0]
    if isinstance(owner, TilesType):
        length = owner.tiles.stages
    else:
        length = owner.count if isinstance(owner, BarriersType) else owner.shape[0]
    return context.get_constant(types.intp, length)


def _indices(owner: TileType, index: types.Type) -> bool:
    """Whether `index` is one integer for each dimension of a tile."""
    members = tuple(index) if isinstance(index, types.BaseTuple) else (index,)
    if all(isinstance(m, types.Integer) for m in members):
        if len(members) == len(owner.shape):
            return True
        raise TypingError(f"{owner} has {len(owner.shape)} dimensions; it was indexed with {len(members)}")
    raise TypingError(f"{owner}: indices must be integers, one a dimension; found {index}")


@infer_global(operator.getitem)
class _GetItem(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        owner, index = args
        if isinstance(owner, (TilesType, BarriersType)):
            if not isinstance(index, types.Integer):
                raise TypingError(f"{owner}: the index of a stage must be one integer; found {index}")
            if isinstance(owner, BarriersType):
                return signature(barrier_type, owner, index)
            tiles = owner.tiles
            return signature(TileType(tiles.shape, tiles.dtype, tiles.swizzle), owner, index)
        if isinstance(owner, TileType) and _indices(owner, index):
            return signature(owner.element.numba_type, owner, index)
        return None


@infer_global(operator.setitem)
class _SetItem(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        owner, index, value = args
        if not isinstance(owner, TileType) or not _indices(owner, index):
            return None
        element = owner.element.numba_type
        if self.context.can_convert(value, element) is None:
            raise TypingError(f"{owner}: a value of type {value} does not convert to {element}; convert it first")
        return signature(types.none, owner, index, element)


def _index(context, builder, numba_type, value, extent: int, what: str):
    """An index as unsigned 32 bits, without the compare and select that Numba spends on negative ones."""
    if isinstance(numba_type, types.IntegerLiteral) and not 0 <= numba_type.literal_value < extent:
        raise LoweringError(f"{what}: index {numba_type.literal_value} is not in 0 … {extent - 1}")
    return context.cast(builder, value, types.unliteral(numba_type), types.uint32)


def _row_member(context, builder, index_type, index, offset: int, stride: int, count: int, what: str):
    number = _index(context, builder, index_type, index, count, what)
    step = builder.mul(number, _U32(stride), flags=("nuw",))
    return builder.gep(_at(builder, offset), [builder.zext(step, _U64)])


@lower_builtin(operator.getitem, TilesType, types.Integer)
def _lower_tile(context, builder, sig, args):
    owner, index_type = sig.args
    tiles = owner.tiles
    return _row_member(
        context, builder, index_type, args[1], owner.offset, tiles.stage_stride, tiles.stages, str(owner)
    )


@lower_builtin(operator.getitem, BarriersType, types.Integer)
def _lower_barrier(context, builder, sig, args):
    owner, index_type = sig.args
    return _row_member(context, builder, index_type, args[1], owner.offset, _BARRIER_BYTES, owner.count, str(owner))


def _element_offset(context, builder, owner: TileType, index_types: Sequence[types.Type], indices: Sequence):
    """Swizzled byte offset of an element from its tile's start.

    The engine swizzles by bits of the address. A tile starts where the pattern does, so the offset's will do.
    """
    offset = _U32(0)
    for index_type, index, extent, stride in zip(index_types, indices, owner.shape, owner.strides, strict=True):
        number = _index(context, builder, index_type, index, extent, str(owner))
        offset = builder.add(offset, builder.mul(number, _U32(stride), flags=("nuw",)), flags=("nuw",))
    if owner.swizzle.mask:
        line = builder.lshr(offset, _U32(_SWIZZLE_SHIFT))
        offset = builder.xor(offset, builder.and_(line, _U32(owner.swizzle.mask)))
    return offset


def _element_pointer(context, builder, owner: TileType, pointer, index_type, index):
    if isinstance(index_type, types.BaseTuple):
        index_types, indices = (
            tuple(index_type),
            [builder.extract_value(index, i) for i in range(len(index_type))],
        )
    else:
        index_types, indices = (index_type,), [index]
    offset = _element_offset(context, builder, owner, index_types, indices)
    element = builder.gep(pointer, [builder.zext(offset, _U64)])
    data_type = context.get_data_type(owner.element.numba_type)
    return builder.bitcast(element, ir.PointerType(data_type, addrspace=3))


@lower_builtin(operator.getitem, TileType, types.Any)
def _lower_load(context, builder, sig, args):
    owner, index_type = sig.args
    pointer = _element_pointer(context, builder, owner, args[0], index_type, args[1])
    return context.unpack_value(builder, owner.element.numba_type, pointer, align=owner.element.size)


@lower_builtin(operator.setitem, TileType, types.Any, types.Any)
def _lower_store(context, builder, sig, args):
    owner, index_type, _ = sig.args
    pointer = _element_pointer(context, builder, owner, args[0], index_type, args[1])
    context.pack_value(builder, owner.element.numba_type, args[2], pointer, align=owner.element.size)
    return context.get_dummy_value()


class _TileMethod(AbstractTemplate):
    prefer_literal = True

    def generic(self, args, kws):
        if not kws and _indices(self.this, types.BaseTuple.from_types(args) if args else types.none):
            return signature(types.uint32, *args, recvr=self.this)
        return None


class _TileOffset(_TileMethod):
    key = "numba_tma.tile.offset"


class _TileAddressOf(_TileMethod):
    key = "numba_tma.tile.address_of"


@lower_builtin(_TileOffset.key, TileType, types.VarArg(types.Integer))
def _lower_offset(context, builder, sig, args):
    return _element_offset(context, builder, sig.args[0], sig.args[1:], args[1:])


@lower_builtin(_TileAddressOf.key, TileType, types.VarArg(types.Integer))
def _lower_address_of(context, builder, sig, args):
    offset = _element_offset(context, builder, sig.args[0], sig.args[1:], args[1:])
    return builder.add(_address(context, builder, sig.args[0], args[0]), offset)

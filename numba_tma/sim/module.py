"""What a PTX module is once parsed: functions, instructions, operands, variables. Plain data, no behaviour.

Names are unique within a function. What PTX declares in a nested ``{ }`` scope carries the scope's number
after a ``#`` (``p#3``), a character that no PTX identifier contains; so inline assembly that uses the same
local names at several places needs no care from whoever executes the code.

Source: PTX ISA, "Syntax", "State Spaces, Types, and Variables", "Instruction Operands", "Directives".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

# Bytes of each fundamental type. A predicate has no size in memory; one byte stands for a lane's truth value.
TYPE_BYTES = {
    "pred": 1,
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "tf32", "f16x2", "bf16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2", "texref", "samplerref", "surfref"), 8),
    "b128": 16,
}

# Special registers and their types. Those with components are read as %tid.x, and so on.
SPECIAL_REGISTERS = {
    **dict.fromkeys(("%tid", "%ntid", "%ctaid", "%nctaid", "%clusterid", "%nclusterid"), "u32"),
    **dict.fromkeys(("%cluster_ctaid", "%cluster_nctaid", "%cluster_ctarank", "%cluster_nctarank"), "u32"),
    **dict.fromkeys(("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%clock", "%clock_hi"), "u32"),
    **{f"%lanemask_{name}": "u32" for name in ("eq", "le", "lt", "ge", "gt")},
    **dict.fromkeys(("%globaltimer_lo", "%globaltimer_hi", "%current_graph_exec_lo"), "u32"),
    **dict.fromkeys(("%total_smem_size", "%aggr_smem_size", "%dynamic_smem_size"), "u32"),
    **dict.fromkeys(("%reserved_smem_offset_begin", "%reserved_smem_offset_end"), "u32"),
    **dict.fromkeys(("%reserved_smem_offset_cap", "%reserved_smem_offset_0"), "u32"),
    "%reserved_smem_offset_1": "u32",
    **dict.fromkeys(("%gridid", "%clock64", "%globaltimer", "%current_graph_exec"), "u64"),
    "%is_explicit_cluster": "pred",
    **{f"%envreg{i}": "b32" for i in range(32)},
    **{f"%pm{i}": "u32" for i in range(8)},
    **{f"%pm{i}_64": "u64" for i in range(8)},
}
SPECIAL_WITH_COMPONENTS = frozenset(
    ("%tid", "%ntid", "%ctaid", "%nctaid", "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid")
)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the source the PTX was compiled from, and the call it was inlined at, if it was."""

    file: str
    line: int
    column: int = 0
    function: str | None = None
    inlined_at: SourceLocation | None = None

    def chain(self) -> Iterator[SourceLocation]:
        """This location, then the call sites it was inlined at, from the inside outwards."""
        place: SourceLocation | None = self
        while place is not None:
            yield place
            place = place.inlined_at

    @property
    def outermost(self) -> SourceLocation:
        """The line of the kernel itself."""
        place = self
        while place.inlined_at is not None:
            place = place.inlined_at
        return place

    @property
    def kernel_line(self) -> str:
        """The line of the kernel itself, by its file's name alone: for what is kept or shown to others."""
        place = self.outermost
        return f"{place.file.rsplit('/', 1)[-1]}:{place.line}"

    def __str__(self) -> str:
        return ", inlined at ".join(f"{place.file}:{place.line}" for place in self.chain())


@dataclass(frozen=True, slots=True)
class Register:
    """A register, or a special register with the component read (``x``, ``y``, ``z``)."""

    name: str
    type: str
    component: str | None = None
    special: bool = False


# The carry or borrow that add.cc, addc, mad.lo.cc and their like hand on: a predicate of its own.
CONDITION_CODE = Register("%cc", "pred")


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant. `kind` is ``int``, ``f32`` (``0f…``) or ``f64`` (``0d…`` and decimal fractions).

    `bits` holds the exact pattern of a floating-point constant (a NaN's payload survives); for an integer it
    is the value in 64-bit two's complement. Integers are within -2**63 … 2**64 - 1.
    """

    value: int | float
    kind: str
    bits: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable or function, plus a number of bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``; `offset` in bytes."""

    base: Register | Symbol | Immediate
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, …}``; also the argument lists of ``call``."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class TensorOperand:
    """``[map, {x, y, …}]``; with a sampler between the two in the texture instructions' form."""

    address: Address
    coordinates: Vector
    sampler: Address | None = None


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the function, or the name of a table (``.branchtargets``, ``.calltargets``, prototype)."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a result that nobody wants."""


@dataclass(frozen=True, slots=True)
class Negated:
    """``!p``"""

    register: Register


@dataclass(frozen=True, slots=True)
class PredicatePair:
    """``d|p``: two destinations, of setp, shfl.sync, elect.sync and lop3."""

    first: Register | Sink
    second: Register | Sink


Operand = Register | Immediate | Symbol | Address | Vector | TensorOperand | Label | Sink | Negated | PredicatePair


@dataclass(slots=True)
class Instruction:
    """One instruction. ``call`` has four operands: target, results, arguments (Vectors), Label | None."""

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand | None, ...]
    text: str
    line: int
    guard: tuple[Register, bool] | None = None
    location: SourceLocation | None = None

    @property
    def mnemonic(self) -> str:
        return ".".join((self.opcode, *self.modifiers))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Relocation:
    """`nbytes` at `offset` of an initialiser hold an address: (address of `symbol` + `addend`) >> `shift`."""

    offset: int
    nbytes: int
    symbol: str
    addend: int = 0
    generic: bool = False
    shift: int = 0


@dataclass(slots=True)
class Variable:
    """A variable or parameter. `init` may be shorter than `size`: the rest is zero.

    `shape` is () for a scalar. An array without extent (``.extern .shared x[]``) has size 0.
    """

    name: str
    space: str
    type: str
    align: int
    size: int
    shape: tuple[int, ...] = ()
    linkage: str | None = None
    init: bytes = b""
    relocations: tuple[Relocation, ...] = ()
    pointer_space: str | None = None
    line: int = 0


@dataclass(slots=True)
class Prototype:
    """``.callprototype``: what an indirect call returns and takes."""

    returns: list[Variable]
    params: list[Variable]


@dataclass(slots=True)
class Function:
    """A kernel (`entry`) or device function; `defined` is False for a mere declaration.

    `registers` holds the registers that the body uses, name to type (``%cc`` if it has carry chains).
    `variables` holds .local, .shared, .global and .param variables declared inside. `labels` give indices
    into `body` (len(body) for the end). `directives` holds performance directives, e.g. {"maxntid": (256,
    1, 1), "explicitcluster": ()}.
    """

    name: str
    entry: bool
    params: list[Variable] = field(default_factory=list)
    returns: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    call_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prototypes: dict[str, Prototype] = field(default_factory=dict)
    directives: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    linkage: str | None = None
    defined: bool = False
    line: int = 0


@dataclass(slots=True)
class Module:
    """A parsed PTX module."""

    filename: str
    version: tuple[int, int] = (0, 0)
    target: str = ""
    target_options: tuple[str, ...] = ()
    address_size: int = 64
    entries: dict[str, Function] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    globals: dict[str, Variable] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

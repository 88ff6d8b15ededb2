"""From an Instruction to an Alu: which arrays an operation reads and writes, as which dtypes.

A builder (alu_integer.py and its sisters) gets a Decoder, takes the modifiers it understands, and ends with
``finish``. A modifier that nobody took is an error, so nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from .errors import UnknownInstruction
from .module import (
    TYPE_BYTES,
    Immediate,
    Instruction,
    Negated,
    Operand,
    PredicatePair,
    Register,
    Sink,
    Symbol,
    Vector,
)

# The dtype a PTX type has as an array. Formats that NumPy lacks, and packed ones, are their bits.
DTYPES = {
    "pred": np.dtype(np.bool_),
    **{f"s{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"{kind}{8 * n}": np.dtype(f"u{n}") for kind in "bu" for n in (1, 2, 4, 8)},
    **dict.fromkeys(("f16", "bf16", "e4m3x2", "e5m2x2"), np.dtype(np.uint16)),
    **dict.fromkeys(("f16x2", "bf16x2", "tf32", "s16x2", "u16x2"), np.dtype(np.uint32)),
    "f32x2": np.dtype(np.uint64),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_SIGNED = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}
ROUNDINGS = ("rn", "rz", "rm", "rp")

Apply = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Alu:
    """A lane-wise operation.

    `sources` are registers (special ones too) and symbols, each with the dtype that its array must have;
    of a register that is the width it is declared with, so a view suffices. Immediates are bound inside.
    `apply` takes those arrays, one-dimensional of equal length, of length 1, or 0-d, and gives one array
    for one destination, a tuple for several or none, with the dtypes of `destinations`; where every
    source is 0-d or there is none, results are 0-d or of length 1. A result may be one of the arguments
    itself or a view of it: treat arrays as immutable. Sinks have been left out of `destinations`.
    """

    sources: tuple[tuple[Operand, np.dtype], ...]
    destinations: tuple[tuple[Register, np.dtype], ...]
    apply: Apply


def immediate(operand: Immediate, dtype: np.dtype) -> np.ndarray:
    """An immediate as a 0-d array: integers are truncated to the width, ``0f…`` keeps its bits.

    An integer given for a half-precision type is its bit pattern, as compilers write it.
    """
    if dtype == np.bool_:
        return np.array(bool(operand.value))
    if dtype.kind == "f" and operand.kind == "int":
        return np.array(operand.value, np.float64).astype(dtype)
    width = 8 * dtype.itemsize
    bits = operand.bits
    if operand.kind == "f32" and width == 64:
        bits = int(np.array(operand.value, np.float64).view(np.uint64))
    elif operand.kind == "f64" and width == 32:
        with np.errstate(all="ignore"):
            bits = int(np.array(operand.value, np.float64).astype(np.float32).view(np.uint32))
    return np.array(bits & ((1 << width) - 1), _UNSIGNED[dtype.itemsize]).view(dtype)


class Decoder:
    """An instruction being decoded: its modifiers still to be understood, and its operands."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.opcode = instruction.opcode
        self.modifiers = list(instruction.modifiers)
        self.operands = instruction.operands

    def fail(self, message: str) -> NoReturn:
        raise UnknownInstruction(f"{self.instruction.mnemonic}: {message}", self.instruction)

    def take(self, *names: str, default: str = "") -> str:
        """The first modifier that is one of `names`, which counts as understood; else `default`."""
        for name in self.modifiers:
            if name in names:
                self.modifiers.remove(name)
                return name
        return default

    def flag(self, name: str) -> bool:
        if name in self.modifiers:
            self.modifiers.remove(name)
            return True
        return False

    def type(self, *allowed: str) -> str:
        """The type at the end of the mnemonic; one of `allowed` if any are given."""
        if not self.modifiers or self.modifiers[-1] not in DTYPES:
            self.fail("has no type at its end that the simulator knows")
        kind = self.modifiers.pop()
        if allowed and kind not in allowed:
            self.fail(f"is not defined for .{kind}, only for {', '.join('.' + name for name in allowed)}")
        return kind

    def count(self, *numbers: int) -> None:
        if len(self.operands) not in numbers:
            wanted = " or ".join(str(number) for number in numbers)
            self.fail(f"takes {wanted} operands, found {len(self.operands)}")

    def finish(self, function: Apply, destinations: list[tuple], sources: list[tuple]) -> Alu:
        """The Alu of `function`; `destinations` and `sources` are pairs of operand and PTX type.

        `function` takes and gives arrays of exactly those types. Where a register is declared wider than the
        type (PTX ISA, "Operand Size Exceeding Instruction-Type Size"), where a predicate is negated, where a
        source is an immediate or a destination a sink, `function` is wrapped.
        """
        if self.modifiers:
            self.fail(f"modifier .{self.modifiers[0]} is not one the simulator knows there")
        arrays, fixed, adapters = [], [], []
        for operand, kind in sources:
            dtype = DTYPES[kind]
            adapter = None
            if isinstance(operand, Immediate):
                fixed.append(immediate(operand, dtype))
                adapters.append(None)
                continue
            if isinstance(operand, Negated):
                operand, adapter = operand.register, np.logical_not
            if isinstance(operand, Register):
                dtype, adapter = self._source(operand, kind, dtype, adapter)
            elif not isinstance(operand, Symbol):
                self.fail(f"a source is a register, a constant or a symbol, not {type(operand).__name__}")
            arrays.append((operand, dtype))
            fixed.append(None)
            adapters.append(adapter)
        wanted, widened, kept = [], [], []
        for i, (operand, kind) in enumerate(destinations):
            if isinstance(operand, Sink):
                continue
            if not isinstance(operand, Register) or operand.special:
                self.fail("a destination must be a register")
            dtype, adapter = self._destination(operand, kind)
            wanted.append((operand, dtype))
            widened.append(adapter)
            kept.append(i)
        apply = _bind(function, fixed, adapters)
        if len(kept) != len(destinations) or any(widened):
            apply = _select(apply, len(destinations), kept, widened)
        return Alu(tuple(arrays), tuple(wanted), apply)

    def _source(self, operand: Register, kind: str, dtype: np.dtype, adapter: Any) -> tuple[np.dtype, Any]:
        width = TYPE_BYTES[operand.type]
        if (operand.type == "pred") != (kind == "pred"):
            self.fail(f"{operand.name} is declared .{operand.type}, where .{kind} is needed")
        if width == dtype.itemsize:
            return dtype, adapter
        if width < dtype.itemsize or width not in _UNSIGNED:
            self.fail(f"{operand.name} is declared .{operand.type}, narrower than .{kind} needs")
        bits = _UNSIGNED[dtype.itemsize]
        # The low bits of the wider register count.
        return _UNSIGNED[width], lambda a: a.astype(bits).view(dtype)

    def _destination(self, operand: Register, kind: str) -> tuple[np.dtype, Any]:
        dtype, width = DTYPES[kind], TYPE_BYTES[operand.type]
        if (operand.type == "pred") != (kind == "pred"):
            self.fail(f"{operand.name} is declared .{operand.type}, but the result is .{kind}")
        if width == dtype.itemsize:
            return dtype, None
        if width < dtype.itemsize or width not in _UNSIGNED:
            self.fail(f"{operand.name} is declared .{operand.type}, too narrow for a result of .{kind}")
        if kind[0] == "s" and dtype.kind == "i":
            wide = _SIGNED[width]
            return wide, lambda a: a.astype(wide)
        wide, bits = _UNSIGNED[width], _UNSIGNED[dtype.itemsize]
        return wide, lambda a: a.view(bits).astype(wide)

    def destinations(self, operand: Operand, first: str, second: str) -> list[tuple]:
        """One destination, or the two of ``d|p``."""
        if isinstance(operand, PredicatePair):
            return [(operand.first, first), (operand.second, second)]
        return [(operand, first)]

    def elements(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.elements if isinstance(operand, Vector) else (operand,)


def _bind(function: Apply, fixed: list, adapters: list) -> Apply:
    """`function` with its immediates bound and its sources adapted; untouched where neither is needed."""
    free = [i for i, value in enumerate(fixed) if value is None]
    if any(adapters):
        adapted = [(i, adapter) for i, adapter in enumerate(adapters) if adapter is not None]

        def function(*arrays: Any, function: Apply = function) -> Any:
            values = list(arrays)
            for i, adapter in adapted:
                values[i] = adapter(values[i])
            return function(*values)

    if len(free) == len(fixed):
        return function
    if not free:
        values = tuple(fixed)
        return lambda: function(*values)
    if len(fixed) == 2:
        x, y = fixed
        return (lambda b: function(x, b)) if x is not None else (lambda a: function(a, y))
    if len(fixed) == 3:
        x, y, z = fixed
        if len(free) == 2:
            if x is not None:
                return lambda b, c: function(x, b, c)
            if y is not None:
                return lambda a, c: function(a, y, c)
            return lambda a, b: function(a, b, z)
        if free[0] == 0:
            return lambda a: function(a, y, z)
        if free[0] == 1:
            return lambda b: function(x, b, z)
        return lambda c: function(x, y, c)

    def bound(*arrays: Any) -> Any:
        values = list(fixed)
        for i, array in zip(free, arrays, strict=True):
            values[i] = array
        return function(*values)

    return bound


def _select(apply: Apply, number: int, kept: list[int], widened: list) -> Apply:
    """Leave out the results that go to a sink, and widen the others to their registers."""
    if number == 1 and kept:
        widen = widened[0]
        return lambda *arrays: widen(apply(*arrays))
    if number == 1:
        return lambda *arrays: ()

    def selected(*arrays: Any) -> Any:
        results = apply(*arrays)
        chosen = tuple(
            results[i] if widen is None else widen(results[i]) for i, widen in zip(kept, widened, strict=True)
        )
        return chosen[0] if len(chosen) == 1 else chosen

    return selected

"""The warp's matrix instructions: mma.sync, ldmatrix, stmatrix, movmatrix.

Floating-point sums are the hardware's (matrix_sums.py), integers are exact.

Source: PTX ISA, "Matrix multiply-accumulate operation using mma instruction", "ldmatrix", "stmatrix", "movmatrix".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from . import matrix_sums
from .access import SHARED, shared_index
from .aligned import WARP, Groups, stacked, together
from .errors import OutOfBounds, SimError, UnknownInstruction
from .fragment import Fragment
from .loadstore import space_of
from .matrix_fragments import (
    ACCUMULATORS,
    BITS,
    accumulator_registers,
    add_integers,
    from_registers,
    in_registers,
    multiplicand,
    numbers,
)
from .memory import SHARED_WINDOW
from .module import Immediate, Instruction, Vector
from .program import S64, U32, Builder, Step

FLOATS8 = frozenset(("e4m3", "e5m2"))
_INTEGERS = (frozenset(("s8", "u8")), frozenset(("s4", "u4")))
_ONCE = frozenset(("sync", "aligned", "row", "col", "satfinite"))


def types_fit(result: str, a: str, b: str) -> bool:
    """Whether the tensor cores multiply `a` by `b` into `result`."""
    if a == b == "f16" or (a in FLOATS8 and b in FLOATS8):
        return result in ("f16", "f32")
    if a == b and a in ("bf16", "tf32"):
        return result == "f32"
    return result == "s32" and any(a in group and b in group for group in _INTEGERS)


def _elements(operand: Any) -> tuple:
    return operand.elements if isinstance(operand, Vector) else (operand,)


def registers_of(d: Builder, operand: Any, expected: int, what: str, dtype: np.dtype, write: bool = False) -> list[int]:
    """The numbers of the registers of a fragment, which must be `expected` many."""
    parts = _elements(operand)
    if len(parts) != expected:
        raise SimError(f"{what} has {len(parts)} registers, this shape and type take {expected}")
    if write:
        return [d.define(part) for part in parts]
    if any(isinstance(part, Immediate) for part in parts):
        return [d.program.constant(np.array(part.value, dtype)) for part in parts]
    return [d.use(part, dtype) for part in parts]


# mma.sync


def _mma(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    shape = next((m for m in (re.fullmatch(r"m(\d+)n8k(\d+)", m) for m in modifiers) if m), None)
    types = [m for m in modifiers if m in BITS or m in ACCUMULATORS]
    others = [m for m in modifiers if m not in types and m not in _ONCE]
    if shape is None or others != [shape[0]] or len(types) != 4 or not {"row", "col"} <= set(modifiers):
        raise UnknownInstruction("the simulator does not know this mma", instruction)
    m, k = int(shape[1]), int(shape[2])
    result, a_type, b_type, c_type = types
    width = k * BITS.get(a_type, 0) // 8
    known = types_fit(result, a_type, b_type) and c_type == result
    known = known and (m, width) in ((16, 16), (16, 32), (8, 16)) and (m == 16 or a_type in ("s8", "u8", "s4", "u4"))
    if not known:
        raise UnknownInstruction(f"mma.sync has no shape {shape[0]} with types {'.'.join(types)}", instruction)
    slices = m // 8
    saturate = "satfinite" in modifiers
    to, a, b, c = instruction.operands
    a_registers = registers_of(d, a, width // 16 * slices, "A", U32)
    b_registers = registers_of(d, b, width // 16, "B", U32)
    dtype = ACCUMULATORS[result]
    c_registers = registers_of(d, c, accumulator_registers(result, slices, 8), "C", dtype)
    targets = registers_of(d, to, accumulator_registers(result, slices, 8), "D", dtype, write=True)

    def compute(fragment: Fragment, warps: Groups) -> None:
        left = numbers(a_type, multiplicand(stacked(fragment, a_registers, U32), slices))
        right = numbers(b_type, multiplicand(stacked(fragment, b_registers, U32), 1))
        held = from_registers(result, stacked(fragment, c_registers, dtype), m, slices)
        if result == "s32":
            total = add_integers(left @ right.transpose(0, 2, 1), held, saturate)
        else:
            total = matrix_sums.of_mma(result, (a_type, b_type), left, right, held)
        out = in_registers(result, total, slices)
        for target, row in zip(targets, out, strict=True):
            fragment.values[target] = row

    return together(d, WARP, compute)


# ldmatrix, stmatrix, movmatrix


def _matrix_rows(d: Builder, instruction: Instruction, operand: Any, count: int) -> Callable[..., np.ndarray]:
    """A function that gives the flat shared byte offset of each row of the matrices: (warps, count, 8)."""
    space = space_of(instruction)
    register, offset, space = d.address(operand, space)
    machine = d.machine
    if space not in ("shared", "generic"):
        raise SimError(f"matrices are in shared memory, not in {space} memory")

    def rows(fragment: Fragment, warps: Groups) -> np.ndarray:
        value = np.broadcast_to(np.atleast_1d(fragment.get(register)), (fragment.n,))
        address = value.view(S64) if value.dtype.itemsize == 8 else value.view(U32).astype(np.int64)
        address = (address + offset).reshape(-1, 32)
        # Lanes beyond the last row give no address: whatever they hold is not looked at.
        used = np.where(np.arange(32) < 8 * count, address, address[:, :1]).reshape(-1)
        if space == "generic":
            used = used - SHARED_WINDOW
            if ((used < 0) | (used >> 32 != 0)).any():
                raise OutOfBounds("a row of a matrix is not in shared memory")
        flat = shared_index(machine, fragment, used, 16, 16).reshape(-1, 1)
        if flat.size == 1:
            flat = np.broadcast_to(flat, (fragment.n, 1))
        return np.ascontiguousarray(flat.reshape(-1, 32)[:, : 8 * count]).reshape(-1, count, 8)

    return rows


def _count(instruction: Instruction) -> int:
    """How many matrices, and that they are 8x8 of 16 bits."""
    modifiers = set(instruction.modifiers)
    count = next((n for n in (1, 2, 4) if f"x{n}" in modifiers), 0)
    known = {"sync", "aligned", "m8n8", "trans", "b16", "shared", "shared::cta", f"x{count}"}
    if not count or modifiers - known or not {"m8n8", "b16"} <= modifiers:
        raise UnknownInstruction("the simulator knows 8x8 matrices of .b16 only", instruction)
    return count


def _transposed(words: np.ndarray) -> np.ndarray:
    """(…, 8 rows, 4 words) of 16-bit elements, each matrix transposed."""
    halves = words.view(np.uint16)
    return np.ascontiguousarray(halves.swapaxes(-1, -2)).view(np.uint32)


def _observe(machine: Any, fragment: Fragment, instruction: Instruction, rows: np.ndarray, action: str) -> None:
    """Tell the observer of the rows: the lanes that named them access 16 bytes each."""
    if machine.observer is None:
        return
    count = 8 * rows.shape[1]
    positions = np.nonzero(np.tile(np.arange(32) < count, rows.shape[0]))[0]
    who = fragment if count == 32 else fragment.subset(positions, fragment.block)
    machine.observer.access(who, instruction, SHARED, machine.shared_view(U32), rows.reshape(-1) >> 2, 4, action)


_WORD = np.arange(4) * 4


def _ldmatrix(d: Builder, instruction: Instruction) -> Step:
    count = _count(instruction)
    trans = "trans" in instruction.modifiers
    to, source = instruction.operands
    locate = _matrix_rows(d, instruction, source, count)
    targets = registers_of(d, to, count, "the result", U32, write=True)
    machine = d.machine

    def compute(fragment: Fragment, warps: Groups) -> None:
        rows = locate(fragment, warps)
        _observe(machine, fragment, instruction, rows, "read")
        machine.loaded[SHARED] += 16 * rows.size
        words = machine.shared_view(U32).take(rows[..., None] + _WORD >> 2)
        if trans:
            words = _transposed(words)
        for j, target in enumerate(targets):
            if target is not None:
                fragment.values[target] = words[:, j].reshape(-1)

    return together(d, WARP, compute)


def _stmatrix(d: Builder, instruction: Instruction) -> Step:
    count = _count(instruction)
    trans = "trans" in instruction.modifiers
    destination, source = instruction.operands
    locate = _matrix_rows(d, instruction, destination, count)
    sources = registers_of(d, source, count, "the source", U32)
    machine = d.machine

    def compute(fragment: Fragment, warps: Groups) -> None:
        rows = locate(fragment, warps)
        _observe(machine, fragment, instruction, rows, "write")
        machine.stored[SHARED] += 16 * rows.size
        machine.scheduler.progress += 1
        words = stacked(fragment, sources, U32).reshape(count, -1, 8, 4).swapaxes(0, 1)
        words = np.ascontiguousarray(words)
        if trans:
            words = _transposed(words)
        machine.shared_view(U32)[rows[..., None] + _WORD >> 2] = words

    return together(d, WARP, compute)


def _movmatrix(d: Builder, instruction: Instruction) -> Step:
    if set(instruction.modifiers) != {"sync", "aligned", "m8n8", "trans", "b16"}:
        raise UnknownInstruction("the simulator does not know this movmatrix", instruction)
    to, source = instruction.operands
    sources = registers_of(d, source, 1, "the source", U32)
    (target,) = registers_of(d, to, 1, "the result", U32, write=True)

    def compute(fragment: Fragment, warps: Groups) -> None:
        words = stacked(fragment, sources, U32).reshape(-1, 8, 4)
        fragment.values[target] = _transposed(words).reshape(-1)

    return together(d, WARP, compute)


HANDLERS: dict[str, Callable[[Builder, Instruction], Step]] = {
    "mma": _mma,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "movmatrix": _movmatrix,
}

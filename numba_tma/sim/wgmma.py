"""The warpgroup's matrix multiplication: wgmma.mma_async and what orders it.

The four warps of a warpgroup issue one instruction together; it reads shared memory, and writes the accumulators, at
some time until the wait for its group. The simulator chooses that time as it does for copies (`policy`): at issue
for "fifo" and "early", at the wait for "late", by lot for "random". Until then the accumulators hold NaN (integers -1),
so a kernel that reads them, or overwrites the operands, too soon gets a wrong number. Floating-point sums are the
hardware's (matrix_sums.py), integers are exact.

An operation that is not done yet belongs to the fragment that issued it, and is done at the latest when the
fragment's registers are copied, since it writes into the arrays that they are. Moves between registers do no harm: they
share arrays.
Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import matrix_sums
from .access import shared_index
from .aligned import WARPGROUP, Groups, stack, together, uniform
from .errors import SimError, UnknownInstruction
from .fragment import Fragment
from .matrix_descriptor import addresses, decode
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
from .memory import SHARED_BASE
from .module import Immediate, Instruction, Vector
from .program import BOOL, U32, U64, Builder, Reader, Step
from .tensor_cores import registers_of, types_fit

if TYPE_CHECKING:
    from .machine import Machine

_ROWS = 64
# Bytes along K that one instruction reads of every row, whatever the type.
_DEPTH_BYTES = 32
_UNIT = np.dtype(np.complex128)
_KNOWN = frozenset(("mma_async", "sync", "aligned", "satfinite"))


class Pending:
    """A fragment's operations that are not done: those of each committed group, oldest first, and the others."""

    def __init__(self) -> None:
        self.groups: list[list[Callable[[], None]]] = []
        self.open: list[Callable[[], None]] = []

    def commit(self) -> None:
        """Close the open group."""
        self.groups.append(self.open)
        self.open = []

    def wait(self, pending: int) -> None:
        """Do what all groups but the `pending` latest ask for."""
        count = max(len(self.groups) - pending, 0)
        done, self.groups = self.groups[:count], self.groups[count:]
        for group in done:
            for operation in group:
                operation()

    @property
    def busy(self) -> bool:
        """Whether anything is to be done yet."""
        return bool(self.open) or any(self.groups)

    def finish(self) -> None:
        """Do everything."""
        self.wait(0)
        opened, self.open = self.open, []
        for operation in opened:
            operation()


def _sign(operand: Any, what: str) -> float:
    if not isinstance(operand, Immediate) or operand.value not in (1, -1):
        raise SimError(f"{what} is 1 or -1")
    return float(operand.value)


def _major(operand: Any, what: str) -> bool:
    if not isinstance(operand, Immediate) or operand.value not in (0, 1):
        raise SimError(f"{what} is 0 (K-major) or 1 (MN-major)")
    return bool(operand.value)


class _Shared:
    """A multiplicand in shared memory: rows along M or N, `extent` of them."""

    def __init__(self, machine: Machine, kind: str, read: Reader, extent: int, transposed: bool, name: str) -> None:
        self.machine = machine
        self.kind = kind
        self.read = read
        self.extent = extent
        self.transposed = transposed
        self.name = name
        self.depth = 8 * _DEPTH_BYTES // BITS[kind]

    def locate(self, fragment: Fragment, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        """Where each different matrix's 16-byte units lie in all blocks' shared memory; which one each group has."""
        value = uniform(self.read(fragment), groups, WARPGROUP, f"the descriptor of {self.name}")
        keys = list(zip(groups.slots.tolist(), value.tolist(), strict=True))
        places: dict[tuple[int, int], int] = {}
        which = np.array([places.setdefault(key, len(places)) for key in keys])
        found = []
        for slot, bits in places:
            address = addresses(decode(bits), self.extent, self.depth, self.transposed)
            low, high = int(address.min()), int(address.max())
            if low < SHARED_BASE or high + 16 > self.machine.shared_end:
                member = groups.slots.tolist().index(slot)
                one = fragment.subset(np.nonzero(groups.row == member)[0][:1], fragment.block)
                for bad in (low, high):
                    shared_index(self.machine, one, np.array([bad]), 16, 16)
            found.append((address + slot * self.machine.shared_stride) >> 4)
        return np.stack(found), which

    def fetch(self, units: np.ndarray) -> np.ndarray:
        """The matrices' elements: (matrices, rows, K)."""
        data = self.machine.shared_view(_UNIT).take(units)
        values = numbers(self.kind, data)
        return values.transpose(0, 2, 1) if self.transposed else values


class _Registers:
    """Multiplicand A in registers."""

    def __init__(self, kind: str, registers: list[int]) -> None:
        self.kind = kind
        self.registers = registers

    def read(self, values: list[np.ndarray], lanes: int) -> np.ndarray:
        """(warpgroups, 64, K)."""
        rows = multiplicand(stack(values, lanes, U32), 2)
        return numbers(self.kind, rows.reshape(-1, _ROWS, rows.shape[-1]))


def _mma_async(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    shape = next((m for m in (re.fullmatch(r"m64n(\d+)k(\d+)", m) for m in modifiers) if m), None)
    types = [m for m in modifiers if m in BITS or m in ACCUMULATORS]
    if shape is None or len(types) != 3 or set(modifiers) - set(types) - _KNOWN != {shape[0]}:
        raise UnknownInstruction("the simulator does not know this wgmma", instruction)
    n, k = int(shape[1]), int(shape[2])
    result, a_type, b_type = types
    integer = result == "s32"
    known = (
        types_fit(result, a_type, b_type)
        and k * BITS[a_type] == 8 * _DEPTH_BYTES
        and "4" not in (a_type[1:], b_type[1:])
    )
    known = known and 8 <= n <= 256 and n % (16 if integer and n > 32 else 8) == 0
    if not known:
        raise UnknownInstruction(f"wgmma.mma_async has no shape {shape[0]} with types {'.'.join(types)}", instruction)
    to, a, b, scale, *immediates = instruction.operands
    saturate = "satfinite" in modifiers
    machine = d.machine
    a_in_registers = isinstance(a, Vector)
    a_sign = b_sign = 1.0
    if not integer:
        a_sign, b_sign = _sign(immediates.pop(0), "imm-scale-a"), _sign(immediates.pop(0), "imm-scale-b")
    a_major = b_major = False
    if BITS[a_type] == 16:
        if not a_in_registers:
            a_major = _major(immediates.pop(0), "imm-trans-a")
        b_major = _major(immediates.pop(0), "imm-trans-b")
    if immediates:
        raise SimError("too many operands: only 16-bit types have imm-trans-a (of a descriptor) and imm-trans-b")
    count = accumulator_registers(result, 2, n)
    dtype = ACCUMULATORS[result]
    before = registers_of(d, to, count, "D", dtype)
    targets = registers_of(d, to, count, "D", dtype, write=True)
    if a_in_registers:
        left: _Registers | _Shared = _Registers(a_type, registers_of(d, a, 4, "A", U32))
    else:
        left = _Shared(machine, a_type, d.reader(a, U64), _ROWS, a_major, "A")
    right = _Shared(machine, b_type, d.reader(b, U64), n, b_major, "B")
    scale_d = d.reader(scale, BOOL)
    sign = a_sign * b_sign
    precision = matrix_sums.of_wgmma(a_type)

    def compute(fragment: Fragment, groups: Groups) -> None:
        lanes = fragment.n
        keep = uniform(scale_d(fragment), groups, WARPGROUP, "scale-d")
        held = [fragment.get(register) for register in before] if keep.any() else None
        b_units, b_which = right.locate(fragment, groups)
        if isinstance(left, _Registers):
            a_values = [fragment.get(register) for register in left.registers]
            a_units = a_which = None
        else:
            a_units, a_which = left.locate(fragment, groups)
        if machine.observer is not None:
            reads = [(b_units, b_which)] if a_units is None else [(a_units, a_which), (b_units, b_which)]
            multiplicand = left.registers if isinstance(left, _Registers) else []
            machine.observer.wgmma_issued(fragment, instruction, targets, multiplicand, reads)

        def perform() -> np.ndarray:
            if a_units is None:
                a_matrix = left.read(a_values, lanes)
            else:
                a_matrix = left.fetch(a_units)
                a_matrix = a_matrix if len(a_matrix) == 1 else a_matrix[a_which]
            b_matrix = right.fetch(b_units)
            b_matrix = b_matrix if len(b_matrix) == 1 else b_matrix[b_which]
            added = None
            if held is not None:
                added = from_registers(result, stack(held, lanes, dtype), _ROWS, 2)
                added[~keep] = 0
            if integer:
                total = add_integers(a_matrix @ b_matrix.transpose(0, 2, 1), added, saturate)
            else:
                a_matrix = a_matrix if sign > 0 else -a_matrix
                total = matrix_sums.step(precision, result, (a_type, b_type), a_matrix, b_matrix, added)
            return in_registers(result, np.broadcast_to(total, (groups.count, _ROWS, n)), 2)

        # What an earlier operation has still to write, this one has still to read.
        behind = fragment.pending is not None and fragment.pending.busy
        if not behind and _at_issue(machine):
            out = perform()
        else:
            out = np.full((count, lanes), -1, np.int32).view(dtype)

            def later() -> None:
                out[:] = perform()

            if fragment.pending is None:
                fragment.pending = Pending()
            fragment.pending.open.append(later)
        values = fragment.values
        for target, row in zip(targets, out, strict=True):
            values[target] = row

    return together(d, WARPGROUP, compute)


def _at_issue(machine: Machine) -> bool:
    policy = machine.engine.policy
    return policy in ("fifo", "early") or (policy == "random" and bool(machine.rng.integers(2)))


def _order(d: Builder, instruction: Instruction) -> Step:
    """fence, commit_group and wait_group."""
    machine = d.machine
    what = instruction.modifiers[0]
    pending = 0
    if what == "wait_group":
        (operand,) = instruction.operands
        pending = operand.value

    def run(values: list, fragment: Fragment) -> None:
        if machine.observer is not None:
            machine.observer.wgmma_ordered(fragment, instruction, what, pending)
        if fragment.pending is not None:
            if what == "commit_group":
                fragment.pending.commit()
            elif what == "wait_group":
                fragment.pending.wait(pending)

    return Step(run=run)


def _wgmma(d: Builder, instruction: Instruction) -> Step:
    what = instruction.modifiers[:1]
    if what == ("mma_async",):
        return _mma_async(d, instruction)
    if what in (("fence",), ("commit_group",), ("wait_group",)):
        return _order(d, instruction)
    raise UnknownInstruction("the simulator does not know this wgmma", instruction)


HANDLERS = {"wgmma": _wgmma}

__all__ = ["HANDLERS", "Pending"]

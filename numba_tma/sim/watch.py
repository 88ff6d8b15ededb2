"""Registers of wgmma: which instructions use accumulators, or A in registers, beside wgmma itself.

An observer is told before such an instruction runs, so that it can see results used before they are there. A `mov` is
told as a move where nobody reads its source afterwards: compilers rename registers in this way, and no assembler makes
an instruction of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .module import Immediate, Instruction, Register, Vector

if TYPE_CHECKING:
    from .fragment import Fragment
    from .program import Block, Builder, Run


class RegisterUse:
    """One instruction that reads or writes such registers, by number."""

    def __init__(self, machine: Any, instruction: Instruction, reads: list[int], writes: list[int]) -> None:
        self.machine = machine
        self.instruction = instruction
        self.reads, self.writes = reads, writes
        # A copy of one such register to another, and where nobody reads the source afterwards; a constant.
        self.moves = _is_move(instruction) and len(reads) == len(writes) == 1
        self.renames = False
        self.clears = instruction.opcode == "mov" and not instruction.guard and not reads and _is_constant(instruction)

    def run(self, values: list, fragment: Fragment) -> None:
        """Tell the observer."""
        self.machine.observer.registers_used(fragment, self)


class RegisterWatch:
    """The registers of one function's wgmma instructions, and their uses by other instructions."""

    def __init__(self, builder: Builder) -> None:
        self._machine = builder.machine
        body = builder.function.body
        found = {r.name: r for i in body if i.opcode == "wgmma" for o in i.operands for r in _in_vector(o)}
        if found:
            _follow_moves(body, found)
        self.bits = 0
        for register in found.values():
            self.bits |= 1 << builder.register(register)
        # Of each block, in order: registers used and defined, and what is told (None for wgmma itself).
        self._blocks: dict[Block, list[tuple[int, int, RegisterUse | None]]] = {}

    def use(self, block: Block, instruction: Instruction, uses: int, defs: int) -> Run | None:
        """An operation that tells of an instruction in the block; None if it uses no such register."""
        uses, defs = uses & self.bits, defs & self.bits
        if not uses | defs:
            return None
        told = None
        if instruction.opcode != "wgmma":
            told = RegisterUse(self._machine, instruction, _numbers(uses), _numbers(defs))
        self._blocks.setdefault(block, []).append((uses, defs, told))
        return told.run if told is not None else None

    def finish(self) -> None:
        """Find the moves, when the blocks' live registers are known."""
        for block, entries in self._blocks.items():
            live = 0
            for successor in block.successors:
                live |= successor.live_in
            for uses, defs, told in reversed(entries):
                if told is not None:
                    told.renames = told.moves and not live & uses
                live = (live & ~defs) | uses


def _in_vector(operand: Any) -> Iterator[Register]:
    if isinstance(operand, Vector):
        yield from (element for element in operand.elements if isinstance(element, Register))


def _is_move(instruction: Instruction) -> bool:
    return (
        instruction.opcode == "mov"
        and instruction.guard is None
        and all(isinstance(operand, Register) and not operand.special for operand in instruction.operands)
    )


def _is_constant(instruction: Instruction) -> bool:
    return isinstance(instruction.operands[1], Immediate)


def _follow_moves(body: list[Instruction], found: dict[str, Register]) -> None:
    """Add what the registers are moved to and from."""
    moves = [i.operands for i in body if _is_move(i)]
    while True:
        before = len(found)
        for target, source in moves:
            if target.name in found or source.name in found:
                found[target.name], found[source.name] = target, source
        if len(found) == before:
            return


def _numbers(bits: int) -> list[int]:
    numbers = []
    while bits:
        lowest = bits & -bits
        numbers.append(lowest.bit_length() - 1)
        bits ^= lowest
    return numbers

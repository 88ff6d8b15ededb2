"""Loops that only wait: they look at memory again and again and change nothing.

What a thread does while it waits is in the PTX a cycle of its control flow: it asks a barrier, or loads a flag, and
branches back. A loop that also stores, arrives, copies or multiplies does work between its looks, and is none of these.
Nor is one that goes on whatever it sees, such as one that adds up what is in an array that others may write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..sim.module import (
    CONDITION_CODE,
    Address,
    Function,
    Instruction,
    Negated,
    PredicatePair,
    Register,
    Vector,
)

# What a loop may do and still only wait: it reads, computes on integers, sleeps, and meets the lanes of its warp.
_QUIET = frozenset(
    (
        *("cvt", "cvta", "isspacep", "ld", "mapa", "mov", "selp"),
        *(
            "abs",
            "add",
            "addc",
            "bfe",
            "bfi",
            "clz",
            "cnot",
            "fns",
            "mad",
            "max",
            "min",
            "mul",
            "neg",
            "popc",
            "prmt",
            "rem",
            "sub",
            "subc",
        ),
        *("and", "lop3", "not", "or", "set", "setp", "shf", "shl", "shr", "xor"),
        *("bra", "brx", "fence", "membar", "nanosleep"),
        *("activemask", "elect", "match", "shfl", "vote"),
    )
)
_STRONG = {"acquire", "relaxed", "volatile"}
BEGINNING = -1


@dataclass(frozen=True)
class Spin:
    """A loop that only waits.

    Attributes:
        header: index of the instruction that every turn begins with.
        looks: indices of the instructions that look whether to go on.
        enters: those behind which the loop is entered at the header; BEGINNING is that of the function.
        turns: those behind which the next turn begins.
    """

    header: int
    looks: tuple[int, ...]
    enters: tuple[int, ...]
    turns: tuple[int, ...]


def is_look(instruction: Instruction) -> bool:
    """Whether it looks for what another thread or the copy engine may have done."""
    modifiers = instruction.modifiers
    if instruction.opcode == "mbarrier":
        return modifiers[0] in ("try_wait", "test_wait")
    if instruction.opcode == "atom":  # one that takes a lock, or fails to and changes nothing
        return "cas" in modifiers
    return instruction.opcode == "ld" and not _STRONG.isdisjoint(modifiers)


def falls_through(instruction: Instruction) -> bool:
    """Whether the instruction behind it may be next."""
    return instruction.guard is not None or instruction.opcode not in ("bra", "brx", "ret", "exit", "trap")


def find(function: Function) -> list[Spin]:
    """The loops of a function that only wait, each with one beginning and no other such loop inside."""
    body = function.body
    behind = [_behind(function, index) for index in range(len(body))]
    before: list[list[int]] = [[] for _ in body]
    for index, targets in enumerate(behind):
        for target in targets:
            before[target].append(index)
    if body:
        before[0].append(BEGINNING)
    loops: dict[int, set[int]] = {}
    for header, indices in enumerate(before):
        for index in indices if len(indices) > 1 else ():
            loops.setdefault(header, set()).update(_loop(body, before, header, index))
    waiting = {header: loop for header, loop in loops.items() if _looks_decide(body, loop)}
    return [
        Spin(
            header,
            tuple(index for index in sorted(loop) if is_look(body[index])),
            tuple(index for index in before[header] if index not in loop),
            tuple(index for index in before[header] if index in loop),
        )
        for header, loop in waiting.items()
        if not any(other < loop for other in waiting.values())
    ]


def _looks_decide(body: list[Instruction], loop: set[int]) -> bool:
    """Whether a branch in the loop depends on what its looks see, by way of registers."""
    seen: set[str] = set()
    while True:
        before = len(seen)
        for index in loop:
            instruction = body[index]
            depends = not seen.isdisjoint(_read(instruction))
            if depends and instruction.opcode in ("bra", "brx"):
                return True
            if depends or is_look(instruction):
                seen |= _written(instruction)
        if len(seen) == before:
            return False


def _written(instruction: Instruction) -> set[str]:
    """Registers that one of the instructions of a loop that waits may write: they all name them first."""
    carry = {CONDITION_CODE.name} if "cc" in instruction.modifiers else set()
    return carry | set(_registers(instruction.operands[:1]))


def _read(instruction: Instruction) -> set[str]:
    """Registers that one may read; a guarded instruction leaves what it does not write."""
    first = 0 if instruction.opcode in ("bra", "brx") else 1
    carry = {CONDITION_CODE.name} if instruction.opcode in ("addc", "subc") else set()
    guard = {instruction.guard[0].name} if instruction.guard is not None else set()
    return carry | guard | set(_registers(instruction.operands[first:]))


def _registers(operands: Iterable[object]) -> Iterator[str]:
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.name
        elif isinstance(operand, Address):
            yield from _registers((operand.base,))
        elif isinstance(operand, Vector):
            yield from _registers(operand.elements)
        elif isinstance(operand, Negated):
            yield operand.register.name
        elif isinstance(operand, PredicatePair):
            yield from _registers((operand.first, operand.second))


def _behind(function: Function, index: int) -> set[int]:
    """The instructions that may be next."""
    instruction = function.body[index]
    targets = set()
    if instruction.opcode == "bra":
        targets.add(function.labels[instruction.operands[0].name])
    elif instruction.opcode == "brx":
        targets.update(function.labels[name] for name in function.branch_targets[instruction.operands[1].name])
    if falls_through(instruction):
        targets.add(index + 1)
    return {target for target in targets if target < len(function.body)}


def _loop(body: list[Instruction], before: list[list[int]], header: int, last: int) -> set[int]:
    """The loop that is closed by going from `last` to `header`: nothing if that closes none, or one that does more
    than wait. It is one if `last` cannot be reached but through `header`."""
    loop, waiting = {header}, [last]
    while waiting:
        index = waiting.pop()
        if index == BEGINNING or not _is_quiet(body[index]):
            return set()
        if index not in loop:
            loop.add(index)
            waiting += before[index]
    return loop if _is_quiet(body[header]) else set()


def _is_quiet(instruction: Instruction) -> bool:
    meets_warp = instruction.opcode in ("bar", "barrier") and "warp" in instruction.modifiers
    return instruction.opcode in _QUIET or meets_warp or is_look(instruction)

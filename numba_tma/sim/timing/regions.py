"""From what a warp executed to what it does in time: stretches of code in the order of the machine code.

A trace is cut where a warp waits for others, where it jumps back, and at calls: between, the assembler is free to
exchange instructions, and does: it puts loads first. So a stretch is put into the order of the machine code, as far as
that lies in one piece, and becomes *actions*: run for so long, perform an operation on memory or a barrier, wait for
the result of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .ops import LATE, WAITS, Costs, Op
from .record import END, Trace

if TYPE_CHECKING:
    from ..program import Block

# Actions: (RUN, slots, cycles, pipes), (WAIT, operations), (WAIT_REGISTER, name), (PERFORM, operation),
# (KEEP, name, operations, names): a register's value comes with those operations of the region, and with what earlier
# regions left coming in registers.
RUN, WAIT, WAIT_REGISTER, PERFORM, KEEP = range(5)
_LONGEST = 64
# What closes a group, and of what. In the machine code it may be a mark of the last one's, and has no place of its own.
_CLOSES = {"wgmma commit": "wgmma", "bulk commit": "copy", "cp.async commit": "cp.async"}


class Operation(NamedTuple):
    """An op that is performed, with the entry of the trace that has what was noted of it, counted from the region's."""

    op: Op
    entry: int


@dataclass(frozen=True)
class Region:
    """A stretch of code: its actions in order, and the operations that they name by number."""

    actions: tuple[tuple, ...]
    operations: tuple[Operation, ...]


def noted(operation: Operation, entries: list, start: int) -> Any:
    """What was recorded of an operation, or None."""
    notes = entries[start + operation.entry][1]
    if notes is None:
        return None
    found = notes.get(id(operation.op.instruction))
    return notes.get(END) if found is None else found


class Regions:
    """The regions of a launch, made once for each sequence of blocks of code."""

    def __init__(self, costs: Costs, blocks: Iterable[Block]) -> None:
        self._costs = costs
        self._late = _late_registers(costs, blocks)
        self._made: dict[tuple[int, ...], Region] = {}

    def of(self, trace: Trace) -> list[tuple[Region, int]]:
        """The trace's regions, each with the number of its first entry."""
        found = []
        entries = trace.entries
        start = 0
        for i, (block, _) in enumerate(entries):
            alone = self._waits(block)
            if i > start and (alone or self._parts(entries[i - 1][0], block) or i - start >= _LONGEST):
                found.append((self._region([b for b, _ in entries[start:i]]), start))
                start = i
            if alone:
                found.append((self._region([block]), i))
                start = i + 1
        if start < len(entries):
            found.append((self._region([b for b, _ in entries[start:]]), start))
        return found

    def _waits(self, block: Block) -> bool:
        return any(op.kind in WAITS for op in self._costs.of_block(block))

    @staticmethod
    def _parts(before: Block, block: Block) -> bool:
        return block.pc <= before.pc or block.instance is not before.instance

    def _region(self, blocks: list[Block]) -> Region:
        key = tuple(block.pc for block in blocks)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = _Builder(self._costs, blocks, self._late).region()
        return made


def _late_registers(costs: Costs, blocks: Iterable[Block]) -> frozenset[tuple[int, str]]:
    """(function, name) of registers that may hold what is still to come: results of loads and the like, and moves."""
    late: set[tuple[int, str]] = set()
    moves = []
    for block in blocks:
        function = block.instance.index
        for op in costs.of_block(block):
            if op.kind in LATE:
                late.update((function, name) for name in op.writes)
            elif op.kind == "free":
                moves.append((function, op))
    changed = True
    while changed:
        before = len(late)
        for function, op in moves:
            if any((function, name) in late for name in op.reads):
                late.update((function, name) for name in op.writes)
        changed = len(late) > before
    return frozenset(late)


class _Builder:
    """Makes one region."""

    def __init__(self, costs: Costs, blocks: list[Block], late: frozenset[tuple[int, str]]) -> None:
        self._costs = costs
        self._late = late
        self._ops: list[Op] = []
        self._entry: list[int] = []
        for number, block in enumerate(blocks):
            for op in costs.of_block(block):
                self._ops.append(op)
                self._entry.append(number)
        self._function = blocks[0].instance.index
        self._actions: list[tuple] = []
        self._operations: list[Operation] = []
        self._numbers: dict[int, int] = {}
        self._slots = self._cycles = 0.0
        self._pipes: dict[int, float] = {}
        # Results that are still to come, by register: numbers of operations, or a register's own name from before.
        self._coming: dict[str, frozenset[int | str]] = {}
        self._waited: set[int | str] = set()
        self._ready: dict[str, float] = {}
        self._now = 0.0

    def region(self) -> Region:
        for index in self._order():
            self._emit(index)
        self._flush()
        for name, coming in self._coming.items():
            left = coming - self._waited
            if left:
                numbers, names = _parted(left)
                self._actions.append((KEEP, (self._function, name), numbers, self._keys(names)))
        return Region(tuple(self._actions), tuple(self._operations))

    def _order(self) -> list[int]:
        """Indices of ops in the order of the machine code, results before their uses."""
        ops = self._ops
        if not self._costs.known:
            return list(range(len(ops)))
        stretches: dict[int, int] = {}
        keys = []
        last = (-1, -1)
        for op in ops:
            if op.place is not None:
                # Stretches stay in the order in which they were come to.
                last = (stretches.setdefault(op.place[0], len(stretches)), op.place[1])
            keys.append(last)
        producers: list[list[int]] = []
        # What a wide access loads may be named before it in the PTX.
        latest = {name: index for index, op in enumerate(ops) for name in op.joined}
        for index, op in enumerate(ops):
            producers.append([latest[name] for name in op.reads if name in latest])
            latest.update(dict.fromkeys(op.writes, index))
        for closing, member in _CLOSES.items():
            before: list[int] = []  # of the group so far; behind a commit, the commit
            for index, op in enumerate(ops):
                if op.kind == member:
                    producers[index] += [i for i in before if ops[i].kind == closing]
                    before.append(index)
                elif op.kind == closing:
                    producers[index] += before
                    before = [index]
        order: list[int] = []
        done = [False] * len(ops)
        for start in sorted(range(len(ops)), key=lambda i: (keys[i], i)):
            todo = [start]
            while todo:
                index = todo[-1]
                missing = [p for p in producers[index] if not done[p]]
                if missing and not done[index]:
                    todo += missing
                    continue
                todo.pop()
                if not done[index]:
                    done[index] = True
                    order.append(index)
        return order

    def _emit(self, index: int) -> None:
        op = self._ops[index]
        coming = frozenset().union(*(self._sources(name) for name in op.reads)) if op.reads else frozenset()
        if op.kind == "free":
            # A move is none in the machine code: who reads the copy waits for the original.
            for name in op.writes:
                self._coming[name] = coming
                self._ready[name] = max((self._ready.get(read, 0.0) for read in op.reads), default=0.0)
            self._add(op)
            return
        self._wait_for(coming)
        if not self._costs.known:
            stall = max((self._ready.get(name, 0.0) for name in op.reads), default=0.0) - self._now
            if stall > 0:
                self._cycles += stall
                self._now += stall
        number: frozenset = frozenset()
        if op.kind != "run":
            self._flush()
            self._operations.append(Operation(op, self._entry[index]))
            self._actions.append((PERFORM, len(self._operations) - 1))
            if op.kind in LATE:
                number = frozenset((len(self._operations) - 1,))
        for name in op.writes:
            self._coming[name] = number
            self._ready[name] = self._now + self._costs.device.latencies["alu"]
        self._add(op)

    def _sources(self, name: str) -> frozenset:
        found = self._coming.get(name)
        if found is None:
            found = frozenset((name,)) if (self._function, name) in self._late else frozenset()
        return found

    def _keys(self, names: list[str]) -> tuple[tuple[int, str], ...]:
        return tuple((self._function, name) for name in names)

    def _wait_for(self, coming: frozenset) -> None:
        late = coming - self._waited
        if not late:
            return
        self._waited |= late
        self._flush()
        numbers, names = _parted(late)
        if numbers:
            self._actions.append((WAIT, numbers))
        self._actions.extend((WAIT_REGISTER, key) for key in self._keys(names))

    def _add(self, op: Op) -> None:
        self._slots += op.slots
        self._cycles += op.cycles
        self._now += op.cycles
        for pipe, cycles in op.pipes:
            self._pipes[pipe] = self._pipes.get(pipe, 0.0) + cycles

    def _flush(self) -> None:
        if self._slots or self._cycles:
            self._actions.append((RUN, self._slots, self._cycles, tuple(self._pipes.items())))
        self._slots = self._cycles = 0.0
        self._pipes = {}


def _parted(sources: Iterable[int | str]) -> tuple[tuple[int, ...], list[str]]:
    """Numbers of operations, and names of registers."""
    found = list(sources)
    numbers = sorted(source for source in found if isinstance(source, int))
    return tuple(numbers), [source for source in found if isinstance(source, str)]

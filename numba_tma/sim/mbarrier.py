"""mbarrier objects, kept in the 8 bytes of shared memory that they own.

The simulator's layout of the 64 bits (opaque to kernels, like the hardware's)::

    bit  63      phase: parity of the current, incomplete phase
    bit  62      zero in every initialised barrier, so that poison is none
    bits 40-61   transaction count, two's complement
    bits 20-39   arrivals of a phase
    bits  0-19   arrivals still pending in the current phase

A word whose arrivals of a phase are 0 is not initialised. The phase completes when no arrival is pending and the
transaction count is zero; then the next one begins with all its arrivals pending. An arrive returns the word before it
as its state; waiting for a state or a parity asks whether the phase named by it is no longer the current one.

Lanes of one instruction may meet at a barrier; they act in the order of their numbers.
Source: PTX ISA, "mbarrier" and its subsections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .access import shared_index
from .errors import SimError, UnknownInstruction
from .fragment import Fragment
from .memory import SHARED_WINDOW
from .module import Address, Instruction, Sink
from .program import BOOL, S32, S64, U32, U64, Block, Builder, Step
from .scheduler import Wait

if TYPE_CHECKING:
    from .machine import Machine

MAX_COUNT = (1 << 20) - 1
MAX_TX = (1 << 20) - 1
TOO_MANY = "more arrive than the phase takes"  # in the error's message
_COUNT_MASK = MAX_COUNT
_TX_MASK = (1 << 22) - 1
_INVALID = 1 << 62
_LOW = np.uint64(MAX_COUNT)


def pack(phase: int, tx: int, arrivals: int, pending: int) -> int:
    """The word of a barrier."""
    return phase << 63 | (tx & _TX_MASK) << 40 | arrivals << 20 | pending


def unpack(word: int) -> tuple[int, int, int, int]:
    """(phase, transaction count, arrivals of a phase, pending arrivals)."""
    tx = word >> 40 & _TX_MASK
    return word >> 63, tx - (tx >> 21 << 22), word >> 20 & _COUNT_MASK, word & _COUNT_MASK


def is_initialised(word: int) -> bool:
    """Whether a word can be a barrier."""
    return not word & _INVALID and bool(word >> 20 & _COUNT_MASK)


class BarrierMemory:
    """Barrier operations one at a time, on words of the flat shared memory. Also what the copy engine calls."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.words = machine.shared_view(U64)
        self._row = machine.shared_stride // 8

    def where(self, index: int) -> str:
        """A barrier for messages: "mbarrier full[1] (shared address 0x408) of block 0"."""
        slot, word = divmod(index, self._row)
        return f"{self.machine.mbarrier_place(8 * word)} of block {self.machine.block_name(slot)}"

    def load(self, index: int, action: str) -> tuple[int, int, int, int]:
        """The fields of an initialised barrier."""
        word = int(self.words[index])
        if not is_initialised(word):
            raise SimError(
                f"{action} on an mbarrier that is not initialised ({self.where(index)}, which holds {word:#018x}): "
                "mbarrier.init must come first, and be seen by this thread"
            )
        return unpack(word)

    def store(self, index: int, phase: int, tx: int, arrivals: int, pending: int) -> None:
        """Write a barrier; its phase completes here when nothing is pending."""
        if not -MAX_TX <= tx <= MAX_TX:
            raise SimError(f"transaction count {tx} of {self.where(index)} is beyond ±{MAX_TX}")
        if pending == 0 and tx == 0:
            phase, pending = phase ^ 1, arrivals
            if self.machine.observer is not None:
                self.machine.observer.phase_completed(index)
        self.words[index] = pack(phase, tx, arrivals, pending)
        self.machine.scheduler.events += 1
        self.machine.scheduler.progress += 1

    def arrive_at(self, index: int, count: int, tx: int = 0, drop: bool = False) -> int:
        """Add `tx` expected bytes, then `count` arrivals; returns the state before the arrivals."""
        phase, old_tx, arrivals, pending = self.load(index, "arrive")
        state = pack(phase, old_tx, arrivals, pending)
        if count > pending:
            raise SimError(
                f"{count} arrival{'s' * (count > 1)} at an mbarrier with {pending} pending ({self.where(index)}, "
                f"initialised for {arrivals}): {TOO_MANY}: more threads than mbarrier.init was told, or one of them "
                "again before the phase was over"
            )
        if drop:
            arrivals -= count
        self.store(index, phase, old_tx + tx, arrivals, pending - count)
        return state

    def arrive_many(
        self, index: np.ndarray, counts: np.ndarray, tx: np.ndarray | None, drop: bool, no_complete: bool
    ) -> np.ndarray | None:
        """Arrivals of many lanes at once; the states before each. None, with nothing done, if there are too many.

        `counts` has one element or one for each lane; `tx` are bytes that each lane expects before it arrives.
        """
        barriers, inverse = np.unique(index, return_inverse=True)
        words = _check_initialised(self, barriers, "arrive")
        each = np.broadcast_to(counts, index.shape).astype(np.int64)
        total = np.bincount(inverse, weights=each).astype(np.int64)
        pending = (words & _LOW).astype(np.int64)
        if (total > pending).any():
            return None
        if no_complete and (total == pending).any():
            raise SimError("mbarrier.arrive.noComplete would complete the phase")
        # What lanes before a lane took away from its barrier.
        order = np.argsort(inverse, kind="stable")
        running = np.cumsum(each[order]) - each[order]
        first = np.concatenate(([0], np.cumsum(np.bincount(inverse))))[:-1]
        before = np.empty(index.size, np.int64)
        before[order] = running - running[first][inverse[order]]
        states = words[inverse] - before.astype(np.uint64)
        if tx is None and not drop and (total < pending).all():
            self.words[barriers] = words - total.astype(np.uint64)
            self.machine.scheduler.progress += 1
            return states
        more = np.zeros(barriers.size, np.int64)
        if tx is not None:
            np.add.at(more, inverse, tx.astype(np.int64))
        for i, count, added in zip(barriers.tolist(), total.tolist(), more.tolist(), strict=True):
            self.arrive_at(i, count, added, drop)
        return states

    # The copy engine's interface

    def _index(self, slot: int, address: int) -> int:
        return slot * self._row + address // 8

    def complete_tx(self, slot: int, address: int, nbytes: int) -> None:
        """Bytes have arrived."""
        self.add_tx(self._index(slot, address), -nbytes, "complete_tx")

    def arrive(self, slot: int, address: int, count: int) -> None:
        """Arrivals made by cp.async.mbarrier.arrive."""
        self.arrive_at(self._index(slot, address), count)

    def add_pending(self, slot: int, address: int, count: int) -> None:
        """More arrivals wanted in this phase: cp.async.mbarrier.arrive without .noinc."""
        index = self._index(slot, address)
        phase, tx, arrivals, pending = self.load(index, "cp.async.mbarrier.arrive")
        if pending + count > MAX_COUNT:
            raise SimError(f"more than {MAX_COUNT} arrivals pending at {self.where(index)}")
        self.store(index, phase, tx, arrivals, pending + count)

    def add_tx(self, index: int, change: int, action: str) -> None:
        """expect_tx (positive) or complete_tx (negative)."""
        phase, tx, arrivals, pending = self.load(index, action)
        self.store(index, phase, tx + change, arrivals, pending)

    def describe(self, index: int, slot: int) -> str:
        """A barrier's state for the deadlock report; its block is left out where it is `slot`, the waiting thread's."""
        word = int(self.words[index])
        place = self.machine.mbarrier_place(8 * (index % self._row))
        where = place if index // self._row == slot else self.where(index)
        if not is_initialised(word):
            return f"{where}, which is not initialised"
        phase, tx, arrivals, pending = unpack(word)
        parts = []
        if pending:
            parts.append(f"{pending} of {arrivals} arrivals missing")
        if tx > 0:
            parts.append(f"{tx} bytes missing")
        if tx < 0:
            parts.append(f"{-tx} bytes more than expected")
        return f"{where}, in a phase of parity {phase}: {', '.join(parts) or 'complete'}"


def _barrier_index(d: Builder, operand: Any, modifiers: tuple[str, ...]) -> Any:
    """A function from a fragment to the word of each lane's barrier: one element or one for each lane."""
    space = "shared" if "shared" in modifiers or "shared::cta" in modifiers or "shared::cluster" in modifiers else ""
    register, offset, space = d.address(operand, space or "generic")
    machine = d.machine
    generic = space == "generic"

    def index(fragment: Fragment) -> np.ndarray:
        value = np.atleast_1d(fragment.get(register))
        address = value.view(S64) if value.dtype.itemsize == 8 else value.view(U32).astype(np.int64)
        if generic:
            address = address - SHARED_WINDOW
            if (address < 0).any() or (address >> 32).any():
                raise SimError(f"generic address {int(value[0]):#x} of an mbarrier is not in shared memory")
        return shared_index(machine, fragment, address + offset, 8, 8) >> 3

    return index


def _spread(value: np.ndarray, n: int) -> np.ndarray:
    return value if value.size == n else np.full(n, value[0], value.dtype)


def _check_initialised(memory: BarrierMemory, index: np.ndarray, action: str) -> np.ndarray:
    words = memory.words[index]
    bad = ((words & np.uint64(_INVALID)) != 0) | ((words >> np.uint64(20)) & np.uint64(_COUNT_MASK) == 0)
    if bad.any():
        memory.load(int(index[int(np.argmax(bad))]), action)
    return words


def _init(d: Builder, instruction: Instruction) -> Step:
    index_of = _barrier_index(d, instruction.operands[0], instruction.modifiers)
    count_of = d.reader(instruction.operands[1], U32)
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        index, count = index_of(fragment), count_of(fragment).astype(np.uint64)
        if int(count.min()) < 1 or int(count.max()) > MAX_COUNT:
            wrong = int(count.max()) if int(count.min()) else 0
            raise SimError(f"mbarrier.init with count {wrong}; it must be from 1 to {MAX_COUNT}")
        if machine.observer is not None:
            machine.observer.mbarrier(fragment, instruction, index, count)
        if index.size == 1 and count.size > 1:
            count = count[-1:]
        machine.barrier_memory.words[index] = count << np.uint64(20) | count
        machine.scheduler.events += 1
        machine.scheduler.progress += 1

    return Step(run=run)


def _inval(d: Builder, instruction: Instruction) -> Step:
    index_of = _barrier_index(d, instruction.operands[0], instruction.modifiers)
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        index = index_of(fragment)
        _check_initialised(machine.barrier_memory, index, "mbarrier.inval")
        if machine.observer is not None:
            machine.observer.mbarrier(fragment, instruction, index)
        machine.barrier_memory.words[index] = np.uint64((1 << 64) - 1)

    return Step(run=run)


def _tx(d: Builder, instruction: Instruction, sign: int) -> Step:
    index_of = _barrier_index(d, instruction.operands[0], instruction.modifiers)
    bytes_of = d.reader(instruction.operands[1], U32)
    machine = d.machine
    action = f"mbarrier.{instruction.modifiers[0]}"

    def run(values: list, fragment: Fragment) -> None:
        index = _spread(index_of(fragment), fragment.n)
        change = _spread(bytes_of(fragment), fragment.n)
        if machine.observer is not None:
            machine.observer.mbarrier(fragment, instruction, index, change)
        for i, nbytes in zip(index.tolist(), change.tolist(), strict=True):
            machine.barrier_memory.add_tx(i, sign * nbytes, action)

    return Step(run=run)


def _arrive(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    drop = "arrive_drop" in modifiers
    expect = "expect_tx" in modifiers
    operands = list(instruction.operands)
    # The destination is absent or a sink for remote barriers.
    destination = operands.pop(0) if not isinstance(operands[0], Address) else Sink()
    index_of = _barrier_index(d, operands[0], modifiers)
    argument = d.reader(operands[1], U32) if len(operands) > 1 else None
    write = d.writer(destination, U64)
    no_complete = "noComplete" in modifiers
    machine = d.machine
    one = np.ones(1, np.uint32)

    def run(values: list, fragment: Fragment) -> None:
        memory = machine.barrier_memory
        index = index_of(fragment)
        given = one if argument is None else argument(fragment)
        if machine.observer is not None:
            machine.observer.mbarrier(fragment, instruction, index, given)
        n = fragment.n
        index, given = _spread(index, n), _spread(given, n)
        if not expect and (int(given.min()) < 1 or int(given.max()) > MAX_COUNT):
            raise SimError(f"mbarrier.arrive with count {int(given.min())}; it must be from 1 to {MAX_COUNT}")
        states = memory.arrive_many(index, one if expect else given, given if expect else None, drop, no_complete)
        if states is None:
            # More arrivals than pending: lane after lane, through the end of the phase or to the error.
            states = np.empty(n, np.uint64)
            for lane, (i, count) in enumerate(zip(index.tolist(), given.tolist(), strict=True)):
                states[lane] = memory.arrive_at(i, 1 if expect else count, count if expect else 0, drop)
        if write is not None:
            write(fragment, states)

    return Step(run=run)


def _pending_count(d: Builder, instruction: Instruction) -> Step:
    read, write = d.reader(instruction.operands[1], U64), d.writer(instruction.operands[0], U32)

    def run(values: list, fragment: Fragment) -> None:
        write(fragment, (read(fragment) & np.uint64(_COUNT_MASK)).astype(np.uint32))

    return Step(run=run)


def _wait(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    blocking = "try_wait" in modifiers
    by_parity = "parity" in modifiers
    destination, address, state = instruction.operands[:3]
    index_of = _barrier_index(d, address, modifiers)
    wanted = d.reader(state, S32 if by_parity else U64)
    write = d.writer(destination, BOOL)
    if len(instruction.operands) > 3:
        d.reader(instruction.operands[3], U32)  # how long to try: the simulator's own patience decides
    machine = d.machine
    memory = machine.barrier_memory
    shift = np.uint64(63)
    yes, no = np.ones(1, np.bool_), np.zeros(1, np.bool_)

    def test(fragment: Fragment, data: tuple) -> np.ndarray:
        index, parity = data
        return memory.words[index] >> shift != parity

    def finish(fragment: Fragment, passed: bool) -> None:
        if passed and machine.observer is not None:
            machine.observer.mbarrier(fragment, instruction, index_of(fragment))
        if write is not None:
            write(fragment, yes if passed else no)

    def describe(fragment: Fragment, data: tuple) -> list[str]:
        index, parity = (_spread(array, fragment.n).tolist() for array in data)
        waits = list(zip(index, parity, fragment.slot.tolist(), strict=True))
        texts = {
            wait: f"waits for the phase of parity {wait[1]} of {memory.describe(wait[0], wait[2])}"
            for wait in set(waits)
        }
        return [texts[wait] for wait in waits]

    def operands(fragment: Fragment) -> tuple[np.ndarray, np.ndarray]:
        index = index_of(fragment)
        _check_initialised(memory, index, f"mbarrier.{'try_wait' if blocking else 'test_wait'}")
        value = wanted(fragment)
        if by_parity:
            # The machine code shifts all other bits out; Triton gives 0 and -1.
            return index, value.astype(np.uint64) & np.uint64(1)
        return index, value >> shift

    def end(fragment: Fragment, block: Block) -> Block | None:
        data = operands(fragment)
        passed = test(fragment, data)
        if passed.all():
            finish(fragment, True)
            return block.next
        fragment.block = block
        machine.scheduler.park(Wait(fragment, test, data, describe, finish, timeout=True))
        return None

    def run(values: list, fragment: Fragment) -> None:
        passed = test(fragment, operands(fragment))
        if machine.observer is not None and passed.any():
            machine.observer.mbarrier(fragment, instruction, index_of(fragment))
        if write is not None:
            write(fragment, passed)

    return Step(end=end, alone=True) if blocking else Step(run=run, cost=512)


def _mbarrier(d: Builder, instruction: Instruction) -> Step:
    kind = instruction.modifiers[0]
    handlers = {
        "init": _init,
        "inval": _inval,
        "arrive": _arrive,
        "arrive_drop": _arrive,
        "test_wait": _wait,
        "try_wait": _wait,
        "pending_count": _pending_count,
    }
    if kind in ("expect_tx", "complete_tx"):
        return _tx(d, instruction, 1 if kind == "expect_tx" else -1)
    if kind not in handlers:
        raise UnknownInstruction("the simulator does not know this mbarrier operation", instruction)
    return handlers[kind](d, instruction)


HANDLERS = {"mbarrier": _mbarrier}

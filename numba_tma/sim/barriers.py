"""Barriers of a block and of a cluster: bar, barrier, barrier.cluster, and bar.warp.sync.

Arrivals are counted in threads; the exited threads of a warp that has arrived count with it. Each lane that waits
remembers how often its barrier had completed, and goes on when that has changed.
Source: PTX ISA, "bar, bar.cta, barrier, barrier.cta", "barrier.cluster", "bar.warp.sync".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import SimError, UnknownInstruction
from .fragment import Fragment
from .module import Instruction
from .program import BOOL, S32, U32, Block, Builder, Step
from .scheduler import Wait

if TYPE_CHECKING:
    from .machine import Machine

BARRIERS = 16


class BlockBarriers:
    """The 16 barriers of each resident block, and one barrier for each cluster and each warp."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        shape = (machine.slots, BARRIERS)
        lanes = 32 * machine.warps
        self.arrived = np.zeros((*shape, lanes), np.bool_)
        self.value = np.zeros((*shape, lanes), np.bool_)
        # Threads that the barrier waits for; 0: all of the block.
        self.expected = np.zeros(shape, np.int64)
        self.active = np.zeros(shape, np.bool_)
        self.completed = np.zeros(shape, np.int64)
        # Of the completed phase: number of threads whose predicate held, and number of threads.
        self.reduction = np.zeros((*shape, 2), np.int64)
        clusters = machine.slots // machine.cluster_size
        self.cluster_arrived = np.zeros((machine.slots, lanes), np.bool_)
        self.cluster_completed = np.zeros(clusters, np.int64)
        self.cluster_phase = np.zeros((machine.slots, lanes), np.int64)
        self.warp_arrived = np.zeros((machine.slots, lanes), np.bool_)
        self.warp_completed = np.zeros((machine.slots, machine.warps), np.int64)
        self.warp_mask = np.zeros((machine.slots, machine.warps), np.uint32)

    def count(self, slots: np.ndarray, barriers: np.ndarray) -> np.ndarray:
        """Arrivals of barriers in threads: a warp all of whose live lanes are there counts 32."""
        arrived = self.arrived[slots, barriers].reshape(slots.size, -1, 32)
        live = self.machine.live_lanes[slots].reshape(arrived.shape)
        whole = arrived.any(axis=2) & ~(live & ~arrived).any(axis=2)
        return np.where(whole, 32, arrived.sum(axis=2)).sum(axis=1)

    def complete_due(self, slots: np.ndarray, barriers: np.ndarray) -> None:
        """Complete the phases of barriers (all active) at which everybody is that they wait for."""
        expected = self.expected[slots, barriers]
        arrived = self.arrived[slots, barriers]
        done = (expected == 0) & ~(self.machine.live_lanes[slots] & ~arrived).any(axis=1)
        if expected.any():
            here = self.count(slots, barriers)
            over = (expected > 0) & (here > expected)
            if over.any():
                i = int(np.argmax(over))
                raise SimError(
                    f"barrier {barriers[i]} of block {self.machine.block_name(int(slots[i]))} expects {expected[i]} "
                    f"threads, {here[i]} have come"
                )
            done |= (expected > 0) & (here == expected)
        if not done.any():
            return
        slots, barriers, arrived = slots[done], barriers[done], arrived[done]
        self.reduction[slots, barriers, 0] = (self.value[slots, barriers] & arrived).sum(axis=1)
        self.reduction[slots, barriers, 1] = arrived.sum(axis=1)
        self.arrived[slots, barriers] = False
        self.active[slots, barriers] = False
        self.completed[slots, barriers] += 1
        self.machine.scheduler.events += 1
        self.machine.scheduler.progress += 1
        if self.machine.observer is not None:
            self.machine.observer.barriers_completed(slots, barriers)

    def arrive(self, fragment: Fragment, barrier: np.ndarray, expected: np.ndarray, value: np.ndarray | None) -> None:
        """The fragment's lanes arrive; `barrier`, `expected` and `value` are one element or one for each lane."""
        slot, thread = fragment.slot, fragment.thread
        if int(barrier.max()) >= BARRIERS:
            raise SimError(f"barrier {int(barrier.max())}: a block has barriers 0 to {BARRIERS - 1}")
        if (expected % 32).any():
            raise SimError(f"a barrier's thread count must be a multiple of 32, not {int(expected.max())}")
        again = self.arrived[slot, barrier, thread]
        if again.any():
            position = int(np.argmax(again))
            raise SimError(
                f"{self.machine.lane_name(fragment, position)} arrives a second time at a barrier whose phase is not "
                "complete"
            )
        self.arrived[slot, barrier, thread] = True
        if value is not None:
            self.value[slot, barrier, thread] = value
        pairs = np.unique(slot * BARRIERS + barrier)
        slots, barriers = pairs // BARRIERS, pairs % BARRIERS
        if expected.size == 1:
            wanted = np.full(pairs.size, int(expected[0]))
        else:
            table = np.zeros((self.machine.slots, BARRIERS), np.int64)
            table[slot, barrier] = expected
            if (table[slot, barrier] != expected).any():
                raise SimError("threads of a block give different counts at a barrier")
            wanted = table[slots, barriers]
        differs = self.active[slots, barriers] & (self.expected[slots, barriers] != wanted)
        if differs.any():
            position = int(np.argmax(differs))
            raise SimError(
                f"barrier {int(barriers[position])}: threads give different counts, {int(wanted[position])} and "
                f"{int(self.expected[slots[position], barriers[position]])} (0 stands for the whole block)"
            )
        self.expected[slots, barriers] = wanted
        self.active[slots, barriers] = True
        self.complete_due(slots, barriers)

    def lanes_exited(self) -> None:
        """Barriers may be complete when threads that they waited for have exited."""
        slots, barriers = np.nonzero(self.active)
        if slots.size:
            self.complete_due(slots, barriers)
        if self.cluster_arrived.any():
            self.complete_clusters()
        if self.warp_arrived.any():
            self.complete_warps()

    def complete_clusters(self) -> None:
        """Complete the phase of each cluster all of whose live threads have arrived."""
        size = self.machine.cluster_size
        clusters = self.machine.slots // size
        missing = (self.machine.live_lanes & ~self.cluster_arrived).reshape(clusters, -1).any(axis=1)
        done = ~missing & self.cluster_arrived.reshape(clusters, -1).any(axis=1)
        if done.any():
            self.cluster_arrived[np.repeat(done, size)] = False
            self.cluster_completed[done] += 1
            if self.machine.observer is not None:
                self.machine.observer.clusters_completed(np.nonzero(done)[0])
            self.machine.scheduler.events += 1
            self.machine.scheduler.progress += 1

    def complete_warps(self) -> None:
        """Complete bar.warp.sync of each warp all of whose masked live lanes have arrived."""
        bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
        masked = (self.warp_mask[..., None] & bits) != 0
        live = self.machine.live_lanes.reshape(masked.shape)
        arrived = self.warp_arrived.reshape(masked.shape)
        done = arrived.any(axis=2) & ~(masked & live & ~arrived).any(axis=2)
        if done.any():
            if self.machine.observer is not None:
                self.machine.observer.lanes_synced(*np.nonzero((arrived & done[..., None]).reshape(len(done), -1)))
            arrived[done] = False
            self.warp_completed[done] += 1
            self.machine.scheduler.events += 1


def _passed(machine: Machine) -> Any:
    def test(fragment: Fragment, data: tuple) -> np.ndarray:
        barrier, phase = data
        return machine.barriers.completed[fragment.slot, barrier] != phase

    return test


def _describe(machine: Machine) -> Any:
    def describe(fragment: Fragment, data: tuple) -> list[str]:
        texts: dict[tuple[int, int], str] = {}
        barrier = np.broadcast_to(data[0], (fragment.n,))
        for pair in zip(fragment.slot.tolist(), barrier.tolist(), strict=True):
            if pair not in texts:
                state = machine.barriers
                expected = int(state.expected[pair])
                here = int(state.count(*(np.array([part]) for part in pair))[0])
                wanted = f"{expected} threads" if expected else f"all {int(machine.live_count[pair[0]])} threads"
                texts[pair] = f"waits at barrier {pair[1]} for {wanted} of the block, {here} have come"
        return [texts[pair] for pair in zip(fragment.slot.tolist(), barrier.tolist(), strict=True)]

    return describe


def _bar(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    if "cluster" in modifiers:
        return _cluster(d, instruction)
    if "warp" in modifiers:
        return _warp_sync(d, instruction)
    operands = list(instruction.operands)
    machine = d.machine
    kind = next((m for m in modifiers if m in ("sync", "arrive", "red")), None)
    if kind is None:
        raise UnknownInstruction("the simulator does not know this barrier", instruction)
    write = operation = value = None
    if kind == "red":
        operation = next(m for m in modifiers if m in ("popc", "and", "or"))
        write = d.writer(operands.pop(0), U32 if operation == "popc" else BOOL)
        value = d.reader(operands.pop(), BOOL)
    barrier = d.reader(operands[0], S32)
    count = d.reader(operands[1], S32) if len(operands) > 1 else None
    nothing = np.zeros(1, np.int64)
    simple = kind == "sync" and count is None

    def finish(fragment: Fragment, passed: bool) -> None:
        if machine.observer is not None:
            machine.observer.barrier_waited(fragment, barrier(fragment).astype(np.int64))
        if write is not None:
            trues, all_threads = np.moveaxis(machine.barriers.reduction[fragment.slot, barrier(fragment)], -1, 0)
            results = {"popc": trues, "and": trues == all_threads, "or": trues > 0}
            write(fragment, results[operation].astype(np.uint32 if operation == "popc" else np.bool_))

    test, describe = _passed(machine), _describe(machine)

    def end(fragment: Fragment, block: Block) -> Block | None:
        number = barrier(fragment).astype(np.int64)
        state = machine.barriers
        if simple and fragment.n == machine.scheduler.live and number.size == 1 and not state.active.any():
            # Every live thread of every block is here.
            machine.scheduler.progress += 1
            if machine.observer is not None:
                machine.observer.barrier_passed(fragment, int(number[0]))
            return block.next
        expected = nothing if count is None else count(fragment).astype(np.int64)
        phase = np.broadcast_to(state.completed[fragment.slot, number], (fragment.n,)).copy()
        if machine.observer is not None:
            machine.observer.barrier_arrived(fragment, number, instruction)
        state.arrive(fragment, number, expected, None if value is None else value(fragment))
        if kind == "arrive":
            return block.next
        fragment.block = block
        wait = Wait(fragment, test, (number, phase), describe, finish)
        if test(fragment, wait.data).all():
            finish(fragment, True)
            return block.next
        machine.scheduler.park(wait)
        return None

    return Step(end=end, alone=True)


def _cluster(d: Builder, instruction: Instruction) -> Step:
    machine = d.machine
    size = machine.cluster_size

    def arrive(values: list, fragment: Fragment) -> None:
        state = machine.barriers
        slot, thread = fragment.slot, fragment.thread
        if state.cluster_arrived[slot, thread].any():
            raise SimError("a thread arrives a second time at the cluster's barrier before it has waited")
        if machine.observer is not None:
            machine.observer.cluster_arrived(fragment, instruction)
        state.cluster_phase[slot, thread] = state.cluster_completed[slot // size]
        state.cluster_arrived[slot, thread] = True
        state.complete_clusters()

    if "arrive" in instruction.modifiers:
        return Step(run=arrive)
    if "wait" not in instruction.modifiers:
        raise UnknownInstruction("the simulator does not know this cluster barrier", instruction)

    def test(fragment: Fragment, data: tuple) -> np.ndarray:
        state = machine.barriers
        slot = fragment.slot
        return state.cluster_completed[slot // size] != state.cluster_phase[slot, fragment.thread]

    def describe(fragment: Fragment, data: tuple) -> list[str]:
        arrived = machine.barriers.cluster_arrived.reshape(-1, size * 32 * machine.warps).sum(axis=1)
        live = machine.live_count.reshape(-1, size).sum(axis=1)
        return [
            f"waits at the cluster's barrier for {live[c]} threads, {arrived[c]} have come"
            for c in (fragment.slot // size).tolist()
        ]

    def finish(fragment: Fragment, passed: bool) -> None:
        if machine.observer is not None:
            machine.observer.cluster_waited(fragment)

    def end(fragment: Fragment, block: Block) -> Block | None:
        if test(fragment, ()).all():
            finish(fragment, True)
            return block.next
        fragment.block = block
        machine.scheduler.park(Wait(fragment, test, (), describe, finish))
        return None

    return Step(end=end, alone=True)


def _warp_sync(d: Builder, instruction: Instruction) -> Step:
    machine = d.machine
    mask = d.reader(instruction.operands[0], U32)

    def test(fragment: Fragment, data: tuple) -> np.ndarray:
        return machine.barriers.warp_completed[fragment.slot, fragment.thread >> 5] != data[0]

    def describe(fragment: Fragment, data: tuple) -> list[str]:
        return ["waits at bar.warp.sync for the other lanes of its warp"] * fragment.n

    def end(fragment: Fragment, block: Block) -> Block | None:
        if fragment.n == machine.scheduler.live:
            if machine.observer is not None:
                machine.observer.lanes_synced(fragment.slot, fragment.thread)
            return block.next
        state = machine.barriers
        slot, thread = fragment.slot, fragment.thread
        warp = thread >> 5
        phase = state.warp_completed[slot, warp]
        state.warp_mask[slot, warp] = mask(fragment)
        state.warp_arrived[slot, thread] = True
        state.complete_warps()
        fragment.block = block
        wait = Wait(fragment, test, (phase,), describe)
        if test(fragment, wait.data).all():
            return block.next
        machine.scheduler.park(wait)
        return None

    return Step(end=end, alone=True)


HANDLERS = {"bar": _bar, "barrier": _bar}

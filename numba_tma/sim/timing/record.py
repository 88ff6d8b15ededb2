"""Writes down, while a launch is executed, what the warps of some of its blocks do.

A warp's trace is the blocks of code that it executed, in order, each with what is not in the text: how many wavefronts
an access to shared memory took, how many sectors of global memory, which phase of which barrier was arrived at or
waited for, what a copy moved. Phases are numbered as they completed, so that the replay needs no counting of its own: a
phase completes when everything that contributed to it here has come.

Global memory. For each instruction it counts the sectors that its warps asked for, in all blocks that are executed,
and those that had to be brought into L2 for it, because nobody had touched them before: 64 bytes at a time, or as many
as a tensor map's L2 promotion says. What was touched is forgotten when it is more than L2 holds. If only some of the
blocks are executed, all of them together are taken to bring in as much for each, but no array more than once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..access import GLOBAL, LOCAL, SHARED
from ..observer import Observer
from . import banks

if TYPE_CHECKING:
    from ..fragment import Fragment
    from ..machine import Machine
    from ..module import Instruction
    from ..program import Block
    from .device import Device

_PAST_L1 = frozenset(("cg", "cv", "volatile", "relaxed", "acquire", "mmio"))
_L1_BYTES = 256 * 1024
# Key of what belongs to the instruction that ends a block of code.
END = 0

Key = tuple  # ("mbarrier", block, word), ("block", block, number), ("cluster", number)


class Phase(NamedTuple):
    """A phase of a barrier: arrived at, or waited for."""

    key: Key
    number: int


class Access(NamedTuple):
    """A warp's access to memory: of kind access.SHARED, GLOBAL or LOCAL.

    `cost` is wavefronts, or lines; `sectors` those that L1 did not have.
    """

    kind: int
    cost: int
    sectors: int = 0
    remote: bool = False


class Copy(NamedTuple):
    """A copy that one thread asked the copy engine for. `phases` are those of the barriers that it signals."""

    kind: str
    nbytes: int
    rows: int
    phases: tuple[Phase, ...]


@dataclass(eq=False)
class Trace:
    """What one warp did: (block of code, what was noted for its instructions by their identity, or None)."""

    block: int
    warp: int
    entries: list[tuple[Block, dict[int, Any] | None]] = field(default_factory=list)
    # Of the cluster's barrier, which the wait does not name.
    cluster_phase: Phase | None = None


class _Lanes:
    """A fragment's lanes as whole warps: `gather` (warps, 32) has a position for each lane, another lane's for absent
    ones. `traced` are the rows of warps that are written down, `traces` where."""

    def __init__(self, recorder: Recorder, fragment: Fragment) -> None:
        slot, thread = fragment.slot, fragment.thread
        warp = slot * recorder.warps + (thread >> 5)
        new = np.ones(fragment.n, np.bool_)
        new[1:] = warp[1:] != warp[:-1]
        starts = np.nonzero(new)[0]
        self.gather = np.repeat(starts[:, None], 32, axis=1)
        row = np.cumsum(new) - 1
        self.gather[row, thread & 31] = np.arange(fragment.n)
        numbers = warp[starts].tolist()
        found = [(i, recorder.traces[n]) for i, n in enumerate(numbers) if n in recorder.traces]
        self.traced = np.array([i for i, _ in found], np.int64)
        self.traces = [trace for _, trace in found]
        self.rows = len(numbers)


class Recorder(Observer):
    """Watches one launch. `blocks` are those to write down, of which all of a cluster are."""

    def __init__(self, machine: Machine, device: Device, blocks: Sequence[int], per_sm: int, warm: bool) -> None:
        self.machine = machine
        self.wanted = set(blocks)
        self.warps = machine.warps
        self.warm = warm
        self.finished: list[Trace] = []
        # How many contributions complete a phase.
        self.needed: Counter[Phase] = Counter()
        # By instruction: sectors asked for, and those that came from memory for it, by array.
        self._asked: Counter[int] = Counter()
        self._fresh: dict[int, Counter[int]] = {}
        self.traces: dict[int, Trace] = {}
        self._notes: dict[Trace, dict[int, Any]] = {}
        self._done: Counter[Key] = Counter()
        self._touched: dict[int, np.ndarray] = {}
        self._part = len(machine.block_numbers) / machine.blocks
        self._l2_units = int(device.l2_bytes * self._part) >> banks.UNIT_SHIFT
        self._in_l2 = 0
        free = max(_L1_BYTES - per_sm * machine.shared_end, 0)
        self._l1_sectors = free >> banks.SECTOR_SHIFT
        self._l1: OrderedDict[int, None] = OrderedDict()
        self._source: tuple[str, int, int] | None = None

    # Warps

    def wave(self, machine: Machine, blocks: int) -> None:
        self.finished += self.traces.values()
        self._blocks = machine.block_numbers[machine.first_block : machine.first_block + blocks].tolist()
        self.traces = {
            slot * self.warps + warp: Trace(block, warp)
            for slot, block in enumerate(self._blocks)
            if block in self.wanted
            for warp in range(self.warps)
        }
        self._row = machine.shared_stride // 8

    def launch_ended(self) -> None:
        self.finished += self.traces.values()
        self.traces = {}

    def lanes(self, fragment: Fragment) -> _Lanes:
        """The fragment's warps, found once."""
        found = fragment.cache.get("timing")
        if found is None:
            found = fragment.cache["timing"] = _Lanes(self, fragment)
        return found

    def executed(self, fragment: Fragment, block: Block) -> None:
        """Lanes have executed a block of code."""
        notes = self._notes
        for trace in self.lanes(fragment).traces:
            trace.entries.append((block, notes.pop(trace, None)))

    def _note(self, trace: Trace, instruction: Any, value: Any) -> None:
        self._notes.setdefault(trace, {})[id(instruction) if instruction is not None else END] = value

    def _each(self, fragment: Fragment, values: np.ndarray) -> list[tuple[Trace, list[int]]]:
        """Traced warps with their lanes' distinct values (given one, or one for each lane)."""
        lanes = self.lanes(fragment)
        if values.size == 1:
            return [(trace, values.tolist()) for trace in lanes.traces]
        rows = values[lanes.gather[lanes.traced]]
        return [(trace, sorted(set(row))) for trace, row in zip(lanes.traces, rows.tolist(), strict=True)]

    # Memory

    def access(
        self,
        fragment: Fragment,
        instruction: Instruction,
        kind: int,
        view: np.ndarray,
        index: np.ndarray,
        count: int,
        action: str,
        values: Sequence[Callable[[Fragment], np.ndarray]] = (),
    ) -> None:
        if kind == SHARED:
            self._shared(fragment, instruction, view.itemsize, index, count, action)
        elif kind == GLOBAL:
            self._global(fragment, instruction, view, index, count, action)
        elif kind == LOCAL:
            for trace in self.lanes(fragment).traces:
                self._note(trace, instruction, Access(LOCAL, 1))

    def _shared(
        self, fragment: Fragment, instruction: Instruction, size: int, index: np.ndarray, count: int, action: str
    ) -> None:
        lanes = self.lanes(fragment)
        if not lanes.traces:
            return
        if index.size == 1:
            costs = [1 if action != "atomic" else 32] * len(lanes.traces)
            offsets = np.broadcast_to(index * size, (len(lanes.traces), 32))
        else:
            offsets = index[lanes.gather[lanes.traced]] * size
            find = banks.most_at_one_place(offsets) if action == "atomic" else banks.wavefronts(offsets, size * count)
            costs = find.tolist()
        remote = [False] * len(costs)
        if self.machine.cluster_size > 1:
            own = fragment.slot[lanes.gather[lanes.traced]]
            remote = (offsets // self.machine.shared_stride != own).any(axis=1).tolist()
        for trace, cost, far in zip(lanes.traces, costs, remote, strict=True):
            self._note(trace, instruction, Access(SHARED, cost, 0, far))

    def _global(
        self, fragment: Fragment, instruction: Instruction, view: np.ndarray, index: np.ndarray, count: int, action: str
    ) -> None:
        segment = self.machine.memory.segment_of(view)
        base = segment.base if segment is not None else 0
        lanes = self.lanes(fragment)
        if index.size == 1:
            address = np.broadcast_to(index, (lanes.rows, 1)) * view.itemsize + base
        else:
            address = index[lanes.gather] * view.itemsize + base
        sectors, new = banks.distinct(address >> banks.SECTOR_SHIFT)
        fresh = self._touch(segment, sectors[new] >> banks.UNIT_SHIFT - banks.SECTOR_SHIFT)
        if action == "read":
            self._count(instruction, int(np.count_nonzero(new)), segment, fresh)
        if not lanes.traces:
            return
        _, new_lines = banks.distinct(address[lanes.traced] >> banks.LINE_SHIFT)
        lines = new_lines.sum(axis=1).tolist()
        cached = action == "read" and _PAST_L1.isdisjoint(instruction.modifiers)
        for trace, row, lines_touched in zip(lanes.traces, lanes.traced.tolist(), lines, strict=True):
            mine = sectors[row][new[row]].tolist()
            missed = self._through_l1(mine) if cached else len(mine)
            self._note(trace, instruction, Access(GLOBAL, lines_touched, missed))

    def _through_l1(self, sectors: list[int]) -> int:
        """How many sectors L1 lacks; it has them from now on."""
        cache, missed = self._l1, 0
        for sector in sectors:
            if sector in cache:
                cache.move_to_end(sector)
            else:
                missed += 1
                cache[sector] = None
        while len(cache) > self._l1_sectors:
            cache.popitem(last=False)
        return missed

    def _count(self, instruction: Any, asked: int, segment: Any, fresh: int) -> None:
        self._asked[id(instruction)] += asked
        if fresh:
            self._fresh.setdefault(id(instruction), Counter())[segment.base] += fresh

    def missing(self) -> Callable[[Any], float]:
        """A function that gives the part of the bytes that an instruction asks for which comes from memory.

        It is more than 1 where more is brought in than was asked for.
        """
        by_array: Counter[int] = Counter()
        for fresh in self._fresh.values():
            by_array.update(fresh)
        scale = dict.fromkeys(by_array, 1.0)
        if self._part < 1:
            for base, sectors in by_array.items():
                units = self._touched[base].size << banks.UNIT_SHIFT - banks.SECTOR_SHIFT
                scale[base] = min(units * self._part / sectors, 1.0)
        parts = {
            key: sum(sectors * scale[base] for base, sectors in fresh.items()) / self._asked[key]
            for key, fresh in self._fresh.items()
        }
        return lambda instruction: parts.get(id(instruction), 0.0)

    def _touch(self, segment: Any, units: np.ndarray) -> int:
        """Units of 64 bytes (numbers, repeats allowed) are in L2 from now on; how many sectors were not."""
        if segment is None or not units.size:
            return 0
        first = segment.base >> banks.UNIT_SHIFT
        seen = self._touched.get(segment.base)
        if seen is None:
            last = (segment.base + segment.size) >> banks.UNIT_SHIFT
            seen = self._touched[segment.base] = np.full(last - first + 1, self.warm, np.bool_)
        # A promoted box may reach over the array's ends.
        place = np.clip(units - first, 0, seen.size - 1)
        missing = place[~seen[place]]
        if not missing.size:
            return 0
        if missing.size > 1:
            missing = np.unique(missing)
        seen[missing] = True
        self._in_l2 += missing.size
        if self._in_l2 > self._l2_units:
            # More than L2 holds: what is touched again later comes from memory again.
            for other in self._touched.values():
                other.fill(False)
            seen[missing] = True
            self._in_l2 = missing.size
        return int(missing.size) << banks.UNIT_SHIFT - banks.SECTOR_SHIFT

    # Copies

    def copy_reads(
        self,
        kind: str,
        origin: Any,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        nbytes: int,
        rows: int,
        promotion: int = 0,
    ) -> None:
        self._source = (kind, nbytes, rows)
        if not nbytes:
            return
        segment = self.machine.memory.find(address)
        # The last dimension is bytes beside each other; every other one adds its own distances.
        starts = np.array([address])
        for extent, stride in zip(shape[:-1], strides[:-1], strict=True):
            starts = (starts[:, None] + np.arange(extent) * stride).reshape(-1)
        ends = starts + shape[-1] - 1
        asked = int(((ends >> banks.SECTOR_SHIFT) - (starts >> banks.SECTOR_SHIFT) + 1).sum())
        if promotion:
            starts, ends = starts // promotion * promotion, (ends // promotion + 1) * promotion - 1
        first, last = starts >> banks.UNIT_SHIFT, ends >> banks.UNIT_SHIFT
        span = np.arange(int((last - first).max()) + 1)
        units = np.minimum(first[:, None] + span, last[:, None]).reshape(-1)
        self._count(origin, asked, segment, self._touch(segment, units))

    def copy_to_shared(
        self,
        thread: int,
        targets: tuple[int, ...],
        start: int,
        nbytes: int,
        bar: int,
        origin: Any,
        source: tuple[int, int, int] | None = None,
        signalled: int | None = None,
        pattern: int = 0,
    ) -> None:
        # A box that lies outside its tensor altogether reads nothing.
        kind, moved, rows = self._source or ("tma_load" if source is None else "bulk_cluster", nbytes, 1)
        self._source = None
        trace = self._trace_of(thread)
        if trace is None:
            return
        phases = tuple(self._phase(("mbarrier", self._blocks[slot], bar // 8)) for slot in targets)
        self.needed.update(phases)
        self._add_copy(trace, origin, Copy(kind, moved, rows, phases))

    def copy_from_shared(
        self,
        thread: int,
        start: int,
        nbytes: int,
        group: int,
        origin: Any,
        region: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None,
        pattern: int = 0,
        reduction: str = "",
        read: Any = None,
    ) -> None:
        rows = 1
        if region is not None and not reduction:
            rows = int(np.prod(region[1][:-1], dtype=np.int64))
        trace = self._trace_of(thread)
        if trace is not None:
            self._add_copy(trace, origin, Copy("store", nbytes, rows, ()))

    def _trace_of(self, thread: int) -> Trace | None:
        slot, index = divmod(thread, self.machine.threads)
        return self.traces.get(slot * self.warps + index // 32)

    def _add_copy(self, trace: Trace, origin: Any, copy: Copy) -> None:
        self._notes.setdefault(trace, {}).setdefault(id(origin), []).append(copy)

    def cp_async_reads(self, threads: np.ndarray, addresses: np.ndarray, size: int, origin: Any) -> None:
        if not threads.size:
            return  # none of the lanes reads anything
        address = addresses.astype(np.int64)
        segment = self.machine.memory.find(int(address[0]))
        slot, index = threads // self.machine.threads, threads % self.machine.threads
        warp = slot * self.warps + index // 32
        new = np.ones(warp.size, np.bool_)
        new[1:] = warp[1:] != warp[:-1]
        starts = np.nonzero(new)[0]
        gather = np.repeat(starts[:, None], 32, axis=1)
        gather[np.cumsum(new) - 1, index % 32] = np.arange(warp.size)
        sectors, first = banks.distinct(address[gather] >> banks.SECTOR_SHIFT)
        units = sectors[first] >> banks.UNIT_SHIFT - banks.SECTOR_SHIFT
        self._count(origin, int(np.count_nonzero(first)), segment, self._touch(segment, units))
        lines = banks.distinct(address[gather] >> banks.LINE_SHIFT)[1].sum(axis=1)
        counts = first.sum(axis=1)
        for row, number in enumerate(warp[starts].tolist()):
            trace = self.traces.get(number)
            if trace is not None:
                self._note(trace, origin, Access(GLOBAL, int(lines[row]), int(counts[row])))

    def cp_async_arrived(self, threads: np.ndarray, bars: np.ndarray, groups: np.ndarray) -> None:
        slots = threads // self.machine.threads
        warps = slots * self.warps + threads % self.machine.threads // 32
        for warp, slot, bar in sorted(set(zip(warps.tolist(), slots.tolist(), bars.tolist(), strict=True))):
            trace = self.traces.get(warp)
            if trace is not None:
                phase = self._phase(("mbarrier", self._blocks[slot], bar // 8))
                self.needed[phase] += 1
                # The instruction is not named; there is one in its block of code.
                self._notes.setdefault(trace, {}).setdefault(END, []).append(phase)

    # Barriers

    def _phase(self, key: Key, before: int = 0) -> Phase:
        return Phase(key, self._done[key] - before)

    def mbarrier(
        self, fragment: Fragment, instruction: Instruction, index: np.ndarray, value: np.ndarray | None = None
    ) -> None:
        what = instruction.modifiers[0]
        if what in ("init", "inval", "expect_tx"):
            return
        waits = what in ("test_wait", "try_wait")
        for trace, words in self._each(fragment, index):
            keys = [("mbarrier", self._blocks[word // self._row], word % self._row) for word in words]
            phases = [self._phase(key, int(waits)) for key in keys]
            if not waits:
                self.needed.update(phases)
            self._note(trace, instruction, phases)

    def phase_completed(self, index: int) -> None:
        self._done["mbarrier", self._blocks[index // self._row], index % self._row] += 1

    def barrier_arrived(self, fragment: Fragment, barrier: np.ndarray, instruction: Instruction) -> None:
        for trace, numbers in self._each(fragment, barrier):
            phases = [self._phase(("block", trace.block, number)) for number in numbers]
            self.needed.update(phases)
            self._note(trace, None, phases)

    def barriers_completed(self, slots: np.ndarray, barriers: np.ndarray) -> None:
        for slot, number in zip(slots.tolist(), barriers.tolist(), strict=True):
            self._done["block", self._blocks[slot], number] += 1

    def barrier_passed(self, fragment: Fragment, barrier: int) -> None:
        self.barrier_arrived(fragment, np.array([barrier]), None)
        for slot in np.unique(fragment.slot).tolist():
            self._done["block", self._blocks[slot], barrier] += 1

    def cluster_arrived(self, fragment: Fragment, instruction: Instruction) -> None:
        for trace in self.lanes(fragment).traces:
            phase = self._phase(("cluster", trace.block // self.machine.cluster_size))
            self.needed[phase] += 1
            trace.cluster_phase = phase
            self._note(trace, instruction, [phase])

    def clusters_completed(self, clusters: np.ndarray) -> None:
        for cluster in clusters.tolist():
            first = self._blocks[cluster * self.machine.cluster_size]
            self._done["cluster", first // self.machine.cluster_size] += 1

    def cluster_waited(self, fragment: Fragment) -> None:
        for trace in self.lanes(fragment).traces:
            self._note(trace, None, [trace.cluster_phase] if trace.cluster_phase else [])

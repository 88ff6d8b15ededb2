"""Watches a launch and names its hazards, whatever order things happened to take this time.

Every access is compared with the last accesses to the same bytes: unless the clock of the accessing thread says that
those are ordered before it, it is a race, also when this run's order did no harm. See clocks.py for what orders,
rules.py for the hazards. Where the tracker does not know whether something orders two accesses (atomics, volatile and
acquiring accesses by which threads may signal each other), it takes it that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..access import GLOBAL, SHARED
from ..errors import SimError
from ..observer import Observer
from .barriers import BarrierWord
from .clocks import BULK_READ, CP_ASYNC, STEPS, Clocks, Plane
from .ends import Ends
from .global_writes import GlobalWrites
from .messages import Reporter
from .shadow import Shadow, stamps, unpack

if TYPE_CHECKING:
    from ..fragment import Fragment
    from ..machine import Machine
    from ..module import Instruction

_SIGNALS = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))


class Tracker(Observer):
    """One launch's hazards."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.report = Reporter(machine, self)
        self.instructions: list[Any] = [None]
        self._numbers: dict[int, int] = {}
        functions = (*machine.module.entries.values(), *machine.module.functions.values())
        self.global_writes = GlobalWrites(self)
        self._copies = any(i.opcode == "cp" for function in functions for i in function.body)

    def wave(self, machine: Machine, blocks: int) -> None:
        self.blocks = blocks
        self.clocks = Clocks(machine.slots, machine.threads, machine.cluster_size, self._copies)
        self.shadow = Shadow(machine.shared.size, machine.warps)
        self.words: dict[int, BarrierWord] = {}
        self._row = machine.shared_stride // 8
        self._block_planes: dict[int, Plane] = {}
        self._cluster_plane = self.clocks.plane(-(-machine.slots // machine.cluster_size))
        self._signal_plane = self.clocks.plane(-(-machine.slots // machine.cluster_size))
        self.ends = Ends(self)
        # Copies of the instruction that is being executed, and tensor maps that threads have acquired or changed.
        self._burst: set[tuple] = set()
        self._acquired: dict[int, list[tuple[int, int]]] = {}
        self._changed: dict[int, tuple[int, Any]] = {}
        self._came_by: dict[tuple[int, int, int], Any] = {}
        lanes = machine.slots * machine.threads
        # Who issued and who waited for bulk groups and cp.async groups.
        self.issued_bulk, self.waited_bulk, self.issued_copies, self.waited_copies = np.zeros((4, lanes), np.bool_)
        # Each thread's step when it last passed a wait on an mbarrier.
        self.acquired_step = np.zeros(lanes, np.int32)

    # Names

    def number(self, instruction: Any) -> int:
        """An instruction's number in stamps."""
        found = self._numbers.get(id(instruction))
        if found is None:
            found = len(self.instructions)
            if found > 0xFFFF:
                return 0
            self.instructions.append(instruction)
            self._numbers[id(instruction)] = found
        return found

    def threads_of(self, fragment: Fragment) -> np.ndarray:
        """A fragment's threads as the clocks count them."""
        found = fragment.cache.get("threads")
        if found is None:
            found = fragment.cache["threads"] = fragment.slot * self.machine.threads + fragment.thread
        return found

    # Ordinary accesses

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
        if kind != SHARED and kind != GLOBAL:
            return
        if action == "atomic" or not _SIGNALS.isdisjoint(instruction.modifiers):
            self._signal(fragment)
            self.global_writes.signals |= kind == GLOBAL and action != "read"
            if kind == SHARED:
                self._written_by_signal(view, index, count, action, instruction)
            return
        if kind != SHARED:
            if action == "write":
                self.global_writes.stored(fragment, instruction, view, index, count, values)
            return
        threads = self.threads_of(fragment)
        size = view.dtype.itemsize
        offsets = index * size if size > 1 else index
        if offsets.size != threads.size:
            offsets = np.broadcast_to(offsets, threads.shape)
        if self.machine.cluster_size > 1:
            self._remote(offsets // self.machine.shared_stride, threads, instruction)
        pieces, each = self.shadow.pieces(offsets, size * count)
        if each > 1:
            threads = np.repeat(threads, each)
        if action == "read":
            self._read(pieces, threads, instruction)
        else:
            self._write(pieces, threads, instruction)

    def _read(self, pieces: np.ndarray, threads: np.ndarray, instruction: Instruction) -> None:
        shadow, clocks = self.shadow, self.clocks
        last = shadow.written.take(pieces)
        columns, values, _ = unpack(last)
        good = clocks.knows(threads, columns, values)
        if not good.all():
            self.report.race(last, ~good, threads, pieces, instruction, "read", "write")
        unwritten = last == 0
        if unwritten.any():
            self.report.unwritten(unwritten, threads, pieces, instruction)
        column = clocks.column[threads]
        latest = shadow.read[0]
        if shadow.in_use[0]:
            self._keep_readers(latest.take(pieces), column, threads, pieces)
        shadow.in_use[0] = True
        latest[pieces] = stamps(column, clocks.own[STEPS, threads], self.number(instruction))

    def _keep_readers(self, before: np.ndarray, column: np.ndarray, threads: np.ndarray, pieces: np.ndarray) -> None:
        """Put aside earlier readers that the new ones are not ordered after: a later write must mind both."""
        owner = before >> 44
        other = (owner != column) & (before != 0)
        if not other.any():
            return
        lanes = np.nonzero(other)[0]
        columns, values, _ = unpack(before[lanes])
        lanes = lanes[~self.clocks.knows(threads[lanes], columns, values)]
        if lanes.size:
            shadow = self.shadow
            row = 1 + (owner[lanes] % self.machine.threads >> 5) % (shadow.readers - 2)
            shadow.read[row, pieces[lanes]] = before[lanes]
            for used in np.unique(row).tolist():
                shadow.in_use[used] = True

    def _write(self, pieces: np.ndarray, threads: np.ndarray, instruction: Instruction) -> None:
        shadow, clocks = self.shadow, self.clocks
        last = shadow.written.take(pieces)
        columns, values, _ = unpack(last)
        good = clocks.knows(threads, columns, values)
        if not good.all():
            self.report.race(last, ~good, threads, pieces, instruction, "write", "write")
        self._check_readers(pieces, threads, instruction, "write")
        shadow.written[pieces] = stamps(clocks.column[threads], clocks.own[STEPS, threads], self.number(instruction))

    def _remote(self, slots: np.ndarray, threads: np.ndarray, instruction: Instruction) -> None:
        far = slots != threads // self.machine.threads
        if far.any():
            self.ends.remote(slots[far], threads[far], instruction)

    def _check_readers(self, pieces: np.ndarray, threads: np.ndarray, instruction: Any, action: str) -> None:
        """Those who read the pieces since the last write must be ordered before this one, which makes them history."""
        for row in self.shadow.rows():
            before = row.take(pieces)
            if not before.any():
                continue
            columns, values, _ = unpack(before)
            good = self.clocks.knows(threads, columns, values)
            if not good.all():
                self.report.race(before, ~good, threads, pieces, instruction, action, "read")
            row[pieces] = 0

    def _signal(self, fragment: Fragment) -> None:
        """Atomics and the like may order threads in ways of the kernel's own: take it that they do."""
        places = fragment.slot // self.machine.cluster_size
        threads = self.threads_of(fragment)
        self.clocks.clean()
        self.clocks.release(self._signal_plane, places, threads)
        self.clocks.complete(self._signal_plane, np.unique(places))
        self.clocks.acquire(threads, self._signal_plane.done[places])

    def _written_by_signal(
        self, view: np.ndarray, index: np.ndarray, count: int, action: str, instruction: Instruction
    ) -> None:
        if action == "read":
            return
        size = view.dtype.itemsize
        pieces, _ = self.shadow.pieces(index * size, size * count)
        # A value of 0 is known to everybody.
        self.shadow.written[pieces] = stamps(0, 0, self.number(instruction) or 1)
        for row in self.shadow.rows():
            row[pieces] = 0

    # Fences and barriers

    def fence(self, fragment: Fragment, instruction: Instruction) -> None:
        modifiers = instruction.modifiers
        proxy = "proxy" in modifiers and ("async" in modifiers or any(m.startswith("async") for m in modifiers))
        if proxy or "mbarrier_init" in modifiers:
            self._fence_inits(fragment)
        if proxy and "global" not in modifiers:
            self.clocks.clean()
            self.clocks.fence(self.threads_of(fragment))

    def _fence_inits(self, fragment: Fragment) -> None:
        threads, slot, clocks = self.threads_of(fragment), fragment.slot, self.clocks
        for word in self.words.values():
            open_ = word.valid & ~word.init_fenced
            if not open_.any():
                continue
            lanes = np.nonzero(open_[slot])[0]
            if lanes.size:
                at = slot[lanes]
                good = clocks.knows(threads[lanes], clocks.column[word.init_thread[at]], word.init_step[at])
                word.init_fenced[at[good]] = True

    def barrier_passed(self, fragment: Fragment, barrier: int) -> None:
        self.clocks.clean()
        self.clocks.meet(fragment.slot, self.threads_of(fragment))

    def barrier_arrived(self, fragment: Fragment, barrier: np.ndarray, instruction: Instruction) -> None:
        threads, slot = self.threads_of(fragment), fragment.slot
        self.clocks.clean()
        for name in np.unique(barrier).tolist():
            if name not in self._block_planes:
                self._block_planes[name] = self.clocks.plane(self.machine.slots)
            lanes = slice(None) if barrier.size == 1 else barrier == name
            self.clocks.release(self._block_planes[name], slot[lanes], threads[lanes])
        if "aligned" in instruction.modifiers or instruction.opcode == "bar":
            self._check_divergence(fragment, barrier, instruction)

    def _check_divergence(self, fragment: Fragment, barrier: np.ndarray, instruction: Instruction) -> None:
        """Lanes of a warp that come to one phase of a barrier by different instructions."""
        warp = fragment.thread >> 5
        names = np.broadcast_to(barrier, warp.shape)
        for key in set(zip(fragment.slot.tolist(), warp.tolist(), names.tolist(), strict=True)):
            other = self._came_by.setdefault(key, instruction)
            if other is not instruction and other.line != instruction.line:
                self.report.divergent(key, other, instruction)

    def barriers_completed(self, slots: np.ndarray, barriers: np.ndarray) -> None:
        for name in np.unique(barriers).tolist():
            self.clocks.complete(self._block_planes[name], slots[barriers == name])
        if self._came_by:
            done = set(zip(slots.tolist(), barriers.tolist(), strict=True))
            self._came_by = {k: v for k, v in self._came_by.items() if (k[0], k[2]) not in done}

    def barrier_waited(self, fragment: Fragment, barrier: np.ndarray) -> None:
        threads, slot = self.threads_of(fragment), fragment.slot
        for name in np.unique(barrier).tolist():
            lanes = slice(None) if barrier.size == 1 else barrier == name
            self.clocks.acquire(threads[lanes], self._block_planes[name].done[slot[lanes]])

    def lanes_synced(self, slots: np.ndarray, threads: np.ndarray) -> None:
        machine = self.machine
        self.clocks.clean()
        self.clocks.meet(slots * machine.warps + (threads >> 5), slots * machine.threads + threads)

    def wgmma_issued(self, fragment: Fragment, instruction: Instruction, accumulators: Any, reads: Any) -> None:
        """The four warps of a warpgroup execute it together, and kernels rely on that."""
        machine = self.machine
        warpgroups = -(-machine.threads // 128)
        self.clocks.clean()
        self.clocks.meet(fragment.slot * warpgroups + fragment.thread // 128, self.threads_of(fragment))

    def cluster_arrived(self, fragment: Fragment, instruction: Instruction) -> None:
        self.clocks.clean()
        places = fragment.slot // self.machine.cluster_size
        self.clocks.release(self._cluster_plane, places, self.threads_of(fragment))
        if "relaxed" not in instruction.modifiers:
            for word in self.words.values():
                word.published[fragment.slot] |= word.valid[fragment.slot]

    def clusters_completed(self, clusters: np.ndarray) -> None:
        self.clocks.complete(self._cluster_plane, clusters)

    def cluster_waited(self, fragment: Fragment) -> None:
        self.clocks.acquire(
            self.threads_of(fragment), self._cluster_plane.done[fragment.slot // self.machine.cluster_size]
        )

    # mbarriers

    def word(self, word: int) -> BarrierWord:
        """The mbarriers at 8 * word of every block's shared memory."""
        found = self.words.get(word)
        if found is None:
            found = self.words[word] = BarrierWord(self.clocks, word)
        return found

    def mbarrier(
        self, fragment: Fragment, instruction: Instruction, index: np.ndarray, value: np.ndarray | None = None
    ) -> None:
        threads = self.threads_of(fragment)
        self.clocks.clean()
        slots, words = np.divmod(index, self._row)
        if slots.size != threads.size:
            slots, words = np.broadcast_to(slots, threads.shape), np.broadcast_to(words, threads.shape)
        if value is not None:
            value = np.broadcast_to(value, threads.shape)
        kind = instruction.modifiers[0]
        action = {
            "init": self._init,
            "inval": self._inval,
            "expect_tx": self._expect,
            "complete_tx": self._complete_tx,
            "arrive": self._arrive,
            "arrive_drop": self._arrive,
            "test_wait": self._wait,
            "try_wait": self._wait,
        }.get(kind)
        if action is None:
            return
        first = int(words[0])
        if (words == first).all():
            action(self.word(first), slots, threads, instruction, value)
            return
        for name in np.unique(words).tolist():
            lanes = words == name
            part = None if value is None else value[lanes]
            action(self.word(name), slots[lanes], threads[lanes], instruction, part)

    def _init(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any, value: Any) -> None:
        again = word.valid[slots]
        if again.any():
            self.report.reinitialised(word, slots[again], threads[again], instruction)
        word.initialise(slots, threads, self.clocks.own[STEPS, threads], instruction)

    def _inval(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any, value: Any) -> None:
        word.valid[slots] = False

    def _check_init(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any) -> None:
        clocks = self.clocks
        good = clocks.knows(threads, clocks.column[word.init_thread[slots]], word.init_step[slots])
        if not good.all():
            bad = ~good & word.valid[slots]
            if bad.any():
                self.report.used_before_init(word, slots[bad], threads[bad], instruction)

    def _expect(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any, value: Any) -> None:
        self._check_init(word, slots, threads, instruction)
        np.add.at(word.expected, slots, value.astype(np.int64))
        if instruction.modifiers[0] == "expect_tx":
            word.bare_expect.update(dict.fromkeys(slots.tolist(), instruction))

    def _complete_tx(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any, value: Any) -> None:
        np.add.at(word.issued, slots, value.astype(np.int64))

    def _arrive(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any, value: Any) -> None:
        clocks = self.clocks
        self._check_init(word, slots, threads, instruction)
        self._remote(slots, threads, instruction)
        counts = value
        if "expect_tx" in instruction.modifiers:
            np.add.at(word.expected, slots, value.astype(np.int64))
            counts = np.ones(slots.size, np.int64)
        self._check_arrivals(word, slots, threads, counts, instruction)
        clocks.release(word.plane, slots, threads)

    def _check_arrivals(self, word: BarrierWord, slots: Any, threads: Any, counts: Any, instruction: Any) -> None:
        """Who arrives must be ordered after the end of the preceding phase; the last one must have promised enough."""
        clocks, machine = self.clocks, self.machine
        good = clocks.knows(threads, word.column[slots], word.phases[slots])
        if not good.all():
            for lane in np.nonzero(~good)[0].tolist():
                if not self._after_last_phase(word, int(slots[lane]), int(threads[lane])):
                    self._too_many(word, int(slots[lane]), int(threads[lane]), instruction)
                    break
        here, total = np.unique(slots, return_inverse=True)
        total = np.bincount(total, weights=counts).astype(np.int64)
        words = machine.barrier_memory.words[here * self._row + word.word]
        pending = (words & np.uint64(0xFFFFF)).astype(np.int64)
        for slot in here[total > pending].tolist():
            lane = int(np.nonzero(slots == slot)[0][-1])
            self._too_many(word, slot, int(threads[lane]), instruction)
        last = here[total == pending]
        over = last[(word.issued[last] > word.expected[last]) & ~word.wrong[last]]
        for slot in over.tolist():
            self.report.more_bytes(word, slot, word.last_copy.get(slot), instruction)

    def _after_last_phase(self, word: BarrierWord, slot: int, thread: int) -> bool:
        """Whether a thread is ordered after the phase that completed last, or at least after all its arrivals."""
        clocks = self.clocks
        known = clocks.row(int(clocks.known[thread]))
        if known[word.column[slot]] >= word.phases[slot]:
            return True
        ordered = known[: clocks.cluster_threads] >= clocks.row(int(word.plane.done[slot]))[: clocks.cluster_threads]
        ordered[clocks.column[thread]] = True
        return bool(ordered.all())

    def _too_many(self, word: BarrierWord, slot: int, thread: int, instruction: Any) -> None:
        if word.valid[slot] and not word.wrong[slot]:
            self.report.too_many(word, slot, thread, instruction)
            word.wrong[slot] = True

    def phase_completed(self, index: int) -> None:
        slot, name = divmod(index, self._row)
        word = self.word(name)
        if word.issued[slot] > word.expected[slot] and not word.wrong[slot]:
            self.report.more_bytes(word, slot, word.last_copy.get(slot), None)
        word.expected[slot] = word.issued[slot] = 0
        word.bare_expect.pop(slot, None)
        word.phases[slot] += 1
        plane, column = word.plane, word.column[slot]
        plane.sum[slot, column] = word.phases[slot]
        plane.sum[slot, self.clocks.columns + column] = word.phases[slot]
        self.clocks.complete(plane, np.array([slot]))

    def _wait(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any, value: Any) -> None:
        clocks = self.clocks
        self._check_init(word, slots, threads, instruction)
        phases = word.phases[slots]
        seen = word.seen_phases[threads]
        following = (seen >= 0) & (phases > seen) & ((phases - seen) % 2 == 1)
        if following.any():
            lanes = np.nonzero(following)[0]
            done = clocks.rows(word.plane.done[slots[lanes]])
            ordered = done[np.arange(lanes.size), clocks.column[threads[lanes]]] >= word.seen_step[threads[lanes]]
            missed = (phases[lanes] - seen[lanes] > 1) | ~ordered
            missed &= ~word.wrong[slots[lanes]]
            if missed.any():
                lane = lanes[int(np.argmax(missed))]
                self.report.phase_missed(word, int(slots[lane]), int(threads[lane]), instruction)
        word.passed_early[threads] = np.where(word.issued[slots] > 0, phases, -1)
        self.acquired_step[threads] = clocks.own[STEPS, threads]
        clocks.acquire(threads, word.plane.done[slots])
        word.seen_phases[threads] = phases
        word.seen_step[threads] = clocks.own[STEPS, threads]

    # Tensor maps in global memory

    def tensor_map_used(self, thread: int, address: int, instruction: Instruction) -> None:
        segment = self.machine.find(address)
        if segment is None or segment.kind != "global":
            return
        clocks = self.clocks
        changed = self._changed.get(address)
        for by, step in self._acquired.get(address, []):
            if by // self.machine.threads != thread // self.machine.threads:
                continue
            if by == thread or clocks.knows(np.array([thread]), clocks.column[[by]], np.array([step]))[0]:
                return
        self.report.map_not_acquired(thread, address, instruction, changed)

    def tensor_map_changed(self, thread: int, address: int, instruction: Instruction) -> None:
        self._acquired.pop(address, None)
        self._changed[address] = (thread, instruction)

    def tensor_maps_acquired(self, fragment: Fragment, addresses: np.ndarray) -> None:
        threads = self.threads_of(fragment)
        steps = self.clocks.own[STEPS, threads]
        addresses = np.broadcast_to(addresses, threads.shape)
        for address, thread, step in zip(addresses.tolist(), threads.tolist(), steps.tolist(), strict=True):
            self._acquired.setdefault(address, []).append((thread, step))

    # Ends

    @property
    def row_words(self) -> int:
        """64-bit words from one block's shared memory to the next one's."""
        return self._row

    def copy_issued(self, fragment: Fragment, instruction: Instruction) -> None:
        self._burst.clear()

    def registers_changed(self, fragment: Fragment, instruction: Instruction) -> None:
        self.ends.registers_changed(fragment.slot, fragment.thread, instruction)

    def lanes_exited(self, fragment: Fragment) -> None:
        self.clocks.clean()
        self.ends.exited(fragment.slot, self.threads_of(fragment))

    def wave_ended(self) -> None:
        self.ends.wave_ended()

    def launch_ended(self) -> None:
        self.global_writes.launch_ended()

    def failed(self, error: SimError) -> None:
        """The launch ends with an error: name what is behind it."""
        self.ends.failed(error)

    # The copy engine

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
        if (targets, start, bar) in self._burst:
            self.report.by_every_lane(self.word(bar // 8), targets, start, thread, origin)
            return
        self._burst.add((targets, start, bar))
        if pattern and start % pattern:
            self.report.swizzled(thread, start, pattern, origin)
        shadow = self.shadow
        own = thread // self.machine.threads
        word = self.word(bar // 8)
        number = self.number(origin)
        who = np.array([thread])
        for slot in targets:
            at = np.array([slot])
            if not word.valid[slot]:
                if len(targets) > 1 or slot != own:
                    self.report.no_receiver(word, slot, thread, origin)
                continue
            self._check_init(word, at, who, origin)
            if not word.init_fenced[slot]:
                self.report.init_not_fenced(word, slot, thread, origin, remote=slot != own)
            word.issued[slot] += nbytes if signalled is None else signalled
            self.ends.copy(slot, int(word.column[slot]), int(word.phases[slot]) + 1, origin, thread)
            word.last_copy[slot] = origin
            if not word.wrong[slot]:
                pending = int(self.machine.barrier_memory.words[slot * self._row + word.word]) & 0xFFFFF
                if not self._after_last_phase(word, slot, thread):
                    self.report.early_copy(word, slot, thread, origin)
                elif word.issued[slot] > word.expected[slot] and pending == 0:
                    # All arrivals are in: nothing more can be promised in time.
                    self.report.more_bytes(word, slot, origin, None)
            if nbytes:
                span = shadow.span(slot * self.machine.shared_stride + start, nbytes)
                self._engine_access(span, who, origin, "write")
                shadow.written[span] = stamps(word.column[slot], word.phases[slot] + 1, number)
        if source is not None and nbytes and word.valid[targets[0]]:
            slot, begin, length = source
            span = shadow.span(slot * self.machine.shared_stride + begin, length)
            self._engine_access(span, who, origin, "read")
            column, phase = word.column[targets[0]], word.phases[targets[0]] + 1
            shadow.in_use[-1] = True
            shadow.read[-1, span] = stamps(column, phase, number)

    def copy_from_shared(
        self,
        thread: int,
        start: int,
        nbytes: int,
        group: int,
        origin: Any,
        region: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None,
        pattern: int = 0,
    ) -> None:
        if region is not None:
            self.global_writes.copied(thread, region, origin)
        if pattern and start % pattern:
            self.report.swizzled(thread, start, pattern, origin)
        clocks, shadow = self.clocks, self.shadow
        clocks.kinds_in_use.add(BULK_READ)
        self.issued_bulk[thread] = True
        if not nbytes:
            return
        slot = thread // self.machine.threads
        who = np.array([thread])
        span = shadow.span(slot * self.machine.shared_stride + start, nbytes)
        self._engine_access(span, who, origin, "read")
        if not shadow.written[span].any():
            self.report.unwritten_source(span, thread, origin)
        column = clocks.column[thread] + BULK_READ * clocks.cluster_threads
        self.ends.copy(slot, int(column), int(group) + 1, origin, thread)
        shadow.in_use[-1] = True
        shadow.read[-1, span] = stamps(column, group + 1, self.number(origin))

    def _engine_access(self, span: slice, who: np.ndarray, origin: Any, action: str) -> None:
        shadow = self.shadow
        self._engine_check(shadow.written[span], span, who, origin, action, "write")
        if action == "write":
            for row in shadow.rows():
                last = row[span]
                if last.any():
                    self._engine_check(last, span, who, origin, action, "read")
                    row[span] = 0

    def _engine_check(self, last: np.ndarray, span: slice, who: np.ndarray, origin: Any, action: str, by: str) -> None:
        if not last.any():
            return
        keep = np.ones(last.size, np.bool_)
        np.not_equal(last[1:], last[:-1], out=keep[1:])
        keep &= last != 0
        at = np.nonzero(keep)[0]
        last = last[at]
        clocks = self.clocks
        columns, values, _ = unpack(last)
        good = clocks.knows(who, columns, values)
        pieces = at + span.start
        threads = np.broadcast_to(who, at.shape)
        if not good.all():
            self.report.race(last, ~good, threads, pieces, origin, f"async {action}", by)
        kind = columns // clocks.cluster_threads
        ordinary = good & ((kind == STEPS) | (kind == CP_ASYNC)) & (values > 0)
        if ordinary.any():
            lanes = np.nonzero(ordinary)[0]
            fenced = clocks.knows(who, columns[lanes], values[lanes], fenced=True)
            if not fenced.all():
                bad = np.zeros(at.size, np.bool_)
                bad[lanes[~fenced]] = True
                self.report.unfenced(last, bad, threads, pieces, origin, f"async {action}", by)

    def cp_async_issued(
        self, threads: np.ndarray, offsets: np.ndarray, size: int, groups: np.ndarray, origin: Any
    ) -> None:
        """cp.async of `size` bytes to flat offsets of shared memory, in each thread's group."""
        clocks, shadow = self.clocks, self.shadow
        clocks.kinds_in_use.add(CP_ASYNC)
        self.issued_copies[threads] = True
        pieces, each = shadow.pieces(offsets, size)
        if each > 1:
            threads, groups = np.repeat(threads, each), np.repeat(groups, each)
        last = shadow.written.take(pieces)
        columns, values, _ = unpack(last)
        good = clocks.knows(threads, columns, values)
        if not good.all():
            # A thread's own cp.async into bytes that an earlier one of its own still fills is the same writer.
            good |= columns == clocks.column[threads] + CP_ASYNC * clocks.cluster_threads
        if not good.all():
            self.report.race(last, ~good, threads, pieces, origin, "cp.async write", "write")
        self._check_readers(pieces, threads, origin, "cp.async write")
        column = clocks.column[threads] + CP_ASYNC * clocks.cluster_threads
        shadow.written[pieces] = stamps(column, groups + 1, self.number(origin))

    def cp_async_arrived(self, threads: np.ndarray, bars: np.ndarray, groups: np.ndarray) -> None:
        """cp.async.mbarrier.arrive: who waits on the barrier knows the copies that each thread issued so far."""
        clocks, machine = self.clocks, self.machine
        clocks.clean()
        slots = threads // machine.threads
        clocks.kinds_in_use.add(CP_ASYNC)
        for bar in np.unique(bars).tolist():
            lanes = bars == bar
            word = self.word(bar // 8)
            clocks.release(word.plane, slots[lanes], threads[lanes])
            column = clocks.column[threads[lanes]] + CP_ASYNC * clocks.cluster_threads
            word.plane.sum[slots[lanes], column] = groups[lanes] + 1

    def groups_waited(self, fragment: Fragment, what: str, pending: int | None) -> None:
        threads, engine, clocks = self.threads_of(fragment), self.machine.engine, self.clocks
        if what.startswith("its cp.async"):
            self.waited_copies[threads] = True
            opened = engine.open_group(threads, "cp.async")
            clocks.own[CP_ASYNC, threads] = opened + 1 if pending is None else np.maximum(opened - pending, 0)
            return
        self.waited_bulk[threads] = True
        opened = np.maximum(engine.open_group(threads, "bulk") - (pending or 0), 0)
        clocks.own[BULK_READ, threads] = np.maximum(clocks.own[BULK_READ, threads], opened)

"""Watches a launch and names its hazards, whatever order things happened to take this time.

Every access is compared with the last accesses to the same bytes: unless the clock of the accessing thread says that
those are ordered before it, it is a race, also when this run's order did no harm. See clocks.py for what orders,
rules.py for the hazards. Where the tracker does not know whether something orders two accesses within a cluster
(atomics, volatile and acquiring accesses by which threads may signal each other), it takes it that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..access import GLOBAL, SHARED
from ..descriptor import NBYTES
from ..errors import SimError
from ..observer import Observer
from .barriers import BarrierWord
from .clocks import BULK_READ, BULK_WRITTEN, CP_ASYNC, IS_ORDINARY, STEPS, WARPGROUP, Clocks, Parts, Plane
from .ends import Ends
from .global_memory import GlobalAccesses
from .grid import Signals, scope_of_gpu
from .messages import Reporter
from .multiplications import Multiplications
from .scan import scan
from .shadow import Shadow, stamps, unpack
from .stores import Values, changes, first_disagreement
from .tensor_maps import TensorMaps

if TYPE_CHECKING:
    from ..fragment import Fragment
    from ..machine import Machine
    from ..module import Instruction
    from ..watch import RegisterUse

_SIGNALS = frozenset(("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"))


def _proxy_spaces(instruction: Instruction) -> frozenset[str]:
    """The memories whose accesses an instruction orders for the copy engine."""
    modifiers = instruction.modifiers
    if instruction.opcode not in ("fence", "membar") or "proxy" not in modifiers:
        return frozenset()
    if not any(m == "async" or m.startswith("async::") for m in modifiers):
        return frozenset()
    if "global" in modifiers:
        return frozenset(("global",))
    shared = any("shared::" in m for m in modifiers)
    return frozenset(("shared",) if shared else ("shared", "global"))


def _is_gpu_fence(instruction: Instruction) -> bool:
    """Whether an instruction orders a thread's accesses for other clusters."""
    if instruction.opcode not in ("fence", "membar") or not scope_of_gpu(instruction):
        return False
    return not {"proxy", "mbarrier_init"} & set(instruction.modifiers)


def _parts(instructions: Iterable[Instruction]) -> Parts:
    """The parts of clocks that a launch needs: one for both memories if no fence is for one of them alone."""
    fences = [i for i in instructions if i.opcode in ("fence", "membar")]
    kinds = {_proxy_spaces(instruction) for instruction in fences} - {frozenset()}
    spaces = frozenset().union(*kinds)
    if len(kinds) == 1:
        numbers = dict.fromkeys(spaces, 1)
    else:
        numbers = {space: 1 + i for i, space in enumerate(sorted(spaces))}
    count = 1 + len(set(numbers.values()))
    signals = count if any(map(_is_gpu_fence, fences)) else None
    return Parts(count + (signals is not None), numbers.get("shared"), numbers.get("global"), signals)


class Tracker(Observer):
    """One launch's hazards."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.report = Reporter(machine, self)
        self.instructions: list[Any] = [None]
        self._numbers: dict[int, int] = {}
        functions = (*machine.module.entries.values(), *machine.module.functions.values())
        body = [instruction for function in functions for instruction in function.body]
        self._clock_parts = _parts(body)
        self._multiplies = any(instruction.opcode == "wgmma" for instruction in body)
        self.signals = Signals()
        self.global_memory = GlobalAccesses(self, self.signals.reaches)
        self.tensor_maps = TensorMaps(self)

    def wave(self, machine: Machine, blocks: int) -> None:
        self.blocks = blocks
        self.first_thread = machine.first_block * machine.threads
        self.clocks = Clocks(
            machine.slots,
            machine.threads,
            machine.cluster_size,
            self._clock_parts,
            self.signals.reaches,
            self.first_thread,
        )
        warpgroups = -(-machine.threads // WARPGROUP) if self._multiplies else 0
        self.shadow = Shadow(machine.shared.size, machine.warps, self.clocks, warpgroups)
        self.words: dict[int, BarrierWord] = {}
        self._row = machine.shared_stride // 8
        self._block_planes: dict[int, Plane] = {}
        clusters = -(-machine.slots // machine.cluster_size)
        self._cluster_plane = self.clocks.plane(clusters)
        self._signal_plane = self.clocks.plane(clusters)
        self.ends = Ends(self)
        self.report.wave()
        self.signals.wave(self.clocks, machine.first_block // machine.cluster_size)
        self.global_memory.wave(self.clocks)
        self.tensor_maps.wave()
        self.multiplications = Multiplications(self) if self._multiplies else None
        # Copies of the instruction that is being executed; what the next one reads of global memory.
        self._burst: set[tuple] = set()
        self._regions: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
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
        if kind == SHARED:
            threads = self.threads_of(fragment)
            if self.machine.cluster_size > 1:
                self._reach_peers(threads, view, index, instruction)
            if action == "atomic" or not _SIGNALS.isdisjoint(instruction.modifiers):
                self._signal(fragment)
                self._written_by_signal(view, index, count, action, instruction)
            else:
                context = self.shadow.prepare(view.dtype.itemsize, count, self.number(instruction))
                if action == "read":
                    self._read(view, index, threads, count, instruction, context)
                else:
                    self._write(view, index, threads, count, instruction, context, fragment, values)
        elif kind == GLOBAL:
            threads = self.threads_of(fragment)
            if action == "atomic" or not _SIGNALS.isdisjoint(instruction.modifiers):
                self._signal(fragment)
                self._signal_beyond(threads, view, index, count, action, instruction)
            elif action == "read":
                self.global_memory.read(threads, instruction, view, index, count)
            else:
                self.global_memory.wrote(fragment, threads, instruction, view, index, count, values)

    def _reach_peers(self, threads: np.ndarray, view: np.ndarray, index: np.ndarray, instruction: Instruction) -> None:
        slots = np.broadcast_to(index * view.dtype.itemsize // self.machine.shared_stride, threads.shape)
        self._remote(slots, threads, instruction)
        far = np.nonzero(slots != threads // self.machine.threads)[0]
        if not far.size:
            return
        # A block whose thread has got as far as its first step has started.
        pairs = np.unique(np.stack((self.clocks.known[threads[far]], slots[far])), axis=1, return_index=True)
        for (row, slot), lane in zip(pairs[0].T.tolist(), far[pairs[1]].tolist(), strict=True):
            first = slot % self.machine.cluster_size * self.machine.threads
            if not self.clocks.row(row)[first : first + self.machine.threads].any():
                self.report.peer_not_started(int(threads[lane]), slot, instruction)

    def _pieces(
        self, view: np.ndarray, index: np.ndarray, threads: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(pieces, threads) of accesses, an entry for each piece."""
        size = view.dtype.itemsize
        pieces, each = self.shadow.pieces(np.broadcast_to(index, threads.shape) * size, size * count)
        return pieces, np.repeat(threads, each) if each > 1 else threads

    def _read(
        self, view: np.ndarray, index: np.ndarray, threads: np.ndarray, count: int, instruction: Any, context: Any
    ) -> None:
        bad = scan("read_shared")(index, threads, context)
        if not bad.any():
            return
        lanes = np.nonzero(bad)[0]
        pieces, threads = self._pieces(view, np.broadcast_to(index, threads.shape)[lanes], threads[lanes], count)
        last = self.shadow.written.take(pieces)
        self._check(last, threads, pieces, instruction, "read", "write")
        unwritten = last == 0
        if unwritten.any():
            self.report.unwritten(unwritten, threads, pieces, instruction)

    def _write(
        self,
        view: np.ndarray,
        index: np.ndarray,
        threads: np.ndarray,
        count: int,
        instruction: Any,
        context: Any,
        fragment: Fragment | None = None,
        values: Values = (),
    ) -> None:
        self.shadow.rows()
        bad = scan("check_write_shared")(index, threads, context)
        if bad.any():
            lanes = np.nonzero(bad)[0]
            places = np.broadcast_to(index, threads.shape)[lanes]
            pieces, some = self._pieces(view, places, threads[lanes], count)
            last = self.shadow.written.take(pieces)
            wrong = ~self._known(last, some)
            if wrong.any():
                changed = changes(view, places, fragment, values, lanes)
                wrong &= np.repeat(changed, pieces.size // lanes.size)
            if wrong.any():
                self.report.race(last, wrong, some, pieces, instruction, "write", "write")
            self._check_readers(pieces, some, instruction, "write")
        together = scan("write_shared")(index, threads, context)
        if values and (together > bad).any():
            pieces, who = self._pieces(view, index, threads, count)
            last = self.shadow.written.take(pieces)
            columns, each = unpack(last)[0], pieces.size // threads.size
            found = first_disagreement(fragment, values, threads, who - self.clocks.column[who] + columns, each)
            if found is not None:
                only = np.arange(pieces.size) == found
                self.report.race(last, only, who, pieces, instruction, "write", "write")

    def _known(self, last: np.ndarray, threads: np.ndarray) -> np.ndarray:
        columns, values, _ = unpack(last)
        return self.clocks.knows(threads, columns, values)

    def _check(
        self, last: np.ndarray, threads: np.ndarray, pieces: np.ndarray, instruction: Any, action: str, by: str
    ) -> None:
        good = self._known(last, threads)
        if not good.all():
            self.report.race(last, ~good, threads, pieces, instruction, action, by)

    def _remote(self, slots: np.ndarray, threads: np.ndarray, instruction: Instruction) -> None:
        far = slots != threads // self.machine.threads
        if far.any():
            self.ends.remote(slots[far], threads[far], instruction)

    def _check_readers(self, pieces: np.ndarray, threads: np.ndarray, instruction: Any, action: str) -> None:
        """Those who read the pieces since the last write must be ordered before this one, which makes them history."""
        for row in self.shadow.rows():
            before = row.take(pieces)
            if before.any():
                self._check(before, threads, pieces, instruction, action, "read")
                row[pieces] = 0

    def _signal(self, fragment: Fragment) -> None:
        """Atomics and the like may order threads in ways of the kernel's own: take it that they do."""
        places = fragment.slot // self.machine.cluster_size
        threads = self.threads_of(fragment)
        self.clocks.clean()
        self.clocks.release(self._signal_plane, places, threads)
        self.clocks.complete(self._signal_plane, np.unique(places))
        self.clocks.acquire(threads, self._signal_plane.done[places])

    def _signal_beyond(
        self, threads: np.ndarray, view: np.ndarray, index: np.ndarray, count: int, action: str, instruction: Any
    ) -> None:
        """Signals in global memory reach other clusters too, if they are released and acquired."""
        segment = self.machine.memory.segment_of(view)
        if segment is None:
            return
        self.signals.access(threads, segment.base + index * view.dtype.itemsize, instruction, action)
        if action != "read":
            self.global_memory.signalled(view, index, count)

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
        spaces = _proxy_spaces(instruction)
        if spaces or "mbarrier_init" in modifiers:
            self._fence_inits(fragment)
        threads = self.threads_of(fragment)
        if spaces:
            parts = self.clocks.parts
            self.clocks.clean()
            self.clocks.fence(
                threads,
                {part for part, space in ((parts.shared, "shared"), (parts.globally, "global")) if space in spaces},
            )
        elif "tensormap::generic" in modifiers:
            if "release" in modifiers:
                self.tensor_maps.released(threads)
        elif _is_gpu_fence(instruction):
            self.signals.fence(threads)

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

    def wgmma_issued(
        self, fragment: Fragment, instruction: Instruction, accumulators: Any, multiplicand: Any, reads: Any
    ) -> None:
        self.multiplications.issued(fragment, instruction, accumulators, multiplicand, reads)

    def wgmma_ordered(self, fragment: Fragment, instruction: Instruction, what: str, pending: int) -> None:
        self.multiplications.ordered(fragment, what, pending)

    def registers_used(self, fragment: Fragment, use: RegisterUse) -> None:
        self.multiplications.registers_used(fragment, use)

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

    def word_of(self, column: int, slot: int) -> BarrierWord | None:
        """The mbarrier of a block whose phases a column counts."""
        return next((word for word in self.words.values() if word.column[slot] == column), None)

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
        word.last_arrival[last] = self.number(instruction)
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
        word.bytes_before[slot] = word.expected[slot]
        word.expected[slot] = word.issued[slot] = 0
        word.bare_expect.pop(slot, None)
        word.phases[slot] += 1
        plane, column = word.plane, word.column[slot]
        plane.sum[slot].reshape(self.clocks.parts.count, -1)[:, column] = word.phases[slot]
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
        word.waited_again[threads] = (seen == phases) & (word.seen_step[threads] < clocks.own[STEPS, threads])
        self.acquired_step[threads] = clocks.own[STEPS, threads]
        clocks.acquire(threads, word.plane.done[slots])
        word.seen_phases[threads] = phases
        word.waited_by[threads] = self.number(instruction)
        word.seen_step[threads] = clocks.own[STEPS, threads]

    # Tensor maps in global memory

    def tensor_map_used(self, thread: int, address: int, instruction: Instruction) -> None:
        self.tensor_maps.used(thread, address, instruction)

    def tensor_map_changed(self, thread: int, address: int, instruction: Instruction) -> None:
        self.global_memory.changed(thread, address, instruction)
        if "cp_fenceproxy" in instruction.modifiers:
            self.tensor_maps.released(np.array([thread]))

    def tensor_map_in_shared(self, thread: int, offset: int, action: str, instruction: Instruction) -> None:
        start = thread // self.machine.threads * self.machine.shared_stride + offset
        view, index = self.machine.shared_view(np.dtype(np.uint64)), start // 8 + np.arange(NBYTES // 8)
        threads = np.full(index.size, thread)
        context = self.shadow.prepare(8, 1, self.number(instruction))
        (self._read if action == "read" else self._write)(view, index, threads, 1, instruction, context)

    def tensor_maps_acquired(self, fragment: Fragment, addresses: np.ndarray) -> None:
        self.tensor_maps.acquired(self.threads_of(fragment), addresses)

    # Ends

    @property
    def row_words(self) -> int:
        """64-bit words from one block's shared memory to the next one's."""
        return self._row

    def copy_issued(self, fragment: Fragment, instruction: Instruction) -> None:
        self._burst.clear()
        if "cp_fenceproxy" in instruction.modifiers:
            # Compilers count on the lanes' meeting there.
            self.lanes_synced(fragment.slot, fragment.thread)

    def registers_changed(self, fragment: Fragment, instruction: Instruction) -> None:
        self.ends.registers_changed(fragment.slot, fragment.thread, instruction)

    def lanes_exited(self, fragment: Fragment) -> None:
        self.clocks.clean()
        self.ends.exited(fragment.slot, self.threads_of(fragment))

    def wave_ended(self) -> None:
        self.ends.wave_ended()

    def failed(self, error: SimError) -> None:
        """The launch ends with an error: name what is behind it."""
        self.ends.failed(error)

    # The copy engine

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
        self._regions.append((address, shape, strides))

    def cp_async_reads(self, threads: np.ndarray, addresses: np.ndarray, size: int, origin: Any) -> None:
        # Copies that read nothing, and clear a stage that nobody uses any more, are how rings end: they are not here.
        if threads.size:
            self.ends.cp_async(threads, self.machine.engine.open_group(threads, "cp.async"), origin)
            self.global_memory.async_reads(threads, addresses, size, origin)

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
        regions, self._regions = self._regions, []
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
            if slot != own:
                self._tell_phases(word, slot, thread)
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
        if not nbytes or not word.valid[targets[0]]:
            return
        home = targets[0]
        for region in regions:
            self.global_memory.loaded(thread, region, int(word.column[home]), int(word.phases[home]) + 1, origin)
        if source is not None:
            slot, begin, length = source
            span = shadow.span(slot * self.machine.shared_stride + begin, length)
            self._engine_access(span, who, origin, "read")
            column, phase = word.column[targets[0]], word.phases[targets[0]] + 1
            self.ends.copy(slot, int(column), int(phase), origin, thread)
            shadow.in_use[shadow.engine] = 1
            shadow.read[shadow.engine, span] = stamps(column, phase, number)

    def _tell_phases(self, word: BarrierWord, slot: int, thread: int) -> None:
        """A copy to a peer is issued after the phases that its thread has waited for, and completes one after them.

        So whoever waits for that knows them to be over: a ring whose stages are filled by several blocks rests on it.
        It is told of barriers without copies alone; what others wrote, a wait of one's own has to make visible.
        """
        known = self.clocks.row(int(self.clocks.known[thread]))
        to = word.plane.sum[slot]
        for other in self.words.values():
            if not other.last_copy:
                columns = other.column[: self.machine.cluster_size]
                to[columns] = np.maximum(to[columns], known[columns])

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
        read: Callable[[], np.ndarray] | None = None,
    ) -> None:
        clocks, shadow = self.clocks, self.shadow
        who = np.array([thread])
        if region is not None:
            column = int(clocks.columns_of(BULK_WRITTEN, who)[0])
            self.global_memory.stored(thread, region, column, int(group) + 1, origin, reduction, read)
        if pattern and start % pattern:
            self.report.swizzled(thread, start, pattern, origin)
        self.issued_bulk[thread] = True
        if not nbytes:
            return
        slot = thread // self.machine.threads
        span = shadow.span(slot * self.machine.shared_stride + start, nbytes)
        self._engine_access(span, who, origin, "read")
        if not shadow.written[span].any():
            self.report.unwritten_source(span, thread, origin)
        column = int(clocks.columns_of(BULK_READ, who)[0])
        self.ends.copy(slot, column, int(group) + 1, origin, thread)
        shadow.in_use[shadow.engine] = 1
        shadow.read[shadow.engine, span] = stamps(column, group + 1, self.number(origin))

    def _engine_access(self, span: slice, who: np.ndarray, origin: Any, action: str) -> None:
        shadow = self.shadow
        self._engine_check(shadow.written[span], span, who, origin, action, "write")
        if action == "write":
            shadow.before[span] = shadow.read[0, span]
            for row in shadow.rows():
                last = row[span]
                if last.any():
                    self._engine_check(last, span, who, origin, action, "read")
                    row[span] = 0

    def _engine_check(self, last: np.ndarray, span: slice, who: np.ndarray, origin: Any, action: str, by: str) -> None:
        if not self.shadow.unsettled(last, who).any():
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
            self.report.race(last, ~good, threads, pieces, origin, f"async {action}", by, span)
        ordinary = good & IS_ORDINARY[clocks.kind[columns]] & (values > 0)
        if ordinary.any():
            lanes = np.nonzero(ordinary)[0]
            fenced = clocks.knows(who, columns[lanes], values[lanes], clocks.parts.shared)
            if not fenced.all():
                bad = np.zeros(at.size, np.bool_)
                bad[lanes[~fenced]] = True
                self.report.unfenced(last, bad, threads, pieces, origin, f"async {action}", by, span)

    def cp_async_issued(
        self,
        threads: np.ndarray,
        offsets: np.ndarray,
        size: int,
        groups: np.ndarray,
        origin: Any,
    ) -> None:
        clocks, shadow = self.clocks, self.shadow
        self.issued_copies[threads] = True
        pieces, each = shadow.pieces(offsets, size)
        column = clocks.columns_of(CP_ASYNC, threads)
        if each > 1:
            threads, groups, column = np.repeat(threads, each), np.repeat(groups, each), np.repeat(column, each)
        last = shadow.written.take(pieces)
        columns, values, _ = unpack(last)
        good = clocks.knows(threads, columns, values)
        if not good.all():
            # A thread's own cp.async into bytes that an earlier one of its own still fills is the same writer.
            good |= columns == column
        if not good.all():
            self.report.race(last, ~good, threads, pieces, origin, "cp.async write", "write")
        self._check_readers(pieces, threads, origin, "cp.async write")
        shadow.written[pieces] = stamps(column, groups + 1, self.number(origin))

    def cp_async_arrived(self, threads: np.ndarray, bars: np.ndarray, groups: np.ndarray) -> None:
        """cp.async.mbarrier.arrive: who waits on the barrier knows the copies that each thread issued so far."""
        clocks, machine = self.clocks, self.machine
        clocks.clean()
        slots = threads // machine.threads
        columns = clocks.columns_of(CP_ASYNC, threads)
        for bar in np.unique(bars).tolist():
            lanes = bars == bar
            word = self.word(bar // 8)
            clocks.release(word.plane, slots[lanes], threads[lanes])
            word.plane.sum[slots[lanes], columns[lanes]] = groups[lanes] + 1

    def groups_waited(self, fragment: Fragment, what: str, pending: int | None) -> None:
        threads, engine, clocks = self.threads_of(fragment), self.machine.engine, self.clocks
        if what.startswith("its cp.async"):
            self.waited_copies[threads] = True
            opened = engine.open_group(threads, "cp.async")
            clocks.own[CP_ASYNC, threads] = opened + 1 if pending is None else np.maximum(opened - pending, 0)
            return
        self.waited_bulk[threads] = True
        opened = np.maximum(engine.open_group(threads, "bulk") - (pending or 0), 0)
        for kind in (BULK_READ,) if "reads" in what else (BULK_READ, BULK_WRITTEN):
            clocks.own[kind, threads] = np.maximum(clocks.own[kind, threads], opened)
        self.report.groups_waited(threads)

"""From what the tracker found to a named hazard with both places, threads and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import Hazard, place_of
from .clocks import BULK_READ, CP_ASYNC, PHASES, STEPS, WGMMA
from .rules import RULES
from .shadow import unpack

if TYPE_CHECKING:
    from ..machine import Machine
    from .barriers import BarrierWord
    from .global_memory import Copy
    from .tracker import Tracker

_DOING = {
    "read": "reads",
    "write": "writes",
    "async read": "starts a copy that reads",
    "async write": "starts a copy that writes",
    "cp.async write": "starts a cp.async that writes",
    "wgmma read": "issues a matrix multiplication that reads",
}
# Earlier accesses by copies and the like, by kind of column and by whether they write.
_PAST = {
    (STEPS, "write"): "wrote",
    (STEPS, "read"): "read",
    (CP_ASYNC, "write"): "started a cp.async into",
    (BULK_READ, "read"): "started a copy out of",
    (PHASES, "write"): "into",
    (PHASES, "read"): "out of",
    (WGMMA, "read"): "issued a matrix multiplication that reads",
}


def _line(instruction: Any) -> str:
    """What tells instructions apart: unrolled loops have one line of Python at many places."""
    return str(getattr(instruction, "location", None) or id(instruction))


def _hazard(identifier: str, what: str, instructions: Sequence[Any], severity: str | None = None) -> Hazard:
    rule = RULES[identifier]
    message = f"{what}\n  rule: {rule.rule}\n  way out: {rule.remedy}"
    places = tuple(i.location for i in instructions if getattr(i, "location", None) is not None)
    first = instructions[0] if instructions else None
    return Hazard(identifier, message, first, severity or rule.severity, places)


@dataclass(frozen=True)
class _Overwritten:
    """A hazard at `place` of the list: a thread, at its step, overwrites what its owner's copy (`value`) may read."""

    place: int
    owner: int
    value: int
    thread: int
    step: int
    what: str
    instructions: tuple[Any, ...]


class Reporter:
    """Adds hazards to the machine's list, each kind once for a pair of instructions."""

    def __init__(self, machine: Machine, tracker: Tracker) -> None:
        self.machine = machine
        self.tracker = tracker
        self._seen: set[tuple] = set()
        self._pairs_named: set[tuple] = set()
        self._overwritten: list[_Overwritten] = []

    def wave(self) -> None:
        """Threads are others from now on."""
        self._overwritten.clear()

    def add(self, identifier: str, what: str, *instructions: Any, severity: str | None = None) -> bool:
        """A hazard, unless the same was reported for the same instructions; whether it was not."""
        key = (identifier, *map(_line, instructions))
        if key in self._seen:
            return False
        self._seen.add(key)
        self.machine.hazards.append(_hazard(identifier, what, instructions, severity))
        return True

    # Names

    def thread(self, thread: int) -> str:
        """A thread as messages name it."""
        slot, index = divmod(thread, self.machine.threads)
        return f"block {self.machine.block_name(slot)}, thread {index}"

    def shared(self, offset: int, nbytes: int = 0) -> str:
        """A place in flat shared memory: the variable or the part of the plan, and the address."""
        slot, inside = divmod(offset, self.machine.shared_stride)
        size = f"{nbytes} B at " if nbytes else ""
        return f"{size}{self.machine.shared_place(inside)} of block {self.machine.block_name(slot)}"

    def barrier(self, word: BarrierWord, slot: int) -> str:
        """An mbarrier as messages name it."""
        return f"{self.machine.mbarrier_place(8 * word.word)} of block {self.machine.block_name(slot)}"

    def _by(self, column: int, slot: int) -> str:
        """Who the owner of a column is."""
        clocks = self.tracker.clocks
        if clocks.kind[column] == PHASES:
            return "a copy"
        first = slot // clocks.cluster_size * clocks.cluster_size * self.machine.threads
        name = self.thread(first + int(clocks.owner[column]))
        return f"the warpgroup of {name}" if clocks.kind[column] == WGMMA else name

    def block_of_grid(self, number: int) -> str:
        """blockIdx of a block by its number among those executed, as text."""
        x, y, z = self.machine.block_coordinates(int(self.machine.block_numbers[number]))
        if self.machine.grid[1] == self.machine.grid[2] == 1:
            return f"{x}"
        return f"({x}, {y})" if self.machine.grid[2] == 1 else f"({x}, {y}, {z})"

    def thread_of_grid(self, thread: int) -> str:
        """A thread by its number in the grid."""
        block, index = divmod(thread, self.machine.threads)
        return f"block {self.block_of_grid(block)}, thread {index}"

    # Two accesses

    def race(
        self,
        last: Any,
        bad: Any,
        threads: Any,
        pieces: Any,
        instruction: Any,
        action: str,
        by: str,
        span: slice | None = None,
    ) -> None:
        """Lanes `bad` access pieces whose `last` access (a `by`) is not ordered before theirs.

        `span`: pieces of all of the access, where it is one copy's.
        """
        self._pairs(last, bad, threads, pieces, instruction, action, by, self._classify, span)

    def unfenced(
        self,
        last: Any,
        bad: Any,
        threads: Any,
        pieces: Any,
        instruction: Any,
        action: str,
        by: str,
        span: slice | None = None,
    ) -> None:
        """The copy engine accesses what ordinary accesses came before, ordered but with no proxy fence between."""

        def classify(column: int, value: int, thread: int, action: str, by: str, piece: int, instruction: Any) -> str:
            if action == "wgmma read":
                return "wgmma-operands-not-fenced"
            return "missing-proxy-fence" if action == "async read" else "async-write-without-proxy-fence"

        self._pairs(last, bad, threads, pieces, instruction, action, by, classify, span)

    def _pairs(
        self,
        last: Any,
        bad: Any,
        threads: Any,
        pieces: Any,
        instruction: Any,
        action: str,
        by: str,
        classify: Any,
        span: slice | None,
    ) -> None:
        tracker = self.tracker
        lanes = np.nonzero(bad)[0]
        columns, values, numbers = unpack(last[lanes])
        kinds = tracker.clocks.kind[columns].astype(np.int64) << 16 | numbers
        for lane in np.unique(kinds, return_index=True)[1].tolist():
            at = lanes[lane]
            column, value, thread = int(columns[lane]), int(values[lane]), int(threads[at])
            before = tracker.instructions[int(numbers[lane])]
            ordered = classify != self._classify
            pair = (ordered, *sorted((_line(instruction), _line(before))))
            if pair in self._pairs_named:
                # Two places that meet in another order have the same thing wrong with them.
                continue
            identifier = classify(column, value, thread, action, by, int(pieces[at]), instruction)
            if not identifier:
                continue
            self._pairs_named.add(pair)
            slot = int(pieces[at]) * tracker.shadow.piece // self.machine.shared_stride
            order = "ordered by a barrier, but with no proxy fence between" if ordered else "and nothing orders the two"
            doing = f"{_DOING[action]} {self._bytes(int(pieces[at]), span)}\n    at {place_of(instruction)}\n"
            if identifier == "wait-on-wrong-parity":
                self._wrong_parity(tracker.word_of(column, slot), slot, thread, doing, before, instruction)
                continue
            what = (
                f"{self.thread(thread)} {doing}"
                f"  after {self._by(column, slot)} {self._past(column, by)} it, {order}\n    at {place_of(before)}"
            )
            added = self.add(identifier, what, instruction, before)
            owner = self._owner(column, slot)
            if added and identifier == "source-overwritten-while-read" and by == "read" and owner not in (None, thread):
                step = int(tracker.clocks.own[STEPS, thread])
                place = len(self.machine.hazards) - 1
                self._overwritten.append(_Overwritten(place, owner, value, thread, step, what, (instruction, before)))

    def groups_waited(self, threads: np.ndarray) -> None:
        """Threads have waited for groups of stores: one that others did not wait for was the wait that they needed.

        Which of the two comes first is chance: who overwrites a source, or who waits for it without telling.
        """
        clocks = self.tracker.clocks
        for one in [one for one in self._overwritten if (threads == one.owner).any()]:
            if clocks.own[BULK_READ, one.owner] < one.value:
                continue
            self._overwritten.remove(one)
            if clocks.row(int(clocks.known[one.owner]))[clocks.column[one.thread]] < one.step:
                self.machine.hazards[one.place] = _hazard("wait-group-by-one-thread", one.what, one.instructions)

    def _owner(self, column: int, slot: int) -> int | None:
        """The thread whose bulk groups a column counts; None for other columns."""
        clocks = self.tracker.clocks
        if clocks.kind[column] != BULK_READ:
            return None
        return slot // clocks.cluster_size * clocks.cluster_size * self.machine.threads + int(clocks.owner[column])

    def _bytes(self, piece: int, span: slice | None) -> str:
        """The bytes of an access as messages name them: a piece, or a copy's span and where in it the piece is."""
        size = self.tracker.shadow.piece
        if span is None:
            return self.shared(piece * size, size)
        inside = f", from its byte {(piece - span.start) * size} on" if piece > span.start else ""
        return self.shared(span.start * size, (span.stop - span.start) * size) + inside

    def _wrong_parity(self, word: BarrierWord, slot: int, thread: int, doing: str, copy: Any, instruction: Any) -> None:
        """A wait that passes at once, and what comes of it. From now on the barrier's phases are not what was meant."""
        word.wrong[:] = True
        wait = self.tracker.instructions[int(word.waited_by[thread])]
        self.add(
            "wait-on-wrong-parity",
            f"{self.thread(thread)} passes a wait at {self.barrier(word, slot)} at once: its parity is that of the "
            f"phase before the copy's\n    at {place_of(wait)}\n  then it {doing}  while the copy may be under way\n"
            f"    at {place_of(copy)}",
            wait,
            instruction,
            copy,
        )

    def _past(self, column: int, by: str) -> str:
        return _PAST[int(self.tracker.clocks.kind[column]), by]

    def _classify(
        self, column: int, value: int, thread: int, action: str, by: str, piece: int, instruction: Any
    ) -> str:
        """The name of a race; '' where what is behind it has been named."""
        tracker, clocks = self.tracker, self.tracker.clocks
        slot = thread // self.machine.threads
        first = slot // clocks.cluster_size * clocks.cluster_size * self.machine.threads
        kind, owner = int(clocks.kind[column]), first + int(clocks.owner[column])
        if kind == WGMMA:
            return "wgmma-operands-overwritten"
        if kind == PHASES:
            if by == "read":
                return "source-overwritten-while-read"
            plain = "wgmma-tile-not-waited" if action == "wgmma read" else "tile-used-before-wait"
            return self._not_waited(column, value - 1, thread, piece, instruction, action, plain)
        block = slice(slot * self.machine.threads, (slot + 1) * self.machine.threads)
        if kind == CP_ASYNC:
            idle = tracker.waited_copies[block] & ~tracker.issued_copies[block]
            waited = clocks.own[CP_ASYNC, owner] >= value
            return "wait-group-without-copies" if idle.any() and not waited else "cp-async-not-waited"
        if kind == BULK_READ:
            if thread != owner and clocks.own[BULK_READ, owner] >= value:
                return "wait-group-by-one-thread"
            idle = tracker.waited_bulk[block] & ~tracker.issued_bulk[block]
            return "wait-group-without-copies" if idle.any() else "source-overwritten-while-read"
        if kind == STEPS and action in ("async write", "cp.async write") and by == "read":
            known = int(clocks.row(int(clocks.known[thread]))[column])
            filled = tracker.word_of(int(unpack(tracker.shadow.written[piece])[0]), slot)
            early = (filled.seen_step if filled else tracker.acquired_step)[owner]
            return "buffer-released-early" if 0 < early <= known else "refill-before-consumers-done"
        if action == "async read":
            return "copy-before-writers-done"
        return "shared-memory-race"

    def _not_waited(
        self, column: int, phase: int, thread: int, piece: int, instruction: Any, action: str, plain: str
    ) -> str:
        """The name of a use of what a copy writes in `phase` of a barrier, with no wait for that phase before it."""
        tracker, clocks = self.tracker, self.tracker.clocks
        slot = thread // self.machine.threads
        word = tracker.word_of(column, slot)
        if word is None or word.seen_phases[thread] < 0:
            return plain
        if word.wrong[slot]:
            return ""
        if word.seen_phases[thread] != phase:
            return plain
        _, origin, issuer = tracker.ends.copies[slot, column]
        if self._unpromised(word, slot, phase, thread, origin, instruction):
            return ""
        if not phase or word.passed_early[thread] == phase or word.waited_again[thread]:
            return "wait-on-wrong-parity"
        if action == "async write":
            return plain
        # The thread has waited for what was in the buffer before.
        known = clocks.row(int(clocks.known[issuer]))[clocks.column[thread]]
        if issuer != thread and known < word.seen_step[thread]:
            return "refill-before-consumers-done"
        read_before = tracker.instructions[int(unpack(tracker.shadow.before[piece])[2])]
        return plain if read_before and _line(read_before) == _line(instruction) else "buffer-released-early"

    def _unpromised(self, word: BarrierWord, slot: int, phase: int, thread: int, copy: Any, instruction: Any) -> bool:
        """Whether a copy came too late for the phase that it was meant for, which had not been promised its bytes."""
        if not phase or word.phases[slot] != phase:
            return False
        value = int(self.machine.barrier_memory.words[slot * self.tracker._row + word.word])
        nobody_yet = value & 0xFFFFF == value >> 20 & 0xFFFFF
        more, promised = word.issued[slot] > word.expected[slot], int(word.bytes_before[slot])
        too_late = (nobody_yet and more) if promised else (nobody_yet or more)
        if not too_late:
            return False
        word.wrong[slot] = True
        arrival = self.tracker.instructions[int(word.last_arrival[slot])]
        text = (
            f"a copy that signals {self.barrier(word, slot)} begins when the phase that {self.thread(thread)} has "
            f"waited for is over: it was promised {promised} B, and the copy's bytes count for the next one\n"
            f"    at {place_of(copy)}"
        )
        if arrival is not None:
            text += f"\n  the phase had its last arrival\n    at {place_of(arrival)}"
        text += f"\n  what is copied is used\n    at {place_of(instruction)}"
        name = "more-bytes-than-expected" if promised else "copy-without-expect-tx"
        self.add(name, text, copy, *([arrival] if arrival is not None else []), instruction)
        return True

    # wgmma

    def registers_before_wait(
        self, thread: int, name: str, instruction: Any, before: Any, accumulator: bool, committed: bool
    ) -> None:
        """Registers of a wgmma are used before it was waited for."""
        what = "an accumulator" if accumulator else "part of A"
        missing = "" if committed else "; its group is not even committed"
        self.add(
            "wgmma-registers-before-wait",
            f"{self.thread(thread)} uses {name}\n    at {place_of(instruction)}\n  which is {what} of a matrix "
            f"multiplication that its warp has not waited for{missing}\n    at {place_of(before)}",
            instruction,
            before,
        )

    def wgmma_not_fenced(self, thread: int, name: str, instruction: Any, before: Any) -> None:
        """Registers of a wgmma were used since the latest wgmma.fence, or there was none."""
        since = f"  and its register {name} was used since the latest one\n    at {place_of(before)}"
        self.add(
            "wgmma-fence-missing",
            f"{self.thread(thread)} issues a matrix multiplication\n    at {place_of(instruction)}\n"
            + (since if before is not None else "  and there is no wgmma.fence since what its registers were used for"),
            instruction,
            *([before] if before is not None else []),
        )

    # Global memory

    def global_pair(
        self,
        thread: int,
        earlier: int,
        address: int,
        nbytes: int,
        instruction: Any,
        before: Any,
        action: str,
        by: str,
        copy: Copy | None,
        fenced: bool,
        whole: int = 0,
    ) -> None:
        """Two accesses of global memory by threads of the grid that nothing orders, or (`fenced`) no proxy fence.

        `whole` are the bytes of all of the later one, where it is a copy.
        """
        threads = self.machine.threads
        mine, other = thread // threads, earlier // threads
        if fenced:
            identifier, order = (
                "global-proxy-fence-missing",
                "ordered, but with no proxy fence for global memory between",
            )
        else:
            order = "and nothing orders the two"
            if mine == other:
                if copy is not None and by == "write":
                    identifier = "stores-write-same-bytes" if action == "async write" else "store-not-waited"
                else:
                    identifier = "global-memory-race"
            elif "write" in action and by == "write":
                identifier = "blocks-write-same-bytes"
            else:
                identifier = "blocks-read-unordered"
        past = {"read": "read", "write": "wrote"}[by]
        if copy is not None:
            past = "started a copy that reads" if by == "read" else "started a copy that writes"
        bytes_ = f"{whole} B of global memory, among them {nbytes} B" if whole else f"{nbytes} B of global memory"
        self.add(
            identifier,
            f"{self.thread_of_grid(thread)} {_DOING[action]} {bytes_} at {address:#x} "
            f"({self.machine.memory.nearest(address)})\n    at {place_of(instruction)}\n"
            f"  after {self.thread_of_grid(earlier)} {past} it, {order}\n    at {place_of(before)}",
            instruction,
            before,
        )

    # One access

    def unwritten(self, bad: Any, threads: Any, pieces: Any, instruction: Any) -> None:
        """Reads of bytes that nobody has written."""
        at = int(np.argmax(bad))
        size = self.tracker.shadow.piece
        self.add(
            "uninitialised-shared-read",
            f"{self.thread(int(threads[at]))} reads {self.shared(int(pieces[at]) * size, size)}, which nobody has "
            f"written\n    at {place_of(instruction)}",
            instruction,
        )

    def unwritten_source(self, span: slice, thread: int, origin: Any) -> None:
        """A copy out of bytes none of which anybody has written."""
        size = self.tracker.shadow.piece
        self.add(
            "uninitialised-shared-read",
            f"{self.thread(thread)} copies from {self.shared(span.start * size, (span.stop - span.start) * size)}, of "
            f"which nobody has written anything\n    at {place_of(origin)}",
            origin,
        )

    # mbarriers

    def more_bytes(self, word: BarrierWord, slot: int, copy: Any, arrival: Any) -> None:
        """Copies deliver more than was promised."""
        word.wrong[slot] = True
        what = (
            f"copies of {word.issued[slot]} B signal {self.barrier(word, slot)} in a phase that expects "
            f"{word.expected[slot]} B"
        )
        places = [i for i in (copy, arrival) if i is not None]
        name = "more-bytes-than-expected" if word.expected[slot] else "copy-without-expect-tx"
        self.add(name, what + "".join(f"\n    at {place_of(i)}" for i in places), *places)

    def early_copy(self, word: BarrierWord, slot: int, thread: int, origin: Any) -> None:
        """A copy whose bytes may count for an earlier phase than meant."""
        word.wrong[slot] = True
        self.add(
            "more-bytes-than-expected",
            f"{self.thread(thread)} starts a copy that signals {self.barrier(word, slot)} and is not ordered after the "
            f"end of the preceding phase: its bytes may count for that one\n    at {place_of(origin)}",
            origin,
        )

    def too_many(self, word: BarrierWord, slot: int, thread: int, instruction: Any) -> None:
        """An arrival that may come into a phase that is full."""
        arrivals = int(self.machine.barrier_memory.words[slot * self.tracker._row + word.word]) >> 20 & 0xFFFFF
        self.add(
            "too-many-arrivals",
            f"{self.thread(thread)} arrives at {self.barrier(word, slot)}, whose phase has all of its {arrivals} "
            f"arrival{'s' * (arrivals != 1)} without it, and has not waited for the end of the phase\n"
            f"    at {place_of(instruction)}\n  initialised at {place_of(word.init_instruction)}",
            instruction,
            word.init_instruction,
        )

    def phase_missed(self, word: BarrierWord, slot: int, thread: int, instruction: Any) -> None:
        """A waiter that the barrier may run two phases ahead of."""
        self.add(
            "phase-missed",
            f"{self.thread(thread)} waits for one phase of {self.barrier(word, slot)} after the other, and the next "
            f"one may complete before it has seen this one\n    at {place_of(instruction)}",
            instruction,
        )

    def used_before_init(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any) -> None:
        """A use that nothing orders after mbarrier.init."""
        slot, thread = int(slots[0]), int(threads[0])
        self.add(
            "barrier-used-before-init",
            f"{self.thread(thread)} uses {self.barrier(word, slot)}\n    at {place_of(instruction)}\n"
            f"  and nothing orders that after {self.thread(int(word.init_thread[slot]))} initialised it\n"
            f"    at {place_of(word.init_instruction)}",
            instruction,
            word.init_instruction,
        )

    def init_not_fenced(self, word: BarrierWord, slot: int, thread: int, origin: Any, remote: bool) -> None:
        """The copy engine gets a barrier whose init no fence followed."""
        if remote and word.published[slot]:
            remote = False
        self.add(
            "mbarrier-init-not-fenced",
            f"{self.thread(thread)} starts a copy that signals {self.barrier(word, slot)}\n    at {place_of(origin)}\n"
            f"  and no fence followed its initialisation\n    at {place_of(word.init_instruction)}",
            origin,
            word.init_instruction,
            severity="error" if remote else "warning",
        )

    def reinitialised(self, word: BarrierWord, slots: Any, threads: Any, instruction: Any) -> None:
        """mbarrier.init on a barrier that somebody still uses, or may use."""
        clocks, words = self.tracker.clocks, self.machine.barrier_memory.words
        for slot, thread in zip(slots.tolist(), threads.tolist(), strict=True):
            value = int(words[slot * self.tracker._row + word.word])
            partial = (value & 0xFFFFF) != (value >> 20 & 0xFFFFF) or bool(value >> 40 & 0x3FFFFF)
            steps = slice(0, clocks.cluster_threads)
            behind = word.plane.sum[slot][steps] > clocks.row(int(clocks.known[thread]))[steps]
            block = slice(slot * self.machine.threads, (slot + 1) * self.machine.threads)
            own = clocks.column[block]
            seen = np.where(word.seen_phases[block] >= 0, word.seen_step[block], 0)
            behind[own] |= seen > clocks.row(int(clocks.known[thread]))[own]
            behind[clocks.column[thread]] = False
            place = slot * self.tracker.row_words + word.word
            waited = any(w.timeout and (w.data[0] == place).any() for w in self.machine.scheduler.waits)
            partial |= waited
            if partial or behind.any():
                self.add(
                    "barrier-reinitialised-in-use",
                    f"{self.thread(thread)} initialises {self.barrier(word, slot)} again, "
                    + ("in the middle of a phase" if partial else "not ordered after the arrivals of other threads")
                    + f"\n    at {place_of(instruction)}\n  first at {place_of(word.init_instruction)}",
                    instruction,
                    word.init_instruction,
                )
                return

    def by_every_lane(self, word: BarrierWord, targets: tuple[int, ...], start: int, thread: int, origin: Any) -> None:
        """Several lanes start the same copy with one instruction."""
        word.wrong[list(targets)] = True
        place = self.shared(targets[0] * self.machine.shared_stride + start)
        self.add(
            "copy-issued-by-every-lane",
            f"{self.thread(thread)} starts the copy to {place} that another lane of its instruction has started "
            f"already\n    at {place_of(origin)}",
            origin,
        )

    def peer_not_started(self, thread: int, slot: int, instruction: Any) -> None:
        """An access to the shared memory of a block that may not run yet."""
        self.add(
            "remote-access-before-peer-starts",
            f"{self.thread(thread)} uses the shared memory of block {self.machine.block_name(slot)}, and nothing says "
            f"that this block has started\n    at {place_of(instruction)}",
            instruction,
        )

    def swizzled(self, thread: int, start: int, pattern: int, origin: Any) -> None:
        """A swizzled tile that does not begin where the pattern does."""
        slot = thread // self.machine.threads
        self.add(
            "swizzled-tile-misaligned",
            f"the swizzled tile at {self.shared(slot * self.machine.shared_stride + start)} begins {start % pattern} B "
            f"past a multiple of {pattern} B\n    at {place_of(origin)}",
            origin,
        )

    def map_not_acquired(self, thread: int, address: int, instruction: Any, changed: Any, acquired: bool) -> None:
        """A copy with a tensor map in global memory without the fences that it takes."""
        text = f"{self.thread(thread)} starts a copy with the tensor map at {address:#x} in global memory\n"
        text += f"    at {place_of(instruction)}\n  and no thread of its block has acquired it"
        if changed is not None:
            what = "acquired this change of it, released by the thread that made it" if acquired else "acquired it"
            text = text.replace("acquired it", what) + f" since it was changed\n    at {place_of(changed)}"
        self.add(
            "tensor-map-not-acquired" if changed is None else "tensor-map-changed-without-fence",
            text,
            instruction,
            *([changed] if changed is not None else []),
        )

    def no_receiver(self, word: BarrierWord, slot: int, thread: int, origin: Any) -> None:
        """A copy into a block whose barrier is not there."""
        self.add(
            "multicast-without-receiver-barrier",
            f"{self.thread(thread)} copies into block {self.machine.block_name(slot)}, where there is no "
            f"{self.machine.mbarrier_place(8 * word.word)}\n    at {place_of(origin)}",
            origin,
        )

    def divergent(self, key: tuple[int, int, int], first: Any, second: Any) -> None:
        """Lanes of a warp at one barrier by two instructions."""
        slot, warp, name = key
        self.add(
            "divergent-barrier",
            f"lanes of warp {warp} of block {self.machine.block_name(slot)} come to barrier {name} at two places\n"
            f"    at {place_of(first)}\n    at {place_of(second)}",
            second,
            first,
        )

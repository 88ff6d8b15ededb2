"""What shows at the end: of a block (copies and accesses that outlive it), of a wave, and of a launch that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Deadlock, Misaligned, OutOfBounds, SimError
from ..mbarrier import TOO_MANY, is_initialised, unpack
from ..report import place_of
from .clocks import CP_ASYNC

if TYPE_CHECKING:
    from .messages import Reporter
    from .tracker import Tracker

_REGISTER_FILE = 1 << 16


class Ends:
    """Things that must be over, or add up, when a block exits."""

    def __init__(self, tracker: Tracker) -> None:
        machine = tracker.machine
        self.tracker = tracker
        self.report: Reporter = tracker.report
        self.machine = machine
        self.plane = tracker.clocks.plane(machine.slots)
        # (block whose shared memory is used, column) -> (value that its threads must know, instruction, issuing thread)
        self.copies: dict[tuple[int, int], tuple[int, Any, int]] = {}
        self.accesses: dict[tuple[int, int], tuple[int, Any, int]] = {}
        # Each thread's latest group with a cp.async, counted from 1, and the number of its instruction.
        self.cp_async_groups, self.cp_async_by = np.zeros((2, machine.slots * machine.threads), np.int32)
        self.registers: dict[int, np.ndarray] = {}
        self.changed_by: dict[int, Any] = {}

    def copy(self, slot: int, column: int, value: int, origin: Any, thread: int) -> None:
        """A copy uses the block's shared memory until `column` comes to `value`."""
        self.copies[slot, column] = (value, origin, thread)

    def cp_async(self, threads: np.ndarray, groups: np.ndarray, origin: Any) -> None:
        """Threads start cp.async copies in these groups."""
        self.cp_async_groups[threads] = groups + 1
        self.cp_async_by[threads] = self.tracker.number(origin)

    def remote(self, slots: np.ndarray, threads: np.ndarray, instruction: Any) -> None:
        """Threads use the shared memory of other blocks."""
        clocks = self.tracker.clocks
        steps = clocks.own[0, threads]
        for slot, thread, column, step in zip(
            slots.tolist(), threads.tolist(), clocks.column[threads].tolist(), steps.tolist(), strict=True
        ):
            self.accesses[slot, column] = (step, instruction, thread)

    def exited(self, slots: np.ndarray, threads: np.ndarray) -> None:
        """Threads exit: what they know, their block knows at its end."""
        self.tracker.clocks.release(self.plane, slots, threads)

    def wave_ended(self) -> None:
        """All blocks of the wave have exited."""
        machine, known = self.machine, self.plane.sum
        for (slot, column), (value, origin, thread) in self.copies.items():
            if known[slot, column] >= value:
                continue
            word = self.tracker.word_of(column, slot)
            if word is not None and word.wrong[slot]:
                continue
            remote = thread // machine.threads != slot
            self.report.add(
                "peer-exited-before-remote-access" if remote else "exit-with-copies-in-flight",
                f"{self.report.thread(thread)} starts a copy that uses the shared memory of block "
                f"{machine.block_name(slot)}, and no thread of that block waits for it before the block exits\n"
                f"    at {place_of(origin)}",
                origin,
            )
        for (slot, column), (step, instruction, thread) in self.accesses.items():
            if known[slot, column] < step:
                self.report.add(
                    "peer-exited-before-remote-access",
                    f"{self.report.thread(thread)} uses the shared memory of block {machine.block_name(slot)}, which "
                    f"may have exited by then\n    at {place_of(instruction)}",
                    instruction,
                )
        self._check_cp_async()
        self.check_registers()

    def _check_cp_async(self) -> None:
        """Who exits must have waited for its copies, or have given them to an mbarrier that somebody waited for."""
        threads = np.nonzero(self.cp_async_groups)[0]
        if not threads.size:
            return
        clocks = self.tracker.clocks
        known = self.plane.sum[threads // self.machine.threads, clocks.columns_of(CP_ASYNC, threads)]
        late = threads[known < self.cp_async_groups[threads]]
        for number in np.unique(self.cp_async_by[late]).tolist():
            thread = int(late[self.cp_async_by[late] == number][0])
            origin = self.tracker.instructions[number]
            self.report.add(
                "cp-async-in-flight-at-exit",
                f"{self.report.thread(thread)} exits with a cp.async in flight that nobody of its block has waited "
                f"for\n    at {place_of(origin)}",
                origin,
            )

    # setmaxnreg

    def registers_changed(self, slots: np.ndarray, threads: np.ndarray, instruction: Any) -> None:
        """Warps ask for another number of registers a thread."""
        launched = self._registers_at_launch()
        if launched is None:
            return
        for slot in np.unique(slots).tolist():
            if slot not in self.registers:
                self.registers[slot] = np.full(self.machine.warps, launched)
            self.registers[slot][np.unique(threads[slots == slot] >> 5)] = instruction.operands[0].value
            self.changed_by[slot] = instruction

    def _registers_at_launch(self) -> int | None:
        """Registers a thread, as far as the directives say; None if setmaxnreg has no effect without them."""
        directives = self.machine.function.directives
        if "maxnreg" in directives:
            return int(directives["maxnreg"][0])
        threads = directives.get("reqntid") or directives.get("maxntid")
        if not threads:
            return None
        blocks = int((directives.get("minnctapersm") or (1,))[0])
        return min(255, _REGISTER_FILE // (int(np.prod(threads)) * max(blocks, 1)) // 8 * 8)

    def check_registers(self) -> None:
        """What the warps of a block have asked for last must fit into what the block was launched with."""
        launched = self._registers_at_launch()
        for slot, wanted in self.registers.items():
            pool = 32 * self.machine.warps * launched
            if 32 * int(wanted.sum()) > pool:
                counts = ", ".join(
                    f"{n} warps × {r}" for r, n in zip(*np.unique(wanted, return_counts=True), strict=True)
                )
                instruction = self.changed_by[slot]
                self.report.add(
                    "register-pool-overrun",
                    f"the warps of block {self.machine.block_name(slot)} ask for {32 * int(wanted.sum())} registers "
                    f"({counts}, × 32 lanes); it was launched with {pool} ({launched} a thread)\n"
                    f"    at {place_of(instruction)}",
                    instruction,
                )
                return

    # A launch that fails

    def failed(self, error: SimError) -> None:
        """Name the hazard behind an error, where it has a name."""
        self.check_registers()
        text = error.message
        if isinstance(error, Deadlock):
            self._deadlock()
        elif isinstance(error, Misaligned):
            name = "bulk-size-not-multiple-of-16" if "size " in text and "16 B" in text else "shared-misaligned"
            if name != "shared-misaligned" or "shared" in text or "mbarrier" in text:
                self._named(name, error)
        elif isinstance(error, OutOfBounds) and "shared" in text:
            self._named("shared-out-of-bounds", error)
        elif "is not initialised" in text:
            self._named("barrier-used-before-init", error)
        elif TOO_MANY in text:
            wrong = next((h for h in self.machine.hazards if h.identifier == "wait-on-wrong-parity"), None)
            if wrong is None:
                self._named("too-many-arrivals", error)
            else:
                at = f" at {wrong.locations[0]}" if wrong.locations else ""
                error.message = f"a wait with the wrong parity{at} passed at once, and so there came {text}"

    def _named(self, identifier: str, error: SimError) -> None:
        if all(hazard.identifier != identifier for hazard in self.machine.hazards):
            where = f"\n    at {place_of(error.instruction)}" if error.instruction is not None else ""
            self.report.add(identifier, f"{error.message}{where}", *([error.instruction] if error.instruction else []))

    def _deadlock(self) -> None:
        machine, tracker = self.machine, self.tracker
        others = False
        for wait in machine.scheduler.waits:
            if not wait.timeout:
                continue
            others = True
            index, parity = (np.broadcast_to(array, (wait.fragment.n,)) for array in wait.data)
            threads = tracker.threads_of(wait.fragment)
            for place in np.unique(index).tolist():
                lane = int(np.argmax(index == place))
                self._stuck(place, int(parity[lane]), int(threads[lane]), wait.fragment.block.end_instruction)
        if others or machine.engine.outstanding():
            return
        for wait in machine.scheduler.waits:
            texts = wait.describe(wait.fragment, wait.data)
            if texts and texts[0].startswith("waits at barrier"):
                instruction = wait.fragment.block.end_instruction
                self.report.add(
                    "divergent-barrier",
                    f"{machine.lane_name(wait.fragment, 0)} {texts[0]}\n    at {place_of(instruction)}",
                    instruction,
                )

    def _stuck(self, place: int, parity: int, thread: int, instruction: Any) -> None:
        """A thread that waits for ever at an mbarrier."""
        tracker, machine = self.tracker, self.machine
        slot, name = divmod(place, tracker.row_words)
        value = int(machine.barrier_memory.words[place])
        if not is_initialised(value):
            return
        word = tracker.word(name)
        phase, tx, arrivals, pending = unpack(value)
        where = self.report.barrier(word, slot)
        waits = f"{self.report.thread(thread)} waits for ever at {where}\n    at {place_of(instruction)}\n  "
        if word.wrong[slot]:
            return
        if pending and slot in word.bare_expect:
            expect = word.bare_expect[slot]
            self.report.add(
                "expect-tx-without-arrive",
                f"{waits}{pending} of {arrivals} arrivals are missing; bytes were promised without an arrival\n"
                f"    at {place_of(expect)}",
                instruction,
                expect,
            )
        elif tx > 0 and not pending:
            self.report.add(
                "fewer-bytes-than-expected",
                f"{waits}the phase expects {word.expected[slot]} B, copies of {word.issued[slot]} B were started",
                instruction,
            )
        elif tx == 0 and pending == arrivals and phase == parity and word.phases[slot]:
            seen = int(word.seen_phases[thread])
            behind = int(word.phases[slot]) - max(seen, 0)
            block = slice(slot * machine.threads, (slot + 1) * machine.threads)
            others = word.seen_phases[block] == word.phases[slot]
            if behind == 1 and (seen < 0 or not others.any()):
                self.report.add(
                    "wait-on-wrong-parity",
                    f"{waits}it asks for parity {parity}, the phase now under way; the phase that is complete has "
                    f"parity {parity ^ 1}",
                    instruction,
                )
            elif behind >= 2:
                self.report.phase_missed(word, slot, thread, instruction)

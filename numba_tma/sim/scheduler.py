"""Which fragment runs next, what waits for what, and how it ends.

Order. The fragment furthest behind in the program runs first, so that lanes meet again after a branch. That
alone would starve lanes that another one waits for in a loop, so each turn has a budget: blocks cost 1, blocks
that look for another thread's progress (volatile loads, atomics, test_wait) far more, and a fragment that has
spent its budget becomes one step more *tired*; the least tired run first. The other orders of warps (schedules.py)
part a wave into groups that do not merge: the lowest group that can run does, or the highest, or any of them for a
turn of random length.

Waiting. A fragment that cannot go on is parked as a `Wait`, with a test that says for each lane whether it can. When
everything it waits for has come the fragment goes on whole; when nothing else can run, the lanes that can go
on leave the others. When none can, the copy engine moves what is in flight; when nothing is, waits that may time
out (try_wait) return false; and when that changes nothing either, it is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Deadlock, SimError, StepLimit
from .fragment import Fragment, merge, reroot
from .program import BUDGET
from .schedules import DESCENDING, RANDOM

if TYPE_CHECKING:
    from .machine import Machine
    from .program import Block

# Rounds in which only polling fragments used up their turns and nothing changed: then it is a deadlock.
STALE_TURNS = 150
# How often a stalled machine lets waits time out before it gives up.
TIMEOUTS = 16
NANOSECONDS_PER_TIMEOUT = 1_000_000


class Wait:
    """A parked fragment.

    `test(fragment, data)` gives one truth value or one for each lane; `data` are arrays of one element or one for
    each lane that go with the lanes when the fragment is split. `finish(fragment, passed)` sets results.
    `describe(fragment, data)` gives for each lane what it waits for, as text, for the deadlock report.
    """

    __slots__ = ("data", "describe", "finish", "fragment", "test", "timeout")

    def __init__(
        self,
        fragment: Fragment,
        test: Callable[[Fragment, tuple], np.ndarray],
        data: tuple[np.ndarray, ...],
        describe: Callable[[Fragment, tuple], list[str]],
        finish: Callable[[Fragment, bool], None] | None = None,
        timeout: bool = False,
    ) -> None:
        self.fragment = fragment
        self.test = test
        self.data = data
        self.describe = describe
        self.finish = finish
        self.timeout = timeout


class Scheduler:
    """Runs one wave of blocks to its end."""

    def __init__(self, machine: Machine, root_block: Block, max_steps: int) -> None:
        self.machine = machine
        self._random = machine.warp_order == RANDOM
        self._backwards = machine.warp_order == DESCENDING
        self.ready: dict[tuple, Fragment] = {}
        self.waits: list[Wait] = []
        # Fragments at a warp collective whose warps are not complete yet.
        self.gathering: dict[tuple, Fragment] = {}
        self.max_steps = max_steps
        self.live = 0
        # Counts what waits may depend on: barrier phases, copies, exits.
        self.events = 0
        self._seen_events = 0
        # Counts what a polling thread may be looking for as well: stores.
        self.progress = 0
        self._seen_progress = -1
        self._stale = 0.0
        self._timeouts = 0
        self._best: tuple | None = None
        self._stack_live: dict[tuple, int] = {(): 0}

    # Fragments

    def live_registers(self, block: Block, stack: tuple) -> int:
        """The registers that lanes at `block` with that call stack can still read."""
        below = self._stack_live.get(stack)
        if below is None:
            below = 0
            for pc in stack:
                below |= self.machine.program.blocks[pc].next.live_in
            self._stack_live[stack] = below
        return block.live_in | below

    def add(self, fragment: Fragment) -> None:
        """Make a fragment ready; it joins the one of its group that is at the same place, if there is one."""
        key = (fragment.group, *fragment.stack, fragment.block.pc)
        other = self.ready.get(key)
        if other is not None:
            fragment = merge([other, fragment], self.live_registers(fragment.block, fragment.stack))
        self.ready[key] = fragment
        self._best = None

    def _pick(self) -> Fragment:
        ready = self.ready
        if len(ready) == 1:
            key, fragment = ready.popitem()
        elif self._random:
            fragment = ready.pop(list(ready)[int(self.machine.rng.integers(len(ready)))])
        else:
            key = min(ready, key=lambda k: self._rank(ready[k].tired, k))
            fragment = ready.pop(key)
        self._best = None
        return fragment

    def _rank(self, tired: float, key: tuple) -> tuple:
        """The lowest runs first."""
        return (tired, tuple([-part for part in key]) if self._backwards else key)

    def _is_next(self, fragment: Fragment, key: tuple) -> bool:
        """Whether a running fragment goes on although others are ready."""
        if self._random:
            return True
        best = self._best
        if best is None:
            best = self._best = min(self._rank(other.tired, k) for k, other in self.ready.items())
        return self._rank(fragment.tired, key) <= best

    def split(self, fragment: Fragment, mask: np.ndarray, taken: Block, other: Block) -> None:
        """Lanes where `mask` is set go to `taken`, the rest to `other`."""
        fragment.flush(self.live_registers(taken, fragment.stack) | other.live_in)
        self.add(fragment.subset(np.nonzero(mask)[0], taken))
        self.add(fragment.subset(np.nonzero(~mask)[0], other))

    def spread(self, fragment: Fragment, choice: np.ndarray, targets: list[Block]) -> None:
        """Each lane goes to `targets[choice]`."""
        live = 0
        for target in targets:
            live |= self.live_registers(target, fragment.stack)
        fragment.flush(live)
        for index in np.unique(choice):
            self.add(fragment.subset(np.nonzero(choice == index)[0], targets[int(index)]))

    def exit(self, fragment: Fragment) -> None:
        """The fragment's lanes are done."""
        self.live -= fragment.n
        self.progress += 1
        self.events += 1
        self.machine.lanes_exited(fragment)
        if self.gathering:
            # Lanes that have exited are not waited for: let every collective look again.
            waiting, self.gathering = self.gathering, {}
            for other in waiting.values():
                self.add(other)

    def refresh(self, fragment: Fragment) -> None:
        """A fragment that comes back from waiting is as tired as the least tired of the ready ones."""
        fragment.tired = min((other.tired for other in self.ready.values()), default=0)

    def park(self, wait: Wait) -> None:
        """Let a fragment wait; its lanes go on, some or all, when the test says so."""
        self.waits.append(wait)
        self.events += 1

    def gather(self, fragment: Fragment) -> None:
        """Let a fragment wait for the rest of its warps to come to the same collective."""
        # Whatever their groups: those of one warp or warpgroup have to meet.
        key = (*fragment.stack, fragment.block.pc)
        other = self.gathering.pop(key, None)
        if other is None:
            self.gathering[key] = fragment
        else:
            # Together they may be complete: the collective looks again.
            self.add(merge([other, fragment], self.live_registers(fragment.block, fragment.stack)))

    # Running

    def run(self) -> None:
        """Run until every lane has exited."""
        while True:
            if self.ready:
                self.machine.pump(False)
                if self.machine.steps > self.max_steps:
                    self._give_up()
                fragment = self._pick()
                if fragment.lanes is not None and fragment.n == self.live:
                    reroot(fragment, self.live_registers(fragment.block, fragment.stack))
                    self.machine.program.fill(fragment.root)
                try:
                    self._turn(fragment)
                except SimError as error:
                    raise error.at(self._instruction)  # noqa: B904 - the same error, completed
                except Exception as error:
                    raise SimError(
                        f"the simulator itself failed: {type(error).__name__}: {error}", self._instruction
                    ) from error
            elif self.live == 0:
                return
            else:
                self._idle()
            if self.events != self._seen_events:
                self._wake()

    def _turn(self, fragment: Fragment) -> None:
        """Run one fragment until it waits, splits, exits, falls behind nobody or has spent its budget."""
        machine = self.machine
        block = fragment.block
        ready = self.ready
        # At random, turns from very short to a whole one.
        budget = allowed = 1 << int(machine.rng.integers(BUDGET.bit_length())) if self._random else BUDGET
        warps = machine.warp_count(fragment)
        recorder = machine.recorder
        while True:
            values = fragment.values
            index = -1
            try:
                for index, op in enumerate(block.ops):  # noqa: B007 - tells where an error happened
                    op(values, fragment)
                index = -1
                count = block.count
                machine.steps += count
                machine.instructions += count * warps
                machine.lane_instructions += count * fragment.n
                fragment.dirty |= block.writes
                following = block.end(fragment, block)
            except Exception:
                self._instruction = block.instructions[index] if index >= 0 else block.end_instruction
                fragment.block = block
                raise
            if recorder is not None and (following is not None or not block.alone):
                recorder.executed(fragment, block)
            if following is None:
                self._stale = 0.0
                return
            budget -= block.cost
            block = following
            if self.events != self._seen_events:
                fragment.block = block
                self._wake()
            if ready:
                fragment.block = block
                key = (fragment.group, *fragment.stack, block.pc)
                if key in ready:
                    other = ready.pop(key)
                    self._best = None
                    fragment = merge([other, fragment], self.live_registers(block, fragment.stack))
                    if fragment.lanes is not None and fragment.n == self.live:
                        reroot(fragment, self.live_registers(block, fragment.stack))
                        machine.program.fill(fragment.root)
                    warps = machine.warp_count(fragment)
                if ready and not self._is_next(fragment, key):
                    self.add(fragment)
                    return
            if budget <= 0:
                fragment.block = block
                fragment.tired += allowed / BUDGET
                self.add(fragment)
                self._spent(allowed / BUDGET)
                return

    _instruction: Any = None

    def _give_up(self) -> None:
        raise StepLimit(
            f"the kernel is not done after {self.machine.steps} steps; if it is no endless loop, raise max_steps",
            self.machine.report_waits(self),
        )

    def _spent(self, share: float) -> None:
        """After a turn whose fragment can still run but has spent its budget, a share of a whole one."""
        machine = self.machine
        if self.progress != self._seen_progress:
            self._seen_progress = self.progress
            self._stale = 0.0
            return
        self._stale += share
        machine.clock_ns += int(1000 * share)
        if machine.pump(True) or self._let_ready_lanes_go():
            self._stale = 0.0
        elif self._stale > STALE_TURNS * (1 + len(self.ready)) and all(
            fragment.tired > STALE_TURNS // 2 for fragment in self.ready.values()
        ):
            raise Deadlock(
                "deadlock: threads poll for a change that no other thread is left to make" + machine.residency_note(),
                machine.report_waits(self),
            )

    # Waiting

    def _wake(self) -> None:
        """Let fragments go on whose lanes can all go on."""
        self._seen_events = self.events
        if not self.waits:
            return
        waiting, self.waits = self.waits, []
        for wait in waiting:
            passed = wait.test(wait.fragment, wait.data)
            if passed.all():
                self._resume(wait, True)
            else:
                self.waits.append(wait)

    def _resume(self, wait: Wait, passed: bool) -> None:
        fragment = wait.fragment
        block = fragment.block
        if wait.finish is not None:
            wait.finish(fragment, passed)
        if self.machine.recorder is not None:
            self.machine.recorder.executed(fragment, block)
        fragment.dirty |= block.writes
        fragment.block = block.next
        self.refresh(fragment)
        self.add(fragment)

    def _let_ready_lanes_go(self) -> bool:
        """Split waiting fragments of which some lanes can go on."""
        waiting, self.waits = self.waits, []
        found = False
        for wait in waiting:
            fragment = wait.fragment
            passed = wait.test(fragment, wait.data)
            if not passed.any():
                self.waits.append(wait)
                continue
            found = True
            if passed.all():
                self._resume(wait, True)
                continue
            fragment.flush(self.live_registers(fragment.block, fragment.stack))
            for mask, goes in ((passed, True), (~passed, False)):
                positions = np.nonzero(mask)[0]
                part = fragment.subset(positions, fragment.block)
                data = tuple(d if d.size == 1 else d.take(positions) for d in wait.data)
                piece = Wait(part, wait.test, data, wait.describe, wait.finish, wait.timeout)
                if goes:
                    self._resume(piece, True)
                else:
                    self.waits.append(piece)
        return found

    def _idle(self) -> None:
        """Nobody can run: move data, split waiters, time out, or give up."""
        machine = self.machine
        if machine.pump(True):
            self.events += 1
            self._timeouts = 0
            return
        if self._let_ready_lanes_go():
            return
        if self.progress != self._seen_progress:
            self._seen_progress = self.progress
            self._timeouts = 0
        if self._timeouts < TIMEOUTS and any(wait.timeout for wait in self.waits):
            self._timeouts += 1
            machine.clock_ns += NANOSECONDS_PER_TIMEOUT
            waiting, self.waits = self.waits, []
            for wait in waiting:
                if wait.timeout:
                    self._resume(wait, False)
                else:
                    self.waits.append(wait)
            return
        raise Deadlock(
            f"deadlock: {self.live} threads wait and nothing is left that could wake them" + machine.residency_note(),
            machine.report_waits(self),
        )

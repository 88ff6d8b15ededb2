"""wgmma: what it reads of shared memory and when, and the registers that are its own until it is waited for.

A warpgroup's groups are a column of the clocks. What its four warps knew when they issued an operation, a thread knows
once it has waited for the group: the operation could not be done before all of them had issued it. A warp reads the
rows of A that it computes, and all of B. Registers are watched warp by warp.
Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .clocks import IS_ORDINARY, STEPS, WGMMA
from .shadow import WARPGROUPS, stamps, unpack

if TYPE_CHECKING:
    from ..fragment import Fragment
    from ..watch import RegisterUse
    from .tracker import Tracker

_WARPS = 4
# Groups of a warpgroup whose issue is remembered.
_GROUPS = 8
_ACCUMULATOR, _MULTIPLICAND = 1, 2


class _Registers:
    """For each warp and watched register: the latest ordinary access, and the latest wgmma that it belongs to."""

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self._places: dict[int, int] = {}
        self.touched = np.zeros((warps, 0), np.int32)
        self.touched_by = np.zeros((warps, 0), np.int32)
        self.group = np.zeros((warps, 0), np.int32)
        self.issued = np.zeros((warps, 0), np.int32)
        self.issued_by = np.zeros((warps, 0), np.int32)
        self.role = np.zeros((warps, 0), np.int8)

    def places(self, numbers: list[int]) -> np.ndarray:
        """Where registers are, by number."""
        for number in numbers:
            self._places.setdefault(number, len(self._places))
        missing = len(self._places) - self.touched.shape[1]
        if missing > 0:
            for name, table in vars(self).items():
                if isinstance(table, np.ndarray):
                    more = np.zeros((self.warps, missing + 64), table.dtype)
                    setattr(self, name, np.concatenate((table, more), axis=1))
        return np.array([self._places[number] for number in numbers], np.int64)

    def move(self, warps: np.ndarray, source: int, target: int) -> None:
        """A register becomes another one."""
        for table in vars(self).values():
            if isinstance(table, np.ndarray):
                table[warps, target] = table[warps, source]


class Multiplications:
    """One wave's wgmma operations."""

    def __init__(self, tracker: Tracker) -> None:
        machine = tracker.machine
        self.tracker, self.machine, self.clocks = tracker, machine, tracker.clocks
        self.report = tracker.report
        self.warpgroups = -(-machine.threads // (32 * _WARPS))
        count = machine.slots * self.warpgroups
        self._plane = self.clocks.plane(count)
        self._rows = self.clocks.held(count * _GROUPS)
        # By thread: groups committed. By warp: groups waited for, and when the latest wgmma.fence was.
        self.committed = np.zeros(machine.slots * machine.threads, np.int32)
        self._waited = np.zeros(machine.slots * machine.warps, np.int32)
        self._fenced = np.zeros(machine.slots * machine.warps, np.int32)
        self._now = 0
        self._registers = _Registers(machine.slots * machine.warps)
        self._state: tuple[Any, ...] = ()

    # Threads

    def _warps(self, fragment: Fragment) -> tuple[np.ndarray, np.ndarray]:
        """The fragment's warps, and the position of a lane of each."""
        found = fragment.cache.get("hazard warps")
        if found is None:
            warps = fragment.slot * self.machine.warps + (fragment.thread >> 5)
            found = fragment.cache["hazard warps"] = np.unique(warps, return_index=True)
        return found

    def _warpgroups(self, fragment: Fragment) -> np.ndarray:
        """Each lane's warpgroup."""
        found = fragment.cache.get("hazard warpgroups")
        if found is None:
            found = fragment.slot * self.warpgroups + fragment.thread // (32 * _WARPS)
            fragment.cache["hazard warpgroups"] = found
        return found

    # Registers

    def registers_used(self, fragment: Fragment, use: RegisterUse) -> None:
        """An instruction other than wgmma uses registers."""
        self._now += 1
        table = self._registers
        warps, first = self._warps(fragment)
        reads, writes = table.places(use.reads), table.places(use.writes)
        places = np.concatenate((reads, writes))
        pending = table.group[warps[:, None], places] > self._waited[warps][:, None]
        if use.renames:
            pending[:, 0] = False
        if pending.any():
            warp, register = np.argwhere(pending)[0].tolist()
            number = (use.reads + use.writes)[register]
            self._used_early(fragment, first[warp], warps[warp], places[register], number, use.instruction)
        if use.moves:
            # Another name for the same: assemblers make no instruction of it.
            table.move(warps, int(reads[0]), int(writes[0]))
        elif not use.clears:
            # Compilers place constants right before wgmma, behind the fence, and assemblers know what to do with them.
            table.touched[warps[:, None], places] = self._now
            table.touched_by[warps[:, None], places] = self.tracker.number(use.instruction)

    def _used_early(self, fragment: Fragment, lane: int, warp: int, place: int, number: int, instruction: Any) -> None:
        table = self._registers
        before = self.tracker.instructions[int(table.issued_by[warp, place])]
        group = int(table.group[warp, place])
        thread = int(self.tracker.threads_of(fragment)[lane])
        self.report.registers_before_wait(
            thread,
            self.machine.program.name_of(number),
            instruction,
            before,
            accumulator=bool(table.role[warp, place] == _ACCUMULATOR),
            committed=bool(self.committed[thread] >= group),
        )

    def _check_registers(
        self, fragment: Fragment, instruction: Any, accumulators: list[int], multiplicand: list[int]
    ) -> None:
        table = self._registers
        self._now += 1
        warps, first = self._warps(fragment)
        fenced, waited = self._fenced[warps][:, None], self._waited[warps][:, None]
        group = self.committed[self.tracker.threads_of(fragment)[first]] + 1
        for numbers, role in ((accumulators, _ACCUMULATOR), (multiplicand, _MULTIPLICAND)):
            if not numbers:
                continue
            places = table.places(numbers)
            at = warps[:, None], places
            # Ordinary accesses since the fence; what another shape of wgmma accumulated into is no better.
            late = (table.touched[at] > fenced) | (fenced == 0)
            number = self.tracker.number(instruction)
            other = (table.group[at] > 0) & (table.issued[at] > fenced)
            if other.any():
                same = (table.role[at] == role) & self._same_shape(table.issued_by[at], instruction)
                pending = other & (table.group[at] > waited) & (table.role[at] != role)
                if pending.any():
                    warp, register = np.argwhere(pending)[0].tolist()
                    self._used_early(
                        fragment, first[warp], warps[warp], places[register], numbers[register], instruction
                    )
                late |= other & ~same & ~pending
            if late.any():
                warp, register = np.argwhere(late)[0].tolist()
                by = max(table.touched[warps[warp], places[register]], 0) > fenced[warp, 0]
                culprit = table.touched_by[warps[warp], places[register]] if by else 0
                self.report.wgmma_not_fenced(
                    int(self.tracker.threads_of(fragment)[first[warp]]),
                    self.machine.program.name_of(numbers[register]),
                    instruction,
                    self.tracker.instructions[int(culprit)],
                )
            table.group[at] = group[:, None]
            table.issued[at], table.issued_by[at], table.role[at] = self._now, number, role

    def _same_shape(self, numbers: np.ndarray, instruction: Any) -> np.ndarray:
        """Whether instructions, by number, are wgmma of the same shape and type of accumulator."""
        shape = instruction.modifiers[3:5]
        found, inverse = np.unique(numbers, return_inverse=True)
        same = [number > 0 and self.tracker.instructions[number].modifiers[3:5] == shape for number in found.tolist()]
        return np.array(same)[inverse.reshape(numbers.shape)]

    # Operations

    def ordered(self, fragment: Fragment, what: str, pending: int) -> None:
        """wgmma.fence, commit_group or wait_group."""
        threads = self.tracker.threads_of(fragment)
        if what == "commit_group":
            self.committed[threads] += 1
            return
        warps, first = self._warps(fragment)
        self._now += 1
        if what == "fence":
            self._fenced[warps] = self._now
            return
        clocks = self.clocks
        done = np.maximum(self.committed[threads] - pending, 0)
        self._waited[warps] = np.maximum(self._waited[warps], done[first])
        clocks.columns_of(WGMMA, threads)
        some = np.nonzero(done > clocks.own[WGMMA, threads])[0]
        if some.size:
            mine = threads[some]
            clocks.own[WGMMA, mine] = done[some]
            clocks.clean()
            clocks.acquire(mine, self._rows[self._warpgroups(fragment)[some] * _GROUPS + done[some] % _GROUPS])

    def issued(
        self,
        fragment: Fragment,
        instruction: Any,
        accumulators: list[int],
        multiplicand: list[int],
        reads: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Warpgroups issue an operation."""
        self._check_registers(fragment, instruction, accumulators, multiplicand)
        clocks, tracker = self.clocks, self.tracker
        threads = tracker.threads_of(fragment)
        clocks.clean()
        # Lanes lie warp by warp: the first of each.
        leaders = threads[::32].reshape(-1, _WARPS)
        group = self.committed[leaders[:, 0]] + 1
        operands = [self._pieces(units, which, len(reads) == 2 and i == 0) for i, (units, which) in enumerate(reads)]
        if not all(self._check(pieces, leaders, instruction, report=False) for pieces in operands):
            # All lanes of a warp come to it together: what one knows, the warp knows.
            clocks.meet(fragment.slot * self.machine.warps + (fragment.thread >> 5), threads)
            for pieces in operands:
                self._check(pieces, leaders, instruction, report=True)
        self._mark(operands, leaders, group, tracker.number(instruction))
        self._remember(fragment, threads, group)

    def _pieces(self, units: np.ndarray, which: np.ndarray, by_warp: bool) -> np.ndarray:
        """Pieces of the shadow that each warpgroup's warps read: (warpgroups, 4 or 1, pieces); 1: all of them alike."""
        if by_warp:
            # K-major, (64 rows, 2) units; M-major, (K, 8): eight rows each.
            along = units.transpose(0, 2, 1) if units.shape[2] != 2 else units
            units = along.reshape(len(units), _WARPS, -1)
        else:
            units = units.reshape(len(units), 1, -1)
        units = units[which] if len(units) > 1 or which.size > 1 else units
        self.tracker.shadow.cut(16)
        each = 16 // self.tracker.shadow.piece
        return units if each == 1 else (units[..., None] * each + np.arange(each)).reshape(*units.shape[:2], -1)

    def _check(self, pieces: np.ndarray, leaders: np.ndarray, instruction: Any, report: bool) -> bool:
        """Whether what is read was written before, for all warps that read it."""
        tracker, clocks, shadow = self.tracker, self.clocks, self.tracker.shadow
        written = shadow.written.take(pieces)
        change = np.ones(written.shape, np.bool_)
        np.not_equal(written[..., 1:], written[..., :-1], out=change[..., 1:])
        group, part, at = np.nonzero(change & (written != 0))
        if not at.size:
            if report:
                tracker.report.unwritten(np.ones(1, np.bool_), leaders[0], pieces[0, 0], instruction)
            return False
        last, place = written[group, part, at], pieces[group, part, at]
        if pieces.shape[1] == 1:
            # Every warp of the warpgroup reads it.
            last, place = np.repeat(last, _WARPS), np.repeat(place, _WARPS)
            who = leaders[group].reshape(-1)
        else:
            who = leaders[group, part]
        columns, values, _ = unpack(last)
        good = clocks.knows(who, columns, values)
        kind = clocks.kind[columns]
        ordinary = np.nonzero(good & IS_ORDINARY[kind] & (values > 0))[0]
        unfenced = np.zeros(good.size, np.bool_)
        if ordinary.size:
            part = clocks.parts.shared
            unfenced[ordinary] = ~clocks.knows(who[ordinary], columns[ordinary], values[ordinary], part)
        if report:
            if not good.all():
                tracker.report.race(last, ~good, who, place, instruction, "wgmma read", "write")
            if unfenced.any():
                tracker.report.unfenced(last, unfenced, who, place, instruction, "wgmma read", "write")
        return bool(good.all() and not unfenced.any())

    def _mark(self, operands: list[np.ndarray], leaders: np.ndarray, group: np.ndarray, number: int) -> None:
        """Note who reads."""
        shadow = self.tracker.shadow
        columns = self.clocks.columns_of(WGMMA, leaders[:, 0])
        stamp = stamps(columns, group, number)
        rows = leaders[:, 0] % self.machine.threads // (32 * _WARPS) % WARPGROUPS + shadow.warpgroup
        shadow.in_use[rows] = 1
        for pieces in operands:
            flat = pieces.reshape(len(pieces), -1)
            shadow.read[rows[:, None], flat] = stamp[:, None]

    def _remember(self, fragment: Fragment, threads: np.ndarray, group: np.ndarray) -> None:
        """What the warps know now, who waits for the group will know."""
        clocks = self.clocks

        def state() -> tuple[np.ndarray, ...]:
            return clocks.known[threads], clocks.own[STEPS, threads], group, np.array(clocks.cleaned)

        same = self._state[:1] == (fragment,)
        if same and all(np.array_equal(a, b) for a, b in zip(state(), self._state[1:], strict=True)):
            return
        warpgroups = self._warpgroups(fragment)
        clocks.release(self._plane, warpgroups, threads)
        clocks.complete(self._plane, warpgroups[::128])
        self._rows[warpgroups[::128] * _GROUPS + group % _GROUPS] = self._plane.done[warpgroups[::128]]
        self._state = (fragment, *state())


__all__ = ["Multiplications"]

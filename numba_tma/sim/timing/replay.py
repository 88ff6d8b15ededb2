"""Plays what the warps did against the clock of one SM (of one SM for each block of a cluster).

Warps are taken in the order of their time, so that what they share serves them as they come. A warp goes on until it
waits for a phase of a barrier that is not complete; what completes the phase gives it its time. Everything else is
known when it is asked for: a copy's arrival, say, follows from when it was issued and what was queued before it.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..access import LOCAL, SHARED
from . import regions as code
from .device import Device
from .model import Stall, WarpTime
from .occupancy import Plan
from .ops import Op, late_latency
from .parts import Memory, Scheduler, Server, Timeline
from .record import Access, Copy, Phase, Trace
from .regions import Operation, Regions, noted

_SECTOR = 32
_NOTHING = Access(SHARED, 1)


@dataclass(eq=False)
class _Barrier:
    """One phase of a barrier: how much is still to contribute, when it completes, who waits for it."""

    key: tuple
    missing: int
    first: float = float("inf")
    time: float = 0.0
    by: str = ""
    waiting: list[tuple[_Warp, Op]] = field(default_factory=list)


class _Warp:
    """A warp on its way through its trace."""

    __slots__ = (
        "action",
        "begun",
        "bulk",
        "coming",
        "copies",
        "done",
        "first_copy",
        "first_wgmma",
        "now",
        "open_bulk",
        "open_copies",
        "open_wgmma",
        "operand_a",
        "position",
        "regions",
        "row",
        "run",
        "scheduler",
        "sm",
        "started",
        "trace",
        "waits",
        "wgmma",
    )

    def __init__(self, trace: Trace, regions: list, sm: _Multiprocessor, row: str) -> None:
        self.trace = trace
        self.regions = regions
        self.sm = sm
        self.scheduler = sm.schedulers[trace.warp % len(sm.schedulers)]
        self.row = row
        self.position = 0
        self.action = 0
        self.now = self.started = self.begun = 0.0
        # When the region's operations are done, and what they wait on; registers that are still to come.
        self.done: list[tuple[float, str, Op | None]] = []
        self.coming: dict[tuple, tuple[float, str, Op | None]] = {}
        # Groups of asynchronous operations: when each is done (bulk: read, written).
        self.copies: list[float] = []
        self.open_copies = self.first_copy = 0.0
        self.bulk: list[tuple[float, float]] = []
        self.open_bulk = (0.0, 0.0)
        self.wgmma: list[float] = []
        self.open_wgmma = self.first_wgmma = 0.0
        self.operand_a = ""
        self.run = 0.0
        self.waits: Counter[str] = Counter()


class _Multiprocessor:
    """An SM's parts."""

    def __init__(self, device: Device, plan: Plan, stretch: float, timeline: Timeline, row: str) -> None:
        self.row = row
        self.schedulers = [Scheduler(timeline, f"{row}/scheduler {i}") for i in range(device.schedulers)]
        self.shared = Server(timeline, f"{row}/shared memory")
        self.engine = Server(timeline, f"{row}/copy engine")
        self.memory = Memory(device, plan.share, plan.active, stretch, timeline, row)
        # Starts of blocks, and arrivals at block barriers, one after the other.
        self.starts = Server(timeline)
        self.arrivals = Server(timeline)
        self.last_store = 0.0


class Replay:
    """One run of the model. `run` plays it to its end."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        stretch: float,
        traces: Iterable[Trace],
        needed: Counter[Phase],
        missing: Callable[[Any], float],
        regions: Regions,
        spilled: float,
        timeline: Timeline,
        name_of: Callable[[tuple], str],
        place_of: Callable[[Any], str],
    ) -> None:
        self._device = device
        self._plan = plan
        self._missing = missing
        self._spilled = spilled
        self._timeline = timeline
        self._name_of = name_of
        self._place_of = place_of
        self._needed = needed
        self._barriers: dict[Phase, _Barrier] = {}
        self._stalls: Counter[tuple[str, str, str]] = Counter()
        size = len(plan.units[0])
        self._sms = [_Multiprocessor(device, plan, stretch, timeline, f"SM {i}") for i in range(size)]
        self._warps: dict[int, list[_Warp]] = defaultdict(list)
        for trace in traces:
            sm = self._sms[trace.block % size]
            row = f"{sm.row}/block {trace.block}/warp {trace.warp}"
            self._warps[trace.block].append(_Warp(trace, regions.of(trace), sm, row))
        self._queue: list[tuple[float, int, _Warp]] = []
        self._order = 0
        self._waiting_units = list(reversed(plan.units))
        self._left: dict[int, int] = {}
        self.unit_ends: list[float] = []
        self.times: list[WarpTime] = []
        self.clocks: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.unfinished = 0
        self._handlers: dict[str, Callable[[_Warp, Op, Any], bool]] = {
            "load": self._load,
            "atomic": self._atomic,
            "reduction": self._store,
            "store": self._store,
            "long": self._long,
            "mma": self._mma,
            "wgmma": self._wgmma,
            "wgmma commit": self._wgmma_commit,
            "wgmma wait": self._wgmma_wait,
            "copy": self._copy,
            "bulk commit": self._bulk_commit,
            "bulk wait": self._bulk_wait,
            "cp.async": self._cp_async,
            "cp.async commit": self._cp_async_commit,
            "cp.async wait": self._cp_async_wait,
            "cp.async arrive": self._cp_async_arrive,
            "block barrier": self._barrier,
            "block arrive": self._arrive,
            "cluster arrive": self._arrive,
            "cluster wait": self._await,
            "mbarrier arrive": self._arrive,
            "mbarrier wait": self._await,
            "warp barrier": self._constant("warp"),
            "mbarrier": self._constant("mbarrier_arrive"),
            "fence": self._fence,
            "clock": self._clock,
        }

    # Warps in time

    def run(self) -> float:
        """Play all; the cycles that it took."""
        for _ in range(self._plan.resident):
            self._begin_unit(0.0)
        while True:
            while self._queue:
                time, _, warp = heapq.heappop(self._queue)
                warp.now = time
                self._go_on(warp)
            stuck = [b for b in self._barriers.values() if b.waiting]
            if not stuck:
                break
            # What they wait for came from blocks that are not played: they go on as if it had come.
            self.unfinished += 1
            for barrier in stuck:
                self._complete(barrier, max(barrier.time, max(warp.now for warp, _ in barrier.waiting)))
        for sm in self._sms:
            for part in (sm.shared, sm.engine, sm.memory.port, sm.memory.memory, sm.memory.stores):
                part.flush()
            for scheduler in sm.schedulers:
                scheduler.tensor.flush()
        return max(max(self.unit_ends, default=0.0), *(sm.last_store for sm in self._sms))

    def _begin_unit(self, time: float) -> None:
        if not self._waiting_units:
            return
        unit = self._waiting_units.pop()
        self._left[unit[0]] = sum(len(self._warps[block]) for block in unit)
        interval = self._device.block_interval * self._plan.active
        for block in unit:
            begin = self._sms[block % len(self._sms)].starts.serve(time, interval)
            for warp in self._warps[block]:
                warp.now = warp.started = warp.begun = begin
                self._push(warp)

    def _end_warp(self, warp: _Warp) -> None:
        self._note_run(warp)
        self.times.append(WarpTime(warp.row, warp.started, warp.now, warp.run, dict(warp.waits)))
        unit = warp.trace.block // len(self._sms) * len(self._sms)
        self._left[unit] -= 1
        if not self._left[unit]:
            self.unit_ends.append(warp.now)
            self._begin_unit(warp.now + self._device.block_start)

    def _push(self, warp: _Warp) -> None:
        self._order += 1
        heapq.heappush(self._queue, (warp.now, self._order, warp))

    def _go_on(self, warp: _Warp) -> None:
        """Let a warp act until another one's turn has come, it waits for a barrier, or it is done."""
        queue = self._queue
        run = warp.scheduler.run
        while warp.position < len(warp.regions):
            region, start = warp.regions[warp.position]
            if not warp.action:
                warp.done = [(0.0, "", None)] * len(region.operations)
            actions = region.actions
            while warp.action < len(actions):
                if queue and warp.now > queue[0][0]:
                    self._push(warp)
                    return
                action = actions[warp.action]
                what = action[0]
                warp.action += 1
                if what == code.RUN:
                    _, slots, cycles, pipes = action
                    end = run(warp.now, slots, cycles, pipes)
                    late = end - warp.now - cycles
                    if late > 0:
                        warp.waits["scheduler"] += late
                    warp.run += cycles
                    warp.now = end
                elif what == code.PERFORM:
                    operation = region.operations[action[1]]
                    note = noted(operation, warp.trace.entries, start)
                    if not self._perform(warp, operation, action[1], note):
                        return
                elif what == code.WAIT:
                    for number in action[1]:
                        self._wait(warp, warp.done[number])
                elif what == code.WAIT_REGISTER:
                    if action[1] in warp.coming:
                        self._wait(warp, warp.coming.pop(action[1]))
                else:
                    _, name, numbers, names = action
                    coming = [warp.done[n] for n in numbers] + [warp.coming[n] for n in names if n in warp.coming]
                    if coming:
                        warp.coming[name] = max(coming, key=lambda result: result[0])
            warp.position += 1
            warp.action = 0
        self._end_warp(warp)

    def _perform(self, warp: _Warp, operation: Operation, number: int, note: Any) -> bool:
        """Whether the warp can go on."""
        handler = self._handlers.get(operation.op.kind)
        if handler is None:
            return True
        self._number = number
        return handler(warp, operation.op, note)

    def _result(self, warp: _Warp, time: float, what: str, op: Op) -> bool:
        warp.done[self._number] = (time, what, op)
        return True

    # Waiting

    def _wait(self, warp: _Warp, result: tuple[float, str, Op | None]) -> None:
        time, what, op = result
        if time > warp.now:
            self._stall(warp, time, what, op, "")

    def _stall(self, warp: _Warp, until: float, reason: str, op: Op | None, on: str) -> None:
        """The warp waits until then."""
        cycles = until - warp.now
        if cycles <= 0:
            return
        self._note_run(warp)
        warp.waits[reason] += cycles
        place = self._place_of(op.instruction) if op is not None else ""
        self._stalls[reason, place, on] += cycles
        detail = " ".join(filter(None, (reason, f"at {place}" if place else "", f"on {on}" if on else "")))
        self._timeline.add(warp.row, warp.now, until, "wait", detail)
        warp.now = warp.begun = until

    def _note_run(self, warp: _Warp) -> None:
        self._timeline.add(warp.row, warp.begun, warp.now, "run")
        warp.begun = warp.now

    # Barriers

    def _phase(self, phase: Phase) -> _Barrier:
        found = self._barriers.get(phase)
        if found is None:
            found = self._barriers[phase] = _Barrier(phase.key, self._needed.get(phase, 0))
        return found

    def _contribute(self, phase: Phase, time: float, by: str) -> None:
        barrier = self._phase(phase)
        barrier.missing -= 1
        barrier.first = min(barrier.first, time)
        if time >= barrier.time:
            barrier.time, barrier.by = time, by
        if barrier.missing == 0:
            self._timeline.add(self._barrier_row(phase.key), barrier.first, barrier.time, "phase", barrier.by)
            self._complete(barrier, barrier.time)

    def _barrier_row(self, key: tuple) -> str:
        if key[0] == "cluster":
            return f"cluster {key[1]}/barrier"
        sm = self._sms[key[1] % len(self._sms)]
        return f"{sm.row}/block {key[1]}/{self._name_of(key)}"

    def _complete(self, barrier: _Barrier, time: float) -> None:
        barrier.missing, barrier.time = 0, time
        waiting, barrier.waiting = barrier.waiting, []
        for warp, op in waiting:
            self._pass(warp, op, barrier)
            self._push(warp)

    def _pass(self, warp: _Warp, op: Op, barrier: _Barrier) -> None:
        """The warp goes on after a barrier's phase."""
        costs = self._device.barriers
        kind = op.kind
        if kind == "mbarrier wait":
            on = f"{self._name_of(barrier.key)}, completed by {barrier.by}"
            self._stall(warp, barrier.time + costs["mbarrier_wake"], "mbarrier", op, on)
        elif kind == "block barrier":
            self._stall(warp, barrier.time + costs["block"], "block barrier", op, barrier.by)
        else:
            self._stall(warp, barrier.time + costs["cluster"], "cluster barrier", op, barrier.by)

    def _await(self, warp: _Warp, op: Op, note: Any) -> bool:
        costs = self._device.barriers
        if op.kind == "mbarrier wait":
            warp.now += costs["mbarrier_try"]
            warp.run += costs["mbarrier_try"]
        for phase in note or ():
            if phase.number < 0:
                continue
            barrier = self._phase(phase)
            if barrier.missing > 0:
                barrier.waiting.append((warp, op))
                return False
            self._pass(warp, op, barrier)
        return True

    def _arrive(self, warp: _Warp, op: Op, note: Any) -> bool:
        late = self._device.barriers["mbarrier_arrive"] if op.kind == "mbarrier arrive" else 0.0
        for phase in note or ():
            self._contribute(phase, warp.now + late, self._by(warp, op))
        return True

    def _by(self, warp: _Warp, op: Op) -> str:
        return f"warp {warp.trace.warp} at {self._place_of(op.instruction)}"

    def _barrier(self, warp: _Warp, op: Op, note: Any) -> bool:
        for phase in note or ():
            barrier = self._phase(phase)
            arrived = warp.sm.arrivals.serve(warp.now, self._device.barriers["block_warp"])
            if barrier.missing > 1:
                barrier.waiting.append((warp, op))
                self._contribute(phase, arrived, self._by(warp, op))
                return False
            self._contribute(phase, arrived, self._by(warp, op))
            self._pass(warp, op, barrier)
        return True

    def _constant(self, name: str) -> Callable[[_Warp, Op, Any], bool]:
        def act(warp: _Warp, op: Op, note: Any) -> bool:
            cycles = self._device.barriers[name]
            warp.now += cycles
            warp.run += cycles
            return True

        return act

    def _clock(self, warp: _Warp, op: Op, note: Any) -> bool:
        self.clocks[warp.trace.block, warp.trace.warp].append(warp.now)
        return True

    def _fence(self, warp: _Warp, op: Op, note: Any) -> bool:
        modifiers = op.instruction.modifiers
        costs = self._device.barriers
        if "proxy" in modifiers:
            cycles = costs["fence_async"]
        elif "cta" in modifiers or "mbarrier_init" in modifiers:
            cycles = costs["fence_block"]
        else:
            cycles = costs["fence_device"]
        self._stall(warp, warp.now + cycles, "fence", op, "")
        return True

    # Memory

    def _issue(self, warp: _Warp, wavefronts: float) -> float:
        """When the pipe that leads to shared memory and L1 is done with an access. The warp waits while it is full."""
        device = self._device
        pipe = warp.sm.shared
        full = pipe.free - device.load_queue * device.shared_wavefront
        if full > warp.now:
            self._stall(warp, full, "memory pipe", None, "")
        return pipe.serve(warp.now, wavefronts * device.shared_wavefront)

    def _load(self, warp: _Warp, op: Op, note: Any) -> bool:
        device, access = self._device, note or _NOTHING
        latencies = device.latencies
        if access.kind == SHARED:
            end = self._issue(warp, max(access.cost, op.width // 4))
            latency = latencies["matrix" if op.instruction.opcode == "ldmatrix" else "shared"]
            if access.remote:
                latency = max(latency, latencies["remote"])
            return self._result(
                warp, max(warp.now + latency, end + latency - device.shared_wavefront), "shared memory", op
            )
        if access.kind == LOCAL:
            return self._result(warp, self._issue(warp, access.cost) + latencies["l1"], "local memory", op)
        end = self._issue(warp, max(access.cost * device.l1_line, _width(op.instruction)))
        if not access.sectors:
            return self._result(warp, end + latencies["l1"], "L1", op)
        part = self._missing(op.instruction)
        end = warp.sm.memory.load(end, _SECTOR * access.sectors, part, latencies["l2"])
        return self._result(warp, end, "global memory", op)

    def _atomic(self, warp: _Warp, op: Op, note: Any) -> bool:
        access = note or _NOTHING
        latencies = self._device.latencies
        end = self._issue(warp, access.cost)
        if access.kind == SHARED:
            return self._result(warp, end + latencies["shared_atomic"], "shared memory", op)
        end = warp.sm.memory.load(end, _SECTOR * access.sectors, self._missing(op.instruction), latencies["atomic"])
        return self._result(warp, end, "atomic", op)

    def _store(self, warp: _Warp, op: Op, note: Any) -> bool:
        access = note or _NOTHING
        if access.kind != SHARED and access.kind != LOCAL:
            end = self._issue(warp, max(access.cost * self._device.l1_line, _width(op.instruction)))
            go_on, written = warp.sm.memory.store(end, _SECTOR * access.sectors, self._spilled)
            warp.sm.last_store = max(warp.sm.last_store, written)
            self._stall(warp, go_on, "stores under way", op, "")
        else:
            self._issue(warp, max(access.cost, op.width // 4))
        return True

    def _long(self, warp: _Warp, op: Op, note: Any) -> bool:
        name = late_latency(op.instruction)
        start = warp.now if name == "xu" else self._issue(warp, 1) - self._device.shared_wavefront
        return self._result(warp, start + self._device.latencies[name], name, op)

    # Tensor cores

    def _mma(self, warp: _Warp, op: Op, note: Any) -> bool:
        device = self._device
        cycles = _macs(op.instruction) / device.tensor["mma_macs"]
        end = warp.scheduler.tensor.serve(warp.now, cycles)
        self._stall(warp, end - 2 * cycles, "tensor core", op, "earlier instructions")
        return self._result(warp, end - cycles + device.latencies["mma"], "tensor core", op)

    def _wgmma(self, warp: _Warp, op: Op, note: Any) -> bool:
        device = self._device
        macs, shared = _macs(op.instruction) / device.schedulers, _operand_bytes(op.instruction)
        cycles = max(macs / device.tensor["wgmma_macs"], shared / device.tensor["wgmma_shared"])
        end = warp.scheduler.tensor.serve(warp.now, cycles)
        if not warp.open_wgmma:
            warp.first_wgmma = end - cycles
            warp.operand_a = "registers" if _a_in_registers(op.instruction) else "shared memory"
        warp.open_wgmma = max(warp.open_wgmma, end + device.tensor["wgmma_latency"])
        return True

    def _wgmma_commit(self, warp: _Warp, op: Op, note: Any) -> bool:
        if warp.open_wgmma:
            row = f"{warp.sm.row}/block {warp.trace.block}/products"
            detail = f"wgmma group of {self._by(warp, op)}, A in {warp.operand_a}"
            done = warp.open_wgmma - self._device.tensor["wgmma_latency"]
            self._timeline.add(row, warp.first_wgmma, done, "product", detail)
        warp.wgmma.append(warp.open_wgmma)
        warp.open_wgmma = 0.0
        return True

    def _wgmma_wait(self, warp: _Warp, op: Op, note: Any) -> bool:
        pending = op.instruction.operands[0].value
        done = warp.wgmma[: len(warp.wgmma) - pending]
        self._stall(warp, max(done, default=0.0), "tensor core", op, "its wgmma groups")
        warp.wgmma = warp.wgmma[len(done) :]
        return True

    # Asynchronous copies

    def _copy(self, warp: _Warp, op: Op, note: Any) -> bool:
        for copy in note or ():
            if copy.kind == "store":
                self._copy_out(warp, op, copy)
            else:
                self._copy_in(warp, op, copy)
        return True

    def _engine(self, warp: _Warp, copy: Copy) -> tuple[float, float]:
        """When the engine begins with a copy, and when it has passed it on."""
        device = self._device
        cycles = max(copy.nbytes / device.copy_port, copy.rows * device.copy_row)
        end = warp.sm.engine.serve(warp.now, cycles)
        return end - cycles, end

    def _copy_in(self, warp: _Warp, op: Op, copy: Copy) -> None:
        device = self._device
        begin, end = self._engine(warp, copy)
        if copy.kind == "bulk_cluster":
            there = end + device.latencies["remote"]
        else:
            part = self._missing(op.instruction)
            arrived = warp.sm.memory.load(begin, copy.nbytes, part, device.latencies["l2"])
            there = max(end + device.latencies["l2"], arrived) + device.copy_latency
        by = f"the copy of {self._by(warp, op)}"
        to = self._name_of(copy.phases[0].key) if copy.phases else "nowhere"
        self._timeline.add(_copies_row(warp), warp.now, there, "flight", f"{copy.nbytes} bytes in, to {to}, {by}")
        for phase in copy.phases:
            self._contribute(phase, there, by)
        warp.now += device.copy_issue
        warp.run += device.copy_issue

    def _copy_out(self, warp: _Warp, op: Op, copy: Copy) -> None:
        device = self._device
        begin, end = self._engine(warp, copy)
        _, written = warp.sm.memory.store(begin, copy.nbytes, self._spilled)
        read = max(end, written) + device.copy_store_read
        written = max(end, written) + device.copy_store_write
        warp.sm.last_store = max(warp.sm.last_store, written)
        self._timeline.add(
            _copies_row(warp), warp.now, written, "flight", f"{copy.nbytes} bytes out, {self._by(warp, op)}"
        )
        warp.open_bulk = (max(warp.open_bulk[0], read), max(warp.open_bulk[1], written))

    def _bulk_commit(self, warp: _Warp, op: Op, note: Any) -> bool:
        warp.bulk.append(warp.open_bulk)
        warp.open_bulk = (0.0, 0.0)
        return True

    def _bulk_wait(self, warp: _Warp, op: Op, note: Any) -> bool:
        pending = op.instruction.operands[0].value
        read = "read" in op.instruction.modifiers
        done = warp.bulk[: len(warp.bulk) - pending]
        time = max((group[not read] for group in done), default=0.0)
        what = "its bulk groups' sources" if read else "its bulk groups"
        self._stall(warp, time, "bulk groups", op, what)
        if not read:
            warp.bulk = warp.bulk[len(done) :]
        return True

    def _cp_async(self, warp: _Warp, op: Op, note: Any) -> bool:
        access = note or _NOTHING
        device = self._device
        end = self._issue(warp, max(access.cost * device.l1_line, access.sectors * _SECTOR / 128))
        part = self._missing(op.instruction)
        there = warp.sm.memory.load(end, _SECTOR * access.sectors, part, device.latencies["l2"])
        if not warp.open_copies:
            warp.first_copy = warp.now
        warp.open_copies = max(warp.open_copies, there + device.copy_async_latency)
        return True

    def _cp_async_commit(self, warp: _Warp, op: Op, note: Any) -> bool:
        if warp.open_copies:
            detail = f"cp.async group of warp {warp.trace.warp}"
            self._timeline.add(_copies_row(warp), warp.first_copy, warp.open_copies, "flight", detail)
        warp.copies.append(warp.open_copies)
        warp.open_copies = 0.0
        return True

    def _cp_async_wait(self, warp: _Warp, op: Op, note: Any) -> bool:
        operands = op.instruction.operands
        if operands:
            done = warp.copies[: len(warp.copies) - operands[0].value]
        else:
            done = [*warp.copies, warp.open_copies]
        self._stall(warp, max(done, default=0.0), "cp.async groups", op, "its copies")
        warp.copies = warp.copies[len(done) :] if operands else []
        return True

    def _cp_async_arrive(self, warp: _Warp, op: Op, note: Any) -> bool:
        time = max([*warp.copies, warp.open_copies, warp.now])
        for phase in note or ():
            self._contribute(phase, time, f"cp.async copies of {self._by(warp, op)}")
        return True

    # Results

    def used(self, cycles: float) -> float:
        """How much of what all SMs share was asked for, of that which is asked for most."""
        return max(sm.memory.used(cycles) for sm in self._sms)

    def stalls(self) -> list[Stall]:
        """Who waited for whom, longest first."""
        total = sum(time.end - time.start for time in self.times) or 1.0
        return [
            Stall(reason, place, on, cycles, cycles / total)
            for (reason, place, on), cycles in self._stalls.most_common()
        ]

    def busy(self, cycles: float) -> dict[str, float]:
        """Shares of `cycles` that the parts were busy, as means over the SMs."""
        parts: dict[str, list[float]] = defaultdict(list)
        for sm in self._sms:
            issued = sum(scheduler.issued for scheduler in sm.schedulers) / len(sm.schedulers)
            tensor = sum(scheduler.tensor.busy for scheduler in sm.schedulers) / len(sm.schedulers)
            for name, value in (
                ("issue slots", issued),
                ("tensor cores", tensor),
                ("shared memory", sm.shared.busy),
                ("copy engine", sm.engine.busy),
                ("from L2", sm.memory.port.busy),
                ("from memory", sm.memory.memory.busy),
                ("to L2", sm.memory.stores.busy),
            ):
                parts[name].append(value)
        return {name: sum(values) / len(values) / max(cycles, 1.0) for name, values in parts.items()}


def _copies_row(warp: _Warp) -> str:
    return f"{warp.sm.row}/block {warp.trace.block}/copies"


def _width(instruction: Any) -> int:
    """Wavefronts at least for so many bytes a lane."""
    return {"v2": 2, "v4": 4}.get(next((m for m in instruction.modifiers if m in ("v2", "v4")), ""), 1)


def _shape(instruction: Any) -> tuple[int, int, int]:
    found = next(filter(None, (re.fullmatch(r"m(\d+)n(\d+)k(\d+)", m) for m in instruction.modifiers)))
    m, n, k = found.groups()
    return int(m), int(n), int(k)


_BITS = {"e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "tf32": 32, "b1": 1}


def _macs(instruction: Any) -> float:
    """Multiply-adds of an instruction, counted as of 16-bit operands."""
    m, n, k = _shape(instruction)
    bits = next((_BITS[t] for t in instruction.modifiers if t in _BITS), 16)
    return m * n * k * bits / 16


def _operand_bytes(instruction: Any) -> float:
    """Bytes that one wgmma reads from shared memory."""
    m, n, k = _shape(instruction)
    bits = next((_BITS[t] for t in instruction.modifiers if t in _BITS), 16)
    return (n + (0 if _a_in_registers(instruction) else m)) * k * bits / 8


def _a_in_registers(instruction: Any) -> bool:
    """Whether a wgmma's operand A is a list of registers, not a descriptor of shared memory."""
    return hasattr(instruction.operands[1], "elements")

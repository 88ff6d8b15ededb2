"""From the simulator's model of time to a timeline.

The model says when warps run and what they wait for, when copies are in flight and barriers complete. It knows every
end, and no marks. So a warp is taken to compute when it does not wait for copies, groups or barriers, from its first
wait for copies on; what it waits for on the way, such as shared memory, belongs to that, and so does issuing cp.async.
Where a block copies by its threads, it does so between two block barriers between which its warps wait for global
memory.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

from ..sim.timing import Interval as Modelled
from ..sim.timing import Model
from . import model
from .from_trace import SHORTEST_COMPUTE_NS, lanes_of
from .model import Block, Flow, Interval, Row, Timeline
from .overlap import Span, union, without

_OF_BLOCK = re.compile(r"SM (\d+)/block (\d+)/(.+)")
_OF_SM = re.compile(r"SM (\d+)/(.+)")
# Reasons of waits that are no part of computing: for copies, and for other warps.
_COPIES = ("mbarrier", "cp.async groups", "bulk groups")
_PRODUCTS = "its wgmma groups"
_OTHERS = ("block barrier", "cluster barrier")
_LOADS = "global memory"
_BY_WARP = re.compile(r"warp (\d+) at")
_PRODUCT = re.compile(r"wgmma group of warp (\d+) at (.*, A in .*)")
_GROUP = re.compile(r"cp\.async group of warp (\d+)")
# What a wait says of itself: "mbarrier at kernel.py:12 (mbarrier.try_wait) on mbarrier full[0], completed by …".
_WAIT = re.compile(r"(.+?)(?: at ([^()]*\([^()]*\)))?(?: on (.*))?")


def of_model(modelled: Model, title: str) -> Timeline:
    """The timeline of a launch that was modelled (`use_backend("sim", model=True)`; the report's `model`)."""
    device = f"modelled: {modelled.device}{', provisional constants' if modelled.provisional else ''}"
    timeline = Timeline(title, device, notes=list(modelled.notes), whole=modelled.played == modelled.blocks_per_sm)
    if modelled.truncated:
        timeline.notes.append("the model kept no more intervals: ModelOptions(intervals=…)")
    by_block: dict[tuple[int, int], dict[str, list[Modelled]]] = {}
    by_sm: dict[int, dict[str, list[Modelled]]] = {}
    for interval in sorted(modelled.intervals, key=lambda i: (i.start, i.end)):
        found = _OF_BLOCK.fullmatch(interval.row)
        if found:
            rows = by_block.setdefault((int(found[1]), int(found[2])), {})
            rows.setdefault(found[3], []).append(interval)
        elif shared := _OF_SM.fullmatch(interval.row):
            by_sm.setdefault(int(shared[1]), {}).setdefault(shared[2], []).append(interval)
    for (multiprocessor, number), rows in sorted(by_block.items(), key=lambda item: item[0][::-1]):
        _Adder(timeline, Block(number, multiprocessor), rows).add()
    for multiprocessor, rows in sorted(by_sm.items()):
        for name, intervals in sorted(rows.items()):
            if intervals[0].kind == "busy":
                row = Row(Block(None, multiprocessor), model.SM_ROW, name)
                timeline.rows.append(row)
                timeline.intervals += [Interval(row, i.start, i.end, model.BUSY, name) for i in intervals]
    return timeline


class _Adder:
    """Adds one block's rows, intervals and flows to a timeline."""

    def __init__(self, timeline: Timeline, block: Block, rows: dict[str, list[Modelled]]) -> None:
        self.timeline, self.block = timeline, block
        numbers = sorted(int(name.split()[1]) for name in rows if name.startswith("warp "))
        self.warps = {number: rows[f"warp {number}"] for number in numbers}
        self.phases = {name: own for name, own in rows.items() if own[0].kind == "phase"}
        self.flights = rows.get("copies", [])
        self.products = rows.get("products", [])
        every = [interval for own in self.warps.values() for interval in own]
        self.awaits_copies = any(_waits(interval, *_COPIES) for interval in every)
        self.start = min(interval.start for interval in every)
        self.warp_rows = {n: Row(block, model.WARP, f"warp {n}", self._role(n, own)) for n, own in self.warps.items()}

    def add(self) -> None:
        """Add it all: warps above, then copies, tensor cores and barriers."""
        self.timeline.rows += self.warp_rows.values()
        for number, intervals in self.warps.items():
            self._add_warp(self.warp_rows[number], intervals)
        copies = {name: own for name, own in self.phases.items() if _is_copy(own[-1])}
        for name, own in copies.items():
            row = Row(self.block, model.COPY_ROW, f"copies for {_short(name)}")
            self.timeline.rows.append(row)
            for i in own:
                self._put(row, (i.start, i.end), model.COPY, f"copy for {_short(name)}", i.detail)
        self._add_flights()
        self._add_products()
        for name, own in self.phases.items():
            if not name.startswith("barrier "):
                self._add_phases(name, own)
        self._add_flows(copies)

    def _put(self, row: Row, span: Span, kind: str, name: str, detail: str = "") -> None:
        self.timeline.intervals.append(Interval(row, *span, kind, name, detail))

    def _role(self, number: int, intervals: Sequence[Modelled]) -> str:
        issues = any(f"the copy of warp {number} at" in flight.detail for flight in self.flights)
        if any(_waits(interval, "mbarrier") and _is_copy(interval) for interval in intervals):
            return "issues, computes" if issues else "consumer"
        if issues:
            return "producer"
        return "copies, computes" if any(_waits(i, "cp.async groups", _LOADS) for i in intervals) else ""

    def _add_warp(self, row: Row, intervals: Sequence[Modelled]) -> None:
        busy: list[Span] = []
        met: list[Span] = []
        for interval in intervals:
            span = (interval.start, interval.end)
            reason, place, on = _told(interval)
            if _waits(interval, *_COPIES) or on == _PRODUCTS:
                busy.append(span)
                name = _short(on.split(",")[0]) if reason == "mbarrier" else reason
                self._put(row, span, model.WAIT, f"wait {name}", f"at {place}: {on}")
            elif _waits(interval, *_OTHERS):
                busy.append(span)
                met.append(span)
                self._put(row, span, model.BARRIER, reason, f"{on} came last" if on else "")
        for span in self._issues(row, intervals):
            busy.append(span)
            self._put(row, span, model.ISSUE, "issue")
        first, last = intervals[0].start, intervals[-1].end
        loads = [] if self.awaits_copies else _loading(intervals, met, first, last)
        for span in loads:
            self._put(row, span, model.LOAD, "load")
        since: float | None = first
        if self.awaits_copies and row.note:
            since = next((i.start for i in intervals if _waits(i, "mbarrier", "cp.async groups")), None)
        if since is None or row.note == "producer" or (self.awaits_copies and not row.note):
            return
        for span in without([(since, last)], union([*busy, *loads])):
            if span[1] - span[0] >= SHORTEST_COMPUTE_NS:
                self._put(row, span, model.COMPUTE, "compute")

    def _issues(self, row: Row, intervals: Sequence[Modelled]) -> list[Span]:
        """From when a warp goes on after a wait to when the copies are on their way that it then asks for."""
        by = re.compile(rf"\b{row.name} at\b")
        asked = [flight.start for flight in self.flights if by.search(flight.detail)]
        ends = [interval.end for interval in intervals if _waits(interval, *_COPIES, *_OTHERS)]
        found: dict[float, float] = {}
        for time in asked:
            place = bisect_right(ends, time)
            since = ends[place - 1] if place else intervals[0].start
            found[since] = max(found.get(since, since), time)
        return union(found.items())

    def _add_flights(self) -> None:
        """Copies that no mbarrier counts: groups of cp.async, and stores."""
        together: dict[int, list[Modelled]] = {}  # the warps' first, second, … groups are shown as one
        turns: dict[str, int] = {}
        for flight in self.flights:
            group = _GROUP.match(flight.detail)
            if group:
                turn = turns[group[1]] = turns.get(group[1], -1) + 1
                together.setdefault(turn, []).append(flight)
        groups = [(min(i.start for i in own), max(i.end for i in own)) for own in together.values()]
        stores = [(i.start, i.end) for i in self.flights if "bytes out" in i.detail]
        for kind, name, spans in ((model.COPY, "cp.async", groups), (model.STORE, "stores", stores)):
            lanes = lanes_of(spans)
            rows = [Row(self.block, model.COPY_ROW, f"{name} {lane}") for lane in range(max(lanes, default=-1) + 1)]
            self.timeline.rows += rows
            for number, (span, lane) in enumerate(zip(spans, lanes, strict=True)):
                self._put(rows[lane], span, kind, f"{name} {number}")

    def _add_products(self) -> None:
        """When the tensor core of a warpgroup's first warp is at its groups: the others' do the same."""
        rows: dict[int, Row] = {}
        turns: Counter[int] = Counter()
        for product in self.products:
            number, place = _PRODUCT.fullmatch(product.detail).groups()
            warp = int(number)
            if warp % 4:
                continue
            if warp not in rows:
                rows[warp] = Row(self.block, model.TENSOR_ROW, f"wgmma of warps {warp}-{warp + 3}")
            self._put(
                rows[warp], (product.start, product.end), model.TENSOR, f"wgmma group {turns[warp]}", f"at {place}"
            )
            turns[warp] += 1
        self.timeline.rows += [rows[warp] for warp in sorted(rows)]

    def _add_phases(self, name: str, phases: Sequence[Modelled]) -> None:
        row = Row(self.block, model.BARRIER_ROW, _short(name), "mbarrier")
        self.timeline.rows.append(row)
        start = self.start
        for turn, phase in enumerate(phases):
            self._put(row, (start, phase.end), model.PHASE, f"phase {turn}", f"parity {turn % 2}")
            start = phase.end

    def _add_flows(self, copies: Iterable[str]) -> None:
        """From what completed a barrier to those who waited for it."""
        ends = {name: [phase.end for phase in own] for name, own in self.phases.items()}
        for number, intervals in self.warps.items():
            for wait in intervals:
                name = self._barrier_of(wait)
                if name not in ends:
                    continue
                place = bisect_left(ends[name], wait.start)
                if place == len(ends[name]) or ends[name][place] > wait.end:
                    continue
                end = ends[name][place]
                if name in copies:
                    source, what = Row(self.block, model.COPY_ROW, f"copies for {_short(name)}"), "arrived"
                else:
                    by = _BY_WARP.search(self.phases[name][place].detail)
                    source = self.warp_rows.get(int(by[1])) if by else None
                    what = name if name.startswith("barrier ") else f"arrived at {_short(name)}"
                if source is not None and source != self.warp_rows[number]:
                    self.timeline.flows.append(Flow(source, end, self.warp_rows[number], wait.end, what))

    def _barrier_of(self, wait: Modelled) -> str:
        on = _told(wait)[2]
        if _waits(wait, "mbarrier"):
            return on.split(",")[0]
        if _waits(wait, "block barrier"):
            for name, phases in self.phases.items():
                if name.startswith("barrier ") and any(p.detail == on and p.end <= wait.end for p in phases):
                    return name
        return ""


def _told(interval: Modelled) -> tuple[str, str, str]:
    """Reason, place and object of a wait."""
    if interval.kind != "wait":
        return "", "", ""
    reason, place, on = _WAIT.fullmatch(interval.detail).groups("")
    return reason, place, on


def _waits(interval: Modelled, *reasons: str) -> bool:
    return _told(interval)[0] in reasons


def _is_copy(interval: Modelled) -> bool:
    """Whether a copy completed the phase, or the phase that was waited for."""
    return "the copy of" in interval.detail or "cp.async copies of" in interval.detail


def _short(name: str) -> str:
    return name.removeprefix("mbarrier ")


def _loading(intervals: Sequence[Modelled], met: Sequence[Span], first: float, last: float) -> list[Span]:
    """The stretches up to the end of a block barrier in which a warp waits for global memory."""
    waits = [interval.start for interval in intervals if _waits(interval, _LOADS)]
    stretches, start = [], first
    for _, end in met:
        if any(start <= wait < end for wait in waits):
            stretches.append((start, end))
        start = end
    return stretches

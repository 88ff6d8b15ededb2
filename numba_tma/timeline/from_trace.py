"""From what a traced launch wrote to a timeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..shared import Barriers, Shared
from ..trace.launched import TracedLaunch
from ..trace.records import Event, WarpTrace
from . import model
from .model import Block, Flow, Interval, Row, Timeline
from .overlap import Span, union, without

# A wait of at most so many nanoseconds found what it waited for there. On an H200 (1.98 GHz) it takes 23 to 27 to look
# at an mbarrier, and 3 at groups.
PASSED_NS = 35.0
PASSED_GROUPS_NS = 10.0
# Where a kernel marks no part "compute", a warp is taken to compute when it does nothing else for so long at least,
# from its first wait for a copy on. Where no warp of a block waits for copies, all of them are taken to.
SHORTEST_COMPUTE_NS = 100.0


def of_trace(launch: TracedLaunch) -> Timeline:
    """The timeline of a traced launch; waits for it to end.

    What a copy's completion is known from are the waits of warps: it is exact where one was waiting, and otherwise the
    latest possible (`Interval.seen`).
    """
    warps = launch.warps()
    marked = any(site.kind == "part" and site.name == "compute" for site in launch.instrumented.sites)
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    timeline = Timeline(launch.name, launch.device, notes=_notes(launch, warps))
    by_block: dict[int, list[WarpTrace]] = {}
    for warp in warps:
        by_block.setdefault(warp.block, []).append(warp)
    timeline.whole = len(by_block) == blocks
    for number, members in by_block.items():
        _BlockTimeline(timeline, Block(number, members[0].multiprocessor), members, launch.shared, marked).add()
    return timeline


def _notes(launch: TracedLaunch, warps: Sequence[WarpTrace]) -> list[str]:
    notes = []
    dropped = sum(warp.dropped for warp in warps)
    if dropped:
        notes.append(
            f"{dropped:,} records had no room ({launch.plan.capacity:,} a warp): what came later is missing; "
            f"take Trace(capacity=…)"
        )
    if launch.instrumented.unseen:
        notes.append(f"waits inside {', '.join(launch.instrumented.unseen)}, which are called, are not in the trace")
    return notes


@dataclass
class _Barrier:
    """What happened at one mbarrier of a block."""

    name: str
    waits: list[tuple[Event, Row]] = field(default_factory=list)
    issues: list[tuple[Event, Row]] = field(default_factory=list)
    arrivals: list[tuple[Event, Row]] = field(default_factory=list)


class _BlockTimeline:
    """Adds one block's rows, intervals and flows to a timeline."""

    def __init__(
        self, timeline: Timeline, block: Block, warps: Sequence[WarpTrace], shared: Shared | None, marked: bool
    ) -> None:
        self.timeline, self.block, self.warps, self.marked = timeline, block, warps, marked
        self.names = _barrier_names(shared, warps[0].shared_base)
        self.barriers: dict[int, _Barrier] = {}
        self.end = max(warp.end for warp in warps)
        self.meetings = _meetings(warps)
        self.copies_awaited = any(_waits_for_copies_since(warp) is not None for warp in warps)

    def add(self) -> None:
        """Add it all: warps above, then copies, tensor cores and barriers."""
        rows = []
        for warp in self.warps:
            row = Row(self.block, model.WARP, f"warp {warp.warp}", _role(warp))
            rows.append((row, warp))
            self.timeline.rows.append(row)
            for event in warp.events:
                self._note(event, row)
        for row, warp in rows:
            self._add_warp(row, warp)
        self._add_block_barriers([row for row, _ in rows])
        copies = [barrier for _, barrier in sorted(self.barriers.items()) if barrier.issues]
        for barrier in copies:
            self._add_copies(barrier)
        self._add_groups(rows)
        self._add_tensor_cores(rows)
        for _, barrier in sorted(self.barriers.items()):
            self._add_phases(barrier)

    def _note(self, event: Event, row: Row) -> None:
        kind = event.site.kind
        if kind not in ("mbarrier wait", "mbarrier arrive", "issue to mbarrier", "cp.async arrive"):
            return
        name = self.names.get(event.detail, f"mbarrier {event.detail:#x}")
        barrier = self.barriers.setdefault(event.detail, _Barrier(name))
        if kind == "mbarrier wait":
            barrier.waits.append((event, row))
        elif kind == "mbarrier arrive" or (kind == "issue to mbarrier" and event.site.count == 0):
            barrier.arrivals.append((event, row))
        else:
            barrier.issues.append((event, row))

    def _put(self, row: Row, span: Span, kind: str, name: str, detail: str = "", seen: bool = True) -> None:
        self.timeline.intervals.append(Interval(row, *span, kind, name, detail, seen))

    # Warps.

    def _add_warp(self, row: Row, warp: WarpTrace) -> None:
        busy: list[Span] = []
        computing: list[Span] = []
        for event in warp.events:
            span, kind = (event.start, event.end), event.site.kind
            if kind == "part":
                if event.site.name == "compute":
                    computing.append(span)
                else:
                    load = event.site.name == "load"
                    self._put(row, span, model.LOAD if load else model.PART, event.site.name)
                    if load:
                        busy.append(span)
                continue
            if kind in ("mark", "bulk commit"):
                if kind == "mark":
                    self._put(row, span, model.MARK, event.site.name, str(event.detail))
                continue
            if kind == "block barrier":
                continue
            what, name, detail = self._described(event)
            self._put(row, span, what, name, detail)
            if span[0] < span[1]:
                busy.append(span)
        met = [(event.start, meeting.end) for meeting in self.meetings for event in meeting.of(warp)]
        busy = union([*busy, *met])
        since = _waits_for_copies_since(warp) if self.copies_awaited else warp.start
        if not self.marked and since is not None:
            gaps = without([(since, warp.end)], busy)
            computing = [gap for gap in gaps if gap[1] - gap[0] >= SHORTEST_COMPUTE_NS]
        for span in without(union(computing), busy):
            self._put(row, span, model.COMPUTE, "compute")

    def _described(self, event: Event) -> tuple[str, str, str]:
        """Kind, name and detail of an event's interval."""
        site = event.site
        barrier = self.names.get(event.detail, f"mbarrier {event.detail:#x}")
        where = f"{site.name}" + (f" at {site.location.kernel_line}" if site.location else "")
        if site.kind == "mbarrier wait":
            return model.WAIT, f"wait {barrier}", where
        if site.kind == "mbarrier arrive":
            return model.MARK, f"arrive {barrier}", where
        if site.kind in ("issue to mbarrier", "cp.async arrive"):
            return model.ISSUE, f"issue to {barrier}", f"{max(site.count, 1)} copies: {where}"
        if site.kind == "issue in group":
            return model.ISSUE, "issue", f"{site.count} copies: {where}"
        if site.kind in ("cp.async commit", "wgmma commit"):
            return model.ISSUE, "issue a group", where
        if site.kind in ("cp.async wait", "bulk wait", "wgmma wait"):
            return model.WAIT, f"wait for all but {site.count} groups" if site.count else "wait for all groups", where
        if site.kind == "cluster barrier":
            return model.BARRIER, "cluster barrier", where
        if site.kind == "grid wait":
            return model.WAIT, "wait for the grid before", where
        return model.MARK, site.kind, where

    def _add_block_barriers(self, rows: Sequence[Row]) -> None:
        """Waits at block barriers, and for whom: the warp that came last."""
        by_warp = {warp.warp: row for warp, row in zip(self.warps, rows, strict=True)}
        for meeting in self.meetings:
            name, last = f"block barrier {meeting.number}", by_warp[meeting.last.warp]
            for warp, event in meeting.members:
                row = by_warp[warp.warp]
                detail = f"{last.name} came last" if row != last else ""
                self._put(row, (event.start, meeting.end), model.BARRIER, name, detail)
                if detail:
                    self.timeline.flows.append(Flow(last, meeting.end, row, meeting.end, name))

    # Copies.

    def _add_copies(self, barrier: _Barrier) -> None:
        """One interval for each time that the barrier's copies are asked for, and arrows to those who waited."""
        row = Row(self.block, model.COPY_ROW, f"copies for {barrier.name}")
        self.timeline.rows.append(row)
        waits = sorted(barrier.waits, key=lambda wait: wait[0].end)
        issues = deque(sorted(barrier.issues, key=lambda issue: issue[0].end))
        while issues:
            first, source = issues.popleft()
            last = first
            after = [wait for wait in waits if wait[0].end >= first.end]
            completed = after[0][0].end if after else self.end
            while issues and issues[0][0].start < completed:  # more copies for the same phase
                last, _ = issues.popleft()
                after = [wait for wait in waits if wait[0].end >= last.end]
                completed = after[0][0].end if after else self.end
            next_issue = issues[0][0].start if issues else float("inf")
            waiting = [
                (event, target)
                for event, target in after
                if event.end < next_issue and event.start < completed - PASSED_NS
            ]
            self._put(row, (first.start, completed), model.COPY, f"copy for {barrier.name}", "", bool(waiting))
            self.timeline.flows.append(Flow(source, first.end, row, first.end, "asked for"))
            self.timeline.flows += [Flow(row, completed, target, event.end, "arrived") for event, target in waiting]

    def _add_groups(self, rows: Sequence[tuple[Row, WarpTrace]]) -> None:
        """Copies in groups that warps wait for themselves: of cp.async, and of the copy engine out of shared memory.

        Every thread has its own groups of cp.async; the warps' first, second, … are shown as one.
        """
        together: dict[int, list[tuple[_Group, Row]]] = {}
        stores: list[list[tuple[_Group, Row]]] = []
        for source, warp in rows:
            for group in _groups(warp, "cp.async", self.end):
                together.setdefault(group.number, []).append((group, source))
            stores += [[(group, source)] for group in _groups(warp, "bulk", self.end)]
        self._put_groups(list(together.values()), model.COPY, "cp.async")
        self._put_groups(stores, model.STORE, "bulk stores")

    def _put_groups(self, groups: list[list[tuple[_Group, Row]]], kind: str, name: str) -> None:
        spans = [(min(g.start for g, _ in members), max(g.end for g, _ in members)) for members in groups]
        lanes = lanes_of(spans)
        in_use = self._rows_for(lanes, model.COPY_ROW, name)
        for members, span, lane in zip(groups, spans, lanes, strict=True):
            row, last = in_use[lane], max(members, key=lambda member: member[0].end)[0]
            self._put(row, span, kind, f"{name} group {last.number}", "", last.seen)
            for group, source in members:
                self.timeline.flows.append(Flow(source, group.issued, row, group.issued, "asked for"))
                if group.seen:
                    self.timeline.flows.append(Flow(row, group.end, source, group.end, "arrived"))

    def _rows_for(self, lanes: Sequence[int], kind: str, name: str) -> list[Row]:
        """A row for each lane."""
        rows = [Row(self.block, kind, f"{name} {lane}") for lane in range(max(lanes, default=-1) + 1)]
        self.timeline.rows += rows
        return rows

    def _add_tensor_cores(self, rows: Sequence[tuple[Row, WarpTrace]]) -> None:
        """What a warpgroup's first warp asked its tensor cores for; all four of its warps do the same."""
        for _, warp in rows:
            groups = list(_groups(warp, "wgmma", self.end)) if warp.warp % 4 == 0 else []
            lanes = lanes_of([(group.start, group.end) for group in groups])
            in_use = self._rows_for(lanes, model.TENSOR_ROW, f"wgmma of warps {warp.warp}-{warp.warp + 3},")
            for group, lane in zip(groups, lanes, strict=True):
                self._put(
                    in_use[lane], (group.start, group.end), model.TENSOR, f"wgmma group {group.number}", "", group.seen
                )

    def _add_phases(self, barrier: _Barrier) -> None:
        """A barrier's phases, each until what completed it, and arrows from the last to arrive to those who waited."""
        row = Row(self.block, model.BARRIER_ROW, barrier.name, "mbarrier")
        ends: list[tuple[float, Row | None]] = []
        if barrier.issues:
            copies = Row(self.block, model.COPY_ROW, f"copies for {barrier.name}")
            ends = [(i.end, None) for i in self.timeline.intervals if i.row == copies]
        elif barrier.arrivals:
            # Each of the warps that arrive does so once in a phase.
            arriving = len({source for _, source in barrier.arrivals})
            arrivals = sorted(barrier.arrivals, key=lambda arrival: arrival[0].end)
            ends = [(event.end, source) for event, source in arrivals[arriving - 1 :: arriving]]
        if not ends:
            return
        self.timeline.rows.append(row)
        start = min(warp.start for warp in self.warps)
        for turn, (end, last) in enumerate(sorted(ends, key=lambda pair: pair[0])):
            self._put(row, (start, end), model.PHASE, f"phase {turn}", f"parity {turn % 2}")
            if last is not None:
                for event, target in barrier.waits:
                    if event.start < end <= event.end and event.end - event.start > PASSED_NS:
                        self.timeline.flows.append(Flow(last, end, target, event.end, f"arrived at {barrier.name}"))
            start = end


@dataclass(frozen=True)
class _Meeting:
    """Warps at a block barrier, each with its event there; it ends when the `last` has come.

    All `came`, some of which only arrived; `members` are those who waited.
    """

    number: int
    came: tuple[tuple[WarpTrace, Event], ...]

    @property
    def members(self) -> list[tuple[WarpTrace, Event]]:
        return [(warp, event) for warp, event in self.came if event.site.kind == "block barrier"]

    @property
    def last(self) -> WarpTrace:
        return max(self.came, key=lambda member: member[1].start)[0]

    @property
    def end(self) -> float:
        return max(event.start for _, event in self.came)

    def of(self, warp: WarpTrace) -> list[Event]:
        return [event for member, event in self.members if member is warp]


def _meetings(warps: Sequence[WarpTrace]) -> list[_Meeting]:
    """A warp's n-th time at a barrier is that of all who ever come to it: what it is for in a block that works."""
    met: dict[tuple[int, int], list[tuple[WarpTrace, Event]]] = {}
    for warp in warps:
        turns: dict[int, int] = {}
        for event in warp.events:
            if event.site.kind in ("block barrier", "block barrier arrive"):
                turn = turns[event.detail] = turns.get(event.detail, -1) + 1
                met.setdefault((event.detail, turn), []).append((warp, event))
    return [_Meeting(number, tuple(members)) for (number, _), members in met.items()]


@dataclass(frozen=True)
class _Group:
    """The `number`-th group of a warp: first and last issue, completion, and whether a warp waited for that."""

    number: int
    start: float
    issued: float
    end: float
    seen: bool


def _groups(warp: WarpTrace, prefix: str, end: float) -> Iterable[_Group]:
    """The groups, but for empty ones, that a warp commits and waits for: of 'cp.async', 'bulk' or 'wgmma'."""
    pending: deque[tuple[int, float, float] | None] = deque()
    uncommitted: list[Event] = []
    number = 0
    for event in warp.events:
        kind = event.site.kind
        if kind == "issue in group" and prefix == "bulk":
            uncommitted.append(event)
        elif kind == f"{prefix} commit":
            issued = uncommitted if prefix == "bulk" else [event] if event.detail else []
            # An empty group counts: a wait says how many of the newest may be incomplete.
            pending.append((number, issued[0].start, issued[-1].end) if issued else None)
            uncommitted, number = [], number + 1
        elif kind == f"{prefix} wait":
            while len(pending) > event.site.count:
                group = pending.popleft()
                if group:
                    yield _Group(*group, event.end, event.end - event.start > PASSED_GROUPS_NS)
    yield from (_Group(*group, end, False) for group in pending if group)


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """A lane for each span, so that those in a lane do not overlap; spans that begin earlier get the lower lanes."""
    free_from: list[float] = []
    lanes = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[index]
        lane = next((lane for lane, free in enumerate(free_from) if free <= start), len(free_from))
        free_from[lane : lane + 1] = [end]
        lanes[index] = lane
    return lanes


def _barrier_names(shared: Shared | None, base: int) -> dict[int, str]:
    """Names by shared address, such as full[1]."""
    if shared is None:
        return {}
    return {
        base + shared.offsets[name] + 8 * number: f"{name}[{number}]" if member.count > 1 else name
        for name, member in shared.members.items()
        if isinstance(member, Barriers)
        for number in range(member.count)
    }


def _waits_for_copies_since(warp: WarpTrace) -> float | None:
    """When a warp first waits for copies that it or others asked for; None if it does not, as a producer."""
    copied_to = {event.detail for event in warp.events if event.site.kind == "issue to mbarrier"}
    waits = {event.detail for event in warp.events if event.site.kind == "mbarrier wait"}
    if copied_to and not copied_to & waits:
        return None
    for event in warp.events:
        if event.site.kind in ("mbarrier wait", "cp.async wait"):
            return event.start
    return None


def _role(warp: WarpTrace) -> str:
    """What a warp is for, as its instructions tell."""
    kinds = {event.site.kind for event in warp.events}
    parts = {event.site.name for event in warp.events if event.site.kind == "part"}
    if "issue to mbarrier" in kinds:
        alone = _waits_for_copies_since(warp) is None and not parts & {"compute", "load"}
        return "producer" if alone else "issues, computes"
    if "cp.async commit" in kinds or "load" in parts:
        return "copies, computes"
    return "consumer" if "mbarrier wait" in kinds or "compute" in parts else ""

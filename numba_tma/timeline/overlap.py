"""How much of the copying was hidden under computation.

For a block, its *copy time* is the time during which at least one copy into its shared memory was in flight: from
when it was issued until its barrier (or the wait for its group) completed. Where threads copy by themselves, it is the
time during which at least one of its warps did. The *hidden* part of it is that during which at least one of the
block's warps computed (rather than waited or asked for copies), or its tensor cores multiplied. For a multiprocessor
the same holds with "one of its blocks" in place of "the block": there, one block computes while another waits.

A trace on a GPU shows when a copy had arrived only if a warp was waiting for it. If it came before it was missed, it
was in flight at most until the wait began to look, and all of that was hidden. `share` takes it for in flight until
then; `at_least` leaves such copies out. The truth lies between, and they are equal where every end was seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .model import COMPUTE, COPY, LOAD, TENSOR, Block, Interval, Timeline

Span = tuple[float, float]


@dataclass(frozen=True)
class Hidden:
    """Copy time and its hidden part, in nanoseconds, of a block or a multiprocessor, or summed over several.

    `seen_copy_ns` and `seen_hidden_ns` count only copies whose end is known. `computing_ns` is the time of computing.
    """

    name: str
    copy_ns: float
    hidden_ns: float
    seen_copy_ns: float
    seen_hidden_ns: float
    computing_ns: float

    @property
    def share(self) -> float:
        """Hidden part of the copy time, 0 to 1; NaN if nothing was copied."""
        return self.hidden_ns / self.copy_ns if self.copy_ns else float("nan")

    @property
    def overlapped(self) -> float:
        """The same from the other side: the part of the computing during which copies were in flight.

        Where copying takes longer than computing, no more than computing / copying can be hidden; then this tells how
        near the kernel is to that. NaN if nothing was computed.
        """
        return self.hidden_ns / self.computing_ns if self.computing_ns else float("nan")

    @property
    def at_least(self) -> float:
        """The same without copies that may have ended earlier than is known."""
        if self.seen_copy_ns:
            return self.seen_hidden_ns / self.seen_copy_ns
        return self.share


def union(spans: Iterable[Span]) -> list[Span]:
    """The time that at least one of the spans covers, as disjoint spans in order."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def common(first: list[Span], second: list[Span]) -> list[Span]:
    """The time that both cover; each is disjoint and in order, as `union` gives it."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(first: list[Span], second: list[Span]) -> list[Span]:
    """The time that `first` covers and `second` does not; both as `union` gives them."""
    if not first:
        return []
    gaps, end = [], first[0][0]
    for start, stop in second:
        gaps.append((end, start))
        end = max(end, stop)
    gaps.append((end, max(end, first[-1][1])))
    return common(first, [gap for gap in gaps if gap[0] < gap[1]])


def length(spans: Iterable[Span]) -> float:
    """How long disjoint spans are together."""
    return sum(end - start for start, end in spans)


def by_block(timeline: Timeline) -> list[Hidden]:
    """For every block that was watched."""
    return [_hidden(block.name, intervals) for block, intervals in _grouped(timeline)]


def by_multiprocessor(timeline: Timeline) -> list[Hidden]:
    """For every multiprocessor, of those of its blocks that were watched."""
    intervals: dict[int, list[Interval]] = {}
    for block, own in _grouped(timeline):
        intervals.setdefault(block.multiprocessor, []).extend(own)
    return [_hidden(f"SM {number}", own) for number, own in sorted(intervals.items())]


def total(name: str, parts: Iterable[Hidden]) -> Hidden:
    """Copy times and their hidden parts added up."""
    parts = list(parts)
    return Hidden(
        name,
        sum(part.copy_ns for part in parts),
        sum(part.hidden_ns for part in parts),
        sum(part.seen_copy_ns for part in parts),
        sum(part.seen_hidden_ns for part in parts),
        sum(part.computing_ns for part in parts),
    )


def _grouped(timeline: Timeline) -> list[tuple[Block, list[Interval]]]:
    groups: dict[Block, list[Interval]] = {block: [] for block in timeline.blocks}
    for interval in timeline.intervals:
        if interval.row.block in groups:
            groups[interval.row.block].append(interval)
    return list(groups.items())


def _hidden(name: str, intervals: list[Interval]) -> Hidden:
    computing = union((i.start, i.end) for i in intervals if i.kind in (COMPUTE, TENSOR))
    copies = [i for i in intervals if i.kind in (COPY, LOAD)]
    copying = union((i.start, i.end) for i in copies)
    seen = union((i.start, i.end) for i in copies if i.seen)
    return Hidden(
        name,
        length(copying),
        length(common(copying, computing)),
        length(seen),
        length(common(seen, computing)),
        length(computing),
    )

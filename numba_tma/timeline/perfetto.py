"""A timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

A block is a process, a row of it a thread; intervals are complete events ("X"), what waited for what are flows ("s" and
"f"), which the viewers draw as arrows between slices. Times are microseconds there.
Source: "Trace Event Format" (the format's description by the Chromium project).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from .model import MARK, Interval, Row, Timeline


def trace_events(timeline: Timeline) -> dict[str, Any]:
    """The object to write as JSON: `traceEvents`, and what the trace is of in `otherData`."""
    events: list[dict[str, Any]] = []
    blocks = dict.fromkeys(row.block for row in timeline.rows)
    processes = {block: number for number, block in enumerate(blocks, 1)}
    threads: dict[Row, tuple[int, int]] = {}
    for block, process in processes.items():
        events.append(_meta("process_name", process, 0, name=f"{timeline.title}, {block.name}"))
        events.append(_meta("process_sort_index", process, 0, sort_index=process))
    for row in timeline.rows:
        process = processes[row.block]
        thread = sum(1 for other in threads.values() if other[0] == process) + 1
        threads[row] = process, thread
        name = f"{row.name} ({row.note})" if row.note else row.name
        events.append(_meta("thread_name", process, thread, name=name))
        events.append(_meta("thread_sort_index", process, thread, sort_index=thread))
    for interval in timeline.intervals:
        events.append(_slice(interval, *threads[interval.row]))
    slices: dict[Row, list[tuple[float, float]]] = {}
    for interval in timeline.intervals:
        if interval.kind != MARK and interval.start < interval.end:
            slices.setdefault(interval.row, []).append((interval.start, interval.end))
    for spans in slices.values():
        spans.sort()
    for number, flow in enumerate(timeline.flows, 1):
        start = _within(slices.get(flow.source, []), flow.start)
        end = _within(slices.get(flow.target, []), flow.end)
        if start is None or end is None:
            continue
        common = {"name": flow.name, "cat": "waits for", "id": number}
        process, thread = threads[flow.source]
        events.append({**common, "ph": "s", "ts": _microseconds(min(start, end)), "pid": process, "tid": thread})
        process, thread = threads[flow.target]
        # "e": it ends in the slice that is open then, not in the next.
        events.append({**common, "ph": "f", "bp": "e", "ts": _microseconds(end), "pid": process, "tid": thread})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"kernel": timeline.title, "device": timeline.device, "notes": "; ".join(timeline.notes)},
    }


def _within(spans: Sequence[tuple[float, float]], time: float) -> float | None:
    """A time within the slice that ends at `time` or is open then, or else the last before: viewers tie a flow to the
    slice that is open at its end points, and one that ends there no longer is. None if there is no such slice."""
    place = bisect_left(spans, (time, time))
    if not place:
        return None
    start, end = spans[place - 1]
    return min(time, end - min(1.0, (end - start) / 2))


def _slice(interval: Interval, process: int, thread: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "name": interval.name,
        "cat": interval.kind,
        "ts": _microseconds(interval.start),
        "pid": process,
        "tid": thread,
    }
    arguments = {"kind": interval.kind}
    if interval.detail:
        arguments["detail"] = interval.detail
    if not interval.seen:
        arguments["end"] = "the latest possible: no warp was waiting for it"
    if interval.kind == MARK:
        return {**event, "ph": "i", "s": "t", "args": arguments}
    return {**event, "ph": "X", "dur": _microseconds(interval.end - interval.start), "args": arguments}


def _meta(what: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": process, "tid": thread, "args": arguments}


def _microseconds(nanoseconds: float) -> float:
    return round(nanoseconds / 1000, 6)

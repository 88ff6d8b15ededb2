"""The rings of a traced launch, read: events of each warp, in nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from . import instrument
from .instrument import Site
from .plan import HEADER_BYTES, RECORD_BYTES, Trace


@dataclass(frozen=True)
class Event:
    """Something at one site: from `start` to `end` in nanoseconds, equal for a moment; `detail` is the site's.

    A block barrier has its start alone: it ends when the last warp has come.
    """

    site: Site
    start: float
    end: float
    detail: int = 0


@dataclass
class WarpTrace:
    """The events of one warp, by their end.

    `dropped` records had no room. `shared_base` is where the shared-memory plan begins, `multiprocessor` the SM.
    """

    block: int
    warp: int
    multiprocessor: int
    shared_base: int
    start: float
    end: float
    events: list[Event] = field(default_factory=list)
    dropped: int = 0


_HEADER = np.dtype(
    {
        "names": [
            "begin_time",
            "begin_clock",
            "end_time",
            "end_clock",
            "count",
            "multiprocessor",
            "lane",
            "shared_base",
        ],
        "formats": ["u8", "u8", "u8", "u8", "u4", "u4", "u4", "u4"],
        "offsets": [
            instrument.BEGIN_TIME,
            instrument.BEGIN_CLOCK,
            instrument.END_TIME,
            instrument.END_CLOCK,
            instrument.COUNT,
            instrument.MULTIPROCESSOR,
            instrument.LANE,
            instrument.SHARED_BASE,
        ],
        "itemsize": HEADER_BYTES,
    }
)
_RECORD = np.dtype([("begin", "u4"), ("end", "u4"), ("site", "u4"), ("detail", "u4")])


def read(buffer: np.ndarray, plan: Trace, sites: Sequence[Site], blocks: int, threads: int) -> list[WarpTrace]:
    """Warps that kept records, by block and warp; their times begin with the first of them at 0.

    Args:
        buffer: the rings' bytes, uint8.
        plan, sites: as the kernel was instrumented.
        blocks, threads: of the launch's grid and of a block.
    """
    warps = -(-threads // 32)
    numbers = plan.traced_blocks(blocks)
    rings = buffer[: len(numbers) * warps * 2 * plan.ring_bytes].reshape(len(numbers), warps, 2, plan.ring_bytes)
    headers = rings[..., :HEADER_BYTES].copy().view(_HEADER)[..., 0]
    # Every warp that was traced has written its first ring's header, which says when it was done.
    traced = headers[:, :, 0]["end_time"] != 0
    if not traced.any():
        return []
    to_nanoseconds = _Clocks(headers[:, :, 0][traced])
    found = []
    for i, warp in np.argwhere(traced).tolist():
        header = headers[i, warp, 0]
        clocks = to_nanoseconds.of(header)
        trace = WarpTrace(
            numbers[i],
            warp,
            int(header["multiprocessor"]),
            int(header["shared_base"]),
            clocks(int(header["begin_clock"])),
            clocks(int(header["end_clock"])),
        )
        for which in range(2):
            count = int(headers[i, warp, which]["count"])
            if which == 1 and headers[i, warp, 1]["end_time"] < header["begin_time"]:
                continue  # an earlier launch's, into the same rings
            kept = min(count, plan.capacity)
            trace.dropped += count - kept
            body = rings[i, warp, which, HEADER_BYTES : HEADER_BYTES + kept * RECORD_BYTES]
            events = _events(body.copy().view(_RECORD), sites, int(header["begin_clock"]), clocks)
            trace.events += events if which == 0 else _not_in(trace.events, events)
        trace.events.sort(key=lambda event: (event.end, event.start))
        found.append(trace)
    origin = min(trace.start for trace in found)
    for trace in found:
        trace.start, trace.end = trace.start - origin, trace.end - origin
        trace.events = [Event(e.site, e.start - origin, e.end - origin, e.detail) for e in trace.events]
    return found


def _not_in(first: Sequence[Event], second: Sequence[Event]) -> list[Event]:
    """The events of a warp's second lane without those that the first lane took part in."""
    known: dict[tuple, list[Event]] = {}
    for event in first:
        known.setdefault((event.site, event.detail), []).append(event)
    return [
        event
        for event in second
        if not any(
            other.start <= event.end and event.start <= other.end for other in known.get((event.site, event.detail), ())
        )
    ]


def _events(records: np.ndarray, sites: Sequence[Site], begin_clock: int, clocks) -> list[Event]:
    # Only the low half of the clock is kept: how far each reading is from the one before restores the rest.
    low = np.stack([records["begin"], records["end"]], axis=1).reshape(-1)
    previous = np.concatenate([np.array([begin_clock & 0xFFFFFFFF], np.uint32), low[:-1]])
    ticks = begin_clock + np.cumsum((low - previous).astype(np.int32), dtype=np.int64)
    return [
        Event(sites[site], clocks(begin), clocks(end), detail)
        for begin, end, site, detail in zip(
            ticks[::2].tolist(),
            ticks[1::2].tolist(),
            records["site"].tolist(),
            records["detail"].tolist(),
            strict=True,
        )
    ]


class _Clocks:
    """From an SM's cycles to nanoseconds of the timer that all SMs share.

    The timer advances in coarse steps, the clock counts cycles: one rate for the whole GPU, and for each SM the offset
    that fits all of its readings best.
    """

    def __init__(self, headers: np.ndarray) -> None:
        cycles = (headers["end_clock"] - headers["begin_clock"]).astype(np.float64).sum()
        passed = (headers["end_time"] - headers["begin_time"]).astype(np.float64).sum()
        self.rate = float(passed / cycles) if cycles and passed else 1.0
        self._epoch = int(headers["begin_time"].min())
        self._offsets = {}
        for number in np.unique(headers["multiprocessor"]).tolist():
            own = headers[headers["multiprocessor"] == number]
            first = int(own["begin_clock"].min())
            gaps = []
            for time, clock in (("begin_time", "begin_clock"), ("end_time", "end_clock")):
                since = (own[time] - np.uint64(self._epoch)).astype(np.float64)
                gaps.append(since - (own[clock] - np.uint64(first)).astype(np.float64) * self.rate)
            self._offsets[number] = first, float(np.mean(gaps))

    def of(self, header: np.void):
        """A function from clock readings of the SM that wrote `header`."""
        first, offset = self._offsets[int(header["multiprocessor"])]
        return lambda clock: (clock - first) * self.rate + offset

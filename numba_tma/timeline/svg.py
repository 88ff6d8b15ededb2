"""A block's timeline as a picture: a row for each warp, the copies, the tensor cores and the barriers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from ..pictures.svg import Picture
from . import model, overlap
from .model import Block, Interval, Row, Timeline

_LEFT, _RIGHT, _LEGEND = 190, 24, 80
_HEIGHTS = {model.WARP: 22, model.COPY_ROW: 17, model.TENSOR_ROW: 17, model.BARRIER_ROW: 15, model.SM_ROW: 13}
_GAP = 16  # between kinds of rows
_LEAST = 0.4  # pixels: what is narrower joins its neighbour

# Kind of interval: its class in the picture, the share of the row's height it takes, and its word in the legend. What
# comes later lies above.
_LOOKS = {
    model.PART: ("c3", 1.0, "a part that the kernel names"),
    model.LOAD: ("threads", 1.0, "threads copy"),
    model.COMPUTE: ("compute", 1.0, "compute"),
    model.WAIT: ("empty", 0.7, "wait for a copy or an mbarrier"),
    model.BARRIER: ("c7", 0.7, "wait at a block barrier"),
    model.ISSUE: ("warning", 1.0, "ask for copies or products"),
    model.COPY: ("tma", 1.0, "copy in flight"),
    model.STORE: ("c5", 1.0, "store in flight"),
    model.TENSOR: ("peer", 1.0, "tensor cores"),
    model.PHASE: ("c0", 1.0, "mbarrier, even phase"),
    model.BUSY: ("c2", 1.0, "busy"),
    model.MARK: ("ink", 0.5, "arrival, or a moment that is named"),
}
_CP_ASYNC = ("cp_async", 1.0, "cp.async in flight")
_ODD_PHASE = ("c6", 1.0, "odd phase")
_ARROWS = {"arrived": "tma line"}


def draw(
    timeline: Timeline,
    block: Block | None = None,
    start: float | None = None,
    end: float | None = None,
    *,
    copies: int = 12,
    width: int = 1100,
) -> str:
    """One block's timeline as SVG text, for light and dark pages.

    Args:
        timeline: whose block it is.
        block: which; by default the one in the middle.
        start, end: of what is shown, in nanoseconds; by default so much that about `copies` copies (or phases of
            loading) begin in it, in the middle of the block.
        copies: see there.
        width: in pixels.

    Raises:
        ValueError: the timeline has no such block, or `end` is not behind `start`.
    """
    block = block or timeline.middle_block()
    if block not in timeline.blocks:
        raise ValueError(
            f"{block.name} is not in the timeline of {timeline.title}; it has {len(timeline.blocks)} blocks"
        )
    own = timeline.of([block])
    first, last = _window(own, copies)
    first, last = (first if start is None else start), (last if end is None else end)
    if not first < last:
        raise ValueError(f"from {first} ns to {last} ns: the end must be behind the start")
    shown = own.between(first, last)
    return _Drawing(own, shown, block, first, last, width).svg()


def _window(timeline: Timeline, copies: int) -> tuple[float, float]:
    """The middle of the block, with so many copies in it; all of it if there are few."""
    first, last = timeline.span
    begun = sorted({i.start for i in timeline.intervals if i.kind in (model.COPY, model.LOAD, model.STORE)})
    rows = len({i.row for i in timeline.intervals if i.kind in (model.COPY, model.LOAD, model.STORE)})
    warps = any(i.kind == model.LOAD or i.name.startswith("cp.async") for i in timeline.intervals)
    wanted = copies * (rows if warps and rows else 1)
    if len(begun) <= wanted + 2:
        return first, last
    middle = len(begun) // 2
    return begun[middle - wanted // 2], begun[middle + wanted // 2]


class _Drawing(Picture):
    """The picture in the making."""

    def __init__(self, whole: Timeline, shown: Timeline, block: Block, start: float, end: float, width: int) -> None:
        self._start, self._scale = start, (width - _LEFT - _RIGHT) / (end - start)
        used = {interval.row for interval in shown.intervals}
        self._words = _legend(shown, width)
        self._top = self._words[-1][1] + 32 if self._words else _LEGEND
        self._rows = _placed([row for row in whole.rows if row in used or row.kind == model.WARP], self._top)
        bottom = max((y + height for y, height in self._rows.values()), default=self._top)
        height = bottom + 40 + 18 * len(whole.notes)
        super().__init__(
            width,
            height,
            f"Timeline of {whole.title}, {block.name}",
            f"From {start:.0f} to {end:.0f} nanoseconds, on {whole.device}: "
            + ", ".join(row.name for row in self._rows)
            + ".",
        )
        self._header(whole, block)
        self._axis(bottom, end)
        for row, (y, row_height) in self._rows.items():
            self._label(row, y, row_height)
        for kind in _LOOKS:
            self._intervals([interval for interval in shown.intervals if interval.kind == kind])
        self._arrows(shown)
        for number, note in enumerate(whole.notes):
            self.text(24, bottom + 44 + 18 * number, note, "warning")

    def _header(self, whole: Timeline, block: Block) -> None:
        self.text(24, 34, whole.title, "ink head")
        self.text(self.width - 24, 34, f"{block.name}, {whole.device}", "muted", "end")
        hidden = overlap.by_block(whole)[0]
        if hidden.copy_ns:
            least = f" (at least {hidden.at_least:.0%})" if hidden.share - hidden.at_least >= 0.005 else ""
            self.text(
                24,
                54,
                f"Copying took {_duration(hidden.copy_ns)} of the block's {_duration(whole.span[1] - whole.span[0])}, "
                f"computing {_duration(hidden.computing_ns)}; {hidden.share:.0%}{least} of the copying was hidden, "
                f"{hidden.overlapped:.0%} of the computing lay under copies.",
                "muted",
            )
        for x, y, classes, word in self._words:
            self.rect(x, y - 9, 11, 11, classes, 2)
            self.text(x + 16, y, word, "muted")

    def _axis(self, bottom: float, end: float) -> None:
        step = nice((end - self._start) / 8)
        unit, divisor = ("µs", 1000) if end >= 10_000 or step >= 1000 else ("ns", 1)
        tick = math.ceil(self._start / step) * step
        while tick <= end:
            x = self._x(tick)
            self.line([(x, self._top - 4), (x, bottom + 6)], "grid")
            self.text(x, bottom + 22, f"{tick / divisor:,.{_digits(step / divisor)}f}", "muted small", "middle")
            tick += step
        self.text(_LEFT - 10, bottom + 22, unit, "muted small", "end")

    def _label(self, row: Row, y: float, height: float) -> None:
        base = y + height / 2 + 4
        self.text(24, base, row.name, "ink")
        if row.note:
            self.text(24 + 6.6 * len(row.name) + 8, base, row.note, "muted small")

    def _intervals(self, intervals: Sequence[Interval]) -> None:
        by_row: dict[Row, list[Interval]] = {}
        for interval in sorted(intervals, key=lambda i: i.start):
            by_row.setdefault(interval.row, []).append(interval)
        for row, members in by_row.items():
            if row not in self._rows:
                continue
            y, height = self._rows[row]
            for first, left, right in self._joined(members):
                classes, share, _ = _look(first)
                inner = (height - 3) * share
                top = y + (height - 3 - inner) / 2
                self._bar(left, top, right - left, inner, classes, _tip(first))
                if first.kind == model.PHASE and right - left > 6.5 * len(first.name):
                    self.text((left + right) / 2, y + height / 2 + 2, first.name, "ink small", "middle")

    def _joined(self, members: Sequence[Interval]) -> list[tuple[Interval, float, float]]:
        """Intervals of a row in pixels, those too narrow to see joined to what they touch."""
        least = 1.2 if members[0].kind in (model.ISSUE, model.MARK) else _LEAST
        found: list[tuple[Interval, float, float]] = []
        for interval in members:
            left = self._x(interval.start)
            right = max(self._x(interval.end), left + least)
            narrow = (interval.end - interval.start) * self._scale <= 2 * _LEAST
            if narrow and found and left - found[-1][2] < _LEAST:
                found[-1] = found[-1][0], found[-1][1], max(found[-1][2], right)
            else:
                found.append((interval, left, right))
        return found

    def _arrows(self, shown: Timeline) -> None:
        for flow in shown.flows:
            classes = _ARROWS.get(flow.name) or ("compute line" if flow.name.startswith("arrived at") else "")
            if not classes or flow.source not in self._rows or flow.target not in self._rows:
                continue
            source, target = (self._rows[row] for row in (flow.source, flow.target))
            begin = self._x(flow.start), source[0] + source[1] / 2 - 1.5
            tip = self._x(flow.end), target[0] + target[1] / 2 - 1.5
            self.line([begin, tip], classes)
            self.dot(*tip, 2, classes.split()[0])

    def _bar(self, x: float, y: float, width: float, height: float, classes: str, tip: str) -> None:
        attributes = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        if width > 4:
            attributes += ' rx="1.5"'
        self._add("rect", classes, attributes, f"<title>{escape(tip)}</title>")

    def _x(self, time: float) -> float:
        return _LEFT + (time - self._start) * self._scale


def _look(interval: Interval) -> tuple[str, float, str]:
    if interval.kind == model.PHASE and interval.detail == "parity 1":
        return _ODD_PHASE
    if interval.kind == model.COPY and interval.name.startswith("cp.async"):
        return _CP_ASYNC
    return _LOOKS[interval.kind]


def _legend(shown: Timeline, width: int) -> list[tuple[float, float, str, str]]:
    """Place, class and word of each look that occurs."""
    used = {_look(interval) for interval in shown.intervals}
    words, x, y = [], 24.0, float(_LEGEND)
    for look in [*_LOOKS.values(), _CP_ASYNC, _ODD_PHASE]:
        if look in used:
            classes, _, word = look
            step = 36 + 6.4 * len(word)
            if x + step > width - 24:
                x, y = 24.0, y + 18
            words.append((x, y, classes, word))
            x += step
    return words


def _placed(rows: Sequence[Row], top: float) -> dict[Row, tuple[float, float]]:
    """Top and height of each row; kinds of rows stand apart."""
    places: dict[Row, tuple[float, float]] = {}
    y, before = top, None
    for row in rows:
        if before is not None and row.kind != before:
            y += _GAP
        places[row] = y, _HEIGHTS[row.kind]
        y += _HEIGHTS[row.kind]
        before = row.kind
    return places


def _tip(interval: Interval) -> str:
    words = f"{interval.name}: {_duration(interval.end - interval.start)} from {interval.start:,.0f} ns"
    if not interval.seen:
        words += " (at most: nobody was waiting for its end)"
    return f"{words}\n{interval.detail}" if interval.detail else words


def _duration(nanoseconds: float) -> str:
    return f"{nanoseconds / 1000:,.1f} µs" if nanoseconds >= 10_000 else f"{nanoseconds:,.0f} ns"


def nice(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _digits(step: float) -> int:
    """Decimals that tell ticks apart."""
    return max(0, -math.floor(math.log10(step) + 1e-9))

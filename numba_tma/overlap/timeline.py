"""A run's timeline: a row an engine. For ui.perfetto.dev it is written as a kernel's is; its picture is its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from ..pictures.svg import Picture
from ..timeline import model
from ..timeline.model import Interval, Row, Timeline
from ..timeline.svg import nice
from .modes import COMPUTE, D2H, H2D, PREPARE, STAGES
from .report import Report, Span

_LEFT, _RIGHT, _TOP, _HEIGHT = 110, 24, 84, 34
_NAMES = {PREPARE: "host", H2D: "copy in", COMPUTE: "compute", D2H: "copy out"}
_KINDS = {PREPARE: model.PART, H2D: model.COPY, COMPUTE: model.COMPUTE, D2H: model.STORE}
_COLOURS = tuple(f"c{number}" for number in range(7))  # batches take turns


@dataclass(frozen=True)
class Machine:
    """What a timeline's rows belong to: a GPU's engines, or a model's."""

    name: str
    number: None = None
    multiprocessor: int = 0


def of_report(report: Report) -> Timeline:
    """The spans of a recorded run, times in nanoseconds since it began, as `numba_tma.timeline` keeps them.

    Raises:
        ValueError: the run was not recorded.
    """
    _check(report)
    machine = Machine("model of a GPU" if report.modelled else report.device)
    rows = {
        stage: Row(machine, model.WARP if stage == PREPARE else model.COPY_ROW, _NAMES[stage], stage)
        for stage in _stages(report)
    }
    return Timeline(
        f"overlap, {report.mode}",
        report.device,
        rows=list(rows.values()),
        intervals=[
            Interval(rows[span.stage], span.start * 1e9, span.end * 1e9, _KINDS[span.stage], f"batch {span.batch}")
            for stage in rows
            for span in report.engine(stage)
        ],
        notes=[report.device] if report.modelled else [],
    )


def svg(report: Report, *, batches: int = 12, width: int = 1100) -> str:
    """The run's first `batches` batches as a picture (SVG text): an engine a row, a colour a batch.

    Raises:
        ValueError: the run was not recorded.
    """
    _check(report)
    shown = [span for stage in STAGES for span in report.engine(stage) if span.batch < batches]
    return _Drawing(report, shown, width).svg()


def save(report: Report, path: str | Path, **options: int) -> None:
    """Write a picture (.svg) or what ui.perfetto.dev opens (.json).

    Args:
        path: the file; its suffix says what.
        options: those of `svg`, for a picture.

    Raises:
        ValueError: another suffix, or the run was not recorded.
    """
    path = Path(path)
    if path.suffix == ".svg":
        path.write_text(svg(report, **options))
    elif path.suffix == ".json":
        of_report(report).save(path)
    else:
        raise ValueError(f"{path}: a run's timeline is written as .svg or .json")


def _check(report: Report) -> None:
    if not report.spans:
        raise ValueError(f"the run in mode {report.mode} has no times: make the pipeline with record=True and run it")


def _stages(report: Report) -> list[str]:
    """The stages that took time at all."""
    busy = report.busy()
    return [stage for stage in STAGES if busy[stage]]


class _Drawing(Picture):
    def __init__(self, report: Report, spans: Sequence[Span], width: int) -> None:
        stages = _stages(report)
        self._begin = min(span.start for span in spans)
        end = max(span.end for span in spans)
        self._scale = (width - _LEFT - _RIGHT) / (end - self._begin)
        bottom = _TOP + _HEIGHT * len(stages)
        super().__init__(
            width,
            bottom + 40,
            f"Timeline of a pipeline, {report.mode}",
            f"{len({span.batch for span in spans})} of {report.batches} batches: what each engine does when.",
        )
        self.text(24, 34, f"{report.mode}, {report.batches} batches in {report.seconds * 1e3:.2f} ms", "ink head")
        self.text(24, 56, report.device, "muted")
        if report.modelled:
            self.text(width - 24, 34, "modelled, not measured", "warning", "end")
        self._axis(bottom, end)
        use = report.utilisation()
        for number, stage in enumerate(stages):
            y = _TOP + number * _HEIGHT
            self.text(24, y + 15, _NAMES[stage], "ink")
            self.text(24, y + 28, f"busy {use[stage]:.0%}", "muted small")
            for span in spans:
                if span.stage == stage:
                    self._bar(span, y)

    def _bar(self, span: Span, y: float) -> None:
        x, width = self._x(span.start), max((span.end - span.start) * self._scale, 0.5)
        tip = f"batch {span.batch}, {_NAMES[span.stage]}: {(span.end - span.start) * 1e3:.3f} ms"
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_HEIGHT - 6}"'
        self._add("rect", _COLOURS[span.batch % len(_COLOURS)], place, f"<title>{escape(tip)}</title>")
        self.line([(x, y), (x, y + _HEIGHT - 6)], "edge")
        if width > 16:
            self.text(x + width / 2, y + 18, str(span.batch), "ink small", "middle")

    def _axis(self, bottom: float, end: float) -> None:
        step = nice((end - self._begin) / 8)
        digits = max(0, -math.floor(math.log10(step * 1e3) + 1e-9))
        for number in range(math.floor((end - self._begin) / step) + 1):
            x = self._x(self._begin + number * step)
            self.line([(x, _TOP - 4), (x, bottom)], "grid")
            self.text(x, bottom + 16, f"{number * step * 1e3:.{digits}f}", "muted small", "middle")
        self.text(_LEFT - 14, bottom + 16, "ms", "muted small", "end")

    def _x(self, time: float) -> float:
        return _LEFT + (time - self._begin) * self._scale

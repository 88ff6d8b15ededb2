"""What a run of a pipeline took: spans of the stages, use of the engines, and how near it came to the ideal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tabulate import tabulate

from .modes import COMPUTE, D2H, H2D, PREPARE, STAGES

_ENGINES = (H2D, COMPUTE, D2H)


@dataclass(frozen=True)
class Span:
    """A stage of a batch: from `start` to `end`, in seconds since the run began."""

    stage: str
    batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Alone:
    """Seconds that each stage of one batch takes with its engine to itself.

    Attributes:
        h2d, d2h: a copy in and out, with the other direction busy.
        compute: the computation.
        prepare: preparing, on the host.
        first_h2d, last_d2h: a copy in and out with the other direction idle, as the first and the last batch's may be;
            by default as long as the others.
    """

    h2d: float
    compute: float
    d2h: float
    prepare: float = 0.0
    first_h2d: float | None = None
    last_d2h: float | None = None

    def of(self, stage: str) -> float:
        """Of one stage among others."""
        return {PREPARE: self.prepare, H2D: self.h2d, COMPUTE: self.compute, D2H: self.d2h}[stage]

    def at_the_ends(self, stage: str) -> float:
        """Of one stage while the pipeline fills or drains."""
        if stage == H2D and self.first_h2d is not None:
            return self.first_h2d
        if stage == D2H and self.last_d2h is not None:
            return self.last_d2h
        return self.of(stage)


def ideal(alone: Alone, batches: int) -> float:
    """Seconds that `batches` batches take at best: the longest stage without a gap, and before and after it the other
    stages of the first and the last batch (one fill, one drain)."""
    if batches < 1:
        return 0.0
    longest = max(STAGES, key=alone.of)
    return batches * alone.of(longest) + sum(alone.at_the_ends(stage) for stage in STAGES if stage != longest)


def serial(alone: Alone, batches: int) -> float:
    """Seconds that they take one after another, with the same rates."""
    return batches * sum(alone.of(stage) for stage in STAGES)


@dataclass
class Report:
    """A run.

    Attributes:
        mode: its name.
        device: the GPU, or the model in words.
        modelled: whether times are a model's.
        batches: how many were delivered.
        seconds: from the first moment to the delivery of the last batch, on the host's clock or the model's.
        bytes_in, bytes_out: copied to and from the device.
        spans: of all stages, if the run was recorded.
    """

    mode: str
    device: str
    modelled: bool
    batches: int = 0
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    spans: list[Span] = field(default_factory=list)

    def engine(self, stage: str) -> list[Span]:
        """What an engine did, in order. It does one thing at a time: the next begins when the one before has ended."""
        found: list[Span] = []
        for span in sorted((span for span in self.spans if span.stage == stage), key=lambda span: span.end):
            start = max(span.start, found[-1].end) if found else span.start
            found.append(replace(span, start=min(start, span.end)))
        return found

    def busy(self) -> dict[str, float]:
        """Seconds that each engine was busy."""
        return {stage: sum(span.end - span.start for span in self.engine(stage)) for stage in STAGES}

    def window(self) -> float:
        """Seconds from the first span's start to the last one's end."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def utilisation(self) -> dict[str, float]:
        """Part of the window in which each engine was busy, 0 to 1."""
        window = self.window()
        return {stage: (busy / window if window else 0.0) for stage, busy in self.busy().items()}

    def share_of_ideal(self, alone: Alone) -> float:
        """The ideal time divided by the time it took, 0 to 1."""
        return ideal(alone, self.batches) / self.seconds if self.seconds else 0.0

    def text(self, alone: Alone | None = None) -> str:
        """The run in a few lines."""
        where = f"{self.device} (times are the model's, not measured)" if self.modelled else self.device
        lines = [
            f"{self.mode} on {where}: {self.batches} batches in {self.seconds * 1e3:.3f} ms, "
            f"{_size(self.bytes_in)} in, {_size(self.bytes_out)} out"
        ]
        if self.spans:
            use, busy = self.utilisation(), self.busy()
            rows = [[stage, f"{busy[stage] * 1e3:.3f}", f"{use[stage]:.1%}"] for stage in STAGES if busy[stage]]
            lines.append(tabulate(rows, ["engine", "busy, ms", "of the run"], "simple", disable_numparse=True))
        if alone is not None:
            best = ideal(alone, self.batches)
            lines.append(f"ideal {best * 1e3:.3f} ms: reached {self.share_of_ideal(alone):.1%} of it")
        return "\n".join(lines)

    def as_dict(self, alone: Alone | None = None) -> dict[str, Any]:
        """For JSON: everything but the spans."""
        found: dict[str, Any] = {
            "mode": self.mode,
            "batches": self.batches,
            "seconds": self.seconds,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "modelled": self.modelled,
        }
        if self.spans:
            found["window_seconds"] = self.window()
            found["busy_seconds"] = self.busy()
            found["utilisation"] = self.utilisation()
        if alone is not None:
            found["ideal_seconds"] = ideal(alone, self.batches)
            found["share_of_ideal"] = self.share_of_ideal(alone)
        return found


def table(reports: Mapping[str, Report], alone: Alone | None = None, *, baseline: str | None = None) -> str:
    """Runs side by side, beside the one named `baseline`, by default the first.

    Raises:
        ValueError: no run has that name.
    """
    baseline = next(iter(reports)) if baseline is None else baseline
    if baseline not in reports:
        raise ValueError(f"baseline {baseline!r}: choose one of the runs, {', '.join(reports)}")
    rows, yardstick = [], reports[baseline]
    for name, report in reports.items():
        row = [name, report.batches, f"{report.seconds * 1e3:.3f}", f"{yardstick.seconds / report.seconds:.2f}×"]
        use = report.utilisation()
        row += [f"{use[stage]:.0%}" if report.spans else "" for stage in _ENGINES]
        if alone is not None:
            row.append(f"{report.share_of_ideal(alone):.1%}")
        rows.append(row)
    headers = ["mode", "batches", "ms", f"vs {baseline}", *(f"{stage} busy" for stage in _ENGINES)]
    return tabulate(rows, [*headers, *(["of ideal"] if alone is not None else [])], "simple", disable_numparse=True)


def _size(nbytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"

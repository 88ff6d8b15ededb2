"""A timeline: rows of intervals, and arrows from what was waited for to who waited. Plain data, whoever measured it.

Times are nanoseconds from the launch's first moment that is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

# Kinds of rows.
WARP, COPY_ROW, TENSOR_ROW, BARRIER_ROW, SM_ROW = "warp", "copies", "tensor cores", "barrier", "multiprocessor"

# Kinds of intervals.
COMPUTE = "compute"  # a warp computes
WAIT = "wait"  # a warp waits for a copy, an mbarrier or a group
BARRIER = "barrier"  # a warp waits for the others of its block or cluster
ISSUE = "issue"  # a warp asks for copies, or for products of the tensor cores
LOAD = "load"  # a warp copies by itself: loads to registers, stores to shared memory
COPY = "copy"  # a copy to shared memory is in flight
STORE = "store"  # a copy from shared memory is in flight
TENSOR = "tensor"  # the tensor cores multiply
PHASE = "phase"  # a phase of an mbarrier
BUSY = "busy"  # a part of the multiprocessor is busy
PART = "part"  # a part of the kernel that it names itself
MARK = "mark"  # a moment that the kernel names, or an arrival


@dataclass(frozen=True)
class Block:
    """A block of the launch and the multiprocessor it ran on; without a number, what all blocks of that share."""

    number: int | None
    multiprocessor: int = 0

    @property
    def name(self) -> str:
        """Its name, for people."""
        where = f"SM {self.multiprocessor}"
        return where if self.number is None else f"block {self.number} on {where}"


@dataclass(frozen=True)
class Row:
    """A row of a block: a warp, the copies for one barrier, the tensor cores, an mbarrier; or a part of the
    multiprocessor. `note` says more."""

    block: Block
    kind: str
    name: str
    note: str = ""


@dataclass(frozen=True)
class Interval:
    """From `start` to `end` in a row. `seen` is False for a copy of which only the latest possible end is known."""

    row: Row
    start: float
    end: float
    kind: str
    name: str
    detail: str = ""
    seen: bool = True


@dataclass(frozen=True)
class Flow:
    """Something at `start` in a row that something at `end` in another row was waiting for."""

    source: Row
    start: float
    target: Row
    end: float
    name: str


@dataclass
class Timeline:
    """What went on in the blocks that were watched.

    Attributes:
        title: the kernel.
        device: what ran it.
        rows: in the order in which they are to be shown.
        intervals, flows: in no order.
        notes: what a reader should know, such as records that were dropped.
        whole: whether every block of the launch was watched.
    """

    title: str
    device: str
    rows: list[Row] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    flows: list[Flow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: bool = True

    @property
    def blocks(self) -> list[Block]:
        """The blocks that have rows, in order."""
        return list(dict.fromkeys(row.block for row in self.rows if row.block.number is not None))

    @property
    def span(self) -> tuple[float, float]:
        """The first start and the last end; (0, 0) if there is nothing."""
        if not self.intervals:
            return 0.0, 0.0
        return min(i.start for i in self.intervals), max(i.end for i in self.intervals)

    def of(self, blocks: Iterable[Block]) -> Timeline:
        """The part that concerns these blocks, and their multiprocessors."""
        wanted = set(blocks)
        wanted |= {Block(None, block.multiprocessor) for block in wanted}
        return replace(
            self,
            rows=[row for row in self.rows if row.block in wanted],
            intervals=[interval for interval in self.intervals if interval.row.block in wanted],
            flows=[flow for flow in self.flows if flow.source.block in wanted and flow.target.block in wanted],
            whole=self.whole and wanted >= set(self.blocks),
        )

    def between(self, start: float, end: float) -> Timeline:
        """The part between two times; intervals that reach over are cut."""
        return replace(
            self,
            intervals=[
                replace(interval, start=max(interval.start, start), end=min(interval.end, end))
                for interval in self.intervals
                if interval.start < end and interval.end > start or start <= interval.start == interval.end <= end
            ],
            flows=[flow for flow in self.flows if flow.start >= start and flow.end <= end],
        )

    def middle_block(self) -> Block:
        """The block half-way through those that were watched.

        Raises:
            ValueError: there is none.
        """
        blocks = self.blocks
        if not blocks:
            raise ValueError(f"the timeline of {self.title} has no block: none that was chosen ran")
        return blocks[len(blocks) // 2]

    def svg(self, **options: object) -> str:
        """A picture of one block; see `numba_tma.timeline.svg.draw`."""
        from .svg import draw

        return draw(self, **options)

    def trace_events(self) -> dict[str, object]:
        """All of it as a Perfetto or Chrome trace; see `numba_tma.timeline.perfetto.trace_events`."""
        from .perfetto import trace_events

        return trace_events(self)

    def save(self, path: str | Path, **options: object) -> None:
        """Write a picture of one block (.svg, .png) or all of it for viewers such as ui.perfetto.dev (.json).

        Args:
            path: the file; its suffix says what.
            options: for a picture, those of `svg`.

        Raises:
            ImportError: a .png, and no cairosvg is installed.
            ValueError: another suffix, or a block that was not watched.
        """
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.trace_events()))
        elif path.suffix == ".svg":
            path.write_text(self.svg(**options))
        elif path.suffix == ".png":
            try:
                from cairosvg import svg2png
            except ImportError:
                raise ImportError(
                    f"{path}: pictures as .png need cairosvg: pip install cairosvg, or write .svg"
                ) from None
            svg2png(bytestring=self.svg(**options).encode(), write_to=str(path), scale=2)
        else:
            raise ValueError(f"{path}: a timeline is written as .svg, .png (one block) or .json (all of it)")

    def block(self, number: int) -> Block:
        """The block of that number.

        Raises:
            ValueError: it was not watched; the message says which were.
        """
        for block in self.blocks:
            if block.number == number:
                return block
        known = ", ".join(str(block.number) for block in self.blocks[:20])
        raise ValueError(
            f"block {number} is not in the timeline; it has {known or 'none'}{', …' * (len(self.blocks) > 20)}"
        )

    def _repr_svg_(self) -> str:
        return self.svg()

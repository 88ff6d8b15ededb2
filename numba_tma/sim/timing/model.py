"""What the model of time takes and gives: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .device import Device


@dataclass(frozen=True)
class MachineInstruction:
    """One instruction of the machine code that the PTX became.

    Attributes:
        line: the PTX line that it came from, from 1.
        mnemonic: its name, such as "LDG.E.128".
        stall: cycles until the warp may issue its next one, as the assembler wrote into the instruction.
        block: number of the stretch of machine code without a branch that it stands in.
    """

    line: int
    mnemonic: str
    stall: int
    block: int


@dataclass(frozen=True)
class ModelOptions:
    """How to model a launch.

    Attributes:
        device: the constants; by default those that come with the package.
        machine_code: what the kernel's PTX became, in the order of the machine code. Without it the model takes the
            PTX for the machine code: it knows neither what the assembler folded nor where it moved the loads.
        registers: registers of a thread, which limit how many blocks an SM holds; 0: not known.
        sample: execute only the blocks that the modelled SM gets. The results of the launch are then incomplete; it is
            for large grids. Blocks must not wait for each other, other than within a cluster.
        warm: take all of what the kernel reads to be in the L2 cache at the start, as far as it fits.
        blocks: how many blocks of an SM to play, at most; beyond, the rate that the SM has settled at is extrapolated.
        intervals: how many timed intervals to keep, at most.
    """

    device: Device | None = None
    machine_code: Sequence[MachineInstruction] = ()
    registers: int = 0
    sample: bool = False
    warm: bool = False
    blocks: int = 64
    intervals: int = 200_000


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that took modelled time.

    Attributes:
        row: who, from the outside inwards, parted by "/": "SM 0/block 132/warp 3", "SM 0/block 132/copies",
            "SM 0/block 132/products", "SM 0/block 132/mbarrier full[1]", "SM 0/copy engine",
            "SM 0/scheduler 2/tensor core".
        start, end: in modelled nanoseconds from the kernel's begin on the SM.
        kind: for warps "run" or "wait"; for engines "busy"; for copies on their way "flight"; for barriers "phase";
            for a warp's groups of wgmma "product", while its tensor core is at one.
        detail: what is waited for, copied, or completes the phase; with the line that says so.
    """

    row: str
    start: float
    end: float
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class WarpTime:
    """Where the modelled cycles of one warp went: `run`, and `waits` by reason. `row` as in `Interval`."""

    row: str
    start: float
    end: float
    run: float
    waits: dict[str, float]


@dataclass(frozen=True)
class Stall:
    """Who waited for whom: the cycles of all modelled warps that waited at one place for the same thing.

    Attributes:
        reason: "mbarrier", "block barrier", "global memory", … .
        place: the waiting instruction's line in the source, or in the PTX; of a load and its like the instruction
            whose result is waited for. Empty where a queue is full.
        on: what was waited for, and the place of what ended the wait, where that is another instruction.
        cycles: summed over the modelled warps.
        share: of all their cycles.
    """

    reason: str
    place: str
    on: str
    cycles: float
    share: float


@dataclass
class Model:
    """What the model says of one launch. All figures are the model's.

    Attributes:
        cycles: SM clock cycles from the kernel's first instruction to the end of its last store.
        seconds: those, and what a launch costs beside them, at the device's clock.
        device: the name of the GPU whose constants were used; `provisional` where they are not measured.
        blocks: of the grid, `blocks_per_sm` of which the busiest SM gets, `resident` at a time, and `played` of which
            were played. If fewer were played than it gets, the rest is extrapolated.
        machine_code: whether the machine code was known.
        warps: where each played warp's cycles went.
        stalls: who waited for whom, longest first.
        busy: the share of the cycles that each part of the SM was busy.
        intervals: what happened when, in no particular order; `truncated` says whether some are left out.
        clocks: modelled nanoseconds at which each warp, by (block, warp), read a clock, in the order in which it did.
        notes: what a reader should know of this result.
    """

    cycles: float
    seconds: float
    device: str
    provisional: bool
    blocks: int
    blocks_per_sm: int
    resident: int
    played: int
    machine_code: bool
    warps: list[WarpTime] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    intervals: list[Interval] = field(default_factory=list)
    truncated: bool = False
    clocks: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"modelled: {self.cycles:,.0f} cycles, {self.seconds * 1e6:,.2f} µs with the launch ({self.device}"
            f"{', provisional constants' if self.provisional else ''})",
            f"{self.blocks} blocks, {self.blocks_per_sm} for the busiest SM, {self.resident} at a time, "
            f"{self.played} played",
            "busy: " + ", ".join(f"{name} {share:.0%}" for name, share in self.busy.items()),
        ]
        for stall in self.stalls[:8]:
            if stall.share >= 0.005:
                place = f" at {stall.place}" if stall.place else ""
                lines.append(f"{stall.share:6.1%} {stall.reason}{place}" + (f": {stall.on}" if stall.on else ""))
        return "\n".join(lines + self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without the intervals."""
        return {
            "cycles": self.cycles,
            "seconds": self.seconds,
            "device": self.device,
            "provisional": self.provisional,
            "blocks_per_sm": self.blocks_per_sm,
            "resident": self.resident,
            "played": self.played,
            "machine_code": self.machine_code,
            "busy": self.busy,
            "stalls": [vars(stall) for stall in self.stalls[:4]],
            "notes": self.notes,
        }

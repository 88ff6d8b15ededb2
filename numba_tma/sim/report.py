"""What a launch gives back: counts, hazards, printed text; and the account of who waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .bank_conflicts import BankUse
from .timing.model import Model

if TYPE_CHECKING:
    from .fragment import Fragment
    from .machine import Machine
    from .scheduler import Scheduler

_MAX_LINES = 40


@dataclass(frozen=True)
class Hazard:
    """Something that went on here and may go wrong on a GPU.

    `severity` is "error" (the kernel is wrong) or "warning". `locations` are the source lines of all the instructions
    that have a part in it, `instruction` the one it was found at.
    """

    identifier: str
    message: str
    instruction: Any = None
    severity: str = "error"
    locations: tuple = ()

    def __str__(self) -> str:
        if "\n" in self.message:
            return f"{self.severity}: {self.identifier}: {self.message}"
        line = getattr(self.instruction, "line", None)
        location = getattr(self.instruction, "location", None)
        where = f" (PTX line {line})" if line else ""
        return f"{self.identifier}: {self.message}{where}" + (f"\n  from {location}" if location else "")


@dataclass
class Report:
    """Counts of one launch.

    `instructions` counts an instruction once for each warp that issues it, `lane_instructions` once for each
    thread, `steps` once for each time the simulator executes it (for many blocks at once). `bytes` has the bytes
    moved by the copy engine (tma_load, tma_store, tma_reduce, bulk_load, bulk_store, bulk_reduce, bulk_cluster,
    cp_async) and by threads (ld_global, st_global, atom_global, ld_shared, st_shared, atom_shared). `output` is what
    the kernel printed. `model` is what the model of time says, if the launch asked for it; `banks` what the accesses to
    shared memory took, "ld_shared" and "st_shared", and `banks_by_place` the same by instruction, if it asked for that.
    """

    instructions: int = 0
    lane_instructions: int = 0
    steps: int = 0
    bytes: dict[str, int] = field(default_factory=dict)
    hazards: list[Hazard] = field(default_factory=list)
    output: str = ""
    model: Model | None = None
    banks: dict[str, BankUse] = field(default_factory=dict)
    banks_by_place: dict[str, BankUse] = field(default_factory=dict)


def place_of(instruction: Any) -> str:
    """An instruction's source line and PTX line, for reports."""
    if instruction is None:
        return "the end of the function"
    location = getattr(instruction, "location", None)
    where = f"{location}: " if location else ""
    return f"{where}{instruction.text} (PTX line {instruction.line})"


def waiting_report(machine: Machine, scheduler: Scheduler) -> str:
    """A line for each group of alike threads: who, where, what for; then what is in flight."""
    waiting: dict[tuple[str, str], dict[int, list[int]]] = {}

    def note(fragment: Fragment, texts: list[str]) -> None:
        place = place_of(fragment.block.first_instruction)
        for slot, thread, text in zip(fragment.slot.tolist(), fragment.thread.tolist(), texts, strict=True):
            waiting.setdefault((place, text), {}).setdefault(slot, []).append(thread)

    for wait in scheduler.waits:
        note(wait.fragment, wait.describe(wait.fragment, wait.data))
    for fragment in scheduler.gathering.values():
        note(fragment, ["waits for the other lanes of its warp to come to this instruction"] * fragment.n)
    for fragment in scheduler.ready.values():
        note(fragment, ["runs"] * fragment.n)
    # Blocks whose threads of the same numbers wait for the same have one line.
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for (place, text), blocks in waiting.items():
        for slot, threads in blocks.items():
            groups.setdefault((place, text, tuple(sorted(threads))), []).append(slot)
    rows = sorted((min(slots), threads, place, text, len(slots)) for (place, text, threads), slots in groups.items())
    lines = []
    for slot, threads, place, text, blocks in rows:
        count = blocks * len(threads)
        more = f" and {blocks - 1} more block{'s' * (blocks > 2)}" if blocks > 1 else ""
        who = f"block {machine.block_name(slot)}{more}, {_who(np.array(threads))}"
        lines.append(f"{who}: {count} thread{'s' * (count > 1)} at {place}: {text}")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"… and {len(lines) - _MAX_LINES} more groups of threads"]
    flying = machine.engine.outstanding()
    lines.extend(f"in flight: {line}" for line in flying[:_MAX_LINES])
    if not flying:
        lines.append("no copy is in flight")
    return "\n".join(lines)


def _who(threads: np.ndarray) -> str:
    """Threads of a block by their warps."""
    warps = np.unique(threads // 32)
    if warps.size > 1 and (np.bincount(threads // 32)[warps] == 32).all():
        return f"warps {_ranges(warps)}"
    if warps.size == 1:
        return f"warp {warps[0]}" + ("" if threads.size == 32 else f" lanes {_ranges(threads % 32)}")
    return f"threads {_ranges(threads)}"


def _ranges(numbers: np.ndarray) -> str:
    numbers = np.unique(numbers)
    breaks = np.nonzero(np.diff(numbers) != 1)[0] + 1
    parts = [(int(part[0]), int(part[-1])) for part in np.split(numbers, breaks)]
    text = [f"{a}" if a == b else f"{a}-{b}" for a, b in parts[:8]]
    return ", ".join(text) + (", …" if len(parts) > 8 else "")

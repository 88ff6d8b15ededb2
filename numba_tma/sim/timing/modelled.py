"""A launch under the model: which blocks are written down, and what is made of it in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .device import default_device
from .model import Model, ModelOptions
from .occupancy import plan, resident_blocks
from .ops import Costs
from .parts import Timeline
from .record import Recorder
from .regions import Regions
from .replay import Replay

if TYPE_CHECKING:
    from ..machine import Machine


class Modelled:
    """The model's part in one launch."""

    def __init__(self, machine: Machine, options: ModelOptions) -> None:
        self._machine = machine
        self._options = options
        self._device = options.device or default_device()
        self._per_sm = resident_blocks(self._device, machine.threads, machine.shared_bytes, options.registers)
        most = max(options.blocks, 3 * self._per_sm * machine.cluster_size)
        self.plan, self._units = plan(self._device, machine.blocks, machine.cluster_size, self._per_sm, most)

    def recorder(self) -> Recorder:
        """What watches the launch."""
        return Recorder(self._machine, self._device, self.plan.blocks, self._per_sm, self._options.warm)

    def play(self, recorder: Recorder) -> Model:
        """The model's result for what was written down."""
        machine, device, options = self._machine, self._device, self._options
        costs = Costs(device, options.machine_code)
        regions = Regions(costs, machine.program.blocks.values())
        missing, spilled, names = recorder.missing(), self._spilled(), self._barrier_names()

        def played_with(stretch: float) -> tuple[Replay, Timeline, float]:
            timeline = Timeline(device, options.intervals)
            traces, needed = recorder.finished, recorder.needed
            replay = Replay(
                device, self.plan, stretch, traces, needed, missing, regions, spilled, timeline, names, _place
            )
            return replay, timeline, replay.run()

        replay, timeline, cycles = _settled(played_with)
        played = len(self.plan.units)
        total = self._extrapolated(cycles, replay.unit_ends)
        seconds = device.launch_seconds + total / (device.clock_mhz * 1e6)
        model = Model(
            cycles=total,
            seconds=seconds,
            device=device.name,
            provisional=device.provisional,
            blocks=machine.blocks,
            blocks_per_sm=self._units,
            resident=self.plan.resident,
            played=played,
            machine_code=costs.known,
            warps=replay.times,
            stalls=replay.stalls(),
            busy=replay.busy(cycles),
            intervals=timeline.intervals,
            truncated=timeline.truncated,
            clocks={
                warp: [cycles * 1e3 / device.clock_mhz for cycles in times] for warp, times in replay.clocks.items()
            },
        )
        if played < self._units:
            model.notes.append(
                f"{self._units - played} further blocks an SM are extrapolated from the last ones played"
            )
        if options.sample:
            model.notes.append("only the blocks that were played were executed: the results are incomplete")
        if replay.unfinished:
            model.notes.append("warps waited for blocks that were not played; those waits are taken as none")
        return model

    def _extrapolated(self, cycles: float, ends: list[float]) -> float:
        """The cycles for all blocks of the busiest SM."""
        rest = self._units - len(ends)
        resident = self.plan.resident
        if rest <= 0 or len(ends) <= resident:
            return cycles * (1 + rest / len(ends)) if rest > 0 else cycles
        ends = sorted(ends)
        return cycles + rest * (ends[-1] - ends[resident - 1]) / (len(ends) - resident)

    def _spilled(self) -> float:
        """The part of the bytes written that L2 does not hold."""
        machine = self._machine
        moved = machine.engine.bytes
        written = (
            machine.stored[0] + machine.atomic[0] + sum(moved[k] for k in ("tma_store", "bulk_store", "tma_reduce"))
        )
        written = written * machine.blocks / machine.block_numbers.size
        return max(1 - self._device.l2_bytes / written, 0.0) if written else 0.0

    def _barrier_names(self) -> Any:
        machine = self._machine

        def name_of(key: tuple) -> str:
            kind, _, number = (*key, 0)[:3]
            if kind != "mbarrier":
                return f"barrier {number}"
            name = machine.shared_name(8 * number)
            return f"mbarrier {name}" if name else f"mbarrier at {8 * number:#x}"

        return name_of


# SMs are idle at different times, so while one asks for something it gets more than its share. That is settled when
# all that is asked for, over the time that it takes, is this part of what there is; below the least it matters little.
_MOST_USED, _LEAST_USED = 0.97, 0.15
_ROUNDS = 3


def _settled(play: Callable[[float], tuple[Replay, Timeline, float]]) -> tuple[Replay, Timeline, float]:
    """A replay in which an SM gets, while it asks, as much of the memory's rate as the others leave to it."""
    stretch = 1.0
    best = play(stretch)
    used = best[0].used(best[2])
    if not _LEAST_USED < used < _MOST_USED:
        return best
    high = None
    for _ in range(_ROUNDS):
        wider = stretch * _MOST_USED / used if high is None else (stretch + high) / 2
        tried = play(wider)
        now = tried[0].used(tried[2])
        if now > _MOST_USED:
            high = wider
            continue
        gain = now / used
        best, stretch, used = tried, wider, now
        if gain < 1.03 or used > _MOST_USED - 0.02:
            break
    return best


def _place(instruction: Any) -> str:
    """Where an instruction stands, in the source if that is known."""
    words = [instruction.opcode]
    for word in instruction.modifiers:
        if "::" in word or word == "shared":
            break
        words.append(word)
    name = ".".join(words)
    location = getattr(instruction, "location", None)
    if location is not None:
        return f"{location.kernel_line} ({name})"
    return f"PTX line {instruction.line} ({name})"

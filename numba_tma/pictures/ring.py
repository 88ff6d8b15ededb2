"""A ring of buffers in use: the events of a simulated run, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda, float32

from .. import ptx
from ..launch import kernel, use_backend
from ..pipeline import mbarrier_wait, ring
from ..shared import Barriers, Shared, Tiles
from ..sim.observer import Observer
from ..tensor_map import TensorMap
from .svg import Picture

STAGES, STEPS, CONSUMERS = 3, 9, 2
_ROWS, _COLUMNS = 8, 32
_smem = Shared(tile=Tiles(STAGES, (_ROWS, _COLUMNS), float32), full=Barriers(STAGES), empty=Barriers(STAGES))
_SHARED_BEGIN = 1024  # where a plan's memory begins in a block's


@kernel(threads=32 * (CONSUMERS + 1), shared=_smem)
def _sums(x_map, out, steps):
    thread = cuda.threadIdx.x
    if thread == 0:
        for stage in range(STAGES):
            ptx.mbarrier_init(_smem.full[stage], 1)
            ptx.mbarrier_init(_smem.empty[stage], CONSUMERS)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    if thread == 32 * CONSUMERS:  # the producer
        for step in range(steps):
            stage, phase = ring(step, STAGES)
            mbarrier_wait(_smem.empty[stage], phase ^ 1)
            ptx.mbarrier_arrive_expect_tx(_smem.full[stage], x_map.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(_smem.tile[stage], x_map, 0, step * _ROWS, _smem.full[stage])
    elif thread < 32 * CONSUMERS:
        total = float32(0)
        for step in range(steps):
            stage, phase = ring(step, STAGES)
            mbarrier_wait(_smem.full[stage], phase)
            for row in range(_ROWS):
                total += _smem.tile[stage][row, thread % _COLUMNS]
            ptx.fence_proxy_async_shared_cta()
            cuda.syncwarp()
            if thread % 32 == 0:
                ptx.mbarrier_arrive(_smem.empty[stage])
        out[thread] = total


@dataclass
class Turn:
    """One tile's stay in a stage: numbers of the events when it was asked for, landed, was read and given back."""

    stage: int
    step: int
    asked: int
    landed: int = -1
    read: int = -1
    released: int = -1


class _Watch(Observer):
    """Collects the turns; other events than those of a turn have no number."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.events = 0

    def copy_to_shared(self, thread: int, targets: tuple, start: int, nbytes: int, *_: Any, **__: Any) -> None:
        stage = (start - _SHARED_BEGIN - _smem.offsets["tile"]) // nbytes
        self.turns.append(Turn(stage, len(self.turns), self._next()))

    def phase_completed(self, index: int) -> None:
        name, stage = _barrier(index)
        turn = self._latest(stage)
        if name == "full":
            turn.landed = self._next()
        else:
            turn.released = self._next()

    def mbarrier(self, fragment: Any, instruction: Any, index: np.ndarray, value: np.ndarray | None = None) -> None:
        name, stage = _barrier(int(np.ravel(index)[0]))
        if name == "full" and "wait" in instruction.text:
            turn = self._latest(stage)
            if turn.read < 0:
                turn.read = self._next()

    def _latest(self, stage: int) -> Turn:
        return next(turn for turn in reversed(self.turns) if turn.stage == stage)

    def _next(self) -> int:
        self.events += 1
        return self.events - 1


def _barrier(index: int) -> tuple[str, int]:
    """Which of the plan's barriers is the 64-bit word of this number."""
    offset = 8 * index - _SHARED_BEGIN
    name = "full" if offset < _smem.offsets["empty"] else "empty"
    return name, (offset - _smem.offsets[name]) // 8


def turns() -> tuple[list[Turn], int]:
    """The turns of a run of 9 tiles, and the number of their events.

    Copies land when no thread can go on, and each warp runs until it must wait: so the order follows from the waits
    alone, not from how the kernel was compiled.
    """
    x = np.arange(STEPS * _ROWS * _COLUMNS, dtype=np.float32).reshape(-1, _COLUMNS)
    out = np.empty(32 * CONSUMERS, np.float32)
    watch = _Watch()
    with use_backend("sim", policy="late", warp_order="ascending", observer=watch):
        _sums[1](TensorMap(x, _smem.tile), out, np.int32(STEPS))
    return watch.turns, watch.events


def draw() -> str:
    """The picture."""
    found, events = turns()
    left, top, column, height = 96, 88, 20.5, 34
    picture = Picture(
        860,
        276,
        "A ring of three buffers: copies under way while others are read",
        "For each of three buffers, event by event: a tile is asked for, lands, is read and is given back, and the "
        "next is asked for.",
    )
    picture.text(24, 34, "A ring of three buffers", "ink head")
    picture.text(
        24,
        54,
        "The order of events in a simulated run in which the copies are slow; no time. Numbers are tiles.",
        "muted",
    )
    for stage in range(STAGES):
        y = top + stage * (height + 8)
        picture.text(24, y + 21, f"buffer {stage}", "ink bold")
        picture.rect(left, y, events * column, height, "empty", 3)
    for turn in found:
        y = top + turn.stage * (height + 8)
        spans = [(turn.asked, turn.landed, "c0"), (turn.landed, turn.read, "c2"), (turn.read, turn.released, "c1")]
        for begin, end, tint in spans:
            picture.rect(left + begin * column, y, (end - begin) * column - 1, height, tint, 3)
        picture.text(left + (turn.asked + turn.landed) / 2 * column, y + 21, f"{turn.step}", "ink mono", "middle")
    y = top + STAGES * (height + 8) + 16
    picture.text(24, y, "under way", "muted")
    for event in range(events):
        count = sum(turn.asked <= event < turn.landed for turn in found)
        picture.text(left + (event + 0.5) * column, y, f"{count}", "muted small", "middle")
    words = [("c0", "copy under way"), ("c2", "landed"), ("c1", "being read"), ("empty", "free")]
    picture.legend(left, y + 24, words)
    return picture.svg()

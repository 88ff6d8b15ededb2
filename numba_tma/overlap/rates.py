"""What the machine can do: rates of the copy engines, and what each stage of a pipeline takes by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .gpu import GpuEngines
from .modes import D2H, H2D
from .pipeline import Pipeline
from .report import Alone

_REPEATS = 5
_IN_A_ROW = 4  # pieces of work behind each other, as in a pipeline that is full


@dataclass(frozen=True)
class Rates:
    """Bytes a second to and from a GPU: page-locked memory with the other direction idle or busy, and pageable."""

    h2d_alone: float
    d2h_alone: float
    h2d: float
    d2h: float
    h2d_pageable: float
    d2h_pageable: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


class _Copies:
    """Copies both ways between buffers of their own, on a stream each."""

    def __init__(self, engines: GpuEngines, in_bytes: int, out_bytes: int, pinned: bool = True) -> None:
        self.engines = engines
        byte = np.dtype(np.uint8)
        self.sizes = {H2D: in_bytes, D2H: out_bytes}
        self._host = {way: engines.host_array((size,), byte, pinned) for way, size in self.sizes.items()}
        self._device = {way: engines.device_array((size,), byte) for way, size in self.sizes.items()}
        self.streams = {way: engines.stream() for way in self.sizes}

    def enqueue(self, way: str) -> None:
        if way == H2D:
            self.engines.copy_in(self._device[way], self._host[way], self.streams[way])
        else:
            self.engines.copy_out(self._host[way], self._device[way], self.streams[way])

    def seconds(self, way: str, other_busy: bool) -> float:
        """Of one copy among several; the other direction is kept busy from before until after them."""
        other = D2H if way == H2D else H2D
        if not self.sizes[way]:
            return 0.0
        samples = []
        for _ in range(_REPEATS):
            if other_busy and self.sizes[other]:
                # So many as fill the time; of short ones no more than come with as many batches.
                for _ in range(2 + min(2 * _IN_A_ROW, -(-2 * _IN_A_ROW * self.sizes[way] // self.sizes[other]))):
                    self.enqueue(other)
            self.enqueue(way)  # by its end the other direction is under way
            samples.append(elapsed(self.engines, self.streams[way], lambda: self.enqueue(way), _IN_A_ROW))
            self.engines.drain(list(self.streams.values()))
        return statistics.median(samples)

    def close(self) -> None:
        for stream in self.streams.values():
            self.engines.close_stream(stream)


def elapsed(engines: Any, stream: Any, enqueue: Callable[[], None], count: int = 1) -> float:
    """Seconds that each of `count` pieces of work takes, put on a stream one behind the other by `enqueue`."""
    before, after = engines.event(), engines.event()
    engines.record(before, stream)
    for _ in range(count):
        enqueue()
    engines.record(after, stream)
    engines.synchronize(after)
    return (engines.seconds(after) - engines.seconds(before)) / count


def steady(engines: Any, stream: Any, enqueue: Callable[[], None], count: int = _IN_A_ROW) -> float:
    """Seconds of a piece of work among `count` like it; the first few, while clocks may still rise, do not count."""
    elapsed(engines, stream, enqueue, count)
    return statistics.median(elapsed(engines, stream, enqueue, count) for _ in range(_REPEATS))


def measure_rates(nbytes: int = 128 << 20, device: int | None = None) -> Rates:
    """Of copies of `nbytes` each way.

    Raises:
        LaunchError: there is no GPU.
    """
    engines = GpuEngines(device)
    engines.begin()
    pinned, pageable = _Copies(engines, nbytes, nbytes), _Copies(engines, nbytes, nbytes, pinned=False)
    try:
        return Rates(
            *(nbytes / pinned.seconds(way, busy) for busy in (False, True) for way in (H2D, D2H)),
            *(nbytes / pageable.seconds(way, False) for way in (H2D, D2H)),
        )
    finally:
        pinned.close()
        pageable.close()


def stages_alone(pipeline: Pipeline, batch: Any, count: int = _IN_A_ROW) -> Alone:
    """Seconds that each stage of a pipeline's batch takes with its engine to itself: copies with the other direction
    busy, the computation with both idle, preparing on a host that does nothing else. From a model, what it says.

    Args:
        batch: one of those that will be run; it is prepared and computed several times.
        count: how often it is computed in a row.
    """
    engines = pipeline.engines
    with pipeline.rehearsal(batch) as rehearsal:
        if engines.modelled:
            model = engines.model
            compute = model.compute(rehearsal.inputs) if callable(model.compute) else model.compute
            copies = [
                sum(model.copy_seconds(spec.nbytes, rate) for spec in arrays.values())
                for arrays, rate in ((pipeline.inputs, model.h2d), (pipeline.outputs, model.d2h))
            ]
            return Alone(copies[0], compute, copies[1], model.prepare)
        compute = steady(engines, rehearsal.stream, rehearsal.compute, count)
        prepare = statistics.median(rehearsal.prepare() for _ in range(_REPEATS))
    copies = _Copies(
        engines,
        sum(spec.nbytes for spec in pipeline.inputs.values()),
        sum(spec.nbytes for spec in pipeline.outputs.values()),
    )
    try:
        busy, idle = ({way: copies.seconds(way, other_busy) for way in (H2D, D2H)} for other_busy in (True, False))
        return Alone(busy[H2D], compute, busy[D2H], prepare, idle[H2D], idle[D2H])
    finally:
        copies.close()

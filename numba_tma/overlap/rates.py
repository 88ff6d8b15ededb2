"""What the machine can do: rates of the copy engines, and what each stage of a pipeline takes by itself."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import arrays, driver
from ..device_array import DeviceArray
from .gpu import GpuEngines, OnDevice, can_access_peer, disable_peer_access, enable_peer_access
from .pipeline import Pipeline
from .report import Alone, Report

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


@dataclass(frozen=True)
class PeerRates:
    """Bytes a second of copies between two GPUs, first from `peer` to `device`, then the other way: with the other
    direction idle, and busy. `access` tells whether either could read the other's memory directly; without, the driver
    takes copies through the host's memory."""

    device: int
    peer: int
    access: bool
    to_device_alone: float
    to_peer_alone: float
    to_device: float
    to_peer: float

    def as_dict(self) -> dict[str, int | bool | float]:
        """For JSON."""
        return asdict(self)


class _Way:
    """Copies in one direction, on a stream of their own."""

    def __init__(self, engines: GpuEngines, nbytes: int, copies: Sequence[Callable[[Any], None]]) -> None:
        self.engines, self.nbytes = engines, nbytes
        self._copies = copies
        self.stream = engines.stream()

    def enqueue(self) -> None:
        self.engines.make_current()  # the other way's GPU may be another one
        for copy in self._copies:
            copy(self.stream)

    def seconds(self, other: _Way | None = None) -> float:
        """Of one round of copies among several; another direction is kept busy from before until after them."""
        if not self.nbytes:
            return 0.0
        samples = []
        for _ in range(_REPEATS):
            if other is not None and other.nbytes:
                # So many as fill the time; of short ones no more than come with as many batches.
                for _ in range(2 + min(2 * _IN_A_ROW, -(-2 * _IN_A_ROW * self.nbytes // other.nbytes))):
                    other.enqueue()
            self.enqueue()  # by its end the other direction is under way
            samples.append(elapsed(self.engines, self.stream, self.enqueue, _IN_A_ROW))
            self.engines.drain([way.stream for way in (self, other) if way is not None])
        return statistics.median(samples)

    def close(self) -> None:
        self.engines.close_stream(self.stream)


def _ways(
    engines: GpuEngines, in_bytes: int, out_bytes: int, pinned: bool = True, on_gpu: Sequence[OnDevice] = ()
) -> tuple[_Way, _Way]:
    """To the device and from it. What lies `on_gpu` is copied in from there, the rest of `in_bytes` from the host."""
    byte = np.dtype(np.uint8)
    engines.make_current()

    def copy_in(source: np.ndarray | OnDevice) -> Callable[[Any], None]:
        target = engines.device_array((source.nbytes,), byte)
        return lambda stream: engines.copy_in(target, source, stream)

    from_host = in_bytes - sum(source.nbytes for source in on_gpu)
    sources = [*([engines.host_array((from_host,), byte, pinned)] if from_host else ()), *on_gpu]
    target, source = engines.host_array((out_bytes,), byte, pinned), engines.device_array((out_bytes,), byte)
    return (
        _Way(engines, in_bytes, [copy_in(source) for source in sources]),
        _Way(engines, out_bytes, [lambda stream: engines.copy_out(target, source, stream)]),
    )


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
    pinned, pageable = (_ways(engines, nbytes, nbytes, kind) for kind in (True, False))
    try:
        alone = [nbytes / way.seconds() for way in pinned]
        busy = [nbytes / way.seconds(other) for way, other in (pinned, pinned[::-1])]
        return Rates(*alone, *busy, *(nbytes / way.seconds() for way in pageable))
    finally:
        for way in (*pinned, *pageable):
            way.close()


def measure_peer_rates(nbytes: int = 256 << 20, device: int = 0, peer: int = 1) -> list[PeerRates]:
    """Of copies of `nbytes` between two GPUs, as a pipeline's copy in makes them: without peer access, then with it if
    the machine has it. It is left enabled.

    Raises:
        ArithmeticError: a copy is not what was copied.
        LaunchError: there are no two such GPUs.
    """
    if device == peer or not all(0 <= ordinal < driver.device_count() for ordinal in (device, peer)):
        raise driver.LaunchError(
            f"copies between GPU {device} and GPU {peer}: they take two different ones of the {driver.device_count()} "
            f"here"
        )
    words = np.random.default_rng(0).integers(0, 2**32, nbytes // 4, np.uint32)
    pairs = ((device, peer), (peer, device))
    ways, targets = zip(*(_from_peer(*pair, words) for pair in pairs), strict=True)
    found = []
    try:
        for access in (False, True):
            if access and not all(can_access_peer(*pair) for pair in pairs):
                continue
            for pair in pairs:
                (enable_peer_access if access else disable_peer_access)(*pair)
            for way, target in zip(ways, targets, strict=True):
                way.engines.make_current()
                target.poison()
                driver.synchronize()  # the copies' streams do not wait for the default stream
            alone = [way.nbytes / way.seconds() for way in ways]
            busy = [way.nbytes / way.seconds(other) for way, other in (ways, ways[::-1])]
            for way, target in zip(ways, targets, strict=True):
                way.engines.make_current()
                if not np.array_equal(target.to_host(), words):
                    raise ArithmeticError(f"a copy between GPU {device} and GPU {peer} differs from what was copied")
            found.append(PeerRates(device, peer, access, *alone, *busy))
    finally:
        for way in ways:
            way.close()
        for pair in pairs:
            enable_peer_access(*pair)
    return found


def _from_peer(reader: int, owner: int, words: np.ndarray) -> tuple[_Way, DeviceArray]:
    """Copies of words that GPU `owner` has to GPU `reader`, and where they go."""
    GpuEngines(owner).make_current()
    array = DeviceArray(words)
    engines = GpuEngines(reader)
    engines.begin()
    source = engines.on_device(array, arrays.view(array))
    target = engines.device_array(words.shape, words.dtype)
    return _Way(engines, source.nbytes, [functools.partial(engines.copy_in, target, source)]), target


def run(pipeline: Pipeline, batches: Sequence[Any], count: int) -> Report:
    """A run of `count` batches, the same again and again, whose results are let go of at once."""
    for result in pipeline.run((batches[i % len(batches)] for i in range(count)), copy=False):
        result.release()
    return pipeline.report


def middle(reports: Sequence[Report]) -> Report:
    """Of runs of the same, the one of median time."""
    return sorted(reports, key=lambda report: report.seconds)[len(reports) // 2]


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
                sum(model.copy_seconds(spec.nbytes, rate) for spec in specs.values())
                for specs, rate in ((pipeline.inputs, model.h2d), (pipeline.outputs, model.d2h))
            ]
            return Alone(copies[0], compute, copies[1], model.prepare)
        compute = steady(engines, rehearsal.stream, rehearsal.compute, count)
        prepare = statistics.median(rehearsal.prepare() for _ in range(_REPEATS))
        on_gpu = [source for source in rehearsal.sources.values() if isinstance(source, OnDevice)]
    sizes = (sum(spec.nbytes for spec in specs.values()) for specs in (pipeline.inputs, pipeline.outputs))
    there, back = _ways(engines, *sizes, on_gpu=on_gpu)
    try:
        return Alone(there.seconds(back), compute, back.seconds(there), prepare, there.seconds(), back.seconds())
    finally:
        there.close()
        back.close()

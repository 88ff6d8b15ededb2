"""The three engines without a GPU: a model with a clock, on NumPy arrays.

What is modelled. An engine for copies in, one for computing, one for copies out, each doing one thing after another in
the order of submission. A copy takes a fixed time and its bytes divided by a rate; a computation takes what `Model`
says. Work begins when its stream, its engine and the events that its stream waits for are ready. A copy of pageable
memory holds the host until it is done. Submitting costs the host nothing.

What is real. Each piece of work is done to the arrays when its modelled time comes: a copy reads its source when it
begins and writes its target when it ends, a computation reads when it begins and its outputs appear when it ends. So
a program that forgets to wait gets the wrong numbers here as well.

Times that come out are the model's, never a measurement.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .modes import COMPUTE, D2H, H2D


@dataclass(frozen=True)
class Model:
    """Rates and times of the modelled machine. The defaults are those of an H200 on PCIe 5.0 ×16.

    Attributes:
        h2d, d2h: bytes a second from and to page-locked memory, with the other direction busy.
        alone: the same with the other direction idle, which is so in the serial modes.
        pageable: bytes a second of pageable memory.
        latency: seconds that a copy takes besides.
        compute: seconds that computing one batch takes, or a function of the inputs that gives them.
        prepare: seconds that the host takes to prepare one batch.
        scale: how many bytes a byte of the arrays stands for. What the simulator can compute is small beside what is
            worth copying.
    """

    h2d: float = 50e9
    d2h: float = 50e9
    alone: float = 55e9
    pageable: float = 20e9
    latency: float = 2e-6
    compute: float | Callable[[Mapping[str, np.ndarray]], float] = 1e-3
    prepare: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("h2d", "d2h", "alone", "pageable"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Model: {name} {getattr(self, name)!r}; expected bytes a second, more than 0")
        if not self.scale > 0:
            raise ValueError(f"Model: scale {self.scale!r}; expected more than 0")
        for name in ("latency", "compute", "prepare"):
            value = getattr(self, name)
            if not callable(value) and not value >= 0:
                raise ValueError(f"Model: {name} {value!r}; expected seconds, 0 or more")

    def words(self) -> str:
        """The assumptions in a line."""
        compute = "as given" if callable(self.compute) else f"{self.compute * 1e3:.4g} ms"
        return (
            f"model: H2D {self.h2d / 1e9:g} GB/s and D2H {self.d2h / 1e9:g} GB/s with both busy, "
            f"{self.alone / 1e9:g} alone, {self.pageable / 1e9:g} pageable, {self.latency * 1e6:g} µs a copy, "
            f"computing {compute}, preparing {self.prepare * 1e3:g} ms"
            + (f", a byte for {self.scale:g}" if self.scale != 1 else "")
        )

    def copy_seconds(self, nbytes: int, rate: float) -> float:
        """What a copy of arrays of `nbytes` takes."""
        return self.latency + nbytes * self.scale / rate


@dataclass
class ModelStream:
    """A stream: when all that is on it will have been done. The simulator's launches take it, and run at once."""

    ready: float = 0.0

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0


@dataclass
class ModelEvent:
    """An event: when it happens."""

    time: float = 0.0


@dataclass(order=True)
class _Effect:
    time: float
    number: int
    apply: Callable[[], None] = field(compare=False)


class ModelEngines:
    """The engines of a `Model`, under the names of `GpuEngines`. Threads have a modelled clock each."""

    modelled = True
    ordinal = 0

    def __init__(self, model: Model | None = None, *, pinned: bool = True, both_busy: bool = True) -> None:
        self.model = Model() if model is None else model
        self.name = self.model.words()
        self._pinned, self._both_busy = pinned, both_busy
        self._free = dict.fromkeys((H2D, COMPUTE, D2H), 0.0)
        self._effects: list[_Effect] = []
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._clocks = threading.local()
        self._origin = 0.0

    def enter_thread(self) -> None:
        """A thread's clock starts where time counts from."""
        self._clocks.now = self._origin

    def make_current(self) -> None:
        """There is no GPU that could be the current one."""

    def now(self) -> float:
        """This thread's clock, in seconds since `begin`."""
        return self._clock() - self._origin

    def catch_up(self, stamp: float) -> None:
        """What this thread goes on with was not ready before `stamp` (of another thread's `now`)."""
        self._clocks.now = max(self._clock(), stamp + self._origin)

    def host_work(self, work: Callable[[], None]) -> tuple[float, float]:
        """Do something on the host, in the modelled time of preparing a batch."""
        begin = self._clock()
        work()
        self._clocks.now = begin + self.model.prepare
        return begin - self._origin, self._clocks.now - self._origin

    def stream(self) -> ModelStream:
        """A new stream."""
        return ModelStream()

    def adopt(self, stream: ModelStream) -> ModelStream:
        """Another pipeline's stream.

        Raises:
            TypeError: a GPU's stream: there is no GPU here.
        """
        if not isinstance(stream, ModelStream):
            raise TypeError(f"stream {stream!r}: the engines are a model's; it takes a ModelStream, or none")
        return stream

    def close_stream(self, stream: ModelStream) -> None:
        """Nothing is to be given back."""

    def event(self) -> ModelEvent:
        """A new event."""
        return ModelEvent()

    def record(self, event: ModelEvent, stream: ModelStream) -> None:
        """The event happens when all that is on the stream now has been done."""
        with self._lock:
            stream.ready = max(stream.ready, self._clock())
            event.time = stream.ready

    def wait(self, stream: ModelStream, event: ModelEvent) -> None:
        """What comes on the stream from now on waits for the event."""
        with self._lock:
            stream.ready = max(stream.ready, event.time)

    def synchronize(self, event: ModelEvent) -> None:
        """The host waits for an event; all that is due until then is done to the arrays."""
        self._until(event.time)

    def drain(self, streams: Sequence[ModelStream]) -> None:
        """The host waits for everything on the streams."""
        for stream in streams:
            self._until(stream.ready)

    def begin(self) -> None:
        """Time counts from here."""
        with self._lock:
            self._origin = self._clocks.now = max(self._clock(), *self._free.values())

    def seconds(self, event: ModelEvent) -> float:
        """When an event happens, since `begin`."""
        return event.time - self._origin

    def host_array(self, shape: tuple[int, ...], dtype: np.dtype, pinned: bool) -> np.ndarray:
        """Zeroed host memory; all counts as page-locked, or none does (`pinned` of the engines)."""
        return np.zeros(shape, dtype)

    def device_array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """What stands for device memory: the simulator's kernels take NumPy arrays."""
        return np.zeros(shape, dtype)

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether host memory counts as page-locked."""
        return self._pinned

    def copy_in(self, target: np.ndarray, source: np.ndarray, stream: ModelStream) -> None:
        """Enqueue a copy to the device."""
        self._copy(H2D, target, source, stream)

    def copy_out(self, target: np.ndarray, source: np.ndarray, stream: ModelStream) -> None:
        """Enqueue a copy from the device."""
        self._copy(D2H, target, source, stream)

    def compute(
        self,
        function: Callable,
        inputs: Mapping[str, np.ndarray],
        outputs: Mapping[str, np.ndarray],
        stream: ModelStream,
        argument: Any,
        failed: Callable[[Exception], None],
    ) -> None:
        """Enqueue a computation; `failed` gets what it raises, when its time has come."""
        after: dict[str, np.ndarray] = {}

        def begin() -> None:
            before = {name: array.copy() for name, array in outputs.items()}
            try:
                function(inputs, outputs, argument)
            except Exception as error:
                failed(error)
            for name, array in outputs.items():
                after[name] = array.copy()
                array[...] = before[name]

        def end() -> None:
            for name, array in outputs.items():
                array[...] = after[name]

        seconds = self.model.compute(inputs) if callable(self.model.compute) else self.model.compute
        self._enqueue(COMPUTE, stream, seconds, begin, end)

    def graph(self, function: Callable, inputs: Mapping, outputs: Mapping, stream: Any, argument: Any) -> Callable:
        """The function itself: there is nothing to capture."""
        return function

    def _copy(self, engine: str, target: np.ndarray, source: np.ndarray, stream: ModelStream) -> None:
        taken: list[np.ndarray] = []

        def begin() -> None:
            taken.append(source.copy())

        def end() -> None:
            target[...] = taken[0]

        done = self._enqueue(engine, stream, self.model.copy_seconds(source.nbytes, self.rate(engine)), begin, end)
        if not self._pinned:
            self._until(done)

    def rate(self, engine: str) -> float:
        """Bytes a second of a copy engine."""
        rate = {H2D: self.model.h2d, D2H: self.model.d2h}[engine] if self._both_busy else self.model.alone
        return rate if self._pinned else min(rate, self.model.pageable)

    def _enqueue(
        self, engine: str, stream: ModelStream, seconds: float, begin: Callable[[], None], end: Callable[[], None]
    ) -> float:
        with self._lock:
            start = max(self._clock(), stream.ready, self._free[engine])
            stream.ready = self._free[engine] = start + seconds
            # Of two effects at one moment the one submitted first comes first: an end before the begin that awaits it.
            heapq.heappush(self._effects, _Effect(start, next(self._numbers), begin))
            heapq.heappush(self._effects, _Effect(stream.ready, next(self._numbers), end))
            return stream.ready

    def _until(self, moment: float) -> None:
        with self._lock:
            while self._effects and self._effects[0].time <= moment:
                heapq.heappop(self._effects).apply()
        self._clocks.now = max(self._clock(), moment)

    def _clock(self) -> float:
        return getattr(self._clocks, "now", self._origin)

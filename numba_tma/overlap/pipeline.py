"""The pipeline: batches to the device, through a computation and back, with all engines busy at once."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import driver
from . import timeline
from .batches import named, sources_of
from .gpu import GpuEngines, OnDevice
from .model import Model, ModelEngines
from .modes import COMPUTE, D2H, H2D, PREPARE, THREE_STREAMS, Mode, mode_of
from .ranges import ranged
from .report import Report, Span
from .results import RESULT, SOURCE, BatchError, Result, SlotsHeldError
from .ring import Ring, Slot, specs


@dataclass(frozen=True)
class Rehearsal:
    """A batch on the device: `compute()` enqueues its computation on `stream`, `prepare()` prepares it once more and
    gives the seconds that took. It was copied in from `sources`."""

    sources: Mapping[str, np.ndarray | OnDevice]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    stream: Any
    compute: Callable[[], None]
    prepare: Callable[[], float]


@dataclass
class _Taken:
    """What the source gave for a batch."""

    index: int
    batch: Any
    error: BatchError | None = None


class _Job:
    """A batch on its way."""

    def __init__(self, index: int, slot: Slot, error: BatchError | None = None) -> None:
        self.index = index
        self.slot = slot
        self.error = error
        self.prepared: tuple[float, float] | None = None
        self.stamp = 0.0

    def fail(self, stage: str, cause: Exception) -> None:
        """Remember the first error."""
        if self.error is None:
            self.error = BatchError(self.index, stage, cause)


class Pipeline:
    """Batches pass copy in, computation and copy out, each on its own engine, and come back in order.

        def compute(inputs, outputs, stream):
            double[blocks, None, stream](inputs["x"], outputs["y"])

        with Pipeline(compute, inputs={"x": ((n,), np.float32)}, outputs={"y": ((n,), np.float32)}) as pipeline:
            for result in pipeline.run(batches):
                use(result["y"])

    Args:
        compute: `compute(inputs, outputs, stream)` enqueues work on `stream` and returns. `inputs` and `outputs` are
            dicts of device arrays (with `__cuda_array_interface__`: kernels, CuPy and PyTorch take them as they are;
            NumPy arrays where there is no GPU). One batch is computed after the other, in order and whatever the mode,
            so memory of its own may be shared by all. In mode "producer" it is called in another thread.
        inputs, outputs: {name: (shape, dtype)} of one batch, or {name: an array like it}.
        mode: "serial_pageable", "serial_pinned", "two_streams", "three_streams", "producer", or a `Mode`.
        depth: slots in the ring, each with the buffers of one batch: pinned and device, inputs and outputs. By default
            4 (one being prepared or copied in, one computed, one copied out, one read), 2 in a serial mode.
        prepare: `prepare(batch, buffers)` writes a batch into `buffers`, a dict of host arrays by input's name, in
            place of copying arrays into them. What of it lies in pinned memory elsewhere, or on a GPU, it may return, a
            dict of arrays: they are read where they are and must not change until the batch's result has come.
        elsewhere: inputs that `prepare` always returns so; slots then have no host buffers for them.
        graph: capture what `compute` enqueues for a slot into a CUDA graph once, and launch that. `compute` is then
            called twice a slot, before the first batch, on inputs of zeros, and has to enqueue the same work each time.
        streams: the streams to use, PyTorch's, CuPy's, Numba's, cuda.core's or handles: as many as the mode has (for
            "three_streams" copies in, computing, copies out). They stay yours. `compute` gets yours back, else a
            cuda.core stream.
        record: keep the times of all stages for `report` and `save_timeline`.
        device: ordinal of the GPU; by default the current one.
        model: run without a GPU on this `Model`'s engines. By default so where there is no GPU.

    Raises:
        TypeError, ValueError: an argument is not what it should be.
    """

    def __init__(
        self,
        compute: Callable[[dict[str, Any], dict[str, Any], Any], object],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        mode: str | Mode = THREE_STREAMS,
        depth: int | None = None,
        prepare: Callable[[Any, dict[str, np.ndarray]], object] | None = None,
        elsewhere: Sequence[str] = (),
        graph: bool = False,
        streams: Sequence[Any] | None = None,
        record: bool = False,
        device: int | None = None,
        model: Model | None = None,
    ) -> None:
        if not callable(compute):
            raise TypeError(f"compute={compute!r}: expected a function compute(inputs, outputs, stream)")
        self.mode = mode_of(mode)
        depth = (4 if self.mode.overlapping else 2) if depth is None else depth
        if not _is_integer(depth) or depth < 1:
            raise ValueError(f"depth {depth!r}: expected a number of slots, 1 or more")
        depth = operator.index(depth)
        if device is not None and not _is_integer(device):
            raise TypeError(f"device {device!r}: expected the ordinal of a GPU, 0 or more")
        if model is not None and not isinstance(model, Model):
            raise TypeError(f"model {model!r}: expected a Model(…)")
        self.inputs, self.outputs = specs(inputs, "input"), specs(outputs, "output")
        if prepare is not None and not callable(prepare):
            raise TypeError(f"prepare={prepare!r}: expected a function prepare(batch, buffers)")
        if not self.inputs and prepare is not None:
            raise ValueError("prepare without inputs: there is no buffer to prepare")
        if isinstance(elsewhere, str):
            raise TypeError(f"elsewhere {elsewhere!r}: expected names of inputs in a list, [{elsewhere!r}]")
        unknown = [name for name in elsewhere if name not in self.inputs]
        if unknown or (elsewhere and prepare is None):
            raise ValueError(
                f"elsewhere {', '.join(unknown or elsewhere)}: expected inputs ({', '.join(self.inputs)}), which "
                f"`prepare` returns"
            )
        self._compute, self.prepare, self._record = compute, prepare, record
        on_gpu = model is None and driver.device_count() > 0
        self.engines: Any = (
            GpuEngines(device)
            if on_gpu
            else ModelEngines(model, pinned=self.mode.pinned, both_busy=self.mode.overlapping)
        )
        self._owns_streams = streams is None
        self._streams: list[Any] = []
        self._ring = Ring([], self.engines.now)
        self._last_computed: Any = None
        self._runs: weakref.WeakSet[Iterator[Result]] = weakref.WeakSet()
        self._threads: ThreadPoolExecutor | None = None
        self._work: list[Future] = []  # of the threads in the last run
        self._running = False
        self._starting = threading.Lock()
        self._closed = False
        self.report = Report(self.mode.name, self.engines.name, self.engines.modelled)
        slots: list[Slot] = []
        try:
            self._take_streams(streams)
            for _ in range(depth):
                slots.append(Slot(self.engines, self.inputs, self.outputs, self.mode.pinned, frozenset(elsewhere)))
            if graph:
                stream = self.mode.stream_of(COMPUTE, 0)
                for slot in slots:
                    slot.graph = self.engines.graph(
                        compute, slot.inputs, slot.outputs, self._streams[stream], self._arguments[stream]
                    )
        except BaseException:
            for slot in slots:
                slot.free()
            self._give_streams_back()
            raise
        self._ring = Ring(slots, self.engines.now)

    @property
    def depth(self) -> int:
        """Slots in the ring."""
        return self._ring.depth

    @property
    def free_slots(self) -> int:
        """Slots that neither a batch nor a result holds."""
        return self._ring.free

    def run(self, batches: Iterable[Any], *, copy: bool = True) -> Iterator[Result]:
        """Send batches through; their results come in the same order.

        At most `depth` batches are under way, results that the caller holds included; one more may have been taken from
        `batches`. A batch is a dict of arrays by input's name, a tuple of arrays in the inputs' order, an array where
        there is one input, or whatever `prepare` takes. Arrays in pinned memory (`pinned`, or another library's) are
        read where they are and must not change until the batch's result has come; others are copied into the slot's
        buffers first.

        Arrays on a GPU, this one or another, are read where they are too, behind what had been enqueued on PyTorch's
        current stream, on the stream of their array interface, or as DLPack has it, when the batch was taken: in mode
        "producer" by another thread. The pipeline's GPU is the current one of the threads that it works in.

        When a stage fails, the batches before are delivered, then `BatchError` is raised; those after it are cancelled.
        The same on leaving the loop early, an exception in it, or Ctrl-C: what is under way is awaited and dropped, all
        slots come back, and the pipeline may run again.

        Args:
            batches: any iterable; a generator is asked as there is room (in another thread in mode "producer").
            copy: give each result memory of its own. False spares that copy: the outputs lie in the slot, which is
                used again once the arrays (and `result`) are gone, or after `result.release()`.

        Raises:
            BatchError: naming batch and stage.
            SlotsHeldError: `copy=False`, and results hold all slots while there are batches left.
            RuntimeError: the pipeline is closed, or runs already.
            TypeError: `batches` is one batch, or no iterable.
        """
        if self._closed:
            raise RuntimeError("the pipeline is closed")
        if isinstance(batches, Mapping) and self.prepare is None:
            raise TypeError("run(…) of a dict, which is one batch: expected an iterable of batches, such as [batch]")
        run = self._results(iter(batches), copy)
        self._runs.add(run)
        return run

    def pinned(self) -> dict[str, np.ndarray]:
        """New page-locked host arrays for the inputs of one batch, to fill and pass to `run`, which copies from them
        directly. They are freed with the last reference. (Without a GPU: ordinary arrays.)"""
        self.engines.enter_thread()
        return {name: self.engines.host_array(spec.shape, spec.dtype, True) for name, spec in self.inputs.items()}

    @contextlib.contextmanager
    def rehearsal(self, batch: Any) -> Iterator[Rehearsal]:
        """A batch copied in, for its stages to be tried one by one while nothing else runs.

        Raises:
            BatchError: it cannot be prepared.
            RuntimeError: the pipeline is closed or runs, or results hold all slots.
        """
        self._start()
        try:
            slot = self._ring.take()
            if slot is None:
                raise self._slots_held()
            job = self._prepared(_Taken(0, batch), slot)
            if job.error is not None:
                raise job.error
            stream, argument = (
                numbered[self.mode.stream_of(COMPUTE, 0)] for numbered in (self._streams, self._arguments)
            )
            for name, array in slot.inputs.items():
                self.engines.copy_in(array, slot.sources[name], stream)
            self.engines.drain([stream])
            work = slot.graph if slot.graph is not None else self._compute

            def compute() -> None:
                self.engines.compute(work, slot.inputs, slot.outputs, stream, argument, lambda e: job.fail(COMPUTE, e))

            def prepare() -> float:
                again = self._prepared(_Taken(0, batch), slot)
                if again.error is not None:
                    raise again.error
                begin, end = again.prepared
                return end - begin

            yield Rehearsal(slot.sources, slot.inputs, slot.outputs, stream, compute, prepare)
        finally:
            self._stop()

    def save_timeline(self, path: str | Path, **options: int) -> None:
        """Write the last run's timeline, if `record`: .svg, or .json for ui.perfetto.dev; see `overlap.timeline`."""
        timeline.save(self.report, path, **options)

    def close(self) -> None:
        """End a run that is under way, wait for the streams, and free buffers and streams.

        Results with `copy=False` keep what they look at.

        Raises:
            RuntimeError: another thread awaits a batch of the run, or the pipeline's own work asks for this.
        """
        if self._closed:
            return
        for run in list(self._runs):
            try:
                run.close()
            except ValueError as error:  # "generator already executing"
                raise RuntimeError(
                    "close() while a batch is awaited, from another thread or from what the pipeline calls: leave the "
                    "loop over run(…) first"
                ) from error
        self._closed = True
        if self._threads is not None:
            self._threads.shutdown(wait=True)
        self.engines.enter_thread()
        with contextlib.suppress(Exception):  # a device that has failed must not keep the rest from being freed
            self.engines.drain(self._streams)
        self._ring.close()
        self._give_streams_back()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Streams.

    def _take_streams(self, given: Sequence[Any] | None) -> None:
        if given is None:
            self._streams = [self.engines.stream() for _ in range(self.mode.streams)]
            self._arguments = self._streams
            return
        if len(given) != self.mode.streams:
            raise ValueError(f"{len(given)} streams; mode {self.mode.name} has {self.mode.streams}")
        self._streams = [self.engines.adopt(stream) for stream in given]
        self._arguments = list(given)

    def _give_streams_back(self) -> None:
        if self._owns_streams:
            for stream in self._streams:
                with contextlib.suppress(Exception):
                    self.engines.close_stream(stream)
        self._streams = []

    # A run.

    def _results(self, source: Iterator[Any], copy: bool) -> Iterator[Result]:
        self._start()
        feed = None
        try:
            self.report = Report(self.mode.name, self.engines.name, self.engines.modelled)
            feed = self._fed_by_threads(source) if self.mode.producer else self._fed_here(source)
            for job in feed:
                yield self._delivered(job, copy)
        finally:
            try:
                if feed is not None:
                    feed.close()
            finally:
                self._stop()

    def _start(self) -> None:
        with self._starting:  # two threads may ask at once
            if self._running:
                raise RuntimeError("the pipeline runs already: exhaust or close its iterator before the next run")
            if self._closed:
                raise RuntimeError("the pipeline is closed")
            if not all(part.done() for part in self._work):
                raise RuntimeError(
                    "a thread of the run before, whose end was interrupted, is still in the source of batches or in "
                    "prepare: it has to return before the next run"
                )
            self._running = True
        try:
            self.engines.enter_thread()
            self._take_back()  # what an interrupted end of the run before has left
            self.engines.begin()
        except BaseException:
            self._running = False
            raise
        self._last_computed = None

    def _stop(self) -> None:
        """Await what is still under way, and take the slots back, unless a thread that nobody waits for has some."""
        try:
            if all(part.done() for part in self._work):
                self._take_back()
        finally:
            self._running = False

    def _take_back(self) -> None:
        if self._ring.free + self._ring.lent < self._ring.depth:
            self._settle()
        self._ring.reclaim()

    def _fed_here(self, source: Iterator[Any]) -> Iterator[_Job]:
        """Jobs that have been submitted, in order; as many are under way as there is room for."""
        limit = self._ring.depth if self.mode.overlapping else 1
        under_way: deque[_Job] = deque()
        taken: _Taken | None = None  # from the source, and without a slot yet
        number, more = 0, True
        while True:
            while more and len(under_way) < limit:
                if taken is None:
                    taken = self._take_from(source, number)
                    if taken is None:
                        more = False
                        break
                    number += 1
                slot = self._ring.take()
                if slot is None:
                    break
                job, taken = self._prepared(taken, slot), None
                if job.error is None:
                    self._submit(job)
                under_way.append(job)
                more = job.error is None
            if under_way:
                yield under_way.popleft()
            elif more:
                raise self._slots_held()
            else:
                return

    def _fed_by_threads(self, source: Iterator[Any]) -> Iterator[_Job]:
        """The same, with one thread that prepares and one that submits."""
        stopped = threading.Event()
        prepared: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        submitted: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()

        def produce() -> None:
            try:
                self.engines.enter_thread()
                for number in itertools.count():
                    taken = self._take_from(source, number)
                    slot = self._ring.wait(stopped) if taken is not None else None
                    if slot is None:
                        return
                    job = self._prepared(taken, slot)
                    prepared.put(job)
                    if job.error is not None:
                        return
            finally:
                prepared.put(None)

        def submit() -> None:
            try:
                self.engines.enter_thread()
                while (job := prepared.get()) is not None:
                    if job.error is None and not stopped.is_set():
                        self.engines.catch_up(job.stamp)
                        self._submit(job)
                    submitted.put(job)
                    if job.error is not None:
                        stopped.set()
                        self._ring.wake()
            finally:
                submitted.put(None)

        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, "overlap")  # kept between runs: to start a thread takes time
        work = [self._threads.submit(contextvars.copy_context().run, part) for part in (produce, submit)]
        self._work = work
        try:
            while (job := self._next_of(submitted)) is not None:
                yield job
        finally:
            stopped.set()
            self._ring.wake()
            wait(work)
        for part in work:
            part.result()

    def _next_of(self, submitted: queue.SimpleQueue) -> _Job | None:
        while True:
            try:
                return submitted.get(timeout=0.1)
            except queue.Empty:
                # Only the caller, who is waiting here, could let go of them.
                if self._ring.lent >= self._ring.depth and self._ring.starving:
                    raise self._slots_held() from None

    def _slots_held(self) -> SlotsHeldError:
        depth = self._ring.depth
        return SlotsHeldError(
            f"all {depth} slots are held by results of earlier batches: let go of them (drop the arrays, or call "
            f"result.release()), use run(…, copy=True), or raise depth={depth}"
        )

    # Stages.

    def _take_from(self, source: Iterator[Any], number: int) -> _Taken | None:
        """The next batch, or the error in place of it; None at the end."""
        try:
            return _Taken(number, next(source))
        except StopIteration:
            return None
        except Exception as error:
            return _Taken(number, None, BatchError(number, SOURCE, error))

    def _prepared(self, taken: _Taken, slot: Slot) -> _Job:
        """The batch in a slot's page-locked memory (or wherever the mode wants it)."""
        job = _Job(taken.index, slot, taken.error)
        self.engines.catch_up(slot.stamp)

        def work() -> None:
            if self.prepare is not None:
                elsewhere = self._prepared_elsewhere(taken.batch, slot.host_inputs)
                slot.sources = slot.host_inputs | self._sources(elsewhere, slot)
                missing = [name for name in self.inputs if name not in slot.sources]
                if missing:
                    raise ValueError(f"prepare returned no {', '.join(missing)}, which lie elsewhere, as was said")
            else:
                slot.sources = self._sources(named(taken.batch, self.inputs), slot)

        if job.error is None:
            try:
                with ranged(PREPARE, job.index):
                    job.prepared = self.engines.host_work(work)
            except Exception as error:
                job.fail(PREPARE, error)
        job.stamp = self.engines.now()
        return job

    def _prepared_elsewhere(self, batch: Any, buffers: dict[str, np.ndarray]) -> Mapping[str, Any]:
        """What `prepare` returns, having seen that the slot's buffers are still its own: copies run on unchecked."""
        lent = dict(buffers)
        returned = self.prepare(batch, lent)
        changed = [name for name in {**buffers, **lent} if lent.get(name) is not buffers.get(name)]
        if changed:
            raise ValueError(
                f"prepare put something else in the place of buffer {', '.join(map(repr, changed))}: write into it, "
                f"buffers[…][...] = …, or return a dict of the arrays that lie elsewhere"
            )
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"prepare returned a {type(returned).__name__}: expected None, or a dict of arrays by input's name"
            )
        return returned

    def _sources(self, given: Mapping[str, Any], slot: Slot) -> dict[str, np.ndarray | OnDevice]:
        return sources_of(given, slot.host_inputs, self.inputs, self.engines, self.mode.pinned)

    def _submit(self, job: _Job) -> None:
        """Enqueue the copies and the computation."""
        engines, slot, stage = self.engines, job.slot, H2D
        engines.make_current()  # the source of batches, or whoever awaits results, may work on another GPU
        numbers = {stage: self.mode.stream_of(stage, job.index) for stage in (H2D, COMPUTE, D2H)}
        try:
            with ranged(H2D, job.index):
                stream = self._streams[numbers[H2D]]
                engines.record(slot.began[H2D], stream)
                for name, array in slot.inputs.items():
                    engines.copy_in(array, slot.sources[name], stream)
                engines.record(slot.ended[H2D], stream)
            stage = COMPUTE
            with ranged(COMPUTE, job.index):
                stream, argument = self._streams[numbers[COMPUTE]], self._arguments[numbers[COMPUTE]]
                engines.wait(stream, slot.ended[H2D])
                if self._last_computed is not None and self.mode.streams > 1:
                    # Batches may share memory of the computation's, and the multiprocessors are one engine.
                    engines.wait(stream, self._last_computed)
                engines.record(slot.began[COMPUTE], stream)
                work = slot.graph if slot.graph is not None else self._compute
                engines.compute(work, slot.inputs, slot.outputs, stream, argument, lambda e: job.fail(COMPUTE, e))
                engines.record(slot.ended[COMPUTE], stream)
                self._last_computed = slot.ended[COMPUTE]
            stage = D2H
            with ranged(D2H, job.index):
                stream = self._streams[numbers[D2H]]
                engines.wait(stream, slot.ended[COMPUTE])
                engines.record(slot.began[D2H], stream)
                for name, array in slot.outputs.items():
                    engines.copy_out(slot.host_outputs[name], array, stream)
                engines.record(slot.ended[D2H], stream)
        except Exception as error:
            job.fail(stage, error)

    def _delivered(self, job: _Job, copy: bool) -> Result:
        """Wait for a job and hand out its outputs.

        Raises:
            BatchError: one of its stages failed.
        """
        slot = job.slot
        if job.error is None:
            try:
                self.engines.synchronize(slot.ended[D2H])
            except Exception as error:
                job.fail(RESULT, error)
        if job.error is not None:
            raise job.error
        slot.sources = {}
        self._note(job)
        if copy:
            result = Result(job.index, {name: array.copy() for name, array in slot.host_outputs.items()})
            self._ring.give(slot)
            return result
        lease = self._ring.lend(slot)
        return Result(job.index, {name: lease.window(array) for name, array in slot.host_outputs.items()}, lease)

    def _note(self, job: _Job) -> None:
        engines, slot, report = self.engines, job.slot, self.report
        report.batches += 1
        report.seconds = engines.now()
        report.bytes_in += sum(spec.nbytes for spec in self.inputs.values())
        report.bytes_out += sum(spec.nbytes for spec in self.outputs.values())
        if self._record:
            report.spans.append(Span(PREPARE, job.index, *job.prepared))
            for stage in (H2D, COMPUTE, D2H):
                times = engines.seconds(slot.began[stage]), engines.seconds(slot.ended[stage])
                report.spans.append(Span(stage, job.index, *times))

    def _settle(self) -> None:
        """Have nothing on the streams any more that uses a slot. A device that has failed will not do anything."""
        with contextlib.suppress(Exception):
            self.engines.drain(self._streams)


def _is_integer(value: Any) -> bool:
    """Whether it counts something: an int or a NumPy integer, and no truth value."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)

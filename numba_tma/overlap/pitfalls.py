"""Five ways to lose the overlap (or the result), and the loop that is often written; each can be run.

Each function takes a `Setting` and returns what it found as plain numbers. On a GPU they are measured; on a model they
follow from it, and the same mistakes give the same wrong results.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import driver
from . import exercise, loops
from .gpu import GpuEngines
from .model import Model, ModelEngines
from .modes import ENGINES, Mode
from .rates import middle
from .report import Report


@dataclass(frozen=True)
class Setting:
    """What the demonstrations run on.

    Attributes:
        words: uint32 words of a batch, each way.
        rounds: of the exercise's kernel.
        batches: how many.
        model: a model of the engines, or None for the GPU.
        seed: of the inputs.
    """

    words: int
    rounds: int
    batches: int = 8
    model: Model | None = None
    seed: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a batch, each way; on a model those that they stand for."""
        return round(4 * self.words * (1 if self.model is None else self.model.scale))

    @contextmanager
    def engines(self) -> Iterator[Any]:
        """Engines by themselves."""
        engines = GpuEngines() if self.model is None else ModelEngines(self.model)
        engines.enter_thread()
        engines.begin()
        yield engines

    def inputs(self) -> list[np.ndarray]:
        """Random words for each batch."""
        rng = np.random.default_rng(self.seed)
        return [rng.integers(0, 2**32, self.words, np.uint32) for _ in range(self.batches)]

    def run(self, repeats: int = 3, **options: Any) -> Report:
        """The exercise through a pipeline, the middle one of `repeats` runs.

        Raises:
            ArithmeticError: a result is wrong.
        """
        options.setdefault("record", True)
        with exercise.make_pipeline(self.words, self.rounds, model=self.model, **options) as pipeline:
            batches = exercise.batches(pipeline, self.batches, np.random.default_rng(self.seed))
            reports = []
            for _ in range(repeats if self.model is None else 1):
                for result in pipeline.run(batches, copy=False):
                    last = result.index, result["words"].copy() if result.index == self.batches - 1 else None
                del result
                reports.append(pipeline.report)
            if not np.array_equal(last[1], exercise.reference(batches[-1]["words"], self.rounds)):
                raise ArithmeticError(f"{pipeline.mode.name}: the last batch's result is wrong")
        return middle(reports)


def pageable(setting: Setting) -> dict[str, Any]:
    """An asynchronous copy of pageable memory holds the host: it returns when the data is on its way or there."""
    found: dict[str, Any] = {"bytes_each_way": setting.nbytes}
    for name, pinned in (("pinned", True), ("pageable", False)):
        mode = Mode(f"three streams, {name}", pinned=pinned, streams=3, layout=ENGINES)
        found[f"{name}_seconds"] = setting.run(mode=mode).seconds
    if setting.model is None:
        for name, pinned in (("pinned", True), ("pageable", False)):
            found.update(_calls(setting.words, name, pinned))
    return found


def _calls(words: int, name: str, pinned: bool) -> dict[str, float]:
    """Host seconds that the call of a copy takes, and those until the copy is done."""
    engines = GpuEngines()
    engines.begin()
    stream = engines.stream()
    host = engines.host_array((words,), np.dtype(np.uint32), pinned)
    device = engines.device_array((words,), np.dtype(np.uint32))
    found = {}
    for way, copy in (
        ("h2d", lambda: engines.copy_in(device, host, stream)),
        ("d2h", lambda: engines.copy_out(host, device, stream)),
    ):
        call, done = [], []
        for _ in range(7):
            begin = time.perf_counter()
            copy()
            call.append(time.perf_counter() - begin)
            engines.drain([stream])
            done.append(time.perf_counter() - begin)
        found[f"{name}_{way}_call_seconds"] = statistics.median(call)
        found[f"{name}_{way}_done_seconds"] = statistics.median(done)
    engines.close_stream(stream)
    return found


def default_stream(setting: Setting) -> dict[str, Any]:
    """Work on the default stream runs one after another, whatever the program's shape."""
    if setting.model is None:
        one: list[Any] = [0, 0, 0]
    else:
        with setting.engines() as engines:
            one = [engines.stream()] * 3
    return {
        "own_streams_seconds": setting.run(mode="three_streams").seconds,
        "default_stream_seconds": setting.run(mode="three_streams", streams=one).seconds,
    }


def no_wait(setting: Setting) -> dict[str, Any]:
    """A result read before the copy out is awaited is whatever was there before."""
    data = setting.inputs()[:1]
    expected = exercise.reference(data[0], setting.rounds)
    compute = exercise.make_compute(setting.words, setting.rounds)
    with setting.engines() as engines:
        buffers = loops.Buffers(engines, data)
        try:
            stream = buffers.compute
            engines.copy_in(buffers.inputs[0], buffers.host[0], stream)
            loops.enqueue(engines, compute, buffers.inputs[0], buffers.outputs[0], stream)
            engines.copy_out(buffers.results[0], buffers.outputs[0], stream)
            at_once = int((buffers.results[0] != expected).sum())
            engines.drain([stream])
            awaited = int((buffers.results[0] != expected).sum())
        finally:
            buffers.close()
    return {"words": setting.words, "wrong_at_once": at_once, "wrong_when_awaited": awaited}


def pinning_once(setting: Setting) -> dict[str, Any]:
    """Locking pages takes longer than it saves if the memory is copied once, or filled anew for each copy.

    Raises:
        LaunchError: there is no GPU: a model knows nothing of it.
    """
    if setting.model is not None:
        raise driver.LaunchError("what page-locking costs is a matter of this machine's driver: it needs a GPU")
    engines = GpuEngines()
    engines.begin()
    stream, words = engines.stream(), np.dtype(np.uint32)
    device = engines.device_array((setting.words,), words)
    source = np.random.default_rng(setting.seed).integers(0, 2**32, setting.words, np.uint32)

    def copied(host: np.ndarray) -> None:
        engines.copy_in(device, host, stream)
        engines.drain([stream])

    def timed(work: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    pageable_copy = statistics.median(timed(lambda: copied(source)) for _ in range(5))
    allocate, fill, copy = [], [], []
    for _ in range(5):
        made: list[np.ndarray] = []
        allocate.append(timed(lambda made=made: made.append(engines.pinned_empty((setting.words,), words))))
        fill.append(timed(lambda made=made: np.copyto(made[0], source)))
        copy.append(timed(lambda made=made: copied(made[0])))
    engines.close_stream(stream)
    return {
        "bytes": source.nbytes,
        "pageable_copy_seconds": pageable_copy,
        "pin_seconds": statistics.median(allocate),
        "fill_seconds": statistics.median(fill),
        "pinned_copy_seconds": statistics.median(copy),
    }


def many_streams(setting: Setting, counts: tuple[int, ...] = (1, 2, 3, 4, 8, 16, 32)) -> dict[str, Any]:
    """More streams than engines gain nothing, and cost slots."""
    if setting.model is None:
        setting = replace(setting, words=setting.words // 4)  # so many slots of pinned memory take long to make
    found = {}
    for count in counts:
        mode = Mode(f"{count} streams in turn", streams=count)
        found[str(count)] = setting.run(mode=mode, depth=max(count, 4)).seconds
    found["a stream an engine"] = setting.run(mode="three_streams").seconds
    return {"bytes_each_way": setting.nbytes, "seconds_by_streams": found}


def loop(setting: Setting) -> dict[str, Any]:
    """The double-buffer loop as it is often written, and mended by events: which batches come out wrong.

    The kernel is made a quarter as long: its input is then still on its way when nothing makes it wait. In a model the
    host takes no time between two turns, so that every kernel is ahead of its input.
    """
    setting = replace(setting, rounds=max(1, setting.rounds // 4), model=_with_short_kernel(setting.model))
    data = setting.inputs()
    expected = [exercise.reference(words, setting.rounds) for words in data]
    compute = exercise.make_compute(setting.words, setting.rounds)
    found: dict[str, Any] = {"batches": len(data)}
    for name, program in (("as_written", loops.as_written), ("mended", loops.mended)):
        with setting.engines() as engines:
            buffers = loops.Buffers(engines, data)
            try:
                engines.begin()
                program(buffers, compute)
                found[f"{name}_seconds"] = engines.now()
                results = [result.copy() for result in buffers.results]
            finally:
                buffers.close()
            found[f"{name}_wrong"] = loops.wrong(results, expected)
    return found


def _with_short_kernel(model: Model | None) -> Model | None:
    if model is None or callable(model.compute):
        return model
    return replace(model, compute=model.compute / 4)


PITFALLS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "pageable": pageable,
    "default_stream": default_stream,
    "no_wait": no_wait,
    "pinning_once": pinning_once,
    "many_streams": many_streams,
    "loop": loop,
}
NEED_GPU = frozenset({"pinning_once"})

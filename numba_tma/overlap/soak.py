"""Many batches in a row: nothing reordered, nothing corrupted, memory constant; and faults put into each stage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import driver
from . import exercise
from .modes import COMPUTE, D2H, H2D, PREPARE
from .pipeline import Pipeline
from .results import SOURCE, BatchError

_ROUNDS = 16
FAULTS = (SOURCE, PREPARE, H2D, COMPUTE, D2H)


def host_bytes() -> int:
    """Memory that this process has resident."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def device_bytes() -> int:
    """Memory in use on the current GPU; 0 without one."""
    if not driver.device_count():
        return 0
    free, total = driver.memory()
    return total - free


def _write(number: int, buffers: dict[str, np.ndarray]) -> None:
    """Batch `number`: words that no other batch has at their place."""
    words = buffers["words"]
    words[...] = np.arange(words.size, dtype=np.uint32)
    words *= np.uint32(2 * number + 1)
    words += np.uint32(number)


def soak(count: int, words: int = 1 << 14, **options: Any) -> dict[str, Any]:
    """Run `count` batches and check every word of each.

    Returns: batches, those in the wrong place, those with a wrong word, seconds, and how much host and device memory
        grew after the first tenth of them.
    """
    growth, misplaced, corrupt, early = {}, 0, 0, max(1, count // 10)
    expected = np.empty(words, np.uint32)
    begin = time.perf_counter()
    with exercise.make_pipeline(words, _ROUNDS, prepare=_write, **options) as pipeline:
        for place, result in enumerate(pipeline.run(range(count), copy=False)):
            misplaced += result.index != place
            _write(place, {"words": expected})
            corrupt += not np.array_equal(result["words"], exercise.reference(expected, _ROUNDS))
            if place + 1 == early:
                growth = {"host": -host_bytes(), "device": -device_bytes()}
        growth["host"] += host_bytes()
        growth["device"] += device_bytes()
        mode, delivered = pipeline.mode.name, pipeline.report.batches
        del result
        free, depth = pipeline.free_slots, pipeline.depth
    return {
        "mode": mode,
        "batches": delivered,
        "words": words,
        "misplaced": misplaced,
        "corrupt": corrupt,
        "seconds": time.perf_counter() - begin,
        "host_growth_bytes": growth["host"],
        "device_growth_bytes": growth["device"],
        "slots_back": free == depth,
    }


class _Faulty:
    """Engines of which one stage fails at one batch."""

    def __init__(self, engines: Any, stage: str, batch: int) -> None:
        self._engines, self._stage, self._left = engines, stage, batch + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engines, name)

    def _count(self, stage: str) -> None:
        if stage == self._stage:
            self._left -= 1
            if not self._left:
                raise OSError(f"a fault put into {stage}")

    def copy_in(self, *arguments: Any) -> None:
        self._count(H2D)
        self._engines.copy_in(*arguments)

    def copy_out(self, *arguments: Any) -> None:
        self._count(D2H)
        self._engines.copy_out(*arguments)

    def compute(self, *arguments: Any) -> None:
        self._count(COMPUTE)
        self._engines.compute(*arguments)


def with_fault(pipeline: Pipeline, stage: str, batch: int, count: int) -> dict[str, Any]:
    """Run `count` of `soak`'s batches through its pipeline, with a fault in a stage of one of them.

    Returns: batches delivered before it and whether they are right, the error's stage and batch, whether all slots
        came back, and how many batches of a second run without a fault are right.
    """

    def source() -> Iterator[int]:
        for number in range(count):
            if stage == SOURCE and number == batch:
                raise OSError(f"a fault put into {stage}")
            yield number

    def write(number: int, buffers: dict[str, np.ndarray]) -> None:
        if stage == PREPARE and number == batch:
            raise OSError(f"a fault put into {stage}")
        _write(number, buffers)

    healthy, prepare = pipeline.engines, pipeline.prepare
    found: dict[str, Any] = {"stage": stage, "batch": batch, "delivered": 0, "right": 0, "error": None}
    pipeline.engines, pipeline.prepare = _Faulty(healthy, stage, batch), write
    try:
        for result in pipeline.run(source()):
            found["right"] += is_right(result.index, result.outputs)
            found["delivered"] += 1
    except BatchError as error:
        found["error"] = {"stage": error.stage, "batch": error.batch, "message": str(error)}
    finally:
        pipeline.engines, pipeline.prepare = healthy, prepare
    found["slots_back"] = pipeline.free_slots == pipeline.depth
    found["right_afterwards"] = sum(is_right(r.index, r.outputs) for r in pipeline.run(range(count)))
    return found


def make_pipeline(words: int, **options: Any) -> Pipeline:
    """A pipeline for `with_fault`."""
    return exercise.make_pipeline(words, _ROUNDS, prepare=_write, **options)


def is_right(number: int, outputs: Mapping[str, np.ndarray]) -> bool:
    """Whether these are the outputs of batch `number`."""
    expected = np.empty_like(outputs["words"])
    _write(number, {"words": expected})
    return np.array_equal(outputs["words"], exercise.reference(expected, _ROUNDS))

"""The measurements of docs/overlap.md: all modes beside the ideal, streams, graphs, shares of kernel and copy."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import driver
from . import exercise
from .modes import MODES
from .rates import measure_rates, middle, run, stages_alone
from .report import Alone, Report, ideal

_DISTINCT = 4  # so many different batches are sent, again and again


def run_mode(
    words: int,
    rounds: int,
    counts: Sequence[int],
    *,
    inputs: list[dict[str, np.ndarray]] | None = None,
    repeats: int = 5,
    seed: int = 0,
    **options: Any,
) -> tuple[dict[int, Report], Alone]:
    """The exercise in one mode: the middle one of `repeats` runs for each number of batches, every word checked once.

    Args:
        inputs: batches to send, again and again, in the mode's kind of memory; by default random ones.

    Raises:
        ArithmeticError: a result is wrong.
    """
    options.setdefault("record", True)
    with exercise.make_pipeline(words, rounds, **options) as pipeline:
        if inputs is None:
            inputs = exercise.batches(pipeline, min(max(counts), _DISTINCT), np.random.default_rng(seed))
        alone = stages_alone(pipeline, inputs[0])
        expected = [exercise.reference(arrays["words"], rounds) for arrays in inputs]
        for result in pipeline.run(inputs):
            if not np.array_equal(result["words"], expected[result.index]):
                raise ArithmeticError(f"{pipeline.mode.name}: batch {result.index} is wrong")
        found = {}
        for count in counts:
            times = 1 if pipeline.engines.modelled else repeats
            found[count] = middle([run(pipeline, inputs, count) for _ in range(times)])
    return found, alone


def modes(
    words: int, rounds: int, counts: Sequence[int] = (4, 8, 32), **options: Any
) -> tuple[dict[str, dict[int, Report]], Alone]:
    """All modes: runs by mode and number of batches, and what the three engines' stages take alone.

    The batches lie in memory of the mode's kind already, so that preparing is no stage of the ideal.
    """
    reports, found = {}, {}
    with exercise.make_pipeline(words, rounds, depth=1, model=options.get("model")) as pipeline:
        pinned = exercise.batches(pipeline, min(max(counts), _DISTINCT), np.random.default_rng(0))
    pageable = [{name: array.copy() for name, array in batch.items()} for batch in pinned]
    for name, mode in MODES.items():
        inputs = pinned if mode.pinned else pageable
        reports[name], found[name] = run_mode(words, rounds, counts, mode=mode, inputs=inputs, **options)
    alone = found["three_streams"]
    return reports, dataclasses.replace(alone, prepare=0.0)


def as_rows(reports: Mapping[str, Mapping[int, Report]], alone: Alone) -> dict[str, Any]:
    """`modes` for JSON."""
    rows = []
    for name, by_count in reports.items():
        for count, report in by_count.items():
            gain = reports["serial_pinned"][count].seconds / report.seconds
            rows.append({**report.as_dict(alone), "mode": name, "times_serial_pinned": gain})
    return {"alone_seconds": dataclasses.asdict(alone), "runs": rows}


def balance(nbytes: int) -> dict[str, Any]:
    """Words and rounds of batches of `nbytes` each way whose kernel takes as long as a copy, and the rates."""
    rates = measure_rates(nbytes)
    words = nbytes // 4
    rounds = exercise.balanced_rounds(words, nbytes / min(rates.h2d, rates.d2h))
    return {"words": words, "rounds": rounds, "rates": rates.as_dict(), "copy_engines": copy_engines()}


def copy_engines() -> int:
    """How many copy engines the driver says the GPU has."""
    return driver.attribute("ASYNC_ENGINE_COUNT", driver.current_device())


def shares(words: int, balanced: int, count: int = 16) -> list[dict[str, Any]]:
    """Kernels shorter and longer than the copies: how much of the copying is hidden under the kernels.

    `copying_hidden`: of the time that all copies, in and out, take one after another, the part by which the run is
    shorter than that time and the kernels' together.
    """
    rows = []
    for factor in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0):
        rounds = max(1, round(balanced * factor))
        found, alone = run_mode(words, rounds, [count], mode="three_streams", repeats=3)
        report = found[count]
        copying = count * (alone.h2d + alone.d2h)
        shown = max(report.seconds - count * alone.compute, 0.0)
        rows.append(
            {
                "kernel_over_copy": alone.compute / max(alone.h2d, alone.d2h),
                "seconds": report.seconds,
                "kernels_seconds": count * alone.compute,
                "copies_seconds": copying,
                "copying_hidden": 1 - shown / copying,
                "share_of_ideal": ideal(alone, count) / report.seconds,
            }
        )
    return rows


def graphs(words: int = 1 << 16, launches: int = 64, count: int = 200) -> dict[str, Any]:
    """Batches whose computation is many short kernels, with and without a CUDA graph for each slot."""
    found: dict[str, Any] = {"words": words, "launches": launches, "batches": count}
    for name, graph in (("launches", False), ("graph", True)):
        for mode in ("three_streams", "producer"):
            reports, _ = run_mode(words, launches, [count], mode=mode, graph=graph, launches=launches, repeats=3)
            found[f"{name}_{mode}_seconds"] = reports[count].seconds
    for name, graph in (("launches", False), ("graph", True)):
        reports, _ = run_mode(words, launches, [count], mode="three_streams", graph=graph, repeats=3)
        found[f"one_kernel_{name}_seconds"] = reports[count].seconds
    return found


def preparing(words: int, rounds: int, count: int = 16) -> dict[str, Any]:
    """Batches that the host has to copy into pinned memory first: by the caller's thread, or by the producer's."""
    found = {}
    rng = np.random.default_rng(0)
    inputs = [rng.integers(0, 2**32, words, np.uint32) for _ in range(4)]
    for name in ("three_streams", "producer"):
        with exercise.make_pipeline(words, rounds, mode=name, record=True) as pipeline:
            alone = stages_alone(pipeline, inputs[0])
            seconds = []
            for _ in range(4):
                for result in pipeline.run((inputs[i % 4] for i in range(count)), copy=False):
                    result.release()
                seconds.append(pipeline.report.seconds)
            found[name] = {
                "seconds": statistics.median(seconds[1:]),
                "ideal_seconds": ideal(alone, count),
                "prepare_seconds": alone.prepare,
                "utilisation": pipeline.report.utilisation(),
            }
    return found


def depths(words: int, rounds: int, count: int = 16) -> dict[str, float]:
    """How many slots the ring needs."""
    found = {}
    for depth in (1, 2, 3, 4, 6, 8):
        # Results are released before the next is asked for, so that one slot is enough.
        reports, _ = run_mode(words, rounds, [count], mode="three_streams", depth=depth, repeats=3)
        found[str(depth)] = reports[count].seconds
    return found

"""The two workloads on a GPU: batches of prompts, retrieval, and what each gains over doing one thing at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..overlap import Alone, Pipeline, ideal
from ..overlap.modes import STAGES
from ..overlap.rates import middle, run, stages_alone
from .batches import BatchInference
from .config import Config
from .model import Model
from .retrieval import OfDocuments, Request, Retrieval, Store, make_index

_LENGTHS = (2, 18)  # of answers that computing is timed with
_ROUNDS = 3
_WIDTH = 64  # candidates that a search begins with
_JUST_UNDER = 0.97  # of the longest stage: two equally long ones would take turns in holding each other up
_SEARCHING = 0.92  # of the time between two batches; writing prompts takes some of the rest
_FILLING = 6  # batches until all stages are at work


def runs_beside_ideal(
    pipeline: Pipeline, batches: Sequence[Any], counts: Sequence[int], repeats: int = 3
) -> list[dict[str, Any]]:
    """The middle one of `repeats` runs for each number of batches: seconds, share of the ideal, use of the engines.

    `busy_of_longest`: what each stage was busy, all batches together, by what the busiest was. `utilisation`: by the
    time from the first stage's begin to the last one's end. In the ideal, computing takes what as many batches in a row
    take with nothing else going on: the longer a GPU works at its limit of power, the lower its clock. A model of the
    engines says the same each time, and is asked once.
    """
    modelled = pipeline.engines.modelled
    rows = []
    for count in counts:
        alone = stages_alone(pipeline, batches[0], count)
        if not modelled:
            run(pipeline, batches, min(count, _FILLING))
        reports = [run(pipeline, batches, count) for _ in range(1 if modelled else repeats)]
        report = middle(reports)
        busy = report.busy()
        longest = max(busy.values())
        rows.append(
            {
                "batches": count,
                "seconds": report.seconds,
                "share_of_ideal": ideal(alone, count) / report.seconds,
                "alone_seconds": {stage: alone.of(stage) for stage in STAGES},
                "busy_of_longest": {stage: taken / longest for stage, taken in busy.items()},
                "utilisation": report.utilisation(),
            }
        )
    return rows


def batches_beside_ideal(
    model: Model,
    batch: int,
    length: int,
    every: int,
    counts: Sequence[int] = (4, 8, 32),
    /,
    *,
    pictures: Path | None = None,
    **options: Any,
) -> dict[str, list[dict[str, Any]]]:
    """Batches of prompts in each mode, the logits of the last `every` positions coming back.

    Args:
        pictures: a folder for timelines.
        options: the pipeline's.
    """
    batches = prompts(model.config, batch, length)
    found = {}
    for mode in ("serial_pageable", "serial_pinned", "three_streams", "producer"):
        with BatchInference(model, batch, length, every=every, mode=mode, record=True, **options) as inference:
            found[mode] = runs_beside_ideal(inference.pipeline, batches, counts)
            if pictures:
                _draw(inference.pipeline, batches, pictures / f"gpt2.batches.{mode}")
    return found


def gains(
    model: Model, batch: int, length: int, shares: Sequence[int], count: int = 16, /, **options: Any
) -> list[dict[str, Any]]:
    """What three streams gain over one thing at a time, for each number of positions whose logits come back (0: the
    last one alone)."""
    batches = prompts(model.config, batch, length)
    rows = []
    for every in shares:
        row: dict[str, Any] = {"tokens": batch * length, "every": every}
        for mode in ("serial_pinned", "three_streams"):
            settings = {"mode": mode, "depth": 3, "record": True} | options
            with BatchInference(model, batch, length, every=every, **settings) as inference:
                (found,) = runs_beside_ideal(inference.pipeline, batches, [count])
                spec = inference.pipeline.outputs["logits"]
            row |= {mode: found["seconds"] / count, "bytes_out": spec.nbytes, "alone_seconds": found["alone_seconds"]}
        rows.append(row)
    return rows


def _draw(pipeline: Pipeline, batches: Sequence[Any], path: Path) -> None:
    """The timeline of a run of 12 batches, as a picture and for ui.perfetto.dev."""
    run(pipeline, batches, 12)
    for suffix in (".svg", ".json"):
        pipeline.save_timeline(path.with_name(path.name + suffix))


def prompts(config: Config, batch: int, length: int) -> list[np.ndarray]:
    """Different batches, always the same."""
    rng = np.random.default_rng(4)
    return [rng.integers(0, config.vocab_size, (batch, length)) for _ in range(4)]


def retrieval_beside_ideal(
    model: Model,
    batch: int,
    document: int,
    question: int,
    /,
    *,
    documents: int = 16,
    vectors: int = 20_000,
    dimensions: int = 128,
    counts: Sequence[int] = (8, 32, 128),
    depth: int = 6,
    pictures: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Retrieval, serial and with all four stages at once, in balance: answers are so long, and the search so thorough,
    that computing and searching take as long as the copies.

    Args:
        model, batch, document, question: as `Retrieval` takes them.
        documents: how many there are.
        vectors: in the index; each belongs to a document, several to one.
        dimensions: of a vector.
        counts: of batches.
        depth: slots of the pipeline that does all at once.
        pictures: a folder for timelines.
        options: the pipelines'.
    """
    rng = np.random.default_rng(5)
    points = rng.standard_normal((vectors, dimensions)).astype(np.float32)
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    index = OfDocuments(make_index(points), documents, _WIDTH)
    vocabulary = model.config.vocab_size
    store = Store(model, rng.integers(0, vocabulary, (documents, document)), index)
    batches = [
        [Request(points[rng.integers(vectors)], rng.integers(0, vocabulary, question)) for _ in range(batch)]
        for _ in range(4)
    ]

    def alone(count: int) -> Alone:
        with Retrieval(store, batch, question, count, **options | {"mode": "serial_pinned", "depth": 1}) as retrieval:
            return stages_alone(retrieval.pipeline, batches[0])

    # The fastest of several: a copy of memory that the host has just touched can take half as long again.
    few, many = ([alone(count) for _ in range(_ROUNDS)] for count in _LENGTHS)
    copies = max(min(found.h2d for found in few + many), min(found.d2h for found in few + many))
    computing = tuple(min(found.compute for found in some) for some in (few, many))
    room = min(model.config.n_positions - document - question, 200)
    count = _fitted(_LENGTHS, computing, _JUST_UNDER * copies, room)
    found: dict[str, Any] = {"document": document, "question": question, "answer": count}
    with Retrieval(store, batch, question, count, record=True, depth=depth, **options) as retrieval:
        if not retrieval.pipeline.engines.modelled:
            index.share = _SEARCHING
            run(retrieval.pipeline, batches, max(counts))
        found["producer"] = runs_beside_ideal(retrieval.pipeline, batches, counts)
        if pictures:
            _draw(retrieval.pipeline, batches, pictures / "gpt2.retrieval")
        index.share = None
        found["candidates"] = index.width
    with Retrieval(store, batch, question, count, record=True, **options | {"mode": "serial_pinned"}) as retrieval:
        found["serial_pinned"] = runs_beside_ideal(retrieval.pipeline, batches, counts, 1)
    return found


def _fitted(at: tuple[int, int], seconds: tuple[float, float], wanted: float, most: int) -> int:
    """Where a straight line through two times reaches the time wanted; from the first to `most`."""
    slope = (seconds[1] - seconds[0]) / (at[1] - at[0])
    there = at[0] + (wanted - seconds[0]) / slope if slope > 0 else at[0]
    return int(np.clip(round(there), at[0], most))

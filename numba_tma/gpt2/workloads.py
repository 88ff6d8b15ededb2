"""The two workloads at a size that shows something: on a GPU the 124M's, without one a small model's, whose times are a
stated model of an H200's engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ..overlap import Alone, Pipeline, Report
from ..overlap import Model as Engines
from ..overlap.rates import stages_alone
from .batches import BatchInference
from .model import Model
from .retrieval import OfDocuments, Request, Retrieval, Store, make_index

_BYTES = 200e6  # of a batch, that a small model's copies stand for
_SECONDS = 4e-3  # that its computing takes
_SEARCH = 3e-3  # that searching and preparing do
_KINDS = 4  # different batches, which take turns

Batches = Sequence[Any]
Workload = Callable[..., AbstractContextManager[tuple[Pipeline, Batches]]]


def _engines(nbytes: int, prepare: float = 0.0) -> Engines:
    """The modelled machine on which `nbytes` of a small batch stand for a large one's."""
    return Engines(compute=_SECONDS, prepare=prepare, scale=_BYTES / nbytes)


@contextmanager
def batches(model: Model, *, small: bool, mode: str) -> Iterator[tuple[Pipeline, Batches]]:
    """8 prompts of 1024 tokens a batch, of which the logits of the last 224 positions come back."""
    batch, length, every = (2, 12, 4) if small else (8, 1024, 224)
    options = {"model": _engines(batch * every * model.vocabulary * 2)} if small else {}
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, model.config.vocab_size, (batch, length)) for _ in range(_KINDS)]
    with BatchInference(model, batch, length, every=every, mode=mode, record=True, **options) as inference:
        yield inference.pipeline, prompts


@contextmanager
def retrieval(model: Model, *, small: bool, mode: str) -> Iterator[tuple[Pipeline, Batches]]:
    """8 questions a batch on documents of 896 tokens, with answers of 16."""
    batch, document, question, count = (2, 16, 6, 3) if small else (8, 896, 16, 16)
    documents, vectors, dimensions = (4, 200, 16) if small else (16, 20_000, 128)
    rng = np.random.default_rng(5)
    points = rng.standard_normal((documents, dimensions)).astype(np.float32)
    vocabulary = model.config.vocab_size
    index = make_index(np.resize(points, (vectors, dimensions)) + 0.3 * rng.standard_normal((vectors, dimensions)))
    store = Store(model, rng.integers(0, vocabulary, (documents, document)), OfDocuments(index, documents))
    layers, _, width = store.prefix_shape
    options = {"model": _engines(batch * layers * document * width * 2, _SEARCH)} if small else {}
    requests = [
        [
            Request(points[rng.integers(documents)], rng.integers(0, vocabulary, rng.integers(1, question + 1)))
            for _ in range(batch)
        ]
        for _ in range(_KINDS)
    ]
    with Retrieval(store, batch, question, count, mode=mode, record=True, **options) as made:
        yield made.pipeline, requests


WORKLOADS: dict[str, Workload] = {"batches": batches, "retrieval": retrieval}


def report(pipeline: Pipeline, batches: Batches, count: int) -> Report:
    """Of a run of `count` batches, the second: the first loads kernels."""
    for _ in range(1 if pipeline.engines.modelled else 2):
        for result in pipeline.run((batches[i % len(batches)] for i in range(count)), copy=False):
            result.release()
    return pipeline.report


def alone(pipeline: Pipeline, batches: Batches) -> Alone:
    """What each stage of a batch takes by itself."""
    return stages_alone(pipeline, batches[0])

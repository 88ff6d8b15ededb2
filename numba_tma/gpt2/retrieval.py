"""Retrieval and generation as a pipeline: search, fetch what was found, generate, give back, all four at once.

A `Store` has documents, an index of their vectors, and for each the keys and values that the model made of it, in
page-locked memory: its cached prefix. A request is a vector to search by, and a question in tokens. For a batch of
requests

    prepare   a host thread searches the index, and writes the questions into page-locked buffers
    H2D       copies the prefixes of the documents found, straight from where the store has them
    compute   puts them into the cache, runs the questions after them, and generates
    D2H       copies back the answers, and the keys and values of document, question and answer, for the next turn

each for another batch at the same time.
"""

from __future__ import annotations

import numbers
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..arrays import part
from ..overlap import Pipeline
from . import memory
from .batches import stream_of
from .kernels import gpt2_move
from .model import BFLOAT16, Launch, Model, PromptError, Session, padded

# What of a missing or surplus share a search's width is changed by. Where searches are the longest stage they take all
# of the time, however far they are beyond their share: what is seen of a surplus is small.
_WIDER, _NARROWER = 0.3, 2.0


class Index(Protocol):
    """What is asked of an index of vectors; `usearch.index.Index` answers to it."""

    def search(self, vectors: np.ndarray, count: int) -> Any:
        """For vectors (n, dimensions) the `count` nearest: `.keys`, (n, count)."""


def make_index(vectors: np.ndarray) -> Index:
    """An index (HNSW, by cosine) of vectors (n, dimensions), whose keys are their numbers.

    Raises:
        ImportError: the package usearch is not installed.
        ValueError: the vectors are no matrix, or a number in them is not finite.
    """
    vectors = np.ascontiguousarray(vectors, np.float32)
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise ValueError(f"vectors of shape {vectors.shape}: expected (n, dimensions), one vector or more")
    _check_finite(vectors, "vector")
    try:
        from usearch.index import Index as Hnsw
    except ImportError as error:
        raise ImportError("searching takes the package usearch: pip install numba-tma[gpt2]") from error
    index = Hnsw(ndim=vectors.shape[1], metric="cos", dtype="f32")
    index.add(np.arange(len(vectors)), vectors)
    return index


def _check_finite(vectors: np.ndarray, what: str) -> None:
    """See that a search has something to compare: to NaN all vectors are as near as any."""
    wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if wrong.size:
        raise ValueError(f"{what} {wrong[0]} has numbers that are not finite: nothing is near it")


@dataclass(frozen=True)
class Found:
    """What a search found: numbers of documents, (vectors, count), the nearest first."""

    keys: np.ndarray


class OfDocuments:
    """An index with several vectors for each document: vector i belongs to document i modulo their number.

    Attributes:
        width: candidates that a search looks at: more of them take longer, and miss less.
        share: of the time from one search's beginning to the next one's that a search is to take; the width follows, up
            to as many as there are vectors. In a pipeline with a host thread of its own, searches are then as thorough
            as the other stages leave time for. None: the width stays.

    Raises:
        TypeError, ValueError: the number of documents or the width is no integer of 1 or more, or the share not above 0
            and up to 1.
    """

    def __init__(self, index: Any, documents: int, width: int = 64, *, share: float | None = None) -> None:
        for name, value in (("documents", documents), ("width", width)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} {value!r}: expected an integer, 1 or more")
            if value < 1:
                raise ValueError(f"{name} {value}: expected 1 or more")
        if share is not None and (isinstance(share, bool) or not isinstance(share, numbers.Real)):
            raise TypeError(f"share {share!r}: expected a part of the time, above 0 and up to 1, or None")
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"share {share!r}: expected a part of the time, above 0 and up to 1, or None")
        self._index, self._documents, self.width, self.share = index, documents, width, share
        self._last: tuple[float, float] | None = None  # when the last search began, and what it took

    def search(self, vectors: np.ndarray, count: int) -> Found:
        """As the index, with documents' numbers for keys.

        Raises:
            ValueError: the index has fewer vectors than are asked for.
        """
        if count > len(self._index):
            raise ValueError(
                f"the {count} nearest of an index of {len(self._index)} vectors: add some, it would make up the rest"
            )
        begin = time.perf_counter()
        if self.share is not None and self._last is not None:
            self._follow(begin)
        self._index.expansion_search = min(self.width, len(self._index))  # it has memory for as many made
        # One thread: to start a thread for each vector takes longer than to search for it.
        keys = np.asarray(self._index.search(vectors, count, threads=1).keys) % self._documents
        self._last = begin, time.perf_counter() - begin
        return Found(keys)

    def _follow(self, begin: float) -> None:
        """In small steps: what a search takes changes by a quarter from one second to the next, with what else the host
        does."""
        last, took = self._last
        if begin <= last:  # the clock has not moved, or another thread was quicker
            return
        missing = self.share - took / (begin - last)
        wanted = self.width * (1 + (_WIDER if missing > 0 else _NARROWER) * missing)
        # A step of one at least: a small width would not change by a few percent.
        width = max(round(wanted), self.width + 1) if missing > 0 else min(round(wanted), self.width - 1)
        self.width = min(max(1, width), len(self._index))


@dataclass(frozen=True)
class Request:
    """What to search by, (dimensions,) float32, and the question that follows the document found."""

    vector: np.ndarray
    question: Sequence[int]


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        document: number of the document found.
        tokens: the answer.
        prefix: keys and values (layers, tokens of document and question and answer but the last, 2 C) bfloat16; a view
            of the slot that it lies in, which is used again when it is gone.
    """

    document: int
    tokens: np.ndarray
    prefix: np.ndarray


class Store:
    """Documents of equal length as the model's keys and values, and the index that finds them.

    Args:
        model: the weights.
        documents: tokens (n, length).
        index: finds a document's number by a vector.
        batch: documents that are put through the model at a time.

    Raises:
        PromptError: the documents are longer than the model has positions, or have other tokens.
    """

    def __init__(self, model: Model, documents: np.ndarray, index: Index, *, batch: int = 8) -> None:
        documents = np.asarray(documents)
        self.model, self.index, self.length = model, index, documents.shape[1]
        width, config = 2 * model.config.n_embd, model.config
        session = Session(model, batch, positions=self.length)
        self.prefixes: list[np.ndarray] = []
        for start in range(0, len(documents), batch):
            some = documents[start : start + batch]
            session.prefill(np.resize(some, (batch, self.length)))
            cache = memory.to_host(session.cache, session.stream)
            for i in range(len(some)):
                prefix = memory.pinned((config.n_layer, self.length, width), BFLOAT16)
                prefix[...] = cache[:, i, :, width // 2 :]
                self.prefixes.append(prefix)

    @property
    def prefix_shape(self) -> tuple[int, int, int]:
        """Layers, tokens and columns of a document's keys and values."""
        return self.prefixes[0].shape


class Retrieval:
    """The pipeline: batches of requests in, answers out, in order.

    Args:
        store: documents and model.
        batch: requests in a batch.
        question: the most tokens of a question.
        count: tokens of an answer.
        options: the pipeline's: mode ("producer" has the search in a thread of its own, and is the default), depth,
            record, model (of the machine, where there is no GPU), …

    Raises:
        PromptError: document, question and answer together are longer than the model has positions.
    """

    def __init__(self, store: Store, batch: int, question: int, count: int, **options: Any) -> None:
        self.store, self.batch, self.question, self.count = store, batch, question, count
        layers, past, width = store.prefix_shape
        self.positions = past + question + count
        if self.positions > store.model.config.n_positions:
            raise PromptError(
                f"documents of {past} tokens, questions of {question} and answers of {count}: more than the model's "
                f"{store.model.config.n_positions} positions"
            )
        self._session: Session | None = None
        self._work: dict[int, list[Launch]] = {}
        inputs = {f"prefix{i}": (store.prefix_shape, BFLOAT16) for i in range(batch)}
        self.pipeline = Pipeline(
            self._compute,
            inputs=inputs
            | {"tokens": ((batch, past + question), np.int32), "lengths": ((batch,), np.int32)}
            | {"documents": ((batch,), np.int32)},
            outputs={
                "prefix": ((batch, layers, self.positions - 1, width), BFLOAT16),
                "sequence": ((batch, self.positions + 1), np.int32),
                "lengths": ((batch,), np.int32),
                "documents": ((batch,), np.int32),
            },
            prepare=self._prepare,
            elsewhere=list(inputs),
            graph=memory.on_gpu(),
            **{"mode": "producer"} | options,
        )

    def run(self, batches: Iterable[Sequence[Request]]) -> Iterator[list[Answer]]:
        """The answers to each batch of requests.

        Raises:
            BatchError: naming the batch; its cause is a `PromptError` where a question does not fit.
        """
        for result in self.pipeline.run(batches, copy=False):
            yield self._answers(result.outputs)
            del result

    def close(self) -> None:
        """Give buffers and streams back."""
        self.pipeline.close()

    def __enter__(self) -> Retrieval:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, outputs: Mapping[str, np.ndarray]) -> list[Answer]:
        answers = []
        for i, length in enumerate(outputs["lengths"]):
            tokens = outputs["sequence"][i, length - self.count + 1 : length + 1].copy()
            answers.append(Answer(int(outputs["documents"][i]), tokens, outputs["prefix"][i, :, :length]))
        return answers

    def _prepare(self, requests: Sequence[Request], buffers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Search, and say where the copies in are to read."""
        if len(requests) != self.batch:
            raise ValueError(f"{len(requests)} requests in a batch of {self.batch}")
        past = self.store.length
        tokens, lengths = padded([request.question for request in requests], self.store.model.config, self.question)
        vectors = np.stack([np.asarray(request.vector, np.float32) for request in requests])
        _check_finite(vectors, "the vector of request")
        found = np.asarray(self.store.index.search(vectors, 1).keys).reshape(self.batch, -1)[:, 0]
        documents = len(self.store.prefixes)
        strange = found[(found < 0) | (found >= documents)]
        if strange.size:
            raise ValueError(
                f"the index found document {strange[0]} of {documents}, numbered from 0: make it of the store's"
            )
        buffers["tokens"][:, past : past + tokens.shape[1]] = tokens
        buffers["lengths"][:] = past + lengths
        buffers["documents"][:] = found
        return {f"prefix{i}": self.store.prefixes[int(document)] for i, document in enumerate(found)}

    def _compute(self, inputs: dict[str, Any], outputs: dict[str, Any], stream: Any) -> None:
        if self._session is None:
            self._session = Session(
                self.store.model, self.batch, positions=self.positions, prompt=self.question, stream=stream_of(stream)
            )
        key = id(inputs["tokens"])
        if key not in self._work:
            self._work[key] = self._launches(self._session, inputs, outputs)
        for launch in self._work[key]:
            launch()

    def _launches(self, session: Session, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[Launch]:
        layers, past, width = self.store.prefix_shape
        stream = session.stream

        def moved(source: Any, target: Any) -> Launch:
            return gpt2_move[(source.shape[1], layers), None, stream].bind(source, target)

        columns = slice(width // 2, None)
        launches = [
            moved(inputs[f"prefix{i}"], part(session.cache, (slice(None), i, slice(0, past), columns)))
            for i in range(self.batch)
        ]
        launches += [
            memory.copy_launch(session.lengths, inputs["lengths"], stream),
            *session.context_launches(inputs["tokens"], session.lengths, self.question, past),
            session.head_launch(session.logits),
            session.choose_launch(),
            *session.decode_launches() * (self.count - 1),
        ]
        launches += [
            moved(
                part(session.cache, (slice(None), i, slice(0, self.positions - 1), columns)),
                part(outputs["prefix"], i),
            )
            for i in range(self.batch)
        ]
        copies = (("sequence", session.sequence), ("lengths", session.lengths), ("documents", inputs["documents"]))
        return launches + [memory.copy_launch(outputs[name], source, stream) for name, source in copies]

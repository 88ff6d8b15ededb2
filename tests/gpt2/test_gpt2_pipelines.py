"""Workloads: batches of prompts, and retrieval with cached prefixes, through the copy engines and the model at once."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import use_backend
from numba_tma.gpt2 import model as gpt2
from numba_tma.gpt2 import reference
from numba_tma.gpt2.batches import BatchInference
from numba_tma.gpt2.benchmark_workloads import batches_beside_ideal, gains, retrieval_beside_ideal
from numba_tma.gpt2.config import Config
from numba_tma.gpt2.model import PromptError, Session
from numba_tma.gpt2.retrieval import OfDocuments, Request, Retrieval, Store, make_index
from numba_tma.gpt2.weights import random_weights
from numba_tma.overlap import BatchError, Model

CONFIG = Config(n_layer=1, n_head=2, n_embd=64, n_positions=48, vocab_size=211)

pytestmark = pytest.mark.filterwarnings("error")  # a hazard
TOLERANCE = 0.04  # of the logits' standard deviation, as for the model


@pytest.fixture
def weights(seed):
    """One layer is enough to see that batches do not get mixed up."""
    return random_weights(CONFIG, seed)


@pytest.mark.parametrize("mode", ["serial_pinned", "producer"])
def test_batches_of_prompts(rng, weights, model, mode):
    batches = [[rng.integers(0, 211, n) for n in rng.integers(1, 13, 2)] for _ in range(3)]
    with BatchInference(model, 2, 12, mode=mode, depth=2, record=True, model=Model()) as inference:
        for prompts, logits in zip(batches, inference.run(batches), strict=True):
            for prompt, found in zip(prompts, logits, strict=True):
                expected = reference.logits(weights, prompt)[-1]
                assert np.abs(found - expected).max() <= TOLERANCE * expected.std()
        assert inference.pipeline.report.batches == 3
        del logits, found  # which lie in a slot
        with pytest.raises(BatchError, match="batch 1: prepare failed: PromptError: prompt 0 has 13 tokens"):
            list(inference.run([batches[0], [[1] * 13, [2]]]))


def test_logits_of_the_last_positions(rng, weights, model):
    prompts = [rng.integers(0, 211, n) for n in (12, 10)]
    with BatchInference(model, 2, 12, every=5, model=Model()) as inference:
        (logits,) = (found.astype(np.float32) for found in inference.run([prompts]))
    assert logits.shape == (2, 5, 211)
    for prompt, rows in zip(prompts, logits, strict=True):
        expected = reference.logits(weights, prompt)[7:]
        assert np.abs(rows[: len(expected)] - expected).max() <= TOLERANCE * expected.std()
    with pytest.raises(PromptError, match="logits of 13 positions, prompts of 12"):
        BatchInference(model, 2, 12, every=13)


class Nearest:
    """An index that compares with every vector."""

    def __init__(self, vectors):
        self.vectors = vectors

    def search(self, vectors, count):
        class Found:
            keys = np.argsort(-vectors @ self.vectors.T, axis=1)[:, :count]

        return Found


def unit(rng, shape):
    vectors = rng.standard_normal(shape).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_a_library_searches(rng):
    pytest.importorskip("usearch")
    vectors = unit(rng, (500, 32))
    wanted = rng.integers(0, 500, 20)
    found = make_index(vectors).search(vectors[wanted] + 0.01 * unit(rng, (20, 32)), 1).keys
    assert np.count_nonzero(np.asarray(found)[:, 0] == wanted) >= 17  # the index is an approximate one


@pytest.mark.parametrize("width", [1, 100, 5000])
def test_searches_take_their_share(monkeypatch, width):
    """A search that takes 50 µs a candidate, beside another stage that takes 5 ms a batch."""
    now = 0.0

    class Searching:
        expansion_search = 0

        def __len__(self):
            return 5000

        def search(self, vectors, count, threads):
            nonlocal now
            now += 50e-6 * self.expansion_search
            return Nearest(np.eye(4)).search(vectors, count)

    monkeypatch.setattr("time.perf_counter", lambda: now)
    index, widths = OfDocuments(Searching(), 4, width, share=0.9), []
    for _ in range(400):
        begin = now
        assert index.search(np.eye(4)[[2]], 1).keys == [[2]]
        widths.append(index.width)
        now = max(begin + 5e-3, now)
    assert all(81 <= wide <= 99 for wide in widths[-100:])  # of the 100 that there is time for


class Keys:
    """An index of so many vectors that finds what it is told to, and says how many candidates it was to look at."""

    def __init__(self, count, keys=None):
        self.count, self.keys, self.expansion_search = count, keys, None

    def __len__(self):
        return self.count

    def search(self, vectors, count, threads=0):
        return Keys(
            self.count, np.resize(np.arange(self.count) if self.keys is None else self.keys, (len(vectors), count))
        )


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), float("inf"), True, "0.5", 1j])
def test_shares_that_are_none(share):
    with pytest.raises((TypeError, ValueError), match="share .*: expected a part of the time, above 0 and up to 1, or"):
        OfDocuments(Keys(9), 3, share=share)


@pytest.mark.parametrize("name", ["documents", "width"])
@pytest.mark.parametrize("value", [0, -1, 2.5, float("nan"), True, "9", None])
def test_numbers_of_documents_and_candidates(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name} .*: expected .*1 or more"):
        OfDocuments(Keys(9), **{"documents": 3, name: value})


@pytest.mark.parametrize("share", [None, 1e-9, np.float32(0.5), 1])
def test_a_clock_that_stands_still(monkeypatch, share):
    monkeypatch.setattr("time.perf_counter", lambda: 7.0)
    index = OfDocuments(Keys(9), np.int64(3), 5, share=share)
    for _ in range(3):
        assert index.search(np.eye(2), 4).keys.tolist() == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert index.width == 5


def test_more_candidates_than_there_are():
    """The index has memory for as many as it is told, and is told no more than it has vectors."""
    held = Keys(9)
    OfDocuments(held, 3, 1 << 62).search(np.eye(2), 9)
    assert held.expansion_search == 9


@pytest.mark.parametrize("vectors", [0, 2])
def test_an_index_with_fewer_vectors_than_are_asked_for(vectors):
    with pytest.raises(ValueError, match=f"the 3 nearest of an index of {vectors} vectors"):
        OfDocuments(Keys(vectors), 3).search(np.eye(2), 3)


def test_two_searches_keep_what_they_found():
    held = Keys(9)
    index = OfDocuments(held, 9)
    first = index.search(np.eye(1), 1)
    held.keys = np.array([5])
    assert index.search(np.eye(1), 1).keys == [[5]] and first.keys == [[0]]


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.zeros(8), r"vectors of shape \(8,\): expected \(n, dimensions\)"),
        (np.zeros((0, 8)), r"vectors of shape \(0, 8\)"),
        (np.array([[1.0, 2.0], [3.0, np.inf]]), "vector 1 has numbers that are not finite"),
    ],
)
def test_vectors_that_no_index_is_made_of(vectors, message):
    with pytest.raises(ValueError, match=message):
        make_index(vectors)


def test_documents_that_are_not_there(rng, model):
    store = Store(model, rng.integers(0, 211, (2, 16)), Keys(9, [0]), batch=2)
    requests = [Request(np.ones(8), [1]), Request(np.ones(8), [2])]
    with Retrieval(store, 2, question=6, count=2, model=Model()) as retrieval:
        for key in (2, -1, 1 << 32):
            store.index.keys = [key]
            with pytest.raises(BatchError, match=f"ValueError: the index found document {key} of 2"):
                list(retrieval.run([requests]))
        nowhere = Request(np.array([1, np.nan] * 4), [2])
        with pytest.raises(BatchError, match="ValueError: the vector of request 1 has numbers that are not finite"):
            list(retrieval.run([[requests[0], nowhere]]))


def test_retrieval(rng, weights, model):
    """As if document and question had been one prompt; what comes back serves as the next turn's prefix."""
    documents, vectors = rng.integers(0, 211, (3, 16)), unit(rng, (3, 8))
    store = Store(model, documents, Nearest(vectors), batch=2)
    wanted = rng.integers(0, 3, (2, 2))
    batches = [
        [Request(vectors[i] + 0.05 * unit(rng, (1, 8))[0], rng.integers(0, 211, rng.integers(1, 7))) for i in some]
        for some in wanted
    ]
    session = Session(model, 1)
    with Retrieval(store, 2, question=6, count=3, depth=2, record=True, model=Model()) as retrieval:
        for some, requests, answers in zip(wanted, batches, retrieval.run(batches), strict=True):
            for document, request, answer in zip(some, requests, answers, strict=True):
                assert answer.document == document
                prompt = np.concatenate([documents[document], request.question])
                sequence = np.concatenate([prompt, answer.tokens])
                logits = reference.logits(weights, sequence)[len(prompt) - 1 : -1]
                chosen = np.take_along_axis(logits, answer.tokens[:, None], 1)[:, 0]
                assert (logits.max(axis=1) - chosen <= 2 * TOLERANCE * logits.std(axis=1)).all()
                assert answer.prefix.shape == (1, len(sequence) - 1, 128)
            session.prefill([sequence[:-1]])
            again = session.cache[:, 0, : len(sequence) - 1, 64:]
            assert np.abs(answer.prefix - again.astype(np.float32)).max() <= TOLERANCE * again.std()
        busy = retrieval.pipeline.report.busy()
    assert all(busy[stage] > 0 for stage in ("H2D", "compute", "D2H"))


def test_what_does_not_fit(rng, model):
    store = Store(model, rng.integers(0, 211, (2, 16)), Nearest(unit(rng, (2, 8))), batch=2)
    with pytest.raises(PromptError, match="more than the model's 48 positions"):
        Retrieval(store, 2, question=30, count=4, model=Model())
    with Retrieval(store, 2, question=6, count=2, model=Model()) as retrieval:
        with pytest.raises(BatchError, match="prompt 1 has 7 tokens"):
            list(retrieval.run([[Request(np.ones(8), [1]), Request(np.ones(8), [1] * 7)]]))
        with pytest.raises(BatchError, match="1 requests in a batch of 2"):
            list(retrieval.run([[Request(np.ones(8), [1])]]))


@pytest.mark.full
def test_what_is_measured_of_pipelines(model):
    """On the model of the engines: in overlapping modes no stage waits but for the longest."""
    machine = {"model": Model(compute=1e-5)}
    runs = batches_beside_ideal(model, 2, 12, 4, (3,), **machine)
    assert set(runs) == {"serial_pageable", "serial_pinned", "three_streams", "producer"}
    assert runs["producer"][0]["share_of_ideal"] == pytest.approx(1)
    (gain,) = gains(model, 2, 12, (4,), 3, **machine)
    assert gain["three_streams"] < gain["serial_pinned"] and gain["bytes_out"] == 2 * 4 * model.vocabulary * 2
    pytest.importorskip("usearch")
    found = retrieval_beside_ideal(model, 2, 16, 6, documents=2, vectors=100, dimensions=8, counts=(3,), **machine)
    assert found["producer"][0]["share_of_ideal"] == pytest.approx(1)
    assert found["serial_pinned"][0]["seconds"] >= found["producer"][0]["seconds"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["serial_pageable", "two_streams", "three_streams", "producer"])
def test_on_a_gpu(rng, mode):
    """Graphs, page-locked memory and streams give what a session gives by itself."""
    config = Config(n_layer=2, n_head=2, n_embd=128, n_positions=128, vocab_size=1013)
    with use_backend("gpu"):
        model = gpt2.Model(random_weights(config, 3))
        session = Session(model, 2)
        batches = [[rng.integers(0, 1013, n) for n in rng.integers(1, 61, 2)] for _ in range(9)]
        with BatchInference(model, 2, 60, mode=mode) as inference:
            for prompts, logits in zip(batches, inference.run(batches), strict=True):
                expected = session.prefill(prompts)
                assert np.abs(logits - expected).max() <= TOLERANCE * expected.std()
        documents, vectors = rng.integers(0, 1013, (4, 40)), unit(rng, (4, 8))
        store = Store(model, documents, Nearest(vectors), batch=2)
        wanted = rng.integers(0, 4, (9, 2))
        batches = [[Request(vectors[i], rng.integers(0, 1013, rng.integers(1, 17))) for i in some] for some in wanted]
        with Retrieval(store, 2, question=16, count=8, mode=mode) as retrieval:
            for some, requests, answers in zip(wanted, batches, retrieval.run(batches), strict=True):
                assert [answer.document for answer in answers] == some.tolist()
                prompts = [np.concatenate([documents[i], r.question]) for i, r in zip(some, requests, strict=True)]
                expected = session.prefill(
                    [np.concatenate([p, a.tokens[:-1]]) for p, a in zip(prompts, answers, strict=True)]
                )
                chosen = expected[[0, 1], [answer.tokens[-1] for answer in answers]]
                assert (expected.max(axis=1) - chosen <= 2 * TOLERANCE * expected.std(axis=1)).all()

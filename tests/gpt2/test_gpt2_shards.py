"""The benchmark of GPT-2 over several GPUs, with a simple pipeline in the model's place and workers in this process."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from numba_tma.gpt2 import benchmark_shards
from numba_tma.gpt2.config import Config
from numba_tma.overlap import Model, Pipeline

distributed = pytest.importorskip("distributed")
CONFIG = Config(n_layer=1, n_head=2, n_embd=64, n_positions=48, vocab_size=211)
RUNS = {0: (6, 4), 3: (4, 2)}
_made = itertools.count()
_wrong: set[int] = set()  # of the pipelines in the order in which they are made


def _make_pipeline(config, batch, length, every):
    number = next(_made)

    def compute(inputs, outputs, stream):
        assert inputs["tokens"].max() < config.vocab_size
        outputs["logits"][...] = inputs["tokens"][:, -max(every, 1) :] + 100 * (number in _wrong)

    shapes = {"tokens": ((batch, length), np.int64)}, {"logits": ((batch, max(every, 1)), np.float32)}
    return Pipeline(compute, *shapes, model=Model())


@pytest.fixture
def rows(monkeypatch):
    """What the benchmark finds with two workers."""
    monkeypatch.setattr(benchmark_shards, "make_pipeline", _make_pipeline)
    asked = []

    def cluster(gpus):
        asked.append(list(gpus))
        return distributed.LocalCluster(
            n_workers=len(asked[-1]), threads_per_worker=1, processes=False, dashboard_address=":0"
        )

    monkeypatch.setattr(benchmark_shards, "gpu_cluster", cluster)
    yield benchmark_shards.by_gpus([0, 1], RUNS, config=CONFIG, batch=2, length=5)
    assert asked == [[0, 1]]


def test_rows(rows):
    found = list(rows)
    assert [(row["gpus"], row["every"], row["batches"]) for row in found] == [
        (0, 0, 6),
        (0, 3, 4),
        (1, 0, 6),
        (2, 0, 12),
        (1, 3, 4),
        (2, 3, 8),
    ]
    assert all(row["seconds"] > 0 and row["bytes_out"] == 8 * max(row["every"], 1) for row in found)
    assert [sorted(row.get("transfer_seconds", ())) for row in found[2:]] == 2 * [
        ["straight", "through the scheduler"],
        [],
    ]


def test_a_workers_wrong_logits_are_an_error(rows):
    for _ in RUNS:
        next(rows)
    _wrong.add(next(_made) + 1)
    with pytest.raises(ArithmeticError, match=r"batch 0: a worker's logits are not those of this process"):
        next(rows)

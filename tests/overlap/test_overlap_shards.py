"""Batches over several worker processes on this machine, by Dask."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma.overlap import BatchError, Model, Pipeline
from numba_tma.overlap.shards import Sharded

distributed = pytest.importorskip("distributed")
N = 16


def _make_pipeline():
    """In a worker. Its results tell which process made them."""
    import os

    def compute(inputs, outputs, stream):
        if inputs["x"][0] < 0:
            raise ValueError("negative")
        outputs["y"][...] = inputs["x"] * 2
        outputs["process"][...] = os.getpid()

    described = {"y": ((N,), np.float64), "process": ((1,), np.int64)}
    return Pipeline(compute, {"x": ((N,), np.float64)}, described, model=Model())


@pytest.fixture(scope="module")
def client():
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def test_order_workers_and_errors(client, rng):
    batches = [rng.random(N) for _ in range(24)]
    with Sharded(_make_pipeline, client, chunk=3) as sharded:
        results = list(sharded.run(batches))
        assert [result.index for result in results] == list(range(24))
        for result, batch in zip(results, batches, strict=True):
            np.testing.assert_array_equal(result["y"], batch * 2)
        assert len({int(result["process"][0]) for result in results}) == 2

        batches[10] = -batches[10] - 1
        got = []
        with pytest.raises(BatchError, match="batch 10: compute failed: ValueError: negative"):
            for result in sharded.run(batches):
                got.append(result.index)
        assert got == list(range(10))

        assert [result.index for result in sharded.run(iter(batches[:2]))] == [0, 1]
        assert list(sharded.run([])) == []


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"expected a dask\.distributed\.Client"):
        Sharded(_make_pipeline, None)

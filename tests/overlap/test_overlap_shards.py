"""Batches over several worker processes on this machine, by Dask."""

from __future__ import annotations

import os

import numpy as np
import pytest

from numba_tma import driver
from numba_tma.overlap import BatchError, Model, Pipeline
from numba_tma.overlap.shards import Sharded, gpu_cluster

distributed = pytest.importorskip("distributed")
N = 16


def _make_pipeline():
    """In a worker. Its results tell which process made them."""

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


def test_chosen_workers_and_an_early_start(client, rng):
    batches = [rng.random(N) for _ in range(8)]
    one = list(client.nthreads())[1:]
    (process,) = client.run(os.getpid, workers=one).values()
    with Sharded(_make_pipeline, client, chunk=1, workers=one) as sharded:
        assert sum(client.run(_pipelines).values()) == 0
        sharded.start()
        assert client.run(_pipelines, workers=one) == {one[0]: 1} and sum(client.run(_pipelines).values()) == 1
        results = list(sharded.run(batches))
    assert {int(result["process"][0]) for result in results} == {process}
    assert sum(client.run(_pipelines).values()) == 0


def _visible():
    return os.environ["CUDA_VISIBLE_DEVICES"]


def _pipelines():
    from numba_tma.overlap import shards

    return len(shards._pipelines)


@pytest.mark.parametrize(("visible", "names"), [(None, ["0", "1", "2"]), ("3,GPU-8f0c,1", ["3", "GPU-8f0c", "1"])])
def test_a_worker_sees_its_gpu_alone(visible, names, monkeypatch):
    monkeypatch.setattr(driver, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with gpu_cluster([0, 2]) as cluster, distributed.Client(cluster) as client:
        seen = client.run(_visible)
        assert sorted(seen.values()) == sorted([names[0], names[2]])
        assert set(client.nthreads().values()) == {1}


@pytest.mark.parametrize(
    ("gpus", "message"), [(None, "no GPU 0 of 0 here"), ([1], "no GPU 1 of 0"), ([-1, 0], "no GPU -1, 0 of 0")]
)
def test_workers_for_gpus_that_are_not_there(gpus, message, monkeypatch):
    monkeypatch.setattr(driver, "device_count", lambda: 0)
    with pytest.raises(driver.LaunchError, match=message):
        gpu_cluster(gpus)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"expected a dask\.distributed\.Client"):
        Sharded(_make_pipeline, None)

"""Batches over several worker processes on this machine, by Dask."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from numba_tma import driver
from numba_tma.overlap import BatchError, Model, Pipeline, shards
from numba_tma.overlap.shards import Sharded, gpu_cluster

distributed = pytest.importorskip("distributed")
N = 16


class _TwoArguments(Exception):
    """It cannot be unpickled, unless Dask has had tblib see to that."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


class _WithLock(Exception):
    """It cannot be pickled."""

    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


_FAULTS = {-2: _TwoArguments(1, 2), -3: _WithLock(), -4: SystemExit(3), -5: KeyboardInterrupt()}


def _make_pipeline():
    """In a worker. Its results tell which process made them."""

    def compute(inputs, outputs, stream):
        if inputs["x"][0] < 0:
            raise _FAULTS.get(int(inputs["x"][0]), ValueError("negative"))
        if np.isnan(inputs["x"][0]):
            os._exit(1)
        outputs["y"][...] = inputs["x"] * 2
        outputs["process"][...] = os.getpid()

    described = {"y": ((N,), np.float64), "process": ((1,), np.int64)}
    return Pipeline(compute, {"x": ((N,), np.float64)}, described, model=Model())


@pytest.fixture(scope="module")
def client():
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
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


@pytest.mark.parametrize(
    ("fault", "batch", "message"),
    [
        (-2, 5, "compute failed: (RuntimeError: )?_TwoArguments: 1 and 2"),
        (-3, 5, "compute failed: RuntimeError: _WithLock: locked"),
        # The batches of a chunk are under way together, and these end all.
        (-4, 4, "result failed: RuntimeError: SystemExit: 3"),
        (-5, 4, "result failed: RuntimeError: KeyboardInterrupt"),
    ],
)
def test_errors_that_cannot_travel(client, fault, batch, message):
    """They neither end a worker's threads nor arrive as an error of pickling."""
    batches = [np.full(N, value, np.float64) for value in (0, 1, 2, 3, 4, fault, 6)]
    with Sharded(_make_pipeline, client, chunk=2) as sharded:
        got = []
        with pytest.raises(BatchError, match=f"^batch {batch}: {message}"):
            for result in sharded.run(batches):
                got.append(result.index)
        assert got == list(range(batch))
        assert [result["y"][0] for result in sharded.run(batches[:5])] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("delivered", [0, 1, 4, 5, 23])
def test_a_source_that_fails(client, rng, delivered):
    """What it gave before is computed and delivered."""
    batches = [rng.random(N) for _ in range(delivered)]

    def source():
        yield from batches
        raise OSError("no more")

    with Sharded(_make_pipeline, client, chunk=2) as sharded:
        got = []
        with pytest.raises(BatchError, match=f"batch {delivered}: source failed: OSError: no more"):
            for result in sharded.run(source()):
                got.append(result["y"])
        np.testing.assert_array_equal(got, [2 * batch for batch in batches])


def test_batches_that_cannot_be_sent(client):
    batches = [np.zeros(N), np.zeros(N), np.zeros(N), threading.Lock()]
    with Sharded(_make_pipeline, client, chunk=2) as sharded:
        got = []
        with pytest.raises(BatchError, match="batch 3: source failed: TypeError: cannot pickle"):
            for result in sharded.run(batches):
                got.append(result.index)
        assert got == [0, 1]  # the chunk that it is in is not sent


def _make_nothing():
    return None


def _fail_to_make():
    raise _TwoArguments("no", "pipeline")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_make_nothing, TypeError, "make_pipeline returned a NoneType: expected a Pipeline"),
        (_fail_to_make, (RuntimeError, _TwoArguments), "no and pipeline"),
    ],
)
def test_pipelines_that_cannot_be_made(client, make, error, message):
    with Sharded(make, client) as sharded:
        with pytest.raises(error, match=message):
            sharded.start()
        with pytest.raises(error, match=message):
            list(sharded.run([np.zeros(N)]))


def test_workers_that_are_not_there(client, monkeypatch):
    """Dask would wait for them."""
    monkeypatch.setattr(shards, "_PATIENCE", 0.2)
    stranger = Sharded(_make_pipeline, client, workers=["tcp://127.0.0.1:1"])
    for ask in (stranger.start, lambda: list(stranger.run([np.zeros(N)]))):
        with pytest.raises(ValueError, match="workers: tcp://127.0.0.1:1 not in the cluster, which has tcp://"):
            ask()
    one = list(client.nthreads())[:1]
    with Sharded(_make_pipeline, client, chunk=1, workers=one) as sharded:
        assert len(list(sharded.run([np.zeros(N)]))) == 1
        with pytest.raises(RuntimeError, match=f"none of the workers {one[0]} is in the cluster any more"):
            list(sharded.run([np.full(N, np.nan), np.zeros(N)]))
        with pytest.raises(ValueError, match=f"workers: {one[0]} not in the cluster"):
            list(sharded.run([np.zeros(N)]))
    client.wait_for_workers(2, timeout=30)


def test_what_is_closed(client):
    with Sharded(_make_pipeline, client) as sharded:
        assert len(list(sharded.run([np.zeros(N)]))) == 1
    sharded.close()  # once more does nothing
    for ask in (sharded.start, lambda: sharded.run([])):
        with pytest.raises(RuntimeError, match="the Sharded is closed"):
            ask()
    with distributed.Client(client.scheduler.address) as other:
        open_still = Sharded(_make_pipeline, other, chunk=1)
        run = open_still.run([np.zeros(N)] * 9)
        next(run)
    for ask in (lambda: next(run), open_still.start, lambda: open_still.run([])):
        with pytest.raises(RuntimeError, match="the Dask client is closed"):
            ask()
    open_still.close()
    client.run(_forget_all)


def _forget_all():
    shards._pipelines.clear()


def _visible():
    return os.environ["CUDA_VISIBLE_DEVICES"]


def _pipelines():
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


@pytest.mark.parametrize(
    ("gpus", "error", "message"),
    [
        ("01", TypeError, r"gpus \['0', '1'\]: expected ordinals"),
        ([0, True], TypeError, "expected ordinals"),
        ([0, 1, 0], ValueError, "a GPU twice"),
    ],
)
def test_gpus_that_are_none(gpus, error, message, monkeypatch):
    monkeypatch.setattr(driver, "device_count", lambda: 2)
    with pytest.raises(error, match=message):
        gpu_cluster(gpus)


def test_bad_arguments(client):
    for given, error, message in (
        ({"client": None}, TypeError, r"expected a dask\.distributed\.Client"),
        ({"make_pipeline": None}, TypeError, "make_pipeline=None: expected a function"),
        *(({"chunk": chunk}, ValueError, f"chunk {chunk!r}; expected a number") for chunk in (0, -1, True, 2.5, "3")),
        ({"workers": []}, ValueError, "expected one address or more, or None for all"),
        *(({"workers": some}, TypeError, "expected a list of addresses") for some in ("tcp://127.0.0.1:1", [5], 5)),
    ):
        with pytest.raises(error, match=message):
            Sharded(**({"make_pipeline": _make_pipeline, "client": client} | given))

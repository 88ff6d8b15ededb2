"""The pipeline on a GPU: numbers, other libraries' streams and memory, graphs, real overlap, errors of the device."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

from numba_tma.overlap import MODES, Pipeline, exercise, soak
from numba_tma.overlap.rates import measure_rates, stages_alone

pytestmark = pytest.mark.gpu
WORDS, ROUNDS = 1 << 18, 6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("graph", [True, False])
def test_every_mode(mode, copy, graph, rng):
    with exercise.make_pipeline(WORDS, ROUNDS, mode=mode, graph=graph, launches=3) as p:
        for kind in ("pinned", "pageable"):
            data = exercise.batches(p, 5, rng)
            if kind == "pageable":
                data = [{name: array.copy() for name, array in arrays.items()} for arrays in data]
            for result in p.run(data * 4, copy=copy):
                expected = exercise.reference(data[result.index % 5]["words"], ROUNDS)
                np.testing.assert_array_equal(result["words"], expected)
            del result
            gc.collect()
            assert p.free_slots == p.depth


@pytest.mark.parametrize("mode", ["two_streams", "three_streams", "producer"])
def test_engines_overlap(mode, rng):
    with exercise.make_pipeline(1 << 22, 64, mode=mode, record=True) as p:
        data = exercise.batches(p, 6, rng)
        for _ in range(2):
            for result in p.run(data, copy=False):
                result.release()
        assert len(p.report.spans) == 4 * 6
        busy = p.report.busy()
        assert p.report.window() < 0.95 * (busy["H2D"] + busy["compute"] + busy["D2H"])
        for span in p.report.spans:
            assert 0 <= span.start <= span.end <= p.report.seconds + 1e-3


def test_pinned_memory_is_known(rng):
    with exercise.make_pipeline(1024, 1) as p:
        assert p.engines.is_pinned(p.pinned()["words"])
        assert p.engines.is_pinned(p.pinned()["words"][5:])
        assert not p.engines.is_pinned(np.zeros(1024, np.uint32))


def test_pytorch(rng):
    torch = pytest.importorskip("torch")
    streams = [torch.cuda.Stream() for _ in range(3)]

    def compute(inputs, outputs, stream):
        assert stream is streams[1]
        with torch.cuda.stream(stream):
            x = torch.as_tensor(inputs["x"], device="cuda")
            torch.as_tensor(outputs["y"], device="cuda").copy_(x @ x)

    described = {"x": ((64, 64), np.float32)}
    with Pipeline(compute, described, {"y": described["x"]}, streams=streams) as p:
        data = [torch.rand(64, 64).pin_memory() for _ in range(6)] + [torch.rand(64, 64) for _ in range(3)]
        assert p.engines.is_pinned(data[0].numpy()) and not p.engines.is_pinned(data[-1].numpy())
        for result in p.run(data):
            x = data[result.index].numpy().astype(np.float64)
            np.testing.assert_allclose(result["y"], x @ x, rtol=2e-3)


def test_cupy(rng):
    cupy = pytest.importorskip("cupy")
    import cupyx

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]

    def compute(inputs, outputs, stream):
        with stream:
            cupy.multiply(cupy.asarray(inputs["x"]), 3, out=cupy.asarray(outputs["y"]))

    described = {"x": ((1000,), np.float32)}
    with Pipeline(compute, described, {"y": described["x"]}, streams=streams) as p:
        data = [cupyx.empty_pinned(1000, np.float32) for _ in range(6)]
        for array in data:
            array[...] = rng.random(1000, np.float32)
        assert p.engines.is_pinned(data[0])
        for result in p.run(data):
            np.testing.assert_array_equal(result["y"], 3 * data[result.index])


@pytest.mark.parametrize("mode", ["three_streams", "producer"])
def test_soak_of_a_thousand(mode):
    found = soak.soak(1000, mode=mode)
    assert (found["batches"], found["misplaced"], found["corrupt"]) == (1000, 0, 0)
    assert found["slots_back"] and found["device_growth_bytes"] == 0 and found["host_growth_bytes"] < 16 << 20


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", soak.FAULTS)
def test_faults(mode, stage):
    with soak.make_pipeline(1 << 14, mode=mode) as p:
        found = soak.with_fault(p, stage, 5, 12)
        assert (found["error"]["stage"], found["error"]["batch"]) == (stage, 5)
        assert found["delivered"] == found["right"] == 5
        assert found["slots_back"] and found["right_afterwards"] == 12


def test_memory_comes_back(rng):
    with exercise.make_pipeline(1 << 20, 1) as p:  # loads the kernel
        list(p.run(exercise.batches(p, 3, rng)))
    before = soak.device_bytes()
    for _ in range(5):
        with exercise.make_pipeline(16 << 20, 1, depth=2) as p:
            list(p.run(exercise.batches(p, 1, rng)))
        del p
    gc.collect()
    assert soak.device_bytes() - before < 16 << 20


def test_rates_and_stages():
    rates = measure_rates(32 << 20)
    assert 0 < rates.h2d <= 1.1 * rates.h2d_alone and 0 < rates.d2h <= 1.1 * rates.d2h_alone
    with exercise.make_pipeline(1 << 22, 500) as p:
        alone = stages_alone(p, p.pinned())
    assert alone.h2d == pytest.approx((16 << 20) / rates.h2d, rel=0.3)
    assert alone.compute > 0 and alone.prepare < alone.h2d


_CRASH = """
import numpy as np
from numba import cuda
from numba_tma import kernel
from numba_tma.overlap import BatchError, Pipeline

@kernel(threads=32)
def stray(x, y, far):
    y[far] = x[0]

def compute(inputs, outputs, stream):
    number = compute.calls
    compute.calls += 1
    stray[1, None, stream](inputs["x"], outputs["y"], np.int64(1 << 40 if number == 2 else 0))

compute.calls = 0
described = {"x": ((32,), np.float32)}
with Pipeline(compute, described, {"y": described["x"]}, mode="MODE") as p:
    try:
        for result in p.run(np.full(32, i, np.float32) for i in range(6)):
            print("got", result.index)
    except BatchError as error:
        print("error", error.batch, error.stage, "ILLEGAL" in str(error).upper())
print("closed")
"""


@pytest.mark.parametrize("mode", ["three_streams", "producer"])
def test_an_error_of_the_device_arrives(mode):
    """It ends the context, so it is left to a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _CRASH.replace("MODE", mode)], capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "closed" and done.returncode == 0, done.stdout + done.stderr
    # The driver tells of it at the next call, whichever batch that is for: none after the one that caused it.
    (error,) = [line.split() for line in lines if line.startswith("error")]
    assert int(error[1]) <= 3 and error[3] == "True"
    assert [line for line in lines if line.startswith("got")] == [f"got {i}" for i in range(int(error[1]))]

"""The pipeline without a GPU: order, back-pressure, errors, shutdown, and who may look at what how long."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest

from numba_tma import launch
from numba_tma.overlap import MODES, BatchError, Mode, Model, Pipeline, SlotsHeldError, exercise, soak
from numba_tma.overlap.model import ModelStream

N = 24
SPEC = {"x": ((N,), np.float32)}
OUT = {"y": ((N,), np.float32)}


def triple(inputs, outputs, stream):
    outputs["y"][...] = 3 * inputs["x"]


def pipeline(compute=triple, mode="three_streams", **options):
    options.setdefault("model", Model())
    return Pipeline(compute, SPEC, OUT, mode=mode, **options)


@pytest.fixture
def batches(rng):
    return [rng.random(N, np.float32) for _ in range(11)]


def check(results, batches):
    assert [result.index for result in results] == list(range(len(batches)))
    for result, batch in zip(results, batches, strict=True):
        np.testing.assert_array_equal(result["y"], 3 * batch)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_in_order_and_slots_back(mode, depth, batches):
    with pipeline(mode=mode, depth=depth) as p:
        for _ in range(2):
            check(list(p.run(batches)), batches)
            assert p.free_slots == p.depth == depth
            assert p.report.batches == len(batches)
            assert p.report.bytes_in == p.report.bytes_out == 4 * N * len(batches)
        assert list(p.run([])) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_kernel_in_the_simulator(mode, rng):
    with exercise.make_pipeline(100, 6, mode=mode, model=Model()) as p:
        data = exercise.batches(p, 3, rng)
        for result in p.run(data):
            words = data[result.index]["words"]
            for _ in range(6):
                words = words * np.uint32(exercise.FACTOR) + np.uint32(exercise.STEP)
            np.testing.assert_array_equal(result["words"], words)


def test_batches_may_be_dicts_tuples_or_arrays(rng):
    def add(inputs, outputs, stream):
        outputs["sum"][...] = inputs["a"] + inputs["b"]

    a, b = rng.random((2, 3, 4))
    spec = {"a": ((3, 4), np.float64), "b": a}
    with Pipeline(add, spec, {"sum": a}, model=Model()) as p:
        found = [result["sum"] for result in p.run([{"b": b, "a": a}, (a, b), [b, a]])]
    for value in found:
        np.testing.assert_array_equal(value, a + b)


@pytest.mark.parametrize("mode", MODES)
def test_prepare_writes_into_the_slots_memory(mode, batches):
    threads = set()

    def prepare(number, buffers):
        threads.add(threading.current_thread())
        buffers["x"][...] = batches[number]

    with pipeline(mode=mode, prepare=prepare) as p:
        check(list(p.run(range(11))), batches)
    assert (threading.current_thread() in threads) == (mode != "producer") and len(threads) == 1


def test_prepare_may_point_elsewhere(batches):
    """Even numbers lie in memory of the source's own, which a model of page-locked memory reads where it is."""

    def prepare(number, buffers):
        buffers["x"][...] = batches[number] if number % 2 else np.nan
        return None if number % 2 else {"x": batches[number]}

    with pipeline(mode="producer", prepare=prepare) as p:
        check(list(p.run(range(11))), batches)
    with (
        pipeline(prepare=lambda number, buffers: {"z": batches[0]}) as p,
        pytest.raises(BatchError, match=r"prepare failed: ValueError: array 'z'; the inputs are x"),
    ):
        list(p.run([0]))


def test_what_lies_elsewhere_has_no_buffers(batches):
    def prepare(number, buffers):
        assert not buffers
        return {"x": batches[number]} if number < 9 else {"x": batches[number][::-1]} if number == 9 else None

    with pipeline(mode="producer", prepare=prepare, elsewhere=["x"]) as p:
        check(list(p.run(range(9))), batches[:9])
        with pytest.raises(BatchError, match="input 'x' lies elsewhere, as was said, and in no page-locked memory"):
            list(p.run([9]))
        with pytest.raises(BatchError, match="prepare returned no x"):
            list(p.run([10]))
    with pytest.raises(ValueError, match=r"elsewhere z: expected inputs \(x\)"):
        pipeline(prepare=prepare, elsewhere=["x", "z"])
    with pytest.raises(ValueError, match="elsewhere x"):
        pipeline(elsewhere=["x"])


def test_the_callers_context_holds_in_the_threads(batches):
    seen = []

    def prepare(number, buffers):
        seen.append(launch.backend())

    with launch.use_backend("sim"), pipeline(mode="producer", prepare=prepare) as p:
        list(p.run(range(2)))
    assert seen == ["sim", "sim"]


@pytest.mark.parametrize("mode", MODES)
def test_back_pressure(mode):
    taken = 0

    def source():
        nonlocal taken
        for _ in range(30):
            taken += 1
            yield np.zeros(N, np.float32)

    with pipeline(mode=mode, depth=3) as p:
        for delivered, _ in enumerate(p.run(source())):
            time.sleep(0.002)
            # Under way: as many as there are slots; in the caller's hands: this one; without a slot yet: one.
            assert taken <= delivered + 3 + 2
    assert taken == 30


@pytest.mark.parametrize("stage", soak.FAULTS)
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_in_each_stage(mode, stage):
    with soak.make_pipeline(32, mode=mode, model=Model()) as p:
        for batch in (0, 4):
            found = soak.with_fault(p, stage, batch, 6)
            assert found["error"] == {
                "stage": stage,
                "batch": batch,
                "message": f"batch {batch}: {stage} failed: OSError: a fault put into {stage}",
            }
            assert found["delivered"] == found["right"] == batch
            assert found["slots_back"] and found["right_afterwards"] == 6


@pytest.mark.parametrize("mode", MODES)
def test_what_compute_raises_has_the_batch(mode, batches):
    def compute(inputs, outputs, stream):
        if inputs["x"][0] == batches[4][0]:
            raise ZeroDivisionError("four")
        triple(inputs, outputs, stream)

    with pipeline(compute, mode) as p:
        got = []
        with pytest.raises(BatchError, match="batch 4: compute failed: ZeroDivisionError: four") as caught:
            for result in p.run(batches):
                got.append(result)
        check(got, batches[:4])
        assert (caught.value.batch, caught.value.stage) == (4, "compute")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert p.free_slots == p.depth
        check(list(p.run(batches[5:])), batches[5:])


def test_a_batch_error_survives_pickling():
    error = pickle.loads(pickle.dumps(BatchError(3, "compute", ValueError("no"))))
    assert (error.batch, error.stage, str(error)) == (3, "compute", "batch 3: compute failed: ValueError: no")
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [True, False])
def test_leaving_early(mode, copy, batches):
    with pipeline(mode=mode) as p:
        for result in p.run(batches, copy=copy):
            if result.index == 2:
                break
        del result
        gc.collect(1)
        assert p.free_slots == p.depth
        with pytest.raises(LookupError, match="mine"):
            for result in p.run(batches, copy=copy):
                raise LookupError(f"mine, {result.index}")
        del result
        gc.collect(1)
        assert p.free_slots == p.depth
        check(list(p.run(batches)), batches)


@pytest.mark.parametrize("where", ["loop", "waiting"])
@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c(mode, where, batches):
    """In the caller's loop, or while the caller waits for a batch that is being prepared."""
    hung = threading.Event()

    def prepare(number, buffers):
        if number == 3 and where == "waiting":
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            hung.wait(0.2)
        buffers["x"][...] = batches[number]

    before = threading.active_count()
    with pipeline(mode=mode, prepare=prepare) as p:
        with pytest.raises(KeyboardInterrupt):
            for result in p.run(range(11)):
                if result.index == 4 and where == "loop":
                    signal.raise_signal(signal.SIGINT)
                time.sleep(0.001)
            pytest.fail("nobody was interrupted")
        assert p.free_slots == p.depth
        hung.set()
        where = "over"
        check(list(p.run(range(11))), batches)
    while threading.active_count() > before:
        time.sleep(0.01)  # the timer's thread; the pipeline's have ended


@pytest.mark.parametrize("mode", MODES)
def test_views_hold_their_slot(mode, batches):
    with pipeline(mode=mode, depth=4) as p:
        run = p.run(batches, copy=False)
        first = next(run)
        kept = first["y"][::2][1:]  # a view of a view
        del first
        for number in range(1, 8):
            result = next(run)
            np.testing.assert_array_equal(result["y"], 3 * batches[number])
            del result
        np.testing.assert_array_equal(kept, 3 * batches[0][2::2])  # nobody has written there
        run.close()
        assert p.free_slots == 3
        del kept
        assert p.free_slots == 4


@pytest.mark.parametrize("mode", MODES)
def test_holding_all_slots_is_an_error_not_a_hang(mode, batches):
    with pipeline(mode=mode, depth=3) as p:
        with pytest.raises(SlotsHeldError, match=r"all 3 slots are held.*copy=True.*depth=3"):
            list(p.run(batches, copy=False))
        gc.collect(1)
        assert p.free_slots == 3
        # Just as many batches as slots may all be held.
        check(list(p.run(batches[:3], copy=False)), batches[:3])


@pytest.mark.parametrize("mode", MODES)
def test_released_results_let_one_slot_do(mode, batches):
    with pipeline(mode=mode, depth=1) as p:
        for result in p.run(batches, copy=False):
            np.testing.assert_array_equal(result["y"], 3 * batches[result.index])
            result.release()
            result.release()  # once more does nothing
            assert p.free_slots == 1 or mode == "producer"


def test_views_outlive_the_pipeline(batches):
    with pipeline() as p:
        found = [result["y"] for result in p.run(batches[:3], copy=False)]
    for value, batch in zip(found, batches, strict=False):
        np.testing.assert_array_equal(value, 3 * batch)


def test_the_streams_that_are_given_are_used(batches):
    mine = [ModelStream() for _ in range(3)]
    seen = []

    def compute(inputs, outputs, stream):
        seen.append(stream)
        triple(inputs, outputs, stream)

    with pipeline(compute, streams=mine) as p:
        check(list(p.run(batches)), batches)
    assert all(stream is mine[1] for stream in seen) and all(stream.ready > 0 for stream in mine)
    with pytest.raises(ValueError, match="2 streams; mode three_streams has 3"):
        pipeline(streams=mine[:2])
    with pytest.raises(TypeError, match="the engines are a model's"):
        pipeline(streams=[1, 2, 3])


def test_one_run_at_a_time(batches):
    with pipeline() as p:
        run = p.run(batches)
        next(run)
        with pytest.raises(RuntimeError, match="runs already"):
            next(p.run(batches))
        assert p.free_slots < p.depth
    assert list(run) == []  # closing the pipeline ended it
    p.close()  # once more does nothing
    with pytest.raises(RuntimeError, match="closed"):
        p.run(batches)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.zeros(N - 1, np.float32), r"batch 1: prepare failed: ValueError: input 'x': float32 of shape \(23,\)"),
        (np.zeros(N), "input 'x': float64 of shape"),
        ({"z": np.zeros(N, np.float32)}, "arrays z; the inputs are x"),
        ((1, 2), "2 arrays; the inputs are x"),
    ],
)
def test_batches_that_do_not_fit(batch, message):
    with pipeline() as p, pytest.raises(BatchError, match=message):
        list(p.run([np.zeros(N, np.float32), batch]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mode": "four"}, ValueError, "mode 'four': choose one of serial_pageable"),
        ({"depth": 0}, ValueError, "depth 0"),
        ({"depth": True}, ValueError, "depth True"),
        ({"compute": 3}, TypeError, "compute=3"),
        ({"inputs": {"x": 5}}, TypeError, "input 'x': 5; expected"),
        ({"outputs": {"y": ((-1,), np.float32)}}, ValueError, "output 'y': shape"),
        ({"inputs": {}, "prepare": print}, ValueError, "prepare without inputs"),
    ],
)
def test_bad_arguments(options, error, message):
    arguments = {"compute": triple, "inputs": SPEC, "outputs": OUT, "model": Model(), **options}
    with pytest.raises(error, match=message):
        Pipeline(**arguments)


def test_bad_modes():
    for options, message in (
        ({"streams": 0}, "0 streams"),
        ({"layout": "heap"}, "layout 'heap'"),
        ({"layout": "engines", "streams": 2}, "makes three"),
        ({"overlapping": False, "producer": True}, "nothing to do"),
    ):
        with pytest.raises(ValueError, match=message):
            Mode("mine", **options)


def test_a_short_soak():
    for mode in ("three_streams", "producer"):
        found = soak.soak(80, 32, mode=mode, model=Model(), depth=3)
        assert (found["batches"], found["misplaced"], found["corrupt"]) == (80, 0, 0)
        assert found["slots_back"] and found["host_growth_bytes"] < 4 << 20

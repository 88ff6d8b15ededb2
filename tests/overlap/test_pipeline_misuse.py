"""What a pipeline refuses, and with which words, where it would be wrong numbers, a hang or a word of Python's own."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
import types
from concurrent.futures import wait

import numpy as np
import pytest

from numba_tma import arrays, driver
from numba_tma.device_array import DeviceArray
from numba_tma.overlap import MODES, BatchError, Model, Pipeline
from numba_tma.overlap.gpu import GpuEngines

N = 24
SPEC = {"x": ((N,), np.float32)}
OUT = {"y": ((N,), np.float32)}


def triple(inputs, outputs, stream):
    outputs["y"][...] = 3 * inputs["x"]


def pipeline(mode="three_streams", compute=triple, **options):
    return Pipeline(compute, **({"inputs": SPEC, "outputs": OUT, "mode": mode, "model": Model()} | options))


@pytest.fixture
def batches(rng):
    return [rng.random(N, np.float32) for _ in range(9)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["x", "z"])
@pytest.mark.parametrize("other", [np.zeros(9 * N, np.float32), np.ones(N, np.float32), 5])
def test_prepare_that_replaces_a_buffer(mode, name, other, batches):
    """The copy in would read whatever lies there, as many bytes as that has."""

    def prepare(number, buffers):
        buffers["x"][...] = batches[number]
        if wrong and number == 2:
            buffers[name] = other

    wrong = True
    with pipeline(mode, prepare=prepare) as p:
        with pytest.raises(BatchError, match=f"batch 2: prepare failed: ValueError: .*the place of buffer '{name}'"):
            list(p.run(range(9)))
        wrong = False
        for result in p.run(range(9)):
            np.testing.assert_array_equal(result["y"], 3 * batches[result.index])


@pytest.mark.parametrize("returned", [np.zeros(N, np.float32), [1], 5, False, "x"])
def test_what_prepare_may_return(returned):
    message = f"TypeError: prepare returned a {type(returned).__name__}: expected None, or a dict"
    with pipeline(prepare=lambda number, buffers: returned) as p, pytest.raises(BatchError, match=message):
        list(p.run([0]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"inputs": [SPEC["x"]]}, TypeError, r"inputs \[.*expected a dict"),
        ({"inputs": {"x": ((2.5,), np.float32)}}, TypeError, r"input 'x': shape \(2.5,\); expected an integer"),
        ({"inputs": {"x": ((True,), np.float32)}}, TypeError, r"input 'x': shape \(True,\)"),
        ({"outputs": {"y": ("4", np.float32)}}, TypeError, "output 'y': shape '4'"),
        ({"outputs": {"y": (4, None)}}, TypeError, "output 'y': no dtype"),
        ({"outputs": {"y": (4, "float33")}}, TypeError, "output 'y': data type 'float33' not understood"),
        ({"inputs": {"x": (4, object)}}, TypeError, "input 'x': dtype object: the elements are Python objects"),
        ({"inputs": {"x": (4, ">f4")}}, TypeError, "input 'x': dtype >f4: its bytes are in the other order"),
        ({"device": True}, TypeError, "device True: expected the ordinal"),
        ({"device": "cuda:0"}, TypeError, "device 'cuda:0': expected the ordinal"),
        ({"model": 5}, TypeError, r"model 5: expected a Model"),
        ({"prepare": 5}, TypeError, "prepare=5: expected a function"),
        (
            {"prepare": print, "elsewhere": "x"},
            TypeError,
            r"elsewhere 'x': expected names.* in a list, \['x'\]",
        ),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        pipeline(**options)


def test_numpys_integers_are_integers(batches):
    described = {"x": (np.int64(N), np.float32)}
    with pipeline(inputs=described, outputs={"y": described["x"]}, depth=np.int64(3), device=np.int32(0)) as p:
        assert p.depth == 3 and p.inputs["x"].shape == (N,)
        assert [type(extent) for extent in p.inputs["x"].shape] == [int]
        assert len(list(p.run(batches))) == 9


def test_arrays_of_pytorch_may_describe_a_batch(monkeypatch):
    class Tensor:
        shape, dtype = (N,), "torch.bfloat16"

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))
    with pipeline(inputs={"x": Tensor()}) as p:
        assert p.inputs["x"].dtype.name == "bfloat16"


@pytest.mark.parametrize(("count", "ordinal"), [(2, 2), (2, -1), (1, 7)])
def test_a_gpu_that_is_not_there(count, ordinal, monkeypatch):
    monkeypatch.setattr(driver, "device_count", lambda: count)
    with pytest.raises(driver.LaunchError, match=f"device {ordinal}: there is no such GPU; the {count} here are 0 to"):
        GpuEngines(ordinal)


def test_one_batch_is_no_iterable_of_batches(batches):
    with (
        pipeline() as p,
        pytest.raises(TypeError, match=r"run\(…\) of a dict.* such as \[batch\]"),
    ):
        p.run({"x": batches[0]})


def test_a_released_result(batches):
    with pipeline() as p:
        for result in p.run(batches, copy=False):
            result.release()
            with pytest.raises(RuntimeError, match=f"batch {result.index}: its result was released"):
                result["y"]


@pytest.mark.parametrize("mode", MODES)
def test_threads_that_begin_at_once(mode, batches):
    """One of them runs, however long it takes to begin."""
    together, began, ended = threading.Barrier(2), [], []

    def run():
        together.wait()
        try:
            results = list(p.run(batches))
        except RuntimeError as error:
            ended.append(str(error))
        else:
            ended.append([result["y"] for result in results])

    with pipeline(mode) as p:
        begin = p.engines.begin

        def slow_begin():
            began.append(threading.get_ident())
            threading.Event().wait(0.05)
            begin()

        p.engines.begin = slow_begin
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(began) == 1
        (refused,) = [found for found in ended if isinstance(found, str)]
        (results,) = [found for found in ended if not isinstance(found, str)]
        assert "runs already" in refused
        np.testing.assert_array_equal(results, [3 * batch for batch in batches])
        assert p.free_slots == p.depth


def test_a_run_that_could_not_begin(batches):
    with pipeline() as p:
        begin = p.engines.begin

        def failing():
            raise OSError("no clock")

        p.engines.begin = failing
        with pytest.raises(OSError, match="no clock"):
            list(p.run(batches))
        p.engines.begin = begin
        assert len(list(p.run(batches))) == 9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["prepare", "compute", "source"])
def test_closing_from_inside(mode, where, batches):
    def closing(stage):
        if stage == where:
            p.close()

    def compute(inputs, outputs, stream):
        closing("compute")

    def source():
        closing("source")
        yield batches[0]

    with pipeline(mode, compute, prepare=lambda batch, buffers: closing("prepare")) as p:
        message = f"batch 0: {where} failed: RuntimeError: close.. while a batch is awaited"
        with pytest.raises(BatchError, match=message):
            list(p.run(source()))
        assert p.free_slots == p.depth


def test_closing_from_another_thread(batches):
    entered, leave = threading.Event(), threading.Event()

    def prepare(batch, buffers):
        entered.set()
        leave.wait(10)
        buffers["x"][...] = batch

    with pipeline(prepare=prepare) as p:
        results = []
        thread = threading.Thread(target=lambda: results.extend(p.run(batches)))
        thread.start()
        entered.wait(10)
        try:
            with pytest.raises(RuntimeError, match="from another thread"):
                p.close()
        finally:
            leave.set()
            thread.join()
        assert [result.index for result in results] == list(range(9))


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_in_a_computation(mode, batches):
    calls = []

    def compute(inputs, outputs, stream):
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt
        triple(inputs, outputs, stream)

    with pipeline(mode, compute) as p:
        with pytest.raises(KeyboardInterrupt):
            list(p.run(batches))
        assert p.free_slots == p.depth
        for _ in range(2):
            results = list(p.run(batches))
            np.testing.assert_array_equal([result["y"] for result in results], [3 * batch for batch in batches])


def test_a_rehearsal_that_fails_later(batches):
    prepared = []

    def prepare(batch, buffers):
        prepared.append(None)
        if len(prepared) == 2:
            raise OSError("once is enough")
        buffers["x"][...] = batch

    with pipeline(prepare=prepare) as p:
        with p.rehearsal(batches[0]) as rehearsal, pytest.raises(BatchError, match="prepare failed: OSError: once"):
            rehearsal.prepare()
        assert p.free_slots == p.depth


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_while_a_run_ends(mode, batches):
    """What was under way then is awaited when the next run begins, and no slot is lost."""
    with pipeline(mode, depth=3) as p:
        drain, drained = p.engines.drain, []

        def interrupted(streams):
            p.engines.drain = drain
            drained.append(None)
            raise KeyboardInterrupt

        run = p.run(iter(batches))
        next(run)
        p.engines.drain = interrupted
        if mode.startswith("serial"):
            run.close()  # nothing was under way
        else:
            with pytest.raises(KeyboardInterrupt):
                run.close()
        assert len(drained) == (not mode.startswith("serial"))
        p.engines.drain = drain
        results = list(p.run(batches[:3], copy=False))  # it takes all slots
        np.testing.assert_array_equal([result["y"] for result in results], [3 * batch for batch in batches[:3]])


def test_ctrl_c_twice(batches):
    """The first ends the run, which waits for `prepare` to return; the second ends that, and `prepare` is at work on a
    slot still."""
    entered, leave, calls = threading.Event(), threading.Event(), []

    def prepare(number, buffers):
        calls.append(number)
        if len(calls) == 5:
            entered.set()
            leave.wait(20)
        buffers["x"][...] = batches[number]

    def interrupt():
        entered.wait(20)
        for _ in range(2):
            threading.Event().wait(0.2)
            os.kill(os.getpid(), signal.SIGINT)

    with pipeline("producer", prepare=prepare) as p:
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                list(p.run(range(9)))
            thread.join()
            with pytest.raises(RuntimeError, match="still in the source of batches or in prepare"):
                list(p.run(range(9)))
        finally:
            leave.set()
        wait(p._work)
        results = list(p.run(range(9)))
        np.testing.assert_array_equal([result["y"] for result in results], [3 * batch for batch in batches])
        assert p.free_slots == p.depth


class _Masked:
    """An array on a GPU of which some elements are missing, as Numba's protocol has it."""

    __cuda_array_interface__ = {"shape": (N,), "typestr": "<f4", "data": (4096, False), "version": 3, "mask": object()}


def test_masked_arrays():
    with pytest.raises(TypeError, match="_Masked with a mask in its __cuda_array_interface__"):
        arrays.view(_Masked())
    with pipeline() as p, pytest.raises(BatchError, match="batch 0: prepare failed: TypeError: a _Masked with a mask"):
        list(p.run([_Masked()]))


def test_memory_of_a_gpu_is_neither_copied_nor_sent(monkeypatch):
    """Two objects of one address would free it twice."""
    monkeypatch.setattr(driver, "allocate", lambda nbytes: 4096)
    freed = []
    monkeypatch.setattr(driver, "free", freed.append)
    array = DeviceArray.empty((N,), np.float32)
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a DeviceArray of shape \(24,\) cannot be pickled or copied.*to_host"):
            way(array)
    del array
    assert freed == [4096]

"""Batches that lie on a GPU, where there is none: what is refused, and how long what copies read is kept."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from numba_tma.overlap import MODES, BatchError, Model, Pipeline

N = 24
SPEC = {"x": ((N,), np.float32)}


def triple(inputs, outputs, stream):
    outputs["y"][...] = 3 * inputs["x"]


def pipeline(mode="three_streams", **options):
    return Pipeline(triple, SPEC, {"y": SPEC["x"]}, mode=mode, model=Model(), **options)


class OfInterface:
    """An array that says it is a GPU's. Nobody reads it."""

    def __init__(self, array: np.ndarray) -> None:
        self.__cuda_array_interface__ = array.__array_interface__ | {"strides": array.strides, "version": 3}


class OfDlpack:
    """The same by DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0  # kDLCUDA

    def __dlpack__(self, **_: object) -> object:
        return self._array.__dlpack__()


@pytest.mark.parametrize("kind", [OfInterface, OfDlpack])
@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(N, np.float32), "TypeError: input 'x' lies on a GPU, and this pipeline runs on a model of one"),
        (np.zeros(N - 1, np.float32), r"ValueError: input 'x': float32 of shape \(23,\); the pipeline was made for"),
        (np.zeros(N), "ValueError: input 'x': float64 of shape"),
        (np.zeros(2 * N, np.float32)[::2], r"ValueError: input 'x': strides \(8,\) B of shape \(24,\) on a GPU leave"),
    ],
)
@pytest.mark.parametrize("by", ["batch", "prepare"])
def test_arrays_on_a_gpu_that_do_not_fit(kind, array, message, by):
    prepare = (lambda batch, buffers: {"x": batch}) if by == "prepare" else None
    with pipeline(prepare=prepare) as p, pytest.raises(BatchError, match=f"batch 0: prepare failed: {message}"):
        list(p.run([kind(array)]))


class _Batch(np.ndarray):
    """An array that weak references may watch."""


def _batch(number: int) -> np.ndarray:
    return np.full(N, number, np.float32).view(_Batch)


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.overlapping])
def test_what_copies_read_is_kept_until_they_have(mode):
    """Nobody else holds the batches. When a run is left early, copies of some are under way still."""
    watched, at_drain = [], []

    def source():
        for number in range(9):
            array = _batch(number)
            watched.append(weakref.ref(array))
            yield array
            del array

    with pipeline(mode) as p:
        drain = p.engines.drain

        def draining(streams):
            at_drain.append(sum(ref() is not None for ref in watched))
            drain(streams)

        p.engines.drain = draining
        run = p.run(source())
        next(run)
        taken = len(watched)
        run.close()
        assert at_drain and at_drain[0] >= min(taken, p.depth) - 1 > 0
        gc.collect(1)  # what the test made; all of it takes seconds behind a compiler
        assert not any(ref() is not None for ref in watched)


@pytest.mark.parametrize("mode", MODES)
def test_what_was_copied_is_let_go_of_when_the_result_comes(mode):
    """Also if the result holds the slot."""
    array = _batch(5)
    watched = weakref.ref(array)
    batches = iter([array])
    del array
    with pipeline(mode) as p:
        (result,) = p.run(batches, copy=False)
        del batches
        gc.collect(1)  # what the test made; all of it takes seconds behind a compiler
        assert watched() is None
        np.testing.assert_array_equal(result["y"], np.full(N, 15))
        result.release()

"""Every kind of array seen as pointer, shape, strides and dtype."""

import ml_dtypes
import numpy as np
import pytest

from numba_tma import arguments, arrays


def test_numpy():
    x = np.zeros((4, 6), np.float32)
    seen = arrays.view(x)
    assert (seen.pointer, seen.shape, seen.strides, seen.dtype) == (
        x.ctypes.data,
        (4, 6),
        (24, 4),
        np.float32,
    )
    assert seen.host and not seen.readonly and seen.layout == "C" and seen.size == 24


@pytest.mark.parametrize(
    ("array", "layout"),
    [
        (np.zeros((4, 6)), "C"),
        (np.zeros((4, 6)).T, "F"),
        (np.zeros((4, 6))[:, ::2], "A"),
        (np.zeros((4, 6))[:, :4], "A"),
        (np.zeros((1, 6))[:, :4], "C"),
        (np.zeros((0, 6)), "C"),
        (np.zeros(6)[::-1], "A"),
        (np.zeros(()), "C"),
    ],
)
def test_layout(array, layout):
    assert arrays.view(array).layout == layout


class Interface:
    """Any device array: all that is known of it is the protocol."""

    def __init__(self, **fields):
        self.__cuda_array_interface__ = {"version": 3, **fields}


def test_cuda_array_interface():
    seen = arrays.view(Interface(shape=(2, 3), typestr="<f2", data=(4096, True)))
    assert (seen.pointer, seen.shape, seen.strides, seen.dtype) == (4096, (2, 3), (6, 2), np.float16)
    assert not seen.host and seen.readonly
    strided = arrays.view(Interface(shape=(2, 3), typestr="<f2", data=(4096, False), strides=(16, 2)))
    assert strided.strides == (16, 2) and strided.layout == "A"


def test_an_own_dtype_of_the_same_size_wins():
    array = Interface(shape=(2,), typestr="<V2", data=(4096, False))
    array.dtype = np.dtype(ml_dtypes.bfloat16)
    assert arrays.view(array).dtype == ml_dtypes.bfloat16


def test_not_an_array():
    assert arrays.view("text") is None
    assert arrays.view(3) is None


def test_as_bytes_shares_memory():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = arrays.as_bytes(x)
    assert raw.dtype == np.uint8 and raw.shape == (24,)
    raw[:4] = np.frombuffer(np.float32(9).tobytes(), np.uint8)
    assert x[0, 0] == 9
    with pytest.raises(ValueError, match="row-major contiguous"):
        arrays.as_bytes(x[:, :2])


def test_reinterpret_keeps_the_owner_alive():
    words = arrays.reinterpret(np.arange(8, dtype=np.uint16), np.uint64, (2,), (8,))
    assert words.tolist() == [0x0003000200010000, 0x0007000600050004]


def test_reinterpret_of_a_device_array():
    array = Interface(shape=(2, 8), typestr="<f2", data=(4096, False))
    words = arrays.view(arrays.reinterpret(array, np.uint64, (2, 2), (16, 8)))
    assert (words.pointer, words.shape, words.strides, words.dtype, words.host) == (
        4096,
        (2, 2),
        (16, 8),
        np.uint64,
        False,
    )


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (object, "Python objects"),
        (np.dtype([("a", object), ("b", np.int32)]), "Python objects"),
        (">f4", "in the other order"),
        (np.dtype([("a", ">i2")]), "in the other order"),
    ],
)
def test_elements_that_a_gpu_cannot_read_are_refused(dtype, message):
    array = np.zeros(4, dtype)
    with pytest.raises(TypeError, match=message):
        arrays.view(array)
    with pytest.raises(TypeError, match=message):
        arguments.marshal(array, "x")


class OnDevice:
    """An array's interface, as if it lay on a GPU."""

    def __init__(self, host):
        self.host = host
        self.__cuda_array_interface__ = {**host.__array_interface__, "strides": host.strides}


@pytest.mark.parametrize(
    "index",
    [1, -1, slice(1, 4), slice(None, None, -2), ..., (slice(None), 2), (2, slice(1, None)), (..., 0), (1, 2, 3)],
)
def test_a_part_is_where_numpy_says(index, rng):
    host = rng.standard_normal((5, 6, 8), np.float32)[:, ::2, 1:]
    found = arrays.view(arrays.part(OnDevice(host), index))
    expected = host[(*index, ...) if isinstance(index, tuple) and ... not in index else index]
    assert found.pointer == expected.ctypes.data and found.shape == expected.shape
    assert found.strides == expected.strides or not expected.size
    np.testing.assert_array_equal(arrays.part(host, index), expected)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([0, 1], TypeError, "integers and slices take a part"),
        (np.array([True] * 5), TypeError, "integers and slices"),
        (True, TypeError, "integers and slices"),
        (5, IndexError, "out of bounds"),
        ((0, 0, 0, 0), IndexError, "too many indices"),
    ],
)
def test_parts_that_there_are_not(index, error, message):
    with pytest.raises(error, match=message):
        arrays.part(OnDevice(np.zeros((5, 6, 8))), index)

"""Arrays whose rows start at multiples of 16 bytes."""

import ml_dtypes
import numpy as np
import pytest

from numba_tma import dtypes
from numba_tma.pitch import is_pitched, pitched, pitched_copy, pitched_like
from numba_tma.tensor_map import TensorMap


@pytest.mark.parametrize("entry", dtypes.TABLE, ids=str)
@pytest.mark.parametrize("shape", [(5,), (7, 33), (3, 5, 17)])
def test_rows_start_at_multiples_of_16_bytes(entry, shape):
    made = pitched(shape, entry)
    assert made.shape == shape and made.dtype == entry.numpy
    assert all(s % 16 == 0 for s in made.strides[:-1])
    assert made.strides[-1] == entry.size
    TensorMap(made, (1,) * (len(shape) - 1) + (16 // entry.size,), store=False)


def test_an_odd_matrix_gets_the_pitch_that_the_error_asks_for():
    made = pitched((128, 1733), "float32")
    assert made.strides == (1736 * 4, 4)
    assert pitched((128, 1736), "float32").strides == (1736 * 4, 4)
    assert pitched((4, 100), "uint8", alignment=128).strides == (128, 1)


def test_copies():
    rng = np.random.default_rng()
    source = rng.standard_normal((9, 31)).astype(ml_dtypes.bfloat16)
    copy = pitched_copy(source)
    np.testing.assert_array_equal(copy, source)
    assert is_pitched(copy) and not is_pitched(source) and not np.shares_memory(copy, source)
    like = pitched_like(source)
    assert like.shape == source.shape and like.dtype == source.dtype and is_pitched(like)


def test_another_allocator():
    asked = []

    def empty(shape, dtype):
        asked.append((shape, dtype))
        return np.zeros(shape, np.float16)

    made = pitched((3, 5), "float16", empty=empty)
    assert asked == [((3, 8), "float16")] and made.shape == (3, 5)


def test_mistakes():
    with pytest.raises(ValueError, match="without dimensions"):
        pitched((), "float32")
    with pytest.raises(ValueError, match="alignment of 6 B.*4 B"):
        pitched((3, 3), "float32", alignment=6)
    with pytest.raises(TypeError, match="choose one of"):
        pitched((3, 3), "complex128")
    with pytest.raises(TypeError, match="list is not an array"):
        is_pitched([1, 2])


@pytest.mark.parametrize("alignment", [16, 128, 256, 4096])
def test_numpy_arrays_start_aligned(alignment):
    held = [pitched((3, 5), "float32", alignment=alignment) for _ in range(8)]
    for array in held:
        assert is_pitched(array, alignment) and array.shape == (3, 5)
        array[...] = 1
    assert pitched((0, 5), "float32", alignment=alignment).shape == (0, 5)

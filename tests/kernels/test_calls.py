"""What all public functions ask of the arrays that they write: writeable, a place for each element, no other's."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import arrays
from numba_tma.kernels import calls, copy, multicast, stencil3d, transpose
from numba_tma.kernels.gather import paged, patches
from numba_tma.kernels.reductions import column_sums, histogram, scatter_add

# By name: the function, its arrays' shapes and types in its order, which of them is written.
FUNCTIONS = {
    "copy": (copy.copy, (((8, 16), "f4"), ((8, 16), "f4")), 1),
    "transpose": (transpose.transpose, (((8, 16), "f4"), ((16, 8), "f4")), 1),
    "stencil3d": (stencil3d.stencil3d, (((2, 4, 8), "f4"), ((2, 4, 8), "f4")), 1),
    "weighted_sums": (multicast.weighted_sums, (((8, 16), "f4"), ((4, 8), "f4"), ((4, 16), "f4")), 2),
    "column_sums": (column_sums.column_sums, (((8, 16), "f4"), ((1, 16), "f4")), 1),
    "histogram": (histogram.histogram, (((512,), "u1"), ((1, 16), "u4")), 1),
    "scatter_add": (scatter_add.scatter_add, (((8, 16), "f4"), ((8,), "i4"), ((4, 16), "f4")), 2),
    "paged": (paged.paged, (((4, 2, 2, 8), "f2"), ((2, 3), "i4"), ((2, 2, 6, 8), "f2")), 2),
    "patches": (patches.patches, (((1, 4, 4, 8), "f2"), ((16, 72), "f2")), 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_written_must_have_memory_of_its_own(name, in_simulator):
    function, kinds, written = FUNCTIONS[name]
    given = [np.zeros(shape, dtype) for shape, dtype in kinds]
    out = given[written]

    def refused(array, message):
        with pytest.raises(ValueError, match=message):
            function(*given[:written], array, *given[written + 1 :])

    locked = out.copy()
    locked.flags.writeable = False
    refused(locked, f"{name}.*: .* is read-only")
    refused(np.lib.stride_tricks.as_strided(out, out.shape, (*out.strides[:-1], 0)), "of strides|and strides .* share")
    # Room for all of them in one buffer, the output upon the first input's last bytes.
    buffer = np.zeros(1 << 14, np.uint8)
    start = (given[0].nbytes - 1) // 16 * 16
    given[0] = buffer[: given[0].nbytes].view(given[0].dtype).reshape(given[0].shape)
    refused(buffer[start : start + out.nbytes].view(out.dtype).reshape(out.shape), "share memory")
    beside = buffer[start + 16 : start + 16 + out.nbytes].view(out.dtype).reshape(out.shape)
    function(*given[:written], beside, *given[written + 1 :])


def seen(shape, strides, dtype="f4", at=1 << 20):
    """An array that is nowhere: what is asked of it is asked of its description."""
    return arrays.ArrayView(at, shape, strides, np.dtype(dtype), False, False)


@pytest.mark.parametrize(
    ("view", "does"),
    [
        (seen((4, 8), (32, 4)), False),
        (seen((4, 8), (4, 16)), False),
        (seen((4, 8), (-32, -4)), False),
        (seen((4, 8), (48, 4)), False),
        (seen((1, 8), (0, 4)), False),
        (seen((0, 8), (0, 4)), False),
        (seen((), ()), False),
        (seen((4, 8), (0, 4)), True),
        (seen((4, 8), (28, 4)), True),
        (seen((4, 8), (32, 2)), True),
        (seen((2, 4, 8), (64, 32, 4)), True),
    ],
    ids=lambda value: str(getattr(value, "strides", value)),
)
def test_overlaps_itself(view, does):
    assert arrays.overlaps_itself(view) is does


def test_share_memory():
    left, right = seen((8, 8), (64, 4)), seen((8, 8), (64, 4), at=(1 << 20) + 32)
    assert not arrays.share_memory(left, right)  # the halves of wider rows
    assert arrays.share_memory(left, seen((8, 9), (64, 4), at=(1 << 20) + 28))
    assert arrays.share_memory(left, left)
    assert not arrays.share_memory(left, seen((0, 8), (64, 4)))
    assert not arrays.share_memory(seen((8,), (8,)), seen((8,), (8,), at=(1 << 20) + 4))  # every other number
    assert arrays.share_memory(seen((8,), (8,)), seen((8,), (-8,), at=(1 << 20) + 40))
    huge = seen((1 << 17, 1 << 17), (1 << 17, 1), "u1")
    assert arrays.share_memory(huge, seen((1,), (1,), "u1", at=(1 << 20) + (1 << 34) - 1))
    assert not arrays.share_memory(huge, seen((1,), (1,), "u1", at=(1 << 20) + (1 << 34)))


def test_extents_end_where_coordinates_do():
    calls.check_extents("here", {"x": seen((calls.MAX_EXTENT, 4), (16, 4)), "y": seen((), ())})
    with pytest.raises(ValueError, match=r"here: y has the shape \(4, 2147483392\).*2,147,483,391.*take it in parts"):
        calls.check_extents("here", {"x": seen((4,), (4,)), "y": seen((4, calls.MAX_EXTENT + 1), (1 << 33, 4))})


def test_what_is_kept_has_an_end():
    kept = calls.Recent(3)
    for key in range(3):
        kept[key] = str(key)
    kept[1] = "again"
    assert dict(kept) == {0: "0", 1: "again", 2: "2"}
    kept[3] = "3"
    assert dict(kept) == {3: "3"}


def test_what_was_made_of_the_same_values_before_is_remembered():
    asked = []

    def make(scale, window):
        if window is None:
            raise ValueError("a window expected")
        asked.append((float(scale), tuple(window)))
        return asked[-1]

    class Changing:
        """Looked up by what it is, not by its number."""

        number = 1.0

        def __float__(self):
            return self.number

    get, changing = calls.remembered(make), Changing()
    for _ in range(2):
        assert get(2.0, (1, 2)) == get(np.float32(2), (1, 2)) == (2.0, (1, 2))
        with pytest.raises(ValueError, match="a window expected"):
            get(2.0, None)
    assert len(asked) == 1
    for number in (3.0, 4.0):  # what may change is asked for each time, as is a list, which cannot be looked up
        changing.number = number
        assert get(changing, (1, 2)) == (number, (1, 2))
        assert get(number, [1, 2]) == (number, (1, 2))
    assert len(asked) == 5

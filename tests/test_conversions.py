"""bfloat16 conversions: the instructions they become, and their rounding in the simulator."""

import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, types

from numba_tma.launch import kernel, use_backend

BF16 = ml_dtypes.bfloat16


def ptx_of(function, *argument_types):
    text, _ = cuda.compile(function, types.void(*argument_types), cc=(9, 0, "a"), device=False, abi="numba")
    return text[text.index("{") :] if ".extern .func" not in text else text


@pytest.mark.parametrize(
    "other",
    [
        types.float16,
        types.float32,
        types.float64,
        types.int8,
        types.int32,
        types.int64,
        types.uint16,
        types.uint64,
    ],
    ids=str,
)
def test_a_conversion_is_a_few_instructions(other):
    def widen(source, target):
        target[0] = source[0]

    def store(source, target):
        source[0] = target[0]

    def cast(source, target):
        target[0] = other(source[0])

    arrays = types.Array(types.bfloat16, 1, "C"), types.Array(other, 1, "C")
    for function in (store, cast, widen) if other in (types.float32, types.float64) else (store, cast):
        text = ptx_of(function, *arrays)
        assert "call" not in text and ".local" not in text and ".extern" not in text


@kernel(threads=128)
def narrow(source, target):
    i = cuda.grid(1)
    if i < source.size:
        target[i] = source[i]


@kernel(threads=128)
def widen(source, target):
    i = cuda.grid(1)
    if i < source.size:
        target[i] = np.float32(source[i])


@kernel(threads=1)
def literals(target):
    target[0] = 0
    target[1] = 3
    target[2] = -257
    target[3] = 0.1


def nearest(value):
    """The bfloat16 nearest to a finite number, ties to the even one, by exact arithmetic."""
    bits = int(np.float32(value).view(np.uint32)) >> 16
    around = [np.uint16(b).view(BF16) for b in (max(bits - 1, bits & 0x8000), bits, bits + 1)]
    exact = Fraction(value)

    def distance(candidate):
        finite = float(candidate) if np.isfinite(candidate) else np.copysign(2.0**128, candidate)
        return abs(Fraction(float(finite)) - exact), int(candidate.view(np.uint16)) & 1

    return min(around, key=distance)


def awkward(rng, dtype):
    """Numbers of every magnitude, half of them on a tie between two bfloat16 or just beside one."""
    count = 512
    bits = np.array([rng.randrange(0x0080, 0x7F7F) << 16 for _ in range(count)], np.uint32)
    ties = (bits | 0x8000).view(np.float32).astype(dtype)
    step = np.abs(ties) * dtype(np.finfo(dtype).eps)
    beside = ties + step * np.array([rng.choice((-1, 0, 1)) for _ in range(count)]).astype(dtype)
    plain = (bits | np.array([rng.randrange(1 << 16) for _ in range(count)], np.uint32)).view(np.float32)
    signs = np.array([rng.choice((-1, 1)) for _ in range(2 * count)])
    return (np.concatenate([beside, plain.astype(dtype)]) * signs).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_narrowing_rounds_once_to_nearest_even(dtype):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    source = awkward(random.Random(seed), dtype)
    special = np.array([np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.4e38], dtype)
    source = np.concatenate([source, special])
    target = np.zeros(source.size, BF16)
    with use_backend("sim"):
        narrow[-(-source.size // 128)](source, target)
    expected = [nearest(v) for v in source[: -special.size].tolist()]
    np.testing.assert_array_equal(target[: -special.size].view(np.uint16), np.array(expected).view(np.uint16))
    np.testing.assert_array_equal(
        target[-special.size :].view(np.uint16), special.astype(np.float32).astype(BF16).view(np.uint16)
    )


def test_nan_stays_nan():
    source, target = np.array([np.nan, -np.nan]), np.zeros(2, BF16)
    with use_backend("sim"):
        narrow[1](source, target)
    assert np.isnan(target.astype(np.float32)).all()


def test_widening_is_exact():
    source = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(BF16)
    target = np.zeros(source.size, np.float32)
    with use_backend("sim"):
        widen[source.size // 128](source, target)
    np.testing.assert_array_equal(target, source.astype(np.float32))


def test_literals_and_integers():
    target = np.ones(4, BF16)
    with use_backend("sim"):
        literals[1](target)
    np.testing.assert_array_equal(target.astype(np.float64), [0, 3, -256, float(nearest(0.1))])
    integers = np.array([0, -1, 255, 256, 257, 259, (1 << 24) + (1 << 16) + 1, -(1 << 31)], np.int32)
    target = np.zeros(integers.size, BF16)
    with use_backend("sim"):
        narrow[1](integers, target)
    np.testing.assert_array_equal(target, np.array([nearest(int(v)) for v in integers]))

"""Conversions of 16- and 8-bit numbers: the instructions they become, and their rounding in the simulator."""

import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import bf16, fp16, types
from numba.cuda._internal.cuda_fp8 import fp8_e4m3, fp8_e5m2

from numba_tma import dtypes
from numba_tma.compile import compile_kernel
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


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("half", [BF16, np.float16])
def test_integers_round_once(dtype, half, rng):
    info = np.iinfo(dtype)
    ties = [(1 << k) + (1 << k - 8) + d for k in range(9, 63) for d in (-1, 0, 1)]
    ties += [(1 << k) + (1 << k - 11) + d for k in range(12, 63) for d in (-1, 0, 1)]
    ties += [-t for t in ties] + [info.min, info.max, 0, 1, -1 % 256]
    random_ones = rng.integers(info.min, info.max, 200, dtype, endpoint=True).tolist()
    integers = np.array([t for t in ties if info.min <= t <= info.max] + random_ones, dtype)
    target = np.zeros(integers.size, half)
    with use_backend("sim"):
        narrow[-(-integers.size // 128)](integers, target)
    if half is BF16:
        expected = np.array([nearest(int(v)) for v in integers])
    else:
        # Below 2**53 exact in float64, from 65520 on infinite.
        with np.errstate(over="ignore"):
            expected = np.clip(integers.astype(np.float64), -1e6, 1e6).astype(np.float16)
    np.testing.assert_array_equal(target.view(np.uint16), expected.view(np.uint16))


@kernel(threads=128)
def to_integers(source, signed, unsigned, byte):
    i = cuda.grid(1)
    if i < source.size:
        signed[i] = source[i]
        unsigned[i] = source[i]
        byte[i] = source[i]


@pytest.mark.parametrize("half", [BF16, np.float16])
def test_to_integers(half, rng):
    source = np.concatenate([rng.uniform(-127, 127, 300), np.arange(-20, 20) / 4]).astype(np.float32).astype(half)
    signed, byte = np.zeros(source.size, np.int64), np.zeros(source.size, np.int8)
    unsigned = np.zeros(source.size, np.uint32)
    with use_backend("sim"):
        to_integers[-(-source.size // 128)](source, signed, unsigned, byte)
    # bfloat16 as NumPy, towards zero; float16 as Numba, to the nearest.
    whole = (np.trunc if half is BF16 else np.rint)(source.astype(np.float64))
    np.testing.assert_array_equal(signed, whole)
    np.testing.assert_array_equal(byte, whole)
    np.testing.assert_array_equal(unsigned, np.maximum(whole, 0))


MODES = ("rn", "rz", "rd", "ru")


def directed(values, half, mode):
    """float32 values in 16 bits, by stepping from the nearest to the neighbour on the right side."""
    rounded = values.astype(half)
    exact, got = values.astype(np.float64), rounded.astype(np.float64)
    up, down = np.array(np.inf, half), np.array(-np.inf, half)
    above, below = np.nextafter(rounded, up), np.nextafter(rounded, down)
    if mode == "rn":
        return rounded
    too_high, too_low = got > exact, got < exact
    if mode == "rz":
        too_high, too_low = too_high & (exact > 0), too_low & (exact < 0)
    elif mode == "rd":
        too_low = np.zeros_like(too_low)
    else:
        too_high = np.zeros_like(too_high)
    return np.where(too_high, below, np.where(too_low, above, rounded))


@pytest.mark.parametrize("half", [BF16, np.float16])
def test_directed_rounding(half):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    if half is BF16:
        functions = [getattr(bf16, f"float32_to_bfloat16_{mode}") for mode in MODES]
        back = [getattr(bf16, f"bfloat16_to_int32_{mode}") for mode in MODES]
        from_int = [getattr(bf16, f"int32_to_bfloat16_{mode}") for mode in MODES]
    else:
        functions = [getattr(fp16, f"__float2half_{mode}") for mode in MODES]
        back = [getattr(fp16, f"__half2int_{mode}") for mode in MODES]
        from_int = [getattr(fp16, f"__int2half_{mode}") for mode in MODES]
    (rn, rz, rd, ru), (to_rn, to_rz, to_rd, to_ru), (of_rn, of_rz, of_rd, of_ru) = functions, back, from_int

    @kernel(threads=128)
    def rounds(source, whole, target, integers, halves):
        i = cuda.grid(1)
        if i < source.size:
            x = source[i]
            target[0, i] = rn(x)
            target[1, i] = rz(x)
            target[2, i] = rd(x)
            target[3, i] = ru(x)
            integers[0, i] = to_rn(rn(x))
            integers[1, i] = to_rz(rn(x))
            integers[2, i] = to_rd(rn(x))
            integers[3, i] = to_ru(rn(x))
            halves[0, i] = of_rn(whole[i])
            halves[1, i] = of_rz(whole[i])
            halves[2, i] = of_rd(whole[i])
            halves[3, i] = of_ru(whole[i])

    numbers = awkward(random.Random(seed), np.float32)
    numbers = np.concatenate([numbers, np.float32([0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, -3.4e38])])
    small = np.random.default_rng(seed).uniform(-100, 100, 2 * numbers.size - 100).astype(np.float32)
    source = np.concatenate([numbers, small, np.float32(np.arange(-50, 50) / 2)])
    whole = np.random.default_rng(seed).integers(-(1 << 31), 1 << 31, source.size).astype(np.int32) >> 15
    target, halves = np.zeros((2, 4, source.size), half)
    integers = np.zeros((4, source.size), np.int32)
    with use_backend("sim"), np.errstate(all="ignore"):
        rounds[-(-source.size // 128)](source, whole, target, integers, halves)
        for row, mode in enumerate(MODES):
            np.testing.assert_array_equal(target[row].astype(float), directed(source, half, mode).astype(float), mode)
            np.testing.assert_array_equal(
                halves[row].astype(float), directed(whole.astype(np.float32), half, mode).astype(float), mode
            )
        rounded = source.astype(half).astype(np.float64)[numbers.size :]
        for found, function in zip(integers, (np.rint, np.trunc, np.floor, np.ceil), strict=True):
            np.testing.assert_array_equal(found[numbers.size :], function(rounded))


FLOAT8 = pytest.mark.parametrize(
    "entry, constructor", [(dtypes.float8_e4m3fn, fp8_e4m3), (dtypes.float8_e5m2, fp8_e5m2)], ids=["e4m3", "e5m2"]
)


@FLOAT8
def test_8_bits_widen_exactly(entry, constructor):
    @kernel(threads=128)
    def widen_all(source, half, brain, single, double, integer, truth):
        i = cuda.grid(1)
        half[i] = np.float16(source[i])
        brain[i] = types.bfloat16(source[i])
        single[i] = np.float32(source[i])
        double[i] = np.float64(source[i])
        integer[i] = np.int32(source[i])
        truth[i] = np.bool_(source[i])

    source = np.arange(256).astype(np.uint8).view(entry.numpy)
    floats = [np.zeros(256, t) for t in (np.float16, BF16, np.float32, np.float64)]
    integer, truth = np.zeros(256, np.int32), np.zeros(256, np.bool_)
    with use_backend("sim"):
        widen_all[2](source, *floats, integer, truth)
    expected = source.astype(np.float64)
    for found in floats:
        np.testing.assert_array_equal(found.astype(np.float64), expected)
        np.testing.assert_array_equal(np.signbit(found)[expected == 0], np.signbit(expected)[expected == 0])
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(integer[finite], np.trunc(expected[finite]))
    np.testing.assert_array_equal(truth, source.view(np.uint8) & 0x7F != 0)


@FLOAT8
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BF16, np.int32], ids=str)
def test_8_bits_round_once_and_saturate(entry, constructor, dtype, rng):
    @kernel(threads=128)
    def narrow_all(source, target):
        i = cuda.grid(1)
        if i < source.size:
            target[i] = constructor(source[i])

    finite = np.unique(np.arange(256).astype(np.uint8).view(entry.numpy).astype(np.float64))
    finite = finite[np.isfinite(finite)]
    ties = (finite[1:] + finite[:-1]) / 2
    numbers = np.concatenate(
        [finite, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), rng.normal(size=300) * 100]
    )
    numbers = np.concatenate([numbers, [1e30, -1e30, np.inf, -np.inf, np.nan, -0.0, 1e-30, 449, 480, 60000, -65000]])
    with np.errstate(all="ignore"):
        source = np.nan_to_num(numbers, posinf=7, neginf=-7).clip(-(2**31), 2**31 - 1) if dtype is np.int32 else numbers
        source = source.astype(np.float32).astype(dtype) if dtype is BF16 else source.astype(dtype)
    target = np.zeros(source.size, entry.numpy)
    with use_backend("sim"):
        narrow_all[-(-source.size // 128)](source, target)
    exact = source.astype(np.float64)
    bounded = np.clip(exact, finite[0], finite[-1])
    position = np.searchsorted(finite, bounded).clip(1, finite.size - 1)
    low, high = finite[position - 1], finite[position]
    even = high.astype(entry.numpy).view(np.uint8) % 2 == 0
    to_high = (high - bounded < bounded - low) | ((high - bounded == bounded - low) & even)
    wanted = np.where(to_high, high, low)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(target.astype(np.float64)), nan)
    np.testing.assert_array_equal(target[~nan].astype(np.float64), wanted[~nan])
    if dtype is not np.int32:
        np.testing.assert_array_equal(np.signbit(target[~nan]), np.signbit(source[~nan]))


@FLOAT8
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_8_bits_call_nothing(entry, constructor, arch):
    number = entry.numba_type

    def both(source, target, back):
        target[0] = np.float32(source[0])
        back[0] = constructor(target[1])
        shared = cuda.shared.array(2, number)
        shared[0] = source[1]
        back[1] = shared[0]

    eight = types.Array(number, 1, "C")
    compiled = compile_kernel(both, (eight, types.Array(types.float32, 1, "C"), eight), arch=arch)
    assert ".extern .func" not in compiled.ptx and ".local" not in compiled.ptx
    assert compiled.cubin[:4] == b"\x7fELF" and compiled.resources.stack_bytes == 0

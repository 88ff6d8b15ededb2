"""float16 and bfloat16 arithmetic, comparisons and mathematics in kernels, against NumPy and exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda import bf16, fp16, types
from numba.cuda._internal.cuda_bf16 import __shfl_sync as shuffle

from numba_tma import kernel
from numba_tma.compile import CompileError, compile_kernel

pytestmark = [
    pytest.mark.usefixtures("in_simulator"),
    # Numba's own overloads are lambdas, whose lines it does not find.
    pytest.mark.filterwarnings("ignore::numba.cuda.core.errors.NumbaDebugInfoWarning"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
]

FORMATS = pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
NUMBA = {np.dtype(np.float16): types.float16, np.dtype(ml_dtypes.bfloat16): types.bfloat16}
MODULE = {np.dtype(np.float16): fp16, np.dtype(ml_dtypes.bfloat16): bf16}
THREADS = 128


def function(dtype, name):
    """One of Numba-CUDA's functions; the float16 ones keep CUDA's underscores."""
    module = MODULE[dtype]
    return getattr(module, name, None) or getattr(module, f"__{name}")


def edges(dtype):
    """Zeros, subnormals, the smallest normal and the largest number, one and its neighbours, infinity, NaN."""
    one = int(np.array(1, dtype).view(np.uint16))
    infinity = int(np.array(np.inf, dtype).view(np.uint16))
    smallest = int(np.array(ml_dtypes.finfo(dtype).smallest_normal, dtype).view(np.uint16))
    magnitudes = [0, 1, 2, 3, smallest - 1, smallest, smallest + 1, one - 1, one, one + 1, infinity - 1, infinity]
    return np.array([m | sign for m in (*magnitudes, infinity + 1) for sign in (0, 0x8000)], np.uint16).view(dtype)


def pairs(dtype, rng, count=600):
    """All pairs of edges, pairs of random bits, and pairs of one magnitude."""
    special = edges(dtype)
    left, right = np.repeat(special, special.size), np.tile(special, special.size)
    bits = rng.integers(0, 1 << 16, (2, count), np.uint16).view(dtype)
    near = rng.normal(size=(2, count)).astype(np.float32).astype(dtype)
    return np.concatenate([left, bits[0], near[0]]), np.concatenate([right, bits[1], near[1]])


def assert_same(found, expected):
    """Bit for bit, but for a NaN's sign and payload."""
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
    np.testing.assert_array_equal(found.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])


def blocks(array):
    return -(-array.size // THREADS)


@kernel(threads=THREADS)
def operators(x, y, out):
    i = cuda.grid(1)
    if i < x.size:
        a, b = x[i], y[i]
        out[0, i] = a + b
        out[1, i] = a - b
        out[2, i] = a * b
        out[3, i] = a / b
        out[4, i] = -a
        out[5, i] = abs(a)
        out[6, i] = +a
        out[7, i] = b
        out[7, i] += a
        out[8, i] = b
        out[8, i] -= a
        out[9, i] = b
        out[9, i] *= a
        out[10, i] = b
        out[10, i] /= a


@FORMATS
def test_operators_round_once(dtype, rng):
    x, y = pairs(dtype, rng)
    out = np.zeros((11, x.size), dtype)
    operators[blocks(x)](x, y, out)
    # In float32 first: with 24 bits that is the same as rounding once (Figueroa, 1995).
    a, b = x.astype(np.float32), y.astype(np.float32)
    expected = [a + b, a - b, a * b, a / b, -a, abs(a), a, b + a, b - a, b * a, b / a]
    for found, wanted in zip(out, expected, strict=True):
        assert_same(found, wanted.astype(dtype))


@kernel(threads=THREADS)
def comparisons(x, y, out):
    i = cuda.grid(1)
    if i < x.size:
        a, b = x[i], y[i]
        out[0, i] = a < b
        out[1, i] = a <= b
        out[2, i] = a == b
        out[3, i] = a != b
        out[4, i] = a > b
        out[5, i] = a >= b
        out[6, i] = 1 if a else 0
        out[7, i] = not a
        out[8, i] = math.isnan(a)


@FORMATS
def test_comparisons(dtype, rng):
    x, y = pairs(dtype, rng)
    out = np.zeros((9, x.size), np.int32)
    comparisons[blocks(x)](x, y, out)
    a, b = x.astype(np.float32), y.astype(np.float32)
    expected = [a < b, a <= b, a == b, a != b, a > b, a >= b, a != 0, a == 0, np.isnan(a)]
    np.testing.assert_array_equal(out, np.array(expected, np.int32))


@FORMATS
def test_minimum_and_maximum(dtype, rng):
    hmin, hmax, hmin_nan, hmax_nan = (function(dtype, n) for n in ("hmin", "hmax", "hmin_nan", "hmax_nan"))

    @kernel(threads=THREADS)
    def extremes(x, y, out):
        i = cuda.grid(1)
        if i < x.size:
            out[0, i] = min(x[i], y[i])
            out[1, i] = max(x[i], y[i])
            out[2, i] = hmin(x[i], y[i])
            out[3, i] = hmax(x[i], y[i])
            out[4, i] = hmin_nan(x[i], y[i])
            out[5, i] = hmax_nan(x[i], y[i])

    x, y = pairs(dtype, rng)
    out = np.zeros((6, x.size), dtype)
    extremes[blocks(x)](x, y, out)
    a, b = x.astype(np.float32), y.astype(np.float32)
    # Python's own min and max: the first unless the second compares as smaller, larger.
    expected = [np.where(b < a, b, a), np.where(b > a, b, a)]
    expected += [np.fmin(a, b), np.fmax(a, b), np.minimum(a, b), np.maximum(a, b)]
    zeros = (a == 0) & (b == 0)  # the sign of zero is the instruction's affair
    for found, wanted in zip(out, expected, strict=True):
        assert_same(found[~zeros], wanted[~zeros].astype(dtype))
        assert not found[zeros].any()


def nearest(value, dtype):
    """An exact number rounded to nearest even."""
    largest = int(np.array(np.inf, dtype).view(np.uint16)) - 1
    info = ml_dtypes.finfo(dtype)
    mantissa, lowest = int(info.nmant), int(info.minexp)
    if value == 0:
        return np.array(0, dtype)
    exponent = max(math.frexp(float(abs(value)))[1] - 1 if abs(value) < 2**200 else 200, lowest)
    steps = round(abs(value) / Fraction(2) ** (exponent - mantissa))
    code = min(((exponent - lowest) << mantissa) + steps, largest + 1)
    return np.array(code | (0x8000 if value < 0 else 0), np.uint16).view(dtype)


@FORMATS
def test_fused_product_rounds_once(dtype, rng):
    hfma, hfma_relu, hfma_sat = (function(dtype, n) for n in ("hfma", "hfma_relu", "hfma_sat"))

    @kernel(threads=THREADS)
    def fused(x, y, z, out):
        i = cuda.grid(1)
        if i < x.size:
            out[0, i] = hfma(x[i], y[i], z[i])
            out[1, i] = hfma_relu(x[i], y[i], z[i])
            out[2, i] = hfma_sat(x[i], y[i], z[i])
            out[3, i] = x[i] * y[i] + z[i]

    x, y, z = rng.normal(size=(3, 700)).astype(np.float32).astype(dtype)
    # Products beside a tie, which a small summand moves to one side.
    z[:300] = (z[:300].astype(np.float32) * np.float32(2.0**-13)).astype(dtype)
    z[300:400] = -(x[300:400].astype(np.float32) * y[300:400].astype(np.float32)).astype(dtype)
    out = np.zeros((4, x.size), dtype)
    fused[blocks(x)](x, y, z, out)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c)
        for a, b, c in zip(*(v.astype(float).tolist() for v in (x, y, z)), strict=True)
    ]
    assert_same(out[0], np.array([nearest(e, dtype) for e in exact]))
    assert_same(out[1], np.array([nearest(max(e, Fraction(0)), dtype) for e in exact]))
    assert_same(out[2], np.array([nearest(min(max(e, Fraction(0)), Fraction(1)), dtype) for e in exact]))
    a, b, c = (v.astype(np.float32) for v in (x, y, z))
    assert_same(out[3], ((a * b).astype(dtype).astype(np.float32) + c).astype(dtype))
    assert (out[3].view(np.uint16) != out[0].view(np.uint16)).any()


FUNCTIONS = (np.exp, np.log, np.log10, np.sin, np.cos, np.tanh, np.exp2, np.log2)
REFERENCE = {"hexp10": lambda x: 10.0**x, "hrsqrt": lambda x: 1 / np.sqrt(x), "htanh_approx": np.tanh}


@kernel(threads=THREADS)
def mathematics(x, out):
    i = cuda.grid(1)
    if i < x.size:
        out[0, i] = math.exp(x[i])
        out[1, i] = math.log(x[i])
        out[2, i] = math.log10(x[i])
        if abs(x[i]) <= np.float32(1e5):
            out[3, i] = math.sin(x[i])
            out[4, i] = math.cos(x[i])
        out[5, i] = math.tanh(x[i])


@FORMATS
def test_mathematics_is_rounded_from_float32(dtype, rng):
    hexp2, hlog2, hexp10, hrsqrt, approx = (
        function(dtype, n) for n in ("hexp2", "hlog2", "hexp10", "hrsqrt", "htanh_approx")
    )

    @kernel(threads=THREADS)
    def more(x, out):
        i = cuda.grid(1)
        if i < x.size:
            out[6, i] = hexp2(x[i])
            out[7, i] = hlog2(x[i])
            out[8, i] = hexp10(x[i])
            out[9, i] = hrsqrt(x[i])
            out[10, i] = approx(x[i])

    x = np.concatenate(
        [
            edges(dtype),
            rng.integers(0, 1 << 16, 300, np.uint16).view(dtype),
            (rng.normal(size=600) * 4).astype(np.float32).astype(dtype),
        ]
    )
    out = np.zeros((11, x.size), dtype)
    mathematics[blocks(x)](x, out)
    more[blocks(x)](x, out)
    wide = x.astype(np.float64)
    for found, reference in zip(out, (*FUNCTIONS, *REFERENCE.values()), strict=True):
        expected = reference(wide).astype(np.float32).astype(dtype)
        if reference in (np.sin, np.cos):
            # Beyond, libdevice takes mad.lo.cc, whose carry the simulator does not hold when it first meets it.
            found, expected = found[abs(wide) <= 1e5], expected[abs(wide) <= 1e5]
        nan = np.isnan(expected.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), nan)
        apart = found[~nan].view(np.int16).astype(int) - expected[~nan].view(np.int16).astype(int)
        assert np.abs(apart).max() <= 1 and np.count_nonzero(apart) <= 0.01 * apart.size


@FORMATS
def test_roots_and_whole_numbers_are_exact(dtype, rng):
    hrcp, hrint = function(dtype, "hrcp"), function(dtype, "hrint")

    @kernel(threads=THREADS)
    def exact(x, out):
        i = cuda.grid(1)
        if i < x.size:
            out[0, i] = math.sqrt(x[i])
            out[1, i] = hrcp(x[i])
            out[2, i] = hrint(x[i])
            out[3, i] = math.floor(x[i])
            out[4, i] = math.ceil(x[i])
            out[5, i] = math.trunc(x[i])

    halves = np.arange(-20, 21).astype(np.float32) / 2
    x = np.concatenate([edges(dtype), rng.integers(0, 1 << 16, 900, np.uint16).view(dtype), halves.astype(dtype)])
    out = np.zeros((6, x.size), dtype)
    exact[blocks(x)](x, out)
    wide = x.astype(np.float32)
    expected = [np.sqrt(wide), 1 / wide, np.rint(wide), np.floor(wide), np.ceil(wide), np.trunc(wide)]
    for found, wanted in zip(out, expected, strict=True):
        assert_same(found, wanted.astype(dtype))


@FORMATS
def test_intrinsics_by_name(dtype, rng):
    names = ("hadd_rn", "hsub", "hmul", "hdiv", "hneg", "habs", "hadd_sat", "hne", "hneu", "hltu", "hisnan", "hisinf")
    add, sub, mul, div, neg, magnitude, add_sat, ne, neu, ltu, isnan, isinf = (function(dtype, n) for n in names)

    @kernel(threads=THREADS)
    def named(x, y, out, truth):
        i = cuda.grid(1)
        if i < x.size:
            a, b = x[i], y[i]
            out[0, i] = add(a, b)
            out[1, i] = sub(a, b)
            out[2, i] = mul(a, b)
            out[3, i] = div(a, b)
            out[4, i] = neg(a)
            out[5, i] = magnitude(a)
            out[6, i] = add_sat(a, b)
            truth[0, i] = ne(a, b)
            truth[1, i] = neu(a, b)
            truth[2, i] = ltu(a, b)
            truth[3, i] = isnan(a)
            truth[4, i] = isinf(a)

    x, y = pairs(dtype, rng, 50)
    out, truth = np.zeros((7, x.size), dtype), np.zeros((5, x.size), np.int32)
    named[blocks(x)](x, y, out, truth)
    a, b = x.astype(np.float32), y.astype(np.float32)
    unordered = np.isnan(a) | np.isnan(b)
    clamped = np.clip(np.nan_to_num(a + b, nan=0, posinf=1, neginf=0), 0, 1) + 0.0
    for found, wanted in zip(out, [a + b, a - b, a * b, a / b, -a, abs(a), clamped], strict=True):
        assert_same(found, wanted.astype(dtype))
    wanted = [(a != b) & ~unordered, (a != b), (a < b) | unordered, np.isnan(a), np.isinf(a) * np.sign(a)]
    np.testing.assert_array_equal(truth, np.nan_to_num(np.array(wanted, np.float32)).astype(np.int32))


GLOBAL = {dtype: np.array(1.5, dtype)[()] for dtype in NUMBA}


@FORMATS
def test_constants_and_local_and_shared_arrays(dtype, rng):
    number, constant = NUMBA[dtype], GLOBAL[dtype]

    @kernel(threads=32)
    def arrays(x, out):
        i = cuda.threadIdx.x
        shared = cuda.shared.array(32, number)
        local = cuda.local.array(4, number)
        shared[i] = x[i] * constant
        cuda.syncthreads()
        total = number(0)
        for k in range(4):
            local[k] = shared[(i + k) % 32]
        for k in range(4):
            total += local[(k + i) % 4]
        out[0, i] = total
        out[1, i] = constant
        # A variable of two types.
        mixed = np.float32(0.25) if i % 2 else x[i]
        out[2, i] = mixed
        out[3, i] = number(0.1)

    x = rng.integers(-8, 8, 32).astype(np.float32).astype(dtype)
    out = np.zeros((4, 32), dtype)
    arrays[1](x, out)
    scaled = x.astype(np.float32) * 1.5
    np.testing.assert_array_equal(out[0].astype(np.float32), sum(np.roll(scaled, -k) for k in range(4)))
    assert (out[1] == constant).all() and (out[3] == np.array(0.1, dtype)).all()
    np.testing.assert_array_equal(out[2], np.where(np.arange(32) % 2, np.array(0.25, dtype), x))


@FORMATS
def test_mixed_with_other_numbers(dtype, rng):
    @kernel(threads=32)
    def mixed(x, out):
        i = cuda.threadIdx.x
        out[0, i] = x[i] + 1
        out[1, i] = 2.5 * x[i]
        out[2, i] = x[i] / np.float32(3)
        out[3, i] = x[i] ** 2
        out[4, i] = x[i] // np.float32(2)
        out[5, i] = x[i] - i

    x = rng.normal(size=32).astype(np.float32).astype(dtype)
    out = np.zeros((6, 32), np.float64)
    mixed[1](x, out)
    a = x.astype(np.float64)
    expected = [a + 1, 2.5 * a, a / 3, a**2, a // 2, a - np.arange(32)]
    # Numba decides in which format each of them is computed; none is coarser than the operand.
    np.testing.assert_allclose(out, expected, rtol=2.0**-7, atol=2.0**-7)


@FORMATS
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_ptxas_accepts_it_and_nothing_is_called(dtype, arch):
    array, flags = types.Array(NUMBA[dtype], 1, "C"), types.Array(types.int32, 2, "C")
    table = types.Array(NUMBA[dtype], 2, "C")
    for function, arguments in (
        (operators.function, (array, array, table)),
        (comparisons.function, (array, array, flags)),
        (mathematics.function, (array, table)),
    ):
        compiled = compile_kernel(function, arguments, arch=arch)
        assert ".extern .func" not in compiled.ptx
        assert compiled.cubin[:4] == b"\x7fELF"
        if function is not mathematics.function:  # sine and cosine of large numbers take a table on the stack
            assert compiled.resources.stack_bytes == 0


def test_what_is_left_to_cuda_cpp_is_refused_by_name():
    def shuffled(x, out):
        out[0] = shuffle(np.uint32(0xFFFFFFFF), x[0], 0, 32)

    array = types.Array(types.bfloat16, 1, "C")
    with pytest.raises(CompileError, match=r"shuffled calls __shfl_sync .*convert to float32"):
        compile_kernel(shuffled, (array, array))


def test_an_external_function_is_refused_by_name():
    outside = cuda.declare_device("outside", "int32(int32)")

    def calls(out):
        out[0] = outside(out[1])

    with pytest.raises(CompileError, match=r"calls calls outside .*ptx"):
        compile_kernel(calls, (types.Array(types.int32, 1, "C"),))


@FORMATS
def test_atomics_are_a_typing_error(dtype):
    def adds(out):
        cuda.atomic.add(out, 0, out[1])

    with pytest.raises(TypingError, match="atomic.add"):
        compile_kernel(adds, (types.Array(NUMBA[dtype], 1, "C"),))

"""How tensor cores sum, on sums worked out by hand. tests/agreement has what a GPU gave."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma.sim import matrix_sums
from numba_tma.sim.matrix_sums import NARROW, WIDE

INF, NAN = float("inf"), float("nan")


def one(terms, c=0.0, precision=WIDE, result="f32", types=("f16", "f16")):
    """The result of a few products and an accumulator, in all columns of a step of 16 products."""
    a, b = np.zeros((1, 1, 16)), np.zeros((1, 8, 16))
    for k, (left, right) in enumerate(terms):
        a[0, 0, k], b[0, :, k] = left, right
    held = np.full((1, 1, 8), c, {"f32": np.float32, "f16": np.float16}[result])
    with np.errstate(all="ignore"):
        found = matrix_sums.step(precision, result, types, a, b, held)
    assert len({value.tobytes() for value in found.reshape(-1)}) == 1
    return found[0, 0, 0]


def power(exponent):
    """2 to an exponent as a product of two f16 numbers."""
    return (2.0 ** (exponent // 2), 2.0 ** (exponent - exponent // 2))


ONE, MINUS_ONE = (1.0, 1.0), (-1.0, 1.0)


def test_terms_are_cut_off_below_the_largest():
    assert one([ONE, power(-25), MINUS_ONE]) == 2.0**-25
    assert one([ONE, power(-26), MINUS_ONE]) == 0
    # Two halves of the last bit do not make one.
    assert one([ONE, power(-26), power(-26), MINUS_ONE]) == 0
    assert one([ONE, MINUS_ONE], c=2.0**-26) == 0
    assert one([power(-26), MINUS_ONE], c=1.0) == 0
    # The largest is a zero's factor, and does not count.
    assert one([(1024.0, 0.0), power(-20)]) == 2.0**-20
    # 1.5 * 1.5 = 2.25 has the exponent of 1, two bits beyond.
    assert one([(1.5, 1.5), power(-25), (-1.5, 1.5)]) == 2.0**-25
    # A subnormal number has the exponent of the least normal one.
    assert one([(2.0**-24, 2.0**14), power(-25), (-(2.0**-24), 2.0**14)]) == 2.0**-25
    assert one([(2.0**-24, 2.0**14), power(-26), (-(2.0**-24), 2.0**14)]) == 0
    assert one([ONE, (2.0**-6, 2.0**-7), MINUS_ONE], precision=NARROW, types=("e4m3", "e4m3")) == 2.0**-13
    assert one([ONE, (2.0**-7, 2.0**-7), MINUS_ONE], precision=NARROW, types=("e4m3", "e4m3")) == 0


def test_results_are_cut_off_or_rounded():
    assert one([ONE, power(-23)]) == 1 + 2.0**-23
    assert one([ONE, power(-24), power(-25)]) == 1
    assert one([MINUS_ONE, (-(2.0**-12), 2.0**-12), (-(2.0**-12), 2.0**-13)]) == -1
    assert one([ONE], c=2.0**-13, precision=NARROW) == 1 + 2.0**-13
    assert one([ONE], c=2.0**-14, precision=NARROW) == 1
    assert one([], c=1 + 2.0**-14, precision=NARROW) == 1
    assert one([power(-11)], c=1.0, result="f16") == 1
    assert one([power(-11)], c=1 + 2.0**-10, result="f16") == 1 + 2.0**-9
    assert one([power(-11), power(-22)], c=1.0, result="f16") == 1 + 2.0**-10
    assert one([power(-11), power(-22)], c=1.0, result="f16", precision=NARROW) == 1


def test_limits():
    largest = float(np.finfo(np.float32).max)
    assert one([(2.0**60, 2.0**40)], c=largest, types=("bf16", "bf16")) == largest
    assert one([(2.0**60, 2.0**44)], c=largest, types=("bf16", "bf16")) == INF
    assert one([(2.0**64, 2.0**64), (-(2.0**64), 2.0**64), ONE], types=("bf16", "bf16")) == 0
    assert one([(2.0**127, 2.0**127), (-(2.0**127), 2.0**127)], types=("bf16", "bf16")) == 0
    assert one([], c=2.0**-149) == np.float32(2.0**-149)
    assert one([(2.0**-75, 2.0**-74)], types=("bf16", "bf16")) == np.float32(2.0**-149)
    assert one([(2.0**-75, 2.0**-75)], types=("bf16", "bf16")) == 0
    assert one([(1.0, 15.0)], c=65504.0, result="f16") == 65504
    assert one([(1.0, 16.0)], c=65504.0, result="f16") == INF


@pytest.mark.parametrize("result", ["f32", "f16"])
def test_zeros_have_no_sign_and_nan_is_one(result):
    for terms, c in (([], -0.0), ([(-0.0, 1.0)] * 16, -0.0), ([ONE, MINUS_ONE], 0.0), ([MINUS_ONE], 1.0)):
        assert one(terms, c, result=result).tobytes().count(0) == (4 if result == "f32" else 2)
    # Half of the least f16 number, below zero, which is rounded to zero.
    assert not np.signbit(one([ONE, (-(2.0**-12), 2.0**-13), MINUS_ONE], result="f16"))
    nan = b"\xff\xff\xff\x7f" if result == "f32" else b"\xff\x7f"
    for terms, c in (([(NAN, 1.0)], 0.0), ([(INF, 0.0)], 0.0), ([(INF, 1.0), (-INF, 1.0)], 0.0), ([(INF, 1.0)], -INF)):
        assert one(terms, c, result=result).tobytes() == nan
    assert one([], NAN, result=result).tobytes() == nan
    assert one([(INF, -1.0), (2.0, 3.0)], 1.0, result=result) == -INF


def test_eight_bit_mma_is_two_steps_and_an_addition():
    a, b, c = np.zeros((1, 8, 32)), np.zeros((1, 8, 32)), np.zeros((1, 8, 8), np.float32)

    def product(terms, held):
        a[:], b[:], c[:] = 0, 0, held
        for k, left, right in terms:
            a[0, :, k], b[0, :, k] = left, right
        return matrix_sums.of_mma("f32", ("e4m3", "e4m3"), a, b, c)[0, 3, 5]

    small, large = (2.0**-9, 2.0**-9), (256.0, 256.0)
    # Elements 0, 1, 4, 5, … of K come first: the small one is lost beside the large ones, or comes after them.
    assert product([(0, *large), (1, *small), (5, -256.0, 256.0)], 0) == 0
    assert product([(0, *large), (2, *small), (5, -256.0, 256.0)], 0) == 2.0**-18
    # The accumulator is added at the end, to nearest.
    assert product([(0, 1.0, 1.0)], 2.0**25) == 2.0**25
    assert product([(0, 3.0, 1.0)], 2.0**25) == 2.0**25 + 4


def test_matrices_of_several_and_of_one(rng):
    a, b = (rng.standard_normal((3, rows, 16)).astype(np.float16).astype(np.float64) for rows in (16, 24))
    c = rng.standard_normal((3, 16, 24)).astype(np.float32)
    every = matrix_sums.step(WIDE, "f32", ("f16", "f16"), a, b, c)
    for i in range(3):
        alone = matrix_sums.step(WIDE, "f32", ("f16", "f16"), a[i : i + 1], b[i : i + 1], c[i : i + 1])
        np.testing.assert_array_equal(alone[0], every[i])
    shared = matrix_sums.step(WIDE, "f32", ("f16", "f16"), a, b[:1], c)
    np.testing.assert_array_equal(shared[0], every[0])
    np.testing.assert_allclose(shared, a @ b[:1].transpose(0, 2, 1) + c, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        matrix_sums.step(WIDE, "f32", ("f16", "f16"), a, b, None),
        matrix_sums.step(WIDE, "f32", ("f16", "f16"), a, b, np.zeros_like(c)),
    )

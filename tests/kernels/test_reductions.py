"""Reductions: contended places, indices outside, what is not aligned, and wrong arguments."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_tma import pitched, use_backend
from numba_tma.kernels.reductions import column_sums, histogram, scatter_add


def names(problem):
    return [variant.name for variant in problem.PROBLEM.variants]


def seen_as(array, shape):
    """As if it had so many rows, all of them in one place."""
    return np.lib.stride_tricks.as_strided(array, shape, (0, *array.strides[1:]))


@pytest.mark.parametrize("variant", names(scatter_add))
def test_scatter_adds_to_what_is_there_and_drops_what_is_outside(variant, rng, in_simulator):
    x = rng.standard_normal((50, 36), np.float32)
    index = rng.integers(-3, 8, 50).astype(np.int32)
    out = rng.standard_normal((5, 36), np.float32)
    expected = out + scatter_add.reference(x, index, 5)
    scatter_add.scatter_add(x, index, out, variant=variant)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("variant", ["bulk", "tensor"])
def test_scatter_add_of_other_types(dtype, variant, rng, in_simulator):
    x = rng.integers(-4, 5, (30, 24)).astype(dtype)  # sums of few small integers are exact in all of them
    index = rng.integers(0, 4, 30).astype(np.int32)
    out = np.empty((4, 24), dtype)
    scatter_add.scatter_add(x, index, out, variant=variant, zeros=True)
    np.testing.assert_array_equal(out.astype(np.float64), scatter_add.reference(x, index, 4))


def test_scatter_add_of_rows_of_any_length(rng, in_simulator):
    x, out = pitched((20, 300 + 7), np.float32), pitched((3, 300 + 7), np.float32)
    x[...], out[...] = rng.standard_normal(x.shape, np.float32), 0
    index = rng.integers(0, 3, 20).astype(np.int32)
    with use_backend("sim"), pytest.warns(UserWarning):  # what it adds to the padding are zeros
        scatter_add.scatter_add(x, index, out, variant="tensor")
    np.testing.assert_allclose(out, scatter_add.reference(x, index, 3), atol=1e-5)
    with pytest.raises(ValueError, match=r"scatter_add\.bulk: x has rows of 1228 B.*'tensor' takes any length"):
        scatter_add.scatter_add(x, index, out, variant="bulk")


def test_histograms_of_any_layout(rng, chosen, in_simulator):
    x, wide = rng.integers(0, 256, 2001).astype(np.uint8), np.zeros((1, 513), np.uint32)
    large = rng.integers(0, 9000, 501).astype(np.uint16)
    cases = (
        (x, wide[:, :256], "bulk"),
        (x[1:], wide[:, :256], "shared"),
        (x, wide[:, 1:257], "vector"),
        (x, wide[:, ::2], "vector"),
        (x, wide[:, :10], "vector"),
        (large[1:], np.zeros((1, 9000), np.uint32), "plain"),
    )
    for values, out, _ in cases:
        histogram.histogram(values, out)
        np.testing.assert_array_equal(out, histogram.reference(values, out.shape[1]))
    assert chosen == [variant for *_, variant in cases]


def test_column_sums_of_any_layout(rng, chosen, in_simulator):
    x, out = rng.standard_normal((40, 33), np.float32), np.empty((1, 33), np.float32)
    for of_x in (x[:, :32].copy(), x[:1, :32], x, x[:, 1:], x[:, ::2], x.T):
        sums = out[:, : of_x.shape[1]] if of_x.shape[1] <= 33 else np.empty((1, of_x.shape[1]), np.float32)
        column_sums.column_sums(of_x, sums)
        np.testing.assert_allclose(sums[0], of_x.astype(np.float64).sum(axis=0), atol=1e-4)
    assert chosen == ["bulk", "bulk", *["strips"] * 4]


def test_scatter_add_of_any_layout(rng, chosen, in_simulator):
    x, index = rng.integers(-4, 5, (20, 41)).astype(np.float32), rng.integers(0, 3, 20).astype(np.int32)
    for of_x in (x[:, :40].copy(), x, x[:, ::2], x.astype(np.int32)):
        out = np.empty((3, of_x.shape[1]), of_x.dtype)
        scatter_add.scatter_add(of_x, index, out, zeros=True)
        np.testing.assert_array_equal(out, scatter_add.reference(of_x, index, 3))
    halves, sums = pitched((20, 41), np.float16), pitched((3, 41), np.float16)
    halves[...] = x
    with pytest.warns(UserWarning):  # what it adds to the padding are zeros
        scatter_add.scatter_add(halves, index, sums, zeros=True)
    np.testing.assert_array_equal(sums.astype(np.float64), scatter_add.reference(x, index, 3))
    assert chosen == ["bulk", "plain", "plain", "plain", "tensor"]
    with pytest.raises(ValueError, match="row stride 82 B is not a multiple of 16 B; pad the last dimension"):
        scatter_add.scatter_add(x.astype(np.float16), index, sums)


@pytest.mark.parametrize("variant", names(histogram))
def test_histograms_of_one_value_and_of_none(variant, in_simulator):
    out = np.empty((1, 256), np.uint32)
    histogram.histogram(np.full(5003, 7, np.uint8), out, variant=variant)
    assert out[0, 7] == 5003 == out.sum()
    histogram.histogram(np.full(10, 9, np.uint8), out, variant=variant, zeros=False)
    assert (out[0, 7], out[0, 9]) == (5003, 10)
    histogram.histogram(np.zeros(0, np.uint8), out, variant=variant)
    assert not out.any()
    if variant != "bulk":  # the copy engine adds to what is contiguous
        wide = np.full((1, 512), 5, np.uint32)
        histogram.histogram(np.full(5003, 7, np.uint8), wide[:, ::2], variant=variant)
        assert wide[0, 14] == 5003 and (wide[0, 1::2] == 5).all()


@pytest.mark.parametrize("variant", names(column_sums))
def test_column_sums_of_nothing_and_of_one(variant, in_simulator):
    out = np.full((1, 8), np.nan, np.float32)
    column_sums.column_sums(np.zeros((0, 8), np.float32), out, variant=variant)
    np.testing.assert_array_equal(out, np.zeros((1, 8)))
    column_sums.column_sums(np.ones((1, 8), np.float32), out, variant=variant)
    np.testing.assert_array_equal(out, np.ones((1, 8)))
    column_sums.column_sums(np.zeros((8, 0), np.float32), np.zeros((1, 0), np.float32), variant=variant)


def test_column_sums_of_columns_that_are_no_vectors(rng, in_simulator):
    x, out = rng.standard_normal((40, 13), np.float32), np.empty((1, 13), np.float32)
    column_sums.column_sums(x, out, variant="strips", strip=16)
    np.testing.assert_allclose(out[0], x.astype(np.float64).sum(axis=0), atol=1e-4)
    with pytest.raises(ValueError, match="13 float32.*variant 'strips', which takes any"):
        column_sums.column_sums(x, out, variant="bulk")


def test_wrong_arguments_are_named(in_simulator):
    x, index, out = np.zeros((4, 8), np.float32), np.zeros(4, np.int32), np.zeros((2, 8), np.float32)
    counts, row, few = np.zeros((1, 256), np.uint32), np.zeros((1, 8), np.float32), np.zeros(64, np.uint8)
    wide, many = np.zeros((1, 512), np.uint32), seen_as(x, (1 << 31, 8))
    for call, error, message in (
        (lambda: scatter_add.scatter_add(x, index.astype(np.int64), out), ValueError, r"int32 \(4,\) expected"),
        (lambda: scatter_add.scatter_add(x, index, out[:, :4]), ValueError, r"of shape \(any, 8\) expected"),
        (lambda: scatter_add.scatter_add(x.astype(np.float64), index, out), ValueError, "x is float64"),
        (
            lambda: scatter_add.scatter_add(x.astype(np.float16), index, out.astype(np.float16), variant="plain"),
            ValueError,
            "this variant has atomics of float32, int32; 'bulk' has more",
        ),
        (lambda: histogram.histogram(x[0], counts), ValueError, "contiguous numbers of uint8 or uint16"),
        (
            lambda: histogram.histogram(np.zeros(64, np.uint8)[1:], counts, variant="vector"),
            ValueError,
            r"histogram\.vector: x at 0x\w+; it must be a multiple of 16 B: copy it, or take variant='shared'",
        ),
        (
            lambda: histogram.histogram(few, np.zeros((1, 10), np.uint32), variant="bulk"),
            ValueError,
            "10 bins; the copy engine adds multiples of 4: take variant='vector'",
        ),
        (
            lambda: histogram.histogram(few, np.zeros((1, 257), np.uint32)[:, 1:], variant="bulk"),
            ValueError,
            "out at 0x",
        ),
        (
            lambda: histogram.histogram(few, np.zeros((1, 8196), np.uint32), variant="shared"),
            ValueError,
            "8196 bins; a block's own counts are at most 8192: take variant='plain'",
        ),
        (lambda: histogram.histogram(np.zeros(64, np.uint8), counts, stages=2, variant="plain"), TypeError, "stages"),
        (lambda: column_sums.column_sums(x, out), ValueError, r"float32 \(1, 8\) expected"),
        (lambda: column_sums.column_sums([1], out), TypeError, "column_sums: x is a list"),
        (lambda: column_sums.column_sums(x, row, variant="engine", lag=8), ValueError, "lag 8 of 8 stages: .* 0 to 7"),
        (lambda: column_sums.column_sums(x, row, variant="engine", columns=6), ValueError, "columns 6: .* multiples"),
        (lambda: column_sums.column_sums(x, row, strip=0), ValueError, "strip 0 of variant 'bulk'"),
        (lambda: histogram.histogram(counts[0].view(np.uint8), counts, threads=8), ValueError, "share memory"),
        (lambda: histogram.histogram(few, counts, threads=8), ValueError, "threads 8: whole warps"),
        (lambda: histogram.histogram(few, wide[:, ::2], variant="bulk"), ValueError, "out's counts lie 8 B apart"),
        (lambda: scatter_add.scatter_add(x, index, out, rows=33), ValueError, "rows 33: 1 to 32 expected"),
        (lambda: scatter_add.scatter_add(x, index, out, variant="tensor", rows=64), ValueError, "rows 64: 1 to 32"),
        (
            lambda: scatter_add.scatter_add(x, index, out, part_bytes=24),
            ValueError,
            "part_bytes 24: .* multiples of 16",
        ),
        (
            lambda: scatter_add.scatter_add(many, seen_as(index, (1 << 31,)), out),
            ValueError,
            r"x has the shape \(2147483",
        ),
        (lambda: column_sums.column_sums(many, row), ValueError, r"above 2,147,483,391, where coordinates end"),
    ):
        with pytest.raises(error, match=message):
            call()

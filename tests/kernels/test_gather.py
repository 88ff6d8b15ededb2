"""Gathering: convolutions of many forms, pages that are not there, and wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma.kernels.gather import paged, patches
from numba_tma.kernels.gather.patches import Convolution

FORMS = [
    Convolution(filter=(1, 1), padding=(0, 0)),
    Convolution(filter=(5, 3), padding=(2, 0), stride=(2, 3)),
    Convolution(filter=(3, 3), padding=(2, 2), dilation=(2, 2)),
    Convolution(filter=(4, 4), padding=(0, 1), stride=(1, 2), dilation=(1, 2)),
]


@pytest.mark.parametrize("variant", [variant.name for variant in patches.PROBLEM.variants])
@pytest.mark.parametrize("convolution", FORMS, ids=str)
def test_convolutions(convolution, variant, rng, in_simulator):
    x = rng.integers(0, 256, (2, 9, 11, 16)).astype(np.uint8)
    p, q = convolution.outputs(9, 11)
    out = np.full((2 * p * q, convolution.taps * 16), 255, np.uint8)
    patches.patches(x, out, convolution=convolution, variant=variant)
    np.testing.assert_array_equal(out, patches.reference(x, convolution))


@pytest.mark.parametrize(("variant", "options"), [("window", {"tile": (3, 5)}), ("im2col", {"pixels": 100})])
def test_channels_in_several_tiles(variant, options, rng, in_simulator):
    x = rng.standard_normal((1, 5, 6, 40), np.float32)
    out = np.full((30, 9 * 40), np.nan, np.float32)
    patches.patches(x, out, variant=variant, channels=16, **options)
    np.testing.assert_array_equal(out, patches.reference(x, Convolution()))


@pytest.mark.parametrize("variant", [variant.name for variant in paged.PROBLEM.variants])
def test_pages_that_are_not_there(variant, rng, in_simulator):
    cache = rng.standard_normal((4, 3, 2, 8)).astype(np.float16)
    table = np.array([[3, -1], [-1, 4], [0, 3], [(1 << 31) - 1, -(1 << 31)]], np.int32)
    out = np.full((4, 2, 6, 8), np.nan, np.float16)
    paged.paged(cache, table, out, variant=variant)
    np.testing.assert_array_equal(out, paged.reference(cache, table))
    assert out[0].any() and not out[1].any() and not out[3].any()


def test_a_convolution_of_lists_is_one_of_tuples():
    assert Convolution([1, 3], [0, 1]) == Convolution((1, 3), (0, 1))
    assert hash(Convolution([1, 3])) == hash(Convolution((1, 3)))


@pytest.mark.parametrize(
    ("tokens", "depth", "dtype", "variant"),
    [
        (4, 16, "f2", "tensor"),
        (4, 12, "f2", "plain"),
        (300, 8, "f2", "vector"),
        (4, 264, "f4", "vector"),
        (227, 256, "f4", "vector"),  # a block has not room for the barrier too
        (4, 16, "?", "vector"),
    ],
)
def test_pages_of_any_form(tokens, depth, dtype, variant, rng, chosen, in_simulator):
    cache = rng.integers(0, 2, (3, tokens, 2, depth)).astype(dtype)
    table = np.array([[2, -1], [0, 1]], np.int32)
    out = np.ones((2, 2, 2 * tokens, depth), dtype)
    paged.paged(cache, table, out)
    np.testing.assert_array_equal(out, paged.reference(cache, table))
    assert chosen == [variant]


@pytest.mark.parametrize(
    ("channels", "convolution", "variant"),
    [
        (8, Convolution(), "im2col"),
        (5, Convolution(), "plain"),
        (8, Convolution(stride=(9, 1)), "vector"),
        (8, Convolution(dilation=(130, 1), padding=(130, 1)), "vector"),
    ],
)
def test_patches_of_any_form(channels, convolution, variant, rng, chosen, in_simulator):
    x = rng.integers(0, 9, (1, 10, 7, channels)).astype(np.float16)
    p, q = convolution.outputs(10, 7)
    out = np.full((p * q, 9 * channels), np.nan, np.float16)
    patches.patches(x, out, convolution=convolution)
    np.testing.assert_array_equal(out, patches.reference(x, convolution))
    wide = np.full((p * q, 18 * channels), np.nan, np.float16)
    patches.patches(x, wide[:, ::2], convolution=convolution)
    np.testing.assert_array_equal(wide[:, ::2], out)
    assert chosen == [variant, "plain"]


def test_nothing_to_gather(in_simulator):
    patches.patches(np.zeros((0, 4, 4, 8), np.float32), np.zeros((0, 72), np.float32))
    paged.paged(np.zeros((2, 4, 2, 8), np.float16), np.zeros((0, 3), np.int32), np.zeros((0, 2, 12, 8), np.float16))


def test_wrong_arguments_are_named(in_simulator):
    x, out = np.zeros((1, 4, 4, 8), np.float32), np.zeros((16, 72), np.float32)
    cache, table = np.zeros((2, 4, 2, 8), np.float16), np.zeros((1, 3), np.int32)
    pages, wide_pages = np.zeros((1, 2, 12, 8), np.float16), np.zeros((1, 2, 12, 16), np.float16)
    wide, wide_out = np.zeros((2, 4, 2, 16), np.float16), np.zeros((16, 144), np.float32)
    for call, error, message in (
        (lambda: patches.patches(x[0], out), ValueError, r"\(images, height, width, channels\) expected"),
        (lambda: patches.patches(x, out[:, :8]), ValueError, r"float32 \(16, 72\) expected"),
        (
            lambda: patches.patches(x, out, convolution=Convolution(filter=(9, 1))),
            ValueError,
            "reaches over 9 pixels and an image of 4 with a padding of 1",
        ),
        (lambda: patches.patches(x, out, pixel=3), TypeError, "has no option 'pixel'; it has pixels, channels, stream"),
        (
            lambda: patches.patches(x[..., :3].copy(), out[:, :27].copy(), variant="vector"),
            ValueError,
            "pad the channels, or take variant 'plain'",
        ),
        (lambda: paged.paged(cache, table[0], cache), ValueError, "table is int32"),
        (lambda: paged.paged(cache, table, cache), ValueError, r"float16 \(1, 2, 12, 8\) expected"),
        (lambda: paged.paged(cache, [0], cache), TypeError, "table is a list"),
        (lambda: paged.paged(wide[..., ::2], table, pages, variant="vector"), ValueError, "contiguous rows"),
        (lambda: paged.paged(cache, table, wide_pages[..., ::2], variant="vector"), ValueError, "contiguous rows"),
        (lambda: paged.paged(cache, table, pages, heads=33), ValueError, "heads 33: 1 to 32"),
        (
            lambda: patches.patches(x, wide_out[:, ::2], variant="im2col"),
            ValueError,
            r"out has strides \(576, 8\) B; .* contiguous rows",
        ),
        (lambda: patches.patches(x, wide_out[:, ::2], variant="window"), ValueError, "or take variant 'plain'"),
        (lambda: patches.patches(x, out, variant="window", tile=8), ValueError, "tile 8 of variant 'window': a tuple"),
        (lambda: Convolution(filter=(0, 3)), ValueError, r"filter \(0, 3\); two integers of 1 or more"),
        (lambda: Convolution(stride=(1, 0)), ValueError, r"stride \(1, 0\)"),
        (lambda: Convolution(dilation=(-1, 1)), ValueError, r"dilation \(-1, 1\)"),
        (lambda: Convolution(padding=(0, -1)), ValueError, r"padding \(0, -1\); two integers of 0 or more"),
        (lambda: Convolution(filter=3), ValueError, "filter 3; two integers"),
        (lambda: Convolution(padding=(1, 1.5)), ValueError, "padding"),
    ):
        with pytest.raises(error, match=message):
            call()

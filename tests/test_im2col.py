"""Tensor maps of im2col mode: their rules, and what a copy gathers, against NumPy."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda.types import uint32

from numba_tma import Barriers, Shared, TensorMap, Tiles, kernel, ptx, use_backend
from numba_tma.device_array import DeviceArray
from numba_tma.im2col import Im2colMap, corners
from numba_tma.pipeline import mbarrier_wait
from numba_tma.sim import SimError, descriptor
from numba_tma.tensor_map import TensorMapError


@functools.cache
def gather(pixels, channels, swizzle, spatial):
    """A kernel that copies one tile; the coordinates and offsets come innermost first."""
    smem = Shared(tile=Tiles(1, (pixels, channels), np.float32, swizzle=swizzle), full=Barriers(1))
    copy = {
        1: ptx.cp_async_bulk_tensor_3d_shared_global_im2col,
        2: ptx.cp_async_bulk_tensor_4d_shared_global_im2col,
        3: ptx.cp_async_bulk_tensor_5d_shared_global_im2col,
    }[spatial]

    if spatial == 1:

        @cuda.jit(device=True)
        def issue(tile, x_map, c, o, bar):
            copy(tile, x_map, c[0], c[1], c[2], bar, o[0])
    elif spatial == 2:

        @cuda.jit(device=True)
        def issue(tile, x_map, c, o, bar):
            copy(tile, x_map, c[0], c[1], c[2], c[3], bar, o[0], o[1])
    else:

        @cuda.jit(device=True)
        def issue(tile, x_map, c, o, bar):
            copy(tile, x_map, c[0], c[1], c[2], c[3], c[4], bar, o[0], o[1], o[2])

    @kernel(threads=32, shared=smem)
    def gathered(x_map, out, coordinates, offsets):
        thread = uint32(cuda.threadIdx.x)
        if thread == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
            issue(smem.tile[0], x_map, coordinates, offsets, smem.full[0])
        cuda.syncthreads()
        mbarrier_wait(smem.full[0], 0)
        for pixel in range(pixels):
            for channel in range(thread, channels, 32):
                out[pixel, channel] = smem.tile[0][pixel, channel]

    return smem, gathered


def walked(x, pixels, channels, lower, upper, strides, first, start, offsets):
    """What the copy should give: pixel after pixel, each looked up by itself. `start` and the rest slowest first."""
    out = np.zeros((pixels, channels), x.dtype)
    high = [extent - 1 + last for extent, last in zip(x.shape[1:-1], upper, strict=True)]
    image, *place = start
    for row in out:
        at = [position + offset for position, offset in zip(place, offsets, strict=True)]
        if image < len(x) and all(0 <= p < extent for p, extent in zip(at, x.shape[1:-1], strict=True)):
            for channel in range(channels):
                if 0 <= first + channel < x.shape[-1]:
                    row[channel] = x[(image, *at, first + channel)]
        for axis in range(len(place) - 1, -1, -1):
            place[axis] += strides[axis]
            if place[axis] <= high[axis]:
                break
            place[axis] = lower[axis]
        else:
            image += 1
    return out


def cases(rng, count, pixels=None):
    """Random images, convolutions, tiles (of so many pixels, or any number) and beginnings."""
    for _ in range(count):
        spatial = int(rng.integers(1, 4))
        extents = rng.integers(2, 7, spatial)
        padding = rng.integers(0, 3, spatial)
        dilation = rng.integers(1, 3, spatial)
        taps = np.minimum(rng.integers(1, 4, spatial), (extents + 2 * padding - 1) // dilation + 1)
        lower, upper = corners(taps.tolist(), padding.tolist(), dilation.tolist())
        strides = tuple(rng.integers(1, 4, spatial).tolist())
        x = rng.standard_normal((rng.integers(1, 4), *extents, 4 * rng.integers(1, 10)), np.float32)
        channels, swizzle = [(8, "none"), (16, "64B"), (32, "128B"), (40, "none")][rng.integers(4)]
        high = extents - 1 + np.array(upper)
        start = [int(rng.integers(0, len(x))), *(int(rng.integers(a, b + 1)) for a, b in zip(lower, high, strict=True))]
        offsets = [int(rng.integers(0, t)) * int(d) for t, d in zip(taps, dilation, strict=True)]
        first = 4 * int(rng.integers(-1, 3))
        yield x, pixels or int(rng.integers(1, 40)), channels, swizzle, lower, upper, strides, first, start, offsets


def run(case, to_device=lambda array: array):
    x, pixels, channels, swizzle, lower, upper, strides, first, start, offsets = case
    smem, gathered = gather(pixels, channels, swizzle, len(lower))
    out = to_device(np.full((pixels, channels), np.nan, np.float32))
    x_map = Im2colMap(to_device(x), smem.tile, lower=lower, upper=upper, strides=strides)
    coordinates = np.array([first, *start[::-1]], np.int32)
    report = gathered[1](x_map, out, to_device(coordinates), to_device(np.array(offsets[::-1], np.uint32)))
    return out, report, x_map


def test_a_copy_gathers_what_a_walk_meets(rng, seed):
    for case in cases(rng, 6):
        with use_backend("sim", policy="random", seed=seed):
            out, report, x_map = run(case)
        x, pixels, channels, _, lower, upper, strides, first, start, offsets = case
        np.testing.assert_array_equal(out, walked(x, pixels, channels, lower, upper, strides, first, start, offsets))
        assert report.bytes["tma_load"] == x_map.box_bytes == pixels * channels * 4
        assert not report.hazards


@pytest.mark.gpu
def test_a_gpu_gathers_the_same(rng):
    for case in cases(rng, 60, pixels=30):
        with use_backend("gpu"):
            out, _, _ = run(case, DeviceArray)
        x, pixels, channels, _, lower, upper, strides, first, start, offsets = case
        expected = walked(x, pixels, channels, lower, upper, strides, first, start, offsets)
        np.testing.assert_array_equal(out.to_host(), expected)


IMAGES = np.zeros((2, 8, 6, 16), np.float32)
NO_PADDING = {"lower": (0, 0), "upper": (0, 0)}


@pytest.mark.parametrize(
    ("rule", "message", "arguments", "options"),
    [
        ("im2col rank", "2 dimensions; images are described by 3 to 5", (IMAGES[0, 0], (8, 16)), NO_PADDING),
        ("im2col pixels", "1025 a copy; there are 1 to 1024", (IMAGES, (1025, 16)), NO_PADDING),
        ("im2col channels", "257 a copy", (IMAGES, (8, 257)), NO_PADDING),
        ("im2col channel bytes", "6 × float32 = 24 B .* take a multiple of 4 channels", (IMAGES, (8, 6)), NO_PADDING),
        (
            "im2col channels and swizzle",
            "at most 8 channels",
            (IMAGES, (8, 16)),
            {**NO_PADDING, "swizzle": "32B"},
        ),
        ("im2col corners", "2 numbers each for 4 dimensions", (IMAGES, (8, 16)), {"lower": (0,), "upper": (0,)}),
        (
            "im2col corners",
            "-129 and 0 in dimension 2; with 4 dimensions each is -128 to 127",
            (IMAGES, (8, 16)),
            {"lower": (0, -129), "upper": (0, 0)},
        ),
        (
            "im2col corners",
            "with 5 dimensions each is -16 to 15",
            (IMAGES[None], (8, 16)),
            {"lower": (0, 0, 0), "upper": (16, 0, 0)},
        ),
        (
            "im2col bounding box",
            "from 0 to -1 in dimension 1: it is empty",
            (IMAGES, (8, 16)),
            {"lower": (0, 0), "upper": (-8, 0)},
        ),
        ("im2col strides", "has 1 entries; 2 expected", (IMAGES, (8, 16)), {**NO_PADDING, "strides": (1,)}),
        ("element strides", "9 along dimension 1", (IMAGES, (8, 16)), {**NO_PADDING, "strides": (9, 1)}),
        ("stride alignment", "is not a multiple of 16 B", (IMAGES[..., :3].copy(), (8, 16)), NO_PADDING),
    ],
)
def test_rules(rule, message, arguments, options):
    with pytest.raises(TensorMapError, match=message) as raised:
        Im2colMap(*arguments, **options)
    assert raised.value.rule == rule


def test_the_simulator_checks_the_same_rules_again():
    good = Im2colMap(IMAGES, (8, 16), lower=(-1, -1), upper=(-1, -1)).encode_sim()
    found = descriptor.decode(good)
    assert found.im2col
    assert (found.box, found.lower, found.upper) == ((16, 8), (-1, -1), (-1, -1))
    broken = bytearray(good)
    broken[112:114] = (-200).to_bytes(2, "little", signed=True)
    with pytest.raises(descriptor.TensorMapError, match="corners -200 and -1 of dimension 1"):
        descriptor.decode(bytes(broken))
    with pytest.raises(descriptor.TensorMapError, match="this is an im2col map"):
        descriptor.replace(good, "rank", None, 2)


def test_corners_of_a_convolution():
    assert corners((3, 3), (1, 1)) == ((-1, -1), (-1, -1))
    assert corners((3, 5), (0, 2), (2, 1)) == ((0, -2), (-4, -2))


@pytest.mark.parametrize(
    ("rule", "message", "arguments"),
    [
        ("im2col filter", "one to three numbers each", ((3, 3), (1,))),
        ("im2col filter", "one to three numbers each", ((3, 3), (1, 1), (1,))),
        ("im2col filter", "one to three numbers each", ((), ())),
        ("im2col filter", r"filter \(0, 3\)", ((0, 3), (1, 1))),
        ("im2col filter", r"padding \(1, -1\).*an image is cropped by indexing it", ((3, 3), (1, -1))),
        ("im2col filter", r"dilation \(0, 1\)", ((3, 3), (1, 1), (0, 1))),
        ("im2col filter", "3 is not a sequence of integers", (3, 1)),
        ("im2col padding", r"\(0.5, 1\) is not a sequence", ((3, 3), (0.5, 1))),
        ("im2col offsets", "256 pixels from the first; .* end at 255 with 4", ((2, 1), (128, 0), (256, 1))),
        ("im2col offsets", "32 pixels from the first; .* end at 31 with 5", ((1, 2, 1), (0, 16, 0), (1, 32, 1))),
    ],
)
def test_corners_of_no_convolution(rule, message, arguments):
    with pytest.raises(TensorMapError, match=message) as raised:
        corners(*arguments)
    assert raised.value.rule == rule


def test_an_offset_has_as_many_bits_as_machine_code_keeps(in_simulator):
    smem, gathered = gather(8, 16, "none", 2)
    x_map = Im2colMap(IMAGES, smem.tile, lower=(-128, 0), upper=(-128, 0))
    out, begin = np.ones((8, 16), np.float32), np.array([0, 0, -128, 0], np.int32)
    gathered[1](x_map, out, begin, np.array([0, 255], np.uint32))
    assert not out.any()
    with pytest.raises(SimError, match="offset of 256 in dimension 2; with 4 dimensions machine code keeps 0 to 255"):
        gathered[1](x_map, out, begin, np.array([0, 256], np.uint32))


def test_a_map_is_for_copies_of_its_mode(in_simulator):
    smem, gathered = gather(8, 16, "none", 2)
    out, four, two = np.zeros((8, 16), np.float32), np.zeros(4, np.int32), np.zeros(2, np.uint32)
    with pytest.raises(TypingError, match="takes an Im2colMap; found TensorMap"):
        gathered[1](TensorMap(IMAGES, (1, 1, 8, 16)), out, four, two)
    with pytest.raises(TypingError, match="is for maps of 4 dimensions; found Im2colMap.* of 3"):
        gathered[1](Im2colMap(IMAGES[0], smem.tile, lower=(0,), upper=(0,)), out, four, two)


def test_a_walk_begins_in_its_bounding_box(in_simulator):
    smem, gathered = gather(8, 16, "none", 2)
    x_map = Im2colMap(IMAGES, smem.tile, lower=(-1, -1), upper=(-1, -1))
    out, two = np.zeros((8, 16), np.float32), np.zeros(2, np.uint32)
    with pytest.raises(SimError, match=r"begins at 5 in dimension 1, outside the bounding box, -1 to 4"):
        gathered[1](x_map, out, np.array([0, 5, 0, 0], np.int32), two)

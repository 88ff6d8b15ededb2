"""transpose: layouts, element types, tuning parameters, named errors, and what the banks of shared memory see."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from numba_tma import pitched, pitched_copy, use_backend
from numba_tma.device_array import DeviceArray
from numba_tma.kernels import transpose
from numba_tma.kernels.problem import Case

VARIANTS = [variant.name for variant in transpose.PROBLEM.variants]


def random_matrix(rng, shape, dtype):
    return np.frombuffer(rng.bytes(shape[0] * shape[1] * np.dtype(dtype).itemsize), dtype).reshape(shape)


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("int8", {"variant": "vector", "tile": (1, 2), "threads": 64}),
        (
            "float32",
            {"variant": "ring", "tile": (2, 1), "threads": 64, "stages": 3, "per_multiprocessor": 1},
        ),
        ("int8", {"variant": "ring", "tile": (1, 1), "threads": 64, "stages": 2, "per_multiprocessor": 1}),
        ("float32", {"variant": "store", "tile": (2, 2), "threads": 128}),
        ("int8", {"variant": "store", "tile": (1, 2), "threads": 64}),
    ],
    ids=str,
)
def test_tiles_stages_and_orders(options, dtype, rng, seed, monkeypatch):
    monkeypatch.setattr(
        transpose, "blocks_for", lambda work, per: min(work, 2)
    )  # several turns of the ring for a block
    side = 16 // np.dtype(dtype).itemsize
    rows = int(rng.integers(1, 40)) * side
    source = pitched_copy(random_matrix(rng, (rows, int(rng.integers(1, 500))), dtype))
    target = pitched(source.shape[::-1], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # hazards are warnings
        with use_backend("sim", seed=seed, policy="random", warp_order="random"):
            transpose.transpose(source, target, **options)
    np.testing.assert_array_equal(bits(target), bits(source.T))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "int32"])
@pytest.mark.parametrize("shape", [(31, 83), (48, 32)], ids=str)
def test_the_default_takes_any_layout(dtype, shape, rng, in_simulator):
    element = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    source = random_matrix(rng, shape, element)
    target = np.empty(shape[::-1], element)
    transpose.transpose(source, target)
    np.testing.assert_array_equal(bits(target), bits(source.T))
    wide = np.zeros((shape[0], 3 * shape[1]), element)
    wide[:, ::3] = source
    target[...] = 0
    transpose.transpose(wide[::-1, ::3], target)  # no TMA variant could
    np.testing.assert_array_equal(bits(target), bits(source[::-1].T))
    padded = pitched_copy(source)
    for view in (padded[::-1], np.broadcast_to(padded[:1], shape)):  # nor here: a tensor map's strides are positive
        transpose.transpose(view, target)
        np.testing.assert_array_equal(bits(target), bits(view.T))


@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_of_nothing_and_of_one(variant, rng, in_simulator):
    for shape in ((0, 64), (8, 0), (0, 0)):
        transpose.transpose(np.zeros(shape, np.float32), np.zeros(shape[::-1], np.float32), variant=variant)
    if variant != "store":  # whose rows of 4 bytes would overhang
        one, target = pitched_copy(rng.random((1, 1), np.float32)), pitched((1, 1), np.float32)
        transpose.transpose(one, target, variant=variant)
        assert target[0, 0] == one[0, 0]


def test_errors_name_the_rule_and_the_way_out(in_simulator):
    a, t = np.zeros((8, 64), np.float32), np.zeros((64, 8), np.float32)
    odd, odd_t = np.zeros((8, 65), np.float32), np.zeros((65, 8), np.float32)
    for arguments, options, error, message in (
        ((a, a), {}, ValueError, "the transposed shape"),
        ((a, t.astype(np.float16)), {}, ValueError, "the same dtype"),
        ((a.astype(np.float64), t.astype(np.float64)), {}, TypeError, "elements of 8 bytes; 1, 2 and 4"),
        (([1], t), {}, TypeError, "transpose of a list to a ndarray"),
        ((a, t), {"variant": "fast"}, KeyError, "has no variant 'fast'"),
        ((a, t), {"variant": "vector", "stages": 2}, TypeError, "'vector' has no option 'stages'"),
        (
            (odd, odd_t),
            {"variant": "tma"},
            ValueError,
            r"strides \(260, 4\) B .*pitched_copy, or take variant='padded'",
        ),
        ((odd_t, odd), {"variant": "ring"}, ValueError, r"the target has strides \(260, 4\)"),
        ((a[:7], t[:, :7]), {"variant": "store"}, ValueError, "rows of 7 × float32 end within 16 B"),
        ((a, t), {"variant": "vector", "tile": (9, 1)}, ValueError, "at most 8 spans"),
        ((a, t), {"variant": "vector", "tile": (1, 1), "threads": 96}, ValueError, "do not divide among 96"),
        ((a, t), {"variant": "swizzle", "threads": 96}, ValueError, "threads 96: the 1024 elements of a tile"),
        ((a, t), {"variant": "vector", "threads": 0}, ValueError, "threads 0 of variant 'vector': an integer of 1"),
        ((a, t), {"variant": "ring", "tile": 2}, ValueError, "tile 2 of variant 'ring': a tuple of two"),
        ((a[::-1], t), {"variant": "tma"}, ValueError, "the source's rows of 64 × float32 lie -256 B apart"),
        ((a, t[::-1]), {"variant": "store"}, ValueError, "the target's rows of 8 × float32 lie -32 B apart"),
        ((a[:, :8], a.reshape(64, 8)[:8]), {}, ValueError, "target at 0x.* and source at 0x.* share memory"),
    ):
        with pytest.raises(error, match=message):
            transpose.transpose(*arguments, **options)
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (1 << 31, 1), (0, 1))
    with pytest.raises(ValueError, match="where coordinates end"):
        transpose.transpose(huge, huge.T)


# Wavefronts that an access takes, over those without conflicts: reads of shared memory, then writes.
CONFLICTS = {"padded": (1, 1), "tma": (32, 0), "swizzle": (4, 0), "vector": (1, 0), "ring": (1, 0), "store": (1, 1)}


@pytest.mark.parametrize(
    ("variant", "dtype"), [*((v, "float16") for v in CONFLICTS), ("store", "float32"), ("store", "int8")]
)
def test_bank_conflicts(variant, dtype, rng):
    width = 256
    host = transpose.PROBLEM.inputs(Case((width, width), dtype), rng)
    with use_backend("sim", banks=True, hazards=False):
        report = transpose.PROBLEM.variant(variant).bind(host)()
    found = []
    for direction in ("ld_shared", "st_shared"):
        use = report.banks[direction]
        found.append(use.wavefronts / use.least if use.requests else 0)
    assert tuple(found) == CONFLICTS[variant]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["padded", "vector", "store"])
def test_more_elements_than_32_bits_count(variant, rng):
    """Just above 2^31 elements, all zero but in the last rows."""
    source = np.zeros(((1 << 31) // 32768 + 48, 32768), np.int8)
    source[-64:] = random_matrix(rng, (64, 32768), np.int8)
    matrix, target = DeviceArray(source), DeviceArray(np.zeros(source.shape[::-1], np.int8))
    target.poison()
    with use_backend("gpu"):
        transpose.transpose(matrix, target, variant=variant)
    found = target.to_host()
    np.testing.assert_array_equal(found[:, -64:], source[-64:].T)
    assert not found[:, :-64].any()

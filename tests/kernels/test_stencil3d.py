"""stencil3d and multicast: boundaries filled with zero and NaN, tiles and stages, layouts, named errors."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from numba_tma import driver, launch, pitched, pitched_copy, suite, use_backend
from numba_tma.device_array import DeviceArray
from numba_tma.kernels import multicast, stencil3d
from numba_tma.kernels.problem import Case

VARIANTS = [variant.name for variant in stencil3d.PROBLEM.variants]


def by_hand(source, points, z, y, x):
    """One point of the result, term by term."""
    total = 0.0
    for offset in np.ndindex(3, 3, 3):
        steps = [o - 1 for o in offset]
        place = [p + s for p, s in zip((z, y, x), steps, strict=True)]
        inside = all(0 <= p < n for p, n in zip(place, source.shape, strict=True))
        total += stencil3d.WEIGHTS[points][sum(map(abs, steps))] * (float(source[tuple(place)]) if inside else 0.0)
    return total


@pytest.mark.parametrize("points", stencil3d.POINTS)
def test_the_reference_itself(points, rng):
    source = rng.standard_normal((3, 4, 5), np.float32)
    result = stencil3d.reference(source, points)
    for z, y, x in np.ndindex(source.shape):
        assert result[z, y, x] == pytest.approx(by_hand(source, points, z, y, x))
    # Laplace's operator: nothing of a constant or linear function, the second derivative of a quadratic one.
    z, y, x = np.mgrid[:5, :5, :5].astype(np.float32)
    assert np.abs(stencil3d.reference(2 + x - 3 * y + z, points)[1:-1, 1:-1, 1:-1]).max() < 1e-12
    inner = stencil3d.reference(x * x + y * y - 3 * z * z, points)[1:-1, 1:-1, 1:-1]
    np.testing.assert_allclose(inner, 2 + 2 - 6, atol=1e-12)


@pytest.mark.parametrize(("variant", "points"), [*((variant, 7) for variant in VARIANTS), ("plain", 27), ("ring", 27)])
def test_outside_is_zero_or_nan(variant, points, rng, in_simulator):
    source = pitched_copy(rng.standard_normal((4, 9, 70), np.float32))
    for fill in ("zero", "nan"):
        out = pitched(source.shape, np.float32)
        out[...] = 7
        stencil3d.stencil3d(source, out, points=points, fill=fill, variant=variant)
        expected = stencil3d.reference(source, points, fill)
        assert np.isnan(expected).any() == (fill == "nan") and not np.isnan(expected[1:-1, 1:-1, 1:-1]).any()
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.nanmax(np.abs(expected)))


@pytest.mark.parametrize(
    "options",
    [
        {"variant": "shared", "tile": (4, 32), "rows": 1, "depth": 2},
        {"variant": "tma", "tile": (8, 32), "rows": 2, "depth": 3},
        {"variant": "stages", "tile": (8, 32), "rows": 2, "depth": 7, "stages": 3},
        {"variant": "ring", "tile": (8, 64), "rows": 4, "depth": 5, "stages": 2},
    ],
    ids=lambda o: o["variant"],
)
def test_tiles_stages_and_orders(options, rng, seed):
    shape = tuple(int(n) for n in rng.integers((1, 1, 1), (14, 20, 90)))
    source, out = pitched_copy(rng.standard_normal(shape, np.float32)), pitched(shape, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with use_backend("sim", seed=seed, policy="random", warp_order="random"):
            stencil3d.stencil3d(source, out, **options)
    expected = stencil3d.reference(source, 7)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_no_bank_is_asked_twice_for_rows_of_four(rng):
    """The tile's rows are read by 16 bytes a lane; only the neighbours beside them lie four words apart."""
    source = pitched_copy(rng.standard_normal((3, 16, 64), np.float32))
    with use_backend("sim", banks=True, hazards=False):
        report = stencil3d.PROBLEM.variant("stages").bind({"source": source, "out": pitched((3, 16, 64), np.float32)})()
    by_width = {4: set(), 1: set()}
    for place, use in report.banks_by_place.items():
        by_width[4 if ".v4." in place else 1].add(use.wavefronts / use.least)
    assert by_width == {4: {1.0}, 1: {4.0}}


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_depth_keeps_bytes_in_flight(stages):
    """On 132 SMs: as many blocks as it takes, none of them without a plane."""
    height, width = stencil3d.tile_shape((16, 128))
    for shape in ((512, 512, 512), (127, 253, 509), (3, 16, 128), (4096, 16, 128)):
        depth = stencil3d.default_depth(shape, (16, 128), stages)
        tiles = -(-shape[1] // 16) * -(-shape[2] // 128)
        blocks = tiles * -(-shape[0] // depth)
        assert 1 <= depth <= shape[0]
        assert blocks * 4 * height * width * stages <= 1.1 * 132 * stencil3d.IN_FLIGHT
    assert stencil3d.default_depth((512, 512, 512), (16, 128), stages) == 128 * stages


def test_of_nothing(in_simulator):
    for shape in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
        for variant in VARIANTS:
            stencil3d.stencil3d(np.zeros(shape, np.float32), np.zeros(shape, np.float32), variant=variant)


def test_errors_name_the_rule_and_the_way_out(in_simulator):
    a, b = np.zeros((4, 4, 8), np.float32), np.zeros((4, 4, 8), np.float32)
    odd = np.zeros((4, 4, 9), np.float32)
    for arguments, options, error, message in (
        ((a, b[:3]), {}, ValueError, "two float32 grids"),
        ((a.astype(np.float64), b), {}, ValueError, "float64"),
        ((a, [1]), {}, TypeError, "stencil3d of a ndarray to a list"),
        ((a, a), {}, ValueError, "out at 0x.* and source at 0x.* share memory"),
        ((a, b), {"points": [7]}, ValueError, r"points \[7\]: 7 or 27"),
        ((a, b), {"variant": "plain", "threads": 32}, ValueError, "threads 32: a tuple of two"),
        ((a, b), {"tile": (16,)}, ValueError, r"tile \(16,\) of variant 'ring': a tuple of two positive integers"),
        ((a, b), {"depth": 0}, ValueError, "depth 0 of variant 'ring': an integer of 1 or more"),
        ((a, b), {"points": 9}, ValueError, "points 9: 7 or 27"),
        ((a, b), {"fill": "one"}, ValueError, "fill 'one'"),
        ((a, b), {"variant": "fast"}, KeyError, "has no variant 'fast'"),
        ((a, b), {"variant": "tma", "stages": 2}, TypeError, "'tma' has no option 'stages'"),
        (
            (odd, odd.copy()),
            {"variant": "ring"},
            ValueError,
            r"source has strides .*pitched_copy, or take variant='plain'",
        ),
        ((a, b), {"tile": (3, 64), "rows": 2}, ValueError, "divide among whole warps"),
        ((a, b), {"tile": (16, 256)}, ValueError, "18 × 264; the copy engine's boxes end at 256"),
    ):
        with pytest.raises(error, match=message):
            stencil3d.stencil3d(*arguments, **options)
    tall = np.lib.stride_tricks.as_strided(a, (1, 1 << 21, 4), (16, 0, 4))
    with pytest.raises(ValueError, match="the grid's y and z end at 65535: take larger tiles"), launch.recording():
        stencil3d.PROBLEM.variant("plain").bind({"source": tall, "out": tall})()


@pytest.mark.parametrize("cluster", [2, 8])
def test_multicast_in_clusters(cluster, rng, seed):
    shape = tuple(int(n) for n in rng.integers((1, 1, 1), (12, 100, 300)))
    options = {"multicast": {"cluster": cluster, "rows": 16, "stages": 3}}
    case = Case(shape, "float32", tuned=options)
    wanted = [multicast.PROBLEM.variant("multicast")]
    (record,) = suite.run_case(multicast.PROBLEM, case, wanted, "sim", seed=seed, schedules=3)
    assert record.ok and not record.hazards, record.reason


def test_what_lands_is_the_same_in_a_cluster(seed):
    landed = {}
    for cluster in (1, 8):
        name = "multicast" if cluster > 1 else "tma"
        case = Case((8, 64, 512), "float32", tuned={"multicast": {"cluster": cluster}})
        (record,) = suite.run_case(multicast.PROBLEM, case, [multicast.PROBLEM.variant(name)], "sim", seed=seed)
        landed[cluster] = record.bytes_moved["tma_load"]
    weights = 8 * 64 * 4 * (512 // 256)
    assert landed == dict.fromkeys((1, 8), 8 * 64 * 512 * 4 + weights)


@pytest.mark.parametrize("variant", [variant.name for variant in multicast.PROBLEM.variants])
def test_weighted_sums(variant, rng, in_simulator):
    x, w = (pitched_copy(rng.standard_normal(shape, np.float32)) for shape in ((37, 13), (5, 37)))
    wide = np.full((5, 26), 7, np.float32)
    multicast.weighted_sums(x, w, wide[:, ::2], variant=variant)
    np.testing.assert_allclose(wide[:, ::2], w.astype(np.float64) @ x, rtol=0, atol=1e-4)
    assert (wide[:, 1::2] == 7).all()
    multicast.weighted_sums(x[:, :0], w, wide[:, :0], variant=variant)
    for given, options, error, message in (
        ((x, w[:, :36], wide[:, :13]), {}, ValueError, r"w is \(5, 36\) and y \(5, 13\); for x of \(37, 13\)"),
        ((x, w, wide[:4, :13]), {}, ValueError, r"y \(4, 13\)"),
        ((x.astype(np.float64), w, wide[:, :13]), {}, ValueError, "x is float64"),
        ((x[:0], w[:, :0], wide[:, :13]), {}, ValueError, "nothing to sum"),
        ((x, [w], wide[:, :13]), {}, TypeError, "w is a list"),
        ((x, w, wide[:, :13]), {"cluster": 0}, (TypeError, ValueError), "cluster"),
    ):
        with pytest.raises(error, match=message):
            multicast.weighted_sums(*given, variant=variant, **options)


def test_multicast_names_wrong_options():
    arrays = multicast.PROBLEM.inputs(Case((4, 32, 256), "float32"), np.random.default_rng(0))
    with pytest.raises(ValueError, match="do not divide among the 8 blocks"):
        multicast.PROBLEM.variant("multicast").bind(arrays, rows=12, cluster=8)
    with pytest.raises(ValueError, match="a multiple of 4 rows"):
        multicast.PROBLEM.variant("tma").bind(arrays, rows=6)


@pytest.mark.gpu
def test_more_points_than_32_bits_count(rng):
    """Just above 2^31 points, all zero but in the last planes; those alone come back."""
    source = np.zeros((513, 2048, 2052), np.float32)
    source[-4:] = rng.standard_normal((4, 2048, 2052), np.float32)
    grid, out = DeviceArray(source), DeviceArray(np.zeros_like(source))
    with use_backend("gpu"):
        stencil3d.stencil3d(grid, out)
    driver.synchronize()
    plane = source[0].nbytes
    raw = driver.copy_to_host(out.pointer + (source.shape[0] - 3) * plane, 3 * plane)
    expected = stencil3d.reference(source[-4:], 7)[1:]
    np.testing.assert_allclose(raw.view(np.float32).reshape(3, 2048, 2052), expected, rtol=0, atol=1e-4)


def test_defaults_go_by_the_layout(rng, in_simulator, chosen):
    grid = rng.standard_normal((5, 7, 24), np.float32)
    exact = np.empty(grid.shape, np.float32)
    stencil3d.stencil3d(grid, exact)
    for source in (grid[:, :, 1:], grid[:, ::-1, 1:23], np.broadcast_to(grid[:1], grid.shape), grid.transpose(2, 1, 0)):
        out, same = np.full(source.shape, np.nan, np.float32), np.empty(source.shape, np.float32)
        stencil3d.stencil3d(source, out)
        stencil3d.stencil3d(pitched_copy(source), same, variant="plain")
        np.testing.assert_allclose(out, same, rtol=0, atol=1e-5)
    x, w = rng.standard_normal((9, 13), np.float32), rng.standard_normal((3, 9), np.float32)
    y = np.full((3, 13), np.nan, np.float32)
    multicast.weighted_sums(x, w, y)
    np.testing.assert_allclose(y, w.astype(np.float64) @ x, rtol=0, atol=1e-4)
    assert chosen == ["ring", *["plain"] * 9]
    multicast.weighted_sums(pitched_copy(x), pitched_copy(w), y)
    assert chosen[-1] == "multicast"

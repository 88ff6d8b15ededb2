"""The ladder's steps, beyond what all problems are tested for: types, both layouts of B, edges, long rings, errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_tma import pitched_copy, sim
from numba_tma.device_array import DeviceArray
from numba_tma.kernels.gemm import binding, ladder, peers, warp_mma
from numba_tma.kernels.gemm.ladder import gemm, reference
from numba_tma.kernels.gemm.operands import operands
from numba_tma.launch import recording, use_backend
from numba_tma.machine_code import main_loop

pytestmark = pytest.mark.filterwarnings("error::numba_tma.launch.HazardWarning")

FIRST = ("naive", "tiled", "mma_cp_async", "mma_tma")
WARPGROUPS = ("wgmma", "ring", "warpgroups", "persistent", "multicast", "store")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": BFLOAT16, "float32": np.dtype(np.float32)}


def integers(rng, shape, dtype):
    """Small ones: float32 holds sums of hundreds of their products exactly, so C is right to the last bit or wrong."""
    return rng.integers(-4, 5, shape).astype(NUMPY[dtype])


def problem(rng, m, n, k, dtype, out_dtype, b_major):
    """A, B, C full of NaN, and what C should become."""
    a, b = integers(rng, (m, k), dtype), integers(rng, (n, k) if b_major == "k" else (k, n), dtype)
    return a, b, np.full((m, n), np.nan, NUMPY[out_dtype]), reference(a, b, b_major=b_major).astype(NUMPY[out_dtype])


@pytest.mark.parametrize("step", FIRST)
def test_every_bit_at_random_sizes(step, rng, seed):
    """Whole pieces of 16 bytes along K and not, both layouts of B, each time with copies and warps in another order."""
    for schedule in rng.choice(sim.schedules(2, seed), 3, replace=False):
        m, n, k = (int(extent) for extent in rng.integers(1, 151, 3))
        with use_backend("sim", **schedule):
            a, b, c, expected = problem(rng, m, n, k // 8 * 8 + 8, "float16", "float16", "k")
            gemm(pitched_copy(a), pitched_copy(b), c, variant=step)
            np.testing.assert_array_equal(c, expected, err_msg=f"{a.shape} by {b.shape}")
            a, b, c, expected = problem(rng, m, n, k, "bfloat16", "float32", "n")
            gemm(pitched_copy(a), pitched_copy(b), c, variant=step, b_major="n")
            np.testing.assert_array_equal(c, expected, err_msg=f"{a.shape} by {b.shape}")


@pytest.mark.parametrize("step", WARPGROUPS)
def test_every_bit_after_many_turns_of_the_ring(step, rng, seed, monkeypatch):
    """B by its columns, two stages for up to ten K blocks, and two SMs, so that blocks that stay have several tiles."""
    monkeypatch.setattr(binding, "multiprocessors", lambda: 2)
    for schedule in rng.choice(sim.schedules(2, seed), 3, replace=False):
        m, n, k = (int(extent) for extent in (rng.integers(1, 400), 4 * rng.integers(1, 70), rng.integers(1, 650)))
        a, b, c, expected = problem(rng, m, n, k, "bfloat16", "float32", "n")
        with use_backend("sim", **schedule):
            gemm(pitched_copy(a), pitched_copy(b), c, variant=step, b_major="n", columns=128, stages=2)
        np.testing.assert_array_equal(c, expected, err_msg=f"{a.shape} by {b.shape}, {schedule}")


@pytest.mark.parametrize("step", ["tiled", "mma_cp_async"])
@pytest.mark.parametrize("schedule", sim.first_schedules(3), ids=str)
def test_rows_at_any_address(step, schedule, rng):
    """Neither the rows of A and B nor those of C begin at multiples of anything but their elements."""
    a, b, c, expected = problem(rng, 71, 67, 133, "float16", "float16", "k")
    assert warp_mma.copies_for(operands({"a": a, "b": b, "c": c})) == "elements"
    with use_backend("sim", **schedule):
        gemm(a, b, c, variant=step)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize(
    ("step", "activation", "options"),
    [
        ("tiled", "gelu", {}),
        ("mma_tma", "gelu", {}),
        ("ring", "silu", {"columns": 64}),
        ("store", "relu", {"columns": 64}),
    ],
)
def test_bias_and_activation(step, activation, options, rng, in_simulator):
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((40, 72), (56, 72)))
    c, bias = np.full((40, 56), np.nan, np.float16), rng.standard_normal(56).astype(np.float32)
    gemm(pitched_copy(a), pitched_copy(b), c, variant=step, bias=bias, activation=activation, **options)
    np.testing.assert_allclose(c, reference(a, b, bias, activation=activation), rtol=2**-10, atol=1e-4)


def test_results_that_tma_cannot_write(rng, in_simulator):
    """It would write whole 16 bytes, and so beyond the rows of a C that is a part of something larger."""
    a, b, _, expected = problem(rng, 30, 43, 64, "float16", "float16", "k")
    for room in (np.full((30, 48), 7, np.float16), np.full((30, 45), 7, np.float16)):
        gemm(a, b, room[:, :43], variant="store", columns=64)
        np.testing.assert_array_equal(room[:, :43], expected)
        assert (room[:, 43:] == 7).all()


@pytest.mark.parametrize(
    ("step", "arch", "dtype", "b_major", "finish"),
    [
        ("mma_cp_async", "sm_80", "float16", "k", False),
        ("mma_cp_async", "sm_90a", "bfloat16", "n", False),
        ("mma_tma", "sm_90a", "bfloat16", "n", False),
        ("mma_tma", "sm_90a", "float16", "k", True),
    ],
)
def test_the_loop_multiplies_and_does_little_else(step, arch, dtype, b_major, finish, rng):
    k = 64 if b_major == "k" else 63
    a, b, c, _ = problem(rng, 64, 64, k, dtype, dtype if b_major == "k" else "float32", b_major)
    options = {"bias": np.zeros(64, np.float32), "activation": "gelu"} if finish else {}
    with recording(arch) as recorded:
        gemm(pitched_copy(a), pitched_copy(b), c, variant=step, b_major=b_major, **options)
    code = recorded.launches[0].compiled
    resources = code.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    loop = main_loop(code.sass)
    kind = "HMMA.16816.F32.BF16" if dtype == "bfloat16" else "HMMA.16816.F32"
    # 64 x 64 of C and 64 of K: 4 x 8 instructions for each of four steps; a fragment load feeds four of them.
    assert loop.count(kind) == 128
    assert sum(mnemonic.startswith("LDSM.16.M") for mnemonic in loop) == 32
    assert loop.count("LDSM.16.MT88.4") == (16 if b_major == "n" else 0)
    assert len(loop) < 400
    assert not {"LDL", "STL", "LDG.E"} & set(loop)


def test_what_does_not_fit_is_named():
    a, b, c = np.zeros((16, 32), np.float16), np.zeros((24, 32), np.float16), np.zeros((16, 24), np.float16)
    for arguments, options, error, message in (
        ((a, b, c), {"variant": "fast"}, KeyError, "gemm has no variant 'fast'"),
        ((a, b, c), {"variant": "tiled", "stages": 2}, TypeError, "'tiled' has no option 'stages'"),
        ((a, b, c), {"b_major": "m"}, ValueError, r"'k' for B of shape \(N, K\)"),
        ((a, b, c), {"b_major": "n"}, ValueError, r"must be \(M, K\), \(K, N\) and \(M, N\)"),
        ((a, b, c), {"activation": "tanh"}, ValueError, "choose one of 'none', 'relu', 'gelu', 'silu'"),
        ((a, b, c), {"variant": "mma_tma", "tile": (64, 64)}, ValueError, "2, 4, 6 or 8 such warps"),
        ((a, b, c), {"variant": "mma_cp_async", "stages": 1}, ValueError, "take 2 or more"),
        ((a, b, c), {"variant": "ring", "stages": 1}, ValueError, "take 2 or more"),
        ((a, b, c), {"variant": "wgmma", "columns": 192}, ValueError, "columns 192: a multiple of 16, up to 128"),
        ((a, b, c), {"variant": "store", "columns": 240}, ValueError, "columns 240: a multiple of 32, up to 256"),
        ((a, b, c), {"variant": "persistent", "cluster": 2}, TypeError, "it has columns, stages, band, stream"),
        ((a, b, c), {"configuration": "fast"}, ValueError, "configuration 'fast'; expected 'autotune'"),
        ((a, b.astype(BFLOAT16), c), {}, ValueError, "both float16 or both bfloat16 expected"),
        ((a, b, c.astype(np.int32)), {}, ValueError, "float16, bfloat16 or float32 expected"),
        ((a, b, c), {"bias": np.zeros(16, np.float32)}, ValueError, r"float32 or float16 of shape \(24,\) expected"),
        ((a[:0], b, c[:0]), {}, ValueError, "nothing to multiply"),
        ((a, b, c[0]), {}, ValueError, "2 dimensions expected"),
        ((a, np.asfortranarray(b), c), {}, ValueError, "rows must be contiguous"),
        (([1.0], b, c), {}, TypeError, "a is a list; an array is expected"),
    ):
        with pytest.raises(error, match=message):
            gemm(*arguments, **options)


def test_no_peer_without_a_gpu_or_with_more_to_do():
    a = np.zeros((16, 16), np.float16)
    assert peers.cublas({"a": a, "b": a, "c": a}, activation="relu") is None


@pytest.mark.gpu
@pytest.mark.parametrize("step", [*FIRST, *WARPGROUPS, "tuned"])
def test_every_bit_on_the_gpu(step, rng):
    for b_major, dtype, out_dtype in (("k", "float16", "float16"), ("n", "bfloat16", "float32")):
        m, n, k = (int(extent) for extent in rng.integers(1, 2000, 3))
        a, b, c, expected = problem(rng, m, n, k, dtype, out_dtype, b_major)
        device = DeviceArray(c)
        gemm(DeviceArray(pitched_copy(a)), DeviceArray(pitched_copy(b)), device, variant=step, b_major=b_major)
        np.testing.assert_array_equal(device.to_host(), expected)


@pytest.mark.gpu
def test_cublas_agrees(rng):
    pytest.importorskip("torch")
    for b_major, dtype in (("k", "float16"), ("n", "bfloat16")):
        a, b, c, expected = problem(rng, 200, 333, 77, dtype, dtype, b_major)
        given = {"a": DeviceArray(pitched_copy(a)), "b": DeviceArray(pitched_copy(b)), "c": DeviceArray(c)}
        peers.cublas(given, b_major=b_major)()
        np.testing.assert_array_equal(given["c"].to_host(), expected)


def test_costs():
    case = ladder.PROBLEM.cases[("default", "gpu")][0]
    assert ladder.PROBLEM.flops(case) == 2 * 4096**3
    assert ladder.PROBLEM.bytes_moved(case) == 3 * 4096 * 4096 * 2

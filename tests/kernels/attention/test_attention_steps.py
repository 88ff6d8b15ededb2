"""The ladder's first steps, beyond what all problems are tested for: masks, grouped heads, views, edges, errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from numba_tma import sim
from numba_tma.device_array import DeviceArray
from numba_tma.kernels.attention import peers
from numba_tma.kernels.attention.ladder import PROBLEM, attend, reference
from numba_tma.kernels.attention.warp_mma import Tiling, tiling_for
from numba_tma.launch import recording, use_backend
from numba_tma.machine_code import main_loop

pytestmark = pytest.mark.filterwarnings("error::numba_tma.launch.HazardWarning")

STEPS = ("three_kernels", "online", "mma_cp_async", "mma_tma")
# Small tiles for small sizes: several blocks of keys, of which some need no mask, and more of them than stages.
SMALL = {name: {"tile": (32, 16), "warps": 2} for name in ("mma_cp_async", "mma_tma")}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROUNDING = {np.dtype(np.float16): 2.0**-11, BFLOAT16: 2.0**-8}


class Made(NamedTuple):
    """Arrays of a call, outputs full of NaN."""

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any


def made(rng, batch, sq, skv, heads, kv_heads, head_dim, dtype=np.float16, size=1.0):
    """Keys and values are views of one array, as a projection of both gives them."""
    q = (size * rng.standard_normal((batch, sq, heads, head_dim))).astype(dtype)
    kv = rng.standard_normal((batch, skv, 2, kv_heads, head_dim)).astype(dtype)
    lse = np.full((batch, heads, sq), np.nan, np.float32)
    return Made(q, kv[:, :, 0], kv[:, :, 1], np.full(q.shape, np.nan, dtype), lse)


def check(given, **asked):
    """Each weight and each result is rounded once, by half a unit in its last place; scores are sums in float32."""
    o, lse = reference(given.q, given.k, given.v, **asked)
    bound = 2 * ROUNDING[given.q.dtype] * float(np.abs(given.v.astype(np.float64)).max())
    what = f"q {given.q.shape}, k {given.k.shape}, {asked}"
    np.testing.assert_allclose(given.o.astype(np.float64), o, rtol=0, atol=bound, err_msg=what)
    q, k = (np.linalg.norm(x.astype(np.float64), axis=-1).max() for x in (given.q, given.k))
    largest_sum = asked.get("scale", 1 / np.sqrt(given.q.shape[-1])) * q * k
    np.testing.assert_allclose(given.lse, lse, rtol=1e-6, atol=4e-6 + 2.0**-21 * largest_sum, err_msg=what)
    assert not given.o[np.isneginf(lse).swapaxes(1, 2)].any(), what


def random_sizes(rng, most):
    """B, Sq, Skv, Hq, Hkv."""
    kv_heads, group = (int(n) for n in rng.integers(1, 3, 2))
    return int(rng.integers(1, 3)), *(int(n) for n in rng.integers(1, most, 2)), kv_heads * group, kv_heads


@pytest.mark.parametrize("step", STEPS)
def test_causal_at_random_sizes(step, rng, seed):
    """More queries than keys and fewer, in every order of copies and warps; scores far beyond exp's range."""
    for schedule in rng.choice(sim.schedules(2, seed), 2, replace=False):
        given = made(rng, *random_sizes(rng, 120), 64, size=30)
        with use_backend("sim", **schedule):
            attend(*given, variant=step, causal=True, **SMALL.get(step, {}))
        check(given, causal=True)


@pytest.mark.parametrize("step", STEPS)
def test_windows_soft_cap_and_scale_at_random_sizes(step, rng, seed):
    """Head dimensions that fill no box of 64 columns, or no 16 bytes where plain Numba copies."""
    head_dim = 40 if step in SMALL else 23
    for schedule in rng.choice(sim.schedules(2, seed), 2, replace=False):
        given = made(rng, *random_sizes(rng, 120), head_dim, BFLOAT16)
        asked = {"window": tuple(int(n) for n in rng.integers(0, 50, 2)), "soft_cap": 2.5, "scale": 0.4}
        with use_backend("sim", **schedule):
            attend(*given, variant=step, **asked, **SMALL.get(step, {}))
        check(given, **asked)


@pytest.mark.parametrize(
    ("step", "head_dim", "options"),
    [
        ("mma_cp_async", 96, {"tile": (64, 32), "warps": 2, "stages": 3}),
        ("mma_tma", 256, {"tile": (32, 32), "warps": 2, "stages": 4}),
    ],
)
def test_other_tilings(step, head_dim, options, rng, in_simulator):
    """32 rows a warp, rings of other lengths, Q's fragments read again for each block of keys."""
    given = made(rng, 1, 70, 90, 1, 1, head_dim)
    attend(*given, variant=step, causal=True, **options)
    check(given, causal=True)


CODE = {
    # step, architecture, head_dim, type, options, instructions in the loop over keys
    "online": ("online", "sm_80", 128, np.float16, {"causal": True}, {"LDS.128": 14}),
    "cp_async 128": ("mma_cp_async", "sm_80", 128, np.float16, {"causal": True}, {"HMMA": 256, "LDSM": 80}),
    "cp_async 64": ("mma_cp_async", "sm_90a", 64, BFLOAT16, {"window": (9, 9), "soft_cap": 5.0}, {"HMMA": 64}),
    "tma 128": ("mma_tma", "sm_90a", 128, BFLOAT16, {}, {"HMMA": 256, "LDSM": 80, "UTMALDG": 4, "MUFU.EX2": 68}),
}


@pytest.mark.parametrize("name", CODE)
def test_the_code_is_what_it_should_be(name, rng):
    step, arch, head_dim, dtype, asked, counts = CODE[name]
    with recording(arch) as recorded:
        attend(*made(rng, 1, 64, 64, 1, 1, head_dim, dtype), variant=step, **asked)
    code = recorded.launches[0].compiled
    resources = code.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.local_bytes == 0
    loop = main_loop(code.sass)
    for mnemonic, count in counts.items():
        assert sum(found.startswith(mnemonic) for found in loop) == count, mnemonic
    assert not {"LDL", "STL"} & set(loop)


def test_what_does_not_fit_is_named(rng):
    given = made(rng, 1, 4, 6, 4, 2, 24)
    q, k, v, o, lse = given
    odd = made(rng, 1, 4, 6, 1, 1, 20)
    shifted = np.zeros(q.size + 1, np.float16)[1:].reshape(q.shape)
    for arrays, options, error, message in (
        (given, {"variant": "fast"}, KeyError, "attention has no variant 'fast'"),
        (given, {"variant": "online", "stages": 2}, TypeError, "'online' has no option 'stages'"),
        (given, {"window": (1, -2)}, ValueError, "-1 for all"),
        (given, {"scale": 0.0}, ValueError, "scale 0.0: a positive number"),
        (given, {"soft_cap": -1.0}, ValueError, "soft_cap -1.0"),
        (given, {"tile": (48, 64)}, ValueError, "48 rows for 3 warps: each has 16 or 32"),
        (given, {"tile": (64, 72)}, ValueError, "72 keys: a multiple of 16"),
        (given, {"stages": 1}, ValueError, "take 2 or more"),
        ((q, k[:, :, :1], v, o, lse), {}, ValueError, r"they must be \(B, Sq, Hq, D\)"),
        ((q, k, v, o, lse[:, :1]), {}, ValueError, r"float32 of shape \(B, Hq, Sq\), \(1, 4, 4\)"),
        ((q[:, :, :3], k, v, o[:, :, :3], lse[:, :3]), {}, ValueError, "3 heads of queries, 2 of keys"),
        ((q, k, v.astype(BFLOAT16), o, lse), {}, ValueError, "all float16 or all bfloat16"),
        ((q[:, :0], k, v, o[:, :0], lse[:, :, :0]), {}, ValueError, "nothing to attend to"),
        ((q[0], k, v, o, lse), {}, ValueError, "4 dimensions expected"),
        ((q, np.asfortranarray(k), v, o, lse), {}, ValueError, "last dimension must be contiguous"),
        (([1.0], k, v, o, lse), {}, TypeError, "q is a list; an array is expected"),
        (odd, {}, ValueError, "head_dim 20: rows are moved in pieces of 16 bytes"),
        (
            (shifted, k, v, o, lse),
            {},
            ValueError,
            "q begins at the address .* rows must begin at multiples of 16 bytes",
        ),
    ):
        with pytest.raises(error, match=message):
            attend(*arrays, **options)
    wide = made(rng, 1, 4, 6, 1, 1, 264)
    with pytest.raises(ValueError, match="head_dim 264: O's rows are kept in registers"):
        attend(*wide, variant="online")


def test_a_reference_worked_out_by_hand():
    q, k = np.array([0.0, 2.0]).reshape(1, 2, 1, 1), np.array([1.0, 3.0]).reshape(1, 2, 1, 1)
    v = np.array([10.0, 20.0]).reshape(1, 2, 1, 1)
    o, lse = reference(q, k, v, scale=np.log(2))  # weights 1 : 1, and 2^2 : 2^6
    np.testing.assert_allclose(o.ravel(), [15, (4 * 10 + 64 * 20) / 68])
    np.testing.assert_allclose(np.exp(lse).ravel(), [2, 68])
    o, lse = reference(q, k, v, scale=np.log(2), causal=True)
    np.testing.assert_allclose(o.ravel(), [10, (4 * 10 + 64 * 20) / 68])
    o, lse = reference(q[:, :, [0, 0]], k[:, :1], v[:, :1], causal=True)
    np.testing.assert_array_equal(o, np.array([[0, 0], [10, 10]])[None, :, :, None])
    np.testing.assert_array_equal(lse, [[[-np.inf, 2], [-np.inf, 2]]])
    _, lse = reference(q, k, v, scale=1e6, soft_cap=3.0)
    np.testing.assert_allclose(lse.ravel(), [np.log(2), 3 + np.log(2)])


def test_tilings():
    assert tiling_for(64) == Tiling(64, 128, 64, 8, 2)
    assert tiling_for(128) == Tiling(128, 128, 64, 4, 2)
    assert tiling_for(256) == Tiling(256, 64, 64, 4, 2)
    assert tiling_for(128, (64, 32)).fragments == 1 and tiling_for(128).fragments == 2
    assert tiling_for(64).q_in_registers and not tiling_for(128).q_in_registers
    with pytest.raises(ValueError, match="head_dim 36: a multiple of 8"):
        Tiling(36, 64, 64, 4, 2)


def test_no_peer_without_a_gpu_or_with_what_it_cannot_do(rng):
    given = made(rng, 1, 8, 8, 1, 1, 64)._asdict()
    assert peers.flash_attention_2(given, window=(3, 3)) is None
    assert peers.flash_attention_2(given, soft_cap=2.0) is None


def test_costs():
    dense, causal = PROBLEM.cases[("default", "gpu")][1:3]
    assert dense.shape == causal.shape == (4, 4096, 4096, 16, 16, 128)
    assert PROBLEM.flops(dense) == 4 * 4 * 16 * 4096**2 * 128 == 2 * PROBLEM.flops(causal)
    assert PROBLEM.bytes_moved(dense) == 4 * (4 * 4 * 4096 * 16 * 128) // 2 + 4 * 4 * 16 * 4096


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_right_on_the_gpu(step, head_dim, rng):
    for dtype in (np.float16, BFLOAT16):
        for asked in ({}, {"causal": True}, {"window": (300, 20), "soft_cap": 20.0}):
            given = made(rng, *random_sizes(rng, 1500), head_dim, dtype)
            device = Made(*(DeviceArray(np.ascontiguousarray(array)) for array in given))
            attend(*device, variant=step, **asked)
            check(Made(*given[:3], device.o.to_host(), device.lse.to_host()), **asked)


@pytest.mark.gpu
def test_flash_attention_2_agrees(rng):
    torch = pytest.importorskip("torch")
    for causal in (False, True):
        given = made(rng, 2, 300, 300, 4, 2, 64)
        device = {name: DeviceArray(np.ascontiguousarray(x)) for name, x in given._asdict().items()}
        o, lse = peers.flash_attention_2(device, causal=causal)()[:2]
        torch.cuda.synchronize()
        found = Made(*given[:3], o.transpose(1, 2).cpu().numpy(), lse[..., :300].cpu().numpy())
        check(found, causal=causal)

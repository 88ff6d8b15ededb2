"""Attention in 8-bit floats: what is quantised bit for bit, what is attended against float64, hazards, machine code."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from numba_tma import use_backend
from numba_tma.device_array import DeviceArray
from numba_tma.kernels.attention import fp8
from numba_tma.kernels.attention.fp8_quantise import KEY_ORDER, LARGEST
from numba_tma.kernels.attention.ladder import reference
from numba_tma.launch import recording

pytestmark = pytest.mark.filterwarnings("error::numba_tma.launch.HazardWarning")

BFLOAT16, FLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(ml_dtypes.float8_e4m3fn)

# dtype, extents (B, Sq, Skv, Hq, Hkv, D), what is asked, the kernel's options.
CASES = {
    "causal": (BFLOAT16, (1, 150, 270, 2, 1, 128), {"causal": True}, {}),
    "in turns": (FLOAT16, (1, 130, 300, 1, 1, 128), {}, {"ping_pong": True}),
    "one accumulator": (BFLOAT16, (1, 70, 400, 1, 1, 128), {}, {"promote": False, "keys": 192, "stages": 2}),
    "a window, D 64": (FLOAT16, (2, 130, 200, 2, 2, 64), {"window": (40, 10)}, {"keys": 96, "consumers": 3}),
    "more queries than keys, D 256": (BFLOAT16, (1, 200, 90, 1, 1, 256), {"causal": True}, {}),
}


def inputs(rng, dtype, extents):
    batch, sq, skv, heads, kv_heads, head_dim = extents
    shapes = (batch, sq, heads), (batch, skv, kv_heads), (batch, skv, kv_heads)
    return tuple(rng.standard_normal((*shape, head_dim)).astype(dtype) for shape in shapes)


def quantised(q, k, v):
    made = fp8.Quantised.empty(q, k)
    for array in made:
        array.view(np.uint8)[...] = 0x7F  # a NaN of e4m3
    with use_backend("sim"):
        fp8.bind_quantise(q, k, v, made)()
    return made


def by_rows(scales, rows):
    """A block's scale for each of its rows: (B, rows, H, 1)."""
    return np.repeat(scales, 64, axis=2)[:, :, :rows].swapaxes(1, 2)[..., None]


def of_values(v8, rows):
    """Values as they came, (B, rows, H, D), from their chunks."""
    batch, heads, chunks, parts, _ = v8.shape
    keys = np.empty((batch, heads, chunks, 16 * parts, 16), v8.dtype)
    keys[..., list(KEY_ORDER)] = v8.reshape(keys.shape)
    return keys.transpose(0, 2, 4, 1, 3).reshape(batch, 16 * chunks, heads, -1)[:, :rows]


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_quantised_bit_for_bit(rng, dtype, head_dim):
    q, k, v = inputs(rng, dtype, (2, 90, 150, 2, 1, head_dim))
    v[:, 64:128] = 0  # a block that has no largest magnitude
    made = quantised(q, k, v)
    for x, x8, scales in ((q, made.q, made.q_scale), (k, made.k, made.k_scale), (v, made.v, made.v_scale)):
        rows = x.shape[1]
        x8 = of_values(x8, rows) if x is v else x8
        scale = by_rows(scales, rows)
        x = x.astype(np.float32)
        for start in range(0, rows, 64):
            block = np.s_[:, start : start + 64]
            largest = np.abs(x[block]).max(axis=(1, 3))
            np.testing.assert_allclose(scale[block][:, 0, :, 0], np.maximum(largest / LARGEST, 2**-64), rtol=1e-6)
        expected = np.clip(x * (np.float32(1) / scale), -LARGEST, LARGEST).astype(FLOAT8)
        np.testing.assert_array_equal(x8.view(np.uint8), expected.view(np.uint8))
    padding = made.v.reshape(2, 1, -1, head_dim, 16)[:, :, 150 // 16, :, [KEY_ORDER.index(key) for key in range(6, 16)]]
    assert not padding.view(np.uint8).any()


def attended_exactly(made, dtype, asked):
    """What comes of the quantised numbers in float64."""
    q, k = (
        x8.astype(np.float64) * by_rows(s, x8.shape[1]) for x8, s in ((made.q, made.q_scale), (made.k, made.k_scale))
    )
    v = of_values(made.v, k.shape[1]).astype(np.float64) * by_rows(made.v_scale, k.shape[1])
    return reference(q, k, v, **asked)


def attend(made, q, asked, options):
    o = np.full(q.shape, np.nan, q.dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, np.float32)
    fp8.bind_attend(made, o, lse, configuration=options, **asked)()
    return o.astype(np.float64), lse


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("schedule", [{}, {"policy": "late", "warp_order": "random", "seed": 3}], ids=["fifo", "late"])
def test_numbers(rng, name, schedule):
    dtype, extents, asked, options = CASES[name]
    q, k, v = inputs(rng, dtype, extents)
    made = quantised(q, k, v)
    with use_backend("sim", **schedule):
        o, lse = attend(made, q, asked, options)
    exact, exact_lse = attended_exactly(made, dtype, asked)
    # A sum keeps 13 bits of a score of up to 448 x 448 in units of its scale, a weight three behind the point.
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=0.02)
    assert np.sqrt(np.mean((o - exact) ** 2)) < 0.04 * np.sqrt(np.mean(exact**2))
    assert not o[np.isneginf(exact_lse).swapaxes(1, 2)].any()
    o_of_inputs, _ = reference(q, k, v, **asked)
    assert np.sqrt(np.mean((o - o_of_inputs) ** 2)) < 0.08 * np.sqrt(np.mean(o_of_inputs**2))


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_takes_many_tiles(rng, monkeypatch, causal):
    """More than are described at once; the counter is zero again afterwards, as the second launch shows."""
    monkeypatch.setattr(fp8, "multiprocessors", lambda: 1)
    q, k, v = inputs(rng, BFLOAT16, (1, 150, 200, 3, 1, 128))
    made = quantised(q, k, v)
    o, lse = np.full(q.shape, np.nan, q.dtype), np.full((1, 3, 150), np.nan, np.float32)
    with use_backend("sim", policy="late", warp_order="random", seed=5):
        launch = fp8.bind_attend(made, o, lse, causal=causal)
        launch()
        first = o.copy()
        o[...] = np.nan
        launch()
    np.testing.assert_array_equal(o, first)
    exact, exact_lse = attended_exactly(made, BFLOAT16, {"causal": causal})
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=0.02)
    assert np.sqrt(np.mean((o.astype(np.float64) - exact) ** 2)) < 0.04 * np.sqrt(np.mean(exact**2))


def test_scales_of_blocks_far_apart(rng):
    """Blocks of keys a million times smaller or larger than others count as they should."""
    q, k, v = inputs(rng, BFLOAT16, (1, 64, 320, 1, 1, 64))
    sizes = np.array([1, 1e-6, 1e3, 0, 1], np.float32)
    v = (v.astype(np.float32) * np.repeat(sizes, 64)[:, None, None]).astype(BFLOAT16)
    k[:, 64:128] = (k[:, 64:128].astype(np.float32) / 32).astype(BFLOAT16)
    made = quantised(q, k, v)
    seen = {"window": (80, 80)}
    with use_backend("sim"):
        o, lse = attend(made, q, seen, {})
        all_o, _ = attend(made, q, {}, {})
    for got, asked in ((o, seen), (all_o, {})):
        exact, _ = attended_exactly(made, BFLOAT16, asked)
        error = np.sqrt(np.mean((got - exact) ** 2, axis=(0, 2, 3)))
        assert (error < 0.1 * np.sqrt(np.mean(exact**2, axis=(0, 2, 3)))).all()


def test_sums_keep_values_with_a_mean(rng):
    """A sum that wgmma cuts off after 13 bits loses the smaller terms; one that starts anew for each block does not."""
    q, k, v = inputs(rng, BFLOAT16, (1, 64, 4096, 1, 1, 64))
    v = (v.astype(np.float32) * 0.25 + 1).astype(BFLOAT16)
    made = quantised(q, k, v)
    with use_backend("sim"):
        o, _ = attend(made, q, {}, {})
        cut, _ = attend(made, q, {}, {"promote": False})
    exact, _ = attended_exactly(made, BFLOAT16, {})
    assert abs(np.mean(o - exact)) < 0.004 < 0.02 < abs(np.mean(cut - exact))


def test_attention_fp8(rng):
    q, k, v = inputs(rng, BFLOAT16, (1, 70, 90, 2, 1, 64))
    with use_backend("sim"):
        o, lse = fp8.attention_fp8(q, k, v, causal=True, scale=0.2, return_lse=True)
    exact, exact_lse = reference(q, k, v, causal=True, scale=0.2)
    assert o.dtype == BFLOAT16 and o.shape == q.shape
    np.testing.assert_allclose(lse, exact_lse, rtol=0, atol=0.5)
    error = o.astype(np.float64) - exact
    assert np.sqrt(np.mean(error**2)) < 0.1 * np.sqrt(np.mean(exact**2))


def test_powers_of_two_change_nothing_but_exponents(rng):
    """Far beyond what e4m3 itself has: 2^50 each way."""
    q, k, v = inputs(rng, BFLOAT16, (1, 10, 70, 1, 1, 64))
    large, small = BFLOAT16.type(2.0**50), BFLOAT16.type(2.0**-50)
    with use_backend("sim"):
        o, lse = fp8.attention_fp8(q, k, v, return_lse=True)
        for of_q, of_k in ((large, small), (small, large)):
            moved, same_lse = fp8.attention_fp8(q * of_q, k * of_k, v, return_lse=True)
            np.testing.assert_array_equal(moved.view(np.uint16), o.view(np.uint16))
            np.testing.assert_array_equal(same_lse, lse)
        for of_v in (large, small):
            moved, same_lse = fp8.attention_fp8(q, k, v * of_v, return_lse=True)
            error = (moved / of_v).astype(np.float64) - o.astype(np.float64)
            assert np.sqrt(np.mean(error**2)) < 0.01 * np.sqrt(np.mean(o.astype(np.float64) ** 2))
            np.testing.assert_allclose(same_lse, lse, rtol=0, atol=1e-3)


def test_an_infinity_takes_its_block_along(rng):
    q, k, v = inputs(rng, BFLOAT16, (1, 130, 90, 1, 1, 64))
    q[0, 70, 0, 5] = np.inf
    q.flags.writeable = False  # it is only read
    with use_backend("sim"):
        o, lse = fp8.attention_fp8(q, k, v, return_lse=True)
    assert np.flatnonzero(np.isnan(lse[0, 0])).tolist() == list(range(64, 128))
    assert np.flatnonzero(np.isnan(o[0, :, 0].astype(np.float32)).any(axis=1)).tolist() == list(range(64, 128))


def test_a_row_of_nan_is_not_taken_for_one_that_saw_no_key(rng):
    q, k, v = inputs(rng, BFLOAT16, (1, 20, 20, 1, 1, 64))
    q[0, 3] = np.nan
    with use_backend("sim"):
        o, lse = fp8.attention_fp8(q, k, v, return_lse=True)
    assert np.flatnonzero(np.isnan(lse[0, 0])).tolist() == [3]
    assert np.flatnonzero(np.isnan(o[0, :, 0].astype(np.float32)).any(axis=1)).tolist() == [3]


@pytest.mark.parametrize("head_dim, causal", [(128, True), (64, False), (256, True)])
def test_machine_code(rng, head_dim, causal):
    q, k, v = inputs(rng, BFLOAT16, (1, 64, 64, 1, 1, head_dim))
    with recording() as recorded, use_backend("sim"):
        made = fp8.Quantised.empty(q, k)
        fp8.bind_quantise(q, k, v, made)()
        attend(made, q, {"causal": causal}, {})
    *quantisers, compiled = (launch.compiled for launch in recorded.launches)
    for found in (*quantisers, compiled):
        assert found.resources.spill_store_bytes == found.resources.stack_bytes == 0
    assert not [warning for warning in compiled.resources.warnings if "C75" in warning]
    opcodes = set(re.findall(r"\b(QGMMA|HGMMA|UTMALDG|UTMASTG|STSM|USETMAXREG|LDL|STL)\b", compiled.sass))
    assert opcodes == {"QGMMA", "UTMALDG", "UTMASTG", "STSM", "USETMAXREG"}


def test_refusals(rng):
    q, k, v = inputs(rng, BFLOAT16, (1, 64, 64, 2, 1, 64))
    with pytest.raises(ValueError, match="head_dim 96: .*64, 128, 256"):
        fp8.Quantised.empty(np.zeros((1, 64, 1, 96), BFLOAT16), k)
    made = fp8.Quantised.empty(q, k)
    lse = np.zeros((1, 2, 64), np.float32)
    with pytest.raises(ValueError, match=r"k_scale is float32 .*: float32 \(1, 1, 1\) expected"):
        fp8.bind_attend(made._replace(k_scale=made.q_scale), q, lse)
    with pytest.raises(ValueError, match="o is float32"):
        fp8.bind_attend(made, q.astype(np.float32), lse)
    for asked, error, message in (
        ({"window": (-5, 0)}, ValueError, "window"),
        ({"scale": "a"}, TypeError, "scale is 'a'; a number expected"),
        ({"scale": 0}, ValueError, "scale 0.0: a positive number"),
    ):
        with pytest.raises(error, match=message):
            fp8.attention_fp8(q, k, v, **asked)
    for change, message in (
        ({"keys": 24}, "24 keys.*: a multiple of 32 keys up to 256"),
        ({"keys": 512}, "512 keys.*: a multiple of 32 keys up to 256"),
        ({"stages": 1}, "1 stages.* 2 to 8 stages"),
        ({"consumers": 1}, "1 consumers.* 2 or 3 consumers"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8.bind_attend(made, q.copy(), lse, configuration=change)
    locked = lse.copy()
    locked.flags.writeable = False
    of_v = np.zeros((1, 1, 4, 8, 256), FLOAT8)[:, :, :, ::2]
    o = np.zeros_like(q)
    for given, into, of_rows, message in (
        (made, q, locked, "bind_attend: lse is read-only"),
        (made._replace(k=made.k[:, :, :0]), q, lse, "nothing to attend to"),
        (made._replace(v=of_v), q, lse, "v: strides .* contiguous"),
        (made._replace(q=o.view(FLOAT8).reshape(-1)[: o.size].reshape(o.shape)), o, lse, "o .* share memory"),
    ):
        with pytest.raises(ValueError, match=message):
            fp8.bind_attend(given, into, of_rows)
    for into, error, message in (
        (made._replace(q=made.k), ValueError, r"q is float8_e4m3fn \(1, 64, 1, 64\): float8_e4m3fn \(1, 64, 2, 64\)"),
        (made._replace(v=of_v), ValueError, "v: strides .* contiguous"),
        (tuple(made), TypeError, "a tuple; a Quantised expected"),
    ):
        with pytest.raises(error, match=message):
            fp8.bind_quantise(q, k, v, into)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_right_on_the_gpu(rng, name):
    """Launched twice: the counter of tiles is zero again after each."""
    dtype, extents, asked, options = CASES[name]
    q, k, v = inputs(rng, dtype, extents)
    q[0, -1, 0] = np.nan
    on_gpu = [DeviceArray(x) for x in (q, k, v)]
    made = fp8.Quantised.empty(*on_gpu[:2])
    o, lse = DeviceArray(q), DeviceArray(np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32))
    fp8.bind_quantise(*on_gpu, made)()
    launch = fp8.bind_attend(made, o, lse, configuration=options, **asked)
    here = fp8.Quantised(*(array.to_host() for array in made))
    exact, exact_lse = attended_exactly(here, dtype, asked)
    row = np.isnan(exact).any(axis=-1)
    assert row[0, -1, 0] and row.sum() == 1
    for _ in range(2):
        for array in (o, lse):
            array.poison()
        launch()
        found, found_lse = o.to_host().astype(np.float64), lse.to_host()
        np.testing.assert_allclose(found_lse, exact_lse, rtol=0, atol=0.02)
        np.testing.assert_array_equal(np.isnan(found).any(axis=-1), row)
        assert np.sqrt(np.nanmean((found - exact) ** 2)) < 0.04 * np.sqrt(np.nanmean(exact**2))

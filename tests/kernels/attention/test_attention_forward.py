"""`attention` and `attention_varlen`: random extents and masks, packed sequences, outputs, and what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from numba_tma import tracing, use_backend
from numba_tma.kernels.attention import forward
from numba_tma.kernels.attention.choice import Configuration, choose
from numba_tma.kernels.attention.forward import attention, attention_varlen, bind_attention
from numba_tma.kernels.attention.ladder import reference
from numba_tma.kernels.attention.masks import Band

pytestmark = pytest.mark.filterwarnings("error::numba_tma.launch.HazardWarning")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HALF_UNIT = {np.dtype(np.float16): 2.0**-11, BFLOAT16: 2.0**-8}
MASKS = {
    "all": {},
    "causal": {"causal": True},
    "left": {"window": "left"},
    "window": {"window": "both"},
}


def asked_for(mask, rng, longest):
    """What is asked of `attention`, with a window's sides drawn."""
    asked = dict(MASKS[mask])
    if "window" in asked:
        left, right = (int(n) for n in rng.integers(0, longest, 2))
        asked["window"] = (left, right if asked["window"] == "both" else -1)
    return asked


def heads_of(rng):
    """Heads of queries, and of keys and values."""
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 4]))
    return kv_heads * group, kv_heads


def limit(v, dtype):
    """Of O's deviation: its rounding, and that of each weight before it multiplies a value."""
    return 2 * HALF_UNIT[np.dtype(dtype)] * float(np.nanmax(np.abs(v.astype(np.float64))))


def drawn(rng, rows, heads, head_dim, dtype):
    return rng.standard_normal((*rows, heads, head_dim)).astype(dtype)


# ---------------------------------------------------------------------------------------------------- the simulator


def check_in_the_simulator(rng, head_dim, mask):
    batch, sq, skv = int(rng.integers(1, 3)), int(rng.integers(1, 200)), int(rng.integers(1, 300))
    heads, kv_heads = heads_of(rng) if head_dim <= 128 else (1, 1)
    dtype = BFLOAT16 if rng.integers(2) else np.dtype(np.float16)
    q = drawn(rng, (batch, sq), heads, head_dim, dtype)
    k, v = (drawn(rng, (batch, skv), kv_heads, head_dim, dtype) for _ in range(2))
    asked = asked_for(mask, rng, skv)
    lse = np.full((batch, heads, sq), np.nan, np.float32)
    out = np.full(q.shape, np.nan, dtype)
    with use_backend("sim", policy="random", warp_order="random", seed=int(rng.integers(1 << 16))):
        assert attention(q, k, v, out=out, lse=lse, **asked) is out
    o, exact_lse = reference(q, k, v, **asked)
    what = f"{(batch, sq, skv, heads, kv_heads, head_dim)} {dtype} {asked}"
    np.testing.assert_allclose(out.astype(np.float64), o, rtol=0, atol=limit(v, dtype), err_msg=what)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-4, err_msg=what)


@pytest.mark.parametrize(("head_dim", "mask"), [(64, "window"), (72, "causal"), (128, "all"), (256, "causal")])
def test_random_extents(rng, head_dim, mask):
    check_in_the_simulator(rng, head_dim, mask)


@pytest.mark.full
@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 256])
@pytest.mark.parametrize("mask", MASKS)
def test_more_random_extents(rng, head_dim, mask, turn):
    check_in_the_simulator(rng, head_dim, mask)


def packed_inputs(rng, q_lengths, kv_lengths, heads, kv_heads, head_dim, dtype):
    starts = [np.r_[0, np.cumsum(lengths)].astype(np.int32) for lengths in (q_lengths, kv_lengths)]
    q = drawn(rng, (int(starts[0][-1]),), heads, head_dim, dtype)
    k, v = (drawn(rng, (int(starts[1][-1]),), kv_heads, head_dim, dtype) for _ in range(2))
    return q, k, v, *starts


@pytest.mark.parametrize("asked", [{"causal": True}, {"window": (20, 10)}], ids=["causal", "window"])
def test_packed_sequences(rng, asked):
    q_lengths, kv_lengths = (70, 0, 193, 5, 1), (90, 20, 64, 0, 131)
    q, k, v, q_starts, kv_starts = packed_inputs(rng, q_lengths, kv_lengths, 2, 1, 64, BFLOAT16)
    v[90:110] = np.nan  # the second sequence's, which has no query: no other one may take notice
    out, lse = np.full(q.shape, np.nan, BFLOAT16), np.full((2, len(q)), np.nan, np.float32)
    with use_backend("sim"):
        attention_varlen(q, k, v, q_starts, kv_starts, max(q_lengths), out=out, lse=lse, **asked)
    for sequence, (length, keys) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        rows = slice(q_starts[sequence], q_starts[sequence + 1])
        own = slice(kv_starts[sequence], kv_starts[sequence + 1])
        if keys == 0:
            assert not out[rows].any()
            assert np.isneginf(lse[:, rows]).all()
        elif length:
            o, exact_lse = reference(q[None, rows], k[None, own], v[None, own], **asked)
            np.testing.assert_allclose(out[rows].astype(np.float64), o[0], rtol=0, atol=limit(v, BFLOAT16))
            np.testing.assert_allclose(lse[:, rows], exact_lse[0], rtol=1e-6, atol=1e-4)


def test_slices_of_a_fused_projection(rng):
    qkv = drawn(rng, (1, 90), 3 * 2, 64, np.float16).reshape(1, 90, 3, 2, 64)
    q, k, v = (qkv[:, :, i] for i in range(3))
    with use_backend("sim"):
        out = attention(q, k, v, causal=True)
    assert out.shape == q.shape
    assert out.flags.c_contiguous
    o, _ = reference(q, k, v, causal=True)
    np.testing.assert_allclose(out.astype(np.float64), o, rtol=0, atol=limit(v, np.float16))


def test_bound_launches_again_and_again(rng):
    q, k, v = (drawn(rng, (1, 140), 1, 64, np.float16) for _ in range(3))
    out = np.empty_like(q)
    with use_backend("sim"):
        launch = bind_attention(q, k, v, out, configuration=Configuration(keys=32))
        for _ in range(3):  # the counter of tiles is zero again after each
            q[...] = drawn(rng, (1, 140), 1, 64, np.float16)
            out[...] = np.nan
            report = launch()
            np.testing.assert_allclose(out.astype(np.float64), reference(q, k, v)[0], rtol=0, atol=limit(v, np.float16))
    assert report.instructions > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 8, 3, 64), np.float16)}, "each of these serves equally many"),
        ({"q": np.zeros((1, 8, 2, 64), np.float32)}, "all float16 or all bfloat16"),
        ({"k": np.zeros((1, 8, 2, 32), np.float16)}, "they must be"),
        ({"q": np.zeros((8, 2, 64), np.float16)}, "4 dimensions expected"),
        ({"out": np.zeros((1, 8, 2, 32), np.float16)}, "they must be"),
        ({"lse": np.zeros((1, 2, 9), np.float32)}, "lse is float32"),
        ({"scale": -1.0}, "a positive number expected"),
        ({"scale": float("nan")}, "a positive number expected"),
        ({"scale": 1e-46}, "a positive number expected"),
        ({"soft_cap": 1e30}, "changes no score"),
        ({"window": (3,)}, r"expected \(left, right\)"),
        ({"window": 5}, r"expected \(left, right\)"),
        ({"k": np.zeros((1, 8, 2, 64), np.float16)[:, :, ::-1]}, "one behind the other"),
        ({"q": np.zeros((1, 0, 2, 64), np.float16)}, "nothing to attend to"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {name: np.zeros((1, 8, 2, 64), np.float16) for name in ("q", "k", "v")} | change
    with use_backend("sim"), pytest.raises(ValueError, match=message):
        attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "q is NoneType; an array is expected"),
        ({"v": [1.0]}, "list is not an array"),
        ({"scale": "a"}, "a number expected"),
        ({"soft_cap": None}, "a number expected"),
        ({"configuration": {}}, "a Configuration expected"),
    ],
)
def test_what_is_of_the_wrong_kind_is_refused(change, message):
    given = {name: np.zeros((1, 8, 2, 64), np.float16) for name in ("q", "k", "v")} | change
    with use_backend("sim"), pytest.raises(TypeError, match=message):
        attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_what_is_asked_is_checked_when_it_is_new(rng, monkeypatch):
    checked, of = [], Band.of
    monkeypatch.setattr(Band, "of", lambda *asked: checked.append(asked) or of(*asked))
    q = drawn(rng, (1, 20), 1, 64, np.float16)
    with use_backend("sim"):
        first = attention(q, q, q, window=(3, 2))
        count = len(checked)
        np.testing.assert_array_equal(attention(q, q, q, window=(3, 2)), first)
        assert len(checked) == count > 0
        np.testing.assert_array_equal(attention(q, q, q, window=[3, 2]), first)
        assert len(checked) == count + 1
        assert (attention(q, q, q, window=(2, 3)) != first).any()


def test_what_is_written_must_be_writable():
    q = np.zeros((1, 8, 2, 64), np.float16)
    out = np.zeros_like(q)
    out.flags.writeable = False
    with use_backend("sim"), pytest.raises(ValueError, match="o is read-only"):
        attention(q, q, q, out=out)


@pytest.mark.parametrize("name", ["k", "v", "lse"])
def test_what_is_written_must_not_be_read(name):
    memory = np.zeros(4096, np.float16)
    given = {n: np.zeros((1, 8, 2, 64), np.float16) for n in ("q", "k", "v")} | {
        "out": memory[:1024].reshape(1, 8, 2, 64)
    }
    given[name] = (
        memory[:32].view(np.float32).reshape(1, 2, 8) if name == "lse" else memory[512:1536].reshape(1, 8, 2, 64)
    )
    q, k, v = (given.pop(n) for n in ("q", "k", "v"))
    with use_backend("sim"), pytest.raises(ValueError, match=f"out at .* and {name} at .* share memory"):
        attention(q, k, v, **given)
    with use_backend("sim"), pytest.raises(ValueError, match=f"out at .* and {name} at .* share memory"):
        bind_attention(q, k, v, **given)


def test_what_is_read_may_be_read_only_and_written_in_its_place(rng):
    q, k, v = (drawn(rng, (1, 20), 1, 64, np.float16) for _ in range(3))
    exact, _ = reference(q, k, v)
    for array in (q, k, v):
        array.flags.writeable = False
    with use_backend("sim"):
        out = attention(q, k, v)
        np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=limit(v, np.float16))
        own = q.copy()
        assert attention(own, k, v, out=own) is own
    np.testing.assert_array_equal(own, out)


def test_no_more_heads_are_gone_through_together_than_there_are():
    q, k = np.zeros((2, 8, 6, 64), np.float16), np.zeros((2, 1, 1, 64), np.float16)
    plan = forward.Plan(q, k, k, None, None, None, forward.Options())
    _, heads, all_heads, together, _ = plan.arguments(q, k, k, q, None, None, np.zeros(1, np.uint32))[-7:-2]
    assert (heads, all_heads, together) == (6, 12, 12)


@pytest.mark.parametrize("window", [(2**31 - 1, -1), (-1, 2**31 - 1), (2**62, 2**62), (2**40, 0)])
def test_windows_wider_than_any_sequence_hide_nothing_more(rng, window):
    q = drawn(rng, (1, 40), 1, 64, np.float16)
    k, v = (drawn(rng, (1, 50), 1, 64, np.float16) for _ in range(2))
    with use_backend("sim"):
        out = attention(q, k, v, window=window)
    o, _ = reference(q, k, v, causal=window[1] == 0)
    np.testing.assert_allclose(out.astype(np.float64), o, rtol=0, atol=limit(v, np.float16))


def test_a_row_of_nan_is_not_taken_for_one_that_saw_no_key(rng):
    q, k, v = (drawn(rng, (1, 20), 1, 64, np.float16) for _ in range(3))
    q[0, 3] = np.nan
    lse = np.zeros((1, 1, 20), np.float32)
    with use_backend("sim"):
        out = attention(q, k, v, lse=lse)
    assert np.flatnonzero(np.isnan(lse[0, 0])).tolist() == [3]
    assert np.flatnonzero(np.isnan(out[0, :, 0]).any(axis=1)).tolist() == [3]


def test_keys_and_values_may_be_one_for_all_batches(rng):
    q = drawn(rng, (3, 20), 2, 64, np.float16)
    k, v = (np.broadcast_to(drawn(rng, (1, 30), 2, 64, np.float16), (3, 30, 2, 64)) for _ in range(2))
    with use_backend("sim"):
        out = attention(q, k, v)
    o, _ = reference(q, k, v)
    np.testing.assert_allclose(out.astype(np.float64), o, rtol=0, atol=limit(v, np.float16))


def test_a_traced_call_is_traced_though_it_was_made_before(rng):
    q = drawn(rng, (1, 20), 1, 64, np.float16)
    with use_backend("sim"):
        attention(q, q, q)
        with tracing() as traced:
            attention(q, q, q)
    assert len(traced.launches) == 1


def test_starts_beyond_the_rows_write_nothing_elsewhere(rng, monkeypatch):
    monkeypatch.setattr(forward, "_check_numbers", lambda given, starts: None)  # as on a GPU
    q, k, v, _, kv_starts = packed_inputs(rng, (40,), (40,), 2, 1, 64, np.float16)
    starts = np.array([0, 10, 60], np.int32)
    kv_starts = np.array([0, 20, 40], np.int32)
    out, lse = np.full_like(q, np.nan), np.full((2, 40), np.nan, np.float32)
    with use_backend("sim"):  # where an access beyond an array ends the run
        attention_varlen(q, k, v, starts, kv_starts, 2**31, out=out, lse=lse)
    assert np.isfinite(lse[:, :10]).all()


def test_rows_that_tma_cannot_read_are_refused():
    odd = np.zeros((1, 8, 2, 66), np.float16)
    with use_backend("sim"), pytest.raises(ValueError, match="multiples of 16 bytes|pieces of 16 bytes"):
        attention(odd, odd, odd)
    with pytest.raises(ValueError, match="a multiple of 16 keys"):
        Configuration(keys=100)
    with pytest.raises(ValueError, match="for two consumers"):
        Configuration(consumers=3, ping_pong=True)
    assert type(Configuration(keys=np.int64(32)).keys) is int


def test_starts_are_checked(rng):
    q, k, v, q_starts, kv_starts = packed_inputs(rng, (4, 4), (4, 4), 1, 1, 64, np.float16)
    with use_backend("sim"):
        with pytest.raises(ValueError, match="int32 of shape"):
            attention_varlen(q, k, v, q_starts.astype(np.int64), kv_starts, 4)
        with pytest.raises(ValueError, match="int32 of shape"):
            attention_varlen(q, k, v, q_starts, kv_starts[:-1], 4)
        with pytest.raises(ValueError, match="longest_q"):
            attention_varlen(q, k, v, q_starts, kv_starts, 0)
        with pytest.raises(TypeError, match="starts are NoneType, ndarray"):
            attention_varlen(q, k, v, None, kv_starts, 4)


# ------------------------------------------------------------------------------------------------------------ a GPU


def exact_on_the_gpu(q, k, v, causal=False, window=(-1, -1)):
    """O and lse in float64 by PyTorch, heads of k and v repeated."""
    import torch

    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    offset = torch.arange(s.shape[3], device="cuda") - torch.arange(s.shape[2], device="cuda")[:, None]
    offset = offset - (s.shape[3] - s.shape[2])
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones_like(offset, dtype=torch.bool)
    if left >= 0:
        seen &= offset >= -left
    if right >= 0:
        seen &= offset <= right
    s = s.masked_fill(~seen, float("-inf"))
    lse = s.logsumexp(-1)
    return (s.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2), lse


def test_a_cluster_that_does_not_divide_the_tiles_is_refused(rng):
    q, k, v = (drawn(rng, (1, 300), 1, 128, BFLOAT16) for _ in range(3))
    with use_backend("sim"), pytest.raises(ValueError, match="300 queries are 3 tiles of 128"):
        attention(q, k, v, configuration=Configuration(cluster=2))


@pytest.mark.parametrize(
    ("skv", "causal", "clusters"), [(65536, False, 2), (65535, False, 1), (65536, True, 1), (1000, False, 1)]
)
def test_keys_are_shared_where_that_pays(skv, causal, clusters):
    chosen = choose(128, Band.of(causal).kind, skv, 1024)
    assert chosen.cluster == clusters
    assert choose(128, Band.of(causal).kind, skv, 1025).cluster == 1  # for nine tiles
    assert choose(128, Band.of(causal).kind, skv).cluster == 1  # who knows how many


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
def test_random_extents_on_the_gpu(rng, head_dim, mask):
    torch = pytest.importorskip("torch")
    dtype = torch.float16 if head_dim == 64 else torch.bfloat16
    for _ in range(13):
        batch, sq, skv = int(rng.integers(1, 4)), int(rng.integers(1, 1500)), int(rng.integers(1, 1500))
        heads, kv_heads = heads_of(rng)
        q = torch.randn(batch, sq, heads, head_dim, device="cuda", dtype=dtype)
        k, v = (torch.randn(batch, skv, kv_heads, head_dim, device="cuda", dtype=dtype) for _ in range(2))
        asked = asked_for(mask, rng, skv)
        out = torch.full_like(q, float("nan"))
        lse = torch.full((batch, heads, sq), float("nan"), device="cuda")
        attention(q, k, v, out=out, lse=lse, **asked)
        o, exact_lse = exact_on_the_gpu(q, k, v, **asked)
        what = f"{(batch, sq, skv, heads, kv_heads, head_dim)} {asked}"
        half = 2.0**-11 if dtype == torch.float16 else 2.0**-8
        off = (out.double() - o).abs().max()
        assert off <= 2 * half * float(v.abs().max()), f"{what}: off by {off}"
        same = torch.where(exact_lse.isinf(), lse.isinf(), (lse - exact_lse).abs() < 1e-3)
        assert same.all(), what


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (128, True), (256, True)])
def test_packed_sequences_on_the_gpu(rng, head_dim, causal):
    torch = pytest.importorskip("torch")
    lengths = [0, 1, *map(int, rng.integers(1, 900, 6)), 0, 128, 2]
    starts = torch.tensor(np.r_[0, np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(sum(lengths), 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = torch.full_like(q, float("nan"))
    lse = torch.full((4, len(q)), float("nan"), device="cuda")
    attention_varlen(q, k, v, starts, starts, max(lengths), causal=causal, out=out, lse=lse)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        begin += length
        if length:
            o, exact_lse = exact_on_the_gpu(q[None, rows], k[None, rows], v[None, rows], causal=causal)
            assert (out[rows].double() - o[0]).abs().max() <= 2.0**-7 * float(v.abs().max())
            assert (lse[:, rows] - exact_lse[0]).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_what_long_sequences_get_on_the_gpu(rng, causal):
    torch = pytest.importorskip("torch")
    chosen = choose(128, Band.of(causal).kind, 1 << 17, 1 << 17)
    for _ in range(5):
        sq, skv = 256 * int(rng.integers(1, 6)) - int(rng.integers(0, 100)), int(rng.integers(1, 1500))
        q = torch.randn(2, sq, 4, 128, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(2, skv, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.full_like(q, float("nan"))
        attention(q, k, v, out=out, causal=causal, configuration=chosen)
        o, _ = exact_on_the_gpu(q, k, v, causal=causal)
        off = (out.double() - o).abs().max()
        assert off <= 2 * 2.0**-8 * float(v.abs().max()), f"{(sq, skv)}: off by {off}"

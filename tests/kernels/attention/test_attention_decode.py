"""Decoding: right and free of hazards for any lengths, pages and splits, and nothing read that is not a sequence's."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from numba_tma import sim
from numba_tma.device_array import DeviceArray
from numba_tma.kernels.attention import decoding
from numba_tma.kernels.attention.decoding import Extents, bind_decode, decode, splits_for, tiling_for
from numba_tma.kernels.attention.kv_cache import append
from numba_tma.kernels.attention.ladder import reference
from numba_tma.kernels.attention.split_kv import Cache, Tiling
from numba_tma.launch import recording, use_backend

pytestmark = pytest.mark.filterwarnings("error::numba_tma.launch.HazardWarning")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
ROUNDING = {FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}
NO_PAGE = np.iinfo(np.int32).max


class Made(NamedTuple):
    """Arrays of a call, outputs full of NaN, and the keys and values of each sequence by themselves."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    lengths: np.ndarray
    page_table: np.ndarray | None
    out: np.ndarray
    lse: np.ndarray
    keys: np.ndarray
    values: np.ndarray


def made(rng, batch, sq, heads, kv_heads, head_dim, capacity, dtype=FLOAT16, page_size=0):
    """The cache is NaN where no sequence is; sequences are empty, of one key, full, or of any length."""
    q = (2 * rng.standard_normal((batch, sq, heads, head_dim))).astype(dtype)
    keys, values = (rng.standard_normal((batch, capacity, kv_heads, head_dim)).astype(dtype) for _ in range(2))
    lengths = rng.integers(0, capacity + 1, batch).astype(np.int32)
    special = rng.permutation([0, 1, capacity])[:batch]
    lengths[: special.size] = special
    k_cache, v_cache = keys.copy(), values.copy()
    for b, length in enumerate(lengths):
        k_cache[b, length:] = v_cache[b, length:] = np.nan
    table = None
    if page_size:
        k_cache, v_cache, table = paged(rng, k_cache, v_cache, lengths, page_size)
    out = np.full(q.shape, np.nan, dtype)
    lse = np.full((batch, heads, sq), np.nan, np.float32)
    return Made(q, k_cache, v_cache, lengths, table, out, lse, keys, values)


def paged(rng, k_cache, v_cache, lengths, page_size):
    """The same in pages anywhere; entries of the table behind a sequence's end name no page."""
    batch, capacity, *row = k_cache.shape
    most = -(-capacity // page_size)
    pages = rng.permutation(batch * most + 3)
    table = np.full((batch, most), NO_PAGE, np.int32)
    caches = [np.full((pages.size, page_size, *row), np.nan, k_cache.dtype) for _ in range(2)]
    for b, length in enumerate(lengths):
        for i in range(-(-int(length) // page_size)):
            page = table[b, i] = pages[b * most + i]
            for cache, source in zip(caches, (k_cache, v_cache), strict=True):
                part = source[b, i * page_size : (i + 1) * page_size]
                cache[page, : len(part)] = part
    return *caches, table


def check(given, *, window=-1, soft_cap=0.0, scale=None):
    bound = 2 * ROUNDING[given.q.dtype] * float(np.abs(given.values.astype(np.float64)).max())
    for b, length in enumerate(given.lengths):
        if length == 0:
            assert not given.out[b].any() and np.isneginf(given.lse[b]).all()
            continue
        k, v = given.keys[b : b + 1, :length], given.values[b : b + 1, :length]
        o, lse = reference(given.q[b : b + 1], k, v, causal=True, window=(window, -1), soft_cap=soft_cap, scale=scale)
        what = f"sequence {b} of {length} keys"
        np.testing.assert_allclose(given.out[b].astype(np.float64), o[0], rtol=0, atol=bound, err_msg=what)
        np.testing.assert_allclose(given.lse[b], lse[0], rtol=1e-5, atol=1e-4, err_msg=what)


def run(given, **options) -> Any:
    return bind_decode(*given[:4], given.out, given.lse, page_table=given.page_table, **options)()


# Extents but for the batch (Sq, Hq, Hkv, D), type, page sizes, what is asked, and how the kernel is cut.
CASES = {
    "contiguous": ((1, 4, 2, 64), FLOAT16, (0,), {}, {}),
    "pages of half a tile, a window, several queries": (
        *((3, 8, 1, 72), BFLOAT16, (16,), {"window": 37, "soft_cap": 3.0}),
        {"keys": 32, "warps": 2, "stages": 2},
    ),
    "pages of several tiles": (
        (1, 2, 2, 128),
        FLOAT16,
        (64, 128, 16),
        {"scale": 0.2},
        {"keys": 16, "warps": 4, "stages": 3},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_hazards(name, rng, seed):
    """Any number of splits, some of them with nothing to do, in other orders of copies, warps and blocks each time."""
    (sq, heads, kv_heads, head_dim), dtype, page_sizes, asked, cut = CASES[name]
    schedules = rng.choice(sim.schedules(3, seed), 3, replace=False)
    for splits, schedule in zip(rng.permutation(4)[:3] + 1, schedules, strict=True):
        capacity = int(rng.integers(100, 240))
        given = made(rng, 3, sq, heads, kv_heads, head_dim, capacity, dtype, int(rng.choice(page_sizes)))
        with use_backend("sim", **schedule):
            report = run(given, splits=int(splits), **asked, **cut)
        assert not report.hazards
        check(given, **asked)


def test_more_rows_than_a_tile_has(rng, in_simulator):
    """16 queries of 5 heads are 80 rows of D 256: five tiles of 16, and Q is read from shared memory each time."""
    given = made(rng, 2, 16, 5, 1, 256, 50)
    run(given, splits=2, keys=16, warps=1, stages=2)
    check(given)


def test_the_call_keeps_plans_and_workspaces(rng, in_simulator, monkeypatch):
    """Twice with arrays in other places: one plan, one workspace; three dimensions, no lse, a new output."""
    monkeypatch.setattr(decoding, "_plans", {})
    for _ in range(2):
        given = made(rng, 3, 1, 4, 2, 64, 150)
        out = decode(given.q[:, 0], *given[1:4], splits=3)
        assert out.shape == (3, 4, 64) and out.dtype == FLOAT16
        lse = given.lse[:, :, 0]
        decode(given.q[:, 0], *given[1:4], splits=3, out=given.out[:, 0], lse=lse)
        check(given)
        np.testing.assert_array_equal(out, given.out[:, 0])
    assert len(decoding._plans) == 2
    for _, places, workspaces in decoding._plans.values():
        assert len(places) == 2 and len(workspaces) == 1
        assert not next(iter(workspaces.values())).counters.any()


def test_views_of_a_cache_with_heads_in_front(rng, in_simulator):
    given = made(rng, 2, 1, 4, 2, 64, 70)
    caches = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in given[1:3]]
    decode(given.q, *caches, given.lengths, out=given.out, lse=given.lse)
    check(given)


def test_caches_that_share_memory_and_results_in_place(rng, in_simulator):
    """Keys and values of all sequences are one prefix's, in one array beside each other; O takes Q's place."""
    both = rng.standard_normal((1, 2, 40, 2, 64)).astype(FLOAT16)
    keys, values = (np.broadcast_to(both[:, i], (3, 40, 2, 64)) for i in range(2))
    q, lengths = rng.standard_normal((3, 2, 4, 64)).astype(FLOAT16), np.array([40, 1, 0], np.int32)
    given = Made(q.copy(), keys, values, lengths, None, q, np.full((3, 4, 2), np.nan, np.float32), keys, values)
    decode(given.out, *given[1:4], splits=2, out=given.out, lse=given.lse)
    check(given)


def test_lengths_and_pages_that_there_are_not(rng, in_simulator, monkeypatch):
    """Lengths beyond the capacity and below 0 count as the nearest; a page that there is not stands for zeros."""
    monkeypatch.setattr(decoding.Plan, "check_pages", lambda *given: None)  # as on a GPU
    given = made(rng, 3, 2, 4, 2, 64, 64, FLOAT16, 16)
    k_pages, v_pages = (np.nan_to_num(x) for x in given[1:3])
    table = np.array([[0, -1, 2**31 - 1, 3], [4, len(k_pages), -(2**31), 5], [6, 6, 6, 6]], np.int32)
    lengths = np.array([2**31 - 1, 64, -(2**31)], np.int32)
    there = (table >= 0) & (table < len(k_pages))
    keys, values = (
        (x[np.where(there, table, 0)] * there[..., None, None, None]).reshape(3, 64, 2, 64).astype(FLOAT16)
        for x in (k_pages, v_pages)
    )
    decode(given.q, k_pages, v_pages, lengths, page_table=table, splits=3, out=given.out, lse=given.lse)
    check(given._replace(lengths=np.array([64, 64, 0]), keys=keys, values=values))
    new = rng.standard_normal((3, 2, 64)).astype(FLOAT16)
    before = k_pages.copy()
    append(new, new, k_pages, v_pages, np.array([65, 48, 0], np.int32), page_table=table)
    np.testing.assert_array_equal(k_pages, before)


@pytest.mark.parametrize("page", [-1, 12])
def test_pages_in_host_memory_are_looked_at_each_time(rng, in_simulator, page):
    q, k, v = (np.zeros(shape, FLOAT16) for shape in [(2, 4, 64), *2 * [(12, 16, 2, 64)]])
    table, lengths = np.array([[7, 2, page], [3, 9, 4]], np.int32), np.array([32, 48], np.int32)
    decode(q, k, v, lengths, page_table=table)  # its last page is not reached
    launch = bind_decode(q, k, v, lengths, np.empty_like(q), page_table=table)
    launch()
    lengths[0] = 33
    wrong = rf"page_table\[0, 2\] is {page}, and sequence 0 has 33 keys, 16 in a page; a number from 0 to 11 expected"
    with pytest.raises(ValueError, match=wrong):
        decode(q, k, v, lengths, page_table=table)
    with pytest.raises(ValueError, match=wrong):
        launch()
    table[0] = page, 2, 5  # what lies before the window is not looked at
    decode(q, k, v, lengths, page_table=table, window=16)
    with pytest.raises(ValueError, match=r"page_table\[0, 0\]"):
        decode(q, k, v, lengths, page_table=table, window=17)


def test_windows_wider_than_any_sequence_hide_nothing_more(rng, in_simulator):
    """Also where there are more queries than keys, and what a query sees begins before the first one."""
    for window in (2**31 - 1, 2**31, 2**62):
        given = made(rng, 3, 16, 1, 1, 8, 20)
        decode(*given[:4], window=window, out=given.out, lse=given.lse)
        check(given)


def test_more_new_keys_than_a_dimension_of_a_grid_has_blocks(rng, in_simulator):
    new, cache = (np.zeros((1, n, 1, 8), FLOAT16) for n in (70_000, 80_000))
    with recording() as recorded:
        append(new, new, cache, cache.copy(), np.array([75_000], np.int32))
    assert len(recorded.launches) == 1


@pytest.mark.parametrize("page_size", [0, 24])
def test_append(page_size, rng, in_simulator):
    """Keys before the first and behind the last place are left out; all else stays as it was."""
    capacity, new = 60, 3
    given = made(rng, 4, 1, 2, 2, 40, capacity, BFLOAT16, page_size)
    lengths = np.array([new, 1, 50, capacity + 1], np.int32)
    k, v = (rng.standard_normal((4, new, 2, 40)).astype(BFLOAT16) for _ in range(2))
    caches = [np.zeros_like(x) for x in given[1:3]]
    table = None
    if page_size:
        table = (
            rng.permutation(len(caches[0]))[: given.page_table.size].reshape(given.page_table.shape).astype(np.int32)
        )
    append(k, v, *caches, lengths, page_table=table)
    for cache, source in zip(caches, (k, v), strict=True):
        expected = np.zeros_like(cache)
        for b, length in enumerate(lengths):
            for i in range(new):
                at = length - new + i
                if 0 <= at < (table.shape[1] * page_size if page_size else capacity):
                    place = (table[b, at // page_size], at % page_size) if page_size else (b, at)
                    expected[place] = source[b, i]
        np.testing.assert_array_equal(cache, expected)


def test_the_code_is_what_it_should_be(rng):
    given = made(rng, 2, 1, 8, 2, 128, 256, BFLOAT16, 64)
    with recording() as recorded:
        run(given)
    code = recorded.launches[0].compiled
    resources = code.resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    found = re.findall(r"\b(HMMA|UTMALDG|LDSM|LDL|STL)\b", code.sass)
    assert found.count("HMMA") == 2 * 2 * 8 and not {"LDL", "STL"} & set(found)
    assert found.count("UTMALDG") >= 4


def test_tilings_and_splits():
    small, long = Extents(8, 1, 12, 12, 64, 1024), Extents(1, 1, 32, 8, 128, 65536)
    assert small.group == 1 and long.group == 4 and small.rows == long.rows == 16
    assert Extents(1, 16, 32, 8, 128, 10).rows == 32 and Extents(1, 16, 32, 8, 128, 10).row_tiles == 2
    assert Extents(1, 16, 32, 8, 256, 10).rows == 16 and Extents(1, 16, 32, 8, 256, 10).row_tiles == 4
    for extents in (small, long):
        splits = splits_for(extents, tiling_for(extents), 132)
        assert 64 <= splits * extents.batch * extents.kv_heads <= 132  # one wave of blocks, on half the SMs at least
    # Two waves for the sake of 4 blocks of 136 would take twice as long; where there are many, it does not matter.
    for batch, most in ((16, 1), (17, 132), (64, 4)):
        extents = Extents(batch, 1, 32, 8, 128, 8192)
        assert 1 <= splits_for(extents, tiling_for(extents), 132) <= most
    uneven = Extents(17, 1, 32, 8, 128, 8192)
    assert splits_for(uneven, tiling_for(uneven), 132) > 1
    assert Cache.of(32, 16) == Cache(16, True) and Cache.of(16, 24) == Cache(8, True)
    assert Cache.of(64, 0) == Cache(64, False)


def test_what_does_not_fit_is_named(rng):
    given = made(rng, 2, 1, 4, 2, 64, 32, FLOAT16, 16)
    q, k, v, lengths, table, out, lse = given[:7]
    shifted = np.zeros(q.size + 1, np.float16)[1:].reshape(q.shape)
    odd = np.zeros(2 * 40 * 2 * 64 + 1, FLOAT16)[1:].reshape(2, 40, 2, 64)
    endless = np.broadcast_to(np.zeros((2, 1, 1, 64), FLOAT16), (2, 2**31, 1, 64))
    locked, cache = np.zeros_like(lse), rng.standard_normal((2, 40, 2, 64)).astype(FLOAT16)
    locked.flags.writeable = False
    for arrays, options, error, message in (
        ((q, k, v, [1, 2]), {}, TypeError, "decode: list is not an array"),
        ((q, k, v, lengths), {}, ValueError, "2 sequences, and 7 in the cache; if these are pages"),
        ((q, k, v, lengths.astype(np.int64)), {"page_table": table}, ValueError, "lengths is int64"),
        ((q, k, v, lengths), {"page_table": table[:1]}, ValueError, "page_table is int32"),
        ((q, k, v[:, :8], lengths), {"page_table": table}, ValueError, "v_cache"),
        ((q, k[:, :9], v[:, :9], lengths), {"page_table": table}, ValueError, "pages of 9 keys: a multiple of 8"),
        ((q[:, :, :3], k, v, lengths), {"page_table": table}, ValueError, "3 heads of queries, 2 of keys"),
        ((q.astype(BFLOAT16), k, v, lengths), {"page_table": table}, ValueError, "all float16 or all bfloat16"),
        ((np.repeat(q, 17, 1), k, v, lengths), {"page_table": table}, ValueError, "17 queries a sequence; at most 16"),
        ((q[0, 0], k, v, lengths), {"page_table": table}, ValueError, r"\(B, Hq, D\) or"),
        ((shifted, k, v, lengths), {"page_table": table}, ValueError, "multiples of 16 bytes"),
        ((q, k, v, lengths), {"page_table": table, "window": -2}, ValueError, "window -2"),
        ((q, k, v, lengths), {"page_table": table, "splits": 0}, ValueError, "splits 0"),
        ((q, k, v, lengths), {"page_table": table, "out": out[:1]}, ValueError, "out is float16"),
        ((q, k, v, lengths), {"page_table": table, "lse": lse[:, :1]}, ValueError, "lse is float32"),
        ((q, k, v, None), {"page_table": table}, TypeError, "lengths is a NoneType; an array is expected"),
        ((q[:0], k, v, lengths[:0]), {"page_table": table[:0]}, ValueError, "none of them 0"),
        ((q, k, v[:, :0], lengths), {"page_table": table}, ValueError, "no extent 0"),
        ((q, cache[:, ::-1], cache, lengths), {}, ValueError, "k_cache runs backwards, its strides"),
        ((q, cache, odd, lengths), {}, ValueError, "v_cache begins at the address"),
        ((q, endless, endless, lengths), {}, ValueError, "room for 2,147,483,648 keys a sequence; at most"),
        ((q, k, v, lengths), {"page_table": table, "scale": "a"}, TypeError, "scale is 'a'; a number expected"),
        ((q, k, v, lengths), {"page_table": table, "scale": [1]}, TypeError, r"scale is \[1\]; a number expected"),
        ((q, k, v, lengths), {"page_table": table, "scale": np.nan}, ValueError, "scale nan: a positive number"),
        ((q, k, v, lengths), {"page_table": table, "soft_cap": -1}, ValueError, "soft_cap -1.0: the bound"),
        ((q, k, v, lengths), {"page_table": table, "splits": 2.5}, TypeError, "splits is 2.5; a whole number"),
        ((q, k, v, lengths), {"page_table": table, "lse": locked}, ValueError, "decode: lse is read-only"),
        ((q, cache, cache, lengths), {"out": cache.reshape(2, 20, 4, 64)[:, :1]}, ValueError, "out .* share memory"),
    ):
        with pytest.raises(error, match=message):
            decode(*arrays, **options)
    for cut, message in (
        ((60, 16, 16, 2, 2), "head_dim 60"),
        ((64, 48, 16, 2, 2), "48 rows"),
        ((64, 16, 24, 2, 2), "24 keys"),
        ((64, 16, 16, 3, 2), "3 warps"),
        ((64, 16, 16, 2, 0), "stages 0"),
        ((128, 32, 16, 2, 1), "must have room for O"),
    ):
        with pytest.raises(ValueError, match=message):
            Tiling(*cut)
    with pytest.raises(ValueError, match="append: k is .* heads and columns"):
        append(q[:, :, :1], q[:, :, :1], k, v, lengths, page_table=table)
    new = rng.standard_normal((2, 2, 64)).astype(FLOAT16)
    for arrays, error, message in (
        ((new[:, None][:, :0], new[:, None][:, :0], cache, cache), ValueError, "no extent 0"),
        ((None, new, cache, cache.copy()), TypeError, "append: k is a NoneType"),
        ((new, new, cache, cache), ValueError, "append: k_cache .* and v_cache .* share memory"),
        ((cache[:, 0], new, cache, cache.copy()), ValueError, "append: k_cache .* and k .* share memory"),
        ((new, new, np.broadcast_to(cache[:1], cache.shape), cache), ValueError, "append: k_cache is read-only"),
    ):
        with pytest.raises(error, match=message):
            append(*arrays, lengths)
    with pytest.raises(TypeError, match="bind_decode has no option 'tiles'; it has scale"):
        bind_decode(*given[:4], out, page_table=table, tiles=2)
    with pytest.raises(TypeError, match="bind_decode: out is None"):
        bind_decode(*given[:4], None, page_table=table)
    with pytest.raises(ValueError, match="stages 0: take 1 or more"):
        bind_decode(*given[:4], out, page_table=table, stages=0)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [0, 16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_right_on_the_gpu(page_size, head_dim, rng):
    """Five of any extents for each kernel, 60 in all."""
    dtype = (FLOAT16, BFLOAT16)[int(rng.integers(2))]
    sq, group = int(rng.integers(1, 5)), int(rng.choice([1, 2, 8]))
    for splits in (None, 1, 3, None, 7):
        batch, kv_heads, capacity = (int(rng.integers(low, high)) for low, high in ((1, 6), (1, 5), (2, 3000)))
        given = made(rng, batch, sq, kv_heads * group, kv_heads, head_dim, capacity, dtype, page_size)
        names = [name for name in Made._fields[:7] if getattr(given, name) is not None]
        moved = given._replace(**{name: DeviceArray(getattr(given, name)) for name in names})
        decode(*moved[:4], page_table=moved.page_table, splits=splits, out=moved.out, lse=moved.lse)
        check(given._replace(out=moved.out.to_host(), lse=moved.lse.to_host()))


@pytest.mark.gpu
def test_a_prefix_that_all_sequences_share_on_the_gpu(rng):
    """A cache with one row of keys for all sequences; O takes Q's place."""
    torch = pytest.importorskip("torch")
    keys, values = (torch.randn(1, 700, 2, 128, device="cuda", dtype=torch.float16).expand(4, -1, -1, -1) for _ in "kv")
    lengths = torch.tensor([700, 1, 0, 333], dtype=torch.int32, device="cuda")
    q = torch.randn(4, 2, 8, 128, device="cuda", dtype=torch.float16)
    out, lse = q.clone(), torch.full((4, 8, 2), float("nan"), device="cuda")
    decode(out, keys, values, lengths, window=2**40, out=out, lse=lse)
    host = [x.cpu().numpy() for x in (q, keys, values, lengths, out, lse)]
    check(Made(*host[:4], None, *host[4:], *host[1:3]))


@pytest.mark.gpu
def test_replayed_as_sequences_grow(rng):
    """A graph captured once goes on to be right when keys are appended and the lengths change on the GPU."""
    torch = pytest.importorskip("torch")
    batch, heads, head_dim, capacity = 3, 4, 64, 700
    q, new_k, new_v = (torch.randn(batch, heads, head_dim, device="cuda", dtype=torch.float16) for _ in range(3))
    caches = [torch.zeros(batch, capacity, heads, head_dim, device="cuda", dtype=torch.float16) for _ in range(2)]
    lengths, out = torch.full((batch,), 640, dtype=torch.int32, device="cuda"), torch.empty_like(q)
    for cache in caches:
        cache[:, :640] = torch.randn_like(cache[:, :640])

    def step():
        lengths.add_(1)
        append(new_k, new_v, *caches, lengths)
        decode(q, *caches, lengths, out=out)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for i in range(1, 4):
        for x in (q, new_k, new_v):
            x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        n = 641 + i
        assert lengths.tolist() == [n] * batch
        k, v = (cache[:, :n].cpu().numpy() for cache in caches)
        np.testing.assert_array_equal(k[:, -1], new_k.cpu().numpy())
        o, _ = reference(q[:, None].cpu().numpy(), k, v)
        np.testing.assert_allclose(out.cpu().numpy(), o[:, 0], rtol=0, atol=2.0**-10 * np.abs(v).max())

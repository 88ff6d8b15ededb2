"""Attention in 8-bit floats: `attention_fp8` on arrays of 16 bits, and its two halves, quantising and attending.

The kernels are in fp8_quantise.py and fp8_warpgroup.py, where it says what is scaled by what and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ... import arrays, driver, dtypes
from ...arrays import ArrayView
from ...device_array import DeviceArray
from ...dtypes import ElementType
from ...tensor_map import TensorMap
from ..calls import check_written, current_stream, new_like
from ..gemm.choice import multiprocessors
from .choice import together
from .fp8_quantise import CHUNK, KV_BLOCK, Q_BLOCK, make_quantise_rows, make_quantise_values
from .fp8_warpgroup import FLOAT8, HEAD_DIMS, make_fp8
from .masks import UNBOUNDED, Band
from .operands import Operands, Scores, operands, view_of
from .tile_counters import tile_counter

Launch = Callable[[], Any]
# What was fastest on an H200. At D = 256 there are no registers for a second accumulator.
CONFIGURATIONS: dict[int, dict[str, Any]] = {
    64: {"keys": 192, "stages": 3},
    128: {"keys": 128, "stages": 3},
    256: {"keys": 128, "stages": 2, "promote": False},
}


class Quantised(NamedTuple):
    """Queries, keys and values in e4m3, with float32 scales: x = x_scale · x8 for each block of rows of each head.

    q (B, Sq, Hq, D), k (B, Skv, Hkv, D)
        As they came.
    v (B, Hkv, ceil(Skv / 16), D / 16, 256)
        For 16 keys each, columns one behind the other, 16 bytes each: the keys in the order of `KEY_ORDER`. Zeros stand
        for keys behind the last.
    q_scale (B, Hq, ceil(Sq / 64)), k_scale and v_scale (B, Hkv, ceil(Skv / 64))
    """

    q: Any
    k: Any
    v: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any

    @staticmethod
    def empty(q: Any, k: Any) -> Quantised:
        """Room for what arrays like these become, where they are."""
        q_view, k_view = view_of("q", q, 4), view_of("k", k, 4)
        batch, sq, heads, head_dim = q_view.shape
        _, skv, kv_heads, _ = k_view.shape
        _check_head_dim(head_dim)
        float8, float32 = dtypes.lookup(FLOAT8), dtypes.float32
        chunks, blocks = -(-skv // CHUNK), -(-skv // KV_BLOCK)
        return Quantised(
            _room(q_view.shape, float8, q),
            _room(k_view.shape, float8, q),
            _room((batch, kv_heads, chunks, head_dim // 16, 16 * CHUNK), float8, q),
            _room((batch, heads, -(-sq // Q_BLOCK)), float32, q),
            _room((batch, kv_heads, blocks), float32, q),
            _room((batch, kv_heads, blocks), float32, q),
        )


def _room(shape: tuple[int, ...], element: ElementType, like: Any) -> Any:
    """An array like another, or beside it where its library, CuPy, has no such numbers."""
    if isinstance(like, np.ndarray) or arrays.is_torch(like):
        return new_like(shape, element, like)
    return DeviceArray.empty(shape, element.numpy)


def _check_kind(given: Any) -> None:
    if not isinstance(given, Quantised):
        raise TypeError(f"a {type(given).__name__}; a Quantised expected, as Quantised.empty(q, k) makes it")


def _check_head_dim(head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"head_dim {head_dim}: the kernels of 8 bits take {', '.join(map(str, HEAD_DIMS))}: pad q, k and v with "
            f"zeros (and give `scale`), or attend in 16 bits"
        )


def bind_quantise(q: Any, k: Any, v: Any, into: Quantised, stream: object = None) -> Launch:
    """Bind the three kernels that write `into`, as `Quantised.empty(q, k)` makes it, from arrays as `attention_fp8`'s.

    Raises:
        TypeError, ValueError: as `attention_fp8`.
    """
    _check_kind(into)
    found = _operands(q, k, v)
    extents = found.batch, found.sq, found.skv, found.heads, found.kv_heads, found.head_dim
    for name, view in _views(into, *extents, arrays.view(q).host).items():
        if view.readonly:
            raise ValueError(f"{name} of what is quantised is read-only; it is written")
    stream = current_stream(q) if stream is None else driver.stream_handle(stream)
    rows = make_quantise_rows(found.head_dim, found.dtype, Q_BLOCK)
    values = make_quantise_values(found.head_dim, found.dtype)
    q_grid = (-(-found.sq // Q_BLOCK), found.heads, found.batch)
    kv_grid = (-(-found.skv // KV_BLOCK), found.kv_heads, found.batch)
    launches = (
        rows[q_grid, None, stream].bind(q, into.q, into.q_scale),
        rows[kv_grid, None, stream].bind(k, into.k, into.k_scale),
        values[kv_grid, None, stream].bind(v, into.v, into.v_scale),
    )

    def launch() -> None:
        for run in launches:
            run()

    return launch


def bind_attend(
    given: Quantised,
    o: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    scale: float | None = None,
    stream: object = None,
    configuration: Mapping[str, Any] | None = None,
) -> Launch:
    """Bind attention on what is quantised already; it may be launched again and again, one at a time.

    Args:
        given: see `Quantised`.
        o: (B, Sq, Hq, D), float16 or bfloat16, written.
        lse: (B, Hq, Sq), float32, written.
        causal, window, scale: as `attention_fp8`.
        configuration: arguments of `make_fp8`; by default those for the head dimension.

    Raises:
        TypeError: not an array, or a scale that is no number.
        ValueError: shapes, types, strides, the window, the scale or the configuration do not fit; o or lse is
            read-only or shares memory.
    """
    batch, sq, heads, head_dim, skv, kv_heads = _check_attend(given, o, lse)
    stream = current_stream(o) if stream is None else driver.stream_handle(stream)
    configuration = CONFIGURATIONS[head_dim] | dict(configuration or {})
    band = Band.of(causal, window)
    scores = Scores.of(scale, 0.0, head_dim)
    kernel = make_fp8(head_dim, dtypes.lookup(arrays.view(o).dtype).name, band.kind, **configuration)
    keys, columns = configuration["keys"], min(head_dim, 128)
    tiles_m = -(-sq // (Q_BLOCK * configuration.get("consumers", 2)))
    tiles = tiles_m * heads * batch
    if tiles >= 1 << 31:
        raise ValueError(f"{tiles:,} tiles of queries: fewer than 2**31 expected; split the batch")
    group, all_heads = heads // kv_heads, heads * batch
    counts = (tiles_m, heads, all_heads, min(together(skv, head_dim, group, element_bytes=1), all_heads), group)
    counter = tile_counter(arrays.view(o).host, "bind_attend", stream)
    # What lies beside a head's row in memory is another head's.
    rows = {"swizzle": f"{columns}B", "store": False, "l2_promotion": "128B"}
    return kernel[min(multiprocessors(), tiles), None, stream].bind(
        TensorMap(given.q, (1, Q_BLOCK, 1, columns), **rows),
        TensorMap(given.k, (1, keys, 1, columns), **rows),
        TensorMap(given.v, (1, 1, keys // CHUNK, head_dim // 16, 16 * CHUNK), store=False),
        TensorMap(o, (1, Q_BLOCK, 1, 64), swizzle="128B", store=False),
        *(given.q_scale, given.k_scale, given.v_scale, lse, counter),
        *(np.uint32(sq), np.uint32(skv), *band.diagonals(sq, skv)),
        *(np.uint32(n) for n in counts),
        scores.factor,
    )


def attention_fp8(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    scale: float | None = None,
    return_lse: bool = False,
    stream: object = None,
) -> Any:
    """softmax(scale · Q Kᵀ) V with products of 8-bit floats, a scale for each 64 rows of a head.

    Args:
        q: (B, Sq, Hq, D), float16 or bfloat16, D 64, 128 or 256; rows begin at multiples of 16 bytes.
        k, v: (B, Skv, Hkv, D), of q's type; Hq is a multiple of Hkv.
        causal: query i sees the keys up to i + Skv - Sq.
        window: (left, right): it sees as many before and behind that one; -1 for all.
        scale: what the scores are multiplied by; 1 / sqrt(D) by default.
        return_lse: whether the rows' log-sum-exp is wanted as well, float32 (B, Hq, Sq).
        stream: a stream's handle or object; by default PyTorch's or CuPy's current one, or the default stream.

    For normally distributed numbers O is some 5 % off, root of mean squares, whatever the sequence's length: weights,
    values and scores have three bits behind the point. See docs/attention_fp8.md for other numbers. An infinity makes
    NaN of all 64 rows that it shares a scale with, a NaN of its own alone; and so of all that attends to them. Scores
    beyond 10^7 are not attended to rightly.

    Returns:
        O as q, or (O, lse).

    Raises:
        TypeError: not an array, or a scale that is no number.
        ValueError: shapes, types, strides, the window or the scale do not fit.
    """
    stream = current_stream(q) if stream is None else driver.stream_handle(stream)
    found = _operands(q, k, v)
    o = new_like(arrays.view(q).shape, dtypes.lookup(found.dtype), q)
    lse = new_like((found.batch, found.heads, found.sq), dtypes.float32, q)
    quantised = Quantised.empty(q, k)
    bind_quantise(q, k, v, quantised, stream)()
    bind_attend(quantised, o, lse, causal=causal, window=window, scale=scale, stream=stream)()
    return (o, lse) if return_lse else o


def _operands(q: Any, k: Any, v: Any) -> Operands:
    """What `operands` finds, for a kernel of 8 bits."""
    found = operands({"q": q, "k": k, "v": v, "o": None, "lse": None})
    found.check_rows()
    _check_head_dim(found.head_dim)
    if len({arrays.view(x).host for x in (q, k, v)}) > 1:
        raise ValueError("q, k and v must lie in the same memory, a GPU's or the host's")
    return found


def _views(
    given: Quantised, batch: int, sq: int, skv: int, heads: int, kv_heads: int, head_dim: int, host: bool
) -> dict[str, ArrayView]:
    """The arrays, seen and checked, for these extents and in this memory."""
    q_blocks, kv_blocks, chunks = -(-sq // Q_BLOCK), -(-skv // KV_BLOCK), -(-skv // CHUNK)
    expected = {
        "q": (FLOAT8, (batch, sq, heads, head_dim)),
        "k": (FLOAT8, (batch, skv, kv_heads, head_dim)),
        "v": (FLOAT8, (batch, kv_heads, chunks, head_dim // 16, 16 * CHUNK)),
        "q_scale": ("float32", (batch, heads, q_blocks)),
        "k_scale": ("float32", (batch, kv_heads, kv_blocks)),
        "v_scale": ("float32", (batch, kv_heads, kv_blocks)),
    }
    views = {}
    for name, (dtype, shape) in expected.items():
        views[name] = view = _checked(name, getattr(given, name), (dtype,), shape)
        last = 3 if name == "v" else 1  # dimensions that are gone through without a look at strides
        if dtype == FLOAT8 and arrays.layout_of(shape[-last:], view.strides[-last:], 1) != "C":
            raise ValueError(f"{name}: strides {view.strides} B; the last {last} must be those of contiguous numbers")
        if view.host != host:
            raise ValueError(f"{name} must lie in the same memory as the others, a GPU's or the host's")
    return views


def _checked(name: str, array: Any, types: tuple[str, ...], shape: tuple[int, ...]) -> ArrayView:
    view = view_of(name, array, len(shape))
    if view.shape != shape or view.dtype.name not in types:
        raise ValueError(f"{name} is {view.dtype} {view.shape}: {' or '.join(types)} {shape} expected")
    return view


def _check_attend(given: Quantised, o: Any, lse: Any) -> tuple[int, int, int, int, int, int]:
    """See that the arrays belong together: B, Sq, Hq, D, Skv and Hkv."""
    _check_kind(given)
    batch, sq, heads, head_dim = shape = view_of("q", given.q, 4).shape
    _, skv, kv_heads, _ = of_k = view_of("k", given.k, 4).shape
    _check_head_dim(head_dim)
    if 0 in shape or 0 in of_k:
        raise ValueError(f"q {shape}, k {of_k}: there is nothing to attend to; extents of 1 and more expected")
    if heads % kv_heads:
        raise ValueError(f"{heads} heads of queries, {kv_heads} of keys: each of these serves equally many of those")
    outputs = {
        "o": _checked("o", o, ("bfloat16", "float16"), shape),
        "lse": _checked("lse", lse, ("float32",), (batch, heads, sq)),
    }
    views = _views(given, batch, sq, skv, heads, kv_heads, head_dim, outputs["o"].host)
    check_written("bind_attend", views | outputs, "o", "lse")
    return batch, sq, heads, head_dim, skv, kv_heads

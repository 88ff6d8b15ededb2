"""`decode`: attention of a few new queries to a cache of keys and values, contiguous or in pages.

The kernel is `split_kv`'s. What is decided here depends on extents alone: how many blocks share a sequence follows
from the cache's capacity and the number of SMs, never from `lengths` or the page table, which stay on the GPU. So a
launch can be captured into a CUDA graph and replayed as the sequences grow.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ... import arrays, driver, dtypes
from ...arrays import ArrayView
from ...device_array import DeviceArray
from ...launch import backend, watched
from ...tensor_map import TensorMap
from ..calls import current_stream, layout, new_like, pointer, recent_places, recent_plans, remembered, seen
from ..gemm.choice import multiprocessors
from .kv_cache import MOST_BLOCKS, capacity_of, check_batch, check_rows, views_of, with_queries
from .masks import MOST_KEYS, UNBOUNDED
from .operands import BOX, MAX_HEAD_DIM, Scores, check_outputs, number
from .split_kv import Cache, Tiling, make_split_kv

MAX_QUERIES = 16
_RING_BYTES = 192 * 1024  # of a block's tiles, of 227 KB that an SM has
_SHARED_BYTES = 227 * 1024  # of an SM, some 1 KB a block aside
_MOST_SPLITS = 128
_MANY_ROUNDS = 16  # tiles for each warp, that make a block's start and end small beside the rest
# What `splits_for` reckons with, of an H200: bytes a second, all in all, to an SM, and to one whose neighbour reads
# too; and seconds: of a block besides reading, for its start and its end; of a warp for a tile that is there, and for
# each element of K in it; of the last block to merge, and for each part.
_READ_RATE, _SM_RATE, _PAIR_RATE = 4.5e12, 75e9, 40e9
_BLOCK_SECONDS = 3e-6
_TILE_SECONDS, _ELEMENT_SECONDS = 0.4e-6, 0.2e-9
_MERGE_SECONDS, _PART_SECONDS = 2.5e-6, 0.06e-6
_CALLER = "decode"


class Extents(NamedTuple):
    """Of a call: sequences, new queries of each, heads, and the most keys that a sequence can have."""

    batch: int
    sq: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int

    @property
    def group(self) -> int:
        """Heads of queries that share one of keys and values."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Of a tile of queries: 32 where they are needed, and registers have room for their O."""
        return 32 if self.sq * self.group > 16 and self.head_dim <= 128 else 16

    @property
    def row_tiles(self) -> int:
        """Tiles of queries that read the same keys."""
        return -(-self.sq * self.group // self.rows)


def tiling_for(
    extents: Extents, keys: int | None = None, warps: int | None = None, stages: int | None = None
) -> Tiling:
    """The tiling asked for; what is left open as it suits the head dimension.

    Raises:
        ValueError: it does not fit.
    """
    boxes = -(-extents.head_dim // BOX)
    if keys is None:
        keys = 32 if boxes == 1 else 16
    if warps is None:
        warps = 8 if boxes <= 3 else 4
    if stages is None:
        stages = max(_RING_BYTES // (max(warps, 1) * 2 * boxes * max(keys, 1) * 128), 1)
    return Tiling(extents.head_dim, extents.rows, keys, warps, stages)


def splits_for(extents: Extents, tiling: Tiling, multiprocessors: int) -> int:
    """How many blocks share a sequence, by a model of the time that full sequences take.

    Blocks that run at once share the memory's rate; a block by itself is held up by what its warps do with a tile. The
    last wave of blocks may leave SMs idle, and parts have to be merged. Of what is as good as the best by 1 %, the most
    blocks with much to do are taken, as sequences of different lengths then keep the SMs equally busy; else the fewest.
    """
    groups = extents.batch * extents.kv_heads * extents.row_tiles
    slots = _SHARED_BYTES // (tiling.shared("float16").nbytes + 1024) * multiprocessors
    tiles = -(-extents.capacity // tiling.keys)
    tile_seconds = _TILE_SECONDS + _ELEMENT_SECONDS * tiling.keys * extents.head_dim
    round_bytes = 4 * extents.head_dim * tiling.keys * tiling.warps

    def rounds(splits: int) -> int:
        return -(-tiles // (splits * tiling.warps))

    def wave(blocks: int, splits: int) -> float:
        nbytes = round_bytes * rounds(splits)
        rate = _SM_RATE if 2 * blocks <= slots else _PAIR_RATE
        alone = max(nbytes / rate, rounds(splits) * tile_seconds) + _BLOCK_SECONDS
        return max(blocks * nbytes / _READ_RATE, alone) if blocks else 0.0

    def seconds(splits: int) -> float:
        waves, left = divmod(groups * splits, slots)
        merging = _MERGE_SECONDS + splits * _PART_SECONDS if splits > 1 else 0.0
        return waves * wave(slots, splits) + wave(left, splits) + _BLOCK_SECONDS + merging

    candidates = range(1, min(-(-tiles // tiling.warps), _MOST_SPLITS) + 1)
    best = min(map(seconds, candidates))
    good = [splits for splits in candidates if seconds(splits) <= 1.01 * best]
    return max((splits for splits in good if rounds(splits) >= _MANY_ROUNDS), default=good[0])


class Workspace:
    """What the blocks of split sequences leave for the last of them, and a lse for callers who want none.

    One launch at a time may use it. The counters are zero again after each.
    """

    def __init__(self, extents: Extents, tiling: Tiling, splits: int, host: bool) -> None:
        groups = extents.batch * extents.kv_heads * extents.row_tiles
        parts = groups * splits if splits > 1 else 1
        empty = np.empty if host else DeviceArray.empty
        self.partial = empty((parts, tiling.rows, tiling.columns), np.float32)
        self.largest = empty((parts, tiling.rows), np.float32)
        self.totals = empty((parts, tiling.rows), np.float32)
        counters = np.zeros(groups, np.uint32)
        self.counters = counters if host else DeviceArray(counters)
        self.lse = empty((extents.batch, extents.heads, extents.sq), np.float32)


@dataclass(frozen=True)
class Options:
    """What is asked of a call, besides its arrays.

    Raises:
        TypeError: something else than a number, where one is expected.
        ValueError: a window that is no number of keys.
    """

    scale: float | None = None
    soft_cap: float = 0.0
    window: int = UNBOUNDED
    splits: int | None = None
    keys: int | None = None
    warps: int | None = None
    stages: int | None = None
    l2_promotion: str = "128B"  # a box's rows

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", number("scale", self.scale))
        object.__setattr__(self, "soft_cap", number("soft_cap", self.soft_cap))
        object.__setattr__(self, "window", _window(self.window))
        for name in ("splits", "keys", "warps", "stages"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole(name, getattr(self, name)))


class Plan:
    """All of a call that does not depend on where its arrays lie.

    Raises:
        TypeError: not arrays.
        ValueError: extents, types, strides or options do not fit.
    """

    def __init__(
        self, q: Any, k_cache: Any, v_cache: Any, lengths: Any, page_table: Any, out: Any, lse: Any, options: Options
    ) -> None:
        rows = {"q": q} if out is None else {"q": q, "out": out}
        views = views_of(
            _CALLER, **rows, k_cache=k_cache, v_cache=v_cache, lengths=lengths, page_table=page_table, lse=lse
        )
        self.extents = extents = _extents(views)
        check_rows(_CALLER, **rows, k_cache=k_cache, v_cache=v_cache)
        _check_forwards(views)
        found = views["q"]
        self.new_output = functools.partial(new_like, found.shape, dtypes.lookup(found.dtype))
        self._host = found.host
        of_lse = views.get("lse")
        # With a dimension for the queries of a sequence.
        self._lse = ((*of_lse.shape, 1), (*of_lse.strides, 4)) if of_lse and len(of_lse.shape) == 2 else ()
        page_size = views["k_cache"].shape[1] if page_table is not None else 0
        scores = Scores.of(options.scale, options.soft_cap, extents.head_dim)
        self._tiling = tiling = tiling_for(extents, options.keys, options.warps, options.stages)
        self.splits = splits = _splits(options, extents, tiling)
        self._window = window = options.window
        self._pages = views["k_cache"].shape[:2]
        cache = Cache.of(tiling.keys, page_size)
        self._box, self._l2_promotion = (1, cache.box_rows, 1, BOX), options.l2_promotion
        kernel = make_split_kv(
            found.dtype.name, window != UNBOUNDED, extents.sq > 1, scores.capped, extents.group, cache, tiling
        )
        grid = (extents.row_tiles * extents.kv_heads, splits, extents.batch)
        self._on = lambda stream: kernel[grid, None, stream]
        counts = (extents.sq, extents.capacity, *views["k_cache"].shape[:2], extents.row_tiles, splits)
        self._scalars = (*map(np.uint32, counts), np.int32(max(window, 0)), scores.factor, scores.inner)

    def check_pages(self, lengths: Any, page_table: Any) -> None:
        """See that all pages with a key that a query sees are there, where that can be seen without waiting for a GPU.

        Raises:
            ValueError: one is not.
        """
        if page_table is None or not self._host:
            return
        table, sq, capacity = seen(page_table), self.extents.sq, self.extents.capacity
        pages, page_size = self._pages
        keys = np.minimum(seen(lengths).astype(np.int64), capacity)[:, None]
        first = keys - sq - self._window if self._window != UNBOUNDED else np.zeros_like(keys)
        at = page_size * np.arange(table.shape[1])
        wrong = (at < keys) & (at + page_size > first) & ((table < 0) | (table >= pages))
        if wrong.any():
            sequence, i = (int(x) for x in np.argwhere(wrong)[0])
            raise ValueError(
                f"{_CALLER}: page_table[{sequence}, {i}] is {table[sequence, i]}, and sequence {sequence} has "
                f"{keys[sequence, 0]} keys, {page_size} in a page; a number from 0 to {pages - 1} expected"
            )

    def workspace(self) -> Workspace:
        """A new one for this plan's launches."""
        return Workspace(self.extents, self._tiling, self.splits, self._host)

    def bind(
        self,
        q: Any,
        k_cache: Any,
        v_cache: Any,
        lengths: Any,
        page_table: Any,
        out: Any,
        lse: Any,
        workspace: Workspace,
        stream: int,
    ) -> Callable[[], Any]:
        """A launch for arrays where they are now; it keeps the workspace alive, not the arrays.

        Raises:
            ValueError: what is written shares memory with what is read, or is read-only.
        """
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths, "page_table": page_table}
        given |= {"out": out, "lse": lse}
        views = {name: arrays.view(array) for name, array in given.items() if array is not None}
        check_outputs(_CALLER, views, *(("out",) if lse is None else ("out", "lse")))
        maps = (
            TensorMap(seen(x), self._box, swizzle="128B", l2_promotion=self._l2_promotion, overlap=True, store=False)
            for x in (k_cache, v_cache)
        )
        return self._on(stream).bind(
            with_queries(q),
            *maps,
            with_queries(out),
            seen(workspace.lse if lse is None else lse, *self._lse),
            seen(lengths),
            np.uint32(0) if page_table is None else seen(page_table),
            workspace.partial,
            workspace.largest,
            workspace.totals,
            workspace.counters,
            *self._scalars,
        )


_options = remembered(Options)
_plans: dict[tuple, tuple[Plan, dict[tuple, Callable[[], Any]], dict[int, Workspace]]] = recent_plans()


def decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    *,
    page_table: Any = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int = UNBOUNDED,
    splits: int | None = None,
    out: Any = None,
    lse: Any = None,
    stream: object = None,
) -> Any:
    """Attention of the last queries of sequences to all of their keys, which a cache holds: O = softmax(scale Q Kᵀ) V.

    Query i of the Sq of a sequence of `n` keys is beside key n - Sq + i, and sees the keys up to that one.

    Args:
        q: (B, Hq, D), or (B, Sq, Hq, D) with 1 to 16 queries a sequence, float16 or bfloat16. D is a multiple of 8, at
            most 256, and rows begin at multiples of 16 bytes.
        k_cache, v_cache: (B, capacity, Hkv, D) of q's type; Hq is a multiple of Hkv. With a page table (pages,
            page_size, Hkv, D), page_size a multiple of 8. Any strides do, of multiples of 16 bytes from 0 on but for
            the last. What lies behind a sequence's end is not looked at.
        lengths: (B,), int32: keys of each sequence, those of the new queries included; more than the capacity count as
            the capacity, fewer than 0 as none.
        page_table: (B, most pages of a sequence), int32: where a sequence's pages are. Entries behind its end are not
            read, nor are those before its window. On a GPU nobody looks at them before the kernel does, to which one
            that is no page's stands for zeros.
        scale: what the scores are multiplied by; 1 / sqrt(D) by default.
        soft_cap: bound of the scores, by a hyperbolic tangent; 0 for none.
        window: keys before its own that a query sees; -1 for all.
        splits: blocks that share a sequence, at most; by default as many as the GPU has room for.
        out: as q, written; by default a new array of the kind of q. It may be q, and shares memory with no other array.
        lse: (B, Hq) or (B, Hq, Sq), as q has queries, float32: written if given, the logarithm of each row's sum of
            exponentials.
        stream: a stream's handle or object; by default PyTorch's or CuPy's current one, or the default stream.

    A query that sees no key gets zeros, and minus infinity in lse. Nothing waits for the GPU, and nothing but `out` is
    allocated, except at the first call with arrays like these on a stream. Calls of one stream share a workspace: what
    is captured into a graph that may run beside others is better bound by `bind_decode`.

    Returns:
        `out`.

    Raises:
        TypeError: not arrays.
        ValueError: extents, types, strides or options do not fit; the message says what would. Or a sequence has a key
            in a page that there is not, if the page table is in the host's memory.
        RuntimeError: a first call while the stream is captured into a graph.
    """
    options = _options(scale, soft_cap, window, splits)
    given = (q, k_cache, v_cache, lengths, page_table, out, lse)
    key = (tuple([layout(array, _CALLER) for array in given]), options, backend())
    stream = current_stream(q) if stream is None else driver.stream_handle(stream)
    found = _plans.get(key)
    if found is None:
        found = (Plan(*given, options), recent_places(), {})
        _plans[key] = found
    planned, places, workspaces = found
    planned.check_pages(lengths, page_table)
    if out is None:
        out = planned.new_output(q)
        given = (*given[:5], out, lse)
    place = (*[array if array is None else pointer(array) for array in given], stream)
    bound = None if watched() else places.get(place)
    if bound is None:
        workspace = workspaces.get(stream)
        if workspace is None:
            _refuse_capture(q, stream)
            workspace = workspaces[stream] = planned.workspace()
        bound = planned.bind(*given, workspace, stream)
        if not watched():
            places[place] = bound
    bound()
    return out


def bind_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    out: Any,
    lse: Any = None,
    *,
    page_table: Any = None,
    stream: object = None,
    **options: Any,
) -> Callable[[], Any]:
    """`decode` for arrays that stay where they are: a function that launches it, and allocates nothing.

    It has a workspace of its own, and keeps the arrays alive. In the simulator it gives a report.

    Args:
        q, k_cache, v_cache, lengths, out, lse, page_table, stream: as `decode` takes them.
        options: `scale`, `soft_cap`, `window` and `splits` of `decode`; and how the kernel is cut: `keys` of a tile
            (16, 32, 64 or 128), `warps` of a block, `stages` of a warp's ring, and the tensor maps' `l2_promotion`.

    Raises:
        TypeError: not arrays, or no such option.
        ValueError: as `decode`.
    """
    stream = current_stream(q) if stream is None else driver.stream_handle(stream)
    given = (q, k_cache, v_cache, lengths, page_table, out, lse)
    for name in options:
        if name not in Options.__dataclass_fields__:
            raise TypeError(f"bind_decode has no option {name!r}; it has {', '.join(Options.__dataclass_fields__)}")
    if out is None:
        raise TypeError("bind_decode: out is None; an array is expected, which it writes each time")
    planned = Plan(*given, Options(**options))
    bound = planned.bind(*given, planned.workspace(), stream)

    def launch() -> Any:
        planned.check_pages(lengths, page_table)
        return bound()

    launch.keeps = given
    return launch


def _refuse_capture(q: Any, stream: int) -> None:
    if not arrays.view(q).host and driver.is_capturing(stream):
        raise RuntimeError(
            "decode: the first call with such arrays allocates its workspace, which cannot be captured into a graph; "
            "call it once before on this stream, or capture what bind_decode gives"
        )


def _extents(views: dict[str, ArrayView]) -> Extents:
    """The extents, which all arrays agree on."""
    q, k = views["q"], views["k_cache"]
    if len(q.shape) not in (3, 4) or 0 in q.shape:
        raise ValueError(f"{_CALLER}: q has the shape {q.shape}; (B, Hq, D) or (B, Sq, Hq, D) expected, none of them 0")
    batch, *queries, heads, head_dim = q.shape
    sq = queries[0] if queries else 1
    check_batch(_CALLER, batch)
    if sq > MAX_QUERIES:
        raise ValueError(f"{_CALLER}: {sq} queries a sequence; at most {MAX_QUERIES}: this is for a few at the end")
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"{_CALLER}: head_dim {head_dim}; a multiple of 8 expected, {MAX_HEAD_DIM} at most: pad q and the cache "
            f"with zeros (and give `scale`)"
        )
    capacity = capacity_of(_CALLER, views, batch, head_dim, q.dtype)
    kv_heads = k.shape[2]
    if heads % kv_heads:
        raise ValueError(f"{_CALLER}: {heads} heads of queries, {kv_heads} of keys: each serves equally many of those")
    out, lse = views.get("out"), views.get("lse")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(f"{_CALLER}: out is {out.dtype} {out.shape}; {q.dtype} of shape {q.shape} expected")
    wanted = (batch, heads, *queries)
    if lse is not None and (lse.shape != wanted or lse.dtype != np.float32):
        raise ValueError(f"{_CALLER}: lse is {lse.dtype} {lse.shape}; float32 of shape {wanted} expected")
    return Extents(batch, sq, heads, kv_heads, head_dim, capacity)


def _check_forwards(views: dict[str, ArrayView]) -> None:
    """See that the copy engine can step through the caches."""
    for name in ("k_cache", "v_cache"):
        view = views[name]
        if any(step < 0 for step, extent in zip(view.strides, view.shape, strict=True) if extent > 1):
            raise ValueError(
                f"{_CALLER}: {name} runs backwards, its strides are {view.strides} B; the copy engine steps forwards "
                f"only: copy it"
            )


def _splits(options: Options, extents: Extents, tiling: Tiling) -> int:
    if options.splits is None:
        return splits_for(extents, tiling, multiprocessors())
    if not 1 <= options.splits <= MOST_BLOCKS:
        raise ValueError(f"{_CALLER}: splits {options.splits}; 1 or more expected, {MOST_BLOCKS} at most")
    return options.splits


def _whole(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{_CALLER}: {name} is {value!r}; a whole number expected, or None") from None


def _window(window: int) -> int:
    if not isinstance(window, (int, np.integer)) or window < UNBOUNDED:
        raise ValueError(
            f"{_CALLER}: window {window!r}; expected the number of keys before its own that a query sees, or -1 for all"
        )
    return min(int(window), MOST_KEYS)

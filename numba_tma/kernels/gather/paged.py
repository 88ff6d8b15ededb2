"""Gather the pages of a cache: the keys or values of each sequence, which a page table has scattered, in order.

The problem. A cache holds pages of T tokens, of H heads of D elements each; a table names the pages of each of B
sequences, -1 where it has none:

    out[b, h, i · T + t, :] = cache[table[b, i], t, h, :],   zeros where table[b, i] is no page of the cache

so that heads, which lie side by side for each token in the cache, come to be rows of their own.

What moves the data: an element a thread (plain), 16 bytes a thread (vector), the copy engine with 4-D tensor maps
(tensor): a box of one page and one head in, the same box out elsewhere. A page number of -1 lies outside the cache, and
its box arrives as zeros.

Costs: B · pages · T · H · D elements read and written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import int32, uint32, uint64

from ... import arrays, dtypes, ptx
from ...arrays import ArrayView
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait
from ...shared import Barriers, Shared, SharedMemoryError, Tiles
from ...tensor_map import TensorMap, TensorMapError
from ..calls import check_extents, check_written, in_vectors, viewed
from ..peers import as_torch
from ..problem import Case, Problem, Variant, check_options

BLOCK_BYTES = 32 * 1024  # under way in a block
L2_PROMOTION = "128B"  # rows of a few hundred bytes: fetching more than is asked for costs a tenth of the rate


@functools.cache
def make_plain(threads: int = 256) -> Kernel:
    """A block a page of a sequence; an element a thread and step."""

    @kernel(threads=threads)
    def paged_plain(cache, table, out):
        sequence, place = cuda.blockIdx.y, cuda.blockIdx.x
        page = table[sequence, place]
        tokens, heads, depth = uint32(cache.shape[1]), uint32(cache.shape[2]), uint32(cache.shape[3])
        for i in range(cuda.threadIdx.x, tokens * heads * depth, threads):
            row = uint32(uint32(i) // depth)
            t, h = uint32(row // heads), uint32(row % heads)
            d = uint32(uint32(i) - uint32(row * depth))
            if page >= 0 and page < cache.shape[0]:
                out[sequence, h, uint32(uint32(place) * tokens + t), d] = cache[page, t, h, d]
            else:
                out[sequence, h, uint32(uint32(place) * tokens + t), d] = 0

    return paged_plain


@functools.cache
def make_vector(threads: int = 256) -> Kernel:
    """As `make_plain`, 16 bytes a thread and step; cache and out as bytes."""

    @kernel(threads=threads)
    def paged_vector(cache, table, out):
        sequence, place = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
        page = table[sequence, place]
        tokens, heads = uint32(cache.shape[1]), uint32(cache.shape[2])
        vectors = uint32(uint32(cache.shape[3]) // uint32(16))
        for i in range(uint32(cuda.threadIdx.x), tokens * heads * vectors, uint32(threads)):
            row = uint32(uint32(i) // vectors)
            vector = uint32(uint32(i) - uint32(row * vectors))
            t, h = uint32(row // heads), uint32(row % heads)
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if page >= 0 and page < cache.shape[0]:
                source = ptx.global_address(cache) + uint64(page) * uint64(cache.strides[0])
                source += uint64(t) * uint64(cache.strides[1]) + uint64(h) * uint64(cache.strides[2])
                a, b, c, d = ptx.ld_global_nc_v4_u32(source + uint64(vector) * uint64(16))
            target = ptx.global_address(out) + uint64(sequence) * uint64(out.strides[0])
            target += uint64(h) * uint64(out.strides[1]) + uint64(place * tokens + t) * uint64(out.strides[2])
            ptx.st_global_v4_u32(target + uint64(vector) * uint64(16), a, b, c, d)

    return paged_vector


@functools.cache
def make_tensor(tokens: int, depth: int, heads: int, dtype: str) -> Kernel:
    """A thread a head: its box of a page in, and out again; `heads` of them a block."""
    if not 1 <= heads <= 32:
        raise ValueError(f"heads {heads}: 1 to 32 expected, one for each of a block's threads")
    smem = Shared(part=Tiles(heads, (tokens, depth), dtype), full=Barriers(heads))

    @kernel(threads=32, shared=smem)
    def paged_tensor(cache_map, table, out_map, all_heads):
        thread = uint32(cuda.threadIdx.x)
        head = uint32(uint32(cuda.blockIdx.z) * uint32(heads) + thread)
        if thread < heads and head < all_heads:
            sequence, place = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.x)
            page = int32(table[sequence, place])
            part, bar = smem.part[thread], smem.full[thread]
            ptx.mbarrier_init(bar, 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(bar, cache_map.box_bytes)
            ptx.cp_async_bulk_tensor_4d_shared_global(part, cache_map, 0, int32(head), 0, page, bar)
            mbarrier_wait(bar, 0)
            first = int32(place * uint32(tokens))
            ptx.cp_async_bulk_tensor_4d_global_shared(out_map, 0, first, int32(head), int32(sequence), part)
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group_read(0)

    return paged_tensor


# ---------------------------------------------------------------------------------------------------------------------
# Host side.


def _bind_plain(given: Mapping[str, Any], *, threads: int = 256, stream: object = None) -> Callable[[], Any]:
    table = arrays.view(given["table"])
    launcher = make_plain(threads)[table.shape[::-1], None, stream]
    return launcher.bind(given["cache"], given["table"], given["out"])


def _bind_vector(given: Mapping[str, Any], *, threads: int = 256, stream: object = None) -> Callable[[], Any]:
    table = arrays.view(given["table"])
    as_bytes = {}
    for name in ("cache", "out"):
        v = arrays.view(given[name])
        if not in_vectors(v):
            raise ValueError(
                f"paged.vector: {name} has rows of {v.shape[-1]} × {v.dtype} and strides {v.strides} B at "
                f"{v.pointer:#x}; contiguous rows of multiples of 16 B expected: pad the depth, or take variant 'plain'"
            )
        shape = (*v.shape[:-1], v.shape[-1] * v.dtype.itemsize)
        as_bytes[name] = arrays.reinterpret(given[name], np.uint8, shape, (*v.strides[:-1], 1))
    launcher = make_vector(threads)[table.shape[::-1], None, stream]
    return launcher.bind(as_bytes["cache"], given["table"], as_bytes["out"])


def _bind_tensor(given: Mapping[str, Any], *, heads: int | None = None, stream: object = None) -> Callable[[], Any]:
    cache, table = arrays.view(given["cache"]), arrays.view(given["table"])
    _, tokens, all_heads, depth = cache.shape
    heads = heads or _heads(cache)
    cache_map, out_map = _maps(given)
    kernel = make_tensor(tokens, depth, heads, cache.dtype.name)
    grid = (table.shape[1], table.shape[0], -(-all_heads // heads))
    return kernel[grid, None, stream].bind(cache_map, given["table"], out_map, np.uint32(all_heads))


def _heads(cache: ArrayView) -> int:
    """Of a block, so that it has `BLOCK_BYTES` under way."""
    _, tokens, heads, depth = cache.shape
    return max(1, min(32, heads, BLOCK_BYTES // (tokens * depth * cache.dtype.itemsize)))


def _maps(given: Mapping[str, Any]) -> tuple[TensorMap, TensorMap]:
    """Of cache and of out, in boxes of a page's tokens of one head."""
    _, tokens, _, depth = arrays.view(given["cache"]).shape
    cache_map = TensorMap(given["cache"], (1, tokens, 1, depth), l2_promotion=L2_PROMOTION, store=False)
    return cache_map, TensorMap(given["out"], (1, 1, tokens, depth))


def _choose(given: Mapping[str, Any]) -> str:
    """The fastest variant that the arrays allow."""
    cache, out = arrays.view(given["cache"]), arrays.view(given["out"])
    if not in_vectors(cache) or not in_vectors(out):
        return "plain"
    try:
        _maps(given)
        make_tensor(cache.shape[1], cache.shape[3], _heads(cache), cache.dtype.name)
    except (TensorMapError, SharedMemoryError, TypeError):  # pages larger than a box or a block has room for, types
        return "vector"
    return "tensor"


OPTIONS = {"plain": ("threads",), "vector": ("threads",), "tensor": ("heads",)}


def paged(cache: Any, table: Any, out: Any, *, variant: str | None = None, **options: Any) -> None:
    """Put the pages of each sequence in order, and heads in rows of their own.

    Args:
        cache: (pages, tokens, heads, depth). For `tensor` at most 256 tokens and 256 elements of depth, of any type
            that the copy engine has; for all but `plain` rows of multiples of 16 bytes.
        table: int32 (sequences, places): pages; -1, or any other number that is none of the cache's, for zeros.
        out: (sequences, heads, places · tokens, depth) of cache's dtype, written.
        variant: plain, vector or tensor; by default the last of them that the arrays allow.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes or layouts do not fit, an extent is 2^31 or more, or out shares memory with another
            array; the message says what would do.
    """
    views = viewed("paged", cache=cache, table=table, out=out)
    if len(views["cache"].shape) != 4:
        raise ValueError(f"paged: cache has the shape {views['cache'].shape}; (pages, tokens, heads, depth) expected")
    if views["table"].dtype != np.int32 or len(views["table"].shape) != 2:
        raise ValueError(f"paged: table is {views['table'].dtype} {views['table'].shape}; int32 (sequences, places)")
    _, tokens, heads, depth = views["cache"].shape
    sequences, places = views["table"].shape
    shape = (sequences, heads, places * tokens, depth)
    if views["out"].shape != shape or views["out"].dtype != views["cache"].dtype:
        raise ValueError(
            f"paged: out is {views['out'].dtype} {views['out'].shape}; {views['cache'].dtype} {shape} expected"
        )
    check_extents("paged", views)
    check_written("paged", views, "out")
    given = {"cache": cache, "table": table, "out": out}
    variant = variant or (_choose(given) if views["out"].size else "tensor")
    chosen = PROBLEM.variant(variant)
    check_options("paged", chosen, options, OPTIONS[variant])
    if views["out"].size:
        chosen.bind(given, **options)()


def reference(cache: np.ndarray, table: np.ndarray) -> np.ndarray:
    """What `out` should hold."""
    there = (table >= 0) & (table < len(cache))
    pages = np.zeros((*table.shape, *cache.shape[1:]), cache.dtype)  # (sequences, places, tokens, heads, depth)
    pages[there] = cache[table[there]]
    sequences, places, tokens, heads, depth = pages.shape
    return np.ascontiguousarray(pages.transpose(0, 3, 1, 2, 4).reshape(sequences, heads, places * tokens, depth))


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    sequences, places, tokens, heads, depth = case.shape
    dtype = dtypes.lookup(case.dtype).numpy
    pages = sequences * places + 3
    cache = rng.integers(-100, 100, (pages, tokens, heads, depth)).astype(dtype)
    table = rng.permutation(pages)[: sequences * places].reshape(sequences, places).astype(np.int32)
    table[rng.random(table.shape) < 1 / 16] = -1
    return {"cache": cache, "table": table, "out": np.empty((sequences, heads, places * tokens, depth), dtype)}


def _torch(given: Mapping[str, Any], **_: Any) -> Callable[[], Any] | None:
    """An indexed read, and a copy that puts heads in front; pages that are not there are those of page 0."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    cache, table, out = (as_torch(given[name]) for name in ("cache", "table", "out"))
    sequences, places = table.shape
    _, tokens, heads, depth = cache.shape
    target = out.view(sequences, heads, places, tokens, depth)
    pages = table.clamp(min=0).long()
    return lambda: target.copy_(cache[pages].permute(0, 3, 1, 2, 4))


PROBLEM = Problem(
    name="paged",
    title="gather pages of a key-value cache by a page table",
    inputs=_inputs,
    outputs=("out",),
    reference=lambda given, case: {"out": reference(given["cache"], given["table"])},
    bytes_moved=lambda case: 2 * int(np.prod(case.shape)) * dtypes.lookup(case.dtype).numpy.itemsize,
    flops=lambda case: 0,
    variants=(
        Variant("plain", "ld/st", "an element a thread and step", _bind_plain, baseline=True),
        Variant("vector", "ld/st", "16 bytes a thread and access", _bind_vector),
        Variant("tensor", "TMA", "a box of a page and a head in and out, a thread each", _bind_tensor),
    ),
    cases={
        ("default", "sim"): [Case((3, 5, 16, 4, 64), "float16"), Case((2, 3, 7, 3, 24), "float32")],
        ("quick", "sim"): [Case((2, 3, 8, 3, 16), "float16"), Case((2, 2, 5, 2, 8), "float32")],
        ("default", "gpu"): [Case((16, 128, 16, 8, 128), "float16")],
        ("quick", "gpu"): [Case((3, 5, 16, 4, 64), "float16")],
    },
    peers={"torch": _torch},
)

"""The cache of keys and values that `decode` reads: what it must be like, and how new keys and values get into it.

A contiguous cache is (B, capacity, Hkv, D), a row of keys for each sequence. A paged one is (pages, page_size, Hkv, D):
key j of sequence b is row j % page_size of page `page_table[b, j // page_size]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import int32, uint32, uint64

from ... import arrays, driver, ptx
from ...arrays import ArrayView
from ...launch import Kernel, kernel
from ...pitch import is_pitched
from ..calls import MAX_EXTENT, check_written, current_stream, seen, viewed
from .operands import INPUTS
from .warp_mma import head_start

_THREADS = 128
_VECTOR = 8  # elements, 16 bytes
MOST_BLOCKS = 65535  # in a grid's second and third dimension
_OPTIONAL = ("page_table", "lse")  # arrays that may be None


def views_of(caller: str, **given: Any) -> dict[str, ArrayView]:
    """The arrays, seen, without optional ones that are None; all in one memory, their last dimension contiguous.

    Raises:
        TypeError: not an array.
        ValueError: they lie in different memories, or in other steps.
    """
    present = {name: array for name, array in given.items() if array is not None or name not in _OPTIONAL}
    views = viewed(caller, **present)
    for name, found in views.items():
        if found.size and found.shape and found.shape[-1] > 1 and found.strides[-1] != found.dtype.itemsize:
            raise ValueError(
                f"{caller}: {name} has strides of {found.strides} B; its last dimension must be contiguous: copy it"
            )
        if found.host != next(iter(views.values())).host:
            first = next(iter(views))
            raise ValueError(f"{caller}: {name} and {first} must lie in the same memory, a GPU's or the host's")
    return views


def check_rows(caller: str, **given: Any) -> None:
    """See that rows can be moved by 16 bytes.

    Raises:
        ValueError: they do not begin at multiples of 16 bytes.
    """
    for name, array in given.items():
        if not is_pitched(array):
            view = arrays.view(array)
            raise ValueError(
                f"{caller}: {name} begins at the address {view.pointer:#x}, its strides are {view.strides} B; its rows "
                f"must begin at multiples of 16 bytes: copy it"
            )


def check_batch(caller: str, batch: int) -> None:
    """See that a grid has room for so many sequences.

    Raises:
        ValueError: it has not.
    """
    if batch > MOST_BLOCKS:
        raise ValueError(f"{caller}: {batch} sequences; at most {MOST_BLOCKS}, a grid's extent: take several calls")


def capacity_of(caller: str, views: Mapping[str, ArrayView], batch: int, head_dim: int, dtype: np.dtype) -> int:
    """Keys that a sequence can have in the cache "k_cache", "v_cache", perhaps with "page_table", for "lengths".

    Raises:
        ValueError: extents or types do not fit each other, the batch, the head dimension or the type.
    """
    k, v, lengths, table = (views.get(name) for name in ("k_cache", "v_cache", "lengths", "page_table"))
    if len(k.shape) != 4 or k.shape != v.shape or k.shape[3] != head_dim or 0 in k.shape:
        raise ValueError(
            f"{caller}: k_cache is {k.shape}, v_cache {v.shape}; both must be (B, capacity, Hkv, {head_dim}), or "
            f"(pages, page_size, Hkv, {head_dim}) with a page table, no extent 0"
        )
    if dtype.name not in INPUTS or k.dtype != dtype or v.dtype != dtype:
        raise ValueError(
            f"{caller}: the new ones are {dtype}, k_cache {k.dtype}, v_cache {v.dtype}; all float16 or all bfloat16 "
            f"expected"
        )
    if lengths.shape != (batch,) or lengths.dtype != np.int32:
        raise ValueError(f"{caller}: lengths is {lengths.dtype} {lengths.shape}; int32 of shape ({batch},) expected")
    if table is None:
        if k.shape[0] != batch:
            raise ValueError(
                f"{caller}: {batch} sequences, and {k.shape[0]} in the cache; if these are pages, give the page table"
            )
        return _reached(caller, k.shape[1])
    if len(table.shape) != 2 or table.shape[0] != batch or table.dtype != np.int32 or 0 in table.shape:
        raise ValueError(
            f"{caller}: page_table is {table.dtype} {table.shape}; int32 of shape ({batch}, most pages of a sequence) "
            f"expected"
        )
    return _reached(caller, table.shape[1] * k.shape[1])


def _reached(caller: str, capacity: int) -> int:
    if capacity > MAX_EXTENT:
        raise ValueError(f"{caller}: room for {capacity:,} keys a sequence; at most {MAX_EXTENT:,}, where numbers end")
    return capacity


def with_queries(array: Any) -> Any:
    """(B, heads, D) as (B, 1, heads, D); four dimensions as they are."""
    view = arrays.view(array)
    if len(view.shape) == 4:
        return seen(array)
    batch, heads, columns = view.shape
    step, *steps = view.strides
    return seen(array, (batch, 1, heads, columns), (step, 16, *steps))


@functools.cache
def make_append(page_size: int) -> Kernel:
    """Make append_kv(k, v, k_cache, v_cache, lengths, page_table, capacity): a thread copies 8 elements of K and of V.

    The grid is (new keys, pieces of a key's heads and columns, batch). `page_size` is 0 for a contiguous cache.
    """

    @cuda.jit(device=True, forceinline=True)
    def copy_piece(new, cache, batch, number, place, row, head, column):
        offset = uint64(column) * uint64(2)
        source = head_start(new, batch, head) + uint64(number) * uint64(new.strides[1]) + offset
        x0, x1, x2, x3 = ptx.ld_global_v4_u32(source)
        target = head_start(cache, place, head) + uint64(row) * uint64(cache.strides[1]) + offset
        ptx.st_global_v4_u32(target, x0, x1, x2, x3)

    @kernel(threads=_THREADS)
    def append_kv(k, v, k_cache, v_cache, lengths, page_table, capacity):
        at = uint32(uint32(cuda.blockIdx.y) * uint32(_THREADS) + uint32(cuda.threadIdx.x))
        number, batch = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.z)
        pieces = uint32(uint32(k.shape[3]) // uint32(_VECTOR))
        head, column = uint32(at // pieces), uint32(at % pieces * uint32(_VECTOR))
        position = int32(int32(lengths[batch]) - int32(k.shape[1]) + int32(number))
        if head >= k.shape[2] or position < 0 or position >= int32(capacity):
            return
        place, row = int32(batch), uint32(position)
        if page_size:
            place, row = page_table[batch, row // uint32(page_size)], uint32(row % uint32(page_size))
        if place < 0 or place >= k_cache.shape[0]:
            return
        copy_piece(k, k_cache, batch, number, place, row, head, column)
        copy_piece(v, v_cache, batch, number, place, row, head, column)

    return append_kv


def bind_append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    *,
    page_table: Any = None,
    stream: object = None,
) -> Callable[[], Any]:
    """A function that puts new keys and values where `lengths` says that the sequences end; it allocates nothing.

    The n new ones of sequence b become its keys lengths[b] - n to lengths[b] - 1. Those before the first key or behind
    the capacity, and those of pages that there are not, are left out.

    Args:
        k, v: (B, Hkv, D), or (B, n, Hkv, D), float16 or bfloat16, rows at multiples of 16 bytes.
        k_cache, v_cache, lengths, page_table: as `decode` takes them; the lengths count the new keys.
        stream: a stream's handle or object; by default PyTorch's or CuPy's current one, or the default stream.

    Raises:
        TypeError: not arrays.
        ValueError: extents, types or strides do not fit, or the caches share memory; the message says what would do.
    """
    caller = "append"
    views = views_of(caller, k=k, v=v, k_cache=k_cache, v_cache=v_cache, lengths=lengths, page_table=page_table)
    new = views["k"]
    if len(new.shape) not in (3, 4) or views["v"].shape != new.shape or 0 in new.shape or new.shape[-1] % _VECTOR:
        raise ValueError(
            f"{caller}: k is {new.shape}, v {views['v'].shape}; both must be (B, Hkv, D) or (B, n, Hkv, D), D a "
            f"multiple of {_VECTOR}, no extent 0"
        )
    if views["v"].dtype != new.dtype or new.shape[-2:] != views["k_cache"].shape[-2:]:
        raise ValueError(
            f"{caller}: k is {new.dtype} {new.shape}, v {views['v'].dtype}, the cache {views['k_cache'].shape}: they "
            f"must have one type, and the cache's heads and columns"
        )
    capacity = capacity_of(caller, views, new.shape[0], new.shape[-1], new.dtype)
    check_batch(caller, new.shape[0])
    check_written(caller, views, "k_cache", "v_cache")
    check_rows(caller, k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    stream = current_stream(k) if stream is None else driver.stream_handle(stream)
    page_size = views["k_cache"].shape[1] if page_table is not None else 0
    count = new.shape[1] if len(new.shape) == 4 else 1
    pieces = -(-new.shape[-2] * new.shape[-1] // (_VECTOR * _THREADS))
    bound = make_append(page_size)[(count, pieces, new.shape[0]), None, stream].bind(
        with_queries(k),
        with_queries(v),
        seen(k_cache),
        seen(v_cache),
        seen(lengths),
        np.uint32(0) if page_table is None else seen(page_table),
        np.uint32(capacity),
    )
    keeps = (k, v, k_cache, v_cache, lengths, page_table)

    def launch() -> Any:
        return bound()

    launch.keeps = keeps
    return launch


def append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    lengths: Any,
    *,
    page_table: Any = None,
    stream: object = None,
) -> None:
    """Put new keys and values at the sequences' ends; arguments and what is raised are `bind_append`'s."""
    bind_append(k, v, k_cache, v_cache, lengths, page_table=page_table, stream=stream)()

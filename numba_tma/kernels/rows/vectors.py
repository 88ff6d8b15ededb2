"""Sixteen bytes of a row at a time: float32 numbers in registers, whatever the row's type is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import int32, uint32

from ... import ptx
from ...unroll import unroll

DTYPES = ("float32", "float16", "bfloat16")


class Vectors(NamedTuple):
    """Device functions on a vector of `width` elements, which are `values[base]` and the next in a local array.

    load_shared(values, base, address), load_global(values, base, address)
        Read 16 bytes, widened to float32.
    load_by_policy(values, base, address, policy)
        Read 16 bytes of global memory with a cache policy for L2.
    store_global(address, values, base)
        Write 16 bytes, rounded to the row's type.
    keep(words, base, address), scale(values, base, words, word)
        Read 16 bytes of global memory as they are, four words from `words[base]` on; multiply by them.
    """

    width: int
    load_shared: Callable
    load_global: Callable
    load_by_policy: Callable
    store_global: Callable
    keep: Callable
    scale: Callable


@functools.cache
def make_vectors(dtype: str) -> Vectors:
    """The functions for rows of `dtype`, one of `DTYPES`."""

    @cuda.jit(device=True, forceinline=True)
    def keep(words, base, address):
        a, b, c, d = ptx.ld_global_nc_v4_u32(address)
        words[base], words[base + 1], words[base + 2], words[base + 3] = a, b, c, d

    return _single(keep) if dtype == "float32" else _half(keep, dtype)


def _single(keep: Callable) -> Vectors:
    @cuda.jit(device=True, forceinline=True)
    def put(values, base, a, b, c, d):
        values[base], values[base + 1], values[base + 2], values[base + 3] = a, b, c, d

    @cuda.jit(device=True, forceinline=True)
    def load_shared(values, base, address):
        a, b, c, d = ptx.ld_shared_v4_f32(address)
        put(values, base, a, b, c, d)

    @cuda.jit(device=True, forceinline=True)
    def load_global(values, base, address):
        a, b, c, d = ptx.ld_global_nc_v4_f32(address)
        put(values, base, a, b, c, d)

    @cuda.jit(device=True, forceinline=True)
    def load_by_policy(values, base, address, policy):
        a, b, c, d = ptx.ld_global_nc_v4_u32_l2_hint(address, policy)
        number = cuda.libdevice.int_as_float
        put(values, base, number(int32(a)), number(int32(b)), number(int32(c)), number(int32(d)))

    @cuda.jit(device=True, forceinline=True)
    def store_global(address, values, base):
        ptx.st_global_v4_f32(address, values[base], values[base + 1], values[base + 2], values[base + 3])

    @cuda.jit(device=True, forceinline=True)
    def scale(values, base, words, word):
        for i in range(4):
            unroll()
            values[base + i] *= cuda.libdevice.int_as_float(int32(words[word + i]))

    return Vectors(4, load_shared, load_global, load_by_policy, store_global, keep, scale)


def _half(keep: Callable, dtype: str) -> Vectors:
    widen = ptx.cvt_f32_f16x2 if dtype == "float16" else ptx.cvt_f32_bf16x2
    narrow = ptx.cvt_rn_f16x2_f32 if dtype == "float16" else ptx.cvt_rn_bf16x2_f32

    @cuda.jit(device=True, forceinline=True)
    def put(values, base, a, b, c, d):
        values[base], values[base + 1] = widen(a)
        values[base + 2], values[base + 3] = widen(b)
        values[base + 4], values[base + 5] = widen(c)
        values[base + 6], values[base + 7] = widen(d)

    @cuda.jit(device=True, forceinline=True)
    def load_shared(values, base, address):
        a, b, c, d = ptx.ld_shared_v4_u32(address)
        put(values, base, a, b, c, d)

    @cuda.jit(device=True, forceinline=True)
    def load_global(values, base, address):
        a, b, c, d = ptx.ld_global_nc_v4_u32(address)
        put(values, base, a, b, c, d)

    @cuda.jit(device=True, forceinline=True)
    def load_by_policy(values, base, address, policy):
        a, b, c, d = ptx.ld_global_nc_v4_u32_l2_hint(address, policy)
        put(values, base, a, b, c, d)

    @cuda.jit(device=True, forceinline=True)
    def pair(values, base):
        return narrow(values[base + 1], values[base])

    @cuda.jit(device=True, forceinline=True)
    def store_global(address, values, base):
        a, b = pair(values, base), pair(values, base + 2)
        c, d = pair(values, base + 4), pair(values, base + 6)
        ptx.st_global_v4_u32(address, a, b, c, d)

    @cuda.jit(device=True, forceinline=True)
    def scale(values, base, words, word):
        for i in range(4):
            unroll()
            low, high = widen(uint32(words[word + i]))
            values[base + 2 * i] *= low
            values[base + 2 * i + 1] *= high

    return Vectors(8, load_shared, load_global, load_by_policy, store_global, keep, scale)

"""Sixteen bytes of a row at a time: four words as they are in memory, or float32 numbers, whatever the row's type is.

Loading and widening are two steps, so that the loads of several vectors stand beside each other: each is one predicated
instruction, and none waits for another's numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda.types import int32, uint32

from ... import dtypes, ptx
from ...unroll import unroll

DTYPES = ("float32", "float16", "bfloat16")
WORDS = 4


@cuda.jit(device=True, forceinline=True)
def load_shared(words, word, address):
    """Read a vector of shared memory into `words[word]` and the next three."""
    words[word], words[word + 1], words[word + 2], words[word + 3] = ptx.ld_shared_v4_u32(address)


@cuda.jit(device=True, forceinline=True)
def load_global(words, word, address):
    """Read a vector of global memory that nothing else writes."""
    words[word], words[word + 1], words[word + 2], words[word + 3] = ptx.ld_global_nc_v4_u32(address)


@cuda.jit(device=True, forceinline=True)
def load_by_policy(words, word, address, policy):
    """The same, with a cache policy for L2."""
    a, b, c, d = ptx.ld_global_nc_v4_u32_l2_hint(address, policy)
    words[word], words[word + 1], words[word + 2], words[word + 3] = a, b, c, d


@cuda.jit(device=True, forceinline=True)
def store_global(address, words, word):
    """Write a vector to global memory."""
    ptx.st_global_v4_u32(address, words[word], words[word + 1], words[word + 2], words[word + 3])


class Vectors(NamedTuple):
    """Device functions on a vector of `width` elements: numbers from `values[base]` on, words from `words[word]` on.

    widen(values, base, words, word): numbers of words.
    scale(values, base, words, word): multiply by the numbers of words.
    narrow(words, word, values, base): words of numbers, rounded to the row's type.
    """

    width: int
    widen: Callable
    scale: Callable
    narrow: Callable


def word_of(dtype: str, value: float) -> int:
    """The word whose elements all are `value`."""
    element = dtypes.lookup(dtype).numpy
    return int(np.full(4 // element.itemsize, value, element).view(np.uint32)[0])


@functools.cache
def make_vectors(dtype: str) -> Vectors:
    """The functions for rows of `dtype`, one of `DTYPES`."""
    return _single() if dtype == "float32" else _half(dtype)


def _single() -> Vectors:
    number, bits = cuda.libdevice.int_as_float, cuda.libdevice.float_as_int

    @cuda.jit(device=True, forceinline=True)
    def widen(values, base, words, word):
        for i in range(WORDS):
            unroll()
            values[base + i] = number(int32(words[word + i]))

    @cuda.jit(device=True, forceinline=True)
    def scale(values, base, words, word):
        for i in range(WORDS):
            unroll()
            values[base + i] *= number(int32(words[word + i]))

    @cuda.jit(device=True, forceinline=True)
    def narrow(words, word, values, base):
        for i in range(WORDS):
            unroll()
            words[word + i] = uint32(bits(values[base + i]))

    return Vectors(4, widen, scale, narrow)


def _half(dtype: str) -> Vectors:
    numbers = ptx.cvt_f32_f16x2 if dtype == "float16" else ptx.cvt_f32_bf16x2
    rounded = ptx.cvt_rn_f16x2_f32 if dtype == "float16" else ptx.cvt_rn_bf16x2_f32

    @cuda.jit(device=True, forceinline=True)
    def widen(values, base, words, word):
        for i in range(WORDS):
            unroll()
            values[base + 2 * i], values[base + 2 * i + 1] = numbers(uint32(words[word + i]))

    @cuda.jit(device=True, forceinline=True)
    def scale(values, base, words, word):
        for i in range(WORDS):
            unroll()
            low, high = numbers(uint32(words[word + i]))
            values[base + 2 * i] *= low
            values[base + 2 * i + 1] *= high

    @cuda.jit(device=True, forceinline=True)
    def narrow(words, word, values, base):
        for i in range(WORDS):
            unroll()
            words[word + i] = rounded(values[base + 2 * i + 1], values[base + 2 * i])

    return Vectors(8, widen, scale, narrow)

"""What is computed on a row: softmax or RMSNorm, in a form that takes the row in pieces.

Both reduce a row to two numbers, (a, b), and then multiply each element. In a softmax a is the largest element and b
the sum of the exponentials relative to it; in RMSNorm b is the sum of squares, and a has no use. Parts of a row, of any
size, have such a pair each, and two pairs make one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import float32

from ... import ptx
from ...unroll import unroll

_ALL_LANES = 0xFFFFFFFF
_CHAINS = 4  # sums and maxima that grow beside each other, so that none waits for itself
_LOG2_E = math.log2(math.e)
_LOWEST = -3.4028234663852886e38  # the finite number that takes the place of a largest element of minus infinity


class Operation(NamedTuple):
    """Device functions; `values` is a local array of float32.

    missing: what an element that is not there counts as.
    partial(values): replace the values by what they weigh, and give their pair.
    merge(a, b, other_a, other_b): one pair of two.
    warp(a, b): one pair of a warp's 32, in every lane.
    weigh(value, a): what `partial` makes of a value where the largest is `a`.
    factor(own, a, b, inverse, epsilon): what to multiply weighed values by. They were weighed against `own`; (a, b) is
        the whole row's pair, `inverse` 1 / columns.
    weighted: whether the result is multiplied by a weight for each column.
    """

    name: str
    missing: float
    weighted: bool
    partial: Callable
    merge: Callable
    warp: Callable
    weigh: Callable
    factor: Callable


@cuda.jit(device=True, forceinline=True)
def power(difference):
    """e to the power of a difference of two elements."""
    return ptx.ex2_approx_ftz_f32(difference * float32(_LOG2_E))


@cuda.jit(device=True, forceinline=True)
def warp_sum(x):
    """The sum over a warp."""
    for i in range(5):
        unroll()
        x += cuda.shfl_xor_sync(_ALL_LANES, x, 16 >> i)
    return x


@functools.cache
def make_softmax(count: int) -> Operation:
    """A softmax whose threads hold `count` values each."""

    @cuda.jit(device=True, forceinline=True)
    def partial(values):
        chains = cuda.local.array(_CHAINS, float32)
        for i in range(_CHAINS):
            unroll()
            chains[i] = float32(_LOWEST)
        for i in range(count):
            unroll()
            chains[i % _CHAINS] = cuda.libdevice.fmaxf(chains[i % _CHAINS], values[i])
        largest = cuda.libdevice.fmaxf(
            cuda.libdevice.fmaxf(chains[0], chains[1]), cuda.libdevice.fmaxf(chains[2], chains[3])
        )
        for i in range(_CHAINS):
            unroll()
            chains[i] = float32(0)
        for i in range(count):
            unroll()
            values[i] = power(values[i] - largest)
            chains[i % _CHAINS] += values[i]
        return largest, (chains[0] + chains[1]) + (chains[2] + chains[3])

    @cuda.jit(device=True, forceinline=True)
    def merge(a, b, other_a, other_b):
        largest = cuda.libdevice.fmaxf(a, other_a)
        return largest, b * power(a - largest) + other_b * power(other_a - largest)

    @cuda.jit(device=True, forceinline=True)
    def warp(a, b):
        largest = a
        for i in range(5):
            unroll()
            largest = cuda.libdevice.fmaxf(largest, cuda.shfl_xor_sync(_ALL_LANES, largest, 16 >> i))
        return largest, warp_sum(b * power(a - largest))

    @cuda.jit(device=True, forceinline=True)
    def weigh(value, a):
        return power(value - a)

    @cuda.jit(device=True, forceinline=True)
    def factor(own, a, b, inverse, epsilon):
        return power(own - a) * ptx.rcp_approx_ftz_f32(b)

    return Operation("softmax", -math.inf, False, partial, merge, warp, weigh, factor)


@functools.cache
def make_rmsnorm(count: int) -> Operation:
    """RMSNorm whose threads hold `count` values each."""

    @cuda.jit(device=True, forceinline=True)
    def partial(values):
        chains = cuda.local.array(_CHAINS, float32)
        for i in range(_CHAINS):
            unroll()
            chains[i] = float32(0)
        for i in range(count):
            unroll()
            chains[i % _CHAINS] += values[i] * values[i]
        return float32(0), (chains[0] + chains[1]) + (chains[2] + chains[3])

    @cuda.jit(device=True, forceinline=True)
    def merge(a, b, other_a, other_b):
        return a, b + other_b

    @cuda.jit(device=True, forceinline=True)
    def warp(a, b):
        return a, warp_sum(b)

    @cuda.jit(device=True, forceinline=True)
    def weigh(value, a):
        return value

    @cuda.jit(device=True, forceinline=True)
    def factor(own, a, b, inverse, epsilon):
        return cuda.libdevice.rsqrtf(b * inverse + epsilon)

    return Operation("rmsnorm", 0.0, True, partial, merge, warp, weigh, factor)


MAKERS = {"softmax": make_softmax, "rmsnorm": make_rmsnorm}

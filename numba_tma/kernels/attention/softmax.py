"""The online softmax on fragments of scores, in the registers of a warp.

Tensor cores hand out accumulators of 16 rows and any number of columns in the same way, mma.sync's 8 columns at a time
and wgmma's at once: of every eight columns, lane i of a warp has columns 2 (i % 4) and 2 (i % 4) + 1 of row i / 4, and
then of row i / 4 + 8. So a thread holds parts of two rows of a fragment, "top" and "bottom", which it shares with three
neighbours. A warp may have several such fragments one below the other, of which rows 2 f and 2 f + 1 are the f-th's.

The exponents are base 2, since that is what the hardware has: factor · x, where `factor` holds the softmax's scale and
log2(e). A hidden score is minus infinity; a row that has seen none but such has that as its maximum.
PTX ISA: "Matrix Fragments for mma.m16n8k16", "Register Fragments for wgmma.mma_async.m64nNk16", "ex2".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from ... import ptx
from ...unroll import unroll
from .masks import TileMasks

_ALL_LANES = 0xFFFFFFFF
_LN_2 = math.log(2)
NOTHING = -math.inf  # the maximum of no scores


@cuda.jit(device=True, forceinline=True)
def quad_max(x):
    """The largest of the four lanes that share a row."""
    x = cuda.libdevice.fmaxf(x, cuda.shfl_xor_sync(_ALL_LANES, x, 1))
    return cuda.libdevice.fmaxf(x, cuda.shfl_xor_sync(_ALL_LANES, x, 2))


@cuda.jit(device=True, forceinline=True)
def quad_sum(x):
    """The sum over the four lanes that share a row."""
    x += cuda.shfl_xor_sync(_ALL_LANES, x, 1)
    return x + cuda.shfl_xor_sync(_ALL_LANES, x, 2)


@cuda.jit(device=True, forceinline=True)
def origin(largest, factor):
    """What to subtract from a row's exponents: its largest; 0 where all are minus infinity, which stay so."""
    return float32(0) if largest == float32(NOTHING) else largest * factor


@cuda.jit(device=True, forceinline=True)
def capped(x, inner):
    """tanh(x · inner ln 2 / 2), as 1 - 2 / (1 + 2^(inner · x)): 2^-22 off at most, where tanh.approx is 2^-11 off."""
    return float32(1) - float32(2) * ptx.rcp_approx_ftz_f32(float32(1) + ptx.ex2_approx_ftz_f32(x * inner))


@cuda.jit(device=True, forceinline=True)
def log_sum_exp(largest, total, factor):
    """Natural logarithm of a row's sum of exponentials; minus infinity if it saw no key, NaN if it saw one."""
    if total == float32(0):
        return float32(NOTHING)
    return float32(_LN_2) * (largest * factor + ptx.lg2_approx_ftz_f32(total))


@cuda.jit(device=True, forceinline=True)
def inverse(total):
    """What O's rows are multiplied by at the end; zero if a row saw no key."""
    return float32(0) if total == float32(0) else ptx.rcp_approx_ftz_f32(total)


class Softmax(NamedTuple):
    """Device functions on `s`, the scores of a warp: fragment by fragment, eight columns by eight, four a lane.

    cap(s, inner)
        Bound the scores, as `Scores` says.
    hide(s, row, key, skv, low, high)
        Scores of keys that a query does not see become minus infinity. `row` and `key` are those of the thread's first
        element; the rest as in `TileMasks`.
    weigh(s, factor, largest, total, shrink)
        Scores become weights, 2^(factor · x - the row's largest). For each of the thread's rows, `largest` (at first
        `NOTHING`) and `total` (0) take them in, the latter this thread's part alone, and `shrink` is what must be
        multiplied by: all that was made with the old maximum.
    """

    cap: Callable
    hide: Callable
    weigh: Callable


def make_softmax(columns: int, masks: TileMasks, fragments: int = 1) -> Softmax:
    """The device functions for so many keys and fragments of 16 queries."""
    eighths = columns // 8

    @cuda.jit(device=True, forceinline=True)
    def cap(s, inner):
        for i in range(4 * eighths * fragments):
            unroll()
            s[i] = capped(s[i], inner)

    @cuda.jit(device=True, forceinline=True)
    def hide(s, row, key, skv, low, high):
        for i in range(2 * fragments):
            unroll()
            first, end = masks.row_range(uint32(row + uint32(8 * i)), skv, low, high)
            first, end = int32(first - int32(key)), int32(end - int32(key))
            for j in range(eighths):
                unroll()
                r = 4 * (i // 2 * eighths + j) + 2 * (i % 2)
                if not masks.sees(int32(8 * j), first, end):
                    s[r] = float32(NOTHING)
                if not masks.sees(int32(8 * j + 1), first, end):
                    s[r + 1] = float32(NOTHING)

    @cuda.jit(device=True, forceinline=True)
    def weigh(s, factor, largest, total, shrink):
        for i in range(2 * fragments):
            unroll()
            most = largest[i]
            for j in range(eighths):
                unroll()
                r = 4 * (i // 2 * eighths + j) + 2 * (i % 2)
                most = cuda.libdevice.fmaxf(most, cuda.libdevice.fmaxf(s[r], s[r + 1]))
            most = quad_max(most)
            zero = origin(most, factor)
            shrink[i] = ptx.ex2_approx_ftz_f32(largest[i] * factor - zero)
            largest[i] = most
            total[i] *= shrink[i]
            for j in range(eighths):
                unroll()
                r = 4 * (i // 2 * eighths + j) + 2 * (i % 2)
                s[r] = ptx.ex2_approx_ftz_f32(s[r] * factor - zero)
                s[r + 1] = ptx.ex2_approx_ftz_f32(s[r + 1] * factor - zero)
                total[i] += s[r] + s[r + 1]

    return Softmax(cap, hide, weigh)

"""Rows of float32 or bfloat16 in vectors of eight elements, as the lanes of a warp read them."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from .. import dtypes, ptx

VECTOR = 8  # elements: 16 bytes of bfloat16, 32 of float32
_ALL_LANES = 0xFFFFFFFF


@cuda.jit(device=True, forceinline=True)
def warp_sum(x):
    """The sum over a warp's lanes, in each of them."""
    for shift in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(_ALL_LANES, x, shift)
    return x


@cuda.jit(device=True, forceinline=True)
def load8_f32(address):
    """Eight float32 from global memory, 32-byte aligned."""
    a0, a1, a2, a3 = ptx.ld_global_v4_f32(address)
    a4, a5, a6, a7 = ptx.ld_global_v4_f32(address + uint64(16))
    return a0, a1, a2, a3, a4, a5, a6, a7


@cuda.jit(device=True, forceinline=True)
def widen8(w0, w1, w2, w3):
    """Eight bfloat16 in four registers as float32."""
    a0, a1 = ptx.cvt_f32_bf16x2(w0)
    a2, a3 = ptx.cvt_f32_bf16x2(w1)
    a4, a5 = ptx.cvt_f32_bf16x2(w2)
    a6, a7 = ptx.cvt_f32_bf16x2(w3)
    return a0, a1, a2, a3, a4, a5, a6, a7


@cuda.jit(device=True, forceinline=True)
def load8_bf16(address):
    """Eight bfloat16 from global memory, 16-byte aligned, as float32."""
    w0, w1, w2, w3 = ptx.ld_global_v4_u32(address)
    return widen8(w0, w1, w2, w3)


@cuda.jit(device=True, forceinline=True)
def store8_f32(address, a0, a1, a2, a3, a4, a5, a6, a7):
    """Eight float32 to global memory."""
    ptx.st_global_v4_f32(address, a0, a1, a2, a3)
    ptx.st_global_v4_f32(address + uint64(16), a4, a5, a6, a7)


@cuda.jit(device=True, forceinline=True)
def pack8(a0, a1, a2, a3, a4, a5, a6, a7):
    """Eight float32 rounded to bfloat16, in four registers."""
    return (
        ptx.cvt_rn_bf16x2_f32(a1, a0),
        ptx.cvt_rn_bf16x2_f32(a3, a2),
        ptx.cvt_rn_bf16x2_f32(a5, a4),
        ptx.cvt_rn_bf16x2_f32(a7, a6),
    )


@cuda.jit(device=True, forceinline=True)
def store8_bf16(address, a0, a1, a2, a3, a4, a5, a6, a7):
    """Eight float32 to global memory, rounded to bfloat16."""
    w0, w1, w2, w3 = pack8(a0, a1, a2, a3, a4, a5, a6, a7)
    ptx.st_global_v4_u32(address, w0, w1, w2, w3)


def row_access(dtype: str) -> tuple[Callable, Callable, int]:
    """load8, store8 and bytes of an element for float32 or bfloat16."""
    if dtype == "float32":
        return load8_f32, store8_f32, 4
    return load8_bf16, store8_bf16, dtypes.lookup("bfloat16").size


def make_normalise(columns: int, epsilon: float) -> Callable:
    """Make `normalise(values, lane)`: a row in a warp's registers to mean 0 and variance 1.

    `values` is a local array; lane i has the vectors i, i + 32, … of the row, those beyond it zeros. The variance is
    of what is left when the mean is taken away: the textbook's difference of squares would lose all of its digits
    where the mean is large.
    """
    vectors = -(-columns // (32 * VECTOR))
    inverse = 1.0 / columns

    @cuda.jit(device=True, forceinline=True)
    def normalise(values, lane):
        total = float32(0)
        for i in range(vectors * VECTOR):
            total += values[i]
        mean = warp_sum(total) * float32(inverse)
        squares = float32(0)
        for i in range(vectors):
            if uint32((lane + uint32(32 * i)) * uint32(VECTOR)) < columns:
                for j in range(VECTOR):
                    values[VECTOR * i + j] -= mean
                    squares += values[VECTOR * i + j] * values[VECTOR * i + j]
        scale = cuda.libdevice.rsqrtf(warp_sum(squares) * float32(inverse) + float32(epsilon))
        for i in range(vectors * VECTOR):
            values[i] *= scale

    return normalise

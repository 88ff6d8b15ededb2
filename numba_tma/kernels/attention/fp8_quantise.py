"""Queries, keys and values as 8-bit floats, each block of rows with a scale of its own, laid out for the tensor cores.

x = scale · x8, with x8 in e4m3 and scale = the block's largest magnitude / 448. A number of e4m3 has three bits of
fraction whatever its size, down to 2^-6, and fewer below: a scale's purpose is to keep a block's numbers out of there.
One outlier therefore costs its own block the small numbers beside it, and no other block anything.

Queries and keys stay as they lie, (B, S, H, D). Values are needed the other way round: wgmma reads operands of 8 bits
along the inner dimension only, which in P V are the keys. So they are written as (B, H, S / 16, D, 16), 16 keys of a
column beside each other, which is what the manual calls core matrices, rows of 16 bytes by eight: any number of such
chunks is an operand without swizzle. Within 16 keys the order is that of `KEY_ORDER`, in which a thread's four bytes of
P's operand are weights that the same thread has: a sum does not ask for the order of its terms.

What moves the data: ordinary loads and stores of 16 bytes; 3 bytes a number.
PTX ISA: "cvt", "Matrix Fragments for wgmma.mma_async.m64nNk32", "Strides" of the asynchronous warpgroup level matrix
instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...shared import Buffer, Shared
from ...unroll import unroll
from .warp_mma import head_start

LARGEST = 448.0  # of e4m3
# Scales are no smaller, so that a block of zeros has one that can be divided by. One of values counts in a row's total
# beside blocks with the largest scales, and must not vanish there: float32 has 2^-126.
SMALLEST_SCALE = 2.0**-64
Q_BLOCK = 64  # rows that share a scale: what a warpgroup computes
KV_BLOCK = 64  # keys, and values, that share one
CHUNK = 16  # keys of a column of V beside each other
# Which of a chunk's keys is where. Bytes 4 t to 4 t + 3 of a row of P's operand are those of thread t of a quad, whose
# scores are columns 2 t and 2 t + 1 of each eight.
KEY_ORDER = tuple(8 * (e // 2) + 2 * t + e % 2 for t in range(4) for e in range(4))

_ALL_LANES = 0xFFFFFFFF
_THREADS = 128
_VECTOR = 8  # numbers of 16 bits in 16 bytes
_MAGNITUDES = 0x7FFF7FFF


class _Parts:
    """Device functions that both kernels are made of.

    load(start, stride, row, rows, column, to, at)
        Eight numbers of a row into `to[at]` and the next three, in pairs; zeros behind the last row.
    scale_of(numbers, thread)
        The block's scale, from all threads' numbers: every thread gets it, and its inverse.
    """

    def __init__(self, dtype: str, words: int) -> None:
        pair = {"float16": "f16x2", "bfloat16": "bf16x2"}[dtype]
        larger, widen = getattr(ptx, f"max_{pair}"), getattr(ptx, f"cvt_f32_{pair}")
        smem = Shared(largest=Buffer(_THREADS // 32, "float32"))

        @cuda.jit(device=True, forceinline=True)
        def load(start, stride, row, rows, column, to, at):
            for i in range(4):
                unroll()
                to[at + i] = uint32(0)
            if row < rows:
                a, b, c, d = ptx.ld_global_nc_v4_u32(start + uint64(row) * stride + uint64(column) * uint64(2))
                to[at], to[at + 1], to[at + 2], to[at + 3] = a, b, c, d

        @cuda.jit(device=True, forceinline=True)
        def scale_of(numbers, thread):
            both = uint32(0)
            for i in range(words):
                unroll()
                both = larger(both, numbers[i] & uint32(_MAGNITUDES))
            low, high = widen(both)
            most = cuda.libdevice.fmaxf(low, high)
            for i in range(5):
                unroll()
                most = cuda.libdevice.fmaxf(most, cuda.shfl_xor_sync(_ALL_LANES, most, 1 << i))
            if thread % uint32(32) == 0:
                smem.largest[thread // uint32(32)] = most
            cuda.syncthreads()
            for i in range(_THREADS // 32):
                unroll()
                most = cuda.libdevice.fmaxf(most, smem.largest[i])
            scale = cuda.libdevice.fmaxf(most * float32(1 / LARGEST), float32(SMALLEST_SCALE))
            return scale, float32(1) / scale

        self.load: Callable = load
        self.scale_of: Callable = scale_of
        self.widen: Callable = widen
        self.shared = smem


@functools.cache
def make_quantise_rows(head_dim: int, dtype: str, rows: int) -> Kernel:
    """quantise_rows(x, x8, scale): x8 (B, S, H, D) and scale (B, H, blocks), of `rows` rows each.

    The grid is (blocks of rows, heads, batches).
    """
    vectors = head_dim // _VECTOR
    at_once = _THREADS // vectors
    steps = rows // at_once
    words = 4 * steps
    parts = _Parts(dtype, words)
    load, scale_of, widen = parts.load, parts.scale_of, parts.widen

    @kernel(threads=_THREADS, shared=parts.shared)
    def quantise_rows(x, x8, scales):
        thread, head, batch = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        column = uint32(thread % uint32(vectors) * uint32(_VECTOR))
        first = uint32(uint32(cuda.blockIdx.x) * uint32(rows) + thread // uint32(vectors))
        count = uint32(x.shape[1])
        start, stride = head_start(x, batch, head), uint64(x.strides[1])
        numbers = cuda.local.array(words, uint32)
        for step in range(steps):
            unroll()
            load(start, stride, uint32(first + uint32(step * at_once)), count, column, numbers, 4 * step)
        scale, inverse = scale_of(numbers, thread)
        if thread == 0:
            scales[batch, head, cuda.blockIdx.x] = scale
        to, to_stride = head_start(x8, batch, head) + uint64(column), uint64(x8.strides[1])
        for step in range(steps):
            unroll()
            i = 4 * step
            a, b = widen(numbers[i])
            c, d = widen(numbers[i + 1])
            low = ptx.cvt_rn_satfinite_e4m3x4_f32(a * inverse, b * inverse, c * inverse, d * inverse)
            a, b = widen(numbers[i + 2])
            c, d = widen(numbers[i + 3])
            high = ptx.cvt_rn_satfinite_e4m3x4_f32(a * inverse, b * inverse, c * inverse, d * inverse)
            row = uint32(first + uint32(step * at_once))
            if row < count:
                ptx.st_global_v2_u32(to + uint64(row) * to_stride, low, high)

    return quantise_rows


@cuda.jit(device=True, forceinline=True)
def of_neighbour(word, distance):
    """The word of the lane whose number differs in the bit `distance`."""
    return uint32(cuda.shfl_xor_sync(_ALL_LANES, int32(word), distance))


@cuda.jit(device=True, forceinline=True)
def quad_transpose(a, b, c, d, lane):
    """Lane i of four neighbours gets the i-th word of each of them, in their order."""
    odd, upper = lane % uint32(2) == 1, lane // uint32(2) % uint32(2) == 1
    x, y = of_neighbour(a if odd else b, 1), of_neighbour(c if odd else d, 1)
    a, b = (x, b) if odd else (a, x)
    c, d = (y, d) if odd else (c, y)
    x, y = of_neighbour(a if upper else c, 2), of_neighbour(b if upper else d, 2)
    a, c = (x, c) if upper else (a, x)
    b, d = (y, d) if upper else (b, y)
    return a, b, c, d


@functools.cache
def make_quantise_values(head_dim: int, dtype: str) -> Kernel:
    """quantise_values(v, v8, scale): v8 (B, H, chunks, D / 16, 256) and scale (B, H, blocks), of `KV_BLOCK` keys each.

    The grid is (blocks of keys, heads, batches). A thread has four keys of eight columns at a time, four bytes beside
    each other in each of these; four threads exchange theirs, so that each has whole columns of a chunk, 16 bytes.
    """
    groups = head_dim // _VECTOR
    at_once = _THREADS // 4 // groups  # chunks
    steps = KV_BLOCK // CHUNK // at_once
    words = 16 * steps
    parts = _Parts(dtype, words)
    load, scale_of, widen = parts.load, parts.scale_of, parts.widen

    @kernel(threads=_THREADS, shared=parts.shared)
    def quantise_values(v, v8, scales):
        thread, head, batch = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        lane = uint32(thread % uint32(4))
        column = uint32(thread // uint32(4) % uint32(groups) * uint32(_VECTOR))
        chunk = uint32(uint32(cuda.blockIdx.x) * uint32(KV_BLOCK // CHUNK) + thread // uint32(4 * groups))
        count, chunks = uint32(v.shape[1]), uint32(v8.shape[2])
        start, stride = head_start(v, batch, head), uint64(v.strides[1])
        numbers = cuda.local.array(words, uint32)
        for step in range(steps):
            unroll()
            key = uint32(uint32(chunk + uint32(step * at_once)) * uint32(CHUNK) + uint32(2) * lane)
            for e in range(4):
                unroll()
                row = uint32(key + uint32(8 * (e // 2) + e % 2))
                load(start, stride, row, count, column, numbers, 16 * step + 4 * e)
        scale, inverse = scale_of(numbers, thread)
        if thread == 0:
            scales[batch, head, cuda.blockIdx.x] = scale
        to = ptx.global_address(v8) + uint64(batch) * uint64(v8.strides[0]) + uint64(head) * uint64(v8.strides[1])
        packed = cuda.local.array(8, uint32)
        for step in range(steps):
            unroll()
            for pair in range(4):
                unroll()
                i = 16 * step + pair
                a0, a1 = widen(numbers[i])
                b0, b1 = widen(numbers[i + 4])
                c0, c1 = widen(numbers[i + 8])
                d0, d1 = widen(numbers[i + 12])
                packed[2 * pair] = ptx.cvt_rn_satfinite_e4m3x4_f32(
                    a0 * inverse, b0 * inverse, c0 * inverse, d0 * inverse
                )
                packed[2 * pair + 1] = ptx.cvt_rn_satfinite_e4m3x4_f32(
                    a1 * inverse, b1 * inverse, c1 * inverse, d1 * inverse
                )
            place = uint32(chunk + uint32(step * at_once))
            at = to + uint64(place) * uint64(head_dim * CHUNK) + uint64(column + lane) * uint64(CHUNK)
            for half in range(2):
                unroll()
                i = 4 * half
                a, b, c, d = quad_transpose(packed[i], packed[i + 1], packed[i + 2], packed[i + 3], lane)
                if place < chunks:
                    ptx.st_global_v4_u32(at + uint64(4 * half * CHUNK), a, b, c, d)

    return quantise_values

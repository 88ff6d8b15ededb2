"""Attention of one new token a sequence to all that are cached: the step between two products of a decoding step.

Each key and value is read once and used once, 2 flops a byte: what counts is how many reads are on their way. A block
has a head of a sequence. A row of D elements of a key or value is read by D / 8 lanes, 16 bytes each, so that a warp
reads several keys at once. Several such sets are on their way: the registers of one are asked to be filled again as
soon as it has been computed with. The first sets are asked for before the kernel in front has ended, which writes the
last key and value alone; these are taken in at the end.

Every lane group goes on with a softmax of its own (its largest score, its sum, its share of the result); they are
joined at the end, within a warp by shuffles and between the warps through shared memory.
"""

from __future__ import annotations

import functools
import math

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from .. import ptx
from ..launch import Kernel, kernel
from ..shared import Buffer, Shared
from ..unroll import unroll
from .vectors import VECTOR, load8_bf16, widen8

WARPS, AHEAD, BLOCKS = 8, 4, 3
_LOG2_E = math.log2(math.e)
_NOTHING = -1e30  # the largest of no scores: finite, so that the difference of two is a number


@functools.cache
def make_decode(head_dim: int, warps: int = WARPS, ahead: int = AHEAD, blocks: int = BLOCKS) -> Kernel:
    """o[b, h] = attention of the query at lengths[b] to the keys 0 … lengths[b]; grid (heads, B).

    Kernel parameters: qkv (B, positions, 3, heads, D) bfloat16, whose last dimensions are contiguous; lengths (B,)
    int32; o (B, heads, D) bfloat16. The kernel in front may write the rows at lengths[b], but neither earlier ones nor
    lengths.

    Args:
        head_dim: D, a power of 2 from 16 to 256.
        warps: of a block; `head_dim` / 32 at least.
        ahead: sets of keys that a warp has on their way.
        blocks: how many an SM should have registers for. The kernels before and after this one need room as well, if
            they are to overlap with it.
    """
    lanes = head_dim // VECTOR  # of a key
    together = 32 // lanes  # keys of a warp at once
    stride = warps * together
    words = 4 * ahead
    factor = _LOG2_E / math.sqrt(head_dim)
    smem = Shared(
        largest=Buffer((warps,), float32), total=Buffer((warps,), float32), o=Buffer((warps, head_dim), float32)
    )

    @cuda.jit(device=True, forceinline=True)
    def join(largest, total, o, other):
        """Take in the softmax of the lane `other` away."""
        theirs = cuda.shfl_xor_sync(0xFFFFFFFF, largest, other)
        most = max(largest, theirs)
        mine, its = ptx.ex2_approx_ftz_f32(largest - most), ptx.ex2_approx_ftz_f32(theirs - most)
        for e in range(VECTOR):
            unroll()
            o[e] = o[e] * mine + cuda.shfl_xor_sync(0xFFFFFFFF, o[e], other) * its
        return most, total * mine + cuda.shfl_xor_sync(0xFFFFFFFF, total, other) * its

    @cuda.jit(device=True, forceinline=True)
    def load(k, v, i, source, part_bytes):
        """A lane's share of a key and a value."""
        at = 4 * i
        k[at], k[at + 1], k[at + 2], k[at + 3] = ptx.ld_global_v4_u32(source)
        v[at], v[at + 1], v[at + 2], v[at + 3] = ptx.ld_global_v4_u32(source + part_bytes)

    @cuda.jit(device=True, forceinline=True)
    def take_in(q, k, v, i, seen, largest, total, o):
        """One key and value; a score that is not `seen` counts as nothing."""
        at = 4 * i
        x = widen8(k[at], k[at + 1], k[at + 2], k[at + 3])
        score = float32(0)
        for e in range(VECTOR):
            unroll()
            score += q[e] * x[e]
        reach = lanes // 2
        while reach > 0:
            score += cuda.shfl_xor_sync(0xFFFFFFFF, score, reach)
            reach //= 2
        score = score * float32(factor) if seen else float32(2 * _NOTHING)
        most = max(largest, score)
        kept, weight = ptx.ex2_approx_ftz_f32(largest - most), ptx.ex2_approx_ftz_f32(score - most)
        y = widen8(v[at], v[at + 1], v[at + 2], v[at + 3])
        for e in range(VECTOR):
            unroll()
            o[e] = o[e] * kept + weight * y[e]
        return most, total * kept + weight

    @kernel(threads=32 * warps, shared=smem, programmatic=True, min_blocks=blocks)
    def gpt2_decode_attention(qkv, lengths, out):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        head, batch = uint32(cuda.blockIdx.x), uint32(cuda.blockIdx.y)
        last = uint32(lengths[batch])
        row_bytes, part_bytes = uint64(qkv.strides[1]), uint64(qkv.strides[2])
        column = uint64(head * uint32(2 * head_dim) + lane % uint32(lanes) * uint32(2 * VECTOR))
        queries = ptx.global_address(qkv) + uint64(batch) * uint64(qkv.strides[0]) + column
        start = queries + part_bytes
        first = uint32(warp * uint32(together) + lane // uint32(lanes))

        k = cuda.local.array(words, uint32)
        v = cuda.local.array(words, uint32)
        earlier = uint32(max(last, uint32(1)) - uint32(1))  # the last of the keys that are there already, if any is
        for i in range(ahead):
            unroll()
            load(k, v, i, start + uint64(min(uint32(first + uint32(i * stride)), earlier)) * row_bytes, part_bytes)

        ptx.griddepcontrol_wait()
        ptx.griddepcontrol_launch_dependents()

        q = load8_bf16(queries + uint64(last) * row_bytes)
        new_k = cuda.local.array(4, uint32)
        new_v = cuda.local.array(4, uint32)
        load(new_k, new_v, 0, start + uint64(last) * row_bytes, part_bytes)
        largest, total = float32(_NOTHING), float32(0)
        o = cuda.local.array(VECTOR, float32)
        for e in range(VECTOR):
            o[e] = float32(0)
        for base in range(uint32(0), last, uint32(ahead * stride)):
            unroll(1)
            for i in range(ahead):
                unroll()
                key = uint32(uint32(base) + first + uint32(i * stride))
                largest, total = take_in(q, k, v, i, key < last, largest, total, o)
                following = min(uint32(key + uint32(ahead * stride)), earlier)
                load(k, v, i, start + uint64(following) * row_bytes, part_bytes)
        largest, total = take_in(q, new_k, new_v, 0, first == 0, largest, total, o)

        other = lanes
        while other < 32:
            largest, total = join(largest, total, o, other)
            other *= 2
        if lane < uint32(lanes):
            for e in range(VECTOR):
                smem.o[warp, uint32(lane * uint32(VECTOR) + uint32(e))] = o[e]
            if lane == 0:
                smem.largest[warp], smem.total[warp] = largest, total
        cuda.syncthreads()
        if thread < uint32(head_dim):
            most = float32(_NOTHING)
            for i in range(warps):
                most = max(most, smem.largest[i])
            total, value = float32(0), float32(0)
            for i in range(warps):
                scale = ptx.ex2_approx_ftz_f32(smem.largest[i] - most)
                total += scale * smem.total[i]
                value += scale * smem.o[i, thread]
            out[batch, head, thread] = value / total

    return gpt2_decode_attention

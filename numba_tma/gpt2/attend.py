"""Attention of one new token a sequence to all that are cached: the step between two products of a decoding step.

Each key and value is read once and used once, 2 flops a byte: what counts is how many reads are on their way. A block
has a head of a sequence. A row of D elements of a key or value is read by D / 8 lanes, 16 bytes each, so that a warp
reads several keys at once, and eight of these sets before it computes with the first; the first sets while the kernel
in front still runs. Every lane group goes on with a softmax of its own (its largest score, its sum, its share of the
result); they are joined at the end, within a warp by shuffles and between the warps through shared memory.
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

WARPS, AHEAD = 16, 8
NOTHING, PREFETCH, LOAD = "nothing", "prefetch", "load"  # what is done before the kernel in front has ended
# What is tried when decoding is measured; the first is what is taken.
VARIANTS = tuple(
    {"warps": warps, "ahead": ahead, "early": early, "blocks": blocks}
    for warps, ahead, blocks in ((WARPS, AHEAD, 1), (16, 4, 1), (8, 8, 1), (16, 4, 2), (8, 8, 2))
    for early in (LOAD, NOTHING, PREFETCH)
)
_LOG2_E = math.log2(math.e)
_NOTHING = -1e30  # the largest of no scores: finite, so that the difference of two is a number


@functools.cache
def make_decode(head_dim: int, warps: int = WARPS, ahead: int = AHEAD, early: str = LOAD, blocks: int = 1) -> Kernel:
    """o[b, h] = attention of the query at lengths[b] to the keys 0 … lengths[b]; grid (blocks * heads, B).

    Kernel parameters: qkv (B, positions, 3, heads, D) bfloat16, whose last dimensions are contiguous; lengths (B,)
    int32; o (B, heads, D) bfloat16. The kernel in front may write the rows at lengths[b], but neither earlier ones nor
    lengths.

    Args:
        head_dim: D, a power of 2 from 16 to 256.
        warps: of a block; `head_dim` / 32 at least.
        ahead: sets of keys that a warp reads before it computes with one.
        early: what to do before the kernel in front has ended: "load" the first sets into registers, all but the last
            key, which that kernel writes; "prefetch" all sets to L2; or "nothing".
        blocks: 1, or 2 that share the keys of a head of a sequence, as a cluster.
    """
    lanes = head_dim // VECTOR  # of a key
    together = 32 // lanes  # keys of a warp at once
    stride = blocks * warps * together
    words = 4 * ahead
    factor = _LOG2_E / math.sqrt(head_dim)
    smem = Shared(
        largest=Buffer((warps,), float32),
        total=Buffer((warps,), float32),
        o=Buffer((warps, head_dim), float32),
        # Of the other block: a column's largest score, sum and value.
        theirs=Buffer((head_dim if blocks > 1 else 1, 4), float32),
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
        """The `i`-th of a lane's keys and values."""
        k[4 * i], k[4 * i + 1], k[4 * i + 2], k[4 * i + 3] = ptx.ld_global_v4_u32(source)
        v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3] = ptx.ld_global_v4_u32(source + part_bytes)

    @cuda.jit(device=True, forceinline=True)
    def give(thread, most, total, value):
        """Block 1's softmax of a column to block 0."""
        place = ptx.mapa_shared_cluster(uint32(ptx.shared_address(smem.theirs) + thread * uint32(16)), uint32(0))
        ptx.st_shared_cluster_v2_f32(place, most, total)
        ptx.st_shared_cluster_v2_f32(uint32(place + uint32(8)), value, float32(0))

    @kernel(threads=32 * warps, shared=smem, cluster=blocks, programmatic=True)
    def gpt2_decode_attention(qkv, lengths, out):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        head, rank = uint32(cuda.blockIdx.x // uint32(blocks)), uint32(cuda.blockIdx.x % uint32(blocks))
        batch = uint32(cuda.blockIdx.y)
        if blocks > 1:
            ptx.barrier_cluster_arrive_relaxed()  # both are there, before one writes to the other
        last = uint32(lengths[batch])
        row_bytes, part_bytes = uint64(qkv.strides[1]), uint64(qkv.strides[2])
        start = ptx.global_address(qkv) + uint64(batch) * uint64(qkv.strides[0]) + uint64(head * uint32(2 * head_dim))
        vector = start + uint64(lane % uint32(lanes) * uint32(2 * VECTOR))
        keys = vector + part_bytes
        k = cuda.local.array(words, uint32)
        v = cuda.local.array(words, uint32)
        first = uint32((rank * uint32(warps) + warp) * uint32(together) + lane // uint32(lanes))
        if early == PREFETCH:
            for key in range(uint32(rank * uint32(32 * warps) + thread), last, uint32(32 * blocks * warps)):
                source = start + uint64(key) * row_bytes + part_bytes
                ptx.cp_async_bulk_prefetch(source, uint32(2 * head_dim))
                ptx.cp_async_bulk_prefetch(source + part_bytes, uint32(2 * head_dim))
        if early == LOAD:
            for i in range(ahead):
                unroll()
                key = uint32(first + uint32(i * stride))
                if key < last:
                    load(k, v, i, keys + uint64(key) * row_bytes, part_bytes)
        ptx.griddepcontrol_wait()
        ptx.griddepcontrol_launch_dependents()
        q = load8_bf16(vector + uint64(last) * row_bytes)

        largest, total = float32(_NOTHING), float32(0)
        o = cuda.local.array(VECTOR, float32)
        for e in range(VECTOR):
            o[e] = float32(0)
        for base in range(uint32(0), uint32(last + uint32(1)), uint32(ahead * stride)):
            unroll(1)
            for i in range(ahead):
                unroll()
                key = min(uint32(uint32(base) + first + uint32(i * stride)), last)
                if early != LOAD or base > 0 or key == last:
                    load(k, v, i, keys + uint64(key) * row_bytes, part_bytes)
            for i in range(ahead):
                unroll()
                key = uint32(uint32(base) + first + uint32(i * stride))
                x = widen8(k[4 * i], k[4 * i + 1], k[4 * i + 2], k[4 * i + 3])
                score = float32(0)
                for e in range(VECTOR):
                    unroll()
                    score += q[e] * x[e]
                reach = lanes // 2
                while reach > 0:
                    score += cuda.shfl_xor_sync(0xFFFFFFFF, score, reach)
                    reach //= 2
                score = score * float32(factor) if key <= last else float32(2 * _NOTHING)
                most = max(largest, score)
                kept, weight = ptx.ex2_approx_ftz_f32(largest - most), ptx.ex2_approx_ftz_f32(score - most)
                largest, total = most, total * kept + weight
                y = widen8(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3])
                for e in range(VECTOR):
                    unroll()
                    o[e] = o[e] * kept + weight * y[e]

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
        most, total, value = float32(_NOTHING), float32(0), float32(0)
        if thread < uint32(head_dim):
            for i in range(warps):
                most = max(most, smem.largest[i])
            for i in range(warps):
                scale = ptx.ex2_approx_ftz_f32(smem.largest[i] - most)
                total += scale * smem.total[i]
                value += scale * smem.o[i, thread]
        if blocks > 1:
            ptx.barrier_cluster_wait()
            if rank == 1 and thread < uint32(head_dim):
                give(thread, most, total, value)
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
            if rank == 0 and thread < uint32(head_dim):
                both = max(most, smem.theirs[thread, 0])
                mine = ptx.ex2_approx_ftz_f32(most - both)
                its = ptx.ex2_approx_ftz_f32(smem.theirs[thread, 0] - both)
                total = total * mine + smem.theirs[thread, 1] * its
                value = value * mine + smem.theirs[thread, 2] * its
        if rank == 0 and thread < uint32(head_dim):
            out[batch, head, thread] = value / total

    return gpt2_decode_attention

"""Blocks, or clusters of them, that stay: the copy engine fetches the next rows while one is computed on.

The row, or a block's part of it, is in shared memory by one bulk copy, and in registers after the first look at it. So
its stage is free again at once, and the results go from registers to global memory. Weights are read once for all rows.
At the cluster's barrier, blocks arrive when they have a row's pairs and wait before they send those of the next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import ptx
from ...launch import Kernel
from ...pipeline import mbarrier_wait, ring
from ...shared import Barriers, Shared, Tiles
from ...unroll import unroll
from .block import make_meeting, meeting_members, operation_kernel
from .operation import MAKERS, Operation
from .row import make_share
from .vectors import WORDS, Vectors, load_global, load_shared, make_vectors, store_global, word_of


def _make_part(
    op: Operation, vectors: Vectors, smem: Shared, threads: int, passes: int, missing: int
) -> tuple[Callable, Callable]:
    """load(…) a part of a row from shared memory into registers, and store(…) it to global memory."""
    width, weighted, taken = vectors.width, op.weighted, WORDS * passes

    @cuda.jit(device=True, forceinline=True)
    def load(values, thread, stage, own):
        words = cuda.local.array(taken, uint32)
        for i in range(taken):
            unroll()
            words[i] = uint32(missing)
        for i in range(passes):
            unroll()
            index = uint32(thread + uint32(i * threads))
            if index < own:
                load_shared(words, WORDS * i, smem.part[stage].address_of(uint32(index * uint32(16))))
        for i in range(passes):
            unroll()
            vectors.widen(values, i * width, words, WORDS * i)

    @cuda.jit(device=True, forceinline=True)
    def store(values, weights, factor, thread, address, own):
        words = cuda.local.array(WORDS, uint32)
        for i in range(passes):
            unroll()
            for j in range(width):
                unroll()
                values[i * width + j] *= factor
            if weighted:
                vectors.scale(values, i * width, weights, WORDS * i)
            vectors.narrow(words, 0, values, i * width)
            index = uint32(thread + uint32(i * threads))
            if index < own:
                store_global(address + uint64(index) * uint64(16), words, 0)

    return load, store


def _make_weights(op: Operation, threads: int, passes: int) -> Callable:
    """weights(…): this thread's weights, if there are any, as words in registers."""

    @cuda.jit(device=True, forceinline=True)
    def load_weights(words, thread, address, own):
        for i in range(passes if op.weighted else 0):
            unroll()
            index = uint32(thread + uint32(i * threads))
            if index < own:
                load_global(words, WORDS * i, address + uint64(index) * uint64(16))

    return load_weights


@functools.cache
def make_ring(
    operation: str,
    dtype: str,
    threads: int = 256,
    passes: int = 4,
    stages: int = 3,
    cluster: int = 1,
    min_blocks: int = 1,
) -> Kernel:
    """Blocks (or clusters) that stay: while one row is computed on, the copies of the next are under way.

    A stage is free again as soon as all have read it into their registers, which the barrier that puts the pairs
    together tells.

    Args:
        operation: softmax or rmsnorm.
        dtype: float32, float16 or bfloat16.
        threads, passes: a block takes up to threads · passes vectors of 16 bytes.
        stages: rows in flight.
        cluster: blocks that share a row, up to 16.
        min_blocks: blocks that an SM is to hold.
    """
    vectors = make_vectors(dtype)
    width = vectors.width
    count, words = passes * width + 1, WORDS * passes
    op = MAKERS[operation](count)
    weighted = op.weighted
    smem = Shared(
        part=Tiles(stages, (threads * passes * 16,), np.uint8),
        **meeting_members(threads, cluster, tables=2),
        full=Barriers(stages),
    )
    share = make_share(width)
    begin, bring, meet, take = make_meeting(op, smem, threads, cluster, tables=2)
    load, store = _make_part(op, vectors, smem, threads, passes, word_of(dtype, op.missing))
    load_weights = _make_weights(op, threads, passes)

    @cuda.jit(device=True, forceinline=True)
    def fetch(x, row, first, own, stage):
        bar = smem.full[stage]
        ptx.mbarrier_arrive_expect_tx(bar, uint32(own * uint32(16)))
        if own > 0:
            source = ptx.global_address(x) + uint64(row) * uint64(x.strides[0]) + uint64(first) * uint64(16)
            ptx.cp_async_bulk_shared_global(smem.part[stage], source, uint32(own * uint32(16)), bar)

    @cuda.jit(device=True, forceinline=True)
    def body(x, weight, out, inverse, epsilon, pairs, state, parts):
        values = cuda.local.array(count, float32)
        weights = cuda.local.array(words, uint32)
        thread = uint32(cuda.threadIdx.x)
        rank = uint32(0)
        if cluster > 1:
            rank = ptx.cluster_ctarank()
        rows = uint32(x.shape[0])
        row = uint32(uint32(cuda.blockIdx.x) // uint32(cluster))
        step = uint32(uint32(cuda.gridDim.x) // uint32(cluster))
        first, own, end, has_end = share(uint32(x.shape[1]), thread, rank, uint32(cluster))

        ahead = row
        if thread == 0:
            begin()
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            for stage in range(stages):
                if ahead < rows:
                    fetch(x, ahead, first, own, uint32(stage))
                ahead = uint32(ahead + step)
        load_weights(weights, thread, ptx.global_address(weight) + uint64(first) * uint64(16), own)
        if cluster > 1:
            ptx.barrier_cluster_arrive_relaxed()  # this block has begun; its barriers are released by their fence
        cuda.syncthreads()

        turn = uint32(0)
        while row < rows:
            stage, phase = ring(turn, stages)
            values[count - 1] = float32(op.missing)
            if has_end:
                values[count - 1] = float32(x[row, end])
            mbarrier_wait(smem.full[stage], phase)
            load(values, thread, stage, own)
            own_a, own_b = op.partial(values)
            ptx.fence_proxy_async_shared_cta()
            slot, slot_phase = ring(turn, 2)
            if cluster > 1:
                ptx.barrier_cluster_wait()
            bring(slot, uint32(0), thread, own_a, own_b)
            meet(slot, slot_phase, thread, rank)
            a, b = take(slot, uint32(0), thread)
            if cluster > 1:
                ptx.barrier_cluster_arrive_relaxed()  # the pairs sent to this block have come: their table is free
            if thread == 0:
                if ahead < rows:
                    fetch(x, ahead, first, own, stage)
                ahead = uint32(ahead + step)
            factor = op.factor(own_a, a, b, inverse, epsilon)
            target = ptx.global_address(out) + uint64(row) * uint64(out.strides[0]) + uint64(first) * uint64(16)
            store(values, weights, factor, thread, target, own)
            if has_end:
                value = values[count - 1] * factor
                if weighted:
                    value *= float32(weight[end])
                out[row, end] = value
            row = uint32(row + step)
            turn = uint32(turn + uint32(1))
        if cluster > 1:
            ptx.barrier_cluster_wait()  # the others may need the pairs that are sent from here

    return operation_kernel(
        op,
        body,
        "ring",
        threads=threads,
        shared=smem,
        cluster=cluster if cluster > 1 else None,
        min_blocks=min_blocks,
    )

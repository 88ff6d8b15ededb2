"""One row a block, or a cluster of blocks: where it waits between the pass that reduces it and the one that rescales.

Several kernels are one here, by two questions. Where does a thread take its vectors from: global memory, or shared
memory, into which the copy engine has fetched the row (or a block's part of it) by one bulk copy? And does it hold them
in registers after that, or take them once more? A row that is taken from global memory twice comes from the L2 cache
the second time, if the rows under way on the whole GPU fit into it.

The engine and 16-byte accesses move whole vectors; the last few elements of a row whose length is no multiple of that
are read and written one by one, by a thread each of the last block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import ptx
from ...launch import Kernel
from ...pipeline import mbarrier_wait
from ...shared import Barriers, Buffer, Shared, Tiles
from ...unroll import unroll
from .block import make_across_grid, make_together, operation_kernel, pairs_buffer
from .operation import MAKERS
from .vectors import make_vectors


def make_share(width: int) -> Callable:
    """share(columns, thread, rank, parts): a block's first vector, how many it has, and the thread's single element.

    Parts are equal, but for the last. `end` is the column of the element behind the row's whole vectors that is this
    thread's, `has_end` whether it has one.
    """

    @cuda.jit(device=True, forceinline=True)
    def share(columns, thread, rank, parts):
        whole = uint32(columns // uint32(width))
        part = uint32(uint32(whole + parts - uint32(1)) // parts)
        first = uint32(min(uint32(rank * part), whole))
        own = uint32(min(part, uint32(whole - first)))
        end = uint32(whole * uint32(width) + thread)
        has_end = rank == uint32(parts - uint32(1)) and end < columns
        return first, own, end, has_end

    return share


@functools.cache
def make_row(
    operation: str,
    dtype: str,
    threads: int = 256,
    vectors: int = 4,
    *,
    held: bool = True,
    part_bytes: int = 0,
    cluster: int = 1,
    grid: bool = False,
    keep: bool = False,
    min_blocks: int = 1,
    single: bool = False,
) -> Kernel:
    """The kernel for rows of `dtype`.

    Args:
        operation: softmax or rmsnorm.
        dtype: float32, float16 or bfloat16.
        threads: of a block.
        vectors: of 16 bytes that a thread takes at once; all that it has, if they are held.
        held: in registers; else each vector is taken twice.
        part_bytes: shared memory for a block's part of the row; with 0 it is taken from global memory.
        cluster: blocks that share a row, up to 16.
        grid: any number of blocks share a row and meet in global memory; the kernel has three arguments more.
        keep: tell the L2 cache to let lines of x go last when they are read for the first time (evict_last), and
            first when they are for the second (evict_first).
        min_blocks: blocks that an SM is to hold.
        single: single elements from global memory instead of vectors: rows may start anywhere and have any strides.
    """
    access = make_vectors(dtype)
    width = 1 if single else access.width
    count, words = vectors * width + 1, 4 * vectors  # the last is an element of the row's end, if the thread has one
    by_engine, ahead = part_bytes > 0, uint32(vectors * threads)
    op = MAKERS[operation](count)
    weighted = op.weighted
    held_weights = weighted and held
    members = {"pairs": pairs_buffer(threads, cluster)}
    if by_engine:
        members |= {"part": Tiles(1, (part_bytes,), np.uint8), "full": Barriers(1)}
    if grid:
        members |= {"number": Buffer(1, np.uint32)}
    smem = Shared(**members)
    together = make_together(op, smem, threads, cluster)
    ticket, across = make_across_grid(op, smem, threads)
    share = make_share(width)

    @cuda.jit(device=True, forceinline=True)
    def fetch(source, own):
        if by_engine:
            bar = smem.full[0]
            ptx.mbarrier_init(bar, 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(bar, uint32(own * uint32(16)))
            nbytes = uint32(own * uint32(16))
            if own > 0:
                if keep:
                    policy = ptx.createpolicy_fractional_l2_evict_last(1.0)
                    ptx.cp_async_bulk_shared_global_l2_hint(smem.part[0], source, nbytes, bar, policy)
                else:
                    ptx.cp_async_bulk_shared_global(smem.part[0], source, nbytes, bar)

    @cuda.jit(device=True, forceinline=True)
    def load_vector(values, base, x, row, source, index, again):
        if by_engine:
            access.load_shared(values, base, smem.part[0].address_of(uint32(index * uint32(16))))
        elif single:
            values[base] = float32(x[row, index])
        elif keep:
            if again:
                policy = ptx.createpolicy_fractional_l2_evict_first(1.0)
            else:
                policy = ptx.createpolicy_fractional_l2_evict_last(1.0)
            access.load_by_policy(values, base, source + uint64(index) * uint64(16), policy)
        else:
            access.load_global(values, base, source + uint64(index) * uint64(16))

    @cuda.jit(device=True, forceinline=True)
    def load(values, x, row, source, index, own, again):
        for i in range(vectors):
            unroll()
            vector = uint32(index + uint32(i * threads))
            if vector < own:
                load_vector(values, i * width, x, row, source, vector, again)
            else:
                for j in range(width):
                    unroll()
                    values[i * width + j] = float32(op.missing)

    @cuda.jit(device=True, forceinline=True)
    def store(values, weights, factor, weight, weight_address, out, row, target, index, own):
        for i in range(vectors):
            unroll()
            vector = uint32(index + uint32(i * threads))
            if vector < own:
                for j in range(width):
                    unroll()
                    values[i * width + j] *= factor
                if single:
                    if weighted:
                        values[i] *= float32(weight[vector])
                    out[row, vector] = values[i]
                else:
                    if weighted:
                        if not held:
                            access.keep(weights, 4 * i, weight_address + uint64(vector) * uint64(16))
                        access.scale(values, i * width, weights, 4 * i)
                    access.store_global(target + uint64(vector) * uint64(16), values, i * width)

    @cuda.jit(device=True, forceinline=True)
    def body(x, weight, out, inverse, epsilon, pairs, state, parts):
        values = cuda.local.array(count, float32)
        weights = cuda.local.array(words, uint32)
        thread = uint32(cuda.threadIdx.x)
        rank = uint32(0)
        if cluster > 1:
            rank = ptx.cluster_ctarank()
        row, parts = uint32(uint32(cuda.blockIdx.x) // uint32(cluster)), uint32(parts)
        if grid:
            row, rank = ticket(state, uint32(x.shape[0]), parts, thread)
        else:
            parts = uint32(cluster)
        first, own, end, has_end = share(uint32(x.shape[1]), thread, rank, parts)
        source = ptx.global_address(x) + uint64(row) * uint64(x.strides[0]) + uint64(first) * uint64(16)
        target = ptx.global_address(out) + uint64(row) * uint64(out.strides[0]) + uint64(first) * uint64(16)
        weight_address = ptx.global_address(weight) + uint64(first) * uint64(16)

        if thread == 0:
            fetch(source, own)
        if cluster > 1:
            ptx.barrier_cluster_arrive_relaxed()  # this block has begun; there is nothing to release yet
        if held_weights:
            for i in range(vectors):
                unroll()
                vector = uint32(thread + uint32(i * threads))
                if vector < own:
                    access.keep(weights, 4 * i, weight_address + uint64(vector) * uint64(16))
        values[count - 1] = float32(op.missing)
        if has_end:
            values[count - 1] = float32(x[row, end])
        if by_engine:
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)

        # One number or two for what each thread has …
        load(values, x, row, source, thread, own, False)
        own_a, own_b = op.partial(values)
        if not held:
            index = uint32(thread + ahead)
            while index < own:
                load(values, x, row, source, index, own, False)
                values[count - 1] = float32(op.missing)
                other_a, other_b = op.partial(values)
                own_a, own_b = op.merge(own_a, own_b, other_a, other_b)
                index = uint32(index + ahead)
        # … and for the row; the blocks of a cluster have all begun before one writes to another.
        if cluster > 1:
            ptx.barrier_cluster_wait()
        a, b = together(uint32(0), thread, rank, own_a, own_b)
        if grid:
            a, b = across(state, pairs, row, rank, parts, thread, a, b)

        if held:
            factor = op.factor(own_a, a, b, inverse, epsilon)
            store(values, weights, factor, weight, weight_address, out, row, target, thread, own)
        else:
            factor = op.factor(a, a, b, inverse, epsilon)
            index = thread
            while index < own:
                load(values, x, row, source, index, own, True)
                for i in range(vectors * width):
                    unroll()
                    values[i] = op.weigh(values[i], a)
                store(values, weights, factor, weight, weight_address, out, row, target, index, own)
                index = uint32(index + ahead)
        if has_end:
            value = op.weigh(float32(x[row, end]), a) * op.factor(a, a, b, inverse, epsilon)
            if weighted:
                value *= float32(weight[end])
            out[row, end] = value

    name = "grid" if grid else "cluster" if cluster > 1 else "bulk" if by_engine else "registers" if held else "online"
    return operation_kernel(
        op,
        body,
        name,
        grid,
        threads=threads,
        shared=smem,
        cluster=cluster if cluster > 1 else None,
        min_blocks=min_blocks,
    )

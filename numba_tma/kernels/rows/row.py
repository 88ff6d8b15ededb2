"""One row a block, or a cluster of blocks: where it waits between the pass that reduces it and the one that rescales.

Several kernels are one here, by two questions. Where does a thread take its vectors from: global memory, or shared
memory, into which the copy engine fetches the row, or a block's part of it? And does it hold them in registers after
that, or take them once more? A row that is taken from global memory twice comes from the L2 cache the second time, if
the rows under way on the whole GPU fit into it.

No look waits for more than it needs. What all threads take at once from shared memory is a piece, with a copy and a
barrier of its own, so that the first pieces are reduced while the last are on their way. Weights are asked for before
the piece that they are for.

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
from .block import make_across_grid, make_together, meeting_members, operation_kernel
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
    by_engine, piece = part_bytes > 0, uint32(vectors * threads)
    pieces = 1 if held else -(-part_bytes // (16 * vectors * threads))
    by_barriers = by_engine or cluster > 1
    op = MAKERS[operation](count)
    weighted = op.weighted
    weighted_vectors = weighted and not single
    members = meeting_members(threads, cluster)
    if by_engine:
        members |= {"part": Tiles(1, (part_bytes,), np.uint8), "full": Barriers(pieces)}
    if grid:
        members |= {"number": Buffer(1, np.uint32)}
    smem = Shared(**members)
    begin, together = make_together(op, smem, threads, cluster)
    ticket, across = make_across_grid(op, smem, threads)
    share = make_share(width)

    @cuda.jit(device=True, forceinline=True)
    def fetch(source, own, policy):
        if by_barriers:
            begin()
            if by_engine:
                for i in range(pieces):
                    ptx.mbarrier_init(smem.full[i], 1)
            ptx.fence_mbarrier_init()
        if by_engine:
            for i in range(pieces):
                start = uint32(uint32(i) * piece)
                nbytes = uint32(uint32(min(piece, uint32(own - min(own, start)))) * uint32(16))
                ptx.mbarrier_arrive_expect_tx(smem.full[i], nbytes)
                if nbytes > 0:
                    place = smem.part[0].address_of(uint32(start * uint32(16)))
                    address = source + uint64(start) * uint64(16)
                    if keep:
                        ptx.cp_async_bulk_shared_global_l2_hint(place, address, nbytes, smem.full[i], policy)
                    else:
                        ptx.cp_async_bulk_shared_global(place, address, nbytes, smem.full[i])

    @cuda.jit(device=True, forceinline=True)
    def load(values, x, row, source, index, own, policy):
        for i in range(vectors):
            unroll()
            vector = uint32(index + uint32(i * threads))
            if vector < own:
                if by_engine:
                    access.load_shared(values, i * width, smem.part[0].address_of(uint32(vector * uint32(16))))
                elif single:
                    values[i] = float32(x[row, vector])
                elif keep:
                    access.load_by_policy(values, i * width, source + uint64(vector) * uint64(16), policy)
                else:
                    access.load_global(values, i * width, source + uint64(vector) * uint64(16))
            else:
                for j in range(width):
                    unroll()
                    values[i * width + j] = float32(op.missing)

    @cuda.jit(device=True, forceinline=True)
    def load_weights(weights, address, index, own):
        for i in range(vectors if weighted_vectors else 0):
            unroll()
            vector = uint32(index + uint32(i * threads))
            if vector < own:
                access.keep(weights, 4 * i, address + uint64(vector) * uint64(16))

    @cuda.jit(device=True, forceinline=True)
    def rescale(values, weights, factor, weight, index, own):
        for i in range(vectors * width):
            unroll()
            values[i] *= factor
        if weighted:
            for i in range(vectors):
                unroll()
                if not single:
                    access.scale(values, i * width, weights, 4 * i)
                elif uint32(index + uint32(i * threads)) < own:
                    values[i] *= float32(weight[uint32(index + uint32(i * threads))])

    @cuda.jit(device=True, forceinline=True)
    def store(values, out, row, target, index, own):
        for i in range(vectors):
            unroll()
            vector = uint32(index + uint32(i * threads))
            if vector < own:
                if single:
                    out[row, vector] = values[i]
                else:
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

        stay, go = uint64(0), uint64(0)
        if keep:
            stay = ptx.createpolicy_fractional_l2_evict_last(1.0)
            go = ptx.createpolicy_fractional_l2_evict_first(1.0)
        if thread == 0:
            fetch(source, own, stay)
        if cluster > 1:
            ptx.barrier_cluster_arrive_relaxed()  # this block has begun; its barriers are released by their fence
        load_weights(weights, weight_address, thread, own)
        values[count - 1] = float32(op.missing)
        if has_end:
            values[count - 1] = float32(x[row, end])
        if by_engine:
            cuda.syncthreads()
            mbarrier_wait(smem.full[0], 0)

        # One number or two for what each thread has …
        load(values, x, row, source, thread, own, stay)
        own_a, own_b = op.partial(values)
        if not held:
            index, number = uint32(thread + piece), uint32(1)
            while index < own:
                if by_engine:
                    mbarrier_wait(smem.full[number], 0)
                    number = uint32(number + uint32(1))
                load(values, x, row, source, index, own, stay)
                values[count - 1] = float32(op.missing)
                other_a, other_b = op.partial(values)
                own_a, own_b = op.merge(own_a, own_b, other_a, other_b)
                index = uint32(index + piece)
        # … and for the row; the blocks of a cluster have all begun before one sends to another.
        if cluster > 1:
            ptx.barrier_cluster_wait()
        a, b = together(uint32(0), uint32(0), thread, rank, own_a, own_b)
        if cluster > 1:
            ptx.barrier_cluster_arrive_relaxed()  # this block needs nothing any more of the others
        if grid:
            a, b = across(state, pairs, row, rank, parts, thread, a, b)

        if held:
            factor = op.factor(own_a, a, b, inverse, epsilon)
            rescale(values, weights, factor, weight, thread, own)
            store(values, out, row, target, thread, own)
        else:
            factor = op.factor(a, a, b, inverse, epsilon)
            index = thread
            while index < own:
                behind = uint32(index + piece)
                load(values, x, row, source, index, own, go)
                for i in range(vectors * width):
                    unroll()
                    values[i] = op.weigh(values[i], a)
                rescale(values, weights, factor, weight, index, own)
                load_weights(weights, weight_address, behind, own)  # they come while these are stored
                store(values, out, row, target, index, own)
                index = behind
        if has_end:
            value = op.weigh(float32(x[row, end]), a) * op.factor(a, a, b, inverse, epsilon)
            if weighted:
                value *= float32(weight[end])
            out[row, end] = value
        if cluster > 1:
            ptx.barrier_cluster_wait()  # the others may need the pairs that are sent from here

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

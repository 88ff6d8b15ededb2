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
from .block import make_across_grid, make_meeting, meeting_members, operation_kernel
from .operation import MAKERS
from .vectors import WORDS, load_by_policy, load_global, load_shared, make_vectors, store_global, word_of


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
    rows: int = 1,
    ahead: int = 1,
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
        part_bytes: shared memory for a block's part of a row; with 0 it is taken from global memory.
        cluster: blocks that share a row, up to 16.
        grid: any number of blocks share a row and meet in global memory; the kernel has three arguments more.
        rows: that a block, or a cluster, takes at once, so that a weight is read once for all of them: more than 1 only
            from shared memory and not over the grid.
        ahead: pieces whose weights are on their way at once, in registers; 1 if they are held.
        keep: tell the L2 cache to let lines of x go last when they are read for the first time (evict_last), and
            first when they are for the second (evict_first). The weights, which every row needs, always go last then.
        min_blocks: blocks that an SM is to hold.
        single: single elements from global memory instead of vectors: rows may start anywhere and have any strides.

    Raises:
        ValueError: rows or pieces ahead that such a kernel cannot take.
    """
    if rows > 1 and (held or grid or not part_bytes):
        raise ValueError(f"rows={rows}: several at once are taken from shared memory twice, by a cluster or a block")
    if ahead > 1 and held:
        raise ValueError(f"ahead={ahead}: a part that is held is one piece, ahead=1")
    access = make_vectors(dtype)
    width = 1 if single else access.width
    taken, ready = WORDS * vectors, WORDS * vectors * ahead  # words of x at once, and of weights
    count = vectors * width + 1  # numbers; the last is an element of the row's end, if the thread has one
    by_engine, piece = part_bytes > 0, uint32(vectors * threads)
    pieces = 1 if held else -(-part_bytes // (16 * vectors * threads))
    by_barriers = by_engine or cluster > 1
    op = MAKERS[operation](count)
    weighted, missing = op.weighted, word_of(dtype, op.missing)
    weighted_vectors = weighted and not single
    members = meeting_members(threads, cluster, rows)
    if by_engine:
        members |= {"part": Tiles(rows, (part_bytes,), np.uint8), "full": Barriers(rows * pieces)}
    if grid:
        members |= {"number": Buffer(1, np.uint32)}
    smem = Shared(**members)
    begin, bring, meet, take = make_meeting(op, smem, threads, cluster, rows)
    ticket, across = make_across_grid(op, smem, threads)
    share = make_share(width)

    # In what follows, `index` is a thread's first vector in a piece or several of them, `step` how many vectors of its
    # own behind that it is about, and `left` how many vectors of the part there are from `index` on.

    @cuda.jit(device=True, forceinline=True)
    def rest(own, index):
        return uint32(own - min(index, own))

    @cuda.jit(device=True, forceinline=True)
    def address(base, index, step):
        return base + uint64(index) * uint64(16) + uint64(step) * uint64(threads * 16)

    @cuda.jit(device=True, forceinline=True)
    def set_up():
        if by_barriers:
            begin()
            if by_engine:
                for i in range(rows * pieces):
                    ptx.mbarrier_init(smem.full[i], 1)
            ptx.fence_mbarrier_init()

    @cuda.jit(device=True, forceinline=True)
    def fetch(number, source, own, policy):
        for i in range(pieces):
            start = uint32(uint32(i) * piece)
            bar = smem.full[uint32(number * pieces + i)]
            nbytes = uint32(uint32(min(piece, rest(own, start))) * uint32(16))
            ptx.mbarrier_arrive_expect_tx(bar, nbytes)
            if nbytes > 0:
                place = smem.part[number].address_of(uint32(start * uint32(16)))
                if keep:
                    ptx.cp_async_bulk_shared_global_l2_hint(place, address(source, start, 0), nbytes, bar, policy)
                else:
                    ptx.cp_async_bulk_shared_global(place, address(source, start, 0), nbytes, bar)

    @cuda.jit(device=True, forceinline=True)
    def load(values, x, row, number, source, index, step, left, policy):
        words = cuda.local.array(taken, uint32)
        for i in range(taken):
            unroll()
            words[i] = uint32(missing)
        for i in range(vectors):
            unroll()
            if single:
                values[i] = float32(op.missing)
            if uint32((step + i) * threads) < left:
                if by_engine:
                    place = smem.part[number].address_of(uint32(index * uint32(16)))
                    load_shared(words, WORDS * i, uint32(place + uint32((step + i) * threads * 16)))
                elif single:
                    values[i] = float32(x[row, uint32(index + uint32((step + i) * threads))])
                elif keep:
                    load_by_policy(words, WORDS * i, address(source, index, step + i), policy)
                else:
                    load_global(words, WORDS * i, address(source, index, step + i))
        for i in range(0 if single else vectors):
            unroll()
            access.widen(values, i * width, words, WORDS * i)

    @cuda.jit(device=True, forceinline=True)
    def load_weights(weights, word, base, index, step, left, policy):
        for i in range(vectors if weighted_vectors else 0):
            unroll()
            if uint32((step + i) * threads) < left:
                if keep:
                    load_by_policy(weights, word + WORDS * i, address(base, index, step + i), policy)
                else:
                    load_global(weights, word + WORDS * i, address(base, index, step + i))

    @cuda.jit(device=True, forceinline=True)
    def rescale(values, weights, word, factor, weight, index, step, left):
        for i in range(vectors * width):
            unroll()
            values[i] *= factor
        if weighted:
            for i in range(vectors):
                unroll()
                if not single:
                    access.scale(values, i * width, weights, word + WORDS * i)
                elif uint32((step + i) * threads) < left:
                    values[i] *= float32(weight[uint32(index + uint32((step + i) * threads))])

    @cuda.jit(device=True, forceinline=True)
    def store(values, out, row, target, index, step, left):
        words = cuda.local.array(taken, uint32)
        for i in range(0 if single else vectors):
            unroll()
            access.narrow(words, WORDS * i, values, i * width)
        for i in range(vectors):
            unroll()
            if uint32((step + i) * threads) < left:
                if single:
                    out[row, uint32(index + uint32((step + i) * threads))] = values[i]
                else:
                    store_global(address(target, index, step + i), words, WORDS * i)

    @cuda.jit(device=True, forceinline=True)
    def reduce(values, x, row, number, source, thread, own, last, policy):
        values[count - 1] = last
        if by_engine:
            mbarrier_wait(smem.full[uint32(number * pieces)], 0)
        load(values, x, row, number, source, thread, 0, rest(own, thread), policy)
        a, b = op.partial(values)
        if not held:
            index, i = uint32(thread + piece), uint32(number * pieces + 1)
            while index < own:
                if by_engine:
                    mbarrier_wait(smem.full[i], 0)
                    i = uint32(i + uint32(1))
                load(values, x, row, number, source, index, 0, uint32(own - index), policy)
                values[count - 1] = float32(op.missing)
                other_a, other_b = op.partial(values)
                a, b = op.merge(a, b, other_a, other_b)
                index = uint32(index + piece)
        return a, b

    @cuda.jit(device=True, forceinline=True)
    def body(x, weight, out, inverse, epsilon, pairs, state, parts):
        values = cuda.local.array(count, float32)
        weights = cuda.local.array(ready, uint32)
        all_a, all_b = cuda.local.array(rows, float32), cuda.local.array(rows, float32)
        factors, lasts = cuda.local.array(rows, float32), cuda.local.array(rows, float32)
        owns = cuda.local.array(rows, uint32)
        thread = uint32(cuda.threadIdx.x)
        rank = uint32(0)
        if cluster > 1:
            rank = ptx.cluster_ctarank()
        row, parts = uint32(uint32(cuda.blockIdx.x) // uint32(cluster) * uint32(rows)), uint32(parts)
        if grid:
            row, rank = ticket(state, uint32(x.shape[0]), parts, thread)
        else:
            parts = uint32(cluster)
        first, own, end, has_end = share(uint32(x.shape[1]), thread, rank, parts)
        source = ptx.global_address(x) + uint64(row) * uint64(x.strides[0]) + uint64(first) * uint64(16)
        target = ptx.global_address(out) + uint64(row) * uint64(out.strides[0]) + uint64(first) * uint64(16)
        weight_address = ptx.global_address(weight) + uint64(first) * uint64(16)
        for r in range(rows):  # a row behind the last has nothing
            unroll()
            owns[r] = uint32(own if r == 0 or uint32(row + uint32(r)) < uint32(x.shape[0]) else uint32(0))

        stay, go = uint64(0), uint64(0)
        if keep:
            stay = ptx.createpolicy_fractional_l2_evict_last(1.0)
            go = ptx.createpolicy_fractional_l2_evict_first(1.0)
        if thread == 0:
            set_up()
            if by_engine:
                for r in range(rows):
                    unroll()
                    fetch(uint32(r), source + uint64(r) * uint64(x.strides[0]), owns[r], stay)
        if cluster > 1:
            ptx.barrier_cluster_arrive_relaxed()  # this block has begun; its barriers are released by their fence
        for k in range(ahead):
            unroll()
            load_weights(weights, k * taken, weight_address, thread, k * vectors, rest(own, thread), stay)
        if by_engine:
            cuda.syncthreads()

        # One number or two for what each thread has …
        for r in range(rows):
            unroll()
            at_row = uint32(row + uint32(r))
            here = source + uint64(r) * uint64(x.strides[0])
            lasts[r] = float32(op.missing)
            if has_end and (r == 0 or at_row < uint32(x.shape[0])):
                lasts[r] = float32(x[at_row, end])
            all_a[r], all_b[r] = reduce(values, x, at_row, uint32(r), here, thread, owns[r], lasts[r], stay)
            bring(uint32(0), uint32(r), thread, all_a[r], all_b[r])
        # … and for the row; the blocks of a cluster have all begun before one sends to another.
        if cluster > 1:
            ptx.barrier_cluster_wait()
        meet(uint32(0), uint32(0), thread, rank)
        for r in range(rows):
            unroll()
            a, b = take(uint32(0), uint32(r), thread)
            if grid:
                a, b = across(state, pairs, row, rank, parts, thread, a, b)
            factors[r] = op.factor(all_a[r] if held else a, a, b, inverse, epsilon)
            all_a[r], all_b[r] = a, b
        if cluster > 1:
            ptx.barrier_cluster_arrive_relaxed()  # this block needs nothing any more of the others

        if held:
            left = rest(own, thread)
            rescale(values, weights, 0, factors[0], weight, thread, 0, left)
            store(values, out, row, target, thread, 0, left)
        else:
            index = thread
            while index < own:
                for k in range(ahead):
                    unroll()
                    for r in range(rows):
                        unroll()
                        left = rest(owns[r], index)
                        at_row = uint32(row + uint32(r))
                        here = source + uint64(r) * uint64(x.strides[0])
                        load(values, x, at_row, uint32(r), here, index, k * vectors, left, go)
                        for i in range(vectors * width):
                            unroll()
                            values[i] = op.weigh(values[i], all_a[r])
                        rescale(values, weights, k * taken, factors[r], weight, index, k * vectors, left)
                        if r == rows - 1:  # the weights' next come while these are stored
                            next_left = rest(own, index)
                            step = (k + ahead) * vectors
                            load_weights(weights, k * taken, weight_address, index, step, next_left, stay)
                        there = target + uint64(r) * uint64(out.strides[0])
                        store(values, out, at_row, there, index, k * vectors, left)
                index = uint32(index + uint32(ahead * vectors * threads))
        for r in range(rows):
            unroll()
            at_row = uint32(row + uint32(r))
            if has_end and (r == 0 or at_row < uint32(x.shape[0])):
                value = op.weigh(lasts[r], all_a[r]) * op.factor(all_a[r], all_a[r], all_b[r], inverse, epsilon)
                if weighted:
                    value *= float32(weight[end])
                out[at_row, end] = value
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

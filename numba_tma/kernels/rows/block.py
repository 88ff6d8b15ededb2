"""The threads of a block, or of a cluster of blocks, put their pairs together; and the kernel around a body.

Blocks of a cluster send their pairs by bulk copies from shared memory to shared memory, which count themselves in at a
barrier of the block that is sent to. Plain stores there (st.shared::cluster) would need a release to the cluster, whose
fence waits for everything that the thread's SM has under way: for each row, the results of the rows before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait
from ...shared import Barriers, Buffer, Shared
from .operation import Operation

_WARP = 32


def meeting_members(threads: int, cluster: int = 1, rows: int = 1, tables: int = 1) -> dict[str, Buffer | Barriers]:
    """What `make_meeting` needs of a plan of shared memory.

    `pairs` has a pair of each warp of all the cluster's blocks, for each row; there are `tables` of it. In a cluster, a
    block sends what is in `own`, and has barriers, `met`, for what it is sent.
    """
    entries = _entries(threads, cluster)
    members: dict[str, Buffer | Barriers] = {"pairs": Buffer((tables, cluster, rows, entries, 2), np.float32)}
    if cluster > 1:
        members |= {"own": Buffer((tables, rows, entries, 2), np.float32), "met": Barriers(tables)}
    return members


def _entries(threads: int, cluster: int) -> int:
    """Pairs of a block: one for each warp, and an even number where they are copied, which is by 16 bytes."""
    warps = threads // _WARP
    return warps + warps % 2 if cluster > 1 else warps


class Meeting(NamedTuple):
    """Device functions by which the threads of a block, or a cluster, get the pair of a whole row, or of several.

    begin(): set up the barriers; one thread calls it, and mbarrier_init's fence afterwards. Nothing without a cluster.
    bring(slot, row, thread, a, b): a thread's pair of one of the rows; all threads call it.
    meet(slot, phase, thread, rank): wait until all have brought their pairs. There is a barrier of the block in it:
        what a thread did before, all of its block may build upon afterwards.
    take(slot, row, thread): the pair of a whole row, in every thread.

    Tables (`slot`) take turns, as a warp may still take the last pairs while the next are sent, and `phase` is 0 and 1
    in turn for the uses of one. The threads of a cluster arrive at its barrier behind `begin`, and behind each `meet`.
    They wait there before each `meet`, since another's barriers might not be set up, and before they end or bring more
    to the same table: what was sent is read from there.
    """

    begin: Callable
    bring: Callable
    meet: Callable
    take: Callable


def make_meeting(
    op: Operation, smem: Shared, threads: int, cluster: int = 1, rows: int = 1, tables: int = 1
) -> Meeting:
    """The functions for blocks of `threads`, with `meeting_members` of the same arguments in the plan `smem`."""
    warps, entries = threads // _WARP, _entries(threads, cluster)
    everyone = cluster * entries
    nbytes = uint32(rows * entries * 8)

    @cuda.jit(device=True, forceinline=True)
    def begin():
        if cluster > 1:
            for slot in range(tables):
                ptx.mbarrier_init(smem.met[slot], 1)

    @cuda.jit(device=True, forceinline=True)
    def bring(slot, row, thread, a, b):
        lane, warp = uint32(thread % uint32(_WARP)), uint32(thread // uint32(_WARP))
        a, b = op.warp(a, b)
        if cluster == 1:
            if lane == 0:
                smem.pairs[slot, 0, row, warp, 0], smem.pairs[slot, 0, row, warp, 1] = a, b
        else:
            # Each thread makes visible to the engine what it wrote itself; then comes the barrier.
            if lane == 0:
                smem.own[slot, row, warp, 0], smem.own[slot, row, warp, 1] = a, b
                ptx.fence_proxy_async_shared_cta()
            if warps < entries and thread == 0:
                smem.own[slot, row, warps, 0], smem.own[slot, row, warps, 1] = float32(op.missing), float32(0)
                ptx.fence_proxy_async_shared_cta()

    @cuda.jit(device=True, forceinline=True)
    def meet(slot, phase, thread, rank):
        cuda.syncthreads()
        if cluster > 1:
            if thread == 0:
                ptx.mbarrier_arrive_expect_tx(smem.met[slot], uint32(nbytes * uint32(cluster)))
            if thread < uint32(cluster):  # a block each, this one among them
                table = smem.pairs.address_of(slot, rank, uint32(0), uint32(0), uint32(0))
                ptx.cp_async_bulk_shared_cluster_shared(
                    ptx.mapa_shared_cluster(table, thread),
                    smem.own.address_of(slot, uint32(0), uint32(0), uint32(0)),
                    nbytes,
                    ptx.mapa_shared_cluster(smem.met[slot], thread),
                )
            mbarrier_wait(smem.met[slot], phase)

    @cuda.jit(device=True, forceinline=True)
    def entry(slot, row, number):
        block, warp = uint32(number // uint32(entries)), uint32(number % uint32(entries))
        return smem.pairs[slot, block, row, warp, 0], smem.pairs[slot, block, row, warp, 1]

    @cuda.jit(device=True, forceinline=True)
    def take(slot, row, thread):
        lane = uint32(thread % uint32(_WARP))
        a, b = float32(op.missing), float32(0)
        if lane < uint32(everyone):
            a, b = entry(slot, row, lane)
        for i in range(1, -(-everyone // _WARP)):
            number = uint32(lane + uint32(i * _WARP))
            if number < uint32(everyone):
                other_a, other_b = entry(slot, row, number)
                a, b = op.merge(a, b, other_a, other_b)
        return op.warp(a, b)

    return Meeting(begin, bring, meet, take)


def make_across_grid(op: Operation, smem: Shared, threads: int) -> tuple[Callable, Callable]:
    """ticket(…) and across(…): a row over blocks that need not be one cluster, and meet in global memory.

    ticket(state, rows, parts, thread): the row and the part of it that are this block's. Blocks draw numbers, so that
    whoever waits for the others of a row knows them to have begun, in whichever order the GPU starts blocks.
    across(state, pairs, row, part, parts, thread, a, b): the pair of the whole row in every thread, from the block's.

    `pairs` is float32 (rows, parts, 2). `state` is uint32 (rows + 1): for each row how many blocks have brought their
    pair, and then how many have taken all of them; behind them the next number. All are zero before and afterwards.
    """

    @cuda.jit(device=True, forceinline=True)
    def ticket(state, rows, parts, thread):
        if thread == 0:
            number = cuda.atomic.add(state, rows, uint32(1))
            if number == uint32(rows * parts) - uint32(1):
                state[rows] = uint32(0)
            smem.number[0] = number
        cuda.syncthreads()
        number = smem.number[0]
        row = uint32(number // parts)
        return row, uint32(number - row * parts)

    @cuda.jit(device=True, forceinline=True)
    def across(state, pairs, row, part, parts, thread, a, b):
        if thread == 0:
            pairs[row, part, 0], pairs[row, part, 1] = a, b
            cuda.threadfence()
            cuda.atomic.add(state, row, uint32(1))
            arrived = ptx.global_address(state) + uint64(row) * uint64(4)
            while ptx.ld_acquire_gpu_global_u32(arrived) < parts:
                pass
        cuda.syncthreads()
        a, b = float32(op.missing), float32(0)
        for i in range(uint32(thread % uint32(_WARP)), parts, uint32(_WARP)):
            a, b = op.merge(a, b, pairs[row, i, 0], pairs[row, i, 1])
        a, b = op.warp(a, b)
        cuda.syncthreads()
        if thread == 0:
            taken = cuda.atomic.add(state, row, uint32(1))
            if taken == uint32(parts + parts) - uint32(1):
                state[row] = uint32(0)
        return a, b

    return ticket, across


def operation_kernel(op: Operation, body: Callable, name: str, grid: bool = False, **options: object) -> Kernel:
    """The kernel around `body(x, weight, out, inverse, epsilon, pairs, state, parts)`, with what it needs of these.

    Without `grid` it lacks the last three.
    """
    if grid and op.weighted:

        def run(x, weight, out, inverse, epsilon, pairs, state, parts):
            body(x, weight, out, inverse, epsilon, pairs, state, parts)
    elif grid:

        def run(x, out, pairs, state, parts):
            body(x, out, out, float32(0), float32(0), pairs, state, parts)
    elif op.weighted:

        def run(x, weight, out, inverse, epsilon):
            body(x, weight, out, inverse, epsilon, x, x, 1)
    else:

        def run(x, out):
            body(x, out, out, float32(0), float32(0), x, x, 1)

    run.__name__ = run.__qualname__ = f"{op.name}_{name}"
    return kernel(run, **options)

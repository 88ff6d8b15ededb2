"""The threads of a block, or of a cluster of blocks, put their pairs together; and the kernel around a body."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...shared import Buffer, Shared
from .operation import Operation

_WARP = 32


def pairs_buffer(threads: int, cluster: int = 1) -> Buffer:
    """Two tables of pairs, one for each warp of the cluster: the member `pairs` of a plan of shared memory."""
    return Buffer((2, cluster * threads // _WARP, 2), np.float32)


def make_together(op: Operation, smem: Shared, threads: int, cluster: int = 1) -> Callable:
    """together(slot, thread, rank, a, b): the pair of the whole row, from each thread's.

    There is one barrier in it, of the block or the cluster: what a thread did before, all may build upon afterwards.
    The table `slot` may be written again after the next such barrier.
    """
    warps = threads // _WARP
    entries = warps * cluster

    @cuda.jit(device=True, forceinline=True)
    def meet(slot, thread, rank, a, b):
        lane, warp = uint32(thread % uint32(_WARP)), uint32(thread // uint32(_WARP))
        if cluster == 1:
            if lane == 0:
                smem.pairs[slot, warp, 0], smem.pairs[slot, warp, 1] = a, b
            cuda.syncthreads()
        else:
            # Every block gets the pair of every warp of the cluster: lane i writes to block i.
            if lane < uint32(cluster):
                own = smem.pairs.address_of(slot, uint32(rank * uint32(warps) + warp), uint32(0))
                ptx.st_shared_cluster_v2_f32(ptx.mapa_shared_cluster(own, lane), a, b)
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()

    @cuda.jit(device=True, forceinline=True)
    def together(slot, thread, rank, a, b):
        a, b = op.warp(a, b)
        meet(slot, thread, rank, a, b)
        lane = uint32(thread % uint32(_WARP))
        a, b = float32(op.missing), float32(0)
        if lane < uint32(entries):
            a, b = smem.pairs[slot, lane, 0], smem.pairs[slot, lane, 1]
        for i in range(1, -(-entries // _WARP)):
            entry = uint32(lane + uint32(i * _WARP))
            if entry < uint32(entries):
                a, b = op.merge(a, b, smem.pairs[slot, entry, 0], smem.pairs[slot, entry, 1])
        return op.warp(a, b)

    return together


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

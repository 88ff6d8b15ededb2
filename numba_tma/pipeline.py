"""Device helpers in Numba on top of the PTX functions: waiting on a barrier, walking a ring of stages, vectors.

They are ordinary device functions, so they also work in a plain `@cuda.jit` kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import cuda, types

from . import ptx

u32 = types.uint32


@cuda.jit(device=True, forceinline=True)
def ring(step, stages):
    """Stage and phase parity of a ring's `step`-th use.

    A ring of `stages` buffers is gone through again and again. Use number `step` takes buffer `step % stages`, and
    each full turn flips the parity that a wait on that buffer's barrier asks for. Both come back as uint32: Numba
    would widen the sum of two uint32 to 64 bits, and addresses with it.
    """
    step = u32(step)
    turn = step // u32(stages)
    return u32(step - turn * u32(stages)), u32(turn & u32(1))


@cuda.jit(device=True, forceinline=True)
def mbarrier_wait(bar, parity):
    """Block this thread until the phase of `parity` (0 or 1) of the barrier at `bar` has completed.

    A fresh barrier is in phase 0, and the phase before it counts as complete: waiting with parity 1 passes at once.
    That is how a producer finds an empty ring without a special case. PTX ISA: mbarrier.try_wait.
    """
    while not ptx.mbarrier_try_wait_parity(bar, parity):
        pass


@functools.cache
def make_release(cluster: int = 1) -> Callable:
    """Make `release(bar, thread)`: a group of threads, numbered from 0, lets go of what the barrier at `bar` guards.

    One thread arrives for all, so the others must have read what they need. Where the blocks of a `cluster` fill parts
    of each other's buffers, it arrives at the barrier in each of them, by as many threads.
    """

    @cuda.jit(device=True, forceinline=True)
    def release(bar, thread):
        if thread == 0:
            ptx.mbarrier_arrive(bar)

    @cuda.jit(device=True, forceinline=True)
    def release_everywhere(bar, thread):
        if thread < cluster:
            ptx.mbarrier_arrive_shared_cluster(ptx.mapa_shared_cluster(bar, thread))

    return release if cluster == 1 else release_everywhere


@functools.cache
def make_meet(cluster: int) -> Callable:
    """Make `meet()`: all threads of the block, or of all blocks of the `cluster`, wait for each other."""

    @cuda.jit(device=True, forceinline=True)
    def meet():
        if cluster == 1:
            cuda.syncthreads()
        else:
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()

    return meet


@cuda.jit(device=True, forceinline=True)
def release_to_async():
    """Let the copy engine overwrite what this block has just read: proxy fence, then block barrier.

    The barrier orders the block's reads before the copy that one thread issues next; the fence carries that order
    from ordinary accesses (the generic proxy) to the copy engine's (the async proxy).
    """
    ptx.fence_proxy_async_shared_cta()
    cuda.syncthreads()

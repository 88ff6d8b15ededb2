"""Device helpers in Numba on top of the PTX functions: waiting on a barrier, walking a ring of stages, vectors.

They are ordinary device functions, so they also work in a plain `@cuda.jit` kernel.
"""

from __future__ import annotations

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


@cuda.jit(device=True, forceinline=True)
def release_to_async():
    """Let the copy engine overwrite what this block has just read: proxy fence, then block barrier.

    The barrier orders the block's reads before the copy that one thread issues next; the fence carries that order
    from ordinary accesses (the generic proxy) to the copy engine's (the async proxy).
    """
    ptx.fence_proxy_async_shared_cta()
    cuda.syncthreads()

"""Kernels that wait, and programs of them for a GPU of their own: a trap takes the CUDA context with it.

`python waiting.py NAME` runs one of PROGRAMS and prints, as JSON, what it ended with.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import time

import numpy as np
from numba import cuda, float32, uint32

from numba_tma import (
    Barriers,
    Kernel,
    LaunchError,
    Shared,
    TensorMap,
    Tiles,
    WatchdogError,
    kernel,
    ptx,
    use_backend,
    watchdog,
)
from numba_tma.device_array import DeviceArray
from numba_tma.pipeline import mbarrier_wait, ring

STAGES, STEPS = 2, 8
SMEM = Shared(tile=Tiles(STAGES, (8, 32), np.float32), full=Barriers(STAGES), empty=Barriers(STAGES))
PAIR = Shared(ready=Barriers(3))


@functools.cache
def make_sums(arrivals: int, seconds: float | None = None) -> Kernel:
    """Warp 0 sums the first rows of tiles that a lane of warp 1 fetches, which waits for `arrivals` arrivals a tile."""

    @kernel(threads=64, shared=SMEM, watchdog=seconds)
    def sums(x_map, out, steps):
        thread = cuda.threadIdx.x
        if thread == 0:
            for stage in range(STAGES):
                ptx.mbarrier_init(SMEM.full[stage], 1)
                ptx.mbarrier_init(SMEM.empty[stage], arrivals)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if thread < 32:
            total = float32(0)
            for step in range(steps):
                stage, phase = ring(step, STAGES)
                mbarrier_wait(SMEM.full[stage], phase)  # the consumer waits
                total += SMEM.tile[stage][0, thread]
                ptx.fence_proxy_async_shared_cta()
                cuda.syncwarp()
                if thread == 0:
                    ptx.mbarrier_arrive(SMEM.empty[stage])
            out[thread] = total
        elif thread == 32:
            for step in range(steps):
                stage, phase = ring(step, STAGES)
                mbarrier_wait(SMEM.empty[stage], phase ^ 1)  # the producer waits
                ptx.mbarrier_arrive_expect_tx(SMEM.full[stage], x_map.box_bytes)
                ptx.cp_async_bulk_tensor_2d_shared_global(SMEM.tile[stage], x_map, 0, 8 * step, SMEM.full[stage])

    return sums


@functools.cache
def make_pair(seconds: float | None, nobody: bool, cluster: int = 1) -> Kernel:
    """Thread 37 of a cluster's last block waits for ready[2]; thread 0 of that block arrives unless `nobody` does."""

    @kernel(threads=64, shared=PAIR, cluster=cluster, watchdog=seconds)
    def pair(out):
        thread = cuda.threadIdx.x
        if thread == 0:
            ptx.mbarrier_init(PAIR.ready[2], 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if uint32(cuda.blockIdx.x) % uint32(cluster) == uint32(cluster - 1):
            if thread == 37:
                mbarrier_wait(PAIR.ready[2], 0)  # the pair waits
            if thread == 0 and not nobody:
                ptx.mbarrier_arrive(PAIR.ready[2])
        out[cuda.blockIdx.x * 64 + thread] = thread

    return pair


@functools.cache
def make_inline_loop(seconds: float | None) -> Kernel:
    """All threads wait, in the loop that is part of an instruction's snippet, for a phase that nobody completes."""

    @kernel(threads=32, shared=PAIR, watchdog=seconds)
    def inline_loop(out):
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(PAIR.ready[1], 5)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        ptx.mbarrier_wait_parity(PAIR.ready[1], 1)
        ptx.mbarrier_wait_parity(PAIR.ready[1], 0)  # the inline wait
        out[cuda.threadIdx.x] = 1

    return inline_loop


@functools.cache
def make_poll(seconds: float | None) -> Kernel:
    """Waits until a flag in global memory is set."""

    @kernel(threads=32, watchdog=seconds)
    def poll(flag, out):
        address = ptx.global_address(flag)
        while ptx.ld_acquire_gpu_global_u32(address) == uint32(0):  # the poll
            pass
        out[cuda.threadIdx.x] = 1

    return poll


def line_of(comment: str) -> int:
    """The line of this file that ends with the comment."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}")]
    return number


def arguments_of_sums() -> tuple[TensorMap, np.ndarray, np.int32]:
    """A matrix, and where its sums go."""
    x = np.arange(8 * STEPS * 32, dtype=np.float32).reshape(8 * STEPS, 32)
    return TensorMap(x, SMEM.tile), np.zeros(32, np.float32), np.int32(STEPS)


def _sums(arrivals: int, seconds: float | None) -> list:
    x_map, out, steps = arguments_of_sums()
    make_sums(arrivals, seconds)[1](x_map, out, steps)
    return out.tolist()


def _pair(nobody: bool, cluster: int = 1) -> list:
    out = np.zeros(64 * cluster, np.float32)
    make_pair(1, nobody, cluster)[cluster](out)
    return out.tolist()


def _inline_loop() -> None:
    make_inline_loop(1)[1](np.zeros(32, np.float32))


def _poll() -> None:
    make_poll(1)[1](np.zeros(1, np.uint32), np.zeros(32, np.float32))


def _bound() -> None:
    out = DeviceArray(np.zeros(64, np.float32))
    make_pair(1, True)[1].bind(out)()
    out.to_host()


def _through_numba(ask: bool) -> None:
    """The failure is Numba's to report; ours is asked for, or told at the end of the program."""
    out = cuda.to_device(np.zeros(64, np.float32))
    make_pair(1, True)[1](out)
    try:
        cuda.synchronize()
    except Exception as error:
        if ask:
            watchdog.raise_if_fired()
        raise LaunchError(f"Numba says {type(error).__name__}") from error


PROGRAMS = {
    "sums that hang": functools.partial(_sums, 32, None),
    "sums": functools.partial(_sums, 1, None),
    "nobody arrives": functools.partial(_pair, True),
    "somebody arrives": functools.partial(_pair, False),
    "in a cluster": functools.partial(_pair, True, 2),
    "inline loop": _inline_loop,
    "poll": _poll,
    "bound": _bound,
    "through Numba": functools.partial(_through_numba, True),
    "through Numba, not asked": functools.partial(_through_numba, False),
}


def main(name: str) -> None:
    """Run a program on the GPU and print what it ended with."""
    began = time.perf_counter()
    ended: dict[str, object] = {}
    try:
        with use_backend("gpu"):
            ended["result"] = PROGRAMS[name]()
    except WatchdogError as error:
        names = ("kernel", "barrier", "phase", "line", "seconds", "block", "thread", "cluster_rank")
        ended |= {name: getattr(error, name) for name in names} | {"message": str(error)}
    except LaunchError as error:
        ended["other"] = str(error)
    print(json.dumps({**ended, "took": time.perf_counter() - began}))


if __name__ == "__main__":
    main(sys.argv[1])

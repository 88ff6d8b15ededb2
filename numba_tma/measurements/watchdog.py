"""What a watchdog costs a kernel that does not hang: for docs/hangs.md."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import numpy as np
from numba import cuda

from .. import bench, ptx
from ..device_array import DeviceArray
from ..kernels import select
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait
from ..shared import Barriers, Shared
from ..watchdog import VARIABLE
from .timing import Record

_SECONDS = 10
_HANDOFFS = 20_000
# Steps whose threads wait often, by what they wait for: copies, the tensor cores' operands, each other.
_STEPS = ("copy.bulk", "kv_stream.tma_ring", "multicast.multicast", "gemm.tuned", "attention.persistent")


@functools.cache
def _make_handoffs(seconds: float) -> Kernel:
    """Two warps that do nothing but wait for each other, in turn."""
    smem = Shared(ping=Barriers(1), pong=Barriers(1))

    @kernel(threads=64, shared=smem, watchdog=seconds)
    def handoffs(count, out):
        thread = cuda.threadIdx.x
        if thread == 0:
            ptx.mbarrier_init(smem.ping[0], 1)
            ptx.mbarrier_init(smem.pong[0], 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if thread == 0:
            for turn in range(count):
                ptx.mbarrier_arrive(smem.ping[0])
                mbarrier_wait(smem.pong[0], turn & 1)
            out[0] = count
        if thread == 32:
            for turn in range(count):
                mbarrier_wait(smem.ping[0], turn & 1)
                ptx.mbarrier_arrive(smem.pong[0])

    return handoffs


@contextlib.contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Kernels that are bound inside have a watchdog, or none if `seconds` is 0."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(seconds)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def cost() -> list[Record]:
    """Times of kernels with a watchdog and without, in turn; every look at a barrier but the first reads the clock."""
    out = DeviceArray(np.zeros(1, np.int32))
    launches: dict[str, dict[float, Callable[[], object]]] = {
        f"{_HANDOFFS} handoffs": {
            seconds: _make_handoffs(seconds)[1].bind(np.int32(_HANDOFFS), out) for seconds in (0, _SECONDS)
        }
    }
    for name in _STEPS:
        ((problem, (variant,)),) = select([name])
        case = problem.cases["quick", "gpu"][0]
        arrays = {key: DeviceArray(array) for key, array in problem.inputs(case, np.random.default_rng(0)).items()}
        launches[name] = {}
        for seconds in (0, _SECONDS):
            with _watched(seconds):
                launches[name][seconds] = variant.bind(arrays, **case.options_of(variant.name))
    records = []
    for name, pair in launches.items():
        timings = bench.time_launches({str(seconds): launch for seconds, launch in pair.items()}, repeats=21)
        without, with_watchdog = (timings[str(seconds)].median for seconds in pair)
        records.append(
            {
                "what": name,
                "seconds": without,
                "seconds_with_watchdog": with_watchdog,
                "slowdown": with_watchdog / without - 1,
            }
        )
    return records

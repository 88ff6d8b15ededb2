"""Timing on a GPU: CUDA events, warm-up, the L2 cache flushed, candidates in turn, medians.

Candidates that are compared are timed within the same loop, one after the other, so that clocks and temperature
drift over all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.cuda.types import uint32, uint64

from . import driver
from .device_array import DeviceArray
from .driver import check
from .launch import kernel, use_backend


@dataclass(frozen=True)
class Timing:
    """Seconds a launch took: median, fastest and slowest of `samples`."""

    median: float
    fastest: float
    slowest: float
    samples: int


@kernel(threads=256)
def _read_all(words, sink):
    """Read every word; the sum is only there so that the reads are."""
    step = uint32(cuda.gridDim.x) * uint32(cuda.blockDim.x)
    total = uint64(0)
    for i in range(uint32(cuda.grid(1)), uint32(words.size), step):
        total += words[i]
    if total == uint64(1):
        sink[0] = total


class Flush:
    """Fills the L2 cache with other data between launches, so that no launch finds its input there.

    It reads rather than writes: lines that a memset left would have to be written back to memory during the launch
    that is timed, 60 MB on an H200.
    """

    def __init__(self, stream: int = 0) -> None:
        nbytes = 4 * driver.attribute("L2_CACHE_SIZE", driver.current_device())
        self._words = DeviceArray(np.zeros(nbytes // 8, np.uint64))
        blocks = 8 * driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device())
        with use_backend("gpu"):
            self._launch = _read_all[blocks, None, stream].bind(self._words, DeviceArray(np.zeros(1, np.uint64)))

    def __call__(self) -> None:
        """Enqueue the flush."""
        self._launch()


def time_launches(
    launches: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 30,
    warm_up: int = 3,
    flush: bool = True,
    stream: int = 0,
) -> dict[str, Timing]:
    """Time functions that each enqueue work on `stream`, in turn.

    Args:
        launches: by name; a function of no arguments enqueues one launch.
        repeats: timed rounds; each round times every function once.
        warm_up: rounds that are not timed.
        flush: fill the L2 cache with other data before each timed launch. This also keeps the GPU busy while the
            host enqueues, so that the events enclose the kernel and nothing else.
    """
    from cuda.bindings import driver as cu

    flusher = Flush(stream) if flush else None
    events = [check(cu.cuEventCreate(0), "cuEventCreate") for _ in range(2 * len(launches))]
    pairs = dict(zip(launches, zip(events[::2], events[1::2], strict=True), strict=True))
    samples: dict[str, list[float]] = {name: [] for name in launches}
    try:
        for round_ in range(warm_up + repeats):
            for name, launch in launches.items():
                begin, end = pairs[name]
                if flusher:
                    flusher()
                check(cu.cuEventRecord(begin, stream), "cuEventRecord")
                launch()
                check(cu.cuEventRecord(end, stream), "cuEventRecord")
            driver.synchronize(stream)
            if round_ >= warm_up:
                for name, (begin, end) in pairs.items():
                    samples[name].append(check(cu.cuEventElapsedTime(begin, end), "cuEventElapsedTime") * 1e-3)
    finally:
        for event in events:
            cu.cuEventDestroy(event)
    return {
        name: Timing(statistics.median(values), min(values), max(values), len(values))
        for name, values in samples.items()
    }


def time_graph(launch: Callable[[int], object], *, launches: int = 20, repeats: int = 20) -> Timing:
    """`time_graphs` of one candidate."""
    return time_graphs({"": launch}, launches=launches, repeats=repeats)[""]


def time_graphs(
    candidates: Mapping[str, Callable[[int], object]], *, launches: int = 20, repeats: int = 20
) -> dict[str, Timing]:
    """Time kernels inside CUDA graphs of many launches, where no launch overhead shows; the candidates in turn.

    Args:
        candidates: by name; a function enqueues one launch on the stream whose handle it is given.
        launches: launches in a graph, one after another; what comes back is the time of one.
        repeats: timed rounds; each round runs every candidate's graph once.
    """
    from cuda.bindings import driver as cu

    stream = check(cu.cuStreamCreate(1), "cuStreamCreate")
    begin, end = (check(cu.cuEventCreate(0), "cuEventCreate") for _ in range(2))
    graphs: dict[str, tuple[object, object]] = {}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    try:
        for name, launch in candidates.items():
            graphs[name] = _graph(stream, launch, launches)
        for round_ in range(repeats + 2):
            for name, (_, executable) in graphs.items():
                check(cu.cuEventRecord(begin, stream), "cuEventRecord")
                check(cu.cuGraphLaunch(executable, stream), "cuGraphLaunch")
                check(cu.cuEventRecord(end, stream), "cuEventRecord")
                driver.synchronize(int(stream))
                if round_ >= 2:
                    elapsed = check(cu.cuEventElapsedTime(begin, end), "cuEventElapsedTime")
                    samples[name].append(elapsed * 1e-3 / launches)
    finally:
        for graph, executable in graphs.values():
            cu.cuGraphExecDestroy(executable)
            cu.cuGraphDestroy(graph)
        cu.cuEventDestroy(begin)
        cu.cuEventDestroy(end)
        cu.cuStreamDestroy(stream)
    return {
        name: Timing(statistics.median(values), min(values), max(values), len(values))
        for name, values in samples.items()
    }


def _graph(stream: object, launch: Callable[[int], object], launches: int) -> tuple[object, object]:
    """A graph of `launches` launches, and the form of it that can be launched."""
    from cuda.bindings import driver as cu

    launch(int(stream))  # loads the kernel: nothing may be loaded during capture
    driver.synchronize(int(stream))
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(cu.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")
    try:
        for _ in range(launches):
            launch(int(stream))
    except Exception:
        cu.cuStreamEndCapture(stream)  # else this thread could not allocate any more
        raise
    graph = check(cu.cuStreamEndCapture(stream), "cuStreamEndCapture")
    return graph, check(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")


def host_overhead(call: Callable[[], object], *, calls: int = 200, repeats: int = 20, stream: int = 0) -> Timing:
    """Host seconds that one call takes to enqueue its launch, the GPU never waited for within a sample."""
    samples = []
    for _ in range(repeats):
        driver.synchronize(stream)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - begin) / calls)
    driver.synchronize(stream)
    return Timing(statistics.median(samples), min(samples), max(samples), len(samples))


def device_copy(nbytes: int, stream: int = 0) -> tuple[Callable[[], object], Callable[[], None]]:
    """The driver's device-to-device copy of `nbytes`, as a launch, and a function that frees its buffers."""
    from cuda.bindings import driver as cu

    source, target = driver.allocate(nbytes), driver.allocate(nbytes)
    check(cu.cuMemsetD8(source, 0x5A, nbytes), "cuMemsetD8")

    def launch() -> object:
        return check(cu.cuMemcpyDtoDAsync(target, source, nbytes, stream), "cuMemcpyDtoDAsync")

    def free() -> None:
        driver.free(source)
        driver.free(target)

    return launch, free

"""Run the micro-benchmarks: on a GPU, where the clock says what they take, or in the simulator."""

from __future__ import annotations

import functools
import statistics
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .. import bench, compile, driver, sim
from ..device_array import DeviceArray
from ..machine_code import parse
from ..sim.timing import MachineInstruction, ModelOptions
from ..tensor_map import TensorMap
from .probes import BEYOND_L2, EMPTY, MULTIPROCESSORS, PROBES, SPIN, SPIN_CYCLES, WHOLE_SM, Probe, module

ARCH = "sm_90a"
_PARAMETER_BYTES, _MAP_OFFSET = 192, 64
_OFFSETS = (0, 8, 16, 24, 28, _MAP_OFFSET)
_FAILED = (1 << 64) - 1
Record = dict[str, Any]


def _map_bytes(probe: Probe, address: int, simulated: bool) -> bytes:
    """The tensor map of a probe's data, 128 bytes."""
    if probe.box is None:
        return bytes(128)
    matrix = np.zeros((probe.span // (2 * probe.box.columns), probe.box.columns), np.float16)
    made = TensorMap(matrix, probe.box.box, swizzle=probe.box.swizzle, l2_promotion=probe.box.promotion, store=False)
    return made.encode_sim(address) if simulated else made.encode(address)


def _parameters(probe: Probe, out: int, data: int, count: int, simulated: bool) -> bytes:
    packed = struct.pack("<QQQII", out, data, probe.span, count, 0)
    return packed.ljust(_MAP_OFFSET, b"\0") + _map_bytes(probe, data, simulated)


@functools.cache
def compiled(names: tuple[str, ...]) -> compile.Compiled:
    text = module(PROBES[name] for name in names)
    return compile.Compiled("calibration", ARCH, text, (), _PARAMETER_BYTES)


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


class _Bench:
    """The kernels loaded, and the memory that they use."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        from cuda.bindings import driver as cu

        chosen = list(probes)
        self._cubin = compiled(tuple(probe.name for probe in chosen)).cubin
        self._ordinal = driver.current_device()
        self._data = driver.allocate(BEYOND_L2)
        driver.check(cu.cuMemsetD8(self._data, 0, BEYOND_L2), "cuMemsetD8")
        self._out = DeviceArray(np.zeros(MULTIPROCESSORS, np.uint64))
        self._flush = bench.Flush()

    def _launch(self, probe: Probe, loaded: driver.LoadedKernel, count: int) -> float:
        """Cycles of one launch: the median of its blocks'. Raises RuntimeError if a wait gave up."""
        if probe.cold:
            self._flush()
        config = driver.launch_config(
            (probe.blocks, 1, 1), (probe.threads, 1, 1), probe.shared_bytes, 0, (probe.cluster, 1, 1)
        )
        buffer = driver.ArgumentBuffer(_PARAMETER_BYTES, _OFFSETS)
        buffer.view[:] = _parameters(probe, self._out.pointer, self._data, count, False)
        driver.Launch(config, loaded, buffer)()
        driver.synchronize()
        cycles = self._out.to_host()[: probe.blocks]
        if (cycles == _FAILED).any():
            raise RuntimeError(f"{probe.name}: a wait gave up")
        return float(np.median(cycles))

    def measure(self, probe: Probe, repeats: int) -> float:
        """Cycles of one iteration of the probe's loop."""
        loaded = driver.LoadedKernel(self._cubin, probe.name, self._ordinal, probe.cluster)
        loaded.allow_shared(probe.shared_bytes)
        if probe.contents is not None:
            driver.copy_to_device(self._data, probe.contents(self._data).view(np.uint8))
        few, many = probe.counts
        self._launch(probe, loaded, many)
        taken = [[self._launch(probe, loaded, count) for count in (few, many)] for _ in range(repeats)]
        return statistics.median(later - earlier for earlier, later in taken) / (many - few)

    def clock_mhz(self) -> float:
        """What the SMs' clock really ran at, by a probe that reads the nanoseconds beside it."""
        probe = PROBES["clock"]
        loaded = driver.LoadedKernel(self._cubin, probe.name, self._ordinal)
        both = int(self._launch(probe, loaded, probe.counts[1]))
        return (both & 0xFFFFFFFF) / (both >> 32) * 1e3

    def free(self) -> None:
        """Give the memory back."""
        driver.free(self._data)


def _empty_launches() -> dict[str, float]:
    """Seconds of launches that do nothing, as `bench` times them: behind a flush of the L2 cache, and in a graph."""
    cubin = compile.Compiled("empty", ARCH, EMPTY, (), 0).cubin
    loaded = driver.LoadedKernel(cubin, "empty", driver.current_device())

    def launch(blocks: int, threads: int, stream: int = 0) -> driver.Launch:
        config = driver.launch_config((blocks, 1, 1), (threads, 1, 1), 0, stream, None)
        return driver.Launch(config, loaded, driver.ArgumentBuffer(0, ()))

    grids = [(1, 32), *((MULTIPROCESSORS * each, threads) for each in (1, 64, 512) for threads in (32, 128, 1024))]
    timings = bench.time_launches({f"{b} blocks of {t}": launch(b, t) for b, t in grids}, repeats=15)
    found = {name: timing.median for name, timing in timings.items()}
    in_graph = bench.time_graph(lambda stream: launch(MULTIPROCESSORS, 128, stream)())
    return {**found, "in a graph": in_graph.median}


def _block_turnover() -> dict[str, float]:
    """Cycles between the end of a block and the first instruction of the one that takes its place, by block size."""
    loaded = driver.LoadedKernel(compile.Compiled("spin", ARCH, SPIN, (), 0).cubin, "spin", driver.current_device())
    loaded.allow_shared(WHOLE_SM)

    def launch(each: int, threads: int) -> driver.Launch:
        # One block fits on an SM at a time.
        config = driver.launch_config((each * MULTIPROCESSORS, 1, 1), (threads, 1, 1), WHOLE_SM, 0, None)
        return driver.Launch(config, loaded, driver.ArgumentBuffer(0, ()))

    few, many = 4, 20
    sizes = (32, 128, 1024)
    launches = {f"{threads} {each}": launch(each, threads) for threads in sizes for each in (few, many)}
    timings = bench.time_launches(launches, repeats=15)
    mhz = driver.attribute("CLOCK_RATE", driver.current_device()) / 1e3
    return {
        str(t): (timings[f"{t} {many}"].median - timings[f"{t} {few}"].median) / (many - few) * mhz * 1e6 - SPIN_CYCLES
        for t in sizes
    }


def measure(names: Iterable[str] | None = None, repeats: int = 3) -> Iterator[Record]:
    """Measure the probes named, or all, on the current GPU: a record each, then one of launches and one of the clock.

    A probe whose wait gave up has no cycles, and says so.
    """
    chosen = [PROBES[name] for name in names] if names else list(PROBES.values())
    if PROBES["clock"] not in chosen:
        chosen.append(PROBES["clock"])
    made = _Bench(chosen)
    try:
        for probe in chosen:
            if probe.name == "clock":
                continue
            record: Record = {"probe": probe.name, "unit": probe.unit, "per_iteration": probe.per_iteration}
            try:
                record["cycles"] = made.measure(probe, repeats)
            except RuntimeError as error:
                record["reason"] = str(error)
            yield record
        yield {"probe": "clock", "mhz": made.clock_mhz()}
        yield {"probe": "launch", "seconds": _empty_launches()}
        yield {"probe": "block turnover", "cycles_by_threads": _block_turnover()}
    finally:
        made.free()


# ---------------------------------------------------------------------------------------------------------------------
# In the simulator


@functools.cache
def _machine_code(name: str) -> tuple[MachineInstruction, ...]:
    return tuple(parse(compile.disassemble(compiled((name,)).cubin, "ptx", encodings=True), name))


def modelled_cycles(name: str, counts: tuple[int, int] = (8, 24)) -> float:
    """What the model of time says one iteration of a probe's loop takes, from runs of so many iterations."""
    probe = PROBES[name]
    options = ModelOptions(machine_code=_machine_code(name), sample=True, warm=not probe.cold, intervals=0)
    taken = [simulate(probe, count, hazards=False, model=options).model.cycles for count in counts]
    return (taken[1] - taken[0]) / (counts[1] - counts[0])


def simulate(probe: Probe, count: int, **options: Any) -> sim.Report:
    """Run a probe in the simulator; `options` go to `sim.launch`."""
    memory = sim.GlobalMemory()
    data, out = np.zeros(probe.span, np.uint8), np.zeros(probe.blocks, np.uint64)
    address = memory.map(data, "data")
    if probe.contents is not None:
        contents = probe.contents(address).view(np.uint8)
        data[: contents.size] = contents
    packed = _parameters(probe, memory.map(out, "out"), address, count, True)
    cuts = (*_OFFSETS, _PARAMETER_BYTES)
    sizes = (8, 8, 8, 4, 4, 128)
    return sim.launch(
        module([probe]),
        probe.name,
        grid=probe.blocks,
        block=probe.threads,
        cluster=probe.cluster,
        shared_bytes=probe.shared_bytes,
        params=[packed[start : start + size] for start, size in zip(cuts, sizes, strict=False)],
        memory=memory,
        **options,
    )

"""Carry out tensor copies on a GPU or in the simulator, many in one launch: a block for each.

The kernel takes addresses alone, so that one compiled kernel serves every map of a rank on either side. A wait that
is never satisfied ends after a time, so a wrong byte count cannot hang a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from configurations import LOAD, OPERATIONS, SHARED_BYTES, Configuration, contents
from numba import cuda
from numba.cuda.types import int32, uint32, uint64

from numba_tma import Barriers, Kernel, Shared, TensorMap, TensorMapError, Tiles, driver, kernel, ptx, sim
from numba_tma.device_array import DeviceArray
from numba_tma.sim import descriptor

THREADS = 128
ARCH = "sm_90a"
_STEP = THREADS * 16
_JOB_BYTES = 48
_GUARD = 512  # bytes on either side of a tensor that are compared too
_WAIT_NS = 2_000_000
_SETTLE_NS = 3_000
_CODES = {name: code for code, name in enumerate(OPERATIONS)}

# The 128-byte swizzle asks for the alignment at which every pattern begins.
smem = Shared(box=Tiles(1, (SHARED_BYTES // 128, 128), np.uint8, swizzle="128B"), full=Barriers(1))


@dataclass(frozen=True)
class Result:
    """What a copy left behind, or why there was none.

    `complete`: the barrier completed by itself; `missing`: bytes that it still waited for otherwise; `clean`: no
    bytes were credited beyond those expected. `shared` is the whole buffer, `tensor` the global memory around the
    tensor. `note` is for the reader and not compared.
    """

    shared: bytes = b""
    tensor: bytes = b""
    complete: bool = True
    missing: int = 0
    clean: bool = True
    refused: str = ""
    note: str = ""

    def difference(self, other: Result) -> str:
        """The first thing in which two results differ, or nothing."""
        for name in ("complete", "missing", "clean"):
            if getattr(self, name) != getattr(other, name):
                return f"{name}: {getattr(self, name)} and {getattr(other, name)}"
        if bool(self.refused) != bool(other.refused):
            return f"refused: {self.refused or 'no'} and {other.refused or 'no'}"
        for name in ("shared", "tensor"):
            mine = np.frombuffer(getattr(self, name), np.uint8)
            others = np.frombuffer(getattr(other, name), np.uint8)
            places = np.flatnonzero(mine != others)
            if len(places):
                first = int(places[0]) // 16 * 16
                return (
                    f"{len(places)} bytes of {name} from {int(places[0])} on; chunk at {first}: "
                    f"{mine[first : first + 16].tobytes().hex()} and {others[first : first + 16].tobytes().hex()}"
                )
        return ""


def _call(name: str, rank: int) -> object:
    """A device function that calls a copy out of shared memory with the first `rank` of five coordinates."""
    copy = getattr(ptx, name)

    def copy_1d(tensor_map, a, b, c, d, e, box):
        copy(tensor_map, a, box)

    def copy_2d(tensor_map, a, b, c, d, e, box):
        copy(tensor_map, a, b, box)

    def copy_3d(tensor_map, a, b, c, d, e, box):
        copy(tensor_map, a, b, c, box)

    def copy_4d(tensor_map, a, b, c, d, e, box):
        copy(tensor_map, a, b, c, d, box)

    def copy_5d(tensor_map, a, b, c, d, e, box):
        copy(tensor_map, a, b, c, d, e, box)

    return cuda.jit(device=True)((copy_1d, copy_2d, copy_3d, copy_4d, copy_5d)[rank - 1])


def _load_call(rank: int) -> object:
    """The same for the copy into shared memory."""
    load = getattr(ptx, f"cp_async_bulk_tensor_{rank}d_shared_global")

    def load_1d(box, tensor_map, a, b, c, d, e, bar):
        load(box, tensor_map, a, bar)

    def load_2d(box, tensor_map, a, b, c, d, e, bar):
        load(box, tensor_map, a, b, bar)

    def load_3d(box, tensor_map, a, b, c, d, e, bar):
        load(box, tensor_map, a, b, c, bar)

    def load_4d(box, tensor_map, a, b, c, d, e, bar):
        load(box, tensor_map, a, b, c, d, bar)

    def load_5d(box, tensor_map, a, b, c, d, e, bar):
        load(box, tensor_map, a, b, c, d, e, bar)

    return cuda.jit(device=True)((load_1d, load_2d, load_3d, load_4d, load_5d)[rank - 1])


@cuda.jit(device=True)
def fill_shared(base, source):
    """The block copies the buffer's initial bytes from global memory."""
    for offset in range(cuda.threadIdx.x * 16, SHARED_BYTES, _STEP):
        a, b, c, d = ptx.ld_global_v4_u32(source + uint64(offset))
        ptx.st_shared_v4_u32(uint32(base + uint32(offset)), a, b, c, d)


@cuda.jit(device=True)
def dump_shared(base, destination):
    """The block copies the buffer to global memory."""
    for offset in range(cuda.threadIdx.x * 16, SHARED_BYTES, _STEP):
        a, b, c, d = ptx.ld_shared_v4_u32(uint32(base + uint32(offset)))
        ptx.st_global_v4_u32(destination + uint64(offset), a, b, c, d)


@cuda.jit(device=True)
def wait_a_while(bar, limit_ns):
    """Wait for the barrier's first phase, at most so long. Returns whether it completed."""
    start = ptx.globaltimer()
    while ptx.globaltimer() - start < limit_ns:
        if ptx.mbarrier_test_wait_parity(bar, 0):
            return True
    return False


@cuda.jit(device=True)
def missing_bytes(bar):
    """What the barrier's first phase still waits for, credited in its stead; 2^16 if it is more."""
    missing = uint32(0)
    while missing < uint32(65536) and not ptx.mbarrier_test_wait_parity(bar, 0):
        ptx.mbarrier_complete_tx(bar, 16)
        missing = uint32(missing + uint32(16))
    return missing


@cuda.jit(device=True)
def sleep(nanoseconds):
    """Let what is on its way arrive."""
    start = ptx.globaltimer()
    while ptx.globaltimer() - start < nanoseconds:
        pass


@functools.cache
def copy_kernel(rank: int) -> Kernel:
    """The kernel for maps of one rank. Parameters are addresses (uint64) of arrays with a row for each block: maps,
    jobs, initial and final shared buffers, outcomes; and two times in nanoseconds."""
    load = _load_call(rank)
    store = _call(f"cp_async_bulk_tensor_{rank}d_global_shared", rank)
    add, minimum, maximum, inc, dec, conjunction, disjunction, exclusive = (
        _call(f"cp_reduce_async_bulk_tensor_{rank}d_{name}", rank) for name in OPERATIONS[2:]
    )

    @kernel(threads=THREADS, shared=smem)
    def tensor_copies(maps, jobs, before, after, outcomes, wait_ns, settle_ns):
        block = uint64(cuda.blockIdx.x)
        base = ptx.shared_address(smem.box[0])
        bar = smem.full[0]
        fill_shared(base, before + block * uint64(SHARED_BYTES))
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(bar, 1)
            ptx.fence_mbarrier_init()
        ptx.fence_proxy_async()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            tensor_map = maps + block * uint64(128)
            job = jobs + block * uint64(_JOB_BYTES)
            operation, place, expected, _ = ptx.ld_global_v4_u32(job)
            u0, u1, u2, u3 = ptx.ld_global_v4_u32(job + uint64(16))
            u4, _, _, _ = ptx.ld_global_v4_u32(job + uint64(32))
            a, b, c, d, e = int32(u0), int32(u1), int32(u2), int32(u3), int32(u4)
            box = uint32(base + place)
            ptx.fence_proxy_tensormap_acquire_gpu(tensor_map)
            complete, clean, missing = True, True, uint32(0)
            if operation == 0:
                ptx.mbarrier_arrive_expect_tx(bar, expected)
                load(box, tensor_map, a, b, c, d, e, bar)
                complete = wait_a_while(bar, wait_ns)
                if not complete:
                    missing = missing_bytes(bar)
                sleep(settle_ns)
                ptx.mbarrier_arrive(bar)
                clean = ptx.mbarrier_test_wait_parity(bar, 1)
            else:
                if operation == 1:
                    store(tensor_map, a, b, c, d, e, box)
                elif operation == 2:
                    add(tensor_map, a, b, c, d, e, box)
                elif operation == 3:
                    minimum(tensor_map, a, b, c, d, e, box)
                elif operation == 4:
                    maximum(tensor_map, a, b, c, d, e, box)
                elif operation == 5:
                    inc(tensor_map, a, b, c, d, e, box)
                elif operation == 6:
                    dec(tensor_map, a, b, c, d, e, box)
                elif operation == 7:
                    conjunction(tensor_map, a, b, c, d, e, box)
                elif operation == 8:
                    disjunction(tensor_map, a, b, c, d, e, box)
                else:
                    exclusive(tensor_map, a, b, c, d, e, box)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group(0)
            ptx.st_global_v4_u32(outcomes + block * uint64(16), uint32(complete), missing, uint32(clean), uint32(1))
        cuda.syncthreads()
        dump_shared(base, after + block * uint64(SHARED_BYTES))

    return tensor_copies


def compiled(which: Kernel, parameters: int) -> object:
    """The kernel compiled for so many uint64 parameters; needs no GPU and touches none."""
    return which.compile(*[np.uint64(0)] * parameters, arch=ARCH)


def aligned(nbytes: int) -> np.ndarray:
    """Zeroed bytes that begin at a multiple of 256, as device memory does."""
    raw = np.zeros(nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]


class OnGpu:
    """Arrays in GPU memory for one launch."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = {name: DeviceArray(array) for name, array in arrays.items()}

    def address(self, name: str) -> int:
        """Where an array is."""
        return self._arrays[name].pointer

    def write(self, name: str, values: np.ndarray) -> None:
        """Replace an array's contents."""
        driver.copy_to_device(self.address(name), values)

    def read(self, name: str) -> np.ndarray:
        """An array's contents."""
        return self._arrays[name].to_host()

    def launch(self, which: Kernel, blocks: int, *parameters: int) -> None:
        """Run a kernel of uint64 parameters and wait for it."""
        which[blocks](*(np.uint64(p) for p in parameters))
        driver.synchronize()

    encode = staticmethod(TensorMap.encode)
    times = (_WAIT_NS, _SETTLE_NS)


class InSimulator:
    """Arrays in the simulator's memory for one launch, and the same methods. `options` go to sim.launch."""

    def __init__(self, arrays: dict[str, np.ndarray], wait_ns: int = 20_000, **options: object) -> None:
        self.times = (wait_ns, 0)
        self._arrays = {name: array.copy() for name, array in arrays.items()}
        self._memory = sim.GlobalMemory()
        self._addresses = {name: self._memory.map(array, name) for name, array in self._arrays.items()}
        self._options = options

    def address(self, name: str) -> int:
        """Where an array is."""
        return self._addresses[name]

    def write(self, name: str, values: np.ndarray) -> None:
        """Replace an array's contents."""
        self._arrays[name][...] = values

    def read(self, name: str) -> np.ndarray:
        """An array's contents."""
        return self._arrays[name]

    def launch(self, which: Kernel, blocks: int, *parameters: int) -> None:
        """Run a kernel of uint64 parameters."""
        made = compiled(which, len(parameters))
        sim.launch(
            "\n".join([made.ptx, *(text for _, text in made.modules)]),
            made.name,
            grid=blocks,
            block=THREADS,
            shared_bytes=which.shared_bytes,
            params=[struct.pack("<Q", p) for p in parameters],
            memory=self._memory,
            **self._options,
        )

    encode = staticmethod(TensorMap.encode_sim)


class _Slot:
    """A configuration's place in the arena that holds all tensors of a launch."""

    def __init__(self, configuration: Configuration, start: int) -> None:
        self.tensor = start + _GUARD + configuration.lead
        self.start = start
        self.end = start + -(-(2 * _GUARD + configuration.lead + configuration.span) // 256) * 256


def _tensor_map(configuration: Configuration, arena: np.ndarray, offset: int) -> TensorMap:
    element = configuration.element
    strides = (element.size, *configuration.strides)
    view = np.ndarray(configuration.sizes[::-1], element.numpy, arena.data, offset, strides[::-1])
    made = TensorMap(
        view,
        configuration.box[::-1],
        swizzle=configuration.swizzle,
        element_strides=configuration.steps[::-1],
        l2_promotion=configuration.l2_promotion,
        fill=configuration.fill,
        dtype=configuration.dtype,
        overlap=configuration.operation == LOAD,
        store=False,
    )
    if configuration.forced:
        made.spec = dataclasses.replace(made.spec, **dict(configuration.forced))
    return made


def execute(configurations: Sequence[Configuration], side: type, **options: object) -> list[Result]:
    """The results of `configurations` on a side, OnGpu or InSimulator (`options` go to its constructor).

    Raises what the first of them raises that faults: LaunchError on a GPU, SimError in the simulator.
    """
    results: dict[int, Result] = {}
    for rank in sorted({c.rank for c in configurations}):
        chosen = [i for i, c in enumerate(configurations) if c.rank == rank]
        outcome = _execute_rank([configurations[i] for i in chosen], rank, side, options)
        results.update(zip(chosen, outcome, strict=True))
    return [results[i] for i in range(len(configurations))]


def execute_alone(configuration: Configuration, side: type) -> Result:
    """The result of one configuration, `refused` where the simulator raises."""
    try:
        return execute([configuration], side)[0]
    except sim.SimError as error:
        return Result(refused=str(error))


def simulate(configurations: Sequence[Configuration]) -> list[Result]:
    """The simulator's results of all: `refused` where the hardware faults and the simulator must raise."""
    legal = iter(execute([c for c in configurations if not c.faults], InSimulator))
    return [execute_alone(c, InSimulator) if c.faults else next(legal) for c in configurations]


def _slots(configurations: Sequence[Configuration]) -> list[_Slot]:
    """Where the tensors of one launch lie, one behind the other."""
    placed, end = [], 0
    for configuration in configurations:
        placed.append(_Slot(configuration, end))
        end = placed[-1].end
    return placed


def initial(configuration: Configuration) -> Result:
    """The memory before the copy."""
    slot = _Slot(configuration, 0)
    shared = contents(configuration, SHARED_BYTES, 1).copy()
    tensor = contents(configuration, slot.end, 0).copy()
    of_tensor, of_shared = (np.frombuffer(given, np.uint8) for given in configuration.given)
    tensor[slot.tensor : slot.tensor + len(of_tensor)] = of_tensor
    shared[configuration.place : configuration.place + len(of_shared)] = of_shared
    return Result(shared.tobytes(), tensor.tobytes())


def tensor_offset(configuration: Configuration) -> int:
    """Where the tensor begins in `Result.tensor`."""
    return _GUARD + configuration.lead


def _execute_rank(
    configurations: Sequence[Configuration], rank: int, side: type, options: dict[str, object]
) -> list[Result]:
    count, placed = len(configurations), _slots(configurations)
    arrays = {
        "arena": aligned(placed[-1].end),
        "maps": aligned(count * descriptor.NBYTES).reshape(count, descriptor.NBYTES),
        "jobs": aligned(count * _JOB_BYTES).view(np.uint32).reshape(count, -1),
        "before": aligned(count * SHARED_BYTES).reshape(count, SHARED_BYTES),
        "after": aligned(count * SHARED_BYTES).reshape(count, SHARED_BYTES),
        "outcomes": aligned(count * 16).view(np.uint32).reshape(count, 4),
    }
    maps = []
    for i, (configuration, slot) in enumerate(zip(configurations, placed, strict=True)):
        before = initial(configuration)
        arrays["arena"][slot.start : slot.end] = np.frombuffer(before.tensor, np.uint8)
        arrays["before"][i] = np.frombuffer(before.shared, np.uint8)
        maps.append(_tensor_map(configuration, arrays["arena"], slot.tensor))
        expected = maps[-1].box_bytes if configuration.expected is None else configuration.expected
        arrays["jobs"][i, :3] = _CODES[configuration.operation], configuration.place, expected
        arrays["jobs"][i, 4 : 4 + rank] = np.array(configuration.coordinates, np.int64).astype(np.uint32)
    run = side(arrays, **options)
    refused: dict[int, str] = {}
    encoded = np.zeros((count, descriptor.NBYTES), np.uint8)
    for i, (tensor_map, slot) in enumerate(zip(maps, placed, strict=True)):
        try:
            raw = run.encode(tensor_map, run.address("arena") + slot.tensor)
            encoded[i] = np.frombuffer(raw, np.uint8)
        except (TensorMapError, descriptor.TensorMapError) as error:
            refused[i] = str(error)
    if refused:  # the blocks of those do what the first other one does, and are not looked at
        keep = [i for i in range(count) if i not in refused]
        again = iter(_execute_rank([configurations[i] for i in keep], rank, side, options) if keep else [])
        return [Result(refused=refused[i]) if i in refused else next(again) for i in range(count)]
    run.write("maps", encoded)
    names = ("maps", "jobs", "before", "after", "outcomes")
    run.launch(copy_kernel(rank), count, *map(run.address, names), *run.times)
    arena, after, outcomes = run.read("arena"), run.read("after"), run.read("outcomes")
    return [
        Result(
            after[i].tobytes(),
            arena[slot.start : slot.end].tobytes(),
            bool(outcomes[i, 0]),
            int(outcomes[i, 1]),
            bool(outcomes[i, 2]),
        )
        for i, slot in enumerate(placed)
    ]

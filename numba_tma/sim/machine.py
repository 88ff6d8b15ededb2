"""The machine: one launch's blocks, memories, program and counters.

A launch runs in waves of resident blocks. All threads of a wave are lanes of the same NumPy arrays, so a block
waits for another one of its wave without harm, but one that waits for a block of a later wave is a deadlock. The
whole grid is one wave when it has at most `ONE_WAVE_LANES` threads and its shared memory fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from . import (
    asynchronous,
    atomics,
    barriers,
    collectives,
    control,
    loadstore,
    mbarrier,
    printf,
    special,
    tensor_cores,
    wgmma,
)
from .bank_conflicts import BankConflicts
from .control import Control
from .engine import AsyncEngine
from .errors import LaunchError, SimError
from .fragment import Fragment, Root
from .hazards import RULES, Tracker
from .memory import (
    LOCAL_WINDOW,
    PARAM_WINDOW,
    POISON,
    SHARED_BASE,
    SHARED_WINDOW,
    WINDOW_SIZE,
    GlobalMemory,
    Segment,
)
from .module import Function, Module, Register, Variable
from .observer import observe_all
from .program import Instance, Program
from .report import Hazard, Report, place_of, waiting_report
from .scheduler import Scheduler
from .schedules import TOGETHER, warp_groups
from .timing import Modelled, ModelOptions

MAX_SHARED = 227 * 1024
MAX_THREADS = 1024
MAX_CLUSTER = 16
# Lanes of a wave: enough that a NumPy call's fixed cost is small beside its work, few enough for the caches.
WAVE_LANES = 1 << 14
ONE_WAVE_LANES = 1 << 16
WAVE_SHARED_BYTES = 1 << 27


class Machine:
    """Everything about one launch. `run` executes it."""

    def __init__(
        self,
        module: Module,
        function: Function,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        shared_bytes: int,
        params: list[bytes],
        memory: GlobalMemory,
        seed: int = 0,
        policy: str = "fifo",
        observer: Any = None,
        hazards: bool = True,
        shared_names: Sequence[tuple[str, int, int, int]] = (),
        warp_order: str = TOGETHER,
        model: ModelOptions | None = None,
        banks: bool = False,
    ) -> None:
        self.module = module
        self.function = function
        self.grid, self.block, self.cluster = grid, block, cluster
        self.memory = memory
        self.threads = block[0] * block[1] * block[2]
        self.warps = -(-self.threads // 32)
        self.blocks = grid[0] * grid[1] * grid[2]
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.explicit_cluster = self.cluster_size > 1 or "explicitcluster" in function.directives
        self._check_launch()
        self.clusters = tuple(g // c for g, c in zip(grid, cluster, strict=True))

        self._lay_out_shared(shared_bytes)
        self.shared_bytes = self.shared_end - SHARED_BASE
        self.modelled = None if model is None else Modelled(self, model)
        # The blocks to execute, as linear numbers in the grid.
        self.block_numbers = np.arange(self.blocks)
        if self.modelled is not None and model.sample:
            self.block_numbers = np.array(self.modelled.plan.blocks)
        self.slots = self._resident_blocks()
        self.shared = np.empty((self.slots, self.shared_stride), np.uint8)
        self._shared_flat = self.shared.reshape(-1)
        self._shared_views: dict[np.dtype, np.ndarray] = {}
        self.local_size = 0
        self.local_stride = 0
        self._local = np.empty((0, 0), np.uint8)
        self._lay_out_params(params)
        self.mapped: list[int] = []
        self._map_globals()

        # Counters. Bytes by kind of memory, see access.KIND_NAMES.
        self.steps = 0
        self.instructions = 0
        self.lane_instructions = 0
        self.loaded = [0] * 5
        self.stored = [0] * 5
        self.atomic = [0] * 5
        self.clock_ns = 0
        self.hazards: list[Hazard] = []
        self._hazards_seen: set[tuple[str, int]] = set()
        self._names_in_plan = shared_names
        self.tracker = Tracker(self) if hazards else None
        self.recorder = None if self.modelled is None else self.modelled.recorder()
        self.bank_conflicts = BankConflicts(self) if banks else None
        watchers = (self.tracker, self.recorder, self.bank_conflicts, observer)
        self.observer = observe_all([watcher for watcher in watchers if watcher is not None])
        self.output = printf.Output()

        self.warp_order = warp_order
        self.rng = np.random.default_rng(seed)
        self.barrier_memory = mbarrier.BarrierMemory(self)
        self.engine = AsyncEngine(
            shared=self.shared,
            threads_per_block=self.threads,
            memory=memory,
            barriers=self.barrier_memory,
            report=self.report_hazard,
            policy=policy,
            rng=self.rng,
            observer=self.observer,
        )
        self.control = Control(self)
        self.handlers = {
            **control.HANDLERS,
            **loadstore.HANDLERS,
            **atomics.HANDLERS,
            **barriers.HANDLERS,
            **collectives.HANDLERS,
            **mbarrier.HANDLERS,
            **asynchronous.HANDLERS,
            **tensor_cores.HANDLERS,
            **wgmma.HANDLERS,
        }
        self.externals = printf.EXTERNALS
        self.heap: dict[int, int] = {}
        self.call_results: dict[int, list[str]] = {}
        self.scheduler: Scheduler
        self.barriers: barriers.BlockBarriers
        self.program = Program(self)

    # Launch

    def _check_launch(self) -> None:
        for name, extents in (("grid", self.grid), ("block", self.block), ("cluster", self.cluster)):
            if min(extents) < 1:
                raise LaunchError(f"{name} {extents}: every extent must be at least 1")
        if self.threads > MAX_THREADS:
            raise LaunchError(f"block {self.block} has {self.threads} threads; at most {MAX_THREADS} are allowed")
        if self.cluster_size > MAX_CLUSTER:
            raise LaunchError(f"cluster {self.cluster} has {self.cluster_size} blocks; at most {MAX_CLUSTER}")
        for g, c in zip(self.grid, self.cluster, strict=True):
            if g % c:
                raise LaunchError(f"grid {self.grid} is not a multiple of cluster {self.cluster} in every extent")

    def _lay_out_shared(self, dynamic: int) -> None:
        """Addresses of shared variables: those with a size in order, then dynamic shared memory."""
        variables = [v for v in self.module.globals.values() if v.space == "shared"]
        for function in (*self.module.entries.values(), *self.module.functions.values()):
            if not function.entry or function is self.function:
                variables += [v for v in function.variables.values() if v.space == "shared"]
        self.shared_offsets, end = _lay_out(variables, SHARED_BASE, dynamic)
        self.dynamic_shared = dynamic
        self.shared_end = end
        used = end - SHARED_BASE
        if used > MAX_SHARED:
            static = used - dynamic
            raise LaunchError(
                f"the block needs {used} bytes of shared memory ({static} static, {dynamic} dynamic); at most "
                f"{MAX_SHARED} are there"
            )
        self.shared_stride = -(-end // 1024) * 1024

    def _resident_blocks(self) -> int:
        size, blocks = self.cluster_size, self.block_numbers.size
        by_memory = max(WAVE_SHARED_BYTES // self.shared_stride // size, 1) * size
        if blocks * self.threads <= ONE_WAVE_LANES and blocks <= by_memory:
            return blocks
        by_lanes = max(WAVE_LANES // self.threads // size, 1) * size
        return min(by_lanes, by_memory, blocks)

    def _lay_out_params(self, params: list[bytes]) -> None:
        formals = self.function.params
        if len(params) != len(formals):
            raise LaunchError(f"{self.function.name} takes {len(formals)} parameters, {len(params)} are given")
        for i, (formal, data) in enumerate(zip(formals, params, strict=True)):
            if len(data) != formal.size:
                raise LaunchError(f"parameter {i} of {self.function.name} has {formal.size} bytes, not {len(data)}")
        self.param_offsets, end = _lay_out(formals, 0, 0)
        buffer = np.zeros(end, np.uint8)
        for formal, data in zip(formals, params, strict=True):
            start = self.param_offsets[formal.name]
            buffer[start : start + formal.size] = np.frombuffer(data, np.uint8)
        buffer.flags.writeable = False
        self.params = Segment(PARAM_WINDOW, buffer, "kernel parameters", "param")

    def _map_globals(self) -> None:
        """Map the module's .global and .const variables and fill in their initial values."""
        self.global_addresses: dict[str, int] = {}
        variables = [v for v in self.module.globals.values() if v.space in ("global", "const")]
        for function in (*self.module.entries.values(), *self.module.functions.values()):
            variables += [v for v in function.variables.values() if v.space in ("global", "const")]
        arrays = {}
        for variable in variables:
            if variable.linkage == "extern" and not variable.size:
                continue
            data = np.zeros(variable.size, np.uint8)
            data[: len(variable.init)] = np.frombuffer(variable.init, np.uint8)
            arrays[variable.name] = data
            address = self.memory.map(data, f"variable {variable.name}", variable.space)
            self.mapped.append(address)
            self.global_addresses[variable.name] = address
        for variable in variables:
            for relocation in variable.relocations:
                target = self.global_addresses.get(relocation.symbol)
                if target is None:
                    raise LaunchError(
                        f"variable {variable.name} is initialised with the address of {relocation.symbol}"
                    )
                value = (target + relocation.addend) >> relocation.shift & ((1 << 8 * relocation.nbytes) - 1)
                place = slice(relocation.offset, relocation.offset + relocation.nbytes)
                arrays[variable.name][place] = np.frombuffer(value.to_bytes(relocation.nbytes, "little"), np.uint8)

    def run(self, max_steps: int) -> Report:
        """Execute the whole grid."""
        try:
            with np.errstate(all="ignore"):
                entry = self.program.instance(self.function, 0)
                for first in range(0, self.block_numbers.size, self.slots):
                    self._run_wave(first, min(self.slots, self.block_numbers.size - first), entry, max_steps)
                self.engine.drain()
                if self.observer is not None:
                    self.observer.launch_ended()
        except SimError as error:
            if self.tracker is not None:
                self.tracker.failed(error)
            error.hazards = self.hazards
            raise
        finally:
            for address in self.mapped:
                self.memory.unmap(address)
        return self.result()

    def _run_wave(self, first: int, count: int, entry: Instance, max_steps: int) -> None:
        self.first_block = first
        self._place_blocks(first, count)
        self.shared.fill(POISON)
        self._local.fill(POISON)
        self.live_lanes = np.zeros((self.slots, 32 * self.warps), np.bool_)
        self.live_lanes[:count, : self.threads] = True
        self.live_count = np.where(np.arange(self.slots) < count, self.threads, 0)
        self.scheduler = Scheduler(self, entry.blocks[0], max_steps)
        self.barriers = barriers.BlockBarriers(self)
        slot = np.repeat(np.arange(count), self.threads)
        thread = np.tile(np.arange(self.threads), count)
        group = warp_groups(self.warp_order, slot, thread // 32, self.rng)
        root = Root(slot, thread, [], self.program.widths, group)
        self.program.fill(root)
        self.scheduler.live = root.n
        if group is None:
            self.scheduler.add(Fragment(root, None, entry.blocks[0], ()))
        else:
            for number in np.unique(group):
                self.scheduler.add(Fragment(root, np.nonzero(group == number)[0], entry.blocks[0], ()))
        if self.observer is not None:
            self.observer.wave(self, count)
        self.scheduler.run()
        if self.observer is not None:
            self.observer.wave_ended()
        for slot in range(count):
            for line in self.engine.retire_block(slot):
                if self.tracker is None:
                    self.report_hazard("exit-with-copies-in-flight", f"block {self.block_name(slot)}: {line}", None)

    def _place_blocks(self, first: int, count: int) -> None:
        """Coordinates of the resident blocks; the blocks of a cluster follow each other."""
        number = self.block_numbers[np.minimum(first + np.arange(self.slots), self.block_numbers.size - 1)]
        self.cta_index = self.block_coordinates(number)

    def block_coordinates(self, number: Any) -> list[Any]:
        """blockIdx along each axis of blocks by number (one or an array); those of a cluster follow each other."""
        cluster, rank = number // self.cluster_size, number % self.cluster_size
        index = []
        for axis in range(3):
            index.append(cluster % self.clusters[axis] * self.cluster[axis] + rank % self.cluster[axis])
            cluster, rank = cluster // self.clusters[axis], rank // self.cluster[axis]
        return index

    def result(self) -> Report:
        """The counts so far."""
        moved = dict(self.engine.bytes)
        for key, counts in (("ld", self.loaded), ("st", self.stored), ("atom", self.atomic)):
            moved[f"{key}_global"], moved[f"{key}_shared"] = counts[0] + counts[4], counts[1]
        report = Report(self.instructions, self.lane_instructions, self.steps, moved, self.hazards, self.output.text())
        if self.modelled is not None:
            report.model = self.modelled.play(self.recorder)
        if self.bank_conflicts is not None:
            report.banks = self.bank_conflicts.total
            uses = self.bank_conflicts.by_instruction.values()
            report.banks_by_place = {place_of(instruction): use for instruction, use in uses}
        return report

    # Memory

    def shared_view(self, dtype: np.dtype) -> np.ndarray:
        """All blocks' shared memory as one array of `dtype`."""
        view = self._shared_views.get(dtype)
        if view is None:
            view = self._shared_views[dtype] = self._shared_flat.view(dtype)
        return view

    def allocate_local(self, variable: Variable) -> int:
        """Room for a .local variable in every thread's local memory; returns its address."""
        align = max(variable.align, 1)
        offset = -(-self.local_size // align) * align
        self.local_size = offset + variable.size
        return offset

    def local_view(self, dtype: np.dtype) -> np.ndarray:
        """All threads' local memory as one array of `dtype`, `local_stride` bytes a thread."""
        if self.local_stride < self.local_size:
            stride = -(-self.local_size // 16) * 16
            grown = np.full((self.slots * self.threads, stride), POISON, np.uint8)
            grown[:, : self.local_stride] = self._local.reshape(-1, self.local_stride) if self._local.size else POISON
            self._local, self.local_stride = grown, stride
        return self._local.reshape(-1).view(dtype)

    def space_of(self, instance: Instance, name: str) -> str:
        """The state space that a variable is in."""
        if name in self.shared_offsets:
            return "shared"
        if name in instance.locals:
            return "local"
        return "global" if name in self.global_addresses else "param"

    def find(self, address: int) -> Segment | None:
        """The segment of global or constant memory or of the parameters that holds a generic address."""
        if PARAM_WINDOW <= address < PARAM_WINDOW + max(self.params.size, 1):
            return self.params
        return self.memory.find(address)

    def is_mapped(self, address: int, nbytes: int) -> bool:
        """Whether the bytes at a generic address exist (any block's shared and any thread's local memory do)."""
        if address >> 32 in (SHARED_WINDOW >> 32, LOCAL_WINDOW >> 32):
            return True
        segment = self.find(address)
        return segment is not None and address + nbytes <= segment.base + segment.size

    def is_const(self, address: int) -> bool:
        """Whether a generic address is in constant memory."""
        segment = self.find(address)
        return segment is not None and segment.kind == "const"

    def nearest_shared(self, address: int) -> str:
        """The shared variable before an address, for error messages."""
        before = [(offset, name) for name, offset in self.shared_offsets.items() if offset <= address]
        if not before:
            return "it lies before the first shared variable"
        offset, name = max(before)
        return f"it is {address - offset} bytes into or past {name}, which begins at {offset:#x}"

    def read_generic(self, address: int, nbytes: int, slot: int, thread: int, what: str) -> np.ndarray:
        """Bytes at a generic address as one thread sees them."""
        if address >> 32 == LOCAL_WINDOW >> 32:
            self.local_view(np.dtype(np.uint8))
            start = address - LOCAL_WINDOW
            if start + nbytes > self.local_size:
                raise SimError(f"{what}: {nbytes} bytes at local address {start:#x}: a thread has {self.local_size}")
            return self._local[slot * self.threads + thread, start : start + nbytes]
        if address >> 32 == SHARED_WINDOW >> 32:
            start = address - SHARED_WINDOW & (WINDOW_SIZE - 1)
            target = slot // self.cluster_size * self.cluster_size + (start >> 24) if self.cluster_size > 1 else slot
            return self.shared[target, start & 0xFFFFFF :][:nbytes]
        if PARAM_WINDOW <= address < PARAM_WINDOW + self.params.size:
            return self.params.buffer[address - PARAM_WINDOW :][:nbytes]
        return self.memory.global_view(address, nbytes, what)

    # Threads

    def thread_index(self, thread: np.ndarray, axis: int) -> np.ndarray:
        """threadIdx along an axis, from linear thread indices."""
        x, y, _ = self.block
        return (thread % x, thread // x % y, thread // (x * y))[axis]

    def special_register(self, program: Program, operand: Register) -> int:
        """The register that holds a special register's value."""
        return special.special_register(self, program, operand)

    def dynamic_special(self, operand: Register) -> Any:
        """How to read a special register that changes; None if it does not."""
        return special.DYNAMIC.get(operand.name.lstrip("%"))

    def shared_symbol(self, program: Program, offset: int, dtype: np.dtype) -> int:
        """The register that holds a shared variable's address for each block of a cluster."""
        return special.shared_symbol(self, program, offset, dtype)

    def _shared_names(self) -> Iterator[tuple[str, int, int, int]]:
        """(name, offset, bytes, bytes of an element or 0) of what a block's shared memory holds, the plan's last."""
        dynamic = self.shared_end - self.dynamic_shared
        for name, offset in self.shared_offsets.items():
            yield name, offset, (dynamic if offset < dynamic else self.shared_end) - offset, 0
        for name, offset, nbytes, element in self._names_in_plan:
            yield name, dynamic + offset, nbytes, element

    def shared_name(self, address: int) -> str:
        """What lies at a shared address of a block, as "full[1]" or "tile[0] + 16 B"; '' where nothing has a name."""
        best, name = -1, ""
        for of, start, nbytes, element in self._shared_names():
            if max(start, best) <= address < start + max(nbytes, 1):
                index, inside = divmod(address - start, element) if element else (None, address - start)
                best = start
                name = of + (f"[{index}]" if element else "") + (f" + {inside} B" if inside else "")
        return name

    def shared_place(self, address: int) -> str:
        """A shared address of a block for messages, its name first: "full[1] (shared address 0x408)"."""
        name, where = self.shared_name(address), f"shared address {address:#x}"
        return f"{name} ({where})" if name else where

    def mbarrier_place(self, address: int) -> str:
        """The same for an mbarrier: "mbarrier full[1] (shared address 0x408)"."""
        return f"mbarrier {'' if self.shared_name(address) else 'at '}{self.shared_place(address)}"

    def block_name(self, slot: int) -> str:
        """blockIdx of a resident block, as text; trailing zeros left out for one-dimensional grids."""
        x, y, z = (int(axis[slot]) for axis in self.cta_index)
        if self.grid[1] == self.grid[2] == 1:
            return f"{x}"
        return f"({x}, {y})" if self.grid[2] == 1 else f"({x}, {y}, {z})"

    def lane_name(self, fragment: Fragment, position: int) -> str:
        """A lane of a fragment as messages name it."""
        slot, thread = int(fragment.slot[position]), int(fragment.thread[position])
        return f"block {self.block_name(slot)}, thread {thread} (warp {thread // 32}, lane {thread % 32})"

    def warp_count(self, fragment: Fragment) -> int:
        """How many warps a fragment's lanes belong to."""
        count = fragment.cache.get("warps")
        if count is None:
            warp = fragment.slot * self.warps + (fragment.thread >> 5)
            count = fragment.cache["warps"] = 1 + int(np.count_nonzero(warp[1:] != warp[:-1]))
        return count

    def lanes_exited(self, fragment: Fragment) -> None:
        """Bookkeeping for lanes that are done."""
        slot = fragment.slot
        if self.observer is not None:
            self.observer.lanes_exited(fragment)
        self.live_lanes[slot, fragment.thread] = False
        self.live_count -= np.bincount(slot, minlength=self.slots)
        self.barriers.lanes_exited()

    # Engine, hazards, reports

    def pump(self, stalled: bool) -> bool:
        """Let the copy engine work; whether anything moved."""
        moved = self.engine.pump(stalled=stalled)
        if moved:
            self.scheduler.events += 1
            self.scheduler.progress += 1
        return moved

    def report_hazard(self, identifier: str, message: str, origin: Any) -> None:
        """Note a hazard once for each instruction."""
        key = (identifier, id(origin) if origin is not None else hash(message))
        if key not in self._hazards_seen:
            self._hazards_seen.add(key)
            rule = RULES.get(identifier)
            location = getattr(origin, "location", None)
            severity = rule.severity if rule else "error"
            self.hazards.append(Hazard(identifier, message, origin, severity, (location,) if location else ()))

    def residency_note(self) -> str:
        """For deadlock messages: a block that waits for one of a later wave waits for ever."""
        if self.block_numbers.size < self.blocks:
            return "; only the blocks of one SM are executed for the model of time, so none may wait for another"
        if self.slots == self.blocks:
            return ""
        return (
            f"; the simulator runs {self.slots} of the grid's {self.blocks} blocks at a time, so a block must not "
            "wait for a later one"
        )

    def report_waits(self, scheduler: Scheduler) -> str:
        """Who waits for what."""
        return waiting_report(self, scheduler)


def _lay_out(variables: list[Variable], base: int, dynamic: int) -> tuple[dict[str, int], int]:
    """Addresses of variables of one space from `base` on, and the end; unsized ones share the `dynamic` bytes."""
    offsets: dict[str, int] = {}
    position = base
    unsized = [v for v in variables if v.size == 0]
    for variable in variables:
        if variable.size:
            align = max(variable.align, 1)
            position = -(-position // align) * align
            offsets[variable.name] = position
            position += variable.size
    if unsized or dynamic:
        align = max([16, *(v.align for v in unsized)])
        position = -(-position // align) * align
        offsets.update((variable.name, position) for variable in unsized)
    return offsets, position + dynamic

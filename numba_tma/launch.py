"""`@kernel`: compile once, launch on a GPU or in the simulator.

    @kernel(threads=128, shared=smem)
    def double(x, y): …

    double[blocks](x, y)

A call marshals its arguments, picks the variant compiled for their types and hands it to the driver, or packs the
same parameters for the simulator. Numba's dispatcher takes no part: it would compile a second time.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import operator
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import types
from numba.core.errors import TypingError as NumbaTypingError
from numba.cuda.core.errors import TypingError

from . import arch as architectures
from . import arguments, driver, sim, staging
from . import watchdog as watchdogs
from .arguments import Argument, Packer
from .arrays import ArrayView
from .compile import DEFAULT_ARCH, Compiled, compile_kernel
from .device_array import DeviceArray
from .driver import LaunchError
from .machine_code import with_machine_code
from .shared import Barriers, Buffer, Shared, Tiles
from .tensor_map import TensorMap
from .trace import Trace
from .trace.instrument import Instrumented, instrument
from .trace.launched import TracedLaunch, Tracing

BACKENDS = ("auto", "gpu", "sim")
VARIABLE = "NUMBA_TMA_BACKEND"
_backend: contextvars.ContextVar[str] = contextvars.ContextVar(
    "numba_tma_backend", default=os.environ.get(VARIABLE) or "auto"
)
# What the CUDA programming guide allows, by axis.
_GRID_LIMITS = ((1 << 31) - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)
_WARP = 32
_NAMED_STREAMS = 2  # the handles 0 to 2 name default streams; all others are pointers
_LOWEST_POINTER = 4096
# Launch parameters of these classes are equal only where they mean the same: 1.0 and True equal 1, and are refused.
_EXACT = frozenset(
    {int, type(None), *(getattr(np, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))}
)
_simulation: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("numba_tma_sim", default=None)
_recording: contextvars.ContextVar[Recording | None] = contextvars.ContextVar("numba_tma_recording", default=None)
_tracing: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("numba_tma_tracing", default=None)
_SIMULATOR = "PTX simulator"


class HazardWarning(UserWarning):
    """The simulator ran a kernel to its end, and saw something that may go wrong on a GPU."""


def backend() -> str:
    """The choice in force: `use_backend`, else what $NUMBA_TMA_BACKEND was when this module was imported, else 'auto'.

    Raises:
        ValueError: the environment variable names no backend.
    """
    chosen = _backend.get()
    if chosen not in BACKENDS:
        raise ValueError(f"{VARIABLE}={chosen!r}: choose one of {', '.join(BACKENDS)}")
    return chosen


@contextlib.contextmanager
def use_backend(name: str, **simulation: Any) -> Iterator[None]:
    """Run the kernels launched inside on 'gpu', in the simulator ('sim'), or where they can run ('auto').

    Keyword arguments go to `sim.launch` (seed, max_steps, …) for the launches that the simulator runs.

    Raises:
        ValueError: no such backend.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r}: choose one of {', '.join(BACKENDS)}")
    chosen, options = _backend.set(name), _simulation.set(simulation or None)
    try:
        yield
    finally:
        _backend.reset(chosen)
        _simulation.reset(options)


@dataclass(frozen=True)
class Recorded:
    """A launch that `recording` kept from running: its kernel, the types of its arguments, and what to compile for."""

    kernel: Kernel
    numba_types: tuple
    arch: str

    @property
    def compiled(self) -> Compiled:
        """The kernel, compiled; remembered."""
        return self.kernel.compile_types(self.numba_types, self.arch)


@dataclass(frozen=True)
class Recording:
    """The launches made inside `recording`, in order, for `arch`. `later`: they are compiled when that is asked for."""

    arch: str
    later: bool = False
    launches: list[Recorded] = field(default_factory=list)


@contextlib.contextmanager
def recording(arch: str = DEFAULT_ARCH, *, later: bool = False) -> Iterator[Recording]:
    """Compile the kernels launched inside for `arch`, with no GPU, and list them; none of them runs.

    With `later` a kernel is compiled only when its `Recorded.compiled` is asked for.
    """
    recorded = Recording(arch, later)
    token = _recording.set(recorded)
    try:
        with use_backend("sim"):
            yield recorded
    finally:
        _recording.reset(token)


def watched() -> bool:
    """Whether launches are traced or recorded just now: then what was bound before must not stand for them."""
    return _tracing.get() is not None or _recording.get() is not None


@contextlib.contextmanager
def tracing(plan: Trace | None = None) -> Iterator[Tracing]:
    """Have the kernels launched inside write down when each warp waits, copies and arrives (see `numba_tma.trace`).

    They are compiled once more for that. Each launch is listed in what this gives; a launch bound inside goes on to be
    traced outside.

    Args:
        plan: which blocks keep records, and how many; by default all blocks, 1024 a warp.

    Raises:
        TypeError: the plan is no `Trace`.
    """
    plan = Trace() if plan is None else plan
    if not isinstance(plan, Trace):
        raise TypeError(f"tracing({plan!r}): expected a Trace(…)")
    found = Tracing(plan)
    token = _tracing.set(found)
    try:
        yield found
    finally:
        _tracing.reset(token)


def gpu_refusal(compiled: Compiled | None = None) -> str | None:
    """Why the current GPU cannot run a kernel (or any), or None if it can."""
    if not driver.device_count():
        return "there is no CUDA GPU (or no driver) here"
    if compiled is None:
        return None
    return compiled.requirement.refusal(driver.capability(driver.current_device()))


def kernel(
    function: Callable | None = None,
    *,
    threads: int | Sequence[int] | None = None,
    shared: Shared | None = None,
    cluster: int | Sequence[int] | None = None,
    min_blocks: int = 1,
    fastmath: bool = False,
    programmatic: bool = False,
    watchdog: float | None = None,
) -> Any:
    """Make a Python function a kernel.

    Args:
        threads: block size (one to three extents). It becomes the kernel's launch bound, and the block size of
            `kernel[grid]`; a launch may ask for fewer threads, never for more.
        shared: the shared-memory plan; its bytes are asked for at each launch.
        cluster: cluster size in blocks (one to three extents), fixed for the kernel.
        min_blocks: blocks that an SM should hold at least; it bounds the registers a thread gets.
        fastmath: let the compiler use approximate math.
        programmatic: programmatic dependent launch: the kernel may start while the one in front of it on the stream
            still runs. It must call `ptx.griddepcontrol_wait()` before it reads or writes what others may use; the one
            in front may call `ptx.griddepcontrol_launch_dependents()` to let it start early. The simulator runs one
            kernel after the other.
        watchdog: seconds after which a thread that waits in a loop on a GPU gives up: the kernel then ends with a
            `WatchdogError` that says where, and the CUDA context is lost. 0: never; None: what $NUMBA_TMA_WATCHDOG says
            when the kernel is bound or first called, else never. The simulator names a hang by itself.

    Raises:
        TypeError: not a plain function of positional arguments without defaults, `shared` is no `Shared`, or `watchdog`
            no number.
        ValueError: threads, cluster, min_blocks or watchdog out of range.
    """
    options = {
        "threads": threads,
        "shared": shared,
        "cluster": cluster,
        "min_blocks": min_blocks,
        "fastmath": fastmath,
        "programmatic": programmatic,
        "watchdog": watchdog,
    }
    return functools.partial(Kernel, **options) if function is None else Kernel(function, **options)


class Kernel:
    """A Python function for a GPU or the simulator; `kernel[grid, block, stream](*arguments)` launches it."""

    def __init__(
        self,
        function: Callable,
        *,
        threads: int | Sequence[int] | None = None,
        shared: Shared | None = None,
        cluster: int | Sequence[int] | None = None,
        min_blocks: int = 1,
        fastmath: bool = False,
        programmatic: bool = False,
        watchdog: float | None = None,
    ) -> None:
        _check_function(function)
        name = function.__name__
        if shared is not None and not isinstance(shared, Shared):
            raise TypeError(
                f"{name}: shared={shared!r}; expected a plan, Shared(…): a number of bytes does not say what is where"
            )
        if not _is_integer(min_blocks) or min_blocks < 1:
            raise ValueError(f"{name}: min_blocks {min_blocks!r}; expected an integer of 1 or more")
        functools.update_wrapper(self, function)
        self.function = function
        self.argument_names = function.__code__.co_varnames[: function.__code__.co_argcount]
        self.threads = _extents(threads, "threads", name) if threads is not None else None
        self.shared = shared
        self.cluster = _extents(cluster, "cluster", name) if cluster is not None else (1, 1, 1)
        self._min_blocks = operator.index(min_blocks)
        self._fastmath = fastmath
        self.programmatic = bool(programmatic)
        self._watchdog = watchdogs.checked(watchdog, f"{name}: watchdog") if watchdog is not None else None
        self._launchers: dict[tuple, Launcher] = {}
        self._by_configuration: dict[Any, Launcher] = {}
        self._compiled: dict[tuple, Compiled] = {}
        self._instrumented: dict[tuple, Instrumented] = {}
        self._on_gpu: dict[tuple[Compiled, int, float], driver.LoadedKernel] = {}
        if self.threads is not None:
            _check_block(self.threads, name)
        if _volume(self.cluster) > 16:
            raise ValueError(f"{name}: a cluster of {_volume(self.cluster)} blocks; Hopper's limit is 16 (8 portably)")

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block, in bytes."""
        return self.shared.nbytes if self.shared is not None else 0

    @property
    def watchdog(self) -> float:
        """Seconds after which a wait gives up on a GPU: the kernel's own, else what the environment says; 0: never.

        Raises:
            ValueError: the environment variable is no number of seconds.
        """
        return watchdogs.from_environment() if self._watchdog is None else self._watchdog

    def __getitem__(self, configuration: Any) -> Launcher:
        """`[grid]`, `[grid, block]` or `[grid, block, stream]`; grid and block are ints or tuples of one to three.

        A grid of several dimensions alone is written `[(x, y), None]`: `[x, y]` is a grid and a block.

        Raises:
            ValueError: an extent, a stream handle or their number is out of range.
            TypeError: no such stream.
        """
        exact = _is_exact(configuration)
        if exact:
            found = self._by_configuration.get(configuration)
            if found is not None:
                return found
        name = self.__name__
        grid, block, stream = _parted(configuration, name)
        extents = _extents(grid, "grid", name)
        block = _extents(block, "block", name) if block is not None else None
        handle = _stream_handle(stream, name)
        found = self._launchers.get((extents, block, handle))
        if found is None:
            found = Launcher(self, extents, block, handle)
            self._launchers[(extents, block, handle)] = found
        if exact:  # a stream object may die, and another take its place
            self._by_configuration[configuration] = found
        return found

    def __call__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"{self.__name__} is a kernel: launch it as {self.__name__}[grid, block](…)")

    def compile(self, *example: Any, arch: str | None = None) -> Compiled:
        """Compile for the types of example arguments (arrays, tensor maps, numbers, or Numba types).

        Args:
            arch: 'sm_80', 'sm_90a', …; by default that of the GPU, or sm_90a where there is none.
        """
        if len(example) != len(self.argument_names):
            self.refuse_count(len(example))
        numba_types = tuple(
            value if isinstance(value, types.Type) else arguments.marshal(value, name).numba_type
            for name, value in zip(self.argument_names, example, strict=True)
        )
        return self.compile_types(numba_types, arch or _default_arch())

    def refuse_count(self, given: int) -> None:
        """Raise for a wrong number of arguments."""
        names = self.argument_names
        raise TypeError(f"{self.__name__}({', '.join(names)}): {len(names)} arguments expected, {given} given")

    def compile_types(self, numba_types: tuple, arch: str, *, marked: bool = False) -> Compiled:
        """Compile for Numba types, with or without trace marks; remembered, in this process and on disk.

        With a watchdog, if it is to have one: that is put into what was compiled without.
        """
        has_watchdog = self.watchdog > 0
        key = (numba_types, arch, marked, has_watchdog)
        found = self._compiled.get(key)
        if found is None:
            try:
                found = compile_kernel(
                    self.function,
                    numba_types,
                    arch=arch,
                    threads=_volume(self.threads) if self.threads else None,
                    min_blocks=self._min_blocks,
                    cluster=self.cluster,
                    fastmath=self._fastmath,
                    marked=marked,
                )
            except (NumbaTypingError, TypingError) as error:
                located = _located(error)
                if located is None:
                    raise
                raise located from error
            if has_watchdog:
                found = watchdogs.watch(found)
            self._compiled[key] = found
        return found

    def instrumented(self, numba_types: tuple, arch: str, plan: Trace) -> Instrumented:
        """The kernel with stamps, compiled for Numba types; remembered."""
        key = (numba_types, arch, plan, self.watchdog > 0)
        if key not in self._instrumented:
            self._instrumented[key] = instrument(self.compile_types(numba_types, arch, marked=True), plan)
        return self._instrumented[key]

    def load(self, compiled: Compiled) -> driver.LoadedKernel:
        """Load a compiled kernel on the current GPU, with the shared memory of its plan.

        Raises:
            LaunchError: the GPU lacks an instruction or the shared memory.
        """
        ordinal = driver.current_device()
        seconds = self.watchdog if watchdogs.is_watched(compiled) else 0
        found = self._on_gpu.get((compiled, ordinal, seconds))
        if found is None:
            refusal = gpu_refusal(compiled)
            if refusal:
                raise LaunchError(f"{self.__name__}: {refusal}")
            found = driver.LoadedKernel(compiled.cubin, compiled.name, ordinal, _volume(self.cluster))
            found.allow_shared(self.shared_bytes)
            if seconds:
                watchdogs.arm(found, compiled, self.shared, seconds)
            self._on_gpu[(compiled, ordinal, seconds)] = found
        return found


class Launcher:
    """A kernel with its grid, block and stream; call it with arguments, or `bind` them to launch again and again."""

    def __init__(
        self, owner: Kernel, grid: tuple[int, int, int], block: tuple[int, int, int] | None, stream: int
    ) -> None:
        name = owner.__name__
        self.kernel = owner
        self.grid = grid
        if block is None and owner.threads is None:
            raise ValueError(f"{name}[grid]: no block size; give kernel[grid, block] or @kernel(threads=…)")
        self.block = block if block is not None else owner.threads
        self.stream = stream
        threads = _volume(self.block)
        if owner.threads is not None:
            bound = _volume(owner.threads)
            if threads > bound:
                raise ValueError(
                    f"{name}: {threads} threads a block, but it was compiled for at most {bound} "
                    f"(@kernel(threads=…)); {_GRID_HINT.format(name=name)}"
                )
            if threads % _WARP and threads != bound:
                raise ValueError(
                    f"{name}: blocks of {threads} threads are neither whole warps of {_WARP} nor the {bound} of "
                    f"@kernel(threads=…); {_GRID_HINT.format(name=name)}"
                )
        _check_block(self.block, name)
        for axis, (blocks, limit) in enumerate(zip(grid, _GRID_LIMITS, strict=True)):
            if blocks > limit:
                raise ValueError(
                    f"{name}: grid {'xyz'[axis]} of {blocks:,} blocks; the limit is {limit:,}: let each block do more"
                    + (", or put this dimension into x" if axis else "")
                )
        for axis, (blocks, size) in enumerate(zip(self.grid, owner.cluster, strict=True)):
            if blocks % size:
                raise ValueError(
                    f"{name}: grid {'xyz'[axis]} of {blocks} blocks is no multiple of the cluster's {size}; "
                    f"round the grid up to {-(-blocks // size) * size}"
                )
        self._variants: dict[tuple, _Variant] = {}

    def __call__(self, *values: Any) -> sim.Report | None:
        """Launch. On a GPU this returns None before the kernel has run; NumPy arrays are copied there and back, and
        then it waits. In the simulator it returns the report."""
        if _tracing.get() is not None and _recording.get() is None:
            return self._traced(_tracing.get(), self._marshal(values), 3)()
        if _backend.get() != "sim":
            words: list[Any] = []
            try:
                variant = self._variants[(*_gpu_in_use(), *arguments.quick(values, words))]
            except KeyError:
                pass  # something new: the long way round, which leaves what the quick way needs
            else:
                variant.submit(words)
                return None
        marshalled = self._marshal(values)
        choice = backend()
        if choice != "sim":
            variant = self._variant(marshalled, choice)
            if variant is not None:
                variant.launch(marshalled)
                return None
        return self._simulate(marshalled, 3)

    def bind(self, *values: Any) -> Callable[[], sim.Report | None]:
        """Marshal the arguments once; what comes back launches with them. The arrays must be where the kernel runs.

        What comes back raises a `LaunchError` when another GPU has become the current one.

        Raises:
            TypeError: a NumPy array for a launch on a GPU: it would have to be copied at each call.
        """
        marshalled = self._marshal(values)
        choice = backend()
        traced = _tracing.get() if _recording.get() is None else None
        variant = self._variant(marshalled, choice, traced.plan if traced else None) if choice != "sim" else None
        if variant is not None:
            names = self.kernel.argument_names
            host = [name for name, argument in zip(names, marshalled, strict=True) if argument.on_host]
            if host:
                raise TypeError(
                    f"{self.kernel.__name__}.bind: {', '.join(host)} in host memory; bind device arrays "
                    f"(numba.cuda.to_device, CuPy, PyTorch), or call the kernel without binding"
                )
        if traced is not None:
            return self._traced(traced, marshalled, 2)
        return variant.bound(marshalled) if variant else functools.partial(self._simulate, marshalled, 2)

    def _marshal(self, values: Sequence[Any]) -> list[Argument]:
        names = self.kernel.argument_names
        if len(values) != len(names):
            self.kernel.refuse_count(len(values))
        return [arguments.marshal(value, name) for value, name in zip(values, names, strict=True)]

    def _variant(self, marshalled: list[Argument], choice: str, plan: Trace | None = None) -> _Variant | None:
        """The loaded kernel for these types, with stamps if there is a plan; None where the simulator is to run it."""
        # Numba's types are slow to hash and there is one object for each, which the variant keeps alive.
        ids = (*_gpu_in_use(), *[id(argument.numba_type) for argument in marshalled])
        key = (plan, self.kernel.watchdog, *ids)
        found = self._variants.get(key)
        if found is not None:
            return found
        refusal = gpu_refusal()
        if refusal:
            if choice == "auto":
                return None
            raise LaunchError(f"{self.kernel.__name__}: {refusal}; use the simulator ({VARIABLE}=sim)")
        numba_types = tuple(argument.numba_type for argument in marshalled)
        if plan is None:
            compiled = self.kernel.compile_types(numba_types, _default_arch())
        else:
            compiled = self.kernel.instrumented(numba_types, _default_arch(), plan).compiled
        if choice == "auto" and gpu_refusal(compiled):
            return None
        found = self._variants[key] = _Variant(self, compiled, self.kernel.load(compiled), numba_types)
        if plan is None:
            self._variants.setdefault(ids, found)  # for the quick way, which asks for no watchdog
        return found

    def _traced(self, traced: Tracing, marshalled: list[Argument], stacklevel: int) -> Callable[[], sim.Report | None]:
        """A function that launches with stamps; the launch is listed in `traced`."""
        kernel_, plan, choice = self.kernel, traced.plan, backend()
        nbytes = plan.nbytes(_volume(self.grid), _volume(self.block))
        variant = self._variant(marshalled, choice, plan) if choice != "sim" else None
        numba_types = tuple(argument.numba_type for argument in marshalled)
        made = kernel_.instrumented(numba_types, _default_arch() if variant else DEFAULT_ARCH, plan)
        zeros = np.zeros(nbytes, np.uint8)
        if variant is None:
            device, read = _SIMULATOR, zeros.view
            launch = functools.partial(self._simulate, marshalled, stacklevel + 1, made.compiled, zeros)
        else:
            rings = DeviceArray(zeros)
            pointer = rings.__cuda_array_interface__["data"][0]
            marshalled = [*marshalled, Argument(types.uint64, (pointer,), None, False)]
            device = driver.device_name(driver.current_device())

            def read() -> np.ndarray:
                driver.synchronize(self.stream)
                return rings.to_host()

            launch = functools.partial(variant.launch, marshalled)
            if not any(argument.on_host for argument in marshalled):
                launch = variant.bound(marshalled)
        listed = TracedLaunch(kernel_.__name__, self.grid, self.block, kernel_.shared, plan, made, device, read)
        traced.launches.append(listed)
        return functools.partial(_launch_listed, launch, listed)

    def _simulate(
        self,
        marshalled: list[Argument],
        stacklevel: int,
        traced: Compiled | None = None,
        rings: np.ndarray | None = None,
    ) -> sim.Report | None:
        """Run in the simulator; hazards become warnings, and `stacklevel` is the caller's as `warnings.warn` counts.

        Inside `recording` the launch is listed, and there is no report. `traced` is the kernel with stamps, which it
        writes to `rings`.
        """
        kernel_, recorded = self.kernel, _recording.get()
        numba_types = tuple(argument.numba_type for argument in marshalled)
        if recorded is not None:
            listed = Recorded(kernel_, numba_types, recorded.arch)
            if not recorded.later:
                _ = listed.compiled
            recorded.launches.append(listed)
            return None
        compiled = traced or kernel_.compile_types(numba_types, DEFAULT_ARCH)
        memory = sim.GlobalMemory()
        if rings is not None:
            marshalled = [*marshalled, Argument(types.uint64, (memory.map(rings, "trace"),))]
        moved = staging.InSimulator(_views(kernel_.argument_names, marshalled), memory)
        packer = Packer(compiled)
        buffer = bytearray(packer.nbytes)
        packer.pack_into(buffer, _moved_words(marshalled, moved.spans, TensorMap.encode_sim))
        options = dict(_simulation.get() or {})
        if options.get("model"):
            options["model"] = with_machine_code(options["model"], compiled)
        report = sim.launch(
            "\n".join([compiled.ptx, *(text for _, text in compiled.modules)]),
            compiled.name,
            grid=self.grid,
            block=self.block,
            cluster=kernel_.cluster,
            shared_bytes=kernel_.shared_bytes,
            shared_names=_shared_names(kernel_.shared),
            params=[bytes(buffer[p.offset : p.offset + p.size]) for p in compiled.parameters],
            memory=memory,
            **options,
        )
        moved.copy_back()
        first = {hazard.identifier: hazard for hazard in reversed(report.hazards)}
        for identifier in dict.fromkeys(hazard.identifier for hazard in report.hazards):
            warnings.warn(f"{kernel_.__name__}: {first[identifier]}", HazardWarning, stacklevel)
        return report


def _launch_listed(launch: Callable[[], sim.Report | None], listed: TracedLaunch) -> sim.Report | None:
    """Launch; `listed` holds the memory that the stamps go to, and lives as long as what may launch again."""
    return launch()


# Accepting keywords to refuse them would cost each launch a dictionary; Python's own TypeError names this instead.
Launcher.__call__.__qualname__ = "kernel[grid, block]"


class _Variant:
    """A launcher's kernel for one tuple of argument types, loaded on the GPUs."""

    def __init__(self, launcher: Launcher, compiled: Compiled, loaded: driver.LoadedKernel, numba_types: tuple) -> None:
        kernel_ = launcher.kernel
        self.numba_types = numba_types
        self._name = kernel_.__name__
        self._names = kernel_.argument_names
        self._stream = launcher.stream
        self._packer = Packer(compiled)
        self._pack_into = self._packer.pack_into
        self._offsets = [parameter.offset for parameter in compiled.parameters]
        self._config = driver.launch_config(
            launcher.grid,
            launcher.block,
            kernel_.shared_bytes,
            launcher.stream,
            kernel_.cluster,
            kernel_.programmatic,
        )
        self._loaded = loaded
        self._local = threading.local()

    def launch(self, marshalled: list[Argument]) -> None:
        """Pack and launch; host arrays are staged for the length of the call."""
        if any(argument.on_host for argument in marshalled):
            driver.ensure_context()
            with staging.OnDevice(_views(self._names, marshalled), self._stream) as moved:
                self.submit(_moved_words(marshalled, moved.spans, TensorMap.encode))
        else:
            self.submit(_moved_words(marshalled, (), TensorMap.encode))

    def bound(self, marshalled: list[Argument]) -> Callable[[], None]:
        """A launch with its parameters packed already; it keeps the arrays alive, and is of the current GPU."""
        bound = self._new_launch(keep=marshalled)
        self._pack_into(bound.buffer.view, _moved_words(marshalled, (), TensorMap.encode))
        if driver.device_count() < 2:
            return bound
        return functools.partial(_launch_on, driver.current_device(), self._name, bound)

    def submit(self, words: Sequence[Any]) -> None:
        """Launch with these parameters."""
        # One buffer a thread: the driver reads it without the interpreter's lock.
        try:
            launch = self._local.launch
        except AttributeError:
            launch = self._local.launch = self._new_launch()
        self._pack_into(launch.buffer.view, words)
        launch()

    def _new_launch(self, keep: object = None) -> driver.Launch:
        driver.ensure_context()
        buffer = driver.ArgumentBuffer(self._packer.nbytes, self._offsets)
        return driver.Launch(self._config, self._loaded, buffer, keep)


def _launch_on(ordinal: int, name: str, launch: Callable[[], None]) -> None:
    """Launch, if the current GPU is still the one of the parameters: on another they would be addresses of nothing."""
    current = driver.current_device()
    if current != ordinal:
        raise LaunchError(
            f"{name}: bound on GPU {ordinal}, and GPU {current} is this thread's current one: make GPU {ordinal} "
            f"current for the launch, or bind arrays of GPU {current} there"
        )
    launch()


def _gpu_in_use() -> tuple[int, ...]:
    """What tells a variant from those for other GPUs of this process; nothing where there is one."""
    return (driver.current_device(),) if driver.device_count() > 1 else ()


def _shared_names(plan: Shared | None) -> list[tuple[str, int, int, int]]:
    """(name, offset, bytes, bytes from element to element or 0) of a plan's members, for the simulator's reports."""
    if plan is None:
        return []

    def stride(member: Tiles | Barriers | Buffer) -> int:
        if isinstance(member, Tiles):
            return member.stage_stride
        return member.nbytes // member.count if isinstance(member, Barriers) else 0

    return [(name, plan.offsets[name], member.nbytes, stride(member)) for name, member in plan.members.items()]


def _views(names: Sequence[str], marshalled: Sequence[Argument]) -> dict[str, ArrayView]:
    # A traced launch has one argument more, which is no array.
    views = zip(names, map(arguments.array_view, marshalled), strict=False)
    return {name: view for name, view in views if view is not None}


def _moved_words(
    marshalled: Sequence[Argument], spans: Sequence[staging.Span], encode: Callable[[TensorMap, int], bytes]
) -> list[Any]:
    """The parameters' values in order, with the arrays where `spans` say they are now."""
    words: list[Any] = []
    for argument in marshalled:
        view = arguments.array_view(argument)
        if view is None:
            words += argument.words
            continue
        pointer = staging.translate(view, spans)
        if isinstance(argument.value, TensorMap):
            words.append(encode(argument.value, pointer))
        else:
            words += arguments.moved(argument, pointer)
    return words


def _default_arch() -> str:
    if driver.device_count():
        return architectures.name(driver.capability(driver.current_device()))
    return DEFAULT_ARCH


_GRID_HINT = "a grid of several dimensions is written {name}[(x, y), None]"


def _is_integer(value: Any) -> bool:
    """Whether it counts something: an int or a NumPy integer, and neither a float nor a truth value."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_exact(configuration: Any) -> bool:
    """Whether a launch configuration consists of plain integers alone, so that equal ones are the same."""
    if configuration.__class__ is not tuple:
        return configuration.__class__ in _EXACT
    for part in configuration:
        if part.__class__ is tuple:
            for extent in part:
                if extent.__class__ not in _EXACT:
                    return False
        elif part.__class__ not in _EXACT:
            return False
    return True


def _parted(configuration: Any, name: str) -> tuple[Any, Any, Any]:
    """Grid, block and stream of what stands in the brackets."""
    parts = configuration if isinstance(configuration, tuple) else (configuration,)
    if not parts:
        raise ValueError(f"{name}[()]: no grid; launch it as {name}[grid] or {name}[grid, block]")
    if len(parts) > 3:
        raise ValueError(
            f"{name}[…]: {len(parts)} launch parameters; give grid, block and stream "
            f"(shared memory comes from the kernel's plan)"
        )
    for part, what in zip(parts[:2], ("grid", "block"), strict=False):
        if not isinstance(part, tuple) and hasattr(part, "__len__"):
            raise ValueError(f"{name}: {what} {part!r} is a {type(part).__name__}; write a number or a tuple")
    return (*parts, None, None)[:3]


def _stream_handle(stream: Any, name: str) -> int:
    if isinstance(stream, bool) or (
        isinstance(stream, int) and not 0 <= stream <= _NAMED_STREAMS and stream < _LOWEST_POINTER
    ):
        raise ValueError(
            f"{name}[grid, block, {stream!r}]: {stream!r} is no handle of a stream; {_GRID_HINT.format(name=name)}"
        )
    return driver.stream_handle(stream)


def _extents(value: Any, what: str, name: str) -> tuple[int, int, int]:
    extents = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(extents) <= 3 or not all(_is_integer(e) and e >= 1 for e in extents):
        raise ValueError(f"{name}: {what} {value!r}; expected one to three positive integers")
    return tuple(operator.index(e) for e in (*extents, 1, 1)[:3])


def _check_block(block: Sequence[int], name: str) -> None:
    if _volume(block) > 1024:
        raise ValueError(f"{name}: {_volume(block)} threads a block; the limit is 1024")
    for axis, (threads, limit) in enumerate(zip(block, _BLOCK_LIMITS, strict=True)):
        if threads > limit:
            raise ValueError(f"{name}: block {'xyz'[axis]} of {threads} threads; the limit is {limit}")


def _check_function(function: Any) -> None:
    """See that a kernel can be made of it."""
    if not inspect.isfunction(function):
        raise TypeError(
            f"@kernel of {function!r}, a {type(function).__name__}; expected a function written in Python"
            + (f": write @kernel(threads={function})" if _is_integer(function) else "")
        )
    name = function.__name__
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name} is an `async def`; a kernel is a plain function")
    if inspect.isgeneratorfunction(function):
        raise TypeError(f"{name} has a `yield`; a kernel is a plain function and returns nothing")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise TypeError(
                f"{name}: parameter {parameter} is {parameter.kind.description}; a kernel's are positional, one by one"
            )
        if parameter.default is not parameter.empty:
            raise TypeError(
                f"{name}: parameter {parameter} has a default; a kernel is launched with all of its arguments"
            )


_REJECTION = re.compile(r"^ *(?:\w*Error): (.+(?:\n(?! *raised from| *-).+)*)", re.MULTILINE)


def _located(error: Exception) -> Exception | None:
    """A typing error that says first where in the kernel and what is wrong; None if it says where already.

    An error from a function's own typing comes out of Numba without the line of the call. The constraint that was
    being solved knows it, and is a local variable of the frames that the error passed through.
    """
    message = str(error)
    if 'File "' in message:
        return None
    location, traceback = None, error.__traceback__
    while traceback is not None:
        location = getattr(traceback.tb_frame.f_locals.get("self"), "loc", None) or location
        traceback = traceback.tb_next
    if location is None:
        return None
    found = _REJECTION.search(message)
    specific = f"{found[1].strip()}\n\n" if found else ""
    return type(error)(f"{location.filename}:{location.line}: {specific}{message}")


def _volume(extents: Sequence[int]) -> int:
    product = 1
    for extent in extents:
        product *= extent
    return product

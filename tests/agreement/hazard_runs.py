"""The hazards' kernels and their mended twins on a GPU: what really happens there.

Each program has a process to itself, which is ended if it hangs. It is launched again and again, and before each launch
all shared memory of the GPU is filled with ones: else a kernel that reads too early would find the right bytes of the
launch before. Its arrays are compared with what the mended twin leaves in the simulator.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import isolated
import numpy as np

from numba_tma import Kernel, LaunchError, TensorMap, driver, launch, sim, tensor_map, use_backend
from numba_tma.compile import link
from numba_tma.device_array import DeviceArray
from numba_tma.sim import descriptor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hazards"))
from cases import CASES

RECORD = "hazards.json"
LAUNCHES = 20
LIMIT_S = 10
ARCH = "sm_90a"
_TWINS = (("bad", False), ("mended", True))


def fingerprint(name: str) -> str:
    """Changes with the case's programs: what was recorded for others is no use."""
    case = CASES[name]
    return hashlib.blake2b((case.source(False) + case.source(True)).encode(), digest_size=8).hexdigest()


# -- the programs ------------------------------------------------------------------------------------------------------


class _Launches:
    """Stands for a kernel: launches it and remembers the arrays."""

    def __init__(self, kernel: Kernel, arrays: list[np.ndarray]) -> None:
        self._kernel, self._arrays = kernel, arrays

    def __getitem__(self, configuration: Any) -> Callable[..., object]:
        launcher = self._kernel[configuration]

        def call(*arguments: Any) -> object:
            for argument in arguments:
                array = argument.array if isinstance(argument, TensorMap) else argument
                if isinstance(array, np.ndarray):
                    self._arrays.append(array if array.base is None else array.base)
            return launcher(*arguments)

        return call


def _namespace(name: str, mended: bool, arrays: list[np.ndarray]) -> dict[str, Any]:
    """The namespace of a program whose kernels remember the arrays that they are launched with."""
    source = CASES[name].source(mended)
    filename = f"{name}-{'mended' if mended else 'bad'}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, filename, "exec"), namespace)
    for key, value in list(namespace.items()):
        if isinstance(value, Kernel):
            namespace[key] = _Launches(value, arrays)
    return namespace


class _Memory:
    """The simulator's global memory for a program that calls `sim.launch` itself: arrays on the GPU, or in it."""

    def __init__(self, arrays: list[np.ndarray], on_gpu: bool) -> None:
        self._arrays, self._on_gpu = arrays, on_gpu
        self.simulated = sim.GlobalMemory()
        self._moved: list[tuple[np.ndarray, DeviceArray]] = []

    def map(self, array: np.ndarray, name: str = "", **options: Any) -> int:
        """The address of an array. Tensor maps are not remembered: their bytes differ between the two."""
        if array.nbytes != descriptor.NBYTES:
            self._arrays.append(array)
        if not self._on_gpu:
            return self.simulated.map(array, name, **options)
        self._moved.append((array, DeviceArray(array)))
        return self._moved[-1][1].pointer

    def copy_back(self) -> None:
        """The GPU's contents into the arrays."""
        for array, moved in self._moved:
            if array.flags.writeable:
                array[...] = moved.to_host()


def _launch_ptx(
    text: str, entry: str | None = None, *, grid: Any, block: Any, params: list[bytes], memory: _Memory, **more: Any
) -> None:
    """What `sim.launch` does, on the GPU."""
    entry = entry or next(iter(sim.parse(text).entries))
    loaded = driver.LoadedKernel(_cubin(text), entry, driver.current_device())
    extents = [(*((e,) if isinstance(e, int) else e), 1, 1)[:3] for e in (grid, block, more.get("cluster", 1))]
    shared_bytes = more.get("shared_bytes", 0)
    loaded.allow_shared(shared_bytes)
    config = driver.launch_config(extents[0], extents[1], shared_bytes, 0, extents[2])
    offsets, place = [], 0
    for parameter in params:
        place = -(-place // 64) * 64
        offsets.append(place)
        place += len(parameter)
    buffer = driver.ArgumentBuffer(place, offsets)
    for offset, parameter in zip(offsets, params, strict=True):
        buffer.view[offset : offset + len(parameter)] = parameter
    driver.Launch(config, loaded, buffer)()
    driver.synchronize()
    memory.copy_back()


def _cubin(text: str) -> bytes:
    return link([("program", text)], ARCH)[0]


def _redirect(namespace: dict[str, Any], arrays: list[np.ndarray], on_gpu: bool) -> None:
    """Make a program that calls `sim.launch` itself remember its arrays and, on a GPU, run there."""

    def simulate(*arguments: Any, memory: _Memory, **options: Any) -> sim.Report:
        return sim.launch(*arguments, memory=memory.simulated, hazards=False, **options)

    substitute = types.SimpleNamespace(**vars(sim))
    substitute.GlobalMemory = lambda: _Memory(arrays, on_gpu)
    substitute.launch = _launch_ptx if on_gpu else simulate
    namespace["sim"] = substitute
    if on_gpu and "descriptor" in namespace:
        encoder = types.SimpleNamespace(**vars(descriptor))
        encoder.encode = lambda box: tensor_map._driver_encode(box, box.address, "the tensor map")
        namespace["descriptor"] = encoder


def _run_once(name: str, mended: bool, on_gpu: bool) -> list[np.ndarray]:
    """Launch a program once; gives its arrays as they are afterwards.

    Raises:
        LaunchError: the driver says that the launch failed.
        sim.SimError: the simulator does.
    """
    namespace, arrays = _program(name, mended, on_gpu)
    arrays.clear()
    with use_backend("gpu" if on_gpu else "sim", hazards=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        namespace["run"]()
    return [array.copy() for array in arrays]


@functools.cache
def _program(name: str, mended: bool, on_gpu: bool) -> tuple[dict[str, Any], list[np.ndarray]]:
    """A program's namespace, and the list that its launches put their arrays into."""
    arrays: list[np.ndarray] = []
    namespace = _namespace(name, mended, arrays)
    if "sim.launch(" in CASES[name].program:
        _redirect(namespace, arrays, on_gpu)
    return namespace, arrays


def expected(name: str) -> list[np.ndarray]:
    """The arrays after the mended twin, in the simulator."""
    return _run_once(name, True, on_gpu=False)


# -- on the GPU --------------------------------------------------------------------------------------------------------

_SHARED_BYTES = 226 * 1024
_FILL = f"""
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 room[];
.visible .entry fill()
{{
    .reg .b32 %at, %end, %ones;
    .reg .pred %more;
    mov.u32 %at, %tid.x;
    shl.b32 %at, %at, 2;
    mov.u32 %end, room;
    add.u32 %at, %at, %end;
    add.u32 %end, %end, {_SHARED_BYTES};
    mov.u32 %ones, 0xFFFFFFFF;
AGAIN:
    st.shared.u32 [%at], %ones;
    add.u32 %at, %at, 4096;
    setp.lt.u32 %more, %at, %end;
    @%more bra AGAIN;
    ret;
}}
"""


@functools.cache
def _fill() -> driver.Launch:
    """A launch that leaves ones in the shared memory of every SM."""
    loaded = driver.LoadedKernel(_cubin(_FILL), "fill", driver.current_device())
    loaded.allow_shared(_SHARED_BYTES)
    blocks = driver.attribute("MULTIPROCESSOR_COUNT")
    config = driver.launch_config((blocks, 1, 1), (1024, 1, 1), _SHARED_BYTES, 0, None)
    return driver.Launch(config, loaded, driver.ArgumentBuffer(8, []))


def compile_program(name: str, mended: bool) -> None:
    """Into the disk cache, so that no program's time goes into it."""
    with launch.recording(ARCH) as recorded, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        namespace = _namespace(name, mended, [])
        if "sim.launch(" not in CASES[name].program:
            namespace["run"]()
    for one in recorded.launches:
        _ = one.compiled.cubin


def _same(arrays: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return [a.tobytes() for a in arrays] == [b.tobytes() for b in others]


def observe(name: str, mended: bool, progress: str, on_gpu: bool = True) -> dict[str, Any]:
    """Launch a program some times. Gives how many launches ended right and wrong, and the driver's error if one failed.

    After every launch the same goes into the file `progress`, for whoever ends this process.
    """
    right = expected(name)
    counts = {"right": 0, "wrong": 0}
    for _ in range(LAUNCHES):
        try:
            if on_gpu:
                driver.ensure_context()
                _fill()()
                driver.synchronize()
            arrays = _run_once(name, mended, on_gpu)
        except LaunchError as error:
            code = re.search(r"CUDA_ERROR_\w+", str(error))
            return {**counts, "error": code[0] if code else str(error).splitlines()[0]}
        counts["right" if _same(arrays, right) else "wrong"] += 1
        Path(progress).write_text(f"{counts['right']} {counts['wrong']}")
    return {**counts, "error": ""}


def run_on_gpu(workers: int) -> dict[str, Any]:
    """What happened, by the case's name and 'bad' or 'mended'."""
    every = [(name, twin, mended) for name in CASES for twin, mended in _TWINS]
    isolated.run({f"{n} {t}": (compile_program, (n, m)) for n, t, m in every}, 60, workers)
    found: dict[str, Any] = {name: {"fingerprint": fingerprint(name)} for name in CASES}
    with tempfile.TemporaryDirectory() as folder:
        paths = {f"{n} {t}": Path(folder) / f"{n}-{t}" for n, t, _ in every}
        jobs = {f"{n} {t}": (observe, (n, m, str(paths[f"{n} {t}"]))) for n, t, m in every}
        outcomes = isolated.run(jobs, LIMIT_S, workers)
        for name, twin, _ in every:
            outcome, path = outcomes[f"{name} {twin}"], paths[f"{name} {twin}"]
            found[name][twin] = outcome.value
            if outcome.failure:
                right, wrong = map(int, path.read_text().split()) if path.exists() else (0, 0)
                hung = "no answer" in outcome.failure
                found[name][twin] = {"right": right, "wrong": wrong, "error": "hung" if hung else outcome.failure}
    return found


def describe(happened: dict[str, Any]) -> str:
    """One twin's record in words."""
    parts = []
    for key, words in (("right", "ended with the right numbers"), ("wrong", "ended with wrong numbers")):
        if happened[key]:
            parts.append(f"{happened[key]} launch{'es' * (happened[key] != 1)} {words}")
    if happened["error"] == "hung":
        parts.append(f"{'the next ' if parts else ''}one hung (no end within {LIMIT_S} s)")
    elif happened["error"]:
        parts.append(f"{'the next ' if parts else ''}one failed with {happened['error']}")
    return ", ".join(parts)


def compare(found: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """A line for each program; gives what is recorded."""
    say("\nwhat the hazards do:")
    for name, record in found.items():
        for twin, _ in _TWINS:
            unexpected = twin == "mended" and (record[twin]["wrong"] or record[twin]["error"])
            say(f"  {name}, {twin}: {describe(record[twin])}{' UNEXPECTED' * bool(unexpected)}")
    return found

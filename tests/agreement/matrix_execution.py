"""Execute configurations of the tensor cores' instructions on a GPU or in the simulator, a block for each."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import matrix_configurations
import matrix_instructions
import matrix_probes
import numpy as np
from matrix_configurations import Configuration
from matrix_instructions import THREADS, Instruction

from numba_tma import cache, driver, sim
from numba_tma.compile import link
from numba_tma.device_array import DeviceArray

_PER_MODULE = 10


@functools.cache
def modules() -> tuple[tuple[Instruction, ...], ...]:
    """All instructions in the groups that are compiled together: each module has wide and narrow ones."""
    every = tuple(dict.fromkeys((*matrix_configurations.instructions(), *matrix_probes.instructions())))
    count = -(-len(every) // _PER_MODULE)
    return tuple(every[first::count] for first in range(count))


@functools.cache
def text(group: tuple[Instruction, ...]) -> str:
    """A module's PTX."""
    return matrix_instructions.module(group)


@functools.cache
def module_of(instruction: Instruction) -> tuple[Instruction, ...]:
    """The group that an instruction is compiled in."""
    return next(group for group in modules() if instruction in group)


def cubin(group: tuple[Instruction, ...]) -> bytes:
    """A module's machine code, from the disk cache if it is there; needs no GPU."""
    key = cache.digest(["tensor cores", text(group)])
    kept = cache.read(key, ".cubin")
    if kept is None:
        kept = link([("tensor_cores", text(group))], "sm_90a")[0]
        cache.write(key, ".cubin", kept)
    return kept


def _arrays(configurations: Sequence[Configuration]) -> dict[str, np.ndarray]:
    instruction = configurations[0].instruction
    return {
        "jobs": np.stack([matrix_configurations.job(c) for c in configurations]),
        "image": np.stack([matrix_configurations.image(c) for c in configurations]),
        "inputs": np.stack([matrix_configurations.inputs(c) for c in configurations]),
        "outputs": np.full((len(configurations), THREADS, instruction.outputs), 0xA5A5A5A5, np.uint32),
    }


def in_simulator(configurations: Sequence[Configuration], **options: object) -> np.ndarray:
    """Outputs of configurations of one instruction: uint32 (configurations, threads, words).

    Raises:
        sim.SimError: one of them is an error.
    """
    arrays, memory = _arrays(configurations), sim.GlobalMemory()
    instruction = configurations[0].instruction
    sim.launch(
        text(module_of(instruction)),
        instruction.name,
        grid=len(configurations),
        block=THREADS,
        params=[struct.pack("<Q", memory.map(array, name)) for name, array in arrays.items()],
        memory=memory,
        **{"hazards": False, **options},
    )
    return arrays["outputs"]


def on_gpu(configurations: Sequence[Configuration]) -> np.ndarray:
    """The same on the GPU.

    Raises:
        LaunchError: one of them is an error; nothing runs in this process afterwards.
    """
    arrays = {name: DeviceArray(array) for name, array in _arrays(configurations).items()}
    instruction = configurations[0].instruction
    loaded = driver.LoadedKernel(cubin(module_of(instruction)), instruction.name, 0)
    config = driver.launch_config((len(configurations), 1, 1), (THREADS, 1, 1), 0, 0, None)
    buffer = driver.ArgumentBuffer(8 * len(arrays), range(0, 8 * len(arrays), 8))
    buffer.view[:] = struct.pack(f"<{len(arrays)}Q", *(array.pointer for array in arrays.values()))
    driver.Launch(config, loaded, buffer)()
    driver.synchronize()
    return arrays["outputs"].to_host()

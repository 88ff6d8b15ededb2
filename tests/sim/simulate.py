"""Numba kernels and raw PTX in the simulator, without the launcher: what the simulator's tests share."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from numba_tma import sim

_compiled: dict[tuple, str] = {}


def numba_ptx(function: Callable, *types: Any) -> str:
    """The PTX that Numba makes of a kernel."""
    key = (function, types)
    if key not in _compiled:
        compiled = cuda.compile(function, types, cc=(9, 0, "a"), device=False, abi="numba", lineinfo=True)
        _compiled[key] = compiled[0] if isinstance(compiled, tuple) else compiled
    return _compiled[key]


def pack(memory: sim.GlobalMemory, *arguments: Any) -> list[bytes]:
    """Kernel parameters in Numba's convention: an array is 5 + 2 ndim words, a NumPy scalar its bytes."""
    out = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            words = [0, 0, argument.size, argument.itemsize, memory.map(argument)]
            out += [struct.pack("<q", word) for word in (*words, *argument.shape, *argument.strides)]
        else:
            out.append(argument.tobytes())
    return out


def run(function: Callable, types: tuple, grid: Any, block: Any, *arguments: Any, **options: Any) -> sim.Report:
    """Compile a Numba kernel and run it."""
    memory = sim.GlobalMemory()
    params = pack(memory, *arguments)
    return sim.launch(numba_ptx(function, *types), grid=grid, block=block, params=params, memory=memory, **options)


HEADER = ".version 8.3\n.target sm_90a\n.address_size 64\n"


def run_ptx(body: str, grid: Any, block: Any, *arguments: Any, declarations: str = "", **options: Any) -> sim.Report:
    """Run raw PTX: `body` is the kernel's text; array arguments arrive as addresses p0, p1, …, others as they are."""
    memory = sim.GlobalMemory()
    params, formals = [], []
    for i, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            params.append(struct.pack("<Q", memory.map(argument, f"p{i}")))
            formals.append(f".param .u64 p{i}")
        elif isinstance(argument, bytes):
            params.append(argument)
            formals.append(f".param .align 64 .b8 p{i}[{len(argument)}]")
        else:
            params.append(argument.tobytes())
            formals.append(f".param .b{8 * argument.itemsize} p{i}")
    text = f"{HEADER}{declarations}\n.visible .entry kernel({', '.join(formals)})\n{{\n{body}\n}}\n"
    return sim.launch(text, "kernel", grid=grid, block=block, params=params, memory=memory, **options)

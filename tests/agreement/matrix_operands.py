"""The matrices of a configuration: from its bytes and words by the simulator's layouts, and back."""

from __future__ import annotations

from dataclasses import dataclass

import matrix_configurations
import numpy as np
from matrix_configurations import Configuration
from matrix_instructions import THREADS, Instruction

from numba_tma.sim.matrix_descriptor import MatrixDescriptor, addresses
from numba_tma.sim.matrix_fragments import by_register, multiplicand

# What the registers of a thread and the results hold.
_RESULTS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


@dataclass(frozen=True)
class Operands:
    """Raw bits: A (problems, m, bytes along K) and B (problems, n, bytes along K) of each use, as uint8; C
    (problems, m, n), as f32, f16 or s32."""

    a: list[np.ndarray]
    b: list[np.ndarray]
    c: np.ndarray


def problems(instruction: Instruction) -> int:
    """How many multiplications a block makes at once: one for each warp, or for its warpgroup."""
    return 1 if instruction.family == "wgmma" else THREADS // 32


def _places(instruction: Instruction) -> np.ndarray:
    """For each thread and element of its accumulator, the element's place in the flat (problems, m, n)."""
    i = instruction
    slices = 2 if i.m > 8 else 1
    flat = np.arange(problems(i) * i.m * i.n).reshape(-1, i.n)
    found = by_register(i.result, flat, slices)  # (registers, lanes) and, of f16, two elements each
    return found.reshape(found.shape[0], THREADS, -1).transpose(1, 0, 2).reshape(THREADS, -1)


def result(instruction: Instruction, words: np.ndarray) -> np.ndarray:
    """Accumulators (threads, registers) as matrices (problems, m, n)."""
    i = instruction
    values = np.ascontiguousarray(words).view(_RESULTS[i.result])
    out = np.empty(values.size, values.dtype)
    out[_places(i)] = values
    return out.reshape(problems(i), i.m, i.n)


def words(instruction: Instruction, matrices: np.ndarray) -> np.ndarray:
    """The reverse: uint32 (threads, registers)."""
    values = np.asarray(matrices, _RESULTS[instruction.result]).reshape(-1)
    return np.ascontiguousarray(values[_places(instruction)]).view(np.uint32)


def _from_memory(
    image: np.ndarray, descriptor: MatrixDescriptor, extent: int, kind: str, transposed: int
) -> np.ndarray:
    depth = 256 // matrix_configurations.BITS[kind]
    units = addresses(descriptor, extent, depth, bool(transposed))
    data = image[units[..., None] + np.arange(16)].reshape(units.shape[0], -1)
    if transposed:
        return np.ascontiguousarray(data.view(np.uint16).T).view(np.uint8)
    return data


def operands(configuration: Configuration) -> Operands:
    """The matrices of a multiplication."""
    i = configuration.instruction
    given = matrix_configurations.inputs(configuration)
    image = matrix_configurations.image(configuration) if i.family == "wgmma" else None
    c = result(i, given[:, : i.d_count])
    a, b, place = [], [], i.d_count
    for use in configuration.uses:
        if i.a_count:
            registers = np.ascontiguousarray(given[:, place : place + i.a_count].T)
            rows = multiplicand(registers, 2 if i.m > 8 else 1)
            a.append(rows.view(np.uint8).reshape(problems(i), i.m, -1))
        else:
            a.append(_from_memory(image, use.a, 64, i.a, i.majors[0])[None])
        place += i.a_count
        if i.b_count:
            registers = np.ascontiguousarray(given[:, place : place + i.b_count].T)
            b.append(multiplicand(registers, 1).view(np.uint8).reshape(problems(i), 8, -1))
        else:
            b.append(_from_memory(image, use.b, i.n, i.b, i.majors[1])[None])
        place += i.b_count
    return Operands(a, b, c)

"""Special registers.

Most are the same for a lane as long as it lives: they are registers that the simulator fills when a wave begins.
Clocks change; `mov` reads them when it is executed. Source: PTX ISA, "Special Registers".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import UnknownInstruction
from .memory import CLUSTER_RANK_SHIFT, SHARED_BASE
from .module import Register
from .program import U32, U64, Program

if TYPE_CHECKING:
    from .fragment import Fragment, Root
    from .machine import Machine

_AXES = {"x": 0, "y": 1, "z": 2}
# Clocks advance with executed steps; a step stands for about this many cycles, at one cycle a nanosecond.
_CYCLES_PER_STEP = 4


def special_register(machine: Machine, program: Program, operand: Register) -> int:
    """The register that holds a special register's value for each lane."""
    name = operand.name.lstrip("%")
    full = name if operand.component is None else f"{name}.{operand.component}"
    axis = _AXES.get(operand.component or "x", 0)
    constants = {
        "ntid": machine.block[axis],
        "nctaid": machine.grid[axis],
        "nclusterid": machine.clusters[axis],
        "cluster_nctaid": machine.cluster[axis],
        "cluster_nctarank": machine.cluster_size,
        "nwarpid": machine.warps,
        "nsmid": machine.slots,
        "gridid": 1,
        "is_explicit_cluster": machine.explicit_cluster,
        "dynamic_smem_size": machine.dynamic_shared,
        "total_smem_size": machine.shared_end - SHARED_BASE,
        "aggr_smem_size": machine.shared_end,
        "reserved_smem_offset_begin": 0,
        "reserved_smem_offset_end": SHARED_BASE,
        "reserved_smem_offset_cap": 0,
    }
    if name in constants:
        dtype = np.dtype(np.bool_) if operand.type == "pred" else U64 if operand.type == "u64" else U32
        return program.constant(np.array(constants[name], dtype))
    if name.startswith(("envreg", "pm")):
        return program.constant(np.zeros((), U64 if name.endswith("_64") else U32))
    builders: dict[str, Callable[[Root], np.ndarray]] = {
        "tid": lambda root: _u32(machine.thread_index(root.thread, axis)),
        "ctaid": lambda root: _by_block(root, machine.cta_index[axis]),
        "clusterid": lambda root: _by_block(root, machine.cta_index[axis] // machine.cluster[axis]),
        "cluster_ctaid": lambda root: _by_block(root, machine.cta_index[axis] % machine.cluster[axis]),
        "cluster_ctarank": lambda root: _u32(root.slot % machine.cluster_size),
        "laneid": lambda root: _u32(root.thread % 32),
        "warpid": lambda root: _u32(root.thread // 32),
        "smid": lambda root: _u32(root.slot),
        "lanemask_eq": lambda root: _lanemask(root, lambda lane: np.uint64(1) << lane),
        "lanemask_lt": lambda root: _lanemask(root, lambda lane: (np.uint64(1) << lane) - np.uint64(1)),
        "lanemask_le": lambda root: _lanemask(root, lambda lane: (np.uint64(2) << lane) - np.uint64(1)),
        "lanemask_gt": lambda root: _lanemask(root, lambda lane: ~((np.uint64(2) << lane) - np.uint64(1))),
        "lanemask_ge": lambda root: _lanemask(root, lambda lane: ~((np.uint64(1) << lane) - np.uint64(1))),
    }
    if name not in builders:
        raise UnknownInstruction(f"special register {operand.name} can be read by mov only, or is not simulated")
    return program.static(("special", full), builders[name], 32)


def _u32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.uint32)


def _by_block(root: Root, table: np.ndarray) -> np.ndarray:
    """A value for each resident block, spread to lanes; one element when it is the same for all."""
    if (table == table[0]).all():
        return _u32(table[:1])
    return _u32(table).take(root.slot)


def _lanemask(root: Root, mask: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return _u32(mask((root.thread % 32).astype(np.uint64)) & np.uint64(0xFFFFFFFF))


def shared_symbol(machine: Machine, program: Program, offset: int, dtype: np.dtype) -> int:
    """Address of a shared variable in a cluster, where each block's addresses carry its rank."""

    def build(root: Root) -> np.ndarray:
        rank = root.slot % machine.cluster_size
        return ((rank << CLUSTER_RANK_SHIFT) + offset).astype(dtype)

    return program.static(("shared", offset, dtype.str), build, 8 * dtype.itemsize)


def _cycles(machine: Machine) -> int:
    return machine.steps * _CYCLES_PER_STEP + machine.clock_ns


def _number(dtype: Any, shift: int, value: Callable[[Machine], int]) -> Callable[[Machine, Fragment], np.ndarray]:
    mask = (1 << 8 * np.dtype(dtype).itemsize) - 1

    def read(machine: Machine, fragment: Fragment) -> np.ndarray:
        return np.array([value(machine) >> shift & mask], dtype)

    return read


_EPOCH_NS = 1_700_000_000_000_000_000
DYNAMIC: dict[str, Callable[[Machine, Fragment], np.ndarray]] = {
    "clock": _number(np.uint32, 0, _cycles),
    "clock_hi": _number(np.uint32, 32, _cycles),
    "clock64": _number(np.uint64, 0, _cycles),
    "globaltimer": _number(np.uint64, 0, lambda machine: _EPOCH_NS + _cycles(machine)),
    "globaltimer_lo": _number(np.uint32, 0, lambda machine: _EPOCH_NS + _cycles(machine)),
    "globaltimer_hi": _number(np.uint32, 32, lambda machine: _EPOCH_NS + _cycles(machine)),
}

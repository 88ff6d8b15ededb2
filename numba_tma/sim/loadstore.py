"""Loads, stores, address arithmetic and fences.

Source: PTX ISA, "Data Movement and Conversion Instructions": ld, ld.global.nc, st, prefetch, isspacep, cvta,
mapa, getctarank; "Parallel Synchronization and Communication Instructions": membar, fence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .access import KIND_NAMES, Scattered, make_resolver
from .decode import DTYPES
from .errors import OutOfBounds, SimError, UnknownInstruction
from .fragment import Fragment
from .memory import (
    CLUSTER_RANK_SHIFT,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    WINDOW_SIZE,
)
from .module import Address, Instruction, Symbol, Vector
from .program import BOOL, U32, U64, UNSIGNED, Builder, Step, widening

SPACES = {
    **{name: name for name in ("global", "const", "shared", "local", "param")},
    "shared::cta": "shared",
    "shared::cluster": "shared",
    "param::entry": "param",
    "param::func": "param",
}
_WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}
_WAITING_LOADS = frozenset(("volatile", "relaxed", "acquire", "mmio"))
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def space_of(instruction: Instruction) -> str:
    """The state space among the modifiers, or "generic"."""
    return next((SPACES[m] for m in instruction.modifiers if m in SPACES), "generic")


def element_type(instruction: Instruction) -> str:
    """The type, the last modifier."""
    name = instruction.modifiers[-1] if instruction.modifiers else ""
    if name not in DTYPES:
        raise UnknownInstruction(f"the simulator does not access memory as {name!r}", instruction)
    return name


def _width(instruction: Instruction) -> int:
    return next((_VECTORS[m] for m in instruction.modifiers if m in _VECTORS), 1)


def _parts(operand: Any, count: int) -> tuple:
    parts = operand.elements if isinstance(operand, Vector) else (operand,)
    if len(parts) != count:
        raise SimError(f"{len(parts)} operands where the instruction moves {count} elements")
    return parts


def _ld(d: Builder, instruction: Instruction) -> Step:
    space = space_of(instruction)
    dtype = DTYPES[element_type(instruction)]
    count = _width(instruction)
    destination, source = instruction.operands[:2]
    targets = _parts(destination, count)
    if space == "param" and isinstance(source, Address) and isinstance(source.base, Symbol):
        return _ld_param(d, targets, source, dtype)
    register, offset, space = d.address(source, space)
    resolve = make_resolver(d.machine, register, offset, dtype, count, space)
    machine = d.machine
    cost = 512 if _WAITING_LOADS & set(instruction.modifiers) else 1
    nbytes = dtype.itemsize * count
    loaded = machine.loaded
    if count == 1:
        number = d.define(targets[0])
        extend = None if number is None else widening(dtype, d.program.widths[number])

        def run(values: list, fragment: Fragment) -> None:
            try:
                view, index, kind = resolve(fragment)
            except Scattered as scattered:
                value = _load_scattered(machine, scattered, fragment, 0, instruction)
            else:
                loaded[kind] += nbytes * fragment.n
                if machine.observer is not None:
                    machine.observer.access(fragment, instruction, kind, view, index, 1, "read")
                value = view.take(index)
            if number is not None:
                values[number] = value if extend is None else extend(value)

        return Step(run=run, cost=cost)
    writers = [d.writer(target, dtype) for target in targets]

    def run_vector(values: list, fragment: Fragment) -> None:
        try:
            view, index, kind = resolve(fragment)
        except Scattered as scattered:
            for k, write in enumerate(writers):
                if write is not None:
                    write(fragment, _load_scattered(machine, scattered, fragment, k, instruction))
            return
        loaded[kind] += nbytes * fragment.n
        if machine.observer is not None:
            machine.observer.access(fragment, instruction, kind, view, index, count, "read")
        for k, write in enumerate(writers):
            if write is not None:
                write(fragment, view.take(index + k if k else index))

    return Step(run=run_vector, cost=cost)


def _load_scattered(
    machine: Any, scattered: Scattered, fragment: Fragment, k: int, instruction: Instruction
) -> np.ndarray:
    value = None
    for positions, (view, index, kind) in scattered.parts:
        if value is None:
            value = np.empty(fragment.n, view.dtype)
        value[positions] = view.take(index + k)
        if machine.observer is not None:
            part = fragment.subset(positions, fragment.block)
            machine.observer.access(part, instruction, kind, view, index + k, 1, "read")
        machine.loaded[kind] += view.dtype.itemsize * positions.size
    return value


def _ld_param(d: Builder, targets: tuple, source: Address, dtype: np.dtype) -> Step:
    name, offset = source.base.name, source.base.offset + source.offset
    writers = [d.writer(target, dtype) for target in targets]
    machine = d.machine
    if d.function.entry and name in machine.param_offsets:
        start = machine.param_offsets[name] + offset
        data = machine.params.buffer
        constants = []
        for k in range(len(targets)):
            first = start + k * dtype.itemsize
            if first + dtype.itemsize > data.size:
                raise OutOfBounds(f"parameter {name}+{offset} is read beyond the {data.size} bytes of parameters")
            constants.append(data[first : first + dtype.itemsize].copy().view(dtype))
        pairs = [(write, value) for write, value in zip(writers, constants, strict=True) if write is not None]

        def run_entry(values: list, fragment: Fragment) -> None:
            for write, value in pairs:
                write(fragment, value)

        return Step(run=run_entry)
    registers = [d.instance.slot(name, offset + k * dtype.itemsize, dtype) for k in range(len(targets))]
    for register in registers:
        d.uses |= 1 << register

    def run(values: list, fragment: Fragment) -> None:
        for write, register in zip(writers, registers, strict=True):
            if write is not None:
                value = fragment.get(register)
                write(fragment, value if value.dtype is dtype else value.view(dtype))

    return Step(run=run)


def _st(d: Builder, instruction: Instruction) -> Step:
    if {"async", "bulk"} & set(instruction.modifiers):
        raise UnknownInstruction("the simulator does not know asynchronous stores", instruction)
    space = space_of(instruction)
    dtype = DTYPES[element_type(instruction)]
    count = _width(instruction)
    destination, source = instruction.operands[:2]
    sources = _parts(source, count)
    readers = [d.reader(part, dtype) for part in sources]
    if space == "param" and isinstance(destination, Address) and isinstance(destination.base, Symbol):
        return _st_param(d, destination, readers, dtype)
    register, offset, space = d.address(destination, space)
    resolve = make_resolver(d.machine, register, offset, dtype, count, space)
    machine = d.machine
    stored = machine.stored
    nbytes = dtype.itemsize * count

    def run(values: list, fragment: Fragment) -> None:
        try:
            view, index, kind = resolve(fragment)
            parts = None
        except Scattered as scattered:
            parts = scattered.parts
        machine.scheduler.progress += 1
        if parts is None:
            stored[kind] += nbytes * fragment.n
            if machine.observer is not None:
                machine.observer.access(fragment, instruction, kind, view, index, count, "write", readers)
            for k, read in enumerate(readers):
                value = read(fragment)
                _put(view, index + k if k else index, value, kind)
            return
        for positions, (view, index, kind) in parts:
            stored[kind] += nbytes * positions.size
            values = [value if value.size == 1 else value[positions] for value in (read(fragment) for read in readers)]
            if machine.observer is not None:
                part = fragment.subset(positions, fragment.block)
                reads = [lambda fragment, value=value: value for value in values]
                machine.observer.access(part, instruction, kind, view, index, count, "write", reads)
            for k, value in enumerate(values):
                _put(view, index + k, value, kind)

    return Step(run=run)


def _put(view: np.ndarray, index: np.ndarray, value: np.ndarray, kind: int) -> None:
    if not view.flags.writeable:
        raise OutOfBounds(f"a store to read-only {KIND_NAMES[kind]} memory")
    if index.size == 1 and value.size > 1:
        # All lanes store to one place: which one wins is not defined; here it is the last.
        value = value[-1:]
    view[index] = value


def _st_param(d: Builder, destination: Address, readers: list, dtype: np.dtype) -> Step:
    name, offset = destination.base.name, destination.base.offset + destination.offset
    registers = [d.instance.slot(name, offset + k * dtype.itemsize, dtype) for k in range(len(readers))]
    for register in registers:
        d.defs |= 1 << register

    def run(values: list, fragment: Fragment) -> None:
        for read, register in zip(readers, registers, strict=True):
            values[register] = read(fragment)

    return Step(run=run)


def _cvta(d: Builder, instruction: Instruction) -> Step:
    to = "to" in instruction.modifiers
    space = space_of(instruction)
    dtype = DTYPES[instruction.modifiers[-1]]
    destination, source = instruction.operands
    if isinstance(source, Address):
        source = source.base
    window = np.array(_WINDOWS[space], U64)
    read = d.reader(source, dtype)
    write = d.writer(destination, dtype)

    def run(values: list, fragment: Fragment) -> None:
        value = read(fragment)
        if dtype is not U64:
            raise SimError("generic addresses have 64 bits: cvta.u32 has no meaning here")
        write(fragment, value - window if to else value + window)

    return Step(run=run)


def _isspacep(d: Builder, instruction: Instruction) -> Step:
    space = space_of(instruction)
    destination, source = instruction.operands
    read, write = d.reader(source, U64), d.writer(destination, BOOL)
    windows = (SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW)
    machine = d.machine
    own = "shared::cluster" not in instruction.modifiers and machine.cluster_size > 1

    def run(values: list, fragment: Fragment) -> None:
        address = read(fragment)
        top = address >> np.uint64(32)
        if space in _WINDOWS and _WINDOWS[space]:
            result = top == np.uint64(_WINDOWS[space] >> 32)
            if space == "shared" and own:
                rank = (address & np.uint64(WINDOW_SIZE - 1)) >> np.uint64(CLUSTER_RANK_SHIFT)
                result = result & (rank == (fragment.slot % machine.cluster_size).view(np.uint64))
        else:
            constant = np.array([machine.is_const(int(a)) for a in np.unique(address)])
            inverse = np.unique(address, return_inverse=True)[1]
            result = ~np.isin(top, np.array([w >> 32 for w in windows], np.uint64))
            is_constant = constant[inverse]
            result = result & (is_constant if space == "const" else ~is_constant)
        write(fragment, result)

    return Step(run=run)


def _mapa(d: Builder, instruction: Instruction) -> Step:
    dtype = DTYPES[instruction.modifiers[-1]]
    shared_space = "shared::cluster" in instruction.modifiers
    destination, source, rank = instruction.operands
    read, read_rank, write = (
        d.reader(_plain(source), dtype),
        d.reader(rank, U32),
        d.writer(destination, dtype),
    )
    machine = d.machine
    low = dtype.type((1 << CLUSTER_RANK_SHIFT) - 1)
    window = 0 if shared_space or dtype is not U64 else SHARED_WINDOW

    def run(values: list, fragment: Fragment) -> None:
        ranks = read_rank(fragment)
        if int(ranks.max()) >= machine.cluster_size:
            raise SimError(f"mapa to rank {int(ranks.max())} of a cluster of {machine.cluster_size} blocks")
        address = read(fragment) & low
        write(fragment, address + (ranks.astype(dtype) << dtype.type(CLUSTER_RANK_SHIFT)) + dtype.type(window))

    return Step(run=run)


def _plain(operand: Any) -> Any:
    return operand.base if isinstance(operand, Address) and not operand.offset else operand


def _getctarank(d: Builder, instruction: Instruction) -> Step:
    dtype = DTYPES[instruction.modifiers[-1]]
    destination, source = instruction.operands
    read, write = d.reader(_plain(source), dtype), d.writer(destination, U32)

    def run(values: list, fragment: Fragment) -> None:
        low = read(fragment) & dtype.type(WINDOW_SIZE - 1)
        write(fragment, (low >> dtype.type(CLUSTER_RANK_SHIFT)).astype(np.uint32))

    return Step(run=run)


def _fence(d: Builder, instruction: Instruction) -> Step:
    machine = d.machine
    acquired = None
    for operand in instruction.operands:
        if isinstance(operand, Address):
            acquired = d.address(operand, "generic")

    def run(values: list, fragment: Fragment) -> None:
        if machine.observer is not None:
            if acquired is not None:
                register, offset, _ = acquired
                addresses = np.atleast_1d(fragment.get(register)).view(np.int64) + offset
                machine.observer.tensor_maps_acquired(fragment, addresses)
            machine.observer.fence(fragment, instruction)

    return Step(run=run)


def _prefetch(d: Builder, instruction: Instruction) -> Step:
    return Step(run=lambda values, fragment: None)


def _mov(d: Builder, instruction: Instruction) -> Step | None:
    """Only what the arithmetic of lanes does not know: special registers that change, and addresses."""
    source = instruction.operands[1]
    dynamic: Callable[[Any, Fragment], np.ndarray] | None = None
    if getattr(source, "special", False):
        dynamic = d.machine.dynamic_special(source)
    if dynamic is None or instruction.guard is not None:
        return None
    machine = d.machine
    type_name = instruction.modifiers[-1]
    write = d.writer(instruction.operands[0], UNSIGNED[DTYPES[type_name].itemsize])

    def run(values: list, fragment: Fragment) -> None:
        write(fragment, dynamic(machine, fragment))

    return Step(run=run, cost=64)


HANDLERS = {
    "ld": _ld,
    "ldu": _ld,
    "st": _st,
    "cvta": _cvta,
    "isspacep": _isspacep,
    "mapa": _mapa,
    "getctarank": _getctarank,
    "membar": _fence,
    "fence": _fence,
    "prefetch": _prefetch,
    "prefetchu": _prefetch,
    "applypriority": _prefetch,
    "discard": _prefetch,
    "mov": _mov,
}

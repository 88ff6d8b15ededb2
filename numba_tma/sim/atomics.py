"""Atomic operations: atom and red, correct when lanes of one instruction meet at an address.

Lanes of one instruction act in the order of their numbers. `red`, and `atom` whose result nobody reads, need no
old values; `atom` gives each lane what the lanes before it left. Source: PTX ISA, "atom", "red".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .access import KIND_NAMES, SHARED, Scattered, make_resolver
from .decode import DTYPES as LANE_DTYPES
from .errors import OutOfBounds, SimError, UnknownInstruction
from .loadstore import space_of
from .module import Instruction, Sink, Vector
from .program import Builder, Step

if TYPE_CHECKING:
    from .fragment import Fragment

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]

_OPERATIONS = frozenset(("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"))
_F16 = np.dtype(np.float16)


def _bf16(function: np.ufunc) -> Combine:
    """A float32 ufunc on bfloat16 bit patterns, rounded to nearest even."""

    def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        wide = function((a.astype(np.uint32) << 16).view(np.float32), (b.astype(np.uint32) << 16).view(np.float32))
        bits = wide.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(wide), 0x7FFF, rounded).astype(np.uint16)

    return combine


def _f16(function: np.ufunc) -> Combine:
    return lambda a, b: function(a.view(_F16), b.view(_F16)).view(np.uint16)


def _inc(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, 0, old + 1).astype(old.dtype)


def _dec(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - 1).astype(old.dtype)


def _exchange(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return new


_UFUNCS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_FLOAT_UFUNCS = {"add": np.add, "min": np.fmin, "max": np.fmax}


def _combine(operation: str, kind: str) -> tuple[Combine | np.ufunc, np.dtype, int]:
    """(function, element dtype, elements) of an operation on a PTX type."""
    packed = 2 if kind.endswith("x2") else 1
    base = kind[:-2] if packed == 2 else kind
    if base in ("f16", "bf16"):
        if operation not in _FLOAT_UFUNCS:
            raise UnknownInstruction(f"the simulator has no atomic {operation} for .{kind}")
        wrap = _f16 if base == "f16" else _bf16
        return wrap(_FLOAT_UFUNCS[operation]), np.dtype(np.uint16), packed
    dtype = LANE_DTYPES.get(kind)
    if dtype is None or packed == 2 or dtype.kind == "b":
        raise UnknownInstruction(f"the simulator has no atomic {operation} for .{kind}")
    if dtype.kind == "f" and operation in _FLOAT_UFUNCS:
        return _FLOAT_UFUNCS[operation], dtype, 1
    special = {"inc": _inc, "dec": _dec, "exch": _exchange}
    return _UFUNCS.get(operation) or special[operation], dtype, 1


def _groups(index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(order, starts, sizes): lanes sorted by address, stable, and the runs of equal addresses."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.concatenate(([0], np.nonzero(ordered[1:] != ordered[:-1])[0] + 1))
    return order, starts, np.diff(np.append(starts, index.size))


def apply_atomic(view: np.ndarray, index: np.ndarray, value: np.ndarray, combine: Any, want_old: bool) -> Any:
    """view[index] = combine(view[index], value) lane after lane; the old values when wanted."""
    if not want_old and isinstance(combine, np.ufunc):
        combine.at(view, index, value)
        return None
    order, starts, sizes = _groups(index)
    if starts.size == index.size:
        old = view[index]
        view[index] = combine(old, value)
        return old
    old = np.empty(index.size, view.dtype)
    longest = int(sizes.max())
    if isinstance(combine, np.ufunc) and starts.size < longest:
        # Few addresses, many lanes at each: running results of each address.
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            lanes = order[start : start + size]
            place = index[lanes[0]]
            values = np.concatenate((view[place : place + 1], value[lanes]))
            run = combine.accumulate(values, dtype=view.dtype)
            old[lanes] = run[:-1]
            view[place] = run[-1]
        return old
    # Many addresses: the first lane of each, then the second, …
    for turn in range(longest):
        lanes = order[(starts + turn)[sizes > turn]]
        place = index[lanes]
        before = view[place]
        old[lanes] = before
        view[place] = combine(before, value[lanes])
    return old


def apply_cas(view: np.ndarray, index: np.ndarray, compare: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Compare and swap, lane after lane; the old values."""
    order, starts, sizes = _groups(index)
    if starts.size == index.size:
        old = view[index]
        view[index] = np.where(old == compare, value, old)
        return old
    old = np.empty(index.size, view.dtype)
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        lanes = order[start : start + size]
        place = index[lanes[0]]
        current = view[place]
        done = 0
        # Lanes that do not find what they compare with change nothing: jump from one that does to the next.
        while done < size:
            hits = np.nonzero(compare[lanes[done:]] == current)[0]
            if not hits.size:
                old[lanes[done:]] = current
                break
            hit = done + int(hits[0])
            old[lanes[done : hit + 1]] = current
            current = value[lanes[hit]]
            done = hit + 1
        view[place] = current
    return old


def _spread(value: np.ndarray, n: int) -> np.ndarray:
    return value if value.size == n else np.full(n, value[0], value.dtype)


def _atomic(d: Builder, instruction: Instruction) -> Step:
    returns = instruction.opcode == "atom"
    operation = next((m for m in instruction.modifiers if m in _OPERATIONS), None)
    kind = instruction.modifiers[-1]
    if operation is None or "async" in instruction.modifiers:
        raise UnknownInstruction("the simulator does not know this atomic operation", instruction)
    operands = list(instruction.operands)
    destination = operands.pop(0) if returns else Sink()
    if len(operands) > 2 and operation != "cas":
        operands = operands[:2]  # a cache policy changes no result
    address, *sources = operands
    if sources and isinstance(sources[0], Vector) and not returns:
        return _vector(d, instruction, operation, kind, address, sources[0])
    if isinstance(address, Vector) or any(isinstance(s, Vector) for s in (*sources, destination)):
        raise UnknownInstruction("the simulator knows vectors of red, not of atom", instruction)
    if operation == "cas":
        combine, dtype, count = None, LANE_DTYPES.get(kind), 1
        if dtype is None:
            raise UnknownInstruction(f"the simulator has no atomic cas for .{kind}", instruction)
    else:
        combine, dtype, count = _combine(operation, kind)
    whole = dtype if count == 1 else np.dtype(np.uint32)
    readers = [d.reader(source, whole) for source in sources]
    register, offset, space = d.address(address, space_of(instruction))
    write = d.writer(destination, whole)
    target = None if write is None else d.register(destination)
    resolve = make_resolver(d.machine, register, offset, dtype, count, space)
    machine = d.machine
    nbytes = whole.itemsize
    # Whether anybody reads the result is known once the function is decoded.
    used: list[bool] = []
    instance = d.instance

    def wanted() -> bool:
        if not used:
            used.append(write is not None and _is_read(instance, instruction, target))
        return used[0]

    def perform(fragment: Fragment, found: tuple, values: list[np.ndarray]) -> np.ndarray | None:
        view, index, where = found
        if where > SHARED:
            raise SimError(f"atomic operations work on global and shared memory, not on {KIND_NAMES[where]} memory")
        if not view.flags.writeable:
            raise OutOfBounds(f"an atomic operation on read-only {KIND_NAMES[where]} memory")
        n = fragment.n
        machine.atomic[where] += nbytes * n
        if machine.observer is not None:
            machine.observer.access(fragment, instruction, where, view, index, count, "atomic")
        index = _spread(index, n)
        if combine is None:
            old = apply_cas(view, index, _spread(values[0], n), _spread(values[1], n))
            if (old == values[0]).any():
                machine.scheduler.progress += 1
            return old
        machine.scheduler.progress += operation != "add" or bool(values[0].any())
        value = _spread(values[0], n)
        if count == 1:
            return apply_atomic(view, index, value, combine, wanted())
        halves = value.view(np.uint16).reshape(n, 2)
        old = np.empty((n, 2), np.uint16)
        for half in range(2):
            old[:, half] = apply_atomic(view, index + half, np.ascontiguousarray(halves[:, half]), combine, True)
        return old.reshape(-1).view(np.uint32)

    def run(values: list, fragment: Fragment) -> None:
        arguments = [read(fragment) for read in readers]
        try:
            old = perform(fragment, resolve(fragment), arguments)
        except Scattered as scattered:
            old = np.empty(fragment.n, whole)
            for positions, found in scattered.parts:
                part = fragment.subset(positions, fragment.block)
                result = perform(part, found, [a if a.size == 1 else a[positions] for a in arguments])
                if result is not None:
                    old[positions] = result
        if write is not None and old is not None:
            write(fragment, old)

    return Step(run=run, cost=64 if returns else 1)


def _vector(d: Builder, instruction: Instruction, operation: str, kind: str, address: Any, source: Vector) -> Step:
    """`red` on two or four 32-bit numbers: each of them atomically, lane after lane."""
    combine, dtype, packed = _combine(operation, kind)
    if packed != 1 or dtype.itemsize != 4:
        raise UnknownInstruction("the simulator knows vectors of 32-bit numbers", instruction)
    count = len(source.elements)
    readers = [d.reader(element, dtype) for element in source.elements]
    register, offset, space = d.address(address, space_of(instruction))
    resolve = make_resolver(d.machine, register, offset, dtype, count, space)
    machine = d.machine

    def perform(fragment: Fragment, found: tuple, values: list[np.ndarray]) -> None:
        view, index, where = found
        if where >= SHARED:
            raise SimError(f"vectors of red work on global memory, not on {KIND_NAMES[where]} memory")
        if not view.flags.writeable:
            raise OutOfBounds(f"an atomic operation on read-only {KIND_NAMES[where]} memory")
        n = fragment.n
        machine.atomic[where] += dtype.itemsize * count * n
        machine.scheduler.progress += 1
        if machine.observer is not None:
            machine.observer.access(fragment, instruction, where, view, index, count, "atomic")
        index = _spread(index, n)
        for i, value in enumerate(values):
            apply_atomic(view, index + i, _spread(value, n), combine, False)

    def run(values: list, fragment: Fragment) -> None:
        arguments = [read(fragment) for read in readers]
        try:
            perform(fragment, resolve(fragment), arguments)
        except Scattered as scattered:
            for positions, found in scattered.parts:
                part = fragment.subset(positions, fragment.block)
                perform(part, found, [a if a.size == 1 else a[positions] for a in arguments])

    return Step(run=run)


def _is_read(instance: Any, instruction: Instruction, register: int) -> bool:
    """Whether a register is read after an instruction defined it; True in doubt."""
    bit = 1 << register
    for block in instance.blocks:
        if any(i is instruction for i in block.instructions):
            # In the same block a read after the write does not show in `uses`: look at the text.
            return any(successor.live_in & bit for successor in block.successors) or _mentioned(
                instance, block, instruction, register
            )
    return True


def _mentioned(instance: Any, block: Any, instruction: Instruction, register: int) -> bool:
    name = next(name for name, number in instance.registers.items() if number == register)
    start = next(i for i, other in enumerate(block.instructions) if other is instruction) + 1
    later = [*block.instructions[start:], block.end_instruction]
    return any(i is not None and name in f"{i.operands} {i.guard}" for i in later)


HANDLERS = {"atom": _atomic, "red": _atomic}

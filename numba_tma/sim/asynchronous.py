"""Asynchronous copies: from instructions and lanes to calls of the copy engine.

Source: PTX ISA, "Asynchronous copy": cp.async, cp.async.bulk, cp.reduce.async.bulk, cp.async.bulk.tensor and their
groups; "tensormap.replace"; "createpolicy".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from . import descriptor
from .aligned import WARP, Groups, together, uniform
from .decode import DTYPES
from .errors import Misaligned, OutOfBounds, SimError, UnknownInstruction
from .fragment import Fragment
from .loadstore import space_of
from .memory import CLUSTER_RANK_SHIFT, SHARED_WINDOW, WINDOW_SIZE
from .module import Immediate, Instruction, Register, TensorOperand
from .program import BOOL, S32, S64, U32, U64, Block, Builder, Step
from .scheduler import Wait

if TYPE_CHECKING:
    from .machine import Machine

_OFFSET = (1 << CLUSTER_RANK_SHIFT) - 1
_REDUCTIONS = frozenset(("add", "min", "max", "inc", "dec", "and", "or", "xor"))


def _threads(machine: Machine, fragment: Fragment) -> np.ndarray:
    """The engine's numbers of a fragment's threads."""
    return fragment.slot * machine.threads + fragment.thread


def _address(d: Builder, operand: Any, generic: bool = False) -> Callable[[Fragment], np.ndarray]:
    """A function that gives each lane's address (int64, one element or one a lane)."""
    register, offset, _ = d.address(operand, "generic" if generic else "shared")

    def read(fragment: Fragment) -> np.ndarray:
        value = np.atleast_1d(fragment.get(register))
        address = value.view(S64) if value.dtype.itemsize == 8 else value.view(U32).astype(np.int64)
        return address + offset

    return read


def _shared_place(machine: Machine, address: int, slot: int) -> tuple[int, int]:
    """(slot, offset) of a shared::cta or shared::cluster address as a thread of `slot` sees it."""
    if address >> 32 == SHARED_WINDOW >> 32:
        address &= WINDOW_SIZE - 1
    rank, offset = address >> CLUSTER_RANK_SHIFT, address & _OFFSET
    if machine.cluster_size == 1:
        if rank:
            raise OutOfBounds(
                f"shared address {address:#x} is beyond the block's shared memory, and there is no cluster"
            )
        return slot, offset
    if not 0 <= rank < machine.cluster_size:
        raise OutOfBounds(f"shared address {address:#x} names rank {rank} of a cluster of {machine.cluster_size}")
    return slot // machine.cluster_size * machine.cluster_size + rank, offset


def _own_place(machine: Machine, address: int, slot: int) -> int:
    """The offset of an address that must lie in the thread's own block."""
    target, offset = _shared_place(machine, address, slot)
    if target != slot:
        raise OutOfBounds(f"shared address {address:#x} lies in another block of the cluster; this operand may not")
    return offset


def _each_lane(d: Builder, instruction: Instruction, action: Callable[..., None], *readers: Any) -> Step:
    """A step that calls `action(machine, thread, slot, *values)` for each lane, values as Python ints."""
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        n = fragment.n
        columns = [np.broadcast_to(read(fragment), (n,)).tolist() for read in readers]
        if machine.observer is not None:
            machine.observer.copy_issued(fragment, instruction)
        for thread, slot, *row in zip(
            _threads(machine, fragment).tolist(), fragment.slot.tolist(), *columns, strict=True
        ):
            action(machine, thread, slot, *row)
        machine.scheduler.progress += 1

    return Step(run=run)


def _multicast(instruction: Instruction, rest: list) -> Any:
    """The multicast mask operand, taken off `rest`, or None."""
    return rest.pop(0) if "multicast::cluster" in instruction.modifiers else None


def _targets(machine: Machine, slot: int, own_target: int, mask: int | None) -> tuple[int, ...]:
    if mask is None:
        return (own_target,)
    if mask >> machine.cluster_size:
        raise SimError(f"multicast mask {mask:#x} names blocks beyond the cluster's {machine.cluster_size}")
    first = slot // machine.cluster_size * machine.cluster_size
    return tuple(first + rank for rank in range(machine.cluster_size) if mask >> rank & 1)


def _load_place(machine: Machine, slot: int, dst: int, bar: int, mask: int | None) -> tuple[tuple[int, ...], int, int]:
    """(target slots, destination offset, barrier offset) of a copy into shared::cluster memory."""
    target, dst = _shared_place(machine, dst, slot)
    bar_target, bar = _shared_place(machine, bar, slot)
    if bar_target != target:
        raise SimError("the mbarrier of a copy must be in the same block's shared memory as its destination")
    return _targets(machine, slot, target, mask), dst, bar


# cp.async.bulk


def _bulk(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    if "commit_group" in modifiers:
        return _commit(d, lambda engine: engine.bulk_commit_group)
    if "wait_group" in modifiers:
        read = "read" in modifiers
        what = "the reads of its bulk groups" if read else "its bulk groups"
        pending = instruction.operands[0].value
        return _wait_groups(d, lambda engine, threads: engine.bulk_wait_ready(threads, pending, read), what, pending)
    if "tensor" in modifiers:
        return _tensor(d, instruction)
    operands = list(instruction.operands)
    if "prefetch" in modifiers:
        source, size = operands[:2]
        return _each_lane(
            d,
            instruction,
            lambda machine, thread, slot, src, nbytes: machine.engine.issue_bulk_prefetch(
                thread, src, nbytes, origin=instruction
            ),
            _address(d, source, generic=True),
            d.reader(size, U32),
        )
    reduction = None
    if instruction.opcode == "cp" and "reduce" in modifiers:
        reduction = (next(m for m in modifiers if m in _REDUCTIONS), modifiers[-1])
    spaces = [m for m in modifiers if m in ("shared::cluster", "shared::cta", "global")]
    destination, source, size, *rest = operands
    nbytes = d.reader(size, U32)
    if spaces[0] == "global":
        return _bulk_to_global(d, instruction, reduction, destination, source, nbytes)
    bar = _address(d, rest.pop(0))
    dst = _address(d, destination)
    if spaces[1] == "global":
        mask = _multicast(instruction, rest)

        def load(machine: Machine, thread: int, slot: int, dst: int, src: int, size: int, bar: int, *mask: int) -> None:
            targets, dst, bar = _load_place(machine, slot, dst, bar, mask[0] if mask else None)
            machine.engine.issue_bulk_load(thread, dst, src, size, bar, targets=targets, origin=instruction)

        masks = [] if mask is None else [d.reader(mask, U32)]
        return _each_lane(d, instruction, load, dst, _address(d, source, generic=True), nbytes, bar, *masks)

    def to_cluster(machine: Machine, thread: int, slot: int, dst: int, src: int, size: int, bar: int) -> None:
        (target,), dst, bar = _load_place(machine, slot, dst, bar, None)
        operation, kind = reduction or (None, None)
        machine.engine.issue_bulk_to_cluster(
            thread,
            target,
            dst,
            _own_place(machine, src, slot),
            size,
            bar,
            operation,
            kind,
            origin=instruction,
        )

    return _each_lane(d, instruction, to_cluster, dst, _address(d, source), nbytes, bar)


def _bulk_to_global(
    d: Builder, instruction: Instruction, reduction: Any, destination: Any, source: Any, nbytes: Any
) -> Step:
    if "cp_mask" in instruction.modifiers:
        raise UnknownInstruction("the simulator does not know byte masks of bulk copies", instruction)

    def store(machine: Machine, thread: int, slot: int, dst: int, src: int, size: int) -> None:
        src = _own_place(machine, src, slot)
        if reduction is None:
            machine.engine.issue_bulk_store(thread, dst, src, size, origin=instruction)
        else:
            machine.engine.issue_bulk_reduce(thread, dst, src, size, *reduction, origin=instruction)

    return _each_lane(d, instruction, store, _address(d, destination, generic=True), _address(d, source), nbytes)


# cp.async.bulk.tensor


def _tensor(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    im2col = "im2col" in modifiers and "prefetch" not in modifiers
    if not im2col and any(m.startswith(("im2col", "tile::")) for m in modifiers):
        raise UnknownInstruction(
            "the simulator knows tensor copies in tile mode, and loads in im2col mode", instruction
        )
    operands = list(instruction.operands)
    position = next(i for i, operand in enumerate(operands) if isinstance(operand, TensorOperand))
    tensor_operand = operands.pop(position)
    map_address = _address(d, tensor_operand.address, generic=True)
    coordinates = [d.reader(element, S32) for element in tensor_operand.coordinates.elements]
    rank = next(int(m[0]) for m in modifiers if re.fullmatch("[1-5]d", m))
    if len(coordinates) != rank:
        raise SimError(f"{len(coordinates)} coordinates for a copy of rank {rank}")
    readers = [map_address, *coordinates]

    def tensor_map(machine: Machine, thread: int, slot: int, address: int) -> bytes:
        if address % descriptor.ALIGNMENT:
            raise Misaligned(f"tensor map at {address:#x}: its address must be a multiple of {descriptor.ALIGNMENT}")
        if machine.observer is not None:
            machine.observer.tensor_map_used(thread, address, instruction)
        index = thread - slot * machine.threads
        return machine.read_generic(address, descriptor.NBYTES, slot, index, "tensor map").tobytes()

    if "prefetch" in modifiers:

        def prefetch(machine: Machine, thread: int, slot: int, address: int, *coords: int) -> None:
            data = tensor_map(machine, thread, slot, address)
            machine.engine.issue_tensor_prefetch(thread, data, coords, origin=instruction)

        return _each_lane(d, instruction, prefetch, *readers)
    if position == 0:
        operation = next((m for m in modifiers if m in _REDUCTIONS), None) if "reduce" in modifiers else None
        source = _address(d, operands.pop(0))

        def store(machine: Machine, thread: int, slot: int, src: int, address: int, *coords: int) -> None:
            data = tensor_map(machine, thread, slot, address)
            src = _own_place(machine, src, slot)
            if operation is None:
                machine.engine.issue_tensor_store(thread, data, coords, src, origin=instruction)
            else:
                machine.engine.issue_tensor_reduce(thread, data, coords, src, operation, origin=instruction)

        return _each_lane(d, instruction, store, source, *readers)
    destination, bar, *rest = operands
    moved = [d.reader(element, DTYPES["u16"]) for element in rest.pop(0).elements] if im2col else []
    mask = _multicast(instruction, rest)
    masks = [] if mask is None else [d.reader(mask, U32)]

    def load(machine: Machine, thread: int, slot: int, dst: int, bar: int, *others: int) -> None:
        mask_value = others[0] if masks else None
        address, *coords = others[len(masks) :]
        targets, dst, bar = _load_place(machine, slot, dst, bar, mask_value)
        data = tensor_map(machine, thread, slot, address)
        if im2col:
            coords, offsets = coords[:rank], coords[rank:]
            machine.engine.issue_im2col_load(thread, data, coords, offsets, dst, bar, targets, origin=instruction)
        else:
            machine.engine.issue_tensor_load(thread, data, coords, dst, bar, targets=targets, origin=instruction)

    return _each_lane(d, instruction, load, _address(d, destination), _address(d, bar), *masks, *readers, *moved)


# cp.async and groups


def _commit(d: Builder, method: Callable[[Any], Callable[[np.ndarray], None]]) -> Step:
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        method(machine.engine)(_threads(machine, fragment))

    return Step(run=run)


def _wait_groups(d: Builder, ready: Callable[[Any, np.ndarray], np.ndarray], what: str, pending: int | None) -> Step:
    machine = d.machine
    allowed = "" if not pending else f" but {pending}"

    def test(fragment: Fragment, data: tuple) -> np.ndarray:
        return ready(machine.engine, _threads(machine, fragment))

    def describe(fragment: Fragment, data: tuple) -> list[str]:
        return [f"waits for {what}, all{allowed}"] * fragment.n

    def finish(fragment: Fragment, passed: bool) -> None:
        if machine.observer is not None:
            machine.observer.groups_waited(fragment, what, pending)

    def end(fragment: Fragment, block: Block) -> Block | None:
        if test(fragment, ()).all():
            finish(fragment, True)
            return block.next
        fragment.block = block
        machine.scheduler.park(Wait(fragment, test, (), describe, finish))
        return None

    return Step(end=end, alone=True)


def _cp_async(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    operands = list(instruction.operands)
    machine = d.machine
    if "commit_group" in modifiers:
        return _commit(d, lambda engine: engine.cp_async_commit_group)
    if "wait_group" in modifiers:
        pending = operands[0].value
        return _wait_groups(
            d,
            lambda engine, threads: engine.cp_async_wait_ready(threads, pending),
            "its cp.async groups",
            pending,
        )
    if "wait_all" in modifiers:
        return _wait_groups(
            d, lambda engine, threads: engine.cp_async_wait_ready(threads, None), "its cp.async copies", None
        )
    if "mbarrier" in modifiers:
        return _cp_async_arrive(d, instruction)
    destination, source, size, *rest = operands
    dst, src = _address(d, destination), _address(d, source, generic=True)
    if not isinstance(size, Immediate):
        raise SimError("the size of cp.async must be a constant")
    if "L2::cache_hint" in modifiers:
        rest = rest[:-1]
    ignore = source_size = None
    if rest:
        if isinstance(rest[0], Register) and rest[0].type == "pred":
            ignore = d.reader(rest[0], BOOL)
        else:
            source_size = d.reader(rest[0], U32)

    def run(values: list, fragment: Fragment) -> None:
        n = fragment.n
        threads = _threads(machine, fragment)
        offsets = np.broadcast_to(dst(fragment), (n,)) & (WINDOW_SIZE - 1)
        if machine.cluster_size > 1:
            offsets = offsets & _OFFSET
        addresses = np.broadcast_to(src(fragment), (n,)).astype(np.uint64)
        sizes = None
        if source_size is not None:
            sizes = np.broadcast_to(source_size(fragment), (n,)).astype(np.int64)
        elif ignore is not None:
            sizes = np.where(np.broadcast_to(ignore(fragment), (n,)), 0, size.value)
        if machine.observer is not None:
            machine.observer.copy_issued(fragment, instruction)
        machine.engine.issue_cp_async(threads, offsets, addresses, size.value, sizes, origin=instruction)
        machine.scheduler.progress += 1

    return Step(run=run)


def _cp_async_arrive(d: Builder, instruction: Instruction) -> Step:
    bar = _address(d, instruction.operands[0])
    noinc = "noinc" in instruction.modifiers
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        bars = np.broadcast_to(bar(fragment), (fragment.n,)) & _OFFSET
        machine.engine.cp_async_mbarrier_arrive(_threads(machine, fragment), bars, noinc, origin=instruction)
        machine.scheduler.events += 1

    return Step(run=run)


def _cp(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    if "bulk" in modifiers:
        return _bulk(d, instruction)
    if modifiers[:1] == ("async",):
        return _cp_async(d, instruction)
    raise UnknownInstruction("the simulator does not know this copy", instruction)


# Tensor maps and cache policies


def _tensormap(d: Builder, instruction: Instruction) -> Step:
    modifiers = instruction.modifiers
    if modifiers[0] == "cp_fenceproxy":
        return _copy_tensormap(d, instruction)
    if modifiers[0] != "replace":
        raise UnknownInstruction("the simulator does not know this operation on tensor maps", instruction)
    field = modifiers[2]
    shared = space_of(instruction) == "shared"
    target, *rest = instruction.operands
    ordinal = rest.pop(0).value if len(rest) > 1 else None
    value = d.reader(rest[0], U64 if modifiers[-1] == "b64" else U32)

    def replace(machine: Machine, thread: int, slot: int, address: int, value: int) -> None:
        place = _tensormap_place(machine, address, slot, thread, shared)
        if machine.observer is not None:
            if shared:
                machine.observer.tensor_map_in_shared(thread, address & _OFFSET, "write", instruction)
            else:
                machine.observer.tensor_map_changed(thread, address, instruction)
        place[:] = np.frombuffer(descriptor.replace(place.tobytes(), field, ordinal, value), np.uint8)

    return _each_lane(d, instruction, replace, _address(d, target, generic=not shared), value)


def _tensormap_place(machine: Machine, address: int, slot: int, thread: int, shared: bool) -> np.ndarray:
    if shared:
        start = _own_place(machine, address, slot)
        return machine.shared[slot, start : start + descriptor.NBYTES]
    index = thread - slot * machine.threads
    return machine.read_generic(address, descriptor.NBYTES, slot, index, "tensor map")


def _copy_tensormap(d: Builder, instruction: Instruction) -> Step:
    """A warp copies a map, once."""
    destination, source, size = instruction.operands
    to, at = _address(d, destination, generic=True), _address(d, source)
    machine = d.machine

    def compute(fragment: Fragment, warps: Groups) -> None:
        if size.value != descriptor.NBYTES:
            raise SimError(f"tensormap.cp_fenceproxy copies {descriptor.NBYTES} bytes, not {size.value}")
        addresses = [uniform(read(fragment), warps, WARP, "an address of the map").tolist() for read in (to, at)]
        if machine.observer is not None:
            machine.observer.copy_issued(fragment, instruction)
        for slot, first, dst, src in zip(warps.slots.tolist(), warps.first.tolist(), *addresses, strict=True):
            thread = slot * machine.threads + first
            data = _tensormap_place(machine, src, slot, thread, True)
            if machine.observer is not None:
                machine.observer.tensor_map_in_shared(thread, src & _OFFSET, "read", instruction)
                machine.observer.tensor_map_changed(thread, dst, instruction)
            _tensormap_place(machine, dst, slot, thread, False)[:] = data
        machine.scheduler.progress += 1

    return together(d, WARP, compute)


def _createpolicy(d: Builder, instruction: Instruction) -> Step:
    """A cache policy changes no result: any value does."""
    write = d.writer(instruction.operands[0], U64)
    value = np.zeros(1, np.uint64)

    def run(values: list, fragment: Fragment) -> None:
        write(fragment, value)

    return Step(run=run)


HANDLERS = {"cp": _cp, "tensormap": _tensormap, "createpolicy": _createpolicy}

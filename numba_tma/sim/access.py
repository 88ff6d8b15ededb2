"""From an instruction's addresses to elements of a NumPy array, with bounds and alignment checked.

A `Resolver` belongs to one instruction. Calling it with a fragment gives ``(view, index, kind)``: the element
``view[index]`` is what each lane accesses (all lanes alike, when `index` has one element), and `kind` says which
memory that is. The segment found last time is tried first: three NumPy operations check all lanes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import Misaligned, OutOfBounds, SimError
from .memory import (
    CLUSTER_RANK_SHIFT,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_BASE,
    SHARED_WINDOW,
    WINDOW_SIZE,
    Segment,
)

if TYPE_CHECKING:
    from .fragment import Fragment
    from .machine import Machine

GLOBAL, SHARED, LOCAL, PARAM, CONST = range(5)
KIND_NAMES = ("global", "shared", "local", "param", "const")
_U64 = np.dtype(np.uint64)
_I64 = np.dtype(np.int64)
_OFFSET_MASK = np.int64((1 << CLUSTER_RANK_SHIFT) - 1)

Resolved = tuple[np.ndarray, np.ndarray, int]


class Scattered(Exception):
    """The lanes of one access touch different memories: `parts` are (positions, (view, index, kind))."""

    def __init__(self, parts: list[tuple[np.ndarray, Resolved]]) -> None:
        super().__init__()
        self.parts = parts


def shared_base(machine: Machine, fragment: Fragment) -> np.ndarray:
    """Byte offset of each lane's block in the flat shared memory; one element when there is one block."""
    root = fragment.root
    table = root.cache.get("shared_base")
    if table is None:
        table = root.slot * machine.shared_stride
        if machine.slots == 1:
            table = table[:1]
        root.cache["shared_base"] = table
    return table if table.size == 1 else fragment.per_lane("shared_base", table)


def shared_index(machine: Machine, fragment: Fragment, address: np.ndarray, nbytes: int, align: int) -> np.ndarray:
    """Flat byte offsets for shared::cta or shared::cluster addresses (int64), checked.

    `address` has one element or one for each lane. The bits above the block's 16 MiB name the rank of the block
    in the cluster.
    """
    rank = address >> CLUSTER_RANK_SHIFT
    offset = address & _OFFSET_MASK
    size = machine.shared_end - SHARED_BASE
    bad = ((offset - SHARED_BASE).view(_U64) > np.uint64(max(size - nbytes, 0))) if size >= nbytes else offset >= 0
    if machine.cluster_size == 1:
        bad |= rank != 0
        base = shared_base(machine, fragment)
    else:
        bad |= (rank < 0) | (rank >= machine.cluster_size)
        first = fragment.slot // machine.cluster_size * machine.cluster_size
        base = (first + np.where(bad, 0, rank)) * machine.shared_stride
    if bad.any():
        raise _out_of_bounds_shared(machine, fragment, address, bad, nbytes)
    if align > 1 and (offset & (align - 1)).any():
        raise _misaligned(machine, fragment, address, offset, align, "shared")
    return base + offset


def _who(machine: Machine, fragment: Fragment, bad: np.ndarray) -> tuple[int, str]:
    position = int(np.argmax(bad)) if bad.size == fragment.n else 0
    count = int(np.count_nonzero(bad)) if bad.size == fragment.n else fragment.n
    others = f" (and {count - 1} other lanes)" if count > 1 else ""
    return position, f"{machine.lane_name(fragment, position)}{others}"


def _out_of_bounds_shared(
    machine: Machine, fragment: Fragment, address: np.ndarray, bad: np.ndarray, nbytes: int
) -> SimError:
    position, who = _who(machine, fragment, np.atleast_1d(bad))
    value = int(address.flat[position if address.size > 1 else 0])
    if value >> CLUSTER_RANK_SHIFT and machine.cluster_size == 1:
        return OutOfBounds(
            f"{nbytes} bytes at shared address {value:#x}: not in shared memory, which ends at "
            f"{machine.shared_end:#x}; there is no cluster, so no other block's shared memory either; {who}"
        )
    return OutOfBounds(
        f"{nbytes} bytes at shared address {value:#x}: outside [{SHARED_BASE:#x}, {machine.shared_end:#x}), the "
        f"block's {machine.shared_end - SHARED_BASE} bytes; {machine.nearest_shared(value)}; {who}"
    )


def _misaligned(
    machine: Machine, fragment: Fragment, address: np.ndarray, offset: np.ndarray, align: int, space: str
) -> SimError:
    bad = np.atleast_1d((offset & offset.dtype.type(align - 1)) != 0)
    position, who = _who(machine, fragment, bad)
    value = int(address.flat[position if address.size > 1 else 0])
    return Misaligned(f"{space} address {value:#x} is not a multiple of {align} bytes, as this access needs; {who}")


def make_resolver(
    machine: Machine, register: int, offset: int, dtype: np.dtype, count: int, space: str
) -> Callable[[Fragment], Resolved]:
    """A resolver for the address in `register` plus `offset`.

    `dtype` is the element; the access is `count` elements wide and aligned to its whole width. `space` is
    "generic", "global", "const", "shared", "local" or "param".
    """
    nbytes = dtype.itemsize * count
    if space == "shared":
        return _shared_resolver(machine, register, offset, dtype, nbytes)
    if space == "local":
        return _local_resolver(machine, register, offset, dtype, nbytes)
    if space == "param":
        offset += PARAM_WINDOW
    return _generic_resolver(machine, register, offset, dtype, nbytes)


def _shared_resolver(machine: Machine, register: int, offset: int, dtype: np.dtype, nbytes: int) -> Any:
    shift = dtype.itemsize.bit_length() - 1
    view = machine.shared_view(dtype)
    low = np.int64(SHARED_BASE)
    span = machine.shared_end - SHARED_BASE - nbytes
    mask = nbytes - 1
    shifted = ("shared_base", shift)
    plain = machine.cluster_size == 1

    def resolve(fragment: Fragment) -> Resolved:
        address = fragment.values[register]
        if address is None:
            address = fragment.load(register)
        address = address.view(_I64) if address.dtype.itemsize == 8 else address.view(np.uint32).astype(_I64)
        if offset:
            address = address + offset
        if address.ndim == 0:
            address = address.reshape(1)
        if plain and span >= 0:
            if address.size == 1:
                value = int(address[0])
                good = SHARED_BASE <= value <= SHARED_BASE + span and not value & mask
            else:
                good = int(np.maximum.reduce((address - low).view(_U64))) <= span and not (
                    mask and int(np.bitwise_or.reduce(address)) & mask
                )
            if good:
                if machine.slots == 1:
                    return view, address >> shift if shift else address, SHARED
                root = fragment.root
                table = root.cache.get(shifted)
                if table is None:
                    table = root.cache[shifted] = root.slot * (machine.shared_stride >> shift)
                base = fragment.per_lane(shifted, table)
                return view, (address >> shift) + base if shift else address + base, SHARED
        return view, shared_index(machine, fragment, address, nbytes, nbytes) >> shift, SHARED

    return resolve


def _local_resolver(machine: Machine, register: int, offset: int, dtype: np.dtype, nbytes: int) -> Any:
    def resolve(fragment: Fragment) -> Resolved:
        address = fragment.get(register)
        address = address.view(_I64) if address.dtype.itemsize == 8 else address.view(np.uint32).astype(_I64)
        return local_access(machine, fragment, np.atleast_1d(address + offset), dtype, nbytes)

    return resolve


def local_access(machine: Machine, fragment: Fragment, address: np.ndarray, dtype: np.dtype, nbytes: int) -> Resolved:
    """Elements of each lane's local memory at byte offsets `address` (int64)."""
    size = machine.local_size
    bad = address.view(_U64) > np.uint64(max(size - nbytes, 0))
    if size < nbytes or bad.any():
        position, who = _who(machine, fragment, bad if size >= nbytes else np.ones(1, bool))
        value = int(address[position if address.size > 1 else 0])
        raise OutOfBounds(f"{nbytes} bytes at local address {value:#x}: a thread has {size} bytes; {who}")
    if nbytes > 1 and (address & (nbytes - 1)).any():
        raise _misaligned(machine, fragment, address, address, nbytes, "local")
    view = machine.local_view(dtype)
    base = fragment.root.cache.get("local_base")
    if base is None:
        root = fragment.root
        base = root.slot * machine.threads + root.thread
        root.cache["local_base"] = base
    base = fragment.per_lane("local_base", base)
    shift = dtype.itemsize.bit_length() - 1
    stride = machine.local_stride >> shift
    return view, base * stride + (address >> shift), LOCAL


def _generic_resolver(machine: Machine, register: int, offset: int, dtype: np.dtype, nbytes: int) -> Any:
    shift = dtype.itemsize.bit_length() - 1
    mask = nbytes - 1
    base: np.ndarray | None = None
    span = -1
    view = np.empty(0, dtype)
    kind = GLOBAL
    simple_shared = machine.cluster_size == 1

    def miss(fragment: Fragment, address: np.ndarray) -> Resolved:
        nonlocal base, span, view, kind
        address = np.atleast_1d(address + np.uint64(offset & ((1 << 64) - 1)))
        first = int(address[0])
        segment = machine.find(first)
        if segment is not None and segment.size >= nbytes:
            inside = address - np.uint64(segment.base)
            if int(inside.max()) <= segment.size - nbytes:
                if mask and int(np.bitwise_or.reduce(address)) & mask:
                    raise _misaligned(machine, fragment, address, address, nbytes, segment.kind)
                kind = KIND_NAMES.index(segment.kind)
                base = np.array((segment.base - offset) & ((1 << 64) - 1), np.uint64)
                span, view = segment.size - nbytes, segment.view(dtype)
                return view, (inside >> shift).view(_I64), kind
        return _by_window(machine, fragment, address, dtype, nbytes)

    def resolve(fragment: Fragment) -> Resolved:
        address = fragment.values[register]
        if address is None:
            address = fragment.load(register)
        if address.dtype is not _U64:
            address = address.view(_U64)
        if base is None:
            return miss(fragment, address)
        inside = address - base
        if inside.size == 1:
            inside = np.atleast_1d(inside)
            value = int(inside[0])
            if value > span or value & mask:
                return miss(fragment, address)
        elif int(np.maximum.reduce(inside)) > span or (mask and int(np.bitwise_or.reduce(inside)) & mask):
            return miss(fragment, address)
        return view, (inside >> shift).view(_I64) if shift else inside.view(_I64), kind

    def resolve_shared_first(fragment: Fragment) -> Resolved:
        # Generic accesses to shared memory keep to it mostly, and blocks differ in the base: a path of their own.
        address = fragment.get(register)
        if address.dtype is not _U64:
            address = address.view(_U64)
        inside = np.atleast_1d(address).view(_I64) + (offset - SHARED_WINDOW)
        if simple_shared and 0 <= int(inside[0]) < WINDOW_SIZE:
            good = int(np.maximum.reduce((inside - SHARED_BASE).view(_U64))) <= (
                machine.shared_end - SHARED_BASE - nbytes
            )
            if good and not (mask and int(np.bitwise_or.reduce(inside)) & mask):
                flat = shared_base(machine, fragment) + inside
                return machine.shared_view(dtype), flat >> shift if shift else flat, SHARED
        return resolve(fragment)

    state = {"resolve": resolve}

    def choose(fragment: Fragment) -> Resolved:
        result = state["resolve"](fragment)
        state["resolve"] = resolve_shared_first if result[2] == SHARED else resolve
        return result

    return choose


def _by_window(machine: Machine, fragment: Fragment, address: np.ndarray, dtype: np.dtype, nbytes: int) -> Resolved:
    """The general case: each lane's address may lie in any memory."""
    shift = dtype.itemsize.bit_length() - 1
    window = address >> np.uint64(32)
    if (window == np.uint64(SHARED_WINDOW >> 32)).all():
        flat = shared_index(machine, fragment, (address - np.uint64(SHARED_WINDOW)).view(_I64), nbytes, nbytes)
        return machine.shared_view(dtype), flat >> shift, SHARED
    if (window == np.uint64(LOCAL_WINDOW >> 32)).all():
        inside = (address - np.uint64(LOCAL_WINDOW)).view(_I64)
        return local_access(machine, fragment, inside, dtype, nbytes)
    if address.size == 1:
        raise _unmapped(machine, fragment, address, nbytes)
    # Lanes of one instruction in several segments or windows: sort them out, one part for each.
    parts = []
    left = np.ones(address.size, np.bool_)
    while left.any():
        first = int(address[int(np.argmax(left))])
        if first >> 32 in (SHARED_WINDOW >> 32, LOCAL_WINDOW >> 32):
            here = left & (window == np.uint64(first >> 32))
        else:
            segment = machine.find(first)
            if segment is None or first + nbytes > segment.base + segment.size:
                raise _unmapped(machine, fragment, address, nbytes)
            here = left & (address - np.uint64(segment.base) <= np.uint64(segment.size - nbytes))
        positions = np.nonzero(here)[0]
        if positions.size == address.size:
            raise SimError(f"address {first:#x} resolves to no memory")
        some = fragment.subset(positions, fragment.block)
        some_addresses = address[positions]
        if first >> 32 in (SHARED_WINDOW >> 32, LOCAL_WINDOW >> 32):
            found = _by_window(machine, some, some_addresses, dtype, nbytes)
        else:
            found = _in_segment(machine, some, segment, some_addresses, dtype, nbytes)
        parts.append((positions, found))
        left &= ~here
    raise Scattered(parts)


def _in_segment(
    machine: Machine, fragment: Fragment, segment: Segment, address: np.ndarray, dtype: np.dtype, nbytes: int
) -> Resolved:
    if nbytes > 1 and int(np.bitwise_or.reduce(address)) & (nbytes - 1):
        raise _misaligned(machine, fragment, address, address, nbytes, segment.kind)
    index = (address - np.uint64(segment.base)).view(_I64) >> (dtype.itemsize.bit_length() - 1)
    return segment.view(dtype), index, KIND_NAMES.index(segment.kind)


def _unmapped(machine: Machine, fragment: Fragment, address: np.ndarray, nbytes: int) -> SimError:
    bad = np.array([not machine.is_mapped(int(a), nbytes) for a in address])
    position, who = _who(machine, fragment, bad)
    value = int(address[position if address.size > 1 else 0])
    segment = machine.find(value)
    if segment is not None:
        over = value + nbytes - segment.base - segment.size
        return OutOfBounds(f"{nbytes} bytes at address {value:#x} end {over} bytes past {segment.describe()}; {who}")
    return OutOfBounds(f"{nbytes} bytes at address {value:#x}: {machine.memory.nearest(value)}; {who}")

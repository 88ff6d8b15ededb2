"""Operations of a warp's lanes together: shfl, vote, match, redux, elect, activemask.

A fragment waits at such an instruction until the lanes that its member masks name, and that have not exited, are
there with it. Then values lie in a matrix with a row of 32 lanes for each warp.
Source: PTX ISA, "shfl.sync", "vote.sync", "match.sync", "activemask", "redux.sync", "elect.sync".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import UnknownInstruction
from .fragment import Fragment
from .module import Immediate, Instruction, PredicatePair
from .program import BOOL, S32, U32, Block, Builder, Reader, Step

if TYPE_CHECKING:
    from .machine import Machine

_LANE = np.arange(32)
_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)
_ALL = 0xFFFFFFFF


class Warps:
    """Where a fragment's lanes lie in a matrix of whole warps. `place` is None when they fill it."""

    def __init__(self, machine: Machine, fragment: Fragment) -> None:
        slot, thread = fragment.slot, fragment.thread
        warp = slot * machine.warps + (thread >> 5)
        new = np.concatenate(([True], warp[1:] != warp[:-1]))
        self.rows = int(np.count_nonzero(new))
        row = np.cumsum(new) - 1
        place = row * 32 + (thread & 31)
        self.slots = slot[new]
        self.warps = thread[new] >> 5
        self.place = None if fragment.n == 32 * self.rows else place
        self.row = row
        # Not by `matrix`, to which one value stands for all lanes: a lone lane is not a whole warp.
        self.lanes_present = np.zeros((self.rows, 32), np.bool_)
        self.lanes_present.reshape(-1)[place] = True
        self.present = pack(self.lanes_present)

    def matrix(self, values: np.ndarray) -> np.ndarray:
        """(rows, 32) from one value for each lane (or one for all)."""
        if values.size == 1 and self.rows * 32 != 1:
            return np.broadcast_to(values, (self.rows, 32))
        if self.place is None:
            return values.reshape(self.rows, 32)
        full = np.zeros(self.rows * 32, values.dtype)
        full[self.place] = values
        return full.reshape(self.rows, 32)

    def lanes(self, matrix: np.ndarray) -> np.ndarray:
        """One value for each lane from (rows, 32)."""
        flat = np.ascontiguousarray(matrix).reshape(-1)
        return flat if self.place is None else flat.take(self.place)

    def spread(self, per_row: np.ndarray) -> np.ndarray:
        """One value for each lane from one for each row."""
        return per_row.take(self.row)


def pack(matrix: np.ndarray) -> np.ndarray:
    """uint32 for each row of truth values."""
    return np.packbits(matrix, axis=1, bitorder="little").view(np.uint32).reshape(-1)


def warps_of(machine: Machine, fragment: Fragment) -> Warps:
    """The fragment's warps, computed once."""
    found = fragment.cache.get("matrix")
    if found is None:
        found = fragment.cache["matrix"] = Warps(machine, fragment)
    return found


def _missing(machine: Machine, warps: Warps, mask: np.ndarray) -> np.ndarray:
    """For each row, whether lanes that its masks name are elsewhere."""
    live = pack(machine.live_lanes.reshape(machine.slots, machine.warps, 32)[warps.slots, warps.warps])
    named = mask if mask.size == 1 else np.bitwise_or.reduce(warps.matrix(mask), axis=1)
    return (named & live & ~warps.present) != 0


def _together(d: Builder, mask: Reader, compute: Callable[[Fragment, Warps], None]) -> Step:
    """A step that waits for the warps to be complete and then computes."""
    machine = d.machine

    def end(fragment: Fragment, block: Block) -> Block | None:
        warps = warps_of(machine, fragment)
        scheduler = machine.scheduler
        if fragment.n != scheduler.live:
            missing = _missing(machine, warps, mask(fragment))
            if missing.any():
                fragment.block = block
                if missing.all():
                    scheduler.gather(fragment)
                else:
                    absent = warps.spread(missing)
                    fragment.flush(scheduler.live_registers(block, fragment.stack))
                    scheduler.gather(fragment.subset(np.nonzero(absent)[0], block))
                    scheduler.add(fragment.subset(np.nonzero(~absent)[0], block))
                return None
        compute(fragment, warps)
        return block.next

    return Step(end=end, alone=True)


def _shfl(d: Builder, instruction: Instruction) -> Step:
    mode = next(m for m in instruction.modifiers if m in ("up", "down", "bfly", "idx"))
    destination, source, lane, clamp, *rest = instruction.operands
    predicate = None
    if isinstance(destination, PredicatePair):
        destination, predicate = destination.first, destination.second
    mask = d.reader(rest[0] if rest else Immediate(_ALL, "int", _ALL), U32)
    read, read_lane, read_clamp = d.reader(source, U32), d.reader(lane, U32), d.reader(clamp, U32)
    write = d.writer(destination, U32)
    write_predicate = d.writer(predicate, BOOL) if predicate is not None else None

    def compute(fragment: Fragment, warps: Warps) -> None:
        values = warps.matrix(read(fragment))
        b = warps.matrix((read_lane(fragment) & 31).astype(np.int64))
        c = warps.matrix(read_clamp(fragment).astype(np.int64))
        segment, last = (c >> 8) & 31, c & 31
        highest = (_LANE & segment) | (last & ~segment)
        lowest = _LANE & segment
        if mode == "up":
            chosen = _LANE - b
            valid = chosen >= highest
        elif mode == "down":
            chosen = _LANE + b
            valid = chosen <= highest
        elif mode == "bfly":
            chosen = _LANE ^ b
            valid = chosen <= highest
        else:
            chosen = lowest | (b & ~segment)
            valid = chosen <= highest
        chosen = np.where(valid, chosen, _LANE) & 31
        if write is not None:
            write(fragment, warps.lanes(np.take_along_axis(values, chosen, axis=1)))
        if write_predicate is not None:
            write_predicate(fragment, warps.lanes(valid))

    return _together(d, mask, compute)


def _vote(d: Builder, instruction: Instruction) -> Step:
    mode = next((m for m in instruction.modifiers if m in ("all", "any", "uni", "ballot")), None)
    if mode is None:
        raise UnknownInstruction("the simulator does not know this vote", instruction)
    destination, source, *rest = instruction.operands
    mask = d.reader(rest[0] if rest else Immediate(_ALL, "int", _ALL), U32)
    read = d.reader(source, BOOL)
    write = d.writer(destination, U32 if mode == "ballot" else BOOL)

    def compute(fragment: Fragment, warps: Warps) -> None:
        members = _members(warps, mask(fragment))
        votes = pack(np.ascontiguousarray(warps.matrix(read(fragment)))) & members
        if mode == "ballot":
            result = votes
        elif mode == "any":
            result = votes != 0
        elif mode == "all":
            result = votes == members
        else:
            result = (votes == members) | (votes == 0)
        if write is not None:
            write(fragment, warps.spread(result))

    return _together(d, mask, compute)


def _members(warps: Warps, mask: np.ndarray) -> np.ndarray:
    """For each row the lanes that take part: named by the mask and there."""
    if mask.size == 1:
        return warps.present & mask
    first = warps.matrix(mask)[np.arange(warps.rows), np.argmax(warps.lanes_present, axis=1)]
    return warps.present & first


def _match(d: Builder, instruction: Instruction) -> Step:
    everyone = "all" in instruction.modifiers
    dtype = np.dtype(np.uint64 if "b64" in instruction.modifiers else np.uint32)
    destination, source, member = instruction.operands
    predicate = None
    if isinstance(destination, PredicatePair):
        destination, predicate = destination.first, destination.second
    mask, read = d.reader(member, U32), d.reader(source, dtype)
    write = d.writer(destination, U32)
    write_predicate = d.writer(predicate, BOOL) if predicate is not None else None

    def compute(fragment: Fragment, warps: Warps) -> None:
        members = _members(warps, mask(fragment))
        values = warps.matrix(read(fragment))
        takes_part = (members[:, None] & _BITS) != 0
        equal = (values[:, :, None] == values[:, None, :]) & takes_part[:, None, :]
        sets = (equal * _BITS.astype(np.uint64)).sum(axis=2).astype(np.uint32)
        if everyone:
            alike = sets == members[:, None]
            if write_predicate is not None:
                write_predicate(fragment, warps.lanes(alike))
            sets = np.where(alike, sets, np.uint32(0))
        if write is not None:
            write(fragment, warps.lanes(sets))

    return _together(d, mask, compute)


_REDUCTIONS: dict[str, tuple[Any, int]] = {
    "add": (np.add, 0),
    "min": (np.minimum, 0),
    "max": (np.maximum, 0),
    "and": (np.bitwise_and, -1),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
}


def _redux(d: Builder, instruction: Instruction) -> Step:
    operation = next((m for m in instruction.modifiers if m in _REDUCTIONS), None)
    kind = instruction.modifiers[-1]
    if operation is None or kind not in ("u32", "s32", "b32"):
        raise UnknownInstruction("the simulator does not know this reduction", instruction)
    dtype = S32 if kind == "s32" else U32
    destination, source, member = instruction.operands
    mask, read, write = d.reader(member, U32), d.reader(source, dtype), d.writer(destination, dtype)
    function, neutral = _REDUCTIONS[operation]
    if operation in ("min", "max"):
        info = np.iinfo(dtype)
        neutral = info.max if operation == "min" else info.min
    fill = np.array(neutral & _ALL, np.uint32).view(dtype) if neutral < 0 and dtype is U32 else dtype.type(neutral)

    def compute(fragment: Fragment, warps: Warps) -> None:
        takes_part = (_members(warps, mask(fragment))[:, None] & _BITS) != 0
        values = np.where(takes_part, warps.matrix(read(fragment)), fill)
        if write is not None:
            write(fragment, warps.spread(function.reduce(values, axis=1, dtype=dtype)))

    return _together(d, mask, compute)


def _elect(d: Builder, instruction: Instruction) -> Step:
    destination, member = instruction.operands
    first, second = destination.first, destination.second
    mask = d.reader(member, U32)
    write, write_predicate = d.writer(first, U32), d.writer(second, BOOL)

    def compute(fragment: Fragment, warps: Warps) -> None:
        takes_part = (_members(warps, mask(fragment))[:, None] & _BITS) != 0
        leader = np.argmax(takes_part, axis=1)
        if write is not None:
            write(fragment, warps.spread(leader.astype(np.uint32)))
        if write_predicate is not None:
            write_predicate(fragment, warps.lanes(leader[:, None] == _LANE))

    return _together(d, mask, compute)


def _activemask(d: Builder, instruction: Instruction) -> Step:
    write = d.writer(instruction.operands[0], U32)
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        warps = warps_of(machine, fragment)
        if write is not None:
            write(fragment, warps.spread(warps.present))

    return Step(run=run)


HANDLERS = {
    "shfl": _shfl,
    "vote": _vote,
    "match": _match,
    "redux": _redux,
    "elect": _elect,
    "activemask": _activemask,
}

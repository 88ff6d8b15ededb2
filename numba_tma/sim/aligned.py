"""Instructions that whole warps or warpgroups execute together (`.aligned`).

A fragment waits at such an instruction until each of its warps (or warpgroups) is there with all of its lanes. Then
lanes lie one after another, 32 (or 128) for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .errors import SimError
from .fragment import Fragment
from .program import Block, Builder, Step

if TYPE_CHECKING:
    from .machine import Machine

WARP, WARPGROUP = 32, 128
_NAMES = {WARP: "warp", WARPGROUP: "warpgroup"}


class Groups:
    """The warps or warpgroups that a fragment's lanes belong to.

    `slots` is each one's block among the resident ones, `first` its first thread, `present` how many of its lanes
    are in the fragment; `count` how many there are, `row` each lane's among them.
    """

    def __init__(self, fragment: Fragment, size: int) -> None:
        slot, thread = fragment.slot, fragment.thread
        new = np.ones(fragment.n, np.bool_)
        new[1:] = (slot[1:] != slot[:-1]) | (thread[1:] // size != thread[:-1] // size)
        begins = np.nonzero(new)[0]
        self.count = begins.size
        self.slots = slot[begins]
        self.first = thread[begins] // size * size
        self.present = np.diff(np.append(begins, fragment.n))
        self.row = np.cumsum(new) - 1
        self.whole = bool((self.present == size).all())


def groups_of(fragment: Fragment, size: int) -> Groups:
    """The fragment's warps or warpgroups, found once."""
    key = ("groups", size)
    found = fragment.cache.get(key)
    if found is None:
        found = fragment.cache[key] = Groups(fragment, size)
    return found


def _elsewhere(machine: Machine, fragment: Fragment, groups: Groups, size: int) -> np.ndarray:
    """For each group, whether lanes of it are still to come. Raises SimError where some never will."""
    live = np.array(
        [
            np.count_nonzero(machine.live_lanes[slot, first : first + size])
            for slot, first in zip(groups.slots.tolist(), groups.first.tolist(), strict=True)
        ]
    )
    broken = (groups.present == live) & (live < size)
    if broken.any():
        i = int(np.argmax(broken))
        name = _NAMES[size]
        raise SimError(
            f"all {size} threads of a {name} execute this together, and {name} {groups.first[i] // size} of block "
            f"{machine.block_name(int(groups.slots[i]))} has only {live[i]}: the others have exited or were never there"
        )
    return groups.present < live


def together(d: Builder, size: int, compute: Callable[[Fragment, Groups], None]) -> Step:
    """A step that waits for the warps or warpgroups to be complete and then computes."""
    machine = d.machine

    def end(fragment: Fragment, block: Block) -> Block | None:
        groups = groups_of(fragment, size)
        if not groups.whole:
            missing = _elsewhere(machine, fragment, groups, size)
            scheduler = machine.scheduler
            fragment.block = block
            if missing.all():
                scheduler.gather(fragment)
            else:
                absent = missing.take(groups.row)
                fragment.flush(scheduler.live_registers(block, fragment.stack))
                scheduler.gather(fragment.subset(np.nonzero(absent)[0], block))
                scheduler.add(fragment.subset(np.nonzero(~absent)[0], block))
            return None
        compute(fragment, groups)
        return block.next

    return Step(end=end, alone=True)


def uniform(values: np.ndarray, groups: Groups, size: int, what: str) -> np.ndarray:
    """One value for each group from one (or one for each lane), which must agree within the group."""
    if values.size == 1:
        return np.broadcast_to(values, (groups.count,))
    table = values.reshape(groups.count, size)
    if (table != table[:, :1]).any():
        raise SimError(f"{what} differs among the threads of a {_NAMES[size]}; all of them must give the same")
    return table[:, 0]


def stack(values: list[np.ndarray], lanes: int, dtype: np.dtype) -> np.ndarray:
    """What registers hold (one element, or one for each lane) as rows: (registers, lanes)."""
    rows = np.empty((len(values), lanes), dtype)
    for row, value in zip(rows, values, strict=True):
        row[:] = value if value.dtype is dtype else value.view(dtype)
    return rows


def stacked(fragment: Fragment, registers: list[int], dtype: np.dtype) -> np.ndarray:
    """Registers as rows: (registers, lanes)."""
    return stack([fragment.get(register) for register in registers], fragment.n, dtype)

"""Fragments: sets of lanes at one program counter, and the registers they hold.

A wave is all the threads of the blocks that are resident at once; a lane is one of them. Lanes of all blocks
and warps that are at the same instruction form one *fragment* and execute it by one NumPy operation.

Registers. The wave's root has one entry for each register: ``None`` (never written), an array of one element
(every lane has that value), a 0-d array (a constant) or an array with an element for each lane. A fragment that
covers the whole wave works on the root's entries themselves. A fragment of some lanes has its own entries, as
wide as it is, taken from the root when first read; what it has written goes back to the root when the fragment
splits or meets another one, if it is still to be read. So instructions never see a mask.

Arrays in entries are never written in place, except by `Root.store`, which owns what it writes to: entries may
share an array freely.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# What a register holds before it is written, by width in bits. Predicates start false.
_POISON = {
    1: np.zeros(1, np.bool_),
    8: np.full(1, -1, np.int8).view(np.uint8),
    16: np.full(1, -1, np.int16).view(np.uint16),
    32: np.full(1, -1, np.int32).view(np.uint32),
    64: np.full(1, -1, np.int64).view(np.uint64),
}


class Root:
    """The lanes of a wave that have not exited, and their registers.

    `slot` (int64, a lane) is the lane's block among the resident ones, `thread` its linear index in the block. `group`
    is what the order of warps has made of the lane (see schedules.py), or None where warps run together.
    """

    __slots__ = ("cache", "group", "n", "private", "slot", "thread", "values", "widths")

    def __init__(
        self,
        slot: np.ndarray,
        thread: np.ndarray,
        values: list,
        widths: list[int],
        group: np.ndarray | None = None,
    ) -> None:
        self.slot = slot
        self.thread = thread
        self.group = group
        self.n = slot.size
        self.values = values
        self.widths = widths
        self.cache: dict[Any, np.ndarray] = {}
        self.private: dict[int, np.ndarray] = {}

    def store(self, register: int, lanes: np.ndarray, value: np.ndarray) -> None:
        """Write `value` (one element, or one for each of `lanes`) to those lanes' register."""
        old = self.values[register]
        if old is None:
            old = _POISON[self.widths[register]]
        if old.size == 1 and self.n != 1:
            new = np.empty(self.n, old.dtype)
            new.fill(old.item() if old.dtype.kind != "V" else old)
        elif self.private.get(register) is old:
            new = old
        else:
            new = old.copy()
        if new.dtype is not value.dtype:
            new = new.view(value.dtype)
        new[lanes] = value
        self.values[register] = self.private[register] = new


class Fragment:
    """Lanes at one program counter. `lanes` are sorted positions in the root, or None for all of them."""

    __slots__ = ("block", "cache", "dirty", "group", "lanes", "n", "pending", "root", "stack", "tired", "values")

    def __init__(self, root: Root, lanes: np.ndarray | None, block: Any, stack: tuple, tired: float = 0) -> None:
        self.root = root
        self.lanes = lanes
        # Fragments of different groups are not merged on the way.
        self.group = 0 if root.group is None else int(root.group[0 if lanes is None else lanes[0]])
        self.block = block
        self.stack = stack
        self.tired = tired
        self.dirty = 0
        self.cache: dict[Any, Any] = {}
        # Matrix multiplications that will write into arrays of `values`: wgmma.Pending, once there are any.
        self.pending: Any = None
        if lanes is None:
            self.n = root.n
            self.values = root.values
            root.private.clear()
        else:
            self.n = lanes.size
            self.values = [None] * len(root.values)

    def load(self, register: int) -> np.ndarray:
        """The register's value for this fragment's lanes, kept as its own entry."""
        value = self.root.values[register]
        if value is None:
            value = _POISON[self.root.widths[register]]
        elif self.lanes is not None and value.size != 1:
            value = value.take(self.lanes)
        self.values[register] = value
        return value

    def get(self, register: int) -> np.ndarray:
        """The register's value: one element or one for each lane."""
        value = self.values[register]
        return self.load(register) if value is None else value

    def full(self, register: int, dtype: np.dtype) -> np.ndarray:
        """The register's value as `dtype` (of the same width), one element for each lane."""
        value = self.get(register)
        if value.dtype is not dtype:
            value = value.view(dtype)
        return value if value.size == self.n and value.ndim else np.broadcast_to(value, (self.n,))

    def set(self, register: int, value: np.ndarray) -> None:
        """Write a register outside of the block's own operations."""
        self.values[register] = value
        self.dirty |= 1 << register

    def per_lane(self, key: Any, table: np.ndarray) -> np.ndarray:
        """A table that has an entry for each lane of the root, for this fragment's lanes; remembered by `key`."""
        if self.lanes is None:
            return table
        found = self.cache.get(key)
        if found is None:
            found = self.cache[key] = table.take(self.lanes)
        return found

    @property
    def slot(self) -> np.ndarray:
        """Each lane's block among the resident ones."""
        return self.per_lane("slot", self.root.slot)

    @property
    def thread(self) -> np.ndarray:
        """Each lane's linear thread index in its block."""
        return self.per_lane("thread", self.root.thread)

    def flush(self, live: int) -> None:
        """Give the written registers among `live` (a bit for each register) back to the root."""
        if self.pending is not None:
            self.pending.finish()
        if self.lanes is not None:
            todo = self.dirty & live
            while todo:
                lowest = todo & -todo
                register = lowest.bit_length() - 1
                todo ^= lowest
                value = self.values[register]
                if value is not None:
                    self.root.store(register, self.lanes, value)
        self.dirty = 0

    def subset(self, positions: np.ndarray, block: Any) -> Fragment:
        """The lanes at `positions` as a fragment of their own, at `block`. The caller has flushed."""
        lanes = positions if self.lanes is None else self.lanes.take(positions)
        return Fragment(self.root, lanes, block, self.stack, self.tired)


def merge(fragments: list[Fragment], live: int) -> Fragment:
    """One fragment in place of several at the same program counter."""
    first = fragments[0]
    root = first.root
    present = np.zeros(root.n, np.bool_)
    for fragment in fragments:
        fragment.flush(live)
        present[fragment.lanes] = True
    total = sum(fragment.n for fragment in fragments)
    lanes = None if total == root.n else np.nonzero(present)[0]
    return Fragment(root, lanes, first.block, first.stack, min(f.tired for f in fragments))


def reroot(fragment: Fragment, live: int) -> None:
    """Make `fragment`, the only one left, a wave of its own: the lanes that exited take no space any more.

    The caller gives the new root its constants and special registers.
    """
    old = fragment.root
    values: list = [None] * len(old.values)
    todo = live
    while todo:
        lowest = todo & -todo
        register = lowest.bit_length() - 1
        todo ^= lowest
        values[register] = fragment.get(register)
    group = old.group if old.group is None or fragment.lanes is None else old.group.take(fragment.lanes)
    fragment.root = Root(fragment.slot, fragment.thread, values, old.widths, group)
    fragment.lanes = None
    fragment.values = values
    fragment.dirty = 0
    fragment.cache = {}

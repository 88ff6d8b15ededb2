"""What orders blocks of different clusters: flags and counters in global memory, released and acquired.

A thread releases what it knows by a store or atomic operation that says .release. By a relaxed one it releases what
lies before a fence of the GPU's scope, its own or that of the thread that it knows it from (each thread's fence, a
block barrier, then one thread's signal: much code does that). Another acquires it by a load or atomic operation that
says .acquire, or by a relaxed one with such a fence after it, be it behind a block barrier. What a thread knows of
other clusters is a *reach*: for each cluster a clock of its threads, an array (parts, columns) as clocks.py has them.
Source: PTX ISA, "Memory Consistency Model", "Release and Acquire Patterns" and "Synchronizes-With".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..module import Instruction
    from .clocks import Clocks

Known = dict[int, np.ndarray]
_NARROW = frozenset(("cta", "cluster"))


class Reaches:
    """What is known of other clusters, each different knowledge once and by number; 0 is nothing."""

    def __init__(self) -> None:
        self._all: list[Known] = [{}]
        self._joins: dict[tuple[int, int], int] = {}

    @property
    def any(self) -> bool:
        """Whether anything is known of other clusters by anybody."""
        return len(self._all) > 1

    def add(self, known: Known) -> int:
        """The number of this knowledge, which must not be changed any more."""
        if not known:
            return 0
        self._all.append(known)
        return len(self._all) - 1

    def join(self, one: int, other: int) -> int:
        """What both know together."""
        if one == other or not other:
            return one
        if not one:
            return other
        key = (min(one, other), max(one, other))
        found = self._joins.get(key)
        if found is None:
            a, b = self._all[key[0]], self._all[key[1]]
            joined = join(dict(a), b)
            if all(joined[c] is b.get(c) for c in joined):
                found = key[1]
            elif all(joined[c] is a.get(c) for c in joined):
                found = key[0]
            else:
                found = self.add(joined)
            self._joins[key] = found
        return found

    def fenced(self, number: int, parts: set[int]) -> int:
        """The same knowledge after a proxy fence, in these parts of its clocks."""
        if not number:
            return 0
        known = {}
        for cluster, clock in self._all[number].items():
            known[cluster] = clock
            if any((clock[part] != clock[0]).any() for part in parts):
                known[cluster] = clock.copy()
                known[cluster][list(parts)] = clock[0]
        return number if all(known[c] is clock for c, clock in self._all[number].items()) else self.add(known)

    def only(self, number: int, part: int) -> int:
        """What of this knowledge lies before the fences of a part."""
        if not number:
            return 0
        return self.add({c: np.minimum(clock, clock[part]) for c, clock in self._all[number].items()})

    def known(self, number: int) -> Known:
        """The clocks by cluster; not to be changed."""
        return self._all[number]


def join(into: Known, more: Known) -> Known:
    """Add clocks by cluster to others. Rows are never changed, and shared where one of the two knows all."""
    for cluster, row in more.items():
        mine = into.get(cluster)
        if mine is None:
            into[cluster] = row
        elif mine is not row:
            columns = max(mine.shape[1], row.shape[1])
            joined = np.maximum(fitted(mine, columns), fitted(row, columns))
            into[cluster] = next((r for r in (row, mine) if np.array_equal(r, joined)), joined)
    return into


def fitted(clock: np.ndarray, columns: int) -> np.ndarray:
    """A clock (parts, columns) with columns that it does not have yet."""
    return clock if clock.shape[1] == columns else np.pad(clock, ((0, 0), (0, columns - clock.shape[1])))


class _Flag:
    """What was released at an address: merged, and what came since by (clocks of a cluster, reach) of a thread."""

    __slots__ = ("known", "merged", "more")

    def __init__(self) -> None:
        self.known: Known = {}
        self.more: list[tuple[int, np.ndarray, int]] = []
        self.merged: int | None = None

    def all(self, reaches: Reaches) -> int:
        """Everything, as a reach."""
        if self.more or self.merged is None:
            for cluster, row, reach in self.more:
                join(self.known, {cluster: row})
                join(self.known, reaches.known(reach))
            self.more.clear()
            self.merged = reaches.add(dict(self.known))
        return self.merged


def scope_of_gpu(instruction: Instruction) -> bool:
    """Whether an instruction orders beyond the cluster."""
    return _NARROW.isdisjoint(instruction.modifiers)


class Signals:
    """Flags in global memory, for the whole launch."""

    def __init__(self) -> None:
        self.reaches = Reaches()
        self._flags: dict[int, _Flag] = {}

    def wave(self, clocks: Clocks, first_cluster: int) -> None:
        """Threads are others from now on."""
        self._clocks = clocks
        self._first_cluster = first_cluster

    def fence(self, threads: np.ndarray) -> None:
        """A fence of the GPU's scope: what was seen before it is acquired, what comes after it may release."""
        if self._clocks.parts.signals is not None:
            self._clocks.clean()
            self._clocks.fence(threads, {self._clocks.parts.signals})

    def access(self, threads: np.ndarray, addresses: np.ndarray, instruction: Instruction, action: str) -> None:
        """Lanes read, write or do atomic operations, one after the other, where flags may be."""
        modifiers = instruction.modifiers
        if not scope_of_gpu(instruction):
            return
        reads = action != "write" and instruction.opcode != "red"
        releases = action != "read" and (
            "release" in modifiers or "acq_rel" in modifiers or self._clocks.parts.signals is not None
        )
        if not releases and not self._flags:
            return
        given = self._given(threads, "release" in modifiers or "acq_rel" in modifiers) if releases else None
        found = np.zeros(threads.size, np.int32)
        for lane, address in enumerate(np.broadcast_to(addresses, threads.shape).tolist()):
            if action == "write":
                self._flags.pop(address, None)
            flag = self._flags.get(address)
            if reads and flag is not None:
                found[lane] = flag.all(self.reaches)
            if given is not None:
                if flag is None:
                    flag = self._flags[address] = _Flag()
                flag.more.append(given[lane])
        some = np.nonzero(found)[0]
        if some.size:
            self._clocks.reach_out(threads[some], found[some], "acquire" in modifiers or "acq_rel" in modifiers)

    def _given(self, threads: np.ndarray, everything: bool) -> list[tuple[int, np.ndarray, int]]:
        """What threads release: all that they know, or what of it lies before a fence."""
        clocks = self._clocks
        snapshots = clocks.snapshots(threads)
        reaches = clocks.reach(clocks.known[threads])[:, 0].tolist()
        if not everything:
            part = clocks.parts.signals
            snapshots = np.minimum(snapshots, snapshots[:, part][:, None])
            reaches = [self.reaches.only(number, part) for number in reaches]
        clusters = self._first_cluster + threads // clocks.cluster_threads
        clocks.advance(threads)
        return list(zip(clusters.tolist(), snapshots, reaches, strict=True))

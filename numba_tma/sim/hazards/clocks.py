"""What each thread knows to have happened: vector clocks, shared between threads that know the same.

A *column* is something that happens in order: a thread's own steps, its bulk groups read or written, its cp.async
groups, or the phases of an mbarrier. A clock has a value for each column of the thread's cluster: all of that column up
to the value happened before. Every clock has two halves: what is known at all (ordinary accesses are ordered after it),
and what of it lies before a proxy fence (the copy engine's accesses are ordered after it as well).

Most threads of a block know the same, so a clock is a row of a table and a thread holds its row's number. A thread's
own columns are not in its row but in `own`, and enter the rows of others when it releases: at an arrival, a barrier.
Source: PTX ISA, "Memory Consistency Model", "Causality order" and "Proxies".
"""

from __future__ import annotations

import numpy as np

# Columns that each thread has.
STEPS, BULK_READ, CP_ASYNC = range(3)
BYTES_BEFORE_CLEANING = 1 << 22


class Clocks:
    """The clocks of a wave's threads. A thread is slot * threads + its index in the block.

    Without `copies` threads have no columns but their steps.
    """

    def __init__(self, slots: int, threads: int, cluster_size: int, copies: bool = True) -> None:
        self.slots, self.threads, self.cluster_size = slots, threads, cluster_size
        self.cluster_threads = threads * cluster_size
        # Columns: thread's kind k of thread t of the cluster is k * cluster_threads + t; then mbarriers.
        self.kinds = 3 if copies else 1
        self.barrier_base = self.kinds * self.cluster_threads
        self.columns = self.barrier_base + 32
        self.barriers = 0
        self.known = np.zeros(slots * threads, np.int64)
        self.own = np.zeros((self.kinds, slots * threads), np.int32)
        self.own[STEPS] = 1
        self.fenced = np.zeros(slots * threads, np.int32)
        self.column = np.tile(np.arange(self.cluster_threads), -(-slots // cluster_size))[: slots * threads]
        self._used = 1
        self._table = np.zeros((64, 2 * self.columns), np.int32)
        self._clean_at = self._few = max(64, BYTES_BEFORE_CLEANING // (8 * self.columns))
        self._planes: list[Plane] = []
        # Kinds other than steps that anything was issued for.
        self.kinds_in_use: set[int] = set()

    # Rows

    def row(self, number: int) -> np.ndarray:
        """A clock, to read."""
        return self._table[number]

    def new_rows(self, values: np.ndarray) -> np.ndarray:
        """Numbers of new rows with these values."""
        count = len(values)
        while self._used + count > len(self._table):
            self._table = np.concatenate((self._table, np.zeros_like(self._table)))
        numbers = np.arange(self._used, self._used + count)
        self._table[numbers] = values
        self._used += count
        return numbers

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Copies of rows."""
        return self._table[numbers]

    def clean(self) -> None:
        """Forget rows that nobody holds. Called between events, when no row number is in anybody's hands."""
        if self._used < self._clean_at:
            return
        holders = [self.known, *(plane.done for plane in self._planes)]
        live = np.unique(np.concatenate([np.zeros(1, np.int64), *holders]))
        self._table = np.concatenate(
            (self._table[live], np.zeros((max(64, live.size), self._table.shape[1]), np.int32))
        )
        self._used = live.size
        for holder in holders:
            holder[:] = np.searchsorted(live, holder)
        self._clean_at = max(self._few, 4 * live.size)

    def barrier_column(self) -> int:
        """A column for another mbarrier."""
        column = self.barrier_base + self.barriers
        self.barriers += 1
        if column >= self.columns:
            old, self.columns = self.columns, self.columns + self.barriers
            self._table = self._widened(self._table, old)
            for plane in self._planes:
                plane.sum = self._widened(plane.sum, old)
        return column

    def _widened(self, table: np.ndarray, old: int) -> np.ndarray:
        wide = np.zeros((len(table), 2, self.columns), np.int32)
        wide[:, :, :old] = table.reshape(len(table), 2, old)
        return wide.reshape(len(table), -1)

    def plane(self, places: int) -> Plane:
        """A place where threads meet, one for each block or cluster."""
        plane = Plane(np.zeros((places, 2 * self.columns), np.int32), np.zeros(places, np.int64))
        self._planes.append(plane)
        return plane

    # Questions

    def knows(self, threads: np.ndarray, columns: np.ndarray, values: np.ndarray, fenced: bool = False) -> np.ndarray:
        """Whether each thread (one or as many as columns) knows that its column has come to its value."""
        width = 2 * self.columns
        start = self.known[threads] * width
        if fenced:
            start = start + self.columns
        good = self._table.reshape(-1).take(start + columns) >= values
        if good.all():
            return good
        left = np.nonzero(~good)[0]
        kind, who = np.divmod(columns[left], self.cluster_threads)
        mine = threads if threads.size == 1 else threads[left]
        own = (who == self.column[mine]) & (kind < self.kinds)
        kind = np.minimum(kind, self.kinds - 1)
        value = self.own[kind, mine]
        if fenced:
            # A wait by the issuing thread itself needs no fence; its own ordinary accesses do.
            value = np.where((kind == STEPS) | (kind == CP_ASYNC), self.fenced_own(kind, mine), value)
        elif own.any():
            value = np.where(kind == STEPS, np.iinfo(np.int32).max, value)
        good[left] = own & (value >= values[left])
        return good

    def fenced_own(self, kind: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """What of a thread's own lies before its latest proxy fence; cp.async counts as its own accesses."""
        return np.where(kind == STEPS, self.fenced[threads], self._fenced_cp_async[threads])

    @property
    def _fenced_cp_async(self) -> np.ndarray:
        if self._fenced_copies is None:
            self._fenced_copies = np.zeros_like(self.fenced)
        return self._fenced_copies

    _fenced_copies: np.ndarray | None = None

    # Events

    def fence(self, threads: np.ndarray) -> None:
        """A proxy fence: all that the threads know is now before a fence."""
        self.fenced[threads] = self.own[STEPS, threads]
        if CP_ASYNC in self.kinds_in_use:
            self._fenced_cp_async[threads] = self.own[CP_ASYNC, threads]
        self.own[STEPS, threads] += 1
        old, inverse = np.unique(self.known[threads], return_inverse=True)
        values = self.rows(old)
        half = self.columns
        if (values[:, half:] == values[:, :half]).all():
            return
        values[:, half:] = values[:, :half]
        self.known[threads] = self.new_rows(values)[inverse]

    def _pour(self, target: np.ndarray, places: np.ndarray, threads: np.ndarray) -> None:
        """Add what threads know, and their own columns, to the rows of `target` at `places`."""
        span = int(self.known[threads].max()) + 1
        pairs = np.unique(places * span + self.known[threads])
        at, rows = np.divmod(pairs, span)
        if at.size == 1 or (at[1:] != at[:-1]).all():
            target[at] = np.maximum(target[at], self._table[rows])
        else:
            starts = np.nonzero(np.concatenate(([True], at[1:] != at[:-1])))[0]
            joined = np.maximum.reduceat(self._table[rows], starts)
            target[at[starts]] = np.maximum(target[at[starts]], joined)
        column, half = self.column[threads], self.columns
        target[places, column] = self.own[STEPS, threads]
        target[places, half + column] = np.maximum(target[places, half + column], self.fenced[threads])
        for kind in self.kinds_in_use:
            shifted = column + kind * self.cluster_threads
            own = self.own[kind, threads]
            target[places, shifted] = np.maximum(target[places, shifted], own)
            # The engine's accesses need no fence among themselves, cp.async's do.
            fenced = self._fenced_cp_async[threads] if kind == CP_ASYNC else own
            target[places, half + shifted] = np.maximum(target[places, half + shifted], fenced)

    def release(self, plane: Plane, places: np.ndarray, threads: np.ndarray) -> None:
        """Threads give what they know to a meeting place; what they do from now on is not part of it."""
        self._pour(plane.sum, places, threads)
        self.own[STEPS, threads] += 1

    def complete(self, plane: Plane, places: np.ndarray) -> None:
        """What has been given so far is there to be acquired."""
        plane.done[places] = self.new_rows(plane.sum[places])

    def acquire(self, threads: np.ndarray, rows: np.ndarray) -> None:
        """Threads (distinct) come to know what the rows say (a number for each thread)."""
        mine = self.known[threads]
        span = self._used
        pairs, inverse = np.unique(mine * span + rows, return_inverse=True)
        old, new = np.divmod(pairs, span)
        a, b = self._table[old], self._table[new]
        dominated = (b >= a).all(axis=1)
        result = new.copy()
        todo = np.nonzero(~dominated)[0]
        if todo.size:
            result[todo] = self.new_rows(np.maximum(a[todo], b[todo]))
        self.known[threads] = result[inverse]

    def meet(self, groups: np.ndarray, threads: np.ndarray) -> None:
        """Threads with the same group (ascending numbers) wait for each other: all know what each one knew."""
        new = np.concatenate(([True], groups[1:] != groups[:-1]))
        number = np.cumsum(new) - 1
        target = np.zeros((int(number[-1]) + 1, 2 * self.columns), np.int32)
        self._pour(target, number, threads)
        self.own[STEPS, threads] += 1
        self.known[threads] = self.new_rows(target)[number]


class Plane:
    """A meeting place: `sum` is what was given, `done` the rows that those who have waited for it acquire."""

    def __init__(self, total: np.ndarray, done: np.ndarray) -> None:
        self.sum = total
        self.done = done

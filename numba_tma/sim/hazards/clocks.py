"""What each thread knows to have happened: vector clocks, shared between threads that know the same.

A *column* is something that happens in order: a thread's own steps, its bulk groups read or written, its cp.async
groups, a warpgroup's groups of matrix multiplications, or the phases of an mbarrier. A clock has a value for each
column of the thread's cluster: all of that column up to the value happened before. Columns other than steps are
made when they are first used, alike in all clusters.

A clock has parts: what is known at all (ordinary accesses are ordered after it); what of that lies before a proxy
fence (the copy engine's accesses are ordered after it as well), for shared and for global memory; and what lies before
a fence of the GPU's scope (a relaxed signal hands it on to other clusters).

Most threads of a block know the same, so a clock is a row of a table and a thread holds its row's number. A thread's
own columns are not in its row but in `own`, and enter the rows of others when it releases: at an arrival, a barrier.
What is known of other clusters goes with a row as two numbers of its own (grid.py): what is known, and what was seen
but has no fence after it yet.
Source: PTX ISA, "Memory Consistency Model", "Causality order" and "Proxies".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .grid import Reaches
from .scan import BULK_READ, BULK_WRITTEN, CLOCKS, CP_ASYNC, ORDINARY, PHASES, STEPS, WGMMA, Context

BYTES_BEFORE_CLEANING = 1 << 22
# By kind of column: whether its accesses are ordinary ones.
IS_ORDINARY = np.isin(np.arange(PHASES + 1), ORDINARY)
WARPGROUP = 128


@dataclass(frozen=True)
class Parts:
    """The parts of clocks that fences make: which one is for which memory, or for signals (None: no such fence)."""

    count: int = 1
    shared: int | None = None
    globally: int | None = None
    signals: int | None = None


class Clocks:
    """The clocks of a wave's threads. A thread is slot * threads + its index in the block."""

    def __init__(
        self,
        slots: int,
        threads: int,
        cluster_size: int,
        parts: Parts | None = None,
        reaches: Reaches | None = None,
        first_thread: int = 0,
    ) -> None:
        self.slots, self.threads, self.cluster_size = slots, threads, cluster_size
        self.parts = parts or Parts()
        self.reaches = reaches or Reaches()
        self.cluster_threads = threads * cluster_size
        lanes = slots * threads
        # Threads have columns of all kinds but phases, a warpgroup's threads share one of its groups.
        # A column's kind, and the thread (in the cluster) or mbarrier that it belongs to; first all threads' steps.
        self.columns = self.cluster_threads + 32
        self.used_columns = self.cluster_threads
        self.kind = np.zeros(self.columns, np.int8)
        self.owner = np.arange(self.columns, dtype=np.int32)
        self._columns_of = {kind: np.full(self.cluster_threads, -1) for kind in range(1, PHASES)}
        self.known = np.zeros(lanes, np.int64)
        self.own = np.zeros((PHASES + 1, lanes), np.int32)
        self.own[STEPS] = 1
        self._steps: np.ndarray | None = None
        # Own columns before the latest fence, for each part but the first.
        self.fenced = np.zeros((self.parts.count - 1, PHASES + 1, lanes), np.int32)
        self.column = np.tile(np.arange(self.cluster_threads), -(-slots // cluster_size))[:lanes]
        self._used = 1
        self._clean_at = self._few = max(64, BYTES_BEFORE_CLEANING // (4 * self.width))
        # How often rows got other numbers.
        self.cleaned = 0
        self._planes: list[Plane] = []
        self._holders = [self.known]
        # Kinds other than steps that anything was issued for.
        self.kinds_in_use: set[int] = set()
        self.context = Context(CLOCKS)
        thread = first_thread + np.arange(lanes)
        self.context.set(known=self.known, column=self.column, own=self.own, lanes=lanes, thread=thread)
        self.context.set(first=thread - self.column, cluster=self.cluster_threads)
        self._reach = np.zeros((64, 2), np.int32)
        self._put(np.zeros((64, self.width), np.int32))

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.parts.count * self.columns

    def _put(self, table: np.ndarray) -> None:
        self._table = table
        self.context.set(table=table, width=table.shape[1], kind=self.kind, owner=self.owner)

    # Rows

    def row(self, number: int) -> np.ndarray:
        """A clock, to read."""
        return self._table[number]

    def new_rows(self, values: np.ndarray, reach: np.ndarray | int = 0) -> np.ndarray:
        """Numbers of new rows with these values."""
        count = len(values)
        if self._used + count > len(self._table):
            size = 2 * max(len(self._table), count)
            table = np.zeros((size, self.width), np.int32)
            table[: self._used] = self._table[: self._used]
            self._reach = np.concatenate((self._reach, np.zeros((size - len(self._reach), 2), np.int32)))
            self._put(table)
        numbers = np.arange(self._used, self._used + count)
        self._table[self._used : self._used + count] = values
        self._reach[self._used : self._used + count] = reach
        self._used += count
        return numbers

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Copies of rows."""
        return self._table[numbers]

    def reach(self, numbers: np.ndarray) -> np.ndarray:
        """What rows know of other clusters."""
        return self._reach[numbers]

    def held(self, count: int) -> np.ndarray:
        """An array of row numbers that keeps them from being cleaned away."""
        numbers = np.zeros(count, np.int64)
        self._holders.append(numbers)
        return numbers

    def clean(self) -> None:
        """Forget rows that nobody holds. Called between events, when no row number is in anybody's hands."""
        if self._used < self._clean_at:
            return
        holders = [*self._holders, *(plane.done for plane in self._planes)]
        live = np.unique(np.concatenate([np.zeros(1, np.int64), *holders]))
        room = max(64, live.size)
        self._reach = np.concatenate((self._reach[live], np.zeros((room, 2), np.int32)))
        self._put(np.concatenate((self._table[live], np.zeros((room, self.width), np.int32))))
        self._used = live.size
        for holder in holders:
            holder[:] = np.searchsorted(live, holder)
        self._clean_at = max(self._few, 4 * live.size)
        self.cleaned += 1

    # Columns

    def new_column(self, kind: int, owner: int) -> int:
        """A column, the same in every cluster."""
        column = self.used_columns
        self.used_columns += 1
        if column >= self.columns:
            old, self.columns = self.columns, self.columns + max(32, self.columns // 2)
            more = np.zeros(self.columns - old, np.int32)
            self.kind = np.concatenate((self.kind, more.astype(np.int8)))
            self.owner = np.concatenate((self.owner, more))
            self._put(self._widened(self._table, old))
            for plane in self._planes:
                plane.sum = self._widened(plane.sum, old)
        self.kind[column], self.owner[column] = kind, owner
        return column

    def _widened(self, table: np.ndarray, old: int) -> np.ndarray:
        wide = np.zeros((len(table), self.parts.count, self.columns), np.int32)
        wide[:, :, :old] = table.reshape(len(table), self.parts.count, old)
        return wide.reshape(len(table), -1)

    def columns_of(self, kind: int, threads: np.ndarray) -> np.ndarray:
        """Each thread's column of a kind."""
        if kind == STEPS:
            return self.column[threads]
        table, places = self._columns_of[kind], self.column[threads]
        found = table[places]
        if (found < 0).any():
            self.kinds_in_use.add(kind)
            for place in np.unique(places[found < 0]).tolist():
                if kind == WGMMA:
                    first = place - place % self.threads % WARPGROUP
                    if table[first] < 0:
                        table[first] = self.new_column(kind, first)
                    table[place] = table[first]
                else:
                    table[place] = self.new_column(kind, place)
            found = table[places]
        return found

    def plane(self, places: int) -> Plane:
        """A place where threads meet, one for each block or cluster."""
        plane = Plane(
            np.zeros((places, self.width), np.int32), np.zeros(places, np.int64), np.zeros((places, 2), np.int32)
        )
        self._planes.append(plane)
        return plane

    # Questions

    def knows(self, threads: np.ndarray, columns: np.ndarray, values: np.ndarray, part: int | None = 0) -> np.ndarray:
        """Whether each thread (one or as many as columns) knows that its column has come to its value.

        `part` asks for what lies before a fence; None: there is no such fence, and it is about ordinary accesses.
        """
        if part is None:
            return np.zeros(columns.shape, np.bool_)
        start = self.known[threads] * self.width + part * self.columns
        good = self._table.reshape(-1).take(start + columns) >= values
        if good.all():
            return good
        left = np.nonzero(~good)[0]
        kind = self.kind[columns[left]]
        mine = threads if threads.size == 1 else threads[left]
        column = self.column[mine]
        own = self.owner[columns[left]] == np.where(kind == WGMMA, column - column % self.threads % WARPGROUP, column)
        value = self.own[kind, mine]
        if part:
            # A wait by the issuing thread itself needs no fence; its own ordinary accesses do.
            value = np.where(IS_ORDINARY[kind], self.fenced[part - 1, kind, mine], value)
        else:
            value = np.where(kind == STEPS, np.iinfo(np.int32).max, value)
        good[left] = own & (value >= values[left])
        return good

    # Events

    def advance(self, threads: np.ndarray) -> None:
        """What threads do from now on is another step of theirs."""
        self.own[STEPS, threads] += 1
        self._steps = None

    def steps(self) -> np.ndarray:
        """All threads' steps as they are now: an array that stays as it is."""
        if self._steps is None:
            self._steps = self.own[STEPS].copy()
        return self._steps

    def fence(self, threads: np.ndarray, parts: set[int]) -> None:
        """A fence: all that the threads know is now before it, in these parts."""
        for part in parts:
            self.fenced[part - 1][:, threads] = self.own[:, threads]
        self.advance(threads)
        old, inverse = _distinct(self.known[threads])
        values = self.rows(old).reshape(len(old), self.parts.count, self.columns)
        if all((values[:, part] == values[:, 0]).all() for part in parts) and not self._reach[old].any():
            return
        for part in parts:
            values[:, part] = values[:, 0]
        reach = self._reach[old].tolist()
        if self.parts.signals in parts:
            reach = [(self.reaches.join(known, seen), 0) for known, seen in reach]
        reach = [(self.reaches.fenced(known, parts), seen) for known, seen in reach]
        self.known[threads] = self.new_rows(values.reshape(len(old), -1), np.array(reach))[inverse]

    def _pour(
        self,
        target: np.ndarray,
        places: np.ndarray,
        threads: np.ndarray,
        reach: np.ndarray,
    ) -> None:
        """Add what threads know, and their own columns, to the rows of `target` at `places`, and to `reach`."""
        known = self.known[threads]
        span = self._used
        at, rows = np.divmod(np.unique(_runs(places * span + known)), span)
        if at.size == 1 or (at[1:] != at[:-1]).all():
            target[at] = np.maximum(target[at], self._table[rows])
        else:
            starts = np.nonzero(np.concatenate(([True], at[1:] != at[:-1])))[0]
            joined = np.maximum.reduceat(self._table[rows], starts)
            target[at[starts]] = np.maximum(target[at[starts]], joined)
        if self.reaches.any:
            for place, row in zip(at.tolist(), rows.tolist(), strict=True):
                reach[place] = self._joined(reach[place], self._reach[row])
        flat, base = target.reshape(-1), places * self.width
        column, half = base + self.column[threads], self.columns
        flat[column] = self.own[STEPS, threads]
        for part in range(1, self.parts.count):
            to = column + part * half
            flat[to] = np.maximum(flat[to], self.fenced[part - 1, STEPS, threads])
        for kind in self.kinds_in_use:
            shift = self._columns_of[kind][self.column[threads]]
            some = np.nonzero(shift >= 0)[0]
            if not some.size:
                continue
            mine, to = threads[some], base[some] + shift[some]
            for part in range(self.parts.count):
                # The engine's accesses need no proxy fence among themselves, cp.async's do.
                late = part and (kind == CP_ASYNC or part == self.parts.signals)
                value = self.fenced[part - 1, kind, mine] if late else self.own[kind, mine]
                if kind == WGMMA:
                    np.maximum.at(flat, to + part * half, value)
                else:
                    flat[to + part * half] = np.maximum(flat[to + part * half], value)

    def release(self, plane: Plane, places: np.ndarray, threads: np.ndarray) -> None:
        """Threads give what they know to a meeting place; what they do from now on is not part of it."""
        self._pour(plane.sum, places, threads, plane.reach)
        self.advance(threads)

    def complete(self, plane: Plane, places: np.ndarray) -> None:
        """What has been given so far is there to be acquired."""
        plane.done[places] = self.new_rows(plane.sum[places], plane.reach[places])

    def acquire(self, threads: np.ndarray, rows: np.ndarray) -> None:
        """Threads (distinct) come to know what the rows say (a number for each thread)."""
        span = self._used
        pairs, inverse = _distinct(self.known[threads] * span + rows)
        old, new = np.divmod(pairs, span)
        a, b = self._table[old], self._table[new]
        dominated = (b >= a).all(axis=1)
        result = new.copy()
        reach = self._reach[new]
        if self.reaches.any:
            joined = np.array([self._joined(*pair) for pair in zip(self._reach[old], reach, strict=True)], np.int32)
            dominated &= (reach == joined).all(axis=1)
            reach = joined
        todo = np.nonzero(~dominated)[0]
        if todo.size:
            result[todo] = self.new_rows(np.maximum(a[todo], b[todo]), reach[todo])
        self.known[threads] = result[inverse]

    def meet(self, groups: np.ndarray, threads: np.ndarray) -> None:
        """Threads with the same group (ascending numbers) wait for each other: all know what each one knew."""
        new = np.concatenate(([True], groups[1:] != groups[:-1]))
        number = np.cumsum(new) - 1
        count = int(number[-1]) + 1
        target, reach = np.zeros((count, self.width), np.int32), np.zeros((count, 2), np.int32)
        self._pour(target, number, threads, reach)
        self.advance(threads)
        self.known[threads] = self.new_rows(target, reach)[number]

    def snapshots(self, threads: np.ndarray) -> np.ndarray:
        """The clocks of threads, their own columns in them: (threads, parts, columns)."""
        target, places = np.zeros((threads.size, self.width), np.int32), np.arange(threads.size)
        self._pour(target, places, threads, np.zeros((threads.size, 2), np.int32))
        return target.reshape(threads.size, self.parts.count, self.columns)

    def _joined(self, one: np.ndarray, other: np.ndarray) -> tuple[int, int]:
        return tuple(self.reaches.join(*pair) for pair in zip(one.tolist(), other.tolist(), strict=True))

    def reach_out(self, threads: np.ndarray, reach: np.ndarray, acquired: bool) -> None:
        """Threads come to know of other clusters, or (not `acquired`) will at their next fence."""
        old = self.known[threads]
        both = self._reach[old]
        place = 0 if acquired else 1
        pairs = zip(both[:, place].tolist(), reach.tolist(), strict=True)
        both[:, place] = [self.reaches.join(*pair) for pair in pairs]
        self.known[threads] = self.new_rows(self.rows(old), both)


def _runs(values: np.ndarray) -> np.ndarray:
    """The values without immediate repetitions."""
    return values[np.concatenate(([True], values[1:] != values[:-1]))] if values.size > 1 else values


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(distinct values, the position of each value among them); quick where equal values follow each other."""
    new = np.concatenate(([True], values[1:] != values[:-1]))
    found, inverse = np.unique(values[new], return_inverse=True)
    return found, inverse[np.cumsum(new) - 1]


class Plane:
    """A meeting place: `sum` is what was given (`reach`: of other clusters), `done` the rows to be acquired."""

    def __init__(self, total: np.ndarray, done: np.ndarray, reach: np.ndarray) -> None:
        self.sum = total
        self.done = done
        self.reach = reach


__all__ = [
    "BULK_READ",
    "BULK_WRITTEN",
    "CP_ASYNC",
    "IS_ORDINARY",
    "PHASES",
    "STEPS",
    "WGMMA",
    "Clocks",
    "Parts",
    "Plane",
]

"""The native inner loops against the same rules spelled out, one lane after the other."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma.sim.hazards.clocks import CP_ASYNC, STEPS, Clocks, Parts
from numba_tma.sim.hazards.global_memory import Pieces
from numba_tma.sim.hazards.scan import GRID_THREAD_SHIFT, GRID_VALUE_SHIFT, scan
from numba_tma.sim.hazards.shadow import Shadow, stamps, unpack

SLOTS, THREADS, BYTES = 4, 64, 256


def random_clocks(rng):
    """Clocks of clusters of two blocks whose threads have met here and there."""
    clocks = Clocks(SLOTS, THREADS, 2, Parts(2, 1, 1), first_thread=3 * SLOTS * THREADS)
    plane = clocks.plane(SLOTS // 2)
    everybody = np.arange(SLOTS * THREADS)
    for _ in range(int(rng.integers(1, 8))):
        some = np.sort(rng.choice(everybody, int(rng.integers(1, 60)), replace=False))
        match rng.integers(4):
            case 0:
                clocks.meet(some // THREADS, some)
            case 1:
                clocks.release(plane, some // (2 * THREADS), some)
                clocks.complete(plane, np.unique(some // (2 * THREADS)))
            case 2:
                clocks.acquire(some, plane.done[some // (2 * THREADS)])
            case 3:
                clocks.columns_of(CP_ASYNC, some)
                clocks.own[CP_ASYNC, some] = rng.integers(1, 4, some.size)
                clocks.fence(some, {1})
    return clocks


def unordered(clocks, stamp, thread):
    columns, values, _ = unpack(np.array([stamp]))
    return not clocks.knows(np.array([thread]), columns, values)[0]


def stamp_of(clocks, thread, number):
    return int(stamps(clocks.column[thread], clocks.own[STEPS, thread], number))


class Expected:
    """Shared memory's shadow by the rules."""

    def __init__(self, clocks, shadow):
        self.clocks, self.shadow = clocks, shadow
        self.written, self.read = shadow.written.copy(), shadow.read.copy()

    def pieces(self, index, itemsize, count):
        first = index * itemsize // self.shadow.piece
        return range(first, first + itemsize * count // self.shadow.piece)

    def reads(self, index, threads, itemsize, count, number):
        bad = []
        for i, thread in zip(index, threads, strict=True):
            wrong = False
            for at in self.pieces(i, itemsize, count):
                wrong |= self.written[at] == 0 or unordered(self.clocks, self.written[at], thread)
                before = int(self.read[0, at])
                owner = before >> 44
                if before and owner != self.clocks.column[thread] and unordered(self.clocks, before, thread):
                    warps = self.shadow.engine - 1
                    self.read[1 + owner % THREADS // 32 % warps, at] = before
                self.read[0, at] = stamp_of(self.clocks, thread, number)
            bad.append(wrong)
        return bad

    def writes(self, index, threads, itemsize, count, number):
        bad = []
        for i, thread in zip(index, threads, strict=True):
            stamps_there = [
                s for at in self.pieces(i, itemsize, count) for s in (self.written[at], *self.read[:, at]) if s
            ]
            bad.append(any(unordered(self.clocks, s, thread) for s in stamps_there))
        for i, thread in zip(index, threads, strict=True):
            for at in self.pieces(i, itemsize, count):
                self.written[at] = stamp_of(self.clocks, thread, number)
                self.read[:, at] = 0
        return bad


@pytest.mark.parametrize("repeat", range(6))
def test_shared_memory(repeat, rng):
    clocks = random_clocks(rng)
    shadow = Shadow(BYTES, 2, clocks)
    for number in range(1, 40):
        itemsize, count = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 2]))
        threads = np.sort(rng.choice(SLOTS * THREADS, int(rng.integers(1, 40)), replace=False))
        index = rng.integers(0, BYTES // (itemsize * count), threads.size) * count
        if rng.integers(4) == 0:
            some = np.sort(rng.choice(SLOTS * THREADS, 90, replace=False))
            clocks.meet(some // THREADS, some)
        if rng.integers(4) == 0:
            column = clocks.columns_of(CP_ASYNC, threads[:1])
            shadow.written[:: BYTES // 16 or 1] = stamps(column, rng.integers(1, 4), 1)[0]
        context = shadow.prepare(itemsize, count, number)
        expected = Expected(clocks, shadow)
        if rng.integers(2):
            wanted = expected.reads(index, threads, itemsize, count, number)
            np.testing.assert_array_equal(scan("read_shared")(index, threads, context), wanted)
        else:
            wanted = expected.writes(index, threads, itemsize, count, number)
            shadow.rows()
            np.testing.assert_array_equal(scan("check_write_shared")(index, threads, context), wanted)
            scan("write_shared")(index, threads, context)
        np.testing.assert_array_equal(shadow.written, expected.written)
        np.testing.assert_array_equal(shadow.read, expected.read)


@pytest.mark.parametrize("repeat", range(4))
def test_global_memory(repeat, rng):
    """Only threads of the own cluster are decided on here: others are left to NumPy, as unordered."""
    clocks = random_clocks(rng)
    pieces = Pieces(BYTES, clocks)
    cluster = 2 * THREADS
    for number in range(1, 30):
        threads = np.sort(rng.choice(SLOTS * THREADS, int(rng.integers(1, 40)), replace=False))
        index = rng.integers(0, BYTES // 4, threads.size)
        context = pieces.prepare(4, 1, number)
        written = pieces.written.copy()
        bad = scan("check_write_global" if rng.integers(2) else "read_global")(index, threads, context)
        for lane, (at, thread) in enumerate(zip(index.tolist(), threads.tolist(), strict=True)):
            stamp = int(written[at])
            by = (stamp >> GRID_THREAD_SHIFT) - 3 * SLOTS * THREADS
            value = np.array([stamp >> GRID_VALUE_SHIFT & 0xFFFFFF])
            if not stamp or by == thread:
                continue
            near = by // cluster == thread // cluster
            known = near and clocks.knows(np.array([thread]), clocks.column[[by]], value)[0]
            assert bad[lane] or known
        scan("write_global")(index, threads, context)
        last = dict(zip(index.tolist(), threads.tolist(), strict=True))
        for at, thread in last.items():
            assert pieces.written[at] == (
                thread + 3 * SLOTS * THREADS << GRID_THREAD_SHIFT
                | int(clocks.own[STEPS, thread]) << GRID_VALUE_SHIFT
                | number
            )


def test_copies_need_the_fence(rng):
    clocks = Clocks(1, THREADS, 1, Parts(2, 1, 1))
    shadow = Shadow(BYTES, 2, clocks)
    writer, reader = np.array([1]), np.array([0])
    context = shadow.prepare(4, 1, 1)
    scan("write_shared")(np.arange(1), writer, context)
    assert shadow.unsettled(shadow.written, reader).any()
    clocks.meet(np.zeros(2, np.int64), np.arange(2))
    assert clocks.knows(reader, np.array([1]), np.array([1]))[0]
    assert shadow.unsettled(shadow.written, reader).any()
    clocks.fence(reader, {1})
    assert not shadow.unsettled(shadow.written, reader).any()
    assert not clocks.knows(reader, np.array([2]), np.array([1]))[0]

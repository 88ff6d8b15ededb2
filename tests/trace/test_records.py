"""Rings made by hand, and what is read from them."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma.trace import Trace, records
from numba_tma.trace.instrument import (
    BEGIN_CLOCK,
    BEGIN_TIME,
    COUNT,
    END_CLOCK,
    END_TIME,
    LANE,
    MULTIPROCESSOR,
    SHARED_BASE,
    Site,
)
from numba_tma.trace.plan import HEADER_BYTES

PLAN = Trace(capacity=16)
SITES = (Site("mbarrier wait", "mbarrier.try_wait"), Site("mark", "here"), Site("block barrier", "bar.sync"))
WAIT, MARK, BAR = range(3)  # the numbers of their sites in a record
EPOCH = 1_700_000_000_000_000_000


def put(ring, offset, dtype, value):
    ring[offset : offset + np.dtype(dtype).itemsize] = np.frombuffer(np.array([value], dtype).tobytes(), np.uint8)


def write(ring, *, time, clock, sm=0, seen=(), lane=0, count=None):
    """Fill a ring: `time` and `clock` are (begin, end), `seen` records of (begin, end, site, detail)."""
    put(ring, BEGIN_TIME, "u8", EPOCH + time[0])
    put(ring, END_TIME, "u8", EPOCH + time[1])
    put(ring, BEGIN_CLOCK, "u8", clock[0])
    put(ring, END_CLOCK, "u8", clock[1])
    put(ring, MULTIPROCESSOR, "u4", sm)
    put(ring, LANE, "u4", lane)
    put(ring, SHARED_BASE, "u4", 1024)
    put(ring, COUNT, "u4", len(seen) if count is None else count)
    for number, record in enumerate(seen):
        for part, value in enumerate(record):
            put(ring, HEADER_BYTES + 16 * number + 4 * part, "u4", value & 0xFFFFFFFF)


@pytest.fixture
def rings():
    """(blocks, warps, 2, bytes) of three blocks of two warps."""
    return np.zeros((3, 2, 2, PLAN.ring_bytes), np.uint8)


def read(rings):
    return records.read(rings.reshape(-1), PLAN, SITES, 3, 64)


def test_nothing_was_traced(rings):
    assert read(rings) == []


def test_intervals_moments_and_nanoseconds(rings):
    # Two cycles a nanosecond.
    seen = [(10_200, 10_300, WAIT, 5), (10_400, 10_400, MARK, 0xFEDCBA98)]
    write(rings[1, 1, 0], time=(5000, 6000), clock=(10_000, 12_000), seen=seen)
    (warp,) = read(rings)
    assert (warp.block, warp.warp, warp.shared_base, warp.start, warp.end) == (1, 1, 1024, 0, 1000)
    wait, mark = warp.events
    assert (wait.site, wait.start, wait.end, wait.detail) == (SITES[0], 100, 150, 5)
    assert (mark.site, mark.start, mark.end, mark.detail) == (SITES[1], 200, 200, 0xFEDCBA98)


def test_the_low_half_of_the_clock_wraps(rings):
    begin = (7 << 32) - 100
    seen = [(begin + 50, begin + 150, WAIT, 0), (begin + 160, begin + 160, MARK, 0)]
    write(rings[0, 0, 0], time=(0, 1000), clock=(begin, begin + 1000), seen=seen)
    wait, mark = read(rings)[0].events
    assert (wait.start, wait.end, mark.start) == (50, 150, 160)


def test_records_need_not_be_in_order(rings):
    """A block barrier is written when the next wait begins, behind a mark that came later."""
    seen = [(1200, 1200, MARK, 0), (1100, 1150, BAR, 0)]
    write(rings[0, 0, 0], time=(0, 1000), clock=(1000, 2000), seen=seen)
    first, second = read(rings)[0].events
    assert (first.site.kind, first.start, first.end) == ("block barrier", 100, 150)
    assert (second.site.kind, second.start) == ("mark", 200)


def test_multiprocessors_have_clocks_of_their_own(rings):
    write(rings[0, 0, 0], time=(1000, 2000), clock=(500, 1500), sm=3, seen=[(1000, 1000, MARK, 0)])
    write(rings[1, 0, 0], time=(1100, 2100), clock=(900_000, 901_000), sm=8, seen=[(900_400, 900_400, MARK, 0)])
    assert [warp.events[0].start for warp in read(rings)] == [500, 500]


def test_a_coarse_timer_is_averaged(rings):
    """Steps of 32 ns: within an SM the cycles decide."""
    for block in range(3):
        for warp in range(2):
            begin = 1000 * block + 7 * warp
            time = (begin // 32 * 32, (begin + 20_000) // 32 * 32)
            middle = begin + 10_000
            write(rings[block, warp, 0], time=time, clock=(begin, begin + 20_000), seen=[(middle, middle, MARK, 0)])
    found = read(rings)
    marks = [warp.events[0].start for warp in found]
    assert np.diff(marks) == pytest.approx([7, 993, 7, 993, 7], rel=2e-3)


def test_the_second_ring_is_another_lane_s(rings):
    write(rings[0, 0, 0], time=(0, 1000), clock=(0, 1000), seen=[(500, 500, MARK, 0)])
    write(rings[0, 0, 1], time=(0, 1000), clock=(0, 0), seen=[(300, 300, MARK, 7)], lane=9)
    put(rings[0, 0, 1], BEGIN_TIME, "u8", 0)
    (warp,) = read(rings)
    assert [(event.start, event.detail) for event in warp.events] == [(300, 7), (500, 0)]


def test_the_second_ring_of_an_earlier_launch_is_left_out(rings):
    write(rings[0, 0, 0], time=(5000, 6000), clock=(0, 1000), seen=[(500, 500, MARK, 0)])
    write(rings[0, 0, 1], time=(0, 4000), clock=(0, 0), seen=[(300, 300, MARK, 0)])
    (warp,) = read(rings)
    assert len(warp.events) == 1


def test_what_had_no_room(rings):
    seen = [(10 * i, 10 * i, MARK, i) for i in range(16)]
    write(rings[2, 0, 0], time=(0, 1000), clock=(0, 1000), seen=seen, count=40)
    (warp,) = read(rings)
    assert warp.dropped == 24
    assert [event.detail for event in warp.events] == list(range(16))


def test_what_both_lanes_saw_counts_once(rings):
    """A warp's second lane comes to block barriers too."""
    write(rings[0, 0, 0], time=(0, 1000), clock=(0, 1000), seen=[(500, 500, BAR, 1), (700, 700, BAR, 1)])
    write(rings[0, 0, 1], time=(0, 1000), clock=(0, 0), seen=[(500, 500, BAR, 1), (600, 600, MARK, 0)], lane=9)
    (warp,) = read(rings)
    assert [(event.site.kind, event.start) for event in warp.events] == [
        ("block barrier", 500),
        ("mark", 600),
        ("block barrier", 700),
    ]

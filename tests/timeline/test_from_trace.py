"""From records to a timeline: whose copies, who waited for whom, which phases."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import Barriers, Shared, Tiles
from numba_tma.kernels import PROBLEMS, kv_stream
from numba_tma.launch import tracing, use_backend
from numba_tma.timeline import model, of_trace
from numba_tma.timeline.model import Block
from numba_tma.trace import Trace
from numba_tma.trace.instrument import Instrumented, Site
from numba_tma.trace.records import Event, WarpTrace

WAIT = Site("mbarrier wait", "mbarrier.try_wait")
ARRIVE = Site("mbarrier arrive", "mbarrier.arrive")
ISSUE = Site("issue to mbarrier", "cp.async.bulk.tensor.2d", 2)
BAR = Site("block barrier", "bar.sync")
COMPUTE, LOAD, OWN = (Site("part", name) for name in ("compute", "load", "softmax"))
SMEM = Shared(tile=Tiles(2, (8, 32), np.float32), full=Barriers(2), empty=Barriers(2))
BASE = 1024
FULL = [BASE + SMEM.offsets["full"] + 8 * i for i in range(2)]
EMPTY = [BASE + SMEM.offsets["empty"] + 8 * i for i in range(2)]


class Made:
    """A traced launch whose warps are given."""

    name, grid, block, shared, plan, device = "made", (1, 1, 1), (64, 1, 1), SMEM, Trace(), "by hand"

    def __init__(self, *warps, sites=(COMPUTE,), dropped=0, unseen=()):
        self.instrumented = Instrumented(None, tuple(sites), unseen)
        self._warps = [
            WarpTrace(0, number, 3, BASE, 0.0, 1000.0, [Event(*event) for event in events], dropped)
            for number, events in enumerate(warps)
        ]

    def warps(self):
        return self._warps


def intervals(timeline, kind, row=None):
    found = [i for i in timeline.intervals if i.kind == kind and row in (None, i.row.name)]
    return [(i.start, i.end) for i in sorted(found, key=lambda i: i.start)]


def test_a_copy_is_in_flight_until_the_first_who_waits_has_it():
    timeline = of_trace(
        Made(
            [(ISSUE, 100, 120, FULL[0]), (WAIT, 150, 700, FULL[0]), (COMPUTE, 710, 900)],
            [(WAIT, 90, 690, FULL[0]), (COMPUTE, 700, 950)],
        )
    )
    (copy,) = [i for i in timeline.intervals if i.kind == model.COPY]
    assert (copy.row.name, copy.start, copy.end, copy.seen) == ("copies for full[0]", 100, 690, True)
    arrived = sorted((flow.target.name, flow.start, flow.end) for flow in timeline.flows if flow.name == "arrived")
    assert arrived == [("warp 0", 690, 700), ("warp 1", 690, 690)]
    assert timeline.blocks == [Block(0, 3)]


def test_a_copy_that_nobody_waited_for():
    timeline = of_trace(Made([(ISSUE, 100, 120, FULL[0]), (COMPUTE, 130, 800), (WAIT, 800, 830, FULL[0])]))
    (copy,) = [i for i in timeline.intervals if i.kind == model.COPY]
    assert (copy.end, copy.seen) == (830, False)


def test_the_next_phase_begins_behind_the_wait():
    events = []
    for turn in range(4):
        at = 200 * turn
        events += [(ISSUE, at, at + 10, FULL[turn % 2]), (WAIT, at + 20, at + 180, FULL[turn % 2])]
    timeline = of_trace(Made(events))
    assert intervals(timeline, model.COPY, "copies for full[0]") == [(0, 180), (400, 580)]
    assert intervals(timeline, model.COPY, "copies for full[1]") == [(200, 380), (600, 780)]
    assert intervals(timeline, model.PHASE, "full[1]") == [(0, 380), (380, 780)]


def test_two_issues_for_one_phase():
    timeline = of_trace(Made([(ISSUE, 100, 110, FULL[0])], [(ISSUE, 130, 140, FULL[0]), (WAIT, 150, 600, FULL[0])]))
    assert intervals(timeline, model.COPY) == [(100, 600)]


def test_the_last_to_arrive_ends_a_phase():
    timeline = of_trace(
        Made(
            [(ARRIVE, 200, 200, EMPTY[0]), (ARRIVE, 700, 700, EMPTY[0])],
            [(ARRIVE, 300, 300, EMPTY[0]), (ARRIVE, 650, 650, EMPTY[0])],
            [(ISSUE, 10, 20, FULL[0]), (WAIT, 50, 310, EMPTY[0]), (ISSUE, 320, 330, FULL[0])],
        )
    )
    assert intervals(timeline, model.PHASE, "empty[0]") == [(0, 300), (300, 700)]
    (flow,) = [flow for flow in timeline.flows if flow.name == "arrived at empty[0]"]
    assert (flow.source.name, flow.start, flow.target.name, flow.end) == ("warp 1", 300, "warp 2", 310)


def test_who_came_last_at_a_block_barrier():
    timeline = of_trace(Made([(BAR, 100, 100, 0), (BAR, 600, 600, 0)], [(BAR, 395, 395, 0), (BAR, 500, 500, 0)]))
    details = {(i.row.name, i.start, i.end): i.detail for i in timeline.intervals if i.kind == model.BARRIER}
    assert details == {
        ("warp 0", 100, 395): "warp 1 came last",
        ("warp 1", 395, 395): "",
        ("warp 1", 500, 600): "warp 0 came last",
        ("warp 0", 600, 600): "",
    }
    assert [(f.source.name, f.target.name) for f in timeline.flows] == [("warp 1", "warp 0"), ("warp 0", "warp 1")]


def test_a_block_barrier_that_some_only_arrive_at():
    """Two warps take turns: each waits for the other's arrival, and nobody waits where it arrives."""
    arrives = Site("block barrier arrive", "bar.arrive")
    timeline = of_trace(
        Made(
            [(BAR, 100, 100, 1), (arrives, 200, 200, 2), (BAR, 220, 220, 1)],
            [(arrives, 50, 50, 1), (BAR, 60, 60, 2), (arrives, 400, 400, 1)],
            sites=(),
        )
    )
    assert intervals(timeline, model.BARRIER, "warp 0") == [(100, 100), (220, 400)]
    assert intervals(timeline, model.BARRIER, "warp 1") == [(60, 200)]
    assert sorted((f.source.name, f.end, f.target.name) for f in timeline.flows) == [
        ("warp 0", 200, "warp 1"),
        ("warp 1", 400, "warp 0"),
    ]


def test_roles():
    timeline = of_trace(
        Made(
            [(WAIT, 0, 100, FULL[0]), (COMPUTE, 100, 200)],
            [(WAIT, 0, 10, EMPTY[0]), (ISSUE, 10, 20, FULL[0])],
            [(ISSUE, 10, 20, FULL[1]), (WAIT, 20, 100, FULL[1])],
            [(LOAD, 0, 100), (COMPUTE, 100, 200)],
            [],
        )
    )
    roles = [row.note for row in timeline.rows if row.kind == model.WARP]
    assert roles == ["consumer", "producer", "issues, computes", "copies, computes", ""]


def test_without_marks_what_is_left_is_computing():
    """But for moments too short to compute in, and for a producer."""
    timeline = of_trace(
        Made(
            [(WAIT, 0, 300, FULL[0]), (WAIT, 350, 500, FULL[0])],
            [(WAIT, 0, 400, EMPTY[0]), (ISSUE, 400, 410, FULL[0])],
            sites=(),
        )
    )
    assert intervals(timeline, model.COMPUTE, "warp 0") == [(500, 1000)]
    assert intervals(timeline, model.COMPUTE, "warp 1") == []


def test_a_wait_within_a_part_is_no_computing():
    timeline = of_trace(Made([(COMPUTE, 100, 500), (WAIT, 200, 300, FULL[0]), (OWN, 100, 600)]))
    assert intervals(timeline, model.COMPUTE) == [(100, 200), (300, 500)]
    assert intervals(timeline, model.PART) == [(100, 600)]


def test_groups_of_cp_async():
    """Two groups in flight; an empty one at the end keeps the count."""
    commit, wait = Site("cp.async commit", "cp.async.commit_group"), Site("cp.async wait", "cp.async.wait_group", 1)
    warp = [
        (commit, 0, 50, 1),
        (commit, 60, 110, 1),
        (wait, 120, 400),
        (commit, 500, 510, 0),
        (wait, 520, 800),
    ]
    later = [(site, start + 5, end + 5, *rest) for site, start, end, *rest in warp]
    timeline = of_trace(Made(warp, later))
    assert intervals(timeline, model.COPY, "cp.async 0") == [(0, 405)]
    assert intervals(timeline, model.COPY, "cp.async 1") == [(60, 805)]
    assert all(i.seen for i in timeline.intervals if i.kind == model.COPY)


def test_stores_and_tensor_cores():
    issue, commit = Site("issue in group", "cp.async.bulk.tensor.2d", 1), Site("bulk commit", "")
    fence, multiplied = Site("wgmma commit", "wgmma.commit_group"), Site("wgmma wait", "wgmma.wait_group", 0)
    timeline = of_trace(
        Made(
            [
                (issue, 100, 110),
                (commit, 115, 115),
                (Site("bulk wait", "cp.async.bulk.wait_group", 0), 120, 400),
                (fence, 500, 520, 1),
                (multiplied, 530, 700),
            ]
        )
    )
    assert intervals(timeline, model.STORE) == [(100, 400)]
    assert intervals(timeline, model.TENSOR) == [(500, 700)]


def test_notes():
    timeline = of_trace(Made([], dropped=7, unseen=("helper",)))
    assert "7 records had no room" in timeline.notes[0] and "helper" in timeline.notes[1]


@pytest.mark.parametrize("name", ["cp_async", "tma", "tma_ring"])
def test_kernels_in_the_simulator(name):
    """As many copies as there are tiles, whoever asks for them; and each is waited for."""
    case = kv_stream.PROBLEM.cases["quick", "sim"][0]
    arrays = kv_stream.PROBLEM.inputs(case, np.random.default_rng(0))
    with use_backend("sim"), tracing() as traced:
        kv_stream.PROBLEM.variant(name).bind(arrays)()
    timeline = of_trace(traced.launches[0])
    rows, columns = case.shape
    strips, tiles = -(-rows // 64), -(-columns // 64)
    assert timeline.whole and len(timeline.blocks) == strips
    for block in timeline.blocks:
        own = timeline.of([block])
        assert len(intervals(own, model.COPY)) == tiles
        assert len(intervals(own, model.COMPUTE)) == tiles * 4  # warps


def test_rows_never_overlap():
    """Within a row, intervals of a kind follow one another: a viewer could not show them otherwise."""
    for problem in PROBLEMS[:2]:
        case = problem.cases["quick", "sim"][0]
        for variant in problem.variants:
            arrays = problem.inputs(case, np.random.default_rng(0))
            with use_backend("sim"), tracing() as traced:
                variant.bind(arrays)()
            timeline = of_trace(traced.launches[0])
            by_row = {}
            for interval in timeline.intervals:
                by_row.setdefault((interval.row, interval.kind), []).append((interval.start, interval.end))
            for spans in by_row.values():
                spans.sort()
                assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))

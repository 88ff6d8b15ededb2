"""From the simulator's model of time to a timeline."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma.kernels import kv_stream
from numba_tma.kernels.problem import Case
from numba_tma.launch import use_backend
from numba_tma.sim.timing import Interval as Modelled
from numba_tma.sim.timing import Model
from numba_tma.timeline import model, overlap
from numba_tma.timeline.from_model import of_model
from numba_tma.timeline.model import Block

WARP = "SM 0/block 5/warp {}".format
COPIED = "the copy of warp {} at k.py:7 (cp.async.bulk)".format
FULL = f"mbarrier at k.py:8 (mbarrier.try_wait) on mbarrier full[0], completed by {COPIED(0)}"


def made(*intervals, played=1, blocks_per_sm=1):
    return Model(
        cycles=0,
        seconds=0,
        device="NVIDIA H200",
        provisional=False,
        blocks=1,
        blocks_per_sm=blocks_per_sm,
        resident=1,
        played=played,
        machine_code=True,
        intervals=[Modelled(*interval) for interval in intervals],
    )


def spans(timeline, kind, row=None):
    found = [i for i in timeline.intervals if i.kind == kind and row in (None, i.row.name)]
    return [(i.start, i.end) for i in sorted(found, key=lambda i: i.start)]


def test_copies_waits_and_arrows():
    timeline = of_model(
        made(
            (WARP(0), 0, 100, "run"),
            (WARP(0), 100, 710, "wait", FULL),
            (WARP(0), 710, 1200, "run"),
            ("SM 0/block 5/mbarrier full[0]", 50, 700, "phase", COPIED(0)),
        ),
        "made",
    )
    assert timeline.blocks == [Block(5, 0)] and timeline.whole
    assert spans(timeline, model.COPY, "copies for full[0]") == [(50, 700)]
    assert spans(timeline, model.PHASE, "full[0]") == [(0, 700)]
    assert spans(timeline, model.WAIT) == [(100, 710)]
    assert spans(timeline, model.COMPUTE) == [(710, 1200)]  # what came before was no work on a copy
    (flow,) = timeline.flows
    assert (flow.source.name, flow.start, flow.target.name, flow.end) == ("copies for full[0]", 700, "warp 0", 710)
    (hidden,) = overlap.by_block(timeline)
    assert (hidden.copy_ns, hidden.hidden_ns, hidden.at_least) == (650, 0, 0)


def test_what_is_waited_for_on_the_way_belongs_to_computing():
    timeline = of_model(
        made(
            (WARP(0), 0, 100, "wait", FULL),
            (WARP(0), 100, 200, "run"),
            (WARP(0), 200, 230, "wait", "shared memory at k.py:9 (ld) on k.py:9 (ld)"),
            (WARP(0), 230, 300, "run"),
            (WARP(0), 300, 340, "wait", "block barrier at k.py:10 (bar.sync) on warp 1 at k.py:10 (bar.sync)"),
            (WARP(0), 340, 380, "run"),  # too short to compute in
            (WARP(0), 380, 900, "wait", FULL),
        ),
        "made",
    )
    assert spans(timeline, model.COMPUTE) == [(100, 300)]
    assert spans(timeline, model.BARRIER) == [(300, 340)]


def test_threads_that_copy():
    barrier = "block barrier at k.py:3 (bar.sync) on warp 0 at k.py:3 (bar.sync)"
    timeline = of_model(
        made(
            (WARP(0), 0, 10, "run"),
            (WARP(0), 10, 700, "wait", "global memory at k.py:2 (st.shared) on k.py:2 (ld.global)"),
            (WARP(0), 700, 720, "wait", barrier),
            (WARP(0), 720, 1000, "run"),
            (WARP(0), 1000, 1010, "wait", barrier),
            (WARP(0), 1010, 1020, "run"),
            (WARP(0), 1020, 1500, "wait", "global memory at k.py:2 (st.shared) on k.py:2 (ld.global)"),
            (WARP(0), 1500, 1510, "wait", barrier),
            (WARP(0), 1510, 1800, "run"),
        ),
        "made",
    )
    assert spans(timeline, model.LOAD) == [(0, 720), (1010, 1510)]
    assert spans(timeline, model.COMPUTE) == [(720, 1000), (1510, 1800)]
    (hidden,) = overlap.by_block(timeline)
    assert hidden.hidden_ns == 0


def test_a_producer_and_its_consumers():
    empty = (
        "mbarrier at k.py:4 (mbarrier.try_wait) on mbarrier empty[0], completed by warp 0 at k.py:9 (mbarrier.arrive)"
    )
    timeline = of_model(
        made(
            (WARP(0), 0, 500, "wait", FULL),
            (WARP(0), 500, 800, "run"),
            (WARP(1), 0, 810, "wait", empty),
            (WARP(1), 810, 1200, "run"),
            ("SM 0/block 5/mbarrier full[0]", 10, 490, "phase", COPIED(1)),
            ("SM 0/block 5/mbarrier empty[0]", 800, 800, "phase", "warp 0 at k.py:9 (mbarrier.arrive)"),
            ("SM 0/block 5/copies", 1190, 1700, "flight", f"8192 bytes in, to mbarrier full[0], {COPIED(1)}"),
        ),
        "made",
    )
    assert [row.note for row in timeline.rows if row.kind == model.WARP] == ["consumer", "producer"]
    assert spans(timeline, model.COMPUTE) == [(500, 800)]
    assert spans(timeline, model.ISSUE, "warp 1") == [(810, 1190)]
    arrived = [flow for flow in timeline.flows if flow.name == "arrived at empty[0]"]
    assert [(flow.source.name, flow.start, flow.target.name) for flow in arrived] == [("warp 0", 800, "warp 1")]


def test_asking_for_copies_is_no_computing():
    timeline = of_model(
        made(
            (WARP(0), 0, 100, "wait", FULL),
            (WARP(0), 100, 400, "run"),
            (WARP(0), 400, 410, "wait", "block barrier at k.py:8 (bar.sync) on warp 0 at k.py:8 (bar.sync)"),
            (WARP(0), 410, 600, "run"),
            (WARP(0), 600, 900, "wait", FULL),
            ("SM 0/block 5/copies", 570, 1200, "flight", f"8192 bytes in, to mbarrier full[1], {COPIED(0)}"),
        ),
        "made",
    )
    assert spans(timeline, model.ISSUE) == [(410, 570)]
    assert spans(timeline, model.COMPUTE) == [(100, 400)]


def test_copies_of_cp_async_and_stores():
    groups = "cp.async groups at k.py:5 (cp.async.wait_group) on its copies"
    timeline = of_model(
        made(
            (WARP(0), 0, 500, "wait", groups),
            (WARP(0), 500, 900, "run"),
            ("SM 0/block 5/copies", 10, 480, "flight", "cp.async group of warp 0"),
            ("SM 0/block 5/copies", 20, 490, "flight", "cp.async group of warp 1"),
            ("SM 0/block 5/copies", 100, 800, "flight", "cp.async group of warp 0"),
            ("SM 0/block 5/copies", 850, 990, "flight", "8192 bytes out, warp 0 at k.py:7 (cp.async.bulk)"),
        ),
        "made",
    )
    assert spans(timeline, model.COPY, "cp.async 0") == [(10, 490)]
    assert spans(timeline, model.COPY, "cp.async 1") == [(100, 800)]
    assert spans(timeline, model.STORE) == [(850, 990)]


def test_parts_of_the_multiprocessor():
    timeline = of_model(
        made((WARP(0), 0, 100, "run"), ("SM 0/copy engine", 20, 60, "busy"), ("SM 1/copy engine", 0, 9, "busy")), "made"
    )
    rows = [row for row in timeline.rows if row.kind == model.SM_ROW]
    assert [(row.block.number, row.block.multiprocessor, row.name) for row in rows] == [
        (None, 0, "copy engine"),
        (None, 1, "copy engine"),
    ]
    own = timeline.of([Block(5, 0)])
    assert [row.name for row in own.rows] == ["warp 0", "copy engine"]
    assert "copy engine" in timeline.svg()


def test_products():
    """A row for each warpgroup: what its first warp's tensor core did."""
    group = "wgmma group of warp {} at k.py:7 (wgmma.commit_group), A in {}".format
    products = "SM 0/block 5/products"
    timeline = of_model(
        made(
            *((WARP(warp), 0, 900, "run") for warp in (4, 5, 8)),
            (products, 10, 300, "product", group(4, "shared memory")),
            (products, 12, 301, "product", group(5, "shared memory")),
            (products, 300, 400, "product", group(8, "shared memory")),
            (products, 400, 600, "product", group(4, "registers")),
        ),
        "made",
    )
    assert [row.name for row in timeline.rows if row.kind == model.TENSOR_ROW] == [
        "wgmma of warps 4-7",
        "wgmma of warps 8-11",
    ]
    assert spans(timeline, model.TENSOR, "wgmma of warps 4-7") == [(10, 300), (400, 600)]
    assert spans(timeline, model.TENSOR, "wgmma of warps 8-11") == [(300, 400)]
    details = [i.detail for i in timeline.intervals if i.kind == model.TENSOR]
    assert sum(detail.endswith("A in registers") for detail in details) == 1


def test_what_was_left_out():
    timeline = of_model(made((WARP(0), 0, 100, "run"), played=2, blocks_per_sm=9), "made")
    assert not timeline.whole


@pytest.mark.parametrize("name", ["plain", "cp_async", "tma", "tma_ring"])
def test_kernels_under_the_model(name):
    """As many copies as tiles, and two buffers hide what plain loads cannot."""
    case = Case((128, 512), "float16", {"work": 16})
    arrays = kv_stream.PROBLEM.inputs(case, np.random.default_rng(0))
    with use_backend("sim", model=True):
        report = kv_stream.PROBLEM.variant(name).bind(arrays, **case.options)()
    timeline = of_model(report.model, name)
    for hidden in overlap.by_block(timeline):
        if name == "plain":
            assert hidden.share == 0
        else:
            assert 0.3 < hidden.share <= 1
    if name != "plain":
        for block in timeline.blocks:
            assert len(spans(timeline.of([block]), model.COPY)) == 8

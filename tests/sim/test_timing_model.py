"""The model of time on whole launches: what must take longer does, what waits says for whom, and the sums are right."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from simulate import run_ptx

from numba_tma.sim import descriptor
from numba_tma.sim.timing import Model, ModelOptions, default_device

DEVICE = default_device()
NS = 1e3 / DEVICE.clock_mhz
NAMES = """
    .reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .f32 %f<20>; .reg .pred %p<8>;
    ld.param.u64 %rd0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
    mad.lo.u32 %r3, %r1, %r2, %r0;
"""


def model_of(body: str, grid: int, block: int, *arrays, options: ModelOptions | None = None, **launch) -> Model:
    report = run_ptx(NAMES + body, grid, block, *arrays, model=options or ModelOptions(), hazards=False, **launch)
    return report.model


def check_sums(model: Model) -> None:
    """Each warp's time is what it ran and what it waited, and its intervals follow each other without a gap."""
    for warp in model.warps:
        assert warp.run + sum(warp.waits.values()) == pytest.approx(warp.end - warp.start)
        rows = sorted((i for i in model.intervals if i.row == warp.row), key=lambda i: i.start)
        assert rows[0].start == pytest.approx(warp.start * NS) and rows[-1].end == pytest.approx(warp.end * NS)
        for before, after in pairwise(rows):
            assert after.start == pytest.approx(before.end)
    assert min(model.busy.values()) >= 0 and max(model.busy.values()) <= 1.001
    assert all(0 <= i.start < i.end for i in model.intervals)
    assert sum(stall.share for stall in model.stalls) <= 1.001


def test_no_model_unless_asked():
    report = run_ptx("ret;", 1, 32)
    assert report.model is None


def test_loads_that_depend_on_each_other_take_turns():
    """Pointers to the same place: each load waits for the one before; loads side by side wait once."""
    data = np.zeros(64, np.uint64)
    chase = "".join("ld.global.cg.u64 %rd1, [%rd0]; add.u64 %rd0, %rd0, %rd1;" for _ in range(10)) + "ret;"
    beside = "".join(f"ld.global.cg.u64 %rd{i + 1}, [%rd0+{8 * i}];" for i in range(10))
    beside += "".join(f"add.u64 %rd0, %rd0, %rd{i + 1};" for i in range(10)) + "ret;"
    warm = ModelOptions(warm=True)
    chased, side = model_of(chase, 1, 1, data, options=warm), model_of(beside, 1, 1, data, options=warm)
    latency = DEVICE.latencies["l2"]
    assert 10 * latency < chased.cycles < 10.7 * latency + 200
    assert latency < side.cycles < 1.5 * latency + 100
    assert chased.stalls[0].reason == "global memory" and chased.stalls[0].share > 0.8
    cold = model_of(chase, 1, 1, data)
    more = DEVICE.latencies["memory"] - latency
    assert cold.cycles - chased.cycles == pytest.approx(more / 10 * 10, rel=0.15), "one access misses, counted by line"
    check_sums(chased)
    check_sums(side)


@pytest.mark.parametrize(("ways", "wavefronts"), [(1, 1), (2, 2), (8, 8), (32, 32)])
def test_bank_conflicts_cost_wavefronts(ways, wavefronts):
    body = f"""
        .shared .align 16 .b8 tile[4096];
        mov.u32 %r4, tile; and.b32 %r5, %r0, 31; mul.lo.u32 %r5, %r5, {4 * ways}; add.u32 %r4, %r4, %r5;
        {"ld.volatile.shared.u32 %r6, [%r4];" * 64}
        ret;
    """
    model = model_of(body, 1, 256, np.zeros(1))
    assert model.cycles * model.busy["shared memory"] == pytest.approx(64 * 8 * wavefronts, rel=0.01)
    assert model.cycles > 0.95 * 64 * 8 * wavefronts, "the last loads are still queued when the warps exit"


STREAM = """
    .shared .align 128 .b8 tiles[16384];
    .shared .align 8 .b64 full[2];
    mov.u32 %r4, tiles; mov.u32 %r5, full; setp.eq.u32 %p0, %r0, 0; mov.u32 %r6, 0;
    @%p0 mbarrier.init.shared.b64 [%r5], 1; @%p0 mbarrier.init.shared.b64 [%r5+8], 1;
    bar.sync 0;
    AHEAD
    LOOP:
    NOW
    and.b32 %r7, %r6, MASK; mad.lo.u32 %r8, %r7, 8, %r5; mad.lo.u32 %r9, %r7, 8192, %r4;
    shr.u32 %r10, %r6, SHIFT; and.b32 %r10, %r10, 1;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r8], %r10; @!%p1 bra WAIT;
    mad.lo.u32 %r11, %r0, 16, %r9;
    COMPUTE
    bar.sync 0;
    add.u32 %r6, %r6, 1;
    REFILL
    setp.lt.u32 %p2, %r6, 16; @%p2 bra LOOP;
    ret;
"""


def stream(buffers: int, links: int) -> Model:
    """16 tiles of 8 KB, awaited and computed on with `links` dependent multiply-adds; refilled as the buffers allow."""
    copy = """
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [{bar}], 8192;
        @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{tile}], [%rd1], 8192, [{bar}];
        add.u64 %rd1, %rd1, 8192;
    """
    ahead = "mov.u64 %rd1, %rd0;" + "".join(
        copy.format(bar=f"%r5+{8 * s}", tile=f"%r4+{8192 * s}") for s in range(buffers)
    )
    text = STREAM.replace("AHEAD", ahead).replace("NOW", "").replace("MASK", str(buffers - 1))
    text = text.replace("SHIFT", str(buffers - 1))
    compute = "ld.shared.f32 %f0, [%r11];" + "fma.rn.f32 %f1, %f1, %f1, %f0;" * links
    refill = "setp.le.u32 %p3, %r6, LAST; and.pred %p3, %p3, %p0;".replace("LAST", str(16 - buffers))
    refill += copy.format(bar="%r8", tile="%r9").replace("@%p0", "@%p3")
    text = text.replace("COMPUTE", compute).replace("REFILL", refill)
    return model_of(text, 1, 128, np.zeros(16 * 8192, np.uint8))


def test_two_buffers_hide_the_copies():
    """With one buffer copy and computation take turns; with two the longer one counts."""
    alone = stream(1, 1).cycles
    models = {(buffers, links): stream(buffers, links) for buffers in (1, 2) for links in (100, 1000)}
    for model in models.values():
        check_sums(model)
    computing = models[2, 1000].cycles - models[2, 100].cycles
    assert models[1, 1000].cycles - models[1, 100].cycles == pytest.approx(computing, rel=0.35)
    assert models[1, 1000].cycles > 0.95 * alone + 16 * 1000 * 4
    # What two buffers save is most of what copying takes by itself, however long the computation is.
    assert models[1, 1000].cycles - models[2, 1000].cycles > 0.6 * alone
    waited = models[1, 100].stalls[0]
    assert waited.reason == "mbarrier" and "completed by the copy of warp 0" in waited.on
    flights = [i for i in models[1, 100].intervals if i.kind == "flight"]
    assert len(flights) == 16 and all("8192 bytes in, to mbarrier full" in i.detail for i in flights)
    phases = [i for i in models[1, 100].intervals if i.kind == "phase" and "mbarrier" in i.row]
    assert len(phases) == 16 and all("the copy of warp 0" in i.detail for i in phases)


def test_a_barrier_waits_for_the_slowest_warp():
    body = f"""
        shr.u32 %r4, %r0, 5; setp.ne.u32 %p0, %r4, 2; @%p0 bra THERE;
        {"mad.lo.u32 %r5, %r5, %r5, %r0;" * 500}
        THERE: bar.sync 0; ret;
    """
    model = model_of(body, 1, 128, np.zeros(1))
    check_sums(model)
    for warp in model.warps:
        waited = warp.waits.get("block barrier", 0.0)
        assert waited < 50 if warp.row.endswith("warp 2") else waited > 500 * 4
    assert all(stall.on.startswith("warp 2 at PTX line") for stall in model.stalls if stall.reason == "block barrier")


def test_groups_of_copies():
    body = """
        .shared .align 16 .b8 tile[4096];
        mov.u32 %r4, tile; mad.lo.u32 %r4, %r0, 16, %r4; mul.wide.u32 %rd1, %r0, 16; add.u64 %rd0, %rd0, %rd1;
        cp.async.cg.shared.global [%r4], [%rd0], 16; cp.async.commit_group;
        cp.async.wait_group 0;
        mov.u32 %r5, tile;
        cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r5], 512; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        ret;
    """
    model = model_of(body.replace("%r0, 16", "%r0, 0").replace("[%rd0], [%r5]", "[%rd0], [%r5]"), 1, 1, np.zeros(512))
    check_sums(model)
    reasons = {stall.reason for stall in model.stalls}
    assert {"cp.async groups", "bulk groups"} <= reasons
    assert model.cycles > DEVICE.latencies["memory"] + DEVICE.copy_store_write


def test_blocks_follow_each_other():
    """As many blocks as an SM holds run side by side, and then the next ones."""
    body = "mad.lo.u32 %r5, %r5, %r5, %r0;" * 400 + "ret;"
    options = ModelOptions()

    def cycles(blocks: int) -> float:
        return model_of(body, 132 * blocks, 1024, np.zeros(1), options=options, shared_bytes=100 * 1024).cycles

    one, two, four = (cycles(n) for n in (1, 2, 4))
    assert two < 2.2 * one and two > one
    assert four == pytest.approx(2 * two, rel=0.15)


def test_extrapolated_from_a_sample(rng):
    """A few of an SM's blocks, alone executed, say what all of them do."""
    body = """
        mul.wide.u32 %rd1, %r3, 4; add.u64 %rd0, %rd0, %rd1; ld.global.u32 %r4, [%rd0];
        add.u32 %r4, %r4, 1; st.global.u32 [%rd0], %r4; ret;
    """
    data = rng.integers(0, 100, 132 * 40 * 64).astype(np.uint32)
    before = data.copy()
    whole = model_of(body, 132 * 40, 64, data, options=ModelOptions(blocks=1000))
    assert (data == before + 1).all() and whole.played == whole.blocks_per_sm == 40 and not whole.notes
    sampled = model_of(body, 132 * 40, 64, data.copy(), options=ModelOptions(blocks=1000, sample=True))
    assert sampled.cycles == pytest.approx(whole.cycles, rel=0.02)
    # 32 blocks fit at a time; three times as many are played at least.
    few = model_of(
        body, 132 * 400, 64, np.zeros(132 * 400 * 64, np.uint32), options=ModelOptions(blocks=96, sample=True)
    )
    many = replace(ModelOptions(), blocks=1000, sample=True)
    all_played = model_of(body, 132 * 400, 64, np.zeros(132 * 400 * 64, np.uint32), options=many)
    assert few.played == 96 and all_played.played == 400
    assert few.cycles == pytest.approx(all_played.cycles, rel=0.1)
    assert "extrapolated" in few.notes[0] and "incomplete" in few.notes[1]


def test_a_sample_runs_its_blocks_only():
    out = np.zeros(264, np.uint32)
    body = "mul.wide.u32 %rd1, %r1, 4; add.u64 %rd0, %rd0, %rd1; st.global.u32 [%rd0], 1; ret;"
    model_of(body, 264, 1, out, options=ModelOptions(sample=True))
    assert np.nonzero(out)[0].tolist() == [0, 132]


def test_clusters_are_played_on_an_sm_each():
    body = """
        .shared .align 16 .b8 tile[1024];
        mov.u32 %r4, tile; mov.u32 %r5, %cluster_ctarank; setp.eq.u32 %p0, %r5, 0; @%p0 bra EARLY;
        LATE
        EARLY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        xor.b32 %r5, %r5, 1;
        mapa.shared::cluster.u32 %r6, %r4, %r5; st.shared.u32 [%r4], %r0;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        ld.shared::cluster.u32 %r7, [%r6]; add.u32 %r7, %r7, 1;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        ret;
    """
    body = body.replace("LATE", "mad.lo.u32 %r9, %r9, %r9, %r0;" * 100)
    model = model_of(body, 4, 32, np.zeros(1), cluster=2)
    check_sums(model)
    assert {warp.row for warp in model.warps} == {"SM 0/block 0/warp 0", "SM 1/block 1/warp 0"}
    early, late = (warp.waits["cluster barrier"] for warp in sorted(model.warps, key=lambda warp: warp.row))
    assert early > late + 100 * 4
    assert any(i.row == "cluster 0/barrier" for i in model.intervals)


def test_tensor_copies_bring_what_is_promoted(rng):
    """A box of half the rows' bytes brings whole rows into L2 where the map says 256 B: twice the bytes from memory."""
    data = rng.standard_normal((4096, 64)).astype(np.float32)
    body = """
        .shared .align 128 .b8 tile[8192]; .shared .align 8 .b64 full;
        mov.u32 %r4, tile; mov.u32 %r5, full; mov.u64 %rd1, p1; cvta.param.u64 %rd1, %rd1;
        mbarrier.init.shared.b64 [%r5], 1; mov.u32 %r6, 0; mov.u32 %r7, 0; mov.u32 %r8, 0;
        LOOP:
        mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 8192;
        cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r4], [%rd1, {%r6, %r7}], [%r5];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r5], %r8; @!%p1 bra WAIT;
        xor.b32 %r8, %r8, 1; add.u32 %r7, %r7, 64; setp.lt.u32 %p2, %r7, 4096; @%p2 bra LOOP;
        ret;
    """
    asked = {}
    for promotion in (descriptor.L2Promotion.NONE, descriptor.L2Promotion.B256):
        from numba_tma import TensorMap
        from numba_tma.sim import GlobalMemory, launch

        memory = GlobalMemory()
        address = memory.map(data)
        name = "none" if promotion == descriptor.L2Promotion.NONE else "256B"
        tensor_map = TensorMap(data, (64, 32), l2_promotion=name).encode_sim(address)
        text = (
            ".version 8.3\n.target sm_90a\n.address_size 64\n"
            ".visible .entry kernel(.param .u64 p0, .param .align 64 .b8 p1[128])\n{\n" + NAMES + body + "\n}\n"
        )
        report = launch(
            text, grid=1, block=1, params=[address.to_bytes(8, "little"), tensor_map], memory=memory, model=True
        )
        model = report.model
        asked[name] = model.busy["from memory"] * model.cycles
    assert asked["256B"] == pytest.approx(2 * asked["none"], rel=0.01)


def test_what_is_read_again_comes_from_l2():
    body = """
        mul.wide.u32 %rd1, %r0, 16; add.u64 %rd1, %rd0, %rd1; mov.u32 %r4, 0;
        LOOP: ld.global.cg.v4.u32 {%r10, %r11, %r12, %r13}, [%rd1]; add.u32 %r5, %r5, %r10;
        add.u32 %r4, %r4, 1; setp.lt.u32 %p0, %r4, REPEATS; @%p0 bra LOOP; ret;
    """
    once = model_of(body.replace("REPEATS", "1"), 1, 128, np.zeros(2048, np.uint8))
    often = model_of(body.replace("REPEATS", "8"), 1, 128, np.zeros(2048, np.uint8))
    from_memory = [m.busy["from memory"] * m.cycles for m in (once, often)]
    from_l2 = [m.busy["from L2"] * m.cycles for m in (once, often)]
    assert from_memory[1] == pytest.approx(from_memory[0], rel=0.01)
    assert from_l2[1] == pytest.approx(8 * from_l2[0], rel=0.01)
    # By way of L1 they do not even come from L2 again.
    cached = model_of(body.replace("REPEATS", "8").replace("global.cg", "global"), 1, 128, np.zeros(2048, np.uint8))
    assert cached.busy["from L2"] * cached.cycles == pytest.approx(from_l2[0], rel=0.01)


def test_clock_readings_are_timed():
    body = "mov.u64 %rd1, %clock64; bar.sync 0; mov.u64 %rd2, %clock64; sub.u64 %rd2, %rd2, %rd1; ret;"
    model = model_of(body, 1, 64, np.zeros(1))
    assert sorted(model.clocks) == [(0, 0), (0, 1)]
    for first, second in model.clocks.values():
        assert second - first >= DEVICE.barriers["block"] * NS


def test_intervals_can_be_limited():
    model = model_of("bar.sync 0;" * 20 + "ret;", 1, 256, np.zeros(1), options=ModelOptions(intervals=10))
    assert len(model.intervals) == 10 and model.truncated
    assert "modelled:" in str(model) and model.as_dict()["cycles"] == model.cycles


def test_waiting_for_a_block_that_is_not_played_is_noted():
    """Block 1 goes to another SM; what block 0 waits for is as if it had come."""
    body = """
        setp.eq.u32 %p0, %r1, 0; @%p0 bra SECOND;
        st.release.gpu.global.u32 [%rd0], 1; ret;
        SECOND: ld.acquire.gpu.global.u32 %r4, [%rd0]; setp.eq.u32 %p1, %r4, 0; @%p1 bra SECOND;
        ret;
    """
    out = np.zeros(1, np.uint32)
    model = model_of(body, 2, 1, out)
    assert out[0] == 1 and model.cycles > 0


def test_a_barrier_that_some_only_arrive_at():
    """Who waits at it is late by what the others do before they arrive, whatever these run meanwhile."""
    body = f"""
        shr.u32 %r4, %r0, 5; setp.eq.u32 %p0, %r4, 0; @%p0 bra WORKS;
        bar.sync 2, 64; ret;
        WORKS: mov.u32 %r6, 0;
        AGAIN: {"mad.lo.u32 %r5, %r5, %r5, %r0;" * 100}
        add.u32 %r6, %r6, 1; setp.lt.u32 %p1, %r6, 5; @%p1 bra AGAIN;
        bar.arrive 2, 64; ret;
    """
    model = model_of(body, 1, 64, np.zeros(1))
    check_sums(model)
    waits = {warp.row.split()[-1]: warp.waits.get("block barrier", 0.0) for warp in model.warps}
    assert waits["0"] == 0 and waits["1"] > 500 * 4
    (phase,) = (i for i in model.intervals if i.row == "SM 0/block 0/barrier 2")
    assert "bar.arrive" in phase.detail

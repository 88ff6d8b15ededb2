"""mbarrier semantics through raw PTX: phases, counts, transactions, states, parity, remote arrivals, mistakes."""

from __future__ import annotations

import numpy as np
import pytest
from simulate import run_ptx

from numba_tma import sim
from numba_tma.sim.mbarrier import is_initialised, pack, unpack

BARRIER = """
    .shared .align 8 .b64 bar; .shared .align 8 .b64 more;
    .reg .b32 %r<16>; .reg .b64 %rd<16>; .reg .pred %p<16>;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, bar;
    ld.param.u64 %rd0, [p0];
"""


def init(count: int) -> str:
    """Thread 0 initialises the barrier; then all see it."""
    return f"""
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared::cta.b64 [%r1], {count};
    bar.sync 0;
    """


def test_the_word_keeps_its_fields(rng):
    for _ in range(200):
        phase, tx = int(rng.integers(2)), int(rng.integers(-(2**20) + 1, 2**20))
        arrivals, pending = int(rng.integers(1, 2**20)), int(rng.integers(2**20))
        word = pack(phase, tx, arrivals, pending)
        assert 0 <= word < 1 << 64
        assert unpack(word) == (phase, tx, arrivals, pending)
        assert is_initialised(word)
    assert not is_initialised(0)
    assert not is_initialised((1 << 64) - 1)


def test_a_phase_completes_with_its_last_arrival():
    body = (
        BARRIER
        + init(3)
        + """
        @!%p0 bra DONE;
        mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 1;   // the phase before the first counts as complete
        mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0;
        mbarrier.arrive.shared.b64 %rd1, [%r1];
        mbarrier.arrive.shared.b64 %rd2, [%r1], 1;
        mbarrier.test_wait.shared.b64 %p3, [%r1], %rd1;
        mbarrier.pending_count.b64 %r2, %rd1;
        mbarrier.pending_count.b64 %r3, %rd2;
        mbarrier.arrive.shared.b64 %rd3, [%r1];
        mbarrier.test_wait.shared.b64 %p4, [%r1], %rd1;
        mbarrier.test_wait.parity.shared.b64 %p5, [%r1], 0;
        mbarrier.test_wait.parity.shared.b64 %p6, [%r1], 1;
        selp.u32 %r4, 1, 0, %p1;
        selp.u32 %r5, 2, 0, %p2;
        selp.u32 %r6, 4, 0, %p3;
        selp.u32 %r7, 8, 0, %p4;
        selp.u32 %r8, 16, 0, %p5;
        selp.u32 %r9, 32, 0, %p6;
        or.b32 %r4, %r4, %r5; or.b32 %r4, %r4, %r6; or.b32 %r4, %r4, %r7; or.b32 %r4, %r4, %r8; or.b32 %r4, %r4, %r9;
        st.global.u32 [%rd0], %r4;
        st.global.u32 [%rd0+4], %r2;
        st.global.u32 [%rd0+8], %r3;
        DONE: ret;
    """
    )
    out = np.zeros(3, np.uint32)
    run_ptx(body, 1, 32, out)
    assert out.tolist() == [1 + 8 + 16, 3, 2]


def test_ping_pong_between_two_warps_of_many_blocks():
    # Warp 0 writes a number and arrives (32 arrivals); warp 1 waits for the phase, adds it up, arrives at `empty`.
    body = """
        .shared .align 8 .b64 full; .shared .align 8 .b64 empty; .shared .align 4 .b8 box[128];
        .reg .b32 %r<16>; .reg .b64 %rd<6>; .reg .pred %p<6>;
        mov.u32 %r0, %tid.x; mov.u32 %r1, full; mov.u32 %r2, empty; mov.u32 %r3, box;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r1], 32;
        @%p0 mbarrier.init.shared.b64 [%r2], 1;
        bar.sync 0;
        and.b32 %r4, %r0, 31; shl.b32 %r5, %r4, 2; add.u32 %r3, %r3, %r5;
        mov.u32 %r6, 0; mov.u32 %r7, 0;
        mov.u32 %r12, %ctaid.x;
        setp.ge.u32 %p1, %r0, 32;
        @%p1 bra CONSUMER;
        PRODUCER:
        and.b32 %r8, %r6, 1; xor.b32 %r8, %r8, 1;
        W1: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], %r8;
        @!%p2 bra W1;
        add.u32 %r9, %r6, %r4; add.u32 %r9, %r9, %r12;
        st.shared.u32 [%r3], %r9;
        mbarrier.arrive.shared.b64 _, [%r1];
        add.u32 %r6, %r6, 1;
        setp.lt.u32 %p3, %r6, 9;
        @%p3 bra PRODUCER;
        ret;
        CONSUMER:
        and.b32 %r8, %r6, 1;
        W2: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r8;
        @!%p2 bra W2;
        ld.shared.u32 %r9, [%r3];
        add.u32 %r7, %r7, %r9;
        bar.warp.sync 0xffffffff;
        setp.eq.u32 %p4, %r4, 0;
        @%p4 mbarrier.arrive.shared.b64 _, [%r2];
        add.u32 %r6, %r6, 1;
        setp.lt.u32 %p3, %r6, 9;
        @%p3 bra CONSUMER;
        ld.param.u64 %rd0, [p0];
        mad.lo.u32 %r10, %r12, 32, %r4;
        mul.wide.u32 %rd1, %r10, 4;
        add.u64 %rd0, %rd0, %rd1;
        st.global.u32 [%rd0], %r7;
        ret;
    """
    out = np.zeros((20, 32), np.uint32)
    run_ptx(body, 20, 64, out)
    block, lane = np.indices((20, 32))
    np.testing.assert_array_equal(out, 9 * (lane + block) + 36)


def test_expected_bytes_hold_the_phase_back():
    body = (
        BARRIER
        + init(1)
        + """
        @!%p0 bra DONE;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 96;
        mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;
        mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%r1], 64;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0;
        mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%r1], 32;
        mbarrier.test_wait.parity.shared.b64 %p3, [%r1], 0;
        // The bytes may come before they are expected, while the arrival is pending.
        mbarrier.complete_tx.shared::cluster.relaxed.cluster.b64 [%r1], 16;
        mbarrier.expect_tx.relaxed.cta.shared.b64 [%r1], 16;
        mbarrier.test_wait.parity.shared.b64 %p4, [%r1], 1;
        mbarrier.arrive.shared.b64 _, [%r1];
        mbarrier.test_wait.parity.shared.b64 %p5, [%r1], 1;
        selp.u32 %r4, 1, 0, %p1; selp.u32 %r5, 2, 0, %p2; selp.u32 %r6, 4, 0, %p3;
        selp.u32 %r7, 8, 0, %p4; selp.u32 %r8, 16, 0, %p5;
        add.u32 %r4, %r4, %r5; add.u32 %r4, %r4, %r6; add.u32 %r4, %r4, %r7; add.u32 %r4, %r4, %r8;
        st.global.u32 [%rd0], %r4;
        DONE: ret;
    """
    )
    out = np.zeros(1, np.uint32)
    run_ptx(body, 1, 32, out)
    assert out[0] == 4 + 16


def test_arrive_drop_lowers_the_next_phases():
    body = (
        BARRIER
        + init(2)
        + """
        @!%p0 bra DONE;
        mbarrier.arrive_drop.shared.b64 _, [%r1];
        mbarrier.arrive.shared.b64 _, [%r1];
        mbarrier.arrive.shared.b64 %rd1, [%r1];    // the second phase takes one arrival only
        mbarrier.test_wait.shared.b64 %p1, [%r1], %rd1;
        selp.u32 %r4, 1, 0, %p1;
        st.global.u32 [%rd0], %r4;
        DONE: ret;
    """
    )
    out = np.zeros(1, np.uint32)
    run_ptx(body, 1, 32, out)
    assert out[0] == 1


def test_arrivals_of_a_warp_run_through_phases():
    # A barrier for one arrival at which 32 lanes arrive: 32 phases, so parity 0 is the current one again.
    body = (
        BARRIER
        + init(1)
        + """
        mbarrier.arrive.shared.b64 %rd1, [%r1];
        bar.sync 0;
        mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 1;
        selp.u32 %r4, 1, 0, %p1; selp.u32 %r5, 2, 0, %p2;
        add.u32 %r4, %r4, %r5;
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd0, %rd0, %rd2;
        st.global.u32 [%rd0], %r4;
        ret;
    """
    )
    out = np.zeros(32, np.uint32)
    run_ptx(body, 1, 32, out)
    assert (out == 2).all()


def test_arriving_at_a_peer():
    body = """
        .shared .align 8 .b64 bar;
        .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<4>;
        mov.u32 %r0, %tid.x; mov.u32 %r1, bar; mov.u32 %r2, %cluster_ctarank;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r1], 3;
        barrier.cluster.arrive; barrier.cluster.wait;
        @!%p0 bra WAIT;
        mov.u32 %r3, 0;
        EACH:
        setp.eq.u32 %p1, %r3, %r2;
        @%p1 bra NEXT;
        mapa.shared::cluster.u32 %r4, %r1, %r3;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
        NEXT:
        add.u32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, 4;
        @%p2 bra EACH;
        WAIT:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1], 0;
        @!%p3 bra WAIT;
        ld.param.u64 %rd0, [p0];
        mov.u32 %r5, %ctaid.x;
        mul.wide.u32 %rd1, %r5, 4; add.u64 %rd0, %rd0, %rd1;
        @%p0 st.global.u32 [%rd0], 1;
        ret;
    """
    out = np.zeros(8, np.uint32)
    run_ptx(body, 8, 64, out, cluster=4)
    assert (out == 1).all()


def test_a_missing_arrival_is_a_deadlock_with_its_barrier():
    body = (
        BARRIER
        + init(33)
        + """
        mbarrier.arrive.shared.b64 _, [%r1];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
        @!%p1 bra WAIT;
        ret;
    """
    )
    with pytest.raises(sim.Deadlock) as caught:
        run_ptx(body, 2, 32, np.zeros(1, np.uint32))
    report = caught.value.report
    assert "block 0 and 1 more block, warp 0: 64 threads at" in report
    assert "mbarrier.try_wait.parity.shared.b64" in report
    assert "waits for the phase of parity 0 of mbarrier bar (shared address 0x400)" in report
    assert "1 of 33 arrivals missing" in report


def test_missing_bytes_are_a_deadlock_with_their_number():
    body = (
        BARRIER
        + init(1)
        + """
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 1024;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
        @!%p1 bra WAIT;
        ret;
    """
    )
    with pytest.raises(sim.Deadlock, match="1024 bytes missing") as caught:
        run_ptx(body, 1, 32, np.zeros(1, np.uint32))
    assert "arrivals missing" not in caught.value.report


def test_mistakes_have_names():
    use = BARRIER + "mbarrier.arrive.shared.b64 _, [%r1]; ret;"
    with pytest.raises(
        sim.SimError,
        match="arrive on an mbarrier that is not initialised .mbarrier bar .shared address 0x400. of block 0",
    ):
        run_ptx(use, 1, 1, np.zeros(1, np.uint32))
    wait = BARRIER + "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0; ret;"
    with pytest.raises(sim.SimError, match="try_wait on an mbarrier that is not initialised"):
        run_ptx(wait, 1, 1, np.zeros(1, np.uint32))
    many = BARRIER + init(2) + "mbarrier.arrive.shared.b64 _, [%r1], 3; ret;"
    with pytest.raises(sim.SimError, match="3 arrivals at an mbarrier with 2 pending"):
        run_ptx(many, 1, 1, np.zeros(1, np.uint32))
    with pytest.raises(sim.SimError, match="must be from 1 to 1048575"):
        run_ptx(BARRIER + init(0) + "ret;", 1, 1, np.zeros(1, np.uint32))
    crooked = BARRIER + "add.u32 %r1, %r1, 4; mbarrier.init.shared.b64 [%r1], 1; ret;"
    with pytest.raises(sim.Misaligned, match="not a multiple of 8"):
        run_ptx(crooked, 1, 1, np.zeros(1, np.uint32))
    gone = BARRIER + init(1) + "mbarrier.inval.shared.b64 [%r1]; mbarrier.arrive.shared.b64 _, [%r1]; ret;"
    with pytest.raises(sim.SimError, match="not initialised"):
        run_ptx(gone, 1, 1, np.zeros(1, np.uint32))


@pytest.mark.parametrize(("parity", "passes"), [(0, 0), (1, 1), (2, 0), (-1, 1), (-2, 0), (0x7FFFFFFF, 1)])
def test_the_lowest_bit_of_a_parity_counts(parity, passes):
    out = np.full(1, 9, np.uint32)
    ask = f"mov.b32 %r2, {parity}; mbarrier.test_wait.parity.shared.b64 %p1, [%r1], %r2; selp.u32 %r2, 1, 0, %p1;"
    run_ptx(BARRIER + init(1) + ask + "ld.param.u64 %rd1, [p0]; st.global.u32 [%rd1], %r2; ret;", 1, 1, out)
    assert out[0] == passes


def test_try_wait_may_return_false():
    # A kernel that counts how often it asked is not stuck: after some tries it goes on without the barrier.
    body = (
        BARRIER
        + init(1)
        + """
        mov.u32 %r2, 0;
        AGAIN:
        mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
        add.u32 %r2, %r2, 1;
        setp.lt.u32 %p2, %r2, 5;
        @%p2 bra AGAIN;
        st.global.u32 [%rd0], %r2;
        ret;
    """
    )
    out = np.zeros(1, np.uint32)
    run_ptx(body, 1, 1, out)
    assert out[0] == 5

"""Orders of warps: what a missing barrier hides shows under some, what is right is right under all."""

from __future__ import annotations

import numpy as np
import pytest
from simulate import run_ptx

from numba_tma import sim
from numba_tma.sim.schedules import WARP_ORDERS

# Each thread stores its element and takes the one that the opposite thread stored.
REVERSE = """
    .shared .align 4 .b8 tile[1024];
    .reg .b32 %r<8>; .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [p0]; mov.u32 %r0, %tid.x; mov.u32 %r5, %ntid.x; mov.u32 %r6, %ctaid.x;
    mad.lo.u32 %r7, %r6, %r5, %r0; mul.wide.u32 %rd1, %r7, 4; add.u64 %rd0, %rd0, %rd1;
    ld.global.u32 %r1, [%rd0];
    mov.u32 %r2, tile; mad.lo.u32 %r3, %r0, 4, %r2;
    st.shared.u32 [%r3], %r1;
    BARRIER
    sub.u32 %r4, %r5, %r0; sub.u32 %r4, %r4, 1; mad.lo.u32 %r4, %r4, 4, %r2;
    ld.shared.u32 %r1, [%r4];
    st.global.u32 [%rd0], %r1;
    ret;
"""


def reversed_by(barrier: str, blocks: int, threads: int, **options) -> np.ndarray:
    data = np.arange(blocks * threads, dtype=np.uint32)
    run_ptx(REVERSE.replace("BARRIER", barrier), blocks, threads, data, **options)
    return data.reshape(blocks, threads)


@pytest.mark.parametrize("order", WARP_ORDERS)
def test_a_missing_barrier(order, seed):
    expected = np.arange(3 * 96, dtype=np.uint32).reshape(3, 96)[:, ::-1]
    assert (reversed_by("bar.sync 0;", 3, 96, warp_order=order, seed=seed) == expected).all()
    wrong = reversed_by("", 3, 96, warp_order=order, seed=seed) != expected
    if order in ("together", "blocks"):
        assert not wrong.any(), "right by luck"
    elif order == "ascending":
        assert wrong[:, :32].all() and not wrong[:, 32:].any()
    elif order == "descending":
        assert wrong[:, 64:].all() and not wrong[:, :64].any()
    else:
        assert wrong[:, [0, 95]].any(axis=1).all(), "one of two warps came first"


def test_random_orders_follow_their_seed(seed):
    first, again = (reversed_by("", 4, 256, warp_order="random", seed=seed) for _ in range(2))
    assert (first == again).all()
    others = [reversed_by("", 4, 256, warp_order="random", seed=seed + i) for i in range(1, 6)]
    assert any((other != first).any() for other in others)


@pytest.mark.parametrize("order", WARP_ORDERS)
def test_a_warp_waited_for_in_a_loop_gets_its_turn(order, seed):
    """Each warp polls until the one before it, or the one after it, has passed the number on."""
    body = """
        .shared .align 4 .b8 count[4];
        .reg .b32 %r<8>; .reg .b64 %rd<2>; .reg .pred %p<4>;
        ld.param.u64 %rd0, [p0]; ld.param.u32 %r5, [p1];
        mov.u32 %r0, %tid.x; mov.u32 %r2, count; shr.u32 %r1, %r0, 5; sub.u32 %r6, 7, %r1;
        setp.ne.u32 %p0, %r5, 0; selp.b32 %r1, %r1, %r6, %p0;
        setp.eq.u32 %p1, %r0, 0; mov.u32 %r3, 0; @%p1 st.volatile.shared.u32 [%r2], %r3;
        bar.sync 0;
        POLL: ld.volatile.shared.u32 %r3, [%r2]; setp.ne.u32 %p2, %r3, %r1; @%p2 bra POLL;
        bar.warp.sync -1;
        and.b32 %r4, %r0, 31; setp.eq.u32 %p3, %r4, 0; add.u32 %r3, %r3, 1;
        @%p3 st.volatile.shared.u32 [%r2], %r3;
        bar.sync 0;
        ld.volatile.shared.u32 %r3, [%r2]; @%p1 st.global.u32 [%rd0], %r3;
        ret;
    """
    for upwards in (0, 1):
        out = np.zeros(1, np.uint32)
        run_ptx(body, 1, 256, out, np.uint32(upwards), warp_order=order, seed=seed, hazards=False)
        assert out[0] == 8


@pytest.mark.parametrize("order", WARP_ORDERS)
def test_blocks_wait_for_each_other(order, seed):
    """The last block goes first, each lets the one before it go."""
    body = """
        .reg .b32 %r<5>; .reg .b64 %rd<2>; .reg .pred %p<2>;
        ld.param.u64 %rd0, [p0]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %nctaid.x;
        sub.u32 %r1, %r1, 1; sub.u32 %r1, %r1, %r0;
        POLL: ld.acquire.gpu.global.u32 %r2, [%rd0]; setp.ne.u32 %p0, %r2, %r1; @%p0 bra POLL;
        bar.sync 0;
        mov.u32 %r3, %tid.x; setp.eq.u32 %p1, %r3, 0; add.u32 %r2, %r2, 1;
        @%p1 st.release.gpu.global.u32 [%rd0], %r2;
        ret;
    """
    out = np.zeros(1, np.uint32)
    run_ptx(body, 40, 64, out, warp_order=order, seed=seed)
    assert out[0] == 40


@pytest.mark.parametrize("order", WARP_ORDERS)
def test_deadlocks_are_still_found(order):
    with pytest.raises(sim.Deadlock, match="20 have come"):
        run_ptx("""
            .reg .b32 %r<2>; .reg .pred %p<2>;
            mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 20;
            @%p0 bra HERE;
            DEAD: bar.sync 1, 128; ret;
            HERE: bar.sync 0; ret;
        """, 2, 64, warp_order=order)  # fmt: skip
    with pytest.raises(sim.Deadlock, match="poll for a change"):
        run_ptx("""
            .reg .b32 %r<2>; .reg .b64 %rd<2>; .reg .pred %p<2>; ld.param.u64 %rd0, [p0];
            POLL: ld.volatile.global.u32 %r0, [%rd0]; setp.eq.u32 %p0, %r0, 0; @%p0 bra POLL;
            ret;
        """, 2, 64, np.zeros(1, np.uint32), warp_order=order)  # fmt: skip


def test_what_schedules_are_there():
    listed = sim.schedules(random=3, seed=5)
    assert len(listed) == 9 and listed[0] == {"policy": "fifo"}
    assert [schedule["seed"] for schedule in listed[-3:]] == [5, 6, 7]
    assert {schedule.get("warp_order", "together") for schedule in listed} == set(WARP_ORDERS)
    assert sim.first_schedules(2) == listed[:2] and len(sim.first_schedules(20)) == 20
    assert sim.named(listed[2]) == "copies late, warps descending"
    assert sim.named(listed[-1]) == "copies random, warps random, seed 7"


def test_unknown_orders_are_refused():
    with pytest.raises(ValueError, match="warp_order 'fair' is none of together, ascending"):
        run_ptx("ret;", 1, 32, warp_order="fair")


@pytest.mark.parametrize("order", WARP_ORDERS)
def test_a_lone_lane_waits_for_its_warp(order, seed):
    """One lane comes to the shuffle before all others, or after them."""
    body = """
        .reg .b32 %r<8>; .reg .b64 %rd<3>; .reg .pred %p<3>;
        ld.param.u64 %rd0, [p0]; ld.param.u32 %r4, [p1]; ld.param.u32 %r5, [p2];
        mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1;
        mul.lo.u32 %r1, %r0, 3; and.b32 %r2, %r0, 31;
        setp.eq.u32 %p0, %r2, %r4; setp.eq.u32 %p1, %r5, 0; xor.pred %p0, %p0, %p1;
        @%p0 bra TOGETHER;
        add.u32 %r1, %r1, 1;
        TOGETHER:
        shfl.sync.bfly.b32 %r3, %r1, 16, 31, -1;
        st.global.u32 [%rd0], %r3;
        ret;
    """
    for lane, early in ((0, 0), (0, 1), (31, 0), (31, 1)):
        out = np.zeros(96, np.uint32)
        run_ptx(body, 1, 96, out, np.uint32(lane), np.uint32(early), warp_order=order, seed=seed)
        thread = np.arange(96) ^ 16
        alone = thread % 32 == lane
        assert (out == 3 * thread + (alone if not early else ~alone)).all()

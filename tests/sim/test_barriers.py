"""Block barriers with numbers and counts, reductions over them, warp barriers, cluster barriers; and deadlocks."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, int32
from simulate import run, run_ptx

from numba_tma import sim


def test_producer_and_consumer_warps_by_named_barriers():
    # Warp 0 writes and arrives at 1; warp 1 waits at 1, reads, arrives at 2; warp 0 waits at 2. Four rounds.
    body = """
        .shared .align 4 .b8 buffer[128];
        .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<3>;
        ld.param.u64 %rd1, [p0];
        mov.u32 %r1, %tid.x;
        and.b32 %r2, %r1, 31;
        shl.b32 %r3, %r2, 2;
        mov.u32 %r4, buffer;
        add.u32 %r4, %r4, %r3;
        mov.u32 %r5, 0;
        setp.lt.u32 %p1, %r1, 32;
        @!%p1 bra CONSUMER;
        PRODUCE:
        mad.lo.u32 %r6, %r5, 100, %r2;
        st.shared.u32 [%r4], %r6;
        bar.arrive 1, 64;
        bar.sync 2, 64;
        add.u32 %r5, %r5, 1;
        setp.lt.u32 %p2, %r5, 4;
        @%p2 bra PRODUCE;
        ret;
        CONSUMER:
        bar.sync 1, 64;
        ld.shared.u32 %r6, [%r4];
        mad.lo.u32 %r7, %r5, 32, %r2;
        mul.wide.u32 %rd2, %r7, 4;
        add.u64 %rd2, %rd2, %rd1;
        st.global.u32 [%rd2], %r6;
        bar.arrive 2, 64;
        add.u32 %r5, %r5, 1;
        setp.lt.u32 %p2, %r5, 4;
        @%p2 bra CONSUMER;
        ret;
    """
    out = np.zeros((4, 32), np.uint32)
    run_ptx(body, 1, 64, out)
    np.testing.assert_array_equal(out, 100 * np.arange(4)[:, None] + np.arange(32))


def test_barrier_reductions(rng):
    body = """
        .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .pred %p<5>;
        ld.param.u64 %rd1, [p0];
        ld.param.u64 %rd2, [p1];
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ctaid.x;
        mad.lo.u32 %r3, %r2, 50, %r1;
        mul.wide.u32 %rd3, %r3, 4;
        add.u64 %rd1, %rd1, %rd3;
        ld.global.u32 %r4, [%rd1];
        setp.ne.u32 %p1, %r4, 0;
        barrier.cta.red.popc.u32 %r5, 3, %p1;
        barrier.cta.red.and.pred %p2, 3, %p1;
        bar.red.or.pred %p3, 0, %p1;
        selp.u32 %r6, 1000, 0, %p2;
        selp.u32 %r7, 2000, 0, %p3;
        add.u32 %r5, %r5, %r6;
        add.u32 %r5, %r5, %r7;
        add.u64 %rd2, %rd2, %rd3;
        st.global.u32 [%rd2], %r5;
        ret;
    """
    a = rng.integers(0, 2, (3, 50)).astype(np.uint32)
    a[1], a[2] = 1, 0
    out = np.zeros((3, 50), np.uint32)
    run_ptx(body, 3, 50, a, out)
    expected = a.sum(1) + 1000 * a.all(1) + 2000 * a.any(1)
    np.testing.assert_array_equal(out, expected[:, None] * np.ones(50, np.uint32))


def test_exited_threads_are_not_waited_for():
    def leave(out):
        buffer = cuda.shared.array(64, int32)
        t = cuda.threadIdx.x
        if t >= 40:
            return
        buffer[t] = t
        cuda.syncthreads()
        out[t] = buffer[39 - t]

    out = np.zeros(40, np.int32)
    run(leave, (int32[:],), 1, 64, out)
    np.testing.assert_array_equal(out, 39 - np.arange(40))


def test_warp_barrier_in_both_branches():
    def branches(out):
        buffer = cuda.shared.array(32, int32)
        t = cuda.threadIdx.x
        if t < 7:
            buffer[t] = 10 + t
            cuda.syncwarp()
        else:
            buffer[t] = 100 + t
            cuda.syncwarp()
        out[t] = buffer[31 - t]

    out = np.zeros(32, np.int32)
    run(branches, (int32[:],), 1, 32, out)
    t = np.arange(32)[::-1]
    np.testing.assert_array_equal(out, np.where(t < 7, 10 + t, 100 + t))


def test_shared_memory_of_a_peer():
    # Every block writes its number; after the cluster's barrier it reads the next block's through mapa.
    body = """
        .shared .align 4 .b8 mine[4];
        .reg .b32 %r<9>; .reg .b64 %rd<5>; .reg .pred %p<2>;
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, mine;
        st.shared.u32 [%r2], %r1;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 %r3, %cluster_ctarank;
        mov.u32 %r4, %cluster_nctarank;
        add.u32 %r3, %r3, 1;
        rem.u32 %r3, %r3, %r4;
        mapa.shared::cluster.u32 %r5, %r2, %r3;
        ld.shared::cluster.u32 %r6, [%r5];
        getctarank.shared::cluster.u32 %r7, %r5;
        cvt.u64.u32 %rd3, %r2;
        cvta.shared.u64 %rd3, %rd3;
        mapa.u64 %rd4, %rd3, %r3;
        ld.u32 %r8, [%rd4];
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        ld.param.u64 %rd1, [p0];
        mul.wide.u32 %rd2, %r1, 12;
        add.u64 %rd1, %rd1, %rd2;
        st.global.u32 [%rd1], %r6;
        st.global.u32 [%rd1+4], %r7;
        st.global.u32 [%rd1+8], %r8;
        ret;
    """
    out = np.zeros((12, 3), np.uint32)
    run_ptx(body, 12, 32, out, cluster=4)
    block = np.arange(12)
    neighbour = block // 4 * 4 + (block + 1) % 4
    np.testing.assert_array_equal(out, np.stack([neighbour, neighbour % 4, neighbour], axis=1))


def test_clusters_in_two_dimensions():
    body = """
        .reg .b32 %r<12>; .reg .b64 %rd<3>;
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, %ctaid.y;
        mov.u32 %r3, %nctaid.x;
        mad.lo.u32 %r4, %r2, %r3, %r1;
        mul.wide.u32 %rd2, %r4, 16;
        ld.param.u64 %rd1, [p0];
        add.u64 %rd1, %rd1, %rd2;
        mov.u32 %r5, %cluster_ctarank;
        mov.u32 %r6, %cluster_ctaid.x;
        mov.u32 %r7, %cluster_ctaid.y;
        mov.u32 %r8, %clusterid.x;
        mov.u32 %r9, %clusterid.y;
        mad.lo.u32 %r8, %r9, 10, %r8;
        st.global.v4.u32 [%rd1], {%r5, %r6, %r7, %r8};
        ret;
    """
    out = np.zeros((4, 6, 4), np.uint32)
    run_ptx(body, (6, 4), 1, out, cluster=(3, 2))
    y, x = np.indices((4, 6))
    np.testing.assert_array_equal(out, np.stack([x % 3 + 3 * (y % 2), x % 3, y % 2, x // 3 + 10 * (y // 2)], axis=-1))


def test_a_barrier_that_half_the_block_does_not_reach():
    body = """
        .reg .b32 %r<3>; .reg .pred %p<2>;
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 32;
        @%p1 bra OTHER;
        bar.sync 0;
        ret;
        OTHER:
        bar.sync 1;
        ret;
    """
    with pytest.raises(sim.Deadlock) as caught:
        run_ptx(body, 1, 96)
    report = caught.value.report
    assert "warp 0: 32 threads at bar.sync 1" in report
    assert "waits at barrier 1 for all 96 threads of the block, 32 have come" in report
    assert "warps 1-2: 64 threads at bar.sync 0" in report
    assert "no copy is in flight" in report


def test_a_deadlock_names_the_python_line():
    def stuck(flag):
        if cuda.threadIdx.x < 32:
            while cuda.atomic.add(flag, 0, 0) == 0:
                pass
        cuda.syncthreads()

    with pytest.raises(sim.Deadlock) as caught:
        run(stuck, (int32[:],), 2, 64, np.zeros(1, np.int32))
    assert "poll" in caught.value.message
    assert f"{__file__}:{stuck.__code__.co_firstlineno + 4}" in caught.value.report
    assert "waits at barrier 0 for all 64 threads of the block, 32 have come" in caught.value.report


def test_threads_that_sleep_and_poll_for_ever():
    def stuck(flag):
        while cuda.atomic.add(flag, cuda.threadIdx.x // 32, 0) == 0:
            cuda.nanosleep(1000)

    with pytest.raises(sim.Deadlock, match="poll"):
        run(stuck, (int32[:],), 1, 64, np.zeros(2, np.int32))


def test_different_counts_at_a_barrier():
    body = """
        .reg .b32 %r<3>; .reg .pred %p<2>;
        mov.u32 %r1, %tid.x;
        setp.lt.u32 %p1, %r1, 32;
        selp.u32 %r2, 64, 96, %p1;
        barrier.sync 1, %r2;
        ret;
    """
    with pytest.raises(sim.SimError, match="different counts"):
        run_ptx(body, 1, 96)
    with pytest.raises(sim.SimError, match="multiple of 32"):
        run_ptx("bar.sync 1, 33; ret;", 1, 64)


def test_blocks_that_wait_for_blocks_of_a_later_wave():
    def all_arrive(arrived):
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(arrived, 0, 1)
            while cuda.atomic.add(arrived, 0, 0) < cuda.gridDim.x:
                pass

    with pytest.raises(sim.Deadlock, match="of the grid's 1000 blocks at a time"):
        run(all_arrive, (int32[:],), 1000, 128, np.zeros(1, np.int32))


def test_the_step_limit():
    def endless(a):
        while True:
            a[0] += 1

    with pytest.raises(sim.StepLimit, match="not done after"):
        run(endless, (int32[:],), 1, 1, np.zeros(1, np.int32), max_steps=100_000)

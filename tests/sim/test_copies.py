"""Asynchronous copies issued by kernels: cp.async, bulk and tensor copies, multicast, groups, under every policy."""

from __future__ import annotations

import numpy as np
import pytest
from simulate import run_ptx

from numba_tma import sim
from numba_tma.sim import descriptor
from numba_tma.sim.engine import POLICIES


def tensor_map(memory_address: int, sizes: tuple, box: tuple, element: descriptor.DataType) -> bytes:
    """A tensor map of a dense tensor, sizes innermost first."""
    strides, step = [], element.nbytes
    for size in sizes[:-1]:
        step *= size
        strides.append(step)
    return descriptor.encode(
        descriptor.Descriptor(
            dtype=element,
            address=memory_address,
            sizes=sizes,
            strides=tuple(strides),
            box=box,
            element_strides=(1,) * len(sizes),
        )
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_double_buffered_bulk_copies(rng, policy):
    # Thread 0 keeps two copies of 1 KiB in flight; all threads add what arrived to their totals.
    body = """
        .shared .align 128 .b8 ring[2048]; .shared .align 8 .b64 full[2];
        .reg .b32 %r<20>; .reg .b64 %rd<8>; .reg .pred %p<8>; .reg .f32 %f<6>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
        mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, ring; mov.u32 %r3, full;
        mul.wide.u32 %rd2, %r1, 12288; add.u64 %rd0, %rd0, %rd2;       // 12 tiles a block
        setp.eq.u32 %p0, %r0, 0;
        mov.u32 %r4, 0;  mov.f32 %f0, 0f00000000;
        @!%p0 bra READY;
        mbarrier.init.shared.b64 [%r3], 1;
        mbarrier.init.shared.b64 [%r3+8], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 1024;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd0], 1024, [%r3];
        READY: bar.sync 0;
        LOOP:
        and.b32 %r5, %r4, 1; shr.u32 %r6, %r4, 1; and.b32 %r6, %r6, 1;
        add.u32 %r7, %r4, 1; and.b32 %r8, %r7, 1;
        setp.lt.u32 %p1, %r7, 12; and.pred %p1, %p1, %p0;
        @!%p1 bra WAIT;
        shl.b32 %r9, %r8, 3; add.u32 %r9, %r9, %r3;
        shl.b32 %r10, %r8, 10; add.u32 %r10, %r10, %r2;
        mul.wide.u32 %rd3, %r7, 1024; add.u64 %rd3, %rd3, %rd0;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 1024;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd3], 1024, [%r9];
        WAIT:
        shl.b32 %r11, %r5, 3; add.u32 %r11, %r11, %r3;
        TRY: mbarrier.try_wait.parity.shared.b64 %p2, [%r11], %r6;
        @!%p2 bra TRY;
        shl.b32 %r12, %r5, 10; add.u32 %r12, %r12, %r2;
        shl.b32 %r13, %r0, 2; add.u32 %r12, %r12, %r13;
        ld.shared.f32 %f1, [%r12]; ld.shared.f32 %f2, [%r12+512];
        add.f32 %f0, %f0, %f1; add.f32 %f0, %f0, %f2;
        bar.sync 0;
        add.u32 %r4, %r4, 1;
        setp.lt.u32 %p3, %r4, 12;
        @%p3 bra LOOP;
        mad.lo.u32 %r14, %r1, 128, %r0; mul.wide.u32 %rd4, %r14, 4; add.u64 %rd1, %rd1, %rd4;
        st.global.f32 [%rd1], %f0;
        ret;
    """
    blocks = 6
    a = rng.integers(-50, 50, (blocks, 12, 2, 128)).astype(np.float32)
    out = np.zeros((blocks, 128), np.float32)
    report = run_ptx(body, blocks, 128, a, out, policy=policy, seed=int(rng.integers(1 << 30)))
    np.testing.assert_array_equal(out, a.sum((1, 2)))
    assert report.bytes["bulk_load"] == a.nbytes
    assert not [hazard for hazard in report.hazards if hazard.severity == "error"]


@pytest.mark.parametrize("policy", POLICIES)
def test_tensor_copies_in_and_out(rng, policy):
    # Each block loads a 16 x 32 tile through a tensor map in the parameters, doubles it, and stores it through another.
    source = rng.integers(0, 1000, (40, 72)).astype(np.int32)
    target = np.full((40, 72), -1, np.int32)
    body = """
        .shared .align 128 .b8 tile[2048]; .shared .align 8 .b64 bar;
        .reg .b32 %r<20>; .reg .b64 %rd<8>; .reg .pred %p<8>;
        mov.b64 %rd0, p2; cvta.param.u64 %rd0, %rd0;
        mov.b64 %rd1, p3; cvta.param.u64 %rd1, %rd1;
        mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r2, bar;
        mov.u32 %r3, %ctaid.x; shl.b32 %r3, %r3, 5; mov.u32 %r4, %ctaid.y; shl.b32 %r4, %r4, 4;
        setp.eq.u32 %p0, %r0, 0;
        @!%p0 bra START;
        prefetch.tensormap [%rd0];
        mbarrier.init.shared.b64 [%r2], 1;
        fence.proxy.async.shared::cta;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 2048;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r1], [%rd0, {%r3, %r4}], [%r2];
        START: bar.sync 0;
        TRY: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
        @!%p1 bra TRY;
        shl.b32 %r5, %r0, 4; add.u32 %r5, %r5, %r1;
        ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [%r5];
        add.u32 %r6, %r6, %r6; add.u32 %r7, %r7, %r7; add.u32 %r8, %r8, %r8; add.u32 %r9, %r9, %r9;
        st.shared.v4.u32 [%r5], {%r6, %r7, %r8, %r9};
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @!%p0 bra DONE;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r3, %r4}], [%r1];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        DONE: ret;
    """
    memory = sim.GlobalMemory()
    maps = [tensor_map(memory.map(a), (72, 40), (32, 16), descriptor.DataType.INT32) for a in (source, target)]
    options = {"policy": policy, "seed": int(rng.integers(1 << 30))}
    report = launch_with(memory, body, (3, 3), 128, maps, **options)
    np.testing.assert_array_equal(target, 2 * source)
    assert report.bytes["tma_load"] == 9 * 2048
    assert not [hazard for hazard in report.hazards if hazard.severity == "error"]


def launch_with(memory, body, grid, block, maps, **options):
    """Run a kernel whose parameters p2, p3, … are tensor maps by value."""
    formals = ", ".join(f".param .align 64 .b8 p{i + 2}[128]" for i in range(len(maps)))
    text = f".version 8.3\n.target sm_90a\n.address_size 64\n.visible .entry kernel({formals})\n{{\n{body}\n}}\n"
    return sim.launch(text, grid=grid, block=block, params=maps, memory=memory, **options)


def test_multicast_to_a_cluster(rng):
    # Block 0 of each cluster loads one tile into both blocks; each waits on its own barrier.
    body = """
        .shared .align 128 .b8 tile[512]; .shared .align 8 .b64 bar;
        .reg .b32 %r<12>; .reg .b16 %h<2>; .reg .b64 %rd<6>; .reg .pred %p<6>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
        mov.u32 %r0, %tid.x; mov.u32 %r1, tile; mov.u32 %r2, bar; mov.u32 %r3, %cluster_ctarank;
        mov.u32 %r4, %clusterid.x;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r2], 1;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;
        barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
        setp.eq.u32 %p1, %r3, 0; and.pred %p1, %p1, %p0;
        mul.wide.u32 %rd2, %r4, 512; add.u64 %rd0, %rd0, %rd2;
        mov.u16 %h0, 3;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r1], [%rd0], 512, [%r2], %h0;
        TRY: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
        @!%p2 bra TRY;
        shl.b32 %r5, %r0, 2; add.u32 %r5, %r5, %r1;
        ld.shared.u32 %r6, [%r5];
        mov.u32 %r7, %ctaid.x; mad.lo.u32 %r7, %r7, 128, %r0; mul.wide.u32 %rd3, %r7, 4; add.u64 %rd1, %rd1, %rd3;
        st.global.u32 [%rd1], %r6;
        barrier.cluster.arrive; barrier.cluster.wait;
        ret;
    """
    a = rng.integers(0, 1 << 30, (3, 128)).astype(np.uint32)
    out = np.zeros((3, 2, 128), np.uint32)
    run_ptx(body, 6, 128, a, out, cluster=2)
    np.testing.assert_array_equal(out, np.stack([a, a], axis=1))


def test_copy_to_a_peer_and_reduction(rng):
    # Block 1 adds its numbers to block 0's, in block 0's shared memory; block 0 adds the sum to global memory.
    body = """
        .shared .align 128 .b8 mine[512]; .shared .align 8 .b64 bar;
        .reg .b32 %r<12>; .reg .b64 %rd<6>; .reg .pred %p<6>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
        mov.u32 %r0, %tid.x; mov.u32 %r1, mine; mov.u32 %r2, bar; mov.u32 %r3, %cluster_ctarank;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r2], 1;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;
        mov.u32 %r7, %ctaid.x; mad.lo.u32 %r7, %r7, 128, %r0; mul.wide.u32 %rd3, %r7, 4; add.u64 %rd0, %rd0, %rd3;
        ld.global.u32 %r6, [%rd0];
        shl.b32 %r5, %r0, 2; add.u32 %r5, %r5, %r1;
        st.shared.u32 [%r5], %r6;
        fence.proxy.async;
        barrier.cluster.arrive; barrier.cluster.wait;
        setp.eq.u32 %p1, %r3, 1; and.pred %p1, %p1, %p0;
        mov.u32 %r8, 0;
        mapa.shared::cluster.u32 %r9, %r1, %r8;
        mapa.shared::cluster.u32 %r10, %r2, %r8;
        @%p1 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32
            [%r9], [%r1], 512, [%r10];
        setp.eq.u32 %p2, %r3, 0;
        @!%p2 bra END;
        TRY: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
        @!%p3 bra TRY;
        fence.proxy.async;
        @!%p0 bra END;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r1], 512;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        END:
        barrier.cluster.arrive; barrier.cluster.wait;
        ret;
    """
    a = rng.integers(0, 1000, (4, 2, 128)).astype(np.uint32)
    out = rng.integers(0, 1000, 128).astype(np.uint32)
    expected = out + a.sum((0, 1), dtype=np.uint32)
    report = run_ptx(body, 8, 128, a, out, cluster=2)
    np.testing.assert_array_equal(out, expected)
    assert report.bytes["bulk_reduce"] == 4 * 512


@pytest.mark.parametrize("policy", POLICIES)
def test_cp_async_groups(rng, policy):
    body = """
        .shared .align 16 .b8 stage[4096];
        .reg .b32 %r<12>; .reg .b64 %rd<6>; .reg .pred %p<6>; .reg .f32 %f<4>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
        mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, stage;
        mad.lo.u32 %r3, %r1, 512, %r0; mul.wide.u32 %rd2, %r3, 16; add.u64 %rd0, %rd0, %rd2;
        shl.b32 %r4, %r0, 4; add.u32 %r2, %r2, %r4;
        setp.lt.u32 %p1, %r0, 100; selp.u32 %r5, 16, 4, %p1;
        cp.async.cg.shared.global [%r2], [%rd0], 16;
        cp.async.commit_group;
        cp.async.ca.shared.global [%r2+2048], [%rd0+2048], 16, %r5;   // the last lanes get one number and zeros
        cp.async.commit_group;
        cp.async.wait_group 1;
        ld.shared.f32 %f0, [%r2];
        cp.async.wait_all;
        ld.shared.f32 %f1, [%r2+2048]; ld.shared.f32 %f2, [%r2+2060];
        add.f32 %f0, %f0, %f1; add.f32 %f0, %f0, %f2;
        mad.lo.u32 %r6, %r1, 128, %r0; mul.wide.u32 %rd3, %r6, 4; add.u64 %rd1, %rd1, %rd3;
        st.global.f32 [%rd1], %f0;
        ret;
    """
    a = rng.integers(-50, 50, (5, 4, 128, 4)).astype(np.float32)
    out = np.zeros((5, 128), np.float32)
    report = run_ptx(body, 5, 128, a, out, policy=policy)
    second = a[:, 1, :, 3] * (np.arange(128) < 100)
    np.testing.assert_array_equal(out, a[:, 0, :, 0] + a[:, 1, :, 0] + second)
    assert report.bytes["cp_async"] == 2 * 5 * 2048


def test_cp_async_completes_a_barrier(rng):
    body = """
        .shared .align 16 .b8 stage[256]; .shared .align 8 .b64 bar;
        .reg .b32 %r<12>; .reg .b64 %rd<6>; .reg .pred %p<6>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
        mov.u32 %r0, %tid.x; mov.u32 %r1, stage; mov.u32 %r2, bar;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r2], 64;
        bar.sync 0;
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2;
        shl.b32 %r3, %r0, 2; add.u32 %r4, %r3, %r1;
        cp.async.ca.shared.global [%r4], [%rd0], 4;
        cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];
        TRY: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
        @!%p1 bra TRY;
        mov.u32 %r5, 252; sub.u32 %r5, %r5, %r3; add.u32 %r5, %r5, %r1;
        ld.shared.u32 %r6, [%r5];
        st.global.u32 [%rd1], %r6;
        ret;
    """
    a = rng.integers(0, 1 << 30, 64).astype(np.uint32)
    out = np.zeros(64, np.uint32)
    run_ptx(body, 1, 64, a, out, policy="late")
    np.testing.assert_array_equal(out, a[::-1])


def test_too_few_bytes_arrive():
    body = """
        .shared .align 128 .b8 tile[2048]; .shared .align 8 .b64 bar;
        .reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .pred %p<2>;
        ld.param.u64 %rd0, [p0]; mov.u32 %r1, tile; mov.u32 %r2, bar;
        mbarrier.init.shared.b64 [%r2], 1;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 2048;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 512, [%r2];
        TRY: mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
        @!%p1 bra TRY;
        ret;
    """
    with pytest.raises(sim.Deadlock, match="1536 bytes missing"):
        run_ptx(body, 1, 1, np.zeros(512, np.float32))


def test_a_block_that_exits_with_a_copy_in_flight():
    body = """
        .shared .align 128 .b8 tile[512]; .shared .align 8 .b64 bar;
        .reg .b32 %r<4>; .reg .b64 %rd<2>;
        ld.param.u64 %rd0, [p0]; mov.u32 %r1, tile; mov.u32 %r2, bar;
        mbarrier.init.shared.b64 [%r2], 1;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 512;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 512, [%r2];
        ret;
    """
    report = run_ptx(body, 1, 1, np.zeros(128, np.float32), policy="late")
    assert "exit-with-copies-in-flight" in [hazard.identifier for hazard in report.hazards]


def test_copies_are_checked_where_they_are_issued():
    body = """
        .shared .align 128 .b8 tile[512]; .shared .align 8 .b64 bar;
        .reg .b32 %r<4>; .reg .b64 %rd<2>;
        ld.param.u64 %rd0, [p0]; mov.u32 %r1, tile; mov.u32 %r2, bar;
        mbarrier.init.shared.b64 [%r2], 1;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd0], SIZE, [%r2];
        ret;
    """
    with pytest.raises(sim.Misaligned, match="508") as caught:
        run_ptx(body.replace("SIZE", "508"), 1, 1, np.zeros(128, np.float32))
    assert "cp.async.bulk.shared::cluster.global" in str(caught.value)
    assert "PTX line" in str(caught.value)
    with pytest.raises(sim.OutOfBounds, match="p0"):
        run_ptx(body.replace("SIZE", "512"), 1, 1, np.zeros(120, np.float32))


def test_a_tensor_map_edited_in_shared_memory(rng):
    # The kernel copies a map to shared memory, gives it another array's address, and stores it to global memory.
    body = """
        .shared .align 128 .b8 map[128]; .shared .align 128 .b8 tile[512]; .shared .align 8 .b64 bar;
        .reg .b32 %r<12>; .reg .b64 %rd<6>; .reg .pred %p<6>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2];
        mov.u32 %r0, %tid.x; mov.u32 %r1, map; mov.u32 %r2, tile; mov.u32 %r3, bar;
        mul.wide.u32 %rd4, %r0, 4; shl.b32 %r4, %r0, 2;
        add.u64 %rd3, %rd1, %rd4; add.u32 %r5, %r1, %r4;
        ld.global.u32 %r6, [%rd3]; st.shared.u32 [%r5], %r6;
        bar.warp.sync 0xffffffff;
        setp.eq.u32 %p0, %r0, 0;
        cvt.u64.u32 %rd3, %r1;
        @%p0 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%rd3], %rd0;
        bar.warp.sync 0xffffffff;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd1], [%rd3], 128;
        fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;
        @!%p0 bra WAIT0;
        mbarrier.init.shared.b64 [%r3], 1;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 512;
        mov.u32 %r7, 0;
        cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r7}], [%r3];
        WAIT0: bar.sync 0;
        TRY: mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0;
        @!%p1 bra TRY;
        add.u32 %r8, %r2, %r4; ld.shared.u32 %r9, [%r8]; add.u64 %rd2, %rd2, %rd4; st.global.u32 [%rd2], %r9;
        ret;
    """
    data = rng.integers(0, 1 << 30, 128).astype(np.uint32)
    encoded = tensor_map(1 << 40, (128,), (128,), descriptor.DataType.UINT32)
    place = np.frombuffer(encoded, np.uint8).copy()
    out = np.zeros(32, np.uint32)
    run_ptx(body, 1, 32, data, place, out)
    np.testing.assert_array_equal(out, data[:32])

"""What looks like a mistake and is none: no hazard under any schedule, and right results."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, uint32

from numba_tma import Barriers, Shared, TensorMap, Tiles, kernel, ptx, sim, use_backend
from numba_tma.pipeline import mbarrier_wait

smem = Shared(tile=Tiles(2, (16, 32), float32), full=Barriers(1), empty=Barriers(1))


@kernel(threads=32, shared=smem)
def fresh_barrier_with_parity_1(x_map, out):
    lane = cuda.threadIdx.x
    if lane == 0:
        ptx.mbarrier_init(smem.empty[0], 1)
        mbarrier_wait(smem.empty[0], 1)
        out[0] = float32(1)


@kernel(threads=32, shared=smem)
def several_copies_one_expect(x_map, out):
    lane = cuda.threadIdx.x
    if lane == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_arrive_expect_tx(smem.full[0], 2 * x_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[1], x_map, 0, 0, smem.full[0])
    cuda.syncthreads()
    mbarrier_wait(smem.full[0], 0)
    out[lane] = smem.tile[1][lane // 2, lane]


@kernel(threads=32, shared=smem)
def expect_after_the_copy(x_map, out):
    lane = cuda.threadIdx.x
    if lane == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
        ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
    cuda.syncthreads()
    mbarrier_wait(smem.full[0], 0)
    out[lane] = smem.tile[0][lane // 2, lane]


@kernel(threads=32, shared=smem)
def box_partly_outside(x_map, out):
    lane = cuda.threadIdx.x
    if lane == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, -8, -8, smem.full[0])
    cuda.syncthreads()
    mbarrier_wait(smem.full[0], 0)
    out[lane] = smem.tile[0][15, lane] + float32(lane < 8)


@kernel(threads=32, shared=smem)
def a_group_for_each_of_two_stages(x_map, out):
    lane = cuda.threadIdx.x
    for step in range(6):
        stage = step % 2
        if lane == 0:
            ptx.cp_async_bulk_wait_group_read(1)
        cuda.syncthreads()
        for row in range(16):
            smem.tile[stage][row, lane] = float32(1)
        ptx.fence_proxy_async_shared_cta()
        cuda.syncthreads()
        if lane == 0:
            ptx.cp_async_bulk_global_shared(ptx.global_address(out) + 16 * step, smem.tile[stage], 16)
            ptx.cp_async_bulk_commit_group()
    if lane == 0:
        ptx.cp_async_bulk_wait_group(0)


@kernel(threads=32, shared=smem)
def proxy_fence_for_the_init(x_map, out):
    lane = cuda.threadIdx.x
    if lane == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_proxy_async()
        ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
    cuda.syncthreads()
    mbarrier_wait(smem.full[0], 0)
    out[lane] = smem.tile[0][lane // 2, lane]


@kernel(threads=32, shared=smem, cluster=2)
def remote_arrive(x_map, out):
    lane = cuda.threadIdx.x
    rank = ptx.cluster_ctarank()
    if lane == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
    ptx.barrier_cluster_arrive_relaxed()
    ptx.barrier_cluster_wait()
    if lane == 0:
        ptx.mbarrier_arrive_shared_cluster(ptx.mapa_shared_cluster(smem.full[0], rank ^ uint32(1)))
    mbarrier_wait(smem.full[0], 0)
    if rank == 0:
        out[lane] = float32(1)
    ptx.barrier_cluster_arrive()
    ptx.barrier_cluster_wait()


cluster_smem = Shared(tile=Tiles(2, (16, 32), float32), full=Barriers(2), empty=Barriers(2))


@kernel(threads=64, shared=cluster_smem, cluster=2)
def a_ring_that_two_blocks_fill(x_map, out):
    """Each block fetches half a tile for both, and hands stages back to both: a peer's arrival is ordered after the end
    of the phase before through the copy that the peer's producer issued after it."""
    thread = cuda.threadIdx.x
    rank = ptx.cluster_ctarank()
    if thread == 0:
        for stage in range(2):
            ptx.mbarrier_init(cluster_smem.full[stage], 1)
            ptx.mbarrier_init(cluster_smem.empty[stage], 2)
        ptx.fence_mbarrier_init()
    ptx.barrier_cluster_arrive()
    ptx.barrier_cluster_wait()
    total = float32(0)
    for step in range(8):
        stage, phase = step % 2, step // 2 % 2
        if thread == 0:
            bar = cluster_smem.full[stage]
            mbarrier_wait(cluster_smem.empty[stage], phase ^ 1)
            ptx.mbarrier_arrive_expect_tx(bar, 2048)
            half = uint32(ptx.shared_address(cluster_smem.tile[stage]) + rank * uint32(1024))
            ptx.cp_async_bulk_tensor_2d_shared_global_multicast(half, x_map, 0, rank * uint32(8), bar, 3)
        elif thread >= 32:
            mbarrier_wait(cluster_smem.full[stage], phase)
            total += cluster_smem.tile[stage][15, thread - 32]
            cuda.syncwarp()
            if thread < 34:
                peer = ptx.mapa_shared_cluster(cluster_smem.empty[stage], thread - 32)
                ptx.fence_proxy_async()
                ptx.mbarrier_arrive_shared_cluster(peer)
    if thread >= 32 and rank == 0:
        out[thread - 32] = total
    ptx.barrier_cluster_arrive()
    ptx.barrier_cluster_wait()


KERNELS = {
    fresh_barrier_with_parity_1: 1,
    several_copies_one_expect: 32,
    expect_after_the_copy: 32,
    box_partly_outside: 32,
    a_group_for_each_of_two_stages: 24,
    proxy_fence_for_the_init: 32,
    remote_arrive: 32,
    a_ring_that_two_blocks_fill: 8 * 32,
}
BOXES = {a_ring_that_two_blocks_fill: (8, 32)}


@pytest.mark.parametrize("function", KERNELS, ids=lambda function: function.__name__)
def test_is_clean(function):
    for schedule in sim.schedules(random=4):
        out = np.zeros(32, np.float32)
        with use_backend("sim", **schedule):
            x_map = TensorMap(np.ones((16, 32), np.float32), BOXES.get(function, (16, 32)))
            report = function[function.cluster[0]](x_map, out)
        assert not report.hazards, f"{schedule}: {[str(hazard) for hazard in report.hazards]}"
        assert out.sum() == KERNELS[function]

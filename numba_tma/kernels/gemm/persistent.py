"""Steps 8 to 10: blocks that stay, in an order that the L2 cache likes; clusters that share tiles; results by TMA.

All three are the kernel of step 7, two consumer warpgroups behind a producer warp, and differ from it and from each
other in what their names say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import cuda
from numba.cuda.types import float32, uint32

from ... import dtypes, ptx
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait, ring
from ...shared import Barriers, Shared, Tiles
from ...warpgroup import k_elements, make_product

GROUP = 128  # threads of a warpgroup
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


@cuda.jit(device=True, forceinline=True)
def tile_of(index, tiles_m, tiles_n, band):
    """Row and column of the `index`-th tile: bands of `band` rows of tiles, each gone through column by column.

    Blocks that run at the same time then read few different rows of A and B, which stay in the L2 cache.
    """
    per_band = uint32(band) * tiles_n
    first = uint32(index // per_band) * uint32(band)
    within = uint32(index % per_band)
    rows = min(uint32(tiles_m - first), uint32(band))
    return uint32(first + within % rows), uint32(within // rows)


@functools.cache
def make_store_tile(columns: int, out_dtype: object, threads: int = GROUP) -> Callable:
    """Make `store_tile(accumulator, c_map, tiles, thread, barrier, row, column)`: a warpgroup's 64 x `columns` by TMA.

    64 columns at a time are rounded, written to shared memory with the swizzle by stmatrix, and handed to the copy
    engine, alternately from two tiles, so that the next 64 are written while the last are copied.
    """
    name = dtypes.lookup(out_dtype).name
    pack = {"bfloat16": ptx.cvt_rn_bf16x2_f32, "float16": ptx.cvt_rn_f16x2_f32}[name]
    chunks = columns // 64

    @cuda.jit(device=True, forceinline=True)
    def store_tile(accumulator, c_map, tile0, tile1, thread, barrier, row, column):
        lane = uint32(thread % uint32(32))
        tile_row = uint32(thread // uint32(32) * uint32(16) + lane % uint32(16))
        right = uint32(lane // uint32(16))  # which eight of sixteen columns this lane's address is for
        swizzle = uint32(lane % uint32(8))
        for chunk in range(chunks):
            tile = tile0 if chunk % 2 == 0 else tile1
            if thread == 0:
                ptx.cp_async_bulk_wait_group_read(1)  # the copy before last has read this tile
            ptx.bar_sync(barrier, threads)
            line = uint32(tile + tile_row * uint32(128))
            for part in range(4):
                i = 32 * chunk + 8 * part
                place = uint32(line + ((uint32(2 * part) + right) ^ swizzle) * uint32(16))
                ptx.stmatrix_sync_x4(
                    place,
                    pack(accumulator[i + 1], accumulator[i]),
                    pack(accumulator[i + 3], accumulator[i + 2]),
                    pack(accumulator[i + 5], accumulator[i + 4]),
                    pack(accumulator[i + 7], accumulator[i + 6]),
                )
            ptx.fence_proxy_async_shared_cta()
            ptx.bar_sync(barrier, threads)
            if thread == 0:
                ptx.cp_async_bulk_tensor_2d_global_shared(c_map, uint32(column + uint32(64 * chunk)), row, tile)
                ptx.cp_async_bulk_commit_group()

    return store_tile


@functools.cache
def make_store(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    columns: int = 256,
    stages: int = 4,
    cluster: int = 2,
    band: int = 8,
) -> Kernel:
    consumers = 2
    accumulators = columns // 2
    depth = k_elements(dtype)
    slice_columns = columns // cluster
    a_bytes, b_bytes = 64 * consumers * 128, columns * 128
    slice_bytes = slice_columns * 128
    stage_bytes = a_bytes + b_bytes
    arrivals = consumers * cluster
    everyone = (1 << cluster) - 1
    rows = 64 * consumers
    product = make_product(columns, dtype, b_major)
    wait_group = getattr(ptx, f"wgmma_wait_group_m64n{columns}_f32")
    store_tile = make_store_tile(columns, out_dtype)
    smem = Shared(
        a=Tiles(stages, (rows, depth), dtype, swizzle="128B"),
        b=Tiles(stages, (columns, depth), dtype, swizzle="128B"),
        c=Tiles(2 * consumers, (64, 64), out_dtype, swizzle="128B"),
        full=Barriers(stages),
        empty=Barriers(stages),
    )

    @cuda.jit(device=True, forceinline=True)
    def release(stage, thread):
        """Tell every block of the cluster that this warpgroup has done with a stage: each filled a part of it."""
        if thread < cluster:
            ptx.mbarrier_arrive_shared_cluster(ptx.mapa_shared_cluster(smem.empty[stage], thread))

    @kernel(threads=GROUP * (consumers + 1), shared=smem, cluster=cluster)
    def gemm_store(a_map, b_map, c_map, tiles_m, tiles_n, k_blocks):
        rank = ptx.cluster_ctarank()
        thread = uint32(cuda.threadIdx.x)
        first = uint32(cuda.blockIdx.x // uint32(cluster))
        step = uint32(cuda.gridDim.x // uint32(cluster))
        tiles = uint32(tiles_m * tiles_n)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], arrivals)
            ptx.fence_mbarrier_init()
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()

        if thread < GROUP:
            ptx.setmaxnreg_dec(PRODUCER_REGISTERS)
            if thread == 0:
                use = uint32(0)
                for index in range(first, tiles, step):
                    m, n = tile_of(uint32(index), tiles_m, tiles_n, band)
                    row = uint32((m * uint32(cluster) + rank) * uint32(rows))
                    column = uint32(n * uint32(columns) + rank * uint32(slice_columns))
                    for k in range(k_blocks):
                        stage, phase = ring(use, stages)
                        use = uint32(use + uint32(1))
                        mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                        bar = smem.full[stage]
                        ptx.mbarrier_arrive_expect_tx(bar, stage_bytes)
                        at = uint32(uint32(k) * uint32(depth))
                        ptx.cp_async_bulk_tensor_2d_shared_global(smem.a[stage], a_map, at, row, bar)
                        ptx.cp_async_bulk_tensor_2d_shared_global_multicast(
                            uint32(ptx.shared_address(smem.b[stage]) + rank * uint32(slice_bytes)),
                            b_map,
                            at,
                            column,
                            bar,
                            everyone,
                        )
        else:
            ptx.setmaxnreg_inc(CONSUMER_REGISTERS)
            group = uint32(thread // uint32(GROUP) - uint32(1))
            thread = uint32(thread % uint32(GROUP))
            accumulator = cuda.local.array(accumulators, float32)
            use = uint32(0)
            for index in range(first, tiles, step):
                m, n = tile_of(uint32(index), tiles_m, tiles_n, band)
                for k in range(k_blocks):
                    stage, phase = ring(use, stages)
                    mbarrier_wait(smem.full[stage], phase)
                    a = uint32(ptx.shared_address(smem.a[stage]) + group * uint32(64 * 128))
                    product(accumulator, a, ptx.shared_address(smem.b[stage]), k > 0)
                    wait_group(accumulator, 1)
                    if k > 0:
                        before, _ = ring(uint32(use - uint32(1)), stages)
                        release(before, thread)
                    use = uint32(use + uint32(1))
                wait_group(accumulator, 0)
                before, _ = ring(uint32(use - uint32(1)), stages)
                release(before, thread)
                row = uint32((m * uint32(cluster) + rank) * uint32(rows) + group * uint32(64))
                store_tile(
                    accumulator,
                    c_map,
                    ptx.shared_address(smem.c[group * uint32(2)]),
                    ptx.shared_address(smem.c[group * uint32(2) + uint32(1)]),
                    thread,
                    group + uint32(1),
                    row,
                    n * uint32(columns),
                )
            if thread == 0:
                ptx.cp_async_bulk_wait_group(0)
        ptx.barrier_cluster_arrive()  # a peer's arrivals may still be on their way here
        ptx.barrier_cluster_wait()

    return gemm_store

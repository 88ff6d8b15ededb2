"""Steps 8 to 10: blocks that stay, in an order that the L2 cache likes; clusters that share tiles; results by TMA.

Each is the kernel before it, from step 7 on, and one idea.
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
from ...unroll import unroll
from ...warpgroup import ROW_BYTES, k_elements, make_product
from .epilogue import make_pack
from .warpgroup import (
    BOX_COLUMNS,
    CONSUMER_REGISTERS,
    GROUP_ROWS,
    PRODUCER_REGISTERS,
    TILE_ROWS,
    WARPGROUP,
    check_columns,
    make_fetch,
    make_finish,
    make_store,
)


@cuda.jit(device=True, forceinline=True)
def tile_of(index, tiles_m, tiles_n, band):
    """Row and column of the `index`-th tile: bands of `band` rows of tiles, each gone through column by column.

    Blocks that run at the same time then read few different rows of A and B, which stay in the L2 cache.
    """
    per_band = uint32(uint32(band) * uint32(tiles_n))
    first = uint32(index // per_band) * uint32(band)
    within = uint32(index % per_band)
    rows = min(uint32(uint32(tiles_m) - first), uint32(band))
    column = uint32(within // rows)
    return uint32(first + within - column * rows), column


@functools.cache
def make_persistent(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    columns: int = 256,
    stages: int = 4,
    band: int = 16,
) -> Kernel:
    """Step 8: as many blocks as SMs, each with many tiles: the producer fetches the next while this one is stored."""
    check_columns(columns, stages, b_major, most=256)
    rows = TILE_ROWS
    accumulators = columns // 2
    depth = k_elements(dtype)
    fetch = make_fetch(rows, columns, dtype, b_major)
    product = make_product(columns, dtype, b_major)
    wait_group = getattr(ptx, f"wgmma_wait_group_m64n{columns}_f32")
    store = make_store(columns, out_dtype, activation, has_bias)
    smem = Shared(
        a=Tiles(stages, (rows, depth), dtype, swizzle="128B"),
        b=Tiles(stages, (columns, depth), dtype, swizzle="128B"),
        full=Barriers(stages),
        empty=Barriers(stages),
    )

    @kernel(threads=3 * WARPGROUP, shared=smem)
    def gemm_persistent(a_map, b_map, c, bias, tiles_m, tiles_n, k_blocks):
        thread = uint32(cuda.threadIdx.x)
        tiles = uint32(tiles_m * tiles_n)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], 2)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()

        use = uint32(0)  # of the ring, through all tiles
        if thread < WARPGROUP:
            ptx.setmaxnreg_dec(PRODUCER_REGISTERS)
            if thread == 0:
                tile = uint32(cuda.blockIdx.x)
                while tile < tiles:
                    m, n = tile_of(tile, tiles_m, tiles_n, band)
                    row, column = m * uint32(rows), n * uint32(columns)
                    for block in range(k_blocks):
                        stage, phase = ring(use, stages)
                        use = uint32(use + uint32(1))
                        mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                        k = uint32(uint32(block) * uint32(depth))
                        fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, smem.full[stage])
                    tile = uint32(tile + uint32(cuda.gridDim.x))
        else:
            ptx.setmaxnreg_inc(CONSUMER_REGISTERS)
            group = uint32(thread // uint32(WARPGROUP) - uint32(1))
            thread = uint32(thread % uint32(WARPGROUP))
            mine = uint32(group * uint32(GROUP_ROWS * ROW_BYTES))
            accumulator = cuda.local.array(accumulators, float32)
            tile = uint32(cuda.blockIdx.x)
            while tile < tiles:
                m, n = tile_of(tile, tiles_m, tiles_n, band)
                for block in range(k_blocks):
                    stage, phase = ring(use, stages)
                    mbarrier_wait(smem.full[stage], phase)
                    a, b = uint32(ptx.shared_address(smem.a[stage]) + mine), ptx.shared_address(smem.b[stage])
                    product(accumulator, a, b, block > 0)
                    wait_group(accumulator, 1)
                    if block > 0 and thread == 0:
                        before, _ = ring(uint32(use - uint32(1)), stages)
                        ptx.mbarrier_arrive(smem.empty[before])
                    use = uint32(use + uint32(1))
                wait_group(accumulator, 0)
                if thread == 0:
                    before, _ = ring(uint32(use - uint32(1)), stages)
                    ptx.mbarrier_arrive(smem.empty[before])
                row = uint32(m * uint32(rows) + group * uint32(GROUP_ROWS))
                store(accumulator, c, bias, thread, row, n * uint32(columns))

                tile = uint32(tile + uint32(cuda.gridDim.x))

    return gemm_persistent


@functools.cache
def make_fetch_shared(rows: int, columns: int, dtype: str, b_major: str, cluster: int) -> Callable:
    """As warpgroup.make_fetch for a cluster: the block fetches its own rows of A and, for all, its part of B."""
    depth = k_elements(dtype)
    nbytes = (rows + columns) * ROW_BYTES
    part = columns // cluster
    boxes = part // BOX_COLUMNS
    box_bytes = depth * ROW_BYTES
    everyone = (1 << cluster) - 1

    @cuda.jit(device=True, forceinline=True)
    def fetch(a_tile, b_tile, a_map, b_map, row, column, k, bar, rank):
        ptx.mbarrier_arrive_expect_tx(bar, nbytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(a_tile, a_map, k, row, bar)
        place = uint32(ptx.shared_address(b_tile) + rank * uint32(part * ROW_BYTES))
        first = uint32(column + rank * uint32(part))
        ptx.cp_async_bulk_tensor_2d_shared_global_multicast(place, b_map, k, first, bar, everyone)

    @cuda.jit(device=True, forceinline=True)
    def fetch_by_columns(a_tile, b_tile, a_map, b_map, row, column, k, bar, rank):
        ptx.mbarrier_arrive_expect_tx(bar, nbytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(a_tile, a_map, k, row, bar)
        for i in range(boxes):
            box = uint32(rank * uint32(boxes) + uint32(i))
            place = uint32(ptx.shared_address(b_tile) + box * uint32(box_bytes))
            first = uint32(column + box * uint32(BOX_COLUMNS))
            ptx.cp_async_bulk_tensor_2d_shared_global_multicast(place, b_map, first, k, bar, everyone)

    return fetch if b_major == "k" else fetch_by_columns


@functools.cache
def make_multicast(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    columns: int = 256,
    stages: int = 4,
    band: int = 8,
    cluster: int = 2,
) -> Kernel:
    """Step 9: blocks one below the other need the same tile of B: each fetches a part of it, for all of the cluster."""
    check_columns(columns, stages, b_major, most=256, cluster=cluster)
    rows = TILE_ROWS
    accumulators = columns // 2
    arrivals = 2 * cluster
    depth = k_elements(dtype)
    fetch = make_fetch_shared(rows, columns, dtype, b_major, cluster)
    product = make_product(columns, dtype, b_major)
    wait_group = getattr(ptx, f"wgmma_wait_group_m64n{columns}_f32")
    store = make_store(columns, out_dtype, activation, has_bias)
    smem = Shared(
        a=Tiles(stages, (rows, depth), dtype, swizzle="128B"),
        b=Tiles(stages, (columns, depth), dtype, swizzle="128B"),
        full=Barriers(stages),
        empty=Barriers(stages),
    )

    @kernel(threads=3 * WARPGROUP, shared=smem, cluster=cluster)
    def gemm_multicast(a_map, b_map, c, bias, tiles_m, tiles_n, k_blocks):
        thread = uint32(cuda.threadIdx.x)
        rank = ptx.cluster_ctarank()
        first, step = uint32(cuda.blockIdx.x) // uint32(cluster), uint32(cuda.gridDim.x) // uint32(cluster)
        tiles = uint32(tiles_m * tiles_n)  # of a cluster: its blocks' tiles are one below the other
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], arrivals)
            ptx.fence_mbarrier_init()
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()

        use = uint32(0)
        if thread < WARPGROUP:
            ptx.setmaxnreg_dec(PRODUCER_REGISTERS)
            if thread == 0:
                tile = first
                while tile < tiles:
                    m, n = tile_of(tile, tiles_m, tiles_n, band)
                    row, column = uint32((m * uint32(cluster) + rank) * uint32(rows)), n * uint32(columns)
                    for block in range(k_blocks):
                        stage, phase = ring(use, stages)
                        use = uint32(use + uint32(1))
                        mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                        k = uint32(uint32(block) * uint32(depth))
                        fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, smem.full[stage], rank)
                    tile = uint32(tile + step)
        else:
            ptx.setmaxnreg_inc(CONSUMER_REGISTERS)
            group = uint32(thread // uint32(WARPGROUP) - uint32(1))
            thread = uint32(thread % uint32(WARPGROUP))
            mine = uint32(group * uint32(GROUP_ROWS * ROW_BYTES))
            accumulator = cuda.local.array(accumulators, float32)
            tile = first
            while tile < tiles:
                m, n = tile_of(tile, tiles_m, tiles_n, band)
                for block in range(k_blocks):
                    stage, phase = ring(use, stages)
                    mbarrier_wait(smem.full[stage], phase)
                    a, b = uint32(ptx.shared_address(smem.a[stage]) + mine), ptx.shared_address(smem.b[stage])
                    product(accumulator, a, b, block > 0)
                    wait_group(accumulator, 1)
                    if block > 0 and thread < cluster:  # every block filled a part of this one's stage
                        before, _ = ring(uint32(use - uint32(1)), stages)
                        ptx.mbarrier_arrive_shared_cluster(ptx.mapa_shared_cluster(smem.empty[before], thread))
                    use = uint32(use + uint32(1))
                wait_group(accumulator, 0)
                if thread < cluster:
                    before, _ = ring(uint32(use - uint32(1)), stages)
                    ptx.mbarrier_arrive_shared_cluster(ptx.mapa_shared_cluster(smem.empty[before], thread))
                row = uint32((m * uint32(cluster) + rank) * uint32(rows) + group * uint32(GROUP_ROWS))
                store(accumulator, c, bias, thread, row, n * uint32(columns))
                tile = uint32(tile + step)
        ptx.barrier_cluster_arrive()  # no block leaves while a peer may still arrive at its barriers
        ptx.barrier_cluster_wait()

    return gemm_multicast


@functools.cache
def make_write(out_dtype: str) -> Callable:
    """Make `write(accumulator, chunk, tile, lane, warp)`: a warp's 16 rows of the `chunk`-th 128 bytes of each row, to
    a tile in shared memory with the 128-byte swizzle."""
    itemsize = dtypes.lookup(out_dtype).size
    pack = None if itemsize == 4 else make_pack(out_dtype)

    @cuda.jit(device=True, forceinline=True)
    def write_packed(accumulator, chunk, tile, lane, warp):
        """64 columns of 16 bits, 16 at a time by stmatrix: lane i has the address of row i % 16 and eight columns."""
        line = uint32(tile + (warp * uint32(16) + lane % uint32(16)) * uint32(ROW_BYTES))
        swizzle, right = lane % uint32(8), lane // uint32(16)
        for part in range(4):
            unroll()
            i = 32 * chunk + 8 * part
            place = uint32(line + ((uint32(2 * part) + right) ^ swizzle) * uint32(16))
            ptx.stmatrix_sync_x4(
                place,
                pack(accumulator[i], accumulator[i + 1]),
                pack(accumulator[i + 2], accumulator[i + 3]),
                pack(accumulator[i + 4], accumulator[i + 5]),
                pack(accumulator[i + 6], accumulator[i + 7]),
            )

    @cuda.jit(device=True, forceinline=True)
    def write_wide(accumulator, chunk, tile, lane, warp):
        """32 columns of 32 bits, two at a time."""
        top = uint32(tile + (warp * uint32(16) + lane // uint32(4)) * uint32(ROW_BYTES))
        swizzle, within = lane // uint32(4), lane % uint32(4)
        for part in range(4):
            unroll()
            i = 16 * chunk + 4 * part
            unit = (uint32(2 * part) + within // uint32(2)) ^ swizzle
            place = uint32(top + unit * uint32(16) + within % uint32(2) * uint32(8))
            ptx.st_shared_v2_f32(place, accumulator[i], accumulator[i + 1])
            ptx.st_shared_v2_f32(uint32(place + uint32(8 * ROW_BYTES)), accumulator[i + 2], accumulator[i + 3])

    return write_wide if itemsize == 4 else write_packed


@functools.cache
def make_staged_store(
    columns: int,
    out_dtype: str,
    activation: str,
    has_bias: bool,
    batched: bool = False,
    accumulate: bool = False,
    tiles: int = 2,
    shared_bias: bool = False,
) -> Callable:
    """Make a function that writes a warpgroup's 64 x `columns` by TMA.

        store(accumulator, c_map, bias, place, thread, barrier, row, column, batch, width)

    128 bytes of every row at a time are written to shared memory and handed to the copy engine, from `tiles` tiles in
    turn, the first at `place`: the next are written while the last are copied. Where there is a tile for each, all are
    written at once and copied while the next product is computed. `barrier` is a named barrier of this warpgroup's own,
    `width` C's columns, beyond which there is no bias, and `batch` the slowest coordinate of a map of three dimensions.
    With `shared_bias` the bias is the address of the tile's columns in shared memory, float32, written before the call.
    With `accumulate` (and `batched`) the copy engine adds to what C holds, in L2: C does not come to the SM for it.
    """
    chunk_columns = ROW_BYTES // dtypes.lookup(out_dtype).size
    chunks = columns // chunk_columns
    tile_bytes = GROUP_ROWS * ROW_BYTES
    others = tiles - 1
    finish = make_finish(columns, activation, has_bias, shared_bias)
    write = make_write(out_dtype)

    @cuda.jit(device=True, forceinline=True)
    def copy_2d(c_map, x, row, batch, tile):
        ptx.cp_async_bulk_tensor_2d_global_shared(c_map, x, row, tile)

    @cuda.jit(device=True, forceinline=True)
    def copy_3d(c_map, x, row, batch, tile):
        ptx.cp_async_bulk_tensor_3d_global_shared(c_map, x, row, batch, tile)

    @cuda.jit(device=True, forceinline=True)
    def add_3d(c_map, x, row, batch, tile):
        ptx.cp_reduce_async_bulk_tensor_3d_add(c_map, x, row, batch, tile)

    copy = add_3d if accumulate else copy_3d if batched else copy_2d

    @cuda.jit(device=True, forceinline=True)
    def store_at_once(accumulator, c_map, bias, place, thread, barrier, row, column, batch, width):
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        if thread == 0:
            ptx.cp_async_bulk_wait_group_read(0)
        ptx.bar_sync(barrier, WARPGROUP)
        finish(accumulator, bias, thread, column, width)
        for chunk in range(chunks):
            unroll()
            write(accumulator, chunk, uint32(place + uint32(chunk * tile_bytes)), lane, warp)
        ptx.fence_proxy_async_shared_cta()
        ptx.bar_sync(barrier, WARPGROUP)
        if thread == 0:
            for chunk in range(chunks):
                unroll()
                tile = uint32(place + uint32(chunk * tile_bytes))
                copy(c_map, uint32(column + uint32(chunk * chunk_columns)), row, batch, tile)
            ptx.cp_async_bulk_commit_group()

    @cuda.jit(device=True, forceinline=True)
    def store(accumulator, c_map, bias, place, thread, barrier, row, column, batch, width):
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        for chunk in range(chunks):
            unroll()
            tile = uint32(place + uint32(chunk % tiles * tile_bytes))
            if thread == 0:
                if chunk == 0:
                    ptx.cp_async_bulk_wait_group_read(0)  # an odd number of chunks ended with this very tile
                else:
                    ptx.cp_async_bulk_wait_group_read(others)  # the copy that took this tile last has read it
            ptx.bar_sync(barrier, WARPGROUP)
            if chunk == 0:
                finish(accumulator, bias, thread, column, width)
            write(accumulator, chunk, tile, lane, warp)
            ptx.fence_proxy_async_shared_cta()
            ptx.bar_sync(barrier, WARPGROUP)
            if thread == 0:
                copy(c_map, uint32(column + uint32(chunk * chunk_columns)), row, batch, tile)
                ptx.cp_async_bulk_commit_group()

    return store_at_once if chunks <= tiles else store


@functools.cache
def make_store_by_tma(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    columns: int = 256,
    stages: int = 4,
    band: int = 8,
    cluster: int = 2,
) -> Kernel:
    """Step 10: results go through shared memory, and TMA carries them away while the next tile is multiplied."""
    check_columns(columns, stages, b_major, most=256, cluster=cluster)
    rows = TILE_ROWS
    accumulators = columns // 2
    arrivals = 2 * cluster
    depth = k_elements(dtype)
    fetch = make_fetch_shared(rows, columns, dtype, b_major, cluster)
    product = make_product(columns, dtype, b_major)
    wait_group = getattr(ptx, f"wgmma_wait_group_m64n{columns}_f32")
    store = make_staged_store(columns, out_dtype, activation, has_bias)
    smem = Shared(
        a=Tiles(stages, (rows, depth), dtype, swizzle="128B"),
        b=Tiles(stages, (columns, depth), dtype, swizzle="128B"),
        c=Tiles(4, (GROUP_ROWS, ROW_BYTES // dtypes.lookup(out_dtype).size), out_dtype, swizzle="128B"),
        full=Barriers(stages),
        empty=Barriers(stages),
    )

    @kernel(threads=3 * WARPGROUP, shared=smem, cluster=cluster)
    def gemm_store_by_tma(a_map, b_map, c_map, bias, width, tiles_m, tiles_n, k_blocks):
        thread = uint32(cuda.threadIdx.x)
        rank = ptx.cluster_ctarank()
        first, step = uint32(cuda.blockIdx.x) // uint32(cluster), uint32(cuda.gridDim.x) // uint32(cluster)
        tiles = uint32(tiles_m * tiles_n)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], arrivals)
            ptx.fence_mbarrier_init()
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()

        use = uint32(0)
        if thread < WARPGROUP:
            ptx.setmaxnreg_dec(PRODUCER_REGISTERS)
            if thread == 0:
                tile = first
                while tile < tiles:
                    m, n = tile_of(tile, tiles_m, tiles_n, band)
                    row, column = uint32((m * uint32(cluster) + rank) * uint32(rows)), n * uint32(columns)
                    for block in range(k_blocks):
                        stage, phase = ring(use, stages)
                        use = uint32(use + uint32(1))
                        mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                        k = uint32(uint32(block) * uint32(depth))
                        fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, smem.full[stage], rank)
                    tile = uint32(tile + step)
        else:
            ptx.setmaxnreg_inc(CONSUMER_REGISTERS)
            group = uint32(thread // uint32(WARPGROUP) - uint32(1))
            thread = uint32(thread % uint32(WARPGROUP))
            mine = uint32(group * uint32(GROUP_ROWS * ROW_BYTES))
            place = ptx.shared_address(smem.c[uint32(group * uint32(2))])
            accumulator = cuda.local.array(accumulators, float32)
            tile = first
            while tile < tiles:
                m, n = tile_of(tile, tiles_m, tiles_n, band)
                for block in range(k_blocks):
                    stage, phase = ring(use, stages)
                    mbarrier_wait(smem.full[stage], phase)
                    a, b = uint32(ptx.shared_address(smem.a[stage]) + mine), ptx.shared_address(smem.b[stage])
                    product(accumulator, a, b, block > 0)
                    wait_group(accumulator, 1)
                    if block > 0 and thread < cluster:
                        before, _ = ring(uint32(use - uint32(1)), stages)
                        ptx.mbarrier_arrive_shared_cluster(ptx.mapa_shared_cluster(smem.empty[before], thread))
                    use = uint32(use + uint32(1))
                wait_group(accumulator, 0)
                if thread < cluster:
                    before, _ = ring(uint32(use - uint32(1)), stages)
                    ptx.mbarrier_arrive_shared_cluster(ptx.mapa_shared_cluster(smem.empty[before], thread))
                row = uint32((m * uint32(cluster) + rank) * uint32(rows) + group * uint32(GROUP_ROWS))
                barrier = uint32(group + uint32(1))
                store(accumulator, c_map, bias, place, thread, barrier, row, n * uint32(columns), 0, width)
                tile = uint32(tile + step)
            if thread == 0:
                ptx.cp_async_bulk_wait_group(0)
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()

    return gemm_store_by_tma

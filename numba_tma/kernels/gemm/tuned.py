"""Step 11: the kernels that `matmul` chooses among, by shape.

`make_tuned` is step 10 with its constants set free: 64 rows for each of one or two consumer warpgroups, any width,
with or without a cluster, batches of matrices (maps of three dimensions, the batch's first), and for results that TMA
cannot write, whose rows do not begin at multiples of 16 bytes, the store from registers.
With `programmatic` both may start before the kernel in front of them has ended, and set up their barriers meanwhile.

`make_split` is for products with fewer tiles than the GPU has SMs, such as a few rows times a large weight. The blocks
of a cluster divide K among them; then each sums a share of the tile's rows, out of its peers' shared memory, always in
the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import cuda
from numba.cuda.types import float32, uint32

from ... import dtypes, ptx
from ...launch import Kernel, kernel
from ...pipeline import make_meet, make_release, mbarrier_wait, ring
from ...shared import Barriers, Buffer, Shared, Tiles
from ...unroll import unroll
from ...warpgroup import ROW_BYTES, consumer_number, k_elements, make_product
from .epilogue import make_direct_store
from .persistent import make_staged_store, tile_of
from .warpgroup import (
    BOX_COLUMNS,
    CONSUMER_REGISTERS,
    GROUP_ROWS,
    PRODUCER_REGISTERS,
    WARPGROUP,
    make_store,
)

_PAD = 8  # floats behind each row of partial sums, so that eight rows lie in different banks


@functools.cache
def make_fetch(rows: int, columns: int, dtype: str, b_major: str, cluster: int, across: str) -> Callable:
    """As persistent.make_fetch_shared, from maps whose slowest dimension is the batch.

    A cluster's tiles lie one below the other (`across` "m") and have B in common, or side by side ("n") and have A.
    """
    depth = k_elements(dtype)
    nbytes = (rows + columns) * ROW_BYTES
    a_rows = rows // cluster if across == "n" else rows
    b_columns = columns // cluster if across == "m" else columns
    boxes = -(-b_columns // BOX_COLUMNS)
    box_bytes = depth * ROW_BYTES
    everyone = (1 << cluster) - 1
    by_k = b_major == "k"

    @cuda.jit(device=True, forceinline=True)
    def alone(place, tensor_map, x, y, z, bar):
        ptx.cp_async_bulk_tensor_3d_shared_global(place, tensor_map, x, y, z, bar)

    @cuda.jit(device=True, forceinline=True)
    def for_all(place, tensor_map, x, y, z, bar):
        ptx.cp_async_bulk_tensor_3d_shared_global_multicast(place, tensor_map, x, y, z, bar, everyone)

    copy_a = for_all if cluster > 1 and across == "n" else alone
    copy_b = for_all if cluster > 1 and across == "m" else alone

    @cuda.jit(device=True, forceinline=True)
    def fetch(a_tile, b_tile, a_map, b_map, row, column, k, a_batch, b_batch, bar, rank):
        ptx.mbarrier_arrive_expect_tx(bar, nbytes)
        a_part = uint32(0 if a_rows == rows else rank)
        b_part = uint32(0 if b_columns == columns else rank)
        place = uint32(ptx.shared_address(a_tile) + a_part * uint32(a_rows * ROW_BYTES))
        copy_a(place, a_map, k, uint32(row + a_part * uint32(a_rows)), a_batch, bar)
        start = ptx.shared_address(b_tile)
        if by_k:
            place = uint32(start + b_part * uint32(b_columns * ROW_BYTES))
            copy_b(place, b_map, k, uint32(column + b_part * uint32(b_columns)), b_batch, bar)
        else:
            for i in range(boxes):
                box = uint32(b_part * uint32(boxes) + uint32(i))
                place = uint32(start + box * uint32(box_bytes))
                copy_b(place, b_map, uint32(column + box * uint32(BOX_COLUMNS)), k, b_batch, bar)

    return fetch


def _rings(rows: int, columns: int, dtype: str, stages: int) -> dict[str, Tiles | Barriers]:
    """Members of a plan: the stages of A and B, and their barriers."""
    depth = k_elements(dtype)
    return {
        "a": Tiles(stages, (rows, depth), dtype, swizzle="128B"),
        "b": Tiles(stages, (columns, depth), dtype, swizzle="128B"),
        "full": Barriers(stages),
        "empty": Barriers(stages),
    }


def _results(out_dtype: str, tiles: int) -> dict[str, Tiles]:
    shape = (GROUP_ROWS, ROW_BYTES // dtypes.lookup(out_dtype).size)
    return {"c": Tiles(tiles, shape, out_dtype, swizzle="128B")} if tiles else {}


def stage_bytes(rows: int, columns: int) -> int:
    """Shared memory of a stage: a K block of A and one of B, and two barriers."""
    return (rows + columns) * ROW_BYTES + 16


def bias_bytes(consumers: int, columns: int) -> int:
    """Shared memory that `make_tuned` needs for the bias of a tile's columns, for each consumer by itself."""
    return 4 * consumers * columns


def result_bytes(consumers: int, tiles: int = 2) -> int:
    """Shared memory that `make_tuned` needs for results on their way to TMA: `tiles` tiles for each consumer."""
    return tiles * consumers * GROUP_ROWS * ROW_BYTES


def sums_bytes(consumers: int, columns: int) -> int:
    """Shared memory that `make_split` needs for partial sums."""
    return GROUP_ROWS * consumers * (columns + _PAD) * 4


@functools.cache
def make_tuned(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    by_tma: bool = True,
    consumers: int = 2,
    columns: int = 256,
    stages: int = 4,
    cluster: int = 2,
    across: str = "m",
    band: int = 8,
    programmatic: bool = True,
    accumulate: bool = False,
    results: int = 2,
) -> Kernel:
    """The kernel for these types and this tile.

    `c` is C's tensor map with `by_tma`, else C itself, of shape (batch, M, N). `a_batches` and `b_batches` are 0 where
    all of the batch have the same A or B, else 1. The grid is any number of clusters; `tiles_m` and `tiles_n` count a
    cluster's tiles, which lie one below the other (`across` "m") or side by side ("n"), as one. With `accumulate` the
    result is added to what C holds. Results on their way to TMA have `results` tiles for each consumer.
    """
    rows = GROUP_ROWS * consumers
    accumulators = columns // 2
    arrivals = consumers * cluster
    two = consumers == 2  # one consumer and the producer may have all registers that they like
    depth = k_elements(dtype)
    rows_apart, columns_apart = (cluster, 1) if across == "m" else (1, cluster)
    fetch = make_fetch(rows, columns, dtype, b_major, cluster, across)
    release, meet = make_release(cluster), make_meet(cluster)
    product = make_product(columns, dtype, b_major)
    wait_group = getattr(ptx, f"wgmma_wait_group_m64n{columns}_f32")
    shared_bias = has_bias and by_tma
    parts = -(-columns // WARPGROUP)
    smem = Shared(
        **_rings(rows, columns, dtype, stages),
        **_results(out_dtype, results * consumers if by_tma else 0),
        **({"bias": Buffer((consumers * columns,), float32)} if shared_bias else {}),
    )

    @cuda.jit(device=True, forceinline=True)
    def load_bias(kept, bias, column, thread, width):
        """This thread's share of the bias of a tile's columns, while the first products are computed."""
        for i in range(parts):
            unroll()
            x = uint32(column + thread + uint32(i * WARPGROUP))
            kept[i] = float32(bias[x]) if x < width else float32(0)

    @cuda.jit(device=True, forceinline=True)
    def share_bias(kept, group, thread):
        for i in range(parts):
            unroll()
            x = uint32(thread + uint32(i * WARPGROUP))
            if x < columns:
                smem.bias[uint32(group * uint32(columns) + x)] = kept[i]

    @cuda.jit(device=True, forceinline=True)
    def bias_in_shared(bias, group):
        return uint32(ptx.shared_address(smem.bias) + group * uint32(4 * columns))

    @cuda.jit(device=True, forceinline=True)
    def bias_itself(bias, group):
        return bias

    bias_of = bias_in_shared if shared_bias else bias_itself

    @cuda.jit(device=True, forceinline=True)
    def place(m, n, rank):
        """First row and column of a block's tile of its cluster's tiles."""
        below, beside = (rank, uint32(0)) if rows_apart > 1 else (uint32(0), rank)
        return (
            uint32((m * uint32(rows_apart) + below) * uint32(rows)),
            uint32((n * uint32(columns_apart) + beside) * uint32(columns)),
        )

    if by_tma:
        staged = make_staged_store(columns, out_dtype, activation, has_bias, True, accumulate, results, shared_bias)

        @cuda.jit(device=True, forceinline=True)
        def store(accumulator, c, bias, group, thread, row, column, batch, width):
            place = ptx.shared_address(smem.c[uint32(group * uint32(results))])
            tile_bias, barrier = bias_of(bias, group), uint32(group + uint32(1))
            staged(accumulator, c, tile_bias, place, thread, barrier, row, column, batch, width)

        @cuda.jit(device=True, forceinline=True)
        def drain(thread):
            if thread == 0:
                ptx.cp_async_bulk_wait_group_read(0)  # shared memory has to outlive the copies, no more
    else:
        direct = make_store(columns, out_dtype, activation, has_bias, accumulate)

        @cuda.jit(device=True, forceinline=True)
        def store(accumulator, c, bias, group, thread, row, column, batch, width):
            direct(accumulator, c[batch], bias, thread, row, column)

        @cuda.jit(device=True, forceinline=True)
        def drain(thread):
            pass

    @kernel(
        threads=WARPGROUP * (consumers + 1),
        shared=smem,
        cluster=cluster,
        min_blocks=blocks_per_sm(consumers, columns),
        programmatic=programmatic,
    )
    def gemm_tuned(a_map, b_map, c, bias, width, tiles_m, tiles_n, batches, k_blocks, a_batches, b_batches):
        thread = uint32(cuda.threadIdx.x)
        rank = ptx.cluster_ctarank()
        first, step = uint32(cuda.blockIdx.x) // uint32(cluster), uint32(cuda.gridDim.x) // uint32(cluster)
        per_batch = uint32(tiles_m * tiles_n)
        tiles = uint32(per_batch * batches)
        if thread == 0:
            ptx.prefetch_tensormap(a_map)
            ptx.prefetch_tensormap(b_map)
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], arrivals)
            ptx.fence_mbarrier_init()
        meet()
        ptx.griddepcontrol_wait()
        ptx.griddepcontrol_launch_dependents()

        use = uint32(0)
        if thread < WARPGROUP:
            if two:
                ptx.setmaxnreg_dec(PRODUCER_REGISTERS)
            if thread == 0:
                tile = first
                while tile < tiles:
                    batch = uint32(tile // per_batch)
                    m, n = tile_of(uint32(tile - batch * per_batch), tiles_m, tiles_n, band)
                    row, column = place(m, n, rank)
                    a_batch, b_batch = uint32(batch * a_batches), uint32(batch * b_batches)
                    for block in range(k_blocks):
                        unroll(1)
                        stage, phase = ring(use, stages)
                        use = uint32(use + uint32(1))
                        mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                        k, bar = uint32(uint32(block) * uint32(depth)), smem.full[stage]
                        fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, a_batch, b_batch, bar, rank)
                    tile = uint32(tile + step)
        else:
            if two:
                ptx.setmaxnreg_inc(CONSUMER_REGISTERS)
            group = consumer_number(thread, consumers)
            thread = uint32(thread % uint32(WARPGROUP))
            mine = uint32(group * uint32(GROUP_ROWS * ROW_BYTES))
            accumulator = cuda.local.array(accumulators, float32)
            kept = cuda.local.array(parts, float32)
            tile = first
            while tile < tiles:
                batch = uint32(tile // per_batch)
                m, n = tile_of(uint32(tile - batch * per_batch), tiles_m, tiles_n, band)
                if shared_bias:
                    _, column = place(m, n, rank)
                    load_bias(kept, bias, column, thread, width)
                block = uint32(0)  # of 32 bits, as `range` would not be: it stays in a uniform register
                while block < k_blocks:
                    unroll(1)
                    stage, phase = ring(use, stages)
                    mbarrier_wait(smem.full[stage], phase)
                    a, b = uint32(ptx.shared_address(smem.a[stage]) + mine), ptx.shared_address(smem.b[stage])
                    product(accumulator, a, b, block > 0)
                    wait_group(accumulator, 1)
                    if block > 0:
                        before, _ = ring(uint32(use - uint32(1)), stages)
                        release(smem.empty[before], thread)
                    use = uint32(use + uint32(1))
                    block = uint32(block + uint32(1))
                wait_group(accumulator, 0)
                before, _ = ring(uint32(use - uint32(1)), stages)
                release(smem.empty[before], thread)
                if shared_bias:
                    share_bias(kept, group, thread)
                row, column = place(m, n, rank)
                row = uint32(row + group * uint32(GROUP_ROWS))
                store(accumulator, c, bias, group, thread, row, column, batch, width)
                tile = uint32(tile + step)
            drain(thread)
        meet()

    return gemm_tuned


def blocks_per_sm(consumers: int, columns: int) -> int:
    """How many blocks of `make_tuned` an SM holds, as far as registers go."""
    return 2 if consumers == 1 and columns <= 128 else 1


@functools.cache
def make_split(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    consumers: int = 2,
    columns: int = 128,
    stages: int = 4,
    splits: int = 4,
    programmatic: bool = True,
    accumulate: bool = False,
) -> Kernel:
    """The kernel whose clusters of `splits` blocks share a tile's K; a cluster for each tile of each of the batch.

    Parameters are those of `make_tuned`'s, C always itself.
    """
    rows = GROUP_ROWS * consumers
    threads = WARPGROUP * (consumers + 1)
    accumulators = columns // 2
    blocks_of_8 = columns // 8
    vectors = rows * columns // 4
    shares = -(-vectors // (threads * splits))
    numbers = 4 * shares
    depth = k_elements(dtype)
    fetch = make_fetch(rows, columns, dtype, b_major, 1, "m")
    product = make_product(columns, dtype, b_major)
    wait_group = getattr(ptx, f"wgmma_wait_group_m64n{columns}_f32")
    store_pair = make_direct_store(out_dtype, activation, has_bias, accumulate)
    smem = Shared(**_rings(rows, columns, dtype, stages), sums=Buffer((rows, columns + _PAD), float32))

    @cuda.jit(device=True, forceinline=True)
    def keep(accumulator, group, thread):
        """Write a warpgroup's partial sums to this block's shared memory."""
        lane = uint32(thread % uint32(32))
        row = uint32(group * uint32(GROUP_ROWS) + thread // uint32(32) * uint32(16) + lane // uint32(4))
        column = uint32(lane % uint32(4) * uint32(2))
        upper = ptx.shared_address(smem.sums) + (row * uint32(columns + _PAD) + column) * uint32(4)
        lower = uint32(upper + uint32(8 * (columns + _PAD) * 4))
        for j in range(blocks_of_8):
            unroll()
            ptx.st_shared_v2_f32(uint32(upper + uint32(32 * j)), accumulator[4 * j], accumulator[4 * j + 1])
            ptx.st_shared_v2_f32(uint32(lower + uint32(32 * j)), accumulator[4 * j + 2], accumulator[4 * j + 3])

    @kernel(threads=threads, shared=smem, cluster=splits, programmatic=programmatic)
    def gemm_split(a_map, b_map, c, bias, width, tiles_m, tiles_n, batches, k_blocks, a_batches, b_batches):
        thread = uint32(cuda.threadIdx.x)
        rank = ptx.cluster_ctarank()
        tile = uint32(cuda.blockIdx.x) // uint32(splits)
        batch = uint32(tile // uint32(tiles_m * tiles_n))
        within = uint32(tile - batch * uint32(tiles_m * tiles_n))
        n = uint32(within // tiles_m)
        row, column = uint32(uint32(within - n * tiles_m) * uint32(rows)), n * uint32(columns)
        share = uint32((k_blocks + uint32(splits - 1)) // uint32(splits))
        start = uint32(rank * share)
        end = min(uint32(start + share), uint32(k_blocks))
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], consumers)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        ptx.griddepcontrol_wait()
        ptx.griddepcontrol_launch_dependents()

        if thread < WARPGROUP:
            if thread == 0:
                a_batch, b_batch = uint32(batch * a_batches), uint32(batch * b_batches)
                for block in range(start, end):
                    unroll(1)
                    stage, phase = ring(uint32(block - start), stages)
                    mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                    k, bar = uint32(uint32(block) * uint32(depth)), smem.full[stage]
                    fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, a_batch, b_batch, bar, uint32(0))
        else:
            group = consumer_number(thread, consumers)
            mine = uint32(group * uint32(GROUP_ROWS * ROW_BYTES))
            accumulator = cuda.local.array(accumulators, float32)
            for i in range(accumulators):
                unroll()
                accumulator[i] = float32(0)  # K may have fewer blocks than the cluster
            use, uses = uint32(0), uint32(max(end, start) - start)
            while use < uses:
                unroll(1)
                stage, phase = ring(use, stages)
                mbarrier_wait(smem.full[stage], phase)
                a, b = uint32(ptx.shared_address(smem.a[stage]) + mine), ptx.shared_address(smem.b[stage])
                product(accumulator, a, b, True)
                wait_group(accumulator, 1)
                if use > 0 and thread % uint32(WARPGROUP) == 0:
                    before, _ = ring(uint32(use - uint32(1)), stages)
                    ptx.mbarrier_arrive(smem.empty[before])
                use = uint32(use + uint32(1))
            wait_group(accumulator, 0)
            keep(accumulator, group, uint32(thread % uint32(WARPGROUP)))
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()

        # This block's share of the tile: vectors of four columns, every splits-th set of `threads` of them.
        sums = ptx.shared_address(smem.sums)
        totals = cuda.local.array(numbers, float32)
        for i in range(shares):
            unroll()
            vector = uint32((uint32(i * splits) + rank) * uint32(threads) + thread)
            s0, s1, s2, s3 = float32(0), float32(0), float32(0), float32(0)
            if vector < vectors:
                r, x = uint32(vector // uint32(columns // 4)), uint32(vector % uint32(columns // 4) * uint32(4))
                place = uint32(sums + (r * uint32(columns + _PAD) + x) * uint32(4))
                for peer in range(splits):
                    unroll()
                    x0, x1, x2, x3 = ptx.ld_shared_cluster_v4_f32(ptx.mapa_shared_cluster(place, peer))
                    s0, s1, s2, s3 = s0 + x0, s1 + x1, s2 + x2, s3 + x3
            totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3] = s0, s1, s2, s3
        for i in range(shares):  # not before all loads are on their way
            unroll()
            vector = uint32((uint32(i * splits) + rank) * uint32(threads) + thread)
            if vector < vectors:
                r, x = uint32(vector // uint32(columns // 4)), uint32(vector % uint32(columns // 4) * uint32(4))
                r, x = uint32(row + r), uint32(column + x)
                store_pair(c[batch], r, x, totals[4 * i], totals[4 * i + 1], bias)
                store_pair(c[batch], r, uint32(x + uint32(2)), totals[4 * i + 2], totals[4 * i + 3], bias)
        ptx.barrier_cluster_arrive()  # peers may still be reading this block's sums
        ptx.barrier_cluster_wait()

    return gemm_split

"""Steps 5 to 7: the warpgroup's tensor-core instruction, a ring of stages behind a producer, and two consumers.

wgmma reads both tiles from shared memory, just as TMA with the 128-byte swizzle left them there. Nobody loads a
fragment into registers any more: four warps start a product, and wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import cuda
from numba.cuda.types import float32, uint32

from ... import ptx
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait, ring
from ...shared import Barriers, Shared, Tiles
from ...unroll import unroll
from ...warpgroup import ROW_BYTES, WARPGROUP, k_elements, make_product
from .epilogue import make_activation_of_two, make_direct_store

GROUP_ROWS = 64  # of C, in one instruction
TILE_ROWS = 2 * GROUP_ROWS  # of C, in a block
BOX_COLUMNS = 64  # of B in a row of 128 bytes, where B's rows run along N


def b_box(columns: int, dtype: object, b_major: str) -> tuple[int, int]:
    """The box of B's tensor map: `columns` rows along K (b_major "k"), or K rows of 64 columns ("n")."""
    depth = k_elements(dtype)
    return (columns, depth) if b_major == "k" else (depth, BOX_COLUMNS)


def check_columns(columns: int, stages: int, b_major: str, *, most: int, cluster: int = 1) -> None:
    """Raise ValueError for a tile that the steps from here on have not, or too few stages.

    `most` is as many columns as there are registers for; of a `cluster` that shares B each block fetches as many.
    """
    unit = cluster * (BOX_COLUMNS if b_major == "n" else 16)
    if not 0 < columns <= most or columns % unit:
        raise ValueError(f"columns {columns}: a multiple of {unit}, up to {most}, is expected here")
    if stages < 2:
        raise ValueError(f"stages {stages}: one is computed on while others fill; take 2 or more")


@functools.cache
def make_fetch(rows: int, columns: int, dtype: str, b_major: str) -> Callable:
    """Make `fetch(a_tile, b_tile, a_map, b_map, row, column, k, bar)`: one K block of A and B, credited to `bar`."""
    depth = k_elements(dtype)
    nbytes = (rows + columns) * ROW_BYTES
    box_bytes = depth * ROW_BYTES
    boxes = columns // BOX_COLUMNS

    @cuda.jit(device=True, forceinline=True)
    def fetch(a_tile, b_tile, a_map, b_map, row, column, k, bar):
        ptx.mbarrier_arrive_expect_tx(bar, nbytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(a_tile, a_map, k, row, bar)
        ptx.cp_async_bulk_tensor_2d_shared_global(b_tile, b_map, k, column, bar)

    @cuda.jit(device=True, forceinline=True)
    def fetch_by_columns(a_tile, b_tile, a_map, b_map, row, column, k, bar):
        ptx.mbarrier_arrive_expect_tx(bar, nbytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(a_tile, a_map, k, row, bar)
        for box in range(boxes):
            place = uint32(ptx.shared_address(b_tile) + uint32(box * box_bytes))
            first = uint32(column + uint32(box * BOX_COLUMNS))
            ptx.cp_async_bulk_tensor_2d_shared_global(place, b_map, first, k, bar)

    return fetch if b_major == "k" else fetch_by_columns


@functools.cache
def make_finish(columns: int, activation: str, has_bias: bool, shared_bias: bool = False) -> Callable:
    """Make `finish(accumulator, bias, thread, column, width)`: add the bias of C's `width` columns, and activate.

    With `shared_bias` the bias is the address of the tile's columns in shared memory, float32.

    A loop of its own: together with the store its body would be too large for the compiler to unroll.
    """
    activate = make_activation_of_two(activation)
    plain = activation == "none" and not has_bias
    blocks = 0 if plain else columns // 8

    @cuda.jit(device=True, forceinline=True)
    def finish(accumulator, bias, thread, column, width):
        column = uint32(column + thread % uint32(4) * uint32(2))
        for j in range(blocks):
            unroll()
            left, right = float32(0), float32(0)
            if shared_bias:
                left, right = ptx.ld_shared_v2_f32(
                    uint32(bias + (thread % uint32(4) * uint32(2) + uint32(8 * j)) * uint32(4))
                )
            elif has_bias:
                x = uint32(column + uint32(8 * j))
                if x < width:
                    left = float32(bias[x])
                if uint32(x + uint32(1)) < width:
                    right = float32(bias[uint32(x + uint32(1))])
            for i in (4 * j, 4 * j + 2):
                unroll()
                accumulator[i], accumulator[i + 1] = activate(accumulator[i] + left, accumulator[i + 1] + right)

    return finish


@functools.cache
def make_store(columns: int, out_dtype: str, activation: str, has_bias: bool, accumulate: bool = False) -> Callable:
    """Make `store(accumulator, c, bias, thread, row, column)`: a warpgroup's 64 x `columns` to `c`, from registers;
    with `accumulate` added to what is there."""
    finish = make_finish(columns, activation, has_bias)
    store_pair = make_direct_store(out_dtype, accumulate=accumulate)
    blocks = columns // 8

    @cuda.jit(device=True, forceinline=True)
    def store(accumulator, c, bias, thread, row, column):
        finish(accumulator, bias, thread, column, uint32(c.shape[1]))
        lane = uint32(thread % uint32(32))
        row = uint32(row + thread // uint32(32) * uint32(16) + lane // uint32(4))
        column = uint32(column + lane % uint32(4) * uint32(2))
        for j in range(blocks):
            unroll()
            x = uint32(column + uint32(8 * j))
            store_pair(c, row, x, accumulator[4 * j], accumulator[4 * j + 1], bias)
            store_pair(c, uint32(row + uint32(8)), x, accumulator[4 * j + 2], accumulator[4 * j + 3], bias)

    return store


@functools.cache
def make_wgmma(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    columns: int = 128,
    stages: int = 2,
) -> Kernel:
    """Step 5: TMA into two buffers, wgmma out of them; a warpgroup has 128 rows, and an SM several of these blocks."""
    check_columns(columns, stages, b_major, most=128)
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
    )

    @kernel(threads=WARPGROUP, shared=smem)
    def gemm_wgmma(a_map, b_map, c, bias, k_blocks):
        thread = uint32(cuda.threadIdx.x)
        leader = thread == 0
        row = uint32(cuda.blockIdx.x) * uint32(rows)
        column = uint32(cuda.blockIdx.y) * uint32(columns)
        upper, lower = cuda.local.array(accumulators, float32), cuda.local.array(accumulators, float32)
        if leader:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if leader:
            for stage in range(stages):
                if stage < k_blocks:
                    k = uint32(stage * depth)
                    fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, smem.full[stage])

        for block in range(k_blocks):
            stage, phase = ring(block, stages)
            mbarrier_wait(smem.full[stage], phase)
            a, b = ptx.shared_address(smem.a[stage]), ptx.shared_address(smem.b[stage])
            product(upper, a, b, block > 0)
            product(lower, uint32(a + uint32(GROUP_ROWS * ROW_BYTES)), b, block > 0)
            wait_group(upper, 0)
            wait_group(lower, 0)
            cuda.syncthreads()  # all four warps have done with the stage: it may be filled again
            ahead = block + stages
            if leader and ahead < k_blocks:
                k = uint32(uint32(ahead) * uint32(depth))
                fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, smem.full[stage])
        store(upper, c, bias, thread, row, column)
        store(lower, c, bias, thread, uint32(row + uint32(GROUP_ROWS)), column)

    return gemm_wgmma


@functools.cache
def make_ring(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    columns: int = 128,
    stages: int = 3,
) -> Kernel:
    """Step 6: a producer warp fills a ring of stages; a product is still running when the next one is started."""
    check_columns(columns, stages, b_major, most=128)
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

    @kernel(threads=WARPGROUP + 32, shared=smem)
    def gemm_ring(a_map, b_map, c, bias, k_blocks):
        thread = uint32(cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.x) * uint32(rows)
        column = uint32(cuda.blockIdx.y) * uint32(columns)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()

        if thread >= WARPGROUP:  # the producer warp, of which one thread issues
            if thread == WARPGROUP:
                for block in range(k_blocks):
                    stage, phase = ring(block, stages)
                    mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                    k = uint32(uint32(block) * uint32(depth))
                    fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, smem.full[stage])
        else:
            upper, lower = cuda.local.array(accumulators, float32), cuda.local.array(accumulators, float32)
            for block in range(k_blocks):
                stage, phase = ring(block, stages)
                mbarrier_wait(smem.full[stage], phase)
                a, b = ptx.shared_address(smem.a[stage]), ptx.shared_address(smem.b[stage])
                product(upper, a, b, block > 0)
                product(lower, uint32(a + uint32(GROUP_ROWS * ROW_BYTES)), b, block > 0)
                wait_group(upper, 2)  # the last block's two products are done, this one's may go on
                wait_group(lower, 2)
                if block > 0 and thread == 0:
                    before, _ = ring(uint32(block - 1), stages)
                    ptx.mbarrier_arrive(smem.empty[before])
            wait_group(upper, 0)
            wait_group(lower, 0)
            store(upper, c, bias, thread, row, column)
            store(lower, c, bias, thread, uint32(row + uint32(GROUP_ROWS)), column)

    return gemm_ring


PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232


@functools.cache
def make_warpgroups(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    columns: int = 256,
    stages: int = 4,
) -> Kernel:
    """Step 7: two consumer warpgroups of 64 rows share a tile of B twice as wide; the producer lends them registers."""
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
    def gemm_warpgroups(a_map, b_map, c, bias, k_blocks):
        thread = uint32(cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.x) * uint32(rows)
        column = uint32(cuda.blockIdx.y) * uint32(columns)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], 2)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()

        if thread < WARPGROUP:
            ptx.setmaxnreg_dec(PRODUCER_REGISTERS)
            if thread == 0:
                for block in range(k_blocks):
                    stage, phase = ring(block, stages)
                    mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                    k = uint32(uint32(block) * uint32(depth))
                    fetch(smem.a[stage], smem.b[stage], a_map, b_map, row, column, k, smem.full[stage])
        else:
            ptx.setmaxnreg_inc(CONSUMER_REGISTERS)
            group = uint32(thread // uint32(WARPGROUP) - uint32(1))
            thread = uint32(thread % uint32(WARPGROUP))
            mine = uint32(group * uint32(GROUP_ROWS * ROW_BYTES))
            accumulator = cuda.local.array(accumulators, float32)
            for block in range(k_blocks):
                stage, phase = ring(block, stages)
                mbarrier_wait(smem.full[stage], phase)
                a, b = uint32(ptx.shared_address(smem.a[stage]) + mine), ptx.shared_address(smem.b[stage])
                product(accumulator, a, b, block > 0)
                wait_group(accumulator, 1)
                if block > 0 and thread == 0:
                    before, _ = ring(uint32(block - 1), stages)
                    ptx.mbarrier_arrive(smem.empty[before])
            wait_group(accumulator, 0)
            store(accumulator, c, bias, thread, uint32(row + group * uint32(GROUP_ROWS)), column)

    return gemm_warpgroups

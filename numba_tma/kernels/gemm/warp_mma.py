"""Steps 3 and 4: the warp's tensor cores, fed by cp.async as on an A100, then by the copy engine.

mma.sync multiplies a 16 x 16 piece of A by a 16 x 8 piece of B, both in the registers of one warp. Around it:

* A warp computes 64 x 64 of C: each element that ldmatrix brings into registers takes part in 64 products. Smaller
  pieces would ask more of shared memory than it can give: at 64 x 64, reading takes 32 of some 51 cycles that the
  products of a step of 16 along K take an H200's four tensor cores.
* A tile holds 64 elements of K, 128 bytes a row. Eight rows below each other, which ldmatrix reads at once, would all
  begin in the same bank; the 128-byte swizzle spreads them over all 32. It is the copy engine's own pattern, so both
  steps compute with the same code.
* Fragments are loaded one step ahead of the products, and tiles `stages` - 1 ahead of both.

PTX ISA: "ldmatrix", "mma", "Matrix Fragments for mma.m16n8k16 with floating point type", "cp.async", "Swizzling Modes".
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait, release_to_async, ring
from ...pitch import is_pitched
from ...shared import Barriers, Shared, Tiles
from ...unroll import unroll
from .epilogue import make_direct_store
from .operands import Operands

DEPTH = 64  # elements of K in a tile: 128 bytes, the span of the swizzle
STEP = 16  # elements of K that one mma takes
ROW_BYTES = 128
WARP = 64  # rows and columns of C that a warp computes
ACCUMULATORS = WARP * WARP // 32
A_REGISTERS = WARP // 16 * 4  # a step's fragments: four registers for 16 rows of A,
B_REGISTERS = WARP // 8 * 2  # two for 8 columns of B


def check_tile(tile: tuple[int, int], stages: int) -> None:
    """Raise ValueError for a tile that warps of 64 x 64 cannot cover, or too few stages."""
    warps = (tile[0] // WARP) * (tile[1] // WARP)
    if tile[0] % WARP or tile[1] % WARP or warps not in (2, 4, 6, 8) or max(tile) > 256:
        raise ValueError(
            f"tile {tile}: each warp computes {WARP} x {WARP} and keeps {ACCUMULATORS} numbers of it in each thread; a "
            f"block has 2, 4, 6 or 8 such warps: take (128, 256), (256, 128), (128, 128), (64, 128), …"
        )
    if stages < 2:
        raise ValueError(f"stages {stages}: one is computed on while others fill; take 2 or more")


# ---------------------------------------------------------------------------------------------------------------------
# From shared memory through the tensor cores to the output: what both steps share.


def make_tiles(dtype: str, b_major: str, tile: tuple[int, int], stages: int) -> dict[str, Tiles]:
    """Buffers for A, M x K, and for B: N x K ('k'), or one of K x 64 after the other ('n'), as wide as the swizzle."""
    rows, columns = tile
    b = (stages, (columns, DEPTH)) if b_major == "k" else (stages * (columns // DEPTH), (DEPTH, DEPTH))
    return {
        "a": Tiles(stages, (rows, DEPTH), dtype, swizzle="128B"),
        "b": Tiles(*b, dtype, swizzle="128B"),
    }


def make_load_fragments(smem: Shared, tile: tuple[int, int], b_major: str) -> Callable:
    """load_fragments(a, b, stage, step): what one step along K multiplies, from shared memory into registers.

    Each ldmatrix reads four 8 x 8 matrices, whose rows the 32 lanes point at. A: the quarters of 16 x 16, by rows
    first. B: both halves along K of 8 columns, then of the next 8. Stored by K ('n'), B's matrices are transposed as
    they are loaded.
    """
    warps_m = tile[0] // WARP
    boxes = tile[1] // DEPTH
    # Sixteen rows further down the swizzle is where it was.
    rows_16 = 16 * ROW_BYTES

    @cuda.jit(device=True, forceinline=True)
    def load_a(fragment, stage, step):
        thread = uint32(cuda.threadIdx.x)
        lane, warp_m = uint32(thread % uint32(32)), uint32(thread // uint32(32) % uint32(warps_m))
        row = uint32(warp_m * uint32(WARP) + lane % uint32(16))
        place = smem.a[stage].address_of(row, uint32(step * STEP) + lane // uint32(16) * uint32(8))
        for i in range(4):
            unroll()
            r = 4 * i
            fragment[r], fragment[r + 1], fragment[r + 2], fragment[r + 3] = ptx.ldmatrix_sync_x4(
                uint32(place + uint32(i * rows_16))
            )

    @cuda.jit(device=True, forceinline=True)
    def load_b_k(fragment, stage, step):
        thread = uint32(cuda.threadIdx.x)
        lane, warp_n = uint32(thread % uint32(32)), uint32(thread // uint32(32 * warps_m))
        row = uint32(warp_n * uint32(WARP) + lane // uint32(16) * uint32(8) + lane % uint32(8))
        place = smem.b[stage].address_of(row, uint32(step * STEP) + lane // uint32(8) % uint32(2) * uint32(8))
        for j in range(4):
            unroll()
            r = 4 * j
            fragment[r], fragment[r + 1], fragment[r + 2], fragment[r + 3] = ptx.ldmatrix_sync_x4(
                uint32(place + uint32(j * rows_16))
            )

    @cuda.jit(device=True, forceinline=True)
    def load_b_n(fragment, stage, step):
        thread = uint32(cuda.threadIdx.x)
        lane, warp_n = uint32(thread % uint32(32)), uint32(thread // uint32(32 * warps_m))
        box = smem.b[uint32(stage * boxes) + warp_n]
        for j in range(4):
            unroll()
            r = 4 * j
            place = box.address_of(lane % uint32(16), uint32(16 * j) + lane // uint32(16) * uint32(8))
            fragment[r], fragment[r + 1], fragment[r + 2], fragment[r + 3] = ptx.ldmatrix_sync_x4_trans(
                uint32(place + uint32(step * rows_16))
            )

    load_b = load_b_k if b_major == "k" else load_b_n

    @cuda.jit(device=True, forceinline=True)
    def load_fragments(a, b, stage, step):
        load_a(a, stage, step)
        load_b(b, stage, step)

    return load_fragments


def make_multiply(dtype: str) -> Callable:
    """multiply(accumulator, a, b): the 64 x 64 products of one step along K, 32 instructions."""
    name = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    mma = getattr(ptx, f"mma_sync_m16n8k16_f32_{name}_{name}_f32")

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, a, b):
        for i in range(4):
            unroll()
            for j in range(8):
                unroll()
                p, q, r = 4 * i, 2 * j, 4 * (8 * i + j)
                acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = mma(
                    a[p], a[p + 1], a[p + 2], a[p + 3], b[q], b[q + 1], acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                )

    return multiply


def make_store_warp(tile: tuple[int, int], out_dtype: str, activation: str, has_bias: bool) -> Callable:
    """store_warp(accumulator, c, bias, first_row, first_column): this warp's 64 x 64 of the block's tile."""
    warps_m = tile[0] // WARP
    store_pair = make_direct_store(out_dtype, activation, has_bias)

    @cuda.jit(device=True, forceinline=True)
    def store_warp(acc, c, bias, first_row, first_column):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        first_row = uint32(first_row + warp % uint32(warps_m) * uint32(WARP) + lane // uint32(4))
        first_column = uint32(first_column + warp // uint32(warps_m) * uint32(WARP) + lane % uint32(4) * uint32(2))
        for i in range(4):
            unroll()
            row = uint32(first_row + uint32(16 * i))
            for j in range(8):
                unroll()
                column, r = uint32(first_column + uint32(8 * j)), 4 * (8 * i + j)
                store_pair(c, row, column, acc[r], acc[r + 1], bias)
                store_pair(c, uint32(row + uint32(8)), column, acc[r + 2], acc[r + 3], bias)

    return store_warp


# ---------------------------------------------------------------------------------------------------------------------
# Step 3: cp.async.


def copies_for(o: Operands) -> str:
    """How these operands' rows are copied: in whole pieces of 16 bytes; in such, of which the last is filled up with
    zeros ("partial"); or, as cp.async takes aligned addresses only, element by element."""
    if not (is_pitched(o.a) and is_pitched(o.b)):
        return "elements"
    return "whole" if o.k % 8 == 0 and (o.b_major == "k" or o.n % 8 == 0) else "partial"


def make_fetch(threads: int, copies: str) -> Callable:
    """fetch(tile, matrix, first_row, first_column): a tile's share of this thread, zeros where the matrix ends.

    Eight threads copy a row of 64 elements, 8 each, and each of them every `threads` / 8-th row.
    """
    rows_apart = threads // 8
    step_bytes = rows_apart * ROW_BYTES

    @cuda.jit(device=True, forceinline=True)
    def fetch_16_bytes(tile, matrix, first_row, first_column):
        thread = uint32(cuda.threadIdx.x)
        r, c = uint32(thread // uint32(8)), uint32(thread % uint32(8) * uint32(8))
        row, column = uint32(first_row + r), uint32(first_column + c)
        rows, columns = uint32(matrix.shape[0]), uint32(matrix.shape[1])
        rows_left = uint32(rows - row) if row < rows and column < columns else uint32(0)
        nbytes = min(uint32(columns - column), uint32(8)) * uint32(2)
        stride = uint64(matrix.strides[0])
        source = ptx.global_address(matrix) + uint64(row) * stride + uint64(column) * uint64(2)
        place = tile.address_of(r, c)
        for i in range(tile.shape[0] // rows_apart):
            to, at = uint32(place + uint32(i * step_bytes)), source + uint64(i * rows_apart) * stride
            inside = uint32(i * rows_apart) < rows_left
            if copies == "whole":
                ptx.cp_async_cg_16_ignore_src(to, at, not inside)
            else:
                ptx.cp_async_cg_16_zfill(to, at, nbytes if inside else uint32(0))

    @cuda.jit(device=True, forceinline=True)
    def fetch_elements(tile, matrix, first_row, first_column):
        thread = uint32(cuda.threadIdx.x)
        c = uint32(thread % uint32(8) * uint32(8))
        for r in range(thread // uint32(8), tile.shape[0], rows_apart):
            row = uint32(first_row + uint32(r))
            for e in range(8):
                column = uint32(first_column + c + uint32(e))
                inside = row < matrix.shape[0] and column < matrix.shape[1]
                tile[r, uint32(c + uint32(e))] = float32(matrix[row, column]) if inside else float32(0)

    return fetch_elements if copies == "elements" else fetch_16_bytes


@functools.cache
def make_mma_cp_async(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    tile: tuple[int, int] = (128, 256),
    stages: int = 3,
    copies: str = "whole",
) -> Kernel:
    """gemm_mma_cp_async(a, b, c, bias): a block computes one tile of C, with `stages` - 1 copies of tiles ahead."""
    check_tile(tile, stages)
    rows, columns = tile
    boxes = columns // DEPTH
    threads = 32 * (rows // WARP) * (columns // WARP)
    ahead_by, pending = stages - 1, stages - 2
    smem = Shared(**make_tiles(dtype, b_major, tile, stages))
    load_fragments = make_load_fragments(smem, tile, b_major)
    multiply = make_multiply(dtype)
    store_warp = make_store_warp(tile, out_dtype, activation, has_bias)
    fetch = make_fetch(threads, copies)

    @cuda.jit(device=True, forceinline=True)
    def fetch_a(stage, a, first_row, block):
        fetch(smem.a[stage], a, first_row, uint32(block * uint32(DEPTH)))

    @cuda.jit(device=True, forceinline=True)
    def fetch_b(stage, b, first_column, block):
        depth = uint32(block * uint32(DEPTH))
        if b_major == "k":
            fetch(smem.b[stage], b, first_column, depth)
        else:
            for box in range(boxes):
                fetch(smem.b[uint32(stage * boxes) + uint32(box)], b, depth, uint32(first_column + uint32(box * DEPTH)))

    @kernel(threads=threads, shared=smem)
    def gemm_mma_cp_async(a, b, c, bias):
        acc = cuda.local.array(ACCUMULATORS, float32)
        a0, a1 = cuda.local.array(A_REGISTERS, uint32), cuda.local.array(A_REGISTERS, uint32)
        b0, b1 = cuda.local.array(B_REGISTERS, uint32), cuda.local.array(B_REGISTERS, uint32)
        for i in range(ACCUMULATORS):
            unroll()
            acc[i] = float32(0)
        first_row = uint32(uint32(cuda.blockIdx.x) * uint32(rows))
        first_column = uint32(uint32(cuda.blockIdx.y) * uint32(columns))
        k_blocks = uint32((uint32(a.shape[1]) + uint32(DEPTH - 1)) // uint32(DEPTH))
        for block in range(ahead_by):
            fetch_a(uint32(block), a, first_row, uint32(block))
            fetch_b(uint32(block), b, first_column, uint32(block))
            ptx.cp_async_commit_group()
        ptx.cp_async_wait_group(pending)
        cuda.syncthreads()
        load_fragments(a0, b0, uint32(0), uint32(0))

        for block in range(k_blocks):
            stage, _ = ring(block, stages)
            ahead = uint32(uint32(block) + uint32(ahead_by))
            refilled, _ = ring(ahead, stages)  # all have read it: the barrier below, a turn ago, saw to that
            load_fragments(a1, b1, stage, uint32(1))
            fetch_a(refilled, a, first_row, ahead)
            multiply(acc, a0, b0)
            load_fragments(a0, b0, stage, uint32(2))
            fetch_b(refilled, b, first_column, ahead)
            ptx.cp_async_commit_group()
            multiply(acc, a1, b1)
            load_fragments(a1, b1, stage, uint32(3))
            multiply(acc, a0, b0)
            ptx.cp_async_wait_group(pending)
            cuda.syncthreads()
            after, _ = ring(uint32(block) + uint32(1), stages)
            load_fragments(a0, b0, after, uint32(0))
            multiply(acc, a1, b1)
        store_warp(acc, c, bias, first_row, first_column)

    return gemm_mma_cp_async


# ---------------------------------------------------------------------------------------------------------------------
# Step 4: TMA.


@functools.cache
def make_mma_tma(
    dtype: str,
    out_dtype: str,
    b_major: str = "k",
    activation: str = "none",
    has_bias: bool = False,
    tile: tuple[int, int] = (128, 256),
    stages: int = 4,
) -> Kernel:
    """gemm_mma_tma(a_map, b_map, c, bias, k_blocks): the same, but one thread asks for whole tiles, edges included.

    The maps' boxes: 128-byte swizzled, `tile[0]` x 64 of A and `tile[1]` x 64 of B, or 64 x 64 of B stored by K.
    """
    check_tile(tile, stages)
    rows, columns = tile
    boxes = 1 if b_major == "k" else columns // DEPTH
    threads = 32 * (rows // WARP) * (columns // WARP)
    smem = Shared(**make_tiles(dtype, b_major, tile, stages), full=Barriers(stages))
    load_fragments = make_load_fragments(smem, tile, b_major)
    multiply = make_multiply(dtype)
    store_warp = make_store_warp(tile, out_dtype, activation, has_bias)

    @cuda.jit(device=True, forceinline=True)
    def fetch(stage, a_map, b_map, first_row, first_column, block):
        bar, depth = smem.full[stage], uint32(block * uint32(DEPTH))
        ptx.mbarrier_arrive_expect_tx(bar, a_map.box_bytes + boxes * b_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.a[stage], a_map, depth, first_row, bar)
        if b_major == "k":
            ptx.cp_async_bulk_tensor_2d_shared_global(smem.b[stage], b_map, depth, first_column, bar)
        else:
            for box in range(boxes):
                column = uint32(first_column + uint32(box * DEPTH))
                ptx.cp_async_bulk_tensor_2d_shared_global(
                    smem.b[uint32(stage * boxes) + uint32(box)], b_map, column, depth, bar
                )

    @kernel(threads=threads, shared=smem)
    def gemm_mma_tma(a_map, b_map, c, bias, k_blocks):
        acc = cuda.local.array(ACCUMULATORS, float32)
        a0, a1 = cuda.local.array(A_REGISTERS, uint32), cuda.local.array(A_REGISTERS, uint32)
        b0, b1 = cuda.local.array(B_REGISTERS, uint32), cuda.local.array(B_REGISTERS, uint32)
        for i in range(ACCUMULATORS):
            unroll()
            acc[i] = float32(0)
        leader = cuda.threadIdx.x == 0
        first_row = uint32(uint32(cuda.blockIdx.x) * uint32(rows))
        first_column = uint32(uint32(cuda.blockIdx.y) * uint32(columns))
        if leader:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            for stage in range(min(uint32(stages), k_blocks)):
                fetch(uint32(stage), a_map, b_map, first_row, first_column, uint32(stage))
        cuda.syncthreads()
        mbarrier_wait(smem.full[0], 0)
        load_fragments(a0, b0, uint32(0), uint32(0))

        for block in range(k_blocks):
            stage, _ = ring(block, stages)
            load_fragments(a1, b1, stage, uint32(1))
            multiply(acc, a0, b0)
            load_fragments(a0, b0, stage, uint32(2))
            multiply(acc, a1, b1)
            load_fragments(a1, b1, stage, uint32(3))
            multiply(acc, a0, b0)
            release_to_async()
            ahead = uint32(uint32(block) + uint32(stages))
            if leader and ahead < k_blocks:
                fetch(stage, a_map, b_map, first_row, first_column, ahead)
            following = uint32(uint32(block) + uint32(1))
            if following < k_blocks:
                after, phase = ring(following, stages)
                mbarrier_wait(smem.full[after], phase)
                load_fragments(a0, b0, after, uint32(0))
            multiply(acc, a1, b1)
        store_warp(acc, c, bias, first_row, first_column)

    return gemm_mma_tma

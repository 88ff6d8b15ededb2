"""Steps 3 and 4: FlashAttention-2's way, on the warp's tensor cores, fed by cp.async and then by the copy engine.

The online softmax of step 2, on tiles that mma.sync multiplies. Each warp computes 16 or 32 rows of O by itself:

* The scores of its rows and a block of keys are accumulators. Rounded to 16 bits they are, in the very same registers,
  the operand A of the second product: the layouts agree. So neither S nor P is ever in memory, and no warp needs
  anything of another.
* O stays in registers as well, D/2 of them a thread for 16 rows, twice as many for 32. With 32 rows what ldmatrix reads
  of K and V is used twice: at 16, reading takes shared memory longer than the products take a Hopper's tensor cores.
* Tiles of K and V take turns in a ring, in the order in which they are needed: K, V of the last block, then of the one
  before it. With two stages one is multiplied while the other fills. Blocks are gone through from the last to the
  first, as only those at the ends need a mask, and beginning with them the last one's epilogue comes early.
* A tile's rows are cut into boxes of 64 columns, 128 bytes, in which 16-byte pieces are swizzled.

PTX ISA: "ldmatrix", "mma", "Matrix Fragments for mma.m16n8k16 with floating point type", "cp.async", "Swizzling Modes".
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait, release_to_async, ring
from ...shared import Barriers, Shared, Tiles
from ...unroll import unroll
from ..gemm.epilogue import make_pack
from .masks import Kind, make_tile_masks
from .operands import BOX, MAX_HEAD_DIM
from .softmax import NOTHING, inverse, log_sum_exp, make_softmax, quad_sum

_STEP = 16  # of the inner dimension, that one mma takes
_ROW_BYTES = 128
_ROWS_16 = 16 * _ROW_BYTES  # so far down the swizzle is where it was
_MMA = {"float16": "f16", "bfloat16": "bf16"}
_Q_REGISTERS = 32  # of a thread for Q, at most; beyond, its fragments are read again for each block of keys
_OTHER_REGISTERS = 48  # of a thread: addresses, fragments of K and V, sums
_SM_REGISTERS = 65536


@dataclass(frozen=True)
class WarpTiling(ABC):
    """How a block's work is cut for warps that multiply by mma.sync: what `make_products` takes.

    Args:
        head_dim: columns of Q, K and V, a multiple of 8.
        rows: of the block's tile of queries.
        keys: of a tile of K or V.
        warps: of the block.
        stages: tiles in a ring.

    Raises:
        ValueError: a head dimension that does not fit.
    """

    head_dim: int
    rows: int
    keys: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        if self.head_dim % 8 or not 8 <= self.head_dim <= MAX_HEAD_DIM:
            raise ValueError(f"head_dim {self.head_dim}: a multiple of 8 expected, {MAX_HEAD_DIM} at most")

    @property
    @abstractmethod
    def fragments(self) -> int:
        """Of 16 rows, that a warp has."""

    @property
    @abstractmethod
    def rows_apart(self) -> int:
        """From one warp's first row to the next one's."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def steps(self) -> int:
        """Of 16 columns of Q and K."""
        return -(-self.head_dim // _STEP)

    @property
    def boxes(self) -> int:
        """Of 64 columns."""
        return -(-self.head_dim // BOX)

    @property
    def registers(self) -> tuple[int, int, int, int]:
        """What a thread has: rows, and registers for Q, S and O."""
        fragments, steps = self.fragments, self.steps
        return 2 * fragments, 4 * steps * fragments, self.keys // 2 * fragments, 8 * steps * fragments

    @property
    def q_in_registers(self) -> bool:
        """Whether Q's fragments are kept there."""
        return self.registers[1] <= _Q_REGISTERS


@dataclass(frozen=True)
class Tiling(WarpTiling):
    """The tiling of steps 3 and 4: each warp has `rows` / `warps` queries, 16 or 32, and K and V share a ring.

    Raises:
        ValueError: its numbers do not fit each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warps not in (2, 4, 8) or self.rows not in (16 * self.warps, 32 * self.warps):
            raise ValueError(
                f"{self.rows} rows for {self.warps} warps: each has 16 or 32 of them, and a block 2, 4 or 8 warps"
            )
        if self.keys % 16 or not 16 <= self.keys <= 256 or self.keys % (self.threads // 8):
            raise ValueError(
                f"{self.keys} keys: a multiple of 16 and of {self.threads // 8} expected, which {self.threads} threads "
                f"copy at a time, and 256 at most"
            )
        if self.stages < 2:
            raise ValueError(f"stages {self.stages}: one is computed on while others fill; take 2 or more")

    @property
    def fragments(self) -> int:
        """Of 16 rows, that a warp has."""
        return self.rows // self.warps // 16

    @property
    def rows_apart(self) -> int:
        """From one warp's first row to the next one's."""
        return 16 * self.fragments

    @property
    def blocks(self) -> int:
        """That an SM should have room for at once: more than one only where their registers leave the compiler some."""
        _, q, s, o = self.registers
        needed = s + o + (q if self.q_in_registers else 0) + _OTHER_REGISTERS
        return 2 if 2 * self.threads * needed <= _SM_REGISTERS else 1

    def tiles(self, dtype: str) -> dict[str, Tiles]:
        """Q, and the ring of K and V; each tile a box behind the other."""
        return {
            "q": Tiles(self.boxes, (self.rows, BOX), dtype, swizzle="128B"),
            "kv": Tiles(self.stages * self.boxes, (self.keys, BOX), dtype, swizzle="128B"),
        }


def tiling_for(head_dim: int, tile: tuple[int, int] | None = None, warps: int | None = None, stages: int = 2) -> Tiling:
    """The tiling asked for; what is left open as it suits the head dimension.

    32 rows a warp where registers hold O, S and a part of Q for them, and 16 cost too much reading: from 65 columns to
    128. With fewer, the registers that 16 rows leave are better spent on more warps.

    Raises:
        ValueError: it does not fit.
    """
    rows, keys = tile or ((128, 64) if head_dim <= 128 else (64, 64))
    per_warp = 32 if 64 < head_dim <= 128 <= rows else 16
    return Tiling(head_dim, rows, keys, warps or max(rows // per_warp, 1), stages)


# ---------------------------------------------------------------------------------------------------------------------
# From shared memory through the tensor cores, and out: what both steps share.


def make_load_q(smem: Shared, tiling: WarpTiling) -> Callable:
    """load_q(fragments, step): this warp's rows of 16 columns of Q, into registers: the quarters of 16 x 16, by rows
    first, of one fragment after the other."""
    rows_apart, fragments = tiling.rows_apart, tiling.fragments

    @cuda.jit(device=True, forceinline=True)
    def load_q(a, step):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        row, column = uint32(warp * uint32(rows_apart) + lane % uint32(16)), uint32(lane // uint32(16) * uint32(8))
        place = smem.q[step // 4].address_of(row, uint32(column + uint32(step % 4 * _STEP)))
        for f in range(fragments):
            unroll()
            r = 4 * f
            a[r], a[r + 1], a[r + 2], a[r + 3] = ptx.ldmatrix_sync_x4(uint32(place + uint32(f * _ROWS_16)))

    return load_q


def make_load_all_q(smem: Shared, tiling: WarpTiling) -> Callable:
    """load_all_q(fragments): all columns, step by step."""
    load_q = make_load_q(smem, tiling)
    steps, per_step = tiling.steps, 4 * tiling.fragments

    @cuda.jit(device=True, forceinline=True)
    def load_all_q(a):
        fragment = cuda.local.array(per_step, uint32)
        for step in range(steps):
            unroll()
            load_q(fragment, step)
            for i in range(per_step):
                unroll()
                a[per_step * step + i] = fragment[i]

    return load_all_q


def make_products(smem: Shared, tiling: WarpTiling, dtype: str) -> tuple[Callable, Callable]:
    """scores(s, q, stage): S = Q Kᵀ with the tile of K in a stage; add_weighted(o, s, stage): O += S V.

    `q` are Q's fragments, if they are in registers. S's accumulators are eight columns by eight, four of a lane, those
    of one fragment after the other; O's likewise.
    """
    mma = getattr(ptx, f"mma_sync_m16n8k16_f32_{_MMA[dtype]}_{_MMA[dtype]}_f32")
    pack = make_pack(dtype)
    load_q = make_load_q(smem, tiling)
    fragments, steps, boxes, in_registers = tiling.fragments, tiling.steps, tiling.boxes, tiling.q_in_registers
    s_eighths, o_eighths, a_size = tiling.keys // 8, 2 * steps, 4 * fragments

    @cuda.jit(device=True, forceinline=True)
    def multiply_16(acc, first, a, from_a, b0, b1, b2, b3):
        """A fragment of A by 16 columns of B, whose two eighths' accumulators begin at `first`."""
        a0, a1, a2, a3 = a[from_a], a[from_a + 1], a[from_a + 2], a[from_a + 3]
        r = first
        acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = mma(
            a0, a1, a2, a3, b0, b1, acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
        )
        r = first + 4
        acc[r], acc[r + 1], acc[r + 2], acc[r + 3] = mma(
            a0, a1, a2, a3, b2, b3, acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
        )

    @cuda.jit(device=True, forceinline=True)
    def scores(s, q, stage):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        # Both halves along D of 8 keys, then of the next 8.
        row = uint32(lane // uint32(16) * uint32(8) + lane % uint32(8))
        column = uint32(lane // uint32(8) % uint32(2) * uint32(8))
        a = cuda.local.array(a_size, uint32)
        for i in range(4 * s_eighths * fragments):
            unroll()
            s[i] = float32(0)
        for step in range(steps):
            unroll()
            if not in_registers:
                load_q(a, step)
            box = smem.kv[uint32(stage * uint32(boxes)) + uint32(step // 4)]
            place = box.address_of(row, uint32(column + uint32(step % 4 * _STEP)))
            for j in range(s_eighths // 2):
                unroll()
                b0, b1, b2, b3 = ptx.ldmatrix_sync_x4(uint32(place + uint32(j * _ROWS_16)))
                for f in range(fragments):
                    unroll()
                    first = 4 * (f * s_eighths + 2 * j)
                    if in_registers:
                        multiply_16(s, first, q, 4 * (step * fragments + f), b0, b1, b2, b3)
                    else:
                        multiply_16(s, first, a, 4 * f, b0, b1, b2, b3)

    @cuda.jit(device=True, forceinline=True)
    def add_weighted(o, s, stage):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        row, column = uint32(lane % uint32(16)), uint32(lane // uint32(16) * uint32(8))
        a = cuda.local.array(a_size, uint32)
        for step in range(s_eighths // 2):
            unroll()
            for f in range(fragments):
                unroll()
                for i in range(4):  # the quarters of 16 x 16: upper and lower rows of 8 columns, then of the next 8
                    unroll()
                    r = 4 * (f * s_eighths + 2 * step) + 2 * i
                    a[4 * f + i] = pack(s[r], s[r + 1])
            for j in range(steps):
                unroll()
                box = smem.kv[uint32(stage * uint32(boxes)) + uint32(j // 4)]
                place = box.address_of(row, uint32(column + uint32(j % 4 * _STEP)))
                b0, b1, b2, b3 = ptx.ldmatrix_sync_x4_trans(uint32(place + uint32(step * _ROWS_16)))
                for f in range(fragments):
                    unroll()
                    multiply_16(o, 4 * (f * o_eighths + 2 * j), a, 4 * f, b0, b1, b2, b3)

    return scores, add_weighted


def make_finish(smem: Shared, tiling: Tiling, dtype: str) -> Callable:
    """finish(o, largest, total, factor, out, lse, first_row): divide this warp's rows by their sums and write them.

    `out` is (Sq, D) and `lse` (Sq,), of one head. A lane has pairs of neighbours; whole pieces of 16 bytes are made of
    them in Q's tile, where the warp's own rows are read by no other.
    """
    pack = make_pack(dtype)
    fragments, steps, boxes = tiling.fragments, tiling.steps, tiling.boxes
    per_warp, o_eighths = 16 * fragments, 2 * steps

    @cuda.jit(device=True, forceinline=True)
    def finish(o, largest, total, factor, out, lse, first_row):
        thread = uint32(cuda.threadIdx.x)
        lane, first = uint32(thread % uint32(32)), uint32(thread // uint32(32) * uint32(per_warp))
        rows, columns = uint32(out.shape[0]), uint32(out.shape[1])
        cuda.syncwarp()  # Q's fragments are read
        for i in range(2 * fragments):
            unroll()
            row = uint32(first + uint32(8 * i) + lane // uint32(4))
            sum_ = quad_sum(total[i])
            scale = inverse(sum_)
            if lane % uint32(4) == 0 and uint32(first_row + row) < rows:
                lse[uint32(first_row + row)] = log_sum_exp(largest[i], sum_, factor)
            for j in range(o_eighths):
                unroll()
                r = 4 * (i // 2 * o_eighths + j) + 2 * (i % 2)
                place = smem.q[j // 8].address_of(row, uint32(uint32(j % 8 * 8) + lane % uint32(4) * uint32(2)))
                ptx.st_shared_u32(place, pack(o[r] * scale, o[r + 1] * scale))
        cuda.syncwarp()
        stride = uint64(out.strides[0])
        column = uint32(lane % uint32(8) * uint32(8))
        to = ptx.global_address(out) + uint64(column) * uint64(2)
        for box in range(boxes):
            for i in range(4 * fragments):
                row = uint32(first + uint32(4 * i) + lane // uint32(8))
                if uint32(first_row + row) < rows and uint32(column + uint32(box * BOX)) < columns:
                    x0, x1, x2, x3 = ptx.ld_shared_v4_u32(smem.q[box].address_of(row, column))
                    at = to + uint64(uint32(first_row + row)) * stride + uint64(box * _ROW_BYTES)
                    ptx.st_global_v4_u32(at, x0, x1, x2, x3)

    return finish


def make_block(smem: Shared, tiling: Tiling, dtype: str, kind: Kind, soft_cap: bool) -> tuple[Callable, ...]:
    """What a block of keys is to a warp, in two halves between which the tile changes:

    weigh(s, q, stage, row, block, full, skv, low, high, factor, inner, largest, total, shrink): S of a tile of K, and
    from it the weights. `row` is the thread's first, `full` whether each query of the tile sees the whole block.
    add(o, s, stage, shrink): O, shrunk, and the weights times a tile of V.
    """
    scores, add_weighted = make_products(smem, tiling, dtype)
    softmax = make_softmax(tiling.keys, make_tile_masks(kind, tiling.rows, tiling.keys), tiling.fragments)
    keys, fragments, eighths = tiling.keys, tiling.fragments, 2 * tiling.steps

    @cuda.jit(device=True, forceinline=True)
    def weigh(s, q, stage, row, block, full, skv, low, high, factor, inner, largest, total, shrink):
        scores(s, q, stage)
        if soft_cap:
            softmax.cap(s, inner)
        if not full:
            key = uint32(uint32(block * uint32(keys)) + uint32(cuda.threadIdx.x) % uint32(4) * uint32(2))
            softmax.hide(s, row, key, skv, low, high)
        softmax.weigh(s, factor, largest, total, shrink)

    @cuda.jit(device=True, forceinline=True)
    def add(o, s, stage, shrink):
        for i in range(2 * fragments):
            unroll()
            for j in range(eighths):
                unroll()
                r = 4 * (i // 2 * eighths + j) + 2 * (i % 2)
                o[r] *= shrink[i]
                o[r + 1] *= shrink[i]
        add_weighted(o, s, stage)

    return weigh, add


@cuda.jit(device=True, forceinline=True)
def first_row_of_block(rows):
    """The block's first query. The last ones, which see most keys where a mask is causal, come first."""
    return uint32(uint32(uint32(cuda.gridDim.x) - uint32(1) - uint32(cuda.blockIdx.x)) * uint32(rows))


# ---------------------------------------------------------------------------------------------------------------------
# Step 3: cp.async.


def make_fetch(tiling: Tiling, rows: int) -> Callable:
    """fetch(tile, start, stride, first_row, all_rows): this thread's share of `rows` rows, in boxes from `tile` on.

    `start` is the address of the head's row 0, `stride` the bytes from one row to the next. Eight threads copy 64
    columns of a row, 8 each, and each of them every `threads` / 8-th row. Behind the last row and column come zeros.
    """
    boxes, head_dim, rows_apart = tiling.boxes, tiling.head_dim, tiling.threads // 8
    step_bytes, box_bytes, ragged = rows_apart * _ROW_BYTES, rows * _ROW_BYTES, tiling.head_dim % BOX != 0

    @cuda.jit(device=True, forceinline=True)
    def fetch(tile, start, stride, first_row, all_rows):
        thread = uint32(cuda.threadIdx.x)
        r, c = uint32(thread // uint32(8)), uint32(thread % uint32(8) * uint32(8))
        place = tile.address_of(r, c)
        for i in range(rows // rows_apart):
            unroll()
            row = uint32(uint32(first_row + r) + uint32(i * rows_apart))
            source = start + uint64(row) * uint64(stride) + uint64(c) * uint64(2)
            for box in range(boxes):
                unroll()
                outside = row >= all_rows
                if ragged:
                    outside = outside or uint32(c + uint32(box * BOX)) >= uint32(head_dim)
                to = uint32(place + uint32(i * step_bytes + box * box_bytes))
                ptx.cp_async_cg_16_ignore_src(to, source + uint64(box * _ROW_BYTES), outside)

    return fetch


@cuda.jit(device=True, forceinline=True)
def head_start(array, batch, head):
    """Address of row 0 of a head of a (B, S, H, D) array."""
    offset = uint64(batch) * uint64(array.strides[0]) + uint64(head) * uint64(array.strides[2])
    return ptx.global_address(array) + offset


@functools.cache
def make_mma_cp_async(dtype: str, kind: Kind, soft_cap: bool, tiling: Tiling) -> Kernel:
    """attention_mma_cp_async(q, k, v, o, lse, group, low, high, factor, inner): a block computes a tile of queries.

    All threads copy: each waits for its own copies of a tile, and the block barrier behind that makes it everybody's;
    it also says that all have read the tile before, into whose stage the next copies go.
    """
    rows, keys, boxes, stages = tiling.rows, tiling.keys, tiling.boxes, tiling.stages
    fragments, in_registers = tiling.fragments, tiling.q_in_registers
    thread_rows, q_size, s_size, o_size = tiling.registers
    ahead, pending = stages - 1, stages - 2
    smem = Shared(**tiling.tiles(dtype))
    masks = make_tile_masks(kind, rows, keys)
    load_all_q = make_load_all_q(smem, tiling)
    weigh, add = make_block(smem, tiling, dtype, kind, soft_cap)
    finish = make_finish(smem, tiling, dtype)
    fetch_q, fetch_tile = make_fetch(tiling, rows), make_fetch(tiling, keys)

    @cuda.jit(device=True, forceinline=True)
    def fetch(k_start, k_stride, v_start, v_stride, turn, first, end, skv):
        """Tile number `turn`: K of a block of keys if it is even, V if it is odd; none before the first block."""
        back, stage = uint32(turn // uint32(2)), uint32(turn % uint32(stages))
        if uint32(first + back) < end:
            row = uint32(uint32(end - uint32(1) - back) * uint32(keys))
            tile = smem.kv[uint32(stage * uint32(boxes))]
            if turn % uint32(2) == 0:
                fetch_tile(tile, k_start, k_stride, row, skv)
            else:
                fetch_tile(tile, v_start, v_stride, row, skv)
        ptx.cp_async_commit_group()  # an empty group, where nothing is left, keeps the count

    @kernel(threads=tiling.threads, shared=smem, min_blocks=tiling.blocks)
    def attention_mma_cp_async(q, k, v, o, lse, group, low, high, factor, inner):
        s = cuda.local.array(s_size, float32)
        out = cuda.local.array(o_size, float32)
        largest, total = cuda.local.array(thread_rows, float32), cuda.local.array(thread_rows, float32)
        shrink = cuda.local.array(thread_rows, float32)
        a = cuda.local.array(q_size, uint32)
        head, batch = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        kv_head = uint32(head // group)
        k_start, k_stride = head_start(k, batch, kv_head), uint32(k.strides[1])
        v_start, v_stride = head_start(v, batch, kv_head), uint32(v.strides[1])
        sq, skv, first_row = uint32(q.shape[1]), uint32(k.shape[1]), first_row_of_block(rows)
        lane, warp = uint32(cuda.threadIdx.x) % uint32(32), uint32(cuda.threadIdx.x) // uint32(32)
        row = uint32(first_row + warp * uint32(16 * fragments) + lane // uint32(4))
        first, end = masks.block_range(first_row, sq, skv, low, high)
        first_full, end_full = masks.full_range(first_row, first, end, skv, low, high)

        fetch_q(smem.q[0], head_start(q, batch, head), uint32(q.strides[1]), first_row, sq)
        ptx.cp_async_commit_group()
        for turn in range(ahead):
            fetch(k_start, k_stride, v_start, v_stride, uint32(turn), first, end, skv)
        for i in range(thread_rows):
            unroll()
            largest[i], total[i] = float32(NOTHING), float32(0)
        for i in range(o_size):
            unroll()
            out[i] = float32(0)
        ptx.cp_async_wait_group(ahead)
        cuda.syncthreads()
        if in_registers:
            load_all_q(a)

        for back in range(uint32(end - first)):
            block, turn = uint32(end - uint32(1) - uint32(back)), uint32(uint32(back) * uint32(2))
            full = first_full <= block and block < end_full
            ptx.cp_async_wait_group(pending)
            cuda.syncthreads()
            fetch(k_start, k_stride, v_start, v_stride, uint32(turn + uint32(ahead)), first, end, skv)
            stage = uint32(turn % uint32(stages))
            weigh(s, a, stage, row, block, full, skv, low, high, factor, inner, largest, total, shrink)
            ptx.cp_async_wait_group(pending)
            cuda.syncthreads()
            fetch(k_start, k_stride, v_start, v_stride, uint32(turn + uint32(stages)), first, end, skv)
            add(out, s, uint32(uint32(turn + uint32(1)) % uint32(stages)), shrink)
        finish(out, largest, total, factor, o[batch, :, head], lse[batch, head], first_row)

    return attention_mma_cp_async


# ---------------------------------------------------------------------------------------------------------------------
# Step 4: TMA.


@functools.cache
def make_mma_tma(dtype: str, kind: Kind, soft_cap: bool, tiling: Tiling) -> Kernel:
    """attention_mma_tma(q_map, k_map, v_map, o, lse, skv, group, low, high, factor, inner): the same, but one thread
    asks for whole tiles, edges included.

    The maps are of (B, S, H, D), their boxes 1 x `rows` or `keys` x 1 x 64, 128-byte swizzled.
    """
    rows, keys, boxes, stages = tiling.rows, tiling.keys, tiling.boxes, tiling.stages
    fragments, in_registers = tiling.fragments, tiling.q_in_registers
    thread_rows, q_size, s_size, o_size = tiling.registers
    smem = Shared(**tiling.tiles(dtype), q_full=Barriers(1), full=Barriers(stages))
    masks = make_tile_masks(kind, rows, keys)
    load_all_q = make_load_all_q(smem, tiling)
    weigh, add = make_block(smem, tiling, dtype, kind, soft_cap)
    finish = make_finish(smem, tiling, dtype)

    @cuda.jit(device=True, forceinline=True)
    def fetch(k_map, v_map, turn, first, end, kv_head, batch):
        """Tile number `turn`: K of a block of keys if it is even, V if it is odd; none before the first block."""
        back, stage = uint32(turn // uint32(2)), uint32(turn % uint32(stages))
        if uint32(first + back) < end:
            row, bar = uint32(uint32(end - uint32(1) - back) * uint32(keys)), smem.full[stage]
            ptx.mbarrier_arrive_expect_tx(bar, uint32(boxes) * k_map.box_bytes)
            for box in range(boxes):
                tile, column = smem.kv[uint32(stage * uint32(boxes)) + uint32(box)], uint32(box * BOX)
                if turn % uint32(2) == 0:
                    ptx.cp_async_bulk_tensor_4d_shared_global(tile, k_map, column, kv_head, row, batch, bar)
                else:
                    ptx.cp_async_bulk_tensor_4d_shared_global(tile, v_map, column, kv_head, row, batch, bar)

    @kernel(threads=tiling.threads, shared=smem, min_blocks=tiling.blocks)
    def attention_mma_tma(q_map, k_map, v_map, o, lse, skv, group, low, high, factor, inner):
        s = cuda.local.array(s_size, float32)
        out = cuda.local.array(o_size, float32)
        largest, total = cuda.local.array(thread_rows, float32), cuda.local.array(thread_rows, float32)
        shrink = cuda.local.array(thread_rows, float32)
        a = cuda.local.array(q_size, uint32)
        head, batch = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        kv_head = uint32(head // group)
        sq, first_row = uint32(o.shape[1]), first_row_of_block(rows)
        lane, warp = uint32(cuda.threadIdx.x) % uint32(32), uint32(cuda.threadIdx.x) // uint32(32)
        row = uint32(first_row + warp * uint32(16 * fragments) + lane // uint32(4))
        first, end = masks.block_range(first_row, sq, skv, low, high)
        first_full, end_full = masks.full_range(first_row, first, end, skv, low, high)
        leader = cuda.threadIdx.x == 0

        if leader:
            ptx.mbarrier_init(smem.q_full[0], 1)
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(smem.q_full[0], uint32(boxes) * q_map.box_bytes)
            for box in range(boxes):
                column = uint32(box * BOX)
                ptx.cp_async_bulk_tensor_4d_shared_global(
                    smem.q[box], q_map, column, head, first_row, batch, smem.q_full[0]
                )
            for turn in range(stages):
                fetch(k_map, v_map, uint32(turn), first, end, kv_head, batch)
        for i in range(thread_rows):
            unroll()
            largest[i], total[i] = float32(NOTHING), float32(0)
        for i in range(o_size):
            unroll()
            out[i] = float32(0)
        cuda.syncthreads()
        mbarrier_wait(smem.q_full[0], 0)
        if in_registers:
            load_all_q(a)

        for back in range(uint32(end - first)):
            block, turn = uint32(end - uint32(1) - uint32(back)), uint32(uint32(back) * uint32(2))
            full = first_full <= block and block < end_full
            stage, phase = ring(turn, stages)
            mbarrier_wait(smem.full[stage], phase)
            weigh(s, a, stage, row, block, full, skv, low, high, factor, inner, largest, total, shrink)
            release_to_async()
            if leader:
                fetch(k_map, v_map, uint32(turn + uint32(stages)), first, end, kv_head, batch)
            stage, phase = ring(uint32(turn + uint32(1)), stages)
            mbarrier_wait(smem.full[stage], phase)
            add(out, s, stage, shrink)
            release_to_async()
            if leader:
                fetch(k_map, v_map, uint32(turn + uint32(stages + 1)), first, end, kv_head, batch)
        finish(out, largest, total, factor, o[batch, :, head], lse[batch, head], first_row)

    return attention_mma_tma

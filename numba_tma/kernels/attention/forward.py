"""FlashAttention-3's way: wgmma, a producer warpgroup, and softmax beside the next product.

A block computes 64 rows of O for each of its consumer warpgroups. Q stays in shared memory, K and V pass through rings
of their own. The scores of a block of keys are a warpgroup's accumulator, become the weights P in the registers that
the second product reads as its operand A, and never leave the thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait, ring
from ...shared import Barriers, Shared, Tiles
from ...unroll import unroll
from ...warpgroup import ROW_BYTES, matrix_descriptor
from ..gemm.epilogue import make_pack
from ..gemm.warpgroup import BOX_COLUMNS, GROUP_ROWS, WARPGROUP

_KINDS = {"bfloat16": "bf16", "float16": "f16"}
_STEP = 16  # of the inner dimension, in one instruction
_HIDDEN = -1e30  # a score that is not to count: finite, so that differences of two are
PRODUCER_REGISTERS = {1: 56, 2: 40, 3: 32}
CONSUMER_REGISTERS = {1: 256, 2: 232, 3: 160}


@functools.cache
def make_scores(head_dim: int, keys: int, dtype: str) -> Callable:
    """Make `scores(s, q, k)`: start S = Q Kᵀ of 64 rows and `keys` keys, as one group.

    `s` is an accumulator of keys / 2; `q` and `k` are shared addresses of boxes of 64 columns, one behind the other.
    """
    kind = _KINDS[dtype]
    mma = getattr(ptx, f"wgmma_mma_async_m64n{keys}k16_f32_{kind}_{kind}")
    steps = head_dim // _STEP
    q_box, k_box = GROUP_ROWS * ROW_BYTES // 16, keys * ROW_BYTES // 16

    @cuda.jit(device=True, forceinline=True)
    def scores(s, q, k):
        q, k = matrix_descriptor(q, 16, 1024), matrix_descriptor(k, 16, 1024)
        ptx.wgmma_fence()
        for step in range(steps):
            unroll()
            box, within = step // 4, step % 4 * 2
            mma(s, q + uint64(box * q_box + within), k + uint64(box * k_box + within), step > 0, 0, 0)
        ptx.wgmma_commit_group()

    return scores


@functools.cache
def make_weighted(head_dim: int, keys: int, dtype: str) -> Callable:
    """Make `weighted(o, p, v, add)`: start O = P V, or O += P V, as one group.

    `o` is an accumulator of head_dim / 2; `p` a local array of keys / 4 uint32, the weights in pairs as wgmma has its
    operand A; `v` the shared address of boxes of `keys` rows and 64 columns, one behind the other.
    """
    kind = _KINDS[dtype]
    mma = getattr(ptx, f"wgmma_mma_async_m64n{head_dim}k16_f32_{kind}_{kind}_rs")
    steps = keys // _STEP
    box_bytes = keys * ROW_BYTES
    step_units = _STEP * ROW_BYTES // 16

    @cuda.jit(device=True, forceinline=True)
    def weighted(o, p, v, add):
        v = matrix_descriptor(v, box_bytes, 1024)
        ptx.wgmma_fence()
        for step in range(steps):
            unroll()
            i = 4 * step
            mma(o, p[i], p[i + 1], p[i + 2], p[i + 3], v + uint64(step * step_units), add or step > 0, 1)
        ptx.wgmma_commit_group()

    return weighted


@cuda.jit(device=True, forceinline=True)
def quad_max(x):
    """The largest of the four lanes that share a row."""
    x = cuda.libdevice.fmaxf(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 1))
    return cuda.libdevice.fmaxf(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 2))


@cuda.jit(device=True, forceinline=True)
def quad_sum(x):
    """The sum over the four lanes that share a row."""
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)
    return x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 2)


@functools.cache
def make_softmax(keys: int) -> tuple[Callable, Callable]:
    """Make `largest(s, top, bottom)` and `exponentials(s, scale, top, bottom)` for a warpgroup's scores.

    A thread has elements of two rows, eight apart: "top" and "bottom". `largest` gives the rows' maxima, those so far
    among them. `exponentials` replaces each score x by 2^(scale (x - maximum)) and gives this thread's sums.
    """
    quarters = keys // 8

    @cuda.jit(device=True, forceinline=True)
    def largest(s, top, bottom):
        for j in range(quarters):
            unroll()
            top = cuda.libdevice.fmaxf(top, cuda.libdevice.fmaxf(s[4 * j], s[4 * j + 1]))
            bottom = cuda.libdevice.fmaxf(bottom, cuda.libdevice.fmaxf(s[4 * j + 2], s[4 * j + 3]))
        return quad_max(top), quad_max(bottom)

    @cuda.jit(device=True, forceinline=True)
    def exponentials(s, scale, top, bottom):
        top, bottom = top * scale, bottom * scale
        top_sum, bottom_sum = float32(0), float32(0)
        for j in range(quarters):
            unroll()
            s[4 * j] = ptx.ex2_approx_ftz_f32(s[4 * j] * scale - top)
            s[4 * j + 1] = ptx.ex2_approx_ftz_f32(s[4 * j + 1] * scale - top)
            s[4 * j + 2] = ptx.ex2_approx_ftz_f32(s[4 * j + 2] * scale - bottom)
            s[4 * j + 3] = ptx.ex2_approx_ftz_f32(s[4 * j + 3] * scale - bottom)
            top_sum += s[4 * j] + s[4 * j + 1]
            bottom_sum += s[4 * j + 2] + s[4 * j + 3]
        return top_sum, bottom_sum

    return largest, exponentials


@functools.cache
def make_hide(keys: int, causal: bool) -> Callable:
    """Make `hide(s, first_key, last, skv)`: scores of keys that do not count become `_HIDDEN`.

    `first_key` is the block's, plus this thread's first column; `last` the last key that the thread's top row sees (the
    bottom one sees eight more), `skv` the number of keys.
    """
    quarters = keys // 8

    @cuda.jit(device=True, forceinline=True)
    def hide(s, first_key, last, skv):
        for j in range(quarters):
            unroll()
            for e in range(2):
                unroll()
                key = int32(first_key + int32(8 * j + e))
                if key >= skv or (causal and key > last):
                    s[4 * j + e] = float32(_HIDDEN)
                if key >= skv or (causal and key > last + 8):
                    s[4 * j + 2 + e] = float32(_HIDDEN)

    return hide


@functools.cache
def make_forward(
    head_dim: int,
    dtype: str,
    causal: bool = False,
    consumers: int = 2,
    keys: int = 128,
    stages: int = 2,
    ping_pong: bool = False,
    o_over_q: bool = False,
) -> Kernel:
    """The kernel; tensor maps are of (batch, rows, heads, head_dim) with boxes of 1 x rows x 1 x 64.

    Tiles are gone through by `together` heads at a time, whose keys and values fit into the L2 cache. With a causal mask
    the longest of them come first, so that blocks which take one tile after the other end together.
    """
    boxes = -(-head_dim // BOX_COLUMNS)
    rows = GROUP_ROWS * consumers
    score_elements, o_elements, p_elements = keys // 2, head_dim // 2, keys // 4
    q_bytes, kv_bytes = GROUP_ROWS * boxes * ROW_BYTES, keys * boxes * ROW_BYTES
    fewer, more = PRODUCER_REGISTERS[consumers], CONSUMER_REGISTERS[consumers]
    pair = 2 * WARPGROUP
    ping_pong = ping_pong and consumers == 2
    scores = make_scores(head_dim, keys, dtype)
    weighted = make_weighted(head_dim, keys, dtype)
    largest, exponentials = make_softmax(keys)
    hide = make_hide(keys, causal)
    pack = make_pack(dtype)
    wait_scores = getattr(ptx, f"wgmma_wait_group_m64n{keys}_f32")
    wait_o = getattr(ptx, f"wgmma_wait_group_m64n{head_dim}_f32")
    own_o = {} if o_over_q else {"o": Tiles(consumers, (boxes * GROUP_ROWS, BOX_COLUMNS), dtype, swizzle="128B")}
    smem = Shared(
        q=Tiles(consumers, (boxes * GROUP_ROWS, BOX_COLUMNS), dtype, swizzle="128B"),
        k=Tiles(stages, (boxes * keys, BOX_COLUMNS), dtype, swizzle="128B"),
        v=Tiles(stages, (boxes * keys, BOX_COLUMNS), dtype, swizzle="128B"),
        **own_o,
        q_full=Barriers(consumers),
        q_empty=Barriers(consumers),
        k_full=Barriers(stages),
        k_empty=Barriers(stages),
        v_full=Barriers(stages),
        v_empty=Barriers(stages),
    )

    @cuda.jit(device=True, forceinline=True)
    def fetch(tile, tensor_map, nrows, row, head, batch, bar):
        """All columns of `nrows` rows of one head, 64 at a time."""
        for box in range(boxes):
            unroll()
            place = uint32(ptx.shared_address(tile) + uint32(box * nrows * ROW_BYTES))
            ptx.cp_async_bulk_tensor_4d_shared_global(place, tensor_map, 64 * box, head, row, batch, bar)

    @cuda.jit(device=True, forceinline=True)
    def tile_of(tile, tiles_m, heads, all_heads, together):
        """First row, head and batch of a tile."""
        first = uint32(tile // uint32(tiles_m * together)) * together
        within = uint32(tile - first * tiles_m)
        width = min(uint32(all_heads - first), uint32(together))
        if causal:  # by length: all heads' last rows first
            m = uint32(within // width)
            every = uint32(first + within - m * width)
            m = uint32(tiles_m - uint32(1) - m)
        else:
            every = uint32(within // tiles_m)
            m = uint32(within - every * tiles_m)
            every = uint32(first + every)
        batch = uint32(every // heads)
        return int32(m * uint32(rows)), uint32(every - batch * heads), batch

    @cuda.jit(device=True, forceinline=True)
    def key_blocks(row, sq, skv):
        """Number of blocks of keys that some row of the tile sees, at least one."""
        end = skv
        if causal:
            end = min(skv, row + int32(rows) + skv - sq)
        return max((end + int32(keys - 1)) // int32(keys), int32(1))

    if o_over_q:

        @cuda.jit(device=True, forceinline=True)
        def o_tile(mine):
            return smem.q[mine]
    else:

        @cuda.jit(device=True, forceinline=True)
        def o_tile(mine):
            return smem.o[mine]

    @cuda.jit(device=True, forceinline=True)
    def release(bar, thread):
        if thread == 0:
            ptx.mbarrier_arrive(bar)

    @cuda.jit(device=True, forceinline=True)
    def store(o, o_map, tile, thread, barrier, row, head, batch, top, bottom):
        """Scale O's rows, and hand them to the copy engine."""
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        line = uint32(ptx.shared_address(tile) + (warp * uint32(16) + lane % uint32(16)) * uint32(ROW_BYTES))
        swizzle, right = lane % uint32(8), lane // uint32(16)
        if thread == 0:
            ptx.cp_async_bulk_wait_group_read(0)  # the last tile's O has left
        ptx.bar_sync(barrier, WARPGROUP)
        for part in range(head_dim // 16):
            unroll()
            i = 8 * part
            unit = (uint32(part % 4 * 2) + right) ^ swizzle
            ptx.stmatrix_sync_x4(
                uint32(line + uint32(part // 4 * GROUP_ROWS * ROW_BYTES) + unit * uint32(16)),
                pack(o[i] * top, o[i + 1] * top),
                pack(o[i + 2] * bottom, o[i + 3] * bottom),
                pack(o[i + 4] * top, o[i + 5] * top),
                pack(o[i + 6] * bottom, o[i + 7] * bottom),
            )
        ptx.fence_proxy_async_shared_cta()
        ptx.bar_sync(barrier, WARPGROUP)
        if thread == 0:
            for box in range(boxes):
                unroll()
                place = uint32(ptx.shared_address(tile) + uint32(box * GROUP_ROWS * ROW_BYTES))
                ptx.cp_async_bulk_tensor_4d_global_shared(o_map, 64 * box, head, row, batch, place)
            ptx.cp_async_bulk_commit_group()

    @kernel(threads=WARPGROUP * (consumers + 1), shared=smem)
    def attention_forward(q_map, k_map, v_map, o_map, lse, sq, skv, tiles_m, heads, all_heads, together, group, scale):
        thread = uint32(cuda.threadIdx.x)
        tiles = uint32(tiles_m * all_heads)
        if thread == 0:
            for i in range(consumers):
                ptx.mbarrier_init(smem.q_full[i], 1)
                ptx.mbarrier_init(smem.q_empty[i], 1)
            for stage in range(stages):
                ptx.mbarrier_init(smem.k_full[stage], 1)
                ptx.mbarrier_init(smem.v_full[stage], 1)
                ptx.mbarrier_init(smem.k_empty[stage], consumers)
                ptx.mbarrier_init(smem.v_empty[stage], consumers)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()

        tile = uint32(cuda.blockIdx.x)
        use, turn = uint32(0), uint32(0)  # of the rings of K and V; of Q
        if thread < WARPGROUP:
            ptx.setmaxnreg_dec(fewer)
            if thread == 0:
                while tile < tiles:
                    row, head, batch = tile_of(tile, tiles_m, heads, all_heads, together)
                    kv_head = uint32(head // group)
                    block = key_blocks(row, sq, skv) - int32(1)
                    for i in range(consumers):
                        mbarrier_wait(smem.q_empty[i], (turn & uint32(1)) ^ uint32(1))
                        ptx.mbarrier_arrive_expect_tx(smem.q_full[i], q_bytes)
                        fetch(smem.q[i], q_map, GROUP_ROWS, int32(row + i * GROUP_ROWS), head, batch, smem.q_full[i])
                    while block >= 0:
                        unroll(1)
                        stage, phase = ring(use, stages)
                        key = int32(block * int32(keys))
                        mbarrier_wait(smem.k_empty[stage], phase ^ uint32(1))
                        ptx.mbarrier_arrive_expect_tx(smem.k_full[stage], kv_bytes)
                        fetch(smem.k[stage], k_map, keys, key, kv_head, batch, smem.k_full[stage])
                        mbarrier_wait(smem.v_empty[stage], phase ^ uint32(1))
                        ptx.mbarrier_arrive_expect_tx(smem.v_full[stage], kv_bytes)
                        fetch(smem.v[stage], v_map, keys, key, kv_head, batch, smem.v_full[stage])
                        use = uint32(use + uint32(1))
                        block = int32(block - int32(1))
                    turn = uint32(turn + uint32(1))
                    tile = uint32(tile + uint32(cuda.gridDim.x))
        else:
            ptx.setmaxnreg_inc(more)
            mine = uint32(thread // uint32(WARPGROUP) - uint32(1))
            thread = uint32(thread % uint32(WARPGROUP))
            lane_row = int32(thread // uint32(32) * uint32(16) + thread % uint32(32) // uint32(4))
            lane_key = int32(thread % uint32(4) * uint32(2))
            s = cuda.local.array(score_elements, float32)
            o = cuda.local.array(o_elements, float32)
            p = cuda.local.array(p_elements, uint32)
            q_tile = ptx.shared_address(smem.q[mine])
            if ping_pong and mine == 1:
                ptx.bar_arrive(1, pair)  # the first warpgroup begins
            while tile < tiles:
                row, head, batch = tile_of(tile, tiles_m, heads, all_heads, together)
                block = key_blocks(row, sq, skv) - int32(1)
                my_row = int32(row + int32(mine * uint32(GROUP_ROWS)) + lane_row)
                last = int32(my_row + skv - sq)  # that the causal mask lets the top row see
                mbarrier_wait(smem.q_full[mine], turn & uint32(1))

                # The last block of keys: scores and weights, with nothing beside them.
                stage, phase = ring(use, stages)
                mbarrier_wait(smem.k_full[stage], phase)
                scores(s, q_tile, ptx.shared_address(smem.k[stage]))
                wait_scores(s, 0)
                release(smem.k_empty[stage], thread)
                hide(s, int32(block * int32(keys) + lane_key), last, skv)
                top, bottom = largest(s, float32(_HIDDEN), float32(_HIDDEN))
                top_sum, bottom_sum = exponentials(s, scale, top, bottom)
                for i in range(p_elements):
                    unroll()
                    p[i] = pack(s[2 * i], s[2 * i + 1])
                started = False
                while block > 0:
                    unroll(1)
                    block = int32(block - int32(1))
                    following, next_phase = ring(uint32(use + uint32(1)), stages)
                    mbarrier_wait(smem.k_full[following], next_phase)
                    if ping_pong:
                        ptx.bar_sync(uint32(1) + mine, pair)
                    scores(s, q_tile, ptx.shared_address(smem.k[following]))
                    mbarrier_wait(smem.v_full[stage], phase)
                    weighted(o, p, ptx.shared_address(smem.v[stage]), started)
                    if ping_pong:
                        ptx.bar_arrive(uint32(2) - mine, pair)
                    started = True
                    wait_scores(s, 1)
                    release(smem.k_empty[following], thread)
                    if causal and int32(block * int32(keys) + int32(keys - 1)) > last - lane_row:
                        hide(s, int32(block * int32(keys) + lane_key), last, skv)
                    old_top, old_bottom = top, bottom
                    top, bottom = largest(s, top, bottom)
                    shrink_top = ptx.ex2_approx_ftz_f32((old_top - top) * scale)
                    shrink_bottom = ptx.ex2_approx_ftz_f32((old_bottom - bottom) * scale)
                    more_top, more_bottom = exponentials(s, scale, top, bottom)
                    top_sum = top_sum * shrink_top + more_top
                    bottom_sum = bottom_sum * shrink_bottom + more_bottom
                    wait_o(o, 0)
                    release(smem.v_empty[stage], thread)
                    for i in range(p_elements):
                        unroll()
                        p[i] = pack(s[2 * i], s[2 * i + 1])
                    for i in range(o_elements // 4):
                        unroll()
                        o[4 * i] *= shrink_top
                        o[4 * i + 1] *= shrink_top
                        o[4 * i + 2] *= shrink_bottom
                        o[4 * i + 3] *= shrink_bottom
                    stage, phase = following, next_phase
                    use = uint32(use + uint32(1))
                if not o_over_q:
                    release(smem.q_empty[mine], thread)
                mbarrier_wait(smem.v_full[stage], phase)
                weighted(o, p, ptx.shared_address(smem.v[stage]), started)
                top_sum, bottom_sum = quad_sum(top_sum), quad_sum(bottom_sum)
                top_scale, bottom_scale = float32(0), float32(0)
                if top > float32(_HIDDEN):
                    top_scale = ptx.rcp_approx_ftz_f32(top_sum)
                if bottom > float32(_HIDDEN):
                    bottom_scale = ptx.rcp_approx_ftz_f32(bottom_sum)
                wait_o(o, 0)
                release(smem.v_empty[stage], thread)
                use = uint32(use + uint32(1))
                turn = uint32(turn + uint32(1))
                first = int32(row + int32(mine * uint32(GROUP_ROWS)))
                store(o, o_map, o_tile(mine), thread, mine + uint32(3), first, head, batch, top_scale, bottom_scale)
                if o_over_q and thread == 0:
                    ptx.cp_async_bulk_wait_group_read(0)
                    ptx.mbarrier_arrive(smem.q_empty[mine])
                if lane_key == 0:
                    if my_row < sq:
                        lse[batch, head, my_row] = logarithm(top, top_sum, scale)
                    if my_row + 8 < sq:
                        lse[batch, head, my_row + 8] = logarithm(bottom, bottom_sum, scale)
                tile = uint32(tile + uint32(cuda.gridDim.x))
            if ping_pong and mine == 0:
                ptx.bar_sync(1, pair)  # the second one's last arrival
            if thread == 0:
                ptx.cp_async_bulk_wait_group_read(0)

    return attention_forward


_LN_2 = 0.6931471805599453


@cuda.jit(device=True, forceinline=True)
def logarithm(maximum, total, scale):
    """Natural logarithm of a row's sum of exponentials; minus infinity if it saw no key."""
    if maximum <= float32(_HIDDEN):
        return float32(-float("inf"))
    return float32(_LN_2) * (maximum * scale + ptx.lg2_approx_ftz_f32(total))

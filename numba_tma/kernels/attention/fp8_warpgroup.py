"""Step 10: both products of 8-bit floats, at twice the rate, with a scale for each block of rows.

The structure is step 7's, softmax beside the next block's scores; what 8 bits change is what is here.

* Scores. S = q_scale · k_scale · (Q8 K8ᵀ): a warpgroup's 64 queries share a scale, as 64 keys do, so that both are in
  the factor by which a score becomes an exponent. Nothing is multiplied for it.
* Weights. A block of values has its scale too, and in O += P V its place is P's: P' = P · v_scale. With the logarithm
  of that scale added to the exponent, and the maximum taken of that sum, the largest P' of a row is 1, whatever the
  scales are; shifted by `SHIFT` it is 256, and e4m3 has 14 powers of two below it without loss, and three more with.
  The row's total is of P, so a block's sum is divided by its scale: two multiplications for each 64 keys.
* Operand A. An accumulator has two neighbouring columns in a thread, an operand of 8 bits four. Values come in the
  order of `KEY_ORDER`, and then the thread's weights are its operand: packing is all there is to do.
* Sums. wgmma adds products of 8-bit floats with 13 bits behind the point of the largest, cutting off. A sum of
  thousands of keys loses whatever is smaller than 2^-13 of it: where values have a mean, most of it. So each block's
  product starts from nothing, and is added in float32, to an O that had to be multiplied anyway.

The limit. At D = 128 a cycle's products (8192 flops) are 16 scores, and a cycle's exponentials are 16: both pipes need
the same time, and neither is idle where the other works only if all goes well.

What moves the data: TMA, a ring for K and one for V; scales by a warp of the producer's.
PTX ISA: "Register Fragments for wgmma.mma_async.m64nNk32", "Matrix Descriptor Format", "ex2".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...pipeline import make_release, mbarrier_wait, ring
from ...shared import Barriers, Buffer, Shared, Tiles
from ...unroll import unroll
from ...warpgroup import ROW_BYTES, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_NONE, consumer_number, matrix_descriptor, uniform
from ..gemm.warpgroup import BOX_COLUMNS, GROUP_ROWS, WARPGROUP
from .fp8_quantise import CHUNK, KV_BLOCK
from .masks import Kind, make_tile_masks
from .rings import make_fetch, make_rings, ring_barriers
from .softmax import NOTHING, inverse, log_sum_exp, make_softmax, quad_max, quad_sum
from .tile_counters import claim
from .tiles import Tile, make_tile

FLOAT8 = "float8_e4m3fn"
HEAD_DIMS = (64, 128, 256)
# Registers of the producer's threads and the consumers', by the number of these.
REGISTERS = {2: (24, 240), 3: (32, 160)}
SHIFT = 8  # of the exponents: a row's largest weight is 2 to this power
_STEP = 32  # of the inner dimension, in one instruction
_EIGHT_ROWS = 8
_CORE_ROW = 16  # bytes
_MOST_STAGES = 8
_SCALES_WARP = 1  # of the producer's warpgroup
TURNS = 4  # tiles of a block that are described at once; the producer is one ahead


@functools.cache
def make_scores(head_dim: int, keys: int) -> Callable:
    """Make `scores(s, q, k)`: start S = Q Kᵀ of 64 rows and `keys` keys, as one group.

    `s` is an accumulator of keys / 2; `q` and `k` are shared addresses of boxes of 128 columns, or the 64 there are.
    """
    mma = getattr(ptx, f"wgmma_mma_async_m64n{keys}k32_f32_e4m3_e4m3")
    fence = getattr(ptx, f"wgmma_fence_m64n{keys}_f32")
    row = min(head_dim, ROW_BYTES)
    swizzle = SWIZZLE_128B if row == ROW_BYTES else SWIZZLE_64B
    steps, in_box = head_dim // _STEP, row // _STEP
    q_box, k_box = GROUP_ROWS * row // 16, keys * row // 16
    pattern = _EIGHT_ROWS * row

    @cuda.jit(device=True, forceinline=True)
    def scores(s, q, k):
        q, k = matrix_descriptor(q, 16, pattern, swizzle), matrix_descriptor(k, 16, pattern, swizzle)
        fence(s)
        for step in range(steps):
            unroll()
            box, within = step // in_box, step % in_box * 2
            mma(s, q + uint64(box * q_box + within), k + uint64(box * k_box + within), step > 0)
        ptx.wgmma_commit_group()

    return scores


@functools.cache
def make_weighted(head_dim: int, keys: int) -> Callable:
    """Make `weighted(o, p, v, add)`: start O = P V, or O += P V, a group for each 32 keys.

    ptxas makes groups of them in any case, as their operand A is in registers, and counts these where one waits for all
    groups but some: for the scores before them, but none of these, it takes their right number.

    `o` is an accumulator of head_dim / 2; `p` a local array of keys / 8 uint32, four weights each; `v` the shared
    address of keys / 16 chunks of `head_dim` columns.
    """
    mma = getattr(ptx, f"wgmma_mma_async_m64n{head_dim}k32_f32_e4m3_e4m3_rs")
    fence = getattr(ptx, f"wgmma_fence_m64n{head_dim}_f32")
    steps = keys // _STEP
    chunk = head_dim * _CORE_ROW
    step_units = _STEP // CHUNK * chunk // 16

    @cuda.jit(device=True, forceinline=True)
    def weighted(o, p, v, add):
        v = matrix_descriptor(v, chunk, _EIGHT_ROWS * _CORE_ROW, SWIZZLE_NONE)
        fence(o)
        for step in range(steps):
            unroll()
            i = 4 * step
            mma(o, p[i], p[i + 1], p[i + 2], p[i + 3], v + uint64(step * step_units), add or step > 0)
            ptx.wgmma_commit_group()

    return weighted


class Sum(NamedTuple):
    """Device functions on O, a block's `product` and the factor `carry` that O is to be multiplied by, of each row.

    clear(o, product, carry)
        Nothing has been added up.
    start(o, product, p, v)
        Start the product of a block's weights and values.
    finish(o, product)
        Wait for it, and for all else that has been started.
    settle(o, product, carry, shrink)
        Make it part of O, which from the next one on is multiplied by `shrink`; if none is under way.
    settle_last(o, product, carry)
        The same, where no other follows.
    """

    clear: Callable
    start: Callable
    finish: Callable
    settle: Callable
    settle_last: Callable


@functools.cache
def make_sum(head_dim: int, keys: int, promote: bool) -> Sum:
    """The functions of a sum in float32 of products of one block each, or (`promote` false) of one long product."""
    elements = head_dim // 2
    weighted = make_weighted(head_dim, keys)
    wait = getattr(ptx, f"wgmma_wait_group_m64n{head_dim}_f32")

    @cuda.jit(device=True, forceinline=True)
    def clear(o, product, carry):
        carry[0], carry[1] = float32(0), float32(0)
        for i in range(elements):
            unroll()
            o[i] = float32(0)
            if promote:
                product[i] = float32(0)

    @cuda.jit(device=True, forceinline=True)
    def start_anew(o, product, p, v):
        weighted(product, p, v, False)

    @cuda.jit(device=True, forceinline=True)
    def finish_product(o, product):
        wait(product, 0)

    @cuda.jit(device=True, forceinline=True)
    def settle_last_product(o, product, carry):
        for i in range(elements):
            unroll()
            o[i] = o[i] * carry[i // 2 % 2] + product[i]

    @cuda.jit(device=True, forceinline=True)
    def settle_product(o, product, carry, shrink):
        settle_last_product(o, product, carry)
        carry[0], carry[1] = shrink[0], shrink[1]

    @cuda.jit(device=True, forceinline=True)
    def start(o, product, p, v):
        weighted(o, p, v, True)

    @cuda.jit(device=True, forceinline=True)
    def finish(o, product):
        wait(o, 0)

    @cuda.jit(device=True, forceinline=True)
    def settle(o, product, carry, shrink):
        for i in range(elements):
            unroll()
            o[i] *= shrink[i // 2 % 2]

    @cuda.jit(device=True, forceinline=True)
    def settle_last(o, product, carry):
        pass

    if promote:
        return Sum(clear, start_anew, finish_product, settle_product, settle_last_product)
    return Sum(clear, start, finish, settle, settle_last)


class Weights(NamedTuple):
    """Device functions that make weights of scores.

    weigh(s, scales, factor, largest, shrink)
        As `Softmax.weigh` but for the total, with the scales of the block's parts at the shared address `scales`:
        k_scale, log2 of v_scale and its inverse, 16 bytes apart. Weights are 2^`SHIFT` times as large.
    add_up(s, scales, total, shrink)
        The weights' part in `total`.
    pack(s, p)
        Four weights to a register, as wgmma has its operand A.
    """

    weigh: Callable
    add_up: Callable
    pack: Callable


def _part(keys: int) -> int:
    """Neighbouring keys of a block that share scales, wherever the block begins."""
    return math.gcd(keys, KV_BLOCK)


@functools.cache
def make_weights(keys: int) -> Weights:
    """The device functions for so many keys."""
    parts, eighths = keys // _part(keys), _part(keys) // 8
    registers = keys // 8

    @cuda.jit(device=True, forceinline=True)
    def weigh(s, scales, factor, largest, shrink):
        factors, logarithms = cuda.local.array(parts, float32), cuda.local.array(parts, float32)
        for part in range(parts):
            unroll()
            of_k, of_v = ptx.ld_shared_v2_f32(uint32(scales + uint32(16 * part)))
            factors[part], logarithms[part] = of_k * factor, of_v
        for i in range(2):
            unroll()
            most = largest[i]
            for part in range(parts):
                unroll()
                raw = float32(NOTHING)
                for j in range(eighths):
                    unroll()
                    r = 4 * (part * eighths + j) + 2 * i
                    raw = cuda.libdevice.fmaxf(raw, cuda.libdevice.fmaxf(s[r], s[r + 1]))
                most = cuda.libdevice.fmaxf(most, raw * factors[part] + logarithms[part])
            most = quad_max(most)
            zero = float32(0) if most == float32(NOTHING) else most
            shrink[i] = ptx.ex2_approx_ftz_f32(largest[i] - zero)
            largest[i] = most
            zero -= float32(SHIFT)
            for part in range(parts):
                unroll()
                offset = logarithms[part] - zero
                for j in range(eighths):
                    unroll()
                    r = 4 * (part * eighths + j) + 2 * i
                    s[r] = ptx.ex2_approx_ftz_f32(s[r] * factors[part] + offset)
                    s[r + 1] = ptx.ex2_approx_ftz_f32(s[r + 1] * factors[part] + offset)

    @cuda.jit(device=True, forceinline=True)
    def add_up(s, scales, total, shrink):
        inverses = cuda.local.array(parts, float32)
        for part in range(parts):
            unroll()
            _, _, inverses[part], _ = ptx.ld_shared_v4_f32(uint32(scales + uint32(16 * part)))
        for i in range(2):
            unroll()
            total[i] *= shrink[i]
            for part in range(parts):
                unroll()
                sum_of_part = float32(0)
                for j in range(eighths):
                    unroll()
                    r = 4 * (part * eighths + j) + 2 * i
                    sum_of_part += s[r] + s[r + 1]
                total[i] += sum_of_part * inverses[part]

    @cuda.jit(device=True, forceinline=True)
    def pack(s, p):
        for i in range(registers):
            unroll()
            r = 8 * (i // 2) + 2 * (i % 2)
            p[i] = ptx.mov_b32(ptx.cvt_rn_satfinite_e4m3x4_f32(s[r], s[r + 1], s[r + 4], s[r + 5]))

    return Weights(weigh, add_up, pack)


def _plan(head_dim: int, dtype: str, consumers: int, keys: int, stages: int) -> Shared:
    """Shared memory: Q and O of each consumer, rings of K, V and the blocks' scales, the turns, and barriers."""
    row = min(head_dim, ROW_BYTES)
    boxes, o_boxes = head_dim // row, head_dim // BOX_COLUMNS
    swizzle = "128B" if row == ROW_BYTES else "64B"
    members = {
        "q": Tiles(consumers, (boxes * GROUP_ROWS, row), FLOAT8, swizzle=swizzle),
        "o": Tiles(consumers, (o_boxes * GROUP_ROWS, BOX_COLUMNS), dtype, swizzle="128B"),
        "k": Tiles(stages, (boxes * keys, row), FLOAT8, swizzle=swizzle),
        "v": Tiles(stages, (keys // CHUNK, head_dim * CHUNK), FLOAT8),
        "scales": Buffer((stages + 1, keys // _part(keys), 4), "float32"),
        "turns": Buffer((TURNS, 8), "uint32"),
        "turn_full": Barriers(TURNS),
    }
    return Shared(**members, **ring_barriers(consumers, stages))


@cuda.jit(device=True, forceinline=True)
def advanced(stage, phase, stages):
    """The ring's next stage and its phase."""
    following = uint32(stage + uint32(1))
    if following == uint32(stages):
        return uint32(0), uint32(phase ^ uint32(1))
    return following, phase


class Supply(NamedTuple):
    """Device functions by which a block comes by its tiles and their contents.

    initialise()
        Of the barriers, by one thread.
    produce(...)
        One thread claims one tile after the other, describes it to all who do not fetch, and fetches what it needs.
    produce_scales(k_scale, v_scale, lane, group)
        A warp brings the scales of each block of keys. Their ring has one slot more than that of K, whose barriers are
        also its own: when K of a block has been let go, the softmax of the block before it is done.
    next_turn(turn)
        Wait for the description of this block's tile number `turn`: first row, head, batch, first block of keys, the
        one behind the last; that is 0 if there is no such tile.
    tile_of(turn)
        First row, head and batch of a turn that has been waited for.
    """

    initialise: Callable
    produce: Callable
    produce_scales: Callable
    next_turn: Callable
    tile_of: Callable


@functools.cache
def make_supply(tile: Tile, smem: Shared, head_dim: int, consumers: int, keys: int, stages: int) -> Supply:
    """The functions for tiles of this kind, in this shared memory."""
    row_bytes = min(head_dim, ROW_BYTES)
    q_bytes, kv_bytes = GROUP_ROWS * head_dim, keys * head_dim
    parts, split = keys // _part(keys), KV_BLOCK // _part(keys)
    place, blocks = tile.place, tile.blocks
    fetch = make_fetch(head_dim // row_bytes, row_bytes, row_bytes)

    @cuda.jit(device=True, forceinline=True)
    def fetch_keys(tile, tensor_map, block, head, batch, bar):
        fetch(tile, tensor_map, keys, uint32(block * uint32(keys)), head, batch, bar)

    @cuda.jit(device=True, forceinline=True)
    def fetch_values(tile, tensor_map, block, head, batch, bar):
        chunk = uint32(block * uint32(keys // CHUNK))
        ptx.cp_async_bulk_tensor_5d_shared_global(ptx.shared_address(tile), tensor_map, 0, 0, chunk, head, batch, bar)

    # The warp that brings the scales arrives at K's barrier too.
    initialise_rings, fill = make_rings(
        smem, (fetch_keys, fetch_values), kv_bytes, consumers, stages, k_arrivals=2, wait=mbarrier_wait
    )

    @cuda.jit(device=True, forceinline=True)
    def initialise():
        initialise_rings()
        for i in range(TURNS):
            ptx.mbarrier_init(smem.turn_full[i], 1)
        ptx.fence_mbarrier_init()

    @cuda.jit(device=True, forceinline=True)
    def describe(turn, row, head, batch, first, end):
        slot = turn % uint32(TURNS)
        to = smem.turns.address_of(slot, 0)
        ptx.st_shared_v4_u32(to, row, head, batch, first)
        ptx.st_shared_u32(uint32(to + uint32(16)), end)
        ptx.mbarrier_arrive(smem.turn_full[slot])

    @cuda.jit(device=True, forceinline=True)
    def next_turn(turn):
        slot, phase = ring(turn, TURNS)
        mbarrier_wait(smem.turn_full[slot], phase)
        turns = smem.turns
        return turns[slot, 0], turns[slot, 1], turns[slot, 2], turns[slot, 3], turns[slot, 4]

    @cuda.jit(device=True, forceinline=True)
    def tile_of(turn):
        turns, slot = smem.turns, uint32(turn % uint32(TURNS))
        return turns[slot, 0], turns[slot, 1], turns[slot, 2]

    @cuda.jit(device=True, forceinline=True)
    def produce(q_map, k_map, v_map, counter, sq, skv, low, high, tiles_m, heads, all_heads, together, group):
        use, turn = uint32(0), uint32(0)  # of the rings of K and V; of Q
        tiles = uint32(tiles_m * all_heads)
        tile = uint32(cuda.blockIdx.x)
        while tile < tiles:
            following = claim(counter, tiles)
            row, head, batch = place(tile, tiles_m, heads, all_heads, together)
            kv_head = uint32(head // group)
            first, block = blocks(row, sq, skv, low, high)
            describe(turn, row, head, batch, first, block)
            for i in range(consumers):
                unroll(1)
                mbarrier_wait(smem.q_empty[i], (turn & uint32(1)) ^ uint32(1))
                bar = smem.q_full[i]
                ptx.mbarrier_arrive_expect_tx(bar, q_bytes)
                fetch(smem.q[i], q_map, GROUP_ROWS, uint32(row + uint32(i) * uint32(GROUP_ROWS)), head, batch, bar)
            use = fill(k_map, v_map, use, first, block, kv_head, batch)
            turn = uint32(turn + uint32(1))
            tile = following
        describe(turn, uint32(0), uint32(0), uint32(0), uint32(0), uint32(0))

    @cuda.jit(device=True, forceinline=True)
    def produce_scales(k_scale, v_scale, lane, group):
        use, turn = uint32(0), uint32(0)
        count = uint32(k_scale.shape[2])
        _, head, batch, first, block = next_turn(turn)
        while block > uint32(0):
            kv_head = uint32(head // group)
            while block > first:
                unroll(1)
                block = uint32(block - uint32(1))
                stage, phase = ring(use, stages)
                slot, _ = ring(use, stages + 1)
                use = uint32(use + uint32(1))
                part = uint32(uint32(block * uint32(parts) + lane) // uint32(split))
                of_k, of_v = float32(1), float32(1)  # keys behind the last one are hidden
                if lane < uint32(parts) and part < count:
                    of_k, of_v = k_scale[batch, kv_head, part], v_scale[batch, kv_head, part]
                mbarrier_wait(smem.k_empty[stage], phase ^ uint32(1))
                if lane < uint32(parts):
                    to = smem.scales.address_of(slot, lane, 0)
                    inverse_of_v = ptx.rcp_approx_ftz_f32(of_v)
                    ptx.st_shared_v4_f32(to, of_k, ptx.lg2_approx_ftz_f32(of_v), inverse_of_v, float32(0))
                cuda.syncwarp()
                if lane == 0:
                    ptx.mbarrier_arrive(smem.k_full[stage])
            turn = uint32(turn + uint32(1))
            _, head, batch, first, block = next_turn(turn)

    return Supply(initialise, produce, produce_scales, next_turn, tile_of)


@functools.cache
def make_fp8(
    head_dim: int,
    dtype: str,
    kind: Kind,
    keys: int = 128,
    stages: int = 3,
    promote: bool = True,
    ping_pong: bool = False,
    consumers: int = 2,
) -> Kernel:
    """Consumer warpgroups of 64 queries each, whose softmaxes run beside the block's product and each other's.

    Tensor maps are of q8 and k8 (batch, rows, heads, head_dim), boxes of 128 columns (or the 64 there are) of one head;
    of v8 (batch, heads, chunks, head_dim / 16, 256), boxes of keys / 16 chunks; and of o, boxes of 64 rows and columns.
    `factor` is the softmax's, times log2(e); `counter` one uint32, zero. `dtype` is O's.

    Args:
        keys: of a block, a multiple of 32 up to 256.
        stages: of the rings, 2 or more.
        promote: whether each block's product starts from nothing and is added to O in float32; it takes head_dim / 2
            registers.
        ping_pong: whether two warpgroups take turns in starting.
        consumers: warpgroups of 64 queries each, 2 or 3.

    Raises:
        ValueError: keys, stages or consumers do not fit.
    """
    # The next block's scores are under way while values are still being read: with one stage nobody would get on.
    if keys not in range(_STEP, 257, _STEP) or consumers not in REGISTERS or not 2 <= stages <= _MOST_STAGES:
        raise ValueError(
            f"{keys} keys, {stages} stages, {consumers} consumers: a multiple of {_STEP} keys up to 256, 2 to "
            f"{_MOST_STAGES} stages and 2 or 3 consumers expected"
        )
    pair = 2 * WARPGROUP
    ping_pong = ping_pong and consumers == 2
    score_elements, o_elements, p_elements = keys // 2, head_dim // 2, keys // 8
    behind_scores = keys // _STEP  # groups
    product_elements = o_elements if promote else 1
    fewer, more = REGISTERS[consumers]
    scores = make_scores(head_dim, keys)
    clear, start, finish, settle, settle_last = make_sum(head_dim, keys, promote)
    masks = make_tile_masks(kind, GROUP_ROWS, keys)
    row_range = masks.row_range
    left = kind.left
    hide = make_softmax(keys, masks).hide
    weigh, add_up, pack = make_weights(keys)
    wait_scores = getattr(ptx, f"wgmma_wait_group_m64n{keys}_f32")
    tile_functions = make_tile(head_dim, dtype, kind, consumers, keys)
    store = tile_functions.store
    smem = _plan(head_dim, dtype, consumers, keys, stages)
    initialise, produce, produce_scales, next_turn, tile_of = make_supply(
        tile_functions, smem, head_dim, consumers, keys, stages
    )
    release = make_release()

    @kernel(threads=WARPGROUP * (consumers + 1), shared=smem)
    def attention_fp8(
        q_map,
        k_map,
        v_map,
        o_map,
        q_scale,
        k_scale,
        v_scale,
        lse,
        counter,
        sq,
        skv,
        low,
        high,
        tiles_m,
        heads,
        all_heads,
        together,
        group,
        factor,
    ):
        thread = uint32(cuda.threadIdx.x)
        if thread == 0:
            initialise()
        cuda.syncthreads()
        if thread < WARPGROUP:
            ptx.setmaxnreg_dec(fewer)
            lane = uint32(thread % uint32(32))
            if thread == 0:
                produce(q_map, k_map, v_map, counter, sq, skv, low, high, tiles_m, heads, all_heads, together, group)
            elif thread // uint32(32) == _SCALES_WARP:
                produce_scales(k_scale, v_scale, lane, group)
        else:
            ptx.setmaxnreg_inc(more)
            # By a vote, so that ptxas sees that it is the same for a warp, and keeps descriptors in uniform registers.
            mine = consumer_number(thread, consumers)
            thread = uint32(thread % uint32(WARPGROUP))
            lane_row = uint32(thread // uint32(32) * uint32(16) + thread % uint32(32) // uint32(4))
            lane_key = uint32(thread % uint32(4) * uint32(2))
            s, o = cuda.local.array(score_elements, float32), cuda.local.array(o_elements, float32)
            product = cuda.local.array(product_elements, float32)
            p = cuda.local.array(p_elements, uint32)
            largest, total = cuda.local.array(2, float32), cuda.local.array(2, float32)
            shrink, carry = cuda.local.array(2, float32), cuda.local.array(2, float32)
            q_tile = ptx.shared_address(smem.q[mine])
            turn, stage, phase, slot = uint32(0), uint32(0), uint32(0), uint32(0)
            if ping_pong and mine == 1:
                ptx.bar_arrive(1, pair)  # the first warpgroup begins
            row, head, batch, first, block = next_turn(turn)
            while uniform(block > uint32(0)):
                row = uint32(row + mine * uint32(GROUP_ROWS))
                of_q = (
                    factor * q_scale[batch, head, min(uint32(row // uint32(GROUP_ROWS)), uint32(q_scale.shape[2] - 1))]
                )
                # The keys that all 64 rows see, by way of this thread's own row: as in step 7.
                my_first, my_end = row_range(uint32(row + lane_row), skv, low, high)
                all_first = int32(my_first + int32(GROUP_ROWS - 1) - int32(lane_row))
                all_end = int32(my_end - int32(lane_row))
                mbarrier_wait(smem.q_full[mine], turn & uint32(1))

                # The last block of keys: scores and weights, with nothing beside them.
                block = uint32(block - uint32(1))
                mbarrier_wait(smem.k_full[stage], phase)
                scores(s, q_tile, ptx.shared_address(smem.k[stage]))
                wait_scores(s, 0)
                release(smem.k_empty[stage], thread)
                hide(s, uint32(row + lane_row), uint32(block * uint32(keys) + lane_key), skv, low, high)
                largest[0], largest[1] = float32(NOTHING), float32(NOTHING)
                total[0], total[1] = float32(0), float32(0)
                weigh(s, smem.scales.address_of(slot, 0, 0), of_q, largest, shrink)
                mbarrier_wait(smem.v_full[stage], phase)
                add_up(s, smem.scales.address_of(slot, 0, 0), total, shrink)
                pack(s, p)
                clear(o, product, carry)
                # What comes from shared memory may differ between threads, for all that ptxas knows, and no wgmma runs
                # across branches that hang on it. A vote is the same for a warp.
                while uniform(block > first):
                    unroll(1)
                    block = uint32(block - uint32(1))
                    following, next_phase = advanced(stage, phase, stages)
                    slot, _ = advanced(slot, phase, stages + 1)
                    mbarrier_wait(smem.k_full[following], next_phase)
                    if ping_pong:
                        ptx.bar_sync(uint32(uint32(1) + mine), pair)
                    scores(s, q_tile, ptx.shared_address(smem.k[following]))
                    settle(o, product, carry, shrink)  # beside these scores
                    start(o, product, p, ptx.shared_address(smem.v[stage]))
                    if ping_pong:
                        ptx.bar_arrive(uint32(uint32(2) - mine), pair)
                    wait_scores(s, behind_scores)
                    release(smem.k_empty[following], thread)
                    key, end = int32(block * uint32(keys)), int32(uint32(block + uint32(1)) * uint32(keys))
                    if end > all_end or (left and key < all_first):
                        hide(s, uint32(row + lane_row), uint32(block * uint32(keys) + lane_key), skv, low, high)
                    weigh(s, smem.scales.address_of(slot, 0, 0), of_q, largest, shrink)
                    # The wait for V is here, where it is needed a little later, because it has a branch: but for that
                    # ptxas waits for the product before the exponentials, and adds each of them up as it comes.
                    mbarrier_wait(smem.v_full[following], next_phase)
                    finish(o, product)
                    release(smem.v_empty[stage], thread)
                    add_up(s, smem.scales.address_of(slot, 0, 0), total, shrink)
                    pack(s, p)  # not before the product that reads it is done
                    stage, phase = following, next_phase
                release(smem.q_empty[mine], thread)
                settle(o, product, carry, shrink)
                start(o, product, p, ptx.shared_address(smem.v[stage]))
                total[0], total[1] = quad_sum(total[0]), quad_sum(total[1])
                top, bottom = inverse(total[0]), inverse(total[1])
                finish(o, product)
                settle_last(o, product, carry)
                release(smem.v_empty[stage], thread)
                # Found out again here, rather than kept in registers all the while.
                row, head, batch = tile_of(turn)
                row = uint32(row + mine * uint32(GROUP_ROWS))
                here = ptx.mov_b32(thread)
                store(o, o_map, smem.o[mine], here, uint32(mine + uint32(3)), row, head, batch, top, bottom)
                if here % uint32(4) == 0:
                    for i in range(2):
                        unroll()
                        r = uint32(
                            row + here // uint32(32) * uint32(16) + here % uint32(32) // uint32(4) + uint32(8 * i)
                        )
                        if r < sq:
                            lse[batch, head, r] = log_sum_exp(largest[i] - float32(SHIFT), total[i], float32(1))
                stage, phase = advanced(stage, phase, stages)
                slot, _ = advanced(slot, phase, stages + 1)
                turn = uint32(turn + uint32(1))
                row, head, batch, first, block = next_turn(turn)
            if ping_pong and mine == 0:
                ptx.bar_sync(1, pair)  # the second one's last arrival
            if thread == 0:
                ptx.cp_async_bulk_wait_group_read(0)

    return attention_fp8

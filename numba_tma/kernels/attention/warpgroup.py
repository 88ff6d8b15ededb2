"""Steps 5 to 9, FlashAttention-3's way: wgmma, a producer, and softmax beside the next block's scores.

A block computes 64 rows of O for each of its consumer warpgroups. Q stays in shared memory; K and V come through rings
of their own, so that a block of keys is let go as soon as its scores are there. The scores are a warpgroup's
accumulator, and become weights in the registers from which the second product reads its operand A. What fills shared
memory is in `rings`, what a tile is in `tiles`.

Source: Shah and others, "FlashAttention-3". PTX ISA: "Register Fragments for wgmma.mma_async.m64nNk16", "Matrix
Descriptor Format", "setmaxnreg".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...pipeline import make_meet, make_release, ring
from ...shared import Buffer, Shared, Tiles
from ...unroll import unroll
from ...warpgroup import ROW_BYTES, consumer_number, matrix_descriptor, uniform
from ..gemm.epilogue import make_pack
from ..gemm.warpgroup import BOX_COLUMNS, GROUP_ROWS, WARPGROUP
from .masks import Kind, make_tile_masks
from .packed import make_sequences
from .rings import make_fetch, make_rings, ring_barriers
from .softmax import NOTHING, inverse, log_sum_exp, make_softmax, quad_sum
from .tile_counters import claim
from .tiles import Tile, make_tile

_KINDS = {"bfloat16": "bf16", "float16": "f16"}
_STEP = 16  # of the inner dimension, in one instruction
_PATTERN_BYTES = 8 * ROW_BYTES
# Registers of the producer's and the consumers' threads, by the number of consumers: 64 K together at most. One would
# have enough without asking for more, but where nobody asks ptxas makes wgmma wait around the barriers' loops.
REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}
# A tile's number is kept for so many turns. The producer writes that of turn t when each consumer has let go of Q of
# turn t - 2 at least: then all its threads have met to store O of turn t - 3, and have read the numbers up to that one.
TURNS = 4


@functools.cache
def make_scores(head_dim: int, keys: int, dtype: str) -> Callable:
    """Make `scores(s, q, k)`: start S = Q Kᵀ of 64 rows and `keys` keys, as one group.

    `s` is an accumulator of keys / 2; `q` and `k` are shared addresses of boxes of 64 columns, one behind the other.
    """
    kind = _KINDS[dtype]
    mma = getattr(ptx, f"wgmma_mma_async_m64n{keys}k16_f32_{kind}_{kind}")
    fence = getattr(ptx, f"wgmma_fence_m64n{keys}_f32")
    steps = head_dim // _STEP
    q_box, k_box = GROUP_ROWS * ROW_BYTES // 16, keys * ROW_BYTES // 16

    @cuda.jit(device=True, forceinline=True)
    def scores(s, q, k):
        q, k = matrix_descriptor(q, 16, _PATTERN_BYTES), matrix_descriptor(k, 16, _PATTERN_BYTES)
        fence(s)
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
    fence = getattr(ptx, f"wgmma_fence_m64n{head_dim}_f32")
    steps = keys // _STEP
    box_bytes = keys * ROW_BYTES
    step_units = _STEP * ROW_BYTES // 16

    @cuda.jit(device=True, forceinline=True)
    def weighted(o, p, v, add):
        v = matrix_descriptor(v, box_bytes, _PATTERN_BYTES)
        fence(o)
        for step in range(steps):
            unroll()
            i = 4 * step
            mma(o, p[i], p[i + 1], p[i + 2], p[i + 3], v + uint64(step * step_units), add or step > 0, 1)
        ptx.wgmma_commit_group()

    return weighted


def _plan(boxes: int, dtype: str, consumers: int, keys: int, stages: int, o_over_q: bool) -> Shared:
    """Shared memory: Q and O of each consumer, rings of K and V, a pair of barriers for each of what is fetched.

    `tile` has the numbers of this turn's tile and of others before and behind it.
    """
    members = {"q": Tiles(consumers, (boxes * GROUP_ROWS, BOX_COLUMNS), dtype, swizzle="128B")}
    if not o_over_q:
        members["o"] = members["q"]
    for name in ("k", "v"):
        members[name] = Tiles(stages, (boxes * keys, BOX_COLUMNS), dtype, swizzle="128B")
    return Shared(**members, **ring_barriers(consumers, stages), tile=Buffer(TURNS, "uint32"))


def _make_fetch_keys(boxes: int, keys: int, packed: bool, cluster: int) -> Callable:
    """Make `load(tile, tensor_map, key, head, part, bar)`: a block of K or V, from this key on.

    Of a `cluster` each block fetches every so many boxes of 64 columns, for all of them.
    """
    fetch = make_fetch(boxes, BOX_COLUMNS, ROW_BYTES, packed)

    @cuda.jit(device=True, forceinline=True)
    def fetch_keys(tile, tensor_map, key, head, part, bar):
        fetch(tile, tensor_map, keys, key, head, part, bar)

    @cuda.jit(device=True, forceinline=True)
    def fetch_share(tile, tensor_map, key, head, batch, bar):
        rank = ptx.cluster_ctarank()
        for turn in range(boxes // cluster):
            unroll()
            box = uint32(uint32(turn * cluster) + rank)
            to = uint32(ptx.shared_address(tile) + box * uint32(keys * ROW_BYTES))
            column = uint32(box * uint32(BOX_COLUMNS))
            ptx.cp_async_bulk_tensor_4d_shared_global_multicast(
                to, tensor_map, column, head, key, batch, bar, (1 << cluster) - 1
            )

    return fetch_keys if cluster == 1 else fetch_share


class Supply(NamedTuple):
    """Device functions by which a block comes by its tiles and their contents.

    initialise()
        Of the barriers, by one thread.
    produce(...)
        One thread claims one tile after the other (those of a cluster have every so many), fetches all that they need,
        and announces a tile's number together with its Q.
    next_tile(mine, turn)
        Wait for Q of consumer `mine`'s tile number `turn`; a number behind the last tile's if there is none.
    """

    initialise: Callable
    produce: Callable
    next_tile: Callable


@functools.cache
def make_supply(
    tile: Tile, smem: Shared, boxes: int, consumers: int, keys: int, stages: int, packed: bool = False, cluster: int = 1
) -> Supply:
    """The functions for tiles of this kind, in this shared memory.

    The blocks of a `cluster` have tiles of one head beside each other, with the same keys, in turns of the grid: each
    fetches a part of K and V for all of them.
    """
    q_bytes, kv_bytes = GROUP_ROWS * boxes * ROW_BYTES, keys * boxes * ROW_BYTES
    place, blocks = tile.place, tile.blocks
    fetch = make_fetch(boxes, BOX_COLUMNS, ROW_BYTES, packed)
    fetch_keys = _make_fetch_keys(boxes, keys, packed, cluster)
    loads = (fetch_keys, fetch_keys)
    initialise_rings, fill = make_rings(smem, loads, kv_bytes, consumers, stages, step=keys, cluster=cluster)
    sequences = make_sequences(packed)
    extents, part_of = sequences.extents, sequences.part

    @cuda.jit(device=True, forceinline=True)
    def initialise():
        initialise_rings()
        ptx.fence_mbarrier_init()

    @cuda.jit(device=True, forceinline=True)
    def following_tile(tile, tiles, counter):
        if cluster == 1:
            return claim(counter, tiles)
        return uint32(tile + uint32(cuda.gridDim.x))

    @cuda.jit(device=True, forceinline=True)
    def produce(
        q_map,
        k_map,
        v_map,
        counter,
        q_starts,
        kv_starts,
        all_sq,
        all_skv,
        all_low,
        all_high,
        tiles_m,
        heads,
        all_heads,
        together,
        group,
    ):
        use, turn = uint32(0), uint32(0)  # of the rings of K and V; of Q
        tiles = uint32(tiles_m * all_heads)
        tile = uint32(cuda.blockIdx.x)
        while tile < tiles:
            following = following_tile(tile, tiles, counter)
            row, head, batch = place(tile, tiles_m, heads, all_heads, together)
            sq, skv, low, high, q_start, kv_start = extents(
                batch, all_sq, all_skv, all_low, all_high, q_starts, kv_starts
            )
            if row < sq:
                q_part, kv_part = part_of(batch, q_start, sq), part_of(batch, kv_start, skv)
                kv_head = uint32(head // group)
                first, block = blocks(row, sq, skv, low, high)
                for i in range(consumers):
                    unroll(1)
                    ptx.mbarrier_wait_parity(smem.q_empty[i], (turn & uint32(1)) ^ uint32(1))
                    if i == 0:
                        smem.tile[turn % uint32(TURNS)] = tile
                    bar = smem.q_full[i]
                    ptx.mbarrier_arrive_expect_tx(bar, q_bytes)
                    fetch(smem.q[i], q_map, GROUP_ROWS, uint32(row + uint32(i * GROUP_ROWS)), head, q_part, bar)
                use = fill(k_map, v_map, use, first, block, kv_head, kv_part)
                turn = uint32(turn + uint32(1))
            tile = following
        for i in range(consumers):
            unroll(1)
            ptx.mbarrier_wait_parity(smem.q_empty[i], (turn & uint32(1)) ^ uint32(1))
            if i == 0:
                smem.tile[turn % uint32(TURNS)] = tiles
            ptx.mbarrier_arrive(smem.q_full[i])

    @cuda.jit(device=True, forceinline=True)
    def next_tile(mine, turn):
        ptx.mbarrier_wait_parity(smem.q_full[mine], turn & uint32(1))
        return smem.tile[turn % uint32(TURNS)]

    return Supply(initialise, produce, next_tile)


def _make_finish(store: Callable, smem: Shared, packed: bool, o_over_q: bool) -> Callable:
    """Make `finish(o, o_map, lse, ends, sums, whose, where, lane, sequence)`: a consumer's rows of O and lse leave.

    `ends` are what O's rows, upper and lower, are multiplied by; `sums` their largest scores, their totals and the
    scores' factor; `whose` the consumer and the thread in it; `where` the consumer's first row, head and batch; `lane`
    the thread's first row and column of its tile; `sequence` where the queries begin, and how many they are. O may go
    `o_over_q`, its Q, which is not needed any more: then Q's tile is let go when O has left.
    """
    part_of = make_sequences(packed).part

    @cuda.jit(device=True, forceinline=True)
    def finish(o, o_map, lse, ends, sums, whose, where, lane, sequence):
        (top, bottom), (largest, total, factor), (mine, thread) = ends, sums, whose
        (row, head, batch), (lane_row, lane_key), (q_start, sq) = where, lane, sequence
        o_tile = smem.q[mine] if o_over_q else smem.o[mine]
        part = part_of(batch, q_start, sq)
        store(o, o_map, o_tile, thread, uint32(mine + uint32(3)), row, head, part, top, bottom)
        if o_over_q and thread == 0:
            ptx.cp_async_bulk_wait_group_read(0)
            ptx.mbarrier_arrive(smem.q_empty[mine])
        if lane_key == 0:
            own = uint32(0) if packed else batch
            first_row = uint32(q_start + row + lane_row)
            end_row = min(uint32(q_start + sq), uint32(lse.shape[2]))  # a lse without rows stands for none
            for i in range(2):
                unroll()
                r = uint32(first_row + uint32(8 * i))
                if r < end_row:
                    lse[own, head, r] = log_sum_exp(largest[i], total[i], factor)

    return finish


@functools.cache
def make_warpgroups(
    head_dim: int,
    dtype: str,
    kind: Kind,
    soft_cap: bool = False,
    consumers: int = 2,
    keys: int = 128,
    stages: int = 2,
    o_over_q: bool = False,
    packed: bool = False,
) -> Kernel:
    """Steps 5 and 6: scores, softmax, product, one after the other; the warpgroups' turns mix by chance.

    Args:
        head_dim: columns of Q, K, V and O, a multiple of 16 up to 256.
        dtype: theirs, "float16" or "bfloat16".
        kind: which sides of the mask are bounded.
        soft_cap: whether the scores are.
        consumers: warpgroups of 64 queries each, 1 to 3.
        keys: of a block, a multiple of 16 up to 256.
        stages: of the rings.
        o_over_q: whether O leaves by way of Q's shared memory, where there is no room else.
        packed: whether sequences are packed one behind the other.

    Tensor maps are of (batch, rows, heads, head_dim), with boxes of 64 columns of one head: 64 rows of q and o, `keys`
    rows of k and v. `factor` and `inner` are `operands.Scores`'. If sequences are `packed`, they are `RaggedMap`s of
    (rows, heads, head_dim); `q_starts` and `kv_starts` are looked at, and `all_low` and `all_high` are the diagonals of
    as many queries as keys. `counter` is a zero, and a zero again afterwards.
    """
    boxes = -(-head_dim // BOX_COLUMNS)
    score_elements, o_elements, p_elements = keys // 2, head_dim // 2, keys // 4
    fewer, more = REGISTERS[consumers]
    scores, weighted = make_scores(head_dim, keys, dtype), make_weighted(head_dim, keys, dtype)
    masks = make_tile_masks(kind, GROUP_ROWS, keys)
    full_range = masks.full_range
    cap, hide, weigh = make_softmax(keys, masks)
    pack = make_pack(dtype)
    wait_scores = getattr(ptx, f"wgmma_wait_group_m64n{keys}_f32")
    wait_o = getattr(ptx, f"wgmma_wait_group_m64n{head_dim}_f32")
    tile_functions = make_tile(head_dim, dtype, kind, consumers, keys, packed)
    place, blocks = tile_functions.place, tile_functions.blocks
    smem = _plan(boxes, dtype, consumers, keys, stages, o_over_q)
    initialise, produce, next_tile = make_supply(tile_functions, smem, boxes, consumers, keys, stages, packed)
    extents = make_sequences(packed).extents
    release = make_release()
    finish = _make_finish(tile_functions.store, smem, packed, o_over_q)

    @kernel(threads=WARPGROUP * (consumers + 1), shared=smem)
    def attention_warpgroups(
        q_map,
        k_map,
        v_map,
        o_map,
        lse,
        counter,
        q_starts,
        kv_starts,
        all_sq,
        all_skv,
        all_low,
        all_high,
        tiles_m,
        heads,
        all_heads,
        together,
        group,
        factor,
        inner,
    ):
        thread = uint32(cuda.threadIdx.x)
        if thread == 0:
            initialise()
        cuda.syncthreads()
        if thread < WARPGROUP:
            ptx.setmaxnreg_dec(fewer)
            if thread == 0:
                produce(
                    *(q_map, k_map, v_map, counter, q_starts, kv_starts, all_sq, all_skv, all_low, all_high),
                    *(tiles_m, heads, all_heads, together, group),
                )
        else:
            ptx.setmaxnreg_inc(more)
            mine = uint32(thread // uint32(WARPGROUP) - uint32(1))
            thread = uint32(thread % uint32(WARPGROUP))
            lane_row = uint32(thread // uint32(32) * uint32(16) + thread % uint32(32) // uint32(4))
            lane_key = uint32(thread % uint32(4) * uint32(2))
            s, o = cuda.local.array(score_elements, float32), cuda.local.array(o_elements, float32)
            p = cuda.local.array(p_elements, uint32)
            largest, total = cuda.local.array(2, float32), cuda.local.array(2, float32)
            shrink = cuda.local.array(2, float32)
            q_tile = ptx.shared_address(smem.q[mine])
            use, turn = uint32(0), uint32(0)
            while True:
                tile = next_tile(mine, turn)
                if tile >= uint32(tiles_m * all_heads):
                    break
                row, head, batch = place(tile, tiles_m, heads, all_heads, together)
                sq, skv, low, high, q_start, _ = extents(batch, all_sq, all_skv, all_low, all_high, q_starts, kv_starts)
                first, end = blocks(row, sq, skv, low, high)
                row = uint32(row + mine * uint32(GROUP_ROWS))
                first_full, end_full = full_range(row, first, end, skv, low, high)
                largest[0], largest[1] = float32(NOTHING), float32(NOTHING)
                total[0], total[1] = float32(0), float32(0)
                block = end
                while block > first:
                    unroll(1)
                    started = block < end
                    block = uint32(block - uint32(1))
                    stage, phase = ring(use, stages)
                    use = uint32(use + uint32(1))
                    ptx.mbarrier_wait_parity(smem.k_full[stage], phase)
                    scores(s, q_tile, ptx.shared_address(smem.k[stage]))
                    wait_scores(s, 0)
                    release(smem.k_empty[stage], thread)
                    if soft_cap:
                        cap(s, inner)
                    if block < first_full or block >= end_full:
                        hide(s, uint32(row + lane_row), uint32(block * uint32(keys) + lane_key), skv, low, high)
                    weigh(s, factor, largest, total, shrink)
                    for i in range(p_elements):
                        unroll()
                        p[i] = ptx.mov_b32(pack(s[2 * i], s[2 * i + 1]))
                    for i in range(o_elements):
                        unroll()
                        o[i] = o[i] * shrink[i // 2 % 2] if started else float32(0)
                    ptx.mbarrier_wait_parity(smem.v_full[stage], phase)
                    weighted(o, p, ptx.shared_address(smem.v[stage]), True)
                    wait_o(o, 0)
                    release(smem.v_empty[stage], thread)
                if not o_over_q:
                    release(smem.q_empty[mine], thread)
                total[0], total[1] = quad_sum(total[0]), quad_sum(total[1])
                top, bottom = inverse(total[0]), inverse(total[1])
                finish(
                    *(o, o_map, lse, (top, bottom), (largest, total, factor)),
                    *((mine, thread), (row, head, batch), (lane_row, lane_key), (q_start, sq)),
                )
                turn = uint32(turn + uint32(1))
            if thread == 0:
                ptx.cp_async_bulk_wait_group_read(0)

    return attention_warpgroups


@functools.cache
def make_overlapped(
    head_dim: int,
    dtype: str,
    kind: Kind,
    soft_cap: bool = False,
    consumers: int = 2,
    keys: int = 128,
    stages: int = 2,
    o_over_q: bool = False,
    ping_pong: bool = False,
    packed: bool = False,
    cluster: int = 1,
) -> Kernel:
    """Steps 7 to 9: the next block's scores are started before this one's product, so that softmax has one beside it.

    With `ping_pong` two warpgroups also take turns in starting: one's products run beside the other's softmax. The
    blocks of a `cluster`, which have tiles beside each other, fetch K and V for each other.
    Parameters are those of `make_warpgroups`'.

    Raises:
        ValueError: a cluster whose blocks do not see the same keys, or among which a row's columns are not divided.
    """
    boxes = -(-head_dim // BOX_COLUMNS)
    if cluster > 1 and (packed or kind.left or kind.right or boxes % cluster):
        raise ValueError(
            f"cluster {cluster}: its blocks need the same keys, all of sequences of one length, and fetch boxes of "
            f"{BOX_COLUMNS} columns in turn; head_dim {head_dim} has {boxes}; take cluster=1"
        )
    score_elements, o_elements, p_elements = keys // 2, head_dim // 2, keys // 4
    fewer, more = REGISTERS[consumers]
    ping_pong = ping_pong and consumers == 2
    pair = 2 * WARPGROUP
    scores, weighted = make_scores(head_dim, keys, dtype), make_weighted(head_dim, keys, dtype)
    # The limits are those of the block's tile, not of the warpgroup's part: ptxas must see that they are uniform, or it
    # takes the loops for places where a warpgroup's threads part, and lets no wgmma run across them.
    masks = make_tile_masks(kind, GROUP_ROWS * consumers, keys)
    full_range = masks.full_range
    left = kind.left
    cap, hide, weigh = make_softmax(keys, masks)
    pack = make_pack(dtype)
    wait_scores = getattr(ptx, f"wgmma_wait_group_m64n{keys}_f32")
    wait_o = getattr(ptx, f"wgmma_wait_group_m64n{head_dim}_f32")
    tile_functions = make_tile(head_dim, dtype, kind, consumers, keys, packed)
    place, blocks = tile_functions.place, tile_functions.blocks
    smem = _plan(boxes, dtype, consumers, keys, stages, o_over_q)
    initialise, produce, next_tile = make_supply(tile_functions, smem, boxes, consumers, keys, stages, packed, cluster)
    release, release_keys, meet = make_release(), make_release(cluster), make_meet(cluster)
    extents = make_sequences(packed).extents
    finish = _make_finish(tile_functions.store, smem, packed, o_over_q)

    def make_advance(hidden: bool) -> Callable:
        @cuda.jit(device=True, forceinline=True)
        def advance(s, o, p, largest, total, shrink, q_tile, whose, use, started, where, limits, scale):
            (mine, thread), (row, key), (skv, low, high), (factor, inner) = whose, where, limits, scale
            stage, phase = ring(use, stages)
            following, next_phase = ring(uint32(use + uint32(1)), stages)
            ptx.mbarrier_wait_parity(smem.k_full[following], next_phase)
            if ping_pong:
                ptx.bar_sync(uint32(uint32(1) + mine), pair)
            scores(s, q_tile, ptx.shared_address(smem.k[following]))
            ptx.mbarrier_wait_parity(smem.v_full[stage], phase)
            weighted(o, p, ptx.shared_address(smem.v[stage]), started)
            if ping_pong:
                ptx.bar_arrive(uint32(uint32(2) - mine), pair)
            wait_scores(s, 1)
            release_keys(smem.k_empty[following], thread)
            if soft_cap:
                cap(s, inner)
            if hidden:
                hide(s, row, key, skv, low, high)
            weigh(s, factor, largest, total, shrink)
            wait_o(o, 0)
            release_keys(smem.v_empty[stage], thread)
            for i in range(p_elements):  # not before the product that reads them is done
                unroll()
                p[i] = ptx.mov_b32(pack(s[2 * i], s[2 * i + 1]))
            for i in range(o_elements):
                unroll()
                o[i] *= shrink[i // 2 % 2]

        return advance

    advance, advance_hidden = make_advance(False), make_advance(True)

    @kernel(threads=WARPGROUP * (consumers + 1), shared=smem, cluster=cluster)
    def attention_overlapped(
        q_map,
        k_map,
        v_map,
        o_map,
        lse,
        counter,
        q_starts,
        kv_starts,
        all_sq,
        all_skv,
        all_low,
        all_high,
        tiles_m,
        heads,
        all_heads,
        together,
        group,
        factor,
        inner,
    ):
        thread = uint32(cuda.threadIdx.x)
        if thread == 0:
            initialise()
        meet()
        if thread < WARPGROUP:
            ptx.setmaxnreg_dec(fewer)
            if thread == 0:
                produce(
                    *(q_map, k_map, v_map, counter, q_starts, kv_starts, all_sq, all_skv, all_low, all_high),
                    *(tiles_m, heads, all_heads, together, group),
                )
        else:
            ptx.setmaxnreg_inc(more)
            mine = consumer_number(thread, consumers)
            thread = uint32(thread % uint32(WARPGROUP))
            lane_row = uint32(thread // uint32(32) * uint32(16) + thread % uint32(32) // uint32(4))
            lane_key = uint32(thread % uint32(4) * uint32(2))
            s, o = cuda.local.array(score_elements, float32), cuda.local.array(o_elements, float32)
            p = cuda.local.array(p_elements, uint32)
            largest, total = cuda.local.array(2, float32), cuda.local.array(2, float32)
            shrink = cuda.local.array(2, float32)
            q_tile = ptx.shared_address(smem.q[mine])
            use, turn = uint32(0), uint32(0)
            if ping_pong and mine == 1:
                ptx.bar_arrive(1, pair)  # the first warpgroup begins
            while True:
                tile = next_tile(mine, turn)
                if tile >= uint32(tiles_m * all_heads):
                    break
                row, head, batch = place(tile, tiles_m, heads, all_heads, together)
                sq, skv, low, high, q_start, _ = extents(batch, all_sq, all_skv, all_low, all_high, q_starts, kv_starts)
                first, block = blocks(row, sq, skv, low, high)
                first_full, end_full = full_range(row, first, block, skv, low, high)
                row = uint32(row + mine * uint32(GROUP_ROWS))
                row_of_thread = uint32(row + lane_row)
                whose, limits, scale = (mine, thread), (skv, low, high), (factor, inner)
                where = (row_of_thread, lane_key)

                # The last block of keys: scores and weights, with nothing beside them.
                block = uint32(block - uint32(1))
                stage, phase = ring(use, stages)
                ptx.mbarrier_wait_parity(smem.k_full[stage], phase)
                scores(s, q_tile, ptx.shared_address(smem.k[stage]))
                wait_scores(s, 0)
                release_keys(smem.k_empty[stage], thread)
                if soft_cap:
                    cap(s, inner)
                hide(s, row_of_thread, uint32(block * uint32(keys) + lane_key), skv, low, high)
                largest[0], largest[1] = float32(NOTHING), float32(NOTHING)
                total[0], total[1] = float32(0), float32(0)
                weigh(s, factor, largest, total, shrink)
                for i in range(p_elements):
                    unroll()
                    p[i] = ptx.mov_b32(pack(s[2 * i], s[2 * i + 1]))
                started = False
                while uniform(block > end_full):
                    unroll(1)
                    block = uint32(block - uint32(1))
                    where = (row_of_thread, uint32(block * uint32(keys) + lane_key))
                    advance_hidden(s, o, p, largest, total, shrink, q_tile, whose, use, started, where, limits, scale)
                    use, started = uint32(use + uint32(1)), True
                while uniform(block > first_full):
                    unroll(1)
                    block = uint32(block - uint32(1))
                    advance(s, o, p, largest, total, shrink, q_tile, whose, use, started, where, limits, scale)
                    use, started = uint32(use + uint32(1)), True
                if left:
                    while uniform(block > first):
                        unroll(1)
                        block = uint32(block - uint32(1))
                        where = (row_of_thread, uint32(block * uint32(keys) + lane_key))
                        advance_hidden(
                            s, o, p, largest, total, shrink, q_tile, whose, use, started, where, limits, scale
                        )
                        use, started = uint32(use + uint32(1)), True
                stage, phase = ring(use, stages)
                if not o_over_q:
                    release(smem.q_empty[mine], thread)
                ptx.mbarrier_wait_parity(smem.v_full[stage], phase)
                weighted(o, p, ptx.shared_address(smem.v[stage]), started)
                total[0], total[1] = quad_sum(total[0]), quad_sum(total[1])
                top, bottom = inverse(total[0]), inverse(total[1])
                wait_o(o, 0)
                release_keys(smem.v_empty[stage], thread)
                finish(
                    *(o, o_map, lse, (top, bottom), (largest, total, factor)),
                    *((mine, thread), (row, head, batch), (lane_row, lane_key), (q_start, sq)),
                )
                use = uint32(use + uint32(1))
                turn = uint32(turn + uint32(1))
            if ping_pong and mine == 0:
                ptx.bar_sync(1, pair)  # the second one's last arrival
            if thread == 0:
                ptx.cp_async_bulk_wait_group_read(0)
        if cluster > 1:
            meet()  # a block's shared memory outlives what the others send there

    return attention_overlapped

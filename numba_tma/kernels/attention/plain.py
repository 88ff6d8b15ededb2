"""Steps 1 and 2: plain Numba, first with all scores in global memory, then with none of them.

Step 1 is the definition, a kernel a line: S = scale Q Kᵀ, P = softmax(S), O = P V. S has Sq · Skv numbers a head, which
are written once, read three times and written again on the way.

Step 2 never has more than a tile of S. For a tile of queries it walks along the keys, and keeps of all that it has seen
the maximum and the sum of each row, and O as if these were all the keys. When a block of keys brings a larger maximum,
sum and O shrink by the ratio of the exponentials: so a row's numbers are right after each block. Sources: Milakov and
Gimelshein, "Online normalizer calculation for softmax"; Dao and others, "FlashAttention".
"""

from __future__ import annotations

import functools

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from ... import dtypes, ptx
from ...launch import Kernel, kernel
from ...unroll import unroll
from .masks import Kind, make_tile_masks
from .softmax import NOTHING, capped, inverse, log_sum_exp, origin

# ---------------------------------------------------------------------------------------------------------------------
# Step 1: three kernels.

TILE = (32, 8)  # threads along a row, and rows, of S and of O
SOFTMAX_ROWS = 4  # rows, a warp each, in a block of the softmax


@functools.cache
def make_scores(kind: Kind, soft_cap: bool) -> Kernel:
    """attention_scores(q, k, s, group, low, high, factor, inner): the exponents of 2, a thread each."""
    masks = make_tile_masks(kind, 1, 1)

    @kernel(threads=TILE)
    def attention_scores(q, k, s, group, low, high, factor, inner):
        heads = uint32(s.shape[1])
        key = uint32(cuda.blockIdx.x * uint32(TILE[0]) + cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.y * uint32(TILE[1]) + cuda.threadIdx.y)
        batch, head = uint32(cuda.blockIdx.z) // heads, uint32(cuda.blockIdx.z) % heads
        kv_head = uint32(head // group)
        if row < s.shape[2] and key < s.shape[3]:
            x = float32(0)
            for d in range(uint32(q.shape[3])):
                x += float32(q[batch, row, head, d]) * float32(k[batch, key, kv_head, d])
            if soft_cap:
                x = capped(x, inner)
            first, end = masks.row_range(row, s.shape[3], low, high)
            s[batch, head, row, key] = x * factor if masks.sees(int32(key), first, end) else float32(NOTHING)

    return attention_scores


@functools.cache
def make_softmax_rows() -> Kernel:
    """attention_softmax(s, lse): each row of exponents becomes weights, by a warp."""

    @cuda.jit(device=True, forceinline=True)
    def warp_sum(x):
        for lanes in (16, 8, 4, 2, 1):
            x += cuda.shfl_xor_sync(0xFFFFFFFF, x, lanes)
        return x

    @cuda.jit(device=True, forceinline=True)
    def warp_max(x):
        for lanes in (16, 8, 4, 2, 1):
            x = cuda.libdevice.fmaxf(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, lanes))
        return x

    @kernel(threads=(32, SOFTMAX_ROWS))
    def attention_softmax(s, lse):
        lane = uint32(cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.x * uint32(SOFTMAX_ROWS) + cuda.threadIdx.y)
        head, batch = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        if row < s.shape[2]:
            largest, total = float32(NOTHING), float32(0)
            for key in range(lane, uint32(s.shape[3]), 32):
                largest = cuda.libdevice.fmaxf(largest, s[batch, head, row, key])
            largest = warp_max(largest)
            zero = origin(largest, float32(1))
            for key in range(lane, uint32(s.shape[3]), 32):
                total += ptx.ex2_approx_ftz_f32(s[batch, head, row, key] - zero)
            total = warp_sum(total)
            scale = inverse(total)
            for key in range(lane, uint32(s.shape[3]), 32):
                s[batch, head, row, key] = ptx.ex2_approx_ftz_f32(s[batch, head, row, key] - zero) * scale
            if lane == 0:
                lse[batch, head, row] = log_sum_exp(largest, total, float32(1))

    return attention_softmax


@functools.cache
def make_product() -> Kernel:
    """attention_product(p, v, o, group): O = P V, a thread an element."""

    @kernel(threads=TILE)
    def attention_product(p, v, o, group):
        heads = uint32(p.shape[1])
        column = uint32(cuda.blockIdx.x * uint32(TILE[0]) + cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.y * uint32(TILE[1]) + cuda.threadIdx.y)
        batch, head = uint32(cuda.blockIdx.z) // heads, uint32(cuda.blockIdx.z) % heads
        kv_head = uint32(head // group)
        if row < o.shape[1] and column < o.shape[3]:
            total = float32(0)
            for key in range(uint32(p.shape[3])):
                total += p[batch, head, row, key] * float32(v[batch, key, kv_head, column])
            o[batch, row, head, column] = total

    return attention_product


# ---------------------------------------------------------------------------------------------------------------------
# Step 2: one kernel.

KEYS = 64  # of a block
WARPS = 4
THREADS = 32 * WARPS  # 8 x 16: each has 8 rows, or 4, and of S 4 columns
_PADDING = 4  # behind 64 rows of Q or K, stored column by column, which a warp writes two to a bank
V_KEYS = 8  # keys of V in shared memory at a time
_GROUP = 4  # neighbours in a row: a vector of 16 bytes
_APART = 32  # rows from a thread's upper four to its lower four


def online_rows(head_dim: int) -> int:
    """Queries of a tile, as many as leave room in registers for their O."""
    return 64 if head_dim <= 128 else 32


@functools.cache
def make_online(dtype: str, head_dim: int, kind: Kind, soft_cap: bool) -> Kernel:
    """attention_online(q, k, v, o, lse, group, low, high, factor, inner): a block computes `online_rows` rows of O.

    As in a matrix product, tiles lie in shared memory as float32: pieces of Q and K for the scores, of V for the second
    product, each in two buffers, so that the next is on its way from global memory through registers. A thread has 8
    rows, half of them 32 rows below the others, and of these a sixteenth of the columns (beyond 128 columns of O, 4
    rows). The weights go through shared memory to the 16 threads that have the same rows, which are half a warp.
    """
    element = dtypes.lookup(dtype).numba_type
    rows = online_rows(head_dim)
    padded_rows, padded_keys = rows + _PADDING, KEYS + _PADDING
    own = rows // 8  # rows of a thread
    groups = rows // _GROUP
    s_size = 4 * own
    columns = -(-head_dim // 16) * 16
    mine = columns // 16  # columns of O that a thread has, in vectors of `width`
    outputs = own * mine
    width = 4 if mine % 4 == 0 else 2 if mine % 2 == 0 else 1
    depth = 16 if columns <= 128 else 8  # columns of Q and K in shared memory at a time; all in all it is 48 KB
    pieces = columns // depth
    q_loads, k_loads, v_loads = rows * depth // THREADS, KEYS * depth // THREADS, -(-columns // 32)
    v_held_size = v_loads * V_KEYS // WARPS
    masks = make_tile_masks(kind, rows, KEYS)

    # Constants are added to 64-bit indices: a sum of 32-bit ones might wrap around, and each would need a product.

    @cuda.jit(device=True, forceinline=True)
    def load(held, loads, matrix, batch, head, first_row, piece):
        """A piece of Q or K, zeros outside: neighbouring threads along a row."""
        thread = uint32(cuda.threadIdx.x)
        row, d = uint32(first_row + thread // uint32(depth)), uint32(piece * uint32(depth) + thread % uint32(depth))
        left = int32(int32(matrix.shape[1]) - int32(row)) if d < uint32(matrix.shape[3]) else int32(0)
        for i in range(loads):
            unroll()
            down = i * (THREADS // depth)
            inside = int32(down) < left
            held[i] = matrix[batch, uint64(row) + uint64(down), head, d] if inside else element(0)

    @cuda.jit(device=True, forceinline=True)
    def store(held, loads, tile, stage):
        thread = uint32(cuda.threadIdx.x)
        for i in range(loads):
            unroll()
            row = uint32(thread // uint32(depth) + uint32(i * (THREADS // depth)))
            tile[stage, thread % uint32(depth), row] = float32(held[i])

    @cuda.jit(device=True, forceinline=True)
    def load_v(held, v, batch, head, first_key):
        """Eight rows of V, a warp each."""
        thread = uint32(cuda.threadIdx.x)
        lane, key = uint32(thread % uint32(32)), uint32(first_key + thread // uint32(32))
        left, ds = int32(int32(v.shape[1]) - int32(key)), int32(int32(v.shape[3]) - int32(lane))
        for i in range(V_KEYS // WARPS):
            unroll()
            for j in range(v_loads):
                unroll()
                inside = int32(WARPS * i) < left and int32(32 * j) < ds
                d = uint64(lane) + uint64(32 * j)
                x = v[batch, uint64(key) + uint64(WARPS * i), head, d] if inside else element(0)
                held[v_loads * i + j] = x

    @cuda.jit(device=True, forceinline=True)
    def store_v(held, tile, stage):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        for i in range(V_KEYS // WARPS):
            unroll()
            for j in range(v_loads):
                unroll()
                d = uint32(lane + uint32(32 * j))
                if d < columns:
                    tile[stage, warp + uint32(WARPS * i), d] = float32(held[v_loads * i + j])

    @cuda.jit(device=True, forceinline=True)
    def multiply_scores(s, q_tile, k_tile, stage, d, group, column):
        of_q, of_k = cuda.local.array(own, float32), cuda.local.array(4, float32)
        for i in range(own):
            of_q[i] = q_tile[stage, d, uint32(_GROUP) * group + uint32(i % _GROUP + i // _GROUP * _APART)]
        for j in range(4):
            of_k[j] = k_tile[stage, d, uint32(_GROUP) * column + uint32(j)]
        for i in range(own):
            for j in range(4):
                s[4 * i + j] += of_q[i] * of_k[j]

    @cuda.jit(device=True, forceinline=True)
    def hide(s, first_row, first_key, skv, low, high):
        for i in range(own):
            unroll()
            row = uint32(first_row + uint32(i % _GROUP + i // _GROUP * _APART))
            first, end = masks.row_range(row, skv, low, high)
            for j in range(4):
                unroll()
                if not masks.sees(int32(first_key + uint32(j)), first, end):
                    s[4 * i + j] = float32(NOTHING)

    @cuda.jit(device=True, forceinline=True)
    def weigh(s, o, factor, largest, total):
        """Scores become weights; what was made with the old maxima shrinks."""
        for i in range(own):
            unroll()
            most = largest[i]
            for j in range(4):
                unroll()
                most = cuda.libdevice.fmaxf(most, s[4 * i + j])
            for lanes in (8, 4, 2, 1):
                most = cuda.libdevice.fmaxf(most, cuda.shfl_xor_sync(0xFFFFFFFF, most, lanes))
            zero = origin(most, factor)
            shrink = ptx.ex2_approx_ftz_f32(largest[i] * factor - zero)
            largest[i] = most
            total[i] *= shrink
            for j in range(4):
                unroll()
                s[4 * i + j] = ptx.ex2_approx_ftz_f32(s[4 * i + j] * factor - zero)
                total[i] += s[4 * i + j]
            for j in range(mine):
                unroll()
                o[mine * i + j] *= shrink

    @cuda.jit(device=True, forceinline=True)
    def store_weights(s, p_tile, group, column):
        """Vectors of four rows, in places exchanged by the key, so that a warp's are in different banks."""
        for part in range(own // _GROUP):
            unroll()
            place = uint32(((group + uint32(8 * part)) ^ (column % uint32(groups))) * uint32(_GROUP))
            for j in range(4):
                unroll()
                for i in range(_GROUP):
                    p_tile[uint32(_GROUP) * column + uint32(j), place + uint32(i)] = s[4 * (_GROUP * part + i) + j]

    @cuda.jit(device=True, forceinline=True)
    def multiply_values(o, p_tile, v_tile, stage, key, within, group, column):
        """A key's weights times its row of V, which is number `within` of the piece."""
        weights, values = cuda.local.array(own, float32), cuda.local.array(mine, float32)
        exchanged = key // uint32(_GROUP) % uint32(groups)
        for part in range(own // _GROUP):
            place = uint32(((group + uint32(8 * part)) ^ exchanged) * uint32(_GROUP))
            for i in range(_GROUP):
                weights[_GROUP * part + i] = p_tile[key, place + uint32(i)]
        for j in range(mine):
            values[j] = v_tile[stage, within, uint32(width) * column + uint32(j % width + j // width * 16 * width)]
        for i in range(own):
            for j in range(mine):
                o[mine * i + j] += weights[i] * values[j]

    @kernel(threads=THREADS)
    def attention_online(q, k, v, o, lse, group, low, high, factor, inner):
        q_tile = cuda.shared.array((2, depth, padded_rows), float32, 16)
        k_tile = cuda.shared.array((2, depth, padded_keys), float32, 16)
        v_tile = cuda.shared.array((2, V_KEYS, columns), float32, 16)
        p_tile = cuda.shared.array((KEYS, rows), float32, 16)
        q_held, k_held = cuda.local.array(q_loads, element), cuda.local.array(k_loads, element)
        v_held = cuda.local.array(v_held_size, element)
        s, out = cuda.local.array(s_size, float32), cuda.local.array(outputs, float32)
        largest, total = cuda.local.array(own, float32), cuda.local.array(own, float32)
        for i in range(own):
            unroll()
            largest[i], total[i] = float32(NOTHING), float32(0)
        for i in range(outputs):
            unroll()
            out[i] = float32(0)

        thread = uint32(cuda.threadIdx.x)
        row_group, column = uint32(thread // uint32(16)), uint32(thread % uint32(16))
        head, batch = uint32(cuda.blockIdx.y), uint32(cuda.blockIdx.z)
        kv_head = uint32(head // group)
        sq, skv = uint32(q.shape[1]), uint32(k.shape[1])
        first_row = uint32(uint32(cuda.blockIdx.x) * uint32(rows))
        row, own_key = uint32(first_row + row_group * uint32(_GROUP)), uint32(column * uint32(_GROUP))
        first, end = masks.block_range(first_row, sq, skv, low, high)
        first_full, end_full = masks.full_range(first_row, first, end, skv, low, high)

        load(q_held, q_loads, q, batch, head, first_row, uint32(0))
        load(k_held, k_loads, k, batch, kv_head, uint32(first * uint32(KEYS)), uint32(0))
        for block in range(first, end):
            first_key = uint32(uint32(block) * uint32(KEYS))
            for i in range(s_size):
                unroll()
                s[i] = float32(0)
            for piece in range(pieces):
                unroll(1)
                stage = uint32(piece) % uint32(2)
                store(q_held, q_loads, q_tile, stage)
                store(k_held, k_loads, k_tile, stage)
                cuda.syncthreads()
                following = uint32(uint32(piece) + uint32(1))
                if following < pieces:
                    load(q_held, q_loads, q, batch, head, first_row, following)
                    load(k_held, k_loads, k, batch, kv_head, first_key, following)
                else:
                    load_v(v_held, v, batch, kv_head, first_key)
                for d in range(0, depth, 2):
                    multiply_scores(s, q_tile, k_tile, stage, uint32(d), row_group, column)
                    multiply_scores(s, q_tile, k_tile, stage, uint32(d + 1), row_group, column)
            if soft_cap:
                for i in range(s_size):
                    unroll()
                    s[i] = capped(s[i], inner)
            if block < first_full or block >= end_full:
                hide(s, row, uint32(first_key + own_key), skv, low, high)
            weigh(s, out, factor, largest, total)
            # A half warp's weights are its own, and barriers above and below part their uses. This one is for ptxas: it
            # would make calls of the shuffles before it for sm_80, and spill what is in registers.
            cuda.syncthreads()
            store_weights(s, p_tile, row_group, column)
            for piece in range(KEYS // V_KEYS):
                unroll(1)
                stage, within = uint32(piece) % uint32(2), uint32(uint32(piece) * uint32(V_KEYS))
                store_v(v_held, v_tile, stage)
                cuda.syncthreads()
                following = uint32(within + uint32(V_KEYS))
                if following < KEYS:
                    load_v(v_held, v, batch, kv_head, uint32(first_key + following))
                else:
                    load(q_held, q_loads, q, batch, head, first_row, uint32(0))
                    load(k_held, k_loads, k, batch, kv_head, uint32(first_key + uint32(KEYS)), uint32(0))
                for i in range(0, V_KEYS, 2):
                    key = uint32(within + uint32(i))
                    multiply_values(out, p_tile, v_tile, stage, key, uint32(i), row_group, column)
                    multiply_values(out, p_tile, v_tile, stage, key + uint32(1), uint32(i + 1), row_group, column)

        for i in range(own):
            unroll()
            for lanes in (8, 4, 2, 1):
                total[i] += cuda.shfl_xor_sync(0xFFFFFFFF, total[i], lanes)
            scale = inverse(total[i])
            down = i % _GROUP + i // _GROUP * _APART
            if int32(down) < int32(int32(sq) - int32(row)):
                y, x = uint64(row) + uint64(down), uint64(uint32(width) * column)
                left = int32(int32(o.shape[3]) - int32(x))
                for j in range(mine):
                    unroll()
                    right = j % width + j // width * 16 * width
                    if int32(right) < left:
                        o[batch, y, head, x + uint64(right)] = out[mine * i + j] * scale
                if column == 0:
                    lse[batch, head, y] = log_sum_exp(largest[i], total[i], factor)

    return attention_online

"""Decoding: a few queries against a long cache of keys and values, which is split among blocks.

With a query or a few there is next to no arithmetic: each element of the cache is used in `group` · Sq multiplications,
and the memory's rate is the limit. So all that counts is that enough bytes are on their way at any time, on all SMs.

* The queries of all heads that share one of keys and values are the rows of one tile: row i · group + g is query i of
  head g of the group. The cache is read once for all of them. mma.sync's 16 rows are filled with zeros where need be.
* A sequence's keys are dealt out to blocks, `splits` of them (flash decoding), and a block's among its warps, tile by
  tile. Each warp works by itself: it has its own ring of tiles, its own barriers, its own softmax, and its lane 0 asks
  for the next tile as soon as the warp has read one. No warp waits for another before the end.
* Pages: the cache's map has dimensions for the page and the row in it, so that a page's number is a coordinate. The
  lanes of a warp look the pages of a tile up in the table, one tile before they are asked for.
* What a warp has in the end is a sum of weighted values, its largest exponent and its total. The warps' are merged in
  shared memory. The block's is the result if the sequence was not split; otherwise it goes to global memory, and the
  block that comes last, by a counter, merges them in the order of the keys.

Rows of the cache behind a sequence's end may hold anything, NaN too: their scores are hidden, and their values are set
to zero in shared memory, as zero times NaN would not be zero. Pages behind it are not looked up: the copy engine is
sent outside the tensor, where everything is zero.

PTX ISA: "cp.async.bulk.tensor", "mma", "Memory Consistency Model: Release and Acquire Patterns".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait, ring
from ...shared import Barriers, Buffer, Shared, Tiles
from ...unroll import unroll
from ..gemm.epilogue import make_pack
from .masks import Kind, make_tile_masks
from .operands import BOX
from .softmax import NOTHING, inverse, log_sum_exp, make_softmax, origin, quad_sum
from .warp_mma import WarpTiling, make_load_all_q, make_products

_ROW_BYTES = 128
_PAD = 8  # floats behind each row of O in shared memory, so that a warp's rows lie in different banks
_VECTOR = 4
_AT_ONCE = 8  # parts of a split sequence, that a thread reads before it adds them up


@dataclass(frozen=True)
class Tiling(WarpTiling):
    """The tiling of a block whose warps all have the same queries, 16 or 32, and each its own rings of K and V.

    Raises:
        ValueError: its numbers do not fit each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows not in (16, 32):
            raise ValueError(f"{self.rows} rows: 16 or 32 expected, one or two fragments of the tensor cores")
        if self.keys not in (16, 32, 64, 128):
            raise ValueError(f"{self.keys} keys: 16, 32, 64 or 128 expected")
        if self.warps not in (1, 2, 4, 8):
            raise ValueError(f"{self.warps} warps: 1, 2, 4 or 8 expected")
        if self.stages < 1:
            raise ValueError(f"stages {self.stages}: take 1 or more")
        if self.rows * self.row_floats * 4 > self.ring_bytes:
            raise ValueError(
                f"{self.stages} stages of {self.keys} keys: a warp's ring of {self.ring_bytes} B must have room for O "
                f"in the end, {self.rows * self.row_floats * 4} B; take more stages or larger tiles"
            )

    @property
    def fragments(self) -> int:
        """Of 16 rows, that each warp has."""
        return self.rows // 16

    @property
    def rows_apart(self) -> int:
        """From one warp's first row to the next one's: they have the same."""
        return 0

    @property
    def columns(self) -> int:
        """Of O, in whole steps."""
        return 16 * self.steps

    @property
    def row_floats(self) -> int:
        """From one row of O in shared memory to the next."""
        return self.columns + _PAD

    @property
    def ring_bytes(self) -> int:
        """Of a warp's tiles of K and V."""
        return 2 * self.stages * self.boxes * self.keys * _ROW_BYTES

    def shared(self, dtype: str) -> Shared:
        """Q; each warp's tiles of K and V in turn, a box behind the other; their barriers; what merging takes."""
        slots = 2 * self.stages * self.warps
        return Shared(
            q=Tiles(self.boxes, (self.rows, BOX), dtype, swizzle="128B"),
            kv=Tiles(slots * self.boxes, (self.keys, BOX), dtype, swizzle="128B"),
            full=Barriers(slots),
            largest=Buffer((self.warps, self.rows), "float32"),
            total=Buffer((self.warps, self.rows), "float32"),
            last=Buffer((1,), "uint32"),
        )


@dataclass(frozen=True)
class Cache:
    """What a kernel knows of the cache: rows that one copy takes, and whether it is in pages."""

    box_rows: int
    paged: bool

    @staticmethod
    def of(keys: int, page_size: int) -> Cache:
        """For tiles of so many keys, and pages of as many, or of 0 where there are none.

        Raises:
            ValueError: pages that are no multiple of 8 keys, a swizzle's pattern.
        """
        if page_size % 8:
            raise ValueError(f"pages of {page_size} keys: a multiple of 8 expected, the rows of a swizzle's pattern")
        return Cache(gcd(keys, page_size), page_size > 0)


def _make_fetch(smem: Shared, tiling: Tiling, cache: Cache) -> tuple[Callable, Callable]:
    """The device functions that find a tile and fetch it:

    look_up(page_table, batch, pages, page_size, tile, end, length): pages of a tile, one a lane, which are outside the
    tensor where the sequence has ended. Without pages it is the sequence.
    fetch(kv_map, slot, tile, page_size, kv_head, page): a tile of K or V, by lane 0.
    """
    keys, boxes = tiling.keys, tiling.boxes
    box_rows, paged, parts = cache.box_rows, cache.paged, keys // cache.box_rows
    nbytes, box_bytes = boxes * keys * _ROW_BYTES, cache.box_rows * _ROW_BYTES

    @cuda.jit(device=True, forceinline=True)
    def look_up(page_table, batch, pages, page_size, tile, end, length):
        if not paged:
            return int32(batch)
        page = int32(pages)
        row = uint32(tile * uint32(keys) + uint32(cuda.threadIdx.x) % uint32(32) * uint32(box_rows))
        if tile < end and uint32(cuda.threadIdx.x) % uint32(32) < uint32(parts) and row < length:
            page = page_table[batch, uint32(row // page_size)]
        return page

    @cuda.jit(device=True, forceinline=True)
    def fetch(kv_map, slot, tile, page_size, kv_head, page):
        leader = uint32(cuda.threadIdx.x) % uint32(32) == 0
        bar = smem.full[slot]
        if leader:
            ptx.mbarrier_arrive_expect_tx(bar, nbytes)
        for part in range(parts):
            unroll()
            row = uint32(tile * uint32(keys) + uint32(part * box_rows))
            of_part = page
            if paged:
                row = uint32(row % page_size)
                of_part = cuda.shfl_sync(0xFFFFFFFF, page, part)
            if leader:
                for box in range(boxes):
                    unroll()
                    tile_start = ptx.shared_address(smem.kv[uint32(slot * uint32(boxes)) + uint32(box)])
                    place, column = uint32(tile_start + uint32(part * box_bytes)), uint32(box * BOX)
                    ptx.cp_async_bulk_tensor_4d_shared_global(place, kv_map, column, kv_head, row, of_part, bar)

    return look_up, fetch


def _make_load_q(smem: Shared, tiling: Tiling, group: int) -> Callable:
    """load_q(q, batch, kv_head, first_row, all_rows): the tile of queries to shared memory, by all threads."""
    rows, threads, steps, head_dim = tiling.rows, tiling.threads, tiling.steps, tiling.head_dim

    @cuda.jit(device=True, forceinline=True)
    def load_q(q, batch, kv_head, first_row, all_rows):
        start = ptx.global_address(q) + uint64(batch) * uint64(q.strides[0])
        vectors = uint32(2 * steps)  # of 8 elements, in a row
        for i in range(uint32(cuda.threadIdx.x), uint32(rows * 2 * steps), uint32(threads)):
            unroll(1)
            row, column = uint32(uint32(i) // vectors), uint32(uint32(i) % vectors * uint32(8))
            at = uint32(first_row + row)
            x0, x1, x2, x3 = uint32(0), uint32(0), uint32(0), uint32(0)
            if at < all_rows and column < uint32(head_dim):
                query, head = uint32(at // uint32(group)), uint32(kv_head * uint32(group) + at % uint32(group))
                offset = uint64(query) * uint64(q.strides[1]) + uint64(head) * uint64(q.strides[2])
                x0, x1, x2, x3 = ptx.ld_global_v4_u32(start + offset + uint64(column) * uint64(2))
            place = smem.q[uint32(column // uint32(BOX))].address_of(row, uint32(column % uint32(BOX)))
            ptx.st_shared_v4_u32(place, x0, x1, x2, x3)

    return load_q


def _make_clear(smem: Shared, tiling: Tiling) -> Callable:
    """clear(slot, first, end): zeros in the rows of a tile of V before `first` and from `end` on, by a warp."""
    keys, boxes = tiling.keys, tiling.boxes

    @cuda.jit(device=True, forceinline=True)
    def clear(slot, first, end):
        lane = uint32(cuda.threadIdx.x) % uint32(32)
        zero = uint32(0)
        for box in range(boxes):
            start = ptx.shared_address(smem.kv[uint32(slot * uint32(boxes)) + uint32(box)])
            for row in range(lane // uint32(8), uint32(keys), uint32(4)):
                unroll(1)
                if int32(row) < first or int32(row) >= end:
                    place = uint32(start + uint32(uint32(row) * uint32(_ROW_BYTES)) + lane % uint32(8) * uint32(16))
                    ptx.st_shared_v4_u32(place, zero, zero, zero, zero)
        cuda.syncwarp()

    return clear


def _make_keep(smem: Shared, tiling: Tiling) -> Callable:
    """keep(o, largest, total, factor): a warp's part of O over its ring, with each row's exponent and sum."""
    fragments, eighths, stride = tiling.fragments, 2 * tiling.steps, 4 * tiling.row_floats
    ring_tiles = 2 * tiling.stages * tiling.boxes

    @cuda.jit(device=True, forceinline=True)
    def keep(o, largest, total, factor):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        start = ptx.shared_address(smem.kv[uint32(warp * uint32(ring_tiles))])
        cuda.syncwarp()  # the last tiles are read
        for i in range(2 * fragments):
            unroll()
            row = uint32(lane // uint32(4) + uint32(8 * i))
            sum_ = quad_sum(total[i])
            if lane % uint32(4) == 0:
                smem.largest[warp, row] = largest[i] * factor
                smem.total[warp, row] = sum_
            place = uint32(start + uint32(row * uint32(stride)) + lane % uint32(4) * uint32(8))
            for j in range(eighths):
                unroll()
                r = 4 * (i // 2 * eighths + j) + 2 * (i % 2)
                ptx.st_shared_v2_f32(uint32(place + uint32(32 * j)), o[r], o[r + 1])

    return keep


def _make_finish(tiling: Tiling, group: int, dtype: str) -> Callable:
    """finish(out, lse, batch, kv_head, row, column, sums, largest, total): four columns of a row of the result."""
    pack, head_dim = make_pack(dtype), tiling.head_dim

    @cuda.jit(device=True, forceinline=True)
    def finish(out, lse, batch, kv_head, row, column, sums, largest, total):
        query, head = uint32(row // uint32(group)), uint32(kv_head * uint32(group) + row % uint32(group))
        scale = inverse(total)
        if column == 0:
            lse[batch, head, query] = log_sum_exp(largest, total, float32(1))
        if column < uint32(head_dim):
            offset = uint64(batch) * uint64(out.strides[0]) + uint64(query) * uint64(out.strides[1])
            offset += uint64(head) * uint64(out.strides[2]) + uint64(column) * uint64(2)
            low, high = pack(sums[0] * scale, sums[1] * scale), pack(sums[2] * scale, sums[3] * scale)
            ptx.st_global_v2_u32(ptx.global_address(out) + offset, low, high)

    return finish


@functools.cache
def make_split_kv(
    dtype: str, windowed: bool, several: bool, soft_cap: bool, group: int, cache: Cache, tiling: Tiling
) -> Kernel:
    """Make the kernel, attention_split_kv(q, k_map, v_map, out, lse, lengths, page_table, partial,
    largest_parts, total_parts, counters, sq, capacity, pages, page_size, row_tiles, splits, window, factor, inner).

    Args:
        dtype: of q, K, V and the result.
        windowed: whether a query sees no more than `window` keys before its own.
        several: whether a sequence has more than one query.
        soft_cap: whether the scores are bounded.
        group: heads of queries for each of keys and values.
        cache: how it lies.
        tiling: how the work is cut.

    The grid is (row_tiles x heads of K and V, splits, batch). The maps are of (batch or page, row, head, column), their
    boxes 1 x `cache.box_rows` x 1 x 64, swizzled. `partial` is (groups of blocks, splits, rows, columns) of float32,
    `largest_parts` and `total_parts` lack the columns, `counters` has a uint32 for each group of blocks, zero before
    the launch and after it.
    """
    rows, keys, warps, stages = tiling.rows, tiling.keys, tiling.warps, tiling.stages
    fragments, in_registers, columns = tiling.fragments, tiling.q_in_registers, tiling.columns
    thread_rows, q_size, s_size, o_size = tiling.registers
    threads, vectors = tiling.threads, columns // _VECTOR
    row_bytes, ring_tiles = 4 * tiling.row_floats, 2 * stages * tiling.boxes
    smem = tiling.shared(dtype)
    # Masks go by queries, of which the rows of a tile belong to so many at most.
    masks = make_tile_masks(Kind(windowed, several), (rows - 1) // group + 2, keys)
    of_query = masks.row_range

    @cuda.jit(device=True, forceinline=True)
    def row_range(row, skv, low, high):
        return of_query(uint32(row // uint32(group)), skv, low, high)

    softmax = make_softmax(keys, masks._replace(row_range=row_range), fragments)
    scores, add_weighted = make_products(smem, tiling, dtype)
    load_all_q = make_load_all_q(smem, tiling)
    look_up, fetch = _make_fetch(smem, tiling, cache)
    load_q, clear = _make_load_q(smem, tiling, group), _make_clear(smem, tiling)
    keep, finish = _make_keep(smem, tiling), _make_finish(tiling, group, dtype)
    block_range, full_range, cap, hide, weigh = (
        masks.block_range,
        masks.full_range,
        softmax.cap,
        softmax.hide,
        softmax.weigh,
    )
    eighths, values_size = 2 * tiling.steps, _VECTOR * _AT_ONCE

    @cuda.jit(device=True, forceinline=True)
    def release():
        """This warp has read a tile, which the copy engine may write again."""
        ptx.fence_proxy_async_shared_cta()
        cuda.syncwarp()

    @cuda.jit(device=True, forceinline=True)
    def merge_warps(row, column, sums):
        """Four columns of a row, summed over the warps: the row's largest exponent and total."""
        most = float32(NOTHING)
        for warp in range(warps):
            unroll()
            most = cuda.libdevice.fmaxf(most, smem.largest[warp, row])
        zero, total = origin(most, float32(1)), float32(0)
        for i in range(_VECTOR):
            unroll()
            sums[i] = float32(0)
        for warp in range(warps):
            unroll()
            weight = ptx.ex2_approx_ftz_f32(smem.largest[warp, row] - zero)
            total += weight * smem.total[warp, row]
            start = ptx.shared_address(smem.kv[uint32(warp * ring_tiles)])
            place = uint32(start + uint32(row * uint32(row_bytes)) + uint32(column * uint32(4)))
            x0, x1, x2, x3 = ptx.ld_shared_v4_f32(place)
            sums[0] += weight * x0
            sums[1] += weight * x1
            sums[2] += weight * x2
            sums[3] += weight * x3
        return most, total

    @cuda.jit(device=True, forceinline=True)
    def merge_blocks(partial, largest, totals, first, active, row, column, sums):
        """The same, summed over the blocks of a sequence, whose first part is number `first`.

        Parts are read `_AT_ONCE` at a time, the last one again where there are fewer: so many loads are under way.
        """
        values, peaks = cuda.local.array(values_size, float32), cuda.local.array(_AT_ONCE, float32)
        shares, last = cuda.local.array(_AT_ONCE, float32), uint32(active - uint32(1))
        most, total = float32(NOTHING), float32(0)
        for i in range(_VECTOR):
            unroll()
            sums[i] = float32(0)
        for begin in range(uint32(0), active, uint32(_AT_ONCE)):
            unroll(1)
            new = most
            for i in range(_AT_ONCE):
                unroll()
                part = uint32(uint32(begin) + uint32(i))
                at = uint32(first + min(part, last))
                offset = uint64(uint32(uint32(at * uint32(rows)) + row)) * uint64(columns) + uint64(column)
                r = _VECTOR * i
                values[r], values[r + 1], values[r + 2], values[r + 3] = ptx.ld_global_v4_f32(
                    ptx.global_address(partial) + offset * uint64(4)
                )
                shares[i] = totals[at, row]
                peaks[i] = largest[at, row] if part <= last else float32(NOTHING)
                new = cuda.libdevice.fmaxf(new, peaks[i])
            zero = origin(new, float32(1))
            shrink = ptx.ex2_approx_ftz_f32(most - zero)
            total *= shrink
            for j in range(_VECTOR):
                unroll()
                sums[j] *= shrink
            for i in range(_AT_ONCE):
                unroll()
                weight = ptx.ex2_approx_ftz_f32(peaks[i] - zero)
                total += weight * shares[i]
                for j in range(_VECTOR):
                    unroll()
                    sums[j] += weight * values[_VECTOR * i + j]
            most = new
        return most, total

    @kernel(threads=threads, shared=smem)
    def attention_split_kv(
        q,
        k_map,
        v_map,
        out,
        lse,
        lengths,
        page_table,
        partial,
        largest_parts,
        total_parts,
        counters,
        sq,
        capacity,
        pages,
        page_size,
        row_tiles,
        splits,
        window,
        factor,
        inner,
    ):
        s, o = cuda.local.array(s_size, float32), cuda.local.array(o_size, float32)
        a = cuda.local.array(q_size, uint32)
        largest, total = cuda.local.array(thread_rows, float32), cuda.local.array(thread_rows, float32)
        shrink, sums = cuda.local.array(thread_rows, float32), cuda.local.array(_VECTOR, float32)
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        batch, split = uint32(cuda.blockIdx.z), uint32(cuda.blockIdx.y)
        kv_head = uint32(uint32(cuda.blockIdx.x) // row_tiles)
        first_row = uint32(uint32(uint32(cuda.blockIdx.x) - kv_head * row_tiles) * uint32(rows))
        first_query, all_rows = uint32(first_row // uint32(group)), uint32(sq * uint32(group))
        if thread == 0:
            ptx.prefetch_tensormap(k_map)
            ptx.prefetch_tensormap(v_map)

        # The tiles of the sequence that this block's queries see, and of those its share, the same number a warp.
        length = uint32(min(max(int32(lengths[batch]), int32(0)), int32(capacity)))
        high = int32(int32(length) - int32(sq))
        low = int32(high - window)
        first_tile, end_tile = block_range(first_query, sq, length, low, high)
        first_full, end_full = full_range(first_query, first_tile, end_tile, length, low, high)
        count = uint32(end_tile - first_tile)
        share = uint32(uint32(count + splits - uint32(1)) // splits)
        share = uint32(uint32(max(share, uint32(1)) + uint32(warps - 1)) // uint32(warps) * uint32(warps))
        active = max(uint32(uint32(count + share - uint32(1)) // share), uint32(1))
        if split >= active:
            return
        begin = uint32(first_tile + split * share)
        end = min(uint32(begin + share), end_tile)
        tile = uint32(begin + warp)
        ahead = tile
        ring_start = uint32(warp * uint32(2 * stages))

        if lane == 0:
            for i in range(2 * stages):
                ptx.mbarrier_init(smem.full[uint32(ring_start + uint32(i))], 1)
            ptx.fence_mbarrier_init()
        cuda.syncwarp()
        page = look_up(page_table, batch, pages, page_size, ahead, end, length)
        for stage in range(stages):
            unroll(1)
            if ahead < end:
                slot = uint32(ring_start + uint32(2) * uint32(stage))
                fetch(k_map, slot, ahead, page_size, kv_head, page)
                fetch(v_map, uint32(slot + uint32(1)), ahead, page_size, kv_head, page)
            ahead = uint32(ahead + uint32(warps))
            page = look_up(page_table, batch, pages, page_size, ahead, end, length)
        load_q(q, batch, kv_head, first_row, all_rows)
        for i in range(thread_rows):
            unroll()
            largest[i], total[i] = float32(NOTHING), float32(0)
        for i in range(o_size):
            unroll()
            o[i] = float32(0)
        cuda.syncthreads()
        if in_registers:
            load_all_q(a)

        use = uint32(0)
        while tile < end:
            unroll(1)
            stage, phase = ring(use, stages)
            k_slot = uint32(ring_start + uint32(2) * stage)
            v_slot = uint32(k_slot + uint32(1))
            full = first_full <= tile and tile < end_full
            next_page = look_up(page_table, batch, pages, page_size, uint32(ahead + uint32(warps)), end, length)
            mbarrier_wait(smem.full[k_slot], phase)
            scores(s, a, k_slot)
            release()
            if ahead < end:
                fetch(k_map, k_slot, ahead, page_size, kv_head, page)
            if soft_cap:
                cap(s, inner)
            if not full:
                key = uint32(uint32(tile * uint32(keys)) + lane % uint32(4) * uint32(2))
                hide(s, uint32(first_row + lane // uint32(4)), key, length, low, high)
            weigh(s, factor, largest, total, shrink)
            for i in range(thread_rows):
                unroll()
                for j in range(eighths):
                    unroll()
                    r = 4 * (i // 2 * eighths + j) + 2 * (i % 2)
                    o[r] *= shrink[i]
                    o[r + 1] *= shrink[i]
            mbarrier_wait(smem.full[v_slot], phase)
            if not full:
                start = int32(tile * uint32(keys))
                first = int32(int32(int32(first_query) + low) - start) if windowed else int32(0)
                clear(v_slot, first, int32(int32(length) - start))
            add_weighted(o, s, v_slot)
            release()
            if ahead < end:
                fetch(v_map, v_slot, ahead, page_size, kv_head, page)
            page = next_page
            tile, ahead = uint32(tile + uint32(warps)), uint32(ahead + uint32(warps))
            use = uint32(use + uint32(1))

        keep(o, largest, total, factor)
        cuda.syncthreads()
        all_vectors = uint32(min(uint32(rows), uint32(all_rows - first_row)) * uint32(vectors))
        group_of_blocks = uint32(batch * uint32(cuda.gridDim.x) + uint32(cuda.blockIdx.x))
        first_part = uint32(group_of_blocks * splits)
        part = uint32(first_part + split)
        for i in range(thread, all_vectors, uint32(threads)):
            unroll(1)
            row = uint32(uint32(i) // uint32(vectors))
            column = uint32(uint32(uint32(i) % uint32(vectors)) * uint32(_VECTOR))
            most, sum_ = merge_warps(row, column, sums)
            if active == 1:
                finish(out, lse, batch, kv_head, uint32(first_row + row), column, sums, most, sum_)
            else:
                if column == 0:
                    largest_parts[part, row] = most
                    total_parts[part, row] = sum_
                offset = uint64(uint32(uint32(part * uint32(rows)) + row)) * uint64(columns) + uint64(column)
                at = ptx.global_address(partial) + offset * uint64(4)
                ptx.st_global_v4_f32(at, sums[0], sums[1], sums[2], sums[3])
        if active == 1:
            return
        cuda.syncthreads()
        if thread == 0:
            ptx.fence_acq_rel_gpu()
            came = cuda.atomic.add(counters, group_of_blocks, uint32(1))
            ptx.fence_acq_rel_gpu()
            smem.last[0] = uint32(came + uint32(1))
        cuda.syncthreads()
        if smem.last[0] != active:
            return
        if thread == 0:
            counters[group_of_blocks] = uint32(0)
        for i in range(thread, all_vectors, uint32(threads)):
            unroll(1)
            row = uint32(uint32(i) // uint32(vectors))
            column = uint32(uint32(uint32(i) % uint32(vectors)) * uint32(_VECTOR))
            most, sum_ = merge_blocks(partial, largest_parts, total_parts, first_part, active, row, column, sums)
            finish(out, lse, batch, kv_head, uint32(first_row + row), column, sums, most, sum_)

    return attention_split_kv

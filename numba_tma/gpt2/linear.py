"""A product of a few rows and a large weight, as each step of decoding has four a layer: y = f(x) @ weight.T + bias.

What decides. At 16 rows a weight's element, 2 bytes, is multiplied 16 times: far too few to be bound by anything but
reading the weight, all of it, once. What comes on top is latency: a kernel that first waits for its rows, then asks for
its weights and then waits for these would leave memory idle most of the time. So:

* A block has 8 columns of y (or a few times 8), and its warps divide K among them. All of a thread's share of the
  weight is asked for at once, into registers, 16 bytes an instruction.
* That does not depend on the kernel in front. It comes before `griddepcontrol.wait`: while that kernel still runs, this
  one's weights are on their way (programmatic dependent launch).
* mma.sync multiplies, with x as A (16 rows) and the weight as B (8 columns). Both take the elements of K in the same
  order, and which order does not matter for a sum: so a lane keeps the eight neighbours that one load gives it, which
  serve as two fragments.
* A layer normalisation in front, whose gain and shift the weight and the bias have taken in, needs no pass of its own:
  the product of (x - mean) · r and the weight is r · (x @ weight.T - mean · sums), with the sums of the weight's rows.
  Mean and r come of the very registers that are multiplied, and are there when the products are.
* Where there are more columns than the SMs have room for, a block goes on to others with the rows that it has. It asks
  for their weights as soon as the registers are free, before it has added up and written what it has.

PTX ISA: "mma", "Matrix Fragments for mma.m16n8k16 with floating point type", "griddepcontrol".
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from .. import ptx
from ..kernels.gemm.epilogue import make_activation
from ..launch import Kernel, kernel
from ..shared import Buffer, Shared
from ..unroll import unroll
from .vectors import VECTOR, load8_f32, pack8

ROWS = 16  # of x, that a block multiplies
_COLUMNS = 8  # of a fragment
_DEPTH = 32  # elements of K that a warp's lanes load at once, four lanes a row
_MOST_STEPS = 6
_MOST_WARPS = 16
_MOST_TILES = 4
_SMS = 132
_ALL_LANES = 0xFFFFFFFF


@dataclass(frozen=True)
class Shape:
    """How a product is cut: `depth` elements of K; `tiles` times 8 columns a block; `warps` that divide K."""

    depth: int
    tiles: int
    warps: int

    @staticmethod
    def of(columns: int, depth: int) -> Shape:
        """What suits a weight of `columns` rows and `depth` columns.

        With more columns a block, x is read less often; but there have to be blocks for all SMs, and the weights of a
        block are kept in registers.
        """
        warps = next((n for n in (8, 16) if -(-depth // (_DEPTH * n)) <= _MOST_STEPS), _MOST_WARPS)
        warps = min(warps, -(-depth // _DEPTH))
        steps = -(-depth // (_DEPTH * warps))
        tiles = 1
        while 2 * tiles * steps <= 12 and tiles < _MOST_TILES and columns // (_COLUMNS * 2 * tiles) >= _SMS:
            tiles *= 2
        return Shape(depth, tiles, warps)

    @staticmethod
    def of_head(depth: int) -> Shape:
        """What suits a vocabulary: a warp adds up 32 columns of a row, and finds the largest."""
        return Shape(depth, _MOST_TILES, Shape.of(1, depth).warps)

    @property
    def steps(self) -> int:
        """Loads of a warp along K."""
        return -(-self.depth // (_DEPTH * self.warps))

    @property
    def columns(self) -> int:
        """Of y, that a block computes at a time."""
        return _COLUMNS * self.tiles


@cuda.jit(device=True, forceinline=True)
def better(value, column, largest, where):
    """The larger of two candidates; of equal ones the first. A NaN is never taken."""
    taken = value > largest or (value == largest and column < where)
    return (value, column) if taken else (largest, where)


@cuda.jit(device=True, forceinline=True)
def key_of(value, column):
    """An integer that is the larger, the larger the float32, and of equal ones, the smaller the column."""
    bits = uint32(cuda.libdevice.float_as_int(value))
    bits = uint32(bits ^ (uint32(0xFFFFFFFF) if bits >> uint32(31) else uint32(0x80000000)))
    return uint64(bits) << uint64(32) | uint64(~uint32(column))


@functools.cache
def make_linear(
    shape: Shape,
    *,
    rows_16: bool,
    norm: float | None = None,
    x_dtype: str = "bfloat16",
    activation: str = "none",
    accumulate: bool = False,
    at_length: bool = False,
    choose: bool = False,
) -> Kernel:
    """y = activation(f(x) @ weight.T + bias) for a few rows; a block for some columns (grid.x) and ROWS rows (grid.y).

    Kernel parameters: x (any rows, K); weight (N, K) bfloat16, its rows beginning at multiples of 16 bytes; sums (N,)
    float32, of the weight's rows, looked at with `norm`; bias (N,) float32; y (rows, N or more), or (rows, positions,
    N) with `at_length`; picked (rows,) int32, which row of x is meant; lengths (rows,) int32; best (rows,) uint64;
    rows. `picked` and `lengths` are read before the kernel in front has ended: what writes them must come before that.

    Args:
        shape: how it is cut; K is a multiple of 8.
        rows_16: whether there are more than 8 rows.
        norm: f is x's rows with mean 0 and variance 1, this epsilon added to the variance. None: f is x.
        x_dtype: bfloat16, or float32, which is rounded.
        activation: as `matmul` has them.
        accumulate: y grows by the result.
        at_length: row r of the result goes to y[r, lengths[r]].
        choose: best[r] becomes the largest of itself and `key_of` row r's columns, whose lower half is the column's
            number with all bits turned over. For a shape of 32 columns.
    """
    depth, tiles, warps, steps, columns = shape.depth, shape.tiles, shape.warps, shape.steps, shape.columns
    threads = 32 * warps
    halves = 2 if rows_16 else 1
    outputs = 8 * halves * columns
    passes = -(-outputs // threads)
    weight_words, row_words = 4 * steps * tiles, 4 * steps * halves
    itemsize = 4 if x_dtype == "float32" else 2
    wide = itemsize == 4
    normalised = norm is not None
    epsilon, inverse = norm or 0.0, 1.0 / depth
    activate = make_activation(activation)
    smem = Shared(
        sums=Buffer((2 * warps, 8 * halves, columns), float32),
        first=Buffer((warps, 8 * halves), float32),
        second=Buffer((warps, 8 * halves), float32),
    )

    @cuda.jit(device=True, forceinline=True)
    def load8(address):
        """Eight elements of x as bfloat16, in four registers."""
        if wide:
            a = load8_f32(address)
            return pack8(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])
        return ptx.ld_global_v4_u32(address)

    @cuda.jit(device=True, forceinline=True)
    def load_weight(words, weight, column0, warp, lane):
        """This lane's elements of the weight's rows of a block's columns."""
        for tile in range(tiles):
            unroll()
            column = uint32(column0 + uint32(8 * tile) + lane // uint32(4))
            source = ptx.global_address(weight) + uint64(column) * uint64(2 * depth)
            for step in range(steps):
                unroll()
                k = uint32((warp * uint32(steps) + uint32(step)) * uint32(_DEPTH) + lane % uint32(4) * uint32(VECTOR))
                at = 4 * (steps * tile + step)
                words[at], words[at + 1], words[at + 2], words[at + 3] = uint32(0), uint32(0), uint32(0), uint32(0)
                if column < weight.shape[0] and k < depth:
                    words[at], words[at + 1], words[at + 2], words[at + 3] = ptx.ld_global_nc_l1_no_allocate_v4_u32(
                        source + uint64(k) * uint64(2)
                    )

    @cuda.jit(device=True, forceinline=True)
    def load_rows(words, x, rows_of, inside, warp, lane):
        """This lane's elements of the rows lane / 4 and, of 16, eight below."""
        for half in range(halves):
            unroll()
            source = ptx.global_address(x) + uint64(rows_of[half]) * uint64(itemsize * depth)
            for step in range(steps):
                unroll()
                k = uint32((warp * uint32(steps) + uint32(step)) * uint32(_DEPTH) + lane % uint32(4) * uint32(VECTOR))
                at = 4 * (steps * half + step)
                words[at], words[at + 1], words[at + 2], words[at + 3] = uint32(0), uint32(0), uint32(0), uint32(0)
                if inside[half] and k < depth:
                    words[at], words[at + 1], words[at + 2], words[at + 3] = load8(
                        source + uint64(k) * uint64(itemsize)
                    )

    @cuda.jit(device=True, forceinline=True)
    def moments(words, warp, lane):
        """Sums of this warp's elements of each row, and of their squares, to shared memory."""
        for half in range(halves):
            unroll()
            first, second = float32(0), float32(0)
            for i in range(4 * steps):
                unroll()
                left, right = ptx.cvt_f32_bf16x2(words[4 * steps * half + i])
                first += left + right
                second += left * left + right * right
            for lanes in (1, 2):
                first += cuda.shfl_xor_sync(_ALL_LANES, first, lanes)
                second += cuda.shfl_xor_sync(_ALL_LANES, second, lanes)
            if lane % uint32(4) == 0:
                row = uint32(lane // uint32(4) + uint32(8 * half))
                smem.first[warp, row], smem.second[warp, row] = first, second

    @cuda.jit(device=True, forceinline=True)
    def mean_and_scale(row):
        """Of a row, when all warps' sums are there."""
        first, second = float32(0), float32(0)
        for i in range(warps):
            first += smem.first[i, row]
            second += smem.second[i, row]
        mean = first * float32(inverse)
        variance = max(second * float32(inverse) - mean * mean, float32(0))
        return mean, cuda.libdevice.rsqrtf(variance + float32(epsilon))

    @kernel(threads=threads, shared=smem, programmatic=True, min_blocks=1 if rows_16 or warps > 8 else 2)
    def gpt2_linear(x, weight, sums, bias, y, picked, lengths, best, rows):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        column0, stride = uint32(cuda.blockIdx.x * uint32(columns)), uint32(cuda.gridDim.x * uint32(columns))
        first = uint32(cuda.blockIdx.y * uint32(ROWS))
        width = uint32(weight.shape[0])

        w = cuda.local.array(weight_words, uint32)
        a = cuda.local.array(row_words, uint32)
        rows_of = cuda.local.array(halves, uint32)
        inside = cuda.local.array(halves, uint32)
        largest = cuda.local.array(passes, float32)
        where = cuda.local.array(passes, int32)
        places = cuda.local.array(passes, uint32)
        load_weight(w, weight, column0, warp, lane)
        for half in range(halves):
            unroll()
            row = uint32(first + lane // uint32(4) + uint32(8 * half))
            inside[half] = uint32(row < rows)
            rows_of[half] = uint32(picked[row]) if row < rows else uint32(0)
        for i in range(passes):
            unroll()
            largest[i], where[i] = float32(-math.inf), int32(0x7FFFFFFF)
            places[i] = uint32(0)
            if at_length:
                target = uint32(first + uint32(thread + uint32(i * threads)) // uint32(columns))
                places[i] = uint32(lengths[target]) if target < rows else uint32(0)

        ptx.griddepcontrol_wait()
        ptx.griddepcontrol_launch_dependents()

        load_rows(a, x, rows_of, inside, warp, lane)
        old = cuda.local.array(passes, float32)
        added = cuda.local.array(passes, float32)
        weights_sum = cuda.local.array(passes, float32)
        turn = uint32(0)
        while column0 < width:
            unroll(1)
            # What the end needs is asked for now.
            for i in range(passes):
                unroll()
                output = uint32(thread + uint32(i * threads))
                column = uint32(column0 + output % uint32(columns))
                target = uint32(first + output // uint32(columns))
                old[i], added[i], weights_sum[i] = float32(0), float32(0), float32(0)
                if output < outputs and column < width and target < rows:
                    added[i] = bias[column]
                    if normalised:
                        weights_sum[i] = sums[column]
                    if accumulate:
                        old[i] = float32(y[target, column])
            if normalised and turn == 0:
                moments(a, warp, lane)

            row, left = uint32(lane // uint32(4)), uint32(lane % uint32(4) * uint32(2))
            part = uint32(turn % uint32(2) * uint32(warps) + warp)
            for tile in range(tiles):
                unroll()
                c0, c1, c2, c3 = float32(0), float32(0), float32(0), float32(0)
                for i in range(2 * steps):
                    unroll()
                    # Two of a load's four registers are one fragment; of 8 rows the lower half is zeros.
                    top, b = 2 * i, 4 * steps * tile + 2 * i
                    bottom = 4 * steps * (halves - 1) + top
                    below0 = a[bottom] if rows_16 else uint32(0)
                    below1 = a[bottom + 1] if rows_16 else uint32(0)
                    c0, c1, c2, c3 = ptx.mma_sync_m16n8k16_f32_bf16_bf16_f32(
                        a[top], below0, a[top + 1], below1, w[b], w[b + 1], c0, c1, c2, c3
                    )
                column = uint32(uint32(8 * tile) + left)
                smem.sums[part, row, column], smem.sums[part, row, column + uint32(1)] = c0, c1
                if rows_16:
                    below = uint32(row + uint32(8))
                    smem.sums[part, below, column], smem.sums[part, below, column + uint32(1)] = c2, c3
            following = uint32(column0 + stride)
            if following < width:
                load_weight(w, weight, following, warp, lane)
            cuda.syncthreads()

            for i in range(passes):
                unroll()
                output = uint32(thread + uint32(i * threads))
                row, within = uint32(output // uint32(columns)), uint32(output % uint32(columns))
                column, target = uint32(column0 + within), uint32(first + row)
                if output < outputs and column < width and target < rows:
                    total = float32(0)
                    for j in range(warps):
                        total += smem.sums[uint32(turn % uint32(2) * uint32(warps) + uint32(j)), row, within]
                    if normalised:
                        mean, scale = mean_and_scale(row)
                        total = (total - mean * weights_sum[i]) * scale
                    total = activate(total + added[i])
                    if at_length:
                        y[target, places[i], column] = total
                    elif accumulate:
                        y[target, column] = old[i] + total
                    else:
                        y[target, column] = total
                    if choose:
                        largest[i], where[i] = better(total, int32(column), largest[i], where[i])
            # The next turn writes the other half of the sums: nobody there can be two turns ahead.
            turn = uint32(turn + uint32(1))
            column0 = following

        if choose:
            for i in range(passes):
                unroll()
                value, column = largest[i], where[i]
                for lanes in (16, 8, 4, 2, 1):
                    other = cuda.shfl_xor_sync(_ALL_LANES, value, lanes)
                    value, column = better(other, cuda.shfl_xor_sync(_ALL_LANES, column, lanes), value, column)
                output = uint32(thread + uint32(i * threads))
                target = uint32(first + output // uint32(columns))
                if lane == 0 and output < outputs and target < rows:
                    cuda.atomic.max(best, target, key_of(value, column))

    return gpt2_linear


def grid(shape: Shape, columns: int, rows: int) -> tuple[int, int]:
    """Blocks for a product of `rows` rows and `columns` columns: at most as many a row tile as SMs hold at once."""
    return min(-(-columns // shape.columns), 2 * _SMS), -(-rows // ROWS)

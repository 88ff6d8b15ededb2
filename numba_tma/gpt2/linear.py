"""A product of a few rows and a large weight, as each step of decoding has five a layer: y = f(x) @ weight.T + bias.

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
* The layer normalisation in front of a product costs less than a launch: each block normalises the rows for itself.

PTX ISA: "mma", "Matrix Fragments for mma.m16n8k16 with floating point type", "griddepcontrol".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from .. import ptx
from ..kernels.gemm.epilogue import make_activation
from ..launch import Kernel, kernel
from ..shared import Buffer, Shared
from ..unroll import unroll
from .vectors import VECTOR, load8_f32, make_normalise, pack8, row_access

ROWS = 16  # of x, that a block multiplies
_COLUMNS = 8  # of a fragment
_DEPTH = 32  # elements of K that a warp's lanes load at once, four lanes a row
_MOST_WARPS = 8
_SMS = 132


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
        warps = min(_MOST_WARPS, -(-depth // _DEPTH))
        steps = -(-depth // (_DEPTH * warps))
        tiles = 1
        while 2 * tiles * steps <= 12 and tiles < 4 and columns // (_COLUMNS * 2 * tiles) >= _SMS:
            tiles *= 2
        return Shape(depth, tiles, warps)

    @property
    def steps(self) -> int:
        """Loads of a warp along K."""
        return -(-self.depth // (_DEPTH * self.warps))

    @property
    def columns(self) -> int:
        """Of y, that a block computes."""
        return _COLUMNS * self.tiles

    @property
    def row_bytes(self) -> int:
        """Of a normalised row in shared memory: padded, so that a quarter warp's rows lie in different banks."""
        return -(-2 * self.depth // 128) * 128 + 64


def _make_rows(shape: Shape, epsilon: float, residual: str, smem: Shared) -> Callable:
    """Make `normalise_rows(x, gain, shift, first, rows, thread)`: x's rows, normalised, to smem.rows as bfloat16."""
    load8, _, itemsize = row_access(residual)
    depth, warps, row_bytes = shape.depth, shape.warps, shape.row_bytes
    vectors = -(-depth // (32 * VECTOR))
    numbers = vectors * VECTOR
    normalise = make_normalise(depth, epsilon)

    @cuda.jit(device=True, forceinline=True)
    def normalise_rows(x, gain, shift, picked, first, rows, thread):
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        values = cuda.local.array(numbers, float32)
        for i in range(warp, min(uint32(rows - first), uint32(ROWS)), uint32(warps)):
            unroll(1)
            row = uint32(picked[uint32(first + i)])
            source = ptx.global_address(x) + uint64(row) * uint64(itemsize * depth)
            for j in range(vectors):
                unroll()
                column = uint32((lane + uint32(32 * j)) * uint32(VECTOR))
                for e in range(VECTOR):
                    values[VECTOR * j + e] = float32(0)
                if column < depth:
                    k = VECTOR * j
                    (
                        values[k],
                        values[k + 1],
                        values[k + 2],
                        values[k + 3],
                        values[k + 4],
                        values[k + 5],
                        values[k + 6],
                        values[k + 7],
                    ) = load8(source + uint64(column) * uint64(itemsize))
            normalise(values, lane)
            target = uint32(ptx.shared_address(smem.rows) + uint32(i) * uint32(row_bytes))
            for j in range(vectors):
                unroll()
                column = uint32((lane + uint32(32 * j)) * uint32(VECTOR))
                if column < depth:
                    k = VECTOR * j
                    g = load8_f32(ptx.global_address(gain) + uint64(column) * uint64(4))
                    s = load8_f32(ptx.global_address(shift) + uint64(column) * uint64(4))
                    w0, w1, w2, w3 = pack8(
                        values[k] * g[0] + s[0],
                        values[k + 1] * g[1] + s[1],
                        values[k + 2] * g[2] + s[2],
                        values[k + 3] * g[3] + s[3],
                        values[k + 4] * g[4] + s[4],
                        values[k + 5] * g[5] + s[5],
                        values[k + 6] * g[6] + s[6],
                        values[k + 7] * g[7] + s[7],
                    )
                    ptx.st_shared_v4_u32(uint32(target + column * uint32(2)), w0, w1, w2, w3)

    return normalise_rows


@functools.cache
def make_linear(
    shape: Shape,
    *,
    rows_16: bool,
    norm: tuple[float, str] | None = None,
    activation: str = "none",
    has_bias: bool = True,
    accumulate: bool = False,
    at_length: bool = False,
) -> Kernel:
    """y = activation(f(x) @ weight.T + bias) for a few rows; a block for `shape.columns` columns, and ROWS rows.

    Kernel parameters: x (any rows, K); weight (N, K) bfloat16, its rows beginning at multiples of 16 bytes; bias (N,)
    float32; y (rows, N), or (rows, positions, N) with `at_length`; gain and shift (K,) float32; picked (rows,) int32,
    which row of x is meant; lengths (rows,) int32; rows.

    Args:
        shape: how it is cut; K is a multiple of 8.
        rows_16: whether there are more than 8 rows.
        norm: f is the layer normalisation with this epsilon, of x of this type (float32 or bfloat16), times gain plus
            shift. None: f is x itself, bfloat16.
        activation: as `matmul` has them.
        has_bias: whether bias is added; otherwise it is not looked at.
        accumulate: y grows by the result.
        at_length: row r of the result goes to y[r, lengths[r]].
    """
    depth, tiles, warps, steps, row_bytes = shape.depth, shape.tiles, shape.warps, shape.steps, shape.row_bytes
    threads = 32 * warps
    halves = 2 if rows_16 else 1
    columns = shape.columns
    outputs = 8 * halves * columns
    passes = -(-outputs // threads)
    weight_words, row_words = 4 * steps * tiles, 4 * steps * halves
    activate = make_activation(activation)
    plan = {"sums": Buffer((warps, 8 * halves, columns), float32)}
    if norm:
        plan["rows"] = Buffer((8 * halves * row_bytes // 4,), "uint32")
    smem = Shared(**plan)

    if norm:
        normalise_rows = _make_rows(shape, *norm, smem)

        @cuda.jit(device=True, forceinline=True)
        def load_rows(words, x, gain, shift, picked, first, rows, thread):
            """The same of normalised rows, by way of shared memory."""
            normalise_rows(x, gain, shift, picked, first, rows, thread)
            cuda.syncthreads()
            lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
            for half in range(halves):
                unroll()
                row = uint32(lane // uint32(4) + uint32(8 * half))
                inside = uint32(first + row) < rows
                source = uint32(ptx.shared_address(smem.rows) + row * uint32(row_bytes))
                for step in range(steps):
                    unroll()
                    k = uint32(
                        (warp * uint32(steps) + uint32(step)) * uint32(_DEPTH) + lane % uint32(4) * uint32(VECTOR)
                    )
                    at = 4 * (steps * half + step)
                    words[at], words[at + 1], words[at + 2], words[at + 3] = uint32(0), uint32(0), uint32(0), uint32(0)
                    if inside and k < depth:
                        words[at], words[at + 1], words[at + 2], words[at + 3] = ptx.ld_shared_v4_u32(
                            uint32(source + k * uint32(2))
                        )

    else:

        @cuda.jit(device=True, forceinline=True)
        def load_rows(words, x, gain, shift, picked, first, rows, thread):
            """This lane's elements of the rows lane / 4 and, of 16, eight below."""
            lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
            for half in range(halves):
                unroll()
                row = uint32(first + lane // uint32(4) + uint32(8 * half))
                inside = row < rows
                source = ptx.global_address(x) + uint64(uint32(picked[row]) if inside else uint32(0)) * uint64(
                    2 * depth
                )
                for step in range(steps):
                    unroll()
                    k = uint32(
                        (warp * uint32(steps) + uint32(step)) * uint32(_DEPTH) + lane % uint32(4) * uint32(VECTOR)
                    )
                    at = 4 * (steps * half + step)
                    words[at], words[at + 1], words[at + 2], words[at + 3] = uint32(0), uint32(0), uint32(0), uint32(0)
                    if inside and k < depth:
                        words[at], words[at + 1], words[at + 2], words[at + 3] = ptx.ld_global_v4_u32(
                            source + uint64(k) * uint64(2)
                        )

    @kernel(threads=threads, shared=smem, programmatic=True)
    def gpt2_linear(x, weight, bias, y, gain, shift, picked, lengths, rows):
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        column0 = uint32(cuda.blockIdx.x * uint32(columns))
        first = uint32(cuda.blockIdx.y * uint32(ROWS))
        width = uint32(weight.shape[0])

        w = cuda.local.array(weight_words, uint32)
        for tile in range(tiles):
            unroll()
            column = uint32(column0 + uint32(8 * tile) + lane // uint32(4))
            source = ptx.global_address(weight) + uint64(column) * uint64(2 * depth)
            for step in range(steps):
                unroll()
                k = uint32((warp * uint32(steps) + uint32(step)) * uint32(_DEPTH) + lane % uint32(4) * uint32(VECTOR))
                at = 4 * (steps * tile + step)
                w[at], w[at + 1], w[at + 2], w[at + 3] = uint32(0), uint32(0), uint32(0), uint32(0)
                if column < width and k < depth:
                    w[at], w[at + 1], w[at + 2], w[at + 3] = ptx.ld_global_nc_l1_no_allocate_v4_u32(
                        source + uint64(k) * uint64(2)
                    )

        ptx.griddepcontrol_wait()
        ptx.griddepcontrol_launch_dependents()

        a = cuda.local.array(row_words, uint32)
        load_rows(a, x, gain, shift, picked, first, rows, thread)

        row, left = uint32(lane // uint32(4)), uint32(lane % uint32(4) * uint32(2))
        for tile in range(tiles):
            unroll()
            c0, c1, c2, c3 = float32(0), float32(0), float32(0), float32(0)
            for part in range(2 * steps):
                unroll()
                # Two of a load's four registers are one fragment; of 8 rows the lower half is zeros.
                top = 2 * part
                bottom = 4 * steps * (halves - 1) + top
                b = 4 * steps * tile + 2 * part
                below0 = a[bottom] if rows_16 else uint32(0)
                below1 = a[bottom + 1] if rows_16 else uint32(0)
                c0, c1, c2, c3 = ptx.mma_sync_m16n8k16_f32_bf16_bf16_f32(
                    a[top], below0, a[top + 1], below1, w[b], w[b + 1], c0, c1, c2, c3
                )
            column = uint32(uint32(8 * tile) + left)
            smem.sums[warp, row, column], smem.sums[warp, row, column + uint32(1)] = c0, c1
            if rows_16:
                below = uint32(row + uint32(8))
                smem.sums[warp, below, column], smem.sums[warp, below, column + uint32(1)] = c2, c3
        cuda.syncthreads()

        for i in range(passes):
            unroll()
            output = uint32(thread + uint32(i * threads))
            row, within = uint32(output // uint32(columns)), uint32(output % uint32(columns))
            column, target = uint32(column0 + within), uint32(first + row)
            if output < outputs and column < width and target < rows:
                total = float32(0)
                for part in range(warps):
                    total += smem.sums[part, row, within]
                if has_bias:
                    total += bias[column]
                total = activate(total)
                if at_length:
                    y[target, uint32(lengths[target]), column] = total
                elif accumulate:
                    y[target, column] = float32(y[target, column]) + total
                else:
                    y[target, column] = total

    return gpt2_linear


def grid(shape: Shape, columns: int, rows: int) -> tuple[int, int]:
    """Blocks for a product of `rows` rows and `columns` columns."""
    return -(-columns // shape.columns), -(-rows // ROWS)

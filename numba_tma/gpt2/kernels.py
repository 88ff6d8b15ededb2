"""The kernels between the products: embedding, normalisation, the chosen token. All are bound by memory.

What is read and written for a row of C elements: embedding 2 C bfloat16 and a residual row of C; normalisation a
residual row and C bfloat16. The arithmetic, some ten operations an element, hides behind that. So a warp has a row,
its lanes read 16 bytes at a time, and all of a row's loads are on their way before the first sum.

Each may start before the kernel in front of it has ended (programmatic dependent launch), and waits for its results.
PTX ISA: "griddepcontrol".
"""

from __future__ import annotations

import functools
import math

from numba import cuda
from numba.cuda.types import float32, int32, uint32, uint64

from .. import ptx
from ..launch import Kernel, kernel
from ..unroll import unroll
from .vectors import VECTOR, load8_bf16, make_normalise, row_access, store8_bf16

ROWS = 8  # of a block: a warp has one


@functools.cache
def make_embed(columns: int, residual: str, at_length: bool) -> Kernel:
    """x[row] = wte[token] + wpe[position], a warp for each row of x (B · S, C); grid (S / ROWS, B).

    tokens is (B, more than S) int32. Without `at_length` row s of a batch has the token and position `first + s`, and
    `picked` (B,) int32 gets the number of each sequence's last row, that of position lengths[b] - 1. With it there is a
    single row, whose token and position is lengths[b]. A token or position outside of its table becomes a row of NaN,
    which nothing that follows can hide.
    """
    _, store8, itemsize = row_access(residual)
    vectors = -(-columns // (32 * VECTOR))

    @kernel(threads=32 * ROWS, programmatic=True)
    def gpt2_embed(tokens, lengths, wte, wpe, x, picked, first, rows, vocabulary):
        lane, warp = uint32(cuda.threadIdx.x % 32), uint32(cuda.threadIdx.x // 32)
        row, batch = uint32(cuda.blockIdx.x * uint32(ROWS) + warp), uint32(cuda.blockIdx.y)
        ptx.griddepcontrol_wait()
        ptx.griddepcontrol_launch_dependents()
        if row < rows:
            if not at_length and row == 0 and lane == 0:
                length = max(int32(lengths[batch]) - int32(first), int32(1))  # 0 where a graph is tried out
                picked[batch] = int32(int32(batch * rows) + length - int32(1))
            position = uint32(lengths[batch]) if at_length else uint32(first + row)
            token = int32(tokens[batch, position])
            known = token >= 0 and token < vocabulary and position < wpe.shape[0]
            # Uniform in a warp: all of its lanes take the same way.
            word = ptx.global_address(wte) + uint64(uint32(token) if known else uint32(0)) * uint64(2 * columns)
            place = ptx.global_address(wpe) + uint64(position if known else uint32(0)) * uint64(2 * columns)
            target = ptx.global_address(x) + uint64(batch * rows + row) * uint64(itemsize * columns)
            scale = float32(1) if known else float32(math.nan)
            for i in range(vectors):
                column = uint32((lane + uint32(32 * i)) * uint32(VECTOR))
                if column < columns:
                    a = load8_bf16(word + uint64(column) * uint64(2))
                    b = load8_bf16(place + uint64(column) * uint64(2))
                    store8(
                        target + uint64(column) * uint64(itemsize),
                        scale * (a[0] + b[0]),
                        scale * (a[1] + b[1]),
                        scale * (a[2] + b[2]),
                        scale * (a[3] + b[3]),
                        scale * (a[4] + b[4]),
                        scale * (a[5] + b[5]),
                        scale * (a[6] + b[6]),
                        scale * (a[7] + b[7]),
                    )

    return gpt2_embed


@functools.cache
def make_normalise_rows(columns: int, epsilon: float, residual: str) -> Kernel:
    """y = x with its rows' mean 0 and variance 1, for x (rows, C) of the residual's type, y bfloat16.

    Gain and shift of a layer normalisation are in the weight and bias that follow it. A warp for each row, ROWS rows a
    block.
    """
    load8, _, itemsize = row_access(residual)
    vectors = -(-columns // (32 * VECTOR))
    numbers = vectors * VECTOR
    normalise = make_normalise(columns, epsilon)

    @kernel(threads=32 * ROWS, programmatic=True)
    def gpt2_normalise(x, y, rows):
        lane, warp = uint32(cuda.threadIdx.x % 32), uint32(cuda.threadIdx.x // 32)
        row = uint32(cuda.blockIdx.x * uint32(ROWS) + warp)
        values = cuda.local.array(numbers, float32)
        ptx.griddepcontrol_wait()
        ptx.griddepcontrol_launch_dependents()
        if row < rows:
            source = ptx.global_address(x) + uint64(row) * uint64(itemsize * columns)
            target = ptx.global_address(y) + uint64(row) * uint64(2 * columns)
            for i in range(vectors):
                unroll()
                column = uint32((lane + uint32(32 * i)) * uint32(VECTOR))
                for j in range(VECTOR):
                    values[VECTOR * i + j] = float32(0)
                if column < columns:
                    k = VECTOR * i
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
            for i in range(vectors):
                unroll()
                column = uint32((lane + uint32(32 * i)) * uint32(VECTOR))
                if column < columns:
                    k = VECTOR * i
                    store8_bf16(
                        target + uint64(column) * uint64(2),
                        values[k],
                        values[k + 1],
                        values[k + 2],
                        values[k + 3],
                        values[k + 4],
                        values[k + 5],
                        values[k + 6],
                        values[k + 7],
                    )

    return gpt2_normalise


APPEND_THREADS = 32


@kernel(threads=APPEND_THREADS, programmatic=True)
def gpt2_append(best, sequence, lengths, rows, grow):
    """sequence[b, lengths[b] + grow] = the token that best[b] (B,) uint64 names, as `linear` has it; then lengths[b]
    grows by `grow`, and best[b] is 0. A thread for each sequence."""
    batch = uint32(cuda.grid(1))
    ptx.griddepcontrol_wait()
    ptx.griddepcontrol_launch_dependents()
    if batch < rows:
        length = uint32(lengths[batch]) + uint32(grow)
        sequence[batch, length] = int32(~uint32(best[batch]))
        lengths[batch] = int32(length)
        best[batch] = uint64(0)


_MOVE_THREADS = 256


@kernel(threads=_MOVE_THREADS, programmatic=True)
def gpt2_move(source, target):
    """target = source, (layers, tokens, columns) bfloat16, whose last dimension is contiguous and begins at multiples
    of 16 bytes; grid (tokens, layers)."""
    ptx.griddepcontrol_wait()
    ptx.griddepcontrol_launch_dependents()
    token, layer = uint64(cuda.blockIdx.x), uint64(cuda.blockIdx.y)
    read = ptx.global_address(source) + layer * uint64(source.strides[0]) + token * uint64(source.strides[1])
    write = ptx.global_address(target) + layer * uint64(target.strides[0]) + token * uint64(target.strides[1])
    for i in range(uint32(cuda.threadIdx.x), uint32(source.shape[2] // VECTOR), uint32(_MOVE_THREADS)):
        w0, w1, w2, w3 = ptx.ld_global_v4_u32(read + uint64(i) * uint64(16))
        ptx.st_global_v4_u32(write + uint64(i) * uint64(16), w0, w1, w2, w3)

"""Steps 1 and 2: plain Numba, a thread an element of C, then as far as tiles in shared memory and registers take it."""

from __future__ import annotations

import functools

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ...launch import Kernel, kernel
from .epilogue import make_activation

NAIVE_BLOCK = (32, 8)  # threads along a row of C, and rows
TILE = 128  # rows and columns of C that a block of `tiled` computes
DEPTH = 8  # elements of K in a tile
THREADS = 256  # each computes 8 x 8 elements
PADDED = TILE + 4  # a warp stores 4 numbers of each of 8 rows of a tile: into 32 different banks


@functools.cache
def make_naive(b_major: str = "k", activation: str = "none", has_bias: bool = False) -> Kernel:
    """gemm_naive(a, b, c, bias): every thread walks along K for one element of C."""
    activate = make_activation(activation)

    @kernel(threads=NAIVE_BLOCK)
    def gemm_naive(a, b, c, bias):
        row = uint32(cuda.blockIdx.x * uint32(NAIVE_BLOCK[1]) + cuda.threadIdx.y)
        column = uint32(cuda.blockIdx.y * uint32(NAIVE_BLOCK[0]) + cuda.threadIdx.x)
        if row < c.shape[0] and column < c.shape[1]:
            total = float32(0)
            for k in range(uint32(a.shape[1])):
                if b_major == "k":
                    total += float32(a[row, k]) * float32(b[column, k])
                else:
                    total += float32(a[row, k]) * float32(b[k, column])
            if has_bias:
                total += float32(bias[column])
            c[row, column] = activate(total)

    return gemm_naive


@functools.cache
def make_tiled(b_major: str = "k", activation: str = "none", has_bias: bool = False) -> Kernel:
    """gemm_tiled(a, b, c, bias): 128 x 128 of C a block, 8 x 8 a thread.

    Tiles of A and B lie in shared memory as float32, K first: for each k a thread reads 8 numbers of both, as four
    16-byte vectors, and does 64 multiply-adds. Two buffers: the next tile is on its way from global memory through
    registers while this one is computed on.
    """
    activate = make_activation(activation)
    loads = TILE * DEPTH // THREADS
    half = TILE // 2

    @cuda.jit(device=True, forceinline=True)
    def load_k(held, matrix, first_row, block):
        """Elements of an M x K or N x K tile: neighbouring threads along K."""
        thread = uint32(cuda.threadIdx.x)
        rows, depth = uint32(matrix.shape[0]), uint32(matrix.shape[1])
        k = uint32(block * uint32(DEPTH) + thread % uint32(DEPTH))
        for i in range(loads):
            row = uint32(first_row + thread // uint32(DEPTH) + uint32(i * (THREADS // DEPTH)))
            held[i] = float32(matrix[row, k]) if row < rows and k < depth else float32(0)

    @cuda.jit(device=True, forceinline=True)
    def store_k(held, tile, stage):
        thread = uint32(cuda.threadIdx.x)
        for i in range(loads):
            row = uint32(thread // uint32(DEPTH) + uint32(i * (THREADS // DEPTH)))
            tile[stage, thread % uint32(DEPTH), row] = held[i]

    @cuda.jit(device=True, forceinline=True)
    def load_n(held, matrix, first_column, block):
        """Elements of a K x N tile: neighbouring threads along N."""
        thread = uint32(cuda.threadIdx.x)
        depth, columns = uint32(matrix.shape[0]), uint32(matrix.shape[1])
        column = uint32(first_column + thread % uint32(TILE))
        for i in range(loads):
            k = uint32(block * uint32(DEPTH) + thread // uint32(TILE) + uint32(i * (THREADS // TILE)))
            held[i] = float32(matrix[k, column]) if k < depth and column < columns else float32(0)

    @cuda.jit(device=True, forceinline=True)
    def store_n(held, tile, stage):
        thread = uint32(cuda.threadIdx.x)
        for i in range(loads):
            k = uint32(thread // uint32(TILE) + uint32(i * (THREADS // TILE)))
            tile[stage, k, thread % uint32(TILE)] = held[i]

    load_b, store_b = (load_k, store_k) if b_major == "k" else (load_n, store_n)

    @cuda.jit(device=True, forceinline=True)
    def multiply(acc, rows, columns, a_tile, b_tile, stage, k, row, column):
        for i in range(4):
            rows[i] = a_tile[stage, k, row + uint32(i)]
            rows[4 + i] = a_tile[stage, k, row + uint32(half + i)]
            columns[i] = b_tile[stage, k, column + uint32(i)]
            columns[4 + i] = b_tile[stage, k, column + uint32(half + i)]
        for i in range(8):
            for j in range(8):
                acc[8 * i + j] += rows[i] * columns[j]

    @kernel(threads=THREADS, min_blocks=2)
    def gemm_tiled(a, b, c, bias):
        a_tile = cuda.shared.array((2, DEPTH, PADDED), float32, 16)
        b_tile = cuda.shared.array((2, DEPTH, PADDED), float32, 16)
        acc = cuda.local.array(64, float32)
        for i in range(64):
            acc[i] = float32(0)
        a_held, b_held = cuda.local.array(loads, float32), cuda.local.array(loads, float32)
        rows, columns = cuda.local.array(8, float32), cuda.local.array(8, float32)
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread % uint32(32)), uint32(thread // uint32(32))
        # A warp's threads stand 4 x 8, so that what they read of both tiles is 64 and 128 bytes; four of a thread's
        # rows and columns are in the upper and left half of the tile, four in the other.
        row = uint32((warp // uint32(2) * uint32(4) + lane // uint32(8)) * uint32(4))
        column = uint32((warp % uint32(2) * uint32(8) + lane % uint32(8)) * uint32(4))
        first_row = uint32(uint32(cuda.blockIdx.x) * uint32(TILE))
        first_column = uint32(uint32(cuda.blockIdx.y) * uint32(TILE))
        blocks = uint32((uint32(a.shape[1]) + uint32(DEPTH - 1)) // uint32(DEPTH))

        load_k(a_held, a, first_row, uint32(0))
        load_b(b_held, b, first_column, uint32(0))
        for block in range(blocks):
            stage = uint32(block) % uint32(2)
            store_k(a_held, a_tile, stage)
            store_b(b_held, b_tile, stage)
            cuda.syncthreads()
            following = uint32(uint32(block) + uint32(1))
            load_k(a_held, a, first_row, following)  # behind the last tile: zeros
            load_b(b_held, b, first_column, following)
            for k in range(0, DEPTH, 4):  # the compiler would not unroll it by itself
                multiply(acc, rows, columns, a_tile, b_tile, stage, uint32(k), row, column)
                multiply(acc, rows, columns, a_tile, b_tile, stage, uint32(k + 1), row, column)
                multiply(acc, rows, columns, a_tile, b_tile, stage, uint32(k + 2), row, column)
                multiply(acc, rows, columns, a_tile, b_tile, stage, uint32(k + 3), row, column)

        # 64-bit indices: sums of 32-bit ones might wrap around, and the compiler could not take the constants out.
        top, left = uint64(first_row + row), uint64(first_column + column)
        for i in range(8):
            y = top + uint64(i % 4 + i // 4 * half)
            for j in range(8):
                x = left + uint64(j % 4 + j // 4 * half)
                if y < uint64(c.shape[0]) and x < uint64(c.shape[1]):
                    total = acc[8 * i + j]
                    if has_bias:
                        total += float32(bias[x])
                    c[y, x] = activate(total)

    return gemm_tiled

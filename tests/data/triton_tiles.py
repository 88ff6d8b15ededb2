"""Four kernels in Triton, for PTX that another compiler made. As data: nothing here imports Triton.

The PTX beside this file is Triton 3.6's for sm_90a:

    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constexprs)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]

with tiles of 32 x 64 elements, and 64 x 64 x 64 for the products. A tensor descriptor becomes the tensor map, its sizes
(i32) and its strides (i64); two pointers to scratch memory come last.
"""

import triton
import triton.language as tl


@triton.jit
def double_tiles(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """y = 2 x, by tiles; x and y are tensor descriptors."""
    at = [tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS]
    y.store(at, x.load(at) * 2)


@triton.jit
def row_sums(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of x's rows; the descriptor is made by each block, in scratch memory of 128 bytes."""
    tiles = tl.make_tensor_descriptor(x, shape=[rows, columns], strides=[columns, 1], block_shape=[ROWS, COLUMNS])
    first = tl.program_id(0) * ROWS
    total = tl.zeros((ROWS,), tl.float32)
    for column in range(0, columns, COLUMNS):
        total += tl.sum(tiles.load([first, column]).to(tl.float32), axis=1)
    lanes = first + tl.arange(0, ROWS)
    tl.store(out + lanes, total, mask=lanes < rows)


@triton.jit
def matmul(a, b, c, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a b^T, by tiles of M x N: three stages of copies, and wgmma."""
    i, j = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for step in range(0, k, K):
        total = tl.dot(a.load([i, step]), b.load([j, step]).T, total)
    c.store([i, j], total.to(tl.float16))


@triton.jit
def matmul_specialized(a, b, c, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The same with warps that copy apart from those that multiply."""
    i, j = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for step in tl.range(0, k, K, warp_specialize=True):
        total = tl.dot(a.load([i, step]), b.load([j, step]).T, total)
    c.store([i, j], total.to(tl.float16))

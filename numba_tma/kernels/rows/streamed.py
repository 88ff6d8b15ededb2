"""Rows straight from global memory, read twice or three times: plain Numba, and with one pass less."""

from __future__ import annotations

import functools
import math

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import ptx
from ...launch import Kernel, kernel
from ...shared import Shared
from ...unroll import unroll
from .block import make_together, operation_kernel, pairs_buffer
from .operation import MAKERS
from .vectors import make_vectors


@functools.cache
def make_plain_softmax(threads: int = 256) -> Kernel:
    """As one writes it in Numba: a block a row, one pass for the maximum, one for the sum, one for the results."""

    @kernel(threads=threads)
    def softmax_plain(x, out):
        shared = cuda.shared.array(threads, float32)
        thread = cuda.threadIdx.x
        row = cuda.blockIdx.x
        columns = x.shape[1]

        largest = float32(-math.inf)
        for column in range(thread, columns, threads):
            largest = max(largest, float32(x[row, column]))
        shared[thread] = largest
        cuda.syncthreads()
        width = threads // 2
        while width > 0:
            if thread < width:
                shared[thread] = max(shared[thread], shared[thread + width])
            cuda.syncthreads()
            width //= 2
        largest = shared[0]
        cuda.syncthreads()

        total = float32(0)
        for column in range(thread, columns, threads):
            total += math.exp(float32(x[row, column]) - largest)
        shared[thread] = total
        cuda.syncthreads()
        width = threads // 2
        while width > 0:
            if thread < width:
                shared[thread] += shared[thread + width]
            cuda.syncthreads()
            width //= 2
        total = shared[0]

        for column in range(thread, columns, threads):
            out[row, column] = math.exp(float32(x[row, column]) - largest) / total

    return softmax_plain


@functools.cache
def make_plain_rmsnorm(threads: int = 256) -> Kernel:
    """As one writes it in Numba: a block a row, one pass for the sum of squares, one for the results."""

    @kernel(threads=threads)
    def rmsnorm_plain(x, weight, out, inverse, epsilon):
        shared = cuda.shared.array(threads, float32)
        thread = cuda.threadIdx.x
        row = cuda.blockIdx.x
        columns = x.shape[1]

        total = float32(0)
        for column in range(thread, columns, threads):
            total += float32(x[row, column]) * float32(x[row, column])
        shared[thread] = total
        cuda.syncthreads()
        width = threads // 2
        while width > 0:
            if thread < width:
                shared[thread] += shared[thread + width]
            cuda.syncthreads()
            width //= 2
        factor = float32(1) / math.sqrt(shared[0] * inverse + epsilon)

        for column in range(thread, columns, threads):
            out[row, column] = float32(x[row, column]) * factor * float32(weight[column])

    return rmsnorm_plain


PLAIN = {"softmax": make_plain_softmax, "rmsnorm": make_plain_rmsnorm}


@functools.cache
def make_online(operation: str, dtype: str, threads: int = 256, unrolled: int = 4, vector: bool = True) -> Kernel:
    """A block a row of any length, one pass for both numbers and one for the results, `unrolled` loads in flight.

    A thread takes `unrolled` vectors at a time and merges their pair into that of what it has seen. Without `vector` it
    takes single elements, and rows may start anywhere and have any strides.
    """
    vectors = make_vectors(dtype)
    width = vectors.width if vector else 1
    count, words = unrolled * width + 1, 4 * unrolled
    op = MAKERS[operation](count)
    weighted = op.weighted
    smem = Shared(pairs=pairs_buffer(threads))
    together = make_together(op, smem, threads)

    @cuda.jit(device=True, forceinline=True)
    def load(values, x, row, index, inside):
        """Take `unrolled` vectors from number `index` on, `threads` apart."""
        for i in range(unrolled):
            unroll()
            vector_index = uint32(index + uint32(i * threads))
            if vector_index >= inside:
                for j in range(width):
                    unroll()
                    values[i * width + j] = float32(op.missing)
            elif vector:
                start = ptx.global_address(x) + uint64(row) * uint64(x.strides[0])
                vectors.load_global(values, i * width, start + uint64(vector_index) * uint64(16))
            else:
                values[i] = float32(x[row, vector_index])

    @cuda.jit(device=True, forceinline=True)
    def store(values, x, weight, out, row, index, inside, a, factor):
        """Write the results of what `load` took."""
        weights = cuda.local.array(words, uint32)
        for i in range(unrolled):
            unroll()
            vector_index = uint32(index + uint32(i * threads))
            if vector_index < inside:
                for j in range(width):
                    unroll()
                    values[i * width + j] = op.weigh(values[i * width + j], a) * factor
                if vector:
                    if weighted:
                        vectors.keep(weights, 4 * i, ptx.global_address(weight) + uint64(vector_index) * uint64(16))
                        vectors.scale(values, i * width, weights, 4 * i)
                    start = ptx.global_address(out) + uint64(row) * uint64(out.strides[0])
                    vectors.store_global(start + uint64(vector_index) * uint64(16), values, i * width)
                else:
                    if weighted:
                        values[i] *= float32(weight[vector_index])
                    out[row, vector_index] = values[i]

    @cuda.jit(device=True, forceinline=True)
    def body(x, weight, out, inverse, epsilon):
        values = cuda.local.array(count, float32)
        thread = uint32(cuda.threadIdx.x)
        row = uint32(cuda.blockIdx.x)
        whole = uint32(uint32(x.shape[1]) // uint32(width))
        end = uint32(whole * uint32(width) + thread)
        has_end = end < uint32(x.shape[1])

        a, b = float32(op.missing), float32(0)
        values[count - 1] = float32(op.missing)
        if has_end:
            values[count - 1] = float32(x[row, end])
        index = thread
        while True:
            load(values, x, row, index, whole)
            other_a, other_b = op.partial(values)
            a, b = op.merge(a, b, other_a, other_b)
            values[count - 1] = float32(op.missing)
            index = uint32(index + uint32(unrolled * threads))
            if index >= whole:
                break
        a, b = together(uint32(0), thread, uint32(0), a, b)
        factor = op.factor(a, a, b, inverse, epsilon)

        index = thread
        while index < whole:
            load(values, x, row, index, whole)
            store(values, x, weight, out, row, index, whole, a, factor)
            index = uint32(index + uint32(unrolled * threads))
        if has_end:
            value = op.weigh(float32(x[row, end]), a) * factor
            if weighted:
                value *= float32(weight[end])
            out[row, end] = value

    return operation_kernel(op, body, "online", threads=threads, shared=smem)

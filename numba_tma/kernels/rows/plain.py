"""The baselines: softmax and RMSNorm as one writes them in Numba, a block a row and a pass for each number."""

from __future__ import annotations

import functools
import math

from numba import cuda
from numba.cuda.types import float32

from ...launch import Kernel, kernel


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
        inverse = cuda.libdevice.fast_fdividef(float32(1), shared[0])

        for column in range(thread, columns, threads):
            out[row, column] = math.exp(float32(x[row, column]) - largest) * inverse

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
        factor = cuda.libdevice.rsqrtf(shared[0] * inverse + epsilon)

        for column in range(thread, columns, threads):
            out[row, column] = float32(x[row, column]) * factor * float32(weight[column])

    return rmsnorm_plain


PLAIN = {"softmax": make_plain_softmax, "rmsnorm": make_plain_rmsnorm}

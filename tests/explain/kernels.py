"""Kernels whose PTX and SASS are known line by line, for the tests of numba_tma.explain."""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from numba_tma import Barriers, Shared, TensorMap, Tiles, kernel, ptx
from numba_tma.pipeline import mbarrier_wait

FACTOR = 3.0
smem = Shared(tile=Tiles(1, (8, 64), np.float32), full=Barriers(1))
operands = Shared(a=Tiles(1, (64, 64), np.float16, swizzle="128B"), b=Tiles(1, (32, 64), np.float16, swizzle="128B"))


@cuda.jit(device=True)
def scaled(x):
    return x * float32(FACTOR)  # scaled: product


@kernel(threads=64, shared=smem)
def load(x_map, out):
    """<b>Not bold</b> </script>
    & so on.
    """
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_init(smem.full[0], 1)  # load: init
        ptx.fence_mbarrier_init()
        ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])  # load: copy
    cuda.syncthreads()  # load: barrier
    mbarrier_wait(smem.full[0], 0)  # load: wait
    out[uint32(cuda.threadIdx.x)] = scaled(smem.tile[0][0, uint32(cuda.threadIdx.x)])  # load: store


@kernel(threads=32)
def called(out):
    out[uint32(cuda.threadIdx.x)] = ptx.linked.laneid()  # called: call


by_another_name = called
wait_group = ptx.wgmma_wait_group_m64n32_f32


@kernel(threads=128, shared=operands)
def product(out, steps):
    acc = cuda.local.array(16, float32)
    for i in range(16):
        acc[i] = float32(0)
    a = uint64(ptx.shared_address(operands.a[0]) >> uint32(4)) | uint64(1) << uint64(62)
    b = uint64(ptx.shared_address(operands.b[0]) >> uint32(4)) | uint64(1) << uint64(62)
    for _ in range(steps):
        ptx.wgmma_fence()
        ptx.wgmma_mma_async_m64n32k16_f32_f16_f16(acc, a, b, True, 0, 0)  # product: first
        ptx.wgmma_mma_async_m64n32k16_f32_f16_f16(acc, a + uint64(2), b + uint64(2), True, 0, 0)  # product: second
        ptx.wgmma_commit_group()
        ptx.wgmma_wait_group_m64n32_f32(acc, 0)  # product: wait
    wait_group(acc, 0)  # product: again
    for i in range(16):
        out[cuda.threadIdx.x, i] = acc[i]


def arguments():
    x = np.zeros((8, 64), np.float32)
    return 1, (TensorMap(x, smem.tile), np.zeros(64, np.float32))


def of_called():
    return 1, (np.zeros(32, np.uint32),)


def of_product():
    return 1, (np.zeros((128, 16), np.float32), np.int32(4))


def of_two():
    out = np.zeros(32, np.uint32)
    called[1](out)
    return arguments()

"""What a launch costs the host, and what the place of a tensor map costs a kernel: for docs/results/README.md."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numba import cuda
from numba.cuda.types import uint32

from .. import bench, ptx
from ..device_array import DeviceArray
from ..launch import Kernel, kernel
from ..pipeline import mbarrier_wait, ring
from ..shared import Barriers, Shared, Tiles
from ..tensor_map import TensorMap
from .timing import Record


@kernel(threads=128)
def _three_arrays(a, b, c):
    pass


@kernel(threads=128)
def _two_maps(a_map, b_map, c, n):
    pass


def launch_overhead() -> list[Record]:
    """Host time of one launch of an empty kernel: our call, a bound call, and Numba's own launch."""
    host = np.zeros(1024, np.float32)
    array = DeviceArray(host)
    numba_array = cuda.to_device(host)
    tensor_map = TensorMap(DeviceArray(np.zeros((64, 64), np.float16)), (64, 64), store=False)
    count = np.uint32(3)
    numbas_own = cuda.jit(lambda a, b, c: None)[1, 128]
    calls: dict[str, Callable[[], object]] = {
        "call, 3 arrays": lambda: _three_arrays[1](array, array, array),
        "call, 3 Numba arrays": lambda: _three_arrays[1](numba_array, numba_array, numba_array),
        "call, 2 tensor maps, array, scalar": lambda: _two_maps[1](tensor_map, tensor_map, array, count),
        "bound, 3 arrays": _three_arrays[1].bind(array, array, array),
        "Numba's own launch, 3 arrays": lambda: numbas_own(numba_array, numba_array, numba_array),
    }
    try:
        import torch

        tensor = torch.zeros(1024, device="cuda")
        calls["call, 3 PyTorch tensors"] = lambda: _three_arrays[1](tensor, tensor, tensor)
    except ImportError:
        pass
    records = []
    for name, call in calls.items():
        call()
        timing = bench.host_overhead(call)
        records.append({"what": name, "seconds": timing.median, "seconds_fastest": timing.fastest})
    return records


@functools.cache
def _make_boxes(box: tuple[int, int], stages: int, acquire: bool) -> Kernel:
    smem = Shared(tile=Tiles(stages, box, np.float16), full=Barriers(stages))
    nbytes = box[0] * box[1] * 2

    @kernel(threads=32, shared=smem)
    def stream_boxes(x_map, steps):
        """`x_map` is a tensor map by value, or the address of one in global memory."""
        if cuda.threadIdx.x == 0:
            if acquire:
                ptx.fence_proxy_tensormap_acquire_gpu(x_map)
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            row = uint32(cuda.blockIdx.x) * uint32(box[0])
            for step in range(steps + stages):
                stage, phase = ring(step, stages)
                if step >= stages:
                    mbarrier_wait(smem.full[stage], phase ^ uint32(1))
                if step < steps:
                    ptx.mbarrier_arrive_expect_tx(smem.full[stage], nbytes)
                    column = uint32(step) * uint32(box[1])
                    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[stage], x_map, column, row, smem.full[stage])

    return stream_boxes


def descriptor_place() -> list[Record]:
    """A tensor map as a by-value parameter against one in global memory: a short kernel and a long one."""
    records = []
    for columns in (256, 16384):
        x = DeviceArray(np.ones((8448, columns), np.float16))
        tensor_map = TensorMap(x, (64, 64), store=False)
        kept = DeviceArray(np.frombuffer(tensor_map.encode(), np.uint8).copy())
        grid, steps = 8448 // 64, np.uint32(columns // 64)
        launches = {
            "by value": _make_boxes((64, 64), 4, False)[grid].bind(tensor_map, steps),
            "in global memory": _make_boxes((64, 64), 4, True)[grid].bind(np.uint64(kept.pointer), steps),
        }
        for name, timing in bench.time_launches(launches, repeats=21).items():
            records.append({"descriptor": name, "boxes_per_block": columns // 64, "seconds": timing.median})
    return records

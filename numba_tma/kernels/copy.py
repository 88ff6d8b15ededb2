"""Copy an array: the smallest kernel in which each way of moving data can be seen alone.

The problem. target = source, for matrices of any size and element type. Nothing is computed, so the time is the bytes
(each read once and written once) over the memory's rate, and a variant is as good as the share it reaches of the
driver's own device-to-device copy.

What moves the data: a load and a store per element (plain), of 16 bytes (vector), cp.async through shared memory
(cp_async), the copy engine with plain stretches of memory (bulk) and with boxes of a matrix (tensor). With the copy
engine one thread a block keeps tens of kilobytes in flight, and no data passes through a register.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda, uint32, uint64

from .. import driver, dtypes, ptx
from ..arrays import as_bytes, reinterpret, view
from ..launch import Kernel, backend, kernel
from ..pipeline import mbarrier_wait, ring
from ..shared import Barriers, Buffer, Shared, Tiles
from ..tensor_map import TensorMap
from .calls import check_extents, check_written
from .problem import Case, Problem, Variant, check_options


@functools.cache
def make_plain(threads: int = 256) -> Kernel:
    """One element a thread and step, in a grid-stride loop: the baseline."""

    @kernel(threads=threads)
    def copy_plain(source, target):
        step = uint64(cuda.gridDim.x) * uint64(cuda.blockDim.x)
        index = uint64(cuda.blockIdx.x) * uint64(cuda.blockDim.x) + uint64(cuda.threadIdx.x)
        while index < uint64(source.size):
            target[index] = source[index]
            index += step

    return copy_plain


@functools.cache
def make_vector(threads: int = 256, unroll: int = 4) -> Kernel:
    """16 bytes a thread and access, `unroll` of them in flight; the last bytes one by one."""

    @kernel(threads=threads)
    def copy_vector(source, target):
        nbytes = uint64(source.size)
        start = uint64(cuda.blockIdx.x) * uint64(threads * unroll) + uint64(cuda.threadIdx.x)
        for i in range(unroll):
            offset = (start + uint64(i * threads)) * uint64(16)
            if offset + uint64(16) <= nbytes:
                a, b, c, d = ptx.ld_global_nc_v4_u32(ptx.global_address(source) + offset)
                ptx.st_global_v4_u32(ptx.global_address(target) + offset, a, b, c, d)
            else:
                for j in range(16):
                    if offset + uint64(j) < nbytes:
                        target[offset + uint64(j)] = source[offset + uint64(j)]

    return copy_vector


@functools.cache
def make_cp_async(threads: int = 256, stages: int = 4) -> Kernel:
    """cp.async into a ring in shared memory, ordinary stores out of it; each thread minds its own 16 bytes a stage."""
    ahead_by = stages - 1
    smem = Shared(chunk=Buffer((stages, threads * 16), np.uint8))

    @kernel(threads=threads, shared=smem)
    def copy_cp_async(source, target):
        nbytes = uint64(source.size)
        thread = uint32(cuda.threadIdx.x)
        slot = uint32(thread * uint32(16))
        step = uint64(cuda.gridDim.x) * uint64(threads * 16)
        first = (uint64(cuda.blockIdx.x) * uint64(threads) + uint64(thread)) * uint64(16)
        ahead = first
        for stage in range(ahead_by):
            if ahead < nbytes:
                valid = uint32(min(nbytes - ahead, uint64(16)))
                ptx.cp_async_cg_16_zfill(smem.chunk.address_of(stage, slot), ptx.global_address(source) + ahead, valid)
            ptx.cp_async_commit_group()
            ahead += step
        count = uint32(0)
        offset = first
        while offset < nbytes:
            stage, _ = ring(uint32(count + uint32(ahead_by)), stages)
            if ahead < nbytes:
                valid = uint32(min(nbytes - ahead, uint64(16)))
                ptx.cp_async_cg_16_zfill(smem.chunk.address_of(stage, slot), ptx.global_address(source) + ahead, valid)
            ptx.cp_async_commit_group()
            ptx.cp_async_wait_group(ahead_by)  # this thread's own copies: no block barrier is needed
            stage, _ = ring(count, stages)
            if offset + uint64(16) <= nbytes:
                a, b, c, d = ptx.ld_shared_v4_u32(smem.chunk.address_of(stage, slot))
                ptx.st_global_v4_u32(ptx.global_address(target) + offset, a, b, c, d)
            else:
                for j in range(16):
                    if offset + uint64(j) < nbytes:
                        target[offset + uint64(j)] = smem.chunk[stage, slot + uint32(j)]
            ahead += step
            offset += step
            count = uint32(count + uint32(1))

    return copy_cp_async


@functools.cache
def make_bulk(stage_bytes: int = 4096, stages: int = 12, lag: int = 4) -> Kernel:
    """Stretches of memory through a ring, in and out by the copy engine; one thread a block does it all.

    A stage is refilled `lag` steps after its store was issued: by then the engine has read it, and the loads of the
    other stages - lag are still in flight.
    """
    if stage_bytes < 16 or stage_bytes % 16:
        raise ValueError(f"stage_bytes {stage_bytes}: the copy engine moves multiples of 16 bytes")
    if not 0 <= lag < stages:
        raise ValueError(f"lag {lag} of {stages} stages: it must be 0 to {stages - 1}, so that a load is in flight")
    smem = Shared(chunk=Tiles(stages, (stage_bytes,), np.uint8), full=Barriers(stages))

    @cuda.jit(device=True, forceinline=True)
    def fetch(source, chunk, nbytes, stage):
        offset = uint64(chunk) * uint64(stage_bytes)
        length = uint32(min(nbytes - offset, uint64(stage_bytes)))
        bar = smem.full[stage]
        ptx.mbarrier_arrive_expect_tx(bar, length)
        ptx.cp_async_bulk_shared_global(smem.chunk[stage], ptx.global_address(source) + offset, length, bar)

    @kernel(threads=32, shared=smem)
    def copy_bulk(source, target):
        # The engine moves multiples of 16 bytes; the block that would take the next chunk moves the rest.
        nbytes = uint64(source.size) & ~uint64(15)
        chunks = uint32((nbytes + uint64(stage_bytes - 1)) // uint64(stage_bytes))
        step = uint32(cuda.gridDim.x)
        chunk = uint32(cuda.blockIdx.x)
        if cuda.threadIdx.x == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            ahead = chunk
            for stage in range(stages - lag):
                if ahead < chunks:
                    fetch(source, ahead, nbytes, stage)
                ahead = uint32(ahead + step)
            count = uint32(0)
            while chunk < chunks:
                stage, phase = ring(count, stages)
                mbarrier_wait(smem.full[stage], phase)
                offset = uint64(chunk) * uint64(stage_bytes)
                length = uint32(min(nbytes - offset, uint64(stage_bytes)))
                ptx.cp_async_bulk_global_shared(ptx.global_address(target) + offset, smem.chunk[stage], length)
                ptx.cp_async_bulk_commit_group()
                if ahead < chunks:
                    # All but the newest `lag` stores have been read out of shared memory.
                    ptx.cp_async_bulk_wait_group_read(lag)
                    refill, _ = ring(uint32(count + uint32(stages - lag)), stages)
                    fetch(source, ahead, nbytes, refill)
                ahead = uint32(ahead + step)
                chunk = uint32(chunk + step)
                count = uint32(count + uint32(1))
            ptx.cp_async_bulk_wait_group(0)
        rest = uint64(nbytes) + uint64(cuda.threadIdx.x)
        if cuda.blockIdx.x == 0 and rest < uint64(source.size):
            target[rest] = source[rest]

    return copy_bulk


@functools.cache
def make_tensor(box: tuple[int, int], dtype: str) -> Kernel:
    """One box of a matrix a block, by tensor map; the engine cuts the boxes that hang over the edge.

    There is no ring: while one block waits for its box, the SM runs a dozen others. Where blocks are small and many,
    they hide the latency by themselves, and the memory sees its addresses in order.
    """
    smem = Shared(tile=Tiles(1, box, dtype), full=Barriers(1))

    @kernel(threads=32, shared=smem)
    def copy_tensor(source_map, target_map):
        if cuda.threadIdx.x == 0:
            column = uint32(cuda.blockIdx.x) * uint32(box[1])
            row = uint32(cuda.blockIdx.y) * uint32(box[0])
            tile, bar = smem.tile[0], smem.full[0]
            ptx.mbarrier_init(bar, 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(bar, source_map.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(tile, source_map, column, row, bar)
            mbarrier_wait(bar, 0)
            ptx.cp_async_bulk_tensor_2d_global_shared(target_map, column, row, tile)
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group(0)  # shared memory must not be given away while the engine reads it

    return copy_tensor


# ---------------------------------------------------------------------------------------------------------------------
# Host side.

BOX_BYTES = 16384


def default_box(itemsize: int, columns: int) -> tuple[int, int]:
    """A box of at most 16 KB: as wide as 256 elements and the matrix allow, in whole multiples of 16 bytes."""
    align = max(16 // itemsize, 1)
    width = min(256, -(-columns // align) * align)
    return max(1, min(256, BOX_BYTES // (width * itemsize))), width


def blocks_for(work: int, per_multiprocessor: int) -> int:
    """Blocks for a grid-stride kernel: enough to fill the GPU, no more than there is work. 132 SMs in the simulator."""
    multiprocessors = 132
    if driver.device_count() and backend() != "sim":
        multiprocessors = driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device())
    return max(1, min(work, multiprocessors * per_multiprocessor))


def _bind_plain(arrays: Mapping[str, Any], *, threads: int = 256, stream: object = None, **_: Any) -> Callable[[], Any]:
    described = view(arrays["source"])
    flat = [reinterpret(arrays[n], described.dtype, (described.size,), (described.dtype.itemsize,)) for n in NAMES]
    return make_plain(threads)[blocks_for(-(-described.size // threads), 16), None, stream].bind(*flat)


def _bind_vector(
    arrays: Mapping[str, Any], *, threads: int = 256, unroll: int = 4, stream: object = None, **_: Any
) -> Callable[[], Any]:
    source, target = (as_bytes(arrays[name]) for name in NAMES)
    blocks = max(1, -(-source.shape[0] // (16 * threads * unroll)))
    return make_vector(threads, unroll)[blocks, None, stream].bind(source, target)


def _bind_cp_async(
    arrays: Mapping[str, Any], *, threads: int = 256, stages: int = 4, stream: object = None, **_: Any
) -> Callable[[], Any]:
    source, target = (as_bytes(arrays[name]) for name in NAMES)
    blocks = blocks_for(-(-source.shape[0] // (16 * threads)), 8)
    return make_cp_async(threads, stages)[blocks, None, stream].bind(source, target)


def _bind_bulk(
    arrays: Mapping[str, Any],
    *,
    stage_bytes: int = 4096,
    stages: int = 12,
    lag: int = 4,
    per_multiprocessor: int = 4,
    stream: object = None,
    **_: Any,
) -> Callable[[], Any]:
    source, target = (as_bytes(arrays[name]) for name in NAMES)
    blocks = blocks_for(-(-source.shape[0] // stage_bytes), per_multiprocessor)
    return make_bulk(stage_bytes, stages, lag)[blocks, None, stream].bind(source, target)


def _bind_tensor(
    arrays: Mapping[str, Any],
    *,
    box: tuple[int, int] | None = None,
    l2_promotion: str = "128B",
    stream: object = None,
    **_: Any,
) -> Callable[[], Any]:
    described = view(arrays["source"])
    box = box or default_box(described.dtype.itemsize, described.shape[1])
    source_map = TensorMap(arrays["source"], box, l2_promotion=l2_promotion, store=False)
    target_map = TensorMap(arrays["target"], box)
    grid = (-(-described.shape[1] // box[1]), -(-described.shape[0] // box[0]))
    if grid[1] > 65535:
        raise ValueError(
            f"{described.shape[0]} rows in boxes of {box[0]} are {grid[1]} blocks; the grid's y ends at 65535"
        )
    return make_tensor(box, described.dtype.name)[grid, None, stream].bind(source_map, target_map)


NAMES = ("source", "target")
OPTIONS = {
    "plain": ("threads",),
    "vector": ("threads", "unroll"),
    "cp_async": ("threads", "stages"),
    "bulk": ("stage_bytes", "stages", "lag", "per_multiprocessor"),
    "tensor": ("box", "l2_promotion"),
}


def copy(source: Any, target: Any, *, variant: str | None = None, **options: Any) -> None:
    """target[...] = source.

    Args:
        source, target: matrices (rows, columns) of one shape and dtype, on one device. All variants but `tensor`
            need them row-major contiguous; `tensor` takes padded rows, which must start on multiples of 16 bytes and
            be whole multiples of 16 bytes long, since the copy engine writes no less.
        variant: plain, vector, cp_async, bulk or tensor; by default the fastest that the layout allows.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes or layouts differ or do not fit the variant, an option's value does not, source and
            target share memory, or one of them has an extent of 2^31 or more (`tensor` alone).
    """
    a, b = view(source), view(target)
    if a is None or b is None:
        raise TypeError(f"copy of a {type(source).__name__} to a {type(target).__name__}: two arrays expected")
    if a.shape != b.shape or a.dtype != b.dtype or len(a.shape) != 2:
        raise ValueError(
            f"source {a.dtype} {a.shape} and target {b.dtype} {b.shape}: two matrices of one shape and dtype expected"
        )
    contiguous, aligned = a.layout == b.layout == "C", a.pointer % 16 == b.pointer % 16 == 0
    variant = variant or ("tensor" if not contiguous else "vector" if aligned else "plain")
    chosen, views = PROBLEM.variant(variant), {"source": a, "target": b}
    if variant == "tensor":
        check_extents("copy.tensor", views)
    check_written(f"copy.{variant}", views, "target")
    if variant != "tensor" and not contiguous:
        raise ValueError(f"copy.{variant} needs row-major contiguous arrays; variant='tensor' takes padded rows")
    if variant != "plain" and not aligned:
        raise ValueError(
            f"copy.{variant} needs addresses on multiples of 16 B, got {a.pointer:#x} and {b.pointer:#x}; "
            f"variant='plain' takes any"
        )
    check_options("copy", chosen, options, OPTIONS[variant])
    if variant == "tensor" and b.shape[1] * b.dtype.itemsize % 16 and b.size:
        raise ValueError(
            f"copy.tensor: the target's rows of {b.shape[1]} × {b.dtype} end within 16 B, and the copy engine would "
            f"write on to the next multiple; contiguous matrices of any length are for the other variants"
        )
    if a.size:
        chosen.bind({"source": source, "target": target}, **options)()


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    dtype = dtypes.lookup(case.dtype).numpy
    nbytes = case.shape[0] * case.shape[1] * dtype.itemsize
    source = np.frombuffer(rng.bytes(nbytes), dtype).reshape(case.shape)
    return {"source": source, "target": np.empty(case.shape, dtype)}


def _case(rows: int, columns: int, dtype: str) -> Case:
    return Case((rows, columns), dtype)


PROBLEM = Problem(
    name="copy",
    title="copy a matrix",
    inputs=_inputs,
    outputs=("target",),
    reference=lambda arrays, case: {"target": arrays["source"]},
    bytes_moved=lambda case: 2 * case.shape[0] * case.shape[1] * dtypes.lookup(case.dtype).numpy.itemsize,
    flops=lambda case: 0,
    variants=(
        Variant("plain", "ld/st", "one element a thread and step", _bind_plain, baseline=True),
        Variant("vector", "ld/st", "16 bytes a thread and access", _bind_vector),
        Variant("cp_async", "cp.async", "a ring in shared memory, filled past the registers", _bind_cp_async),
        Variant("bulk", "TMA", "the copy engine, stretches of memory through a ring", _bind_bulk),
        Variant("tensor", "TMA", "the copy engine, one box of the matrix a block", _bind_tensor),
    ),
    cases={
        ("default", "sim"): [_case(512, 512, "float32"), _case(37, 1008, "uint8")],
        ("quick", "sim"): [_case(64, 128, "float32"), _case(37, 48, "uint8")],
        ("default", "gpu"): [
            _case(16384, 16384, "float32"),
            _case(1000, 4000, "float16"),
            _case(32768, 32768, "uint8"),
        ],
        ("quick", "gpu"): [_case(4096, 4096, "float32"), _case(37, 1008, "uint8")],
    },
)

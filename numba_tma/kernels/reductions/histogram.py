"""Count how often each value occurs: many increments of few places.

The problem. For N values of uint8 or uint16:

    out[0, v] = how many of them are v,    v = 0 … bins-1;  larger values are not counted

What moves the data: an atomic addition a value in global memory (plain), in a histogram of the block's own in shared
memory (shared), with 16-byte loads (vector), with bulk copies (bulk). A block's histogram must be added to the result
in the end: bins atomics of its threads, or, by the copy engine, one reduction of bins · 4 bytes.

Costs: each value is read once. What limits is where they meet: one atomic operation at a time on an address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import uint32, uint64

from ... import arrays, driver, ptx
from ...arrays import ArrayView
from ...launch import Kernel, backend, kernel
from ...pipeline import mbarrier_wait, release_to_async, ring
from ...shared import Barriers, Shared, Tiles
from ..calls import check_written, viewed
from ..peers import as_torch
from ..problem import Case, Problem, Variant, check_options
from .zero import after_zeros

DTYPES = ("uint8", "uint16")
MAX_BINS = 8192  # 32 KB of static shared memory a block


@functools.cache
def make_plain(threads: int = 256) -> Kernel:
    """Every value is an atomic addition in global memory."""

    @kernel(threads=threads)
    def histogram_plain(x, out):
        step = uint64(cuda.gridDim.x) * uint64(threads)
        i = uint64(cuda.blockIdx.x) * uint64(threads) + uint64(cuda.threadIdx.x)
        while i < uint64(x.size):
            value = x[i]
            if value < out.shape[1]:
                cuda.atomic.add(out, (0, value), uint32(1))
            i += step

    return histogram_plain


@functools.cache
def make_shared(bins: int, threads: int = 256) -> Kernel:
    """A block counts in shared memory, and adds what it has to the result at its end."""

    @kernel(threads=threads)
    def histogram_shared(x, out):
        counts = cuda.shared.array(bins, uint32)
        for i in range(cuda.threadIdx.x, bins, threads):
            counts[i] = 0
        cuda.syncthreads()
        step = uint64(cuda.gridDim.x) * uint64(threads)
        i = uint64(cuda.blockIdx.x) * uint64(threads) + uint64(cuda.threadIdx.x)
        while i < uint64(x.size):
            value = x[i]
            if value < bins:
                cuda.atomic.add(counts, value, uint32(1))
            i += step
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, bins, threads):
            if counts[i] > 0:
                cuda.atomic.add(out, (0, i), counts[i])

    return histogram_shared


def _make_count(bins: int, dtype: str) -> Callable:
    """count(counts, word): the two or four values of a word."""
    shift, number = (8, 4) if dtype == "uint8" else (16, 2)
    mask = (1 << shift) - 1
    checked = mask >= bins

    @cuda.jit(device=True, forceinline=True)
    def count(counts, word):
        for j in range(number):
            value = uint32(uint32(word >> uint32(j * shift)) & uint32(mask))
            if checked:
                if value < uint32(bins):
                    cuda.atomic.add(counts, value, uint32(1))
            else:
                cuda.atomic.add(counts, value, uint32(1))

    return count


def _make_rest(bins: int) -> Callable:
    """rest(x, counts, first, thread): the values from number `first` on, fewer than 16 bytes, by the first block."""

    @cuda.jit(device=True, forceinline=True)
    def rest(x, counts, first, thread):
        i = uint64(first) + uint64(thread)
        if cuda.blockIdx.x == 0 and i < uint64(x.size):
            value = x[i]
            if value < bins:
                cuda.atomic.add(counts, value, uint32(1))

    return rest


def _check_warps(threads: int) -> None:
    """The last values, up to 15 of them, are counted by a thread each."""
    if threads % 32:
        raise ValueError(f"threads {threads}: whole warps of 32 expected")


@functools.cache
def make_vector(bins: int, dtype: str, threads: int = 256) -> Kernel:
    """As `make_shared`, with 16 bytes a load."""
    _check_warps(threads)
    count, rest = _make_count(bins, dtype), _make_rest(bins)
    values = 16 if dtype == "uint8" else 8

    @kernel(threads=threads)
    def histogram_vector(x, out):
        counts = cuda.shared.array(bins, uint32)
        for i in range(cuda.threadIdx.x, bins, threads):
            counts[i] = 0
        cuda.syncthreads()
        vectors = uint64(x.size) // uint64(values)
        step = uint64(cuda.gridDim.x) * uint64(threads)
        i = uint64(cuda.blockIdx.x) * uint64(threads) + uint64(cuda.threadIdx.x)
        while i < vectors:
            a, b, c, d = ptx.ld_global_nc_v4_u32(ptx.global_address(x) + i * uint64(16))
            count(counts, a)
            count(counts, b)
            count(counts, c)
            count(counts, d)
            i += step
        rest(x, counts, vectors * uint64(values), cuda.threadIdx.x)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, bins, threads):
            if counts[i] > 0:
                cuda.atomic.add(out, (0, i), counts[i])

    return histogram_vector


@functools.cache
def make_bulk(bins: int, dtype: str, threads: int = 256, stages: int = 3, stage_vectors: int = 4) -> Kernel:
    """Values come by bulk copies through a ring; the block's counts leave by one bulk reduction.

    A stage has `stage_vectors` vectors of 16 bytes for each thread.
    """
    _check_warps(threads)
    count, rest = _make_count(bins, dtype), _make_rest(bins)
    values = 16 if dtype == "uint8" else 8
    stage_bytes = threads * stage_vectors * 16
    smem = Shared(chunk=Tiles(stages, (stage_bytes,), np.uint8), full=Barriers(stages))

    @cuda.jit(device=True, forceinline=True)
    def fetch(x, chunk, nbytes, stage):
        offset = uint64(chunk) * uint64(stage_bytes)
        length = uint32(min(uint64(nbytes) - offset, uint64(stage_bytes)))
        ptx.mbarrier_arrive_expect_tx(smem.full[stage], length)
        ptx.cp_async_bulk_shared_global(smem.chunk[stage], ptx.global_address(x) + offset, length, smem.full[stage])

    @kernel(threads=threads, shared=smem)
    def histogram_bulk(x, out):
        counts = cuda.shared.array(bins, uint32, alignment=16)
        thread = uint32(cuda.threadIdx.x)
        nbytes = uint64(x.size) // uint64(values) * uint64(16)
        chunks = uint32((nbytes + uint64(stage_bytes - 1)) // uint64(stage_bytes))
        step = uint32(cuda.gridDim.x)
        chunk = uint32(cuda.blockIdx.x)
        ahead = chunk
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            for stage in range(stages):
                if ahead < chunks:
                    fetch(x, ahead, nbytes, uint32(stage))
                ahead = uint32(ahead + step)
        for i in range(thread, bins, threads):
            counts[i] = 0
        cuda.syncthreads()
        turn = uint32(0)
        while chunk < chunks:
            stage, phase = ring(turn, stages)
            left = nbytes - uint64(chunk) * uint64(stage_bytes)
            mbarrier_wait(smem.full[stage], phase)
            for i in range(stage_vectors):
                offset = uint32(uint32(thread + uint32(i * threads)) * uint32(16))
                if uint64(offset) < left:
                    a, b, c, d = ptx.ld_shared_v4_u32(smem.chunk[stage].address_of(offset))
                    count(counts, a)
                    count(counts, b)
                    count(counts, c)
                    count(counts, d)
            release_to_async()
            if thread == 0:
                if ahead < chunks:
                    fetch(x, ahead, nbytes, stage)
                ahead = uint32(ahead + step)
            chunk = uint32(chunk + step)
            turn = uint32(turn + uint32(1))
        rest(x, counts, nbytes // uint64(16 // values), thread)
        release_to_async()
        if thread == 0:
            ptx.cp_reduce_async_bulk_global_shared_add_u32(ptx.global_address(out), counts, uint32(bins * 4))
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group_read(0)

    return histogram_bulk


# ---------------------------------------------------------------------------------------------------------------------
# Host side.


def _blocks(chunks: int, per_multiprocessor: int) -> int:
    """Blocks that stay: as many as an SM holds at once, no more than there is work. 132 SMs in the simulator."""
    multiprocessors = 132
    if driver.device_count() and backend() != "sim":
        multiprocessors = driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device())
    return max(1, min(chunks, multiprocessors * per_multiprocessor))


def _bind(make: Callable[[int, str, int], Kernel], bytes_a_thread: int) -> Callable[..., Callable[[], Any]]:
    """Bind a kernel made from (bins, dtype, threads), whose threads take so many bytes at a time."""

    def bind(
        given: Mapping[str, Any],
        *,
        threads: int = 256,
        per_multiprocessor: int = 4,
        zeros: bool = True,
        stream: object = None,
        **options: int,
    ) -> Callable[[], Any]:
        x, out = arrays.view(given["x"]), arrays.view(given["out"])
        nbytes = bytes_a_thread or x.dtype.itemsize
        blocks = _blocks(-(-x.size * x.dtype.itemsize // (threads * nbytes)), per_multiprocessor)
        made = make(out.shape[1], x.dtype.name, threads, **options)
        launch = made[blocks, None, stream].bind(given["x"], given["out"])
        return after_zeros(given["out"], stream, launch) if zeros else launch

    return bind


OPTIONS = {
    "plain": ("threads", "per_multiprocessor"),
    "shared": ("threads", "per_multiprocessor"),
    "vector": ("threads", "per_multiprocessor"),
    "bulk": ("threads", "per_multiprocessor", "stages", "stage_vectors"),
}


def histogram(x: Any, out: Any, *, variant: str | None = None, zeros: bool = True, **options: Any) -> None:
    """out[0, v] = how many of the numbers in x are v.

    Args:
        x: N numbers of uint8 or uint16, contiguous; on a multiple of 16 bytes for `vector` and `bulk`.
        out: uint32 (1, bins), up to 8192 bins (for `plain` any number); larger values are not counted. For `bulk` a
            multiple of 4 bins, contiguous and on a multiple of 16 bytes. Counts begin anew at 2^32.
        variant: plain, shared, vector or bulk; by default the last of them that the arrays allow.
        zeros: fill `out` with zeros first; without, counts are added to it.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes or layouts do not fit, or x and out share memory; the message says what would do.
    """
    views = viewed("histogram", x=x, out=out)
    described, counts = views["x"], views["out"]
    if described.dtype.name not in DTYPES or len(described.shape) != 1 or described.layout != "C":
        raise ValueError(
            f"histogram: x is {described.dtype} {described.shape}; contiguous numbers of {' or '.join(DTYPES)} expected"
        )
    if counts.dtype != np.uint32 or len(counts.shape) != 2 or counts.shape[0] != 1 or not counts.size:
        raise ValueError(f"histogram: out is {counts.dtype} {counts.shape}; uint32 (1, bins) expected")
    check_written("histogram", views, "out")
    variant = variant or next(name for name in _FASTEST_FIRST if _unfit(name, described, counts) is None)
    chosen = PROBLEM.variant(variant)
    check_options("histogram", chosen, options, OPTIONS[variant])
    unfit = _unfit(variant, described, counts)
    if unfit:
        raise ValueError(f"histogram.{variant}: {unfit}")
    if described.size:
        chosen.bind({"x": x, "out": out}, zeros=zeros, **options)()
    elif zeros:
        after_zeros(out, options.get("stream"), lambda: None)()


_FASTEST_FIRST = ("bulk", "vector", "shared", "plain")


def _unfit(variant: str, x: ArrayView, out: ArrayView) -> str | None:
    """Why a variant cannot take these arrays, or None."""
    bins = out.shape[1]
    if variant != "plain" and bins > MAX_BINS:
        return f"{bins} bins; a block's own counts are at most {MAX_BINS}: take variant='plain'"
    if variant in ("vector", "bulk") and x.pointer % 16:
        return f"x at {x.pointer:#x}; it must be a multiple of 16 B: copy it, or take variant='shared'"
    if variant == "bulk" and bins % 4:
        return f"{bins} bins; the copy engine adds multiples of 4: take variant='vector'"
    if variant == "bulk" and out.pointer % 16:
        return f"out at {out.pointer:#x}; it must be a multiple of 16 B: copy it, or take variant='vector'"
    if variant == "bulk" and bins > 1 and out.strides[1] != out.dtype.itemsize:
        return (
            f"out's counts lie {out.strides[1]} B apart; the copy engine adds to contiguous ones: take variant='vector'"
        )
    return None


def reference(x: np.ndarray, bins: int) -> np.ndarray:
    """Counts of shape (1, bins)."""
    return np.bincount(x, minlength=bins)[:bins].astype(np.uint32)[None]


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    count, bins = case.shape
    dtype = np.dtype(case.dtype)
    # A few are too large, where the type has room for them.
    high = min(bins + bins // 8, np.iinfo(dtype).max + 1)
    return {"x": rng.integers(0, high, count, dtype), "out": np.empty((1, bins), np.uint32)}


def _torch(given: Mapping[str, Any], **_: Any) -> Callable[[], Any] | None:
    """torch.bincount, for the values of eight bits that it takes."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or arrays.view(given["x"]).dtype != np.uint8:
        return None
    x, bins = as_torch(given["x"]), arrays.view(given["out"]).shape[1]
    return lambda: torch.bincount(x, minlength=bins)


PROBLEM = Problem(
    name="histogram",
    title="count how often each value occurs",
    inputs=_inputs,
    outputs=("out",),
    reference=lambda arrays, case: {"out": reference(arrays["x"], case.shape[1])},
    bytes_moved=lambda case: case.shape[0] * np.dtype(case.dtype).itemsize,
    flops=lambda case: case.shape[0],
    variants=(
        Variant(
            "plain",
            "atomics",
            "an atomic addition in global memory a value",
            _bind(lambda bins, dtype, threads: make_plain(threads), 0),
            baseline=True,
        ),
        Variant(
            "shared",
            "atomics",
            "a histogram a block in shared memory",
            _bind(lambda bins, dtype, threads: make_shared(bins, threads), 0),
        ),
        Variant("vector", "atomics", "16 bytes a load", _bind(make_vector, 16)),
        Variant("bulk", "TMA", "values by bulk copies, counts by one bulk reduction a block", _bind(make_bulk, 64)),
    ),
    cases={
        ("default", "sim"): [Case((10007, 256), "uint8"), Case((5001, 1024), "uint16")],
        ("quick", "sim"): [Case((3001, 256), "uint8"), Case((1501, 512), "uint16")],
        ("default", "gpu"): [
            Case((1 << 27, 256), "uint8"),
            Case((1 << 22, 4096), "uint16"),
        ],
        ("quick", "gpu"): [Case((1_000_003, 256), "uint8"), Case((1_000_001, 1024), "uint16")],
    },
    peers={"torch": _torch},
)

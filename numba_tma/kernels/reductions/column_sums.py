"""Sum the rows of a matrix into one: the gradient of a bias, partial sums that many blocks have a part in.

The problem. For a float32 matrix of R rows and C columns, C a multiple of 4 for the copy engine:

    out[0, c] = sum over r of x[r, c]

Columns alone are too few to fill a GPU, so blocks take strips of rows, and what they have must be put together.

What moves the data: loads (plain), atomics at the end of a strip (strips), bulk copies through a ring and a bulk
reduction at the end (bulk), and, to see what the L2 cache can add, the copy engine alone: each row is copied into
shared memory and added to the result from there, by no thread at all (engine).

Costs: R · C · 4 bytes read, and R · C additions. The partial rows of all strips, R / strip · C · 4 bytes more, are
added by the L2 cache; for `engine` that is the whole matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import arrays, ptx
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait, release_to_async, ring
from ...shared import Barriers, Shared, Tiles
from ..calls import check_extents, check_written, in_vectors, viewed
from ..peers import as_torch
from ..problem import Case, Problem, Variant, check_options
from .zero import after_zeros


@functools.cache
def make_plain(threads: int = 256) -> Kernel:
    """A thread a column."""

    @kernel(threads=threads)
    def column_sums_plain(x, out, strip):
        column = uint32(uint32(cuda.blockIdx.x) * uint32(threads) + uint32(cuda.threadIdx.x))
        if column < uint32(x.shape[1]):
            total = float32(0)
            for row in range(x.shape[0]):
                total += x[row, column]
            out[0, column] = total

    return column_sums_plain


@functools.cache
def make_strips(threads: int = 256) -> Kernel:
    """A thread a column of a strip of rows, and an atomic addition at its end."""

    @kernel(threads=threads)
    def column_sums_strips(x, out, strip):
        column = uint32(uint32(cuda.blockIdx.x) * uint32(threads) + uint32(cuda.threadIdx.x))
        first = uint32(uint32(cuda.blockIdx.y) * uint32(strip))
        end = uint32(min(uint32(first + uint32(strip)), uint32(x.shape[0])))
        if column < uint32(x.shape[1]):
            total = float32(0)
            for row in range(first, end):
                total += x[row, column]
            cuda.atomic.add(out, (0, column), total)

    return column_sums_strips


def _make_fetch(smem: Shared, columns: int) -> Callable:
    @cuda.jit(device=True, forceinline=True)
    def fetch(x, row, first, length, stage):
        """A row's part, `length` bytes from column `first` on, into a stage."""
        ptx.mbarrier_arrive_expect_tx(smem.full[stage], length)
        source = ptx.global_address(x) + uint64(row) * uint64(x.strides[0]) + uint64(first) * uint64(4)
        ptx.cp_async_bulk_shared_global(smem.part[stage], source, length, smem.full[stage])

    return fetch


@functools.cache
def make_bulk(threads: int = 256, stages: int = 8) -> Kernel:
    """A strip's rows come through a ring, four columns a thread; the partial row leaves by one bulk reduction."""
    columns = 4 * threads
    smem = Shared(part=Tiles(stages, (columns,), float32), total=Tiles(1, (columns,), float32), full=Barriers(stages))
    fetch = _make_fetch(smem, columns)

    @kernel(threads=threads, shared=smem)
    def column_sums_bulk(x, out, strip):
        thread = uint32(cuda.threadIdx.x)
        first = uint32(uint32(cuda.blockIdx.x) * uint32(columns))
        length = uint32(uint32(4) * uint32(min(uint32(columns), uint32(uint32(x.shape[1]) - first))))
        row = uint32(uint32(cuda.blockIdx.y) * uint32(strip))
        rows = uint32(min(uint32(strip), uint32(uint32(x.shape[0]) - row)))
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            for stage in range(stages):
                if uint32(stage) < rows:
                    fetch(x, uint32(row + uint32(stage)), first, length, uint32(stage))
        cuda.syncthreads()
        offset = uint32(thread * uint32(4))
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        for turn in range(rows):
            stage, phase = ring(turn, stages)
            mbarrier_wait(smem.full[stage], phase)
            if uint32(offset * uint32(4)) < length:
                e, f, g, h = ptx.ld_shared_v4_f32(smem.part[stage].address_of(offset))
                a += e
                b += f
                c += g
                d += h
            release_to_async()
            ahead = uint32(uint32(turn) + uint32(stages))
            if thread == 0 and ahead < rows:
                fetch(x, uint32(row + ahead), first, length, stage)
        ptx.st_shared_v4_f32(smem.total[0].address_of(offset), a, b, c, d)
        release_to_async()
        if thread == 0:
            target = ptx.global_address(out) + uint64(first) * uint64(4)
            ptx.cp_reduce_async_bulk_global_shared_add_f32(target, smem.total[0], length)
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group_read(0)

    return column_sums_bulk


@functools.cache
def make_engine(columns: int = 1024, stages: int = 8, lag: int = 4) -> Kernel:
    """A row in, and from there added to the result; one thread a block, which sees no element."""
    if not 0 <= lag < stages:
        raise ValueError(f"lag {lag} of {stages} stages: it must be 0 to {stages - 1}, so that a load is in flight")
    if columns % 4:
        raise ValueError(f"columns {columns}: the copy engine moves multiples of 16 B, so multiples of 4 float32")
    smem = Shared(part=Tiles(stages, (columns,), float32), full=Barriers(stages))
    fetch = _make_fetch(smem, columns)

    @kernel(threads=32, shared=smem)
    def column_sums_engine(x, out, strip):
        first = uint32(uint32(cuda.blockIdx.x) * uint32(columns))
        length = uint32(uint32(4) * uint32(min(uint32(columns), uint32(uint32(x.shape[1]) - first))))
        row = uint32(uint32(cuda.blockIdx.y) * uint32(strip))
        rows = uint32(min(uint32(strip), uint32(uint32(x.shape[0]) - row)))
        if cuda.threadIdx.x == 0:
            for stage in range(stages):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            for stage in range(stages - lag):
                if uint32(stage) < rows:
                    fetch(x, uint32(row + uint32(stage)), first, length, uint32(stage))
            target = ptx.global_address(out) + uint64(first) * uint64(4)
            for turn in range(rows):
                stage, phase = ring(turn, stages)
                mbarrier_wait(smem.full[stage], phase)
                ptx.cp_reduce_async_bulk_global_shared_add_f32(target, smem.part[stage], length)
                ptx.cp_async_bulk_commit_group()
                ahead = uint32(uint32(turn) + uint32(stages - lag))
                if ahead < rows:
                    ptx.cp_async_bulk_wait_group_read(lag)
                    refill, _ = ring(ahead, stages)
                    fetch(x, uint32(row + ahead), first, length, refill)
            ptx.cp_async_bulk_wait_group(0)

    return column_sums_engine


# ---------------------------------------------------------------------------------------------------------------------
# Host side.


def _bind(make: Callable[..., Kernel], columns: Callable[[dict], int], aligned: bool) -> Callable[..., Any]:
    """Bind a kernel of (x, out, strip); `columns` gives a block's columns from its options."""

    def bind(
        given: Mapping[str, Any], *, strip: int = 128, zeros: bool = True, stream: object = None, **options: int
    ) -> Callable[[], Any]:
        x = arrays.view(given["x"])
        if aligned:
            _need_vectors(given)
        strips = 1 if make is make_plain else -(-x.shape[0] // strip)
        grid = (-(-x.shape[1] // columns(options)), strips)
        launch = make(**options)[grid, None, stream].bind(given["x"], given["out"], np.uint32(strip))
        return after_zeros(given["out"], stream, launch) if zeros and make is not make_plain else launch

    return bind


def _need_vectors(given: Mapping[str, Any]) -> None:
    for name in ("x", "out"):
        described = arrays.view(given[name])
        if not in_vectors(described):
            raise ValueError(
                f"column_sums: {name} has rows of {described.shape[1]} float32 and strides {described.strides} B, at "
                f"{described.pointer:#x}; the copy engine takes multiples of 16 B and contiguous rows: pad with zeros, "
                f"or take variant 'strips', which takes any"
            )


OPTIONS = {
    "plain": ("threads",),
    "strips": ("threads", "strip"),
    "bulk": ("threads", "strip", "stages"),
    "engine": ("columns", "strip", "stages", "lag"),
}


def column_sums(x: Any, out: Any, *, variant: str | None = None, **options: Any) -> None:
    """out[0, c] = sum over r of x[r, c]; in which order is not defined, but for `plain`.

    Args:
        x: float32 (R, C), of any strides.
        out: float32 (1, C), written.
        variant: plain, strips, bulk or engine; by default bulk, or strips where rows of x or out are no multiples of 16
            bytes, or not contiguous.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes or layouts do not fit, an extent is 2^31 or more, or x and out share memory; the
            message says what would do.
    """
    views = viewed("column_sums", x=x, out=out)
    matrix, sums = views["x"], views["out"]
    if matrix.dtype != np.float32 or len(matrix.shape) != 2:
        raise ValueError(f"column_sums: x is {matrix.dtype} {matrix.shape}; a float32 matrix expected")
    if sums.dtype != np.float32 or sums.shape != (1, matrix.shape[1]):
        raise ValueError(f"column_sums: out is {sums.dtype} {sums.shape}; float32 (1, {matrix.shape[1]}) expected")
    check_extents("column_sums", views)
    check_written("column_sums", views, "out")
    variant = variant or ("bulk" if all(map(in_vectors, views.values())) else "strips")
    chosen = PROBLEM.variant(variant)
    check_options("column_sums", chosen, options, OPTIONS[variant])
    if matrix.size:
        chosen.bind({"x": x, "out": out}, **options)()
    elif sums.size:
        after_zeros(out, options.get("stream"), lambda: None)()


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    rows, columns = case.shape
    return {"x": rng.standard_normal((rows, columns), np.float32), "out": np.empty((1, columns), np.float32)}


def _torch(given: Mapping[str, Any], **_: Any) -> Callable[[], Any] | None:
    """torch.sum over the rows."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    x, out = as_torch(given["x"]), as_torch(given["out"])
    return lambda: torch.sum(x, 0, keepdim=True, out=out)


def _case(rows: int, columns: int, **tuned: Mapping[str, Any]) -> Case:
    return Case((rows, columns), "float32", {}, tuned)


# Strips of few rows, so that small matrices have several.
SMALL = {"strips": {"strip": 16}, "bulk": {"strip": 16, "stages": 3}, "engine": {"strip": 16, "stages": 3, "lag": 1}}

PROBLEM = Problem(
    name="column_sums",
    title="sum the rows of a matrix into one",
    inputs=_inputs,
    outputs=("out",),
    reference=lambda arrays, case: {"out": arrays["x"].astype(np.float64).sum(axis=0, keepdims=True)},
    bytes_moved=lambda case: 4 * (case.shape[0] + 1) * case.shape[1],
    flops=lambda case: case.shape[0] * case.shape[1],
    variants=(
        Variant(
            "plain",
            "ld/st",
            "a thread a column",
            _bind(make_plain, lambda o: o.get("threads", 256), False),
            baseline=True,
        ),
        Variant(
            "strips",
            "atomics",
            "strips of rows, put together by atomics",
            _bind(make_strips, lambda o: o.get("threads", 256), False),
        ),
        Variant(
            "bulk",
            "TMA",
            "rows by bulk copies, partial sums by a bulk reduction",
            _bind(make_bulk, lambda o: 4 * o.get("threads", 256), True),
        ),
        Variant(
            "engine",
            "TMA",
            "rows in and reduced out: no thread adds",
            _bind(make_engine, lambda o: o.get("columns", 1024), True),
        ),
    ),
    cases={
        ("default", "sim"): [_case(300, 1100, **SMALL), _case(1000, 60, **SMALL)],
        ("quick", "sim"): [_case(70, 132, **SMALL)],
        ("default", "gpu"): [_case(4096, 16384), _case(1 << 16, 1024)],
        ("quick", "gpu"): [_case(1000, 3332), _case(70, 132, **SMALL)],
    },
    tolerance=1e-4,
    peers={"torch": _torch},
)

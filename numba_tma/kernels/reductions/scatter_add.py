"""Add rows to the rows of another matrix that an index names: the gradient of an embedding, the combine of experts.

The problem. For N rows of x, of D elements each, and an index into the M rows of out:

    out[m, :] = sum of x[i, :] over the i with index[i] = m

In which order a sum is made is not defined, and rows that many indices name are contended for. An index outside 0 … M-1
drops its row.

What moves the data: an atomic operation an element (plain) or on four elements (vector); the copy engine, by pieces of
memory (bulk) and by boxes of a tensor map (tensor). A reduction of the copy engine reads shared memory and has the L2
cache do the additions. So one thread moves a whole row, in by a copy and out by a reduction, and no element passes
through a register.

Costs: each row of x is read once; in the L2 cache each element of it is added to one of out. Where out does not fit
into that cache, its lines come and go as often as rows meet them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import int32, uint32, uint64

from ... import arrays, dtypes, ptx
from ...arrays import ArrayView
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait
from ...shared import Barriers, Shared, Tiles
from ...tensor_map import TensorMap
from ..calls import check_extents, check_written, in_vectors, viewed
from ..peers import as_torch
from ..problem import Case, Problem, Variant, check_options
from .zero import after_zeros

DTYPES = ("float32", "int32", "float16", "bfloat16")
ATOMIC_DTYPES = DTYPES[:2]  # of which a thread adds single ones
BLOCK_BYTES = 32 * 1024  # what a block has in flight: seven such blocks fill an SM's shared memory
BOX_COLUMNS = 256  # the widest box of a tensor map


@functools.cache
def make_plain(threads: int = 256) -> Kernel:
    """A block a row; each thread adds one element and the next ones `threads` further, atomically."""

    @kernel(threads=threads)
    def scatter_add_plain(x, index, out):
        row = cuda.blockIdx.x
        target = index[row]
        if target >= 0 and target < out.shape[0]:
            for column in range(cuda.threadIdx.x, x.shape[1], threads):
                cuda.atomic.add(out, (target, column), x[row, column])

    return scatter_add_plain


@functools.cache
def make_vector(threads: int = 256) -> Kernel:
    """Four float32 an access, in and out: Hopper's vector atomics."""

    @kernel(threads=threads)
    def scatter_add_vector(x, index, out):
        row = uint32(cuda.blockIdx.x)
        target = index[row]
        if target >= 0 and target < out.shape[0]:
            source = ptx.global_address(x) + uint64(row) * uint64(x.strides[0])
            destination = ptx.global_address(out) + uint64(target) * uint64(out.strides[0])
            for vector in range(uint32(cuda.threadIdx.x), uint32(x.shape[1]) // uint32(4), uint32(threads)):
                offset = uint64(vector) * uint64(16)
                a, b, c, d = ptx.ld_global_nc_v4_f32(source + offset)
                ptx.red_global_add_v4_f32(destination + offset, a, b, c, d)

    return scatter_add_vector


def _check_rows(rows: int) -> None:
    if not 1 <= rows <= 32:
        raise ValueError(f"rows {rows}: 1 to 32 expected, one for each of a block's threads")


@functools.cache
def make_bulk(dtype: str, part_bytes: int, rows: int) -> Kernel:
    """A thread a row: it copies `part_bytes` of it into shared memory and adds them to out's row, by the copy engine.

    The grid is (blocks of `rows` rows, parts of a row).
    """
    _check_rows(rows)
    if part_bytes % 16:
        raise ValueError(f"part_bytes {part_bytes}: the copy engine moves multiples of 16")
    add = {
        "float32": ptx.cp_reduce_async_bulk_global_shared_add_f32,
        "int32": ptx.cp_reduce_async_bulk_global_shared_add_s32,
        "float16": ptx.cp_reduce_async_bulk_global_shared_add_noftz_f16,
        "bfloat16": ptx.cp_reduce_async_bulk_global_shared_add_noftz_bf16,
    }[dtype]
    smem = Shared(part=Tiles(rows, (part_bytes,), np.uint8), full=Barriers(rows))

    @kernel(threads=32, shared=smem)
    def scatter_add_bulk(x, index, out, row_bytes):
        thread = uint32(cuda.threadIdx.x)
        row = uint32(uint32(cuda.blockIdx.x) * uint32(rows) + thread)
        if thread < rows and row < uint32(x.shape[0]):
            start = uint32(uint32(cuda.blockIdx.y) * uint32(part_bytes))
            length = uint32(min(uint32(part_bytes), uint32(uint32(row_bytes) - start)))
            part, bar = smem.part[thread], smem.full[thread]
            ptx.mbarrier_init(bar, 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(bar, length)
            source = ptx.global_address(x) + uint64(row) * uint64(x.strides[0]) + uint64(start)
            ptx.cp_async_bulk_shared_global(part, source, length, bar)
            target = int32(index[row])
            mbarrier_wait(bar, 0)
            if target >= 0 and target < out.shape[0]:
                destination = ptx.global_address(out) + uint64(target) * uint64(out.strides[0]) + uint64(start)
                add(destination, part, length)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)  # the block must not end while the engine reads its memory

    return scatter_add_bulk


@functools.cache
def make_tensor(dtype: str, columns: int, rows: int) -> Kernel:
    """As `make_bulk`, by tensor maps of boxes of one row: any row length; rows behind out's end are dropped."""
    _check_rows(rows)
    smem = Shared(part=Tiles(rows, (1, columns), dtype), full=Barriers(rows))

    @kernel(threads=32, shared=smem)
    def scatter_add_tensor(x_map, index, out_map):
        thread = uint32(cuda.threadIdx.x)
        row = uint32(uint32(cuda.blockIdx.x) * uint32(rows) + thread)
        if thread < rows and row < uint32(index.shape[0]):
            column = uint32(uint32(cuda.blockIdx.y) * uint32(columns))
            part, bar = smem.part[thread], smem.full[thread]
            ptx.mbarrier_init(bar, 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(bar, x_map.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(part, x_map, column, row, bar)
            target = index[row]
            mbarrier_wait(bar, 0)
            if target >= 0:  # a box may end outside the matrix, and is cut, but not begin in front of it
                ptx.cp_reduce_async_bulk_tensor_2d_add(out_map, column, target, part)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)

    return scatter_add_tensor


# ---------------------------------------------------------------------------------------------------------------------
# Host side.


def _rows_a_block(nbytes: int) -> int:
    return max(1, min(32, BLOCK_BYTES // nbytes))


def _atomic(make: Callable[..., Kernel], dtypes_known: tuple[str, ...]) -> Callable[..., Callable[[], Any]]:
    def bind(
        given: Mapping[str, Any], *, zeros: bool = True, threads: int = 256, stream: object = None, **_: Any
    ) -> Callable[[], Any]:
        x = arrays.view(given["x"])
        if x.dtype.name not in dtypes_known:
            raise ValueError(f"{x.dtype}: this variant has atomics of {', '.join(dtypes_known)}; 'bulk' has more")
        launch = make(threads)[x.shape[0], None, stream].bind(given["x"], given["index"], given["out"])
        return after_zeros(given["out"], stream, launch) if zeros else launch

    return bind


def _bind_vector(given: Mapping[str, Any], **options: Any) -> Callable[[], Any]:
    _need_vectors(given, "vector")
    return _atomic(make_vector, ("float32",))(given, **options)


def _bind_bulk(
    given: Mapping[str, Any],
    *,
    zeros: bool = True,
    part_bytes: int | None = None,
    rows: int | None = None,
    stream: object = None,
) -> Callable[[], Any]:
    _need_vectors(given, "bulk")
    x = arrays.view(given["x"])
    row_bytes = x.shape[1] * x.dtype.itemsize
    part_bytes = part_bytes or min(row_bytes, BLOCK_BYTES)
    rows = rows or _rows_a_block(part_bytes)
    kernel = make_bulk(x.dtype.name, part_bytes, rows)
    launcher = kernel[(-(-x.shape[0] // rows), -(-row_bytes // part_bytes)), None, stream]
    launch = launcher.bind(given["x"], given["index"], given["out"], np.uint32(row_bytes))
    return after_zeros(given["out"], stream, launch) if zeros else launch


def _bind_tensor(
    given: Mapping[str, Any],
    *,
    zeros: bool = True,
    columns: int | None = None,
    rows: int | None = None,
    stream: object = None,
) -> Callable[[], Any]:
    x = arrays.view(given["x"])
    granule = 16 // x.dtype.itemsize
    columns = columns or min(BOX_COLUMNS, -(-x.shape[1] // granule) * granule)
    rows = rows or _rows_a_block(columns * x.dtype.itemsize)
    kernel = make_tensor(x.dtype.name, columns, rows)
    x_map = TensorMap(given["x"], (1, columns), l2_promotion="128B", store=False)
    # The engine adds nothing outside the matrix, in the padding of its rows neither: what it would write there are
    # the zeros that it fetched from outside x.
    out_map = TensorMap(given["out"], (1, columns))
    launcher = kernel[(-(-x.shape[0] // rows), -(-x.shape[1] // columns)), None, stream]
    launch = launcher.bind(x_map, given["index"], out_map)
    return after_zeros(given["out"], stream, launch) if zeros else launch


def _need_vectors(given: Mapping[str, Any], variant: str) -> None:
    for name in ("x", "out"):
        described = arrays.view(given[name])
        row = described.shape[1] * described.dtype.itemsize
        if not in_vectors(described):
            raise ValueError(
                f"scatter_add.{variant}: {name} has rows of {row} B, {described.strides[0]} B apart, at "
                f"{described.pointer:#x}; all three must be multiples of 16 B and rows contiguous: 'tensor' takes any "
                f"length of padded rows, 'plain' any of float32 and int32"
            )


OPTIONS = {
    "plain": ("threads",),
    "vector": ("threads",),
    "bulk": ("part_bytes", "rows"),
    "tensor": ("columns", "rows"),
}


def scatter_add(
    x: Any, index: Any, out: Any, *, variant: str | None = None, zeros: bool = False, **options: Any
) -> None:
    """out[index[i]] += x[i] for each row i of x; an index outside out drops its row.

    Args:
        x: (N, D) of float32, int32, float16 or bfloat16.
        index: N numbers of int32.
        out: (M, D) of x's dtype, added to. M may be any; all other extents are below 2^31.
        variant: plain and vector (float32 and, plain, int32), bulk or tensor. By default bulk; where rows of x or out
            are no multiples of 16 bytes, or not contiguous, plain, and tensor for the types of 16 bits, whose rows must
            then be padded.
        zeros: fill `out` with zeros first.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes or layouts do not fit, an extent is 2^31 or more, or out shares memory with x or the
            index; the message says what would do.
    """
    views = viewed("scatter_add", x=x, index=index, out=out)
    x_, index_, out_ = (views[name] for name in ("x", "index", "out"))
    if x_.dtype.name not in DTYPES or len(x_.shape) != 2:
        raise ValueError(f"scatter_add: x is {x_.dtype} {x_.shape}; a matrix of {', '.join(DTYPES)} expected")
    if out_.dtype != x_.dtype or len(out_.shape) != 2 or out_.shape[1] != x_.shape[1]:
        raise ValueError(
            f"scatter_add: out is {out_.dtype} {out_.shape}; {x_.dtype} of shape (any, {x_.shape[1]}) expected"
        )
    if index_.dtype != np.int32 or index_.shape != x_.shape[:1]:
        raise ValueError(f"scatter_add: index is {index_.dtype} {index_.shape}; int32 ({x_.shape[0]},) expected")
    check_extents("scatter_add", {"x": x_})
    check_written("scatter_add", views, "out")
    variant = variant or _choose(x_, out_)
    chosen = PROBLEM.variant(variant)
    check_options("scatter_add", chosen, options, OPTIONS[variant])
    if out_.size and x_.size:
        chosen.bind({"x": x, "index": index, "out": out}, zeros=zeros, **options)()
    elif zeros and out_.size:
        after_zeros(out, options.get("stream"), lambda: None)()


def _choose(x: ArrayView, out: ArrayView) -> str:
    """The variant for these matrices."""
    if in_vectors(x) and in_vectors(out):
        return "bulk"
    return "plain" if x.dtype.name in ATOMIC_DTYPES else "tensor"


def reference(x: np.ndarray, index: np.ndarray, rows: int) -> np.ndarray:
    """float64 sums (int64 for integers) of shape (rows, columns)."""
    wide = np.int64 if x.dtype.kind == "i" else np.float64
    out = np.zeros((rows, x.shape[1]), wide)
    order = np.argsort(index, kind="stable")
    order = order[(index[order] >= 0) & (index[order] < rows)]
    if order.size:
        targets, starts = np.unique(index[order], return_index=True)
        out[targets] = np.add.reduceat(x[order].astype(wide), starts, axis=0)
    return out


def _as_stored(sums: np.ndarray, case: Case) -> np.ndarray:
    return sums.astype(np.int32) if case.dtype == "int32" else sums


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    count, columns, rows = case.shape
    dtype = dtypes.lookup(case.dtype).numpy
    if case.dtype == "int32":
        x = rng.integers(-1000, 1000, (count, columns), np.int32)
    else:
        x = rng.standard_normal((count, columns), np.float32).astype(dtype)
    # A few indices lie outside, and drop their rows.
    index = rng.integers(-1, rows + 1, count).astype(np.int32)
    return {"x": x, "index": index, "out": np.empty((rows, columns), dtype)}


def _bytes(case: Case) -> int:
    count, columns, rows = case.shape
    return (count + rows) * columns * dtypes.lookup(case.dtype).numpy.itemsize


def _torch(given: Mapping[str, Any], **_: Any) -> Callable[[], Any] | None:
    """torch.Tensor.index_add_, which wants every index inside: those that are not go to a row of their own."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    x, index, out = (as_torch(given[name]) for name in ("x", "index", "out"))
    rows = out.shape[0]
    spare = torch.empty((rows + 1, out.shape[1]), dtype=out.dtype, device="cuda")
    inside = torch.where((index >= 0) & (index < rows), index, rows)
    return lambda: spare.zero_().index_add_(0, inside, x)


TOLERANCES = {"float32": 1e-5, "int32": 0.0, "float16": 1e-2, "bfloat16": 1e-1}

PROBLEM = Problem(
    name="scatter_add",
    title="add rows to the rows that an index names",
    inputs=_inputs,
    outputs=("out",),
    reference=lambda arrays, case: {"out": _as_stored(reference(arrays["x"], arrays["index"], case.shape[2]), case)},
    bytes_moved=_bytes,
    flops=lambda case: case.shape[0] * case.shape[1],
    variants=(
        Variant("plain", "atomics", "an atomic addition an element", _atomic(make_plain, ATOMIC_DTYPES), baseline=True),
        Variant("vector", "atomics", "four elements an access", _bind_vector),
        Variant("bulk", "TMA", "a thread a row: copied in, reduced out", _bind_bulk),
        Variant("tensor", "TMA", "the same by tensor maps: any length, bounds kept", _bind_tensor),
    ),
    cases={
        ("default", "sim"): [Case((100, 256, 20), "float32"), Case((50, 320, 3), "float32")],
        ("quick", "sim"): [Case((40, 64, 7), "float32"), Case((33, 36, 3), "float32")],
        ("default", "gpu"): [
            Case((1 << 15, 1024, 1 << 13), "float32"),
            Case((1 << 15, 1024, 64), "float32"),
        ],
        ("quick", "gpu"): [Case((5000, 256, 100), "float32"), Case((333, 1024, 3), "float32")],
    },
    tolerance=lambda case: TOLERANCES[case.dtype],
    peers={"torch": _torch},
)

"""More elements than 32 bits count, on a GPU, where PyTorch checks every one of them; softmax's are in test_rows.py."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from numba_tma import use_backend
from numba_tma.kernels import copy, multicast, select, stencil3d, transpose
from numba_tma.kernels.gather import paged, patches
from numba_tma.kernels.reductions import column_sums, histogram, scatter_add

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = (1 << 21) + 1003, 1024


def pieces(extent, step):
    """Slices of an axis: PyTorch makes temporary arrays, and they need not be huge too."""
    return [slice(i, min(i + step, extent)) for i in range(0, extent, step)]


@pytest.fixture
def cuda():
    """PyTorch with a GPU of enough free memory, given back afterwards."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 45 << 30:
        pytest.skip("needs PyTorch for CUDA and 45 GB of free memory on the GPU")
    with torch.device("cuda"), use_backend("gpu"):
        yield torch
    gc.collect()
    torch.cuda.empty_cache()


def each(problem, out, run, right, without=()):
    """Run every variant into an output that held something else before."""
    ((_, variants),) = select([problem])
    for variant in variants:
        if variant.name in without:
            continue
        out.fill_(77)
        run(variant.name)
        assert right(), f"{problem}.{variant.name}"


def test_copy(cuda):
    source = cuda.randint(0, 256, (65539, 32784), dtype=cuda.uint8)
    target = cuda.empty_like(source)
    each("copy", target, lambda v: copy.copy(source, target, variant=v), lambda: cuda.equal(source, target))


def test_transpose(cuda):
    source = cuda.randint(-128, 128, (65552, 32784), dtype=cuda.int8)
    target = cuda.empty((32784, 65552), dtype=cuda.int8)

    def right():
        return all(cuda.equal(target[:, s], source[s].t()) for s in pieces(len(source), 8192))

    each("transpose", target, lambda v: transpose.transpose(source, target, variant=v), right)


@pytest.mark.parametrize("points", stencil3d.POINTS)
def test_stencil3d(points, cuda):
    shape = (1291, 1297, 1284)
    source, out = cuda.empty(shape), cuda.empty(shape)
    for s in pieces(shape[0], 64):
        source[s].normal_()

    def right():
        for s in pieces(shape[0], 43):
            low, high = max(s.start - 1, 0), min(s.stop + 1, shape[0])
            around = (1, 1, 1, 1, int(s.start == 0), int(s.stop == shape[0]))
            padded = cuda.nn.functional.pad(source[low:high], around)
            expected = cuda.zeros((s.stop - s.start, *shape[1:]))
            for offset in np.ndindex(3, 3, 3):
                weight = stencil3d.WEIGHTS[points][sum(abs(o - 1) for o in offset)]
                z, y, x = (slice(o, o + n) for o, n in zip(offset, expected.shape, strict=True))
                expected += weight * padded[z, y, x]
            if (out[s] - expected).abs().max() > 1e-4:
                return False
        return True

    without = () if points == 7 else ("shared", "tma", "stages")
    each("stencil3d", out, lambda v: stencil3d.stencil3d(source, out, points=points, variant=v), right, without)


def test_weighted_sums(cuda):
    # Small integers: their sums are exact in float32, in whatever order.
    x = cuda.randint(0, 4, (65600, 32772), dtype=cuda.float32)
    w = cuda.randint(0, 2, (2, 65600), dtype=cuda.float32)
    y = cuda.empty((2, 32772))
    expected = sum(w[:, s] @ x[s] for s in pieces(len(x), 8192))
    each("multicast", y, lambda v: multicast.weighted_sums(x, w, y, variant=v), lambda: cuda.equal(y, expected))


def test_column_sums(cuda):
    x, out = cuda.randint(0, 4, (ROWS, COLUMNS), dtype=cuda.float32), cuda.empty((1, COLUMNS))
    expected = sum(x[s].sum(0, dtype=cuda.float64) for s in pieces(ROWS, 1 << 18))

    def right():
        return cuda.equal(out[0].double(), expected)

    each("column_sums", out, lambda v: column_sums.column_sums(x, out, variant=v), right)


@pytest.mark.parametrize(("dtype", "values", "bins"), [("uint8", 256, 256), ("int16", 4500, 4096)])
def test_histogram(dtype, values, bins, cuda):
    numbers = cuda.randint(0, values, ((1 << 31) + 12345,), dtype=getattr(cuda, dtype))
    x = numbers if dtype == "uint8" else numbers.view(cuda.uint16)
    out = cuda.empty((1, bins), dtype=cuda.int32)
    expected = sum(cuda.bincount(numbers[s].int(), minlength=bins)[:bins] for s in pieces(len(numbers), 1 << 26))

    def run(variant):
        histogram.histogram(x, out.view(cuda.uint32), variant=variant)

    each("histogram", out, run, lambda: cuda.equal(out[0].long(), expected))
    numbers.zero_()  # more than 2^31 times the same
    for variant in ("shared", "vector", "bulk"):
        run(variant)
        assert int(out[0, 0]) & 0xFFFFFFFF == len(numbers) and not out[0, 1:].any(), variant


def test_scatter_add_of_many_rows(cuda):
    x, index = cuda.randint(0, 4, (ROWS, COLUMNS), dtype=cuda.float32), cuda.randint(-1, 1001, (ROWS,)).int()
    out, expected = cuda.empty((1000, COLUMNS)), cuda.zeros((1002, COLUMNS))
    for s in pieces(ROWS, 1 << 18):
        expected.index_add_(0, (index[s] + 1).long(), x[s])

    def run(variant):
        scatter_add.scatter_add(x, index, out, variant=variant, zeros=True)

    each("scatter_add", out, run, lambda: cuda.equal(out, expected[1:1001]))


def test_scatter_add_to_many_rows(cuda):
    index = cuda.cat([cuda.randperm(ROWS - 1)[:4095], cuda.tensor([ROWS - 1])])
    x, out = cuda.randint(1, 4, (4096, COLUMNS), dtype=cuda.float32), cuda.empty((ROWS, COLUMNS))

    def run(variant):
        scatter_add.scatter_add(x, index.int(), out, variant=variant, zeros=True)

    def right():
        everything = sum(float(out[s].sum(dtype=cuda.float64)) for s in pieces(ROWS, 1 << 18))
        return cuda.equal(out[index], x) and everything == float(x.sum(dtype=cuda.float64))

    each("scatter_add", out, run, right)


def test_paged(cuda):
    cache = cuda.empty((132200, 16, 8, 128), dtype=cuda.bfloat16)
    for s in pieces(len(cache), 8192):
        cache[s].normal_()
    table = cuda.randperm(len(cache))[: 129 * 1024].int().view(129, 1024)
    table[::7, ::11] = -1
    out = cuda.empty((129, 8, 1024 * 16, 128), dtype=cuda.bfloat16)

    def right():
        for pages, heads in zip(table, out, strict=True):
            expected = cache[pages.clamp(min=0).long()] * (pages >= 0)[:, None, None, None]
            if not cuda.equal(heads, expected.permute(2, 0, 1, 3).reshape(heads.shape)):
                return False
        return True

    each("paged", out, lambda v: paged.paged(cache, table, out, variant=v), right)


def test_patches(cuda):
    x = cuda.randn((300, 56, 56, 256), dtype=cuda.float16)
    out = cuda.empty((300 * 56 * 56, 9 * 256), dtype=cuda.float16)

    def right():
        for s in pieces(len(x), 10):
            padded = cuda.nn.functional.pad(x[s], (0, 0, 1, 1, 1, 1))
            taps = [padded[:, r : r + 56, c : c + 56] for r in range(3) for c in range(3)]
            expected = cuda.stack(taps, 3).reshape(-1, out.shape[1])
            if not cuda.equal(out[s.start * 56 * 56 : s.stop * 56 * 56], expected):
                return False
        return True

    each("patches", out, lambda v: patches.patches(x, out, variant=v), right)

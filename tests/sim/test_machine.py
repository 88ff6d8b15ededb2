"""Whole kernels from Numba's PTX against NumPy: grids, shared memory, divergence, atomics, calls, printing."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from numba import cuda, float32, float64, int32, int64, types, uint8, uint32
from simulate import run

F4 = float32[:]
F42 = float32[:, :]
I4 = int32[:]


def test_odd_sizes(rng):
    def add(a, b, c):
        i = cuda.grid(1)
        if i < c.size:
            c[i] = a[i] + b[i]

    for n in (1, 31, 33, 1000, 100_003):
        a, b = rng.standard_normal((2, n), dtype=np.float32)
        c = np.zeros(n, np.float32)
        report = run(add, (F4, F4, F4), -(-n // 96), 96, a, b, c)
        np.testing.assert_array_equal(c, a + b)
        assert report.bytes["ld_global"] == 8 * n
        assert report.bytes["st_global"] == 4 * n


def test_grid_stride_loop(rng):
    def scale(a, factor, out):
        for i in range(cuda.grid(1), a.size, cuda.gridsize(1)):
            out[i] = a[i] * factor

    a = rng.standard_normal(5003, dtype=np.float32)
    out = np.zeros_like(a)
    run(scale, (F4, float32, F4), 5, 64, a, np.float32(1.5), out)
    np.testing.assert_array_equal(out, a * np.float32(1.5))


def test_grids_in_three_dimensions_and_strided_arrays(rng):
    def coordinates(out, source):
        x, y, z = cuda.grid(3)
        if x < out.shape[2] and y < out.shape[1] and z < out.shape[0]:
            out[z, y, x] = source[z, y, x] + 10000 * cuda.blockIdx.z + 100 * cuda.threadIdx.y + cuda.gridDim.x

    shape = (5, 7, 19)
    source = rng.integers(0, 50, (10, 7, 38)).astype(np.int32)[::2, ::-1, ::2]
    out = np.zeros(shape, np.int32, order="F")
    kind = types.Array(int32, 3, "A")
    run(coordinates, (kind, kind), (5, 2, 3), (4, 4, 2), out, source)
    z, y, _ = np.indices(shape)
    np.testing.assert_array_equal(out, source + 10000 * (z // 2) + 100 * (y % 4) + 5)


def test_many_waves():
    def number(out):
        i = cuda.grid(1)
        out[i] = i * 2 + cuda.blockIdx.x

    out = np.zeros(3000 * 64, np.int32)
    report = run(number, (I4,), 3000, 64, out)
    i = np.arange(out.size)
    np.testing.assert_array_equal(out, i * 2 + i // 64)
    assert report.instructions * 32 == report.lane_instructions


def test_shared_reduction(rng):
    def reduce(a, out):
        buffer = cuda.shared.array(128, float32)
        t = cuda.threadIdx.x
        i = cuda.grid(1)
        buffer[t] = a[i] if i < a.size else float32(0)
        cuda.syncthreads()
        s = 64
        while s > 0:
            if t < s:
                buffer[t] += buffer[t + s]
            cuda.syncthreads()
            s //= 2
        if t == 0:
            out[cuda.blockIdx.x] = buffer[0]

    a = rng.standard_normal(1500, dtype=np.float32)
    out = np.zeros(12, np.float32)
    report = run(reduce, (F4, F4), 12, 128, a, out)
    expected = np.pad(a, (0, 36)).reshape(12, 128).astype(np.float64).sum(1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    assert report.bytes["st_shared"] > 4 * 1536


def test_transpose_tile(rng):
    def transpose(a, out):
        tile = cuda.shared.array((32, 33), float32)
        x = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        for j in range(cuda.threadIdx.y, 32, 8):
            y = cuda.blockIdx.y * 32 + j
            if x < a.shape[1] and y < a.shape[0]:
                tile[j, cuda.threadIdx.x] = a[y, x]
        cuda.syncthreads()
        x = cuda.blockIdx.y * 32 + cuda.threadIdx.x
        for j in range(cuda.threadIdx.y, 32, 8):
            y = cuda.blockIdx.x * 32 + j
            if x < a.shape[0] and y < a.shape[1]:
                out[y, x] = tile[cuda.threadIdx.x, j]

    a = rng.standard_normal((77, 131), dtype=np.float32)
    out = np.zeros((131, 77), np.float32)
    run(transpose, (F42, F42), (5, 3), (32, 8), a, out)
    np.testing.assert_array_equal(out, a.T)


def test_shared_matmul(rng):
    def matmul(a, b, c):
        sa = cuda.shared.array((16, 16), float32)
        sb = cuda.shared.array((16, 16), float32)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * 16 + ty, cuda.blockIdx.x * 16 + tx
        total = float32(0)
        for k in range(0, a.shape[1], 16):
            sa[ty, tx] = a[row, k + tx] if row < a.shape[0] and k + tx < a.shape[1] else float32(0)
            sb[ty, tx] = b[k + ty, column] if k + ty < b.shape[0] and column < b.shape[1] else float32(0)
            cuda.syncthreads()
            for i in range(16):
                total += sa[ty, i] * sb[i, tx]
            cuda.syncthreads()
        if row < c.shape[0] and column < c.shape[1]:
            c[row, column] = total

    a, b = rng.standard_normal((50, 39), dtype=np.float32), rng.standard_normal((39, 70), dtype=np.float32)
    c = np.zeros((50, 70), np.float32)
    run(matmul, (F42, F42, F42), (5, 4), (16, 16), a, b, c)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)


def test_histogram(rng):
    def histogram(data, bins):
        local = cuda.shared.array(256, int32)
        for i in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
            local[i] = 0
        cuda.syncthreads()
        for i in range(cuda.grid(1), data.size, cuda.gridsize(1)):
            cuda.atomic.add(local, data[i], 1)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
            cuda.atomic.add(bins, i, local[i])

    data = (rng.standard_normal(20_001) * 30 + 128).clip(0, 255).astype(np.uint8)
    bins = np.zeros(256, np.int32)
    report = run(histogram, (uint8[:], I4), 8, 96, data, bins)
    np.testing.assert_array_equal(bins, np.bincount(data, minlength=256))
    assert report.bytes["atom_global"] == 8 * 256 * 4


def test_warp_shuffles(rng):
    def warp_sums(a, out):
        i = cuda.grid(1)
        value = a[i]
        for offset in (16, 8, 4, 2, 1):
            value += cuda.shfl_down_sync(0xFFFFFFFF, value, offset)
        if cuda.laneid == 0:
            out[i // 32] = value

    a = rng.integers(-100, 100, 256).astype(np.int32)
    out = np.zeros(8, np.int32)
    run(warp_sums, (I4, I4), 2, 128, a, out)
    np.testing.assert_array_equal(out, a.reshape(8, 32).sum(1))


def test_votes(rng):
    def votes(a, out):
        i = cuda.grid(1)
        out[0, i] = cuda.ballot_sync(0xFFFFFFFF, a[i] > 0)
        out[1, i] = cuda.all_sync(0xFFFFFFFF, a[i] > 0)
        out[2, i] = cuda.any_sync(0xFFFFFFFF, a[i] > 0)
        if a[i] > 0:
            out[3, i] = cuda.activemask()
        out[4, i] = cuda.match_any_sync(0xFFFFFFFF, a[i])

    a = rng.integers(-2, 2, 96).astype(np.int32)
    a[32:64] = 1
    out = np.zeros((5, 96), np.uint32)
    run(votes, (I4, uint32[:, :]), 1, 96, a, out)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    rows = a.reshape(3, 32)
    ballots = ((rows > 0) * bits).sum(1).astype(np.uint32)
    np.testing.assert_array_equal(out[0].reshape(3, 32), ballots[:, None] * np.ones(32, np.uint32))
    np.testing.assert_array_equal(out[1].reshape(3, 32), (rows > 0).all(1)[:, None] * np.ones(32))
    np.testing.assert_array_equal(out[2].reshape(3, 32), (rows > 0).any(1)[:, None] * np.ones(32))
    np.testing.assert_array_equal(out[3].reshape(3, 32), np.where(rows > 0, ballots[:, None], 0))
    alike = ((rows[:, :, None] == rows[:, None, :]) * bits).sum(2)
    np.testing.assert_array_equal(out[4].reshape(3, 32), alike)


def test_local_arrays(rng):
    def sort_rows(a):
        row = cuda.local.array(7, float32)
        i = cuda.grid(1)
        for k in range(7):
            row[k] = a[i, k]
        for j in range(1, 7):
            value = row[j]
            k = j - 1
            while k >= 0 and row[k] > value:
                row[k + 1] = row[k]
                k -= 1
            row[k + 1] = value
        for k in range(7):
            a[i, k] = row[k]

    a = rng.standard_normal((64, 7), dtype=np.float32)
    expected = np.sort(a, axis=1)
    run(sort_rows, (F42,), 2, 32, a)
    np.testing.assert_array_equal(a, expected)


def test_heavy_divergence():
    def collatz(out):
        i = cuda.grid(1)
        n, steps = int64(i + 1), 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        out[i] = steps

    def reference(n):
        steps = 0
        while n != 1:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        return steps

    out = np.zeros(256, np.int32)
    run(collatz, (I4,), 4, 64, out)
    np.testing.assert_array_equal(out, [reference(n) for n in range(1, 257)])


def test_many_ways(rng):
    def choose(a, out):
        i = cuda.grid(1)
        k = a[i]
        if k == 0:
            out[i] = i
        elif k == 1:
            out[i] = -i
        elif k == 2:
            for j in range(i % 5):
                out[i] += j
        elif k == 3:
            return
        else:
            out[i] = k * k
        out[i] += 1

    a = rng.integers(0, 9, 300).astype(np.int32)
    out = np.zeros(300, np.int32)
    run(choose, (I4, I4), 3, 100, a, out)
    i = np.arange(300)
    r = i % 5
    ways = [i + 1, 1 - i, r * (r - 1) // 2 + 1, np.zeros_like(i)]
    np.testing.assert_array_equal(out, np.where(a < 4, np.choose(np.minimum(a, 3), ways), a * a + 1))


def test_spin_lock_between_blocks():
    def locked(lock, counter):
        if cuda.threadIdx.x == 0:
            while cuda.atomic.cas(lock, 0, 0, 1) != 0:
                pass
            cuda.threadfence()
            counter[0] = counter[0] * 3 + 1
            cuda.threadfence()
            cuda.atomic.exch(lock, 0, 0)

    lock, counter = np.zeros(1, np.int32), np.zeros(1, np.uint32)
    run(locked, (I4, uint32[:]), 20, 64, lock, counter)
    expected = 0
    for _ in range(20):
        expected = (expected * 3 + 1) % 2**32
    assert counter[0] == expected


def test_lane_waits_for_a_lane_of_its_warp():
    def handshake(flag, out):
        t = cuda.threadIdx.x
        if t == 0:
            while cuda.atomic.add(flag, 0, 0) == 0:
                pass
            out[0] = 7
        elif t == 31:
            out[1] = 5
            cuda.threadfence()
            cuda.atomic.exch(flag, 0, 1)

    flag, out = np.zeros(1, np.int32), np.zeros(2, np.int32)
    run(handshake, (I4, I4), 1, 32, flag, out)
    assert out.tolist() == [7, 5]


def test_grid_barrier(rng):
    def two_phases(a, partial, arrived, out):
        t, b = cuda.threadIdx.x, cuda.blockIdx.x
        cuda.atomic.add(partial, b, a[b * 64 + t])
        cuda.threadfence()
        cuda.syncthreads()
        if t == 0:
            cuda.atomic.add(arrived, 0, 1)
            while cuda.atomic.add(arrived, 0, 0) < cuda.gridDim.x:
                cuda.nanosleep(32)
        cuda.syncthreads()
        if t < cuda.gridDim.x:
            cuda.atomic.add(out, b, partial[t])

    a = rng.integers(0, 100, 12 * 64).astype(np.int32)
    partial, out, arrived = np.zeros(12, np.int32), np.zeros(12, np.int32), np.zeros(1, np.int32)
    run(two_phases, (I4,) * 4, 12, 64, a, partial, arrived, out)
    np.testing.assert_array_equal(partial, a.reshape(12, 64).sum(1))
    np.testing.assert_array_equal(out, np.full(12, a.sum()))


def test_mathematical_functions(rng):
    def functions(a, out):
        i = cuda.grid(1)
        x = a[i]
        out[0, i] = math.sin(x)
        out[1, i] = math.exp(x)
        out[2, i] = math.log(abs(x))
        out[3, i] = math.sqrt(abs(x))
        out[4, i] = abs(x) ** (x / 3)
        out[5, i] = math.cos(x * 1000)
        out[6, i] = math.tanh(x) + math.atan2(x, x + 1)
        out[7, i] = math.erf(x) + math.floor(x)

    x = rng.standard_normal(64) * 4
    for dtype, kind, tolerance in ((np.float64, float64, 1e-14), (np.float32, float32, 2e-6)):
        a = x.astype(dtype)
        out = np.zeros((8, 64), dtype)
        run(functions, (kind[:], kind[:, :]), 2, 32, a, out)
        w = a.astype(np.float64)
        third = (a / dtype(3)).astype(np.float64) if dtype is np.float64 else w / 3
        kilo = (a * dtype(1000)).astype(np.float64)
        expected = [np.sin(w), np.exp(w), np.log(abs(w)), np.sqrt(abs(w)), abs(w) ** third]
        np.testing.assert_allclose(out[:5], expected, rtol=20 * tolerance, atol=tolerance)
        np.testing.assert_allclose(out[5], np.cos(kilo), rtol=0, atol=2e-3 if dtype is np.float32 else 1e-12)
        erf = np.array([math.erf(v) for v in w])
        np.testing.assert_allclose(out[6], np.tanh(w) + np.arctan2(w, w + 1), rtol=20 * tolerance, atol=tolerance)
        np.testing.assert_allclose(out[7], erf + np.floor(w), rtol=20 * tolerance, atol=4 * tolerance)


def test_half_precision(rng):
    def halves(a, b, out):
        i = cuda.grid(1)
        if i < a.size:
            out[i] = float32(a[i]) * float32(b[i]) + float32(a[i])

    a, b = rng.standard_normal((2, 77)).astype(np.float16)
    out = np.zeros(77, np.float16)
    h = types.float16[:]
    run(halves, (h, h, h), 3, 32, a, b, out)
    exact = a.astype(np.float64) * b + a
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=1e-3, atol=1e-7)


def test_int64_division(rng):
    def divide(a, b, out):
        i = cuda.grid(1)
        out[0, i] = a[i] // b[i]
        out[1, i] = a[i] % b[i]

    a = rng.integers(-(2**62), 2**62, 128)
    b = rng.integers(-(2**31), 2**31, 128)
    b[b == 0] = 3
    out = np.zeros((2, 128), np.int64)
    run(divide, (int64[:], int64[:], int64[:, :]), 4, 32, a, b, out)
    np.testing.assert_array_equal(out, [a // b, a % b])


def test_print():
    def shout(a):
        i = cuda.grid(1)
        if a[i] > 1:
            print("lane", i, a[i], "end")

    a = np.array([0, 1.5, 0, 2.25], np.float32)
    echo = io.StringIO()
    report = run(shout, (F4,), 2, 2, a, print_to=echo)
    assert report.output == "lane 1 1.500000 end\nlane 3 2.250000 end\n"
    assert echo.getvalue() == report.output


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float32, np.float64])
def test_atomics_that_collide(rng, dtype):
    kind = {np.int32: int32, np.uint64: types.uint64, np.float32: float32, np.float64: float64}[dtype]

    def collide(a, total, highest, lowest, ticket):
        i = cuda.grid(1)
        cuda.atomic.add(total, i % 3, a[i])
        cuda.atomic.max(highest, 0, a[i])
        cuda.atomic.min(lowest, 0, a[i])
        ticket[i] = cuda.atomic.add(total, 3, a[0])

    n = 200
    a = rng.integers(1, 50, n).astype(dtype)
    total = np.zeros(4, dtype)
    highest, lowest, ticket = np.zeros(1, dtype), np.full(1, 100, dtype), np.zeros(n, dtype)
    run(collide, (kind[:],) * 5, 4, 50, a, total, highest, lowest, ticket)
    np.testing.assert_array_equal(total[:3], [a[k::3].sum() for k in range(3)])
    assert total[3] == n * a[0]
    assert (highest[0], lowest[0]) == (a.max(), a.min())
    np.testing.assert_array_equal(np.sort(ticket), np.arange(n) * a[0])


def test_sine_of_large_arguments():
    """libdevice reduces them with a chain of multiplications that hands a carry from one to the next."""

    def sines(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = math.sin(x[i])

    x = np.concatenate([np.geomspace(1e5, 3e38, 200), [-2e9, 105615.0]]).astype(np.float32)
    y = np.zeros_like(x)
    run(sines, (F4, F4), 2, 128, x, y)
    np.testing.assert_allclose(y, np.sin(x.astype(np.float64)), atol=2e-7)

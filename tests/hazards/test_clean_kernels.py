"""Whole kernels that are right: products behind a ring, blocks that signal each other. No hazard under any schedule."""

from __future__ import annotations

import inspect
import linecache
import warnings

import numpy as np
import pytest
from numba import cuda, float32, uint32, uint64

from numba_tma import Barriers, Buffer, Shared, TensorMap, Tiles, kernel, ptx, sim, use_backend
from numba_tma.pipeline import mbarrier_wait
from numba_tma.warpgroup import matrix_descriptor

SCHEDULES = sim.schedules(random=4)
BLOCKS, THREADS = 4, 64


def launch(function, grid, *arguments, schedule):
    with use_backend("sim", **schedule):
        report = function[grid](*arguments)
    assert not report.hazards, f"{sim.named(schedule)}: {[str(hazard) for hazard in report.hazards]}"


# Matrix products: C (64, 64) = A (64, K) B (64, K), K in steps of 64 through two stages

stages = Shared(
    a=Tiles(2, (64, 64), np.float16, swizzle="128B"),
    b=Tiles(2, (64, 64), np.float16, swizzle="128B"),
    full=Barriers(2),
    empty=Barriers(2),
)
STEPS = 5


def make_gemm(arrivals: int, in_flight: int):
    """`arrivals` threads of the consumer free a stage: all, or one for the warpgroup; `in_flight` groups may be pending
    when they do."""

    @kernel(threads=160, shared=stages)
    def gemm(a_map, b_map, c):
        thread = uint32(cuda.threadIdx.x)
        if thread == 0:
            for stage in range(2):
                ptx.mbarrier_init(stages.full[stage], 1)
                ptx.mbarrier_init(stages.empty[stage], arrivals)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if thread >= 128:
            if thread == 128:
                for step in range(STEPS):
                    stage, phase = step % 2, step // 2 % 2
                    mbarrier_wait(stages.empty[stage], phase ^ 1)
                    ptx.mbarrier_arrive_expect_tx(stages.full[stage], a_map.box_bytes + b_map.box_bytes)
                    ptx.cp_async_bulk_tensor_2d_shared_global(stages.a[stage], a_map, 64 * step, 0, stages.full[stage])
                    ptx.cp_async_bulk_tensor_2d_shared_global(stages.b[stage], b_map, 64 * step, 0, stages.full[stage])
        else:
            acc = cuda.local.array(32, float32)
            for j in range(32):
                acc[j] = float32(0)
            for step in range(STEPS):
                stage, phase = step % 2, step // 2 % 2
                mbarrier_wait(stages.full[stage], phase)
                da = matrix_descriptor(ptx.shared_address(stages.a[stage]), 16, 1024)
                db = matrix_descriptor(ptx.shared_address(stages.b[stage]), 16, 1024)
                ptx.wgmma_fence()
                ptx.wgmma_mma_async_m64n64k16_f32_f16_f16(acc, da, db, True, 0, 0)
                ptx.wgmma_mma_async_m64n64k16_f32_f16_f16(acc, da + uint64(2), db + uint64(2), True, 0, 0)
                ptx.wgmma_mma_async_m64n64k16_f32_f16_f16(acc, da + uint64(4), db + uint64(4), True, 0, 0)
                ptx.wgmma_mma_async_m64n64k16_f32_f16_f16(acc, da + uint64(6), db + uint64(6), True, 0, 0)
                ptx.wgmma_commit_group()
                ptx.wgmma_wait_group_m64n64_f32(acc, in_flight)
                if step >= in_flight and (arrivals > 1 or thread == 0):
                    ptx.mbarrier_arrive(stages.empty[(step - in_flight) % 2])
            ptx.wgmma_wait_group_m64n64_f32(acc, 0)
            row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
            for j in range(8):
                c[row, column + 8 * j], c[row, column + 8 * j + 1] = acc[4 * j], acc[4 * j + 1]
                c[row + 8, column + 8 * j], c[row + 8, column + 8 * j + 1] = acc[4 * j + 2], acc[4 * j + 3]

    return gemm


@pytest.mark.parametrize("arrivals", [128, 1])
@pytest.mark.parametrize("in_flight", [0, 1])
def test_gemm(rng, arrivals, in_flight):
    a, b = (rng.standard_normal((64, 64 * STEPS)).astype(np.float16) for _ in range(2))
    gemm = make_gemm(arrivals, in_flight)
    for schedule in SCHEDULES:
        c = np.full((64, 64), np.nan, np.float32)
        maps = (TensorMap(x, (64, 64), swizzle="128B") for x in (a, b))
        launch(gemm, 1, *maps, c, schedule=schedule)
        np.testing.assert_allclose(c, a.astype(float) @ b.astype(float).T, rtol=1e-3, atol=1e-3)


operands = Shared(a=Tiles(1, (64, 64), np.float16, swizzle="128B"), b=Tiles(1, (8, 64), np.float16, swizzle="128B"))


@kernel(threads=128, shared=operands)
def rows_of_its_own(out):
    """A warp writes the rows of A that it multiplies itself: the lanes of the warp need to meet, the warps need not."""
    thread = cuda.threadIdx.x
    a, b = operands.a[0], operands.b[0]
    warp, lane = thread // 32, thread % 32
    if thread < 64:
        for row in range(8):
            b[row, thread] = np.float16(1)
    ptx.fence_proxy_async_shared_cta()
    cuda.syncthreads()
    acc = cuda.local.array(4, float32)
    for step in range(3):
        for row in range(16):
            a[16 * warp + row, lane] = np.float16(step)
        ptx.fence_proxy_async_shared_cta()
        cuda.syncwarp()
        da = matrix_descriptor(ptx.shared_address(a), 16, 1024)
        db = matrix_descriptor(ptx.shared_address(b), 16, 1024)
        ptx.wgmma_fence()
        ptx.wgmma_mma_async_m64n8k16_f32_f16_f16(acc, da, db, step > 0, 0, 0)
        ptx.wgmma_commit_group()
        ptx.wgmma_wait_group_m64n8_f32(acc, 0)
        for j in range(4):
            acc[j] *= float32(2)
    out[thread] = acc[0]


def test_a_warp_writes_its_rows_of_a():
    for schedule in SCHEDULES:
        out = np.zeros(128, np.float32)
        launch(rows_of_its_own, 1, out, schedule=schedule)
        np.testing.assert_array_equal(out, 2 * (2 * 16 * 1) + 2 * (16 * 2))


@kernel(threads=128, shared=operands)
def a_from_registers(words, out):
    """Two products, the second of what came out of the first: rounded, and in registers."""
    thread = cuda.threadIdx.x
    a, b = operands.a[0], operands.b[0]
    for row in range(64):
        if thread < 64:
            a[row, thread] = np.float16(1)
    if thread < 64:
        for row in range(8):
            b[row, thread] = np.float16(1)
    ptx.fence_proxy_async_shared_cta()
    cuda.syncthreads()
    da = matrix_descriptor(ptx.shared_address(a), 16, 1024)
    db = matrix_descriptor(ptx.shared_address(b), 16, 1024)
    total = cuda.local.array(4, float32)
    for j in range(4):
        total[j] = float32(0)
    for step in range(3):
        scores = cuda.local.array(4, float32)
        ptx.wgmma_fence()
        ptx.wgmma_mma_async_m64n8k16_f32_f16_f16(scores, da, db, False, 0, 0)
        ptx.wgmma_commit_group()
        ptx.wgmma_wait_group_m64n8_f32(scores, 0)
        word = words[uint32(scores[0]) + step]
        for j in range(4):
            total[j] *= float32(0.5)
        ptx.wgmma_wait_group_m64n8_f32(total, 0)  # ties them: scaled before the fence
        ptx.wgmma_fence()
        ptx.wgmma_mma_async_m64n8k16_f32_f16_f16_rs(total, word, word, word, word, db, True, 0)
        ptx.wgmma_commit_group()
        ptx.wgmma_wait_group_m64n8_f32(total, 0)
    out[thread] = total[0]


def test_a_in_registers():
    words = np.zeros(20, np.uint32)
    words[16:19] = np.array([[1, 1], [2, 2], [3, 3]], np.float16).view(np.uint32).reshape(-1)
    for schedule in SCHEDULES:
        out = np.zeros(128, np.float32)
        launch(a_from_registers, 1, words, out, schedule=schedule)
        np.testing.assert_array_equal(out, 16 * (1 / 4 + 2 / 2 + 3))


# Blocks that signal each other through global memory

share = Shared(last=Buffer((1,), np.uint32), tile=Tiles(1, (64,), float32), full=Barriers(1))


@kernel(threads=THREADS, shared=share)
def last_block_sums(x, partial, counter, out):
    """Split K: every block stores its part, the one that comes last adds them up."""
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    partial[block, thread] = x[block, thread] * float32(2)
    cuda.threadfence()
    cuda.syncthreads()
    if thread == 0:
        share.last[0] = cuda.atomic.add(counter, 0, 1)
    cuda.syncthreads()
    if share.last[0] == BLOCKS - 1:
        cuda.threadfence()
        total = float32(0)
        for other in range(BLOCKS):
            total += partial[other, thread]
        out[thread] = total


@kernel(threads=THREADS, shared=share)
def one_fence_for_the_block(x, partial, counter, out):
    """The same with the fences of one thread, which the block barriers extend to the others."""
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    partial[block, thread] = x[block, thread] * float32(2)
    cuda.syncthreads()
    if thread == 0:
        cuda.threadfence()
        share.last[0] = cuda.atomic.add(counter, 0, 1)
        cuda.threadfence()
    cuda.syncthreads()
    if share.last[0] == BLOCKS - 1:
        total = float32(0)
        for other in range(BLOCKS):
            total += partial[other, thread]
        out[thread] = total


@kernel(threads=THREADS)
def in_turn(x, partial, counter, out):
    """Each block adds to what the block before it has left, in order."""
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    if thread == 0:
        while ptx.ld_acquire_gpu_global_u32(ptx.global_address(counter)) != block:
            pass
    cuda.syncthreads()
    out[thread] += x[block, thread] * float32(2)
    cuda.syncthreads()
    if thread == 0:
        ptx.st_release_gpu_global_u32(ptx.global_address(counter), block + 1)


@kernel(threads=THREADS)
def grid_barrier(x, partial, counter, out):
    """All blocks wait for all; then everybody reads what all have written, twice."""
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    for step in range(2):
        partial[block, thread] = x[block, thread] * float32(1 + step)
        for half in range(2):
            cuda.syncthreads()
            if thread == 0:
                cuda.threadfence()
                cuda.atomic.add(counter, 0, 1)
                while cuda.atomic.add(counter, 0, 0) < BLOCKS * (2 * step + half + 1):
                    pass
                cuda.threadfence()
            cuda.syncthreads()
            if half == 0:
                total = float32(0)
                for other in range(BLOCKS):
                    total += partial[other, thread]
                if block == 0:
                    out[thread] = total


@kernel(threads=THREADS)
def everybody_says_the_same(x, partial, counter, out):
    """All blocks store the same numbers to the same place."""
    thread = cuda.threadIdx.x
    out[thread] = float32(2) * (x[0, thread] + x[1, thread] + x[2, thread] + x[3, thread])


@kernel(threads=THREADS, shared=share)
def stored_and_loaded_by_the_engine(x, partial, counter, out):
    """A block hands on by bulk stores what the next one loads by bulk copies."""
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    total = float32(0)
    if thread == 0:
        ptx.mbarrier_init(share.full[0], 1)
        ptx.fence_mbarrier_init()
        while ptx.ld_acquire_gpu_global_u32(ptx.global_address(counter)) != block:
            pass
        if block > 0:
            ptx.mbarrier_arrive_expect_tx(share.full[0], 256)
            source = ptx.global_address(partial) + uint64(256) * uint64(block - 1)
            ptx.cp_async_bulk_shared_global(share.tile[0], source, 256, share.full[0])
    cuda.syncthreads()
    if block > 0:
        mbarrier_wait(share.full[0], 0)
        total = share.tile[0][thread]
    total += x[block, thread] * float32(2)
    share.tile[0][thread] = total
    ptx.fence_proxy_async_shared_cta()
    cuda.syncthreads()
    if thread == 0:
        ptx.cp_async_bulk_global_shared(ptx.global_address(partial) + uint64(256) * uint64(block), share.tile[0], 256)
        ptx.cp_async_bulk_commit_group()
        ptx.cp_async_bulk_wait_group(0)
        ptx.st_release_gpu_global_u32(ptx.global_address(counter), block + 1)
    if block == BLOCKS - 1:
        out[thread] = total


@kernel(threads=THREADS, shared=share)
def stored_by_threads_loaded_by_the_engine(x, partial, counter, out):
    """As above, but stored by threads: with a proxy fence on the way."""
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    total = float32(0)
    if thread == 0:
        ptx.mbarrier_init(share.full[0], 1)
        ptx.fence_mbarrier_init()
        while ptx.ld_acquire_gpu_global_u32(ptx.global_address(counter)) != block:
            pass
        if block > 0:
            ptx.fence_proxy_async_global()
            ptx.mbarrier_arrive_expect_tx(share.full[0], 256)
            source = ptx.global_address(partial) + uint64(256) * uint64(block - 1)
            ptx.cp_async_bulk_shared_global(share.tile[0], source, 256, share.full[0])
    cuda.syncthreads()
    if block > 0:
        mbarrier_wait(share.full[0], 0)
        total = share.tile[0][thread]
    total += x[block, thread] * float32(2)
    partial[block, thread] = total
    cuda.syncthreads()
    if thread == 0:
        ptx.st_release_gpu_global_u32(ptx.global_address(counter), block + 1)
    if block == BLOCKS - 1:
        out[thread] = total


SIGNALS = [
    last_block_sums,
    one_fence_for_the_block,
    in_turn,
    grid_barrier,
    everybody_says_the_same,
    stored_and_loaded_by_the_engine,
    stored_by_threads_loaded_by_the_engine,
]


@pytest.mark.parametrize("function", SIGNALS, ids=lambda function: function.__name__)
def test_blocks_signal(function, rng):
    for schedule in SCHEDULES:
        x = rng.integers(-100, 100, (BLOCKS, THREADS)).astype(np.float32)
        partial, counter = np.zeros((BLOCKS, THREADS), np.float32), np.zeros(1, np.uint32)
        out = np.zeros(THREADS, np.float32)
        launch(function, BLOCKS, x, partial, counter, out, schedule=schedule)
        np.testing.assert_array_equal(out, 2 * x.sum(axis=0))


MANY = 80  # blocks of 1024 threads: more than the simulator runs at a time


@kernel(threads=1024)
def last_of_many_blocks(partial, counter, out):
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    partial[block, thread] = float32(block)
    cuda.threadfence()
    cuda.syncthreads()
    last = 0
    if thread == 0:
        last = int(cuda.atomic.add(counter, 0, 1) == MANY - 1)
    if cuda.syncthreads_or(last):
        cuda.threadfence()
        total = float32(0)
        for other in range(0, MANY, 9):
            total += partial[other, thread]
        out[thread] = total


@kernel(threads=1024)
def reads_the_block_before(partial, counter, out):
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    partial[block, thread] = float32(block)
    if block > 0:
        out[thread] = partial[block - 1, thread]


def test_blocks_that_do_not_run_at_the_same_time():
    for schedule in SCHEDULES[:3]:
        partial, counter, out = np.zeros((MANY, 1024), np.float32), np.zeros(1, np.uint32), np.zeros(1024, np.float32)
        launch(last_of_many_blocks, MANY, partial, counter, out, schedule=schedule)
        assert (out == sum(range(0, MANY, 9))).all()
        with use_backend("sim", **schedule), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hazards = reads_the_block_before[MANY](partial, counter, out).hazards
        found = [str(hazard) for hazard in hazards if hazard.identifier == "blocks-read-unordered"]
        assert found
        assert any(f"block {block}, " in found[0] for block in range(1, MANY))


# The same kernels with a line less: found under every schedule

LEFT_OUT = [
    (
        last_block_sums,
        "    cuda.threadfence()\n    cuda.syncthreads()",
        "    cuda.syncthreads()",
        "blocks-read-unordered",
    ),
    (last_block_sums, "        cuda.threadfence()\n        total", "        total", "blocks-read-unordered"),
    (
        one_fence_for_the_block,
        "    cuda.syncthreads()\n    if thread == 0:\n",
        "    if thread == 0:\n",
        "blocks-read-unordered",
    ),
    (one_fence_for_the_block, "        cuda.threadfence()\n        share", "        share", "blocks-read-unordered"),
    (in_turn, "ptx.st_release_gpu_global_u32(ptx.global_address(counter), block + 1)", "counter[0] = block + 1", None),
    (
        in_turn,
        "    cuda.syncthreads()\n    if thread == 0:\n        ptx.st",
        "    if thread == 0:\n        ptx.st",
        None,
    ),
    (grid_barrier, "                cuda.threadfence()\n            cuda", "            cuda", "blocks-read-unordered"),
    (stored_and_loaded_by_the_engine, "wait_group(0)", "wait_group_read(0)", "blocks-read-unordered"),
    (
        stored_by_threads_loaded_by_the_engine,
        "            ptx.fence_proxy_async_global()\n",
        "",
        "global-proxy-fence-missing",
    ),
    (
        stored_by_threads_loaded_by_the_engine,
        "    cuda.syncthreads()\n    if thread == 0:\n        ptx.st_release",
        "    if thread == 0:\n        ptx.st_release",
        "blocks-read-unordered",
    ),
]


@pytest.mark.parametrize(("function", "line", "instead", "identifier"), LEFT_OUT)
def test_a_line_less(function, line, instead, identifier, rng):
    source = inspect.getsource(function.function)
    assert source.count(line) == 1
    filename = f"{function.__name__}-{LEFT_OUT.index((function, line, instead, identifier))}.py"
    source = source.replace(line, instead)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace = dict(globals())
    exec(compile(source, filename, "exec"), namespace)
    for schedule in SCHEDULES:
        x = rng.integers(-100, 100, (BLOCKS, THREADS)).astype(np.float32)
        partial, counter = np.zeros((BLOCKS, THREADS), np.float32), np.zeros(1, np.uint32)
        out = np.zeros(THREADS, np.float32)
        with use_backend("sim", **schedule), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                hazards = namespace[function.__name__][BLOCKS](x, partial, counter, out).hazards
            except sim.SimError as error:
                hazards = error.hazards
        found = {hazard.identifier for hazard in hazards}
        wanted = {identifier} if identifier else {"blocks-read-unordered", "blocks-write-same-bytes"}
        assert found & wanted, f"{sim.named(schedule)}: {found}"

"""Stores and reductions of the copy engine that meet in global memory, or whose source is written too early."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from numba import cuda, float32

from numba_tma import Barriers, Shared, TensorMap, Tiles, kernel, pitched, ptx, sim, use_backend
from numba_tma.pipeline import mbarrier_wait, release_to_async, ring

SCHEDULES = sim.schedules()
OVERLAP = "stores-write-same-bytes"
smem = Shared(tile=Tiles(2, (64,), float32))


def hazards_of(launch, schedule):
    with use_backend("sim", **schedule), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return launch().hazards
        except sim.SimError as error:
            return error.hazards


def names(launch):
    """What the hazards of a launch are called under all schedules together."""
    return {tuple(sorted(hazard.identifier for hazard in hazards_of(launch, s))) for s in SCHEDULES}


@cuda.jit(device=True)
def fill():
    thread = cuda.threadIdx.x
    smem.tile[0][thread] = float32(1)
    smem.tile[1][thread] = float32(2)
    ptx.fence_proxy_async_shared_cta()
    cuda.syncthreads()


@cuda.jit(device=True)
def store(out, stage, at):
    ptx.cp_async_bulk_global_shared(ptx.global_address(out) + at, smem.tile[stage], 256)


@cuda.jit(device=True)
def add(out, stage, at):
    ptx.cp_reduce_async_bulk_global_shared_add_f32(ptx.global_address(out) + at, smem.tile[stage], 256)


@cuda.jit(device=True)
def add_whole(out, stage, at):
    ptx.cp_reduce_async_bulk_global_shared_add_u32(ptx.global_address(out) + at, smem.tile[stage], 256)


@cuda.jit(device=True)
def nothing():
    pass


@cuda.jit(device=True)
def new_group():
    ptx.cp_async_bulk_commit_group()


@cuda.jit(device=True)
def wait_for_reads():
    ptx.cp_async_bulk_commit_group()
    ptx.cp_async_bulk_wait_group_read(0)


@cuda.jit(device=True)
def wait_for_writes():
    ptx.cp_async_bulk_commit_group()
    ptx.cp_async_bulk_wait_group(0)


def one_thread(first, second, between, step=0):
    @kernel(threads=64, shared=smem)
    def one_thread_(out):
        fill()
        if cuda.threadIdx.x == 0:
            first(out, 0, 0)
            between()
            second(out, 1, step)
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group(0)

    return lambda: one_thread_[1](np.zeros(128, np.float32))


@pytest.mark.parametrize("between", [nothing, new_group, wait_for_reads], ids=lambda f: f.__name__)
def test_two_stores_of_a_thread(between):
    assert names(one_thread(store, store, between)) == {(OVERLAP,)}
    assert names(one_thread(store, store, between, step=240)) == {(OVERLAP,)}
    assert names(one_thread(store, store, between, step=256)) == {()}


def test_two_stores_with_a_wait_between():
    assert names(one_thread(store, store, wait_for_writes)) == {()}


def test_the_report_has_both_lines_and_the_copys_bytes():
    (hazard,) = hazards_of(one_thread(store, store, new_group, step=128), SCHEDULES[0])
    assert len(hazard.locations) == 2
    text = str(hazard)
    assert "starts a copy that writes 256 B of global memory, among them 16 B at" in text
    assert "128 bytes into out" in text and "started a copy that writes it" in text
    assert "a wait_group without .read between the two" in text


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [(add, add, ()), (add, add_whole, (OVERLAP,)), (store, add, (OVERLAP,)), (add, store, (OVERLAP,))],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_reductions_of_one_kind_commute(first, second, found):
    assert names(one_thread(first, second, new_group)) == {found}
    assert names(one_thread(first, second, wait_for_writes)) == {()}


def two_threads(waits, cluster=1):
    """Thread 0, then thread 32 or the cluster's other block, store to the same place."""

    @kernel(threads=64, shared=smem, cluster=cluster)
    def two_threads_(out):
        fill()
        thread = cuda.threadIdx.x + 64 * cuda.blockIdx.x
        if thread == 0:
            store(out, 0, 0)
            waits()
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()
        if thread == 64 or (cluster == 1 and thread == 32):
            store(out, 1, 0)
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group(0)

    return lambda: two_threads_[cluster](np.zeros(64, np.float32))


@pytest.mark.parametrize(("cluster", "name"), [(1, OVERLAP), (2, "blocks-write-same-bytes")])
def test_stores_of_two_threads(cluster, name):
    assert names(two_threads(wait_for_reads, cluster)) == {(name,)}
    assert names(two_threads(wait_for_writes, cluster)) == {()}


@pytest.mark.parametrize("second", [1, 2])
def test_the_same_twice_does_no_harm(second):
    @kernel(threads=64, shared=smem)
    def twice(out):
        thread = cuda.threadIdx.x
        smem.tile[0][thread] = float32(thread)
        smem.tile[1][thread] = float32(thread * second if thread == 63 else thread)
        ptx.fence_proxy_async_shared_cta()
        cuda.syncthreads()
        if thread % 32 == 0:
            store(out, thread // 32, 0)
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group(0)

    assert names(lambda: twice[1](np.zeros(64, np.float32))) == {(OVERLAP,) if second == 2 else ()}


def test_blocks_may_add_to_one_place():
    @kernel(threads=64, shared=smem)
    def sums(out):
        fill()
        if cuda.threadIdx.x == 0:
            add(out, 0, 0)
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group(0)

    def launch():
        out = np.zeros(64, np.float32)
        report = sums[4](out)
        assert (out == 4).all()
        return report

    assert names(launch) == {()}


# A ring of two stages that are loaded, worked on and stored

ROWS, COLUMNS, STAGES = 8, 32, 2
ring_smem = {
    extra: Shared(
        tile=Tiles(STAGES, (ROWS, COLUMNS), float32),
        out=Tiles(STAGES, (ROWS, COLUMNS + extra), float32),
        full=Barriers(STAGES),
    )
    for extra in (0, 4)
}


def doubled(pending=1, barrier=True, extra=0, parity=0, waits=True):
    plan = ring_smem[extra]

    @cuda.jit(device=True)
    def fetch(x_map, stage, step):
        ptx.mbarrier_arrive_expect_tx(plan.full[stage], x_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(plan.tile[stage], x_map, step * COLUMNS, 0, plan.full[stage])

    @kernel(threads=64, shared=plan)
    def doubled_(x_map, y_map, steps):
        thread = cuda.threadIdx.x
        if thread == 0:
            for stage in range(STAGES):
                ptx.mbarrier_init(plan.full[stage], 1)
            ptx.fence_mbarrier_init()
            for step in range(STAGES):
                fetch(x_map, step, step)
        cuda.syncthreads()
        for step in range(steps):
            stage, phase = ring(step, STAGES)
            mbarrier_wait(plan.full[stage], phase ^ parity)
            if waits and thread == 0:
                ptx.cp_async_bulk_wait_group_read(pending)
            if barrier:
                cuda.syncthreads()
            column = thread % COLUMNS
            for row in range(thread // COLUMNS, ROWS, 2):
                plan.out[stage][row, column] = float32(2) * plan.tile[stage][row, column]
            release_to_async()
            if thread == 0:
                ptx.cp_async_bulk_tensor_2d_global_shared(y_map, step * COLUMNS, 0, plan.out[stage])
                ptx.cp_async_bulk_commit_group()
                if step + STAGES < steps:
                    fetch(x_map, stage, step + STAGES)
        if thread == 0:
            ptx.cp_async_bulk_wait_group(0)

    def launch(columns=6 * COLUMNS):
        x, y = pitched((ROWS, columns), np.float32), pitched((ROWS, columns), np.float32)
        x[...] = np.arange(x.size).reshape(x.shape)
        maps = TensorMap(x, plan.tile, store=False), TensorMap(y, plan.out, store="padding")
        report = doubled_[1](*maps, np.int32(-(-columns // COLUMNS)))
        if not report.hazards:
            np.testing.assert_array_equal(y, 2 * x)
        return report

    return launch


def test_the_ring_is_clean():
    assert names(doubled()) == {()}
    # A wait for all stores one step early, and the barrier of the step between, do as well.
    assert names(doubled(pending=0, barrier=False)) == {()}


def test_boxes_wider_than_the_step_between_them():
    assert names(doubled(extra=4)) == {(OVERLAP,)}


def test_only_the_thread_that_stores_waits():
    """Whoever comes first: the one that waits, or those that do not and write."""
    assert names(doubled(barrier=False)) == {("wait-group-by-one-thread",)}


@pytest.mark.parametrize("options", [{"waits": False}, {"pending": 2}])
def test_nobody_waits_for_the_source(options):
    assert names(doubled(**options)) == {("source-overwritten-while-read",)}


def test_wrong_parity_names_the_wait_first():
    for schedule in SCHEDULES:
        with use_backend("sim", **schedule), warnings.catch_warnings(), pytest.raises(sim.SimError) as caught:
            warnings.simplefilter("ignore")
            doubled(parity=1)()
        error = caught.value
        assert {h.identifier for h in error.hazards} == {"wait-on-wrong-parity"}, sim.named(schedule)
        lines = str(error.hazards[0]).splitlines()
        assert "wait" in lines[0] and "full[" in lines[0] and "mbarrier.try_wait" in lines[1], lines
        assert "mbarrier.try_wait" in error.hazards[0].instruction.text
        if not isinstance(error, sim.Deadlock):
            assert error.message.startswith("a wait with the wrong parity at ")


# Padding behind a row's end


def test_padding_may_be_stored_to(rng):
    columns = 4 * int(rng.integers(34, 60)) + int(rng.integers(1, 4))
    assert names(lambda: doubled()(columns)) == {()}


def test_padding_that_others_write_to_is_none():
    plan = Shared(tile=Tiles(1, (8, 16), float32))

    @kernel(threads=32, shared=plan)
    def store_beside(x_map, whole):
        lane = cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            for row in range(8):
                plan.tile[0][row, lane % 16] = float32(1)
            ptx.fence_proxy_async_shared_cta()
            cuda.syncwarp()
            if lane == 0:
                ptx.cp_async_bulk_tensor_2d_global_shared(x_map, 0, 0, plan.tile[0])
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group(0)
        elif lane < 8:
            whole[lane, 15] = float32(2)

    def launch(columns):
        whole = np.zeros((8, 16), np.float32)
        return store_beside[2](TensorMap(whole[:, :columns], plan.tile, store="padding"), whole)

    assert names(lambda: launch(14)) == {("blocks-write-same-bytes",)}
    assert names(lambda: launch(12)) == {()}

"""Mistakes that look like others get the name of what is behind them, and no other; their mended twins get none."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from numba import cuda, float32, uint32

from numba_tma import Barriers, HazardWarning, Shared, TensorMap, Tiles, kernel, ptx, sim, use_backend
from numba_tma.pipeline import mbarrier_wait, release_to_async, ring
from numba_tma.warpgroup import matrix_descriptor

SCHEDULES = sim.schedules(random=4)
STAGES, STEPS = 2, 6
smem = Shared(tile=Tiles(STAGES, (16, 32), float32), full=Barriers(STAGES), empty=Barriers(STAGES))


def outcome(function, *arguments, schedule):
    """(identifiers of the hazards in order, the error that ended the launch)."""
    with use_backend("sim", **schedule), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [hazard.identifier for hazard in function[1](*arguments).hazards], None
        except sim.SimError as error:
            return [hazard.identifier for hazard in error.hazards], error


def names(function, columns=32 * STEPS):
    """What the hazards of a kernel are called, under each schedule."""
    found = {}
    for schedule in SCHEDULES:
        x, out = np.ones((16, columns), np.float32), np.zeros(64, np.float32)
        found[sim.named(schedule)] = outcome(function, TensorMap(x, smem.tile), out, schedule=schedule)
    return found


# One tile: how its bytes are promised


@cuda.jit(device=True)
def promised_with_the_arrival(bar, x_map):
    ptx.mbarrier_arrive_expect_tx(bar, x_map.box_bytes)
    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, bar)


@cuda.jit(device=True)
def promised_before_the_arrival(bar, x_map):
    ptx.mbarrier_expect_tx(bar, x_map.box_bytes)
    ptx.mbarrier_arrive(bar)
    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, bar)


@cuda.jit(device=True)
def never_promised(bar, x_map):
    ptx.mbarrier_arrive(bar)
    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, bar)


@cuda.jit(device=True)
def never_promised_copied_first(bar, x_map):
    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, bar)
    ptx.mbarrier_arrive(bar)


@cuda.jit(device=True)
def promised_after_the_arrival(bar, x_map):
    ptx.mbarrier_arrive(bar)
    ptx.mbarrier_expect_tx(bar, x_map.box_bytes)
    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, bar)


@cuda.jit(device=True)
def promised_after_the_copy(bar, x_map):
    ptx.mbarrier_arrive(bar)
    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, bar)
    ptx.mbarrier_expect_tx(bar, x_map.box_bytes)


@cuda.jit(device=True)
def one_of_two_promised(bar, x_map):
    ptx.mbarrier_arrive_expect_tx(bar, x_map.box_bytes)
    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[1], x_map, 32, 0, bar)
    ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, bar)


def one_tile(fetch, parity=0):
    @kernel(threads=64, shared=smem)
    def one_tile_(x_map, out):
        thread = cuda.threadIdx.x
        if thread == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
            fetch(smem.full[0], x_map)
        cuda.syncthreads()
        mbarrier_wait(smem.full[0], parity)
        out[thread] = smem.tile[0][15, thread % 32]

    return one_tile_


@pytest.mark.parametrize("fetch", [promised_with_the_arrival, promised_before_the_arrival], ids=lambda f: f.__name__)
def test_promised_in_time(fetch):
    assert set(map(str, names(one_tile(fetch)).values())) == {"([], None)"}


@pytest.mark.parametrize(
    "fetch, name",
    [
        (never_promised, "copy-without-expect-tx"),
        (never_promised_copied_first, "copy-without-expect-tx"),
        (promised_after_the_arrival, "copy-without-expect-tx"),
        (promised_after_the_copy, "copy-without-expect-tx"),
        (one_of_two_promised, "more-bytes-than-expected"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_not_promised_in_time(fetch, name):
    for schedule, (found, _) in names(one_tile(fetch)).items():
        assert found == [name], schedule


def test_wrong_parity_of_what_was_promised():
    for schedule, (found, _) in names(one_tile(promised_with_the_arrival, parity=1)).items():
        assert "wait-on-wrong-parity" in found, schedule
        assert not {"copy-without-expect-tx", "more-bytes-than-expected"} & set(found), schedule


# Two stages, filled by one of the threads that read them


def two_stages(promised=True, released="after", waits="each", parity="ring"):
    """`released`: "after" reading a stage or "before"; `waits`: for "each" step or for the "first" of a stage."""

    @cuda.jit(device=True)
    def fetch(x_map, stage, step):
        if promised:
            ptx.mbarrier_arrive_expect_tx(smem.full[stage], x_map.box_bytes)
        else:
            ptx.mbarrier_arrive(smem.full[stage])
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[stage], x_map, 32 * step, 0, smem.full[stage])

    @kernel(threads=64, shared=smem)
    def two_stages_(x_map, out):
        thread = cuda.threadIdx.x
        if thread == 0:
            for stage in range(STAGES):
                ptx.mbarrier_init(smem.full[stage], 1)
            ptx.fence_mbarrier_init()
            for step in range(STAGES):
                fetch(x_map, step, step)
        cuda.syncthreads()
        total = float32(0)
        for step in range(STEPS):
            stage, phase = ring(step, STAGES)
            if parity == "zero":
                phase = uint32(0)
            if waits == "each" or step < STAGES:
                mbarrier_wait(smem.full[stage], phase)
            if released == "before":
                release_to_async()
                if thread == 0 and step + STAGES < STEPS:
                    fetch(x_map, stage, step + STAGES)
            for row in range(16):
                total += smem.tile[stage][row, thread % 32]
            if released == "after":
                release_to_async()
                if thread == 0 and step + STAGES < STEPS:
                    fetch(x_map, stage, step + STAGES)
        out[thread] = total

    return two_stages_


def test_two_stages():
    assert set(map(str, names(two_stages()).values())) == {"([], None)"}


def test_two_stages_without_promise():
    for schedule, (found, _) in names(two_stages(promised=False)).items():
        assert found == ["copy-without-expect-tx"], schedule


def test_two_stages_released_before_reading():
    for schedule, (found, _) in names(two_stages(released="before")).items():
        assert found == ["buffer-released-early"], schedule


def test_two_stages_waited_for_once():
    """The same place read what was in the buffer before: it needs a wait, and no later release."""
    for schedule, (found, _) in names(two_stages(waits="first")).items():
        assert found[0] == "tile-used-before-wait" and "buffer-released-early" not in found, schedule


def test_constant_parity_in_a_ring():
    """Whatever the error is that ends the launch, it says what is behind it."""
    kinds = set()
    for schedule, (found, error) in names(two_stages(parity="zero")).items():
        assert found[0] == "wait-on-wrong-parity", schedule
        assert "error: wait-on-wrong-parity: " in str(error) and "way out: wait with parity" in str(error), schedule
        kinds.add(type(error))
    assert kinds == {sim.SimError, sim.Deadlock}


# Two stages, filled by a warp of its own


def producer_and_consumers(released="after"):
    @kernel(threads=64, shared=smem)
    def producer_and_consumers_(x_map, out):
        thread = cuda.threadIdx.x
        if thread == 0:
            for stage in range(STAGES):
                ptx.mbarrier_init(smem.full[stage], 1)
                ptx.mbarrier_init(smem.empty[stage], 32)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        if thread == 32:
            for step in range(STEPS):
                stage, phase = ring(step, STAGES)
                mbarrier_wait(smem.empty[stage], phase ^ uint32(1))
                ptx.mbarrier_arrive_expect_tx(smem.full[stage], x_map.box_bytes)
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[stage], x_map, 32 * step, 0, smem.full[stage])
        if thread < 32:
            total = float32(0)
            for step in range(STEPS):
                stage, phase = ring(step, STAGES)
                mbarrier_wait(smem.full[stage], phase)
                if released == "before":
                    ptx.fence_proxy_async_shared_cta()
                    ptx.mbarrier_arrive(smem.empty[stage])
                for row in range(16):
                    total += smem.tile[stage][row, thread]
                if released == "after":
                    ptx.fence_proxy_async_shared_cta()
                    ptx.mbarrier_arrive(smem.empty[stage])
            out[thread] = total

    return producer_and_consumers_


def test_consumers():
    assert set(map(str, names(producer_and_consumers()).values())) == {"([], None)"}


def test_consumers_release_before_reading():
    for schedule, (found, _) in names(producer_and_consumers(released="before")).items():
        assert found == ["buffer-released-early"], schedule


# A tile that wgmma reads

operands = Shared(
    a=Tiles(1, (64, 64), np.float16, swizzle="128B"), b=Tiles(1, (8, 64), np.float16, swizzle="128B"), full=Barriers(1)
)


def product(promised=True):
    @kernel(threads=128, shared=operands)
    def product_(a_map, b_map, out):
        thread = cuda.threadIdx.x
        if thread == 0:
            ptx.mbarrier_init(operands.full[0], 1)
            ptx.fence_mbarrier_init()
            if promised:
                ptx.mbarrier_arrive_expect_tx(operands.full[0], a_map.box_bytes + b_map.box_bytes)
            else:
                ptx.mbarrier_arrive(operands.full[0])
            ptx.cp_async_bulk_tensor_2d_shared_global(operands.a[0], a_map, 0, 0, operands.full[0])
            ptx.cp_async_bulk_tensor_2d_shared_global(operands.b[0], b_map, 0, 0, operands.full[0])
        cuda.syncthreads()
        mbarrier_wait(operands.full[0], 0)
        acc = cuda.local.array(4, float32)
        da = matrix_descriptor(ptx.shared_address(operands.a[0]), 16, 1024)
        db = matrix_descriptor(ptx.shared_address(operands.b[0]), 16, 1024)
        ptx.wgmma_fence()
        ptx.wgmma_mma_async_m64n8k16_f32_f16_f16(acc, da, db, False, 0, 0)
        ptx.wgmma_commit_group()
        ptx.wgmma_wait_group_m64n8_f32(acc, 0)
        out[thread] = acc[0]

    return product_


@pytest.mark.parametrize("promised, wanted", [(True, []), (False, ["copy-without-expect-tx"])])
def test_product(promised, wanted):
    function = product(promised)
    for schedule in SCHEDULES:
        a, b = np.ones((64, 64), np.float16), np.ones((8, 64), np.float16)
        maps = (TensorMap(x, x.shape, swizzle="128B") for x in (a, b))
        found, _ = outcome(function, *maps, np.zeros(128, np.float32), schedule=schedule)
        assert found == wanted, sim.named(schedule)


# A tile that is stored: what the numbers do not show

store_smem = Shared(tile=Tiles(1, (32, 64), np.float16), full=Barriers(1))


def scaled(without=""):
    @kernel(threads=64, shared=store_smem)
    def scaled_(source, target):
        column = cuda.threadIdx.x
        tile = store_smem.tile[0]
        if column == 0:
            ptx.mbarrier_init(store_smem.full[0], 1)
            if without != "init fence":
                ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(store_smem.full[0], source.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(tile, source, 0, 0, store_smem.full[0])
        cuda.syncthreads()
        mbarrier_wait(store_smem.full[0], 0)
        for row in range(32):
            tile[row, column] = float32(tile[row, column]) * float32(2)
        if without != "proxy fence":
            ptx.fence_proxy_async_shared_cta()
        if without != "barrier":
            cuda.syncthreads()
        if column == 0:
            ptx.cp_async_bulk_tensor_2d_global_shared(target, 0, 0, tile)
            ptx.cp_async_bulk_commit_group()
            if without != "wait_group":
                ptx.cp_async_bulk_wait_group(0)

    return scaled_


@pytest.mark.parametrize(
    "without, wanted",
    [
        ("", []),
        ("init fence", ["mbarrier-init-not-fenced"]),
        ("proxy fence", ["missing-proxy-fence"]),
        ("barrier", ["copy-before-writers-done"]),
        ("wait_group", ["exit-with-copies-in-flight"]),
    ],
)
def test_right_numbers_and_a_warning(rng, without, wanted):
    """As docs/writing_a_kernel.md has it."""
    x = rng.standard_normal((32, 64)).astype(np.float16)
    y = np.empty_like(x)
    maps = TensorMap(x, store_smem.tile), TensorMap(y, store_smem.tile)
    with use_backend("sim"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaled(without)[1](*maps)
    np.testing.assert_array_equal(y, 2 * x)
    assert [w.category for w in caught] == [HazardWarning] * len(wanted)
    for warning, name in zip(caught, wanted, strict=True):
        assert f": {name}: " in str(warning.message)
    if wanted:
        with use_backend("sim"), warnings.catch_warnings(), pytest.raises(HazardWarning, match=wanted[0]):
            warnings.simplefilter("error", HazardWarning)
            scaled(without)[1](*maps)

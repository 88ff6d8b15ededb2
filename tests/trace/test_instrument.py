"""Kernels with stamps: they give the same results, and write down what they did."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
from numba import cuda

from numba_tma import Barriers, Shared, TensorMap, Tiles, kernel, ptx, sim, suite, trace
from numba_tma.compile import CompileError
from numba_tma.kernels import PROBLEMS, kv_stream
from numba_tma.launch import recording, tracing, use_backend
from numba_tma.pipeline import mbarrier_wait, release_to_async, ring
from numba_tma.trace import Trace, records
from numba_tma.trace.instrument import instrument

# One of each problem by default, the last and usually the largest; the others where all is asked for.
ALL = [
    pytest.param(
        problem,
        variant,
        id=f"{problem.name}.{variant.name}",
        marks=() if variant is problem.variants[-1] else pytest.mark.full,
    )
    for problem in PROBLEMS
    for variant in problem.variants
]
SMEM = Shared(tile=Tiles(2, (8, 32), np.float32), full=Barriers(2))


@kernel(threads=64, shared=SMEM)
def sums(x_map, out, steps):
    """Column sums of `steps` tiles by warp 0, copies asked for by one lane of warp 1."""
    thread = cuda.threadIdx.x
    if thread == 0:
        for stage in range(2):
            ptx.mbarrier_init(SMEM.full[stage], 1)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    total = np.float32(0)
    for step in range(steps):
        stage, phase = ring(step, 2)
        if thread == 37:
            ptx.mbarrier_arrive_expect_tx(SMEM.full[stage], x_map.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(SMEM.tile[stage], x_map, 0, step * 8, SMEM.full[stage])
        if thread < 32:
            mbarrier_wait(SMEM.full[stage], phase)
            trace.begin("sum")
            for row in range(8):
                total += SMEM.tile[stage][row, thread]
            trace.end("sum")
            trace.mark("summed", step)
        release_to_async()
    if thread < 32:
        out[cuda.blockIdx.x, thread] = total


def run(plan=None, steps=5, blocks=2):
    rng = np.random.default_rng()
    x, out = rng.random((8 * steps, 32), np.float32), np.zeros((blocks, 32), np.float32)
    with use_backend("sim"), tracing(plan) as traced:
        sums[blocks](TensorMap(x, SMEM.tile), out, np.int32(steps))
    for row in out[: blocks if steps else 0]:
        np.testing.assert_allclose(row, x.sum(axis=0), rtol=1e-5)
    return traced.launches[0]


def count(warp, kind, name=None):
    return sum(event.site.kind == kind and name in (None, event.site.name) for event in warp.events)


def test_what_a_kernel_does_is_written_down():
    launch = run(steps=5, blocks=3)
    warps = {(warp.block, warp.warp): warp for warp in launch.warps()}
    assert sorted(warps) == [(block, warp) for block in range(3) for warp in range(2)]
    for (_, number), warp in warps.items():
        consumer = number == 0
        assert count(warp, "mbarrier wait") == (5 if consumer else 0)
        assert count(warp, "part", "sum") == (5 if consumer else 0)
        assert count(warp, "issue to mbarrier") == (0 if consumer else 5)
        assert count(warp, "block barrier") == 6
        assert warp.dropped == 0
        assert all(warp.start <= event.start <= event.end <= warp.end for event in warp.events)
        assert [event.detail for event in warp.events if event.site.kind == "mark"] == [0, 1, 2, 3, 4][: 5 * consumer]
    base = SMEM.offsets["full"] + warps[0, 0].shared_base
    details = [event.detail for event in warps[0, 0].events if event.site.kind == "mbarrier wait"]
    assert details == [base, base + 8, base, base + 8, base]
    issued = [event.detail for event in warps[0, 1].events if event.site.kind == "issue to mbarrier"]
    assert issued == details


def test_one_thing_after_another():
    consumer, producer = run().warps()[:2]
    waits, parts, issues = (
        [event for event in warp.events if event.site.kind == kind]
        for warp, kind in ((consumer, "mbarrier wait"), (consumer, "part"), (producer, "issue to mbarrier"))
    )
    for issue, wait, part in zip(issues, waits, parts, strict=True):
        assert issue.start < wait.end <= part.start < part.end
    assert all(part.end <= wait.start for part, wait in zip(parts, waits[1:], strict=False))


def test_records_without_room_are_counted():
    whole = run(steps=20).warps()[0]
    short = run(Trace(capacity=32), steps=20).warps()[0]
    assert short.dropped == len(whole.events) - 32
    kept = [(event.site.kind, event.detail) for event in short.events]
    assert len(kept) == 32
    for kind in ("mbarrier wait", "mark"):
        assert [k for k in kept if k[0] == kind] == [
            (event.site.kind, event.detail) for event in whole.events if event.site.kind == kind
        ][: sum(k[0] == kind for k in kept)]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [(range(1, 100), [1, 2, 3, 4]), (range(0, 5, 3), [0, 3]), (range(2, 3), [2]), (range(9, 12), [])],
)
def test_some_blocks_only(blocks, expected):
    launch = run(Trace(blocks=blocks), blocks=5)
    assert sorted({warp.block for warp in launch.warps()}) == expected


def test_some_multiprocessors_only():
    launch = run(Trace(multiprocessors=range(1, 1000, 2)), blocks=6)
    whole = run(blocks=6)
    on = {warp.block: warp.multiprocessor for warp in whole.warps()}
    assert len(set(on.values())) > 1, "the simulator keeps several SMs"
    assert sorted({warp.block for warp in launch.warps()}) == [block for block, sm in on.items() if sm % 2]


@pytest.mark.parametrize(("problem", "variant"), ALL)
def test_the_suite_is_right_with_stamps(problem, variant, seed):
    case = problem.cases["quick", "sim"][0]
    with tracing(Trace(capacity=64)) as traced:
        (record,) = suite.run_case(problem, case, [variant], "sim", seed=seed)
    assert record.ok, record.reason
    assert not record.hazards
    assert all(launch.warps() for launch in traced.launches) and traced.launches


@pytest.mark.parametrize("variant", ["cp_async", "tma_ring"])
def test_stamps_are_cheap_in_registers(variant):
    arrays = kv_stream.PROBLEM.inputs(kv_stream.PROBLEM.cases["quick", "sim"][0], np.random.default_rng(0))
    with use_backend("sim"), tracing() as traced:
        kv_stream.PROBLEM.variant(variant).bind(arrays)()
    resources = traced.launches[0].instrumented.compiled.resources
    assert resources.spill_store_bytes == 0 and resources.local_bytes == 0
    assert resources.registers <= 80


@pytest.mark.parametrize("variant", ["warpgroups", "ping_pong"])
def test_products_stay_asynchronous_under_stamps(variant):
    """The assembler would warn (C7510 and its like) if it let products wait for each other, or for registers."""
    problem = next(problem for problem in PROBLEMS if problem.name == "attention")
    case = dataclasses.replace(problem.cases["default", "sim"][1], shape=(1, 128, 256, 1, 1, 128))
    with recording() as recorded:
        problem.variant(variant).bind(problem.inputs(case, np.random.default_rng(0)))()
    (launched,) = recorded.launches
    resources = instrument(launched.compiled, Trace()).compiled.resources
    assert not resources.warnings and not resources.spill_store_bytes


def test_a_bound_launch_keeps_what_it_writes_to(in_simulator):
    x, out = np.random.default_rng().random((16, 32), np.float32), np.zeros((1, 32), np.float32)
    with tracing() as traced:
        bound = sums[1].bind(TensorMap(x, SMEM.tile), out, np.int32(2))
    listed = weakref.ref(traced.launches[0])
    del traced
    gc.collect()
    assert listed() is not None
    bound()
    assert listed().warps()


def test_copies_to_one_barrier_are_one_record():
    arrays = kv_stream.PROBLEM.inputs(kv_stream.PROBLEM.cases["quick", "sim"][0], np.random.default_rng(0))
    with use_backend("sim"), tracing() as traced:
        kv_stream.PROBLEM.variant("tma").bind(arrays)()
    sites = [site for site in traced.launches[0].instrumented.sites if site.kind == "issue to mbarrier"]
    assert {site.count for site in sites} == {2}
    assert all("kv_stream.py" in str(site.location) for site in sites)


def test_a_mark_in_a_function_that_is_called():
    @kernel(threads=32)
    def calls(x):
        x[cuda.threadIdx.x] += 1

    compiled = calls.compile(np.zeros(32, np.float32))
    called = (
        ".visible .func helper()\n{\n{\n.reg .u32 %trace_value;\n"
        f"mov.u32 %trace_value, 0; // numba_tma.trace mark {b'load'.hex()}\n}}\nret;\n}}\n"
    )
    entry = compiled.ptx.index(".visible .entry")
    wrong = dataclasses.replace(compiled, ptx=compiled.ptx[:entry] + called + compiled.ptx[entry:])
    with pytest.raises(CompileError, match=r"helper, which the compiler did not inline.*forceinline"):
        instrument(wrong, Trace())


def test_an_end_without_a_beginning(in_simulator):
    @kernel(threads=32)
    def ends(x):
        x[cuda.threadIdx.x] += 1
        trace.end("load")

    @kernel(threads=32)
    def begins(x):
        trace.begin("load")
        x[cuda.threadIdx.x] += 1

    with tracing(), pytest.raises(CompileError, match=r"trace.end\('load'\) without a trace.begin"):
        ends[1](np.zeros(32, np.float32))
    with tracing(), pytest.raises(CompileError, match=r"trace.begin\('load'\) without a trace.end"):
        begins[1](np.zeros(32, np.float32))


def test_guarded_instructions_are_stamped_under_their_guard():
    """As compilers other than Numba's write them: each half of the threads waits at a barrier of its own."""

    @kernel(threads=64)
    def guarded(out):
        cuda.syncthreads()
        out[cuda.threadIdx.x] = 1

    halves = """.reg .pred %half;
    .reg .u32 %thread;
    mov.u32 %thread, %tid.x;
    setp.lt.u32 %half, %thread, 32;
    @%half bar.sync 1, 32;
    @!%half bar.sync 2, 32;"""
    compiled = guarded.compile(np.zeros(64, np.float32))
    assert "bar.sync \t0;" in compiled.ptx
    plan = Trace()
    made = instrument(dataclasses.replace(compiled, ptx=compiled.ptx.replace("bar.sync \t0;", halves)), plan)
    memory = sim.GlobalMemory()
    out, rings = np.zeros(64, np.float32), np.zeros(plan.nbytes(1, 64), np.uint8)
    words = {"out_data": memory.map(out, "out"), "numba_tma_trace": memory.map(rings, "trace")}
    given = [words.get(p.name, 64).to_bytes(p.size, "little") for p in made.compiled.parameters]
    sim.launch(made.compiled.ptx, grid=1, block=64, params=given, memory=memory)
    assert (out == 1).all()
    warps = records.read(rings, plan, made.sites, 1, 64)
    assert [[event.detail for event in warp.events] for warp in warps] == [[1], [2]]


def test_a_plan_that_is_wrong():
    with pytest.raises(TypeError, match=r"expected a range, such as range\(8\)"):
        Trace(blocks=[1, 2])
    with pytest.raises(ValueError, match="chooses nothing"):
        Trace(multiprocessors=range(4, 4))
    with pytest.raises(ValueError, match="a warp keeps 1 to"):
        Trace(capacity=0)
    with pytest.raises(ValueError, match=r"choose blocks.*or keep fewer records"):
        Trace().nbytes(1_000_000, 128)
    with pytest.raises(TypeError, match=r"expected a Trace\(…\)"), tracing(1024):
        pass


@pytest.mark.gpu
def test_on_the_gpu(seed):
    """Stamps in nanoseconds that go forwards, and a kernel that is as right as before."""
    case = kv_stream.PROBLEM.cases["quick", "gpu"][0]
    for variant in kv_stream.PROBLEM.variants:
        with tracing() as traced:
            (record,) = suite.run_case(kv_stream.PROBLEM, case, [variant], "gpu", seed=seed, measure=False)
        assert record.ok, record.reason
        warps = traced.launches[0].warps()
        assert warps and not any(warp.dropped for warp in warps)
        longest = max(warp.end for warp in warps)
        assert 1e3 < longest < 1e6
        for warp in warps:
            assert all(-100 <= event.start <= event.end <= longest + 100 for event in warp.events)

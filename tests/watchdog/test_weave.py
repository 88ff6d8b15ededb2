"""Watchdogs in PTX: there when asked for, harmless, and in the simulator they bite where the time is short."""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest
import waiting
from numba import cuda, types, uint32, uint64

from numba_tma import driver, kernel, launch, ptx, sim, suite, trace, use_backend, watchdog
from numba_tma.compile import Compiled, CompileError, compile_kernel, link
from numba_tma.kernels import PROBLEMS
from numba_tma.launch import recording, tracing
from numba_tma.watchdog import armed, record, weave

ADDED = re.compile(r"[%$]watchdog|numba_tma[._]watchdog")
HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"


def compiled_sums(arrivals: int = 1, seconds: float | None = None) -> Compiled:
    return waiting.make_sums(arrivals, seconds).compile(*waiting.arguments_of_sums())


@functools.cache
def recorded(problem: str, variant: str) -> Compiled:
    chosen = next(p for p in PROBLEMS if p.name == problem)
    with recording() as found:
        arrays = chosen.inputs(chosen.cases["quick", "sim"][0], np.random.default_rng(0))
        chosen.variant(variant).bind(arrays, **chosen.cases["quick", "sim"][0].options_of(variant))()
    return found.launches[-1].compiled


def test_without_a_watchdog_the_ptx_is_what_the_compiler_made(monkeypatch):
    owner = waiting.make_sums(1)
    x_map, out, steps = waiting.arguments_of_sums()
    plain = owner.compile(x_map, out, steps)
    numba_types = (x_map.numba_type, types.Array(types.float32, 1, "C"), types.int32)
    assert plain == compile_kernel(owner.function, numba_types, threads=64, cluster=(1, 1, 1))
    assert not ADDED.search(plain.ptx) and "globaltimer" not in plain.ptx
    monkeypatch.setenv(watchdog.VARIABLE, "2")
    watched = owner.compile(x_map, out, steps)
    assert watched.ptx != plain.ptx and watched.ptx.count("%globaltimer") == 2
    assert weave.SYMBOL in watched.ptx and "trap;" in watched.ptx
    monkeypatch.setenv(watchdog.VARIABLE, "0")
    assert owner.compile(x_map, out, steps) is plain


def test_all_of_the_kernel_stays():
    """Taking the added lines out again, and the loops' own labels back in, gives the kernel without a watchdog."""
    plain, watched = compiled_sums(), compiled_sums(seconds=1)
    lines, kept = iter(watched.ptx.split("\n")), []
    for line in lines:
        if line == "$watchdog_gave_up:":
            while line != "bra $watchdog_ends;":
                line = next(lines)
        elif re.match(r"\$watchdog_enter_\d+:", line):
            while not re.match(r"\$watchdog_begun_\d+:", line):
                line = next(lines)
        elif "$watchdog_turn_" in line or not ADDED.search(line):
            kept.append(line)
    expected = plain.ptx.split("\n")
    assert len(kept) == len(expected)
    changed = [(a, b) for a, b in zip(expected, kept, strict=True) if a != b]
    assert len(changed) == 2  # the branch that closes each wait's loop
    assert all(re.sub(r"\$L__BB\w+", "X", a) == re.sub(r"\$watchdog_turn_\d", "X", b) for a, b in changed)


def test_a_kernel_that_does_not_wait_has_none(monkeypatch):
    monkeypatch.setenv(watchdog.VARIABLE, "2")

    @kernel(threads=32)
    def add(x):
        x[0] += 1

    assert not ADDED.search(add.compile(np.zeros(1, np.float32)).ptx)


def test_a_name_is_no_watchdog(monkeypatch):
    """Nor is the name of a file or function in the PTX's lines."""
    monkeypatch.setenv(watchdog.VARIABLE, "2")

    @kernel(threads=32)
    def numba_tma_watchdog(x):
        x[0] += 1

    compiled = numba_tma_watchdog.compile(np.zeros(1, np.float32))
    assert weave.SYMBOL in compiled.ptx and not watchdog.is_watched(compiled)
    watched = compiled_sums(seconds=1)
    assert watchdog.is_watched(watched) and weave.watch(watched) is watched


@kernel(threads=32, watchdog=1)
def adds_up(x, out):
    address, total = ptx.global_address(x), uint32(0)
    for i in range(x.shape[0]):
        total = uint32(total + ptx.ld_acquire_gpu_global_u32(uint64(address + 4 * i)))
    out[cuda.threadIdx.x] = total


def test_adding_up_is_no_wait(rng, in_simulator):
    x, out = rng.integers(0, 1000, 64, np.uint32), np.zeros(32, np.uint32)
    assert not watchdog.is_watched(adds_up.compile(x, out))
    adds_up[1](x, out)
    assert (out == x.sum()).all()


def test_the_watchdog_is_asked_for_at_each_bind(monkeypatch):
    """Whatever was launched before."""

    class Variant:
        def __init__(self, launcher, compiled, loaded, numba_types):
            self.is_watched = watchdog.is_watched(compiled)

        def bound(self, marshalled):
            return self

        def launch(self, marshalled):
            launched.append(self)

    class OnGpu:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__array_interface__ | {"strides": array.strides, "version": 3}

    monkeypatch.setattr(launch, "_Variant", Variant)
    monkeypatch.setattr(launch, "gpu_refusal", lambda compiled=None: None)
    monkeypatch.setattr(launch.Kernel, "load", lambda self, compiled: None)
    arguments = OnGpu(np.zeros(1, np.uint32)), OnGpu(np.zeros(32, np.float32))
    for first in ("2", "0"):
        launcher, launched = waiting.make_poll(None)[1, 32, 1 if first == "2" else 2], []
        monkeypatch.setenv(watchdog.VARIABLE, first)
        with use_backend("gpu"):
            launcher(*arguments)
            assert [one.is_watched for one in launched] == [first == "2"]
            for later in ("0", "2", "", "3", first):
                monkeypatch.setenv(watchdog.VARIABLE, later)
                assert launcher.bind(*arguments).is_watched == (later in ("2", "3"))


def test_sites_have_the_lines_of_the_kernel():
    sites = weave.sites(compiled_sums(seconds=1))
    lines = {site.location.outermost.line for site in sites.values()}
    assert lines == {waiting.line_of("the consumer waits"), waiting.line_of("the producer waits")}
    for number, site in sites.items():
        ptx = compiled_sums(seconds=1).ptx.split("\n")
        assert site.mnemonic.startswith("mbarrier.try_wait.parity") and site.mnemonic in ptx[site.line - 1]
        assert f"// numba_tma.watchdog {number}" in "\n".join(ptx[site.line - 6 : site.line])


def test_right_results_and_named_deadlocks_in_the_simulator(in_simulator):
    x_map, out, steps = waiting.arguments_of_sums()
    report = waiting.make_sums(1, 2)[1](x_map, out, steps)
    assert not report.hazards
    np.testing.assert_array_equal(out, np.asarray(x_map.array)[::8].sum(axis=0))
    with use_backend("sim"), pytest.raises(sim.Deadlock, match="31 of 32 arrivals missing"):
        waiting.make_sums(32, 1e-9)[1](x_map, out, steps)  # the limit is the GPU's: nobody sets it here


@pytest.mark.parametrize(
    "problem",
    [p if p.name in ("kv_stream", "softmax", "gemm") else pytest.param(p, marks=pytest.mark.full) for p in PROBLEMS],
    ids=lambda problem: problem.name,
)
def test_the_suite_is_right_with_watchdogs(problem, seed, monkeypatch):
    monkeypatch.setenv(watchdog.VARIABLE, "2")
    case = problem.cases["quick", "sim"][0]
    for got in suite.run_case(problem, case, [problem.variants[-1]], "sim", seed=seed):
        assert got.ok, got.reason
        assert not got.hazards


def test_traces_and_watchdogs_go_together(in_simulator):
    x_map, out, steps = waiting.arguments_of_sums()
    with tracing(trace.Trace()) as traced:
        waiting.make_sums(1, 2)[1](x_map, out, steps)
    np.testing.assert_array_equal(out, np.asarray(x_map.array)[::8].sum(axis=0))
    (launch,) = traced.launches
    assert watchdog.is_watched(launch.instrumented.compiled)
    waits = [event for warp in launch.warps() for event in warp.events if event.site.kind == "mbarrier wait"]
    assert len(waits) == 2 * waiting.STEPS
    assert weave.sites(launch.instrumented.compiled).keys() == {0, 1}


@pytest.mark.parametrize(
    ("problem", "variant"), [("kv_stream", "tma_ring"), ("gemm", "ring"), ("attention", "ping_pong")]
)
def test_registers_stay_and_products_stay_asynchronous(problem, variant):
    """The assembler would warn (C7510 and its like) if it let products wait for each other, or for registers."""
    plain = recorded(problem, variant)
    resources = weave.watch(plain).resources
    assert weave.watch(plain) != plain
    assert not resources.warnings and resources.spill_store_bytes == plain.resources.spill_store_bytes
    assert resources.registers <= plain.resources.registers + 8


class Armed:
    """The simulator with the limit and the record that the host of a GPU would have set."""

    def __init__(self, limit: int) -> None:
        self.limit, self.rows = limit, np.zeros(record.BYTES, np.uint8)
        self._launch = sim.launch

    def __call__(self, text: str, name: str, **options: object) -> None:
        address = options["memory"].map(self.rows, "record")
        armed = text.replace(f"{{0, {weave.ENDLESS}, 0}}", f"{{{address}, {self.limit}, 0}}")
        assert armed != text
        self._launch(armed, name, **options)

    def found(self) -> record.Record:
        """What a thread wrote before it trapped."""
        return record.read(self.rows, self.limit)


@pytest.mark.parametrize(("cluster", "rank"), [(1, 0), (2, 1)])
def test_the_first_that_gives_up_leaves_a_record(cluster, rank, monkeypatch, in_simulator):
    owner, out = waiting.make_pair(1, True, cluster), np.zeros(128 * cluster, np.float32)
    monkeypatch.setattr(sim, "launch", Armed(limit := 3_000_000))
    with use_backend("sim"), pytest.raises(sim.Trap):
        owner[2 * cluster](out)
    found = sim.launch.found()
    assert found.thread == (37, 0, 0) and found.block in [(rank, 0, 0), (cluster + rank, 0, 0)]
    assert (found.cluster_rank, found.cluster_blocks, found.phase) == (rank, cluster, 0)
    assert limit <= found.seconds * 1e9 < 2 * limit
    error = watchdog.WatchdogError("pair", found, weave.sites(owner.compile(out)), owner.shared)
    assert error.barrier == "mbarrier ready[2]" and error.phase == 0
    assert error.line == f"{waiting.__file__}:{waiting.line_of('the pair waits')}"
    assert (f"rank {rank} of its cluster's 2" in str(error)) == (cluster == 2)


def test_a_flag_that_nobody_sets(monkeypatch):
    owner, flag, out = waiting.make_poll(1), np.zeros(1, np.uint32), np.zeros(32, np.float32)
    monkeypatch.setattr(sim, "launch", Armed(20_000))
    with use_backend("sim"), pytest.raises(sim.Trap):
        owner[1](flag, out)
    found = sim.launch.found()
    error = watchdog.WatchdogError("poll", found, weave.sites(owner.compile(flag, out)), None)
    assert error.barrier.startswith("address 0x") and error.phase is None
    assert error.line == f"{waiting.__file__}:{waiting.line_of('the poll')}"


def test_what_the_simulator_says_of_a_poll():
    """The check that a watchdog puts in front of the loop has the line of the wait."""
    reports = []
    for seconds in (0, 1):
        with use_backend("sim"), pytest.raises(sim.Deadlock, match="poll for a change") as found:
            waiting.make_poll(seconds)[1](np.zeros(1, np.uint32), np.zeros(32, np.float32))
        reports.append(re.findall(r"waiting\.py:\d+", found.value.report))
    assert reports[0] == reports[1] == [f"waiting.py:{waiting.line_of('the poll')}"]


def watched_text(body: str, target: str = "sm_90") -> Compiled:
    """Hand-written PTX: one thread waits at the second of two barriers, made for one arrival, in the loop of `body`."""
    text = (
        f"{HEAD.replace('sm_90', target)}.visible .entry waits()\n{{\n.shared .align 8 .b8 bars[16];\n"
        f".reg .pred %p, %q;\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\nmov.u32 %r1, 1;\n"
        f"mbarrier.init.shared.b64 [bars+8], %r1;\nsetp.eq.u32 %q, %r1, 1;\n{body}\nret;\n}}\n"
    )
    return weave.watch(Compiled("waits", target, text, (), 0))


@pytest.mark.parametrize(
    ("body", "phase"),
    [
        ("L:\nmbarrier.try_wait.parity.shared.b64 %p, [bars+8], 0;\n@!%p bra L;", 0),
        # Entered by a branch as well as from above.
        ("@%q bra L;\nmov.u32 %r1, 0;\nL:\nmbarrier.try_wait.parity.shared.b64 %p, [bars+8], 0;\n@!%p bra L;", 0),
        # Its last instruction lies in front of its first.
        (
            "mov.u32 %r2, bars;\nbra M;\nL:\nnanosleep.u32 50;\nM:\n"
            "mbarrier.try_wait.parity.shared.b64 %p, [%r2+8], 0;\n@!%p bra L;",
            0,
        ),
        ("mov.u64 %rd1, 1;\nL:\nmbarrier.test_wait.shared.b64 %p, [bars+8], %rd1;\n@!%p bra L;", None),
        # A wait that succeeds and one that does not; in scopes, with the same label.
        (
            "{\nL:\nmbarrier.try_wait.parity.shared.b64 %p, [bars+8], 1;\n@!%p bra L;\n}\n"
            "{\nL:\nmbarrier.try_wait.parity.shared.b64 %p, [bars+8], 0;\n@!%p bra L;\n}",
            0,
        ),
        # A look under a guard.
        ("L:\n@%q mbarrier.try_wait.parity.shared.b64 %p, [bars+8], 0;\n@!%p bra L;", 0),
    ],
)
def test_shapes_of_loops(body, phase):
    compiled = watched_text(body)
    assert link([(compiled.name, compiled.ptx)], "sm_90")[0]
    armed = Armed(20_000)
    with pytest.raises(sim.Trap):
        armed(compiled.ptx, compiled.name, grid=1, block=1, params=[], memory=sim.GlobalMemory())
    found = armed.found()
    assert found.phase == phase and found.seconds >= 20e-6
    assert found.barrier(None, weave.sites(compiled)[found.site]).startswith("mbarrier at shared address 0x")


def test_older_architectures_have_no_clusters():
    compiled = watched_text(
        "mov.u64 %rd1, 1;\nL:\nmbarrier.test_wait.shared.b64 %p, [bars+8], %rd1;\n@!%p bra L;", "sm_80"
    )
    assert "%cluster" not in compiled.ptx
    assert link([(compiled.name, compiled.ptx)], "sm_80")[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("L:\nmbarrier.try_wait.parity.shared.b64 %p, [bars+8], 0; @!%p bra L;", "a line of its own"),
        (
            "mov.u32 %r2, 0;\nT: .branchtargets L, E;\nbrx.idx %r2, T;\nL:\n"
            "mbarrier.try_wait.parity.shared.b64 %p, [bars+8], 0;\n@!%p bra L;\nE:",
            "one of the targets",
        ),
    ],
)
def test_ptx_that_cannot_be_watched(body, message):
    with pytest.raises(CompileError, match=message):
        watched_text(body)


class Loaded:
    """A loaded kernel as far as a watchdog needs it."""

    def variable(self, name: str) -> int:
        assert name == weave.SYMBOL
        return 0x1000


def test_a_failed_call_says_what_the_watchdog_saw(monkeypatch, capsys):
    compiled, rows, written = compiled_sums(seconds=2), np.zeros(record.BYTES, np.uint8), {}
    monkeypatch.setattr(armed, "_armed", [])
    monkeypatch.setattr(driver, "mapped_memory", lambda nbytes: (rows[:nbytes], 0x2000))
    monkeypatch.setattr(driver, "copy_to_device", lambda at, words: written.update({at: words.tolist()}))
    watchdog.arm(Loaded(), compiled, waiting.SMEM, 2)
    assert written == {0x1000 + weave.RECORD: [0x2000], 0x1000 + weave.LIMIT: [2_000_000_000]}
    with pytest.raises(driver.LaunchError, match="cuStreamSynchronize: 719") as other:
        driver.check((719,), "cuStreamSynchronize")
    assert not isinstance(other.value, watchdog.WatchdogError)
    armed._tell()
    watchdog.raise_if_fired()
    assert not capsys.readouterr().err

    fields = rows[: record._TYPE.itemsize].view(record._TYPE)
    values = {"site": 1, "address": 0x400 + 2064 + 8, "shared_base": 0x400, "phase": 1, "thread_x": 32, "block_y": 3}
    for name, value in {**values, "now": 9_000_000_000, "deadline": 8_900_000_000, "cluster_blocks": 1}.items():
        fields[name] = value
    watchdog.raise_if_fired()  # a record that is not whole yet is none
    fields["state"] = record.WRITTEN
    armed._tell()
    assert "sums: a thread waited 2.1 s at mbarrier empty[1] for the phase of parity 1" in capsys.readouterr().err
    with pytest.raises(watchdog.WatchdogError, match=r"thread \(32, 0, 0\) of block \(0, 3, 0\); others"):
        watchdog.raise_if_fired()
    with pytest.raises(watchdog.WatchdogError, match=r"(?s)2\.1 s at mbarrier empty\[1\].*docs/hangs.md") as found:
        driver.check((719,), "cuStreamSynchronize")
    armed._tell()  # all is told
    assert not capsys.readouterr().err
    assert found.value.seconds == 2.1
    assert dataclasses.asdict(record.read(rows, 2_000_000_000))["thread"] == (32, 0, 0)

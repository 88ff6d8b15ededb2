"""The main command, as a user calls it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from numba_tma import report, suite
from numba_tma.kernels import PROBLEMS, copy
from numba_tma.kernels.problem import Variant

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "scripts" / "run_all.py")
FIELDS = {"problem", "variant", "backend", "device", "shape", "dtype", "ok", "error", "hazards"}
GPU_FIELDS = {"seconds", "gb_per_s", "tflop_per_s", "ratio_to_baseline", "peer", "ratio_to_peer"}


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def test_quick_run_in_the_simulator(tmp_path):
    out = tmp_path / "results.json"
    chosen = ("copy", "kv_stream", "softmax", "gemm")
    done = run(
        "--backend", "sim", "--quick", *(word for name in chosen for word in ("--only", name)), "--json", str(out)
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text())
    problems = [problem for problem in PROBLEMS if problem.name in chosen]
    assert len(records) == sum(len(p.variants) * len(p.cases[("quick", "sim")]) for p in problems)
    for record in records:
        assert set(record) >= FIELDS | GPU_FIELDS
        assert record["ok"] and record["backend"] == "sim" and record["hazards"] == []
        assert record["seconds"] is None, "the simulator's wall time is not a kernel's"
        assert record["instructions"] > 0
    assert f"all {len(records)} checks passed" in done.stdout
    moved = {(r["problem"], r["variant"]): r["bytes_moved"] for r in records}
    assert "tma_load" in moved[("kv_stream", "tma")] and "ld_global" not in moved[("kv_stream", "tma")]
    assert "cp_async" in moved[("kv_stream", "cp_async")]


def test_only_and_list():
    done = run("--backend", "sim", "--quick", "--only", "copy.bulk", "--only", "kv_stream.tma")
    assert done.returncode == 0 and "kv_stream.tma " in done.stdout and "copy.plain" not in done.stdout
    assert run("--backend", "sim", "--quick", "--only", "copy.tensor", "--schedules", "7").returncode == 0
    listed = run("--list").stdout
    for problem in PROBLEMS:
        for variant in problem.variants:
            assert f"{problem.name}.{variant.name}" in listed
    assert run("--list", "--only", "softmax.ring").stdout.count("\n") == 2  # the problem's line and the variant's
    assert run("--list", "--only", "softmax.round").returncode == 2


@pytest.mark.parametrize("name", ["sort", "copy.fastest"])
def test_unknown_names(name):
    done = run("--only", name)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no problem 'sort'" in done.stderr or "no variant 'fastest'" in done.stderr


def test_bad_options_end_before_the_run(tmp_path):
    for arguments in (["--seed", "-1"], ["--json", str(tmp_path)], ["--schedules", "0"]):
        done = run("--backend", "sim", "--quick", *arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr and arguments[0] in done.stderr


def test_interrupt_ends_cleanly():
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--backend", "sim"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.lstrip().startswith("ok"):
            break
    process.send_signal(signal.SIGINT)
    started = time.perf_counter()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors and "interrupted" in errors
    assert time.perf_counter() - started < 30


def test_a_wrong_result_fails(monkeypatch):
    """A variant that leaves its output as it found it is caught, whatever the output was before."""
    lazy = Variant("lazy", "nothing", "", lambda arrays, **_: lambda: suite.launch.sim.Report())
    (record,) = suite.run_case(copy.PROBLEM, copy.PROBLEM.cases[("quick", "sim")][0], [lazy], "sim", seed=1)
    assert not record.ok and record.error > 0
    assert report.failures([record])[0].startswith("copy.lazy 64×128 float32: error")


def test_a_raising_variant_fails_and_the_rest_runs():
    def broken(arrays, **_):
        raise RuntimeError("out of order")

    case = copy.PROBLEM.cases[("quick", "sim")][0]
    variants = [Variant("broken", "nothing", "", broken), copy.PROBLEM.variant("bulk")]
    first, second = suite.run_case(copy.PROBLEM, case, variants, "sim", seed=1)
    assert not first.ok and first.reason == "RuntimeError: out of order" and second.ok


def test_an_order_under_which_a_variant_is_wrong_is_named():
    """One that is right only while warps run together, as a missing barrier makes it."""

    def careless(arrays, **_):
        together = suite.launch._simulation.get().get("warp_order") is None
        arrays["target"][...] = arrays["source"] if together else 0
        return suite.launch.sim.Report

    case = copy.PROBLEM.cases[("quick", "sim")][0]
    variant = Variant("careless", "luck", "", careless)
    (record,) = suite.run_case(copy.PROBLEM, case, [variant], "sim", seed=1)
    assert record.ok
    (record,) = suite.run_case(copy.PROBLEM, case, [variant], "sim", seed=1, schedules=3)
    assert not record.ok and record.reason.endswith("above 0 (copies early, warps ascending)")


def test_worst_error_sees_nan_and_shape():
    tolerance = PROBLEMS[1].tolerance
    reference = {"out": np.ones((1, 4))}
    assert suite.worst_error(tolerance, {"out": np.ones((1, 4), np.float32)}, reference) == 0
    assert suite.worst_error(tolerance, {"out": np.array([[1, 1, np.nan, 1]], np.float32)}, reference) == np.inf
    assert suite.worst_error(tolerance, {"out": np.ones((4,), np.float32)}, reference) == np.inf
    assert suite.worst_error(tolerance, {"out": np.array([[1, 1, 3, 1]], np.float32)}, reference) == 2


def test_seconds():
    assert [report.seconds(s) for s in (None, 2.5e-7, 3.1e-5, 0.25, 2)] == ["", "250 ns", "31 µs", "250 ms", "2 s"]


@pytest.mark.gpu
def test_quick_run_on_the_gpu(tmp_path):
    out = tmp_path / "results.json"
    done = run("--backend", "gpu", "--quick", "--json", str(out))
    assert done.returncode == 0, done.stderr
    for record in json.loads(out.read_text()):
        assert record["ok"] and record["backend"] == "gpu" and record["seconds"] > 0 and record["gb_per_s"] > 0
        assert record["circumstances"]["device"] == record["device"]


def test_modelled_times(tmp_path):
    out = tmp_path / "results.json"
    done = run("--backend", "sim", "--quick", "--only", "kv_stream.tma", "--model", "--json", str(out))
    assert done.returncode == 0 and "modelled time" in done.stdout
    for record in json.loads(out.read_text()):
        assert record["seconds"] is None and 1e-6 < record["modelled_seconds"] < 1e-4
        assert record["model"]["machine_code"] and record["model"]["stalls"]

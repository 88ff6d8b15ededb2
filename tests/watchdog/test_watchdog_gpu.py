"""Watchdogs on a GPU: kernels that hang end with a name, and take their process's context with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import waiting

from numba_tma import watchdog

pytestmark = pytest.mark.gpu


# Programs of `waiting.py`, with what the environment says; all run at once, each in a process of its own.
RUNS = [(program, "") for program in waiting.PROGRAMS if program != "sums that hang"]
RUNS += [("sums that hang", "1.5"), ("sums", "1")]


@pytest.fixture(scope="module")
def run():
    """A function that gives what a program ended with, and what it wrote to stderr."""
    started = {}
    for program, seconds in RUNS:
        started[program, seconds] = subprocess.Popen(
            [sys.executable, waiting.__file__, program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, watchdog.VARIABLE: seconds},
        )

    def ended(program: str, seconds: str = "") -> tuple[dict, str]:
        process = started[program, seconds]
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return json.loads(output.splitlines()[-1]), errors

    yield ended
    for process in started.values():
        process.kill()


def line(comment: str) -> str:
    return f"{waiting.__file__}:{waiting.line_of(comment)}"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            "nobody arrives",
            {"kernel": "pair", "barrier": "mbarrier ready[2]", "phase": 0, "line": line("the pair waits"),
             "block": [0, 0, 0], "thread": [37, 0, 0], "cluster_rank": 0},
        ),
        ("in a cluster", {"barrier": "mbarrier ready[2]", "block": [1, 0, 0], "thread": [37, 0, 0], "cluster_rank": 1}),
        ("inline loop", {"barrier": "mbarrier ready[1]", "phase": 0, "line": line("the inline wait")}),
        ("poll", {"phase": None, "line": line("the poll")}),
        ("bound", {"barrier": "mbarrier ready[2]", "line": line("the pair waits")}),
        ("through Numba", {"barrier": "mbarrier ready[2]", "line": line("the pair waits")}),
    ],
)  # fmt: skip
def test_a_hang_ends_with_a_name(program, expected, run):
    ended, stderr = run(program)
    assert {name: ended.get(name) for name in expected} == expected, (ended, stderr)
    assert 1 <= ended["seconds"] < 1.5
    assert "numba_tma watchdog:" not in stderr  # it has been told


def test_the_environment_is_enough(run):
    """The chain that docs/hangs.md shows: who gives up first is one of its two ends."""
    ended, _ = run("sums that hang", "1.5")
    consumer = {"barrier": "mbarrier full[0]", "phase": 1, "line": line("the consumer waits")}
    producer = {"barrier": "mbarrier empty[0]", "phase": 0, "line": line("the producer waits")}
    assert {name: ended[name] for name in consumer} in (consumer, producer), ended
    assert 1.5 <= ended["seconds"] < 2
    print(ended["message"])


@pytest.mark.parametrize("seconds", ["", "1"])
def test_the_mended_twin_runs(seconds, run):
    ended, stderr = run("sums", seconds)
    x_map, _, _ = waiting.arguments_of_sums()
    assert ended["result"] == np.asarray(x_map.array)[::8].sum(axis=0).tolist()
    assert "numba_tma watchdog:" not in stderr


def test_a_wait_that_ends_in_time(run):
    ended, stderr = run("somebody arrives")
    assert ended["result"] == list(range(64)) and "numba_tma watchdog:" not in stderr


def test_what_nobody_asked_for_is_told_at_the_end(run):
    ended, stderr = run("through Numba, not asked")
    assert ended["other"].startswith("Numba says")
    assert "numba_tma watchdog: pair: a thread waited 1" in stderr and "mbarrier ready[2]" in stderr

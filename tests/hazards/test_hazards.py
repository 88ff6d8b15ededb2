"""Every hazard is caught under every schedule, and its mended twin is clean under all of them."""

from __future__ import annotations

import linecache
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from cases import CASES

from numba_tma import sim, use_backend
from numba_tma.sim.hazards import RULES

SCHEDULES = sim.schedules()
PAGES = Path(__file__).parents[2] / "scripts" / "hazard_pages.py"


def program(name: str, mended: bool) -> dict:
    """The namespace of a case's program; its lines can be looked up."""
    source = CASES[name].source(mended)
    filename = f"{name}-{'mended' if mended else 'bad'}.py"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace: dict = {"__name__": "program"}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def hazards_of(namespace: dict, schedule: dict) -> list[sim.Hazard]:
    with use_backend("sim", **schedule), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        takes_schedule = namespace["run"].__code__.co_flags & 8
        try:
            return namespace["run"](**(schedule if takes_schedule else {})).hazards
        except sim.SimError as error:
            return error.hazards


@pytest.mark.parametrize("name", CASES)
def test_caught(name):
    namespace = program(name, mended=False)
    for schedule in SCHEDULES:
        hazards = {hazard.identifier: hazard for hazard in hazards_of(namespace, schedule)}
        if "warp_order" in schedule and name not in hazards:
            # Another order of warps may meet the same mistake at its other end first.
            assert any(hazard.severity == "error" for hazard in hazards.values()), f"{schedule}: {sorted(hazards)}"
            continue
        assert name in hazards, f"{schedule}: {sorted(hazards)}"
        hazard = hazards[name]
        assert hazard.severity == RULES[name].severity or name == "mbarrier-init-not-fenced"
        assert "PTX line" in str(hazard)
        if "sim.launch(" not in CASES[name].program:
            assert any(f"{name}-bad.py" in str(location) for location in hazard.locations), hazard


@pytest.mark.parametrize("name", CASES)
def test_mended_twin_is_clean(name):
    namespace = program(name, mended=True)
    for schedule in SCHEDULES:
        hazards = hazards_of(namespace, schedule)
        assert not hazards, f"{schedule}: {[str(hazard) for hazard in hazards]}"


def test_pages_are_up_to_date():
    done = subprocess.run([sys.executable, str(PAGES), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run scripts/hazard_pages.py: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_the_pages_run(name, capsys):
    """In this process: a new one for each would take minutes."""
    text = (PAGES.parents[1] / "docs" / "hazards" / f"{name}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2
    for block, twin in zip(blocks, ("bad", "mended"), strict=True):
        filename = f"{name}-{twin}.py"
        linecache.cache[filename] = (len(block), None, block.splitlines(True), filename)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(block, filename, "exec"), {"__name__": "program"})
    assert f"{name}: " in capsys.readouterr().out


def test_every_rule_has_a_case():
    assert set(CASES) == set(RULES)

"""Shared by all tests: GPU tests are skipped where there is no Hopper GPU, seeds are fresh and printed on failure."""

from __future__ import annotations

import os

import numpy as np
import pytest

from numba_tma import driver


def pytest_configure(config: pytest.Config) -> None:
    # Two processes that simulate need no threads inside NumPy, and would get in each other's way with them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu = driver.device_count() > 0 and driver.capability(0) >= (9, 0)
    wanted = config.getoption("-m") or ""
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))
        if "full" in item.keywords and "full" not in wanted:
            item.add_marker(pytest.mark.skip(reason="slow; select with -m full"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed; $NUMBA_TMA_SEED repeats an earlier one."""
    value = int(os.environ.get("NUMBA_TMA_SEED") or np.random.SeedSequence().entropy % (1 << 32))
    request.node.add_report_section("setup", "seed", f"NUMBA_TMA_SEED={value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator with a fresh seed."""
    return np.random.default_rng(seed)


@pytest.fixture
def in_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch in the simulator, also where there is a GPU."""
    monkeypatch.setenv("NUMBA_TMA_BACKEND", "sim")

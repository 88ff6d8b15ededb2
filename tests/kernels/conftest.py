"""Shared by the tests of the kernels."""

from __future__ import annotations

import pytest

from numba_tma.kernels.problem import Problem


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the variants that were taken, in order."""
    taken: list[str] = []
    variant = Problem.variant
    monkeypatch.setattr(Problem, "variant", lambda problem, name: taken.append(name) or variant(problem, name))
    return taken

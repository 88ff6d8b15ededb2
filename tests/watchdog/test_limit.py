"""How long a wait may take: what is taken, and what is refused by name."""

from __future__ import annotations

import decimal
import fractions

import numpy as np
import pytest

from numba_tma import kernel, watchdog
from numba_tma.watchdog import limit


def nothing(x):
    pass


@pytest.mark.parametrize(("text", "seconds"), [("2", 2.0), (" 0.5 ", 0.5), ("1e-3", 1e-3), ("", 0.0), ("0", 0.0)])
def test_seconds_in_the_environment(text, seconds, monkeypatch):
    monkeypatch.setenv(watchdog.VARIABLE, text)
    assert watchdog.from_environment() == kernel(nothing).watchdog == seconds
    assert kernel(watchdog=7)(nothing).watchdog == 7
    assert kernel(watchdog=0)(nothing).watchdog == 0


def test_no_variable_no_watchdog(monkeypatch):
    monkeypatch.delenv(watchdog.VARIABLE, raising=False)
    assert kernel(nothing).watchdog == 0


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "2s", "1e10"])
def test_the_environment_is_checked_at_the_launch(text, monkeypatch, in_simulator):
    monkeypatch.setenv(watchdog.VARIABLE, text)
    with pytest.raises(ValueError, match=rf"NUMBA_TMA_WATCHDOG='{text}': expected a number of seconds"):
        kernel(threads=32)(nothing)[1](np.zeros(1))


@pytest.mark.parametrize(
    ("seconds", "error"),
    [
        (-1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        ("2", TypeError),
        (True, TypeError),
        ([2], TypeError),
        (1j, TypeError),
        (np.True_, TypeError),
        (np.complex64(2), TypeError),
        (np.array([2.0]), TypeError),
        (np.timedelta64(2, "s"), ValueError),
        (10**400, ValueError),
        (fractions.Fraction(10**400), ValueError),
        (decimal.Decimal("sNaN"), ValueError),
    ],
)
def test_the_keyword_is_checked(seconds, error):
    with pytest.raises(error, match=r"nothing: watchdog=.*: expected a number of seconds above 0"):
        kernel(watchdog=seconds)(nothing)


@pytest.mark.parametrize(
    "seconds", [2, 0.25, 1e-9, np.float32(0.5), np.int64(3), fractions.Fraction(1, 4), decimal.Decimal("2")]
)
def test_numbers_of_any_kind(seconds):
    assert kernel(watchdog=seconds)(nothing).watchdog == float(seconds)


def test_nanoseconds():
    assert limit.nanoseconds(2) == 2_000_000_000
    assert limit.nanoseconds(1e-12) == 1

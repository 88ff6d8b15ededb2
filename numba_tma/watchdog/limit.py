"""How long a wait may take, as users say it: seconds, in an option or in the environment."""

from __future__ import annotations

import decimal
import math
import numbers
import os

VARIABLE = "NUMBA_TMA_WATCHDOG"
_LONGEST = 1e9  # 31 years
_EXPECTED = f"expected a number of seconds above 0 and up to {_LONGEST:.0e}, such as 2, or 0 for no watchdog"


def checked(seconds: object, what: str) -> float:
    """Seconds as a float; 0 for none.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative, not finite, or longer than anybody waits.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (numbers.Real, decimal.Decimal)):
        raise TypeError(f"{what}={seconds!r}: {_EXPECTED}")
    try:
        number = float(seconds)
    except (TypeError, ValueError, OverflowError):  # a time with a unit, a signalling NaN, an integer beyond all floats
        number = math.nan
    if not 0 <= number <= _LONGEST:
        raise ValueError(f"{what}={seconds!r}: {_EXPECTED}")
    return number


def from_environment() -> float:
    """What $NUMBA_TMA_WATCHDOG says just now; 0 where it is empty or not set.

    Raises:
        ValueError: it is no number, negative, or not finite.
    """
    text = os.environ.get(VARIABLE, "").strip()
    try:
        return checked(float(text or 0), VARIABLE)
    except ValueError:
        raise ValueError(f"{VARIABLE}={text!r}: {_EXPECTED}") from None


def nanoseconds(seconds: float) -> int:
    """The same for the GPU's clock; a limit is never nothing."""
    return max(round(seconds * 1e9), 1)

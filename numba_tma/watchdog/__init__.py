"""Watchdogs: a kernel that waits in vain on a GPU ends with the name of the barrier, the phase and the line.

`NUMBA_TMA_WATCHDOG=2` in the environment, or `@kernel(…, watchdog=2)`: a wait that takes two seconds gives up. Kernels
stay as they are: what looks at the clock is put into their PTX, into the loops that only wait.
"""

from .armed import arm, raise_if_fired
from .limit import VARIABLE, checked, from_environment
from .record import Record, WatchdogError
from .weave import is_watched, watch

__all__ = [
    "VARIABLE",
    "Record",
    "WatchdogError",
    "arm",
    "checked",
    "from_environment",
    "is_watched",
    "raise_if_fired",
    "watch",
]

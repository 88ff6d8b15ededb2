"""Watchdogs of kernels that are loaded on a GPU: where their records go, and the errors that they become.

A record lies in memory of the host that the GPU can write: what lay on the GPU is lost with the CUDA context when the
kernel traps. It is never given back, for a launch may be under way when its kernel is forgotten.
"""

from __future__ import annotations

import atexit
import functools
import sys

import numpy as np

from .. import driver
from ..compile import Compiled
from ..shared import Shared
from . import record, weave
from .limit import nanoseconds
from .record import WatchdogError

_armed: list[_Armed] = []


class _Armed:
    """The watchdog of one loaded kernel."""

    def __init__(self, compiled: Compiled, shared: Shared | None, limit: int, memory: np.ndarray) -> None:
        self.told = False
        self._compiled, self._shared, self._limit, self._memory = compiled, shared, limit, memory

    def error(self) -> WatchdogError | None:
        """What happened, if a thread of the kernel gave up."""
        found = record.read(self._memory, self._limit)
        if found is None:
            return None
        return WatchdogError(self._compiled.name, found, weave.sites(self._compiled), self._shared)


def arm(loaded: driver.LoadedKernel, compiled: Compiled, shared: Shared | None, seconds: float) -> None:
    """Set the time limit of a kernel's watchdog, and where its record goes.

    Args:
        loaded, compiled: the kernel, which has a watchdog (`weave.watch`).
        shared: its plan, for the barriers' names.
        seconds: until a wait gives up.

    Raises:
        LaunchError: the driver has no memory for it.
    """
    _listen()
    memory, address = driver.mapped_memory(record.BYTES)
    limit = nanoseconds(seconds)
    variable = loaded.variable(weave.SYMBOL)
    words = {weave.RECORD: address, weave.LIMIT: limit}
    for offset, value in words.items():
        driver.copy_to_device(variable + offset, np.array([value], np.uint64))
    _armed.append(_Armed(compiled, shared, limit, memory))


def raise_if_fired() -> None:
    """Raise for a kernel whose watchdog has ended it; to be asked after another library has reported a failed launch.

    Raises:
        WatchdogError: a thread gave up waiting.
    """
    error = _fired()
    if error is not None:
        raise error


def _fired() -> WatchdogError | None:
    for armed in _armed:
        error = armed.error()
        if error is not None:
            armed.told = True
            return error
    return None


@functools.cache
def _listen() -> None:
    """Have failures of the driver explained by what a watchdog wrote; what nobody has heard of is told at the end."""
    driver.explain_failures(_fired)
    atexit.register(_tell)


def _tell() -> None:
    # The program may wait for the GPU by another library, whose error says that a launch failed and no more.
    for armed in _armed:
        error = None if armed.told else armed.error()
        if error is not None:
            print(f"numba_tma watchdog: {error}", file=sys.stderr)

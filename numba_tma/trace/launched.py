"""Launches that were traced, and what they wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..shared import Shared
from . import records
from .instrument import Instrumented
from .plan import Trace
from .records import WarpTrace


@dataclass(frozen=True)
class TracedLaunch:
    """One launch with stamps. A launch that is repeated (`bind`) writes over what the one before it wrote.

    Attributes:
        name: the kernel.
        grid, block: extents of the launch.
        shared: the kernel's shared-memory plan, which has the barriers' names.
        plan: what was to be traced.
        instrumented: the kernel with its stamps; `instrumented.sites` are the places that leave records.
        device: the GPU's name, or the simulator.
        read: waits for the launch and gives the bytes of its rings.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: Shared | None
    plan: Trace
    instrumented: Instrumented
    device: str
    read: Callable[[], np.ndarray] = field(repr=False)

    def warps(self) -> list[WarpTrace]:
        """The events of every warp that was traced, by block and warp."""
        return records.read(
            self.read(), self.plan, self.instrumented.sites, math.prod(self.grid), math.prod(self.block)
        )


@dataclass(frozen=True)
class Tracing:
    """The launches made inside `tracing`, in order."""

    plan: Trace
    launches: list[TracedLaunch] = field(default_factory=list)

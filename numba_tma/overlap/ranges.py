"""NVTX ranges of the stages, which Nsight Systems shows beside the GPU's rows; nothing without the package `nvtx`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from .modes import COMPUTE, D2H, H2D, PREPARE

_COLOURS = {PREPARE: "gray", H2D: "blue", COMPUTE: "green", D2H: "orange"}


@functools.cache
def _nvtx() -> Any:
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx


def ranged(stage: str, batch: int) -> contextlib.AbstractContextManager:
    """A range around what the host does for a stage of a batch: it encloses the calls that enqueue it."""
    nvtx = _nvtx()
    if nvtx is None:
        return contextlib.nullcontext()
    return nvtx.annotate(f"{stage} {batch}", color=_COLOURS[stage], domain="numba_tma.overlap")

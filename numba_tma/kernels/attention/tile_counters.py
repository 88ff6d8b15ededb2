"""Counters from which a kernel's blocks claim their next tiles."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import uint32

from ... import driver
from ...arrays import DeviceView
from ...device_array import DeviceArray


class _Counters:
    """Zeros in a GPU's memory, one for each bound launch, never freed: a captured graph may count with one for ever.

    Launches count from zero back to zero. After `_COUNT` of them the first ones are given out again.
    """

    _COUNT = 1 << 16

    def __init__(self) -> None:
        self._memory = DeviceArray(np.zeros(self._COUNT, np.uint32))
        self._turns = itertools.count()

    def next(self) -> DeviceView:
        """One of them."""
        address = self._memory.pointer + 4 * (next(self._turns) % self._COUNT)
        return DeviceView(None, address, (1,), (4,), np.dtype(np.uint32))


_counters: dict[int, _Counters] = {}


def tile_counter(host: bool, caller: str, stream: int) -> Any:
    """A counter of tiles, zero, where the arrays are.

    Raises:
        RuntimeError: `caller` is the first on this GPU to ask, while the stream is captured into a graph.
    """
    if host:
        return np.zeros(1, np.uint32)
    device = driver.current_device()
    if device not in _counters:
        if driver.is_capturing(stream):
            raise RuntimeError(
                f"{caller}: the first call of a process allocates memory for counters, which cannot be captured into a "
                f"graph: call it once before"
            )
        _counters[device] = _Counters()
    return _counters[device].next()


@cuda.jit(device=True, forceinline=True)
def claim(counter, tiles):
    """The number of a block's next tile, by one thread; a block's first is that of its own number.

    Blocks that got short tiles claim more of them. After as many claims as there are `tiles`, which is all that blocks
    make until they get none, the counter is zero again.
    """
    return uint32(cuda.gridDim.x + uint32(cuda.atomic.inc(counter, 0, uint32(tiles - uint32(1)))))

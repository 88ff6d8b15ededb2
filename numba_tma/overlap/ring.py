"""The ring of slots: a slot has the host and device buffers of one batch, and the events of its stages."""

from __future__ import annotations

import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arrays
from .modes import COMPUTE, D2H, H2D
from .windows import window


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one array of a batch."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def specs(described: Mapping[str, Any], what: str) -> dict[str, Spec]:
    """Specs of {name: (shape, dtype)}, or of {name: an array like it}.

    Raises:
        TypeError, ValueError: a description is neither, a shape's extents are no integers of 0 or more, or a GPU cannot
            read the dtype.
    """
    if not isinstance(described, Mapping):
        raise TypeError(f"{what}s {described!r}: expected a dict, {{name: (shape, dtype)}}")
    found = {}
    for name, value in described.items():
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            shape, dtype = value.shape, arrays.torch_dtype(value.dtype) if arrays.is_torch(value) else value.dtype
        elif isinstance(value, tuple) and len(value) == 2:
            shape, dtype = value
        else:
            raise TypeError(f"{what} {name!r}: {value!r}; expected (shape, dtype), or an array of that shape and dtype")
        extents = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if not all(isinstance(extent, (int, np.integer)) and not isinstance(extent, bool) for extent in extents):
            raise TypeError(f"{what} {name!r}: shape {shape!r}; expected an integer, or a tuple of them")
        if min(extents, default=0) < 0:
            raise ValueError(f"{what} {name!r}: shape {shape}; an extent is negative")
        if dtype is None:
            raise TypeError(f"{what} {name!r}: no dtype; expected one, such as np.float32")
        try:
            dtype = np.dtype(dtype)
            arrays.check_dtype(dtype)
        except TypeError as error:
            raise TypeError(f"{what} {name!r}: {error}") from None
        found[name] = Spec(tuple(map(operator.index, extents)), dtype)
    return found


class Slot:
    """Buffers and events of one batch on its way."""

    def __init__(
        self,
        engines: Any,
        inputs: Mapping[str, Spec],
        outputs: Mapping[str, Spec],
        pinned: bool,
        elsewhere: Collection[str] = (),
    ) -> None:
        self.host_inputs = {
            name: engines.host_array(s.shape, s.dtype, pinned) for name, s in inputs.items() if name not in elsewhere
        }
        self.host_outputs = {name: engines.host_array(s.shape, s.dtype, pinned) for name, s in outputs.items()}
        self.inputs = {name: engines.device_array(s.shape, s.dtype) for name, s in inputs.items()}
        self.outputs = {name: engines.device_array(s.shape, s.dtype) for name, s in outputs.items()}
        self.began = {stage: engines.event() for stage in (H2D, COMPUTE, D2H)}
        self.ended = {stage: engines.event() for stage in (H2D, COMPUTE, D2H)}
        self.sources: Mapping[str, Any] = {}  # what the copies in read; kept alive until they have
        self.graph: Any = None
        self.stamp = 0.0  # when it was given back, on the clock of who did

    def free(self) -> None:
        """Let go of the buffers. Results that still look at the host's keep those."""
        if hasattr(self.graph, "close"):
            self.graph.close()
        self.host_inputs, self.host_outputs, self.inputs, self.outputs = {}, {}, {}, {}
        self.began, self.ended, self.sources, self.graph = {}, {}, {}, None


class Ring:
    """The slots that nobody uses, and who waits for one."""

    def __init__(self, slots: list[Slot], now: Callable[[], float]) -> None:
        self._all = tuple(slots)
        self._free = deque(slots)
        self._lent: list[Slot] = []
        self._now = now
        # The lock is reentrant: the garbage collector may give a slot back in a thread that holds it.
        self._changed = threading.Condition()
        self._closed = False
        self.starving = False  # somebody waits for a slot

    @property
    def depth(self) -> int:
        """How many slots there are."""
        return len(self._all)

    @property
    def free(self) -> int:
        """How many nobody uses."""
        return len(self._free)

    @property
    def lent(self) -> int:
        """How many readers hold."""
        return len(self._lent)

    def take(self) -> Slot | None:
        """A free slot, or None."""
        with self._changed:
            return self._free.popleft() if self._free else None

    def wait(self, stopped: threading.Event) -> Slot | None:
        """A slot as soon as one is free; None when `stopped` (see `wake`)."""
        with self._changed:
            self.starving = True
            try:
                self._changed.wait_for(lambda: self._free or stopped.is_set())
            finally:
                self.starving = False
            return None if stopped.is_set() else self._free.popleft()

    def wake(self) -> None:
        """Have those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        with self._changed:
            if self._closed:
                slot.free()
            elif not _among(self._free, slot):
                slot.sources = {}
                slot.stamp = self._now()
                self._free.append(slot)
                self._changed.notify_all()

    def lend(self, slot: Slot) -> Lease:
        """Hand a slot to a reader; it comes back when the reader lets go of it."""
        lease = Lease(self, slot)
        with self._changed:
            self._lent.append(slot)
        return lease

    def returned(self, slot: Slot) -> None:
        """A reader has let go."""
        with self._changed:
            self._lent = [other for other in self._lent if other is not slot]
            self.give(slot)

    def reclaim(self) -> None:
        """Take back all that no reader holds: nobody else is at work any more. The next run's clock starts at 0."""
        with self._changed:
            for slot in self._all:
                if not _among(self._lent, slot):
                    self.give(slot)
            for slot in self._free:
                slot.stamp = 0.0

    def close(self) -> None:
        """Free all slots; those that readers hold are freed when they come back."""
        with self._changed:
            self._closed = True
            while self._free:
                self._free.popleft().free()


def _among(slots: Iterable[Slot], slot: Slot) -> bool:
    return any(other is slot for other in slots)


class Lease:
    """A reader's hold on a slot. It ends with `release`, or when the last array over the slot's outputs is gone."""

    def __init__(self, ring: Ring, slot: Slot) -> None:
        self.release = weakref.finalize(self, ring.returned, slot)
        self.release.atexit = False

    def window(self, array: np.ndarray) -> np.ndarray:
        """The array once more, in such a way that it keeps this lease alive."""
        return window((self, array), array.ctypes.data, array.shape, array.dtype)

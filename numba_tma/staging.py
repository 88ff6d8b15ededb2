"""Memory that is not where the kernel runs: host arrays for a GPU launch, device arrays for a simulated one.

Arrays that share one buffer stay one buffer, at the same distances from one another, so a kernel that gets an array
and a tensor map over it sees one memory, and padding between rows stays in place.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence

import numpy as np

from . import driver
from .arrays import ArrayView
from .sim import GlobalMemory


def _extent(view: ArrayView) -> tuple[int, int]:
    """First and last-plus-one byte that the elements of `view` occupy."""
    low = high = view.pointer
    for extent, stride in zip(view.shape, view.strides, strict=True):
        reach = (extent - 1) * stride
        low, high = low + min(reach, 0), high + max(reach, 0)
    return low, high + view.dtype.itemsize


class Span:
    """A contiguous stretch of memory that one or several arrays occupy."""

    def __init__(self, name: str, low: int, high: int, host: bool, writeable: bool) -> None:
        self.name, self.low, self.high, self.host, self.writeable = name, low, high, host, writeable
        self.target = 0

    @property
    def lead(self) -> int:
        """How far its start is behind a multiple of 16 bytes, which a copy must keep: instructions check it."""
        return self.low % 16

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.high - self.low

    def host_bytes(self) -> np.ndarray:
        """The stretch as a uint8 array over the very same memory (host spans only)."""
        return np.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(self.low), np.uint8)


def spans(views: Mapping[str, ArrayView]) -> list[Span]:
    """The stretches that the named arrays occupy, overlapping ones joined; empty arrays take none."""
    joined: list[Span] = []
    occupied = sorted((*_extent(view), name) for name, view in views.items() if view.size)
    for low, high, name in occupied:
        view, last = views[name], joined[-1] if joined else None
        if last is not None and last.host == view.host and low < last.high:
            last.name += f" and {name}"
            last.high = max(last.high, high)
            last.writeable = last.writeable or not view.readonly
        else:
            joined.append(Span(name, low, high, view.host, not view.readonly))
    return joined


def translate(view: ArrayView, stretches: Sequence[Span]) -> int:
    """Where the first element of `view` lies after its span was moved; its own address if it was not."""
    for span in stretches:
        if span.low <= view.pointer < span.high and span.host == view.host:
            return span.target + (view.pointer - span.low)
    return view.pointer


class OnDevice:
    """Host spans copied to the GPU for one launch; on leaving: wait, copy back what may be written, free."""

    def __init__(self, views: Mapping[str, ArrayView], stream: int) -> None:
        self.spans = spans({name: view for name, view in views.items() if view.host})
        self._stream = stream
        self._allocations: list[int] = []

    def __enter__(self) -> OnDevice:
        try:
            for span in self.spans:
                self._allocations.append(driver.allocate(span.nbytes + span.lead))
                span.target = self._allocations[-1] + span.lead
                driver.copy_to_device(span.target, span.host_bytes())
        except BaseException:
            self._free()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                driver.synchronize(self._stream)
                for span in self.spans:
                    if span.writeable:
                        span.host_bytes()[:] = driver.copy_to_host(span.target, span.nbytes)
        except driver.LaunchError:
            # After a fault of the kernel nothing can be given back, and that it failed says nothing new.
            with contextlib.suppress(driver.LaunchError):
                self._free()
            raise
        self._free()

    def _free(self) -> None:
        while self._allocations:
            driver.free(self._allocations.pop())


class InSimulator:
    """Every span mapped into the simulator's global memory: host memory as it stands, a GPU's by way of a copy."""

    def __init__(self, views: Mapping[str, ArrayView], memory: GlobalMemory) -> None:
        self.spans = spans(views)
        self._copies: list[tuple[Span, np.ndarray]] = []
        for span in self.spans:
            if span.host:
                contents = span.host_bytes()
                if not span.writeable:
                    contents.flags.writeable = False
            else:
                contents = driver.copy_to_host(span.low, span.nbytes)
                self._copies.append((span, contents))
            span.target = memory.map(contents, span.name, offset=span.lead)

    def copy_back(self) -> None:
        """Bring the copies of device arrays back to the GPU."""
        for span, contents in self._copies:
            if span.writeable:
                driver.copy_to_device(span.low, contents)

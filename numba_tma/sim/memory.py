"""The simulated address space: global memory made of NumPy buffers, and the windows of generic addresses.

A generic address is 64 bits. Global and constant memory use it as it is; shared, local and parameter memory
each sit in a window of their own, and ``cvta`` adds or takes off the window's base::

    PARAM_WINDOW   kernel parameters (the same bytes for every thread)
    LOCAL_WINDOW   local memory (each thread sees its own bytes at the same addresses)
    SHARED_WINDOW  shared memory; within it, address = (rank of the block in its cluster) << 24 | offset

Global memory is a set of segments with unmapped gaps between them, so that running off the end of an array is
an error and not a read of its neighbour. Sources: PTX ISA, "State Spaces", "Generic Addressing", "cvta", "mapa".
"""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np

from .errors import OutOfBounds, SimError

PARAM_WINDOW = 0x7F00_0000_0000
LOCAL_WINDOW = 0x7F10_0000_0000
SHARED_WINDOW = 0x7F20_0000_0000
WINDOW_SIZE = 1 << 32
# A block's own bytes begin here, as on Hopper, where the first KiB is the system's: address 0 is never valid.
SHARED_BASE = 1024
CLUSTER_RANK_SHIFT = 24

_FIRST_ADDRESS = 0x10_0000_0000
_ALIGNMENT = 256
_GAP = 1 << 16

# Memory that nobody has written holds this byte: NaN as a float of any width, -1 as an integer.
POISON = 0xFF


class Segment:
    """A run of mapped addresses and the bytes behind it."""

    __slots__ = ("base", "buffer", "kind", "name", "owner", "size", "writable", "_views")

    def __init__(self, base: int, buffer: np.ndarray, name: str, kind: str = "global", owner: Any = None) -> None:
        self.base = base
        self.buffer = buffer
        self.size = buffer.size
        self.name = name
        self.kind = kind
        self.writable = bool(buffer.flags.writeable)
        self.owner = owner
        self._views: dict[np.dtype, np.ndarray] = {}

    def view(self, dtype: np.dtype) -> np.ndarray:
        """The bytes as whole elements of `dtype`, counted from the segment's base."""
        found = self._views.get(dtype)
        if found is None:
            whole = self.buffer.size // dtype.itemsize * dtype.itemsize
            found = self._views[dtype] = self.buffer[:whole].view(dtype)
        return found

    def views(self) -> list[np.ndarray]:
        """The views that `view` has given."""
        return list(self._views.values())

    def describe(self) -> str:
        """The segment as error messages name it."""
        return f"{self.name} [{self.base:#x}, {self.base + self.size:#x}), {self.size} bytes"


def _bytes_of(array: np.ndarray) -> tuple[np.ndarray, int]:
    """A flat uint8 view that covers `array`, and the offset of its first element therein."""
    if array.size == 0:
        return np.empty(0, np.uint8), 0
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8), 0
    low = high = 0
    for extent, stride in zip(array.shape, array.strides, strict=True):
        reach = (extent - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    nbytes = high - low + array.itemsize
    raw = (ctypes.c_uint8 * nbytes).from_address(array.ctypes.data + low)
    flat = np.frombuffer(raw, np.uint8)
    if not array.flags.writeable:
        flat.flags.writeable = False
    return flat, -low


class GlobalMemory:
    """Device memory: NumPy arrays mapped without a copy at addresses of the simulator's own."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._segments: list[Segment] = []
        self._next = _FIRST_ADDRESS
        self._by_view: dict[int, tuple[np.ndarray, Segment | None]] = {}

    def map(self, array: np.ndarray, name: str | None = None, kind: str = "global", offset: int = 0) -> int:
        """Map `array` (any shape, dtype and strides) and return the address of its first element.

        Kernels read and write the array's own buffer. The lowest byte sits `offset` bytes behind a multiple of 256; a
        read-only array gives read-only memory. The array is kept alive as long as the mapping.
        """
        flat, first = _bytes_of(array)
        base = self._next + offset
        segment = Segment(base, flat, name or f"array {len(self._segments)}", kind, owner=array)
        self._next = -(-(base + flat.size + _GAP) // _ALIGNMENT) * _ALIGNMENT
        self._bases.append(base)
        self._segments.append(segment)
        return base + first

    def unmap(self, address: int) -> None:
        """Forget the mapping that holds `address`; further accesses to it are errors. Addresses are not reused."""
        segment = self.find(address)
        if segment is None:
            raise SimError(f"nothing is mapped at {address:#x}")
        index = self._segments.index(segment)
        del self._segments[index], self._bases[index]

    def find(self, address: int) -> Segment | None:
        """The segment that holds `address`, or None. An empty segment holds its own base."""
        index = bisect.bisect_right(self._bases, address) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        return segment if address < segment.base + max(segment.size, 1) else None

    def segment_of(self, view: np.ndarray) -> Segment | None:
        """The segment that a view of all its elements belongs to, or None."""
        found = self._by_view.get(id(view))
        if found is None or found[0] is not view:
            owner = next((s for s in self._segments if any(v is view for v in s.views())), None)
            found = self._by_view[id(view)] = (view, owner)
        return found[1]

    def nearest(self, address: int) -> str:
        """A phrase that places an `address` in what is mapped there, or beside the nearest mapping."""
        if not self._segments:
            return "no global memory is mapped"
        inside = self.find(address)
        if inside is not None and address < inside.base + inside.size:
            return f"{address - inside.base} bytes into {inside.describe()}"
        index = bisect.bisect_right(self._bases, address) - 1
        around = [self._segments[i] for i in (index, index + 1) if 0 <= i < len(self._segments)]

        def distance(segment: Segment) -> int:
            return segment.base - address if address < segment.base else address - segment.base - segment.size

        best = min(around, key=distance)
        gap = distance(best)
        side = "before" if address < best.base else "past the end of"
        return f"{gap} bytes {side} {best.describe()}"

    def _segment(self, address: int, nbytes: int, what: str) -> Segment:
        segment = self.find(address)
        if segment is None:
            raise OutOfBounds(f"{what}: {nbytes} bytes at {address:#x}: {self.nearest(address)}")
        if address + nbytes > segment.base + segment.size:
            over = address + nbytes - segment.base - segment.size
            raise OutOfBounds(f"{what}: {nbytes} bytes at {address:#x} end {over} bytes past {segment.describe()}")
        return segment

    def global_view(self, address: int, nbytes: int, what: str = "access") -> np.ndarray:
        """A uint8 view of mapped bytes [address, address + nbytes); `what` names the access in errors."""
        segment = self._segment(address, nbytes, what)
        start = address - segment.base
        return segment.buffer[start : start + nbytes]

    def gather(self, addresses: np.ndarray, nbytes: int, what: str = "access") -> np.ndarray:
        """Copies of `nbytes` bytes from each address: uint8 (n, nbytes)."""
        segment = self._segment(int(addresses[0]), nbytes, what)
        offsets = addresses.astype(np.uint64) - np.uint64(segment.base)
        if segment.size >= nbytes and int(offsets.max()) <= segment.size - nbytes:
            index = offsets.astype(np.int64)[:, None] + np.arange(nbytes)
            return segment.buffer.take(index)
        return np.stack([self.global_view(int(a), nbytes, what) for a in addresses])

    def read_string(self, address: int, limit: int = 1 << 16) -> bytes:
        """The zero-terminated string at `address`, without the zero."""
        segment = self._segment(address, 1, "string")
        start = address - segment.base
        text = segment.buffer[start : start + limit].tobytes()
        end = text.find(b"\0")
        if end < 0:
            raise SimError(f"the string at {address:#x} has no terminating zero within {len(text)} bytes")
        return text[:end]

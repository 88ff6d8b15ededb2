"""Bytes of global memory that several blocks write in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import place_of

if TYPE_CHECKING:
    from ..fragment import Fragment
    from .tracker import Tracker

_PIECE = 16
_MANY = 64


class _Owners:
    """Which cluster wrote each piece of a segment (1 and up, 0: none), and by which instruction."""

    def __init__(self, nbytes: int) -> None:
        self.piece = _PIECE
        count = -(-nbytes // _PIECE)
        self.cluster = np.zeros(count, np.int32)
        self.instruction = np.zeros(count, np.uint16)

    def pieces(self, offsets: np.ndarray, nbytes: int) -> np.ndarray:
        low = int(np.bitwise_or.reduce(offsets)) | nbytes
        size = low & -low
        if size < self.piece:
            self.cluster = np.repeat(self.cluster, self.piece // size)
            self.instruction = np.repeat(self.instruction, self.piece // size)
            self.piece = size
        first = offsets // self.piece
        count = nbytes // self.piece
        return first if count == 1 else (first[:, None] + np.arange(count)).reshape(-1)


class GlobalWrites:
    """Kept for the whole launch. Blocks of a cluster may order their writes and count as one.

    A kernel whose blocks signal each other through global memory may order theirs too: then nothing is reported.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.machine = tracker.machine
        self.signals = False
        self._owners: dict[int, _Owners] = {}
        self._found: list[tuple[int, int, Any, Any, int]] = []
        # Ordinary stores of what is there already do no harm: (view, indices, bytes before, what to report).
        self._to_compare: list[tuple[np.ndarray, np.ndarray, np.ndarray, tuple]] = []

    def _owner(self, segment: Any) -> _Owners:
        found = self._owners.get(segment.base)
        if found is None:
            found = self._owners[segment.base] = _Owners(segment.size)
        return found

    def stored(
        self,
        fragment: Fragment,
        instruction: Any,
        view: np.ndarray,
        index: np.ndarray,
        count: int,
        values: Sequence[Callable[[Fragment], np.ndarray]],
    ) -> None:
        """Ordinary stores by lanes."""
        if self._to_compare:
            self.compare()
        segment = self.machine.memory.segment_of(view)
        if segment is None:
            return
        size = view.dtype.itemsize
        owners = self._owner(segment)
        pieces = owners.pieces(index * size, size * count)
        each = pieces.size // index.size
        cluster = (fragment.slot + self.machine.first_block) // self.machine.cluster_size + 1
        if each > 1:
            cluster = np.repeat(cluster, each)
        if index.size != fragment.n:
            pieces = np.tile(pieces, fragment.n)
        clash = self._mark(owners, pieces, cluster, instruction)
        if clash is not None and len(self._to_compare) < _MANY:
            lane, other, by = clash
            at = index[lane // each if index.size > 1 else 0] + np.arange(count)
            found = (int(cluster[lane]) - 1, other, instruction, by, segment.base + int(pieces[lane]) * owners.piece)
            self._to_compare.append((view, at, view[at].copy(), found))
        together = np.nonzero(owners.cluster.take(pieces) != cluster)[0]
        if together.size and len(self._found) < _MANY:
            self._stored_together(owners, pieces, cluster, together, fragment, instruction, values, segment.base)

    def _stored_together(
        self,
        owners: _Owners,
        pieces: np.ndarray,
        cluster: np.ndarray,
        together: np.ndarray,
        fragment: Fragment,
        instruction: Any,
        values: Sequence[Callable[[Fragment], np.ndarray]],
        base: int,
    ) -> None:
        """Lanes of several blocks store to the same pieces with one instruction; harmless if it is the same value."""
        each = pieces.size // fragment.n
        last = np.zeros(int(pieces.max()) + 1, np.int64)
        last[pieces] = np.arange(pieces.size)
        for lane in together[:_MANY].tolist():
            winner = int(last[pieces[lane]])
            for read in values:
                value = np.broadcast_to(read(fragment), (fragment.n,))
                if value[lane // each].tobytes() != value[winner // each].tobytes():
                    address = base + int(pieces[lane]) * owners.piece
                    other = int(cluster[winner]) - 1
                    self._found.append((int(cluster[lane]) - 1, other, instruction, instruction, address))
                    return

    def copied(self, thread: int, region: tuple[int, tuple, tuple], origin: Any) -> None:
        """A copy writes a region: (address, extents, strides), bytes, the last extent being contiguous."""
        address, shape, strides = region
        segment = self.machine.memory.find(address)
        if segment is None or not all(shape):
            return
        offsets = np.array([address - segment.base])
        for extent, stride in zip(shape[:-1], strides[:-1], strict=True):
            offsets = (offsets[:, None] + np.arange(extent) * stride).reshape(-1)
        owners = self._owner(segment)
        pieces = owners.pieces(offsets, shape[-1])
        block = thread // self.machine.threads + self.machine.first_block
        cluster = np.full(pieces.size, block // self.machine.cluster_size + 1)
        clash = self._mark(owners, pieces, cluster, origin)
        if clash is not None:
            lane, other, by = clash
            self._found.append(
                (int(cluster[0]) - 1, other, origin, by, segment.base + int(pieces[lane]) * owners.piece)
            )

    def _mark(
        self, owners: _Owners, pieces: np.ndarray, cluster: np.ndarray, instruction: Any
    ) -> tuple[int, int, Any] | None:
        before = owners.cluster.take(pieces)
        clash = None
        if before.any():
            other = (before != 0) & (before != cluster)
            if other.any():
                lane = int(np.argmax(other))
                by = self.tracker.instructions[int(owners.instruction[pieces[lane]])]
                clash = (lane, int(before[lane]) - 1, by)
        owners.cluster[pieces] = cluster
        owners.instruction[pieces] = self.tracker.number(instruction)
        return clash

    def compare(self) -> None:
        """See whether the stores that came second changed anything."""
        for view, at, before, found in self._to_compare:
            if view[at].tobytes() != before.tobytes():
                self._found.append(found)
        self._to_compare.clear()

    def launch_ended(self) -> None:
        """Report what was found, unless blocks may have ordered it."""
        self.compare()
        if self.signals:
            return
        name = "cluster" if self.machine.cluster_size > 1 else "block"
        for one, other, instruction, by, address in self._found:
            self.tracker.report.add(
                "blocks-write-same-bytes",
                f"{name} {one} writes global memory at {address:#x} ({self.machine.memory.nearest(address)})\n"
                f"    at {place_of(instruction)}\n  which {name} {other} writes too\n    at {place_of(by)}",
                instruction,
                by,
            )

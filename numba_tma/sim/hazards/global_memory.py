"""Who last wrote and who last read each piece of global memory, for the whole launch.

A *stamp* is an int64: thread of the grid (26 bits), its step (24 bits), number of the instruction (12 bits); 0 for
"never". Bit 62 marks a copy's: the rest is its number in a list. Pieces are as large as the accesses allow. Of the
reads since the last write two are kept: the latest, and one that the latest is not ordered after.

Most memory is either read or written in a launch. So reads of memory that nothing was written to so far are only put on
record, the latest of them, and noted when the first write comes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..descriptor import NBYTES
from .clocks import Clocks
from .grid import Reaches, fitted
from .scan import (
    GRID_COPY,
    GRID_INSTRUCTION_MASK,
    GRID_THREAD_SHIFT,
    GRID_VALUE_MASK,
    GRID_VALUE_SHIFT,
    MEMORY,
    Context,
    scan,
)
from .stores import Values, changes, first_disagreement

if TYPE_CHECKING:
    from ..fragment import Fragment
    from ..memory import Segment
    from .tracker import Tracker

_PIECE = 16
# Memory in more pieces than this, and grids of more threads than stamps can name, are not watched.
_MANY_PIECES = 1 << 24
_MANY_THREADS = 1 << 26
# Of memory that nothing was written to so far: copies on record, and bytes of records of ordinary reads.
_LOADS = 4096
_RECORD_BYTES = 1 << 25
# Of what stores write: bytes that are kept to compare others with.
_STORE_BYTES = 1 << 26

# (address, extents, strides), bytes; the last extent is contiguous.
Region = tuple[int, tuple[int, ...], tuple[int, ...]]


class _Read(NamedTuple):
    """An ordinary read on record, at byte `index * itemsize`; `first` is the number of its wave's first thread."""

    index: np.ndarray
    threads: np.ndarray
    steps: np.ndarray
    first: int
    itemsize: int
    count: int
    number: int


class Copy(NamedTuple):
    """A tensor or bulk copy: `column` comes to `value` in its cluster's clocks when it is done.

    `reduction` says how it combines what it writes with what is there, '' if it does not.
    """

    cluster: int
    thread: int
    column: int
    value: int
    origin: Any
    reduction: str = ""


@lru_cache(maxsize=256)
def _pattern(shape: tuple[int, ...], strides: tuple[int, ...], piece: int) -> np.ndarray:
    """Pieces of a region, counted from its first."""
    offsets = np.zeros(1, np.int64)
    for extent, stride in zip(shape[:-1], strides[:-1], strict=True):
        offsets = (offsets[:, None] + np.arange(extent) * (stride // piece)).reshape(-1)
    return (offsets[:, None] + np.arange(shape[-1] // piece)).reshape(-1)


class Pieces:
    """Stamps of one segment of global memory."""

    def __init__(self, nbytes: int, clocks: Clocks) -> None:
        self.piece = _PIECE
        self.dirty = False
        self.loads: deque[tuple[Copy, Region]] = deque(maxlen=_LOADS)
        self.reads: deque[_Read] = deque()
        self.recorded = 0
        self.used = np.zeros(1, np.int8)
        self.context = Context(MEMORY)
        self.context.set(clocks=int(clocks.context.address), used=self.used, active=np.zeros(1, np.int64), rows=1)
        self._put(*np.zeros((3, -(-nbytes // _PIECE)), np.int64))

    def _put(self, written: np.ndarray, read: np.ndarray, other: np.ndarray) -> None:
        self.written, self.read, self.other = written, read, other
        piece = self.piece.bit_length() - 1
        self.context.set(written=written, read=read, more=other, count=written.size, piece=piece)

    def cut(self, size: int) -> bool:
        """Make the pieces no larger than `size`; False if that would be too many."""
        if size >= self.piece:
            return True
        factor = self.piece // size
        count = self.written.size
        if count * factor > _MANY_PIECES:
            return False
        rows = np.zeros((3, count * factor), np.int64)
        for old, new in zip((self.written, self.read, self.other), rows, strict=True):
            some = np.nonzero(old)[0]
            new.reshape(count, factor)[some] = old[some][:, None]
        self.piece = size
        self._put(*rows)
        return True

    def prepare(self, itemsize: int, count: int, instruction: int) -> np.uint64 | None:
        """Make the context ready for accesses of `count` elements; its address, or None where nothing is watched."""
        nbytes = itemsize * count
        if not self.cut(nbytes):
            return None
        self.context.set(element=itemsize.bit_length() - 1, each=nbytes // self.piece, instruction=instruction)
        return self.context.address

    def record(self, read: _Read) -> None:
        """Put a read on record; the oldest are forgotten when they are too many."""
        self.reads.append(read)
        self.recorded += read.index.nbytes
        while self.recorded > _RECORD_BYTES:
            self.recorded -= self.reads.popleft().index.nbytes

    def note(self, read: _Read) -> None:
        """Note a read that was on record."""
        nbytes = read.itemsize * read.count
        if not self.cut(nbytes):
            return
        by = (read.threads + read.first) << GRID_THREAD_SHIFT
        by |= read.steps[read.threads].astype(np.int64) << GRID_VALUE_SHIFT | read.number
        at = np.broadcast_to(read.index, by.shape) * read.itemsize // self.piece
        each = nbytes // self.piece
        if each > 1:
            at, by = (at[:, None] + np.arange(each)).reshape(-1), by.repeat(each)
        before = self.read[at]
        others = np.nonzero((before >> GRID_THREAD_SHIFT != by >> GRID_THREAD_SHIFT) & (before != 0))[0]
        if others.size:
            self.other[at[others]] = before[others]
            self.used[0] = 1
        self.read[at] = by

    def region(self, region: Region, base: int) -> np.ndarray | slice | None:
        """The pieces of a region, as far as there are any: a store's last row may end beyond its array."""
        address, shape, strides = region
        start = address - base
        low = start | shape[-1]
        for stride in strides[:-1]:
            low |= stride
        if not self.cut(low & -low):
            return None
        if all(extent == 1 for extent in shape[:-1]):
            return slice(start // self.piece, (start + shape[-1]) // self.piece)
        pieces = start // self.piece + _pattern(shape, strides, self.piece)
        return pieces if pieces[-1] < self.written.size else pieces[pieces < self.written.size]


class GlobalAccesses:
    """What the launch does to global memory."""

    def __init__(self, tracker: Tracker, reaches: Reaches) -> None:
        machine = tracker.machine
        self.tracker, self.machine, self.reaches = tracker, machine, reaches
        self.copies: list[Copy] = []
        # What stores write, by the number of the copy; the oldest are forgotten when it is too much.
        self._stores: dict[int, tuple[Region, np.ndarray]] = {}
        self._store_bytes = 0
        self.instructions: list[Any] = [None]
        self._numbers: dict[int, int] = {}
        self._segments: dict[int, Pieces | None] = {}
        self._watched = machine.blocks * machine.threads < _MANY_THREADS

    def wave(self, clocks: Clocks) -> None:
        """Threads are others from now on."""
        self._clocks = clocks
        self._first_thread = self.machine.first_block * self.machine.threads
        for pieces in self._segments.values():
            if pieces is not None:
                pieces.context.set(clocks=int(clocks.context.address))

    def _pieces(self, segment: Segment | None) -> Pieces | None:
        if segment is None or not self._watched:
            return None
        if segment.base not in self._segments:
            few = segment.size // _PIECE <= _MANY_PIECES
            self._segments[segment.base] = Pieces(segment.size, self._clocks) if few else None
        return self._segments[segment.base]

    def _number(self, instruction: Any) -> int:
        found = self._numbers.get(id(instruction))
        if found is None:
            found = len(self.instructions)
            if found > GRID_INSTRUCTION_MASK:
                return 0
            self.instructions.append(instruction)
            self._numbers[id(instruction)] = found
        return found

    # Ordinary accesses

    def read(self, threads: np.ndarray, instruction: Any, view: np.ndarray, index: np.ndarray, count: int) -> None:
        """Lanes read `count` elements of a segment's view from `index` on."""
        pieces = self._pieces(self.machine.memory.segment_of(view))
        if pieces is None:
            return
        number, itemsize = self._number(instruction), view.dtype.itemsize
        if not pieces.dirty:
            pieces.record(_Read(index, threads, self._clocks.steps(), self._first_thread, itemsize, count, number))
            return
        context = pieces.prepare(itemsize, count, number)
        if context is None:
            return
        bad = scan("read_global")(index, threads, context)
        if bad.any():
            self._explain(pieces, bad, threads, view, index, count, instruction, None, None)

    def wrote(
        self,
        fragment: Fragment,
        threads: np.ndarray,
        instruction: Any,
        view: np.ndarray,
        index: np.ndarray,
        count: int,
        values: Values,
    ) -> None:
        """Lanes are about to write."""
        segment = self.machine.memory.segment_of(view)
        pieces = self._pieces(segment)
        context = None if pieces is None else pieces.prepare(view.dtype.itemsize, count, self._number(instruction))
        if context is None:
            return
        self._dirty(pieces, segment)
        bad = scan("check_write_global")(index, threads, context)
        if bad.any():
            self._explain(pieces, bad, threads, view, index, count, instruction, fragment, values)
        together = scan("write_global")(index, threads, context)
        if (together > bad).any():
            self._together(pieces, threads, view, index, count, instruction, fragment, values)

    def signalled(self, view: np.ndarray, index: np.ndarray, count: int) -> None:
        """Atomic and strong writes: taken as known to everybody."""
        pieces = self._pieces(self.machine.memory.segment_of(view))
        if pieces is None or not pieces.cut(view.dtype.itemsize * count):
            return
        at = self._each(pieces, view, index, count)
        pieces.written[at] = pieces.read[at] = pieces.other[at] = 0

    def _each(self, pieces: Pieces, view: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
        nbytes = view.dtype.itemsize
        first = index * nbytes // pieces.piece
        each = nbytes * count // pieces.piece
        return first if each == 1 else (first[:, None] + np.arange(each)).reshape(-1)

    def _dirty(self, pieces: Pieces, segment: Segment) -> None:
        if pieces.dirty:
            return
        pieces.dirty = True
        for read in pieces.reads:
            pieces.note(read)
        pieces.reads.clear()
        for copy, region in pieces.loads:
            at = pieces.region(region, segment.base)
            if at is not None:
                pieces.other[at] = self._keep(copy)
                pieces.used[0] = 1
        pieces.loads.clear()

    # What is wrong

    def _explain(
        self,
        pieces: Pieces,
        bad: np.ndarray,
        threads: np.ndarray,
        view: np.ndarray,
        index: np.ndarray,
        count: int,
        instruction: Any,
        fragment: Fragment | None,
        values: Values | None,
    ) -> None:
        """Report lanes whose accesses are not ordered after earlier ones, as far as they are not after all."""
        lanes = np.nonzero(bad)[0]
        index = np.broadcast_to(index, threads.shape)[lanes]
        at = self._each(pieces, view, index, count)
        each = at.size // lanes.size
        who = np.repeat(threads[lanes], each) if each > 1 else threads[lanes]
        rows = [("write", pieces.written)]
        if values is not None:
            rows += [("read", pieces.read), ("read", pieces.other)]
        for by, row in rows:
            stamps = row.take(at)
            wrong = self.unordered(stamps, who)
            if by == "write" and values is not None and wrong.any():
                changed = changes(view, index, fragment, values, lanes)
                wrong &= np.repeat(changed, each) if each > 1 else changed
            if wrong.any():
                action = "read" if values is None else "write"
                self._report(pieces, view, stamps, wrong, who, at, instruction, action, by)

    def _together(
        self,
        pieces: Pieces,
        threads: np.ndarray,
        view: np.ndarray,
        index: np.ndarray,
        count: int,
        instruction: Any,
        fragment: Fragment,
        values: Values,
    ) -> None:
        """Lanes that one instruction lets write to the same bytes; harmless if it is the same value."""
        at = self._each(pieces, view, np.broadcast_to(index, threads.shape), count)
        each = at.size // threads.size
        stamps = pieces.written.take(at)
        found = first_disagreement(fragment, values, threads, (stamps >> GRID_THREAD_SHIFT) - self._first_thread, each)
        if found is not None:
            wrong = np.arange(at.size) == found
            self._report(pieces, view, stamps, wrong, threads.repeat(each), at, instruction, "write", "write")

    def unordered(self, stamps: np.ndarray, threads: np.ndarray, fenced: bool = False) -> np.ndarray:
        """Whether the accesses of stamps are not ordered before what these threads do now.

        `fenced`: not before a proxy fence; copies need none.
        """
        clocks = self._clocks
        bad = np.zeros(stamps.size, np.bool_)
        some = np.nonzero(stamps)[0]
        if not some.size:
            return bad
        stamps, threads = stamps[some], threads[some] if threads.size > 1 else np.broadcast_to(threads, some.shape)
        clusters, columns, values = self._places(stamps)
        part = clocks.parts.globally if fenced else 0
        mine = (self._first_thread + threads) // clocks.cluster_threads
        near = clusters == mine
        wrong = np.ones(some.size, np.bool_)
        if near.any():
            wrong[near] = ~clocks.knows(threads[near], columns[near], values[near], part)
        reach = clocks.reach(clocks.known[threads])[:, 0]
        far = np.nonzero(~near & (reach > 0))[0]
        if far.size and part is not None:
            keys, which = np.unique(np.stack((reach[far], clusters[far])), axis=1, return_inverse=True)
            for i, (number, cluster) in enumerate(keys.T.tolist()):
                clock = self.reaches.known(number).get(cluster)
                if clock is not None:
                    lanes = far[which.reshape(-1) == i]
                    wrong[lanes] = fitted(clock, clocks.columns)[part, columns[lanes]] < values[lanes]
        if fenced:
            wrong &= (stamps & GRID_COPY) == 0
        bad[some] = wrong
        return bad

    def _places(self, stamps: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(clusters, columns, values) of stamps."""
        size = self._clocks.cluster_threads
        clusters, columns = np.divmod(stamps >> GRID_THREAD_SHIFT, size)
        values = (stamps >> GRID_VALUE_SHIFT) & GRID_VALUE_MASK
        for lane in np.nonzero(stamps & GRID_COPY)[0].tolist():
            copy = self.copies[int(stamps[lane]) ^ GRID_COPY]
            clusters[lane], columns[lane], values[lane] = copy.cluster, copy.column, copy.value
        return clusters, columns, values

    def _report(
        self,
        pieces: Pieces,
        view: np.ndarray,
        stamps: np.ndarray,
        wrong: np.ndarray,
        threads: np.ndarray,
        at: np.ndarray,
        instruction: Any,
        action: str,
        by: str,
    ) -> None:
        segment = self.machine.memory.segment_of(view)
        self.describe(segment.base, pieces.piece, stamps, wrong, threads, at, instruction, action, by)

    def describe(
        self,
        base: int,
        piece: int,
        stamps: np.ndarray,
        wrong: np.ndarray,
        threads: np.ndarray,
        at: np.ndarray,
        instruction: Any,
        action: str,
        by: str,
        fenced: bool = False,
        nbytes: int = 0,
    ) -> None:
        """Report one lane for each earlier instruction; `nbytes` are those of the whole access, where it is a copy."""
        lanes = np.nonzero(wrong)[0]
        numbers = np.where(stamps[lanes] & GRID_COPY, stamps[lanes], stamps[lanes] & GRID_INSTRUCTION_MASK)
        for first in np.unique(numbers, return_index=True)[1].tolist():
            lane = lanes[first]
            stamp = int(stamps[lane])
            copy = self.copies[stamp ^ GRID_COPY] if stamp & GRID_COPY else None
            earlier = copy.thread if copy else stamp >> GRID_THREAD_SHIFT
            before = self.instruction_of(stamp)
            thread = int(threads[lane if threads.size > 1 else 0]) + self._first_thread
            address = base + int(at[lane]) * piece
            self.tracker.report.global_pair(
                thread, earlier, address, piece, instruction, before, action, by, copy, fenced, nbytes
            )

    # Copies

    def _copy(self, thread: int, column: int, value: int, origin: Any, reduction: str = "") -> Copy:
        in_grid = self._first_thread + thread
        return Copy(in_grid // self._clocks.cluster_threads, in_grid, column, value, origin, reduction)

    def _keep(self, copy: Copy) -> int:
        """The stamp of a copy."""
        self.copies.append(copy)
        return GRID_COPY | (len(self.copies) - 1)

    def _found(self, region: Region) -> tuple[Segment, Pieces] | None:
        segment = self.machine.memory.find(region[0])
        pieces = self._pieces(segment) if segment is not None and segment.kind == "global" and all(region[1]) else None
        return None if pieces is None else (segment, pieces)

    def stored(
        self,
        thread: int,
        region: Region,
        column: int,
        value: int,
        origin: Any,
        reduction: str,
        read: Callable[[], np.ndarray],
    ) -> None:
        """A tensor or bulk store, or reduction, that writes a region is issued; `read` gives the bytes."""
        found = self._found(region)
        if found is None:
            return
        segment, pieces = found
        at = pieces.region(region, segment.base)
        if at is None:
            return
        self._dirty(pieces, segment)
        copy = self._copy(thread, column, value, origin, reduction)
        data = None if reduction else read().reshape(-1)
        self._check(segment, pieces, at, copy, math.prod(region[1]), "async write", ("write", "read"), data)
        pieces.written[at] = self._keep(copy)
        if data is not None:
            self._remember(region, data)
        pieces.read[at] = pieces.other[at] = 0

    def loaded(self, thread: int, region: Region, column: int, value: int, origin: Any) -> None:
        """A tensor or bulk load that reads a region is issued."""
        found = self._found(region)
        if found is None:
            return
        segment, pieces = found
        copy = self._copy(thread, column, value, origin)
        if not pieces.dirty:
            pieces.loads.append((copy, region))
            return
        at = pieces.region(region, segment.base)
        if at is None:
            return
        self._check(segment, pieces, at, copy, math.prod(region[1]), "async read", ("write",))
        pieces.other[at] = self._keep(copy)
        pieces.used[0] = 1

    def _check(
        self,
        segment: Segment,
        pieces: Pieces,
        at: np.ndarray | slice,
        copy: Copy,
        nbytes: int,
        action: str,
        kinds: Iterable[str],
        data: np.ndarray | None = None,
    ) -> None:
        """See that a copy of `nbytes` comes after what was done before to the pieces that it uses.

        `data` is what it stores. Two stores of the same to the same bytes do no harm, whatever their order.
        """
        who, origin = np.array([copy.thread - self._first_thread]), copy.origin
        rows = [("write", pieces.written), ("read", pieces.read), ("read", pieces.other)]
        for by, row in rows:
            if by not in kinds:
                continue
            stamps = row[at]
            if not stamps.any():
                continue
            keep = np.ones(stamps.size, np.bool_)
            np.not_equal(stamps[1:], stamps[:-1], out=keep[1:])
            lanes = np.nonzero(keep & (stamps != 0))[0]
            ends = np.append(np.nonzero(keep)[0], stamps.size)
            ends = ends[np.searchsorted(ends, lanes, side="right")]
            every = np.arange(at.start, at.stop) if isinstance(at, slice) else at
            places, stamps = every[lanes], stamps[lanes]
            wrong = unordered = self.unordered(stamps, who)
            if copy.reduction and wrong.any():
                wrong = unordered & ~self._reduced(stamps, copy.reduction)
            elif data is not None and data.size == every.size * pieces.piece and by == "write" and wrong.any():
                wrong, chunks = unordered.copy(), data.reshape(every.size, -1)
                for i in np.nonzero(wrong & (stamps & GRID_COPY != 0))[0].tolist():
                    run = slice(lanes[i], ends[i])
                    wrong[i] = not self._same(pieces, segment, int(stamps[i]), every[run], chunks[run])
            told = (who, places, origin, action, by)
            if wrong.any():
                self.describe(segment.base, pieces.piece, stamps, wrong, *told, nbytes=nbytes)
            if by == "write":
                late = ~unordered & self.unordered(stamps, who, fenced=True)
                if late.any():
                    self.describe(segment.base, pieces.piece, stamps, late, *told, fenced=True, nbytes=nbytes)

    def _remember(self, region: Region, data: np.ndarray) -> None:
        """Keep what the copy that was kept last stores."""
        self._stores[len(self.copies) - 1] = (region, data)
        self._store_bytes += data.size
        while self._store_bytes > _STORE_BYTES:
            self._store_bytes -= self._stores.pop(next(iter(self._stores)))[1].size

    def _same(self, pieces: Pieces, segment: Segment, stamp: int, places: np.ndarray, chunks: np.ndarray) -> bool:
        """Whether the copy of a stamp stores the same `chunks` to some pieces; no in doubt."""
        region, data = self._stores.get(stamp ^ GRID_COPY, (None, None))
        at = pieces.region(region, segment.base) if region is not None else None
        if at is None:
            return False
        at = np.arange(at.start, at.stop) if isinstance(at, slice) else at
        if data.size != at.size * pieces.piece:
            return False
        order = np.argsort(at)
        found = order[np.searchsorted(at, places, sorter=order)]
        return np.array_equal(data.reshape(at.size, -1)[found], chunks)

    def _reduced(self, stamps: np.ndarray, reduction: str) -> np.ndarray:
        """Whether stamps are copies that reduce in this way: whatever the order of such, the result is the same."""
        return np.array(
            [bool(s & GRID_COPY) and self.copies[s ^ GRID_COPY].reduction == reduction for s in stamps.tolist()]
        )

    def async_reads(self, threads: np.ndarray, addresses: np.ndarray, nbytes: int, origin: Any) -> None:
        """cp.async reads like an ordinary access of its thread: `nbytes` at each address."""
        left = np.arange(threads.size)
        while left.size:
            segment = self.machine.memory.find(int(addresses[left[0]]))
            if segment is None:
                return
            here = (addresses[left] - np.uint64(segment.base)) < np.uint64(max(segment.size, 1))
            lanes, left = left[here], left[~here]
            if segment.kind == "global":
                bytes_ = segment.view(np.dtype(np.uint8))
                offsets = (addresses[lanes] - np.uint64(segment.base)).view(np.int64)
                self.read(threads[lanes], origin, bytes_, offsets, nbytes)

    # Tensor maps

    def changed(self, thread: int, address: int, instruction: Any) -> None:
        """A thread writes a tensor map."""
        segment = self.machine.memory.find(address)
        pieces = self._pieces(segment) if segment is not None and segment.kind == "global" else None
        if pieces is None:
            return
        view, index = segment.view(np.dtype(np.uint64)), (address - segment.base) // 8 + np.arange(NBYTES // 8)
        context = pieces.prepare(8, 1, self._number(instruction))
        if context is None:
            return
        self._dirty(pieces, segment)
        threads = np.full(index.size, thread)
        bad = scan("check_write_global")(index, threads, context)
        if bad.any():
            self._explain(pieces, bad, threads, view, index, 1, instruction, None, ())
        scan("write_global")(index, threads, context)

    def instruction_of(self, stamp: int) -> Any:
        """The instruction of a stamp."""
        return (
            self.copies[stamp ^ GRID_COPY].origin
            if stamp & GRID_COPY
            else self.instructions[stamp & GRID_INSTRUCTION_MASK]
        )

    def written(self, address: int, nbytes: int) -> np.ndarray:
        """Stamps of what was written to these bytes."""
        segment = self.machine.memory.find(address)
        pieces = self._segments.get(segment.base) if segment is not None else None
        if pieces is None or not pieces.dirty:
            return np.zeros(0, np.int64)
        start = address - segment.base
        stamps = pieces.written[start // pieces.piece : -(-(start + nbytes) // pieces.piece)]
        return np.unique(stamps[stamps != 0])

"""Who last wrote and who last read each piece of shared memory.

A *stamp* is an int64: column (20 bits), value of that column (28 bits), number of the instruction (16 bits); 0 for
"never". Pieces are as large as the accesses allow and are cut when a smaller access comes. Reads since the last write
are kept apart, as rows: the latest ordinary read; for each of a few warps one that the latest is not ordered after; the
copy engine's; each warpgroup's matrix multiplications. `before` has the latest ordinary reads before the last copy.
"""

from __future__ import annotations

import numpy as np

from .clocks import Clocks
from .scan import COLUMN_SHIFT, INSTRUCTION_MASK, MEMORY, VALUE_MASK, VALUE_SHIFT, Context, scan

PIECE = 16
READERS = 8
# More shared memory than this gets fewer readers apart: a hazard less may be seen, none is made up.
MANY_BYTES = 1 << 23
# The columns of the first this many warpgroups have rows of their own, the others share them.
WARPGROUPS = 4


def stamps(columns: np.ndarray | int, values: np.ndarray | int, instruction: int) -> np.ndarray:
    """Pack stamps."""
    return (np.asarray(columns, np.int64) << COLUMN_SHIFT) | (np.asarray(values, np.int64) << VALUE_SHIFT) | instruction


def unpack(stamp: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(columns, values, instructions)."""
    return stamp >> COLUMN_SHIFT, (stamp >> VALUE_SHIFT) & VALUE_MASK, stamp & INSTRUCTION_MASK


class Shadow:
    """Stamps of `nbytes` bytes of memory; `warps` that read apart. Stamps are of `clocks`."""

    def __init__(self, nbytes: int, warps: int, clocks: Clocks, warpgroups: int = 0) -> None:
        self.nbytes = nbytes
        self.piece = PIECE
        readers = min(warps, READERS if nbytes <= MANY_BYTES else 2)
        # Rows: the latest read, warps' reads, the copy engine's, warpgroups'.
        self.engine = 1 + readers
        self.warpgroup = self.engine + 1
        self.readers = self.warpgroup + min(warpgroups, WARPGROUPS)
        self.in_use = np.zeros(self.readers, np.int8)
        self.context = Context(MEMORY)
        row = np.arange(clocks.cluster_threads) % clocks.threads // 32 % readers
        self.context.set(clocks=int(clocks.context.address), used=self.in_use[1:], row=row.astype(np.int8))
        self._clocks = clocks
        count = -(-nbytes // PIECE)
        self._put(*np.zeros((2, count), np.int64), np.zeros((self.readers, count), np.int64))

    def _put(self, written: np.ndarray, before: np.ndarray, read: np.ndarray) -> None:
        self.written, self.before, self.read = written, before, read
        piece = self.piece.bit_length() - 1
        self.context.set(written=written, read=read[0], more=read[1:], count=read.shape[1], piece=piece)
        self._active = (b"", [])

    def rows(self) -> list[np.ndarray]:
        """The rows of reads that anything is in, of which the context knows too."""
        used = self.in_use.tobytes()
        if self._active[0] != used:
            active = np.nonzero(self.in_use[1:])[0]
            self._active = (used, [self.read[0], *(self.read[1 + i] for i in active.tolist())])
            self.context.set(active=active, rows=active.size)
        return self._active[1]

    def cut(self, size: int) -> None:
        """Make the pieces no larger than `size` (a power of two)."""
        if size >= self.piece:
            return
        factor = self.piece // size
        count = len(self.written)
        # Zeros that nobody touches take no memory: only what was used is written.
        written, before = np.zeros((2, count * factor), np.int64)
        read = np.zeros((self.readers, count * factor), np.int64)
        for old, new in zip((self.written, self.before, *self.read), (written, before, *read), strict=True):
            used = np.nonzero(old)[0]
            new.reshape(count, factor)[used] = old[used][:, None]
        self.piece = size
        self._put(written, before, read)

    def prepare(self, itemsize: int, count: int, instruction: int) -> np.uint64:
        """Make the context ready for an access of `count` elements, aligned to their whole size; its address."""
        nbytes = itemsize * count
        self.cut(nbytes)
        self.context.set(element=itemsize.bit_length() - 1, each=nbytes // self.piece, instruction=instruction)
        return self.context.address

    def unsettled(self, stamp: np.ndarray, thread: np.ndarray) -> np.ndarray:
        """Whether a copy by a thread may not come after the accesses of stamps, or not without a fence."""
        self.context.set(fence=(self._clocks.parts.shared or 0) * self._clocks.columns)
        return scan("check_copy")(stamp, thread, self.context.address)

    def pieces(self, offsets: np.ndarray, nbytes: int) -> tuple[np.ndarray, int]:
        """(pieces, pieces an access) of aligned accesses of `nbytes` at byte offsets; one's follow each other."""
        self.cut(nbytes)
        first = offsets >> (self.piece.bit_length() - 1)
        count = nbytes // self.piece
        if count == 1:
            return first, 1
        return (first[:, None] + np.arange(count)).reshape(-1), count

    def span(self, start: int, nbytes: int) -> slice:
        """The pieces of a stretch of bytes."""
        low = start | nbytes
        self.cut(low & -low)
        return slice(start // self.piece, (start + nbytes) // self.piece)

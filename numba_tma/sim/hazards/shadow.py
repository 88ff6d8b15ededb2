"""Who last wrote and who last read each piece of shared memory.

A *stamp* is an int64: column (20 bits), value of that column (28 bits), number of the instruction (16 bits); 0 for
"never". Pieces are as large as the accesses allow and are cut when a smaller access comes. Reads are kept for each of
a few warps apart, the copy engine's by themselves: since the last write.
"""

from __future__ import annotations

import numpy as np

PIECE = 16
READERS = 8
# More shared memory than this gets fewer readers apart: a hazard less may be seen, none is made up.
MANY_BYTES = 1 << 23
_COLUMN, _VALUE = 44, 16
_VALUE_MASK = (1 << 28) - 1


def stamps(columns: np.ndarray | int, values: np.ndarray | int, instruction: int) -> np.ndarray:
    """Pack stamps."""
    return (np.asarray(columns, np.int64) << _COLUMN) | (np.asarray(values, np.int64) << _VALUE) | instruction


def unpack(stamp: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(columns, values, instructions)."""
    return stamp >> _COLUMN, (stamp >> _VALUE) & _VALUE_MASK, stamp & 0xFFFF


class Shadow:
    """Stamps of `nbytes` bytes of memory; `warps` that read apart."""

    def __init__(self, nbytes: int, warps: int) -> None:
        self.nbytes = nbytes
        self.piece = PIECE
        # The latest reader; those of a few warps that it is not ordered after; and the copy engine.
        self.readers = min(warps, READERS if nbytes <= MANY_BYTES else 2) + 2
        self.in_use = [False] * self.readers
        count = -(-nbytes // PIECE)
        self.written = np.zeros(count, np.int64)
        self.read = np.zeros((self.readers, count), np.int64)

    def rows(self) -> list[np.ndarray]:
        """The rows of readers that anything is in."""
        return [row for row, used in zip(self.read, self.in_use, strict=True) if used]

    def cut(self, size: int) -> None:
        """Make the pieces no larger than `size` (a power of two)."""
        if size < self.piece:
            factor = self.piece // size
            count = len(self.written)
            # Zeros that nobody touches take no memory: only what was used is written.
            written, read = self.written, self.read
            self.written = np.zeros(count * factor, np.int64)
            self.read = np.zeros((self.readers, count * factor), np.int64)
            used = np.nonzero(written)[0]
            self.written.reshape(count, factor)[used] = written[used][:, None]
            for old, new in zip(read, self.read, strict=True):
                used = np.nonzero(old)[0]
                new.reshape(count, factor)[used] = old[used][:, None]
            self.piece = size

    def pieces(self, offsets: np.ndarray, nbytes: int) -> tuple[np.ndarray, int]:
        """(pieces, pieces an access) of accesses of `nbytes` at byte offsets; the pieces of one follow each other."""
        low = int(np.bitwise_or.reduce(offsets)) | nbytes
        if low & (self.piece - 1):
            self.cut(low & -low)
        first = offsets >> (self.piece.bit_length() - 1)
        count = nbytes // self.piece
        if count == 1:
            return first, 1
        return (first[:, None] + np.arange(count)).reshape(-1), count

    def span(self, start: int, nbytes: int) -> slice:
        """The pieces of a stretch of bytes."""
        low = start | nbytes
        if low & (self.piece - 1):
            self.cut(low & -low)
        return slice(start // self.piece, (start + nbytes) // self.piece)

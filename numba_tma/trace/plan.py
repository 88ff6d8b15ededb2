"""What is to be traced, and where its records go."""

from __future__ import annotations

import operator
from dataclasses import dataclass

HEADER_BYTES = 64
RECORD_BYTES = 16
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Trace:
    """Which blocks of a launch keep records, and how many.

    Attributes:
        capacity: records that a warp keeps. Those that come later are counted and dropped.
        blocks: linear numbers of the blocks to trace, a `range`; None for all.
        multiprocessors: trace only blocks that run on these, a `range` of SM numbers; None for all.

    Raises:
        TypeError: not a range, or not a number.
        ValueError: no record, or a range that is empty or runs backwards.
    """

    capacity: int = 1024
    blocks: range | None = None
    multiprocessors: range | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "capacity", operator.index(self.capacity))
        if not 1 <= self.capacity <= 1 << 24:
            raise ValueError(f"Trace: capacity {self.capacity}; a warp keeps 1 to {1 << 24:,} records")
        for name in ("blocks", "multiprocessors"):
            chosen = getattr(self, name)
            if chosen is None:
                continue
            if not isinstance(chosen, range):
                raise TypeError(f"Trace: {name} {chosen!r}; expected a range, such as range(8) or range(0, 132, 16)")
            if len(chosen) == 0 or chosen.start < 0 or chosen.step < 1:
                raise ValueError(f"Trace: {name} {chosen} chooses nothing; a range runs upwards from 0 or more")

    @property
    def ring_bytes(self) -> int:
        """Bytes of one ring: header and records."""
        return HEADER_BYTES + RECORD_BYTES * self.capacity

    def traced_blocks(self, blocks: int) -> range:
        """The linear numbers, of a grid of so many blocks, for which there are rings."""
        chosen = range(blocks) if self.blocks is None else self.blocks
        return range(chosen.start, min(chosen.stop, blocks), chosen.step)

    def nbytes(self, blocks: int, threads: int) -> int:
        """Bytes of all rings of a launch: two a warp, the second for a thread that issues and is not the first lane.

        Raises:
            ValueError: it would be too much; the message says how to ask for less.
        """
        warps = -(-threads // 32)
        total = max(len(self.traced_blocks(blocks)), 1) * warps * 2 * self.ring_bytes
        if total > _MOST_BYTES:
            raise ValueError(
                f"a trace of {blocks:,} blocks × {warps} warps × {self.capacity:,} records takes {total:,} B; "
                f"choose blocks, Trace(blocks=range(…)), or keep fewer records, Trace(capacity=…)"
            )
        return total

"""Which kernel `attention` takes, by head dimension and mask: what was fastest on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from ..gemm.choice import multiprocessors
from ..gemm.warpgroup import GROUP_ROWS
from .masks import Kind

# Of keys and values that the heads which are gone through together have: they stay in an H200's L2 of 50 MB.
_L2_BYTES = 32 << 20


@dataclass(frozen=True)
class Configuration:
    """How `warpgroup.make_overlapped` is cut: the parameters of the same names."""

    consumers: int = 2
    keys: int = 128
    stages: int = 2
    o_over_q: bool = False
    ping_pong: bool = False

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return GROUP_ROWS * self.consumers

    def __post_init__(self) -> None:
        if self.consumers not in (1, 2, 3) or self.keys not in range(16, 257, 16) or not 1 <= self.stages <= 8:
            raise ValueError(f"{self}: 1 to 3 consumers, a multiple of 16 keys up to 256, and 1 to 8 stages expected")


def choose(head_dim: int, kind: Kind) -> Configuration:
    """The configuration for heads of so many columns.

    Registers decide: a consumer's thread has half of O's columns and of the block's scores, and with three consumers
    160 registers in all. From 129 columns on, O leaves by way of Q's shared memory, for which there is no room else.
    """
    if head_dim <= 64:
        return Configuration(consumers=3)
    if head_dim <= 128:
        return Configuration(ping_pong=not (kind.left or kind.right))
    if head_dim <= 192:
        return Configuration(keys=96, o_over_q=True)
    return Configuration(keys=80, o_over_q=True)


def together(skv: int, head_dim: int, group: int) -> int:
    """How many heads of queries to go through side by side, so that their keys and values stay in the L2 cache."""
    return max(1, _L2_BYTES // (4 * skv * head_dim)) * group


def grid(tiles: int) -> int:
    """Blocks of a launch, one an SM: each claims tiles until there are no more."""
    return min(multiprocessors(), tiles)

"""Which kernel `attention` takes, by head dimension and mask: what was fastest on an H200."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from ..gemm.choice import multiprocessors
from ..gemm.warpgroup import GROUP_ROWS
from .masks import Kind

# Of keys and values that the heads which are gone through together have: they stay in an H200's L2 of 50 MB.
_L2_BYTES = 32 << 20
# From so many keys on a tile takes so long that its start and end do not count, and a block for each tile was faster
# than blocks that claim tiles; probably since what begins together asks L2 for the same keys at the same time. Without
# a mask all tiles are equally long, and blocks that stay keep in step for longer.
_LONG, _LONG_UNMASKED = 6144, 65536


@dataclass(frozen=True)
class Configuration:
    """How `warpgroup.make_overlapped` is cut: the parameters of the same names.

    With `persistent` there is a block an SM, which claims tiles until there are none, otherwise a block for each tile.
    """

    consumers: int = 2
    keys: int = 128
    stages: int = 2
    o_over_q: bool = False
    ping_pong: bool = False
    persistent: bool = True
    cluster: int = 1

    def __post_init__(self) -> None:
        for name in ("consumers", "keys", "stages"):
            object.__setattr__(self, name, int(operator.index(getattr(self, name))))
        if self.consumers not in (1, 2, 3) or self.keys not in range(16, 257, 16) or not 1 <= self.stages <= 8:
            raise ValueError(f"{self}: 1 to 3 consumers, a multiple of 16 keys up to 256, and 1 to 8 stages expected")
        if self.ping_pong and self.consumers != 2:
            raise ValueError(f"{self}: taking turns is for two consumers")

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return GROUP_ROWS * self.consumers

    def blocks(self, tiles: int) -> int:
        """Blocks of a launch for so many tiles."""
        return min(multiprocessors(), tiles) if self.persistent else tiles

    def cut(self) -> dict[str, int | bool]:
        """What the kernel is made with."""
        made = {"cluster": self.cluster} if self.cluster > 1 else {}
        made |= {"consumers": self.consumers, "keys": self.keys, "stages": self.stages, "o_over_q": self.o_over_q}
        return made | ({"ping_pong": True} if self.ping_pong else {})


def choose(head_dim: int, kind: Kind, skv: int) -> Configuration:
    """The configuration for heads of so many columns and so many keys.

    Registers decide: a consumer's thread has half of O's columns and of the block's scores, and with three consumers
    160 registers in all. From 129 columns on, O leaves by way of Q's shared memory, for which there is no room else.
    """
    masked = kind.left or kind.right
    persistent = skv < (_LONG if masked else _LONG_UNMASKED)
    if head_dim <= 64:
        return Configuration(consumers=3)
    if head_dim <= 128:
        return Configuration(ping_pong=not masked, persistent=persistent)
    return Configuration(keys=96 if head_dim <= 192 else 80, o_over_q=True, persistent=persistent)


def together(skv: int, head_dim: int, group: int, element_bytes: int = 2) -> int:
    """How many heads of queries to go through side by side, so that their keys and values stay in the L2 cache."""
    return max(1, _L2_BYTES // (2 * element_bytes * skv * head_dim)) * group

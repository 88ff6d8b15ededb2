"""Which kernel `attention` takes, by head dimension and mask: what was fastest on an H200."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from ..gemm.choice import multiprocessors
from ..gemm.warpgroup import GROUP_ROWS
from .masks import Kind

# Of keys and values that the heads which are gone through together have: they stay in an H200's L2 of 50 MB.
_L2_BYTES = 32 << 20
# From so many keys on a causal tile takes so long that its start and end do not count, and a block for each tile was
# faster than blocks that claim tiles; probably since what begins together asks L2 for the same keys at the same time.
_LONG, _LONG_WIDE = 12288, 6144  # the latter for heads of more than 128 columns
# Without a mask, keys and values of one head are more than L2 holds, and two blocks that fetch them for each other
# were faster, by 4 %. With fewer keys they were slower, by as much: each waits for the slower one.
_SHARED = 65536
# Up to so many keys two consumers in turn were faster than three, if some keys are hidden.
_SHORT = 1024


@dataclass(frozen=True)
class Configuration:
    """How `warpgroup.make_overlapped` is cut: the parameters of the same names.

    With `persistent` there is a block an SM, which claims tiles until there are none, otherwise a block for each tile.
    The blocks of a `cluster` fetch keys and values for each other: that needs a number of tiles of queries that the
    cluster divides, all of which see the same keys.
    """

    consumers: int = 2
    keys: int = 128
    stages: int = 2
    o_over_q: bool = False
    ping_pong: bool = False
    persistent: bool = True
    cluster: int = 1

    def __post_init__(self) -> None:
        for name in ("consumers", "keys", "stages", "cluster"):
            object.__setattr__(self, name, int(operator.index(getattr(self, name))))
        if self.consumers not in (1, 2, 3) or self.keys not in range(16, 257, 16) or not 1 <= self.stages <= 8:
            raise ValueError(f"{self}: 1 to 3 consumers, a multiple of 16 keys up to 256, and 1 to 8 stages expected")
        if self.ping_pong and self.consumers != 2:
            raise ValueError(f"{self}: taking turns is for two consumers")
        if self.cluster not in (1, 2, 4):
            raise ValueError(f"{self}: a cluster of 1, 2 or 4 blocks expected")

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return GROUP_ROWS * self.consumers

    def blocks(self, tiles: int) -> int:
        """Blocks of a launch for so many tiles."""
        return min(multiprocessors() // self.cluster * self.cluster, tiles) if self.persistent else tiles

    def cut(self) -> dict[str, int | bool]:
        """What the kernel is made with."""
        made = {"cluster": self.cluster} if self.cluster > 1 else {}
        made |= {"consumers": self.consumers, "keys": self.keys, "stages": self.stages, "o_over_q": self.o_over_q}
        return made | ({"ping_pong": True} if self.ping_pong else {})


def choose(head_dim: int, kind: Kind, skv: int, sq: int | None = None) -> Configuration:
    """The configuration for heads of so many columns, so many keys, and queries: None if sequences differ in it.

    Registers decide: a consumer's thread has half of O's columns and of the block's scores, and with three consumers
    160 registers in all. With 176 keys, or from 129 columns on, O leaves by way of Q's shared memory, for which there
    is no room else.
    """
    masked = kind.left or kind.right
    if head_dim <= 64:
        return Configuration(ping_pong=True) if masked and skv <= _SHORT else Configuration(consumers=3)
    wide = Configuration(keys=176, o_over_q=True, persistent=False)
    if head_dim <= 128 and kind.right and not kind.left and skv >= _LONG:
        return wide
    if head_dim <= 128 and not masked and skv >= _SHARED and sq is not None and -(-sq // wide.rows) % 2 == 0:
        return replace(wide, cluster=2)
    if head_dim <= 128:
        return Configuration(ping_pong=masked)
    persistent = skv < (_LONG_WIDE if masked else _SHARED)
    return Configuration(
        keys=96 if head_dim <= 192 else 80, o_over_q=True, ping_pong=masked and persistent, persistent=persistent
    )


def together(skv: int, head_dim: int, group: int, element_bytes: int = 2) -> int:
    """How many heads of queries to go through side by side, so that their keys and values stay in the L2 cache."""
    return max(1, _L2_BYTES // (2 * element_bytes * skv * head_dim)) * group

"""Orders in which a launch may proceed: of its asynchronous copies, and of its warps. For runs that look for wrong
numbers.

A GPU promises nothing about which warp goes first. The orders of warps (`warp_order` of `launch`):

==========  =========================================================================================
together    all warps of all blocks side by side, whoever is furthest behind first (the default: it is the fastest)
ascending   warp 0 of each block until it has to wait, then warp 1, …; a warp that may go on again goes first
descending  the last warp first; and where lanes of a warp part, those ahead in the program first
blocks      the first block until it has to wait, then the next one
random      for a random time one warp, then another, as `seed` says
==========  =========================================================================================

A warp that another one waits for in a loop gets its turn under all of them. Under "blocks" and "random" a launch of
very many blocks or warps takes some of them together, so that it does not become slow without measure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TOGETHER, ASCENDING, DESCENDING, BLOCKS, RANDOM = WARP_ORDERS = (
    "together",
    "ascending",
    "descending",
    "blocks",
    "random",
)
# Parts of a wave that take turns: each runs for itself, so a wave's time grows with their number.
_MAX_GROUPS = 16


def warp_groups(order: str, slot: np.ndarray, warp: np.ndarray, rng: np.random.Generator) -> np.ndarray | None:
    """For each lane the number of the group that it runs in; None for one group of all.

    `slot` is each lane's block in the wave, `warp` its warp in the block. All lanes of a warp are of one group.
    """
    if order == TOGETHER:
        return None
    if order in (ASCENDING, DESCENDING):
        return warp
    if order == BLOCKS:
        blocks = int(slot[-1]) + 1
        return slot * min(blocks, _MAX_GROUPS) // blocks
    per_block = int(warp.max()) + 1
    total = (int(slot[-1]) + 1) * per_block
    return (rng.permutation(total) % _MAX_GROUPS)[slot * per_block + warp]


def named(schedule: dict[str, Any]) -> str:
    """A schedule in words, for messages: "copies late, warps descending"."""
    words = f"copies {schedule.get('policy', 'fifo')}, warps {schedule.get('warp_order', TOGETHER)}"
    return f"{words}, seed {schedule['seed']}" if "seed" in schedule else words


def first_schedules(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """The first `count` of `schedules`, as many random ones among them as that takes."""
    return schedules(count, seed)[:count]


def schedules(random: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Keyword arguments of `launch` (and `use_backend`): six fixed orders, then `random` ones from `seed` on.

    Copies complete in order, as early and as late as allowed, with warps together and one by one. A hazard is found
    under any of them; the wrong number that it leads to may show under some only.
    """
    fixed = [
        {"policy": "fifo"},
        {"policy": "early", "warp_order": ASCENDING},
        {"policy": "late", "warp_order": DESCENDING},
        {"policy": "early"},
        {"policy": "late"},
        {"policy": "fifo", "warp_order": BLOCKS},
    ]
    return fixed + [{"policy": "random", "warp_order": RANDOM, "seed": seed + number} for number in range(random)]

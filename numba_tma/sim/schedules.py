"""Orders in which the asynchronous copies of a launch may complete: for runs that look for wrong numbers."""

from __future__ import annotations

from typing import Any


def schedules(random: int = 2) -> list[dict[str, Any]]:
    """Keyword arguments of `launch` (and `use_backend`): in order, as early and as late as allowed, `random` at random.

    A hazard is found under any of them; the wrong number that it leads to may show under some only.
    """
    fixed = [{"policy": policy} for policy in ("fifo", "early", "late")]
    return fixed + [{"policy": "random", "seed": seed} for seed in range(random)]

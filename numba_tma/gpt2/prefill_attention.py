"""Causal attention of a prompt's queries to all that the cache holds, on the attention kernels of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..kernels.attention.ladder import PROBLEM


def bind_causal(q: Any, k: Any, v: Any, o: Any, lse: Any, stream: int) -> Callable[[], Any]:
    """Attention of q (B, S, H, D) to k and v (B, P + S, H, D), views of one array; query i sees the keys to P + i."""
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    return PROBLEM.variant("mma_tma").bind(arrays, causal=True, stream=stream)

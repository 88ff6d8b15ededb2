"""The library that the ladder is measured beside: cuBLAS, as PyTorch calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..peers import as_torch


def cublas(given: Mapping[str, Any], *, b_major: str = "k", activation: str = "none") -> Callable[[], Any] | None:
    """torch.mm on the arrays "a", "b" and "c" of device memory, or None: no PyTorch for CUDA here, or more to do."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or activation != "none" or "bias" in given:
        return None
    a, b, c = (as_torch(given[name]) for name in ("a", "b", "c"))
    if a.dtype != c.dtype:
        return None
    b = b.T if b_major == "k" else b
    return lambda: torch.mm(a, b, out=c)

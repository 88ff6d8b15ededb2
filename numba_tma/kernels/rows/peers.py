"""What the ladders are measured beside: PyTorch's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..gemm.peers import as_torch


def torch_softmax(given: Mapping[str, Any]) -> Callable[[], Any] | None:
    """torch.softmax over the rows of "x" into "out", or None where there is no PyTorch for CUDA."""
    torch = _torch()
    if torch is None:
        return None
    x, out = as_torch(given["x"]), as_torch(given["out"])
    return lambda: torch.softmax(x, -1, out=out)


def torch_rms_norm(given: Mapping[str, Any], *, epsilon: float) -> Callable[[], Any] | None:
    """torch's rms_norm over the rows of "x", or None where there is no PyTorch for CUDA."""
    torch = _torch()
    if torch is None:
        return None
    x, weight = as_torch(given["x"]), as_torch(given["weight"])
    return lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)


def _torch() -> Any | None:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None

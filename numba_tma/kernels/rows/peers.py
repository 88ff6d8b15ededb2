"""What the ladders are measured beside: PyTorch's own kernels, and what its compiler makes of the same line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..peers import as_torch

Launch = Callable[[], Any]


def torch_softmax(given: Mapping[str, Any]) -> Launch | None:
    """torch.softmax over the rows of "x" into "out", or None where there is no PyTorch for CUDA."""
    torch = _torch()
    if torch is None:
        return None
    x, out = as_torch(given["x"]), as_torch(given["out"])
    return lambda: torch.softmax(x, -1, out=out)


def torch_rms_norm(given: Mapping[str, Any], *, epsilon: float) -> Launch | None:
    """torch's rms_norm over the rows of "x", or None where there is no PyTorch for CUDA."""
    torch = _torch()
    if torch is None:
        return None
    x, weight = as_torch(given["x"]), as_torch(given["weight"])
    return lambda: torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)


def all_of(operation: str, given: Mapping[str, Any], *, epsilon: float = 0.0) -> dict[str, Launch]:
    """PyTorch's kernel and its compiler's for this shape; none where there is no PyTorch for CUDA."""
    torch = _torch()
    if torch is None:
        return {}
    arguments = [as_torch(given[name]) for name in ("x", "weight") if name in given]

    def softmax(x: Any) -> Any:
        return torch.softmax(x, -1)

    def rms_norm(x: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon)

    function = softmax if operation == "softmax" else rms_norm
    torch.compiler.reset()
    made = torch.compile(function, dynamic=False)
    return {"torch": lambda: function(*arguments), "torch.compile": lambda: made(*arguments)}


def _torch() -> Any | None:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None

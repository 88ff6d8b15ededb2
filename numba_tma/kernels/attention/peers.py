"""What attention is measured beside: FlashAttention-2 and cuDNN, as PyTorch has them, and FlashAttention-3."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..peers import as_torch
from .masks import UNBOUNDED


def flash_attention_2(
    given: Mapping[str, Any],
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> Callable[[], Any] | None:
    """The forward kernel behind torch's scaled_dot_product_attention on device arrays "q", "k" and "v", (B, S, H, D).

    None: no PyTorch for CUDA here, or what its interface cannot ask for (a window, a soft cap, causal attention of
    fewer or more queries than keys, which it aligns at their beginnings, head dimensions that are no multiple of 8).
    """
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or tuple(window) != (UNBOUNDED, UNBOUNDED) or soft_cap:
        return None
    # It wants heads before rows, as a view.
    q, k, v = (as_torch(given[name]).transpose(1, 2) for name in ("q", "k", "v"))
    if (causal and q.shape[2] != k.shape[2]) or q.shape[3] % 8:
        return None
    group = q.shape[1] // k.shape[1]
    if group > 1:  # not part of what is timed
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    return lambda: forward(q, k, v, 0.0, causal, False, scale=scale)


def cudnn(q: Any, k: Any, v: Any, causal: bool = False) -> Callable[[], Any]:
    """cuDNN's forward kernel on torch tensors (B, S, H, D), as scaled_dot_product_attention calls it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def launch() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return launch


def flash_attention_3(q: Any, k: Any, v: Any, causal: bool = False) -> Callable[[], Any] | None:
    """The released FlashAttention-3 forward (package fa3-fwd) on torch tensors (B, S, H, D); None if it is not here."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return None
    return lambda: flash_attn_func(q, k, v, causal=causal)

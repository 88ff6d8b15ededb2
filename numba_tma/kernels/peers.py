"""What peers of every kind need: our arrays as theirs."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arrays


def as_torch(array: Any) -> Any:
    """A device array as a PyTorch tensor over the same memory.

    bfloat16 has no name in `__cuda_array_interface__`; it passes as the integer of its size.
    """
    import torch

    described = arrays.view(array)
    if described.dtype.name != "bfloat16":
        return torch.as_tensor(array, device="cuda")
    bits = arrays.reinterpret(array, np.int16, described.shape, described.strides)
    return torch.as_tensor(bits, device="cuda").view(torch.bfloat16)

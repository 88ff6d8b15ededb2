"""Zeros in a matrix, before a kernel adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda.types import uint32

from ... import arrays
from ...launch import kernel

THREADS = 256


@kernel(threads=THREADS)
def zero(out):
    """out[...] = 0, a row a block."""
    row = uint32(cuda.blockIdx.x)
    for column in range(uint32(cuda.threadIdx.x), uint32(out.shape[1]), uint32(THREADS)):
        out[row, column] = 0


def after_zeros(out: Any, stream: object, launch: Callable[[], Any]) -> Callable[[], Any]:
    """A function that fills the matrix `out` with zeros and then calls `launch`, whose result it gives."""
    clear = zero[arrays.view(out).shape[0], None, stream].bind(out)

    def run() -> Any:
        clear()
        return launch()

    return run

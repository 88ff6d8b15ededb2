"""The arrays of a row operation, checked, and what a launch derives from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays, driver
from ...launch import Kernel, backend
from ..calls import aligned_rows
from .vectors import DTYPES

MULTIPROCESSORS = 132  # of an H200: what the simulator takes, and how many parts of a row surely fit on one
MAX_ROWS = (1 << 31) - 1
MAX_COLUMNS = 1 << 31


@dataclass(frozen=True)
class Operands:
    """x and out, matrices of one shape and dtype, and perhaps a weight for each column.

    `aligned` says whether all of their rows are contiguous and start on multiples of 16 bytes.
    """

    x: Any
    out: Any
    weight: Any
    rows: int
    columns: int
    dtype: str
    itemsize: int
    aligned: bool
    epsilon: float

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the kernels take."""
        if self.weight is None:
            return self.x, self.out
        return self.x, self.weight, self.out, np.float32(1 / self.columns), np.float32(self.epsilon)

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes in a row, a last part of one included."""
        return -(-self.columns * self.itemsize // 16)


def operands(given: Mapping[str, Any], epsilon: float = 0.0) -> Operands:
    """See that "x", "out" and perhaps "weight" fit each other.

    Raises:
        TypeError: something is no array.
        ValueError: shapes, dtypes or layouts do not fit; the message says what would.
    """
    views = {}
    for name, array in given.items():
        views[name] = arrays.view(array)
        if views[name] is None:
            raise TypeError(f"{name} is a {type(array).__name__}; an array is expected")
    x, out, weight = views["x"], views["out"], views.get("weight")
    if x.dtype.name not in DTYPES:
        raise ValueError(f"x is {x.dtype}; {', '.join(DTYPES)} are what there is")
    if len(x.shape) != 2:
        raise ValueError(f"x has the shape {x.shape}; a matrix (rows, columns) is expected: reshape(-1, columns)")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out is {out.dtype} {out.shape}; {x.dtype} {x.shape} expected, as x")
    if x.shape[0] > MAX_ROWS or x.shape[1] >= MAX_COLUMNS:
        raise ValueError(f"x has the shape {x.shape}; rows and columns must be below 2^31: take it in parts")
    if weight is not None and (weight.shape != x.shape[1:] or weight.dtype != x.dtype):
        raise ValueError(f"weight is {weight.dtype} {weight.shape}; {x.dtype} {x.shape[1:]} expected")
    aligned = all(aligned_rows(view) for view in (x, out)) and (weight is None or aligned_rows(weight))
    return Operands(
        given["x"],
        given["out"],
        given.get("weight"),
        *x.shape,
        x.dtype.name,
        x.dtype.itemsize,
        aligned,
        epsilon,
    )


def need_aligned(o: Operands, variant: str) -> None:
    """See that the copy engine can take the rows.

    Raises:
        ValueError: a row is not contiguous, or does not start on a multiple of 16 bytes.
    """
    if not o.aligned:
        raise ValueError(
            f"variant {variant!r}: each row of x and out (and the weight) must be contiguous and start on a multiple "
            f"of 16 B; numba_tma.pitched makes such arrays, variants 'plain' and 'online' take any"
        )


def resident_blocks(kernel: Kernel, arguments: tuple[Any, ...]) -> int:
    """How many blocks of `kernel` the device holds at once; in the simulator, one on each SM of an H200."""
    blocks = kernel.cluster[0]
    if not driver.device_count() or backend() == "sim":
        return MULTIPROCESSORS // blocks * blocks
    compiled = kernel.compile(*arguments)
    return kernel.load(compiled).resident_blocks(kernel.threads, kernel.shared_bytes, kernel.cluster)

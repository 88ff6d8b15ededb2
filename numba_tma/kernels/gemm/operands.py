"""What a step is bound with: the matrices, seen and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays, dtypes
from ...arrays import ArrayView
from ...pitch import is_pitched
from ...tensor_map import TensorMap
from .epilogue import check_activation

INPUTS = ("float16", "bfloat16")
OUTPUTS = ("float16", "bfloat16", "float32")
MAJORS = ("k", "n")
BOX = 64  # elements in a box's row of 128 bytes


@dataclass(frozen=True)
class Operands:
    """A, B, C and the bias of one product, with their extents and the names of their types.

    `bias` is what a kernel is given in its place: the array, or a number that no kernel without bias looks at.
    """

    a: Any
    b: Any
    c: Any
    bias: Any
    has_bias: bool
    m: int
    n: int
    k: int
    b_major: str
    dtype: str
    out_dtype: str

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Tiles of C along M and N."""
        return -(-self.m // rows), -(-self.n // columns)

    @property
    def k_blocks(self) -> np.uint32:
        """Tiles along K."""
        return np.uint32(-(-self.k // BOX))

    def maps(self, rows: int, columns: int) -> tuple[TensorMap, TensorMap]:
        """Tensor maps of A, `rows` x 64, and of B, `columns` x 64, or 64 x 64 where B is stored by K; swizzled."""
        b_box = (columns, BOX) if self.b_major == "k" else (BOX, BOX)
        a_map = TensorMap(self.a, (rows, BOX), swizzle="128B", store=False)
        return a_map, TensorMap(self.b, b_box, swizzle="128B", store=False)

    @property
    def c_by_tma(self) -> bool:
        """Whether TMA may write C. It writes whole 16 bytes: also beyond a row that ends within them."""
        return is_pitched(self.c) and self.n * dtypes.lookup(self.out_dtype).size % 16 == 0

    def c_map(self) -> TensorMap:
        """Tensor map of C: 64 rows of 128 bytes, swizzled."""
        return TensorMap(self.c, (64, 128 // dtypes.lookup(self.out_dtype).size), swizzle="128B", store=False)


def operands(given: Mapping[str, Any], b_major: str = "k", activation: str = "none") -> Operands:
    """The arrays "a" (M, K), "b" (N, K) or, with `b_major` "n", (K, N), "c" (M, N) and perhaps "bias" (N,), checked.

    A and B are both float16 or both bfloat16; C float16, bfloat16 or float32; the bias float32 or of C's type.

    Raises:
        TypeError: not an array.
        ValueError: dimensions, extents, types or strides do not fit, or there is no such `b_major` or activation.
    """
    if b_major not in MAJORS:
        raise ValueError(f"b_major {b_major!r}: 'k' for B of shape (N, K), C = A Bᵀ, or 'n' for (K, N), C = A B")
    check_activation(activation)
    bias = given.get("bias")
    views = {name: _view(name, given[name], 2) for name in ("a", "b", "c")}
    a, b, c = views["a"], views["b"], views["c"]
    m, k = a.shape
    n, b_k = b.shape if b_major == "k" else reversed(b.shape)
    if b_k != k or c.shape != (m, n):
        wanted = "(N, K)" if b_major == "k" else "(K, N)"
        raise ValueError(
            f"a {a.shape}, b {b.shape}, c {c.shape}: with b_major {b_major!r} they must be (M, K), {wanted} and (M, N)"
        )
    if 0 in (m, n, k):
        raise ValueError(f"a {a.shape}, b {b.shape}: there is nothing to multiply")
    if a.dtype.name not in INPUTS or b.dtype != a.dtype:
        raise ValueError(f"a is {a.dtype}, b {b.dtype}: both float16 or both bfloat16 expected")
    if c.dtype.name not in OUTPUTS:
        raise ValueError(f"c is {c.dtype}: float16, bfloat16 or float32 expected")
    if bias is not None:
        found = _view("bias", bias, 1)
        if found.shape != (n,) or found.dtype not in (np.dtype(np.float32), c.dtype):
            raise ValueError(f"bias is {found.dtype} {found.shape}: float32 or {c.dtype} of shape ({n},) expected")
    return Operands(
        given["a"],
        given["b"],
        given["c"],
        np.float32(0) if bias is None else bias,
        bias is not None,
        m,
        n,
        k,
        b_major,
        a.dtype.name,
        c.dtype.name,
    )


def _view(name: str, array: Any, dimensions: int) -> ArrayView:
    found = arrays.view(array)
    if found is None:
        raise TypeError(f"{name} is a {type(array).__name__}; an array is expected")
    if len(found.shape) != dimensions:
        raise ValueError(f"{name} has the shape {found.shape}: {dimensions} dimensions expected")
    if found.shape[-1] > 1 and found.strides[-1] != found.dtype.itemsize:
        raise ValueError(
            f"{name}: strides {found.strides} B; its rows must be contiguous: copy it, or give its transpose with the "
            f"other b_major"
        )
    return found

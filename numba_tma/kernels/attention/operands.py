"""What a step is bound with: queries, keys, values and outputs, seen and checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays
from ...arrays import ArrayView
from ...pitch import is_pitched
from ...tensor_map import TensorMap
from ..calls import check_extents, check_written
from .masks import UNBOUNDED, Band

INPUTS = ("float16", "bfloat16")
BOX = 64  # elements in a box's row of 128 bytes
MAX_HEAD_DIM = 256
_LOG2_E = math.log2(math.e)
# Between these, a scale's and a cap's products with log2(e) are ordinary float32 numbers, and a cap's error, 2^-22 of
# it, is small beside the scores.
_SCALES, _CAPS = (1e-30, 1e10), (1e-6, 8192.0)


def number(name: str, value: Any) -> float:
    """What is asked of a call, as a float.

    Raises:
        TypeError: it is no number; the message names it.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; a number expected") from None


@dataclass(frozen=True)
class Scores:
    """How a product of a query and a key becomes an exponent of 2.

    Without a soft cap the exponent is `factor` · x. With one, x is first replaced by tanh(x · scale / cap), for which
    kernels take a power of 2 again: `inner` is 2 log2(e) scale / cap. Both are float32, which kernels take as they are.
    """

    factor: np.float32
    inner: np.float32
    capped: bool

    @staticmethod
    def of(scale: float | None, soft_cap: float, head_dim: int) -> Scores:
        """Of a softmax over scale · x, or over cap · tanh(scale · x / cap) if the soft cap is not 0.

        A scale that is None stands for 1 / sqrt(head_dim).

        Raises:
            TypeError: a scale or a soft cap that is no number.
            ValueError: one that is not positive, or that float32 cannot work with.
        """
        scale = 1 / math.sqrt(head_dim) if scale is None else number("scale", scale)
        soft_cap = number("soft_cap", soft_cap)
        if not _SCALES[0] <= scale <= _SCALES[1]:  # a NaN as well
            raise ValueError(
                f"scale {scale}: a positive number expected, {_SCALES[0]:.0e} to {_SCALES[1]:.0e}; usually it is "
                f"1 / sqrt(head_dim)"
            )
        if soft_cap != 0 and not _CAPS[0] <= soft_cap <= _CAPS[1]:
            raise ValueError(
                f"soft_cap {soft_cap}: the bound of the scores expected, {_CAPS[0]:.0e} to {_CAPS[1]:,.0f}, or 0 for "
                f"none: one beyond that changes no score by more than the arithmetic does"
            )
        if soft_cap == 0:
            return Scores(np.float32(scale * _LOG2_E), np.float32(0), False)
        return Scores(np.float32(soft_cap * _LOG2_E), np.float32(2 * _LOG2_E * scale / soft_cap), True)


@dataclass(frozen=True)
class Operands:
    """The arrays of one attention, their extents, and what is asked of it.

    `heads` are the queries' and `kv_heads` those of keys and values, of which each serves `group` neighbouring heads.
    `o` and `lse` are None where they are still to be made.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    batch: int
    sq: int
    skv: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    band: Band
    scores: Scores

    @property
    def group(self) -> int:
        """Heads of queries that share one of keys and values."""
        return self.heads // self.kv_heads

    @property
    def diagonals(self) -> tuple[np.int32, np.int32]:
        """`low` and `high` of the band of keys that a query sees."""
        return self.band.diagonals(self.sq, self.skv)

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Tiles of `rows` queries, heads, batches."""
        return -(-self.sq // rows), self.heads, self.batch

    def maps(self, rows: int, keys: int) -> tuple[TensorMap, TensorMap, TensorMap]:
        """Tensor maps of q, k and v: boxes of `rows` or `keys` rows of one head and 64 of its columns, swizzled."""
        boxes = ((self.q, rows), (self.k, keys), (self.v, keys))
        q, k, v = (TensorMap(array, (1, n, 1, BOX), swizzle="128B", store=False) for array, n in boxes)
        return q, k, v

    def check_rows(self) -> None:
        """See that vectors of 16 bytes, cp.async's and the copy engine's, can move whole rows.

        Raises:
            ValueError: rows of q, k, v or o do not begin or end at multiples of 16 bytes.
        """
        if self.head_dim % 8:
            raise ValueError(
                f"head_dim {self.head_dim}: rows are moved in pieces of 16 bytes, 8 elements: pad q, k and v with "
                f"zeros to {-(-self.head_dim // 8) * 8} (and give `scale`), or take a step of plain Numba"
            )
        for name in ("q", "k", "v") if self.o is None else ("q", "k", "v", "o"):
            view = arrays.view(getattr(self, name))
            backwards = any(step < 0 for step, extent in zip(view.strides, view.shape, strict=True) if extent > 1)
            if not is_pitched(getattr(self, name)) or backwards or view.strides[1] >= 1 << 32:
                raise ValueError(
                    f"{name} begins at the address {view.pointer:#x}, its strides are {view.strides} B: rows must "
                    f"begin at multiples of 16 bytes, one behind the other: copy it, or take a step of plain Numba"
                )


def operands(
    given: Mapping[str, Any],
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> Operands:
    """The arrays "q" (B, Sq, Hq, D), "k" and "v" (B, Skv, Hkv, D), "o" as q and "lse" (B, Hq, Sq), checked.

    q, k, v and o are all float16 or all bfloat16, lse is float32; D is 256 at most, Hq a multiple of Hkv. o and lse may
    be None. `scale` is 1 / sqrt(D) if it is not given.

    Raises:
        TypeError: not an array, or no number.
        ValueError: dimensions, extents, types, strides, the window, the scale or the soft cap do not fit.
    """
    views = {name: _rows_of(name, given[name], 4) for name in ("q", "k", "v")}
    q, k, v = views.values()
    views |= {name: _rows_of(name, given[name], n) for name, n in (("o", 4), ("lse", 3)) if given[name] is not None}
    batch, sq, heads, head_dim = q.shape
    skv, kv_heads = k.shape[1:3]
    o, lse = views.get("o", q), views.get("lse")
    if k.shape != (batch, skv, kv_heads, head_dim) or v.shape != k.shape or o.shape != q.shape:
        raise ValueError(
            f"q {q.shape}, k {k.shape}, v {v.shape}, o {o.shape}: they must be (B, Sq, Hq, D), (B, Skv, Hkv, D), "
            f"(B, Skv, Hkv, D) and (B, Sq, Hq, D)"
        )
    if lse is not None and (lse.shape != (batch, heads, sq) or lse.dtype != np.float32):
        raise ValueError(
            f"lse is {lse.dtype} {lse.shape}: float32 of shape (B, Hq, Sq), {(batch, heads, sq)}, expected"
        )
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q {q.shape}, k {k.shape}: there is nothing to attend to; extents of 1 and more expected")
    check_extents("attention", views)
    if heads % kv_heads:
        raise ValueError(
            f"{heads} heads of queries, {kv_heads} of keys: each of these serves equally many of those (arrays are "
            f"(B, S, H, D), heads behind rows)"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim}: O's rows are kept in registers, {MAX_HEAD_DIM} elements at most")
    if q.dtype.name not in INPUTS or any(view.dtype != q.dtype for view in (k, v, o)):
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}, o {o.dtype}: all float16 or all bfloat16 expected")
    for name in ("o", "lse"):
        if name in views and views[name].readonly:
            raise ValueError(f"{name} is read-only; it is written")
    return Operands(
        *(given[name] for name in ("q", "k", "v", "o", "lse")),
        batch,
        sq,
        skv,
        heads,
        kv_heads,
        head_dim,
        q.dtype.name,
        Band.of(causal, window),
        Scores.of(scale, soft_cap, head_dim),
    )


def check_outputs(caller: str, views: Mapping[str, ArrayView], *written: str) -> None:
    """`check_written`, where an output may also be "q" itself: a tile's Q is read before its O is written.

    Raises:
        ValueError: as `check_written`.
    """
    q = views["q"]
    for name in written:
        out = views[name]
        in_place = (out.pointer, out.shape, out.strides) == (q.pointer, q.shape, q.strides)
        apart = {other: view for other, view in views.items() if not (in_place and other == "q")}
        check_written(caller, apart, name)


def view_of(name: str, array: Any, dimensions: int) -> ArrayView:
    """An array of so many dimensions, as the launcher sees it.

    Raises:
        TypeError: no array; the message names it.
        ValueError: one of other dimensions.
    """
    found = arrays.view(array)
    if found is None:
        raise TypeError(f"{name} is a {type(array).__name__}; an array is expected")
    if len(found.shape) != dimensions:
        raise ValueError(f"{name} has the shape {found.shape}: {dimensions} dimensions expected")
    return found


def _rows_of(name: str, array: Any, dimensions: int) -> ArrayView:
    """`view_of`, where the last dimension is contiguous."""
    found = view_of(name, array, dimensions)
    if found.size and found.shape[-1] > 1 and found.strides[-1] != found.dtype.itemsize:
        raise ValueError(f"{name}: strides {found.strides} B; its last dimension must be contiguous: copy it")
    return found

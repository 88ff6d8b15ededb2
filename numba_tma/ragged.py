"""Tensor maps of sequences that lie one behind the other: each copy sees one sequence, and ends where it ends.

    q_map = RaggedMap(q, box=(64, 1, 64), swizzle="128B")     # q: (rows of all sequences, heads, columns)
    x, y, z = ragged_row(start, length, row)                  # in a kernel
    cp_async_bulk_tensor_5d_shared_global(tile, q_map, 0, head, x, y, z, bar)

The engine fills with zeros, or leaves alone, what lies outside of the tensor, and an ordinary map's tensor is all of
the array: a tile at a sequence's end would reach into the next one. Here rows have three coordinates,

    address = first + x · S + y · S + z · (2**34 - S)          S: bytes from row to row

and an extent of 2**30 for x. With z = 2**30 the last term is 2**64 - 2**30 · S, which the engine's arithmetic, modulo
2**64, takes for -2**30 · S. With y = start + length and x = 2**30 - length + row the address is that of row number
start + row, and x is outside of the tensor exactly if row >= length. So one map serves all sequences, whose starts and
lengths may be known on the GPU alone. (Triton's ragged descriptors work in this way.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from numba import cuda
from numba.cuda.types import uint32

from . import arrays
from .shared import SWIZZLES
from .tensor_map import (
    FILL,
    L2_PROMOTION,
    TensorMap,
    TensorMapError,
    TensorMapSpec,
    TensorMapType,
    check_address,
    check_modes,
    check_sizes,
    checked_box,
    checked_strides,
    element_type,
)

_EDGE = 1 << 30
_ROUND = 1 << 34  # bytes; _EDGE of these are 2**64


@cuda.jit(device=True, forceinline=True)
def ragged_row(start, length, row):
    """Coordinates (x, y, z), fastest first, of row `row` of a sequence of `length` rows from row `start` on; uint32."""
    edge = uint32(_EDGE)
    return uint32(uint32(edge - uint32(length)) + uint32(row)), uint32(uint32(start) + uint32(length)), edge


class RaggedMap(TensorMap):
    """Describes rows of many sequences, and the box of one sequence's that a copy moves.

    Args:
        array: (rows, columns) or (rows, heads, columns), of all sequences; the map keeps it alive.
        box: rows, heads if there are any, and columns of one copy, at most 256 each.
        swizzle, l2_promotion, fill, dtype, overlap: as for `TensorMap`.

    Kernels give the coordinates of the columns, of the heads if there are any, and those of `ragged_row`; loads and
    stores are those of four or five dimensions.

    Raises:
        TensorMapError: a rule is broken; `.rule` tells which.
        TypeError: not an array, or an element type that the engine has not.
    """

    def __init__(
        self,
        array: object,
        box: Sequence[int],
        *,
        swizzle: str = "none",
        l2_promotion: str = "128B",
        fill: str = "zero",
        dtype: object = None,
        overlap: bool = False,
    ) -> None:
        view = arrays.view(array)
        if view is None:
            raise TypeError(f"RaggedMap of a {type(array).__name__}: expected an array, as TensorMap does")
        element = element_type(view, dtype)
        view = replace(view, dtype=element.numpy)
        if len(view.shape) not in (2, 3):
            raise TensorMapError(
                "ragged rank", f"shape {view.shape}; (rows, columns) or (rows, heads, columns) expected"
            )
        check_modes(element, swizzle, "none", l2_promotion, fill)
        check_address(view)
        check_sizes(view)
        rows = view.shape[0]
        if rows >= _EDGE:
            raise TensorMapError("ragged rows", f"{rows:,} rows; fewer than 2**30 expected: use a map for each part")
        strides = checked_strides(view, False, overlap)
        if strides[0] >= _ROUND:
            raise TensorMapError("ragged stride", f"rows are {strides[0]:,} B apart; less than 2**34 expected")
        box = checked_box(view, element, box, swizzle)

        self.array, self.view, self.element = array, view, element
        self.box = (1, 1, *box)
        self.element_strides = (1,) * len(self.box)
        self.swizzle = swizzle
        self.spec = TensorMapSpec(
            dtype=element.tensor_map_code,
            sizes=(*view.shape[:0:-1], _EDGE, rows + 1, _EDGE + 1),
            strides=(*strides[-2:0:-1], strides[0], strides[0], _ROUND - strides[0]),
            box=self.box[::-1],
            element_strides=self.element_strides,
            interleave=0,
            swizzle=SWIZZLES[swizzle].code,
            l2_promotion=L2_PROMOTION[l2_promotion],
            fill=FILL[fill],
        )
        self._check_tile()
        self.numba_type = TensorMapType(element, self.box, self.element_strides, swizzle)
        self.token = id(self.numba_type)
        self._encoded = None

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.view.shape))
        return f"RaggedMap({self.element} {shape}, box={self.box[2:]}, swizzle={self.swizzle!r})"

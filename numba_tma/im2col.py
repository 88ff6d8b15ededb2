"""Tensor maps of im2col mode: the pixels that a tap of a convolution's filter sees, gathered by the copy engine.

    x_map = Im2colMap(x, smem.tile, lower=(-1, -1), upper=(-1, -1))        # 3 × 3 filter, padding 1

x is a tensor of images, channels last: (images, height, width, channels), or with no height or with a depth in front of
it. A tile has a row for each of its pixels, of some of the channels. A copy walks over the outputs of the convolution,
image by image and row by row, and takes for each the input pixel under one tap of the filter; pixels outside the image
arrive as zeros. The tap is an offset of the copy, so that one map serves all of them.
Sources: CUDA driver API, "Tensor Map Object Management" (cuTensorMapEncodeIm2col); PTX ISA, "Im2col mode".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import arrays
from .shared import SWIZZLES, Tiles
from .sim.descriptor import CORNER_LIMITS, MAX_PIXELS, OFFSET_LIMITS
from .tensor_map import (
    FILL,
    L2_PROMOTION,
    MAX_BOX,
    TensorMap,
    TensorMapError,
    TensorMapSpec,
    TensorMapType,
    check_address,
    check_modes,
    check_sizes,
    checked_element_strides,
    checked_strides,
    element_type,
    integers,
)

_GRANULE = 16


def corners(
    filter: Sequence[int], padding: Sequence[int], dilation: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The corners `lower` and `upper` of a convolution, slowest dimension first.

    Args:
        filter: extents of the filter in (depth, height,) width.
        padding: zeros on either side of the image in each of them.
        dilation: distance of the filter's taps; 1 by default.

    Raises:
        TensorMapError: not one to three integers each, taps or distances below 1, padding below 0, or a filter that
            reaches further than a copy's offsets do: 65535 pixels in one dimension, 255 in two, 31 in three.
    """
    filter, padding = integers("im2col filter", filter), integers("im2col padding", padding)
    dilation = (1,) * len(filter) if dilation is None else integers("im2col dilation", dilation)
    if not 1 <= len(filter) <= 3 or not len(filter) == len(padding) == len(dilation):
        raise TensorMapError(
            "im2col filter",
            f"filter {filter}, padding {padding}, dilation {dilation}; one to three numbers each, as many in all",
        )
    if min(filter) < 1 or min(dilation) < 1 or min(padding) < 0:
        raise TensorMapError(
            "im2col filter",
            f"filter {filter}, padding {padding}, dilation {dilation}; a filter has 1 or more taps, 1 or more "
            f"apart, and padding is 0 or more: an image is cropped by indexing it",
        )
    reach = [(taps - 1) * step for taps, step in zip(filter, dilation, strict=True)]
    if max(reach) > OFFSET_LIMITS[len(filter) + 2]:
        raise TensorMapError(
            "im2col offsets",
            f"the last tap is {max(reach)} pixels from the first; the offsets of a copy end at "
            f"{OFFSET_LIMITS[len(filter) + 2]} with {len(filter) + 2} dimensions: take a smaller filter or dilation",
        )
    return tuple(-p for p in padding), tuple(p - r for p, r in zip(padding, reach, strict=True))


class Im2colMap(TensorMap):
    """Describes a tensor of images and the pixels that one copy in im2col mode moves into shared memory.

    Args:
        array: (images, (depth, (height,)) width, channels), as for `TensorMap`; the map keeps it alive.
        tile: (pixels, channels) of one copy, at most 1024 and 256; or the `Tiles` of a shared-memory plan, whose shape
            and swizzle it then has.
        lower, upper: corners of the bounding box, for (depth, (height,)) width: the walk over the pixels goes from
            `lower` to the last pixel plus `upper`, both inclusive. `corners` computes them.
        strides: step of the walk in each of these dimensions, 1 to 8: the convolution's stride.
        swizzle, l2_promotion, fill, dtype: as for `TensorMap`.

    The coordinates of a copy are those of its first pixel, lower corner + output position · stride, and the offsets the
    tap's position · dilation. Machine code keeps 16 bits of an offset with one spatial dimension, 8 of each with two
    and 5 with three, and drops the others without a word.

    Raises:
        TensorMapError: a rule is broken; `.rule` tells which.
        TypeError: not an array, or an element type that the engine has not.
    """

    def __init__(
        self,
        array: object,
        tile: Sequence[int] | Tiles,
        *,
        lower: Sequence[int],
        upper: Sequence[int],
        strides: Sequence[int] | None = None,
        swizzle: str | None = None,
        l2_promotion: str = "128B",
        fill: str = "zero",
        dtype: object = None,
    ) -> None:
        view = arrays.view(array)
        if view is None:
            raise TypeError(f"Im2colMap of a {type(array).__name__}: expected an array, as TensorMap does")
        element = element_type(view, dtype)
        view = replace(view, dtype=element.numpy)
        if isinstance(tile, Tiles):
            if tile.dtype.numpy != element.numpy:
                raise TensorMapError("element type", f"{tile!r} cannot hold {element} elements; give both one type")
            if swizzle not in (None, tile.swizzle):
                raise TensorMapError("swizzle", f"{swizzle!r} for {tile!r}; leave it out, the tiles have one")
            tile, swizzle = tile.shape, tile.swizzle
        swizzle = "none" if swizzle is None else swizzle
        rank = len(view.shape)
        if rank not in CORNER_LIMITS:
            raise TensorMapError(
                "im2col rank",
                f"{rank} dimensions; images are described by 3 to 5, (images, (depth, (height,)) width, channels)",
            )
        check_modes(element, swizzle, "none", l2_promotion, fill)
        check_address(view)
        check_sizes(view)
        byte_strides = checked_strides(view, False, False)
        pixels, channels = _checked_tile(tile, element.size, str(element), swizzle)
        lower, upper = _checked_corners(view.shape, lower, upper)
        steps = (1,) * (rank - 2) if strides is None else integers("im2col strides", strides)
        if len(steps) != rank - 2:
            raise TensorMapError("im2col strides", f"{steps} has {len(steps)} entries; {rank - 2} expected")
        steps = checked_element_strides((1, *steps, 1), rank)

        self.array, self.view, self.element = array, view, element
        self.box = (pixels, channels)
        self.element_strides = steps
        self.swizzle = swizzle
        self.spec = TensorMapSpec(
            dtype=element.tensor_map_code,
            sizes=view.shape[::-1],
            strides=byte_strides[-2::-1],
            box=(channels, pixels),
            element_strides=steps[::-1],
            interleave=0,
            swizzle=SWIZZLES[swizzle].code,
            l2_promotion=L2_PROMOTION[l2_promotion],
            fill=FILL[fill],
            lower=lower[::-1],
            upper=upper[::-1],
        )
        self._check_tile()
        self.numba_type = TensorMapType(element, self.box, steps, swizzle, im2col=True)
        self.token = id(self.numba_type)
        self._encoded = None

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """What one copy moves: (pixels, channels)."""
        return self.box

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.view.shape))
        low, high = self.spec.lower[::-1], self.spec.upper[::-1]
        return (
            f"Im2colMap({self.element} {shape}, tile={self.box}, lower={low}, upper={high}, {self.box_bytes} B a copy)"
        )


def _checked_tile(tile: object, size: int, element: str, swizzle: str) -> tuple[int, int]:
    extents = integers("im2col tile", tile)
    if len(extents) != 2:
        raise TensorMapError("im2col tile", f"{extents}; expected (pixels, channels)")
    pixels, channels = extents
    if not 1 <= pixels <= MAX_PIXELS:
        raise TensorMapError("im2col pixels", f"{pixels} a copy; there are 1 to {MAX_PIXELS}: make several copies")
    if not 1 <= channels <= MAX_BOX:
        raise TensorMapError("im2col channels", f"{channels} a copy; there are 1 to {MAX_BOX}: make several copies")
    row, span = channels * size, SWIZZLES[swizzle].span
    if row % _GRANULE:
        raise TensorMapError(
            "im2col channel bytes",
            f"{channels} × {element} = {row} B are not a multiple of {_GRANULE} B; take a multiple of "
            f"{_GRANULE // size} channels",
        )
    if span and row > span:
        raise TensorMapError(
            "im2col channels and swizzle",
            f"{channels} × {element} = {row} B do not fit the span of the {swizzle} swizzle; take at most "
            f"{span // size} channels",
        )
    return pixels, channels


def _checked_corners(shape: tuple[int, ...], lower: object, upper: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    lower, upper = integers("im2col corners", lower), integers("im2col corners", upper)
    rank = len(shape)
    if not len(lower) == len(upper) == rank - 2:
        raise TensorMapError(
            "im2col corners", f"lower {lower} and upper {upper}; {rank - 2} numbers each for {rank} dimensions"
        )
    low, high = CORNER_LIMITS[rank]
    for axis, (first, last, extent) in enumerate(zip(lower, upper, shape[1:-1], strict=True), start=1):
        if not (low <= first <= high and low <= last <= high):
            raise TensorMapError(
                "im2col corners",
                f"{first} and {last} in dimension {axis}; with {rank} dimensions each is {low} to {high}",
            )
        if extent - 1 + last < first:
            raise TensorMapError(
                "im2col bounding box",
                f"from {first} to {extent - 1 + last} in dimension {axis}: it is empty, the filter is larger than the "
                f"padded image",
            )
    return lower, upper

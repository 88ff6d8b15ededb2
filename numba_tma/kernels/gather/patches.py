"""The input of a convolution, gathered: for every output pixel, the pixels that its filter sees, side by side.

The problem. x holds N images of H × W pixels of C channels, channels last. With a filter of R × S taps, padding, stride
and dilation, the P × Q output pixels of each image have a row each:

    out[(n, p, q), (r, s, c)] = x[n, p · stride + r · dilation - padding, q · stride + s · dilation - padding, c]

and zeros where that lies outside the image. A matrix product of it with the filters is the convolution ("im2col").

What moves the data: an element a thread, with all its divisions and guards (plain), 16 bytes a thread (vector), the
copy engine with boxes of 4-D and 5-D tensor maps (window), and in its im2col mode (im2col), which walks over the pixels
of a row and on to the next row and image. The engine fills what lies outside with zeros: no guard is in the code.

Costs: x is read once, if the L2 cache keeps it for R · S uses, and R · S times as much is written. Nothing is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import int32, uint32, uint64

from ... import arrays, dtypes, ptx
from ...im2col import Im2colMap, corners
from ...launch import Kernel, kernel
from ...pipeline import mbarrier_wait
from ...shared import Barriers, Shared, Tiles
from ...tensor_map import TensorMap, TensorMapError
from ..calls import MAX_EXTENT, check_extents, check_written, in_vectors, viewed
from ..peers import as_torch
from ..problem import Case, Problem, Variant, check_options

L2_PROMOTION = "128B"  # as wide as a tile's channels: what is fetched beside them is another tile's
PIXELS = 64  # of a tile of the im2col mode
MAX_STAGES = 9  # taps under way in a block, a thread for each


@dataclass(frozen=True)
class Convolution:
    """Extents of a convolution: two numbers each, of height and width.

    Raises:
        ValueError: they are no two integers of 1 or more, or of 0 or more for the padding.
    """

    filter: tuple[int, int] = (3, 3)
    padding: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        for name, least in (("filter", 1), ("padding", 0), ("stride", 1), ("dilation", 1)):
            pair = getattr(self, name)
            if not (
                isinstance(pair, (tuple, list))
                and len(pair) == 2
                and all(isinstance(n, (int, np.integer)) and n >= least for n in pair)
            ):
                raise ValueError(
                    f"convolution: {name} {pair!r}; two integers of {least} or more expected, of height and width"
                )
            object.__setattr__(self, name, tuple(map(int, pair)))  # kernels are kept by what can be hashed

    @property
    def taps(self) -> int:
        """Positions of the filter."""
        return self.filter[0] * self.filter[1]

    def outputs(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output.

        Raises:
            ValueError: the filter does not fit into the padded image.
        """
        found = []
        for axis, extent in enumerate((height, width)):
            reach = (self.filter[axis] - 1) * self.dilation[axis] + 1
            room = extent + 2 * self.padding[axis] - reach
            if room < 0:
                raise ValueError(
                    f"a filter that reaches over {reach} pixels and an image of {extent} with a padding of "
                    f"{self.padding[axis]}: it must fit in"
                )
            found.append(room // self.stride[axis] + 1)
        return found[0], found[1]


PARTS = tuple(part.name for part in fields(Convolution))


@functools.cache
def make_plain(convolution: Convolution, threads: int = 256) -> Kernel:
    """A row of out a block, an element a thread and step; where it comes from takes four divisions."""
    taps_h, taps_w = convolution.filter
    pad_h, pad_w = convolution.padding
    step_h, step_w = convolution.stride
    dilation_h, dilation_w = convolution.dilation

    @kernel(threads=threads)
    def patches_plain(x, out, p_count, q_count):
        channels = uint32(x.shape[3])
        pixel = uint32(cuda.blockIdx.x)
        n = uint32(pixel // uint32(p_count * q_count))
        rest = uint32(pixel - uint32(n * uint32(p_count * q_count)))
        p, q = uint32(rest // uint32(q_count)), uint32(rest % uint32(q_count))
        for column in range(cuda.threadIdx.x, taps_h * taps_w * channels, threads):
            tap = uint32(uint32(column) // channels)
            c = uint32(uint32(column) - uint32(tap * channels))
            h = int32(p) * step_h + int32(tap // uint32(taps_w)) * dilation_h - pad_h
            w = int32(q) * step_w + int32(tap % uint32(taps_w)) * dilation_w - pad_w
            if h >= 0 and h < x.shape[1] and w >= 0 and w < x.shape[2]:
                out[pixel, column] = x[n, h, w, c]
            else:
                out[pixel, column] = 0

    return patches_plain


@functools.cache
def make_vector(convolution: Convolution, threads: int = 256) -> Kernel:
    """16 bytes of channels a thread, a row of out a block; x and out as bytes."""
    taps_h, taps_w = convolution.filter
    pad_h, pad_w = convolution.padding
    step_h, step_w = convolution.stride
    dilation_h, dilation_w = convolution.dilation

    @kernel(threads=threads)
    def patches_vector(x, out, p_count, q_count):
        vectors = uint32(uint32(x.shape[3]) // uint32(16))
        pixel = uint32(cuda.blockIdx.x)
        n = uint32(pixel // uint32(p_count * q_count))
        rest = uint32(pixel - uint32(n * uint32(p_count * q_count)))
        p, q = uint32(rest // uint32(q_count)), uint32(rest % uint32(q_count))
        target = ptx.global_address(out) + uint64(pixel) * uint64(out.strides[0])
        for i in range(uint32(cuda.threadIdx.x), uint32(taps_h * taps_w) * vectors, uint32(threads)):
            tap = uint32(uint32(i) // vectors)
            vector = uint32(uint32(i) - uint32(tap * vectors))
            h = int32(p) * int32(step_h) + int32(tap // uint32(taps_w)) * int32(dilation_h) - int32(pad_h)
            w = int32(q) * int32(step_w) + int32(tap % uint32(taps_w)) * int32(dilation_w) - int32(pad_w)
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if h >= 0 and h < x.shape[1] and w >= 0 and w < x.shape[2]:
                source = ptx.global_address(x) + uint64(n) * uint64(x.strides[0])
                source += uint64(h) * uint64(x.strides[1]) + uint64(w) * uint64(x.strides[2])
                a, b, c, d = ptx.ld_global_nc_v4_u32(source + uint64(vector) * uint64(16))
            ptx.st_global_v4_u32(target + uint64(i) * uint64(16), a, b, c, d)

    return patches_vector


def _stages(convolution: Convolution) -> int:
    return min(convolution.taps, MAX_STAGES)


@functools.cache
def make_window(convolution: Convolution, tile: tuple[int, int, int], dtype: str) -> Kernel:
    """A window of (height, width, channels) outputs a block, by boxes of x and of out; a thread for each tap.

    The window hangs over the image where the padding is, and over out at its end: the engine fills the one with zeros
    and cuts the other.
    """
    taps, taps_w, stages = convolution.taps, convolution.filter[1], _stages(convolution)
    pad_h, pad_w = convolution.padding
    step_h, step_w = convolution.stride
    dilation_h, dilation_w = convolution.dilation
    high, wide, channels = tile
    smem = Shared(part=Tiles(stages, tile, dtype), full=Barriers(stages))

    @kernel(threads=32, shared=smem)
    def patches_window(x_map, out_map, p_tiles, q_tiles):
        thread = uint32(cuda.threadIdx.x)
        if thread < stages:
            n = uint32(cuda.blockIdx.x) // uint32(p_tiles * q_tiles)
            rest = uint32(uint32(cuda.blockIdx.x) - n * uint32(p_tiles * q_tiles))
            p, q = int32(rest // uint32(q_tiles) * uint32(high)), int32(rest % uint32(q_tiles) * uint32(wide))
            c = int32(uint32(cuda.blockIdx.y) * uint32(channels))
            part, bar = smem.part[thread], smem.full[thread]
            ptx.mbarrier_init(bar, 1)
            ptx.fence_mbarrier_init()
            phase = uint32(0)
            for tap in range(thread, taps, stages):
                h = p * int32(step_h) + int32(tap // taps_w) * int32(dilation_h) - int32(pad_h)
                w = q * int32(step_w) + int32(tap % taps_w) * int32(dilation_w) - int32(pad_w)
                ptx.mbarrier_arrive_expect_tx(bar, x_map.box_bytes)
                ptx.cp_async_bulk_tensor_4d_shared_global(part, x_map, c, w, h, int32(n), bar)
                mbarrier_wait(bar, phase)
                phase ^= uint32(1)
                ptx.cp_async_bulk_tensor_5d_global_shared(out_map, c, int32(tap), q, p, int32(n), part)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)  # the part may be filled again, and the block end

    return patches_window


@functools.cache
def make_im2col(convolution: Convolution, tile: tuple[int, int], dtype: str) -> Kernel:
    """`tile` (pixels, channels) a block, wherever these pixels are: the engine walks; a thread for each tap."""
    taps, taps_w, stages = convolution.taps, convolution.filter[1], _stages(convolution)
    pad_h, pad_w = convolution.padding
    step_h, step_w = convolution.stride
    dilation_h, dilation_w = convolution.dilation
    pixels, channels = tile
    smem = Shared(part=Tiles(stages, tile, dtype), full=Barriers(stages))

    @kernel(threads=32, shared=smem)
    def patches_im2col(x_map, out_map, p_count, q_count):
        thread = uint32(cuda.threadIdx.x)
        if thread < stages:
            pixel = uint32(uint32(cuda.blockIdx.x) * uint32(pixels))
            n = pixel // uint32(p_count * q_count)
            rest = uint32(pixel - n * uint32(p_count * q_count))
            # Where the walk begins: the input pixel under the filter's first tap.
            h = int32(rest // uint32(q_count)) * int32(step_h) - int32(pad_h)
            w = int32(rest % uint32(q_count)) * int32(step_w) - int32(pad_w)
            c = int32(uint32(cuda.blockIdx.y) * uint32(channels))
            part, bar = smem.part[thread], smem.full[thread]
            ptx.mbarrier_init(bar, 1)
            ptx.fence_mbarrier_init()
            phase = uint32(0)
            for tap in range(thread, taps, stages):
                down, right = uint32(tap // taps_w * dilation_h), uint32(tap % taps_w * dilation_w)
                ptx.mbarrier_arrive_expect_tx(bar, x_map.box_bytes)
                ptx.cp_async_bulk_tensor_4d_shared_global_im2col(part, x_map, c, w, h, int32(n), bar, right, down)
                mbarrier_wait(bar, phase)
                phase ^= uint32(1)
                ptx.cp_async_bulk_tensor_3d_global_shared(out_map, c, int32(tap), int32(pixel), part)
                ptx.cp_async_bulk_commit_group()
                ptx.cp_async_bulk_wait_group_read(0)

    return patches_im2col


# ---------------------------------------------------------------------------------------------------------------------
# Host side.


@dataclass(frozen=True)
class _Shapes:
    """What a launch derives from the arrays."""

    images: int
    outputs: tuple[int, int]
    channels: int
    itemsize: int
    dtype: str

    @property
    def pixels(self) -> int:
        return self.images * self.outputs[0] * self.outputs[1]

    def channel_tile(self, wanted: int | None) -> int:
        granule = max(1, 16 // self.itemsize)
        return wanted or min(-(-self.channels // granule) * granule, max(granule, 128 // self.itemsize))


def _shapes(given: Mapping[str, Any], convolution: Convolution) -> _Shapes:
    x = arrays.view(given["x"])
    images, height, width, channels = x.shape
    outputs = convolution.outputs(height, width)
    return _Shapes(images, outputs, channels, x.dtype.itemsize, x.dtype.name)


def _given_by_parts(bind: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
    """`bind`, with the convolution's parts as options of their own."""

    def bind_parts(given: Mapping[str, Any], **options: Any) -> Callable[[], Any]:
        parts = {name: options.pop(name) for name in PARTS if name in options}
        return bind(given, convolution=Convolution(**parts), **options)

    return bind_parts


def _numbers(s: _Shapes) -> tuple[np.int32, np.int32]:
    return np.int32(s.outputs[0]), np.int32(s.outputs[1])


def _bind_plain(
    given: Mapping[str, Any],
    *,
    convolution: Convolution,
    threads: int = 256,
    stream: object = None,
) -> Callable[[], Any]:
    s = _shapes(given, convolution)
    launcher = make_plain(convolution, threads)[s.pixels, None, stream]
    return launcher.bind(given["x"], given["out"], *_numbers(s))


def _bind_vector(
    given: Mapping[str, Any],
    *,
    convolution: Convolution,
    threads: int = 128,
    stream: object = None,
) -> Callable[[], Any]:
    s = _shapes(given, convolution)
    _need_vectors(given)
    as_bytes = []
    for name in ("x", "out"):
        v = arrays.view(given[name])
        shape = (*v.shape[:-1], v.shape[-1] * v.dtype.itemsize)
        as_bytes.append(arrays.reinterpret(given[name], np.uint8, shape, (*v.strides[:-1], 1)))
    return make_vector(convolution, threads)[s.pixels, None, stream].bind(*as_bytes, *_numbers(s))


def _need_vectors(given: Mapping[str, Any]) -> None:
    for name in ("x", "out"):
        v = arrays.view(given[name])
        if not in_vectors(v):
            raise ValueError(
                f"patches.vector: {name} has {v.shape[-1] * v.dtype.itemsize} B in its last dimension and strides "
                f"{v.strides} B; all must be multiples of 16 B: pad the channels, or take variant 'plain'"
            )


def _rows_of(out: Any) -> arrays.ArrayView:
    """The view of out, whose rows are to be seen as taps of channels.

    Raises:
        ValueError: they are not contiguous.
    """
    v = arrays.view(out)
    if v.strides[1] != v.dtype.itemsize and v.shape[1] > 1:
        raise ValueError(
            f"patches: out has strides {v.strides} B; the copy engine takes contiguous rows: copy it, or take variant "
            f"'plain'"
        )
    return v


def _bind_window(
    given: Mapping[str, Any],
    *,
    convolution: Convolution,
    tile: tuple[int, int] = (8, 8),
    channels: int | None = None,
    stream: object = None,
) -> Callable[[], Any]:
    s = _shapes(given, convolution)
    high, wide, channels = *tile, s.channel_tile(channels)
    steps = convolution.stride
    x_map = TensorMap(
        given["x"],
        (1, high * steps[0], wide * steps[1], channels),
        element_strides=(1, *steps, 1),
        l2_promotion=L2_PROMOTION,
        store=False,
    )
    out = _rows_of(given["out"])
    p, q = s.outputs
    shape = (s.images, p, q, convolution.taps, s.channels)
    row, tap = out.strides[0], s.channels * s.itemsize
    strides = (p * q * row, q * row, row, tap, s.itemsize)
    out_map = TensorMap(arrays.reinterpret(given["out"], out.dtype, shape, strides), (1, high, wide, 1, channels))
    tiles = (-(-p // high), -(-q // wide))
    kernel = make_window(convolution, (high, wide, channels), s.dtype)
    grid = (s.images * tiles[0] * tiles[1], -(-s.channels // channels))
    return kernel[grid, None, stream].bind(x_map, out_map, np.int32(tiles[0]), np.int32(tiles[1]))


def _bind_im2col(
    given: Mapping[str, Any],
    *,
    convolution: Convolution,
    pixels: int = PIXELS,
    channels: int | None = None,
    stream: object = None,
) -> Callable[[], Any]:
    s = _shapes(given, convolution)
    channels = s.channel_tile(channels)
    x_map, out_map = _im2col_maps(given, s, convolution, (pixels, channels))
    kernel = make_im2col(convolution, (pixels, channels), s.dtype)
    grid = (-(-s.pixels // pixels), -(-s.channels // channels))
    return kernel[grid, None, stream].bind(x_map, out_map, *_numbers(s))


def _im2col_maps(
    given: Mapping[str, Any], s: _Shapes, convolution: Convolution, tile: tuple[int, int]
) -> tuple[Im2colMap, TensorMap]:
    """Of x and of out, in tiles of (pixels, channels)."""
    lower, upper = corners(convolution.filter, convolution.padding, convolution.dilation)
    x_map = Im2colMap(
        given["x"],
        tile,
        lower=lower,
        upper=upper,
        strides=convolution.stride,
        l2_promotion=L2_PROMOTION,
    )
    out = _rows_of(given["out"])
    shape = (s.pixels, convolution.taps, s.channels)
    strides = (out.strides[0], s.channels * s.itemsize, s.itemsize)
    pixels, channels = tile
    return x_map, TensorMap(arrays.reinterpret(given["out"], out.dtype, shape, strides), (pixels, 1, channels))


def _choose(given: Mapping[str, Any], convolution: Convolution) -> str:
    """The variant for these arrays."""
    if not all(in_vectors(arrays.view(given[name])) for name in ("x", "out")):
        return "plain"
    s = _shapes(given, convolution)
    try:
        _im2col_maps(given, s, convolution, (PIXELS, s.channel_tile(None)))
    except (TensorMapError, TypeError):  # a stride above 8, a filter that reaches far, an unknown type, …
        return "vector"
    return "im2col"


OPTIONS = {
    "plain": ("threads",),
    "vector": ("threads",),
    "window": ("tile", "channels"),
    "im2col": ("pixels", "channels"),
}


def patches(
    x: Any, out: Any, *, convolution: Convolution | None = None, variant: str | None = None, **options: Any
) -> None:
    """Gather the input pixels of each output pixel of a convolution.

    Args:
        x: (images, height, width, channels), of any strides. `window` and `im2col` take the types that the copy engine
            has.
        out: (images · P · Q, taps · channels) of x's dtype, written; P and Q are `convolution.outputs(height, width)`.
        convolution: filter, padding, stride and dilation; by default 3 × 3 with a padding of 1.
        variant: plain, vector, window or im2col. All but `plain` need channels of multiples of 16 bytes. By default
            im2col, where the arrays and the convolution allow it; else vector, or plain.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes or layouts do not fit, an extent is 2^31 or more, or x and out share memory; the
            message says what would do.
    """
    convolution = convolution or Convolution()
    views = viewed("patches", x=x, out=out)
    images, rows = views["x"], views["out"]
    if len(images.shape) != 4:
        raise ValueError(f"patches: x has the shape {images.shape}; (images, height, width, channels) expected")
    p, q = convolution.outputs(*images.shape[1:3])
    shape = (images.shape[0] * p * q, convolution.taps * images.shape[3])
    if rows.shape != shape or rows.dtype != images.dtype:
        raise ValueError(f"patches: out is {rows.dtype} {rows.shape}; {images.dtype} {shape} expected")
    check_extents("patches", views)
    padded = [n + 2 * padding for n, padding in zip(images.shape[1:3], convolution.padding, strict=True)]
    if max(padded) > MAX_EXTENT:
        raise ValueError(f"patches: images of {padded} with their padding; extents end at {MAX_EXTENT:,}")
    check_written("patches", views, "out")
    given = {"x": x, "out": out}
    variant = variant or (_choose(given, convolution) if rows.size else "im2col")
    chosen = PROBLEM.variant(variant)
    check_options("patches", chosen, options, OPTIONS[variant])
    if rows.size:
        chosen.bind(given, **asdict(convolution), **options)()


def reference(x: np.ndarray, convolution: Convolution) -> np.ndarray:
    """What `out` should hold."""
    n, height, width, channels = x.shape
    p, q = convolution.outputs(height, width)
    (pad_h, pad_w), (step_h, step_w) = convolution.padding, convolution.stride
    padded = np.zeros((n, height + 2 * pad_h, width + 2 * pad_w, channels), x.dtype)
    padded[:, pad_h : pad_h + height, pad_w : pad_w + width] = x
    taps = []
    for r in range(convolution.filter[0]):
        for s in range(convolution.filter[1]):
            h, w = r * convolution.dilation[0], s * convolution.dilation[1]
            taps.append(padded[:, h : h + p * step_h : step_h, w : w + q * step_w : step_w][:, :p, :q])
    return np.stack(taps, axis=3).reshape(n * p * q, convolution.taps * channels)


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    dtype = dtypes.lookup(case.dtype).numpy
    x = rng.integers(-100, 100, case.shape).astype(dtype)
    convolution = Convolution(**case.options)
    p, q = convolution.outputs(*case.shape[1:3])
    out = np.empty((case.shape[0] * p * q, convolution.taps * case.shape[3]), dtype)
    return {"x": x, "out": out}


def _bytes(case: Case) -> int:
    convolution = Convolution(**case.options)
    p, q = convolution.outputs(*case.shape[1:3])
    written = case.shape[0] * p * q * convolution.taps * case.shape[3]
    return (int(np.prod(case.shape)) + written) * dtypes.lookup(case.dtype).numpy.itemsize


def _torch(given: Mapping[str, Any], *, convolution: Convolution) -> Callable[[], Any] | None:
    """A copy of a view with overlapping strides of the padded images, padded anew each time as a convolution would."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    x, out = as_torch(given["x"]), as_torch(given["out"])
    n, height, width, channels = x.shape
    p, q = convolution.outputs(height, width)
    (pad_h, pad_w), (step_h, step_w) = convolution.padding, convolution.stride
    target = out.view(n, p, q, *convolution.filter, channels)

    def run() -> Any:
        padded = torch.nn.functional.pad(x, (0, 0, pad_w, pad_w, pad_h, pad_h))
        a, b, c, d = padded.stride()
        moved = (b * convolution.dilation[0], c * convolution.dilation[1])
        view = padded.as_strided(target.shape, (a, b * step_h, c * step_w, *moved, d))
        return target.copy_(view)

    return run


def _case(shape: tuple[int, int, int, int], dtype: str = "float16", **convolution: tuple[int, int]) -> Case:
    return Case(shape, dtype, convolution)


PROBLEM = Problem(
    name="patches",
    title="gather the input of a convolution: im2col",
    inputs=_inputs,
    outputs=("out",),
    reference=lambda given, case: {"out": reference(given["x"], Convolution(**case.options))},
    bytes_moved=_bytes,
    flops=lambda case: 0,
    variants=(
        Variant(
            "plain", "ld/st", "an element a thread, divisions and guards", _given_by_parts(_bind_plain), baseline=True
        ),
        Variant("vector", "ld/st", "16 bytes of channels a thread", _given_by_parts(_bind_vector)),
        Variant("window", "TMA", "boxes of 4-D and 5-D maps; the engine pads and cuts", _given_by_parts(_bind_window)),
        Variant("im2col", "TMA", "the engine walks over pixels, rows and images", _given_by_parts(_bind_im2col)),
    ),
    cases={
        ("default", "sim"): [_case((2, 14, 14, 64)), _case((2, 11, 13, 24), stride=(2, 2), padding=(0, 2))],
        ("quick", "sim"): [_case((2, 7, 6, 16)), _case((2, 8, 9, 8), stride=(2, 1), dilation=(1, 2), padding=(0, 2))],
        ("default", "gpu"): [
            _case((16, 56, 56, 256)),
            _case((128, 7, 7, 512)),
        ],
        ("quick", "gpu"): [_case((2, 14, 14, 64)), _case((3, 11, 13, 24), stride=(2, 2), padding=(0, 2))],
    },
    peers={"torch": _given_by_parts(_torch)},
)

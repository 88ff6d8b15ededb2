"""How each step is launched: what binds it takes the arrays "a", "b", "c" and perhaps "bias", and gives a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ... import arrays, driver
from ...launch import Kernel
from . import persistent, warp_mma
from .choice import Configuration, multiprocessors
from .matmul import plan
from .operands import operands
from .warpgroup import TILE_ROWS

Bind = Callable[..., Callable[[], Any]]


def bind_plain(make: Callable[..., Kernel], rows: int, columns: int) -> Bind:
    """Bind a kernel of (a, b, c, bias), of any types, whose blocks each compute `rows` x `columns` of C."""

    def bind(
        given: Mapping[str, Any], *, b_major: str = "k", activation: str = "none", stream: object = None
    ) -> Callable[[], Any]:
        o = operands(given, b_major, activation)
        kernel = make(b_major, activation, o.has_bias)
        return kernel[o.grid(rows, columns), None, stream].bind(o.a, o.b, o.c, o.bias)

    return bind


def bind_mma_cp_async(
    given: Mapping[str, Any],
    *,
    b_major: str = "k",
    activation: str = "none",
    stream: object = None,
    tile: tuple[int, int] = (128, 256),
    stages: int = 3,
) -> Callable[[], Any]:
    """Bind step 3; how it copies follows from extents and strides."""
    o = operands(given, b_major, activation)
    copies = warp_mma.copies_for(o)
    kernel = warp_mma.make_mma_cp_async(o.dtype, o.out_dtype, b_major, activation, o.has_bias, tile, stages, copies)
    return kernel[o.grid(*tile), None, stream].bind(o.a, o.b, o.c, o.bias)


def bind_mma_tma(
    given: Mapping[str, Any],
    *,
    b_major: str = "k",
    activation: str = "none",
    stream: object = None,
    tile: tuple[int, int] = (128, 256),
    stages: int = 4,
) -> Callable[[], Any]:
    """Bind step 4."""
    o = operands(given, b_major, activation)
    kernel = warp_mma.make_mma_tma(o.dtype, o.out_dtype, b_major, activation, o.has_bias, tile, stages)
    return kernel[o.grid(*tile), None, stream].bind(*o.maps(*tile), o.c, o.bias, o.k_blocks)


def bind_warpgroups(make: Callable[..., Kernel], columns: int, stages: int) -> Bind:
    """Bind one of steps 5 to 7, a tile of 128 x `columns` a block; `columns` and `stages` are its defaults."""
    default_columns, default_stages = columns, stages

    def bind(
        given: Mapping[str, Any],
        *,
        b_major: str = "k",
        activation: str = "none",
        stream: object = None,
        columns: int = default_columns,
        stages: int = default_stages,
    ) -> Callable[[], Any]:
        o = operands(given, b_major, activation)
        kernel = make(o.dtype, o.out_dtype, b_major, activation, o.has_bias, columns, stages)
        grid, maps = o.grid(TILE_ROWS, columns), o.maps(TILE_ROWS, columns)
        return kernel[grid, None, stream].bind(*maps, o.c, o.bias, o.k_blocks)

    return bind


def bind_persistent(
    given: Mapping[str, Any],
    *,
    b_major: str = "k",
    activation: str = "none",
    stream: object = None,
    columns: int = 256,
    stages: int = 4,
    band: int = 16,
) -> Callable[[], Any]:
    """Bind step 8: a block for each SM, or for each tile if there are fewer."""
    o = operands(given, b_major, activation)
    kernel = persistent.make_persistent(o.dtype, o.out_dtype, b_major, activation, o.has_bias, columns, stages, band)
    tiles_m, tiles_n = o.grid(TILE_ROWS, columns)
    blocks, counts = min(tiles_m * tiles_n, multiprocessors()), (np.uint32(tiles_m), np.uint32(tiles_n))
    return kernel[blocks, None, stream].bind(*o.maps(TILE_ROWS, columns), o.c, o.bias, *counts, o.k_blocks)


def bind_multicast(
    given: Mapping[str, Any],
    *,
    b_major: str = "k",
    activation: str = "none",
    stream: object = None,
    columns: int = 256,
    stages: int = 4,
    band: int = 8,
    cluster: int = 2,
) -> Callable[[], Any]:
    """Bind step 9: as many clusters as the SMs have room for, each with tiles of 128 · `cluster` x `columns`."""
    o = operands(given, b_major, activation)
    kernel = persistent.make_multicast(
        o.dtype, o.out_dtype, b_major, activation, o.has_bias, columns, stages, band, cluster
    )
    tiles_m, tiles_n = o.grid(TILE_ROWS * cluster, columns)
    blocks, counts = _in_clusters(tiles_m * tiles_n, cluster), (np.uint32(tiles_m), np.uint32(tiles_n))
    maps = o.maps(TILE_ROWS, columns // cluster)
    return kernel[blocks, None, stream].bind(*maps, o.c, o.bias, *counts, o.k_blocks)


def bind_store(
    given: Mapping[str, Any],
    *,
    b_major: str = "k",
    activation: str = "none",
    stream: object = None,
    columns: int = 256,
    stages: int = 4,
    band: int = 8,
    cluster: int = 2,
) -> Callable[[], Any]:
    """Bind step 10, or step 9 for a C that TMA cannot write: its rows must begin and end at multiples of 16 bytes."""
    o = operands(given, b_major, activation)
    options = {"columns": columns, "stages": stages, "band": band, "cluster": cluster}
    if not o.c_by_tma:
        return bind_multicast(given, b_major=b_major, activation=activation, stream=stream, **options)
    kernel = persistent.make_store_by_tma(o.dtype, o.out_dtype, b_major, activation, o.has_bias, **options)
    tiles_m, tiles_n = o.grid(TILE_ROWS * cluster, columns)
    blocks, counts = _in_clusters(tiles_m * tiles_n, cluster), (np.uint32(tiles_m), np.uint32(tiles_n))
    maps = (*o.maps(TILE_ROWS, columns // cluster), o.c_map())
    return kernel[blocks, None, stream].bind(*maps, o.bias, np.uint32(o.n), *counts, o.k_blocks)


def _in_clusters(tiles: int, cluster: int) -> int:
    """Blocks of a persistent grid of clusters."""
    return min(tiles, multiprocessors() // cluster) * cluster


def bind_tuned(
    given: Mapping[str, Any],
    *,
    b_major: str = "k",
    activation: str = "none",
    stream: object = None,
    configuration: Configuration | str | None = None,
) -> Callable[[], Any]:
    """Bind step 11: what `matmul` launches for these operands."""
    o = operands(given, b_major, activation)
    a, b, c, bias = o.a, o.b, o.c, given.get("bias")
    if b_major == "k":  # matmul multiplies A by a K x N matrix: this one's transpose, which lies as it is
        view = arrays.view(b)
        b = arrays.reinterpret(b, view.dtype, view.shape[::-1], view.strides[::-1])
    handle = driver.stream_handle(stream)
    planned = plan(a, b, c, bias, None, activation, False, configuration, handle)
    return lambda: planned.launch(a, b, bias, c, handle)

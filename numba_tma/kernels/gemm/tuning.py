"""Measuring the table of `choice`, and `matmul` beside cuBLAS; needs a GPU and PyTorch.

Inputs are rotated, so that none is found in the L2 cache, and candidates run in turn inside CUDA graphs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

import numpy as np

from ... import bench, dtypes
from ...tensor_map import TensorMap
from ...warpgroup import k_elements
from . import choice
from .choice import Configuration, Cost, Shape, Types
from .matmul import matmul
from .warpgroup import GROUP_ROWS, b_box

_ROTATED_BYTES = 160 << 20  # more than thrice the L2 cache
_SECONDS = 2e-3  # that a timed graph should take
_RATE = 6e14

# Projections of real models, and what else comes up: odd sizes, few rows.
SHAPES = {
    "GPT-2 qkv": Shape(1, 1024, 2304, 768),
    "GPT-2 up": Shape(1, 8192, 3072, 768),
    "GPT-2 down": Shape(1, 8192, 768, 3072),
    "GPT-2 head": Shape(1, 4096, 50257, 768),
    "Llama-3 8B qkv, 128 rows": Shape(1, 128, 6144, 4096),
    "Llama-3 8B down, 128 rows": Shape(1, 128, 4096, 14336),
    "Llama-3 8B gate and up, 512 rows": Shape(1, 512, 28672, 4096),
    "Llama-3 8B qkv": Shape(1, 2048, 6144, 4096),
    "Llama-3 8B out": Shape(1, 2048, 4096, 4096),
    "Llama-3 8B down": Shape(1, 4096, 4096, 14336),
    "Llama-3 8B gate and up": Shape(1, 8192, 28672, 4096),
    "Llama-3 8B out, 16384 rows": Shape(1, 16384, 4096, 4096),
    "Llama-3 70B qkv, 128 rows": Shape(1, 128, 10240, 8192),
    "Llama-3 70B down, 256 rows": Shape(1, 256, 8192, 28672),
    "Llama-3 70B gate and up, 1024 rows": Shape(1, 1024, 57344, 8192),
    "Llama-3 70B out": Shape(1, 2048, 8192, 8192),
    "Llama-3 70B qkv": Shape(1, 4096, 10240, 8192),
    "Llama-3 70B out, 16384 rows": Shape(1, 16384, 8192, 8192),
    "1000 cubed": Shape(1, 1000, 1000, 1000),
    "odd rows and columns": Shape(1, 2047, 2049, 2056),
    "odd N, large": Shape(1, 4095, 4097, 4104),
    "no multiples": Shape(1, 3000, 5000, 7000),
    "16 rows": Shape(1, 16, 4096, 4096),
    "64 rows": Shape(1, 64, 8192, 8192),
}
CUBES = {f"{n} cubed": Shape(1, n, n, n) for n in (4096, 8192, 16384)}
# Other types, and B as it lies for A B: the cubes alone.
OTHER_KINDS = (("float16", "k"), ("bfloat16", "n"), ("float8_e4m3fn", "k"), ("float32", "k"))


def types_of(dtype: str, shape: Shape, b_major: str = "k", out_dtype: str | None = None) -> Types:
    """The types of a product whose C is row-major."""
    out_dtype = out_dtype or ("bfloat16" if dtypes.lookup(dtype).size == 1 else dtype)
    return Types(dtype, out_dtype, b_major, shape.n * dtypes.lookup(out_dtype).size % 16 == 0)


def compile_all(wanted: Iterable[tuple], workers: int) -> None:
    """Compile kernels into the cache on disk, several at a time in processes of their own.

    Args:
        wanted: for each kernel its Configuration and Types, and if they are not "none" and False, its activation and
            whether it has a bias (of float32).
    """
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(_compile, *one) for one in dict.fromkeys(wanted)]:
            done.result()


def _compile(configuration: Configuration, types: Types, activation: str = "none", has_bias: bool = False) -> None:
    depth = k_elements(types.dtype)
    boxes = {
        "a": (types.dtype, (1, configuration.a_rows, depth)),
        "b": (types.dtype, (1, *b_box(configuration.b_columns, types.dtype, types.b_major))),
        "c": (types.out_dtype, (1, GROUP_ROWS, 128 // dtypes.lookup(types.out_dtype).size)),
    }
    maps = {
        name: TensorMap(np.zeros(box, dtypes.lookup(dtype).numpy), box, swizzle="128B", store=False)
        for name, (dtype, box) in boxes.items()
    }
    c = np.zeros((2, 8, 8), dtypes.lookup(types.out_dtype).numpy)
    target = maps["c"] if types.by_tma and configuration.splits == 1 else c
    kernel = configuration.kernel(types, activation, has_bias)
    bias = np.zeros(8, np.float32) if has_bias else c
    _ = kernel.compile(maps["a"], maps["b"], target, bias, *[np.uint32(1)] * 7).cubin


def _arrays(shape: Shape, types: Types, copies: int) -> list[tuple[Any, Any, Any]]:
    """Random operands (B as the kernel takes it: K x N) and outputs, so many sets of them."""
    import torch

    def random(*extents: int) -> Any:
        values = torch.randn(*extents, device="cuda", dtype=torch.bfloat16)
        return values.to(getattr(torch, types.dtype))

    sets = []
    for _ in range(copies):
        a = random(shape.m, shape.k)
        b = random(shape.n, shape.k).T if types.b_major == "k" else random(shape.k, shape.n)
        c = torch.full((shape.m, shape.n), math.nan, device="cuda", dtype=getattr(torch, types.out_dtype))
        sets.append((a, b, c))
    return sets


def _copies(shape: Shape, types: Types) -> int:
    size = dtypes.lookup(types.dtype).size
    moved = (shape.m * shape.k + shape.n * shape.k) * size + shape.m * shape.n * dtypes.lookup(types.out_dtype).size
    return max(1, min(16, math.ceil(_ROTATED_BYTES / moved)))


def _product(sets: Sequence[tuple], configuration: Configuration | None) -> Callable[[int], object]:
    turn = itertools.cycle(sets)

    def launch(stream: int) -> None:
        a, b, c = next(turn)
        matmul(a, b, out=c, configuration=configuration, stream=stream)

    return launch


def _cublas(sets: Sequence[tuple], types: Types) -> Callable[[int], object]:
    """PyTorch's product, which is cuBLAS' (with tf32), of 8-bit types cuBLASLt's with scales of one."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    turn = itertools.cycle(sets)
    one = torch.ones((), device="cuda")

    def launch(stream: int) -> None:
        a, b, c = next(turn)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            if dtypes.lookup(types.dtype).size == 1:
                torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=c.dtype, use_fast_accum=True, out=c)
            else:
                torch.mm(a, b, out=c)

    return launch


def _launches(shape: Shape, copies: int) -> int:
    """How many launches to put into a graph: a whole number of turns through the sets."""
    seconds = max(4e-6, 2 * shape.m * shape.n * shape.k / _RATE)
    return max(1, round(_SECONDS / seconds / copies)) * copies


def measure_costs() -> list[dict[str, Any]]:
    """The table's costs: every configuration's time for two waves of tiles (a cluster's one), at two lengths of K."""
    types, found = Types("bfloat16", "bfloat16", "k", True), []
    for configuration in choice.candidates():
        if not configuration.fits(types):
            continue
        waves = 1 if configuration.splits > 1 else 2
        seconds = {}
        for blocks in (16, 64):
            shape = _whole_waves(configuration, types, blocks, waves)
            sets = _arrays(shape, types, _copies(shape, types))
            timing = bench.time_graphs(
                {"": _product(sets, configuration)}, launches=_launches(shape, len(sets)), repeats=7
            )[""]
            seconds[blocks] = timing.median / waves * 1e6
        steps = 1 if configuration.splits == 1 else configuration.splits
        block = (seconds[64] - seconds[16]) / 48 * steps
        tile = max(0.0, seconds[16] - 16 / steps * block)
        cost = Cost(round(block, 4), round(tile, 3))
        found.append({"configuration": choice.as_entry(configuration), "cost": asdict(cost)})
    return found


def _whole_waves(configuration: Configuration, types: Types, blocks: int, waves: int) -> Shape:
    """A shape whose tiles keep all SMs busy `waves` times."""
    blocks_per_sm = choice.blocks_per_sm(configuration.consumers, configuration.columns)
    if configuration.splits > 1:
        slots = choice.SMS // configuration.splits
    else:
        slots = choice.SMS * blocks_per_sm // configuration.cluster
    tiles = slots * waves
    tiles_m = max(d for d in range(1, math.isqrt(tiles) + 1) if tiles % d == 0)
    below, beside = (configuration.cluster, 1) if configuration.across == "m" else (1, configuration.cluster)
    rows, columns = configuration.rows * below, configuration.columns * beside
    return Shape(1, tiles_m * rows, tiles // tiles_m * columns, blocks * k_elements(types.dtype))


def in_turn(
    shape: Shape, types: Types, configurations: Mapping[str, Configuration], *, repeats: int = 9
) -> dict[str, float]:
    """Seconds of a product by each configuration, under its name, and by "cuBLAS"; medians of graphs run in turn."""
    sets = _arrays(shape, types, _copies(shape, types))
    candidates = {"cuBLAS": _cublas(sets, types)} | {key: _product(sets, c) for key, c in configurations.items()}
    timings = bench.time_graphs(candidates, launches=_launches(shape, len(sets)), repeats=repeats)
    return {key: timing.median for key, timing in timings.items()}


def measure_shapes(
    shapes: dict[str, Shape], dtype: str, *, b_major: str = "k", tried: int = 5, repeats: int = 9
) -> list[dict[str, Any]]:
    """For each shape: the fastest of the `tried` configurations that the model likes best, and cuBLAS beside it."""
    found = []
    for name, shape in shapes.items():
        types = types_of(dtype, shape, b_major)
        configurations = {str(c): c for c in choice.best_candidates(types, shape, tried)}
        seconds = in_turn(shape, types, configurations, repeats=repeats)
        peer = seconds.pop("cuBLAS")
        best = min(seconds, key=seconds.__getitem__)
        found.append(
            {
                "name": name,
                "dtype": dtype,
                "b_major": b_major,
                "shape": asdict(shape),
                "configuration": choice.as_entry(configurations[best]),
                "seconds": seconds[best],
                "cublas_seconds": peer,
                "tried": seconds,
            }
        )
        print(
            f"{dtype} {name}: {found[-1]['seconds'] * 1e6:.1f} us, cuBLAS {peer * 1e6:.1f}, "
            f"{peer / found[-1]['seconds']:.3f}, {best}",
            flush=True,
        )
    return found


def write_table(costs: list[dict[str, Any]], shapes: list[dict[str, Any]], circumstances: dict[str, Any]) -> None:
    """Write the table that `choice` reads."""
    entries = [
        {"itemsize": dtypes.lookup(s["dtype"]).size, "shape": s["shape"], "configuration": s["configuration"]}
        for s in shapes
        if (s["dtype"], s["b_major"]) == ("bfloat16", "k")  # whose configurations serve all
    ]
    choice.TABLE.write_text(json.dumps({"circumstances": circumstances, "costs": costs, "shapes": entries}, indent=1))
    choice.table.cache_clear()

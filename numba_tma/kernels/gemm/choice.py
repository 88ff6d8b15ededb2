"""Which kernel for which shape: a table measured on a GPU, and between its entries a model made from it.

The table (tuned.json, written by scripts/tune_gemm.py) has, for each configuration, the time that a block takes for one
K block and for all else of a tile, and for single shapes the configuration that was the fastest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ... import driver, dtypes
from ...launch import Kernel, backend, gpu_refusal
from ...warpgroup import ROW_BYTES, k_elements
from .tuned import bias_bytes, blocks_per_sm, make_split, make_tuned, result_bytes, stage_bytes, sums_bytes
from .warpgroup import BOX_COLUMNS, GROUP_ROWS

TABLE = Path(__file__).with_name("tuned.json")
_SHARED_LIMIT = 232_448  # bytes a block may have on sm_90
_SHARED_PER_SM = 233_472
_RESERVED = 1_024  # of which a block takes so much besides its own
_MOST_STAGES = 8
SMS = 132


@dataclass(frozen=True)
class Shape:
    """What is multiplied: `batch` products of M x K and K x N."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Types:
    """Element types by name, and how B lies: "k" for rows along K, "n" for rows along N. `by_tma`: C's rows begin at
    multiples of 16 bytes, so that TMA may write them."""

    dtype: str
    out_dtype: str
    b_major: str
    by_tma: bool


@dataclass(frozen=True)
class Configuration:
    """A kernel of `tuned`: `splits` above 1 is `make_split`'s, which has no other cluster, and no band."""

    consumers: int = 2
    columns: int = 256
    cluster: int = 1
    across: str = "m"
    band: int = 8
    splits: int = 1
    programmatic: bool = True

    @property
    def rows(self) -> int:
        """Rows of C that a block computes at a time."""
        return GROUP_ROWS * self.consumers

    @property
    def a_rows(self) -> int:
        """Rows of A that one copy fetches."""
        return self.rows // self.cluster if self.across == "n" else self.rows

    @property
    def b_columns(self) -> int:
        """Columns of B that a block fetches."""
        return self.columns // self.cluster if self.across == "m" else self.columns

    def stages(self, types: Types) -> int:
        """As many as fit into shared memory."""
        if self.splits > 1:
            limit = _SHARED_LIMIT - sums_bytes(self.consumers, self.columns)
        else:
            limit = self._shared() - (result_bytes(self.consumers) if types.by_tma else 0)
        return min(_MOST_STAGES, limit // stage_bytes(self.rows, self.columns))

    def results(self, types: Types) -> int:
        """Tiles for each consumer's results: what the stages leave room for, up to a whole result."""
        chunks = -(-self.columns * dtypes.lookup(types.out_dtype).size // ROW_BYTES)
        left = self._shared() - self.stages(types) * stage_bytes(self.rows, self.columns)
        return max(2, min(chunks, left // result_bytes(self.consumers, 1)))

    def _shared(self) -> int:
        shared = _SHARED_PER_SM // blocks_per_sm(self.consumers, self.columns) - _RESERVED
        return min(_SHARED_LIMIT, shared) - bias_bytes(self.consumers, self.columns)

    def fits(self, types: Types) -> bool:
        """Whether there is such a kernel for these types."""
        per_row = 128 // dtypes.lookup(types.out_dtype).size
        whole_boxes = types.b_major == "k" or self.b_columns % BOX_COLUMNS == 0
        whole_rows = self.splits > 1 or not types.by_tma or self.columns % per_row == 0
        return whole_boxes and whole_rows and self.stages(types) >= 2

    def kernel(self, types: Types, activation: str, has_bias: bool, accumulate: bool = False) -> Kernel:
        """The kernel, not compiled yet."""
        names = (types.dtype, types.out_dtype, types.b_major, activation, has_bias)
        tile = {"consumers": self.consumers, "columns": self.columns, "stages": self.stages(types)}
        options = {"programmatic": self.programmatic, "accumulate": accumulate}
        if self.splits > 1:
            return make_split(*names, **tile, splits=self.splits, **options)
        return make_tuned(
            *names,
            types.by_tma,
            **tile,
            cluster=self.cluster,
            across=self.across,
            band=self.band,
            results=self.results(types),
            **options,
        )

    def tiles(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of tiles, a cluster's counted as one."""
        below, beside = (self.cluster, 1) if self.across == "m" else (1, self.cluster)
        return -(-shape.m // (self.rows * below)), -(-shape.n // (self.columns * beside))

    def grid(self, shape: Shape, sms: int = SMS) -> int:
        """Blocks to launch."""
        tiles_m, tiles_n = self.tiles(shape)
        tiles = tiles_m * tiles_n * shape.batch
        if self.splits > 1:
            return tiles * self.splits
        resident = sms * blocks_per_sm(self.consumers, self.columns)
        return min(resident // self.cluster, tiles) * self.cluster


def multiprocessors() -> int:
    """SMs of the GPU that kernels are launched on; in the simulator, an H200's."""
    if backend() == "sim" or gpu_refusal():
        return SMS
    return driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device())


def candidates() -> Iterator[Configuration]:
    """All configurations that are worth trying for some shape."""
    for columns in (256, 192, 128):
        yield Configuration(2, columns, 2, "m", 8)
    for consumers, columns, cluster in ((2, 128, 2), (2, 64, 2), (2, 64, 4), (1, 128, 2), (1, 64, 2), (1, 64, 4)):
        yield Configuration(consumers, columns, cluster, "n", 16)
    for consumers, columns in ((2, 256), (2, 192), (2, 128), (2, 64), (1, 256), (1, 128), (1, 64)):
        yield Configuration(consumers, columns, 1, "m", 16)
    for splits in (2, 4, 8):
        for consumers, columns in ((2, 128), (2, 64), (1, 128), (1, 64)):
            yield Configuration(consumers, columns, splits=splits)


@dataclass(frozen=True)
class Cost:
    """Microseconds of a configuration: `block` for one K block, `tile` for all else of a tile, all SMs being busy."""

    block: float
    tile: float


@functools.cache
def table() -> tuple[dict[Configuration, Cost], dict[tuple[int, Shape], Configuration]]:
    """Costs by configuration, and the fastest configuration by bytes of an element and shape."""
    raw = json.loads(TABLE.read_text())
    costs = {Configuration(**entry["configuration"]): Cost(**entry["cost"]) for entry in raw["costs"]}
    fastest = {
        (entry["itemsize"], Shape(**entry["shape"])): Configuration(**entry["configuration"]) for entry in raw["shapes"]
    }
    return costs, fastest


_EARLY = 0.7
_LAUNCH_US = 3.0
_BYTES_PER_US = 4.0e6


def predicted(configuration: Configuration, cost: Cost, types: Types, shape: Shape, sms: int = SMS) -> float:
    """Microseconds that the model gives a product: waves of tiles, or the time that its bytes take, if longer."""
    element = dtypes.lookup(types.dtype)
    blocks = -(-shape.k // k_elements(element))
    tiles_m, tiles_n = configuration.tiles(shape)
    tiles = tiles_m * tiles_n * shape.batch
    if configuration.splits > 1:
        slots = max(1, sms // configuration.splits)
        blocks = -(-blocks // configuration.splits)
    else:
        slots = sms * blocks_per_sm(configuration.consumers, configuration.columns) // configuration.cluster
    waves = -(-tiles // slots)
    moved = (shape.m * shape.k + shape.n * shape.k) * element.size
    moved += shape.m * shape.n * dtypes.lookup(types.out_dtype).size
    return _LAUNCH_US + max(waves * (blocks * cost.block + cost.tile), shape.batch * moved / _BYTES_PER_US)


def choose(types: Types, shape: Shape, sms: int = SMS) -> Configuration:
    """The configuration for a product: the table's, where it has the shape, or the one that the model likes best."""
    costs, fastest = table()
    known = fastest.get((dtypes.lookup(types.dtype).size, shape))
    if known is not None and known.fits(types) and sms == SMS:
        return known
    best = min(
        (predicted(c, cost, types, shape, sms), i, c) for i, (c, cost) in enumerate(costs.items()) if c.fits(types)
    )
    # Of a grid with fewer blocks than there are SMs the first to start early take SMs next to each other, which share
    # their way to memory: on an H200 80 blocks lost a sixth by it, 96 gained.
    return replace(best[2], programmatic=best[2].grid(shape, sms) >= _EARLY * sms)


def as_entry(configuration: Configuration) -> dict[str, Any]:
    """A configuration as the table has it."""
    return asdict(configuration)


def best_candidates(types: Types, shape: Shape, count: int, sms: int = SMS) -> list[Configuration]:
    """The `count` configurations that the model likes best, the first also with bands of other widths,
    the first two also without an early start."""
    costs, _ = table()
    ranked = sorted((c for c in costs if c.fits(types)), key=lambda c: predicted(c, costs[c], types, shape, sms))[
        :count
    ]
    others = [replace(ranked[0], band=band) for band in (4, 8, 16, 32) if band != ranked[0].band]
    late = [replace(c, programmatic=False) for c in ranked[:2]]
    return ranked + late + (others if ranked[0].splits == 1 else [])

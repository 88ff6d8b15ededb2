"""Table of docs/claims.md, to which several pages' measurements contribute."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from ..report import markdown, seconds
from . import attention, gpt2, overlap
from .records import MEASUREMENTS, Record, load, load_records


def _claims(results: Path) -> str:
    """What was measured on the claims of docs/claims.md, by their numbers there."""
    records = load_records(results)
    measurements = load(results, MEASUREMENTS)

    def fastest(problem: str, side: int, variant: str) -> Record:
        fitting = [r for r in records if (r["problem"], r["shape"], r["variant"]) == (problem, [side, side], variant)]
        return min(fitting, key=lambda record: record["seconds"])

    small = {name: fastest("kv_stream", 1024, name)["seconds"] for name in ("plain", "plain_vector", "cp_async", "tma")}
    graph = {record["variant"]: record["seconds"] for record in measurements["small_in_a_graph"]}
    large = {name: fastest("kv_stream", 16384, name)["seconds"] for name in ("plain_vector", "cp_async", "tma")}
    alone = next(record["seconds"] for record in measurements["overlap"] if record["work"] == 1)
    sweep = next(record for record in measurements["tile_sweep_16384"] if record["variant"] == "tma")
    tile = [int(extent) for extent in sweep["options"]["tile"]]
    copied = records[0]["gb_per_s"] / records[0]["share_of_device_copy"]
    rows = [
        [
            "4",
            f"the driver's copy on an H200 with {records[0]['circumstances']['multiprocessors']} SMs",
            f"{copied:,.0f} GB/s",
        ],
        [
            "7",
            "one block per SM, one multiply-add a pair: plain Numba, TMA with one buffer, with two",
            ", ".join(seconds(alone[name]) for name in ("plain", "one buffer", "two buffers")),
        ],
        [
            "11",
            f"best tile of `kv_stream.tma` at 16384²: {tile[0]}×{tile[1]} fp16, {2 * math.prod(tile) / 1024:.0f} KB",
            f"{sweep['share_of_device_copy']:.0%} of the driver's copy",
        ],
        [
            "13",
            "1024², TMA against plain Numba, its best form, `cp.async`",
            ", ".join(f"{small[name] / small['tma']:.2f} ×" for name in ("plain", "plain_vector", "cp_async")),
        ],
        [
            "13",
            "the same in a CUDA graph, without the launch",
            ", ".join(f"{graph[name] / graph['tma']:.2f} ×" for name in ("plain", "plain_vector", "cp_async")),
        ],
        [
            "14",
            "16384², each at its best: plain Numba's best form, `cp.async`, TMA",
            ", ".join(seconds(value) for value in large.values()),
        ],
        *attention.claims(results),
        *overlap.claims(results),
        *gpt2.claims(results),
    ]
    rows.sort(key=lambda row: int(row[0]))
    return markdown(rows, ["claim", "measured", ""])


TABLES: dict[str, Callable[[Path], str]] = {"claims": _claims}

"""Table of README.md, to which several pages' measurements contribute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..report import markdown, seconds
from . import attention, gemm, gpt2, overlap
from .records import MEASUREMENTS, Record, load, load_records


def _headline(results: Path) -> str:
    records = load_records(results)

    def best(problem: str, shape: list[int], *variants: str) -> Record:
        fitting = [r for r in records if r["problem"] == problem and r["shape"] == shape and r["variant"] in variants]
        return min(fitting, key=lambda r: r["seconds"])

    copied = best("copy", [16384, 16384], "bulk", "tensor")
    rows = [
        [
            "copy of 1 GiB by TMA",
            f"{copied['gb_per_s']:,.0f} GB/s, {copied['share_of_device_copy']:.0%} of the driver's",
        ]
    ]
    for size in (4096, 16384):
        tma = best("kv_stream", [size, size], "tma", "tma_ring")
        plain = [r for r in records if r["problem"] == "kv_stream" and r["shape"] == [size, size]]
        first = next(r for r in plain if r["variant"] == "plain")
        vector = best("kv_stream", [size, size], "plain_vector")
        rows.append(
            [
                f"K/V stream at {size}², TMA",
                f"{seconds(tma['seconds'])}; {first['seconds'] / tma['seconds']:.1f} × the plain exercise, "
                f"{vector['seconds'] / tma['seconds']:.2f} × the best plain Numba",
            ]
        )
    rows += gemm.headline(results)
    rows += attention.headline(results)
    rows += gpt2.headline(results)
    rows += overlap.headline(results)
    overlapped = load(results, MEASUREMENTS)["overlap"]
    gains = [r["seconds"]["one buffer"] / r["seconds"]["two buffers"] for r in overlapped]
    rows.append(["two buffers instead of one, a block per SM, copy and compute balanced", f"{max(gains):.2f} ×"])
    simulated = load(results, "simulator_speed.json")["seconds"]
    rows.append(
        [
            "simulator, 2 × 1024² elements, no GPU",
            f"{simulated['ours']:.2f} s; Numba's own takes {simulated['numba']:.1f} s",
        ]
    )
    return markdown(rows, ["", ""])


TABLES: dict[str, Callable[[Path], str]] = {"headline": _headline}

"""Tables of docs/results/README.md: what a launch costs the host, and where a tensor map lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..report import markdown, seconds
from .records import MEASUREMENTS, load


def _launch_overhead(results: Path) -> str:
    rows = [
        [r["what"], f"{r['seconds'] * 1e6:.1f} µs", f"{r['seconds_fastest'] * 1e6:.1f} µs"]
        for r in load(results, MEASUREMENTS)["launch_overhead"]
    ]
    return markdown(rows, ["", "median", "fastest"])


def _descriptor_place(results: Path) -> str:
    rows = [
        [r["descriptor"], r["boxes_per_block"], seconds(r["seconds"])]
        for r in load(results, MEASUREMENTS)["descriptor_place"]
    ]
    return markdown(rows, ["tensor map", "boxes a block", "time"])


TABLES: dict[str, Callable[[Path], str]] = {
    "descriptor place": _descriptor_place,
    "launch overhead": _launch_overhead,
}

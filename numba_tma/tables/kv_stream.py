"""Tables of docs/kv_stream.md beyond the suite's: one buffer against two, the best tiles, and a small case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..report import markdown, seconds
from .records import MEASUREMENTS, Record, load, options_in_words


def _overlap(results: Path) -> str:
    rows = []
    for r in load(results, MEASUREMENTS)["overlap"]:
        t = {name: value * 1e6 for name, value in r["seconds"].items()}
        longer = max(t["copy alone"], t["compute alone"])
        rows.append(
            [
                r["work"],
                *(f"{t[name]:.0f}" for name in ("copy alone", "compute alone", "one buffer", "two buffers", "plain")),
                f"{t['one buffer'] / t['two buffers']:.2f}×",
                f"{t['two buffers'] / longer:.2f}",
            ]
        )
    headers = ["work", "copy alone, µs", "compute alone", "one buffer", "two buffers", "plain"]
    return markdown(rows, [*headers, "two vs one", "two / longer of the two alone"])


def _sweep(results: Path) -> str:
    best: dict[str, Record] = {}
    for r in load(results, MEASUREMENTS)["tile_sweep_16384"]:
        best.setdefault(r["variant"], r)
    rows = []
    for variant, r in best.items():
        rows.append(
            [f"`{variant}`", options_in_words(r["options"]), seconds(r["seconds"]), f"{r['share_of_device_copy']:.1%}"]
        )
    return markdown(rows, ["variant", "best of the sweep at 16384²", "time", "of device copy"])


def _small(results: Path) -> str:
    rows = [
        [f"`{r['variant']}`", seconds(r["seconds"]), f"{r['gb_per_s']:,.0f}"]
        for r in load(results, MEASUREMENTS)["small_in_a_graph"]
    ]
    return markdown(rows, ["1024², in a CUDA graph, 8 splits", "time", "GB/s"])


TABLES: dict[str, Callable[[Path], str]] = {
    "kv_stream overlap": _overlap,
    "kv_stream small": _small,
    "kv_stream sweep": _sweep,
}

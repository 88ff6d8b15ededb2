"""Tables of docs/timelines.md: what was hidden in kv_stream on a GPU, and what the stamps cost there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..report import markdown
from .records import load

RESULTS = "h200_timelines.json"


def _rows(results: Path) -> list[dict[str, Any]]:
    return load(results, RESULTS)["timelines"]


def _hidden(results: Path) -> str:
    rows = []
    for row in _rows(results):
        least, most = row["hidden_at_least"], row["hidden"]
        share = f"{most:.0%}" if least == most else f"{least:.0%} to {most:.0%}"
        times = f"{row['copying_us']:,.1f}", f"{row['computing_us']:,.1f}"
        rows.append([f"`{row['variant']}`", *times, share, f"{row['overlapped']:.0%}"])
    return markdown(rows, ["", "copying, µs", "computing, µs", "copying hidden", "computing under copies"])


def _cost(results: Path) -> str:
    rows = []
    for row in _rows(results):
        without, with_stamps = row["us_without_stamps"], row["us_with_stamps"]
        slowdown = f"{with_stamps / without - 1:+.0%}"
        rows.append([f"`{row['variant']}`", f"{without:,.1f}", f"{with_stamps:,.1f}", slowdown])
    return markdown(rows, ["", "without stamps, µs", "with, µs", "slowdown"])


TABLES: dict[str, Callable[[Path], str]] = {"hidden copies": _hidden, "cost of stamps": _cost}

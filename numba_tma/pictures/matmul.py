"""`matmul` at real shapes as bars, cuBLAS beside each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..tables.gemm import MATMUL, flops, kind
from .svg import Picture

_DTYPE = "bfloat16"  # the type in which all shapes are measured


def draw(folder: Path) -> str:
    """The picture of the products in the results' `folder`."""
    measured = json.loads((folder / MATMUL).read_text())
    records = [r for r in measured["shapes"] if kind(r) == _DTYPE]
    rates = [[flops(r) / r[key] / 1e12 for key in ("seconds", "cublas_seconds")] for r in records]
    left, right, top, step = 376, 716, 84, 19
    scale = (right - left) / max(max(pair) for pair in rates)
    height = top + step * len(records) + 18
    picture = Picture(
        860,
        height,
        "matmul beside cuBLAS",
        "Bars of TFLOP/s for each product, with a mark where cuBLAS is in the same run.",
    )
    circumstances = measured["circumstances"]
    picture.text(24, 34, f"matmul, {_DTYPE}, TFLOP/s", "ink head")
    picture.text(836, 34, f"{circumstances['device']}, {circumstances['date']}, medians", "muted", "end")
    picture.legend(24, 58, [("tma", "matmul"), ("peer", "cuBLAS")])
    picture.text(836, 62, "vs cuBLAS", "muted small", "end")
    for i, (record, (ours, peer)) in enumerate(zip(records, rates, strict=True)):
        y = top + i * step
        picture.text(24, y + 11, record["name"], "ink")
        picture.text(left - 10, y + 11, _extents(record), "muted small", "end")
        picture.rect(left, y, ours * scale, step - 5, "tma", 2)
        picture.rect(left + peer * scale - 1.5, y - 2, 3, step - 1, "peer", 1)
        picture.text(770, y + 11, f"{ours:.0f}", "ink", "end")
        picture.text(836, y + 11, f"{ours / peer:.2f} ×", "muted", "end")
    return picture.svg()


def _extents(record: dict[str, Any]) -> str:
    return "×".join(str(record["shape"][key]) for key in "mnk")

"""Tables of docs/attention_decode.md: `decode` at many extents, beside torch's attention, and what L2 fetches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report import markdown, seconds
from .records import load

FILE = "h200_attention_decode.json"
PEERS = ("cuDNN", "FlashAttention-2")
_FULL = 1.0


def speed(records: Sequence[Mapping[str, Any]], read_rate: float) -> str:
    """Time, rate and share of `read_rate`, in bytes a second, of each case, and how many times as long peers take."""
    rows = []
    for r in records:
        found = r["seconds"]
        rate = r["bytes"] / found["decode"]
        cache = f"pages of {r['page_size']}" if r["page_size"] else "contiguous"
        if r["filled"] != _FULL:
            cache += f", {r['filled']:.0%} full"
        rows.append(
            [
                r["batch"],
                f"{r['capacity']:,}",
                f"{r['kv_heads']} × {r['group']}",
                r["head_dim"],
                r["sq"],
                cache,
                seconds(found["decode"]),
                f"{rate / 1e12:.2f}",
                f"{rate / read_rate:.0%}",
                *(f"{found[peer] / found['decode']:.2f}×" if peer in found else "" for peer in PEERS),
            ]
        )
    headers = ["batch", "capacity", "heads of keys × group", "D", "queries", "cache", "time", "TB/s", "of read rate"]
    return markdown(rows, [*headers, *PEERS])


def _speed(results: Path) -> str:
    measured = load(results, FILE)
    fastest = max(r["bytes"] / r["seconds"] for r in measured["decode_read_rate"])
    return speed(measured["decode_speed"], fastest)


def promotion(records: Sequence[Mapping[str, Any]]) -> str:
    """TB/s of each case by what the tensor maps promote fetches to."""
    rows = []
    for r in records:
        extents = [r["batch"], f"{r['capacity']:,}", f"{r['kv_heads']} × {r['group']}", r["head_dim"]]
        rows.append([*extents, *(f"{r['bytes'] / value / 1e12:.2f}" for value in r["seconds"].values())])
    names = [f"`{name}`, TB/s" for name in records[0]["seconds"]]
    return markdown(rows, ["batch", "capacity", "heads of keys × group", "D", *names])


def _promotion(results: Path) -> str:
    return promotion(load(results, FILE)["decode_promotion"])


TABLES: dict[str, Callable[[Path], str]] = {"decode promotion": _promotion, "decode speed": _speed}

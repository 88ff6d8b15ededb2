"""Tables of docs/attention_fp8.md: attention in 8 bits beside 16 and beside its peer, and the errors of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .report import markdown, seconds

Record = dict[str, Any]
FILE = "h200_attention_fp8.json"
OURS, OURS_16 = "numba-tma, 8 bits", "numba-tma, bfloat16"
ONE = "numba-tma, 8 bits, one accumulator"
FA3_8, FA3_16 = "FlashAttention-3, 8 bits", "FlashAttention-3, bfloat16"


def forward(records: Sequence[Record]) -> str:
    """TFLOP/s of `bind_attend`'s kernel, its ratio to 16 bits and to the peer, and the time of quantising beside it."""
    rows = []
    for r in records:
        speeds, times = r["tflop_per_s"], r["seconds"]
        ratios = (f"{speeds[OURS] / speeds[name]:.2f} ×" if name in speeds else "" for name in (OURS_16, FA3_16, FA3_8))
        rows.append(
            [
                r["head_dim"],
                "causal" if r["causal"] else "all",
                f"{r['length']:,}",
                f"{speeds[OURS]:.0f}",
                f"{speeds[ONE]:.0f}" if ONE in speeds else "",
                *ratios,
                f"{seconds(times['quantise'])} to {seconds(times[OURS])}",
            ]
        )
    peers = ("of `attention`", f"of {FA3_16}", f"of {FA3_8}")
    headers = ["D", "keys seen", "S", "TFLOP/s", "with one accumulator", *peers, "quantising to this"]
    return markdown(rows, headers)


def errors(records: Sequence[Record]) -> str:
    """Root mean square and largest deviation by inputs and length, a column for each way."""
    groups: dict[tuple, dict[str, Record]] = {}
    for r in records:
        groups.setdefault((r["inputs"], r["length"]), {})[r["name"]] = r
    names = list(dict.fromkeys(r["name"] for r in records))
    rows = []
    for (inputs, length), found in groups.items():
        cells = [f"{found[n]['rms']:.1%}, {found[n]['largest']:.1g}" if n in found else "" for n in names]
        rows.append([inputs, f"{length:,}", *cells])
    return markdown(rows, ["inputs", "S", *(f"{n}: rms, largest" for n in names)])


def _of(table: Callable[[Sequence[Record]], str], name: str) -> Callable[[Path], str]:
    return lambda results: table(json.loads((results / FILE).read_text())[name])


TABLES: dict[str, Callable[[Path], str]] = {
    "attention fp8": _of(forward, "attention_fp8_forward"),
    "attention fp8 errors": _of(errors, "attention_fp8_errors"),
}

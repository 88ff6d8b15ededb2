"""Tables of docs/attention_fp8.md: attention in 8 bits beside 16 and beside its peer, and the errors of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..report import markdown, seconds
from .records import load

Record = dict[str, Any]
FILE = "h200_attention_fp8.json"
OURS, OURS_16 = "numba-tma, 8 bits", "numba-tma, bfloat16"
ONE = "numba-tma, 8 bits, one accumulator"
FA3_8, FA3_16 = "FlashAttention-3, 8 bits", "FlashAttention-3, bfloat16"


def forward(records: Sequence[Record]) -> str:
    """TFLOP/s of both ways to add up, the first one's ratio to 16 bits and the peers, and quantising's time beside it.

    Peers that were not measured have no column.
    """
    peers = {OURS_16: "of `attention`", FA3_16: f"of {FA3_16}", FA3_8: f"of {FA3_8}"}
    peers = {name: header for name, header in peers.items() if any(name in r["tflop_per_s"] for r in records)}
    rows = []
    for r in records:
        speeds, times = r["tflop_per_s"], r["seconds"]
        rows.append(
            [
                r["head_dim"],
                "causal" if r["causal"] else "all",
                f"{r['length']:,}",
                f"{speeds[OURS]:.0f}",
                f"{speeds[ONE]:.0f}" if ONE in speeds else "",
                *(f"{speeds[OURS] / speeds[name]:.2f} ×" if name in speeds else "" for name in peers),
                f"{seconds(times['quantise'])} to {seconds(times[OURS])}",
            ]
        )
    headers = ["D", "keys seen", "S", "TFLOP/s", "with one accumulator", *peers.values(), "quantising to this"]
    return markdown(rows, headers)


def configurations(records: Sequence[Record]) -> str:
    """TFLOP/s by how the kernel is cut, a column for each length and mask."""
    columns = list(dict.fromkeys((r["head_dim"], r["length"], r["causal"]) for r in records))
    rows: dict[tuple, dict[tuple, str]] = {}
    for r in records:
        cut = r["keys"], r["consumers"], "each block's" if r["promote"] else "one", "in turns" if r["ping_pong"] else ""
        rows.setdefault(cut, {})[r["head_dim"], r["length"], r["causal"]] = f"{r['tflop_per_s']:.0f}"
    headers = [f"D {d}, S {s:,}{', causal' if causal else ''}" for d, s, causal in columns]
    return markdown(
        [[*cut, *(found.get(column, "") for column in columns)] for cut, found in rows.items()],
        ["keys", "consumers", "accumulator", "", *headers],
    )


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
    return lambda results: table(load(results, FILE)[name])


TABLES: dict[str, Callable[[Path], str]] = {
    "attention fp8": _of(forward, "attention_fp8_forward"),
    "attention fp8 errors": _of(errors, "attention_fp8_errors"),
    "attention fp8 configurations": _of(configurations, "attention_fp8_configurations"),
}

"""Tables of docs/attention.md: the ladder, `attention` beside its peers, packed sequences, errors, and energy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..report import markdown, seconds
from .records import load

Record = dict[str, Any]
FILE = "h200_attention.json"
OURS = "numba-tma"
FA2, FA3, CUDNN = "FlashAttention-2", "FlashAttention-3", "cuDNN"


def steps(records: Sequence[Record]) -> str:
    """TFLOP/s of each step, a column for each length and mask, beside FlashAttention-2."""
    headers = ["step", *(f"S = {r['length']:,}{', causal' if r['causal'] else ''}" for r in records)]
    rows = []
    for name in records[0]["tflop_per_s"]:
        named = name if name == FA2 else f"`{name}`"
        rows.append([named, *(f"{r['tflop_per_s'][name]:.0f}" for r in records)])
    return markdown(rows, headers)


def forward(records: Sequence[Record]) -> str:
    """TFLOP/s of `attention` and what that is of each peer's, by head dimension, mask and length."""
    rows = []
    for r in records:
        speeds = r["tflop_per_s"]
        peers = (f"{speeds[OURS] / speeds[peer]:.2f} ×" if peer in speeds else "" for peer in (FA3, CUDNN, FA2))
        causal = "causal" if r["causal"] else "all"
        rows.append([r["head_dim"], causal, f"{r['length']:,}", f"{speeds[OURS]:.0f}", *peers])
    return markdown(rows, ["D", "keys seen", "S", "TFLOP/s", f"of {FA3}", f"of {CUDNN}", f"of {FA2}"])


def packed(records: Sequence[Record]) -> str:
    """Time and TFLOP/s of `attention_varlen` on the measured lengths."""
    rows = [["causal" if r["causal"] else "all", seconds(r["seconds"]), f"{r['tflop_per_s']:.0f}"] for r in records]
    return markdown(rows, ["keys seen", "24 sequences of 64 to 4096 tokens", "TFLOP/s"])


def errors(records: Sequence[Record]) -> str:
    """Root mean square and largest deviation, a column for each library."""
    groups: dict[tuple, dict[str, Record]] = {}
    for r in records:
        groups.setdefault((r["head_dim"], r["causal"], r["outliers"]), {})[r["name"]] = r
    names = list(dict.fromkeys(r["name"] for r in records))
    rows = []
    for (head_dim, causal, outliers), found in groups.items():
        cells = [f"{found[n]['rms']:.2e}, {found[n]['largest']:.1e}" if n in found else "" for n in names]
        rows.append([head_dim, "causal" if causal else "all", "outliers" if outliers else "normal", *cells])
    return markdown(rows, ["D", "keys seen", "inputs", *(f"{n}: rms, largest" for n in names)])


def long(records: Sequence[Record]) -> str:
    """Seconds, TFLOP/s and joules of a forward pass over one long sequence."""
    rows = []
    for r in records:
        name = f"`{r['name']}`" if r["name"] == OURS else r["name"]
        energy = [f"{r['joules']:.1f}", f"{r['watts']:.0f}"]
        rows.append(
            [name, "causal" if r["causal"] else "all", seconds(r["seconds"]), f"{r['tflop_per_s']:.0f}", *energy]
        )
    return markdown(rows, ["", "keys seen", "time", "TFLOP/s", "joules", "watts"])


def claims(results: Path) -> list[list[str]]:
    """Rows of docs/claims.md's table: claim, what was measured, figures."""
    measured = load(results, FILE)
    (steady,) = (r for r in measured["attention_steps"] if r["length"] == 4096 and not r["causal"])
    speeds = steady["tflop_per_s"]
    ladder = (FA2, "mma_cp_async", "mma_tma", "wgmma", "warpgroups", "overlapped")
    alone = [
        r["tflop_per_s"]["mma_tma"] / r["tflop_per_s"]["mma_cp_async"]
        for r in measured["attention_steps"]
        if not r["causal"]
    ]
    lengths = [f"{r['length']:,}" for r in measured["attention_steps"] if not r["causal"]]
    whole = {r["name"]: r for r in measured["attention_long"] if not r["causal"]}
    return [
        [
            "5",
            f"attention with `mma.sync`, tiles by TMA in place of `cp.async`, at S = {', '.join(lengths)}",
            ", ".join(f"{ratio:.2f} ×" for ratio in alone),
        ],
        [
            "6",
            f"attention at S = 4,096, TFLOP/s: {FA2}, "
            + ", ".join(f"`{name}`" for name in ladder[1:])
            + ", `attention`",
            ", ".join(f"{speeds[name]:.0f}" for name in ladder) + f", {_best(measured):.0f}",
        ],
        [
            "7",
            "the same, tiles of 64 queries (`wgmma`) and of 128 (`warpgroups`)",
            f"{speeds['wgmma']:.0f}, {speeds['warpgroups']:.0f}",
        ],
        [
            "15",
            f"131,072 tokens, a forward pass: {FA2}, `attention`, {FA3}",
            ", ".join(
                f"{seconds(whole[name]['seconds'])} and {whole[name]['joules']:.0f} J"
                for name in (FA2, OURS, FA3)
                if name in whole
            ),
        ],
    ]


def headline(results: Path) -> list[list[str]]:
    """Rows of README.md's table."""
    measured = load(results, FILE)
    rows = []
    for causal in (False, True):
        (r,) = (
            r for r in measured["attention_forward"] if (r["head_dim"], r["causal"], r["length"]) == (128, causal, 4096)
        )
        speeds = r["tflop_per_s"]
        beside = ", ".join(
            f"{speeds[OURS] / speeds[peer]:.2f} × {peer}" for peer in (FA3, CUDNN, FA2) if peer in speeds
        )
        what = "causal " if causal else ""
        rows.append(
            [f"{what}`attention`, bfloat16, 4096 tokens, heads of 128", f"{speeds[OURS]:.0f} TFLOP/s, {beside}"]
        )
    return rows


def _best(measured: dict[str, Any]) -> float:
    (found,) = (
        r["tflop_per_s"][OURS]
        for r in measured["attention_forward"]
        if (r["head_dim"], r["causal"], r["length"]) == (128, False, 4096)
    )
    return found


def _of(table: Callable[[Sequence[Record]], str], name: str) -> Callable[[Path], str]:
    return lambda results: table(load(results, FILE)[name])


TABLES: dict[str, Callable[[Path], str]] = {
    "attention steps": _of(steps, "attention_steps"),
    "attention forward": _of(forward, "attention_forward"),
    "attention packed": _of(packed, "attention_packed"),
    "attention errors": _of(errors, "attention_errors"),
    "attention long": _of(long, "attention_long"),
}

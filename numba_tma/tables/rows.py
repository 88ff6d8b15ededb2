"""Tables of docs/softmax.md: rates of softmax and rmsnorm over row lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..report import markdown
from .records import Record, load

RESULTS = "h200_memory.json"
COPY = "driver's copy"
PEERS = ("torch", "torch.compile")


def rates(records: Iterable[Record]) -> str:
    """The fastest variant at each row length beside PyTorch and the driver's copy, in GB/s."""
    rows = []
    for record in records:
        found = record["gb_per_s"]
        name = max((n for n in found if n not in (COPY, *PEERS)), key=found.__getitem__)
        beside = [f"{found[peer]:,.0f}" if peer in found else "" for peer in PEERS]
        rows.append(
            [
                f"{record['columns']:,}",
                record["dtype"],
                f"`{name}`",
                f"{found[name]:,.0f}",
                f"{found[name] / found[COPY]:.1%}",
                *beside,
            ]
        )
    return markdown(rows, ["columns", "type", "fastest", "GB/s", "of device copy", *PEERS])


def steps(records: Iterable[Record], columns: int, dtype: str) -> str:
    """All that was measured of one length and type, both operations beside each other."""
    both = {r["operation"]: r["gb_per_s"] for r in records if (r["columns"], r["dtype"]) == (columns, dtype)}
    names = sorted((n for n in both["softmax"] if n in both["rmsnorm"]), key=lambda n: -both["softmax"][n])
    rows = [[f"`{name}`", *(f"{both[operation][name]:,.0f}" for operation in ("softmax", "rmsnorm"))] for name in names]
    return markdown(rows, ["", "softmax, GB/s", "rmsnorm"])


def trials(records: Iterable[Record], operation: str, columns: int, dtype: str) -> str:
    """All that was measured of one operation, length and type beside each other, as shares of the driver's copy too."""
    wanted = (operation, columns, dtype)
    found = next(r["gb_per_s"] for r in records if (r["operation"], r["columns"], r["dtype"]) == wanted)
    names = sorted(found, key=found.__getitem__, reverse=True)
    rows = [[f"`{name}`", f"{found[name]:,.0f}", f"{found[name] / found[COPY]:.1%}"] for name in names]
    return markdown(rows, ["", "GB/s", "of device copy"])


def _of(operation: str) -> Callable[[Path], str]:
    return lambda results: rates(r for r in load(results, RESULTS)["rows"] if r["operation"] == operation)


TABLES: dict[str, Callable[[Path], str]] = {
    "softmax rates": _of("softmax"),
    "rmsnorm rates": _of("rmsnorm"),
    "rows 4096": lambda results: steps(load(results, RESULTS)["rows"], 4096, "float32"),
    "rows 262144": lambda results: steps(load(results, RESULTS)["rows"], 262144, "float32"),
    "row trials softmax": lambda results: trials(load(results, RESULTS)["row_trials"], "softmax", 262144, "float32"),
    "row trials rmsnorm": lambda results: trials(load(results, RESULTS)["row_trials"], "rmsnorm", 4096, "float32"),
}

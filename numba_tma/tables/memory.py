"""Tables of docs/softmax.md and docs/copy.md: rates over row lengths and element types."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..report import markdown

Record = dict[str, Any]

RESULTS, COPIES = "h200_memory.json", "h200_copy.json"
COPY = "driver's copy"
PEERS = ("torch", "torch.compile")


def _load(results: Path, name: str = RESULTS) -> dict[str, Any]:
    return json.loads((results / name).read_text())


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


def copy_types(records: Iterable[Record]) -> str:
    """Each variant of copy on 1 GiB of each type, as a share of the driver's copy in the same loop."""
    rows, names = [], []
    for record in records:
        found = record["gb_per_s"]
        names = [name for name in found if name != "driver"]
        shares = [f"{found[name] / found['driver']:.1%}" for name in names]
        rows.append([record["dtype"], f"{found['driver']:,.0f}", *shares])
    return markdown(rows, ["type", "driver, GB/s", *(f"`{name}`" for name in names)])


def _of(operation: str) -> Callable[[Path], str]:
    return lambda results: rates(r for r in _load(results)["rows"] if r["operation"] == operation)


TABLES: dict[str, Callable[[Path], str]] = {
    "softmax rates": _of("softmax"),
    "rmsnorm rates": _of("rmsnorm"),
    "rows 4096": lambda results: steps(_load(results)["rows"], 4096, "float32"),
    "rows 262144": lambda results: steps(_load(results)["rows"], 262144, "float32"),
    "row trials softmax": lambda results: trials(_load(results)["row_trials"], "softmax", 262144, "float32"),
    "row trials rmsnorm": lambda results: trials(_load(results)["row_trials"], "rmsnorm", 4096, "float32"),
    "copy types": lambda results: copy_types(_load(results, COPIES)["copy_types"]),
}

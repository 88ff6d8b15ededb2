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
    operations = ("softmax", "rmsnorm")
    names = {name for operation in operations for name in both[operation]}
    fastest = {name: max(both[operation].get(name, 0) for operation in operations) for name in names}
    rows = []
    for name in sorted(names, key=fastest.__getitem__, reverse=True):
        beside = [f"{both[operation][name]:,.0f}" if name in both[operation] else "" for operation in operations]
        rows.append([f"`{name}`", *beside])
    return markdown(rows, ["", "softmax, GB/s", "rmsnorm"])


def trials(records: Iterable[Record], operation: str, columns: int, dtype: str) -> str:
    """All that was measured of one operation, length and type beside each other, as shares of the driver's copy too.

    Where it is known, with a thread's registers and how many blocks the GPU held at once.
    """
    wanted = (operation, columns, dtype)
    record = next(r for r in records if (r["operation"], r["columns"], r["dtype"]) == wanted)
    found = record["gb_per_s"]
    counts = [key for key in ("registers", "blocks") if key in record]
    rows = []
    for name in sorted(found, key=found.__getitem__, reverse=True):
        beside = [str(record[key].get(name, "")) for key in counts]
        rows.append([f"`{name}`", *beside, f"{found[name]:,.0f}", f"{found[name] / found[COPY]:.1%}"])
    return markdown(rows, ["", *counts, "GB/s", "of device copy"])


def meetings(records: Iterable[Record]) -> str:
    """How blocks exchange their pairs: rates by stores and by copies, and with lines that stay in L2."""
    ways = ("stores", "copies", "copies, keep=True")
    rows = []
    for record in records:
        found = record["gb_per_s"]
        rows.append([f"{record['columns']:,}", record["dtype"], *(f"{found[way]:,.0f}" for way in (*ways, COPY))])
    return markdown(rows, ["columns", "type", *ways, COPY])


def _of(operation: str) -> Callable[[Path], str]:
    return lambda results: rates(r for r in load(results, RESULTS)["rows"] if r["operation"] == operation)


TABLES: dict[str, Callable[[Path], str]] = {
    "softmax rates": _of("softmax"),
    "rmsnorm rates": _of("rmsnorm"),
    "rows 4096": lambda results: steps(load(results, RESULTS)["rows"], 4096, "float32"),
    "rows 262144": lambda results: steps(load(results, RESULTS)["rows"], 262144, "float32"),
    "row meetings": lambda results: meetings(load(results, RESULTS)["row_meetings"]),
    "row parts": lambda results: trials(load(results, RESULTS)["row_parts"], "rmsnorm", 262144, "bfloat16"),
    "row trials": lambda results: trials(load(results, RESULTS)["row_trials"], "softmax", 262144, "float32"),
}

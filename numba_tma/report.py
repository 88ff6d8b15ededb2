"""Results as text and as files: the run's table, and the JSON that docs/results/ keeps."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .suite import Record

_UNITS = ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms"))


def table(records: Sequence[Record]) -> str:
    """The run as a table: times and rates for a GPU; instructions, bytes by engine and, where the model was asked, its
    times for the simulator."""
    on_gpu = any(record.backend == "gpu" for record in records)
    modelled = any(record.modelled_seconds is not None for record in records)
    headers = ["problem", "variant", "moved by", "shape", "dtype", "correct", "error"]
    headers += (
        ["time", "GB/s", "TFLOP/s", "of device copy", "vs baseline"]
        if on_gpu
        else ["warp instructions", "bytes moved, by engine", "hazards", *(["modelled time"] if modelled else [])]
    )
    rows = []
    for record in records:
        row = [
            record.problem,
            record.variant,
            record.moves,
            "×".join(map(str, record.shape)),
            record.dtype,
            _verdict(record),
            "" if record.error is None else f"{record.error:.2g}",
        ]
        if on_gpu:
            row += [
                seconds(record.seconds),
                _number(record.gb_per_s, 0),
                _number(record.tflop_per_s, 2) if record.tflop_per_s else "",
                "" if record.share_of_device_copy is None else f"{record.share_of_device_copy:.0%}",
                "" if record.ratio_to_baseline is None else f"{record.ratio_to_baseline:.2f}×",
            ]
        else:
            engines = [f"{kind} {count:,}" for kind, count in sorted(record.bytes_moved.items())]
            row += [
                "" if record.instructions is None else f"{record.instructions:,}",
                "\n".join(engines),
                len(record.hazards) or "",
                *([seconds(record.modelled_seconds)] if modelled else []),
            ]
        rows.append(row)
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)


def failures(records: Sequence[Record]) -> list[str]:
    """One line for each check that failed."""
    return [
        f"{r.problem}.{r.variant} {'×'.join(map(str, r.shape))} {r.dtype}: {r.reason}"
        for r in records
        if not r.ok and not r.skipped
    ]


def markdown(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """A table for a page of the documentation; numbers stand as they are given."""
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it."""
    if value is None:
        return ""
    for limit, factor, unit in _UNITS:
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"


def write_json(path: Path, records: Sequence[Record], circumstances: dict[str, Any] | None = None) -> None:
    """Write the records as a JSON list, each with the circumstances if given; the file appears whole or not at all."""
    rows = [{**record.as_dict(), **({"circumstances": circumstances} if circumstances else {})} for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".json")
    with os.fdopen(handle, "w") as file:
        json.dump(rows, file, indent=1)
        file.write("\n")
    os.replace(name, path)


def _verdict(record: Record) -> str:
    if record.skipped:
        return f"not run: {record.reason}"
    return "yes" if record.ok else "NO"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"

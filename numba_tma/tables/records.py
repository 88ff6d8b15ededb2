"""What the tables have in common: records out of docs/results/, by problem and by case, and how they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..report import markdown, seconds

Record = dict[str, Any]

# Of scripts/measure.py.
MEASUREMENTS, MOVEMENT = "h200_measurements.json", "h200_movement.json"
_COMPUTE_BOUND = 50  # flops a byte from which a problem's rate is given in TFLOP/s


def load(results: Path, name: str) -> Any:
    """Content of one file of results."""
    return json.loads((results / name).read_text())


def load_records(results: Path) -> list[Record]:
    """All records of `run_all.py --json` in a folder: of the files whose names have run_all in them, in their order.

    Raises:
        ValueError: two files have the same problem on the same device; the message names them.
    """
    found: dict[tuple[str, str], Path] = {}
    records = []
    for file in sorted(results.glob("*run_all*.json")):
        for record in json.loads(file.read_text()):
            key = record["problem"], record["device"]
            if found.setdefault(key, file) != file:
                raise ValueError(f"{found[key].name} and {file.name} both have {key[0]} on {key[1]}; keep one of them")
            records.append(record)
    return records


def runs(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by problem, those of further devices under 'problem, device'."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        first = groups.get(record["problem"])
        alone = first is None or first[0]["device"] == record["device"]
        groups.setdefault(record["problem"] if alone else f"{record['problem']}, {record['device']}", []).append(record)
    return groups


def rate(records: Iterable[Record]) -> tuple[str, str]:
    """In which unit to give a problem's rates and the records' key for it: TFLOP/s where arithmetic is the limit."""
    timed = [record for record in records if record["seconds"]]
    if max(record["tflop_per_s"] * 1e3 / record["gb_per_s"] for record in timed) > _COMPUTE_BOUND:
        return "TFLOP/s", "tflop_per_s"
    return "GB/s", "gb_per_s"


def baseline(records: Iterable[Record]) -> str:
    """Name of the variant that the others are compared with."""
    return next((record["variant"] for record in records if record["ratio_to_baseline"] == 1), "baseline")


def circumstances_in_words(circumstances: Mapping[str, Any]) -> str:
    """Where and with what something was measured, in a line."""
    driver = circumstances["driver_cuda"]
    versions = [f"{name} {circumstances[name]}" for name in ("numba", "numba-cuda", "cuda-bindings")]
    return ", ".join(
        [
            circumstances["device"],
            f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}",
            *versions,
            circumstances["date"],
        ]
    )


def options_in_words(options: Mapping[str, Any]) -> str:
    """Options as a reader would write them: tiles as 16×128."""
    return ", ".join(f"{k} {'×'.join(map(str, v)) if isinstance(v, list) else v}" for k, v in options.items())


def cases(records: Iterable[Record]) -> list[list[Record]]:
    """Records of one problem by case: those of one shape and type that were run together, each variant once."""
    groups: list[list[Record]] = []
    for record in records:
        alike = groups and all(groups[-1][0][key] == record[key] for key in ("shape", "dtype"))
        if not alike or record["variant"] in [other["variant"] for other in groups[-1]]:
            groups.append([])
        groups[-1].append(record)
    return groups


def picture_name(run: str) -> str:
    """File name of the picture of one of the `runs`."""
    return re.sub(r"\W+", "_", run) + ".svg"


def best(records: Iterable[Record], group: str, baseline: str, peer: str | None = None) -> str:
    """The fastest configuration of each variant, by what `group` names; beside the baseline and a peer."""
    fastest: dict[Any, dict[str, Record]] = {}
    for record in records:
        of_group = fastest.setdefault(record[group], {})
        known = of_group.get(record["variant"])
        if known is None or record["seconds"] < known["seconds"]:
            of_group[record["variant"]] = record
    rows = []
    for value, variants in fastest.items():
        for name, record in variants.items():
            others = [variants[other]["seconds"] / record["seconds"] for other in (baseline, peer) if other]
            rows.append(
                [
                    value,
                    name if name == peer else f"`{name}`",
                    options_in_words(record["options"]),
                    seconds(record["seconds"]),
                    f"{record['gb_per_s']:,.0f}",
                    f"{record['share_of_device_copy']:.1%}",
                    *(f"{ratio:.2f}×" for ratio in others),
                ]
            )
    versus = [f"vs `{baseline}`", *([f"vs {peer}"] if peer else [])]
    return markdown(rows, [group, "variant", "options", "time", "GB/s", "of device copy", *versus])

"""Tables of docs/transpose.md: the fastest tiles of each step, and banks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..report import markdown
from .records import MOVEMENT, Record, best, load


def banks(records: Iterable[Record]) -> str:
    """Wavefronts of shared memory: what the simulator counts beside what the GPU does."""
    rows = []
    for record in records:
        row = [f"`{record['variant']}`", record["dtype"]]
        for direction in ("ld_shared", "st_shared"):
            use = record[direction]
            if use["least"]:
                row += [
                    f"{use['least']:,}",
                    f"{use['simulator']:,}",
                    f"{use['gpu']:,.0f}",
                    f"{use['gpu'] / use['simulator'] - 1:+.1%}",
                ]
            else:
                row += [""] * 4
        if any(row[2:]):
            rows.append(row)
    headers = [f"{what}{name}" for what in ("loads: ", "stores: ") for name in ("least", "simulator", "GPU", "off by")]
    return markdown(rows, ["variant", "type", *headers])


TABLES: dict[str, Callable[[Path], str]] = {
    "transpose banks": lambda results: banks(load(results, MOVEMENT)["bank_conflicts"]),
    "transpose speed": lambda results: best(load(results, MOVEMENT)["transpose_tiles"], "dtype", "naive", "torch"),
}

"""Tables of docs/transpose.md, docs/multicast.md and docs/tile_sweep.md: banks, L2 traffic, bytes in flight."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .report import markdown, seconds

Record = dict[str, Any]

RESULTS = "h200_movement.json"
_SECTOR = 32  # bytes


def _load(results: Path) -> dict[str, Any]:
    return json.loads((results / RESULTS).read_text())


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


def traffic(records: Sequence[Record]) -> str:
    """What a cluster saves between L2 and the SMs: what all SMs received, over what L2 was read for it."""
    rows = []
    for record in records:
        read = _SECTOR * record["l2_sectors_read_by_sms"]
        rows.append(
            [
                record["what"],
                f"{record['bytes_into_sms'] / 1e6:,.0f}",
                f"{read / 1e6:,.0f}",
                f"{record['bytes_into_sms'] / read:.2f}×",
                seconds(record["seconds"]),
            ]
        )
    return markdown(rows, ["", "MB into SMs", "MB read from L2", "fewer by", "time"])


def promotion(records: Iterable[Record]) -> str:
    """GB/s for each way to let L2 fetch, a row for each kernel."""
    rows: dict[str, dict[str, str]] = {}
    for record in records:
        points = f", {record['options']['points']} points" if "points" in record["options"] else ""
        name = f"`{record['problem']}.{record['variant']}`{points}"
        rows.setdefault(name, {})[record["promotion"]] = f"{record['gb_per_s']:,.0f}"
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items()]
    return markdown(table, ["GB/s with `l2_promotion=`", *(f'`"{column}"`' for column in columns)])


def in_flight(records: Sequence[Record]) -> str:
    """Rate against bytes in flight, for tiles of one size."""
    rows = []
    for record in sorted(records, key=lambda r: (r["in_flight"], r["blocks"])):
        rows.append(
            [
                f"{record['in_flight'] // 1024} KB",
                record["blocks"],
                record["stages"],
                f"{record['gb_per_s']:,.0f}",
                f"{record['share_of_device_copy']:.0%}",
                f"{record['residence_ns']:,.0f} ns",
            ]
        )
    return markdown(
        rows, ["in flight on an SM", "blocks", "stages", "GB/s", "of device copy", "in flight / rate: time of a copy"]
    )


def tiles(records: Sequence[Record]) -> str:
    """Rate against the tile's shape, a block on each SM."""
    rows = []
    for record in records:
        height, width = record["tile"]
        rows.append(
            [
                f"{height}×{width}",
                f"{2 * height * width / 1024:g} KB",
                f"{2 * width} B",
                record["stages"],
                f"{record['in_flight'] // 1024} KB",
                f"{record['gb_per_s']:,.0f}",
                f"{record['share_of_device_copy']:.0%}",
            ]
        )
    return markdown(rows, ["tile, fp16", "bytes", "row", "stages", "in flight on an SM", "GB/s", "of device copy"])


TABLES: dict[str, Callable[[Path], str]] = {
    "transpose banks": lambda results: banks(_load(results)["bank_conflicts"]),
    "l2 promotion": lambda results: promotion(_load(results)["l2_promotion"]),
    "multicast traffic": lambda results: traffic(_load(results)["multicast_traffic"]),
    "bytes in flight": lambda results: in_flight(_load(results)["bytes_in_flight"]),
    "two buffers": lambda results: tiles(_load(results)["two_buffers"]),
    "tile sizes": lambda results: tiles(_load(results)["tile_sizes"]),
    "tile shapes": lambda results: tiles(_load(results)["tile_shapes"]),
}

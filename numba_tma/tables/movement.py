"""Tables of docs/transpose.md, docs/stencil3d.md, docs/multicast.md and docs/tile_sweep.md: banks, L2 traffic, bytes in
flight, what L2 fetches at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..report import markdown, seconds

Record = dict[str, Any]

RESULTS, PROMOTIONS = "h200_movement.json", "h200_l2_promotion.json"
_SECTOR = 32  # bytes


def _load(results: Path, name: str = RESULTS) -> dict[str, Any]:
    return json.loads((results / name).read_text())


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
                    _in_words(record["options"]),
                    seconds(record["seconds"]),
                    f"{record['gb_per_s']:,.0f}",
                    f"{record['share_of_device_copy']:.1%}",
                    *(f"{ratio:.2f}×" for ratio in others),
                ]
            )
    versus = [f"vs `{baseline}`", *([f"vs {peer}"] if peer else [])]
    return markdown(rows, [group, "variant", "options", "time", "GB/s", "of device copy", *versus])


def _in_words(options: Record) -> str:
    """Options as a reader would write them: tiles as 16×128."""
    return ", ".join(f"{k} {'×'.join(map(str, v)) if isinstance(v, list) else v}" for k, v in options.items())


def depths(records: Iterable[Record], tile: tuple[int, int] = (16, 128), rows: int = 4, points: int = 7) -> str:
    """GB/s of stencil3d with its planes in flight, over how far a block goes along z."""
    found: dict[str, dict[int, str]] = {}
    for record in records:
        options = record["options"]
        if record["variant"] not in ("tma", "stages") or record["points"] != points:
            continue
        if tuple(options["tile"]) == tile and options["rows"] == rows:
            name = f"`{record['variant']}`, {options.get('stages', 1)}"
            found.setdefault(name, {})[options["depth"]] = f"{record['gb_per_s']:,.0f}"
    columns = sorted({depth for row in found.values() for depth in row})
    table = [[name, *(row.get(depth, "") for depth in columns)] for name, row in found.items()]
    return markdown(table, ["planes in flight a block; GB/s at depth", *map(str, columns)])


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


def promotions_of_boxes(records: Iterable[Record]) -> str:
    """GB/s of reading boxes, with what L2 fetches at a time in columns, and what less and more are to 128 bytes."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for record in records:
        rates = rows.setdefault((f"{record['row_bytes']} B", record["order"]), {})
        rates[record["promotion"]] = record["gb_per_s"]
    columns = list(next(iter(rows.values())))
    others = [column for column in columns if column != "128B"]
    table = []
    for name, rates in rows.items():
        changes = [f"{rates[other] / rates['128B'] - 1:+.1%}" for other in others]
        table.append([*name, *(f"{rates[column]:,.0f}" for column in columns), *changes])
    headers = [*(f"`{column}`" for column in columns), *(f"`{other}` to `128B`" for other in others)]
    return markdown(table, ["a box's row", "boxes are taken", *headers])


def promotions_of_problems(records: Iterable[Record], shortest: float = 60e-6) -> str:
    """GB/s with L2 fetching 128 bytes and 256 at a time, of cases that take long enough for a percent to be seen."""
    rows = []
    for record in records:
        narrow, wide = record["seconds"]["128B"], record["seconds"]["256B"]
        if wide < shortest:
            continue
        rows.append(
            [
                f"`{record['problem']}.{record['variant']}`",
                "×".join(map(str, record["shape"])),
                record["dtype"],
                _in_words(record["options"]),
                *(f"{record['bytes'] / seconds_ / 1e9:,.0f}" for seconds_ in (narrow, wide)),
                f"{narrow / wide - 1:+.1%}",
            ]
        )
    return markdown(rows, ["variant", "shape", "type", "options", "`128B`, GB/s", "`256B`, GB/s", "256 faster by"])


TABLES: dict[str, Callable[[Path], str]] = {
    "transpose speed": lambda results: best(_load(results)["transpose_tiles"], "dtype", "naive", "torch"),
    "stencil3d speed": lambda results: best(_load(results)["stencil3d_tiles"], "points", "plain"),
    "stencil3d depths": lambda results: depths(_load(results)["stencil3d_tiles"]),
    "transpose banks": lambda results: banks(_load(results)["bank_conflicts"]),
    "multicast traffic": lambda results: traffic(_load(results)["multicast_traffic"]),
    "bytes in flight": lambda results: in_flight(_load(results)["bytes_in_flight"]),
    "tile sizes": lambda results: tiles(_load(results)["tile_sizes"]),
    "L2 promotion of boxes": lambda results: promotions_of_boxes(_load(results, PROMOTIONS)["l2_promotion_of_boxes"]),
    "L2 promotion of problems": lambda results: promotions_of_problems(_load(results, PROMOTIONS)["l2_promotion"]),
    "tile shapes": lambda results: tiles(_load(results)["tile_shapes"]),
}

"""Tables of docs/tile_sweep.md: bytes in flight, tiles, and what L2 fetches at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..report import markdown
from .records import MOVEMENT, Record, load, options_in_words

PROMOTIONS = "h200_l2_promotion.json"


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
                options_in_words(record["options"]),
                *(f"{record['bytes'] / spent / 1e9:,.0f}" for spent in (narrow, wide)),
                f"{narrow / wide - 1:+.1%}",
            ]
        )
    return markdown(rows, ["variant", "shape", "type", "options", "`128B`, GB/s", "`256B`, GB/s", "256 faster by"])


TABLES: dict[str, Callable[[Path], str]] = {
    "bytes in flight": lambda results: in_flight(load(results, MOVEMENT)["bytes_in_flight"]),
    "tile sizes": lambda results: tiles(load(results, MOVEMENT)["tile_sizes"]),
    "tile shapes": lambda results: tiles(load(results, MOVEMENT)["tile_shapes"]),
    "L2 promotion of boxes": lambda results: promotions_of_boxes(load(results, PROMOTIONS)["l2_promotion_of_boxes"]),
    "L2 promotion of problems": lambda results: promotions_of_problems(load(results, PROMOTIONS)["l2_promotion"]),
}

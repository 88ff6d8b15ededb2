"""Tables of bytes in flight, of tiles and of what L2 fetches, made of records like those measured."""

from __future__ import annotations

from cells import row

from numba_tma.tables import tile_sweep as tables_tile_sweep


def test_bytes_in_flight_and_tiles():
    def measured(tile, stages, blocks):
        return {
            "tile": list(tile),
            "stages": stages,
            "blocks": blocks,
            "in_flight": 4 * tile[0] * tile[1] * stages * blocks,
            "gb_per_s": 2113.4,
            "share_of_device_copy": 0.497,
            "residence_ns": 1023.4,
        }

    made = tables_tile_sweep.in_flight([measured((64, 64), 2, 2), measured((64, 64), 1, 1)])
    assert [line.split("|")[1].strip() for line in made.splitlines()[2:]] == ["16 KB", "64 KB"]
    assert row(made, "64 KB") == ["64 KB", "2", "2", "2,113", "50%", "1,023 ns"]
    made = tables_tile_sweep.tiles([measured((8, 64), 32, 1)])
    assert row(made, "8×64") == ["8×64", "1 KB", "128 B", "32", "64 KB", "2,113", "50%"]


def test_what_l2_fetches_at_a_time():
    boxes = [
        {"row_bytes": 128, "order": "along rows", "promotion": promotion, "gb_per_s": rate}
        for promotion, rate in (("none", 4544.8), ("128B", 4541.0), ("256B", 4141.0))
    ]
    made = tables_tile_sweep.promotions_of_boxes(boxes)
    headers = ["`none`", "`128B`", "`256B`", "`none` to `128B`", "`256B` to `128B`"]
    assert row(made, "a box") == ["a box's row", "boxes are taken", *headers]
    assert row(made, "128 B") == ["128 B", "along rows", "4,545", "4,541", "4,141", "+0.1%", "-8.8%"]

    def taking(shape, options, narrow, wide):
        seconds = {"none": narrow, "128B": narrow, "256B": wide}
        return {"problem": "copy", "variant": "tensor", "shape": shape, "dtype": "int8", "options": options} | {
            "bytes": 800_000_000,
            "seconds": seconds,
        }

    made = tables_tile_sweep.promotions_of_problems(
        [taking([64, 32], {"box": [8, 16]}, 220e-6, 200e-6), taking([1, 1], {}, 30e-6, 40e-6)]
    )
    assert row(made, "`copy.tensor`") == [
        *("`copy.tensor`", "64×32", "int8", "box 8×16"),
        *("3,636", "4,000", "+10.0%"),
    ]
    assert len(made.splitlines()) == 3

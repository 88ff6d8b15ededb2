"""Tables of banks, of what multicast saves and of bytes in flight, made of records like those measured."""

from __future__ import annotations

import re

from numba_tma.tables import movement as tables_movement


def cells(table, first):
    """The row of a table that begins so, or its headers."""
    row = next(line for line in table.splitlines() if re.sub(" +", " ", line).startswith(f"| {first}"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_banks():
    nothing = {"gpu": 0.0, "simulator": 0, "least": 0}
    made = tables_movement.banks(
        [
            {"variant": "naive", "dtype": "int8", "ld_shared": nothing, "st_shared": nothing},
            {
                "variant": "tma",
                "dtype": "int8",
                "ld_shared": {"gpu": 263000.0, "simulator": 262144, "least": 8192},
                "st_shared": nothing,
            },
            {
                "variant": "store",
                "dtype": "int8",
                "ld_shared": {"gpu": 2048.0, "simulator": 2048, "least": 2048},
                "st_shared": {"gpu": 2000.0, "simulator": 2048, "least": 2048},
            },
        ]
    )
    assert "naive" not in made  # it has no shared memory
    assert cells(made, "`tma`") == ["`tma`", "int8", "8,192", "262,144", "263,000", "+0.3%", "", "", "", ""]
    assert cells(made, "`store`")[2:] == ["2,048", "2,048", "2,048", "+0.0%", "2,048", "2,048", "2,000", "-2.3%"]


def test_traffic():
    def measured(what, sectors, seconds):
        return {
            "what": what,
            "l2_sectors_read_by_sms": sectors,
            "bytes_into_sms": 1_080_000_000.0,
            "seconds": seconds,
        }

    made = tables_movement.traffic(
        [measured("alone", 33_750_000.0, 200e-6), measured("clusters of 4", 8_437_500.0, 80e-6)]
    )
    assert cells(made, "alone") == ["alone", "1,080", "1,080", "1.00×", "200 µs"]
    assert cells(made, "clusters") == ["clusters of 4", "1,080", "270", "4.00×", "80 µs"]


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

    made = tables_movement.in_flight([measured((64, 64), 2, 2), measured((64, 64), 1, 1)])
    assert [line.split("|")[1].strip() for line in made.splitlines()[2:]] == ["16 KB", "64 KB"]
    assert cells(made, "64 KB") == ["64 KB", "2", "2", "2,113", "50%", "1,023 ns"]
    made = tables_movement.tiles([measured((8, 64), 32, 1)])
    assert cells(made, "8×64") == ["8×64", "1 KB", "128 B", "32", "64 KB", "2,113", "50%"]


def test_what_l2_fetches_at_a_time():
    boxes = [
        {"row_bytes": 128, "order": "along rows", "promotion": promotion, "gb_per_s": rate}
        for promotion, rate in (("none", 4544.8), ("128B", 4541.0), ("256B", 4141.0))
    ]
    made = tables_movement.promotions_of_boxes(boxes)
    headers = ["`none`", "`128B`", "`256B`", "`none` to `128B`", "`256B` to `128B`"]
    assert cells(made, "a box") == ["a box's row", "boxes are taken", *headers]
    assert cells(made, "128 B") == ["128 B", "along rows", "4,545", "4,541", "4,141", "+0.1%", "-8.8%"]

    def taking(shape, options, narrow, wide):
        seconds = {"none": narrow, "128B": narrow, "256B": wide}
        return {"problem": "copy", "variant": "tensor", "shape": shape, "dtype": "int8", "options": options} | {
            "bytes": 800_000_000,
            "seconds": seconds,
        }

    made = tables_movement.promotions_of_problems(
        [taking([64, 32], {"box": [8, 16]}, 220e-6, 200e-6), taking([1, 1], {}, 30e-6, 40e-6)]
    )
    assert cells(made, "`copy.tensor`") == [
        *("`copy.tensor`", "64×32", "int8", "box 8×16"),
        *("3,636", "4,000", "+10.0%"),
    ]
    assert len(made.splitlines()) == 3


def test_best_of_each_variant():
    def measured(variant, seconds, **options):
        found = {"variant": variant, "dtype": "int8", "options": options, "seconds": seconds}
        return {**found, "gb_per_s": 1e-3 / seconds, "share_of_device_copy": 0.961}

    made = tables_movement.best(
        [
            measured("naive", 900e-6),
            measured("vector", 200e-6, tile=[1, 1]),
            measured("vector", 100e-6, tile=[2, 2], threads=256),
            measured("torch", 150e-6),
        ],
        "dtype",
        "naive",
        "torch",
    )
    assert cells(made, "int8 | `naive`") == ["int8", "`naive`", "", "900 µs", "1", "96.1%", "1.00×", "0.17×"]
    row = ["int8", "`vector`", "tile 2×2, threads 256", "100 µs", "10", "96.1%", "9.00×", "1.50×"]
    assert cells(made, "int8 | `vector`") == row
    assert cells(made, "int8 | torch")[-2:] == ["6.00×", "1.00×"]


def test_depths():
    def measured(variant, depth, gb_per_s, points=7, **options):
        options = {"tile": [16, 128], "rows": 4, "depth": depth, **options}
        return {"variant": variant, "points": points, "options": options, "gb_per_s": gb_per_s}

    plain = {"variant": "plain", "points": 7, "options": {}, "gb_per_s": 1.0}
    one, two = measured("tma", 128, 3603.4), measured("stages", 256, 3630.0, stages=2)
    made = tables_movement.depths([plain, one, two, measured("tma", 64, 1.0, points=27)])
    assert cells(made, "planes")[1:] == ["128", "256"]
    assert cells(made, "`tma`, 1")[1:] == ["3,603", ""]
    assert cells(made, "`stages`, 2")[1:] == ["", "3,630"]

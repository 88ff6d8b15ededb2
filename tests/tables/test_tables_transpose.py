"""Table of banks, made of records like those measured."""

from __future__ import annotations

from cells import row

from numba_tma.tables import transpose as tables_transpose


def test_banks():
    nothing = {"gpu": 0.0, "simulator": 0, "least": 0}
    made = tables_transpose.banks(
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
    assert row(made, "`tma`") == ["`tma`", "int8", "8,192", "262,144", "263,000", "+0.3%", "", "", "", ""]
    assert row(made, "`store`")[2:] == ["2,048", "2,048", "2,048", "+0.0%", "2,048", "2,048", "2,000", "-2.3%"]

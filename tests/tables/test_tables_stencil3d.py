"""Table of planes in flight, made of records like those measured."""

from __future__ import annotations

from cells import row

from numba_tma.tables import stencil3d as tables_stencil3d


def test_depths():
    def measured(variant, depth, gb_per_s, points=7, **options):
        options = {"tile": [16, 128], "rows": 4, "depth": depth, **options}
        return {"variant": variant, "points": points, "options": options, "gb_per_s": gb_per_s}

    plain = {"variant": "plain", "points": 7, "options": {}, "gb_per_s": 1.0}
    one, two = measured("tma", 128, 3603.4), measured("stages", 256, 3630.0, stages=2)
    made = tables_stencil3d.depths([plain, one, two, measured("tma", 64, 1.0, points=27)])
    assert row(made, "planes")[1:] == ["128", "256"]
    assert row(made, "`tma`, 1")[1:] == ["3,603", ""]
    assert row(made, "`stages`, 2")[1:] == ["", "3,630"]

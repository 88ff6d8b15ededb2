"""Tables of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from numba_tma import tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_only_the_regions_change():
    text = "before\n<!-- table: circumstances -->\nstale\n<!-- end -->\nafter\n"
    made = tables.update(text, RESULTS)
    assert made.startswith("before\n") and made.endswith("after\n") and "stale" not in made and "NVIDIA" in made
    assert tables.update(made, RESULTS) == made


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="nothing"):
        tables.update("<!-- table: nothing -->\n<!-- end -->", RESULTS)

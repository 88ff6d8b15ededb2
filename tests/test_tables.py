"""Tables of the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from numba_tma import tables

RESULTS = Path(__file__).parents[1] / "docs" / "results"


def record(variant: str, shape: tuple[int, ...] = (1, 2), dtype: str = "float32") -> dict:
    return {"variant": variant, "shape": list(shape), "dtype": dtype}


def test_cases_are_what_ran_together():
    records = [record("a"), record("b"), record("a"), record("b"), record("a", (3, 4)), record("b", (3, 4), "int8")]
    assert [len(group) for group in tables.cases(records)] == [2, 2, 1, 1]
    assert tables.cases([]) == []


def test_options_in_words():
    assert tables.options_in_words({"splits": 4, "tile": [16, 128]}) == "splits 4, tile 16×128"
    assert tables.options_in_words({}) == ""


def test_only_the_regions_change():
    text = "before\n<!-- table: circumstances -->\nstale\n<!-- end -->\nafter\n"
    made = tables.update(text, RESULTS)
    assert made.startswith("before\n") and made.endswith("after\n") and "stale" not in made and "NVIDIA" in made
    assert tables.update(made, RESULTS) == made


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="nothing"):
        tables.update("<!-- table: nothing -->\n<!-- end -->", RESULTS)

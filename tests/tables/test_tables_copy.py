"""Table of rates over element types."""

from __future__ import annotations

from cells import rows

from numba_tma.tables import copy as tables_copy


def test_copies_by_type():
    records = [{"dtype": "int8", "gb_per_s": {"driver": 4000.0, "plain": 1000.0, "bulk": 3960.0}}]
    assert rows(tables_copy.copy_types(records)) == [["int8", "4,000", "25.0%", "99.0%"]]

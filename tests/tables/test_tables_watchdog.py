"""Table of what a watchdog costs, made of records like those measured."""

from __future__ import annotations

import json

from cells import row

from numba_tma.tables.watchdog import RESULTS, TABLES


def test_cost(tmp_path):
    records = [
        {"what": "copy.bulk", "seconds": 3.2e-5, "seconds_with_watchdog": 3.2e-5},
        {"what": "handoffs", "seconds": 1.2e-3, "seconds_with_watchdog": 1.8e-3},
    ]
    (tmp_path / RESULTS).write_text(json.dumps({"watchdog_cost": records}))
    made = TABLES["watchdog cost"](tmp_path)
    assert row(made, "`copy.bulk`") == ["`copy.bulk`", "32 µs", "32 µs", "+0%"]
    assert row(made, "`handoffs`") == ["`handoffs`", "1.2 ms", "1.8 ms", "+50%"]

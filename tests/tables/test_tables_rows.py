"""Tables of rates over row lengths."""

from __future__ import annotations

from cells import rows

from numba_tma.tables import rows as tables_rows

RECORDS = [
    {
        "operation": operation,
        "dtype": "float32",
        "columns": 4096,
        "gb_per_s": {"driver's copy": 4000.0, "bulk": 3000.0 * factor, "ring": 3900.0, "torch": 2000.0},
    }
    for operation, factor in (("softmax", 1.0), ("rmsnorm", 1.5))
]


def test_the_fastest_at_each_length():
    assert rows(tables_rows.rates(RECORDS)) == [
        ["4,096", "float32", "`ring`", "3,900", "97.5%", "2,000", ""],
        ["4,096", "float32", "`bulk`", "4,500", "112.5%", "2,000", ""],
    ]


def test_steps_of_one_length():
    assert rows(tables_rows.steps(RECORDS, 4096, "float32")) == [
        ["`driver's copy`", "4,000", "4,000"],
        ["`ring`", "3,900", "3,900"],
        ["`bulk`", "3,000", "4,500"],
        ["`torch`", "2,000", "2,000"],
    ]


def test_trials_of_one_operation():
    assert rows(tables_rows.trials(RECORDS, "rmsnorm", 4096, "float32")) == [
        ["`bulk`", "4,500", "112.5%"],
        ["`driver's copy`", "4,000", "100.0%"],
        ["`ring`", "3,900", "97.5%"],
        ["`torch`", "2,000", "50.0%"],
    ]

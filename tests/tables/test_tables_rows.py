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
        ["`bulk`", "3,000", "4,500"],
        ["`driver's copy`", "4,000", "4,000"],
        ["`ring`", "3,900", "3,900"],
        ["`torch`", "2,000", "2,000"],
    ]


def test_a_step_of_one_operation_only():
    records = [{**record, "gb_per_s": dict(record["gb_per_s"])} for record in RECORDS]
    records[1]["gb_per_s"]["grid"] = 9000.0
    assert rows(tables_rows.steps(records, 4096, "float32"))[0] == ["`grid`", "", "9,000"]


def test_trials_of_one_operation():
    assert rows(tables_rows.trials(RECORDS, "rmsnorm", 4096, "float32")) == [
        ["`bulk`", "4,500", "112.5%"],
        ["`driver's copy`", "4,000", "100.0%"],
        ["`ring`", "3,900", "97.5%"],
        ["`torch`", "2,000", "50.0%"],
    ]


def test_trials_with_what_they_take():
    record = {**RECORDS[0], "registers": {"ring": 40}, "blocks": {"ring": 396}}
    assert rows(tables_rows.trials([record], "softmax", 4096, "float32"))[:2] == [
        ["`driver's copy`", "", "", "4,000", "100.0%"],
        ["`ring`", "40", "396", "3,900", "97.5%"],
    ]


def test_ways_to_exchange_pairs():
    rates = {"driver's copy": 4000.0, "stores": 3000.4, "copies": 3500.0, "copies, keep=True": 3999.6}
    record = {"operation": "softmax", "dtype": "bfloat16", "columns": 65536, "gb_per_s": rates}
    assert rows(tables_rows.meetings([record])) == [
        ["65,536", "bfloat16", "3,000", "3,500", "4,000", "4,000"],
    ]

"""Records by problem and by case, in words, and the fastest of them."""

from __future__ import annotations

import json

import pytest
from cells import row
from run_all_records import measured

from numba_tma.tables import records as tables_records


def record(variant: str, shape: tuple[int, ...] = (1, 2), dtype: str = "float32") -> dict:
    return {"variant": variant, "shape": list(shape), "dtype": dtype}


def test_cases_are_what_ran_together():
    records = [record("a"), record("b"), record("a"), record("b"), record("a", (3, 4)), record("b", (3, 4), "int8")]
    assert [len(group) for group in tables_records.cases(records)] == [2, 2, 1, 1]
    assert tables_records.cases([]) == []


def test_options_in_words():
    assert tables_records.options_in_words({"splits": 4, "tile": [16, 128]}) == "splits 4, tile 16×128"
    assert tables_records.options_in_words({}) == ""


def test_records_of_all_files_and_each_problem_once(tmp_path):
    (tmp_path / "a_run_all.json").write_text(json.dumps([measured()]))
    (tmp_path / "b_run_all.json").write_text(json.dumps([measured("other"), measured(device="another GPU")]))
    (tmp_path / "unrelated.json").write_text("{}")
    records = tables_records.load_records(tmp_path)
    assert [(r["problem"], r["device"]) for r in records] == [
        ("product", "GPU"),
        ("other", "GPU"),
        ("product", "another GPU"),
    ]
    assert list(tables_records.runs(records)) == ["product", "other", "product, another GPU"]
    assert tables_records.picture_name("product, another GPU") == "product_another_GPU.svg"
    (tmp_path / "c_run_all.json").write_text(json.dumps([measured("other")]))
    with pytest.raises(ValueError, match=r"b_run_all\.json and c_run_all\.json both have other on GPU"):
        tables_records.load_records(tmp_path)


def test_a_problem_bound_by_arithmetic_is_given_in_flops():
    assert tables_records.rate([measured(tflop_per_s=1.0)]) == ("GB/s", "gb_per_s")  # 10 flops a byte
    assert tables_records.rate([measured(tflop_per_s=700.0), measured(seconds=None)]) == ("TFLOP/s", "tflop_per_s")


def test_best_of_each_variant():
    def timed(variant, seconds, **options):
        found = {"variant": variant, "dtype": "int8", "options": options, "seconds": seconds}
        return {**found, "gb_per_s": 1e-3 / seconds, "share_of_device_copy": 0.961}

    made = tables_records.best(
        [
            timed("naive", 900e-6),
            timed("vector", 200e-6, tile=[1, 1]),
            timed("vector", 100e-6, tile=[2, 2], threads=256),
            timed("torch", 150e-6),
        ],
        "dtype",
        "naive",
        "torch",
    )
    assert row(made, "int8 | `naive`") == ["int8", "`naive`", "", "900 µs", "1", "96.1%", "1.00×", "0.17×"]
    fastest = ["int8", "`vector`", "tile 2×2, threads 256", "100 µs", "10", "96.1%", "9.00×", "1.50×"]
    assert row(made, "int8 | `vector`") == fastest
    assert row(made, "int8 | torch")[-2:] == ["6.00×", "1.00×"]

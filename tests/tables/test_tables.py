"""Tables of the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numba_tma import tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"


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


CIRCUMSTANCES = {
    "date": "2026-01-02",
    "device": "GPU",
    "driver_cuda": 12080,
    "numba": "1",
    "numba-cuda": "2",
    "cuda-bindings": "3",
}


def measured(problem: str = "product", device: str = "GPU", **changes) -> dict:
    return {
        "problem": problem,
        "variant": "naive",
        "device": device,
        "shape": [8, 8],
        "dtype": "float16",
        "options": {},
        "ok": True,
        "reason": "",
        "error": 0.0,
        "seconds": 1e-3,
        "gb_per_s": 100.0,
        "tflop_per_s": 0.0,
        "share_of_device_copy": 0.5,
        "ratio_to_baseline": 1.0,
        "peer": None,
        "ratio_to_peer": None,
        "circumstances": CIRCUMSTANCES,
        **changes,
    }


def test_records_of_all_files_and_each_problem_once(tmp_path):
    (tmp_path / "a_run_all.json").write_text(json.dumps([measured()]))
    (tmp_path / "b_run_all.json").write_text(json.dumps([measured("other"), measured(device="another GPU")]))
    (tmp_path / "unrelated.json").write_text("{}")
    records = tables.load_records(tmp_path)
    assert [(r["problem"], r["device"]) for r in records] == [
        ("product", "GPU"),
        ("other", "GPU"),
        ("product", "another GPU"),
    ]
    assert list(tables.runs(records)) == ["product", "other", "product, another GPU"]
    assert tables.picture_name("product, another GPU") == "product_another_GPU.svg"
    (tmp_path / "c_run_all.json").write_text(json.dumps([measured("other")]))
    with pytest.raises(ValueError, match=r"b_run_all\.json and c_run_all\.json both have other on GPU"):
        tables.load_records(tmp_path)


def test_a_problem_bound_by_arithmetic_is_given_in_flops():
    assert tables.rate([measured(tflop_per_s=1.0)]) == ("GB/s", "gb_per_s")  # 10 flops a byte
    assert tables.rate([measured(tflop_per_s=700.0), measured(seconds=None)]) == ("TFLOP/s", "tflop_per_s")


def test_a_problem_has_its_section(tmp_path):
    peered = measured(variant="fast", ratio_to_baseline=4.0, peer="cuBLAS", ratio_to_peer=0.9, tflop_per_s=640.0)
    wrong = measured(variant="wrong", ok=False, reason="error 3 above 1", error=3.0, seconds=None, gb_per_s=None)
    records = [measured(tflop_per_s=160.0), peered, {**wrong, "ratio_to_baseline": None, "tflop_per_s": None}]
    (tmp_path / "run_all.json").write_text(json.dumps(records))
    text = tables.update("<!-- table: problems -->\n<!-- end -->\n", tmp_path)
    assert "### product" in text and "](../pictures/product.svg)" in text and "driver for CUDA 12.8" in text
    head, rows = text.split("|\n|--")[0], text.split("\n")
    assert "vs `naive`" in head and "vs cuBLAS" in head and "TFLOP/s" in head and "GB/s" not in head
    fast = next(row for row in rows if "`fast`" in row)
    assert "4.00×" in fast and "0.90×" in fast and "640" in fast
    assert "error 3 above 1" in next(row for row in rows if "`wrong`" in row)

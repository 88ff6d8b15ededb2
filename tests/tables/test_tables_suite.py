"""Sections of docs/results/README.md."""

from __future__ import annotations

import json

from run_all_records import measured

from numba_tma import tables


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

"""The tables of attention: what stands in which row and column, from made-up measurements."""

from __future__ import annotations

import json

from numba_tma.tables import attention as tables_attention


def cells(table):
    """Rows of a Markdown table as lists of stripped cells, the line under the head left out."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line]
    return [row for row in rows if not set("".join(row)) <= set("-:")]


def forward(length, causal, ours, **peers):
    return {"head_dim": 128, "causal": causal, "length": length, "tflop_per_s": {"numba-tma": ours, **peers}}


def test_forward_compares_with_each_peer_and_leaves_out_who_is_not_here():
    records = [
        forward(1024, False, 600.0, **{"FlashAttention-3": 500.0, "FlashAttention-2": 300.0}),
        forward(2048, True, 450.0, cuDNN=500.0),
    ]
    head, first, second = cells(tables_attention.forward(records))
    assert head == ["D", "keys seen", "S", "TFLOP/s", "of FlashAttention-3", "of cuDNN", "of FlashAttention-2"]
    assert first == ["128", "all", "1,024", "600", "1.20 ×", "", "2.00 ×"]
    assert second == ["128", "causal", "2,048", "450", "", "0.90 ×", ""]


def test_steps_have_a_row_each():
    speeds = {"mma_tma": 350.4, "FlashAttention-2": 300.6}
    head, *rows = cells(tables_attention.steps([{"causal": True, "length": 4096, "tflop_per_s": speeds}]))
    assert head == ["step", "S = 4,096, causal"]
    assert rows == [["`mma_tma`", "350"], ["FlashAttention-2", "301"]]


def test_errors_are_grouped_by_input():
    records = [
        {"name": name, "head_dim": 64, "causal": False, "outliers": outliers, "rms": rms, "largest": 0.01}
        for name, rms in (("numba-tma", 0.002), ("cuDNN", 0.003))
        for outliers in (False, True)
    ]
    _, *rows = cells(tables_attention.errors(records))
    assert [row[2] for row in rows] == ["normal", "outliers"]
    assert rows[0][3:] == ["2.00e-03, 1.0e-02", "3.00e-03, 1.0e-02"]


def test_claims_come_from_the_measurements(tmp_path):
    ladder = ("mma_cp_async", "mma_tma", "wgmma", "warpgroups", "overlapped", "FlashAttention-2")
    steps = {"causal": False, "length": 4096, "tflop_per_s": dict(zip(ladder, range(100, 700, 100), strict=True))}
    whole = [
        {"name": name, "causal": False, "seconds": s, "joules": 100 * s}
        for name, s in (("numba-tma", 1.0), ("FlashAttention-2", 2.0))
    ]
    measured = {
        "attention_steps": [steps],
        "attention_long": whole,
        "attention_forward": [forward(4096, False, 650.0)],
    }
    (tmp_path / tables_attention.FILE).write_text(json.dumps(measured))
    rows = {claim: figures for claim, _, figures in tables_attention.claims(tmp_path)}
    assert rows["5"] == "2.00 ×"
    assert rows["6"] == "600, 100, 200, 300, 400, 500, 650"
    assert rows["15"] == "2 s and 200 J, 1 s and 100 J"

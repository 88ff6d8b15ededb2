"""Tables of docs/attention_fp8.md from data of known content."""

from __future__ import annotations

import json

from numba_tma.tables_attention_fp8 import FA3_8, FILE, ONE, OURS, OURS_16, TABLES

FORWARD = {
    "head_dim": 128,
    "causal": True,
    "length": 4096,
    "seconds": {"quantise": 8e-5, OURS: 4e-4},
    "tflop_per_s": {OURS: 840.0, ONE: 880.0, OURS_16: 700.0, FA3_8: 800.0},
}
ERRORS = [
    {"name": "scales of blocks", "length": 4096, "inputs": "normal", "rms": 0.0525, "largest": 0.31},
    {"name": FA3_8, "length": 4096, "inputs": "normal", "rms": 0.0534, "largest": 0.4},
    {"name": "scales of blocks", "length": 4096, "inputs": "outliers", "rms": 0.0679, "largest": 9.2},
]


def rows(tmp_path, name):
    (tmp_path / FILE).write_text(json.dumps({"attention_fp8_forward": [FORWARD], "attention_fp8_errors": ERRORS}))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLES[name](tmp_path).splitlines()]


def test_forward(tmp_path):
    header, _, row = rows(tmp_path, "attention fp8")
    assert header[:4] == ["D", "keys seen", "S", "TFLOP/s"]
    # No time of FlashAttention-3 in 16 bits, where it was not installed.
    assert row == ["128", "causal", "4,096", "840", "880", "1.20 ×", "", "1.05 ×", "80 µs to 400 µs"]


def test_errors(tmp_path):
    header, _, normal, outliers = rows(tmp_path, "attention fp8 errors")
    assert header == ["inputs", "S", "scales of blocks: rms, largest", f"{FA3_8}: rms, largest"]
    assert normal == ["normal", "4,096", "5.2%, 0.3", "5.3%, 0.4"]
    assert outliers == ["outliers", "4,096", "6.8%, 9", ""]

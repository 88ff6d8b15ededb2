"""Tables of docs/attention_fp8.md from data of known content."""

from __future__ import annotations

import json

from numba_tma.tables.attention_fp8 import FA3_8, FILE, ONE, OURS, OURS_16, TABLES

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

CUT = {"keys": 128, "stages": 3, "promote": True, "ping_pong": False, "consumers": 2}
CONFIGURATIONS = [
    CUT | {"head_dim": 128, "length": 4096, "causal": False, "tflop_per_s": 833.4},
    CUT | {"head_dim": 128, "length": 4096, "causal": True, "tflop_per_s": 810.0},
    CUT | {"head_dim": 128, "length": 4096, "causal": True, "promote": False, "ping_pong": True, "tflop_per_s": 900.0},
]


def rows(tmp_path, name):
    data = {
        "attention_fp8_forward": [FORWARD],
        "attention_fp8_errors": ERRORS,
        "attention_fp8_configurations": CONFIGURATIONS,
    }
    (tmp_path / FILE).write_text(json.dumps(data))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in TABLES[name](tmp_path).splitlines()]


def test_forward(tmp_path):
    header, _, row = rows(tmp_path, "attention fp8")
    assert header[:4] == ["D", "keys seen", "S", "TFLOP/s"]
    # No column for FlashAttention-3 in 16 bits, which was not measured.
    assert row == ["128", "causal", "4,096", "840", "880", "1.20 ×", "1.05 ×", "80 µs to 400 µs"]


def test_errors(tmp_path):
    header, _, normal, outliers = rows(tmp_path, "attention fp8 errors")
    assert header == ["inputs", "S", "scales of blocks: rms, largest", f"{FA3_8}: rms, largest"]
    assert normal == ["normal", "4,096", "5.2%, 0.3", "5.3%, 0.4"]
    assert outliers == ["outliers", "4,096", "6.8%, 9", ""]


def test_configurations(tmp_path):
    header, _, ours, other = rows(tmp_path, "attention fp8 configurations")
    assert header == ["keys", "consumers", "accumulator", "", "D 128, S 4,096", "D 128, S 4,096, causal"]
    assert ours == ["128", "2", "each block's", "", "833", "810"]
    assert other == ["128", "2", "one", "in turns", "", "900"]

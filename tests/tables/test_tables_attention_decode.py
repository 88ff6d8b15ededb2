"""The tables of decoding."""

from __future__ import annotations

from numba_tma.tables import attention_decode as tables_decode


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_promotion():
    case = {"batch": 2, "capacity": 4096, "kv_heads": 8, "group": 4, "head_dim": 128, "bytes": 4e9}
    made = tables_decode.promotion([{**case, "seconds": {"none": 1e-3, "256B": 0.5e-3}}]).splitlines()
    assert cells(made[0])[4:] == ["`none`, TB/s", "`256B`, TB/s"]
    assert cells(made[2]) == ["2", "4,096", "8 × 4", "128", "4.00", "8.00"]


def test_speed():
    case = {"batch": 2, "capacity": 4096, "kv_heads": 8, "group": 4, "head_dim": 128, "sq": 1}
    records = [
        {**case, "page_size": 0, "filled": 1.0, "bytes": 4e9, "seconds": {"decode": 1e-3, "cuDNN": 1.5e-3}},
        {**case, "page_size": 16, "filled": 0.25, "bytes": 1e9, "seconds": {"decode": 0.5e-3}},
    ]
    first, second = map(cells, tables_decode.speed(records, 5e12).splitlines()[2:])
    assert first == ["2", "4,096", "8 × 4", "128", "1", "contiguous", "1 ms", "4.00", "80%", "1.50×", ""]
    assert second[5:] == ["pages of 16, 25% full", "500 µs", "2.00", "40%", "", ""]

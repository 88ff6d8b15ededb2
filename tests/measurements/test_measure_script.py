"""scripts/measure.py keeps each record as soon as it is there."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from numba_tma import launch, measurements, suite

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure.py"


def test_what_was_measured_before_the_end_is_kept(tmp_path, monkeypatch):
    def broken_off():
        yield {"columns": 1, "seconds": 0.5}
        yield {"columns": 2, "seconds": 0.25}
        raise TimeoutError

    kept = tmp_path / "results" / "kept.json"
    monkeypatch.setattr(launch, "gpu_refusal", lambda: None)
    monkeypatch.setattr(suite, "circumstances", lambda: {"device": "none"})
    monkeypatch.setattr(measurements, "ALL", {"whole": lambda: [{"columns": 3}], "broken": broken_off, "after": list})
    monkeypatch.setattr(sys, "argv", ["measure.py", "--json", str(kept)])
    with pytest.raises(TimeoutError):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert json.loads(kept.read_text()) == {
        "circumstances": {"device": "none"},
        "whole": [{"columns": 3}],
        "broken": [{"columns": 1, "seconds": 0.5}, {"columns": 2, "seconds": 0.25}],
    }

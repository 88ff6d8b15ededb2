"""The programs that record what hazards do on a GPU, tried in the simulator; what was recorded of the mended ones."""

from __future__ import annotations

import hazard_runs
import numpy as np
import pytest
import records
from hazard_runs import CASES

from numba_tma import sim


@pytest.fixture(autouse=True)
def few_launches(monkeypatch):
    monkeypatch.setattr(hazard_runs, "LAUNCHES", 2)


@pytest.mark.parametrize("name", CASES)
def test_mended_programs_are_right(name, tmp_path):
    found = hazard_runs.observe(name, True, str(tmp_path / "progress"), on_gpu=False)
    assert found == {"right": 2, "wrong": 0, "error": ""}
    assert (tmp_path / "progress").read_text() == "2 0"
    assert any(array.size for array in hazard_runs.expected(name))


def test_wrong_numbers_and_hangs_are_told_apart(tmp_path):
    progress = tmp_path / "progress"
    early = hazard_runs.observe("tile-used-before-wait", False, str(progress), on_gpu=False)
    assert early == {"right": 0, "wrong": 2, "error": ""}
    with pytest.raises(sim.Deadlock):
        hazard_runs.observe("fewer-bytes-than-expected", False, str(progress), on_gpu=False)


def test_words():
    describe = hazard_runs.describe
    assert describe({"right": 20, "wrong": 0, "error": ""}) == "20 launches ended with the right numbers"
    assert "1 launch ended with wrong numbers, the next one hung" in describe({"right": 0, "wrong": 1, "error": "hung"})
    assert describe({"right": 0, "wrong": 0, "error": "CUDA_ERROR_X"}) == "one failed with CUDA_ERROR_X"


def test_the_fill_reaches_all_shared_memory():
    out = np.zeros(hazard_runs._SHARED_BYTES // 4, np.uint32)
    read = hazard_runs._FILL.replace("st.shared.u32 [%at], %ones;", "st.shared.u32 [%at], %ones; CHECK").replace(
        "fill()", "fill(.param .u64 out)"
    )
    check = """
    { .reg .b64 %to, %of; .reg .b32 %v, %o; mov.u32 %o, room; sub.u32 %o, %at, %o; cvt.u64.u32 %of, %o;
      ld.param.u64 %to, [out]; add.u64 %to, %to, %of; ld.shared.u32 %v, [%at]; st.global.u32 [%to], %v; }
    """
    memory = sim.GlobalMemory()
    params = [memory.map(out).to_bytes(8, "little")]
    text = read.replace("CHECK", check)
    sim.launch(text, grid=1, block=1024, shared_bytes=hazard_runs._SHARED_BYTES, params=params, memory=memory)
    assert (out == 0xFFFFFFFF).all()


def test_mended_programs_were_right_on_a_gpu():
    record = records.load(hazard_runs.RECORD)
    if record is None:
        pytest.skip("no GPU's results recorded yet: scripts/record_agreement.py makes them")
    for name, found in record["hazards"].items():
        if name in CASES and found["fingerprint"] == hazard_runs.fingerprint(name):
            assert found["mended"]["right"] > 0 and not found["mended"]["wrong"] and not found["mended"]["error"], name


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_mended_programs_are_right_on_this_gpu(name, tmp_path):
    assert hazard_runs.observe(name, True, str(tmp_path / "progress")) == {"right": 2, "wrong": 0, "error": ""}

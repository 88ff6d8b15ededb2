"""Reading what ncu prints, and running it where there is one."""

from __future__ import annotations

import shutil

import pytest

from numba_tma import counters

METRICS = ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", "gpu__time_duration.sum")
TEXT = f"""==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "transpose_tma" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 4242
"ID","Process ID","Kernel Name","{METRICS[1]}","{METRICS[0]}"
"","","","ns",""
"0","4242","transpose_tma (1, 1)","12,345","65,536"
"1","4242","transpose_padded","678.5","2048"
"""


def test_lines_of_launches_between_others():
    assert counters.parse(TEXT, METRICS) == [
        {METRICS[0]: 65536, METRICS[1]: 12345},
        {METRICS[0]: 2048, METRICS[1]: 678.5},
    ]
    assert counters.parse("==ERROR== no permission\n", METRICS) == []


def test_without_ncu(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(counters.CountersError, match="no ncu on the PATH"):
        counters.read([], METRICS)


def test_what_ncu_refuses_is_told(monkeypatch, tmp_path):
    refusing = tmp_path / "ncu"
    refusing.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    target = counters.Target("transpose", "tma", (64, 64), "float32")
    with pytest.raises(counters.CountersError, match=r"0 launches of 1, exit status 1: .*ERR_NVGPUCTRPERM"):
        counters.read([target], METRICS)

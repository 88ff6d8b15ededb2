"""PTX that was not made here: CUDA C++ with libcu++'s barriers and bulk copies, compiled by nvcc 13.0."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from numba_tma import sim

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("policy", ["fifo", "early", "late", "random"])
def test_cuda_barrier_and_bulk_copies(policy, seed):
    text = (DATA / "bulk_add.ptx").read_text()
    data = np.arange(3 * 1024, dtype=np.int32)
    memory = sim.GlobalMemory()
    params = [struct.pack("<Q", memory.map(data)), struct.pack("<Q", data.size)]
    report = sim.launch(text, grid=3, block=128, params=params, memory=memory, policy=policy, seed=seed)
    np.testing.assert_array_equal(data, np.arange(1, 3 * 1024 + 1))
    assert report.bytes["bulk_load"] == report.bytes["bulk_store"] == data.nbytes
    assert not report.hazards

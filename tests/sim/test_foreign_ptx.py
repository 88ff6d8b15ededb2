"""PTX that was not made here: CUDA C++ compiled by nvcc 13, with libcu++'s barriers and copies. Triton's is in
tests/test_check.py."""

from __future__ import annotations

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from numba_tma import TensorMap, sim

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


@pytest.mark.parametrize("policy", ["fifo", "early", "late", "random"])
def test_tensor_copies_and_wgmma(policy, seed, rng):
    text = (DATA / "wgmma_product.ptx").read_text()
    a, b = (rng.standard_normal((rows, 320)).astype(ml_dtypes.bfloat16) for rows in (128, 192))
    c = np.full((128, 192), np.nan, np.float32)
    memory = sim.GlobalMemory()
    params = [TensorMap(x, (64, 64), swizzle="128B").encode_sim(memory.map(x)) for x in (a, b)]
    params += [struct.pack("<Q", memory.map(c)), struct.pack("<I", 192), struct.pack("<I", 5)]
    report = sim.launch(text, grid=(2, 3), block=128, params=params, memory=memory, policy=policy, seed=seed)
    np.testing.assert_allclose(c, a.astype(float) @ b.astype(float).T, rtol=1e-4, atol=1e-3)
    assert report.bytes["tma_load"] == 6 * 5 * 2 * 64 * 64 * 2
    assert not report.hazards

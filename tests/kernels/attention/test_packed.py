"""Starts of packed sequences that are wrong: nothing hangs, and nothing is read or written but rows that there are."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import use_backend
from numba_tma.kernels.attention import forward
from numba_tma.kernels.attention.forward import attention_varlen
from numba_tma.kernels.attention.ladder import reference

pytestmark = pytest.mark.filterwarnings("error::numba_tma.launch.HazardWarning")

_MOST, _LEAST = np.iinfo(np.int32).max, np.iinfo(np.int32).min

# Starts of q and of k, of 30 and 50 rows, and what the sequences are taken for: first and end of both; None where
# there is no query.
STARTS = {
    "falling": (([20, 10, 30], [50, 30, 20]), (None, (10, 30, 30, 30))),
    "before the first row": (([-7, 12, 30, 30], [-9, 5, 50, 50]), ((0, 12, 0, 5), (12, 30, 5, 50), None)),
    "behind the last key": (
        ([0, 10, 20, 30], [0, 60, _MOST, _LEAST]),
        ((0, 10, 0, 50), (10, 20, 60, 60), (20, 30, 0, 0)),
    ),
    "extreme": (([_LEAST, 30, _LEAST], [_LEAST, _MOST, _MOST]), ((0, 30, 0, 50), None)),
    "a sequence that is too long": (([30, 10, _MOST], [0, 7, 0]), (None, None)),
}


@pytest.mark.parametrize("name", STARTS)
def test_wrong_starts(rng, name, monkeypatch):
    """On a GPU only the kernel looks at them."""
    monkeypatch.setattr(forward, "_check_numbers", lambda given, starts: None)
    (q_starts, kv_starts), taken_for = STARTS[name]
    q = rng.standard_normal((30, 2, 64)).astype(np.float16)
    k, v = (rng.standard_normal((50, 1, 64)).astype(np.float16) for _ in range(2))
    out, lse = np.full_like(q, np.nan), np.full((2, 30), np.nan, np.float32)
    starts = (np.array(numbers, np.int32) for numbers in (q_starts, kv_starts))
    with use_backend("sim"):  # where an access beyond an array ends the run
        attention_varlen(q, k, v, *starts, 30, causal=True, out=out, lse=lse)
    for first, end, first_key, end_key in filter(None, taken_for):
        rows = slice(first, end)
        if first_key == end_key:
            assert not out[rows].any() and np.isneginf(lse[:, rows]).all()
            continue
        o, exact = reference(q[None, rows], k[None, first_key:end_key], v[None, first_key:end_key], causal=True)
        np.testing.assert_allclose(out[rows].astype(np.float64), o[0], rtol=0, atol=2.0**-10 * np.abs(v).max())
        np.testing.assert_allclose(lse[:, rows], exact[0], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("wrong", [False, True])
def test_starts_in_host_memory_are_looked_at_each_time(rng, wrong):
    q = rng.standard_normal((30, 2, 64)).astype(np.float16)
    k, v = (rng.standard_normal((50, 1, 64)).astype(np.float16) for _ in range(2))
    q_starts, kv_starts = np.array([0, 10, 10, 30], np.int32), np.array([0, 0, 20, 50], np.int32)
    with use_backend("sim"):
        attention_varlen(q, k, v, q_starts, kv_starts, 20)
        kv_starts[2] = -1 if wrong else 50
        if not wrong:
            attention_varlen(q, k, v, q_starts, kv_starts, 20)
            return
        with pytest.raises(ValueError, match=r"kv_starts\[2\] is -1; 0 to 50 expected"):
            attention_varlen(q, k, v, q_starts, kv_starts, 20)
        q_starts[3] = 31
        with pytest.raises(ValueError, match=r"q_starts\[3\] is 31; 10 to 30 expected: .* there are 30 rows"):
            attention_varlen(q, k, v, q_starts, kv_starts, 20)

"""What is asked of attention's arrays and numbers before any kernel is made."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import arrays
from numba_tma.kernels.attention.operands import Scores, check_outputs, operands


def given(**changes):
    """Queries of two heads and eight rows, keys and values, and what is still to be made."""
    inputs = {name: np.zeros((1, 8, 2, 64), np.float16) for name in ("q", "k", "v")}
    return inputs | {"o": None, "lse": None} | changes


def test_outputs_may_still_be_to_make():
    """Q is not written then: it may be read-only, or one row for all."""
    q = np.broadcast_to(np.zeros((1, 1, 2, 64), np.float16), (1, 8, 2, 64))
    found = operands(given(q=q))
    found.check_rows()
    assert found.o is None and found.lse is None
    assert (found.batch, found.sq, found.skv, found.heads, found.kv_heads, found.head_dim) == (1, 8, 8, 2, 2, 64)
    with pytest.raises(ValueError, match="o is read-only"):
        operands(given(o=q))


@pytest.mark.parametrize(
    ("changes", "asked", "error", "message"),
    [
        ({x: np.zeros((1, 0, 2, 64), np.float16) for x in "kv"}, {}, ValueError, "extents of 1 and more expected"),
        ({"q": np.broadcast_to(np.float16(0), (1, 2**31, 2, 64))}, {}, ValueError, "last dimension must be contiguous"),
        ({"q": np.broadcast_to(np.zeros(64, np.float16), (1, 2**31, 2, 64))}, {}, ValueError, "where coordinates end"),
        ({"lse": np.zeros((1, 2, 8))}, {}, ValueError, r"lse is float64 .*: float32 of shape \(B, Hq, Sq\)"),
        ({"o": np.zeros((1, 8, 2, 32), np.float16)}, {}, ValueError, "they must be"),
        ({}, {"scale": [1.0]}, TypeError, r"scale is \[1.0\]; a number expected"),
        ({}, {"soft_cap": "a"}, TypeError, "soft_cap is 'a'; a number expected"),
        ({}, {"soft_cap": np.inf}, ValueError, "soft_cap inf: the bound of the scores"),
        ({}, {"scale": -np.inf}, ValueError, "scale -inf: a positive number"),
    ],
)
def test_what_does_not_fit_is_named(changes, asked, error, message):
    with pytest.raises(error, match=message):
        operands(given(**changes), **asked)


def test_the_usual_scale_is_that_of_the_head_dimension():
    assert Scores.of(None, 0, 64) == Scores.of(0.125, 0, 64) != Scores.of(None, 0, 128)
    assert Scores.of(None, 2, 64).capped and not Scores.of(None, 0, 64).capped


def test_outputs_lie_apart_but_for_queries_themselves():
    buffer, lse = np.zeros((1, 16, 2, 64), np.float16), np.zeros((1, 2, 8), np.float32)
    q, k = buffer[:, :8], np.zeros((1, 8, 2, 64), np.float16)

    def check(out, lse=lse):
        views = {name: arrays.view(x) for name, x in {"q": q, "k": k, "v": k, "out": out, "lse": lse}.items()}
        check_outputs("attention", views, "out", "lse")

    check(q)
    check(buffer[:, 8:])
    for out, message in (
        (buffer[:, 1:9], "out .* and q .* share memory"),
        (q[:, ::-1], "out .* and q .* share memory"),
        (k, "out .* and k .* share memory"),
        (np.broadcast_to(k, k.shape), "out is read-only"),
    ):
        with pytest.raises(ValueError, match=message):
            check(out)
    with pytest.raises(ValueError, match="lse .* and q .* share memory"):
        check(k.copy(), buffer.view(np.float32)[0, :8, :, 0].T[None])

"""How the figures of attention are measured."""

from __future__ import annotations

from collections import Counter

import pytest

from numba_tma.measurements.attention import balanced_orders, rates


@pytest.mark.parametrize("count", range(2, 10))
def test_each_comes_after_each_other_equally_often(count):
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in zip(order, order[1:], strict=False))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) == 1


def test_a_record_counts_what_is_seen():
    found = {"a": 1e-3, "b": 4e-3}
    whole, causal = (rates(found, 1024, causal, head_dim=64) for causal in (False, True))
    assert list(whole) == ["head_dim", "causal", "length", "seconds", "tflop_per_s"]
    # 16 sequences of 1024, 2048 columns in all: two products of 1024 x 1024 for each column.
    assert whole["tflop_per_s"] == pytest.approx({"a": 16 * 4 * 1024**2 * 2048 / 1e9, "b": 16 * 1024**2 * 2048 / 1e9})
    assert causal["tflop_per_s"] == pytest.approx({name: rate / 2 for name, rate in whole["tflop_per_s"].items()})

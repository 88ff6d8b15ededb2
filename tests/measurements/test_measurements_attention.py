"""How the figures of attention are measured."""

from __future__ import annotations

from collections import Counter

import pytest

from numba_tma.measurements.attention import balanced_orders


@pytest.mark.parametrize("count", range(2, 10))
def test_each_comes_after_each_other_equally_often(count):
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    pairs = Counter(pair for order in orders for pair in zip(order, order[1:], strict=False))
    assert len(pairs) == count * (count - 1)
    assert len(set(pairs.values())) == 1

"""How softmax and rmsnorm are measured: beside what, and which figures are kept."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import bench, dtypes
from numba_tma.kernels.rows import binding, peers
from numba_tma.kernels.rows.operands import operands
from numba_tma.measurements import rows


@pytest.mark.parametrize("dtype", rows.DTYPES)
@pytest.mark.parametrize("operation", rows.OPERATIONS)
def test_what_is_chosen_is_measured_and_nothing_twice(operation, dtype):
    kind = dtypes.lookup(dtype).numpy
    for columns in rows.ROW_LENGTHS:
        flat, target = (np.zeros(2 * columns, kind) for _ in range(2))
        given = rows.arrays_of(operation, columns, flat, target)

        def same(variant, options, given=given):
            bound = binding.bind(operation, variant)(given, **options, **rows.epsilon_of(operation))
            return bound.func.__self__.kernel, bound.func.__self__.grid

        assert given["x"].shape == given["out"].shape == (2, columns)
        found = rows.candidates(given)
        assert same(*binding.choose(operands(given))) == same(*next(iter(found.values())))
        variants = {variant for variant, _ in found.values()}
        wide = columns * kind.itemsize > binding.PART_BYTES
        assert variants >= ({"cluster", "ring", "grid"} if wide else {"registers", "bulk"})
        assert len({same(variant, options) for variant, options in found.values()}) == len(found)


def test_a_record_comes_when_it_is_measured(monkeypatch):
    class Array:
        def __new__(cls, host):
            return host

        empty = staticmethod(np.empty)

    freed, times = [], iter((1e-3, 4e-3))

    def time_launches(launches, repeats):
        seconds = next(times)
        return {name: bench.Timing(seconds, seconds, seconds, repeats) for name in launches}

    monkeypatch.setattr(rows, "DeviceArray", Array)
    monkeypatch.setattr(rows, "NBYTES", 1 << 16)
    monkeypatch.setattr(bench, "device_copy", lambda nbytes: (lambda: None, lambda: freed.append(nbytes)))
    monkeypatch.setattr(bench, "time_launches", time_launches)
    monkeypatch.setattr(peers, "all_of", lambda operation, given, **options: {"torch": lambda: None})
    records = rows.rows()
    for operation, rate in (("softmax", 2**17 / 1e-3 / 1e9), ("rmsnorm", 2**17 / 4e-3 / 1e9)):
        record = next(records)
        assert (record["operation"], record["dtype"], record["columns"]) == (operation, "float32", rows.ROW_LENGTHS[0])
        assert record["gb_per_s"]["driver's copy"] == record["gb_per_s"]["torch"] == pytest.approx(rate)
    assert not freed
    records.close()
    assert freed == [1 << 16]

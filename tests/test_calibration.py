"""The micro-benchmarks: all assemble, and each does what it says, in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from numba_tma import compile, driver
from numba_tma.calibration import run
from numba_tma.calibration.probes import PROBES, module


def test_all_assemble():
    cubin, log = compile.link([("calibration", module())], run.ARCH)
    assert len(cubin) > 1 << 19
    assert log.count("Compiling entry function") == len(PROBES)
    assert log.count(" 0 bytes spill stores") == len(PROBES), "a spill would be measured too"


@pytest.mark.parametrize("name", PROBES)
def test_an_iteration_does_what_is_counted(name):
    """Between two counts the difference is what the record calls an iteration, and all waits end."""
    probe = PROBES[name]
    few = replace(probe, blocks=min(probe.blocks, 4))
    reports = [run.simulate(few, count, hazards=False) for count in (3, 5)]
    if probe.unit.startswith("bytes"):
        kinds = ("ld_global", "st_global", "cp_async", "bulk_load", "tma_load", "bulk_store")
        moved = [sum(report.bytes[kind] for kind in kinds) for report in reports]
        # Each block also stores its cycles.
        assert (moved[1] - moved[0]) / few.blocks == 2 * probe.per_iteration
    else:
        assert reports[1].instructions > reports[0].instructions + probe.per_iteration


@pytest.mark.gpu
def test_some_on_a_gpu():
    assert driver.device_count()
    records = {r["probe"]: r for r in run.measure(["fma_f32_latency", "global_latency_l2", "bulk_latency_l2_1024"], 1)}
    assert 3 < records["fma_f32_latency"]["cycles"] / 16 < 6
    assert 150 < records["global_latency_l2"]["cycles"] / 4 < 500
    assert 300 < records["bulk_latency_l2_1024"]["cycles"] < 2000
    assert 500 < records["clock"]["mhz"] < 2500

"""The micro-benchmarks: all assemble, and each does what it says, in the simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

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


RECORDED = Path(__file__).parents[1] / "docs" / "results" / "h200_calibration.json"
# What the model is to give back of what its constants were made from; how closely, as a factor.
GIVEN_BACK = {
    "fma_f32_latency": 1.1,
    "lop_b32_rate": 1.05,
    "unpack_f16x2_rate": 1.05,
    "shared_latency_b32": 1.05,
    "shared_load_b32_8way": 1.02,
    "global_latency_l2": 1.05,
    "load_memory_one_2k": 1.1,
    "load_memory_all_64k": 1.05,
    "copy_memory_all": 1.1,
    "cp_async_latency_l2": 1.1,
    "bulk_latency_l2_1024": 1.1,
    "bulk_memory_all_16k_4": 1.05,
    "tensor_memory_all_64x128_4": 1.1,
    "bulk_store_l2_one": 1.05,
    "bar_sync_8": 1.05,
    "mma_m16n8k16_rate_16": 1.05,
    "wgmma_n128_16_1": 1.05,
}


QUICK = ("lop_b32_rate", "shared_load_b32_8way", "load_memory_one_2k", "bulk_latency_l2_1024", "wgmma_n128_16_1")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in GIVEN_BACK])
def test_the_model_gives_back_what_was_measured(name):
    recorded = {r["probe"]: r for r in json.loads(RECORDED.read_text())["records"]}
    ratio = run.modelled_cycles(name) / recorded[name]["cycles"]
    assert 1 / GIVEN_BACK[name] < ratio < GIVEN_BACK[name]

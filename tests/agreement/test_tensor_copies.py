"""The simulator's copy engine beside the hardware's: thousands of random tensor copies, compared byte for byte.

On a GPU the two run side by side; elsewhere the simulator is compared with what a GPU left behind earlier
(recorded/, made by scripts/record_agreement.py).
"""

from __future__ import annotations

from collections import Counter

import configurations
import experiments
import pytest
import records
from configurations import GROUPS, LOAD, OPERATIONS, REDUCTIONS, STORE, Configuration, group
from execution import InSimulator, OnGpu, Result, execute, execute_alone, initial, simulate

from numba_tma import sim

# Where the simulator raises though the hardware goes on, and why.
EXCEPTIONS = {
    "empty-copies: bulk load of 8 B": "undefined: an H200 moves and credits nothing, so that a kernel waits for ever",
}


def _fail_on(configurations_: list[Configuration], found: list[tuple[Configuration, str]]) -> None:
    if found:
        pytest.fail("\n".join(records.report(configurations_, found, 8)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GROUPS)
def test_gpu_and_simulator_agree(name, seed):
    chosen = [c for c in group(name, seed) if not c.faults]
    _fail_on(chosen, records.differences(chosen, execute(chosen, OnGpu), execute(chosen, InSimulator)))


@pytest.mark.parametrize("name", GROUPS)
def test_simulator_agrees_with_recorded_copies(name):
    record = records.load(records.COPIES)
    if record is None:
        pytest.skip("no GPU's results recorded yet: scripts/record_agreement.py makes them")
    recorded, chosen = record["copies"][name], group(name)
    assert recorded["fingerprint"] == records.fingerprint(chosen), "the configurations changed: record them again"
    results = simulate(chosen)
    wrong = [
        (configuration, f"digests {digest} and {records.digest(result)}")
        for configuration, result, digest in zip(chosen, results, recorded["digests"], strict=True)
        if digest != records.digest(result)
    ]
    for index, packed in recorded["samples"].items():  # of these the bytes themselves were kept
        configuration = chosen[int(index)]
        difference = records.unpack(initial(configuration), packed).difference(results[int(index)])
        if difference:
            wrong.insert(0, (configuration, difference))
    _fail_on(chosen, wrong)


def test_simulator_names_the_rule_where_the_hardware_faults():
    chosen = [c for name in GROUPS for c in group(name) if c.faults]
    rules = ("begin before", "not a multiple of 16 B", "map of INT64 elements")
    found = Counter(
        tuple(rule for rule in rules if rule in execute_alone(configuration, InSimulator).refused)
        for configuration in chosen
    )
    assert sorted(found) == sorted((rule,) for rule in rules)
    assert min(found.values()) >= 5


@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_simulator_agrees_with_recorded_experiments(name):
    record = records.load(records.EXPERIMENTS)
    if record is None:
        pytest.skip("no GPU's results recorded yet: scripts/record_agreement.py makes them")
    if name not in record["experiments"]:
        pytest.skip("an experiment newer than the record: scripts/record_agreement.py runs it")
    wrong = []
    for case in experiments.EXPERIMENTS[name].cases:
        recorded = record["experiments"][name]["cases"][case.label]
        try:
            found = records.digest(case.run(InSimulator))
        except sim.SimError:
            found = None  # where the hardware faults the simulator must raise
        expected = None if f"{name}: {case.label}" in EXCEPTIONS else recorded["digest"]
        if found != expected:
            wrong.append(f"{case.label}: the hardware gave {recorded['hardware'][:3]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("policy", ["random", "early"])
def test_order_of_completion_does_not_matter(policy, seed):
    chosen = [c for c in group("ordinary", seed) if not c.faults][:300]
    in_order = execute(chosen, InSimulator)
    otherwise = execute(chosen, InSimulator, policy=policy, seed=seed, wait_ns=2_000_000)
    _fail_on(chosen, records.differences(chosen, in_order, otherwise))


def test_configurations_cover_what_matters():
    found = Counter(tag for name in GROUPS for configuration in group(name) for tag in configuration.tags)
    wanted = [f"rank {rank}" for rank in range(1, 6)]
    wanted += [f"{op} {dtype}" for op, types in REDUCTIONS.items() for dtype in types]
    wanted += [f"{op} {dtype}" for op in (LOAD, STORE) for dtype in configurations._DTYPES]
    wanted += [
        *("swizzle, narrow rows", "swizzle, pattern not at the box's start", "element strides, negative start"),
        *("element strides, box no multiple", "inner coordinate between chunks", "row ends within a chunk"),
        *("partly outside", "partly outside, nan fill", "negative start", "overlap", "numbers", "specials"),
    ]
    assert set(OPERATIONS) <= set(found)
    assert [tag for tag in wanted if found[tag] < 5] == []


def test_a_result_survives_packing(rng):
    configuration = next(c for c in group("ordinary") if not c.faults)
    before = initial(configuration)
    shared = bytearray(before.shared)
    shared[100:104] = rng.bytes(4)
    result = Result(bytes(shared), before.tensor, complete=False, missing=16, note="kept")
    assert records.unpack(before, records.pack(before, result)) == result
    assert records.digest(result) != records.digest(before)

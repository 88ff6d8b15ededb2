"""The simulator's tensor cores beside the hardware's, bit for bit: data that moves, integers, rounded sums.

On a GPU the two run side by side; elsewhere the simulator is compared with what a GPU left behind earlier
(recorded/, made by scripts/record_agreement.py).
"""

from __future__ import annotations

from collections import Counter

import accumulation
import matrix_configurations
import matrix_execution
import matrix_operands
import matrix_probes
import matrix_recording
import numpy as np
import pytest
import records
from accumulation import Model
from matrix_instructions import Instruction

from numba_tma.compile import link
from numba_tma.sim.matrix_fragments import numbers

INSTRUCTIONS = matrix_configurations.instructions()
FAMILIES = ("wgmma", "mma", "ldmatrix", "stmatrix", "movmatrix")


def _of(family: str) -> list[Instruction]:
    return [instruction for instruction in INSTRUCTIONS if instruction.family == family]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_and_simulator_agree(family, seed):
    wrong = []
    for instruction in _of(family):
        chosen = matrix_configurations.ordinary(instruction, seed)
        real, simulated = matrix_execution.on_gpu(chosen), matrix_execution.in_simulator(chosen)
        wrong += [str(c) for c, r, s in zip(chosen, real, simulated, strict=True) if (r != s).any()]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def record() -> dict:
    found = records.load(matrix_recording.RECORD)
    if found is None:
        pytest.skip("no GPU's results recorded yet: scripts/record_agreement.py makes them")
    return found["matrices"]


@pytest.mark.parametrize("group", ["ordinary", "risky"])
@pytest.mark.parametrize("family", FAMILIES)
def test_simulator_agrees_with_the_record(family, group, record):
    wrong = []
    for name, chosen in matrix_recording.groups()[group].items():
        if chosen[0].instruction.family != family:
            continue
        recorded = record["digests"][f"{group}/{name}"]
        assert recorded["fingerprint"] == matrix_recording.fingerprint(chosen), "the configurations changed"
        results = matrix_recording.simulate_each(list(chosen))
        for configuration, expected, result in zip(chosen, recorded["digests"], results, strict=True):
            # What the hardware faults on, the simulator raises on.
            found = "CUDA_ERROR" if isinstance(result, str) else matrix_recording.digest(result)
            if found not in expected:
                wrong.append(f"{name}: {configuration.uses} ({configuration.values})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("instruction", matrix_probes.instructions(), ids=lambda i: i.name)
def test_probes_agree_with_the_record(instruction, record):
    recorded, chosen = record["probes"][instruction.name], matrix_probes.configurations(instruction)
    assert recorded["fingerprint"] == matrix_recording.fingerprint(chosen), "the probes changed: record them again"
    hardware = matrix_recording.unpack_answers(instruction, recorded["answers"])
    simulator = matrix_probes.answers(instruction, matrix_execution.in_simulator(chosen))
    assert {k: (v, simulator[k]) for k, v in hardware.items() if v != simulator[k]} == {}


def test_configurations_cover_what_matters():
    every = [c for i in INSTRUCTIONS for c in matrix_configurations.ordinary(i)]
    found = Counter(tag for configuration in every for tag in configuration.tags)
    assert len(every) > 800
    assert {f"n{n}" for n in range(8, 257, 8)} <= set(found)
    wanted = [f"{side} {span}" for side in "AB" for span in (16, 32, 64, 128)]
    wanted += [f"majors ({a}, {b})" for a in (0, 1) for b in (0, 1)] + list(matrix_configurations.VALUES)
    wanted += ["orderly", "shifted", "any", "base offset", "scale-d 0", "negated", "A in registers"]
    assert [tag for tag in wanted if found[tag] < 5] == []
    layouts = {(c.layout, u.b.span, c.instruction.majors) for c in every if c.exact for u in c.uses}
    assert {("orderly", span, (0, 0)) for span in (16, 32, 64, 128)} <= layouts


def test_the_assembler_takes_the_kernels(rng):
    every = matrix_execution.modules()
    for group in (every[i] for i in rng.choice(len(every), 3, replace=False)):
        link([("tensor_cores", matrix_execution.text(group))], "sm_90a")


@pytest.mark.parametrize(
    "instruction", [i for i in INSTRUCTIONS if i.result in ("f32", "f16") and i.n <= 24], ids=lambda i: i.name
)
def test_the_simulator_sums_as_the_model(instruction, seed):
    # Two ways to the same bits: the simulator's code, and the plain form of the same model.
    chosen = matrix_configurations.ordinary(instruction, seed)
    model = accumulation.of(instruction)
    for configuration, words in zip(chosen, matrix_execution.in_simulator(chosen), strict=True):
        got, expected = matrix_operands.result(instruction, words), accumulation.apply(model, configuration)
        assert accumulation.same(got, expected).all(), configuration.values


def _one(model: Model, terms: list[tuple[float, float]], c: float, result: str = "f32") -> float:
    a, b = (np.array([[t[side] for t in terms]]) for side in (0, 1))
    held = np.array([[c]], {"f32": np.float32, "f16": np.float16}[result])
    return float(accumulation.step(model, result, ("f16", "f16"), a, b, held)[0, 0])


def test_models_cut_off_where_they_say():
    model = Model(fraction=25)
    one, tiny = (1.0, 1.0), 2.0**-13
    assert _one(model, [one, (tiny, 2.0**-12), (-1.0, 1.0)], 0.0) == 2.0**-25
    assert _one(model, [one, (tiny, 2.0**-13), (-1.0, 1.0)], 0.0) == 0
    # Halves of the last bit do not add up, and the exponent of 1.5 * 1.5 is that of 1.
    assert _one(model, [one, (tiny, 2.0**-13), (tiny, 2.0**-13), (-1.0, 1.0)], 0.0) == 0
    assert _one(model, [(1.5, 1.5), (tiny, 2.0**-12), (-1.5, 1.5)], 0.0) == 2.0**-25
    assert _one(Model(25, normalised=True), [(1.5, 1.5), (tiny, 2.0**-12), (-1.5, 1.5)], 0.0) == 0
    # Results: cut off, not rounded; of f16 to nearest, ties to even.
    assert _one(model, [one, (2.0**-12, 2.0**-12)], 0.0) == 1
    assert _one(model, [one, (2.0**-12, 2.0**-12), (2.0**-12, 2.0**-13)], 0.0) == 1
    assert _one(model, [(-1.0, 1.0), (-(2.0**-12), 2.0**-12), (-(2.0**-12), 2.0**-13)], 0.0) == -1
    assert _one(Model(25, rounding="rn"), [one, (2.0**-12, 2.0**-12), (2.0**-12, 2.0**-13)], 0.0) == 1 + 2.0**-23
    assert _one(Model(13, kept=13), [one], 2.0**-13) == 1 + 2.0**-13
    assert _one(Model(13, kept=13), [one], 2.0**-14) == 1
    assert _one(model, [(2.0**-5, 2.0**-6)], 1.0, "f16") == 1
    assert _one(model, [(2.0**-5, 2.0**-6), (2.0**-11, 2.0**-11)], 1.0, "f16") == 1 + 2.0**-10
    assert _one(model, [(300.0, 300.0)], 0.0, "f16") == np.inf


@pytest.mark.parametrize("instruction", matrix_probes.instructions(), ids=lambda i: i.name)
def test_probes_are_where_they_say(instruction):
    i = instruction
    every = matrix_probes.probes(i)
    answers = matrix_probes.answers(i, matrix_execution.in_simulator(matrix_probes.configurations(i)))
    assert len(answers) == len(every) > 400
    assert matrix_recording.unpack_answers(i, "".join(answers.values())) == answers
    dtype = np.float16 if i.result == "f16" else np.float32
    for probe in every:
        if any(isinstance(number, matrix_probes.Bits) for term in probe.terms for number in term[1:]):
            continue
        terms = [a * b for _, a, b in probe.terms] + ([] if isinstance(probe.c, matrix_probes.Bits) else [probe.c])
        got = np.array(int(answers[probe.label], 16), f"<u{dtype().itemsize}").view(dtype).astype(float)
        size = max((abs(term) for term in terms), default=0.0)
        if 2.0**-10 < size < 60000 and "bits" not in probe.label and "NaN" not in probe.label:
            assert abs(got - sum(terms)) <= size * 2.0**-9, probe.label


def test_a_record_of_this_simulator_is_the_record(record, monkeypatch):
    """What is compared with a GPU's results does not lose or mix up any."""
    some = {
        group: {name: by_name[name] for name in list(by_name)[:: 1 + len(by_name) // 4]}
        for group, by_name in matrix_recording.groups().items()
    }
    monkeypatch.setattr(matrix_recording, "groups", lambda: some)
    raw: dict[str, dict[str, str]] = {"outputs": {}, "failures": {}}
    for group, by_name in some.items():
        for name, chosen in by_name.items():
            for i, result in enumerate(matrix_recording.simulate_each(list(chosen))):
                if isinstance(result, str):
                    raw["failures"][f"{group}/{name}/{i}"] = "cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"
                else:
                    raw["outputs"][f"{group}/{name}/{i}"] = matrix_recording.pack(result)
    lines: list[str] = []
    made = matrix_recording.compare(raw, lambda line, brief=True: lines.append(line))
    assert f"{len(raw['outputs'])} configurations, 0 differ" in lines
    assert made["digests"] == {name: record["digests"][name] for name in made["digests"]}
    assert made["probes"] == {name: record["probes"][name] for name in some["probes"]}
    # A wrong bit is found.
    key = next(key for key in raw["outputs"] if key.startswith("ordinary/wgmma"))
    instruction = some["ordinary"][key.split("/")[1]][0].instruction
    words = matrix_recording.unpack(instruction, raw["outputs"][key]).copy()
    words[5, 0] ^= 1
    raw["outputs"][key] = matrix_recording.pack(words)
    matrix_recording.compare(raw, lambda line, brief=True: lines.append(line))
    assert f"{len(raw['outputs'])} configurations, 1 differ" in lines


def test_the_best_model_is_found(rng):
    # Results that a model made are explained by it, and by few others.
    instruction = next(i for i in INSTRUCTIONS if (i.family, i.result, i.a, i.k) == ("mma", "f32", "f16", 16))
    chosen = [c for c in matrix_configurations.ordinary(instruction, int(rng.integers(1 << 30))) if not c.exact]
    hidden = Model(fraction=int(rng.choice([23, 24, 25])), terms=int(rng.choice([0, 4, 8])))
    made = [(c, matrix_operands.words(instruction, accumulation.apply(hidden, c))) for c in chosen]
    (share, found), (second, _) = matrix_recording.fit(made)[:2]
    assert (share, found.fraction) == (1.0, hidden.fraction)
    assert found.terms == hidden.terms or {found.terms, hidden.terms} == {0, 16}
    assert second < 1.0 or hidden.terms == 0


def test_results_survive_packing(rng):
    instruction = INSTRUCTIONS[0]
    words = rng.integers(0, 1 << 32, (128, instruction.outputs), np.uint32)
    np.testing.assert_array_equal(matrix_recording.unpack(instruction, matrix_recording.pack(words)), words)
    matrix = rng.standard_normal((1, 64, instruction.n)).astype(
        np.float32 if instruction.result == "f32" else np.float16
    )
    there = matrix_operands.words(instruction, matrix)
    np.testing.assert_array_equal(matrix_operands.result(instruction, there), matrix)
    assert numbers("f16", np.array([0x3C00, 0xC000], np.uint16)).tolist() == [1.0, -2.0]

"""The tensor cores' configurations and probes on a GPU, each launch safe from the others' faults; and the comparison.

A process executes launches one by one until one fails, since nothing runs in it afterwards; another goes on behind that
one. A launch of several configurations that failed is repeated with each alone.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import accumulation
import isolated
import matrix_configurations
import matrix_execution
import matrix_operands
import matrix_probes
import numpy as np
from accumulation import Model
from matrix_configurations import Configuration
from matrix_instructions import Instruction

from numba_tma import LaunchError, sim

RECORD = "matrices.json"
_LIMIT_S = 20
_SAMPLED = ("numbers", "spread", "subnormals")
_FIT_CASES, _FIT_MODELS = 4, 16


@functools.cache
def groups() -> dict[str, dict[str, tuple[Configuration, ...]]]:
    """All configurations by group and name of the instruction."""
    every = matrix_configurations.instructions()
    return {
        "ordinary": {i.name: matrix_configurations.ordinary(i) for i in every},
        "risky": {i.name: found for i in every if (found := matrix_configurations.risky(i))},
        "probes": {i.name: matrix_probes.configurations(i) for i in matrix_probes.instructions()},
    }


def fingerprint(configurations: Iterable[Configuration]) -> str:
    """Changes with any of the configurations: results recorded for others are no use."""
    return hashlib.blake2b(repr(list(configurations)).encode(), digest_size=8).hexdigest()


def digest(outputs: np.ndarray) -> str:
    """Sixteen hexadecimal digits for one configuration's outputs."""
    return hashlib.blake2b(np.ascontiguousarray(outputs).tobytes(), digest_size=8).hexdigest()


def pack(outputs: np.ndarray) -> str:
    """One configuration's outputs as text."""
    return base64.b85encode(zlib.compress(np.ascontiguousarray(outputs).tobytes(), 6)).decode()


def unpack(instruction: Instruction, packed: str) -> np.ndarray:
    """The reverse: uint32 (threads, words)."""
    return np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint32).reshape(-1, instruction.outputs)


# -- on the GPU --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """One launch: some configurations of a group and an instruction."""

    group: str
    name: str
    indices: tuple[int, ...]


def compile_all() -> None:
    """Every module's machine code, into the disk cache, in processes of their own."""
    jobs = {str(number): (matrix_execution.cubin, (group,)) for number, group in enumerate(matrix_execution.modules())}
    for outcome in isolated.run(jobs, 120, 8).values():
        if outcome.failure:
            raise RuntimeError(f"compiling the tensor cores' kernels: {outcome.failure}")


def _run_units(units: tuple[Unit, ...]) -> tuple[list[np.ndarray], str]:
    """Outputs of the launches up to the first that fails, and how that failed."""
    outputs = []
    for unit in units:
        every = groups()[unit.group][unit.name]
        try:
            outputs.append(matrix_execution.on_gpu([every[i] for i in unit.indices]))
        except LaunchError as error:
            return outputs, str(error).splitlines()[0]
    return outputs, ""


def run_on_gpu(workers: int, limit_s: float = 45) -> dict[str, dict[str, str]]:
    """Packed outputs by 'group/instruction/index', and failures likewise; after `limit_s` no further launches begin."""
    compile_all()
    units = [
        Unit(group, name, indices)
        for group, by_name in groups().items()
        for name, every in by_name.items()
        for indices in ([(i,) for i in range(len(every))] if group == "risky" else [tuple(range(len(every)))])
    ]
    end = time.monotonic() + limit_s
    outputs: dict[str, str] = {}
    failures: dict[str, str] = {}

    def note(unit: Unit, found: np.ndarray | None, failure: str = "") -> None:
        for position, index in enumerate(unit.indices):
            key = f"{unit.group}/{unit.name}/{index}"
            if found is None:
                failures[key] = failure
            else:
                outputs[key] = pack(found[position])

    chunks = [tuple(units[first::workers]) for first in range(workers)]
    while any(chunks) and time.monotonic() < end:
        jobs = {str(number): (_run_units, (chunk,)) for number, chunk in enumerate(chunks) if chunk}
        outcomes = isolated.run(jobs, _LIMIT_S, workers)
        left: list[tuple[Unit, ...]] = []
        for name, outcome in outcomes.items():
            chunk = chunks[int(name)]
            found, failure = outcome.value if not outcome.failure else ([], outcome.failure)
            for unit, arrays in zip(chunk, found, strict=False):
                note(unit, arrays)
            rest = chunk[len(found) :]
            if outcome.failure and len(rest) > 1:  # it died without a word: who was it?
                left += [rest[: len(rest) // 2], rest[len(rest) // 2 :]]
            elif rest and len(rest[0].indices) > 1:
                alone = tuple(Unit(rest[0].group, rest[0].name, (i,)) for i in rest[0].indices)
                left += [alone, rest[1:]]
            elif rest:
                note(rest[0], None, failure)
                left.append(rest[1:])
        chunks = left
    for chunk in chunks:
        for unit in chunk:
            note(unit, None, "not executed: no time was left")
    return {"outputs": outputs, "failures": failures}


# -- the comparison ----------------------------------------------------------------------------------------------------


def simulate(configurations: tuple[Configuration, ...]) -> np.ndarray | str:
    """The simulator's outputs, or how it refuses them."""
    try:
        return matrix_execution.in_simulator(configurations)
    except sim.SimError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def kind_of(instruction: Instruction) -> str:
    """The types, and what else may make the hardware sum differently."""
    i = instruction
    return " ".join((i.family, *([f"k{i.k}"] * (i.family == "mma")), i.result, i.a, i.b))


Cases = list[tuple[Configuration, np.ndarray]]


def _share(model: Model, cases: Cases) -> float:
    right = [
        accumulation.same(accumulation.apply(model, c), matrix_operands.result(c.instruction, words))
        for c, words in cases
    ]
    return float(np.concatenate([r.reshape(-1) for r in right]).mean())


def fit(cases: Cases) -> list[tuple[float, Model]]:
    """Models by the share of the hardware's elements that they explain, best first.

    All are tried on a few elements of each sort of values, the best on many more.
    """
    by_values: dict[str, Cases] = defaultdict(list)
    for case in sorted(cases, key=lambda case: case[1].size):
        by_values[case[0].values].append(case)
    few = [case for values, found in by_values.items() for case in found[: 4 if values == "probes" else 1]]
    many = [case for found in by_values.values() for case in found[:_FIT_CASES]]
    tried = list(accumulation.candidates(cases[0][0].instruction.result))
    tried.sort(key=lambda model: -_share(model, few))
    return sorted(((_share(model, many), model) for model in tried[:_FIT_MODELS]), key=lambda pair: -pair[0])


def _first_difference(instruction: Instruction, real: np.ndarray, other: np.ndarray) -> str:
    if not instruction.multiplies:
        place = tuple(np.argwhere(real != other)[0])
        count = int((real != other).sum())
        return f"{count} words, first thread {place[0]} word {place[1]}: {real[place]:08x} and {other[place]:08x}"
    mine, theirs = (matrix_operands.result(instruction, words) for words in (real, other))
    wrong = np.argwhere(mine.view(f"<u{mine.itemsize}") != theirs.view(f"<u{mine.itemsize}"))
    rows, columns = sorted({int(w[1]) for w in wrong}), sorted({int(w[2]) for w in wrong})
    place = tuple(wrong[0])
    return (
        f"{len(wrong)} of {mine.size} elements, rows {rows[:9]}, columns {columns[:9]}; at {list(map(int, place))}: "
        f"{mine[place]} and {theirs[place]}"
    )


def _compare_exact(
    cases: list[tuple[str, Configuration, np.ndarray, np.ndarray | str]], say: Callable[..., None]
) -> None:
    total, wrong = Counter(), Counter()
    shown: set[frozenset[str]] = set()
    lines, differing = [], 0
    for key, configuration, real, simulated in cases:
        tags = configuration.tags
        total.update(tags)
        if not isinstance(simulated, str) and (real == simulated).all():
            continue
        wrong.update(tags)
        differing += 1
        if frozenset(tags) not in shown and len(shown) < 40:
            shown.add(frozenset(tags))
            what = simulated
            if not isinstance(simulated, str):
                what = _first_difference(configuration.instruction, real, simulated)
            lines += [f"  {key}: {sorted(tags)}", f"    {configuration.uses[:2]}", f"    {what}"]
    say(f"{len(cases)} configurations whose bits must agree, {differing} differ")
    for tag in sorted(wrong, key=lambda tag: -wrong[tag] / total[tag]):
        say(f"  {wrong[tag]:5} of {total[tag]:5} with '{tag}'")
    for line in lines:
        say(line, brief=False)


def _compare_rounded(
    cases: list[tuple[str, Configuration, np.ndarray, np.ndarray]], say: Callable[..., None]
) -> dict[str, Any]:
    """Fit the models, and say what they leave unexplained. Gives the best one of each kind."""
    by_kind: dict[str, Cases] = defaultdict(list)
    of_simulator: dict[str, list[np.ndarray]] = defaultdict(list)
    for _, configuration, real, simulated in cases:
        by_kind[kind_of(configuration.instruction)].append((configuration, real))
        of_simulator[kind_of(configuration.instruction)].append(simulated)
    best = {}
    for kind, of_kind in by_kind.items():
        shares = fit(of_kind)
        share, model = shares[0]
        also = [m for s, m in shares if s == share][1:]
        right: dict[str, list[np.ndarray]] = defaultdict(list)
        simulated_right, missed, signs = [], [], 0
        for (configuration, real), simulated in zip(of_kind, of_simulator[kind], strict=True):
            i = configuration.instruction
            mine, expected = matrix_operands.result(i, real), accumulation.apply(model, configuration)
            agree = accumulation.same(mine, expected)
            right[configuration.values].append(agree.reshape(-1))
            simulated_right.append(accumulation.same(mine, matrix_operands.result(i, simulated)).reshape(-1))
            signs += int((~agree & (mine == 0) & (expected == 0)).sum())
            for place in np.argwhere(~agree)[: 3 if len(missed) < 12 else 0]:
                p = tuple(place)
                missed.append(
                    f"{i.name} ({configuration.values}) at {list(map(int, p))}: "
                    f"hardware {_shown(mine[p])}, model {_shown(expected[p])}"
                )
        counts = {values: (int(np.concatenate(r).sum()), sum(map(len, r))) for values, r in right.items()}
        as_simulated = float(np.concatenate(simulated_right).mean())
        say(f"  {kind}: the simulator has {as_simulated:.2%} of the bits, the best model {share:.4%}: {model}")
        say(f"    {', '.join(f'{v} {n}/{t}' for v, (n, t) in counts.items())}; {signs} differ in a zero's sign")
        if also:
            say(f"    as good: {also[:6]}{' …' if len(also) > 6 else ''}", brief=False)
        for line in missed:
            say(f"    {line}", brief=False)
        best[kind] = {"model": dataclasses.asdict(model), "share": share, "simulator": as_simulated, "counts": counts}
    return best


def _shown(value: np.generic) -> str:
    return f"{value} = {value.tobytes()[::-1].hex()}"


def compare(raw: dict[str, dict[str, str]], say: Callable[..., None]) -> dict[str, Any]:
    """Say how hardware and simulator differ; gives what is recorded."""
    failures = raw["failures"]
    outputs = {}
    for key, packed in raw["outputs"].items():
        group, name, index = key.split("/")
        outputs[key] = unpack(groups()[group][name][int(index)].instruction, packed)
    exact, rounded = [], []
    recorded: dict[str, Any] = {"digests": {}, "samples": {}, "probes": {}}
    for group, by_name in groups().items():
        for name, every in by_name.items():
            present = [i for i in range(len(every)) if f"{group}/{name}/{i}" in outputs]
            simulated: Any = simulate(tuple(every[i] for i in present)) if present else []
            if isinstance(simulated, str):  # one that is refused takes its launch along
                simulated = [alone if isinstance(alone := simulate((every[i],)), str) else alone[0] for i in present]
            for index, result in zip(present, simulated, strict=True):
                key = f"{group}/{name}/{index}"
                case = (key, every[index], outputs[key], result)
                (exact if every[index].exact else rounded).append(case)
            digests = [
                digest(outputs[key]) if (key := f"{group}/{name}/{i}") in outputs else failures.get(key, "not executed")
                for i in range(len(every))
            ]
            if group == "probes":
                if len(present) == len(every):
                    answers = matrix_probes.answers(
                        every[0].instruction, np.stack([outputs[f"{group}/{name}/{i}"] for i in present])
                    )
                    recorded["probes"][name] = {"fingerprint": fingerprint(every), "answers": "".join(answers.values())}
                continue
            recorded["digests"][f"{group}/{name}"] = {"fingerprint": fingerprint(every), "digests": digests}
    say("\nrefused by the hardware, by what the simulator says:")
    for failure, count in Counter(failures.values()).items():
        say(f"  {count} configurations: {failure}")
    for key in failures:
        group, name, index = key.split("/")
        configuration = groups()[group][name][int(index)]
        result = simulate((configuration,))
        say(f"  {key} ({configuration.layout}): {result if isinstance(result, str) else 'fine'}", brief=False)
    say("")
    _compare_exact(exact, say)
    say(f"\n{len(rounded)} configurations with rounded sums:")
    recorded["models"] = _compare_rounded([case for case in rounded if not isinstance(case[3], str)], say)
    taken: set[str] = set()
    for key, configuration, real, _ in rounded:
        i = configuration.instruction
        what = f"{kind_of(i)} {configuration.values}"
        if i.n == 8 and configuration.values in _SAMPLED and what not in taken:
            taken.add(what)
            recorded["samples"][key] = pack(real)
    _say_probes(recorded["probes"], say)
    return recorded


def _say_probes(recorded: dict[str, Any], say: Callable[..., None]) -> None:
    """All answers that are not the exact sum rounded to nearest, with what the simulator and that sum are."""
    nearest = accumulation.Model(fraction=60, rounding="rn")
    for name, entry in recorded.items():
        every = groups()["probes"][name]
        i = every[0].instruction
        hardware = unpack_answers(i, entry["answers"])
        exact = matrix_probes.answers(
            i, np.stack([matrix_operands.words(i, accumulation.apply(nearest, c)) for c in every])
        )
        count = sum(exact[label] != bits for label, bits in hardware.items())
        say(f"\nprobes of {name}: {count} of {len(hardware)} not the exact sum")
        for label, bits in hardware.items():
            if exact[label] != bits:
                say(f"  {label}: {bits}, exact {exact[label]}", brief=False)


def unpack_answers(instruction: Instruction, joined: str) -> dict[str, str]:
    """Answers by label as they are recorded: one after another."""
    digits = 4 if instruction.result == "f16" else 8
    labels = [probe.label for probe in matrix_probes.probes(instruction)]
    return {label: joined[n * digits : (n + 1) * digits] for n, label in enumerate(labels)}

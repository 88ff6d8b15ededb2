"""The tensor cores' configurations and probes on a GPU, each launch safe from the others' faults; and the comparison.

A process executes launches one by one until one fails, since nothing runs in it afterwards; another goes on behind that
one. A launch of several configurations that failed is repeated with each alone.
"""

from __future__ import annotations

import base64
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
    tried = list(accumulation.candidates(cases[0][0].instruction))
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
        f"{_shown(mine[place])} and {_shown(theirs[place])}"
    )


def _shown(value: np.generic) -> str:
    return f"{value} = {value.tobytes()[::-1].hex()}"


@dataclass(frozen=True)
class Difference:
    """A configuration in which the sides differ; `what` says how (the hardware's first), or why it is refused."""

    key: str
    configuration: Configuration
    real: np.ndarray
    what: str
    refused: bool


def _say_differences(compared: list[Configuration], found: list[Difference], say: Callable[..., None]) -> None:
    """Counts by tag, the first of each kind of tags, and for sums the models that explain the hardware's."""
    say(f"{len(compared)} configurations, {len(found)} differ")
    total = Counter(tag for configuration in compared for tag in configuration.tags)
    wrong = Counter(tag for difference in found for tag in difference.configuration.tags)
    for tag in sorted(wrong, key=lambda tag: -wrong[tag] / total[tag]):
        say(f"  {wrong[tag]:5} of {total[tag]:5} with '{tag}'")
    shown: set[frozenset[str]] = set()
    by_kind: dict[str, Cases] = defaultdict(list)
    for difference in found:
        tags = frozenset(difference.configuration.tags)
        if tags not in shown and len(shown) < 40:
            shown.add(tags)
            for line in (difference.key, str(difference.configuration.uses[:2]), f"  {difference.what}"):
                say(f"  {line}", brief=False)
        if not (difference.configuration.exact or difference.refused):
            by_kind[kind_of(difference.configuration.instruction)].append((difference.configuration, difference.real))
    for kind, cases in by_kind.items():
        say(f"{kind}: what explains the sums that differ")
        for share, model in fit(cases)[:4]:
            say(f"  {share:.4%} {model}")


def compare(raw: dict[str, dict[str, str]], say: Callable[..., None]) -> dict[str, Any]:
    """Say how hardware and simulator differ; gives what is recorded."""
    failures = raw["failures"]
    recorded: dict[str, Any] = {"digests": {}, "probes": {}}
    compared: list[Configuration] = []
    found: list[Difference] = []
    for group, by_name in groups().items():
        for name, every in by_name.items():
            instruction = every[0].instruction
            outputs = {
                i: unpack(instruction, raw["outputs"][key])
                for i in range(len(every))
                if (key := f"{group}/{name}/{i}") in raw["outputs"]
            }
            for i, result in zip(outputs, simulate_each([every[i] for i in outputs]), strict=True):
                compared.append(every[i])
                refused = isinstance(result, str)
                if refused or (result != outputs[i]).any():
                    what = result if refused else _first_difference(instruction, outputs[i], result)
                    found.append(Difference(f"{group}/{name}/{i}", every[i], outputs[i], what, refused))
            entry: dict[str, Any] = {"fingerprint": fingerprint(every)}
            if group != "probes":
                entry["digests"] = [
                    digest(outputs[i]) if i in outputs else failures.get(f"{group}/{name}/{i}", "not executed")
                    for i in range(len(every))
                ]
                recorded["digests"][f"{group}/{name}"] = entry
            elif len(outputs) == len(every):
                answers = matrix_probes.answers(instruction, np.stack(list(outputs.values())))
                recorded["probes"][name] = entry | {"answers": "".join(answers.values())}
    say("\ntensor cores:")
    _say_differences(compared, found, say)
    for failure, count in Counter(failures.values()).items():
        say(f"{count} configurations refused by the hardware: {failure}")
    for key in failures:
        group, name, index = key.split("/")
        configuration = groups()[group][name][int(index)]
        (result,) = simulate_each([configuration])
        if not isinstance(result, str):
            say(f"  {key} ({configuration.layout}), but not by the simulator")
    _say_probes(recorded["probes"], say)
    return recorded


def simulate_each(configurations: list[Configuration]) -> list[np.ndarray | str]:
    """The simulator's outputs of each; one that is refused takes its launch along, so that they are launched alone."""
    if not configurations:
        return []
    together = simulate(tuple(configurations))
    if not isinstance(together, str):
        return list(together)
    return [alone if isinstance(alone := simulate((c,)), str) else alone[0] for c in configurations]


def _say_probes(recorded: dict[str, Any], say: Callable[..., None]) -> None:
    """All answers that are not the exact sum rounded to nearest, beside that sum."""
    nearest = accumulation.Model(fraction=60, rounding="rn")
    for name, entry in recorded.items():
        every = groups()["probes"][name]
        i = every[0].instruction
        hardware = unpack_answers(i, entry["answers"])
        exact = matrix_probes.answers(
            i, np.stack([matrix_operands.words(i, accumulation.apply(nearest, c)) for c in every])
        )
        count = sum(exact[label] != bits for label, bits in hardware.items())
        say(f"probes of {name}: {count} of {len(hardware)} are not the exact sum rounded to nearest", brief=False)
        for label, bits in hardware.items():
            if exact[label] != bits:
                say(f"  {label}: {bits}, exact {exact[label]}", brief=False)


def unpack_answers(instruction: Instruction, joined: str) -> dict[str, str]:
    """Answers by label as they are recorded: one after another."""
    digits = 4 if instruction.result == "f16" else 8
    labels = [probe.label for probe in matrix_probes.probes(instruction)]
    return {label: joined[n * digits : (n + 1) * digits] for n, label in enumerate(labels)}

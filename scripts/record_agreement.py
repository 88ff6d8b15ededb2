#!/usr/bin/env python
"""Run random tensor copies, experiments, the tensor cores and the hazards' kernels on the Hopper GPU here.

All but the last run in the simulator too, and what differs is reported.

    python scripts/record_agreement.py --output FOLDER              # all of it: record, report, all results
    python scripts/record_agreement.py --matrices --record-only --output FOLDER
    python scripts/record_agreement.py --compare FOLDER/raw.json.gz  # an earlier GPU run with today's simulator; no GPU

FOLDER gets copies.json, experiments.json, matrices.json and hazards.json, which belong into tests/agreement/recorded,
and report.txt and raw.json.gz, which do not. What may fault or hang has a process and a time limit of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "agreement"))

import configurations
import execution
import experiments
import hazard_runs
import isolated
import matrix_recording
import records
from execution import InSimulator, OnGpu, Result

from numba_tma import LaunchError, launch, sim, suite

_LIMIT_S = 20
_WORKERS = 14
_PARTS = 14  # of each group of copies, in processes of their own
_MOST_SAMPLES, _SAMPLE_CHARACTERS = 60, 300


def _compile() -> None:
    """Everything, before the processes are forked that run it."""
    kernels = {execution.copy_kernel(rank): 7 for rank in range(1, 6)} | experiments.KERNELS
    for which, parameters in kernels.items():
        _ = execution.compiled(which, parameters).cubin


def _run_copies(group: str, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Packed results of a group's copies, one launch each: up to the first that faults, which ends this process's use
    of the GPU."""
    chosen = configurations.group(group)
    packed = []
    for index in indices:
        try:
            (result,) = execution.execute([chosen[index]], OnGpu)
        except LaunchError as error:
            return [*packed, {"failure": str(error).splitlines()[0]}]
        packed.append(records.pack(execution.initial(chosen[index]), result))
    return packed


def _run_experiment(name: str, labels: tuple[str, ...]) -> list[dict[str, Any]]:
    cases = {case.label: case for case in experiments.EXPERIMENTS[name].cases}
    results = experiments.run_cases(name, labels, OnGpu)
    return [records.pack(cases[label].before, result) for label, result in zip(labels, results, strict=True)]


def _copies_on_gpu(workers: int) -> dict[str, list[dict[str, Any]]]:
    """Packed results by group. What a fault left undone goes on in a new process."""
    found = {name: [{}] * count for name, count in configurations.GROUPS.items()}
    parts = [(name, range(first, len(found[name]), _PARTS)) for name in found for first in range(_PARTS)]
    while parts:
        jobs = {f"{i}": (_run_copies, part) for i, part in enumerate(parts)}
        left = []
        for (name, indices), outcome in zip(parts, isolated.run(jobs, _LIMIT_S, workers).values(), strict=True):
            packed = outcome.value or [{"failure": outcome.failure}]
            for index, result in zip(indices, packed, strict=False):
                found[name][index] = result
            if len(packed) < len(indices):
                left.append((name, indices[len(packed) :]))
        parts = left
    return found


def _experiments_on_gpu(workers: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Packed results, or the failure, by experiment and case."""
    jobs, contents = {}, {}
    for name, experiment in experiments.EXPERIMENTS.items():
        labels = tuple(case.label for case in experiment.cases)
        for part in [(label,) for label in labels] if experiment.isolated else [labels]:
            job = f"{name}: {part[0]}"
            jobs[job], contents[job] = (_run_experiment, (name, part)), (name, part)
    outcomes = isolated.run(jobs, _LIMIT_S, workers)
    # One bad case of those that share a process should not hide the others.
    alone = {}
    for job, (name, labels) in contents.items():
        if outcomes[job].failure and len(labels) > 1:
            alone |= {f"{name}: {label}": (_run_experiment, (name, (label,))) for label in labels}
    outcomes |= isolated.run(alone, _LIMIT_S, workers) if alone else {}
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in experiments.EXPERIMENTS}
    for job, (name, labels) in contents.items():
        together = outcomes[job]
        for position, label in enumerate(labels):
            outcome = outcomes.get(f"{name}: {label}", together)
            if outcome is together and not together.failure:
                found[name][label] = together.value[position]
            else:
                found[name][label] = {"failure": outcome.failure} if outcome.failure else outcome.value[0]
    return found


def _simulate(case: experiments.Case) -> Result | str:
    try:
        return case.run(InSimulator)
    except sim.SimError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _lines(case: experiments.Case, result: Result | str, other: Result | str | None) -> list[str]:
    if isinstance(result, str):
        return [result]
    if result.refused:
        return [f"refused: {result.refused}"]
    return [line for line in case.show(result, other if isinstance(other, Result) else None) if line]


def _verdict(hardware: Result | str, simulator: Result | str) -> str:
    if isinstance(hardware, str) and isinstance(simulator, str):
        return "an error on both sides"
    if isinstance(hardware, str) or isinstance(simulator, str) or hardware.difference(simulator):
        return "DIFFERENT"
    return "same"


def _compare_copies(raw: dict[str, list[dict[str, Any]]], say: Callable[..., None]) -> dict[str, Any]:
    recorded = {}
    for name, packed in raw.items():
        chosen = configurations.group(name)
        hardware = [
            Result(refused=p["failure"]) if "failure" in p else records.unpack(execution.initial(c), p)
            for c, p in zip(chosen, packed, strict=True)
        ]
        start = time.perf_counter()
        simulator = execution.simulate(chosen)
        found = records.differences(chosen, hardware, simulator)
        say(f"\n{name}: ({time.perf_counter() - start:.1f} s of simulation)")
        for line in records.report(chosen, found, 40):
            say(line, brief=len(found) == 0 or line[0] != " " or "of" in line[:14])
        for failure, count in Counter(r.refused for r in hardware if r.refused).items():
            say(f"  {count} ended with {failure}")
        small = [i for i, p in enumerate(packed) if "changes" in p and len(p["changes"]) < _SAMPLE_CHARACTERS]
        recorded[name] = {
            "fingerprint": records.fingerprint(chosen),
            "digests": [records.digest(result) for result in hardware],
            "samples": {str(i): packed[i] for i in small[:_MOST_SAMPLES]},
        }
    return recorded


def _compare_experiments(raw: dict[str, dict[str, dict[str, Any]]], say: Callable[..., None]) -> dict[str, Any]:
    recorded = {}
    for name, packed in raw.items():
        experiment = experiments.EXPERIMENTS[name]
        cases = {}
        say(f"\n{name}: {experiment.question}")
        for case in experiment.cases:
            entry = packed[case.label]
            hardware = entry["failure"] if "failure" in entry else records.unpack(case.before, entry)
            simulator = _simulate(case)
            verdict = _verdict(hardware, simulator)
            lines = _lines(case, hardware, simulator)
            say(f"  {case.label}: {verdict}", brief=verdict == "DIFFERENT")
            for number, line in enumerate(lines):
                say(f"    hardware   {line}", brief=verdict == "DIFFERENT" and number < 2)
            if verdict != "same":
                for line in _lines(case, simulator, hardware):
                    say(f"    simulator  {line}", brief=False)
            cases[case.label] = {
                "hardware": lines,
                "failed": isinstance(hardware, str),
                "digest": None if isinstance(hardware, str) else records.digest(hardware),
            }
        recorded[name] = {"question": experiment.question, "cases": cases}
    return recorded


def main() -> int:
    """Record or compare; the exit status is 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", action="store_true", help="only the random copies")
    parser.add_argument("--experiments", action="store_true", help="only the experiments")
    parser.add_argument("--matrices", action="store_true", help="only the tensor cores")
    parser.add_argument("--hazards", action="store_true", help="only the hazards' kernels")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where the files go")
    parser.add_argument("--compare", type=Path, metavar="RAW", help="take a GPU run's raw.json.gz instead of a GPU")
    parser.add_argument("--record-only", action="store_true", help="compare later, on a machine that costs less")
    parser.add_argument("--workers", type=int, default=_WORKERS, help="processes at once (default %(default)s)")
    options = parser.parse_args()
    every = not (options.copies or options.experiments or options.matrices or options.hazards)
    start = time.perf_counter()
    if options.compare:
        raw = json.loads(gzip.decompress(options.compare.read_bytes()))
    else:
        asked = isolated.run({"gpu": (launch.gpu_refusal, ()), "facts": (suite.circumstances, ())}, _LIMIT_S, 2)
        refusal = asked["gpu"].failure or asked["gpu"].value
        if refusal:
            print(f"record_agreement: {refusal}", file=sys.stderr)
            return 2
        raw = {"circumstances": asked["facts"].value}
        if every or options.copies or options.experiments:
            _compile()
            print(f"compiled after {time.perf_counter() - start:.1f} s", flush=True)
        if every or options.copies:
            raw["copies"] = _copies_on_gpu(options.workers)
            print(f"copies done after {time.perf_counter() - start:.1f} s", flush=True)
        if every or options.experiments:
            raw["experiments"] = _experiments_on_gpu(options.workers)
            print(f"experiments done after {time.perf_counter() - start:.1f} s", flush=True)
        if every or options.matrices:
            raw["matrices"] = matrix_recording.run_on_gpu(options.workers)
            print(f"tensor cores done after {time.perf_counter() - start:.1f} s", flush=True)
        if every or options.hazards:
            raw["hazards"] = hazard_runs.run_on_gpu(options.workers)
            print(f"hazards done after {time.perf_counter() - start:.1f} s", flush=True)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        if not options.compare:
            (options.output / "raw.json.gz").write_bytes(gzip.compress(json.dumps(raw).encode(), 6))
    if options.record_only:
        return 0
    text: list[str] = []

    def say(line: str, brief: bool = True) -> None:
        text.append(line)
        if brief:
            print(line[:400], flush=True)

    facts = {"circumstances": raw["circumstances"], "seed": configurations.SEED}
    for key, name, compare in (
        ("copies", records.COPIES, _compare_copies),
        ("experiments", records.EXPERIMENTS, _compare_experiments),
        ("matrices", matrix_recording.RECORD, matrix_recording.compare),
        ("hazards", hazard_runs.RECORD, hazard_runs.compare),
    ):
        if key in raw:
            recorded = facts | {key: compare(raw[key], say)}
            if options.output:
                (options.output / name).write_text(json.dumps(recorded, indent=0) + "\n")
    if options.output:
        (options.output / "report.txt").write_text("\n".join(text) + "\n")
    print(f"finished after {time.perf_counter() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

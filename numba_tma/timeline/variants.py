"""Timelines of the suite's variants, what of their copying is hidden, and what the stamps cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tabulate import tabulate

from .. import bench, driver, launch
from ..device_array import DeviceArray
from ..kernels.problem import Case, Problem, Variant
from ..trace import Trace
from . import overlap
from .from_model import of_model
from .from_trace import of_trace
from .model import Timeline

Arrays = Mapping[str, Any]


def inputs(problem: Problem, case: Case, backend: str, seed: int = 0) -> Arrays:
    """A problem's arrays by name, where the backend ('gpu' or 'sim') wants them."""
    arrays = problem.inputs(case, np.random.default_rng(seed))
    return {name: DeviceArray(array) for name, array in arrays.items()} if backend == "gpu" else arrays


def timeline_of(
    problem: Problem, variant: Variant, case: Case, backend: str, arrays: Arrays, plan: Trace | None = None
) -> Timeline:
    """Run a variant on its arrays and tell what it did when.

    On a GPU it is traced by `plan`. It runs twice, and the second launch is the one that is shown: the first may find
    the GPU's clock low. In the simulator the times are those of its model, which plays the blocks of one SM.

    Raises:
        LaunchError: the GPU cannot run it.
        ValueError: the plan would take too much memory.
    """
    title = f"{problem.name}.{variant.name} {'×'.join(map(str, case.shape))}"
    if backend == "sim":
        with launch.use_backend("sim", model=True):
            report = variant.bind(arrays, **case.options_of(variant.name))()
        return of_model(report.model, title)
    with launch.use_backend(backend), launch.tracing(plan) as traced:
        run = variant.bind(arrays, **case.options_of(variant.name))
        for _ in range(2):
            run()
            driver.synchronize()
    timeline = of_trace(traced.launches[0])
    timeline.title = title
    return timeline


def with_options(case: Case, options: Mapping[str, Any]) -> Case:
    """The case with some of its options changed, for all variants."""
    tuned = {name: {**own, **options} for name, own in case.tuned.items()}
    return replace(case, options={**case.options, **options}, tuned=tuned)


def table(timelines: Iterable[tuple[str, Timeline]]) -> str:
    """How much of the copying was hidden, a row for each (name, timeline): times are a block's median, shares are over
    all blocks, and over all multiprocessors."""
    rows = []
    for name, timeline in timelines:
        blocks = [hidden for hidden in overlap.by_block(timeline) if hidden.copy_ns]
        multiprocessors = [hidden for hidden in overlap.by_multiprocessor(timeline) if hidden.copy_ns]
        if not blocks:
            rows.append([name, len(timeline.blocks)])
            continue
        rows.append(
            [
                name,
                len(blocks),
                f"{statistics.median(hidden.copy_ns for hidden in blocks) / 1000:,.1f}",
                f"{statistics.median(hidden.computing_ns for hidden in blocks) / 1000:,.1f}",
                _percent(overlap.total("", blocks)),
                _percent(overlap.total("", multiprocessors)),
                f"{overlap.total('', blocks).overlapped:.0%}",
            ]
        )
    headers = [
        "",
        "blocks",
        "copying, µs",
        "computing, µs",
        "hidden in the block",
        "on the SM",
        "computing under copies",
    ]
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=("left", *["right"] * 6))


def overhead_table(costs: Iterable[Overhead]) -> str:
    """Times without and with stamps, a row for each variant."""
    rows = [[c.name, f"{c.plain * 1e6:,.2f}", f"{c.traced * 1e6:,.2f}", f"{c.slowdown:+.1%}"] for c in costs]
    headers = ["", "µs without stamps", "with", "slowdown"]
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=("left", *["right"] * 3))


def _percent(hidden: overlap.Hidden) -> str:
    least = hidden.at_least
    if hidden.share - least < 0.005:
        return f"{hidden.share:.0%}"
    return f"{least:.0%} to {hidden.share:.0%}"


@dataclass(frozen=True)
class Overhead:
    """Median seconds of a launch without and with stamps, timed in turn."""

    name: str
    plain: float
    traced: float

    @property
    def slowdown(self) -> float:
        """How much longer it takes: 0.03 is 3 %."""
        return self.traced / self.plain - 1


def overheads(
    variants: Sequence[Variant], case: Case, arrays: Arrays, plan: Trace | None = None, repeats: int = 30
) -> list[Overhead]:
    """What the stamps cost on the GPU here; the variants are timed in turn, each with and without.

    Raises:
        LaunchError: the GPU cannot run one of them.
    """
    launches = {}
    with launch.use_backend("gpu"):
        for variant in variants:
            options = case.options_of(variant.name)
            launches[variant.name] = variant.bind(arrays, **options)
            with launch.tracing(plan):
                launches[f"{variant.name} traced"] = variant.bind(arrays, **options)
    timings = bench.time_launches(launches, repeats=repeats)
    return [
        Overhead(variant.name, timings[variant.name].median, timings[f"{variant.name} traced"].median)
        for variant in variants
    ]

"""How far the simulator's model of time is from a GPU: its times for the cases that were measured on one.

The cases are large. A GPU's busiest SM is modelled, so only that SM's blocks are executed, and the inputs are zeros,
which take no memory until somebody writes to them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .kernels import kv_stream
from .kernels.problem import Case, Problem, Variant
from .launch import HazardWarning, use_backend
from .sim.timing import ModelOptions

Record = dict[str, Any]


class _Zeros:
    """Stands in for a random generator where only shapes matter."""

    def standard_normal(self, size: Any = None, dtype: Any = np.float64) -> np.ndarray:
        """Zeros of that shape."""
        return np.zeros(size or (), dtype)

    def random(self, size: Any = None, dtype: Any = np.float64) -> np.ndarray:
        """Zeros of that shape."""
        return np.zeros(size or (), dtype)

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Any = None) -> np.ndarray:
        """Zeros of that shape."""
        return np.zeros(size or ())

    def integers(self, low: int, high: int | None = None, size: Any = None, dtype: Any = np.int64) -> np.ndarray:
        """Zeros of that shape."""
        return np.zeros(size or (), dtype)

    def bytes(self, length: int) -> bytes:
        """So many zeros."""
        return bytes(length)


def modelled(problem: Problem, case: Case, variants: Iterable[Variant]) -> Iterator[Record]:
    """The model's time of each variant of a case, behind a flushed L2 cache as `bench` measures."""
    arrays = problem.inputs(case, _Zeros())
    for variant in variants:
        if variant.name in case.without:
            continue
        with use_backend("sim", model=ModelOptions(sample=True), hazards=False), warnings.catch_warnings():
            warnings.simplefilter("ignore", HazardWarning)
            report = variant.bind(arrays, **case.options_of(variant.name))()
        yield {
            "problem": problem.name,
            "variant": variant.name,
            "shape": list(case.shape),
            "dtype": case.dtype,
            "options": case.options_of(variant.name),
            "modelled": report.model.as_dict(),
        }


def overlap(works: Sequence[int]) -> Iterator[Record]:
    """The model's times of kv_stream with one buffer, with two and without copies.

    On a GPU `measurements.kv_stream.overlap` measures them.
    """
    rows, columns = 8448, 16384
    arrays = {name: np.zeros((rows, columns), np.float16) for name in ("k", "v")}
    arrays["out"] = np.zeros((1, rows), np.float32)
    binds = {
        "one buffer": kv_stream.bind_one_buffer,
        "two buffers": kv_stream.PROBLEM.variant("tma").bind,
        "compute alone": kv_stream.bind_resident,
    }
    for work in works:
        seconds = {}
        for name, bind in binds.items():
            with use_backend("sim", model=ModelOptions(sample=True), hazards=False):
                seconds[name] = bind(arrays, tile=(64, 256), threads=256, work=work)().model.seconds
        yield {"work": work, "seconds": seconds}


def compared(measured: Sequence[Record], model: Sequence[Record]) -> list[Record]:
    """Records of both, for what both have: seconds on the GPU and in the model, and each against the case's baseline.

    `measured` are records of `run_all` on a GPU, in which the baseline of a case comes first.
    """

    def key(record: Record) -> str:
        # As JSON has them: what was a tuple is a list.
        options = {name: list(v) if isinstance(v, tuple) else v for name, v in record["options"].items()}
        return f"{record['problem']} {record['variant']} {list(record['shape'])} {record['dtype']} {options}"

    times = {key(record): record["modelled"]["seconds"] for record in model}
    rows: list[Record] = []
    baseline: Record | None = None
    for record in measured:
        if record["seconds"] is None or key(record) not in times:
            continue
        row = {
            **{name: record[name] for name in ("problem", "variant", "shape", "dtype", "options")},
            "gpu": record["seconds"],
            "model": times[key(record)],
        }
        if record["ratio_to_baseline"] == 1.0 or baseline is None:
            baseline = row
        row["gpu_ratio"] = baseline["gpu"] / row["gpu"]
        row["model_ratio"] = baseline["model"] / row["model"]
        rows.append(row)
    return rows

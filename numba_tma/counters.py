"""What the GPU's own counters say of a kernel: Nsight Compute (`ncu`) around launches of the suite's variants.

    read([Target("transpose", "tma", (512, 512), "float32")], ["l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"])

`ncu` runs this module as a program, which makes the launches, and reports each of them as a line.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from . import driver, launch
from .device_array import DeviceArray
from .kernels import Case, select

_TIMEOUT_SECONDS = 300


class CountersError(RuntimeError):
    """There is no `ncu`, or it did not count; the message has what it said."""


@dataclass(frozen=True)
class Target:
    """One launch to count: a variant of a problem, and the case's shape, element type and options."""

    problem: str
    variant: str
    shape: tuple[int, ...]
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)


def read(targets: Sequence[Target], metrics: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of each target's launch, by name; `ncu --query-metrics` lists those that there are.

    Raises:
        CountersError: there is no ncu here, it may not count, or a target did not launch once.
    """
    if shutil.which("ncu") is None:
        raise CountersError("there is no ncu on the PATH; it comes with the CUDA toolkit (Nsight Compute)")
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    command += [sys.executable, "-m", __name__, json.dumps([asdict(target) for target in targets])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    rows = parse(done.stdout, metrics)
    if done.returncode or len(rows) != len(targets):
        raise CountersError(
            f"ncu counted {len(rows)} launches of {len(targets)}, exit status {done.returncode}: "
            f"{(done.stdout + done.stderr)[-2000:]}"
        )
    return rows


def parse(text: str, metrics: Sequence[str]) -> list[dict[str, float]]:
    """What ncu prints as CSV: a line of names, one of units, then a line for each launch; other lines stand around."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    return [{name: float(row[name].replace(",", "")) for name in metrics} for row in rows[1:]]


def _launch(targets: Sequence[Mapping[str, Any]]) -> None:
    with launch.use_backend("gpu"):
        for target in targets:
            ((problem, (variant,)),) = select([f"{target['problem']}.{target['variant']}"])
            case = Case(tuple(target["shape"]), target["dtype"], target["options"])
            host = problem.inputs(case, np.random.default_rng(0))
            device = {name: DeviceArray(array) for name, array in host.items()}
            variant.bind(device, **case.options)()
            driver.synchronize()


if __name__ == "__main__":
    _launch(json.loads(sys.argv[1]))

"""A pipeline fed from the host, from its own GPU and from another one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..device_array import DeviceArray
from . import exercise
from .gpu import GpuEngines
from .rates import middle, run, stages_alone
from .report import ideal

HOST, OWN, PEER = "pinned host memory", "its own GPU", "another GPU"  # where batches lie
_DISTINCT = 4  # so many different batches are sent, again and again
_REPEATS = 5


def fed_from(words: int, rounds: int, count: int = 32, *, device: int = 0, peer: int = 1) -> dict[str, dict[str, Any]]:
    """The exercise on three streams on GPU `device`, by where its batches lie.

    Args:
        words, rounds: of a batch, as `exercise.make_pipeline` takes them.
        count: batches in a run, of which the middle one of several is given.
        peer: the other GPU.

    Raises:
        ArithmeticError: a result is wrong.
    """
    found = {}
    rng = np.random.default_rng(0)
    host = [rng.integers(0, 2**32, words, np.uint32) for _ in range(_DISTINCT)]
    expected = [exercise.reference(array, rounds) for array in host]
    for place, owner in ((HOST, None), (OWN, device), (PEER, peer)):
        if owner is not None:
            GpuEngines(owner).make_current()
            batches: list[Any] = [DeviceArray(array) for array in host]
        GpuEngines(device).make_current()
        with exercise.make_pipeline(words, rounds, device=device, record=True) as pipeline:
            if owner is None:
                batches = [pipeline.pinned() for _ in host]
                for batch, array in zip(batches, host, strict=True):
                    batch["words"][...] = array
            for result in pipeline.run(batches):
                if not np.array_equal(result["words"], expected[result.index]):
                    raise ArithmeticError(f"batches in {place}: batch {result.index} is wrong")
            alone = stages_alone(pipeline, batches[0])
            report = middle([run(pipeline, batches, count) for _ in range(_REPEATS)])
        found[place] = {
            "batches": count,
            "bytes": 4 * words,
            "seconds": report.seconds,
            "copy_in_alone_seconds": alone.h2d,
            "share_of_ideal": ideal(alone, count) / report.seconds,
            "utilisation": report.utilisation(),
        }
    return found

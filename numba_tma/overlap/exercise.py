"""The copy-kernel-copy exercise: batches of words in, `rounds` steps of a generator on each word, as many words out.

The generator is the linear congruential one of Numerical Recipes, w ← 1664525·w + 1013904223 modulo 2³²: exact, so that
one wrong word shows, and n steps are one step with other constants, so that checking costs the host next to nothing.
`rounds` sets how long the kernel takes beside the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.types import uint32

from .. import driver
from ..launch import kernel
from .pipeline import Pipeline
from .rates import steady

FACTOR, STEP = 1664525, 1013904223
_THREADS = 256


@kernel(threads=_THREADS)
def advance(words, out, rounds):
    """Each thread takes every `gridDim·blockDim`-th word."""
    threads = uint32(cuda.gridDim.x) * uint32(_THREADS)
    for i in range(uint32(cuda.grid(1)), uint32(words.size), threads):
        word = words[i]
        for _ in range(rounds):
            word = word * uint32(FACTOR) + uint32(STEP)
        out[i] = word


def reference(words: np.ndarray, rounds: int) -> np.ndarray:
    """What the kernel makes of uint32 words."""
    factor, step = 1, 0
    for _ in range(rounds):
        factor, step = factor * FACTOR % 2**32, (step * FACTOR + STEP) % 2**32
    return words * np.uint32(factor) + np.uint32(step)


def make_compute(words: int, rounds: int, launches: int = 1) -> Callable:
    """A pipeline's `compute`: the kernel on all words.

    Args:
        words: of a batch.
        rounds: steps for each word.
        launches: kernels to enqueue, each with its share of the rounds; a multiple of it.

    Raises:
        ValueError: `rounds` is no multiple of `launches`.
    """
    if rounds % launches:
        raise ValueError(f"{rounds} rounds in {launches} launches: not the same number in each")
    blocks = -(-words // _THREADS)
    if driver.device_count():
        blocks = min(blocks, 8 * driver.attribute("MULTIPROCESSOR_COUNT", driver.current_device()))
    share = np.uint32(rounds // launches)

    def compute(inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        launch = advance[max(blocks, 1), None, stream]
        launch(inputs["words"], outputs["words"], share)
        for _ in range(launches - 1):
            launch(outputs["words"], outputs["words"], share)

    return compute


def make_pipeline(words: int, rounds: int, *, launches: int = 1, **options: Any) -> Pipeline:
    """The exercise as a pipeline; `options` are those of `Pipeline`."""
    described = {"words": ((words,), np.uint32)}
    return Pipeline(make_compute(words, rounds, launches), described, described, **options)


def batches(pipeline: Pipeline, count: int, rng: np.random.Generator) -> list[dict[str, np.ndarray]]:
    """Random batches in pinned memory, or in pageable where the pipeline's mode has no other."""
    made = []
    for _ in range(count):
        arrays = (
            pipeline.pinned()
            if pipeline.mode.pinned
            else {n: np.empty(s.shape, s.dtype) for n, s in pipeline.inputs.items()}
        )
        for array in arrays.values():
            array[...] = rng.integers(0, 2**32, array.shape, np.uint32)
        made.append(arrays)
    return made


def balanced_rounds(words: int, seconds: float) -> int:
    """How many rounds make the kernel take that long on this GPU."""
    few, many = 64, 1024
    times = [_kernel_seconds(words, rounds) for rounds in (few, many)]
    each = (times[1] - times[0]) / (many - few)
    return max(1, round(few + (seconds - times[0]) / each))


def _kernel_seconds(words: int, rounds: int) -> float:
    with make_pipeline(words, rounds, depth=1) as pipeline, pipeline.rehearsal(pipeline.pinned()) as rehearsal:
        return steady(pipeline.engines, rehearsal.stream, rehearsal.compute)

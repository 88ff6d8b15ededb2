"""Batches of prompts through GPT-2 on one GPU and on several, handed out by Dask; and what its transfers cost."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..overlap import Pipeline, Result
from ..overlap.shards import Sharded, gpu_cluster
from .batches import BatchInference
from .benchmark_workloads import prompts
from .config import Config
from .model import Model
from .precompile import compile_all
from .weights import random_weights

BATCH, LENGTH = 8, 1024
# Positions whose logits come back: how many batches each GPU gets in a run, and how many a worker gets at once. Of 0,
# the last token's come, float32; those of 224 are copied for as long as computing takes, on an H200.
RUNS = {0: (128, 16), 224: (8, 4)}
_TOGETHER = 2  # arrays of one transfer
_REPEATS = 3
_TOLERANCE = 2**-7  # of the largest logit: bfloat16's last bit


def precompile(workers: int, config: Config | None = None) -> list[str]:
    """Compile what the model launches into the cache on disk, by so many processes."""
    contexts = tuple((BATCH, LENGTH, 0, every) for every in RUNS)
    return compile_all(config or Config(), contexts, workers)


@functools.cache
def _model(config: Config) -> Model:
    return Model(random_weights(config))


def make_pipeline(config: Config, batch: int, length: int, every: int, **options: Any) -> Pipeline:
    """Batches of prompts through a model of random weights; in a worker, on its GPU."""
    return BatchInference(_model(config), batch, length, every=every, **options).pipeline


def by_gpus(
    gpus: Sequence[int],
    runs: Mapping[int, tuple[int, int]] = RUNS,
    *,
    config: Config | None = None,
    batch: int = BATCH,
    length: int = LENGTH,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Runs of a pipeline in this process, then of Dask's workers on the first of the GPUs, on the first two, and so on.

    Args:
        gpus: ordinals.
        runs: for each number of positions whose logits come back, how many batches of a run each GPU gets, and how many
            a worker gets at once.
        config, batch, length: the model's shape, prompts in a batch and tokens of each.
        options: the pipelines'.

    Yields:
        A row for each number of GPUs (0: this process, without Dask) and of positions, `every`: `batches` of a run, the
        middle one's `seconds`, and `bytes_out` of a batch. Of this process also `copied_seconds`, of a run whose
        results get memory of their own, as a worker's do. With Dask on one GPU also `transfer_seconds`: what a batch's
        outputs take from a worker's memory to this process while nothing else goes on, straight and through the
        scheduler.

    Raises:
        ArithmeticError: a worker's logits are not those of this process.
        LaunchError: there are no such GPUs.
    """
    config = config or Config()
    make = functools.partial(make_pipeline, config, batch, length, **options)
    batches = prompts(config, batch, length)
    expected = {}
    for every, (count, _) in runs.items():
        with make(every) as pipeline:
            expected[every] = [result["logits"] for result in pipeline.run(batches)]
            seconds = _timed(functools.partial(pipeline.run, copy=False), batches, count)
            copied = _timed(pipeline.run, batches, count)
        row = {"gpus": 0, "every": every, "batches": count, "seconds": seconds, "copied_seconds": copied}
        yield row | {"bytes_out": expected[every][0].nbytes}
    with gpu_cluster(gpus) as cluster, _clients(cluster) as (direct, indirect):
        workers = list(direct.nthreads())
        for every, (count, chunk) in runs.items():
            like = expected[every][0]
            for number in range(1, len(workers) + 1):
                used = workers[:number]
                with Sharded(functools.partial(make, every), direct, chunk=chunk, workers=used) as sharded:
                    sharded.start()
                    _check(sharded.run(batches), expected[every])
                    seconds = _timed(sharded.run, batches, count * number)
                row = {"gpus": number, "every": every, "batches": count * number, "seconds": seconds}
                row |= {"bytes_out": like.nbytes, "chunk": chunk}
                if number == 1:
                    ways = {"straight": direct, "through the scheduler": indirect}
                    row["transfer_seconds"] = {way: _transfer(client, like) for way, client in ways.items()}
                yield row


@contextlib.contextmanager
def _clients(cluster: Any) -> Iterator[tuple[Any, Any]]:
    """One that fetches results from the workers themselves, and one that does so through the scheduler."""
    from distributed import Client

    with Client(cluster, direct_to_workers=True) as direct, Client(cluster, direct_to_workers=False) as indirect:
        yield direct, indirect


def _check(results: Iterable[Result], expected: list[np.ndarray]) -> None:
    for result in results:
        found, wanted = (array.astype(np.float32) for array in (result["logits"], expected[result.index]))
        if not np.allclose(found, wanted, rtol=0, atol=_TOLERANCE * np.abs(wanted).max()):
            raise ArithmeticError(f"batch {result.index}: a worker's logits are not those of this process")


def _timed(run: Callable[[Iterable[Any]], Iterable[Any]], batches: list[np.ndarray], count: int) -> float:
    """Seconds of the middle one of several runs; results are let go of as they come."""
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        deque(run(batches[i % len(batches)] for i in range(count)), maxlen=0)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _transfer(client: Any, like: np.ndarray) -> float:
    """Seconds that an array like this one takes from a worker, of several together."""
    from distributed import wait

    seconds = []
    for _ in range(_REPEATS):
        future = client.submit(_made, like.shape, like.dtype, pure=False)
        wait(future)
        begin = time.perf_counter()
        future.result()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) / _TOGETHER


def _made(shape: tuple[int, ...], dtype: np.dtype) -> list[np.ndarray]:
    """In a worker."""
    return [np.ones(shape, dtype) for _ in range(_TOGETHER)]

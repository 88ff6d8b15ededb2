"""Batches over several GPUs or machines: Dask's scheduler hands chunks of them to workers with a pipeline each.

    from dask.distributed import Client

    with gpu_cluster() as cluster, Client(cluster, direct_to_workers=True) as client:
        with Sharded(make_pipeline, client) as sharded:
            for result in sharded.run(batches):
                use(result["y"])

Dask starts the workers, moves the chunks to them and the results back, and gives a chunk to another worker when one has
died. No array goes from one GPU to another.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import driver
from .pipeline import BatchError, Pipeline, Result

_Outputs = list[dict[str, np.ndarray]]

# In a worker: the pipelines that it has made, by what asked for them.
_pipelines: dict[str, Pipeline] = {}
_lock = threading.Lock()


def gpu_cluster(gpus: Sequence[int] | None = None) -> Any:
    """A cluster of Dask's on this machine: a worker process for each GPU, which sees no other.

    Dask does not limit the workers' host memory, of which a pipeline locks its share. Where RAPIDS is installed,
    `dask_cuda.LocalCUDACluster` does the same, and binds each worker to the cores next to its GPU.

    Args:
        gpus: ordinals, by default of all GPUs.

    Returns:
        A `distributed.SpecCluster`.

    Raises:
        ImportError: dask.distributed is not installed.
        LaunchError: there is no such GPU.
    """
    distributed = _distributed()
    count = driver.device_count()
    gpus = range(count) if gpus is None else gpus
    missing = [gpu for gpu in gpus if not 0 <= gpu < count]
    if missing or not gpus:
        raise driver.LaunchError(f"a worker for each GPU: no GPU {', '.join(map(str, missing or [0]))} of {count} here")
    # A worker gets a GPU by the name that it has for the driver, also if this process is itself limited to some.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(gpu) for gpu in range(count)]
    here = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "dashboard": False}
    options = {**here, "nthreads": 1, "memory_limit": None, "silence_logs": logging.WARNING}
    workers = {
        gpu: {"cls": distributed.Nanny, "options": {**options, "env": {"CUDA_VISIBLE_DEVICES": names[gpu]}}}
        for gpu in gpus
    }
    scheduler = {"cls": distributed.Scheduler, "options": here}
    return distributed.SpecCluster(workers=workers, scheduler=scheduler, silence_logs=logging.WARNING)


def _distributed() -> Any:
    try:
        import distributed
    except ImportError:
        raise ImportError("Sharded needs dask.distributed: pip install numba-tma[cluster]") from None
    return distributed


def _pipeline(token: str, make: Callable[[], Pipeline]) -> Pipeline:
    """In a worker, with the lock: its pipeline, made if there is none yet."""
    if token not in _pipelines:
        _pipelines[token] = make()
    return _pipelines[token]


def _start(token: str, make: Callable[[], Pipeline]) -> None:
    """In a worker: make its pipeline."""
    with _lock:
        _pipeline(token, make)


def _run_chunk(token: str, make: Callable[[], Pipeline], first: int, chunk: list) -> tuple[_Outputs, BatchError | None]:
    """In a worker: a chunk's outputs, up to the batch that failed."""
    outputs: _Outputs = []
    with _lock:  # a worker may have several threads, and a GPU has one of each engine
        pipeline = _pipeline(token, make)
        try:
            for result in pipeline.run(chunk):
                outputs.append(result.outputs)
        except BatchError as error:
            return outputs, BatchError(first + error.batch, error.stage, error.__cause__)
    return outputs, None


def _close(token: str) -> None:
    """In a worker: free its pipeline."""
    with _lock:
        if token in _pipelines:
            _pipelines.pop(token).close()


class Sharded:
    """A pipeline on each worker of a Dask cluster; `run` is as a pipeline's.

    Args:
        make_pipeline: makes a worker's pipeline, in the worker, on its current GPU. Importable there.
        client: a `dask.distributed.Client`. Made with `direct_to_workers=True` it fetches results from the workers
            themselves, which have to be within its reach, rather than through the scheduler.
        chunk: batches that a worker gets at once. Between chunks its engines run empty, so that it should be several
            times a pipeline's depth.
        workers: addresses of the cluster's workers that get batches, by default all: those with a GPU, where some have
            none.

    Raises:
        ImportError: dask.distributed is not installed.
        ValueError: chunk is less than 1.
    """

    def __init__(
        self,
        make_pipeline: Callable[[], Pipeline],
        client: Any,
        *,
        chunk: int = 32,
        workers: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(client, _distributed().Client):
            raise TypeError(f"client={client!r}: expected a dask.distributed.Client")
        if chunk < 1:
            raise ValueError(f"chunk {chunk}; 1 or more")
        self._make, self._client, self._chunk = make_pipeline, client, chunk
        self._workers = list(workers) if workers is not None else None
        self._token = uuid.uuid4().hex

    def start(self) -> None:
        """Make the pipelines of all workers now, rather than each with its first chunk."""
        started = [
            self._client.submit(_start, self._token, self._make, workers=[worker], pure=False)
            for worker in self._addresses()
        ]
        self._client.gather(started)

    def _addresses(self) -> list[str]:
        return list(self._client.nthreads()) if self._workers is None else self._workers

    def run(self, batches: Iterable[Any]) -> Iterator[Result]:
        """Results in the order of the batches. Two chunks a worker are under way at most.

        Raises:
            BatchError: naming the batch; those before it have been delivered, those after it are cancelled.
        """
        source, number = iter(batches), 0
        under_way: deque[tuple[int, Any]] = deque()
        try:
            while True:
                room = 2 * max(1, len(self._addresses()))
                while len(under_way) < room and (chunk := list(itertools.islice(source, self._chunk))):
                    # pure=False: equal batches are computed again, not looked up.
                    future = self._client.submit(
                        _run_chunk, self._token, self._make, number, chunk, workers=self._workers, pure=False
                    )
                    under_way.append((number, future))
                    number += len(chunk)
                if not under_way:
                    return
                first, future = under_way.popleft()
                outputs, error = future.result()
                for place, found in enumerate(outputs, first):
                    yield Result(place, found)
                if error is not None:
                    raise error
        finally:
            for _, future in under_way:
                future.cancel()

    def close(self) -> None:
        """Free the workers' pipelines."""
        self._client.run(_close, self._token, workers=self._workers)

    def __enter__(self) -> Sharded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

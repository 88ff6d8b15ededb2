"""Batches over several GPUs or machines: Dask's scheduler hands chunks of them to workers with a pipeline each.

    from dask.distributed import Client
    from dask_cuda import LocalCUDACluster          # a worker process a GPU; without a GPU: Client(n_workers=2, …)

    with Client(LocalCUDACluster()) as client, Sharded(make_pipeline, client) as sharded:
        for result in sharded.run(batches):
            use(result["y"])

Dask starts the workers, moves the chunks to them and the results back, and gives a chunk to another worker when one has
died. No array goes from one GPU to another.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .pipeline import BatchError, Pipeline, Result

_Outputs = list[dict[str, np.ndarray]]

# In a worker: the pipelines that it has made, by what asked for them.
_pipelines: dict[str, Pipeline] = {}
_lock = threading.Lock()


def _run_chunk(token: str, make: Callable[[], Pipeline], first: int, chunk: list) -> tuple[_Outputs, BatchError | None]:
    """In a worker: a chunk's outputs, up to the batch that failed."""
    outputs: _Outputs = []
    with _lock:  # a worker may have several threads, and a GPU has one of each engine
        if token not in _pipelines:
            _pipelines[token] = make()
        try:
            for result in _pipelines[token].run(chunk):
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
        client: a `dask.distributed.Client`.
        chunk: batches that a worker gets at once. Between chunks its engines run empty, so that it should be several
            times a pipeline's depth.

    Raises:
        ImportError: dask.distributed is not installed.
        ValueError: chunk is less than 1.
    """

    def __init__(self, make_pipeline: Callable[[], Pipeline], client: Any, *, chunk: int = 32) -> None:
        try:
            import distributed
        except ImportError:
            raise ImportError("Sharded needs dask.distributed: pip install numba-tma[cluster]") from None
        if not isinstance(client, distributed.Client):
            raise TypeError(f"client={client!r}: expected a dask.distributed.Client")
        if chunk < 1:
            raise ValueError(f"chunk {chunk}; 1 or more")
        self._make, self._client, self._chunk = make_pipeline, client, chunk
        self._token = uuid.uuid4().hex

    def run(self, batches: Iterable[Any]) -> Iterator[Result]:
        """Results in the order of the batches. Two chunks a worker are under way at most.

        Raises:
            BatchError: naming the batch; those before it have been delivered, those after it are cancelled.
        """
        source, number = iter(batches), 0
        under_way: deque[tuple[int, Any]] = deque()
        try:
            while True:
                room = 2 * max(1, len(self._client.nthreads()))
                while len(under_way) < room and (chunk := list(itertools.islice(source, self._chunk))):
                    # pure=False: equal batches are computed again, not looked up.
                    future = self._client.submit(_run_chunk, self._token, self._make, number, chunk, pure=False)
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
        self._client.run(_close, self._token)

    def __enter__(self) -> Sharded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

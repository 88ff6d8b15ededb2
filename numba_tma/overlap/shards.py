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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import driver
from .pipeline import Pipeline
from .results import RESULT, SOURCE, BatchError, Result

_Outputs = list[dict[str, np.ndarray]]

# In a worker: the pipelines that it has made, by what asked for them.
_pipelines: dict[str, Pipeline] = {}
_lock = threading.Lock()
_PATIENCE = 5.0  # seconds between two looks whether a chunk that nobody finishes still has a worker


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
        TypeError, ValueError: an ordinal is no integer, or there twice.
    """
    distributed = _distributed()
    count = driver.device_count()
    gpus = range(count) if gpus is None else list(gpus)
    if not all(isinstance(gpu, (int, np.integer)) and not isinstance(gpu, bool) for gpu in gpus):
        raise TypeError(f"gpus {gpus}: expected ordinals, such as [0, 1]")
    if len(set(gpus)) < len(gpus):
        raise ValueError(f"gpus {gpus}: a GPU twice; each has one worker, whose pipeline keeps all of it busy")
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
        try:
            made = make()
        except BaseException as error:
            raise _portable(error) from None
        if not isinstance(made, Pipeline):
            raise TypeError(f"make_pipeline returned a {type(made).__name__}: expected a Pipeline")
        _pipelines[token] = made
    return _pipelines[token]


def _portable(error: BaseException) -> Exception:
    """An error that reaches the caller's process and does not end this one: itself, or one of the same words."""
    pickled = _distributed().protocol.pickle
    try:
        if isinstance(error, Exception) and isinstance(pickled.loads(pickled.dumps(error)), type(error)):
            return error
    except Exception:  # of what it holds, or of a constructor that takes something else than a message
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


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
            return outputs, BatchError(first + error.batch, error.stage, _portable(error.__cause__))
        except BaseException as error:  # sys.exit() in a stage, which would be the end of the worker
            return outputs, BatchError(first + len(outputs), RESULT, _portable(error))
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
        TypeError, ValueError: an argument is not what it should be.
    """

    def __init__(
        self,
        make_pipeline: Callable[[], Pipeline],
        client: Any,
        *,
        chunk: int = 32,
        workers: Collection[str] | None = None,
    ) -> None:
        if not isinstance(client, _distributed().Client):
            raise TypeError(f"client={client!r}: expected a dask.distributed.Client")
        if not callable(make_pipeline):
            raise TypeError(f"make_pipeline={make_pipeline!r}: expected a function that makes a Pipeline")
        if isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1:
            raise ValueError(f"chunk {chunk!r}; expected a number of batches, 1 or more")
        if workers is not None and (
            isinstance(workers, str)
            or not isinstance(workers, Collection)
            or not all(isinstance(worker, str) for worker in workers)
        ):
            raise TypeError(f"workers={workers!r}: expected a list of addresses, such as list(client.nthreads())[:1]")
        if workers is not None and not workers:
            raise ValueError("workers=[]: expected one address or more, or None for all workers")
        self._make, self._client, self._chunk = make_pipeline, client, int(chunk)
        self._workers = list(workers) if workers is not None else None
        self._token = uuid.uuid4().hex
        self._closed = False

    def start(self) -> None:
        """Make the pipelines of all workers now, rather than each with its first chunk.

        Raises:
            RuntimeError: this, or the client, is closed.
            ValueError: one of `workers` is not in the cluster.
        """
        self._check_open()
        self._check_workers()
        started = [
            self._client.submit(_start, self._token, self._make, workers=[worker], pure=False)
            for worker in self._addresses()
        ]
        self._client.gather(started)

    def _addresses(self) -> list[str]:
        return list(self._client.nthreads()) if self._workers is None else self._workers

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the Sharded is closed: make another one")
        if self._client.status != "running":
            raise RuntimeError(
                f"the Dask client is {self._client.status}: a Sharded needs it open as long as it is used"
            )

    def _check_workers(self) -> None:
        """The scheduler would wait for a worker that it does not know for ever."""
        there = self._client.nthreads()
        missing = [worker for worker in self._workers or () if worker not in there]
        if missing:
            raise ValueError(
                f"workers: {', '.join(missing)} not in the cluster, which has {', '.join(there) or 'none'}: one that "
                f"died comes back under another address"
            )

    def _awaited(self, future: Any) -> tuple[_Outputs, BatchError | None]:
        """What came of a chunk."""
        while True:
            try:
                return future.result(timeout=_PATIENCE)
            except TimeoutError:
                if future.done():  # a worker's own
                    raise
                self._check_open()
                if self._workers is not None and not set(self._workers) & set(self._client.nthreads()):
                    raise RuntimeError(
                        f"none of the workers {', '.join(self._workers)} is in the cluster any more, and no others may "
                        f"take their batches: name more of them, or workers=None"
                    ) from None

    def _taken(self, source: Iterator[Any], number: int) -> tuple[list, BatchError | None]:
        """The next chunk, whose first batch is `number`, and the error that the source ended it with."""
        chunk: list = []
        try:
            chunk.extend(itertools.islice(source, self._chunk))
        except Exception as error:
            return chunk, BatchError(number + len(chunk), SOURCE, error)
        return chunk, None

    def _submit(self, number: int, chunk: list) -> Any:
        """Send a chunk, whose first batch is `number`, to whichever worker is free first."""
        try:
            # pure=False: equal batches are computed again, not looked up.
            return self._client.submit(
                _run_chunk, self._token, self._make, number, chunk, workers=self._workers, pure=False
            )
        except Exception:
            for place, batch in enumerate(chunk, number):  # Dask does not say which cannot be sent, nor why
                try:
                    _distributed().protocol.pickle.dumps(batch)
                except Exception as error:
                    raise BatchError(place, SOURCE, error) from None
            raise

    def run(self, batches: Iterable[Any]) -> Iterator[Result]:
        """Results in the order of the batches. Two chunks a worker are under way at most.

        Raises:
            BatchError: naming the batch; those before it have been delivered, those after it are cancelled.
            RuntimeError: this, or the client, is closed; or all of `workers` have died.
            ValueError: one of `workers` is not in the cluster.
        """
        self._check_open()
        return self._results(iter(batches))

    def _results(self, source: Iterator[Any]) -> Iterator[Result]:
        self._check_workers()
        number, failed = 0, None
        under_way: deque[tuple[int, Any]] = deque()
        try:
            while True:
                self._check_open()
                room = 2 * max(1, len(self._addresses()))
                while failed is None and len(under_way) < room:
                    chunk, failed = self._taken(source, number)
                    if not chunk:
                        break
                    try:
                        future = self._submit(number, chunk)
                    except BatchError as error:
                        failed = error
                        break
                    under_way.append((number, future))
                    number += len(chunk)
                if not under_way:
                    if failed is not None:
                        raise failed
                    return
                first, future = under_way.popleft()
                outputs, error = self._awaited(future)
                for place, found in enumerate(outputs, first):
                    yield Result(place, found)
                if error is not None:
                    raise error
        finally:
            for _, future in under_way if self._client.status == "running" else ():
                future.cancel()

    def close(self) -> None:
        """Free the workers' pipelines. Where the client is closed the workers keep theirs until they end."""
        if self._closed:
            return
        self._closed = True
        if self._client.status == "running":
            there = self._client.nthreads()
            workers = [worker for worker in self._addresses() if worker in there]
            ended = self._client.run(_close, self._token, workers=workers, on_error="return")
            for error in ended.values():
                if isinstance(error, Exception) and not isinstance(error, OSError):  # which one that dies just now has
                    raise error

    def __enter__(self) -> Sharded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

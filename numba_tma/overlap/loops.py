"""The double-buffer loop as it is often written, and what mends it.

Both loops run on engines as they are, without a pipeline: three streams, two buffers a side, one batch after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Buffers:
    """Two device buffers for what comes in and two for what goes out, the hosts' beside them, and three streams."""

    def __init__(self, engines: Any, batches: Sequence[np.ndarray]) -> None:
        self.engines = engines
        shape, dtype = batches[0].shape, batches[0].dtype
        self.host = [engines.host_array(shape, dtype, True) for _ in batches]
        for host, batch in zip(self.host, batches, strict=True):
            host[...] = batch
        self.results = [engines.host_array(shape, dtype, True) for _ in batches]
        self.inputs = [engines.device_array(shape, dtype) for _ in range(2)]
        self.outputs = [engines.device_array(shape, dtype) for _ in range(2)]
        self.copy_in, self.compute, self.copy_out = (engines.stream() for _ in range(3))
        # What nobody has written yet is zero everywhere, so that a missing copy shows.
        for array in (*self.inputs, *self.outputs):
            engines.copy_in(array, self.results[0], self.copy_in)
        engines.drain([self.copy_in])

    def close(self) -> None:
        """Wait for the streams and give them back."""
        streams = [self.copy_in, self.compute, self.copy_out]
        self.engines.drain(streams)
        for stream in streams:
            self.engines.close_stream(stream)


def as_written(buffers: Buffers, compute: Callable) -> None:
    """The next batch is copied on one stream, a kernel runs on a second, results go out on a third, and each turn ends
    with a wait for the kernel's stream."""
    b, engines = buffers, buffers.engines
    for i in range(len(b.host)):
        here, other = i % 2, (i + 1) % 2
        if i + 1 < len(b.host):
            engines.copy_in(b.inputs[other], b.host[i + 1], b.copy_in)
        enqueue(engines, compute, b.inputs[here], b.outputs[here], b.compute)
        if i > 0:
            engines.copy_out(b.results[i - 1], b.outputs[other], b.copy_out)
        engines.drain([b.compute])


def mended(buffers: Buffers, compute: Callable) -> None:
    """The same with an event after each piece of work, and a wait for it before each that needs it."""
    b, engines = buffers, buffers.engines
    copied, computed, returned = ([engines.event() for _ in range(2)] for _ in range(3))
    for i in range(len(b.host)):
        here = i % 2
        if i >= 2:
            engines.wait(b.copy_in, computed[here])  # the kernel two batches ago has read this buffer
        engines.copy_in(b.inputs[here], b.host[i], b.copy_in)
        engines.record(copied[here], b.copy_in)
        engines.wait(b.compute, copied[here])  # the input has arrived
        if i >= 2:
            engines.wait(b.compute, returned[here])  # the result two batches ago has left this buffer
        enqueue(engines, compute, b.inputs[here], b.outputs[here], b.compute)
        engines.record(computed[here], b.compute)
        engines.wait(b.copy_out, computed[here])  # the result is there
        engines.copy_out(b.results[i], b.outputs[here], b.copy_out)
        engines.record(returned[here], b.copy_out)
    engines.drain([b.copy_out])  # the last result as well


def enqueue(engines: Any, compute: Callable, source: Any, target: Any, stream: Any) -> None:
    """Put the exercise's kernel on a stream."""

    def failed(error: Exception) -> None:
        raise error

    engines.compute(compute, {"words": source}, {"words": target}, stream, stream, failed)


def wrong(results: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> list[int]:
    """Which batches' results are not what they should be."""
    return [
        number
        for number, pair in enumerate(zip(results, expected, strict=True))
        if not np.array_equal(pair[0], pair[1])
    ]

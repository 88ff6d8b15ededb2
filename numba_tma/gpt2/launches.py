"""Work that repeats: launches one after the other, then as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..overlap.gpu import Graph


class Launches:
    """Launches that belong together, on one stream; calling it enqueues them all.

    Given a stream (cuda.core's, not the default stream) the second call captures them and from then on they are one
    graph. The first does not, as kernels that are not loaded yet cannot be captured; nor is anything run twice, since
    what is run may depend on what ran before.
    """

    def __init__(self, launches: Sequence[Callable[[], Any]], stream: Any = None) -> None:
        self._launches = tuple(launches)
        self._stream = stream
        self._loaded = False
        self._graph: Graph | None = None

    def __len__(self) -> int:
        return len(self._launches)

    def __call__(self) -> None:
        """Enqueue them; in the simulator, run them."""
        if self._stream is None or not self._loaded:
            self._run()
            self._loaded = True
            return
        if self._graph is None:
            self._graph = Graph(lambda *_: self._run(), {}, {}, self._stream, None)
        self._graph.launch(self._stream)

    def _run(self) -> None:
        for launch in self._launches:
            launch()

"""How each step is launched, and which blocks, clusters and stages a row's length asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .operands import need_aligned, operands, resident_blocks
from .resident import make_bulk, make_ring

PART_BYTES = 64 * 1024  # of a row in one block: what 512 threads hold in their registers
MAX_CLUSTER = 16
_VECTOR = 16


class Split(NamedTuple):
    """How a row is spread: over `cluster` blocks of `threads` threads, of `passes` vectors of 16 bytes each."""

    cluster: int
    threads: int
    passes: int


def split(vectors: int, cluster: int | None = None, threads: int | None = None) -> Split:
    """A split for rows of so many vectors; what is not None is taken as given.

    Raises:
        ValueError: the row does not fit.
    """
    if cluster is None:
        cluster = 1
        while cluster < MAX_CLUSTER and vectors * _VECTOR > PART_BYTES * cluster:
            cluster *= 2
    share = -(-vectors // cluster)
    if threads is None:
        threads = min(512, max(32, 1 << (max(share - 1, 0) // 4).bit_length()))
    passes = max(1, -(-share // threads))
    if passes * threads * _VECTOR > 224 * 1024 or passes > 16:
        raise ValueError(
            f"rows of {vectors * _VECTOR:,} B over {cluster} blocks of {threads} threads are {passes} vectors a "
            f"thread; 16 are the most: take a larger cluster (up to {MAX_CLUSTER}), or variant 'online'"
        )
    return Split(cluster, threads, passes)


def bind_bulk(operation: str, variant: str) -> Callable[..., Callable[[], Any]]:
    """Bind one row a block (`bulk`) or a cluster (`cluster`)."""

    def bind(
        given: Mapping[str, Any],
        *,
        epsilon: float = 0.0,
        cluster: int | None = None,
        threads: int | None = None,
        min_blocks: int = 1,
        stream: object = None,
    ) -> Callable[[], Any]:
        o = operands(given, epsilon)
        need_aligned(o, variant)
        s = split(o.vectors, 1 if variant == "bulk" else cluster, threads)
        kernel = make_bulk(operation, o.dtype, s.threads, s.passes, s.cluster, min_blocks)
        return kernel[o.rows * s.cluster, None, stream].bind(*o.arguments)

    return bind


def bind_ring(operation: str) -> Callable[..., Callable[[], Any]]:
    """Bind the persistent ring; `clusters` is how many there are, by default what the device holds at once."""

    def bind(
        given: Mapping[str, Any],
        *,
        epsilon: float = 0.0,
        cluster: int | None = None,
        threads: int | None = None,
        stages: int = 3,
        min_blocks: int = 1,
        clusters: int | None = None,
        stream: object = None,
    ) -> Callable[[], Any]:
        o = operands(given, epsilon)
        need_aligned(o, "ring")
        s = split(o.vectors, cluster, threads)
        kernel = make_ring(operation, o.dtype, s.threads, s.passes, stages, s.cluster, min_blocks)
        if clusters is None:
            clusters = resident_blocks(kernel, o.arguments) // s.cluster
        return kernel[min(clusters, o.rows) * s.cluster, None, stream].bind(*o.arguments)

    return bind

"""How each step is launched, and which blocks, clusters and stages a row's length asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..problem import Case, Variant, check_options
from .operands import Operands, need_aligned, operands, resident_blocks
from .plain import PLAIN
from .ring import make_ring
from .row import make_row

PART_BYTES = 64 * 1024  # of a row in one block: what 512 threads hold in their registers
MAX_CLUSTER = 16
VECTOR = 16


OPTIONS = {
    "plain": ("threads",),
    "online": ("threads", "vectors", "min_blocks", "cluster"),
    "registers": ("threads", "min_blocks", "cluster"),
    "bulk": ("threads", "min_blocks"),
    "cluster": ("threads", "min_blocks", "cluster"),
    "ring": ("threads", "min_blocks", "cluster", "stages", "clusters"),
}


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
        while cluster < MAX_CLUSTER and vectors * VECTOR > PART_BYTES * cluster:
            cluster *= 2
    share = -(-vectors // cluster)
    if threads is None:
        threads = min(512, _threads(share, 4))
    passes = max(1, -(-share // threads))
    if passes * threads * VECTOR > 224 * 1024 or passes > 16:
        raise ValueError(
            f"rows of {vectors * VECTOR:,} B over {cluster} blocks of {threads} threads are {passes} vectors a "
            f"thread; 16 are the most: take a larger cluster (up to {MAX_CLUSTER}), or variant 'online'"
        )
    return Split(cluster, threads, passes)


def _threads(vectors: int, each: int) -> int:
    """The power of two, a warp at least, whose threads have `each` of so many vectors."""
    return max(32, 1 << (max(vectors - 1, 0) // each).bit_length())


def bind_plain(operation: str) -> Callable[..., Callable[[], Any]]:
    """Bind the baseline."""

    def bind(
        given: Mapping[str, Any], *, epsilon: float = 0.0, threads: int = 256, stream: object = None
    ) -> Callable[[], Any]:
        o = operands(given, epsilon)
        return PLAIN[operation](threads)[o.rows, None, stream].bind(*o.arguments)

    return bind


def bind_online(operation: str) -> Callable[..., Callable[[], Any]]:
    """Bind the two passes over global memory, by vectors where the rows allow it."""

    def bind(
        given: Mapping[str, Any],
        *,
        epsilon: float = 0.0,
        threads: int | None = None,
        vectors: int = 4,
        min_blocks: int = 1,
        cluster: int = 1,
        stream: object = None,
    ) -> Callable[[], Any]:
        o = operands(given, epsilon)
        share = -(-o.vectors // cluster)
        if threads is None:
            threads = min(512, _threads(share, vectors))
        kernel = make_row(
            operation,
            o.dtype,
            threads,
            vectors,
            held=False,
            cluster=cluster,
            min_blocks=min_blocks,
            single=not o.aligned,
        )
        return kernel[o.rows * cluster, None, stream].bind(*o.arguments)

    return bind


def bind_held(operation: str, variant: str) -> Callable[..., Callable[[], Any]]:
    """Bind one row a block or cluster, held in registers: from global memory (`registers`), or by the copy engine."""

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
        part_bytes = 0 if variant == "registers" else s.passes * s.threads * VECTOR
        kernel = make_row(
            operation, o.dtype, s.threads, s.passes, part_bytes=part_bytes, cluster=s.cluster, min_blocks=min_blocks
        )
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


def variants(operation: str) -> tuple[Variant, ...]:
    """The ladder of an operation."""
    return (
        Variant(
            "plain", "ld/st", "as one writes it: a pass for each number, and one to write", bind_plain(operation), True
        ),
        Variant("online", "ld/st", "one pass for both numbers, 16 bytes a thread and access", bind_online(operation)),
        Variant("registers", "ld/st", "the row read once, and held", bind_held(operation, "registers")),
        Variant("bulk", "TMA", "fetched by one bulk copy, while no thread waits", bind_held(operation, "bulk")),
        Variant("cluster", "TMA", "a row over the blocks of a cluster", bind_held(operation, "cluster")),
        Variant("ring", "TMA", "blocks that stay; the next rows on their way", bind_ring(operation)),
    )


def bind(operation: str, variant: str) -> Callable[..., Callable[[], Any]]:
    """What binds a variant."""
    return next(v.bind for v in variants(operation) if v.name == variant)


def choose(o: Operands) -> tuple[str, dict[str, Any]]:
    """The variant for these arrays where none is asked for, and its options: what was fastest on an H200."""
    if not o.aligned or o.vectors * VECTOR > PART_BYTES * MAX_CLUSTER:
        return "online", {}
    return ("bulk" if o.vectors * VECTOR <= PART_BYTES else "ring"), {}


def run(
    operation: str, ladder: Sequence[Variant], given: Mapping[str, Any], variant: str | None, options: Mapping[str, Any]
) -> None:
    """Check arrays and options, and launch.

    Raises:
        KeyError, TypeError, ValueError: as the public functions say.
    """
    named = {v.name: v for v in ladder}
    if variant is not None and variant not in named:
        raise KeyError(f"{operation} has no variant {variant!r}; it has {', '.join(named)}")
    try:
        o = operands(given)
        if variant is None:
            variant, chosen_options = choose(o)
            options = {**chosen_options, **options}
        chosen = named[variant]
        known = {name: value for name, value in options.items() if name != "epsilon"}
        check_options(operation, chosen, known, OPTIONS[chosen.name])
        if o.rows and o.columns:
            chosen.bind(given, **options)()
    except ValueError as error:
        raise ValueError(f"{operation}: {error}") from None


# Small rows leave the blocks of a cluster, and a ring's second turn, without work unless they are asked for.
SMALL = {"cluster": {"cluster": 2}, "ring": {"cluster": 2, "clusters": 2, "stages": 2}}


def gpu_cases(options: Mapping[str, Any] | None = None) -> list[Case]:
    """256 MB of rows of 4k to 256k columns, in the types that matter most; `bulk` only where a block holds a row."""
    cases = []
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        for columns in (4096, 32768, 262144):
            without = ("bulk",) if columns * itemsize > PART_BYTES else ()
            cases.append(Case(((1 << 28) // (columns * itemsize), columns), dtype, options or {}, without=without))
    return cases

"""How each step is launched, and which blocks, clusters and stages a row's length asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ... import arrays, driver
from ...device_array import DeviceArray
from ..problem import Case, UnknownNameError, Variant, check_options
from .operands import MULTIPROCESSORS, Operands, need_aligned, operands, resident_blocks
from .plain import PLAIN
from .ring import make_ring
from .row import make_row

PART_BYTES = 64 * 1024  # of a row in one block: what 512 threads hold in registers; three such parts fit on an SM
MAX_PART_BYTES = 224 * 1024
PART_GRAIN = 4096  # room for parts is made in steps of so much, so that few kernels are compiled
MAX_CLUSTER = 16
HELD_ELEMENTS = 32  # of a row in a thread's registers, beside as many weights
VECTOR = 16


OPTIONS = {
    "plain": ("threads",),
    "online": ("threads", "vectors", "min_blocks", "keep"),
    "registers": ("threads", "min_blocks", "keep"),
    "bulk": ("threads", "min_blocks", "keep"),
    "cluster": ("parts", "rows", "ahead", "threads", "vectors", "min_blocks", "keep"),
    "ring": ("threads", "min_blocks", "cluster", "stages", "clusters"),
    "grid": ("parts", "ahead", "threads", "vectors", "min_blocks", "keep"),
}


class Split(NamedTuple):
    """How a row is spread: over `cluster` blocks of `threads` threads, of `passes` vectors of 16 bytes each."""

    cluster: int
    threads: int
    passes: int


def split(vectors: int, itemsize: int, cluster: int | None = None, threads: int | None = None) -> Split:
    """A split for rows of so many vectors of elements of `itemsize` bytes; what is not None is taken as given.

    Four vectors a thread, up to 512 threads; then more, as long as 32 elements widened to float32 fit into registers.

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
        if share * VECTOR > threads * HELD_ELEMENTS * itemsize:
            threads *= 2
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
        keep: bool = False,
        stream: object = None,
    ) -> Callable[[], Any]:
        o = operands(given, epsilon)
        if threads is None:
            threads = min(512, _threads(o.vectors, vectors))
        kernel = make_row(
            operation,
            o.dtype,
            threads,
            vectors,
            held=False,
            min_blocks=min_blocks,
            keep=keep,
            single=not o.aligned,
        )
        return kernel[o.rows, None, stream].bind(*o.arguments)

    return bind


def bind_held(operation: str, variant: str) -> Callable[..., Callable[[], Any]]:
    """Bind one row a block, held in registers: from global memory (`registers`), or by the copy engine (`bulk`)."""

    def bind(
        given: Mapping[str, Any],
        *,
        epsilon: float = 0.0,
        threads: int | None = None,
        min_blocks: int = 1,
        keep: bool = False,
        stream: object = None,
    ) -> Callable[[], Any]:
        o = operands(given, epsilon)
        need_aligned(o, variant)
        s = split(o.vectors, o.itemsize, 1, threads)
        part_bytes = 0 if variant == "registers" else s.passes * s.threads * VECTOR
        kernel = make_row(
            operation, o.dtype, s.threads, s.passes, part_bytes=part_bytes, min_blocks=min_blocks, keep=keep
        )
        return kernel[o.rows, None, stream].bind(*o.arguments)

    return bind


def bind_parts(operation: str, variant: str) -> Callable[..., Callable[[], Any]]:
    """Bind rows over several blocks, up to 64 KB in the shared memory of each, three of them on an SM.

    They are a cluster (`cluster`), or any blocks of the grid (`grid`). A cluster takes one of the `rows` or two, and
    has `ahead` pieces of weights on their way: see `make_row`.
    """

    def bind(
        given: Mapping[str, Any],
        *,
        epsilon: float = 0.0,
        parts: int | None = None,
        rows: int = 1,
        ahead: int = 1,
        threads: int = 512,
        vectors: int = 2,
        min_blocks: int = 3,
        keep: bool = False,
        stream: object = None,
    ) -> Callable[[], Any]:
        o = operands(given, epsilon)
        need_aligned(o, variant)
        if parts is None:
            parts = parts_of(rows * o.vectors, variant)
        part_bytes = -(-o.vectors * VECTOR // (parts * PART_GRAIN)) * PART_GRAIN
        if rows * part_bytes > MAX_PART_BYTES or (variant == "cluster" and parts > MAX_CLUSTER):
            raise ValueError(
                f"{rows} rows of {o.vectors * VECTOR:,} B in {parts} parts of {part_bytes:,} B: a block has room for "
                f"{MAX_PART_BYTES:,} B, a cluster has at most {MAX_CLUSTER} blocks; take more parts of variant 'grid'"
            )
        options = {"held": False, "part_bytes": part_bytes, "ahead": ahead, "min_blocks": min_blocks, "keep": keep}
        if variant == "cluster":
            kernel = make_row(operation, o.dtype, threads, vectors, cluster=parts, rows=rows, **options)
            return kernel[-(-o.rows // rows) * parts, None, stream].bind(*o.arguments)
        kernel = make_row(operation, o.dtype, threads, vectors, grid=True, **options)
        given_all = (*o.arguments, *_meeting(o, parts, driver.stream_handle(stream)), np.uint32(parts))
        room = resident_blocks(kernel, given_all)
        if parts > room:  # they would wait for blocks that cannot begin before they end
            raise ValueError(
                f"rows of {o.vectors * VECTOR:,} B in {parts} parts: the GPU holds {room} such blocks at once, and "
                f"those of a row wait for each other; take variant 'online'"
            )
        return kernel[o.rows * parts, None, stream].bind(*given_all)

    return bind


def parts_of(vectors: int, variant: str) -> int:
    """Parts of up to 64 KB: any number, or a power of two for a cluster."""
    parts = max(1, -(-vectors * VECTOR // PART_BYTES))
    return min(MAX_CLUSTER, 1 << (parts - 1).bit_length()) if variant == "cluster" else parts


def _meeting(o: Operands, parts: int, stream: int) -> tuple[Any, Any]:
    """Where the blocks of a row over the grid meet: pairs and counters, the latter zero."""
    if arrays.view(o.x).host:
        return np.empty((o.rows, parts, 2), np.float32), np.zeros(o.rows + 1, np.uint32)
    return _meeting_on_gpu(o.rows, parts, stream, driver.current_device())


@functools.lru_cache(maxsize=8)
def _meeting_on_gpu(rows: int, parts: int, stream: int, device: int) -> tuple[DeviceArray, DeviceArray]:
    """One for each stream, on which launches follow one another; each leaves the counters as it found them."""
    return DeviceArray.empty((rows, parts, 2), np.float32), DeviceArray(np.zeros(rows + 1, np.uint32))


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
        s = split(o.vectors, o.itemsize, cluster, threads)
        if s.threads > 512 and o.weight is not None and cluster is None:
            # 32 elements, as many weights and the ring's own state are too much for 64 registers.
            s = split(o.vectors, o.itemsize, min(MAX_CLUSTER, 2 * s.cluster), threads)
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
        Variant("cluster", "TMA", "a row over the blocks of a cluster", bind_parts(operation, "cluster")),
        Variant("ring", "TMA", "blocks that stay; the next rows on their way", bind_ring(operation)),
        Variant("grid", "TMA", "a row over any blocks, which meet in global memory", bind_parts(operation, "grid")),
    )


def bind(operation: str, variant: str) -> Callable[..., Callable[[], Any]]:
    """What binds a variant."""
    return next(v.bind for v in variants(operation) if v.name == variant)


def choose(o: Operands) -> tuple[str, dict[str, Any]]:
    """The variant for these arrays where none is asked for, and its options: what was fastest on an H200.

    Always with lines that stay in L2 (`keep`), which won 2 to 4 % at each length.
    """
    nbytes = o.vectors * VECTOR
    if not o.aligned or parts_of(o.vectors, "grid") > MULTIPROCESSORS:
        return "online", {}
    if nbytes > PART_BYTES * MAX_CLUSTER:
        return "grid", {"keep": True}
    variant, options = (_choose_softmax if o.weight is None else _choose_rmsnorm)(o.vectors, o.itemsize == 2)
    return variant, {**options, "keep": True}


def _choose_softmax(vectors: int, half: bool) -> tuple[str, dict[str, Any]]:
    """For rows of so many vectors that a cluster holds; variant and options but for `keep`."""
    nbytes = vectors * VECTOR
    if nbytes <= PART_BYTES // (4 if half else 2):
        return "registers", {"threads": min(512, _threads(vectors, 2))}
    if nbytes <= PART_BYTES and not half:
        return "registers", {"min_blocks": 2}
    return "cluster", {}


def _choose_rmsnorm(vectors: int, half: bool) -> tuple[str, dict[str, Any]]:
    """The same. Numbers half as wide need twice the registers for a vector, which bound the blocks on an SM."""
    nbytes = vectors * VECTOR
    if half and nbytes <= PART_BYTES // 4:
        each = 2 if nbytes <= PART_BYTES // 8 else 4
        threads = _threads(vectors, each)
        return "registers", {"threads": threads, "min_blocks": min(32, (1536 if each == 2 else 1024) // threads)}
    if nbytes <= PART_BYTES // 2:
        return ("cluster", {}) if half else ("registers", {"threads": min(512, _threads(vectors, 2))})
    four = {"threads": 256, "ahead": 2, "min_blocks": 4}  # blocks on an SM
    if nbytes <= (2 * PART_BYTES if half else PART_BYTES):
        return "cluster", {"rows": 2, "parts": parts_of(4 * vectors, "cluster"), **four}
    if nbytes <= 2 * PART_BYTES:
        return "cluster", {"parts": parts_of(2 * vectors, "cluster"), **four}
    if 2 * nbytes <= PART_BYTES * MAX_CLUSTER:  # two rows at once halve what the weights cost
        return "cluster", {"rows": 2, "threads": 256, "ahead": 4}
    return "cluster", {"threads": 256, "ahead": 3} if half else {}


def run(
    operation: str, ladder: Sequence[Variant], given: Mapping[str, Any], variant: str | None, options: Mapping[str, Any]
) -> None:
    """Check arrays and options, and launch.

    Raises:
        KeyError, TypeError, ValueError: as the public functions say.
    """
    named = {v.name: v for v in ladder}
    if variant is not None and variant not in named:
        raise UnknownNameError(f"{operation} has no variant {variant!r}; it has {', '.join(named)}")
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
SMALL = {
    "cluster": {"parts": 2, "threads": 32},
    "ring": {"cluster": 2, "clusters": 2, "stages": 2},
    "grid": {"parts": 3, "threads": 32},
}


def gpu_cases(options: Mapping[str, Any] | None = None) -> list[Case]:
    """64 MB of rows of 4k to 256k columns; `registers` and `bulk` only where a block holds a row."""
    cases = []
    for rows, columns, dtype in ((4096, 4096, "float32"), (1024, 32768, "bfloat16"), (64, 262144, "float32")):
        long = columns > 32768
        without = ("registers", "bulk") if long else ()
        cases.append(Case((rows, columns), dtype, options or {}, without=without))
    return cases

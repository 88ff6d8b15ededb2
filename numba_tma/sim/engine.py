"""The asynchronous copy engine: cp.async, bulk copies, tensor copies (TMA), bulk reductions and their groups.

The machine calls an ``issue_*`` method for each asynchronous instruction, with operands already decoded to
integers; the engine checks the rules (named errors at issue) and moves the bytes later, in ``pump``.

**Threads and blocks.** Blocks that are resident at once have a *slot* (row of the shared-memory array). A
thread is one integer, ``slot * threads_per_block + index in the block``. Where an argument is called
``threads`` it is an int64 array of distinct threads; where it is called ``thread`` it is an int.

**Addresses.** A shared address is a byte offset into the slot's shared memory, that is the shared::cta
address with the window's base taken off. Where data goes to another block of the cluster the machine
decodes shared::cluster addresses to (slot, offset). Global addresses are the simulator's 64-bit addresses.

**What the machine provides** (constructor, all keywords)::

    shared             uint8 array (slots, bytes of shared memory); bytes a multiple of 128
    threads_per_block  int
    memory             global_view(address, nbytes, what) -> uint8 view of the mapped bytes
                       gather(addresses: uint64 array, nbytes, what) -> uint8 array (n, nbytes), a copy
                       both raise OutOfBounds naming `what` where nothing is mapped
    barriers           complete_tx(slot, address, nbytes): bytes arrived
                       arrive(slot, address, count): `count` pending arrivals done (cp.async.mbarrier.arrive)
                       add_pending(slot, address, count): `count` more arrivals wanted (… without .noinc)
    report             report(identifier, message, origin): a hazard beside which execution goes on
    policy             "fifo" (default), "early", "late" or "random"
    rng                numpy.random.Generator, for "random"
    observer           copy_to_shared, copy_from_shared, cp_async_issued, cp_async_arrived: see observer.py; or None
    latency            pumps from issue to effect under "fifo" (and from a store's read to its write)

``origin`` of the issue methods is whatever the machine wants to get back in reports (its instruction).

**Instructions to methods**

==================================================================  =========================================
cp.async.bulk.shared::cluster.global.mbarrier…                      issue_bulk_load
cp.async.bulk.global.shared::cta.bulk_group                         issue_bulk_store
cp.async.bulk.shared::cluster.shared::cta.mbarrier…                 issue_bulk_to_cluster
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier….op.type  issue_bulk_to_cluster(…, op, dtype)
cp.reduce.async.bulk.global.shared::cta.bulk_group.op.type          issue_bulk_reduce
cp.async.bulk.prefetch.L2.global                                    issue_bulk_prefetch
cp.async.bulk.tensor.Nd.shared::cluster.global.mbarrier…            issue_tensor_load
cp.async.bulk.tensor.Nd.global.shared::cta.bulk_group               issue_tensor_store
cp.reduce.async.bulk.tensor.Nd.global.shared::cta.op.bulk_group     issue_tensor_reduce
cp.async.bulk.prefetch.tensor.Nd.L2.global                          issue_tensor_prefetch
cp.async.bulk.commit_group                                          bulk_commit_group(threads)
cp.async.bulk.wait_group N / .read N                                bulk_wait_ready(threads, n, read) -> mask
cp.async.{ca,cg}.shared.global                                      issue_cp_async (one call for many lanes)
cp.async.commit_group                                               cp_async_commit_group(threads)
cp.async.wait_group N                                               cp_async_wait_ready(threads, n) -> mask
cp.async.wait_all                                                   cp_async_wait_ready(threads, None) -> mask
cp.async.mbarrier.arrive{.noinc}                                    cp_async_mbarrier_arrive
==================================================================  =========================================

Multicast and peers: ``targets`` of the loads is the sequence of slots that receive the data, each at offset
`dst` and with its own mbarrier at offset `bar`; default is the issuing thread's block alone.

**Time.** The machine calls ``pump()`` once a scheduling round, and ``pump(stalled=True)`` when no thread can
run. Both return whether anything moved; a stalled machine for which it returns False is deadlocked. An
operation takes effect in pieces; a load's piece is read and written at once and credits the mbarrier with its
bytes; a store's bytes are read first (``wait_group.read``) and written in a later pump (``wait_group``).

======  =============================================================================================
fifo    in order of issue, `latency` pumps after issue; when stalled, at once
early   everything at issue
late    nothing until the machine is stalled, then one piece
random  each pump moves some pieces of randomly chosen operations, also out of order
======  =============================================================================================

**Ends.** ``retire_block(slot)`` when a block has exited and before its slot is used again: finishes what
still reads or writes its shared memory and returns a line of text for each such operation (bytes in flight
at exit). ``drain()`` at the end of the kernel finishes everything. ``outstanding(slot)`` describes what is
in flight, for the deadlock report. ``bytes`` counts bytes moved, by kind (KINDS): those delivered to shared
memory, the fill and every receiver of a multicast included, or written to global memory; bulk_cluster is from
shared to shared memory.

Sources: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy" and its sections on cp.async,
cp.async.bulk, cp.reduce.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, "Async proxy".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from . import descriptor, im2col, tensor
from .errors import Misaligned, OutOfBounds, SimError

POLICIES = ("fifo", "early", "late", "random")
KINDS = (
    "tma_load",
    "tma_store",
    "tma_reduce",
    "bulk_load",
    "bulk_store",
    "bulk_reduce",
    "bulk_cluster",
    "cp_async",
)


class Memory(Protocol):
    """What the engine asks of global memory."""

    def global_view(self, address: int, nbytes: int, what: str) -> np.ndarray: ...

    def gather(self, addresses: np.ndarray, nbytes: int, what: str) -> np.ndarray: ...


class Barriers(Protocol):
    """What the engine asks of the mbarriers. Slots and addresses are ints."""

    def complete_tx(self, slot: int, address: int, nbytes: int) -> None: ...

    def arrive(self, slot: int, address: int, count: int) -> None: ...

    def add_pending(self, slot: int, address: int, count: int) -> None: ...


class GroupTracker:
    """Async-groups of every thread: which have completed, for waits that name a number of pending groups.

    Works on one thread (int) or many (array of distinct ints) alike. Groups of a thread are numbered from
    0; the one under construction has the number ``open``. An operation joins it by `add` and leaves by
    `finish`.
    """

    def __init__(self, threads: int) -> None:
        self._open = np.zeros(threads, np.int64)
        self._done = np.zeros(threads, np.int64)  # every group below this number has completed
        self._pending = np.zeros((threads, 8), np.int32)  # operations under way, by group number modulo width

    def open(self, threads: int | np.ndarray) -> int | np.ndarray:
        """The number of each thread's group under construction."""
        return self._open[threads]

    def add(self, threads: int | np.ndarray) -> int | np.ndarray:
        """Add an operation of each thread to its open group; return the groups' numbers."""
        groups = self._open[threads]
        self._pending[threads, groups % self._pending.shape[1]] += 1
        return groups

    def finish(self, threads: int | np.ndarray, groups: int | np.ndarray) -> None:
        """Complete an operation of each thread that `add` put into `groups`."""
        self._pending[threads, groups % self._pending.shape[1]] -= 1

    def commit(self, threads: int | np.ndarray) -> None:
        """Close each thread's open group."""
        self._open[threads] += 1
        if np.any(self._open[threads] - self._done[threads] >= self._pending.shape[1]):
            self._advance(threads)
            if np.any(self._open[threads] - self._done[threads] >= self._pending.shape[1]):
                self._widen()

    def ready(self, threads: int | np.ndarray, n: int | None) -> np.ndarray:
        """Return for each thread whether at most its `n` newest closed groups are pending.

        None asks that nothing at all is pending, the open group included.
        """
        self._advance(threads)
        opened = self._open[threads]
        if n is None:
            width = self._pending.shape[1]
            return (self._done[threads] >= opened) & (self._pending[threads, opened % width] == 0)
        return self._done[threads] >= opened - n

    def reset(self, first: int, last: int) -> None:
        """Forget the threads from `first` up to `last`."""
        self._open[first:last] = self._done[first:last] = self._pending[first:last] = 0

    def _advance(self, threads: int | np.ndarray) -> None:
        width = self._pending.shape[1]
        while True:
            done = self._done[threads]
            complete = (done < self._open[threads]) & (self._pending[threads, done % width] == 0)
            if not np.any(complete):
                return
            self._done[threads] = done + complete

    def _widen(self) -> None:
        width = self._pending.shape[1]
        pending = np.zeros((len(self._open), 2 * width), np.int32)
        # A group's column depends on the width: take the columns over group by group.
        rows = np.arange(len(self._open))
        for ahead in range(width):
            groups = self._done + ahead
            pending[rows, groups % (2 * width)] = self._pending[rows, groups % width]
        self._pending = pending


@dataclass(eq=False)
class _Operation:
    """One instruction of one thread, or one cp.async of many, under way.

    `parts` are what is still to do in the present phase; `move(part)` does one. A store has a second phase:
    `move` reads the source and puts a write into `writes`; when every part is read the writes become the
    parts.
    """

    kind: str
    text: str
    origin: Any
    thread: int
    slots: tuple[int, ...]  # blocks whose shared memory the present phase touches (cp.async: see lanes)
    nbytes: int
    parts: list[Any]
    move: Callable[[Any], Callable[[], None] | None]
    due: int = 0
    group: int | None = None
    writes: list[Callable[[], None]] = field(default_factory=list)
    stores: bool = False
    lanes: np.ndarray | None = None  # the threads of a cp.async
    when_done: list[Callable[[], None]] = field(default_factory=list)

    def touches(self, slot: int, threads_per_block: int) -> bool:
        """Return whether the present phase reads or writes the shared memory of block `slot`."""
        if self.lanes is not None:
            return bool(np.any(self.lanes // threads_per_block == slot))
        return slot in self.slots

    def describe(self, threads_per_block: int) -> str:
        return (
            f"{self.text}, {self.nbytes} B, issued by thread {self.thread % threads_per_block} of slot "
            f"{self.thread // threads_per_block}, {len(self.parts)} pieces to go"
        )


class AsyncEngine:
    """Operations under way and the groups and barriers that they complete. See the module's docstring."""

    def __init__(
        self,
        *,
        shared: np.ndarray,
        threads_per_block: int,
        memory: Memory,
        barriers: Barriers,
        report: Callable[[str, str, Any], None],
        policy: str = "fifo",
        rng: np.random.Generator | None = None,
        latency: int = 4,
        observer: Any = None,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is none of {', '.join(POLICIES)}")
        if shared.dtype != np.uint8 or shared.ndim != 2 or not shared.flags.c_contiguous or shared.shape[1] % 128:
            raise ValueError("shared must be a contiguous uint8 array (slots, bytes), bytes a multiple of 128")
        self.policy = policy
        self.bytes = dict.fromkeys(KINDS, 0)
        self._shared = shared
        self._elements = {size: shared.reshape(-1).view(f"V{size}") for size in (4, 8, 16)}
        self._threads_per_block = threads_per_block
        self._memory = memory
        self._barriers = barriers
        self._report = report
        self._rng = rng if rng is not None else np.random.default_rng(0)
        self._latency = latency
        self._observer = observer
        self._tick = 0
        self._queue: deque[_Operation] = deque()  # loads, and stores whose source is not read yet
        self._writes: deque[_Operation] = deque()  # stores whose source is read
        threads = shared.shape[0] * threads_per_block
        self._bulk_read = GroupTracker(threads)
        self._bulk_write = GroupTracker(threads)
        self._cp_async = GroupTracker(threads)

    # -- bulk copies -----------------------------------------------------------------------------------------

    def issue_bulk_load(
        self,
        thread: int,
        dst: int,
        src: int,
        nbytes: int,
        bar: int,
        targets: Sequence[int] | None = None,
        origin: Any = None,
    ) -> None:
        """Global to shared: `nbytes` from `src` to offset `dst` of every target slot, crediting its `bar`.

        Raises Misaligned (16 B for addresses and size, 8 B for the mbarrier) and OutOfBounds.
        """
        text = "cp.async.bulk.shared::cluster.global"
        targets = self._targets(thread, targets)
        self._check_bulk(text, nbytes, shared=dst, remote=src)
        self._check_shared(text, dst, nbytes)
        self._check_barrier(text, bar)
        source = self._memory.global_view(src, nbytes, f"source of {text}") if nbytes else self._shared[0, :0]

        def move(part: tuple[int, int]) -> None:
            begin, end = part
            for slot in targets:
                self._shared[slot, dst + begin : dst + end] = source[begin:end]
                self._arrived("bulk_load", slot, bar, end - begin)

        if self._observer is not None:
            self._observer.copy_reads("bulk_load", origin, src, (nbytes,), (1,), nbytes, 1)
            self._observer.copy_to_shared(thread, targets, dst, nbytes, bar, origin)
        parts = self._ranges(nbytes)
        self._issue(_Operation("bulk_load", text, origin, thread, targets, nbytes, parts, move))

    def issue_bulk_store(self, thread: int, dst: int, src: int, nbytes: int, origin: Any = None) -> None:
        """Shared to global: `nbytes` from offset `src` of the thread's block to `dst`, in its bulk group."""
        self._bulk_to_global("bulk_store", "cp.async.bulk.global.shared::cta", thread, dst, src, nbytes, None, origin)

    def issue_bulk_reduce(
        self, thread: int, dst: int, src: int, nbytes: int, op: str, dtype: str, origin: Any = None
    ) -> None:
        """Reduce global memory at `dst` with `nbytes` bytes from offset `src` of the thread's block.

        `op` is add, min, max, inc, dec, and, or, xor; `dtype` a PTX type name (f16, bf16, b32, u32, s32,
        b64, u64, s64, f32, f64).
        """
        tensor.check_reduction(op, dtype)
        text = f"cp.reduce.async.bulk.global.shared::cta.{op}.{dtype}"
        self._bulk_to_global("bulk_reduce", text, thread, dst, src, nbytes, (op, dtype), origin)

    def issue_bulk_to_cluster(
        self,
        thread: int,
        target: int,
        dst: int,
        src: int,
        nbytes: int,
        bar: int,
        op: str | None = None,
        dtype: str | None = None,
        origin: Any = None,
    ) -> None:
        """Shared to shared: `nbytes` bytes from offset `src` of the thread's block to `dst` of slot `target`.

        Credits the mbarrier at `bar` of the target. With `op` and `dtype` the target's bytes are reduced.
        """
        text = "cp.async.bulk.shared::cluster.shared::cta"
        if op is not None:
            tensor.check_reduction(op, dtype)
            if dtype not in ("u32", "s32", "b32") and (op, dtype) != ("add", "u64"):
                raise SimError(f"cp.reduce.async.bulk to shared::cluster has no .{op}.{dtype}")
            text = f"cp.reduce.async.bulk.shared::cluster.shared::cta.{op}.{dtype}"
        self._check_bulk(text, nbytes, shared=dst, remote=src)
        self._check_shared(text, dst, nbytes)
        self._check_shared(text, src, nbytes)
        self._check_barrier(text, bar)
        own = thread // self._threads_per_block

        def move(part: tuple[int, int]) -> None:
            begin, end = part
            source = self._shared[own, src + begin : src + end]
            destination = self._shared[target, dst + begin : dst + end]
            destination[:] = source if op is None else tensor.reduce(op, dtype, destination, source)
            self._arrived("bulk_cluster", target, bar, end - begin)

        if self._observer is not None:
            self._observer.copy_to_shared(thread, (target,), dst, nbytes, bar, origin, (own, src, nbytes))
        parts = self._ranges(nbytes)
        self._issue(_Operation("bulk_cluster", text, origin, thread, (own, target), nbytes, parts, move))

    def issue_bulk_prefetch(self, thread: int, src: int, nbytes: int, origin: Any = None) -> None:
        """Prefetch into L2: checked like a copy, moves nothing."""
        text = "cp.async.bulk.prefetch.L2.global"
        self._check_bulk(text, nbytes, remote=src)
        if nbytes:
            self._memory.global_view(src, nbytes, f"source of {text}")

    def _bulk_to_global(
        self,
        kind: str,
        text: str,
        thread: int,
        dst: int,
        src: int,
        nbytes: int,
        reduction: tuple[str, str] | None,
        origin: Any,
    ) -> None:
        self._check_bulk(text, nbytes, shared=src, remote=dst)
        self._check_shared(text, src, nbytes)
        own = thread // self._threads_per_block
        target = self._writable(dst, nbytes, text) if nbytes else self._shared[0, :0]

        def move(part: tuple[int, int]) -> Callable[[], None]:
            begin, end = part
            data = self._shared[own, src + begin : src + end].copy()

            def write() -> None:
                place = target[begin:end]
                place[:] = data if reduction is None else tensor.reduce(*reduction, place, data)
                self.bytes[kind] += end - begin

            return write

        if self._observer is not None:
            region = (dst, (nbytes,), (1,)) if nbytes else None
            group, how = self.open_group(thread, "bulk"), ".".join(reduction or ())
            self._observer.copy_from_shared(
                thread, src, nbytes, group, origin, region, 0, how, lambda: self._shared[own, src : src + nbytes].copy()
            )
        parts = self._ranges(nbytes)
        self._issue(_Operation(kind, text, origin, thread, (own,), nbytes, parts, move, stores=True))

    # -- tensor copies ---------------------------------------------------------------------------------------

    def issue_tensor_load(
        self,
        thread: int,
        tensor_map: bytes,
        coords: Sequence[int],
        dst: int,
        bar: int,
        targets: Sequence[int] | None = None,
        origin: Any = None,
    ) -> None:
        """Global to shared: the box at `coords` (signed, innermost first) to `dst` of every target slot.

        Elements outside the tensor arrive as its fill. Each target's `bar` is credited with the whole box's
        bytes. Raises TensorMapError for 128 bytes that are no tensor map, OutOfBounds, and Misaligned: 128 B for
        `dst`, 16 B for the begin in a row, which may lie before the tensor (elsewhere the hardware faults).
        """
        text = f"cp.async.bulk.tensor.{len(coords)}d.shared::cluster.global"
        targets = self._targets(thread, targets)
        desc, geo, coords = self._check_tensor(text, tensor_map, coords, dst)
        self._check_inner(text, coords, geo)
        self._check_barrier(text, bar)
        box = tensor.whole(geo)
        source = tensor.inside(desc, coords, box)
        view = None
        if source is not None:
            view = self._memory.global_view(source.address, source.nbytes, f"source of {text}")

        def move(window: tensor.Window) -> None:
            region = source if window is box else tensor.inside(desc, coords, window)
            if region is not None and region.shape == tensor.payload_shape(geo, window):
                payload = np.ascontiguousarray(tensor.loaded(desc, _region_of(region, source, view)))
            else:
                payload = tensor.fill_payload(desc, window)
                if region is not None:
                    payload[region.index] = tensor.loaded(desc, _region_of(region, source, view))
            for slot in targets:
                tensor.write_shared(self._shared[slot], dst, geo, window, payload)
                self._arrived("tma_load", slot, bar, payload.size)

        if self._observer is not None:
            pattern = geo.swizzle and 8 * descriptor.Swizzle(geo.swizzle).span
            if source is not None:
                promotion = 32 << desc.l2_promotion if desc.l2_promotion else 0
                self._observer.copy_reads(
                    "tma_load", origin, source.address, source.shape, source.strides, geo.nbytes, geo.rows, promotion
                )
            self._observer.copy_to_shared(
                thread, targets, dst, geo.rows * geo.row_pitch, bar, origin, None, geo.nbytes, pattern
            )
        parts = self._windows(geo, box)
        self._issue(_Operation("tma_load", text, origin, thread, targets, geo.nbytes, parts, move))

    def issue_im2col_load(
        self,
        thread: int,
        tensor_map: bytes,
        coords: Sequence[int],
        offsets: Sequence[int],
        dst: int,
        bar: int,
        targets: Sequence[int] | None = None,
        origin: Any = None,
    ) -> None:
        """Global to shared: the channels of the pixels that a walk from `coords` meets, moved by `offsets`.

        Raises as `issue_tensor_load` does, and OutOfBounds for a walk that begins outside its bounding box.
        """
        text = f"cp.async.bulk.tensor.{len(coords)}d.shared::cluster.global.im2col"
        targets = self._targets(thread, targets)
        desc = self._decode(text, tensor_map, coords, walk=True)
        if len(offsets) != desc.rank - 2:
            raise SimError(f"{text}: {len(offsets)} offsets for a tensor map of rank {desc.rank}")
        geo = im2col.geometry(desc)
        self._check_place(text, geo, dst)
        self._check_inner(text, tuple(coords), geo)
        self._check_barrier(text, bar)
        walk = im2col.walk(desc, tuple(coords), tuple(offsets))
        views = [(run, self._memory.global_view(run.address, run.nbytes, f"source of {text}")) for run in walk]

        def move(window: tensor.Window) -> None:
            payload = tensor.fill_payload(desc, window, geo)
            for run, view in views:
                im2col.put(payload, window, run, tensor.loaded(desc, run.of(view)))
            for slot in targets:
                tensor.write_shared(self._shared[slot], dst, geo, window, payload)
                self._arrived("tma_load", slot, bar, payload.size)

        if self._observer is not None:
            pattern = geo.swizzle and 8 * descriptor.Swizzle(geo.swizzle).span
            promotion = 32 << desc.l2_promotion if desc.l2_promotion else 0
            for run in walk:
                self._observer.copy_reads(
                    "tma_load", origin, run.address, run.shape, run.strides, geo.nbytes, geo.rows, promotion
                )
            self._observer.copy_to_shared(
                thread, targets, dst, geo.rows * geo.row_pitch, bar, origin, None, geo.nbytes, pattern
            )
        parts = self._windows(geo, tensor.whole(geo))
        self._issue(_Operation("tma_load", text, origin, thread, targets, geo.nbytes, parts, move))

    def issue_tensor_store(
        self, thread: int, tensor_map: bytes, coords: Sequence[int], src: int, origin: Any = None
    ) -> None:
        """Shared to global: the box at offset `src` of the thread's block to `coords`, in its bulk group.

        The box must not begin before the tensor in any dimension (OutOfBounds), and in the innermost it
        must begin at a multiple of 16 B (Misaligned): the hardware faults at such stores and reductions.
        Elements past the tensor are not written, but for the rest of a 16-byte chunk in which a row ends:
        that is reported as hazard tma-store-overhang, unless the map says that it is padding.
        """
        text = f"cp.async.bulk.tensor.{len(coords)}d.global.shared::cta"
        self._tensor_to_global("tma_store", text, thread, tensor_map, coords, src, None, origin)

    def issue_tensor_reduce(
        self, thread: int, tensor_map: bytes, coords: Sequence[int], src: int, op: str, origin: Any = None
    ) -> None:
        """Like issue_tensor_store, but `op` reduces each element of the tensor with the box's element."""
        text = f"cp.reduce.async.bulk.tensor.{len(coords)}d.global.shared::cta.{op}"
        self._tensor_to_global("tma_reduce", text, thread, tensor_map, coords, src, op, origin)

    def issue_tensor_prefetch(self, thread: int, tensor_map: bytes, coords: Sequence[int], origin: Any = None) -> None:
        """Prefetch into L2: the tensor map and the number of coordinates are checked, nothing moves."""
        self._decode(f"cp.async.bulk.prefetch.tensor.{len(coords)}d.L2.global", tensor_map, coords)

    def _tensor_to_global(
        self,
        kind: str,
        text: str,
        thread: int,
        tensor_map: bytes,
        coords: Sequence[int],
        src: int,
        op: str | None,
        origin: Any,
    ) -> None:
        desc, geo, coords = self._check_tensor(text, tensor_map, coords, src)
        ptx_type = None if op is None else tensor.tensor_reduction_type(op, desc.dtype)
        flush = desc.dtype in (descriptor.DataType.FLOAT32_FTZ, descriptor.DataType.TFLOAT32_FTZ)
        if min(coords) < 0:
            raise OutOfBounds(
                f"{text} at coordinates {coords}: a box that is stored must not begin before the tensor, in no "
                "dimension; begin it inside and store a smaller box"
            )
        self._check_inner(text, coords, geo)
        own = thread // self._threads_per_block
        box = tensor.whole(geo)
        target = tensor.inside(desc, coords, box)
        view = None if target is None else self._writable(target.address, target.nbytes, text)
        extra = tensor.overhang(desc, coords, box)
        if extra is not None and not desc.padding:
            self._report(
                "tma-store-overhang",
                f"{text} writes {extra.shape[-1]} B beyond the end of the tensor's rows "
                f"({desc.sizes[0] * geo.element_bytes} B), up to the next multiple of 16 B; make the rows a "
                'multiple of 16 B, or keep nothing there and say so: TensorMap(…, store="padding")',
                origin,
            )

        def put(place: np.ndarray, data: np.ndarray) -> None:
            place[...] = data if op is None else tensor.reduce(op, ptx_type, place, data, flush)
            self.bytes[kind] += data.size

        def move(window: tensor.Window) -> Callable[[], None]:
            payload = tensor.read_shared(self._shared[own], src, geo, window)

            def write() -> None:
                region = target if window is box else tensor.inside(desc, coords, window)
                if region is not None:
                    put(_region_of(region, target, view), payload[region.index])
                if extra is not None:
                    edge = tensor.overhang(desc, coords, window)
                    for place, data in self._mapped_rows(edge, payload):
                        put(place, data)

            return write

        if self._observer is not None:
            region = None
            if target is not None:
                width = target.shape[-1] + (extra.shape[-1] if extra is not None else 0)
                region = (target.address, (*target.shape[:-1], width), target.strides)

            def read() -> np.ndarray:
                inner = slice(target.index[-1].start, target.index[-1].start + width)
                return tensor.read_shared(self._shared[own], src, geo, box)[(*target.index[:-1], inner)].copy()

            pattern = geo.swizzle and 8 * descriptor.Swizzle(geo.swizzle).span
            group, how = self.open_group(thread, "bulk"), f"{op}.{ptx_type}" if op else ""
            self._observer.copy_from_shared(
                thread, src, geo.rows * geo.row_pitch, group, origin, region, pattern, how, read
            )
        parts = self._windows(geo, box)
        self._issue(_Operation(kind, text, origin, thread, (own,), geo.nbytes, parts, move, stores=True))

    def _check_inner(self, text: str, coords: tuple[int, ...], geo: tensor.Geometry) -> None:
        begin = coords[0] * geo.element_bytes
        if begin % tensor.CHUNK:
            raise Misaligned(
                f"{text} at coordinates {coords}: the box begins {begin} B into a row, which is not a multiple of "
                f"{tensor.CHUNK} B; the innermost coordinate must be a multiple of {tensor.CHUNK // geo.element_bytes}"
            )

    def _mapped_rows(self, edge: tensor.Region | None, payload: np.ndarray) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """Yield the overhang's places and data; rows of it that lie in no array are left out.

        A tensor's last row may end where its array ends; on a GPU the overhang then falls into the
        allocation's padding.
        """
        if edge is None:
            return
        data = payload[edge.index]
        for row in np.ndindex(edge.shape[:-1]):
            address = edge.address + sum(i * stride for i, stride in zip(row, edge.strides[:-1], strict=True))
            try:
                place = self._memory.global_view(address, edge.shape[-1], "overhang")
            except OutOfBounds:
                continue
            yield place, data[row]

    # -- cp.async --------------------------------------------------------------------------------------------

    def issue_cp_async(
        self,
        threads: np.ndarray,
        dst: np.ndarray,
        src: np.ndarray,
        size: int,
        src_size: np.ndarray | None = None,
        origin: Any = None,
    ) -> None:
        """Global to shared, `size` (4, 8 or 16) bytes a thread: from `src` to offset `dst` of its block.

        All arrays have one entry a thread; they are kept, so the caller must not change them afterwards.
        Where `src_size` is given only so many bytes (0 to `size`) are read and the rest is zero. The copies
        join each thread's open cp.async group. Raises Misaligned (`size` bytes) and OutOfBounds.
        """
        text = f"cp.async.shared.global of {size} B"
        if size not in (4, 8, 16):
            raise SimError(f"cp.async copies 4, 8 or 16 bytes, not {size}")
        if len(threads) == 0:
            return
        src = src.astype(np.uint64, copy=False)
        dst = dst.astype(np.int64, copy=False)
        if np.any(dst % size):
            self._misaligned(text, "shared address", int(dst[dst % size != 0][0]), size)
        reads = src_size is None or src_size != 0
        wrong = (src % np.uint64(size) != 0) & reads
        if np.any(wrong):
            self._misaligned(text, "global address", int(src[wrong][0]), size)
        self._check_shared(text, int(dst.min()), 0)
        self._check_shared(text, int(dst.max()), size)
        if src_size is not None and np.any((src_size < 0) | (src_size > size)):
            raise SimError(f"{text}: src-sizes {np.unique(src_size).tolist()} are not all in 0 to {size}")
        slots = threads // self._threads_per_block
        places = (slots * self._shared.shape[1] + dst) // size
        groups = self._cp_async.add(threads)
        if self._observer is not None:
            self._observer.cp_async_issued(threads, places * size, size, groups, origin)
            whole = slice(None) if src_size is None else src_size == size
            self._observer.cp_async_reads(threads[whole], src[whole], size, origin)

        def move(part: slice) -> None:
            data = self._gathered(src[part], size, None if src_size is None else src_size[part], text)
            self._elements[size][places[part]] = data.view(f"V{size}").ravel()
            self._cp_async.finish(threads[part], groups[part])
            self.bytes["cp_async"] += data.size

        parts = [slice(a, b) for a, b in self._ranges(len(threads), 1)]
        operation = _Operation(
            "cp_async", text, origin, int(threads[0]), (), size * len(threads), parts, move, lanes=threads
        )
        self._issue(operation)

    def _gathered(self, src: np.ndarray, size: int, src_size: np.ndarray | None, text: str) -> np.ndarray:
        what = f"source of {text}"
        if src_size is None:
            return np.ascontiguousarray(self._memory.gather(src, size, what))
        data = np.zeros((len(src), size), np.uint8)
        for nbytes in np.unique(src_size).tolist():
            lanes = np.flatnonzero(src_size == nbytes)
            if nbytes:
                data[lanes, :nbytes] = self._memory.gather(src[lanes], nbytes, what)
        return data

    def cp_async_commit_group(self, threads: np.ndarray) -> None:
        """Close each thread's open cp.async group."""
        self._cp_async.commit(threads)

    def cp_async_wait_ready(self, threads: np.ndarray, n: int | None) -> np.ndarray:
        """Return for each thread whether at most its `n` newest cp.async groups are pending.

        None is cp.async.wait_all: nothing that the thread issued is pending, committed or not.
        """
        return self._cp_async.ready(threads, n)

    def cp_async_mbarrier_arrive(
        self, threads: np.ndarray, bars: np.ndarray | int, noinc: bool, origin: Any = None
    ) -> None:
        """Make each thread arrive at the mbarrier at offset `bars` once its cp.async copies so far are done.

        Without `noinc` the barrier's pending count goes up by one first, so that the arrival changes nothing.
        """
        text = "cp.async.mbarrier.arrive"
        if len(threads) == 0:
            return
        bars = np.broadcast_to(np.asarray(bars, np.int64), threads.shape)
        for bar in np.unique(bars).tolist():
            self._check_barrier(text, bar)
        if self._observer is not None:
            self._observer.cp_async_arrived(threads, bars, self.open_group(threads, "cp.async"))
        slots = threads // self._threads_per_block
        keys, counts = np.unique(np.stack([slots, bars]), axis=1, return_counts=True)
        arrivals = list(zip(keys[0].tolist(), keys[1].tolist(), counts.tolist(), strict=True))
        if not noinc:
            for slot, bar, count in arrivals:
                self._barriers.add_pending(slot, bar, count)
        mine = np.zeros(self._shared.shape[0] * self._threads_per_block, bool)
        mine[threads] = True
        before = [op for op in self._queue if op.lanes is not None and mine[op.lanes].any()]
        waiting = len(before)

        def one_done() -> None:
            nonlocal waiting
            waiting -= 1
            if waiting == 0:
                arrive()

        def arrive() -> None:
            for slot, bar, count in arrivals:
                self._barriers.arrive(slot, bar, count)

        if waiting == 0:
            arrive()
        for op in before:
            op.when_done.append(one_done)

    # -- bulk groups -----------------------------------------------------------------------------------------

    def bulk_commit_group(self, threads: np.ndarray) -> None:
        """Close each thread's open bulk group."""
        self._bulk_read.commit(threads)
        self._bulk_write.commit(threads)

    def bulk_wait_ready(self, threads: np.ndarray, n: int, read: bool) -> np.ndarray:
        """Return for each thread whether at most its `n` newest bulk groups are pending.

        With `read`, a group is complete once all its sources in shared memory are read.
        """
        return (self._bulk_read if read else self._bulk_write).ready(threads, n)

    def open_group(self, threads: int | np.ndarray, kind: str) -> int | np.ndarray:
        """The number of each thread's group under construction; `kind` is "bulk" or "cp.async"."""
        return (self._bulk_read if kind == "bulk" else self._cp_async).open(threads)

    # -- progress --------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._queue and not self._writes

    def pump(self, stalled: bool = False) -> bool:
        """Let time pass; move what the policy says. Returns whether anything moved.

        `stalled`: no thread can run, so something must move if anything is under way.
        """
        self._tick += 1
        if not self._queue and not self._writes:
            return False
        if self.policy == "random":
            return self._pump_random(stalled)
        if self.policy == "late":
            return stalled and self._step(self._queue or self._writes, 0)
        if stalled:
            self._tick = max(self._tick, min(line[0].due for line in (self._queue, self._writes) if line))
        moved = False
        for line in (self._writes, self._queue):
            while line and line[0].due <= self._tick:
                moved |= self._step(line, 0)
        return moved

    def _pump_random(self, stalled: bool) -> bool:
        moved = False
        for _ in range(int(self._rng.integers(1 if stalled else 0, 4))):
            count = len(self._queue) + len(self._writes)
            if count == 0:
                break
            index = int(self._rng.integers(count))
            line = self._queue
            if index >= len(line):
                index, line = index - len(line), self._writes
            parts = line[index].parts
            last = int(self._rng.integers(len(parts)))
            parts[last], parts[-1] = parts[-1], parts[last]
            moved |= self._step(line, index)
        return moved

    def _step(self, line: deque[_Operation], index: int) -> bool:
        """Move the last part of the operation at `index` of `line`; take it on when the phase is over."""
        operation = line[index]
        if operation.parts:
            part = operation.parts.pop()
            try:
                write = operation.move(part)
            except SimError as error:
                raise error.at(operation.origin) from None
            if write is not None:
                operation.writes.append(write)
        if operation.parts:
            return True
        del line[index]
        if operation.stores and line is self._queue:
            self._source_read(operation)
        else:
            self._complete(operation)
        return True

    def _source_read(self, operation: _Operation) -> None:
        """A store's source is read: its writes come next."""
        if operation.group is not None:
            self._bulk_read.finish(operation.thread, operation.group)
        operation.parts, operation.writes = operation.writes, []
        operation.move = _run
        operation.slots = ()
        operation.due = self._tick + self._latency
        self._writes.append(operation)
        if self.policy == "early":
            self._finish(self._writes, operation)

    def _complete(self, operation: _Operation) -> None:
        if operation.stores and operation.group is not None:
            self._bulk_write.finish(operation.thread, operation.group)
        for call in operation.when_done:
            call()

    def _finish(self, line: deque[_Operation], operation: _Operation) -> None:
        """Move all parts of the operation's present phase."""
        while operation in line:
            self._step(line, line.index(operation))

    def _issue(self, operation: _Operation) -> None:
        if operation.stores:
            operation.group = self._bulk_read.add(operation.thread)
            self._bulk_write.add(operation.thread)
        operation.due = self._tick + self._latency
        self._queue.append(operation)
        if self.policy == "early":
            self._finish(self._queue, operation)

    # -- ends ------------------------------------------------------------------------------------------------

    def outstanding(self, slot: int | None = None) -> list[str]:
        """Return a line for each operation under way that block `slot` issued or that touches its memory.

        None asks for all blocks.
        """
        return [
            operation.describe(self._threads_per_block)
            for operation in (*self._queue, *self._writes)
            if slot is None
            or slot == operation.thread // self._threads_per_block
            or operation.touches(slot, self._threads_per_block)
        ]

    def retire_block(self, slot: int) -> list[str]:
        """Finish all that still reads or writes the shared memory of `slot`, and forget its threads' groups.

        Returns a line for each operation that was found doing so: bytes in flight at the block's exit.
        Writes to global memory whose source is read stay under way.
        """
        found = [operation for operation in self._queue if operation.touches(slot, self._threads_per_block)]
        lines = [operation.describe(self._threads_per_block) for operation in found]
        for operation in found:
            self._finish(self._queue, operation)
        first = slot * self._threads_per_block
        last = first + self._threads_per_block
        for operation in (*self._queue, *self._writes):
            if first <= operation.thread < last and operation.stores:
                operation.group = None
        for groups in (self._bulk_read, self._bulk_write, self._cp_async):
            groups.reset(first, last)
        return lines

    def drain(self) -> None:
        """Finish everything, in order of issue: the end of the kernel."""
        while self._queue:
            self._step(self._queue, 0)
        while self._writes:
            self._step(self._writes, 0)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _arrived(self, kind: str, slot: int, bar: int, nbytes: int) -> None:
        self.bytes[kind] += nbytes
        self._barriers.complete_tx(slot, bar, nbytes)

    def _targets(self, thread: int, targets: Sequence[int] | None) -> tuple[int, ...]:
        return (thread // self._threads_per_block,) if targets is None else tuple(targets)

    def _ranges(self, length: int, grain: int = 16) -> list[tuple[int, int]]:
        """Cut [0, length) into ranges, in multiples of `grain`: one, or at random a few."""
        if self.policy != "random" or length <= grain:
            return [(0, length)]
        parts = int(self._rng.integers(1, 5))
        bounds = sorted({0, length, *(int(i) * grain for i in self._rng.integers(1, length // grain + 1, parts))})
        return list(zip(bounds, bounds[1:], strict=False))

    def _windows(self, geo: tensor.Geometry, box: tensor.Window) -> list[tensor.Window]:
        return tensor.split(geo, int(self._rng.integers(1, 5))) if self.policy == "random" else [box]

    def _writable(self, address: int, nbytes: int, text: str) -> np.ndarray:
        view = self._memory.global_view(address, nbytes, f"destination of {text}")
        if not view.flags.writeable:
            raise SimError(f"destination of {text}: the array at {address:#x} is read-only; map a writable one")
        return view

    def _check_tensor(
        self, text: str, tensor_map: bytes, coords: Sequence[int], shared: int
    ) -> tuple[descriptor.Descriptor, tensor.Geometry, tuple[int, ...]]:
        desc = self._decode(text, tensor_map, coords)
        geo = tensor.geometry(desc)
        self._check_place(text, geo, shared)
        return desc, geo, tuple(coords)

    def _check_place(self, text: str, geo: tensor.Geometry, shared: int) -> None:
        if shared % tensor.SHARED_ALIGNMENT:
            self._misaligned(text, "shared address", shared, tensor.SHARED_ALIGNMENT)
        self._check_shared(text, shared, tensor.shared_extent(geo, shared))

    @staticmethod
    def _decode(text: str, tensor_map: bytes, coords: Sequence[int], walk: bool = False) -> descriptor.Descriptor:
        desc = descriptor.decode(tensor_map)
        if desc.im2col != walk:
            kinds = "tiled", "im2col"
            raise SimError(f"{text} takes a map that is {kinds[walk]}; this one is {kinds[desc.im2col]}")
        if len(coords) != desc.rank:
            raise SimError(f"{text}: {len(coords)} coordinates for a tensor map of rank {desc.rank}")
        return desc

    def _check_bulk(self, text: str, nbytes: int, **addresses: int) -> None:
        if nbytes % 16 or nbytes < 0:
            raise Misaligned(
                f"{text}: size {nbytes} B is not a multiple of 16 B; copy {nbytes // 16 * 16} B in bulk and "
                "the rest otherwise, or pad the buffer"
            )
        for name, address in addresses.items():
            if address % 16:
                self._misaligned(text, f"{name} address", address, 16)

    def _check_barrier(self, text: str, bar: int) -> None:
        if bar % 8:
            self._misaligned(text, "mbarrier at", bar, 8)
        self._check_shared(f"{text}, mbarrier", bar, 8)

    def _check_shared(self, text: str, offset: int, nbytes: int) -> None:
        size = self._shared.shape[1]
        if offset < 0 or offset + nbytes > size:
            raise OutOfBounds(
                f"{text}: [{offset:#x}, {offset + nbytes:#x}) is not within the block's {size} B of shared "
                "memory; ask for more at launch or correct the address"
            )

    @staticmethod
    def _misaligned(text: str, name: str, address: int, alignment: int) -> None:
        raise Misaligned(
            f"{text}: {name} {address:#x} is not a multiple of {alignment} B; it is {address % alignment} B "
            "past one: align the buffer"
        )


def _run(write: Callable[[], None]) -> None:
    write()


def _region_of(region: tensor.Region, outer: tensor.Region, view: np.ndarray) -> np.ndarray:
    """Return `region`, a part of `outer`, as an array on `view`, the bytes of `outer`."""
    return region.of(view[region.address - outer.address :] if region is not outer else view)

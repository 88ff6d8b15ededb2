"""The constants of a GPU that the model of time works with, read from a file beside this module."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).with_name("h200.json")


@dataclass(frozen=True)
class Device:
    """A GPU, as the model sees it. Times are in cycles of the SM's clock, unless they say otherwise.

    Attributes:
        provisional: whether constants are taken from literature rather than measured.
        launch_seconds: what a launch costs that does nothing.
        block_start: from a block's end to the first instruction of the one in its place.
        block_interval: cycles between the starts of two blocks on an SM, when all SMs get blocks.
        pipes: cycles that a warp's instruction keeps a pipe of its scheduler, by pipe: fma, imad, alu, half
            (conversions from half precision), xu, fp64.
        latencies: from issue to result: alu, xu, shuffle, shared, matrix (ldmatrix), shared_atomic, remote (another
            block's shared memory), l1, l2, memory, atomic (in L2), mma.
        shared_wavefront: cycles that the shared-memory pipe of an SM takes for 128 bytes; a bank conflict is one
            more; a shuffle takes one too.
        load_queue: wavefronts that may be waiting at that pipe before warps stop issuing.
        l1_line: cycles for each line of 128 bytes that an access to global memory touches.
        l2_port: bytes a cycle that an SM gets from L2; `l2_total`: what all of them get together.
        memory_total: bytes a cycle that all SMs get from memory together; `memory_port`: that one gets.
        memory_knee: (bytes on their way to one SM while all load, cycles of latency that come on top).
        memory_write: what writing a byte to memory takes of the time of reading it.
        store_port: bytes a cycle that an SM writes to L2; `store_total`: what all write together; `store_buffer`: bytes
            of stores that may be under way.
        copy_async_latency: what cp.async takes beyond a load's latency.
        copy_issue: cycles that a copy into shared memory holds up the thread that asks for it; `copy_row`: that the
            engine takes for each row of a tensor box; `copy_port`: bytes a cycle it moves at most.
        copy_latency: from a copy's issue to its arrival beyond the latency of L2 or memory.
        copy_store_read: from a store's issue until its source is read, beyond the bytes' time; `copy_store_write`:
            until it is written.
        barriers: cycles: block (bar.sync), block_warp (more for each warp), warp (bar.warp.sync), cluster,
            mbarrier_arrive, mbarrier_try (a try that succeeds), mbarrier_wake (from completion to the waiting warp),
            fence_async, fence_block, fence_device.
        tensor: mma_macs, wgmma_macs (multiply-adds of 16-bit operands a cycle and scheduler), wgmma_latency,
            wgmma_shared (bytes of operands in shared memory a cycle and SM).
    """

    name: str
    provisional: bool
    multiprocessors: int
    schedulers: int
    max_threads: int
    max_blocks: int
    registers: int
    shared_bytes: int
    reserved_shared_bytes: int
    l2_bytes: int
    clock_mhz: float
    launch_seconds: float
    block_start: float
    block_interval: float
    pipes: dict[str, float]
    latencies: dict[str, float]
    shared_wavefront: float
    load_queue: float
    l1_line: float
    l2_port: float
    l2_total: float
    memory_port: float
    memory_total: float
    memory_knee: tuple[tuple[float, float], ...]
    memory_write: float
    store_port: float
    store_total: float
    store_buffer: float
    copy_async_latency: float
    copy_issue: float
    copy_row: float
    copy_port: float
    copy_latency: float
    copy_store_read: float
    copy_store_write: float
    barriers: dict[str, float]
    tensor: dict[str, float]
    circumstances: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the file has them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def read(path: Path) -> Device:
    """The constants in a file.

    Raises:
        ValueError: the file lacks some, or has others.
    """
    values = json.loads(path.read_text())
    known = {f.name for f in fields(Device)}
    if set(values) != known:
        odd = ", ".join(sorted(set(values) ^ known))
        raise ValueError(f"{path}: constants of a device that are missing or unknown: {odd}")
    values["memory_knee"] = tuple(map(tuple, values["memory_knee"]))
    return Device(**values)


@functools.cache
def default_device() -> Device:
    """The constants that come with the package: an H200."""
    return read(DEFAULT)

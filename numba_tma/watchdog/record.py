"""What a thread that gave up waiting has written, and the error that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..driver import LaunchError
from ..shared import Barriers, Shared
from .limit import VARIABLE

if TYPE_CHECKING:
    from .weave import Site

BYTES = 128
WRITTEN = 1  # the state of a record that is whole; 0 before
NO_PHASE = 0xFFFFFFFF  # what is waited for is no parity
_SHARED_WINDOW = 1 << 20  # above it, a shared address says in which block of a cluster it lies
_PAGE = "docs/hangs.md"

_FORMATS = {
    "state": "<u4",
    "site": "<u4",
    "address": "<u8",
    "now": "<u8",
    "deadline": "<u8",
    "phase": "<u4",
    "shared_base": "<u4",
    "cluster_rank": "<u4",
    "cluster_blocks": "<u4",
    **{f"block_{axis}": "<u4" for axis in "xyz"},
    **{f"thread_{axis}": "<u4" for axis in "xyz"},
}
_TYPE = np.dtype(list(_FORMATS.items()))
# Byte offsets, as the kernel's stores have them.
FIELDS: dict[str, int] = {name: _TYPE.fields[name][1] for name in _FORMATS}


class WatchdogError(LaunchError):
    """A kernel waited in vain for as long as its watchdog allows, and ended itself. The CUDA context is lost.

    Attributes:
        kernel: its name.
        barrier: the mbarrier by its name in the shared-memory plan, such as 'full[1]', or an address.
        phase: the parity that was waited for; None where the wait is not for a parity.
        line: file and line of the wait in the kernel itself, or '' where the PTX has no lines.
        seconds: how long that thread had waited.
        block, thread: indices of the first thread that gave up; `cluster_rank` is its block's rank in its cluster.
    """

    def __init__(self, kernel: str, record: Record, sites: Mapping[int, Site], shared: Shared | None) -> None:
        site = sites.get(record.site)
        self.kernel = kernel
        self.barrier = record.barrier(shared, site)
        self.phase = record.phase
        self.line = str(site.location.outermost) if site and site.location else ""
        self.seconds = record.seconds
        self.block, self.thread, self.cluster_rank = record.block, record.thread, record.cluster_rank
        for_phase = f" for the phase of parity {self.phase}" if self.phase is not None else ""
        where = (
            f"{site.location or 'a line that the PTX does not say'}: {site.mnemonic}" if site else "an unknown place"
        )
        ranked = f", rank {record.cluster_rank} of its cluster's {record.cluster_blocks}"
        super().__init__(
            f"{kernel}: a thread waited {record.seconds:.4g} s at {self.barrier}{for_phase}, and gave up\n"
            f"  at {where}{f' (PTX line {site.line})' if site else ''}\n"
            f"  the first to give up: thread {_triple(self.thread)} of block {_triple(self.block)}"
            f"{ranked if record.cluster_blocks > 1 else ''}; others may wait for the same, or for it\n"
            f"  what is missing there: run a small input in the simulator, NUMBA_TMA_BACKEND=sim, and see {_PAGE}\n"
            f"  if the wait is only a long one: a larger {VARIABLE}, or @kernel(watchdog=…)\n"
            f"  the CUDA context is lost: nothing more runs on the GPU in this process"
        )

    def __reduce__(self) -> tuple:
        return _remade, (str(self), vars(self))


def _remade(message: str, attributes: dict[str, object]) -> WatchdogError:
    """The error in another process."""
    error = WatchdogError.__new__(WatchdogError, message)
    vars(error).update(attributes)
    return error


@dataclass(frozen=True)
class Record:
    """A record's contents.

    Attributes:
        site: number of the place in the kernel.
        address: what was looked at: a shared or, for a load, a generic or global address.
        phase: parity that was waited for, or None.
        seconds: how long the thread had waited, of which `limit` were allowed.
        shared_base: where the block's dynamic shared memory begins, 0 if it has none.
    """

    site: int
    address: int
    phase: int | None
    seconds: float
    shared_base: int
    cluster_rank: int
    cluster_blocks: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]

    def barrier(self, shared: Shared | None, site: Site | None) -> str:
        """What was looked at by the name it has in the kernel's plan, else by its address."""
        if site is not None and not site.mnemonic.startswith("mbarrier"):
            return f"address {self.address:#x}"
        address = self.address % _SHARED_WINDOW
        offset = address - self.shared_base % _SHARED_WINDOW
        for name, member in shared.members.items() if shared is not None else ():
            inside = offset - shared.offsets[name]
            if not 0 <= inside < member.nbytes:
                continue
            if not isinstance(member, Barriers):
                return f"mbarrier {name} + {inside} B (shared address {address:#x})"
            return f"mbarrier {name}[{inside // 8}]" if member.count > 1 else f"mbarrier {name}"
        return f"mbarrier at shared address {address:#x}"


def read(memory: np.ndarray, limit: int) -> Record | None:
    """The record in 128 bytes (uint8) of which a watchdog of `limit` nanoseconds has written, or None if it has not."""
    fields = memory[: _TYPE.itemsize].view(_TYPE)[0]
    if int(fields["state"]) != WRITTEN:
        return None
    phase = int(fields["phase"])
    return Record(
        site=int(fields["site"]),
        address=int(fields["address"]),
        # The hardware looks at the lowest bit alone.
        phase=None if phase == NO_PHASE else phase & 1,
        seconds=(int(fields["now"]) - int(fields["deadline"]) + limit) / 1e9,
        shared_base=int(fields["shared_base"]),
        cluster_rank=int(fields["cluster_rank"]),
        cluster_blocks=int(fields["cluster_blocks"]),
        block=tuple(int(fields[f"block_{axis}"]) for axis in "xyz"),
        thread=tuple(int(fields[f"thread_{axis}"]) for axis in "xyz"),
    )


def _triple(index: tuple[int, int, int]) -> str:
    return f"({', '.join(map(str, index))})"

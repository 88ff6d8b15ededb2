"""What may watch a launch: methods that the machine calls at memory accesses and at synchronisation.

The machine makes these calls only when a launch has an observer. A fragment's lanes are named by `fragment.slot`
(which resident block) and `fragment.thread` (linear index in the block). A subclass overrides what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .fragment import Fragment
    from .machine import Machine
    from .module import Instruction
    from .watch import RegisterUse


class Observer:
    """Sees everything and does nothing."""

    def wave(self, machine: Machine, blocks: int) -> None:
        """A wave of so many blocks begins."""

    def access(
        self,
        fragment: Fragment,
        instruction: Instruction,
        kind: int,
        view: np.ndarray,
        index: np.ndarray,
        count: int,
        action: str,
        values: Sequence[Callable[[Fragment], np.ndarray]] = (),
    ) -> None:
        """Lanes access `count` elements of `view` from element `index` on (one, or one for each lane).

        `kind` is access.GLOBAL, SHARED, LOCAL, PARAM or CONST; `action` is "read", "write" or "atomic". The view is
        all of `machine.shared`, of every thread's local memory, or of the segment that the addresses lie in. `values`
        give what a store writes, for each element.
        """

    def fence(self, fragment: Fragment, instruction: Instruction) -> None:
        """membar, or fence of any kind."""

    def barrier_passed(self, fragment: Fragment, barrier: int) -> None:
        """Every live thread of the wave came to a block barrier at once and goes on."""

    def barrier_arrived(self, fragment: Fragment, barrier: np.ndarray, instruction: Instruction) -> None:
        """Lanes arrive at block barriers (one number, or one for each lane); the phase may complete after this."""

    def barriers_completed(self, slots: np.ndarray, barriers: np.ndarray) -> None:
        """Phases of block barriers complete; who waited goes on."""

    def barrier_waited(self, fragment: Fragment, barrier: np.ndarray) -> None:
        """Lanes that arrived at block barriers go on."""

    def lanes_synced(self, slots: np.ndarray, threads: np.ndarray) -> None:
        """Lanes have met at bar.warp.sync, those of each warp that was complete; sorted by slot and thread."""

    def cluster_arrived(self, fragment: Fragment, instruction: Instruction) -> None:
        """Lanes arrive at the cluster's barrier; the phase may complete after this."""

    def clusters_completed(self, clusters: np.ndarray) -> None:
        """The barriers of these clusters complete."""

    def cluster_waited(self, fragment: Fragment) -> None:
        """Lanes pass barrier.cluster.wait."""

    def mbarrier(
        self, fragment: Fragment, instruction: Instruction, index: np.ndarray, value: np.ndarray | None = None
    ) -> None:
        """An mbarrier instruction, for waits when they succeed. `index` counts 64-bit words of `machine.shared`.

        `value` is the count of init and arrive, the bytes of expect_tx and complete_tx (one, or one for each lane).
        """

    def phase_completed(self, index: int) -> None:
        """The phase of an mbarrier completes."""

    def copy_issued(self, fragment: Fragment, instruction: Instruction) -> None:
        """Lanes issue asynchronous copies, or change tensor maps."""

    def wgmma_issued(
        self,
        fragment: Fragment,
        instruction: Instruction,
        accumulators: list[int],
        multiplicand: list[int],
        reads: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Warpgroups issue wgmma.mma_async, which will read shared memory and write registers until it is waited for.

        `accumulators` are registers' numbers, `multiplicand` those of A if it is in registers. `reads` has (units,
        which) for each multiplicand in shared memory: row `which[i]` of `units` counts the 16 bytes of `machine.shared`
        that the fragment's i-th warpgroup reads.
        """

    def registers_used(self, fragment: Fragment, use: RegisterUse) -> None:
        """An instruction that is not wgmma is about to use registers that wgmma instructions of its function use."""

    def wgmma_ordered(self, fragment: Fragment, instruction: Instruction, what: str, pending: int) -> None:
        """Lanes execute wgmma's "fence", "commit_group" or "wait_group" (for all but `pending` groups)."""

    def groups_waited(self, fragment: Fragment, what: str, pending: int | None) -> None:
        """Lanes pass a wait for their bulk or cp.async groups, all but `pending` (None: for uncommitted ones too)."""

    def copy_to_shared(
        self,
        thread: int,
        targets: tuple[int, ...],
        start: int,
        nbytes: int,
        bar: int,
        origin: Any,
        source: tuple[int, int, int] | None = None,
        signalled: int | None = None,
        pattern: int = 0,
    ) -> None:
        """The engine takes on a copy to `nbytes` at offset `start` of each target slot.

        It signals the mbarrier at `bar` there with `signalled` bytes (None: with all). `source` is (slot, offset,
        bytes) if that is shared memory too. `pattern`: bytes after which its swizzle repeats, or 0. `thread` is as the
        engine counts.
        """

    def copy_from_shared(
        self,
        thread: int,
        start: int,
        nbytes: int,
        group: int,
        origin: Any,
        region: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None,
        pattern: int = 0,
        reduction: str = "",
        read: Callable[[], np.ndarray] | None = None,
    ) -> None:
        """The engine takes on a copy out of the shared memory of the thread's block, in its bulk group `group`.

        `region` is what it writes of global memory, if anything: (address, extents, strides) in bytes. `reduction`
        says how it combines that with what is there, as "add.f32"; '' if it stores. `read` gives the bytes for it.
        """

    def copy_reads(
        self,
        kind: str,
        origin: Any,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        nbytes: int,
        rows: int,
        promotion: int = 0,
    ) -> None:
        """The engine will read global memory: bytes in `shape`, `strides` apart, from `address` on.

        `nbytes` is what it delivers, in `rows`; `promotion` the bytes that L2 is to get at a time, if that is said. The
        next call is copy_to_shared for the same copy.
        """

    def cp_async_reads(self, threads: np.ndarray, addresses: np.ndarray, size: int, origin: Any) -> None:
        """The engine will read `size` bytes from global `addresses` for cp.async: those that read all of them."""

    def tensor_map_used(self, thread: int, address: int, instruction: Instruction) -> None:
        """A thread starts a copy with the tensor map at a generic address."""

    def tensor_map_changed(self, thread: int, address: int, instruction: Instruction) -> None:
        """A thread changes the tensor map at a generic address in global memory."""

    def tensor_map_in_shared(self, thread: int, offset: int, action: str, instruction: Instruction) -> None:
        """A thread does something ("read", "write") with the tensor map at an offset of its block's shared memory."""

    def tensor_maps_acquired(self, fragment: Fragment, addresses: np.ndarray) -> None:
        """fence.proxy.tensormap's acquire of the maps at these addresses (one, or one for each lane)."""

    def registers_changed(self, fragment: Fragment, instruction: Instruction) -> None:
        """setmaxnreg."""

    def lanes_exited(self, fragment: Fragment) -> None:
        """Lanes are done."""

    def wave_ended(self) -> None:
        """All lanes of the wave are done."""

    def launch_ended(self) -> None:
        """All waves are done."""

    def cp_async_issued(
        self, threads: np.ndarray, offsets: np.ndarray, size: int, groups: np.ndarray, origin: Any
    ) -> None:
        """The engine takes on cp.async of `size` bytes to offsets of all blocks' shared memory, in groups."""

    def cp_async_arrived(self, threads: np.ndarray, bars: np.ndarray, groups: np.ndarray) -> None:
        """Threads will arrive at mbarriers when their cp.async copies up to groups are done."""


class _Several:
    """Passes every call on to several observers."""

    def __init__(self, observers: list[Observer]) -> None:
        self._observers = observers

    def __getattr__(self, name: str) -> Any:
        methods = [getattr(observer, name) for observer in self._observers]

        def call(*arguments: Any) -> None:
            for method in methods:
                method(*arguments)

        setattr(self, name, call)
        return call


def observe_all(observers: list[Any]) -> Any:
    """One observer in place of several: None if there is none."""
    if len(observers) < 2:
        return observers[0] if observers else None
    return _Several(observers)

"""What may watch a launch: methods that the machine calls at memory accesses and at synchronisation.

The machine makes these calls only when a launch has an observer. A fragment's lanes are named by `fragment.slot`
(which resident block) and `fragment.thread` (linear index in the block). A subclass overrides what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .fragment import Fragment
    from .machine import Machine
    from .module import Instruction


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
    ) -> None:
        """Lanes access `count` elements of `view` from element `index` on (one, or one for each lane).

        `kind` is access.GLOBAL, SHARED, LOCAL, PARAM or CONST; `action` is "read", "write" or "atomic". The view is
        all of `machine.shared`, of every thread's local memory, or of the segment that the addresses lie in.
        """

    def fence(self, fragment: Fragment, instruction: Instruction) -> None:
        """membar, or fence of any kind."""

    def barrier_passed(self, fragment: Fragment, barrier: int) -> None:
        """Every live thread of the wave came to a block barrier at once and goes on."""

    def barrier_arrived(self, fragment: Fragment, barrier: np.ndarray) -> None:
        """Lanes arrive at block barriers (one number, or one for each lane)."""

    def barriers_completed(self, slots: np.ndarray, barriers: np.ndarray) -> None:
        """Phases of block barriers complete; who waited goes on."""

    def mbarrier(self, fragment: Fragment, instruction: Instruction, index: np.ndarray) -> None:
        """An mbarrier instruction, for waits when they succeed. `index` counts 64-bit words of `machine.shared`."""

    def phase_completed(self, index: int) -> None:
        """The phase of an mbarrier completes."""

    def copy_issued(self, fragment: Fragment, instruction: Instruction) -> None:
        """Lanes issue asynchronous copies, or change tensor maps."""

    def wgmma_issued(
        self,
        fragment: Fragment,
        instruction: Instruction,
        accumulators: list[int],
        reads: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Warpgroups issue wgmma.mma_async, which will read shared memory and write registers until it is waited for.

        `accumulators` are the registers' numbers. `reads` has (units, which) for each multiplicand in shared memory:
        row `which[i]` of `units` counts the 16 bytes of `machine.shared` that the fragment's i-th warpgroup reads.
        """

    def wgmma_ordered(self, fragment: Fragment, instruction: Instruction, what: str, pending: int) -> None:
        """Lanes execute wgmma's "fence", "commit_group" or "wait_group" (for all but `pending` groups)."""

    def groups_waited(self, fragment: Fragment, what: str) -> None:
        """Lanes pass a wait for their bulk groups or cp.async groups."""

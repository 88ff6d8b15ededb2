"""Counts how many wavefronts the accesses to shared memory take: what ncu calls shared-memory wavefronts.

A wavefront gives one word of each of the 32 banks. An access of a warp takes one, or two and four for 8 and 16 bytes a
lane; more only where lanes want different words of one bank: a bank conflict. Atomics and the copy engine's accesses
are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .access import SHARED
from .observer import Observer
from .timing.banks import WORD, wavefronts

if TYPE_CHECKING:
    from .fragment import Fragment
    from .machine import Machine
    from .module import Instruction

_NAMES = {"read": "ld_shared", "write": "st_shared"}


@dataclass
class BankUse:
    """Warps' accesses to shared memory.

    Attributes:
        requests: accesses, one for each warp.
        wavefronts: what they took.
        least: what they would have taken without conflicts.
    """

    requests: int = 0
    wavefronts: int = 0
    least: int = 0

    @property
    def conflicts(self) -> int:
        """Wavefronts that only conflicts cost."""
        return self.wavefronts - self.least

    def add(self, requests: int, wavefronts: int, least: int) -> None:
        """Count some more."""
        self.requests += requests
        self.wavefronts += wavefronts
        self.least += least


class BankConflicts(Observer):
    """Watches one launch. `total` is by direction, "ld_shared" and "st_shared"; `by_instruction` by instruction."""

    def __init__(self, machine: Machine) -> None:
        self._warps = machine.warps
        self.total = {name: BankUse() for name in _NAMES.values()}
        self.by_instruction: dict[int, tuple[Instruction, BankUse]] = {}

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
        if kind != SHARED or action not in _NAMES:
            return
        gather = self._lanes(fragment)
        requests = gather.shape[0]
        nbytes = view.itemsize * count
        least = requests * max(nbytes // WORD, 1)
        if index.size == 1:  # all lanes want the same words
            taken = least
        else:
            taken = int(wavefronts(index[gather] * view.itemsize, nbytes).sum())
        _, of_instruction = self.by_instruction.setdefault(id(instruction), (instruction, BankUse()))
        for use in (self.total[_NAMES[action]], of_instruction):
            use.add(requests, taken, least)

    def _lanes(self, fragment: Fragment) -> np.ndarray:
        """Positions of each warp's lanes in the fragment, (warps, 32); an absent lane stands where another does."""
        gather = fragment.cache.get("bank conflicts")
        if gather is None:
            warp = fragment.slot * self._warps + (fragment.thread >> 5)
            new = np.ones(fragment.n, np.bool_)
            new[1:] = warp[1:] != warp[:-1]
            gather = np.repeat(np.nonzero(new)[0][:, None], 32, axis=1)
            gather[np.cumsum(new) - 1, fragment.thread & 31] = np.arange(fragment.n)
            fragment.cache["bank conflicts"] = gather
        return gather

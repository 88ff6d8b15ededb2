"""Tensor maps in global memory: read by a proxy of their own, so a changed one is released and acquired.

Who changes a map (ordinary stores, tensormap.replace) executes fence.proxy.tensormap's release after that (or copies
it by tensormap.cp_fenceproxy, which releases); who uses it executes the acquire on its address, ordered after the
release. A thread that has changed a map itself needs the acquire only. Every block acquires for itself.
Source: PTX ISA, "membar, fence": fence.proxy.tensormap; "tensormap.cp_fenceproxy".
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import numpy as np

from ..descriptor import NBYTES
from .clocks import STEPS
from .scan import GRID_COPY, GRID_THREAD_SHIFT, GRID_VALUE_MASK, GRID_VALUE_SHIFT

if TYPE_CHECKING:
    from .tracker import Tracker


class TensorMaps:
    """The launch's tensor maps in global memory, by address."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.machine = tracker, tracker.machine
        # Threads that acquired a map, each with its step and the writes that it acquired, as stamps.
        self._acquired: dict[int, list[tuple[int, int, set[int]]]] = {}
        # The steps at which each thread of the grid released, ascending.
        self._released: dict[int, list[int]] = {}

    def wave(self) -> None:
        """Threads are others from now on."""
        self._acquired.clear()

    def released(self, threads: np.ndarray) -> None:
        """Threads release what they have written, before a new step begins."""
        clocks, first = self.tracker.clocks, self.tracker.first_thread
        for thread, step in zip(threads.tolist(), clocks.own[STEPS, threads].tolist(), strict=True):
            self._released.setdefault(first + thread, []).append(step)
        clocks.advance(threads)

    def acquired(self, threads: np.ndarray, addresses: np.ndarray) -> None:
        """Threads acquire the maps at these addresses."""
        steps = self.tracker.clocks.own[STEPS, threads]
        addresses = np.broadcast_to(addresses, threads.shape)
        for address, thread, step in zip(addresses.tolist(), threads.tolist(), steps.tolist(), strict=True):
            done = set(self._ready(address, thread))
            self._acquired.setdefault(address, []).append((thread, step, done))

    def _ready(self, address: int, thread: int) -> list[int]:
        """The writes to a map that were released and are ordered before what the thread does now."""
        memory = self.tracker.global_memory
        stamps = memory.written(address, NBYTES)
        own = self.tracker.first_thread + thread
        who = np.array([thread])
        good = ~memory.unordered(stamps, who)
        for i, stamp in enumerate(stamps.tolist()):
            by = stamp >> GRID_THREAD_SHIFT
            if not good[i] or by == own or stamp & GRID_COPY:
                continue
            # What the writer has released is known when its step at the release is.
            steps = self._released.get(by, [])
            first = bisect_left(steps, stamp >> GRID_VALUE_SHIFT & GRID_VALUE_MASK)
            release = np.array(
                [by << GRID_THREAD_SHIFT | step << GRID_VALUE_SHIFT for step in steps[first : first + 1]]
            )
            good[i] = release.size > 0 and not memory.unordered(release, who).any()
        return stamps[good].tolist()

    def used(self, thread: int, address: int, instruction: Any) -> None:
        """A thread starts a copy with a map."""
        segment = self.machine.find(address)
        if segment is None or segment.kind != "global":
            return
        clocks, threads = self.tracker.clocks, self.machine.threads
        writes = set(self.tracker.global_memory.written(address, NBYTES).tolist())
        old = False
        for by, step, done in self._acquired.get(address, []):
            if by // threads != thread // threads:
                continue
            if by == thread or clocks.knows(np.array([thread]), clocks.column[[by]], np.array([step]))[0]:
                if writes <= done:
                    return
                old = True
        changed = self.tracker.global_memory.instruction_of(max(writes)) if writes else None
        self.tracker.report.map_not_acquired(thread, address, instruction, changed, old)

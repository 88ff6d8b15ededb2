"""The mbarriers of a wave as the hazard tracker sees them: phases, promised bytes, who initialised, who waited."""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import PHASES, Clocks, Plane


class BarrierWord:
    """The mbarriers at one offset of all blocks' shared memory; arrays have an entry for each block.

    `phases` counts completed phases, `expected` and `issued` the bytes of the current one. `column` is the clocks'
    column of each block's barrier, by which threads know its phases. `last_arrival` is the number of the instruction
    by which the latest phase had all its arrivals, `bytes_before` the bytes promised to the phase that completed last.
    """

    def __init__(self, clocks: Clocks, word: int) -> None:
        slots, size = clocks.slots, clocks.cluster_size
        self.word = word
        self.plane: Plane = clocks.plane(slots)
        ranks = np.array([clocks.new_column(PHASES, -1) for _ in range(size)])
        self.column = np.tile(ranks, -(-slots // size))[:slots]
        self.phases = np.zeros(slots, np.int64)
        self.expected = np.zeros(slots, np.int64)
        self.issued = np.zeros(slots, np.int64)
        self.bytes_before = np.zeros(slots, np.int64)
        self.last_arrival = np.zeros(slots, np.int32)
        self.bare_expect: dict[int, Any] = {}
        self.last_copy: dict[int, Any] = {}
        # Once its count is known to be wrong, a barrier is not accounted for any more.
        self.wrong = np.zeros(slots, np.bool_)
        self.valid = np.zeros(slots, np.bool_)
        self.init_thread = np.zeros(slots, np.int64)
        self.init_step = np.zeros(slots, np.int64)
        self.init_fenced = np.zeros(slots, np.bool_)
        self.published = np.zeros(slots, np.bool_)
        self.init_instruction: Any = None
        # For each thread: phases at its latest passed wait (-1: none), and its step then; whether it waits for a phase
        # that it has waited for before, having given something away since.
        threads = slots * clocks.threads
        self.seen_phases = np.full(threads, -1, np.int32)
        self.seen_step = np.zeros(threads, np.int32)
        # The number of the instruction of that wait.
        self.waited_by = np.zeros(threads, np.int32)
        self.waited_again = np.zeros(threads, np.bool_)
        # The phase that was under way when a thread's latest wait passed at once, copies being in flight; -1: none.
        self.passed_early = np.full(threads, -1, np.int32)

    def initialise(self, slots: np.ndarray, threads: np.ndarray, steps: np.ndarray, instruction: Any) -> None:
        """mbarrier.init by a thread for each slot. Phases go on counting, so that old knowledge stays old."""
        self.valid[slots] = True
        self.init_thread[slots], self.init_step[slots] = threads, steps
        self.init_fenced[slots] = self.published[slots] = self.wrong[slots] = False
        self.expected[slots] = self.issued[slots] = self.bytes_before[slots] = self.last_arrival[slots] = 0
        self.init_instruction = instruction
        self.seen_phases.reshape(len(self.phases), -1)[slots] = -1

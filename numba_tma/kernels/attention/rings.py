"""What the producer of steps 5 to 10 fills: Q of each consumer, and rings of K and V.

All that is fetched has a pair of barriers, "full" for its bytes that have come, "empty" for those who have read it. K
and V have rings of their own, so that a block of keys is let go as soon as its scores are there.

PTX ISA: "mbarrier", "cp.async.bulk.tensor".
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from numba import cuda
from numba.cuda.types import uint32

from ... import ptx
from ...pipeline import ring
from ...shared import Barriers, Shared
from ...unroll import unroll
from .packed import make_sequences


def ring_barriers(consumers: int, stages: int) -> dict[str, Barriers]:
    """`q_full` and `q_empty`, one for each consumer; `k_full`, `k_empty`, `v_full`, `v_empty`, one for each stage."""
    counts = {"q": consumers, "k": stages, "v": stages}
    return {f"{name}_{state}": Barriers(count) for name, count in counts.items() for state in ("full", "empty")}


@functools.cache
def make_fetch(boxes: int, columns: int, row_bytes: int, packed: bool = False) -> Callable:
    """Make `fetch(tile, tensor_map, nrows, row, head, part, bar)`: `nrows` rows of one head, all of their columns.

    They come box by box, each of so many `columns`, which are `row_bytes`. `part` is `packed.Sequences`'.
    """
    load = make_sequences(packed).load

    @cuda.jit(device=True, forceinline=True)
    def fetch(tile, tensor_map, nrows, row, head, part, bar):
        for box in range(boxes):
            unroll()
            to = uint32(ptx.shared_address(tile) + uint32(box * nrows * row_bytes))
            load(to, tensor_map, box * columns, head, row, part, bar)

    return fetch


class Rings(NamedTuple):
    """Device functions for Q's tiles and the rings of K and V.

    initialise()
        Of their barriers, by one thread; it fences nothing.
    fill(k_map, v_map, use, first, block, head, part)
        Fetch the blocks of keys from `first` on and before `block`, backwards: those at a causal mask's edge first.
        `use` counts the uses of the rings so far; what it is afterwards is returned.
    """

    initialise: Callable
    fill: Callable


def make_rings(
    smem: Shared,
    loads: tuple[Callable, Callable],
    nbytes: int,
    consumers: int,
    stages: int,
    *,
    step: int = 1,
    k_arrivals: int = 1,
    cluster: int = 1,
    wait: Callable = ptx.mbarrier_wait_parity,
) -> Rings:
    """The functions for this shared memory, with tiles `q`, `k` and `v`, and `ring_barriers`.

    Args:
        loads: of K and of V, `load(tile, tensor_map, at, head, part, bar)`: a block of keys, `nbytes` bytes.
        step: what a block's number is multiplied by, to be `at`.
        k_arrivals: at `k_full`, that of the thread that fetches K included.
        cluster: blocks that fetch K and V for each other, and whose consumers all let a stage go.
        wait: how the fetching thread waits for a barrier's phase: with the loop in the snippet of PTX, or with Numba's.
    """
    load_k, load_v = loads

    @cuda.jit(device=True, forceinline=True)
    def initialise():
        for i in range(consumers):
            ptx.mbarrier_init(smem.q_full[i], 1)
            ptx.mbarrier_init(smem.q_empty[i], 1)
        for stage in range(stages):
            ptx.mbarrier_init(smem.k_full[stage], k_arrivals)
            ptx.mbarrier_init(smem.v_full[stage], 1)
            ptx.mbarrier_init(smem.k_empty[stage], consumers * cluster)
            ptx.mbarrier_init(smem.v_empty[stage], consumers * cluster)

    @cuda.jit(device=True, forceinline=True)
    def fill(k_map, v_map, use, first, block, head, part):
        while block > first:
            unroll(1)
            block = uint32(block - uint32(1))
            stage, phase = ring(use, stages)
            use = uint32(use + uint32(1))
            at = uint32(block * uint32(step))
            wait(smem.k_empty[stage], phase ^ uint32(1))
            ptx.mbarrier_arrive_expect_tx(smem.k_full[stage], nbytes)
            load_k(smem.k[stage], k_map, at, head, part, smem.k_full[stage])
            wait(smem.v_empty[stage], phase ^ uint32(1))
            ptx.mbarrier_arrive_expect_tx(smem.v_full[stage], nbytes)
            load_v(smem.v[stage], v_map, at, head, part, smem.v_full[stage])
        return use

    return Rings(initialise, fill)

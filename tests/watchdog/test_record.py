"""Records that are made by hand, and the names they give."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from numba_tma import Barriers, Buffer, Shared, WatchdogError
from numba_tma.sim.module import SourceLocation
from numba_tma.watchdog import record
from numba_tma.watchdog.weave import Site

PLAN = Shared(full=Barriers(2), last=Barriers(1), sums=Buffer((4,), np.float32))
WAIT = Site(
    "mbarrier.try_wait.parity.shared::cta.b64", SourceLocation("p.py", 3, inlined_at=SourceLocation("k.py", 7)), 41
)


def made(limit: int = 1_000_000_000, **values: int) -> record.Record | None:
    memory = np.zeros(record.BYTES, np.uint8)
    for name, value in {"state": record.WRITTEN, "cluster_blocks": 1, "shared_base": 0x400, **values}.items():
        size = record._TYPE.fields[name][0].itemsize
        memory[record.FIELDS[name] :][:size] = np.frombuffer(value.to_bytes(size, "little"), np.uint8)
    return record.read(memory, limit)


def test_the_error_travels_between_processes():
    address = 0x400 + PLAN.offsets["full"] + 8
    found = made(now=5_500_000_000, deadline=5_250_000_000, address=address, phase=1, thread_x=3)
    error = WatchdogError("sums", found, {0: WAIT}, PLAN)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is WatchdogError and str(again) == str(error) and vars(again) == vars(error)
    assert (again.barrier, again.phase, again.thread) == ("mbarrier full[1]", 1, (3, 0, 0))


def test_fields_lie_apart_and_aligned():
    spans = sorted((record.FIELDS[name], record._TYPE.fields[name][0].itemsize) for name in record.FIELDS)
    assert all(offset % size == 0 for offset, size in spans)
    assert all(a + size <= b for (a, size), (b, _) in zip(spans, spans[1:], strict=False))
    assert spans[-1][0] + spans[-1][1] <= record.BYTES


def test_what_is_not_whole_is_no_record():
    assert made(state=0, site=4) is None


def test_times_and_phases():
    found = made(now=5_500_000_000, deadline=5_250_000_000, phase=0xFFFFFFFE)
    assert found.seconds == 1.25 and found.phase == 0
    assert made(phase=1).phase == 1 and made(phase=record.NO_PHASE).phase is None


@pytest.mark.parametrize(
    ("member", "inside", "name"),
    [
        ("full", 0, "mbarrier full[0]"),
        ("full", 8, "mbarrier full[1]"),
        ("last", 0, "mbarrier last"),
        ("sums", 8, "mbarrier sums + 8 B (shared address 0x{:x})"),
        ("sums", 1 << 12, "mbarrier at shared address 0x{:x}"),
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_names(member, inside, name, rank):
    address = 0x400 + PLAN.offsets[member] + inside
    # In a cluster a shared address has the block's rank above it, and so has the memory's beginning.
    found = made(address=address + (rank << 24), shared_base=0x400 + (rank << 24))
    assert found.barrier(PLAN, WAIT) == name.format(address)


def test_without_a_plan_or_a_known_site():
    assert made(address=0x500).barrier(None, None) == "mbarrier at shared address 0x500"
    error = WatchdogError("k", made(site=9, phase=0), {0: WAIT}, PLAN)
    assert error.line == "" and "an unknown place" in str(error)
    load = Site("ld.acquire.gpu.global.u32", None, 5)
    error = WatchdogError("k", made(address=0x7F0012345678, phase=record.NO_PHASE), {0: load}, PLAN)
    assert "at address 0x7f0012345678, and gave up" in str(error) and error.phase is None


def test_the_error_says_where_and_what_next():
    values = {
        "block_x": 5,
        "thread_y": 2,
        "cluster_rank": 1,
        "cluster_blocks": 2,
        "address": 0x400 + PLAN.offsets["last"],
    }
    error = WatchdogError("k", made(now=30, deadline=20, phase=1, **values), {0: WAIT}, PLAN)
    assert (error.kernel, error.barrier, error.phase, error.line) == ("k", "mbarrier last", 1, "k.py:7")
    assert (error.block, error.thread, error.cluster_rank) == ((5, 0, 0), (0, 2, 0), 1)
    for part in (
        "k: a thread waited 1 s at mbarrier last for the phase of parity 1",
        "p.py:3, inlined at k.py:7",
        "PTX line 41",
        "(5, 0, 0), rank 1 of its cluster's 2",
        "NUMBA_TMA_BACKEND=sim",
        "docs/hangs.md",
    ):
        assert part in str(error)

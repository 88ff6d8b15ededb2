"""How much of the copying is hidden, from intervals made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from numba_tma.timeline import model, overlap
from numba_tma.timeline.model import Block, Interval, Row, Timeline


def timeline(*spans, block=0, multiprocessor=0):
    """A block's timeline of (row, kind, start, end[, seen])."""
    where = Block(block, multiprocessor)
    rows = {name: Row(where, model.WARP, name) for name, *_ in spans}
    intervals = [Interval(rows[name], start, end, kind, kind, "", *seen) for name, kind, start, end, *seen in spans]
    return Timeline("made", "by hand", list(rows.values()), intervals)


def joined(*parts):
    return Timeline(
        "made", "by hand", [row for part in parts for row in part.rows], [i for part in parts for i in part.intervals]
    )


def only(timeline):
    (hidden,) = overlap.by_block(timeline)
    return hidden


def test_nothing_is_hidden_where_copy_and_compute_take_turns():
    hidden = only(timeline(("copies", "copy", 0, 100), ("w", "compute", 100, 150), ("copies", "copy", 150, 250)))
    assert (hidden.copy_ns, hidden.hidden_ns, hidden.share) == (200, 0, 0)


def test_all_is_hidden_where_computing_covers_it():
    hidden = only(timeline(("copies", "copy", 20, 90), ("w", "compute", 0, 100)))
    assert (hidden.copy_ns, hidden.share) == (70, 1)


def test_copies_at_once_count_once():
    hidden = only(timeline(("a", "copy", 0, 60), ("b", "copy", 30, 100), ("w", "compute", 50, 80)))
    assert (hidden.copy_ns, hidden.hidden_ns, hidden.computing_ns, hidden.overlapped) == (100, 30, 30, 1)


def test_a_block_computes_while_one_of_its_warps_does():
    hidden = only(
        timeline(
            ("copies", "copy", 0, 100), ("w0", "compute", 0, 30), ("w1", "compute", 20, 50), ("w0", "wait", 30, 100)
        )
    )
    assert hidden.hidden_ns == 50


def test_the_tensor_cores_count_as_computing():
    hidden = only(timeline(("copies", "copy", 0, 100), ("tensor", "tensor", 10, 60), ("w", "wait", 10, 60)))
    assert hidden.hidden_ns == 50


def test_waiting_issuing_and_storing_hide_nothing():
    kinds = ("wait", "barrier", "issue", "store", "phase", "part", "mark")
    hidden = only(timeline(("copies", "copy", 0, 100), *(("w", kind, 0, 100) for kind in kinds)))
    assert hidden.hidden_ns == 0


def test_threads_that_copy_by_themselves():
    """Plain loads: nothing is hidden in the block, but on the SM another block computes meanwhile."""
    first = timeline(("w", "load", 0, 100), ("w", "compute", 100, 150), block=0, multiprocessor=4)
    second = timeline(("w", "compute", 40, 90), ("w", "load", 90, 190), block=7, multiprocessor=4)
    both = joined(first, second)
    assert [hidden.share for hidden in overlap.by_block(both)] == [0, 0]
    (sm,) = overlap.by_multiprocessor(both)
    # Loading from 0 to 190, computing from 40 to 90 and from 100 to 150.
    assert (sm.name, sm.copy_ns, sm.hidden_ns) == ("SM 4", 190, 100)


def test_blocks_of_different_multiprocessors_do_not_mix():
    first = timeline(("copies", "copy", 0, 100), block=0, multiprocessor=0)
    second = timeline(("w", "compute", 0, 100), block=1, multiprocessor=1)
    assert [h.hidden_ns for h in overlap.by_multiprocessor(joined(first, second))] == [0, 0]


def test_an_end_that_nobody_saw():
    """The first copy is known. The second was there when it was looked for, at 200: in flight at most so long."""
    hidden = only(
        timeline(
            ("copies", "copy", 0, 100, True),
            ("copies", "copy", 100, 200, False),
            ("w", "compute", 60, 200),
        )
    )
    assert (hidden.copy_ns, hidden.hidden_ns, hidden.share) == (200, 140, 0.7)
    assert hidden.at_least == 0.4


def test_nothing_copied_is_no_share():
    assert math.isnan(only(timeline(("w", "compute", 0, 10))).share)


def test_sums_over_blocks():
    parts = [overlap.Hidden("a", 100, 50, 100, 50, 80), overlap.Hidden("b", 300, 30, 100, 10, 40)]
    whole = overlap.total("both", parts)
    assert (whole.copy_ns, whole.share, whole.at_least, whole.overlapped) == (400, 0.2, 0.3, 80 / 120)


def random_spans(rng, count):
    starts = rng.integers(0, 1000, count)
    return [(int(s), int(s + n)) for s, n in zip(starts, rng.integers(0, 60, count), strict=True)]


def cells(spans):
    covered = np.zeros(1200, bool)
    for start, end in spans:
        covered[start:end] = True
    return covered


@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_spans_against_cells(count, rng):
    for _ in range(20):
        first, second = overlap.union(random_spans(rng, count)), overlap.union(random_spans(rng, count // 2 + 1))
        for result, expected in (
            (first, cells(first)),
            (overlap.common(first, second), cells(first) & cells(second)),
            (overlap.without(first, second), cells(first) & ~cells(second)),
        ):
            np.testing.assert_array_equal(cells(result), expected)
            assert overlap.length(result) == np.count_nonzero(expected)
            assert all(a[1] <= b[0] for a, b in zip(result, result[1:], strict=False))

"""What stores write: two that write the same value to the same bytes do no harm, whatever their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..fragment import Fragment

# Reads of what a store writes, one for each element that a lane stores.
Values = Sequence[Callable[["Fragment"], np.ndarray]]


def _bits(value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(value).view(np.dtype(f"u{value.dtype.itemsize}"))


def changes(view: np.ndarray, index: np.ndarray, fragment: Fragment, values: Values, lanes: np.ndarray) -> np.ndarray:
    """Whether lanes (positions) write something else than what is there from `view[index]` on; true in doubt."""
    if not values:
        return np.ones(lanes.size, np.bool_)
    changed = np.zeros(lanes.size, np.bool_)
    for k, read in enumerate(values):
        new = np.broadcast_to(read(fragment), (fragment.n,))[lanes]
        changed |= _bits(new) != _bits(view[index + k])
    return changed


def first_disagreement(
    fragment: Fragment, values: Values, threads: np.ndarray, writers: np.ndarray, each: int
) -> int | None:
    """The first piece that another lane of the instruction wrote too, with another value, or None.

    `threads` are the lanes' threads, `writers` the threads that wrote each piece last (`each` pieces a lane).
    """
    order = np.argsort(threads)
    place = np.minimum(np.searchsorted(threads, writers, sorter=order), threads.size - 1)
    other = order[place]
    mine = np.arange(threads.size).repeat(each)
    pairs = np.nonzero((threads[other] == writers) & (other != mine))[0]
    for read in values:
        value = _bits(np.broadcast_to(read(fragment), (fragment.n,)))
        differ = pairs[value[mine[pairs]] != value[other[pairs]]]
        if differ.size:
            return int(differ[0])
    return None

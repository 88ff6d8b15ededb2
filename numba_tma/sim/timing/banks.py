"""How a warp's accesses fall on banks, sectors and lines, from the lanes' addresses.

Shared memory has 32 banks of 4 bytes. What a warp accesses is served in wavefronts, each of which gives one word of
every bank; lanes that want the same word share it. Accesses of 8 bytes a lane are served for half of the warp at a
time, those of 16 bytes for a quarter. Global memory is fetched in sectors of 32 bytes, looked up in lines of 128.
Source: CUDA C++ Programming Guide, "Shared Memory", "Global Memory".
"""

from __future__ import annotations

import numpy as np

BANKS, WORD = 32, 4
# Memory gives two sectors at a time.
SECTOR_SHIFT, UNIT_SHIFT, LINE_SHIFT = 5, 6, 7


def wavefronts(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """Wavefronts that each warp's access takes: int64 (warps,).

    `offsets` are the lanes' byte offsets in shared memory, (warps, 32); lanes that take no part have another lane's.
    """
    words = max(nbytes // WORD, 1)
    first = offsets // WORD
    rows = first.shape[0]
    # (warps, parts served together, lanes × words)
    each = first[:, :, None] + np.arange(words)
    groups = np.sort(each.reshape(rows * words, -1), axis=1)
    new = np.ones(groups.shape, np.bool_)
    new[:, 1:] = groups[:, 1:] != groups[:, :-1]
    place = np.arange(groups.shape[0])[:, None] * BANKS + groups % BANKS
    hits = np.bincount(place[new], minlength=groups.shape[0] * BANKS).reshape(-1, BANKS).max(axis=1)
    return hits.reshape(rows, words).sum(axis=1)


def most_at_one_place(offsets: np.ndarray) -> np.ndarray:
    """How many lanes of each warp name the same word at most, which atomics serve one after the other."""
    words = np.sort(offsets // WORD, axis=1)
    most = np.ones(words.shape[0], np.int64)
    for distance in range(1, 32):
        equal = (words[:, distance:] == words[:, :-distance]).any(axis=1)
        if not equal.any():
            break
        most[equal] = distance + 1
    return most


def distinct(units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each warp's units (warps, 32) in order, and where a new one begins: (warps, 32) each."""
    if (units[:, 1:] < units[:, :-1]).any():
        units = np.sort(units, axis=1)
    new = np.ones(units.shape, np.bool_)
    new[:, 1:] = units[:, 1:] != units[:, :-1]
    return units, new

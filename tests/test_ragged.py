"""Ragged tensor maps: copies end where a sequence ends, in both directions; the rules of such a map."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import uint32

from numba_tma import Barriers, Shared, Tiles, kernel, ptx, use_backend
from numba_tma.pipeline import mbarrier_wait
from numba_tma.ragged import RaggedMap, ragged_row
from numba_tma.tensor_map import TensorMapError

ROWS, COLUMNS = 8, 32
smem = Shared(tile=Tiles(1, (ROWS, COLUMNS), "float32"), full=Barriers(1))


@kernel(threads=32, shared=smem)
def move(source, target, starts, lengths, row):
    """Block b copies rows `row` to `row` + 7 of sequence b through shared memory."""
    if cuda.threadIdx.x == 0:
        sequence = uint32(cuda.blockIdx.x)
        x, y, z = ragged_row(uint32(starts[sequence]), uint32(lengths[sequence]), uint32(row))
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_arrive_expect_tx(smem.full[0], source.box_bytes)
        ptx.cp_async_bulk_tensor_4d_shared_global(smem.tile[0], source, 0, x, y, z, smem.full[0])
        mbarrier_wait(smem.full[0], 0)
        ptx.cp_async_bulk_tensor_4d_global_shared(target, 0, x, y, z, smem.tile[0])
        ptx.cp_async_bulk_commit_group()
        ptx.cp_async_bulk_wait_group(0)


@kernel(threads=32, shared=smem)
def load(source, out, start, length, row):
    """Rows `row` to `row` + 7 of one sequence, as they come."""
    if cuda.threadIdx.x == 0:
        x, y, z = ragged_row(uint32(start), uint32(length), uint32(row))
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
        ptx.mbarrier_arrive_expect_tx(smem.full[0], source.box_bytes)
        ptx.cp_async_bulk_tensor_4d_shared_global(smem.tile[0], source, 0, x, y, z, smem.full[0])
    cuda.syncthreads()
    mbarrier_wait(smem.full[0], 0)
    for i in range(ROWS):
        out[i, cuda.threadIdx.x] = smem.tile[0][i, cuda.threadIdx.x]


def check_moves(rng):
    lengths = np.array([5, 0, 8, 3, 13], np.int32)
    starts = np.r_[0, np.cumsum(lengths)[:-1]].astype(np.int32)
    source = rng.standard_normal((int(lengths.sum()), COLUMNS), np.float32)
    target = np.full_like(source, np.nan)
    for row in (0, 8, 16):
        maps = (RaggedMap(source, (ROWS, COLUMNS)), RaggedMap(target, (ROWS, COLUMNS)))
        move[len(lengths)](*maps, starts, lengths, row)
    np.testing.assert_array_equal(target, source)


def test_each_sequence_is_moved_and_no_row_of_its_neighbours(rng):
    with use_backend("sim"):
        check_moves(rng)


@pytest.mark.gpu
def test_each_sequence_is_moved_on_the_gpu(rng):
    with use_backend("gpu"):
        check_moves(rng)


@pytest.mark.parametrize(("start", "length", "row"), [(3, 5, 0), (3, 5, 4), (3, 5, 5), (0, 0, 0), (10, 10, 2)])
def test_what_lies_behind_the_end_arrives_as_zeros(rng, start, length, row):
    source = rng.standard_normal((20, COLUMNS), np.float32)
    out = np.full((ROWS, COLUMNS), np.nan, np.float32)
    with use_backend("sim"):
        load[1](RaggedMap(source, (ROWS, COLUMNS)), out, start, length, row)
    there = max(0, min(ROWS, length - row))
    np.testing.assert_array_equal(out[:there], source[start + row : start + row + there])
    assert not out[there:].any()


@pytest.mark.parametrize(
    ("shape", "box", "rule"),
    [((20,), (8,), "ragged rank"), ((4, 4, 4, 8), (1, 1, 1, 8), "ragged rank"), ((20, 3), (8, 3), "stride alignment")],
)
def test_rules(shape, box, rule):
    with pytest.raises(TensorMapError) as raised:
        RaggedMap(np.zeros(shape, np.float32), box)
    assert raised.value.rule == rule


def test_rows_too_many_or_too_far_apart():
    far = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (2, 4), (1 << 34, 4))
    with pytest.raises(TensorMapError, match="less than 2"):
        RaggedMap(far, (1, 4))
    many = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (1 << 30, 4), (16, 4))
    with pytest.raises(TensorMapError, match="fewer than 2"):
        RaggedMap(many, (1, 4))

"""Wavefronts of accesses to shared memory, against what the banks' rules give by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, uint32
from simulate import run, run_ptx

BODY = """
    .shared .align 16 .b8 memory[16384];
    .reg .b32 %t, %a, %v0, %v1, %v2, %v3;
    .reg .b64 %w0, %w1;
    .reg .pred %p;
    mov.u32 %t, %tid.x;
    mul.lo.u32 %a, %t, STRIDE;
    mov.u32 %v0, memory;
    add.u32 %a, %a, %v0;
    STORE
    ret;
"""


def wavefronts(stride: int, instruction: str, threads: int = 32) -> tuple[int, int, int]:
    body = BODY.replace("STRIDE", str(stride)).replace("STORE", instruction)
    report = run_ptx(body, 1, threads, banks=True, hazards=False)
    direction = "st_shared" if instruction.startswith(("st", "@%p st")) else "ld_shared"
    use = report.banks[direction]
    assert use.conflicts == use.wavefronts - use.least
    assert sum(u.wavefronts for u in report.banks_by_place.values()) == use.wavefronts
    return use.requests, use.wavefronts, use.least


@pytest.mark.parametrize(
    ("stride", "expected"), [(0, 1), (4, 1), (8, 2), (12, 1), (16, 4), (32, 8), (64, 16), (128, 32), (132, 1), (1, 1)]
)
def test_words_a_stride_apart(stride, expected):
    store = "st.shared.u32 [%a], %v0;" if stride % 4 == 0 else "st.shared.u8 [%a], %v0;"
    assert wavefronts(stride, store) == (1, expected, 1)
    assert wavefronts(stride, store.replace("st", "ld", 1).replace("[%a], %v0", "%v0, [%a]")) == (1, expected, 1)


@pytest.mark.parametrize(("stride", "expected"), [(8, 2), (16, 4), (24, 2), (128, 32), (136, 2), (0, 2)])
def test_eight_bytes_a_lane_are_served_in_halves(stride, expected):
    assert wavefronts(stride, "ld.shared.v2.u32 {%v0, %v1}, [%a];") == (1, expected, 2)
    assert wavefronts(stride, "ld.shared.u64 %w0, [%a];") == (1, expected, 2)


@pytest.mark.parametrize(("stride", "expected"), [(16, 4), (32, 8), (48, 4), (128, 32), (144, 4), (0, 4)])
def test_sixteen_bytes_a_lane_are_served_in_quarters(stride, expected):
    assert wavefronts(stride, "ld.shared.v4.u32 {%v0, %v1, %v2, %v3}, [%a];") == (1, expected, 4)


def test_lanes_that_take_no_part_cost_nothing():
    guarded = "setp.lt.u32 %p, %t, 3;\n @%p st.shared.u32 [%a], %v0;"
    body = BODY.replace("STRIDE", "128").replace("STORE", guarded)
    use = run_ptx(body, 1, 64, banks=True, hazards=False).banks["st_shared"]
    assert (use.requests, use.wavefronts) == (1, 3)  # the second warp does not execute it


def test_each_warp_and_block_counts(rng):
    pad = int(rng.integers(0, 2))
    shape = (32, 32 + pad)

    def columns(x, out):
        tile = cuda.shared.array(shape, float32)
        thread = uint32(cuda.threadIdx.x)
        row, column = uint32(thread // uint32(32)), uint32(thread % uint32(32))
        tile[row, column] = x[row, column]
        cuda.syncthreads()
        out[row, column] = tile[column, row]

    x, out = rng.random((32, 32), np.float32), np.zeros((32, 32), np.float32)
    matrix = float32[:, ::1]
    report = run(columns, (matrix, matrix), 3, 1024, x, out, banks=True, hazards=False)
    np.testing.assert_array_equal(out, x.T)
    stores, loads = report.banks["st_shared"], report.banks["ld_shared"]
    assert (stores.requests, stores.wavefronts) == (96, 96)
    assert (loads.requests, loads.wavefronts) == (96, 96 if pad else 96 * 32)


def test_counted_only_if_asked():
    report = run_ptx(BODY.replace("STRIDE", "4").replace("STORE", "st.shared.u32 [%a], %v0;"), 1, 32, hazards=False)
    assert report.banks == {} == report.banks_by_place

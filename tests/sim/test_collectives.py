"""Warp-wide instructions against plain references, also in part of a warp and in several blocks at once."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, int32, uint32
from simulate import run, run_ptx

PROLOGUE = """
    .reg .b32 %r<16>; .reg .b64 %rd<6>; .reg .pred %p<6>;
    ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
    mad.lo.u32 %r3, %r1, %r2, %r0; mul.wide.u32 %rd2, %r3, 4; add.u64 %rd3, %rd0, %rd2;
    ld.global.u32 %r4, [%rd3];
    mul.wide.u32 %rd2, %r3, 8; add.u64 %rd1, %rd1, %rd2;
"""
EPILOGUE = "st.global.v2.u32 [%rd1], {%r5, %r6}; ret;"


def shuffle(mode: str, values: list[int], b: list[int], c: int) -> tuple[list[int], list[int]]:
    """shfl.sync as the manual's pseudocode says, lane after lane."""
    out, valid = [], []
    for lane in range(32):
        segment, clamp = c >> 8 & 31, c & 31
        highest = (lane & segment) | (clamp & ~segment)
        lowest = lane & segment
        other = b[lane] & 31
        if mode == "up":
            source = lane - other
            good = source >= highest
        elif mode == "down":
            source = lane + other
            good = source <= highest
        elif mode == "bfly":
            source = lane ^ other
            good = source <= highest
        else:
            source = lowest | (other & ~segment)
            good = source <= highest
        out.append(values[source if good else lane])
        valid.append(int(good))
    return out, valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles(rng, mode, width):
    segment = 32 - width
    c = segment << 8 | (0 if mode == "up" else 31)
    body = (
        PROLOGUE
        + f"""
        and.b32 %r7, %r4, 15;
        shfl.sync.{mode}.b32 %r5|%p0, %r4, %r7, {c}, 0xffffffff;
        selp.u32 %r6, 1, 0, %p0;
    """
        + EPILOGUE
    )
    a = rng.integers(0, 1 << 32, (2, 64)).astype(np.uint32)
    out = np.zeros((2, 64, 2), np.uint32)
    run_ptx(body, 2, 64, a, out)
    for values, got in zip(a.reshape(4, 32), out.reshape(4, 32, 2), strict=True):
        expected, valid = shuffle(mode, values.tolist(), (values & 15).tolist(), c)
        assert got[:, 0].tolist() == expected
        assert got[:, 1].tolist() == valid


def test_the_last_warp_may_be_narrow(rng):
    body = (
        PROLOGUE
        + """
        shfl.sync.idx.b32 %r5, %r4, 3, 31, 0xffffffff;
        vote.sync.ballot.b32 %r6, 1, 0xffffffff;
    """.replace("ballot.b32 %r6, 1", "ballot.b32 %r6, %p1")
        + EPILOGUE
    )
    body = body.replace("shfl.sync", "setp.eq.u32 %p1, %r0, %r0;\n shfl.sync", 1)
    a = rng.integers(0, 100, (3, 40)).astype(np.uint32)
    out = np.zeros((3, 40, 2), np.uint32)
    run_ptx(body, 3, 40, a, out)
    np.testing.assert_array_equal(out[:, :32, 0], a[:, 3:4] * np.ones(32, np.uint32))
    np.testing.assert_array_equal(out[:, 32:, 0], a[:, 35:36] * np.ones(8, np.uint32))
    assert (out[:, :32, 1] == 0xFFFFFFFF).all()
    assert (out[:, 32:, 1] == 0xFF).all()


def test_reductions_over_a_warp(rng):
    a = rng.integers(0, 1 << 32, 64).astype(np.uint32)
    members = 0x00FFFF0F
    inside = np.array([members >> lane & 1 for lane in range(32)], bool)
    signed = a.view(np.int32)
    cases = {
        "add.u32": (np.add, a),
        "min.s32": (np.minimum, signed),
        "max.s32": (np.maximum, signed),
        "min.u32": (np.minimum, a),
        "max.u32": (np.maximum, a),
        "and.b32": (np.bitwise_and, a),
        "or.b32": (np.bitwise_or, a),
        "xor.b32": (np.bitwise_xor, a),
    }
    for name, (function, values) in cases.items():
        body = (
            PROLOGUE
            + f"""
            mov.u32 %r8, %laneid; mov.u32 %r9, {members}; mov.u32 %r6, 0; mov.u32 %r5, 0;
            shr.u32 %r10, %r9, %r8; and.b32 %r10, %r10, 1;
            setp.eq.u32 %p0, %r10, 0;
            @%p0 bra DONE;
            redux.sync.{name} %r5, %r4, %r9;
            elect.sync %r6|%p1, %r9;
            selp.u32 %r6, 1, 0, %p1;
            DONE:
        """
            + EPILOGUE
        )
        out = np.zeros((64, 2), np.uint32)
        run_ptx(body, 1, 64, a, out)
        for warp in range(2):
            expected = function.reduce(values[32 * warp :][:32][inside], dtype=values.dtype)
            got = out[32 * warp :][:32]
            assert (got[inside, 0] == np.asarray(expected).view(np.uint32)).all(), name
            assert got[:, 1].tolist() == [1] + 31 * [0]


def test_votes_in_part_of_a_warp(rng):
    body = (
        PROLOGUE
        + """
        mov.u32 %r5, 0; mov.u32 %r6, 0;
        and.b32 %r7, %r0, 3; setp.eq.u32 %p0, %r7, 1; setp.ne.u32 %p1, %r4, 0;
        @!%p0 bra DONE;
        vote.sync.ballot.b32 %r5, %p1, 0x22222222;
        vote.sync.all.pred %p2, %p1, 0x22222222;
        vote.sync.uni.pred %p3, %p1, 0x22222222;
        selp.u32 %r6, 1, 0, %p2; selp.u32 %r7, 2, 0, %p3; add.u32 %r6, %r6, %r7;
        DONE:
    """
        + EPILOGUE
    )
    a = rng.integers(0, 2, (4, 32)).astype(np.uint32)
    a[1, 1::4], a[2, 1::4] = 1, 0
    out = np.zeros((4, 32, 2), np.uint32)
    run_ptx(body, 2, 64, a, out)
    for warp in range(4):
        votes = a[warp, 1::4]
        ballot = sum(int(v) << 4 * i + 1 for i, v in enumerate(votes))
        all_, uniform = votes.all(), votes.all() or not votes.any()
        assert (out[warp, 1::4, 0] == ballot).all()
        assert (out[warp, 1::4, 1] == all_ + 2 * uniform).all()


def test_match_all(rng):
    body = (
        PROLOGUE
        + """
        match.all.sync.b32 %r5|%p0, %r4, 0xffffffff;
        selp.u32 %r6, 1, 0, %p0;
    """
        + EPILOGUE
    )
    a = np.array([[7] * 32, [7] * 31 + [8]], np.uint32)
    out = np.zeros((2, 32, 2), np.uint32)
    run_ptx(body, 1, 64, a, out)
    assert (out[0] == [0xFFFFFFFF, 1]).all()
    assert (out[1] == 0).all()


def test_lanes_meet_at_a_collective_after_diverging():
    # Lanes arrive from different paths and after different numbers of rounds.
    def late(a, out):
        i = cuda.grid(1)
        value = 0
        if cuda.laneid % 3 == 0:
            for k in range(cuda.laneid):
                value += a[k]
        elif cuda.laneid % 3 == 1:
            value = -i
        total = value
        for offset in (1, 2, 4, 8, 16):
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, offset)
        out[i] = total

    a = np.arange(1, 33, dtype=np.int32)
    out = np.zeros(128, np.int32)
    run(late, (int32[:], int32[:]), 2, 64, a, out)
    i = np.arange(128)
    lane = i % 32
    value = np.select([lane % 3 == 0, lane % 3 == 1], [lane * (lane + 1) // 2, -i], 0)
    np.testing.assert_array_equal(out, np.repeat(value.reshape(4, 32).sum(1), 32))


def test_lanes_that_have_exited_are_not_waited_for():
    def leave(out):
        if cuda.threadIdx.x % 4 == 0:
            return
        out[cuda.threadIdx.x] = cuda.ballot_sync(0xFFFFFFFF, True)

    out = np.zeros(32, np.uint32)
    run(leave, (uint32[:],), 1, 32, out)
    assert (out.reshape(8, 4) == [0, *3 * [0xEEEEEEEE]]).all()


def test_special_registers():
    body = """
        .reg .b32 %r<16>; .reg .b64 %rd<6>;
        ld.param.u64 %rd0, [p0];
        mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %r0;
        mov.u32 %r4, %ctaid.z; mad.lo.u32 %r4, %r4, 48, %r3;
        mul.wide.u32 %rd1, %r4, 32; add.u64 %rd0, %rd0, %rd1;
        mov.u32 %r5, %laneid; mov.u32 %r6, %warpid; mov.u32 %r7, %nwarpid; mov.u32 %r8, %lanemask_lt;
        st.global.v4.u32 [%rd0], {%r5, %r6, %r7, %r8};
        mov.u32 %r5, %lanemask_ge; mov.u32 %r6, %nctaid.z; activemask.b32 %r7; mov.u32 %r8, %lanemask_eq;
        st.global.v4.u32 [%rd0+16], {%r5, %r6, %r7, %r8};
        ret;
    """
    out = np.zeros((2, 48, 8), np.uint32)
    run_ptx(body, (1, 1, 2), (12, 4), out)
    thread = np.arange(48)
    lane = thread % 32
    below = (1 << lane) - 1
    active = np.where(thread < 32, 0xFFFFFFFF, 0xFFFF)
    rows = [lane, thread // 32, 2 + 0 * lane, below, 0xFFFFFFFF ^ below, 2 + 0 * lane, active, 1 << lane]
    np.testing.assert_array_equal(out, np.broadcast_to(np.stack(rows, 1), (2, 48, 8)))


def test_clocks_advance():
    body = """
        .reg .b32 %r<4>; .reg .b64 %rd<6>; .reg .pred %p;
        ld.param.u64 %rd0, [p0];
        mov.u64 %rd1, %globaltimer;
        mov.u64 %rd2, %clock64;
        nanosleep.u32 5000;
        mov.u64 %rd3, %globaltimer;
        mov.u64 %rd4, %clock64;
        sub.u64 %rd3, %rd3, %rd1; sub.u64 %rd4, %rd4, %rd2;
        st.global.v2.u64 [%rd0], {%rd3, %rd4};
        ret;
    """
    out = np.zeros(2, np.uint64)
    run_ptx(body, 1, 1, out)
    assert (out >= 5000).all()

"""Atomics in one instruction by many lanes, against a loop in the lanes' order."""

from __future__ import annotations

import numpy as np
import pytest
from simulate import run_ptx

KINDS = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
}
WRAP = {
    "add": lambda a, b: a + b,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
}


def kernel(space: str, operation: str, kind: str) -> str:
    """Lane i: old[i] = atom(target[place[i]], value[i])."""
    size = KINDS[kind]().itemsize
    register = f"b{8 * size}"
    copy_in = f"ld.global.{register} %v2, [%rd5]; st.shared.{register} [%r5], %v2; bar.sync 0;"
    copy_out = f"bar.sync 0; ld.shared.{register} %v2, [%r5]; st.global.{register} [%rd5], %v2;"
    shared = space == "shared"
    return f"""
        .shared .align 8 .b8 mine[512];
        .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .{register} %v<4>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; ld.param.u64 %rd2, [p2]; ld.param.u64 %rd3, [p3];
        mov.u32 %r0, %tid.x;
        mul.wide.u32 %rd4, %r0, 4; add.u64 %rd1, %rd1, %rd4; ld.global.u32 %r1, [%rd1];
        mul.wide.u32 %rd4, %r0, {size}; add.u64 %rd2, %rd2, %rd4; add.u64 %rd3, %rd3, %rd4; add.u64 %rd5, %rd0, %rd4;
        ld.global.{register} %v0, [%rd2];
        mov.u32 %r4, mine; mad.lo.u32 %r5, %r0, {size}, %r4; mad.lo.u32 %r6, %r1, {size}, %r4;
        {copy_in if shared else ""}
        mul.wide.u32 %rd4, %r1, {size}; add.u64 %rd6, %rd0, %rd4;
        atom.{space}.{operation}.{kind} %v1, [{"%r6" if shared else "%rd6"}], %v0;
        st.global.{register} [%rd3], %v1;
        {copy_out if shared else ""}
        ret;
    """


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        *[
            (op, kind)
            for op in ("add", "min", "max")
            for kind in ("u32", "s32", "u64", "s64")
            if (op, kind) != ("add", "s64")
        ],
        *[(op, kind) for op in ("and", "or", "xor", "exch") for kind in ("b32", "b64")],
        *[("inc", "u32"), ("dec", "u32"), ("add", "f32"), ("add", "f64")],
    ],
)
@pytest.mark.parametrize("places", [1, 7, 64])
def test_old_values_and_results(rng, space, operation, kind, places):
    dtype = KINDS[kind]
    n = 64
    if dtype(0).dtype.kind == "f":
        target, value = rng.standard_normal((2, n)).astype(dtype)
    else:
        info = np.iinfo(dtype)
        high = 20 if operation in ("inc", "dec") else int(info.max)
        low = 0 if operation in ("inc", "dec") else int(info.min)
        target, value = rng.integers(low, high, (2, n), dtype=dtype, endpoint=True)
    place = rng.permutation(n).astype(np.uint32) if places == n else rng.integers(0, places, n).astype(np.uint32)
    expected, before = target.copy(), np.zeros(n, dtype)
    with np.errstate(over="ignore"):
        for lane in range(n):
            old = before[lane] = expected[place[lane]]
            expected[place[lane]] = WRAP[operation](old, value[lane])
    old = np.zeros(n, dtype)
    run_ptx(kernel(space, operation, kind), 1, n, target, place, value, old)
    np.testing.assert_array_equal(old, before)
    np.testing.assert_array_equal(target, expected)


def test_compare_and_swap_in_order(rng):
    body = """
        .reg .b32 %r<9>; .reg .b64 %rd<9>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
        mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 3; shr.u32 %r2, %r0, 2; add.u32 %r3, %r2, 1;
        mul.wide.u32 %rd2, %r1, 4; add.u64 %rd0, %rd0, %rd2;
        atom.global.cas.b32 %r4, [%rd0], %r2, %r3;      // lane after lane counts its word up
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd1, %rd1, %rd2; st.global.u32 [%rd1], %r4;
        ret;
    """
    target = np.array([0, 5, 0, 100], np.uint32)
    old = np.zeros(64, np.uint32)
    run_ptx(body, 1, 64, target, old)
    assert target.tolist() == [16, 16, 16, 100]
    steps = old.reshape(16, 4)
    assert steps[:, 0].tolist() == list(range(16))
    assert steps[:, 1].tolist() == [5] * 6 + list(range(6, 16))
    assert (steps[:, 3] == 100).all()


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_half_precision(rng, kind):
    import ml_dtypes

    dtype = np.float16 if kind == "f16x2" else ml_dtypes.bfloat16
    body = f"""
        .reg .b32 %r<9>; .reg .b64 %rd<9>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1];
        mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 1;
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd1, %rd1, %rd2; ld.global.u32 %r2, [%rd1];
        mul.wide.u32 %rd2, %r1, 4; add.u64 %rd0, %rd0, %rd2;
        red.global.add.noftz.{kind} [%rd0], %r2;
        ret;
    """
    target = rng.integers(-4, 4, (2, 2)).astype(dtype)
    value = rng.integers(-3, 4, (16, 2, 2)).astype(dtype)
    expected = target.astype(np.float32) + value.astype(np.float32).sum(0)
    run_ptx(body, 1, 32, target, value)
    np.testing.assert_array_equal(target.astype(np.float32), expected)

"""Lane-wise instructions against Python integers and exact fractions."""

from __future__ import annotations

import itertools
import math
import os
import random
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from numba_tma.sim.alu import compile_alu
from numba_tma.sim.errors import UnknownInstruction
from numba_tma.sim.parse import parse

SEED = int(os.environ.get("NUMBA_TMA_SEED") or random.SystemRandom().randrange(1 << 32))
EDGES = {
    16: [0, 1, 2, 3, 7, 255, 256, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF],
    32: [0, 1, 2, 3, 31, 32, 33, 0xFFFF, 0x10000, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF],
    64: [0, 1, 2, 63, 64, 0xFFFFFFFF, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 1],
}
FLOAT_EDGES = {
    "f32": [
        0.0,
        1.0,
        1.5,
        1 + 2**-23,
        1 - 2**-24,
        2**-126,
        2**-149,
        3 * 2**-149,
        2**-127,
        3.4028234663852886e38,
    ]
    + [0.1, 1 / 3, 7.0, 2.0**24, 2.0**24 + 2, 2.0**-75, 2.0**64, 1e-30, 123456.789],
    "f64": [
        0.0,
        1.0,
        1.5,
        1 + 2**-52,
        1 - 2**-53,
        2**-1022,
        2**-1074,
        1.7976931348623157e308,
        0.1,
        1 / 3,
        2.0**53,
    ],
    "f16": [0.0, 1.0, 1.5, 1 + 2**-10, 2**-14, 2**-24, 3 * 2**-24, 65504.0, 0.1, 2048.0, 1 / 3],
    "bf16": [0.0, 1.0, 1.5, 1 + 2**-7, 2**-126, 2**-133, 3.3895313892515355e38, 0.1, 256.0, 1 / 3],
}
# Precision in bits, smallest and largest exponent.
FORMATS = {"f32": (24, -126, 127), "f64": (53, -1022, 1023), "f16": (11, -14, 15), "bf16": (8, -126, 127)}
FLOAT_DTYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(autouse=True)
def quiet():
    print(f"NUMBA_TMA_SEED={SEED}")
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def decode(text: str, **registers: str):
    """The Alu of an instruction whose registers are declared by keyword, e.g. a="b32"."""
    declared = " ".join(f".reg .{kind} {name};" for name, kind in registers.items())
    module = parse(f".version 8.6\n.target sm_90a\n.address_size 64\n.entry k() {{ {declared}\n{text}\n}}")
    return compile_alu(module.entries["k"].body[0], module.entries["k"])


def run(text: str, registers: str, **arrays: np.ndarray):
    """Execute an instruction; `registers` declares them as "d:b32 a:b32", arrays are given by name."""
    alu = decode(text, **dict(item.split(":") for item in registers.split()))
    given = []
    for operand, dtype in alu.sources:
        array = np.asarray(arrays[operand.name])
        given.append(array.view(dtype) if array.dtype != dtype else array)
    results = alu.apply(*given)
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == len(alu.destinations)
    for result, (_, dtype) in zip(results, alu.destinations, strict=True):
        assert result.dtype == dtype
    return results if len(results) > 1 else results[0]


def signed(value: int, width: int) -> int:
    value &= (1 << width) - 1
    return value - (1 << width) if value >> width - 1 else value


def integers(width: int, count: int, arity: int, seed: int = 0) -> list[np.ndarray]:
    """Every combination of edges (two operands at most), then random values of random lengths in bits."""
    rng = random.Random(SEED + seed)
    edges = EDGES[width]
    rows = [[x] * arity for x in edges]
    rows += [[x, y] + [rng.choice(edges) for _ in range(arity - 2)] for x in edges for y in edges if arity > 1]
    rows += [[rng.getrandbits(rng.randint(1, width)) for _ in range(arity)] for _ in range(count)]
    return [np.array(column, f"u{width // 8}") for column in zip(*rows, strict=True)]


def expect(result: np.ndarray, expected: list[int], width: int, what: str = "") -> None:
    got = [int(x) & ((1 << width) - 1) for x in result]
    wanted = [x & ((1 << width) - 1) for x in expected]
    wrong = [i for i, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]]
    assert not wrong, (
        f"{what}: lane {wrong[0]} gives {got[wrong[0]]:#x}, not {wanted[wrong[0]]:#x} ({len(wrong)} wrong)"
    )


def binary(text: str, width: int, reference, out: int | None = None, seed: int = 0) -> None:
    a, b = integers(width, 300, 2, seed)
    out = out or width
    result = run(text, f"d:b{out} a:b{width} b:b{width}", a=a, b=b)
    expect(result, [reference(int(x), int(y)) for x, y in zip(a, b, strict=True)], out, text)


# ---- integers


def truncated(x: int, y: int) -> int:
    quotient = abs(x) // abs(y)
    return -quotient if (x < 0) != (y < 0) else quotient


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integer_arithmetic(kind):
    width = int(kind[1:])

    def value(x):
        return signed(x, width) if kind[0] == "s" else x

    binary(f"add.{kind} d, a, b;", width, lambda x, y: x + y)
    binary(f"sub.{kind} d, a, b;", width, lambda x, y: x - y)
    binary(f"mul.lo.{kind} d, a, b;", width, lambda x, y: x * y)
    binary(f"mul.hi.{kind} d, a, b;", width, lambda x, y: value(x) * value(y) >> width)
    binary(f"min.{kind} d, a, b;", width, lambda x, y: min(value(x), value(y)))
    binary(f"max.{kind} d, a, b;", width, lambda x, y: max(value(x), value(y)))
    binary(f"div.{kind} d, a, b;", width, lambda x, y: truncated(value(x), value(y)) if y else -1)
    binary(
        f"rem.{kind} d, a, b;",
        width,
        lambda x, y: value(x) - truncated(value(x), value(y)) * value(y) if y else -1,
    )
    if width < 64:
        binary(f"mul.wide.{kind} d, a, b;", width, lambda x, y: value(x) * value(y), out=2 * width)
    if kind[0] == "s":
        (a,) = integers(width, 100, 1)
        for name, reference in (("abs", abs), ("neg", lambda x: -x)):
            result = run(f"{name}.{kind} d, a;", f"d:b{width} a:b{width}", a=a)
            expect(result, [reference(value(int(x))) for x in a], width, name)


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_multiply_add(kind):
    width = int(kind[1:])
    a, b, c = integers(width, 300, 3)

    def values(*arrays):
        rows = zip(*arrays, strict=True)
        if kind[0] == "s":
            return [[signed(int(x), width) for x in row] for row in rows]
        return [[int(x) for x in row] for row in rows]

    registers = f"d:b{width} a:b{width} b:b{width} c:b{width}"
    rows = values(a, b, c)
    expect(run(f"mad.lo.{kind} d, a, b, c;", registers, a=a, b=b, c=c), [x * y + z for x, y, z in rows], width)
    expected = [(x * y >> width) + z for x, y, z in rows]
    expect(run(f"mad.hi.{kind} d, a, b, c;", registers, a=a, b=b, c=c), expected, width)
    expected = [abs(x - y) + z for x, y, z in rows]
    expect(run(f"sad.{kind} d, a, b, c;", registers, a=a, b=b, c=c), expected, width)
    if width < 64:
        wide = np.array([random.Random(i).getrandbits(2 * width) for i in range(len(a))], f"u{width // 4}")
        result = run(
            f"mad.wide.{kind} d, a, b, c;",
            f"d:b{2 * width} a:b{width} b:b{width} c:b{2 * width}",
            a=a,
            b=b,
            c=wide,
        )
        expect(result, [x * y + int(w) for (x, y, _), w in zip(rows, wide, strict=True)], 2 * width)


@pytest.mark.parametrize("kind", ["s32", "u32"])
@pytest.mark.parametrize("part", ["lo", "hi"])
def test_24_bit_multiplication(kind, part):
    a, b, c = integers(32, 300, 3)
    width = 24

    def value(x):
        return signed(int(x), width) if kind == "s32" else int(x) & 0xFFFFFF

    shift = 16 if part == "hi" else 0
    products = [value(x) * value(y) >> shift for x, y in zip(a, b, strict=True)]
    expect(run(f"mul24.{part}.{kind} d, a, b;", "d:b32 a:b32 b:b32", a=a, b=b), products, 32)
    result = run(f"mad24.{part}.{kind} d, a, b, c;", "d:b32 a:b32 b:b32 c:b32", a=a, b=b, c=c)
    expect(result, [p + int(z) for p, z in zip(products, c, strict=True)], 32)


def test_saturation():
    def clamp(x):
        return max(-(1 << 31), min((1 << 31) - 1, x))

    binary("add.sat.s32 d, a, b;", 32, lambda x, y: clamp(signed(x, 32) + signed(y, 32)))
    binary("sub.sat.s32 d, a, b;", 32, lambda x, y: clamp(signed(x, 32) - signed(y, 32)))
    a, b, c = integers(32, 300, 3)
    result = run("mad.hi.sat.s32 d, a, b, c;", "d:b32 a:b32 b:b32 c:b32", a=a, b=b, c=c)
    rows = [[signed(int(x), 32) for x in row] for row in zip(a, b, c, strict=True)]
    expect(result, [clamp((x * y >> 32) + z) for x, y, z in rows], 32)


@pytest.mark.parametrize("width", [32, 64])
def test_carry_chains(width):
    """Sums, differences and products of twice the width, word by word."""
    words = integers(width, 300, 4)
    a0, a1, b0, b1 = words
    registers = f"d:b{width} a:b{width} b:b{width} c:b{width}"
    mask = (1 << width) - 1

    def whole(low, high):
        return [int(x) | int(y) << width for x, y in zip(low, high, strict=True)]

    kind = f"u{width}"
    for first, second, sign in (("add.cc", "addc.cc", 1), ("sub.cc", "subc.cc", -1)):
        low, carry = run(f"{first}.{kind} d, a, b;", registers, a=a0, b=b0)
        high, out = run(f"{second}.{kind} d, a, b;", registers, a=a1, b=b1, **{"%cc": carry})
        plain = run(f"{second[:4]}.{kind} d, a, b;", registers, a=a1, b=b1, **{"%cc": carry})
        expected = [x + sign * y for x, y in zip(whole(a0, a1), whole(b0, b1), strict=True)]
        expect(low, expected, width)
        expect(high, [x >> width for x in expected], width)
        expect(plain, [x >> width for x in expected], width)
        assert [bool(x) for x in out] == [not 0 <= x < 1 << 2 * width for x in expected]
    low, carry = run(f"mad.lo.cc.{kind} d, a, b, c;", registers, a=a0, b=b0, c=a1)
    high, out = run(f"madc.hi.cc.{kind} d, a, b, c;", registers, a=a0, b=b0, c=b1, **{"%cc": carry})
    expected = [int(x) * int(y) + (int(z) | int(w) << width) for x, y, z, w in zip(a0, b0, a1, b1, strict=True)]
    expect(low, expected, width)
    expect(high, [x >> width for x in expected], width)
    assert [bool(x) for x in out] == [x >> 2 * width != 0 for x in expected]
    assert mask


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts_clamp_their_amount(width):
    amounts = [0, 1, 5, width - 1, width, width + 1, 63, 64, 65, 255, 256, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    values = [int(x) for x in integers(width, 20, 1)[0]]
    a = np.array([x for x in values for _ in amounts], f"u{width // 8}")
    n = np.array(amounts * len(values), np.uint32)
    pairs = [(int(x), min(int(y), width)) for x, y in zip(a, n, strict=True)]
    references = {
        f"shl.b{width}": [x << y for x, y in pairs],
        f"shr.u{width}": [x >> y for x, y in pairs],
        f"shr.s{width}": [signed(x, width) >> y for x, y in pairs],
    }
    for name, expected in references.items():
        expect(run(f"{name} d, a, n;", f"d:b{width} a:b{width} n:b32", a=a, n=n), expected, width, name)
        for amount in (0, 3, width, 300):
            part = [i for i, y in enumerate(n) if min(int(y), width) == min(amount, width)]
            if part:
                result = run(f"{name} d, a, {amount};", f"d:b{width} a:b{width}", a=a)
                expect(result[part], [expected[i] for i in part], width, f"{name} by {amount}")


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shift(mode):
    a, b, n = integers(32, 300, 3)
    n = np.where(np.arange(len(n)) % 2 == 0, n, n % 40).astype(np.uint32)
    rows = [
        (int(y) << 32 | int(x), int(z) & 31 if mode == "wrap" else min(int(z), 32))
        for x, y, z in zip(a, b, n, strict=True)
    ]
    registers = "d:b32 a:b32 b:b32 n:b32"
    expect(run(f"shf.l.{mode}.b32 d, a, b, n;", registers, a=a, b=b, n=n), [x << s >> 32 for x, s in rows], 32)
    expect(run(f"shf.r.{mode}.b32 d, a, b, n;", registers, a=a, b=b, n=n), [x >> s for x, s in rows], 32)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_bit_fields(kind):
    width = int(kind[1:])
    (a, c) = integers(width, 400, 2)
    rng = random.Random(SEED)
    position = np.array(
        [rng.choice([0, 1, 5, 31, 32, 63, 64, 255, 256, 300, rng.getrandbits(32)]) for _ in a], np.uint32
    )
    length = np.array([rng.choice([0, 1, 7, 31, 32, 33, 63, 64, 255, 257, rng.getrandbits(32)]) for _ in a], np.uint32)

    # The manual allows 0 … 255; beyond, the 32-bit instructions drop bits and the 64-bit ones do not.
    limit = 255 if width == 32 else 0xFFFFFFFF

    def extract(x, p, n):
        p, n = p & limit, n & limit
        fill = x >> min(p + n - 1, width - 1) & 1 if kind[0] == "s" and n else 0
        bits = [x >> p + i & 1 if i < n and p + i < width else fill for i in range(width)]
        return sum(bit << i for i, bit in enumerate(bits))

    def insert(x, y, p, n):
        p, n = p & limit, n & limit
        for i in range(min(n, width)):
            if p + i < width:
                y = y & ~(1 << p + i) | (x >> i & 1) << p + i
        return y

    rows = [[int(v) for v in row] for row in zip(a, c, position, length, strict=True)]
    registers = f"d:b{width} a:b{width} c:b{width} p:b32 n:b32"
    result = run(f"bfe.{kind} d, a, p, n;", registers, a=a, p=position, n=length)
    expect(result, [extract(x, p, n) for x, _, p, n in rows], width)
    result = run(f"bfi.b{width} d, a, c, p, n;", registers, a=a, c=c, p=position, n=length)
    expect(result, [insert(*row) for row in rows], width)
    magnitudes = [x if kind[0] == "u" or signed(x, width) >= 0 else ~signed(x, width) for x, *_ in rows]
    registers = f"d:b32 a:b{width}"
    result = run(f"bfind.{kind} d, a;", registers, a=a)
    expect(result, [x.bit_length() - 1 for x in magnitudes], 32)
    result = run(f"bfind.shiftamt.{kind} d, a;", registers, a=a)
    expect(result, [width - x.bit_length() if x else -1 for x in magnitudes], 32)


@pytest.mark.parametrize("width", [32, 64])
def test_counting_bits(width):
    (a,) = integers(width, 300, 1)
    values = [int(x) for x in a]
    expect(run(f"popc.b{width} d, a;", f"d:b32 a:b{width}", a=a), [bin(x).count("1") for x in values], 32)
    expect(run(f"clz.b{width} d, a;", f"d:b32 a:b{width}", a=a), [width - x.bit_length() for x in values], 32)
    expected = [int(f"{x:0{width}b}"[::-1], 2) for x in values]
    expect(run(f"brev.b{width} d, a;", f"d:b{width} a:b{width}", a=a), expected, width)
    expect(run(f"not.b{width} d, a;", f"d:b{width} a:b{width}", a=a), [~x for x in values], width)
    expect(run(f"cnot.b{width} d, a;", f"d:b{width} a:b{width}", a=a), [int(x == 0) for x in values], width)


def test_permute_bytes():
    a, b, c = integers(32, 300, 3)
    rows = [[int(v) for v in row] for row in zip(a, b, c, strict=True)]

    def pick(x, y, selectors):
        data = (x | y << 32).to_bytes(8, "little")
        return sum((data[s & 7] if s < 8 else 255 * (data[s & 7] >> 7)) << 8 * i for i, s in enumerate(selectors))

    modes = {
        "": lambda c: [c >> 4 * i & 15 for i in range(4)],
        ".f4e": lambda c: [(c & 3) + i for i in range(4)],
        ".b4e": lambda c: [(c & 3) - i & 7 for i in range(4)],
        ".rc8": lambda c: [c & 3] * 4,
        ".ecl": lambda c: [max(c & 3, i) for i in range(4)],
        ".ecr": lambda c: [min(c & 3, i) for i in range(4)],
        ".rc16": lambda c: [2 * (c & 1), 2 * (c & 1) + 1] * 2,
    }
    for mode, selectors in modes.items():
        result = run(f"prmt.b32{mode} d, a, b, c;", "d:b32 a:b32 b:b32 c:b32", a=a, b=b, c=c)
        expect(result, [pick(x, y, selectors(z)) for x, y, z in rows], 32, mode)


def test_look_up_logic():
    a, b, c = integers(32, 50, 3)
    rows = [[int(v) for v in row] for row in zip(a, b, c, strict=True)]
    for table in (0, 0xFF, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x33, *random.Random(SEED).sample(range(256), 12)):
        expected = [
            sum((table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1) & 1) << i for i in range(32))
            for x, y, z in rows
        ]
        expect(run(f"lop3.b32 d, a, b, c, {table:#x};", "d:b32 a:b32 b:b32 c:b32", a=a, b=b, c=c), expected, 32)
    q = np.arange(len(a)) % 2 == 0
    value, p = run("lop3.or.b32 d|p, a, b, c, 0x80, q;", "d:b32 p:pred q:pred a:b32 b:b32 c:b32", a=a, b=b, c=c, q=q)
    expect(value, [x & y & z for x, y, z in rows], 32)
    assert [bool(x) for x in p] == [x & y & z != 0 or bool(w) for (x, y, z), w in zip(rows, q, strict=True)]


def test_masks_and_extension():
    a, b = integers(32, 400, 2)
    b = np.where(np.arange(len(b)) % 3 > 0, b % 40, b).astype(np.uint32)
    rows = [[int(v) for v in row] for row in zip(a, b, strict=True)]

    def mask(position, length, clamps):
        position, length = (min(x, 32) if clamps else x & 31 for x in (position, length))
        return ((1 << length) - 1) << position

    def extend(x, n, clamps, sign):
        n = min(n, 32) if clamps else n & 31
        low = x & ((1 << n) - 1)
        return low - (1 << n) if sign and n and low >> n - 1 else low

    for mode, clamps in (("clamp", True), ("wrap", False)):
        registers = "d:b32 a:b32 b:b32"
        result = run(f"bmsk.{mode}.b32 d, b, a;", registers, a=a, b=b)
        expect(result, [mask(y, x, clamps) for x, y in rows], 32)
        for kind in ("s32", "u32"):
            result = run(f"szext.{mode}.{kind} d, a, b;", registers, a=a, b=b)
            expect(result, [extend(x, y, clamps, kind == "s32") for x, y in rows], 32)


def test_find_nth_set_bit():
    (a,) = integers(32, 300, 1)
    rng = random.Random(SEED)
    base = np.array([rng.randrange(32) for _ in a], np.uint32)
    offset = np.array([rng.randint(-9, 9) for _ in a], np.int32)

    def find(mask, start, n):
        if n == 0:
            return start if mask >> start & 1 else -1
        places = range(start, 32) if n > 0 else range(start, -1, -1)
        found = [i for i in places if mask >> i & 1]
        return found[abs(n) - 1] if len(found) >= abs(n) else -1

    expected = [find(int(m), int(s), int(n)) for m, s, n in zip(a, base, offset, strict=True)]
    expect(run("fns.b32 d, a, b, n;", "d:b32 a:b32 b:b32 n:b32", a=a, b=base, n=offset), expected, 32)


@pytest.mark.parametrize("first", ["s32", "u32"])
@pytest.mark.parametrize("second", ["s32", "u32"])
def test_dot_products(first, second):
    a, b, c = integers(32, 300, 3)

    def parts(x, width, kind):
        pieces = [int(x) >> i & ((1 << width) - 1) for i in range(0, 32, width)]
        return [signed(p, width) for p in pieces] if kind == "s32" else pieces

    def dot(width, chosen):
        return [
            sum(p * q for p, q in zip(parts(x, width, first), parts(y, 8, second)[chosen], strict=True)) + int(z)
            for x, y, z in zip(a, b, c, strict=True)
        ]

    registers = "d:b32 a:b32 b:b32 c:b32"
    arrays = {"a": a, "b": b, "c": c}
    expect(run(f"dp4a.{first}.{second} d, a, b, c;", registers, **arrays), dot(8, slice(0, 4)), 32)
    expect(run(f"dp2a.lo.{first}.{second} d, a, b, c;", registers, **arrays), dot(16, slice(0, 2)), 32)
    expect(run(f"dp2a.hi.{first}.{second} d, a, b, c;", registers, **arrays), dot(16, slice(2, 4)), 32)


def test_packed_integers():
    a, b = integers(32, 300, 2)

    def halves(x, sign):
        pieces = [int(x) & 0xFFFF, int(x) >> 16]
        return [signed(p, 16) for p in pieces] if sign else pieces

    def both(function, sign):
        return [
            sum((function(p, q) & 0xFFFF) << 16 * i for i, (p, q) in enumerate(zip(*pair, strict=True)))
            for pair in ((halves(x, sign), halves(y, sign)) for x, y in zip(a, b, strict=True))
        ]

    registers = "d:b32 a:b32 b:b32"
    expect(run("add.u16x2 d, a, b;", registers, a=a, b=b), both(lambda x, y: x + y, False), 32)
    expect(run("min.u16x2 d, a, b;", registers, a=a, b=b), both(min, False), 32)
    expect(run("max.s16x2 d, a, b;", registers, a=a, b=b), both(max, True), 32)
    relu = run("min.relu.s16x2 d, a, b;", registers, a=a, b=b)
    expect(relu, both(lambda x, y: max(min(x, y), 0), True), 32)


def test_video_instructions():
    a, b, c = integers(32, 300, 3)

    def lanes(x, width, kind):
        pieces = [int(x) >> i & ((1 << width) - 1) for i in range(0, 32, width)]
        return [signed(p, width) for p in pieces] if kind == "s32" else pieces

    def expected(function, width, kind, accumulates):
        results = []
        for x, y, z in zip(a, b, c, strict=True):
            values = [function(p, q) for p, q in zip(lanes(x, width, kind), lanes(y, width, kind), strict=True)]
            if accumulates:
                results.append(sum(values) + int(z))
            else:
                results.append(sum((v & ((1 << width) - 1)) << width * i for i, v in enumerate(values)))
        return results

    registers = "d:b32 a:b32 b:b32 c:b32"
    arrays = {"a": a, "b": b, "c": c}
    for lanes_count in (2, 4):
        width = 32 // lanes_count
        for name, function in (
            ("absdiff", lambda x, y: abs(x - y)),
            ("add", lambda x, y: x + y),
            ("sub", lambda x, y: x - y),
            ("min", min),
            ("max", max),
            ("avrg", lambda x, y: x + y + (x + y >= 0) >> 1),
        ):
            for kind in ("s32", "u32"):
                for adds in (False, True):
                    text = f"v{name}{lanes_count}.{kind}.{kind}.{kind}{'.add' * adds} d, a, b, c;"
                    expect(run(text, registers, **arrays), expected(function, width, kind, adds), 32, text)
        result = run(f"vset{lanes_count}.s32.s32.lt d, a, b, c;", registers, **arrays)
        expect(result, expected(lambda x, y: int(x < y), width, "s32", False), 32)


# ---- floating point


def floats(kind: str, count: int, arity: int) -> list[np.ndarray]:
    """Edges in pairs and random bit patterns, a third of them near each other; finite ones only."""
    dtype = FLOAT_DTYPES[kind]
    width = 8 * np.dtype(dtype).itemsize
    rng = np.random.default_rng(SEED)
    edges = np.array([s * x for x in FLOAT_EDGES[kind] for s in (1.0, -1.0)]).astype(dtype)
    first, second = (x.ravel() for x in np.meshgrid(edges, edges))
    columns = []
    for i in range(arity):
        bits = rng.integers(0, 1 << width, count, dtype=np.uint64, endpoint=False) if width < 64 else None
        if bits is None:
            bits = rng.integers(0, 1 << 63, count, dtype=np.uint64) * np.uint64(2) + np.uint64(i)
        random_values = bits.astype(f"u{width // 8}").view(dtype)
        near = (rng.standard_normal(count) * 2.0 ** rng.integers(-4, 4, count)).astype(dtype)
        column = [(first, second)[i] if i < 2 else rng.permutation(first), random_values, near]
        columns.append(np.concatenate(column))
    good = np.all([np.isfinite(c.astype(np.float64)) for c in columns], axis=0)
    return [c[good] for c in columns]


def exact(x) -> Fraction:
    return Fraction(float(x))


def rounded(value: Fraction, kind: str, mode: str) -> float:
    """A rational rounded to a format, from the definition; infinities by the mode."""
    if value == 0:
        return 0.0
    precision, lowest, highest = FORMATS[kind]
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    steps, rest = divmod(size, unit)
    away = {"rz": False, "rm": value < 0, "rp": value > 0, "rna": rest * 2 >= unit}.get(mode)
    if away is None:
        up = rest * 2 > unit or (rest * 2 == unit and steps % 2 == 1)
    else:
        up = away and (rest > 0 or mode == "rna")
    size = (steps + up) * unit
    if size >= Fraction(2) ** (highest + 1):
        largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** highest
        size = largest if away is False else None
    if size is None:
        return -math.inf if value < 0 else math.inf
    return -float(size) if value < 0 else float(size)


def expect_floats(result, expected: list[float], kind: str, what: str, arrays=()) -> None:
    got = result.view(FLOAT_DTYPES[kind]).astype(np.float64)
    wanted = np.array(expected, np.float64)
    same = (got == wanted) & (np.signbit(got) == np.signbit(wanted)) | np.isnan(got) & np.isnan(wanted)
    # The sign of an exact zero is a test of its own.
    same |= (got == 0) & (wanted == 0) & np.array([x == 0 and not np.signbit(x) for x in expected])
    if not same.all():
        i = int(np.argmin(same))
        given = [float(a[i]).hex() for a in arrays]
        pytest.fail(f"{what}{given} gives {got[i].hex()}, not {wanted[i].hex()} ({(~same).sum()} wrong)")


OPERATIONS = {
    "add": (2, lambda x, y: x + y),
    "sub": (2, lambda x, y: x - y),
    "mul": (2, lambda x, y: x * y),
    "fma": (3, lambda x, y, z: x * y + z),
    "div": (2, lambda x, y: x / y if y else None),
}


def _extreme_doubles(arity: int) -> list[np.ndarray]:
    """Operands whose results, or the errors of whose results, underflow, overflow or cancel."""
    rng = random.Random(SEED)

    def number(exponent):
        mantissa = rng.choice([1.0, 2 - 2**-52, rng.uniform(1, 2), 1 + rng.getrandbits(3) * 2.0**-50])
        return rng.choice([1, -1]) * math.ldexp(mantissa, max(-1100, min(1023, exponent)))

    rows = []
    for _ in range(1500):
        first = rng.randint(-1074, 1023)
        target = rng.choice([rng.randint(-1140, -960), rng.randint(1020, 1025), rng.randint(-1074, 1023)])
        x, y = number(first), number(rng.choice([target - first, first - target]))
        if arity < 3:
            rows.append((x, y))
            continue
        try:
            product = x * y
        except OverflowError:
            product = math.inf
        near = -product if math.isfinite(product) else number(1023)
        rows.append((x, y, rng.choice([near, math.nextafter(near, 0.0), number(target + rng.randint(-210, 210))])))
    # Two sums that overflow on the way, and none at the end.
    largest = 1.7976931348623157e308
    rows += [(largest, -1.5 * 2.0**971, largest)[:arity], (-1.5 * 2.0**971, largest, -largest)[:arity]]
    return [np.array(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_rounding(name, kind, mode):
    arity, function = OPERATIONS[name]
    arrays = floats(kind, 800, arity)
    if kind == "f64":
        arrays = [np.concatenate(both) for both in zip(arrays, _extreme_doubles(arity), strict=True)]
    results = [function(*(exact(x) for x in row)) for row in zip(*arrays, strict=True)]
    keep = np.array([x is not None for x in results])
    arrays = [a[keep] for a in arrays]
    expected = [rounded(x, kind, mode) for x in results if x is not None]
    width = 8 * arrays[0].itemsize
    names = "abc"[:arity]
    registers = " ".join(f"{n}:b{width}" for n in "d" + names)
    text = f"{name}.{mode}.{kind} d, {', '.join(names)};"
    result = run(text, registers, **dict(zip(names, arrays, strict=True)))
    expect_floats(result, expected, kind, text, arrays)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_half_precision(name, kind):
    arity, function = OPERATIONS[name]
    arrays = floats(kind, 800, arity)
    expected = [rounded(function(*(exact(x) for x in row)), kind, "rn") for row in zip(*arrays, strict=True)]
    names = "abc"[:arity]
    registers = " ".join(f"{n}:b16" for n in "d" + names)
    rn = ".rn" if name == "fma" else ""
    text = f"{name}{rn}.{kind} d, {', '.join(names)};"
    bits = [a.view(np.uint16) for a in arrays]
    result = run(text, registers, **dict(zip(names, bits, strict=True)))
    expect_floats(result, expected, kind, text, arrays)
    # The packed form does the same to both halves.
    pairs = [b.astype(np.uint32) | b[::-1].astype(np.uint32) << np.uint32(16) for b in bits]
    packed = run(
        text.replace(f".{kind}", f".{kind}x2"),
        registers.replace("b16", "b32"),
        **dict(zip(names, pairs, strict=True)),
    )
    assert np.array_equal((packed & 0xFFFF).astype(np.uint16), result)
    assert np.array_equal((packed >> 16).astype(np.uint16)[::-1], result)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_square_root_and_reciprocal(kind, mode):
    (a,) = floats(kind, 800, 1)
    a = np.abs(a)
    a = a[a > 0]
    if kind == "f64":
        # Subnormal operands, and those whose reciprocals are.
        sizes = [math.ldexp(1 + i / 997, e) for i, e in enumerate([*range(-1074, -1000), *range(1000, 1024)])]
        a = np.concatenate([a, np.array(sizes), np.array([5e-324, 1.7976931348623157e308])])
    width = 8 * a.itemsize
    result = run(f"sqrt.{mode}.{kind} d, a;", f"d:b{width} a:b{width}", a=a).astype(np.float64)
    precision = FORMATS[kind][0]
    for x, root in zip(a, result, strict=True):
        # Exactly one neighbour fits: compare squares of rationals.
        step = Fraction(2) ** (math.frexp(float(root))[1] - precision)
        low, high = exact(root) - step, exact(root) + step
        if mode == "rn":
            assert (exact(root) - step / 2) ** 2 <= exact(x) <= (exact(root) + step / 2) ** 2
        elif mode == "rp":
            assert low**2 < exact(x) <= exact(root) ** 2
        else:
            assert exact(root) ** 2 <= exact(x) < high**2
    expected = [rounded(1 / exact(x), kind, mode) for x in a]
    expect_floats(run(f"rcp.{mode}.{kind} d, a;", f"d:b{width} a:b{width}", a=a), expected, kind, "rcp", [a])


def test_zero_sums_and_signs():
    zero, one = np.float32(0), np.float32(1)
    a = np.array([zero, -zero, zero, one, -one], np.float32)
    b = np.array([zero, -zero, -zero, -one, one], np.float32)
    nearest = run("add.rn.f32 d, a, b;", "d:f32 a:f32 b:f32", a=a, b=b)
    down = run("add.rm.f32 d, a, b;", "d:f32 a:f32 b:f32", a=a, b=b)
    assert list(np.signbit(nearest)) == [False, True, False, False, False] and not nearest.any()
    assert list(np.signbit(down)) == [False, True, True, True, True] and not down.any()
    fused = run("fma.rm.f64 d, a, c, b;", "d:f64 a:f64 b:f64 c:f64", a=a.astype("f8"), b=b.astype("f8"), c=np.ones(5))
    assert list(np.signbit(fused)) == [False, True, True, True, True]


def test_special_values_of_directed_rounding():
    inf, nan, big = np.inf, np.nan, np.finfo(np.float32).max
    a = np.array([inf, -inf, inf, nan, big, -big, 1, 0], np.float32)
    b = np.array([inf, inf, 1, 1, big, -big, inf, 0], np.float32)
    up = run("add.rp.f32 d, a, b;", "d:f32 a:f32 b:f32", a=a, b=b)
    down = run("add.rz.f32 d, a, b;", "d:f32 a:f32 b:f32", a=a, b=b)
    assert np.array_equal(up, np.array([inf, nan, inf, nan, inf, -big, inf, 0], np.float32), equal_nan=True)
    assert np.array_equal(down, np.array([inf, nan, inf, nan, big, -big, inf, 0], np.float32), equal_nan=True)
    quotient = run(
        "div.rz.f32 d, a, b;", "d:f32 a:f32 b:f32", a=np.float32([1, -1, 0, inf]), b=np.float32([0, 0, 0, 2])
    )
    assert np.array_equal(quotient, np.float32([inf, -inf, nan, inf]), equal_nan=True)


# Facts: what an H200 answered, and the operands, as bits.
ON_HARDWARE = [
    ("bfe.s64 d, a, b, c;", "b64 b64 b32 b32", (0x36B44F94420BA0, 0xD1D0BA07, 0x28), 0),
    ("bfe.u64 d, a, b, c;", "b64 b64 b32 b32", (0xA058D932A7EF6384, 0x39, 0x80000000), 0x50),
    (
        "bfi.b64 d, a, b, p, n;",
        "b64 b64 b64 b32 b32",
        (0x43, 0xED3DD1D9923E853A, 0x923E853A, 0x84E21D36),
        0xED3DD1D9923E853A,
    ),
    ("mul.rz.f64 d, a, b;", "b64 b64 b64", (0x409D5A2107579089, 0x1), 0x756),
    ("div.rz.f64 d, a, b;", "b64 b64 b64", (0x613AF1A6C6BAB66B, 0x8000000000000000), 0xFFF0000000000000),
    ("fma.rz.f64 d, a, b, c;", "b64 b64 b64 b64", (0xB0234EC4B25C9FF1, 0x1, 0x7FEFFFFFFFFFFFFF), 0x7FEFFFFFFFFFFFFE),
    ("rcp.rz.f64 d, a;", "b64 b64", (0x0,), 0x7FF0000000000000),
    ("mul.rm.f64 d, a, b;", "b64 b64 b64", (0x8000000000000001, 0x1), 0x8000000000000001),
    ("div.rm.f64 d, a, b;", "b64 b64 b64", (0x405707F9D2A2A3DD, 0x0), 0x7FF0000000000000),
    ("fma.rm.f64 d, a, b, c;", "b64 b64 b64 b64", (0xBFBE8C7A5DE5B844, 0x1, 0xFFCFF2BB4AB2FB96), 0xFFCFF2BB4AB2FB97),
    ("rcp.rm.f64 d, a;", "b64 b64", (0x0,), 0x7FF0000000000000),
    ("mul.rp.f64 d, a, b;", "b64 b64 b64", (0x97AC803353CC8440, 0x8958D60F505E2D04), 0x1),
    ("div.rp.f64 d, a, b;", "b64 b64 b64", (0x1, 0x3F78F4173CE92FDB), 0xA5),
    ("fma.rp.f64 d, a, b, c;", "b64 b64 b64 b64", (0x1, 0x3F72F7B09073DF17, 0x1C3044563DC989A), 0x1C3044563DC989B),
    ("rcp.rp.f64 d, a;", "b64 b64", (0x8000000000000000,), 0xFFF0000000000000),
    ("sqrt.rp.f64 d, a;", "b64 b64", (0x5FCBD0470F5348,), 0x20268E237A8C289B),
    ("cvt.rn.f16.f64 d, a;", "b16 b64", (0x7FF8000000000000,), 0x7E00),
    ("cvt.rna.tf32.f32 d, a;", "b32 b32", (0x7FC00000,), 0x7FC00000),
    ("neg.f16x2 d, a;", "b32 b32", (0x7F807F80,), 0x7FFF7FFF),
    ("neg.bf16x2 d, a;", "b32 b32", (0x67E37FCF,), 0xE7E37FFF),
    ("div.approx.f32 d, a, b;", "b32 b32 b32", (0x765C3ACC, 0x7F7FFFFF), 0),
]


@pytest.mark.parametrize(("text", "kinds", "operands", "answer"), ON_HARDWARE, ids=[case[0] for case in ON_HARDWARE])
def test_as_on_hardware(text, kinds, operands, answer):
    names = text.removesuffix(";").replace(",", "").split()[1:]
    registers = dict(zip(names, kinds.split(), strict=True))
    arrays = {
        name: np.full(3, bits, f"u{int(registers[name][1:]) // 8}")
        for name, bits in zip(names[1:], operands, strict=True)
    }
    result = run(text, " ".join(f"{name}:{kind}" for name, kind in registers.items()), **arrays)
    width = int(registers["d"][1:])
    expect(result.view(f"u{width // 8}"), [answer] * 3, width, text)


def test_special_operands_of_directed_doubles():
    """As to nearest, but for the sign of an exact zero sum."""
    values = [0.0, -0.0, 1.5, -3.0, 5e-324, 1.7976931348623157e308, np.inf, -np.inf, np.nan]
    x, y, z = (np.array(column) for column in zip(*itertools.product(values, repeat=3), strict=True))
    special = [~np.isfinite(v) | (v == 0) for v in (x, y, z)]
    for mode in ("rz", "rm", "rp"):
        for name, arrays, chosen in (
            ("add", (x, y), special[0] | special[1]),
            ("mul", (x, y), special[0] | special[1]),
            ("div", (x, y), special[0] | special[1]),
            ("fma", (x, y, z), special[0] | special[1] | ~np.isfinite(z)),
        ):
            names = "abc"[: len(arrays)]
            text, registers = f"{{}} d, {', '.join(names)};", " ".join(f"{n}:f64" for n in "d" + names)
            given = {n: a[chosen] for n, a in zip(names, arrays, strict=True)}
            result = run(text.format(f"{name}.{mode}.f64"), registers, **given)
            nearest = run(text.format(f"{name}.rn.f64"), registers, **given)
            assert np.array_equal(result, nearest, equal_nan=True), (name, mode)
            signed_as = np.signbit(result) == np.signbit(nearest)
            zero_sum = (nearest == 0) & (name in ("add", "fma")) & (mode == "rm")
            assert np.all(signed_as | zero_sum | np.isnan(nearest)), (name, mode)


def test_approximate_division_by_large_numbers():
    a = np.float32([1e38, -1e38, np.inf, np.nan, 3e38, 1.0])
    b = np.float32([1e38, 1e38, 1e38, 1e38, 2.0**126, -3e38])
    for ftz in ("", ".ftz"):
        result = run(f"div.approx{ftz}.f32 d, a, b;", "d:f32 a:f32 b:f32", a=a, b=b)
        expected = np.float32([0, -0.0, np.nan, np.nan, a[4] / b[4], -0.0])
        assert np.array_equal(result, expected, equal_nan=True)
        assert np.signbit(result)[[0, 1, 5]].tolist() == [False, True, True]
        full = run(f"div.full{ftz}.f32 d, a, b;", "d:f32 a:f32 b:f32", a=a, b=b)
        assert full[0] == 1


def test_flush_of_half_precision():
    a = np.uint16([0x0001, 0x83FF, 0x0400, 0x7FC1, 0xFC00])
    one = np.full(5, 0x3C00, np.uint16)
    assert run("neg.ftz.f16 d, a;", "d:b16 a:b16", a=a).tolist() == [0x8000, 0, 0x8400, 0x7FFF, 0x7C00]
    assert run("abs.f16 d, a;", "d:b16 a:b16", a=a).tolist() == [0x0001, 0x03FF, 0x0400, 0x7FFF, 0x7C00]
    assert run("mul.ftz.f16 d, a, b;", "d:b16 a:b16 b:b16", a=a, b=one)[:3].tolist() == [0, 0x8000, 0x0400]
    halved = run("mul.ftz.f16 d, a, b;", "d:b16 a:b16 b:b16", a=a[2:3], b=np.uint16([0x3800]))
    assert halved.tolist() == [0]


def test_flush_to_zero():
    tiny = np.float32(2.0**-126)
    a = np.array([2.0**-127, -(2.0**-149), tiny, 1.0, np.nan, np.inf, tiny], np.float32)
    b = np.array([1.0, 1.0, -0.5 * tiny, 2.0**-140, 1.0, 1.0, 0.5], np.float32)
    for name, expected in (
        ("add.ftz.f32", [1.0, 1.0, tiny, 1.0, np.nan, np.inf, 0.5]),
        ("mul.ftz.f32", [0.0, -0.0, -0.0, 0.0, np.nan, np.inf, 0.0]),
        ("min.ftz.f32", [0.0, -0.0, -0.0, 0.0, 1.0, 1.0, tiny]),
    ):
        result = run(f"{name} d, a, b;", "d:f32 a:f32 b:f32", a=a, b=b)
        assert np.array_equal(result, np.float32(expected), equal_nan=True), name
        numbers = ~np.isnan(result)
        assert np.array_equal(np.signbit(result)[numbers], np.signbit(np.float32(expected))[numbers]), name
    result = run("abs.ftz.f32 d, a;", "d:f32 a:f32", a=a)
    assert np.array_equal(result, np.float32([0, 0, tiny, 1, np.nan, np.inf, tiny]), equal_nan=True)
    equal = run("setp.eq.ftz.f32 p, a, b;", "p:pred a:f32 b:f32", a=a[:2], b=np.zeros(2, np.float32))
    assert equal.all()


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_minimum_and_maximum(kind):
    dtype = FLOAT_DTYPES[kind]
    values = [0.0, -0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, float(np.array(2.0**-20).astype(dtype))]
    a = np.array([x for x in values for _ in values]).astype(dtype)
    b = np.array(values * len(values)).astype(dtype)
    word = f"u{a.itemsize}"

    def order(x):
        return (x, math.copysign(1.0, x))

    for name, choose in (("min", min), ("max", max)):
        for modifier in ("", ".NaN"):
            result = run(
                f"{name}{modifier}.{kind} d, a, b;",
                f"d:b{8 * a.itemsize} a:b{8 * a.itemsize} b:b{8 * a.itemsize}",
                a=a.view(word),
                b=b.view(word),
            ).view(dtype)
            for x, y, r in zip(a.astype(float), b.astype(float), result.astype(float), strict=True):
                numbers = [v for v in (x, y) if not math.isnan(v)]
                if not numbers or (modifier and len(numbers) < 2):
                    assert math.isnan(r)
                else:
                    assert order(r) == order(choose(numbers, key=order)), (name, x, y, r)
    canonical = {"f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}[kind]
    nan = np.full(3, np.nan).astype(dtype).view(word)
    registers = f"d:b{8 * a.itemsize} a:b{8 * a.itemsize} b:b{8 * a.itemsize}"
    assert set(run(f"max.{kind} d, a, b;", registers, a=nan, b=nan).view(word).tolist()) == {canonical}


def test_minimum_of_three_and_of_magnitudes():
    a, b, c = np.float32([1, -5, 3]), np.float32([2, 4, np.nan]), np.float32([-3, 9, -1])
    registers = "d:f32 a:f32 b:f32 c:f32"
    assert run("min.f32 d, a, b, c;", registers, a=a, b=b, c=c).tolist() == [-3, -5, -1]
    assert run("max.xorsign.abs.f32 d, a, b;", registers, a=a, b=b).tolist() == [2, -5, 3]


def test_relu_and_saturation():
    a = np.array([-1.0, 0.5, 3.0, np.nan, -0.0], np.float16).view(np.uint16)
    one = np.full(5, 0x3C00, np.uint16)
    zero = np.zeros(5, np.uint16)
    registers = "d:b16 a:b16 b:b16 c:b16"
    relu = run("fma.rn.relu.f16 d, a, b, c;", registers, a=a, b=one, c=zero)
    assert relu.tolist() == [0, 0x3800, 0x4200, 0x7FFF, 0]
    sat = run("fma.rn.sat.f16 d, a, b, c;", registers, a=a, b=one, c=zero)
    assert sat.tolist() == [0, 0x3800, 0x3C00, 0, 0]
    wide = np.float32([-1, 0.25, 7, np.nan])
    result = run("add.sat.f32 d, a, b;", "d:f32 a:f32 b:f32", a=wide, b=np.zeros(4, np.float32))
    assert result.tolist() == [0, 0.25, 1, 0]


@pytest.mark.parametrize(
    ("name", "reference", "relative"),
    [
        ("ex2", lambda x: 2.0**x, 2**-22),
        ("sin", math.sin, 2**-20),
        ("cos", math.cos, 2**-20),
        ("tanh", math.tanh, 2**-11),
    ],
)
def test_approximations(name, reference, relative):
    a = np.linspace(-3, 3, 500, dtype=np.float32)
    result = run(f"{name}.approx.f32 d, a;", "d:f32 a:f32", a=a).astype(np.float64)
    expected = np.array([reference(float(x)) for x in a])
    assert np.max(np.abs(result - expected) / np.maximum(np.abs(expected), 1)) <= relative


def test_more_approximations():
    a = np.float32(np.random.default_rng(SEED).uniform(0.001, 1000, 500))
    for name, reference in (("rcp", lambda x: 1 / x), ("rsqrt", lambda x: 1 / np.sqrt(x)), ("sqrt", np.sqrt)):
        result = run(f"{name}.approx.ftz.f32 d, a;", "d:f32 a:f32", a=a)
        expected = reference(a.astype(np.float64))
        assert np.max(np.abs(result / expected - 1)) < 2**-22
    result = run("lg2.approx.f32 d, a;", "d:f32 a:f32", a=a)
    assert np.max(np.abs(result - np.log2(a.astype(np.float64)))) < 2**-18
    wide = a.astype(np.float64)
    for name, reference in (("rcp", 1 / wide), ("rsqrt", 1 / np.sqrt(wide))):
        result = run(f"{name}.approx.ftz.f64 d, a;", "d:f64 a:f64", a=wide)
        assert np.max(np.abs(result / reference - 1)) < 2**-19
        assert not (result.view(np.uint64) & 0xFFFFFFFF).any()
    half = np.array([-2.0, 0.0, 0.5, 3.0], np.float16)
    packed = np.ascontiguousarray(half).view(np.uint32)
    result = run("ex2.approx.f16x2 d, a;", "d:b32 a:b32", a=packed).view(np.float16)
    assert np.allclose(result.astype(float), 2.0 ** half.astype(float), rtol=2**-9)


def test_signs_and_classes():
    a = np.float32([1.5, -2, 0.0, -0.0, np.inf, np.nan, 2.0**-130])
    b = np.float32([-1, 1, -1, 1, -1, 1, -1])
    assert run("copysign.f32 d, b, a;", "d:f32 a:f32 b:f32", a=a, b=b).tolist()[:2] == [-1.5, 2.0]
    expected = {
        "finite": [1, 1, 1, 1, 0, 0, 1],
        "infinite": [0, 0, 0, 0, 1, 0, 0],
        "number": [1, 1, 1, 1, 1, 0, 1],
        "notanumber": [0, 0, 0, 0, 0, 1, 0],
        "normal": [1, 1, 0, 0, 0, 0, 0],
        "subnormal": [0, 0, 0, 0, 0, 0, 1],
    }
    for name, wanted in expected.items():
        assert run(f"testp.{name}.f32 p, a;", "p:pred a:f32", a=a).astype(int).tolist() == wanted, name
    half = np.array([0x3C00, 0xBC00, 0xFC00, 0x8000], np.uint16)
    assert run("abs.f16 d, a;", "d:b16 a:b16", a=half).tolist() == [0x3C00, 0x3C00, 0x7C00, 0]
    pair = np.array([0xBC003C00, 0x00018001], np.uint32)
    assert run("neg.bf16x2 d, a;", "d:b32 a:b32", a=pair).tolist() == [0x3C00BC00, 0x80010001]
    assert run("abs.f16x2 d, a;", "d:b32 a:b32", a=pair).tolist() == [0x3C003C00, 0x00010001]


# ---- conversions


@pytest.mark.parametrize("target", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
def test_float_to_integer(target, source):
    dtype = FLOAT_DTYPES[source]
    (a,) = floats(source, 300, 1)
    wide = np.float64([0.5, 1.5, 2.5, -0.5, -1.5, 127.5, 255.5, 2.0**31, -(2.0**31), 2.0**32, 2.0**63, -(2.0**63)])
    near = np.float64([2.0**31 - 0.5, 2.0**32 - 0.5, 2.0**63 - 1024, 2.0**64, 2.0**64 - 2048, 1e30, -1e30])
    a = np.concatenate([a, wide.astype(dtype), near.astype(dtype), np.array([np.inf, -np.inf, np.nan]).astype(dtype)])
    width, sign = int(target[1:]), target[0] == "s"
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if sign else (0, (1 << width) - 1)
    register = max(width, 16)
    for mode, rounds in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
        expected = []
        for x in a.astype(np.float64):
            if math.isnan(x):
                expected.append(-(1 << width - 1) if source == "f64" or width == 64 else 0)
                if not sign:
                    expected[-1] &= (1 << width) - 1
            elif math.isinf(x):
                expected.append(high if x > 0 else low)
            else:
                expected.append(max(low, min(high, rounds(Fraction(x)))))
        bits = a.view(f"u{a.itemsize}")
        result = run(f"cvt.{mode}.{target}.{source} d, a;", f"d:b{register} a:b{8 * a.itemsize}", a=bits)
        expect(result, expected, register, f"cvt.{mode}.{target}.{source}")


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("target", ["f16", "bf16", "f32", "f64"])
def test_integer_to_float(target, source):
    width = int(source[1:])
    (a,) = integers(max(width, 16), 300, 1)
    values = [signed(int(x), width) if source[0] == "s" else int(x) & ((1 << width) - 1) for x in a]
    out = 8 * np.dtype(FLOAT_DTYPES[target]).itemsize
    for mode in ("rn", "rz") if target in ("f16", "bf16") else ("rn", "rz", "rm", "rp"):
        result = run(f"cvt.{mode}.{target}.{source} d, a;", f"d:b{out} a:b{max(width, 16)}", a=a)
        expected = [rounded(Fraction(x), target, mode) for x in values]
        expect_floats(result, expected, target, f"cvt.{mode}.{target}.{source}", [a])


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("target", ["f16", "bf16", "f32", "f64"])
def test_float_to_float(target, source):
    (a,) = floats(source, 1500, 1)
    if source in ("f32", "f64"):
        # Values around ties of the target.
        rng = np.random.default_rng(SEED)
        steps = rng.integers(0, 1 << 12, 500) * 0.5 + rng.choice([0, 2.0**-13, -(2.0**-13)], 500)
        a = np.concatenate([a, (steps * 2.0 ** rng.integers(-30, 20, 500)).astype(a.dtype)])
    widths = f"d:b{8 * np.dtype(FLOAT_DTYPES[target]).itemsize} a:b{8 * a.itemsize}"
    narrows = FORMATS[target][0] < FORMATS[source][0] or {target, source} == {"f16", "bf16"}
    modes = ["rn", "rz"] + ["rm", "rp"] * (target == "f32")
    bits = a.view(f"u{a.itemsize}")
    for mode in modes if narrows else [""]:
        text = f"cvt{'.' * bool(mode)}{mode}.{target}.{source} d, a;"
        expect_floats(
            run(text, widths, a=bits), [rounded(exact(x), target, mode or "rn") for x in a], target, text, [a]
        )
    special = np.array([np.inf, -np.inf, np.nan]).astype(a.dtype).view(bits.dtype)
    result = run(f"cvt{'.rn' * narrows}.{target}.{source} d, a;", widths, a=special).view(FLOAT_DTYPES[target])
    assert np.array_equal(result.astype(float), [np.inf, -np.inf, np.nan], equal_nan=True)


def test_integer_narrowing_and_widening():
    (a,) = integers(64, 300, 1)
    values = [int(x) for x in a]
    for width in (8, 16, 32):
        register = max(width, 16)
        expected = [signed(x, width) for x in values]
        expect(run(f"cvt.s{width}.s64 d, a;", f"d:b{register} a:b64", a=a), expected, register)
        expect(
            run(f"cvt.u{width}.u64 d, a;", f"d:b{register} a:b64", a=a),
            [x & ((1 << width) - 1) for x in values],
            register,
        )
        high = (1 << width - 1) - 1
        expected = [max(-high - 1, min(high, signed(x, 64))) for x in values]
        expect(run(f"cvt.sat.s{width}.s64 d, a;", f"d:b{register} a:b64", a=a), expected, register)
        expected = [min((1 << width) - 1, max(0, signed(x, 64))) for x in values]
        expect(run(f"cvt.sat.u{width}.s64 d, a;", f"d:b{register} a:b64", a=a), expected, register)
    low = a.astype(np.uint32)
    expect(run("cvt.s64.s32 d, a;", "d:b64 a:b32", a=low), [signed(x, 32) for x in values], 64)
    expect(run("cvt.u64.u32 d, a;", "d:b64 a:b32", a=low), [x & 0xFFFFFFFF for x in values], 64)
    # The low byte of a wide register, sign-extended into another.
    expect(run("cvt.s32.s8 d, a;", "d:b32 a:b32", a=low), [signed(x, 8) for x in values], 32)
    expect(run("cvt.u32.u8 d, a;", "d:b32 a:b64", a=a), [x & 255 for x in values], 32)


def test_rounding_to_whole_floats():
    a = np.float32([0.5, 1.5, -0.5, -1.5, 2.4, -2.6, 1e20, np.inf, -0.0])
    for mode, reference in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        result = run(f"cvt.{mode}.f32.f32 d, a;", "d:f32 a:f32", a=a)
        assert np.array_equal(result, reference(a)) and np.array_equal(np.signbit(result), np.signbit(reference(a)))
    result = run("cvt.sat.f32.f32 d, a;", "d:f32 a:f32", a=np.float32([-1, 0.25, 2, np.nan, -0.0]))
    assert result.tolist() == [0, 0.25, 1, 0, 0] and not np.signbit(result).any()


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_eight_bit_floats(kind):
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    codes = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    result = run(f"cvt.rn.f16x2.{kind}x2 d, a;", "d:b32 a:b16", a=codes)
    wanted = codes.view(np.uint8).view(dtype).astype(np.float16)
    assert np.array_equal(result.view(np.float16), wanted, equal_nan=True)
    rng = np.random.default_rng(SEED)
    values = np.float32(rng.standard_normal(4000) * 2.0 ** rng.integers(-18, 17, 4000))
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.concatenate([values, np.float32([largest, 1e9, -1e9, np.inf, -np.inf, 0.0, -0.0, 2.0**-9, 2.0**-10])])
    result = run(f"cvt.rn.satfinite.{kind}x2.f32 d, a, b;", "d:b16 a:f32 b:f32", a=values, b=values[::-1])
    wanted = np.clip(values, -largest, largest).astype(dtype).view(np.uint8)
    assert np.array_equal(result >> 8, wanted)
    assert np.array_equal(result & 255, wanted[::-1])
    nan = np.full(2, np.nan, np.float32)
    assert set((run(f"cvt.rn.satfinite.{kind}x2.f32 d, a, b;", "d:b16 a:f32 b:f32", a=nan, b=nan)).tolist()) == {0x7F7F}


def test_packed_conversion_puts_the_first_source_above():
    a, b = np.float32([1.0, 70000.0, -2.0]), np.float32([2.0, -1e-8, np.nan])
    result = run("cvt.rn.f16x2.f32 d, a, b;", "d:b32 a:f32 b:f32", a=a, b=b)
    assert result.tolist() == [0x3C004000, 0x7C008000, 0xC0007FFF]
    relu = run("cvt.rn.relu.satfinite.f16x2.f32 d, a, b;", "d:b32 a:f32 b:f32", a=a, b=b)
    assert relu.tolist() == [0x3C004000, 0x7BFF0000, 0x00007FFF]
    result = run("cvt.rz.bf16x2.f32 d, a, b;", "d:b32 a:f32 b:f32", a=np.float32([1.999]), b=np.float32([-1.999]))
    assert result.tolist() == [0x3FFFBFFF]


def test_tf32():
    a = np.array([0x3F800FFF, 0x3F801000, 0x3F803000, 0xBF801000, 0x7F800000, 0x7FC00000, 0x7F7FFFFF], np.uint32)
    away = run("cvt.rna.tf32.f32 d, a;", "d:b32 a:b32", a=a)
    even = run("cvt.rn.tf32.f32 d, a;", "d:b32 a:b32", a=a)
    assert away.tolist() == [
        0x3F800000,
        0x3F802000,
        0x3F804000,
        0xBF802000,
        0x7F800000,
        0x7FC00000,
        0x7F800000,
    ]
    assert even.tolist() == [
        0x3F800000,
        0x3F800000,
        0x3F804000,
        0xBF800000,
        0x7F800000,
        0x7FFFFFFF,
        0x7F800000,
    ]


def test_packing_integers():
    a, b = np.int32([70000, -5, 3]), np.int32([-70000, 300, -1])
    c = np.uint32([0x1234ABCD, 0, 0xFFFFFFFF])
    result = run("cvt.pack.sat.s16.s32 d, a, b;", "d:b32 a:b32 b:b32", a=a, b=b)
    assert result.tolist() == [0x7FFF8000, 0xFFFB012C, 0x0003FFFF]
    result = run("cvt.pack.sat.u8.s32.b32 d, a, b, c;", "d:b32 a:b32 b:b32 c:b32", a=a, b=b, c=c)
    assert result.tolist() == [0xABCDFF00, 0x000000FF, 0xFFFF0300]


# ---- comparison, selection, moves


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_float_comparisons(kind):
    dtype = FLOAT_DTYPES[kind]
    values = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]
    a = np.array([x for x in values for _ in values]).astype(dtype)
    b = np.array(values * len(values)).astype(dtype)
    width = 8 * a.itemsize
    plain = {
        "eq": lambda x, y: x == y,
        "ne": lambda x, y: x != y,
        "lt": lambda x, y: x < y,
        "le": lambda x, y: x <= y,
        "gt": lambda x, y: x > y,
        "ge": lambda x, y: x >= y,
    }
    pairs = list(zip(a.astype(float), b.astype(float), strict=True))
    unordered = [math.isnan(x) or math.isnan(y) for x, y in pairs]
    expected = {"num": [not u for u in unordered], "nan": unordered}
    for name, relation in plain.items():
        truth = [relation(x, y) for x, y in pairs]
        expected[name] = [t and not u for t, u in zip(truth, unordered, strict=True)]
        expected[f"{name}u"] = [t or u for t, u in zip(truth, unordered, strict=True)]
    bits = {"a": a.view(f"u{a.itemsize}"), "b": b.view(f"u{a.itemsize}")}
    for name, wanted in expected.items():
        result = run(f"setp.{name}.{kind} p, a, b;", f"p:pred a:b{width} b:b{width}", **bits)
        assert result.tolist() == wanted, name
    result = run(f"set.ltu.u32.{kind} d, a, b;", f"d:b32 a:b{width} b:b{width}", **bits)
    assert result.tolist() == [0xFFFFFFFF * t for t in expected["ltu"]]
    result = run(f"set.ge.f32.{kind} d, a, b;", f"d:f32 a:b{width} b:b{width}", **bits)
    assert result.tolist() == [float(t) for t in expected["ge"]]


def test_integer_comparisons():
    a, b = integers(32, 200, 2)
    rows = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    registers = "p:pred q:pred c:pred a:b32 b:b32"
    assert run("setp.lt.s32 p, a, b;", registers, a=a, b=b).tolist() == [signed(x, 32) < signed(y, 32) for x, y in rows]
    assert run("setp.hs.u32 p, a, b;", registers, a=a, b=b).tolist() == [x >= y for x, y in rows]
    c = np.arange(len(a)) % 2 == 0
    for join, function in (
        ("and", lambda x, y: x and y),
        ("or", lambda x, y: x or y),
        ("xor", lambda x, y: x != y),
    ):
        p, q = run(f"setp.gt.{join}.u32 p|q, a, b, !c;", registers, a=a, b=b, c=c)
        assert p.tolist() == [function(x > y, not z) for (x, y), z in zip(rows, c.tolist(), strict=True)]
        assert q.tolist() == [function(x <= y, not z) for (x, y), z in zip(rows, c.tolist(), strict=True)]
    only = run("setp.eq.u32 _|q, a, b;", registers, a=a, b=b)
    assert only.tolist() == [x != y for x, y in rows]
    pair = np.array([0x00023C00], np.uint32)
    low, high = run("setp.lt.f16x2 p|q, a, b;", registers, a=pair, b=np.array([0x00013C01], np.uint32))
    assert (low.tolist(), high.tolist()) == ([True], [False])


def test_selection():
    a, b = np.arange(6, dtype=np.uint32), np.arange(10, 16, dtype=np.uint32)
    p = np.array([1, 0, 1, 0, 0, 1], bool)
    assert run("selp.b32 d, a, b, p;", "d:b32 a:b32 b:b32 p:pred", a=a, b=b, p=p).tolist() == [
        0,
        11,
        2,
        13,
        14,
        5,
    ]
    assert run("selp.s32 d, -1, b, !p;", "d:b32 b:b32 p:pred", b=b, p=p).view(np.int32).tolist() == [
        10,
        -1,
        12,
        -1,
        -1,
        15,
    ]
    half = run("selp.f32 d, 0.5, 0f40000000, p;", "d:f32 p:pred", p=p).view(np.float32)
    assert half.tolist() == [0.5, 2, 0.5, 2, 2, 0.5]
    chooser = np.float32([-1, -0.0, 0.0, np.nan, 5, -np.inf])
    assert run("slct.u32.f32 d, a, b, c;", "d:b32 a:b32 b:b32 c:f32", a=a, b=b, c=chooser).tolist() == [
        10,
        1,
        2,
        13,
        4,
        15,
    ]


def test_moves_and_vectors():
    low, high = integers(32, 20, 2)
    whole = run("mov.b64 d, {a, b};", "d:b64 a:b32 b:b32", a=low, b=high)
    expect(whole, [int(x) | int(y) << 32 for x, y in zip(low, high, strict=True)], 64)
    x, y = run("mov.b64 {a, b}, d;", "d:b64 a:b32 b:b32", d=whole)
    assert np.array_equal(x, low) and np.array_equal(y, high)
    assert np.array_equal(run("mov.b64 {_, b}, d;", "d:b64 b:b32", d=whole), high)
    quarters = run("mov.b64 {a, b, c, e}, d;", "d:b64 a:b16 b:b16 c:b16 e:b16", d=whole)
    again = run(
        "mov.b64 d, {a, b, c, e};",
        "d:b64 a:b16 b:b16 c:b16 e:b16",
        **dict(zip("abce", quarters, strict=True)),
    )
    assert np.array_equal(again, whole)
    assert int(run("mov.u32 d, -1;", "d:b32")) == 0xFFFFFFFF
    assert int(run("mov.f32 d, 0f7FC12345;", "d:f32").view(np.uint32)) == 0x7FC12345
    assert bool(run("mov.pred p, 1;", "p:pred")) is True
    assert float(run("mov.f64 d, 0d3FF8000000000000;", "d:f64")) == 1.5
    alu = decode("mov.u32 d, %tid.x;", d="b32")
    assert alu.sources[0][0].name == "%tid" and alu.sources[0][0].component == "x"


def test_scalars_broadcast():
    """A lane value that the whole block shares may come as a 0-d array."""
    lanes, uniform = np.arange(8, dtype=np.uint32), np.array(3, np.uint32)
    assert run("mad.lo.u32 d, a, b, 1;", "d:b32 a:b32 b:b32", a=lanes, b=uniform).tolist() == [
        3 * x + 1 for x in range(8)
    ]
    assert run("selp.b32 d, a, b, p;", "d:b32 a:b32 b:b32 p:pred", a=lanes, b=uniform, p=lanes > 4).tolist() == [
        3
    ] * 5 + [5, 6, 7]
    assert int(np.ravel(run("add.u32 d, a, a;", "d:b32 a:b32", a=uniform))[0]) == 6


@pytest.mark.parametrize(
    "text", ["ld.global.u32 a, [b];", "bra L; L:", "bar.sync 0;", "ret;", "cvta.to.global.u64 b, b;"]
)
def test_what_is_not_lane_wise(text):
    assert decode(text, a="b32", b="b64") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.rq.f32 a, a, a;", "modifier .rq"),
        ("add.f32 a, a;", "takes 3 operands, found 2"),
        ("add.u8 a, a, a;", "not defined for .u8"),
        ("mul.u32 a, a, a;", ".lo, .hi or .wide"),
        ("add.u64 b, a, b;", "narrower than .u64"),
        ("add.u32 p, a, a;", "declared .pred"),
        ("cvt.f8.f32 a, a;", "type"),
        ("setp.lt.b32 p, a, a;", ".eq and .ne only"),
        ("add.u32 1, a, a;", "destination must be a register"),
    ],
)
def test_unknown_forms_name_themselves(text, message):
    with pytest.raises(UnknownInstruction, match=message) as caught:
        decode(text, a="b32", b="b64", p="pred")
    assert text in str(caught.value)

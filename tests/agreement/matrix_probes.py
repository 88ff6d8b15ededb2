"""Questions about how the tensor cores sum, each a few dot products whose answer tells.

A probe is one row of A against one column of B. Many share an execution: probe p is row p of A and column p of B, its
answer on the diagonal of D.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import matrix_operands
import ml_dtypes
import numpy as np
from matrix_configurations import Configuration, Use
from matrix_instructions import A_BYTES, BITS, IMAGE_BYTES, THREADS, Instruction

from numba_tma.sim.matrix_descriptor import MatrixDescriptor

_NUMPY = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "f32": np.dtype(np.float32),
}
# Largest and smallest exponents that a power of two may have in each type.
_RANGE = {"f16": (-24, 15), "bf16": (-133, 127), "tf32": (-136, 127), "e4m3": (-9, 8), "e5m2": (-16, 15)}


@dataclass(frozen=True)
class Bits:
    """An element by its bits."""

    value: int


Number = float | Bits


@dataclass(frozen=True)
class Probe:
    """`terms` gives the elements of A and B at some positions along K; the others are zero."""

    label: str
    terms: tuple[tuple[int, Number, Number], ...]
    c: Number = 0.0


def instructions() -> tuple[Instruction, ...]:
    """The instructions that are probed: one of each pair of types that may sum differently."""
    types = (
        *(("f32", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"), ("f16", "f16", "f16")),
        *(("f32", "e4m3", "e4m3"), ("f32", "e5m2", "e5m2"), ("f16", "e4m3", "e4m3"), ("f16", "e5m2", "e5m2")),
    )
    made = [Instruction("wgmma", 64, 64, 256 // BITS[a], result, a, b) for result, a, b in types]
    made += [Instruction("wgmma", 64, 64, 16, "f32", "f16", "f16", registers=True)]
    for k, kinds in ((8, types[:2] + types[3:4]), (16, types[:2] + types[3:4]), (4, types[2:3]), (8, types[2:3])):
        made += [Instruction("mma", 16, 8, k, result, a, b) for result, a, b in kinds]
    made += [Instruction("mma", 16, 8, 32, result, a, b) for result, a, b in types[4:]]
    return tuple(made)


def _power(kind: str, exponent: int) -> tuple[float, float]:
    """Two powers of two that this type has, whose product is 2 to the exponent."""
    low, high = _RANGE[kind]
    one = min(max(exponent, low + 3), high - 1)
    return 2.0**one, 2.0 ** (exponent - one)


def _ranges(i: Instruction) -> Iterator[Probe]:
    """How many bits below the largest exponent are kept, of products and of C."""
    half = i.k // 2
    for r in range(1, 40):
        low = _RANGE[i.a][0]
        if -r >= 2 * low + 3:
            small = _power(i.a, -r)
            yield Probe(f"1 + 2^-{r}", ((0, 1.0, 1.0), (1, *small)))
            yield Probe(f"1 + 2^-{r} - 1, next to each other", ((0, 1.0, 1.0), (1, *small), (2, -1.0, 1.0)))
            yield Probe(f"1 + 2^-{r} - 1, the last in the other half", ((0, 1.0, 1.0), (1, *small), (half, -1.0, 1.0)))
            yield Probe(f"1 - 2^-{r} - 1", ((0, 1.0, 1.0), (1, -small[0], small[1]), (2, -1.0, 1.0)))
            yield Probe(f"c = 2^-{r} among 1 - 1", ((0, 1.0, 1.0), (1, -1.0, 1.0)), 2.0**-r)
            yield Probe(f"c = 1, 2^-{r} - 1", ((0, *small), (1, -1.0, 1.0)), 1.0)
            # Two halves of a unit: do they carry before the cut?
            yield Probe(
                f"1 + 2^-{r} + 2^-{r} - 1", ((0, 1.0, 1.0), (1, *small), (2, *small), (3, -1.0, 1.0)) if i.k > 3 else ()
            )


def _positions(i: Instruction) -> Iterator[Probe]:
    """Which products are summed at once: a small one between two large ones that cancel, at all positions."""
    large, small = 16.0, _power(i.a, -18 if i.a == "e4m3" else -20)
    for first in range(i.k):
        for second in range(i.k):
            if first != second and (second - first) % 3 == 1:
                tiny = next(k for k in (second - 1, 0, i.k - 1, 1) if k not in (first, second) and k >= 0)
                yield Probe(
                    f"large at {first} and {second}, small at {tiny}",
                    ((first, large, large), (second, -large, large), (tiny, *small)),
                )


def _rounding(i: Instruction) -> Iterator[Probe]:
    """How the sum is rounded to the result's type: ties, beyond ties, of either sign."""
    unit = 10 if i.result == "f16" else 23
    for name, tail in (("3/4", (-1, -2)), ("1/2", (-1,)), ("1/4", (-2,)), ("5/8", (-1, -3)), ("1 3/4", (0, -1, -2))):
        for sign in (1.0, -1.0):
            if i.k > len(tail) and -unit - 3 >= 2 * _RANGE[i.a][0] + 3:
                parts = [_power(i.a, -unit + t) for t in tail]
                terms = tuple((k + 1, sign * p, q) for k, (p, q) in enumerate(parts))
                yield Probe(f"{sign:+.0f} and {name} units", ((0, sign, 1.0), *terms))
                yield Probe(f"c = {sign:+.0f} and {name} units", terms, sign)
                other = tuple((k, -p, q) for k, p, q in terms)
                yield Probe(f"c = {sign:+.0f} less {name} units", other, sign)
                yield Probe(f"c = {sign * 2:+.0f} less {name} units of 1", other, sign * 2)


def _c_kept(i: Instruction) -> Iterator[Probe]:
    """How much of C's fraction is kept alone, and beside products of several sizes."""
    fraction = 10 if i.result == "f16" else 23
    for r in range(8, fraction + 1):
        yield Probe(f"c = 1 + 2^-{r} alone", (), 1 + 2.0**-r)
        yield Probe(f"c = -(1 + 2^-{r}) alone", (), -1 - 2.0**-r)
    full = 2 - 2.0**-fraction
    for e in range(-4, 8):
        if 2 * _RANGE[i.a][0] + 3 <= e <= _RANGE[i.a][1]:
            yield Probe(f"c = 2 - unit, beside 2^{e}", ((0, *_power(i.a, e)),), full)
            yield Probe(
                f"c = 2 - unit, beside 2^{e} - 2^{e}",
                ((0, *_power(i.a, e)), (1, -_power(i.a, e)[0], _power(i.a, e)[1])),
                full,
            )
    yield Probe("c = 2 - unit, beside 2^7 * 0", ((0, 128.0, 0.0),), full)
    yield Probe("c = 2 - unit, beside 0 * 2^7", ((0, 0.0, 128.0),), full)


def _exponents(i: Instruction) -> Iterator[Probe]:
    """Whether a product of 1.5 * 1.5 counts as 2^0 or 2^1, and one of subnormal numbers as what."""
    low = _RANGE[i.a][0]
    for r in range(8, 32):
        if -r >= 2 * low + 3:
            small = _power(i.a, -r)
            yield Probe(f"1.5 * 1.5 + 2^-{r} - 2.25", ((0, 1.5, 1.5), (1, *small), (2, -1.5, 1.5)))
    if BITS[i.a] == 8 or i.a == "f16":
        top = 2.0 ** (_RANGE[i.a][1] - 1)
        for r in range(6, 30):
            small = _power(i.a, -r)
            if -r >= 2 * low + 3:
                terms = ((0, 2.0**low, top), (1, *small), (2, -(2.0**low), top))
                yield Probe(f"least subnormal * {top:g}, 2^-{r}, and off again", terms)


def _specials(i: Instruction) -> Iterator[Probe]:
    """NaN, infinity, zeros."""
    width = BITS[i.a]
    quiet = int.from_bytes(np.array(np.nan).astype(_NUMPY[i.a]).tobytes(), "little")
    sign = 1 << (width - 1)
    for name, bits in (
        ("NaN", quiet),
        ("-NaN", quiet | sign),
        ("NaN of other bits", quiet | 1),
        ("all ones", 2 * sign - 1),
    ):
        yield Probe(f"{name} * 1", ((0, Bits(bits), 1.0),))
        yield Probe(f"1 * {name}", ((1, 1.0, Bits(bits)),), 1.0)
    c_quiet, c_sign = (0x7E00, 0x8000) if i.result == "f16" else (0x7FC00000, 0x80000000)
    signalling = 0x7C01 if i.result == "f16" else 0x7F800001
    for name, bits in (("NaN", c_quiet | 5), ("-NaN", c_quiet | c_sign), ("signalling NaN", signalling)):
        yield Probe(f"c = {name}", ((0, 1.0, 1.0),), Bits(bits))
        yield Probe(f"c = {name} alone", (), Bits(bits))
    for c in (0.0, -0.0):
        yield Probe(f"c = {c} alone", (), c)
        yield Probe(f"c = {c}, 0 * -0 everywhere", tuple((k, 0.0, -0.0) for k in range(i.k)), c)
        yield Probe(f"c = {c}, -0 * 1 everywhere", tuple((k, -0.0, 1.0) for k in range(i.k)), c)
        yield Probe(f"c = {c}, 1 - 1", ((0, 1.0, 1.0), (1, -1.0, 1.0)), c)
    yield Probe("c = -1, +1", ((0, 1.0, 1.0),), -1.0)
    if i.a != "e4m3":
        inf = float("inf")
        yield Probe("inf * 1", ((0, inf, 1.0),))
        yield Probe("inf * 0", ((0, inf, 0.0),))
        yield Probe("inf - inf", ((0, inf, 1.0), (1, -inf, 1.0)))
        yield Probe("inf - inf in the other half", ((0, inf, 1.0), (i.k // 2, -inf, 1.0)))
        yield Probe("c = -inf, inf", ((0, inf, 1.0),), -inf)
        yield Probe("c = inf, inf * -1", ((0, inf, -1.0),), inf)
    yield Probe("c = inf, 1", ((0, 1.0, 1.0),), float("inf"))


def _limits(i: Instruction) -> Iterator[Probe]:
    """Sums beyond the result's range or below its normal numbers."""
    if i.result == "f16":
        for more in (8.0, 15.0, 16.0, 17.0, 32.0):
            yield Probe(f"c = 65504 + {more:g}", ((0, more, 1.0),), 65504.0)
            yield Probe(f"c = -65504 - {more:g}", ((0, -more, 1.0),), -65504.0)
        for e in (-24, -25, -26):
            if e >= 2 * _RANGE[i.a][0]:
                yield Probe(f"2^{e}", ((0, 2.0 ** (e // 2), 2.0 ** (e - e // 2)),))
                yield Probe(f"3 * 2^{e}", ((0, 3 * 2.0 ** (e // 2), 2.0 ** (e - e // 2)),))
        yield Probe("c least subnormal", (), 2.0**-24)
        return
    largest = float(np.finfo(np.float32).max)
    yield Probe("c largest", (), largest)
    yield Probe("c largest + 1", ((0, 1.0, 1.0),), largest)
    for e in (0, 20, 60, 98, 99, 100, 101, 102, 103, 104):
        if e <= 2 * _RANGE[i.a][1]:
            one, two = _power(i.a, e)
            yield Probe(f"c largest + 2^{e}", ((0, one, two),), largest)
            yield Probe(f"c = -largest - 2^{e}", ((0, -one, two),), -largest)
    for r in (1, 2, 0x400, 0x7FFFFF, 0x800000, 0x800001):
        yield Probe(f"c = bits {r:#x} alone", (), Bits(r))
        yield Probe(f"c = bits {r:#x} beside 1 - 1", ((0, 1.0, 1.0), (1, -1.0, 1.0)), Bits(r))
    if i.a in ("bf16", "tf32"):
        for e in (-126, -127, -133, -140, -148, -149, -150, -151, -160):
            yield Probe(f"2^{e}", ((0, 2.0 ** (e // 2), 2.0 ** (e - e // 2)),))
            yield Probe(
                f"1.5 * 2^{e}, -2^{e}",
                ((0, 1.5 * 2.0 ** (e // 2), 2.0 ** (e - e // 2)), (1, -(2.0 ** (e // 2)), 2.0 ** (e - e // 2))),
            )
            yield Probe(f"c = 2^-149, 2^{e}", ((0, 2.0 ** (e // 2), 2.0 ** (e - e // 2)),), 2.0**-149)
        yield Probe("subnormal * 2^100", ((0, 2.0**-130, 2.0**100),))
        yield Probe("2^127 * 2^127", ((0, 2.0**127, 2.0**127),))
        yield Probe("2^127 * 2^127 off again", ((0, 2.0**127, 2.0**127), (1, -(2.0**127), 2.0**127)))
        yield Probe("2^64 * 2^64 off again, 1", ((0, 2.0**64, 2.0**64), (1, -(2.0**64), 2.0**64), (2, 1.0, 1.0)))
        yield Probe("2^64 * 2^63 twice", ((0, 2.0**64, 2.0**63), (1, 2.0**64, 2.0**63)))
        yield Probe(
            "2^64 * 2^63 twice and off once", ((0, 2.0**64, 2.0**63), (1, 2.0**64, 2.0**63), (2, -(2.0**64), 2.0**63))
        )


def _unread(i: Instruction) -> Iterator[Probe]:
    """Whether the lowest 13 bits of a tf32 element count, are cut off or rounded."""
    if i.a != "tf32":
        return
    for bits in (1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x3FFF):
        yield Probe(f"(1 + {bits:#x} * 2^-23) * 1", ((0, Bits(0x3F800000 + bits), 1.0),))
        yield Probe(f"1 * -(1 + {bits:#x} * 2^-23)", ((0, 1.0, Bits(0xBF800000 + bits)),))
    for bits in (0x7F800001, 0x7F801000, 0x7F801FFF, 0x7F802000, 0x7F7FFFFF, 0x00001FFF, 0x00001000):
        yield Probe(f"bits {bits:#x} * 1", ((0, Bits(bits), 1.0),))


@functools.cache
def probes(instruction: Instruction) -> tuple[Probe, ...]:
    """All probes of an instruction."""
    made = [
        probe
        for questions in (_ranges, _positions, _rounding, _c_kept, _exponents, _specials, _limits, _unread)
        for probe in questions(instruction)
        if len({k for k, _, _ in probe.terms}) == len(probe.terms) and all(k < instruction.k for k, _, _ in probe.terms)
    ]
    return tuple({probe.label: probe for probe in made}.values())


def _bits(kind: str, values: Iterable[Number]) -> np.ndarray:
    dtype = _NUMPY[kind]
    unsigned = np.dtype(f"<u{dtype.itemsize}")
    with np.errstate(over="ignore"):
        return np.array(
            [v.value if isinstance(v, Bits) else int(np.array(v).astype(dtype).view(unsigned)) for v in values],
            unsigned,
        )


def _together(i: Instruction) -> int:
    """Probes in one configuration."""
    return 64 if i.family == "wgmma" else 8 * matrix_operands.problems(i)


def _place(i: Instruction, chosen: tuple[Probe, ...]) -> Configuration:
    """One configuration for some probes."""
    count = matrix_operands.problems(i)
    width = BITS[i.a] // 8
    a = np.zeros((count, i.m, i.k), f"<u{width}")
    b = np.zeros((count, i.n, i.k), f"<u{width}")
    c = np.zeros((count, i.m, i.n), "<u2" if i.result == "f16" else "<u4")
    for number, probe in enumerate(chosen):
        problem, row = divmod(number, i.n)
        for k, left, right in probe.terms:
            a[problem, row, k], b[problem, row, k] = _bits(i.a, (left,))[0], _bits(i.b, (right,))[0]
        c[problem, row, row] = _bits(i.result, (probe.c,))[0]
    given = np.zeros((THREADS, i.inputs), np.uint32)
    given[:, : i.d_count] = matrix_operands.words(i, c.view(np.float16 if i.result == "f16" else np.float32))
    image = np.zeros(IMAGE_BYTES, np.uint8)
    place = i.d_count
    for matrix, registers in ((a, i.a_count), (b, i.b_count)):
        raw = matrix.view(np.uint8)
        if registers:
            rows = raw.view(np.uint32).reshape(THREADS // 32, -1, raw.shape[-1] // 4)
            slices = rows.shape[1] // 8
            parts = rows.reshape(len(rows), slices, 8, -1, 4).transpose(3, 1, 0, 2, 4)
            given[:, place : place + registers] = parts.reshape(registers, THREADS).T
            place += registers
        else:
            # Two 16-byte units of a row, eight rows after each other.
            start = 0 if matrix is a else A_BYTES
            units = raw.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3)
            image[start : start + units.size] = units.reshape(-1)
    use = Use(MatrixDescriptor(0, 128, 256), MatrixDescriptor(A_BYTES, 128, 256))
    return Configuration(i, (use,), "probes", 0, "probes", (image.tobytes(), given.tobytes()))


@functools.cache
def configurations(instruction: Instruction) -> tuple[Configuration, ...]:
    """All of an instruction's probes in configurations."""
    every, size = probes(instruction), _together(instruction)
    return tuple(_place(instruction, every[first : first + size]) for first in range(0, len(every), size))


def answers(instruction: Instruction, outputs: np.ndarray) -> dict[str, str]:
    """Each probe's result in hexadecimal, from the configurations' outputs."""
    every, size = probes(instruction), _together(instruction)
    found = {}
    for number, words in enumerate(outputs):
        matrices = matrix_operands.result(instruction, words)
        bits = matrices.view(f"<u{matrices.itemsize}")
        for position, probe in enumerate(every[number * size : (number + 1) * size]):
            problem, row = divmod(position, instruction.n)
            found[probe.label] = f"{bits[problem, row, row]:0{2 * bits.itemsize}x}"
    return found

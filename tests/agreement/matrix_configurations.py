"""Random uses of the tensor cores' instructions: which instruction, where its matrices lie, what numbers they hold.

As with the copies, all is made from an index alone with generators whose streams do not change between versions of
Python and NumPy, so that results recorded on a GPU can be compared anywhere.
"""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matrix_instructions import (
    A_BYTES,
    B_BYTES,
    BITS,
    IMAGE_BYTES,
    MOST_STEPS,
    STEP_BYTES,
    THREADS,
    Instruction,
)

from numba_tma.sim.matrix_descriptor import SPANS, MatrixDescriptor, addresses

SEED = 20250611
# Bits of a matrix descriptor that mean nothing.
RESERVED = 0b11 << 14 | 0b11 << 30 | 0b111 << 46 | 0x3FF << 52

# What the numbers are like.
VALUES = ("integers", "numbers", "spread", "subnormals", "specials", "bits")
# These sums are the same however they are formed, so every bit must agree.
EXACT = "integers"


@dataclass(frozen=True)
class Use:
    """One execution in a block: descriptors of A and B, whether D counts (scale-d), bits to set beside them."""

    a: MatrixDescriptor
    b: MatrixDescriptor
    scale: bool = True
    reserved: int = 0


@dataclass(frozen=True)
class Configuration:
    """An instruction, executed once for each of `uses` on the same accumulator.

    Descriptors start relative to the block's shared buffer. `values` says what the memory and registers hold, `index`
    seeds it; `given` overrides it: bytes of the shared buffer and the threads' words. `layout` names how the
    descriptors were chosen.
    """

    instruction: Instruction
    uses: tuple[Use, ...]
    values: str = "bits"
    index: int = 0
    layout: str = ""
    given: tuple[bytes, bytes] = (b"", b"")

    @property
    def exact(self) -> bool:
        """Whether the order and width of sums do not matter: data that is moved, integers, small whole numbers."""
        i = self.instruction
        return not i.multiplies or i.result == "s32" or self.values == EXACT

    @property
    def tags(self) -> set[str]:
        """What is remarkable about it: differences are counted by these."""
        i = self.instruction
        found = {i.family, self.layout} - {""}
        if not i.multiplies:
            return found | {i.name}
        found |= {f"{i.family} {i.result} {i.a} {i.b}", self.values, "exact" if self.exact else "rounded"}
        if i.family == "wgmma":
            found |= {f"A {self.uses[0].a.span}" if not i.registers else "A in registers", f"B {self.uses[0].b.span}"}
            found |= {f"n{i.n}", f"majors {i.majors}", f"{self.layout}, B {self.uses[0].b.span}, {i.majors}"}
            if any(use.a.base or use.b.base for use in self.uses):
                found.add("base offset")
            if not all(use.scale for use in self.uses):
                found.add("scale-d 0")
            if i.signs != (1, 1):
                found.add("negated")
        return found


# -- which instructions ------------------------------------------------------------------------------------------------

_WGMMA_TYPES = (
    *(("f32", "f16", "f16"), ("f32", "bf16", "bf16"), ("f16", "f16", "f16"), ("f32", "tf32", "tf32")),
    *(("f32", "e4m3", "e4m3"), ("f32", "e4m3", "e5m2"), ("f32", "e5m2", "e4m3"), ("f32", "e5m2", "e5m2")),
    *(("f16", "e4m3", "e4m3"), ("f16", "e5m2", "e4m3")),
    *(("s32", "s8", "s8"), ("s32", "s8", "u8"), ("s32", "u8", "s8"), ("s32", "u8", "u8")),
)


def _wgmma_instructions() -> Iterator[Instruction]:
    r = random.Random(f"{SEED} wgmma")
    common = (8, 8, 16, 24, 32, 64)
    rare = [n for n in range(8, 257, 8) if n not in common]
    for number, (result, a, b) in enumerate(_WGMMA_TYPES):
        found: dict[str, Instruction] = {}
        sizes = [*common, *(rare[(3 * number + j) % len(rare)] for j in range(3))]
        # Integers have only every second width from 32 on.
        sizes = [n if result != "s32" or n <= 32 else -(-n // 16) * 16 for n in sizes]
        for n in sizes:
            halves = BITS[a] == 16
            while True:
                registers = r.random() < 0.4
                majors = (r.randrange(2) if halves and not registers else 0, r.randrange(2) if halves else 0)
                signs = r.choice(((1, 1), (1, 1), (1, -1), (-1, 1), (-1, -1))) if result != "s32" else (1, 1)
                saturate = result == "s32" and r.random() < 0.3
                made = Instruction("wgmma", 64, n, 256 // BITS[a], result, a, b, registers, majors, signs, saturate)
                if made.name not in found:
                    break
                n = 8 * r.randint(1, 4)
            found[made.name] = made
        yield from found.values()


def _mma_instructions() -> Iterator[Instruction]:
    for k, (result, a, b) in (
        *((k, types) for k in (8, 16) for types in (("f32", "f16", "f16"), ("f32", "bf16", "bf16"))),
        *((k, ("f16", "f16", "f16")) for k in (8, 16)),
        *((k, ("f32", "tf32", "tf32")) for k in (4, 8)),
        *((32, ("f32", a, b)) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
        (32, ("f16", "e4m3", "e5m2")),
    ):
        yield Instruction("mma", 16, 8, k, result, a, b)
    for m, width in ((8, 16), (16, 16), (16, 32)):
        for kinds in (("s8", "u8"), ("s4", "u4")):
            for number, a in enumerate(kinds):
                for b in kinds:
                    k = width * 8 // BITS[a]
                    yield Instruction("mma", m, 8, k, "s32", a, b, saturate=width == 32 and number == 0)


def _moves() -> Iterator[Instruction]:
    for family in ("ldmatrix", "stmatrix"):
        for count in (1, 2, 4):
            for trans in (False, True):
                yield Instruction(family, count=count, trans=trans)
    yield Instruction("movmatrix", count=1, trans=True)


@functools.cache
def instructions() -> tuple[Instruction, ...]:
    """All instructions that are tried."""
    return (*_wgmma_instructions(), *_mma_instructions(), *_moves())


# -- where matrices lie ------------------------------------------------------------------------------------------------


def _fits(descriptor: MatrixDescriptor, extent: int, depth: int, transposed: bool, end: int) -> bool:
    found = addresses(descriptor, extent, depth, transposed)
    return bool(found.min() >= 0 and found.max() + 16 <= end)


def _descriptor(
    r: random.Random, layout: str, extent: int, kind: str, transposed: int, nbytes: int
) -> MatrixDescriptor:
    """A matrix within `nbytes`, its start relative to them.

    'orderly' is as CUTLASS and Triton place matrices, at a step along K within the swizzle's pattern; 'shifted' the
    same on a base offset; 'any' takes whatever start, strides and base offset fit.
    """
    depth = 256 // BITS[kind]
    while True:
        span = r.choice(SPANS)
        tall = 8 * span
        if layout == "any":
            base = r.choice((0, 0, r.randrange(8)))
            start = 16 * r.randrange(nbytes // 16)
            leading, stride = (16 * r.choice((r.randrange(64), r.randrange(512))) for _ in range(2))
        else:
            # Packed: eight rows of a span after each other, then the next eight; MN-major, columns of K instead.
            if transposed:
                boxes = -(-extent * 2 // span)
                stride, leading = (tall, tall * 2) if span > 16 else (tall * 2, tall)
                if r.random() < 0.3:
                    stride, leading = (tall * boxes, tall) if span > 16 else (tall, tall * boxes)
            else:
                stride, leading = tall, tall * extent // 8
                if span == 16 and r.random() < 0.5:
                    stride, leading = tall * 2, tall
            start = 1024 * r.randrange(nbytes // 1024)
            base = 0
            if layout == "shifted":
                rows = r.randrange(1, 8)
                start, base = start + 128 * rows, rows % max(tall // 128, 1) if span > 16 else 0
            elif span > 32 and not transposed:
                start += 32 * r.randrange(span // 32)
        made = MatrixDescriptor(start, leading, stride, base, span)
        if _fits(made, extent, depth, bool(transposed), nbytes):
            return made


def _use(r: random.Random, instruction: Instruction, layout: str) -> Use:
    i = instruction
    a = _descriptor(r, layout, 64, i.a, i.majors[0], A_BYTES)
    b = _descriptor(r, layout, i.n, i.b, i.majors[1], B_BYTES)
    b = MatrixDescriptor(b.start + A_BYTES, b.leading, b.stride, b.base, b.span)
    return Use(a, b, scale=r.random() < 0.8)


_NOWHERE = Use(MatrixDescriptor(0, 0, 0), MatrixDescriptor(0, 0, 0))
_LAYOUTS = ("orderly", "orderly", "shifted", "any", "any", "orderly")


def _random(instruction: Instruction, number: int, seed: int) -> Configuration:
    r = random.Random(f"{seed} {instruction.name} {number}")
    values = VALUES[number % len(VALUES)]
    if instruction.result == "s32" or not instruction.multiplies:
        values = "bits"
    index = zlib.crc32(f"{seed} {instruction.name} {number}".encode())
    if instruction.family != "wgmma":
        count = r.choice((1, 1, 2, MOST_STEPS)) if instruction.family == "mma" else 1
        return Configuration(instruction, (_NOWHERE,) * count, values, index)
    layout = _LAYOUTS[(number + index) % len(_LAYOUTS)]
    # More than one use only where nothing is rounded: else it could not be told which of them was.
    count = r.choice((1, 2, MOST_STEPS)) if values == EXACT or instruction.result == "s32" else 1
    return Configuration(instruction, tuple(_use(r, instruction, layout) for _ in range(count)), values, index, layout)


@functools.cache
def ordinary(instruction: Instruction, seed: int = SEED) -> tuple[Configuration, ...]:
    """Configurations of an instruction that no hardware refuses; the default seed's are those that were recorded."""
    return tuple(_random(instruction, number, seed) for number in range(_count(instruction)))


def _count(instruction: Instruction) -> int:
    if instruction.result == "s32" or not instruction.multiplies:
        return 3
    return len(VALUES)


@functools.cache
def risky(instruction: Instruction) -> tuple[Configuration, ...]:
    """What may be an error, or mean something else than the simulator takes it for: bits of a descriptor without a
    meaning, and addresses that only fit when they wrap around at 18 bits."""
    if instruction.family != "wgmma" or instruction.n > 24 or instruction.result == "s32":
        return ()
    r = random.Random(f"{SEED} risky {instruction.name}")
    index = zlib.crc32(f"{SEED} risky {instruction.name}".encode())
    use = _use(r, instruction, "orderly")
    reserved = 1 << r.choice([bit for bit in range(64) if RESERVED >> bit & 1]) if r.random() < 0.7 else RESERVED
    backwards = (1 << 18) - 512
    wrapped = MatrixDescriptor(A_BYTES + 4096, backwards, backwards, 0, 16)
    return (
        Configuration(instruction, (Use(use.a, use.b, True, reserved),), EXACT, index, f"reserved bits {reserved:#x}"),
        Configuration(instruction, (Use(use.a, wrapped),), EXACT, index, "strides of -512 bytes"),
    )


# -- what numbers ------------------------------------------------------------------------------------------------------

# Width in memory, mantissa bits, exponent bits; and the lowest bits that a tf32 operand carries along.
_FORMATS = {
    "f16": (16, 10, 5),
    "bf16": (16, 7, 8),
    "tf32": (32, 10, 8),
    "f32": (32, 23, 8),
    "e4m3": (8, 3, 4),
    "e5m2": (8, 2, 5),
}
_TF32_UNUSED = 13


def special_bits(kind: str) -> list[int]:
    """Bits of zeros, infinities, NaNs, subnormals and limits of a floating-point type, of either sign."""
    _, mantissa, exponent = _FORMATS[kind]
    top = ((1 << exponent) - 1) << mantissa
    if kind == "e4m3":
        found = [0, 1, 7, 8, top | 6, top | 7]
    else:
        found = [0, 1, (1 << mantissa) - 1, 1 << mantissa, top - 1, top, top | 1, top | 1 << (mantissa - 1)]
        found.append(top | (1 << mantissa) - 1)
    sign = 1 << (mantissa + exponent)
    return found + [bits | sign for bits in found]


def _exponents(values: str, exponent: int, small: bool) -> tuple[int, int]:
    """The biased exponents, from and to, of numbers drawn; few of them above 0 if `small`."""
    bias, top = (1 << exponent - 1) - 1, (1 << exponent) - 1
    most = bias + 3 if small else top - 1
    if values == "spread":
        return max(1, bias - 30), min(most, bias + 31)
    if values == "subnormals":
        return 0, min(most, bias + 60)
    return bias - 2, bias + 2


def floats(values: str, kind: str, raw: np.ndarray, small: bool = False) -> np.ndarray:
    """Bits of numbers of a type, as uint64, from random 64-bit words. `small`: their sums shall fit into f16."""
    _, mantissa, exponent = _FORMATS[kind]
    one = np.uint64
    fraction, sign = raw & one((1 << mantissa) - 1), (raw >> one(63)) << one(mantissa + exponent)
    draw = raw >> one(32) & one(0xFFFFFF)
    if values == "bits":
        bits = raw >> one(63 - mantissa - exponent) & one((1 << (mantissa + exponent + 1)) - 1)
    elif values == EXACT:  # 0 to 3, and much more in accumulators
        bias = ((1 << exponent - 1) - 1) << mantissa
        numbers = [0, bias, bias + (1 << mantissa), bias + (3 << mantissa - 1)]
        numbers += [bias + (power << mantissa) for power in range(3, 7)] if kind == "f32" else []
        chosen = np.array(numbers, one)
        bits = sign | chosen.take(draw % one(len(chosen)))
    else:
        low, high = _exponents(values, exponent, small)
        biased = one(low) + draw % one(high - low + 1)
        if values == "subnormals":
            biased = np.where(draw >> one(8) & one(3) == 0, one(0), biased)
        bits = sign | biased << one(mantissa) | fraction
        if kind == "e4m3":  # its highest exponent's last code is NaN
            nan = bits & one(0x7F) == one(0x7F)
            bits = np.where(nan, bits ^ one(1), bits)
        if values == "specials":
            chosen = np.array(special_bits(kind), one)
            special = draw & one(63) == one(0)
            bits = np.where(special, chosen.take((draw >> one(6)) % one(len(chosen))), bits)
    if kind == "tf32":
        bits = bits << one(_TF32_UNUSED) | raw >> one(20) & one((1 << _TF32_UNUSED) - 1)
    return bits


def _elements(values: str, kind: str, words: int, index: int, stream: int, small: bool = False) -> np.ndarray:
    """So many 32-bit words of elements of a type."""
    generator = np.random.PCG64([SEED, index, stream])
    if kind not in _FORMATS or (values == "bits" and kind != "tf32"):
        return generator.random_raw(-(-words // 2)).astype("<u8").view("<u4")[:words]
    bits = floats(values, kind, generator.random_raw(words * 32 // _FORMATS[kind][0]), small)
    return bits.astype(f"<u{_FORMATS[kind][0] // 8}").view("<u4")


def _accumulators(configuration: Configuration) -> np.ndarray:
    i = configuration.instruction
    return _elements(configuration.values, i.result, THREADS * i.d_count, configuration.index, 2, i.result == "f16")


def image(configuration: Configuration) -> np.ndarray:
    """The initial bytes of the shared buffer: A's part, B's part."""
    if configuration.given[0]:
        return np.frombuffer(configuration.given[0], np.uint8)
    i = configuration.instruction
    kinds = (i.a, i.b) if i.multiplies else ("u8", "u8")
    parts = [
        _elements(configuration.values, kind, nbytes // 4, configuration.index, stream, i.result == "f16")
        for stream, (kind, nbytes) in enumerate(zip(kinds, (A_BYTES, B_BYTES), strict=True))
    ]
    return np.concatenate(parts).view(np.uint8)


def inputs(configuration: Configuration) -> np.ndarray:
    """What the threads hold: uint32 (threads, words)."""
    i = configuration.instruction
    out = np.zeros((THREADS, i.inputs), np.uint32)
    if configuration.given[1]:
        return np.frombuffer(configuration.given[1], np.uint32).reshape(out.shape)
    if not i.multiplies:
        raw = _elements("bits", "u8", THREADS * i.inputs, configuration.index, 2).reshape(out.shape)
        out[:] = raw
        if i.family == "ldmatrix":
            out[:, 0] = raw[:, 0] % (IMAGE_BYTES // 16) * 16
        elif i.family == "stmatrix":  # no two lanes write the same bytes
            out[:, 0] = 16 * np.argsort(np.random.PCG64([SEED, configuration.index, 3]).random_raw(256))[:THREADS]
        return out
    out[:, : i.d_count] = _accumulators(configuration).reshape(THREADS, -1)
    place = i.d_count
    for step in range(MOST_STEPS):
        for stream, (kind, count) in enumerate(((i.a, i.a_count), (i.b, i.b_count))):
            source = 4 + 2 * step + stream
            words = _elements(
                configuration.values, kind, THREADS * count, configuration.index, source, i.result == "f16"
            )
            out[:, place : place + count] = words.reshape(THREADS, -1)
            place += count
    return out


def job(configuration: Configuration) -> np.ndarray:
    """How often to execute it, and the descriptors: uint64 words."""
    out = np.zeros((MOST_STEPS + 1, STEP_BYTES // 8), np.uint64)
    out[0, 0] = len(configuration.uses)
    for row, use in zip(out[1:], configuration.uses, strict=False):
        row[:3] = use.a.encode() | use.reserved, use.b.encode() | use.reserved, use.scale
    return out.reshape(-1)

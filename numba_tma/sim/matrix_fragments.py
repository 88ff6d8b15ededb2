"""Matrices in registers: how lanes hold them, and what their bits are as numbers.

Every fragment of a multiplicand is made of 8-row slices. In a slice, lane l of a warp holds the 32-bit words l % 4,
l % 4 + 4, … of row l // 4, whatever the elements are: one f32-sized, two 16-bit or four 8-bit ones to a word, the
first in the lowest bits. Rows run along M for A and along N for B (its columns), words along K. A's registers
alternate between the first and the second slice of 8 rows. An accumulator's lane l holds columns 2 (l % 4) and
2 (l % 4) + 1 of each 8 columns in row l // 4 of each slice, 16-bit ones together in one register.

Numbers are float64, which holds every product of two elements exactly.
Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and its neighbours, "Matrix Fragments
for wgmma.mma_async.m64nNk16" and its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .formats import SMALL

# Bits of an element of each multiplicand type.
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
# Type of an accumulator's registers; f16 ones hold two elements.
ACCUMULATORS = {
    "f32": np.dtype(np.float32),
    "s32": np.dtype(np.int32),
    "f16": np.dtype(np.uint32),
}


def _table(kind: str) -> np.ndarray:
    """The value of each of an 8-bit format's 256 codes."""
    form = SMALL[kind]
    code = np.arange(256)
    exponent, mantissa = (code & 0x7F) >> form.mantissa, code & ((1 << form.mantissa) - 1)
    significand = np.where(exponent > 0, mantissa + (1 << form.mantissa), mantissa)
    size = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - form.bias - form.mantissa)
    size[(code & 0x7F) > form.largest] = np.nan
    if form.infinity is not None:
        size[(code & 0x7F) == form.infinity] = np.inf
    return np.where(code & 0x80, -size, size)


_TABLES = {kind: _table(kind) for kind in ("e4m3", "e5m2")}


def _nibbles(words: np.ndarray) -> np.ndarray:
    data = words.view(np.uint8)
    return np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


_DECODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "f16": lambda words: words.view(np.float16).astype(np.float64),
    "bf16": lambda words: (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    # The tensor cores leave the lowest 13 bits of a tf32 operand unread.
    "tf32": lambda words: (words.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64),
    "e4m3": lambda words: _TABLES["e4m3"].take(words.view(np.uint8)),
    "e5m2": lambda words: _TABLES["e5m2"].take(words.view(np.uint8)),
    "s8": lambda words: words.view(np.int8).astype(np.float64),
    "u8": lambda words: words.view(np.uint8).astype(np.float64),
    "s4": lambda words: (_nibbles(words) ^ 8).astype(np.float64) - 8,
    "u4": lambda words: _nibbles(words).astype(np.float64),
}


def numbers(kind: str, words: np.ndarray) -> np.ndarray:
    """The elements of rows of bytes (any dtype, contiguous) as float64, lowest bits first."""
    return _DECODE[kind](words)


def multiplicand(registers: np.ndarray, slices: int) -> np.ndarray:
    """Rows of A or B from registers.

    Takes uint32 (registers, 32 x warps), gives uint32 (warps, 8 x slices, 4 x registers / slices): each row's words in
    order.
    """
    count, lanes = registers.shape
    parts = registers.reshape(count // slices, slices, lanes // 32, 8, 4).transpose(2, 1, 3, 0, 4)
    return np.ascontiguousarray(parts).reshape(lanes // 32, 8 * slices, 4 * count // slices)


def accumulator_registers(kind: str, slices: int, columns: int) -> int:
    """How many registers of a lane an accumulator of 8 x slices rows takes."""
    return columns // 8 * slices * (1 if kind == "f16" else 2)


def by_register(kind: str, matrices: np.ndarray, slices: int) -> np.ndarray:
    """Elements of accumulators in the order of registers.

    Takes (warps x 8 x slices, columns) or the same with the rows split, gives (registers, 32 x warps), or, of f16,
    (registers, 32 x warps, 2): the two elements of a register.
    """
    columns = matrices.shape[-1]
    parts = matrices.reshape(-1, slices, 8, columns // 8, 4, 2)
    lanes = parts.shape[0] * 32
    if kind == "f16":
        return parts.transpose(3, 1, 0, 2, 4, 5).reshape(-1, lanes, 2)
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(-1, lanes)


def in_registers(kind: str, matrices: np.ndarray, slices: int) -> np.ndarray:
    """Accumulators of that type's elements as registers of ACCUMULATORS[kind]: (registers, lanes)."""
    found = np.ascontiguousarray(by_register(kind, matrices, slices))
    return found.view(np.uint32)[..., 0] if kind == "f16" else found


def from_registers(kind: str, registers: np.ndarray, rows: int, slices: int) -> np.ndarray:
    """The reverse: (matrices, rows, columns) of float32, int32 or float16 from (registers, lanes)."""
    lanes = registers.shape[1]
    if kind == "f16":
        parts = registers.view(np.float16).reshape(-1, slices, lanes // 32, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5)
    else:
        parts = registers.reshape(-1, slices, 2, lanes // 32, 8, 4).transpose(3, 1, 4, 0, 5, 2)
    return np.ascontiguousarray(parts).reshape(-1, rows, 8 * parts.shape[3])


def add_integers(products: np.ndarray, held: np.ndarray | None, saturate: bool) -> np.ndarray:
    """Products (whole numbers in float64) plus int32 numbers (None: zero), as int32: wrapped around, or stopped at the
    ends of their range if `saturate`."""
    # Sums of one instruction's products and 32 bits are exact in float64.
    total = products if held is None else products + held
    if saturate:
        return np.clip(total, -(2.0**31), 2.0**31 - 1).astype(np.int32)
    return total.astype(np.int64).astype(np.int32)

"""Matrices in shared memory as wgmma sees them: the 64-bit matrix descriptor, and where it finds each 16 bytes.

A matrix is read in units of 16 bytes. K-major, a unit holds elements along K of one row (of A; of B a column), and each
instruction reads two of them of every row; MN-major, it holds elements of eight neighbouring rows at one K.
The byte address of a unit, before swizzling, is

    K-major   no swizzle     start + row % 8 * 16 + row // 8 * stride + unit * leading
              32, 64, 128 B  start + row % 8 * span + row // 8 * stride + unit * 16
    MN-major  no swizzle     start + unit * stride + k % 8 * 16 + k // 8 * leading
              32, 64, 128 B  start + unit % (span // 16) * 16 + unit // (span // 16) * leading
                                   + k % 8 * span + k // 8 * stride

with the span 32, 64 or 128 bytes. Swizzling then exchanges units by address bits: bits 4 to 6 are XORed with bits 7
to 9 (128 B; one and two bits fewer for 64 B and 32 B), counted from where the pattern begins, which is the base offset.
Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout", "Matrix Descriptor Format".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# Span in bytes of each swizzle mode; 16 stands for none.
SPANS = (16, 128, 64, 32)
_ADDRESS = 0x3FFFF


@dataclass(frozen=True, slots=True)
class MatrixDescriptor:
    """A matrix in shared memory.

    `start` (of the 256 KiB that 18 bits reach), `leading` and `stride` are in bytes; `base` is the base offset, in
    128 bytes; `span` the width of the swizzle in bytes, 16 for none.
    """

    start: int
    leading: int
    stride: int
    base: int = 0
    span: int = 16

    def encode(self) -> int:
        """The 64-bit value."""
        fields = [(value & _ADDRESS) >> 4 for value in (self.start, self.leading, self.stride)]
        return fields[0] | fields[1] << 16 | fields[2] << 32 | (self.base & 7) << 49 | SPANS.index(self.span) << 62


def decode(value: int) -> MatrixDescriptor:
    """What a 64-bit value says. Bits without a meaning are not looked at."""
    start, leading, stride = ((value >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return MatrixDescriptor(start, leading, stride, value >> 49 & 7, SPANS[value >> 62])


@lru_cache(maxsize=1024)
def _offsets(leading: int, stride: int, span: int, extent: int, depth: int, transposed: bool) -> np.ndarray:
    if transposed:
        k, unit = np.arange(depth)[:, None], np.arange(extent // 8)
        if span == 16:
            return unit * stride + k % 8 * 16 + k // 8 * leading
        units = span // 16
        return unit % units * 16 + unit // units * leading + k % 8 * span + k // 8 * stride
    row, unit = np.arange(extent)[:, None], np.arange(2)
    return row % 8 * span + row // 8 * stride + unit * (leading if span == 16 else 16)


def addresses(descriptor: MatrixDescriptor, extent: int, depth: int, transposed: bool) -> np.ndarray:
    """Shared addresses of the 16-byte units that one instruction reads.

    K-major: int64 (extent, 2), `extent` being M or N. MN-major (`transposed`, 16-bit elements): (depth, extent / 8),
    `depth` being K.
    """
    span = descriptor.span
    address = descriptor.start + _offsets(descriptor.leading, descriptor.stride, span, extent, depth, transposed)
    if span > 16:
        phase = (address >> 7) - descriptor.base & span // 16 - 1
        address ^= phase << 4
    return address

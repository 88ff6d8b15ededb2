"""Device helpers for wgmma: matrix descriptors of swizzled tiles, and the product of two of them.

A tile that TMA fetched with the 128-byte swizzle is what the tensor cores read: rows of 128 bytes, eight to a pattern
of 1024 bytes. Along K a row holds 64 elements of 16 bits, 32 of tf32 or 128 of 8 bits: always four of the tensor
core's steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import cuda
from numba.cuda.types import uint32, uint64

from . import dtypes, ptx
from .unroll import unroll

WARPGROUP = 128  # threads
ROW_BYTES = 128
_PATTERN_BYTES = 8 * ROW_BYTES
_STEP_BYTES = 32  # of K that one instruction takes
SWIZZLE_NONE, SWIZZLE_128B, SWIZZLE_64B = 0, 1, 2  # as descriptors number them
_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "tf32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


@cuda.jit(device=True, forceinline=True)
def matrix_descriptor(address, leading_bytes, stride_bytes, swizzle=SWIZZLE_128B):
    """Descriptor of a tile at a shared address (uint32): uint64.

    `leading_bytes` and `stride_bytes` are the manual's leading and stride byte offsets, multiples of 16; `swizzle` is
    one of this module's, 128 bytes by default. PTX ISA: Asynchronous Warpgroup Level Matrix Instructions, Matrix
    Descriptor Format.
    """
    # In a cluster a shared address has a block's rank above these 18 bits.
    start = uint64((uint32(address) & uint32(0x3FFFF)) >> uint32(4))
    leading = uint64(leading_bytes // 16) << uint64(16)
    stride = uint64(stride_bytes // 16) << uint64(32)
    return start | leading | stride | uint64(swizzle) << uint64(62)


@cuda.jit(device=True, forceinline=True)
def uniform(condition):
    """`condition`, on which a warp's threads agree, by a vote.

    ptxas cannot see that what came by way of shared memory or a division is the same for a warp. With a vote it can:
    loops that end by it do not make wgmma wait, and what hangs on it stays in uniform registers.
    """
    return cuda.any_sync(0xFFFFFFFF, condition)


@cuda.jit(device=True, forceinline=True)
def consumer_number(thread, consumers):
    """Which of the consumer warpgroups behind the producer's a thread of the block is in, as a uniform number."""
    number = uint32(0)
    for i in range(1, consumers):
        unroll()
        if uniform(thread >= uint32((i + 1) * WARPGROUP)):
            number = uint32(i)
    return number


def k_elements(dtype: object) -> int:
    """Elements of K in a row of a tile, which is 128 bytes wide."""
    return ROW_BYTES // dtypes.lookup(dtype).size


@functools.cache
def make_product(n: int, dtype: object, b_major: str = "k") -> Callable:
    """Make the device function `product(accumulator, a, b, add)` for tiles 64 x K and K x n, K being 128 bytes.

    `accumulator` is a local array of n / 2 float32, `a` and `b` shared addresses (uint32) of tiles with the 128-byte
    swizzle; `add` says whether to add to what the accumulator holds. A's tile has 64 rows along K. B's has, with
    `b_major` "k", n rows along K; with "n" (16-bit types), n / 64 boxes of K rows of 64 columns. It fences, issues four
    wgmma and commits them as one group; wait with `ptx.wgmma_wait_group_m64n{n}_f32(accumulator, pending)`.

    Raises:
        ValueError: no such instruction.
    """
    element = dtypes.lookup(dtype)
    if element.name not in _NAMES:
        raise ValueError(f"wgmma has no operands of {element}; it has {', '.join(_NAMES)}")
    kind = _NAMES[element.name]
    name = f"wgmma_mma_async_m64n{n}k{_STEP_BYTES // element.size}_f32_{kind}_{kind}"
    if b_major not in ("k", "n") or (b_major == "n" and element.size != 2):
        raise ValueError(f"b_major {b_major!r} for {element}: 'k', or 'n' where elements have 16 bits")
    mma = getattr(ptx, name, None)
    if mma is None:
        raise ValueError(f"there is no {name}: N must be 8, 16, 24, 32 or a multiple of 16 up to 256; got {n}")
    if b_major == "k":
        b_leading, b_step = 16, _STEP_BYTES // 16  # the leading offset has no meaning under a swizzle
    else:
        b_leading, b_step = ROW_BYTES * k_elements(element), _STEP_BYTES // element.size * ROW_BYTES // 16
    b_steps = tuple(step * b_step for step in range(4))
    b1, b2, b3 = b_steps[1:]
    by_columns = int(b_major == "n")

    @cuda.jit(device=True, forceinline=True)
    def product(accumulator, a, b, add):
        a = matrix_descriptor(a, 16, _PATTERN_BYTES)
        b = matrix_descriptor(b, b_leading, _PATTERN_BYTES)
        ptx.wgmma_fence()
        mma(accumulator, a, b, add, 0, by_columns)
        mma(accumulator, a + uint64(2), b + uint64(b1), True, 0, by_columns)
        mma(accumulator, a + uint64(4), b + uint64(b2), True, 0, by_columns)
        mma(accumulator, a + uint64(6), b + uint64(b3), True, 0, by_columns)
        ptx.wgmma_commit_group()

    @cuda.jit(device=True, forceinline=True)
    def product_k_major(accumulator, a, b, add):
        a = matrix_descriptor(a, 16, _PATTERN_BYTES)
        b = matrix_descriptor(b, b_leading, _PATTERN_BYTES)
        ptx.wgmma_fence()
        mma(accumulator, a, b, add)
        mma(accumulator, a + uint64(2), b + uint64(2), True)
        mma(accumulator, a + uint64(4), b + uint64(4), True)
        mma(accumulator, a + uint64(6), b + uint64(6), True)
        ptx.wgmma_commit_group()

    return product if element.size == 2 else product_k_major

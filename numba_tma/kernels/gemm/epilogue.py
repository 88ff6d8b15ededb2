"""What happens to an accumulator at the end: bias, activation, rounding to the output's type, the store.

The tensor cores hand a product back in pairs: of every eight columns, lane i of a warp has columns 2 (i % 4) and
2 (i % 4) + 1, of row i / 4 and again of row i / 4 + 8. mma.sync's m16n8 is one such block; wgmma's m64nN is N / 8 of
them for each of its four warps. So one function that stores a pair serves them all.
PTX ISA: "Matrix Fragments for mma.m16n8k16", "Register Fragments for wgmma.mma_async.m64nNk16".
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from ... import dtypes, ptx

ACTIVATIONS = ("none", "relu", "gelu", "silu")
_CUBIC = 0.044715
_TWO_ROOTS = 2 * float(np.sqrt(2 / np.pi))
_LOG2_E = float(np.log2(np.e))


def activation_reference(name: str, x: np.ndarray) -> np.ndarray:
    """The activation called `name` in float64; GELU is the form with tanh.

    Raises:
        ValueError: there is no such activation.
    """
    check_activation(name)
    x = x.astype(np.float64)
    if name == "relu":
        return np.maximum(x, 0)
    if name == "gelu":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + _CUBIC * x**3)))
    if name == "silu":
        return 0.5 * x * (1 + np.tanh(0.5 * x))
    return x


def check_activation(name: str) -> None:
    """See that there is an activation of this name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r}: choose one of {', '.join(map(repr, ACTIVATIONS))}")


def make_activation(name: str) -> Callable:
    """A device function of one float32: 'none', 'relu', 'gelu' (with tanh) or 'silu'.

    GELU and SiLU are x / (1 + exp(-z)): (1 + tanh(z / 2)) / 2 is that quotient without its numerator. Exponential and
    reciprocal are the special function unit's, some 2**-21 off, which no output type but float32 shows.

    Raises:
        ValueError: there is no such activation.
    """
    check_activation(name)

    @cuda.jit(device=True, forceinline=True)
    def none(x):
        return x

    @cuda.jit(device=True, forceinline=True)
    def relu(x):
        return float32(0) if x < float32(0) else x  # a NaN stays one

    @cuda.jit(device=True, forceinline=True)
    def sigmoid(x):
        return ptx.rcp_approx_ftz_f32(float32(1) + ptx.ex2_approx_ftz_f32(x * float32(-_LOG2_E)))

    @cuda.jit(device=True, forceinline=True)
    def silu(x):
        return x * sigmoid(x)

    @cuda.jit(device=True, forceinline=True)
    def gelu(x):
        z = float32(_TWO_ROOTS) * (x + float32(_CUBIC) * x * x * x)
        return x * sigmoid(z)

    return {"none": none, "relu": relu, "gelu": gelu, "silu": silu}[name]


def make_activation_of_two(name: str) -> Callable:
    """`make_activation`'s function for two numbers at once, (x0, x1) to (y0, y1).

    GELU and SiLU divide by two numbers with one reciprocal, that of their product: the special function unit, which has
    a result for every eighth of what the others have, is what they wait for. So that the product is finite, no
    denominator is taken to be more than 2**60; results that this changes are less than 2**-55 of x.

    Raises:
        ValueError: there is no such activation.
    """
    activate = make_activation(name)

    @cuda.jit(device=True, forceinline=True)
    def each(x0, x1):
        return activate(x0), activate(x1)

    @cuda.jit(device=True, forceinline=True)
    def divided(x0, x1, z0, z1):
        """x / (1 + exp(-z))."""
        d0 = float32(1) + ptx.ex2_approx_ftz_f32(cuda.libdevice.fminf(z0 * float32(-_LOG2_E), float32(60)))
        d1 = float32(1) + ptx.ex2_approx_ftz_f32(cuda.libdevice.fminf(z1 * float32(-_LOG2_E), float32(60)))
        inverse = ptx.rcp_approx_ftz_f32(d0 * d1)
        return x0 * (inverse * d1), x1 * (inverse * d0)

    @cuda.jit(device=True, forceinline=True)
    def silu(x0, x1):
        return divided(x0, x1, x0, x1)

    @cuda.jit(device=True, forceinline=True)
    def gelu(x0, x1):
        z0 = x0 * (float32(_TWO_ROOTS) + float32(_TWO_ROOTS * _CUBIC) * (x0 * x0))
        z1 = x1 * (float32(_TWO_ROOTS) + float32(_TWO_ROOTS * _CUBIC) * (x1 * x1))
        return divided(x0, x1, z0, z1)

    return {"gelu": gelu, "silu": silu}.get(name, each)


def make_pack(out_dtype: object) -> Callable:
    """pack(x0, x1): two float32 rounded to float16 or bfloat16, in one uint32 with x0 in the lower half.

    Raises:
        ValueError: another type.
    """
    name = dtypes.lookup(out_dtype).name

    @cuda.jit(device=True, forceinline=True)
    def pack_float16(x0, x1):
        return ptx.cvt_rn_f16x2_f32(x1, x0)

    @cuda.jit(device=True, forceinline=True)
    def pack_bfloat16(x0, x1):
        return ptx.cvt_rn_bf16x2_f32(x1, x0)

    functions = {"float16": pack_float16, "bfloat16": pack_bfloat16}
    if name not in functions:
        raise ValueError(f"{name} is no 16-bit floating-point type: pack takes float16 or bfloat16")
    return functions[name]


def make_stores(out_dtype: object) -> tuple[Callable, Callable, Callable]:
    """Device functions of (address, x0, x1) that round and store both, x0 alone at it, x1 alone one element behind it.

    Storing both at once takes an address aligned to both.

    Raises:
        ValueError: the type is not float16, bfloat16 or float32.
    """

    @cuda.jit(device=True, forceinline=True)
    def both_f32(address, x0, x1):
        ptx.st_global_v2_f32(address, x0, x1)

    @cuda.jit(device=True, forceinline=True)
    def first_f32(address, x0, x1):
        ptx.st_global_f32(address, x0)

    @cuda.jit(device=True, forceinline=True)
    def second_f32(address, x0, x1):
        ptx.st_global_f32(address + uint64(4), x1)

    if dtypes.lookup(out_dtype).name == "float32":
        return both_f32, first_f32, second_f32
    pack = make_pack(out_dtype)

    @cuda.jit(device=True, forceinline=True)
    def both(address, x0, x1):
        ptx.st_global_u32(address, pack(x0, x1))

    @cuda.jit(device=True, forceinline=True)
    def first(address, x0, x1):
        ptx.st_global_u16(address, pack(x0, x1))

    @cuda.jit(device=True, forceinline=True)
    def second(address, x0, x1):
        ptx.st_global_u16(address + uint64(2), pack(x0, x1) >> uint32(16))

    return both, first, second


def make_direct_store(
    out_dtype: object, activation: str = "none", has_bias: bool = False, accumulate: bool = False
) -> Callable:
    """A device function that finishes two neighbours of a row and writes what of them lies inside `out`.

        store_pair(out, row, column, x0, x1, bias)

    `out` is a matrix of `out_dtype` (float16, bfloat16 or float32) whose rows are contiguous; `row` and `column` are
    uint32, the column even; x0 and x1 are float32 and belong to (row, column) and (row, column + 1). `bias` is an
    array of N numbers, float32 or of the output's type, added before the activation; without `has_bias` it is not
    looked at, and any argument will do. With `accumulate` what `out` holds is added last.

    Both go out in one store where they are aligned to it. That needs an even row stride, in elements.

    Raises:
        ValueError: no such activation, or another output type.
    """
    activate = make_activation(activation)
    store_both, store_first, store_second = make_stores(out_dtype)
    itemsize = dtypes.lookup(out_dtype).size
    misaligned = 2 * itemsize - 1

    @cuda.jit(device=True, forceinline=True)
    def store_pair(out, row, column, x0, x1, bias):
        rows, columns = uint32(out.shape[0]), uint32(out.shape[1])
        if row < rows and column < columns:
            second = uint32(column + uint32(1))
            both = second < columns
            if has_bias:
                x0 += float32(bias[column])
                x1 += float32(bias[second]) if both else float32(0)
            x0, x1 = activate(x0), activate(x1)
            if accumulate:
                x0 += float32(out[row, column])
                x1 += float32(out[row, second]) if both else float32(0)
            start, stride = ptx.global_address(out), uint64(out.strides[0])
            address = start + uint64(row) * stride + uint64(column) * uint64(itemsize)
            if both and uint32(start | stride) & uint32(misaligned) == 0:
                store_both(address, x0, x1)
            else:
                store_first(address, x0, x1)
                if both:
                    store_second(address, x0, x1)

    return store_pair

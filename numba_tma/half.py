"""Arithmetic, comparisons and mathematics of float16 and bfloat16 in kernels, as instructions.

Numba-CUDA makes each of these a call of a CUDA C++ function that has to be compiled at run time and linked in,
through stack memory. Here they are instructions. Importing this module replaces Numba's versions of what
`numba.cuda.fp16` and `numba.cuda.bf16` define for scalars: the operators, `math`'s functions and the functions that
have the names of CUDA's intrinsics (`hfma`, `float32_to_bfloat16_rz`, …).

Rounding, to nearest with ties to even unless the name says otherwise:

=====================================  ============================================================
`+`, `-`, `*`, `hfma`, `_sat`, `_relu`  rounded once. A product and a sum are not contracted to one `hfma`
`/`, `hrcp`, `sqrt`                     in float32 and again to 16 bits, which is the same as rounded once
`exp`, `log`, `sin`, `tanh`, …          by libdevice in float32 (a few units in its last place), then to 16 bits:
                                        correctly rounded but where the exact result is that near to a tie
`htanh_approx`                          the hardware's approximation
`floor`, `ceil`, `trunc`, `hrint`       exact
=====================================  ============================================================

Subnormal numbers count, except those of bfloat16 under `fastmath`. Of two numbers one of which is a NaN `hmin` and
`hmax` give the other. All of it runs on sm_80, where a bfloat16 sum is a fused product with one. What
remains with CUDA C++ is refused by the compiler with its name: packed pairs, shuffles, loads and atomics of pointers.

PTX ISA: "Half Precision Floating Point Instructions", "cvt".
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba.cuda import bf16, cgutils, fp16, types
from numba.cuda._internal import cuda_bf16, cuda_fp16

from .conversions import F32, I16, I32, asm, from_float32, to_float32, to_integer, to_odd

Emit = Callable[..., ir.Value]


@dataclass(frozen=True)
class _Half:
    """A 16-bit format: its name in PTX and in CUDA's function names, Numba's type, where Numba keeps its functions."""

    ptx: str
    cuda: str
    numba_type: types.Type
    registry: object
    module: object
    one: int


_FORMATS = (
    _Half("f16", "half", types.float16, fp16.target_registry, cuda_fp16, 0x3C00),
    _Half("bf16", "bfloat16", types.bfloat16, bf16.target_registry, cuda_bf16, 0x3F80),
)
_SIGN = 0x8000  # as a number, minus zero


def _instruction(mnemonic: str) -> Emit:
    """An instruction of 16-bit operands and result."""

    def emit(builder, *values):
        operands = ", ".join(f"${i}" for i in range(len(values) + 1))
        return asm(builder, I16, f"{mnemonic} {operands};", "=h" + ",h" * len(values), *values)

    return emit


def _single(builder: ir.IRBuilder, function: str, *values: ir.Value) -> ir.Value:
    """A float32 function of libdevice."""
    signature = ir.FunctionType(F32, [F32] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, function), values)


def _in_float32(form: str, function: str) -> Emit:
    def emit(builder, *values):
        wide = [to_float32(builder, form, value) for value in values]
        return from_float32(builder, form, _single(builder, function, *wide))

    return emit


def _arithmetic(half: _Half) -> dict[str, Emit]:
    """Sum, difference, product and fused product of a format."""
    if half.ptx == "f16":
        return {name: _instruction(f"{name}.rn.f16") for name in ("add", "sub", "mul", "fma")}
    # add.bf16 and its like need sm_90.
    fma = _instruction("fma.rn.bf16")
    one, minus_one, minus_zero = (I16(bits) for bits in (half.one, half.one | _SIGN, _SIGN))
    return {
        "add": lambda builder, a, b: fma(builder, a, one, b),
        "sub": lambda builder, a, b: fma(builder, b, minus_one, a),
        "mul": lambda builder, a, b: fma(builder, a, b, minus_zero),
        "fma": fma,
    }


def _saturated(half: _Half, emit: Emit) -> Emit:
    """Into [0, 1], a NaN to zero."""
    largest, smallest = _instruction(f"max.{half.ptx}"), _instruction(f"min.{half.ptx}")

    def saturated(builder, *values):
        return smallest(builder, largest(builder, emit(builder, *values), I16(0)), I16(half.one))

    return saturated


def _comparison(half: _Half, sign: str, unordered: bool) -> Emit:
    def emit(builder, *values):
        compare = builder.fcmp_unordered if unordered else builder.fcmp_ordered
        return compare(sign, *(to_float32(builder, half.ptx, value) for value in values))

    return emit


def _is_nan(half: _Half) -> Emit:
    def emit(builder, value):
        wide = to_float32(builder, half.ptx, value)
        return builder.fcmp_unordered("uno", wide, wide)

    return emit


def _is_infinite(half: _Half) -> Emit:
    """1, -1 or 0."""
    infinity = 0x7C00 if half.ptx == "f16" else 0x7F80

    def emit(builder, value):
        plus = builder.icmp_unsigned("==", value, I16(infinity))
        minus = builder.icmp_unsigned("==", value, I16(infinity | _SIGN))
        return builder.sub(builder.zext(plus, I32), builder.zext(minus, I32))

    return emit


def _whole(half: _Half, mode: str) -> Emit:
    if half.ptx == "f16":
        return _instruction(f"cvt.{mode}.f16.f16")

    def emit(builder, value):
        wide = to_float32(builder, "bf16", value)
        return from_float32(builder, "bf16", asm(builder, F32, f"cvt.{mode}.f32.f32 $0, $1;", "=f,f", wide))

    return emit


def _approximate_tanh(half: _Half) -> Emit:
    if half.ptx == "f16":
        return _instruction("tanh.approx.f16")

    def emit(builder, value):  # tanh.approx.bf16 needs sm_90
        wide = to_float32(builder, "bf16", value)
        return from_float32(builder, "bf16", asm(builder, F32, "tanh.approx.f32 $0, $1;", "=f,f", wide))

    return emit


_FUNCTIONS = ("exp", "exp2", "exp10", "log", "log2", "log10", "sin", "cos", "tanh", "rsqrt")
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _named(half: _Half) -> dict[object, Emit]:
    """What to emit for each operator, and for each CUDA function by its name."""
    exact = _arithmetic(half)
    divide = _in_float32(half.ptx, "__nv_fdiv_rn")
    minus: Emit = lambda builder, value: builder.xor(value, I16(_SIGN))  # noqa: E731
    magnitude: Emit = lambda builder, value: builder.and_(value, I16(0x7FFF))  # noqa: E731
    same: Emit = lambda builder, value: value  # noqa: E731
    table: dict[object, Emit] = {
        operator.neg: minus,
        operator.pos: same,
        operator.truediv: divide,
        operator.itruediv: divide,
        abs: magnitude,
        "__hneg": minus,
        "__habs": magnitude,
        "__hdiv": divide,
        "__hfma": exact["fma"],
        "__hfma_sat": _saturated(half, exact["fma"]),
        "__hfma_relu": _instruction(f"fma.rn.relu.{half.ptx}"),
        "__hisnan": _is_nan(half),
        "__hisinf": _is_infinite(half),
        "hsqrt": _in_float32(half.ptx, "__nv_fsqrt_rn"),
        "hrcp": _in_float32(half.ptx, "__nv_frcp_rn"),
        "htanh_approx": _approximate_tanh(half),
        "hrint": _whole(half, "rni"),
        "htrunc": _whole(half, "rzi"),
        "hfloor": _whole(half, "rmi"),
        "hceil": _whole(half, "rpi"),
    }
    for name in ("add", "sub", "mul"):
        table |= dict.fromkeys((getattr(operator, name), getattr(operator, f"i{name}")), exact[name])
        table |= dict.fromkeys((f"__h{name}", f"__h{name}_rn"), exact[name])
        table[f"__h{name}_sat"] = _saturated(half, exact[name])
    for name, sign in _COMPARISONS.items():
        # In Python a NaN is unequal to everything; CUDA's __hne is false for it, its __hneu true.
        table[getattr(operator, name)] = _comparison(half, sign, unordered=name == "ne")
        table[f"__h{name}"] = _comparison(half, sign, unordered=False)
        table[f"__h{name}u"] = _comparison(half, sign, unordered=True)
    for name in ("min", "max"):
        table[f"__h{name}"] = _instruction(f"{name}.{half.ptx}")
        table[f"__h{name}_nan"] = _instruction(f"{name}.NaN.{half.ptx}")
    for name in _FUNCTIONS:
        table[f"h{name}"] = _in_float32(half.ptx, f"__nv_{name}f")
    for integer in ("short", "ushort"):
        table |= dict.fromkeys((f"__{half.cuda}_as_{integer}", f"__{integer}_as_{half.cuda}"), same)
    return table


_CONVERSION = re.compile(r"__([a-z]+)2(half|bfloat16)(?:_(r[nzdu]))?|__(half|bfloat16)2([a-z]+)(?:_(r[nzdu]))?")


def _conversion(half: _Half, name: str) -> Callable | None:
    """The lowering of a CUDA conversion function, told by its name."""
    match = _CONVERSION.fullmatch(name)
    if match is None:
        return None
    _, narrows, narrow_mode, _, _, wide_mode = match.groups()

    def narrow(context, builder, signature, args):
        wide = to_odd(context, builder, signature.args[0], args[0])
        return from_float32(builder, half.ptx, wide, narrow_mode or "rn")

    def widen(context, builder, signature, args):
        wide = to_float32(builder, half.ptx, args[0])
        if isinstance(signature.return_type, types.Integer):
            return to_integer(builder, signature.return_type, wide, wide_mode)
        return wide

    return narrow if narrows else widen


def _constructor(half: _Half) -> Callable:
    def lower(context, builder, signature, args):
        if not args:
            return I16(0)
        return context.cast(builder, args[0], signature.args[0], half.numba_type)

    return lower


def _lowering(half: _Half, key: object, named: dict[object, Emit]) -> Callable | None:
    """What replaces one of Numba's functions, or None."""
    if key is half.numba_type:
        return _constructor(half)
    if getattr(key, "__module__", None) == half.module.__name__:
        key = key.__name__
        conversion = _conversion(half, key)
        if conversion is not None:
            return conversion
    emit = named.get(key)
    return None if emit is None else lambda context, builder, signature, args: emit(builder, *args)


def _replace(half: _Half) -> None:
    named = _named(half)
    for _, key, arguments in list(half.registry.functions):
        scalars = all(isinstance(t, (types.Integer, types.Float)) or t == types.bfloat16 for t in arguments)
        lowering = _lowering(half, key, named) if scalars else None
        if lowering is not None:
            half.registry.lower(key, *arguments)(lowering)


for _half in _FORMATS:
    _replace(_half)

"""bfloat16 conversions in kernels, as instructions.

Numba-CUDA converts bfloat16 by calling functions of CUDA C++ that have to be compiled at run time and linked
in, through stack memory. Here the same conversions are one or two instructions, with the same rounding (to
nearest, ties to even). Importing this module replaces Numba's. Arithmetic on bfloat16 values themselves still
calls CUDA C++: convert to float32 first. PTX ISA: "cvt".
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import bf16, types  # noqa: F401 - bf16 registers what is replaced below
from numba.cuda.extending import lower_cast

_I16, _I32, _F32, _F64 = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.DoubleType()
_INTEGERS = (
    types.int8,
    types.int16,
    types.int32,
    types.int64,
    types.uint8,
    types.uint16,
    types.uint32,
    types.uint64,
)


def _asm(builder, result: ir.Type, text: str, constraints: str, value: ir.Value) -> ir.Value:
    return builder.call(ir.InlineAsm(ir.FunctionType(result, [value.type]), text, constraints), [value])


@lower_cast(types.bfloat16, types.float32)
def _to_float32(context, builder, source, target, value):
    return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)


@lower_cast(types.bfloat16, types.float64)
@lower_cast(types.bfloat16, types.float16)
def _through_float32(context, builder, source, target, value):
    exact = _to_float32(context, builder, source, types.float32, value)
    return context.cast(builder, exact, types.float32, target)


@lower_cast(types.float32, types.bfloat16)
def _from_float32(context, builder, source, target, value):
    return _asm(builder, _I16, "cvt.rn.bf16.f32 $0, $1;", "=h,f", value)


@lower_cast(types.float16, types.bfloat16)
def _from_float16(context, builder, source, target, value):
    return _from_float32(context, builder, types.float32, target, context.cast(builder, value, source, types.float32))


@lower_cast(types.float64, types.bfloat16)
def _from_float64(context, builder, source, target, value):
    # Rounded twice to nearest, a value just beside a tie would go the wrong way: the first step rounds to
    # odd.
    truncated = _asm(builder, _F32, "cvt.rz.f32.f64 $0, $1;", "=f,d", value)
    inexact = builder.fcmp_unordered("!=", builder.fpext(truncated, _F64), value)
    odd = builder.or_(builder.bitcast(truncated, _I32), builder.zext(inexact, _I32))
    return _from_float32(context, builder, types.float32, target, builder.bitcast(odd, _F32))


def _from_integer(context, builder, source, target, value):
    exact = context.cast(builder, value, types.unliteral(source), types.float64)
    return _from_float64(context, builder, types.float64, target, exact)


def _to_integer(context, builder, source, target, value):
    exact = _to_float32(context, builder, source, types.float32, value)
    return context.cast(builder, exact, types.float32, target)


lower_cast(types.IntegerLiteral, types.bfloat16)(_from_integer)
for _integer in _INTEGERS:
    lower_cast(_integer, types.bfloat16)(_from_integer)
    lower_cast(types.bfloat16, _integer)(_to_integer)

"""Conversions of the 16- and 8-bit floating-point types in kernels, as instructions.

Numba-CUDA converts bfloat16 and the 8-bit types by calling functions of CUDA C++ that have to be compiled at run
time and linked in, through stack memory. Here the same conversions are a few instructions, with the same rounding:
to nearest, ties to even, once, whatever the source; the 8-bit types saturate at their largest number. bfloat16
and the 8-bit types convert to an integer towards zero. float16 does so as Numba has it, to the nearest, unlike
NumPy. Global constants and `bool()` of the 16-bit types, local and shared arrays of bfloat16 and of the 8-bit types,
and variables that are now bfloat16, now another number, which Numba-CUDA rejects, work too.

Importing this module replaces Numba's versions. No architecture's own instruction is needed: all of it runs on
sm_80. PTX ISA: "cvt".
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.cuda import (
    bf16,  # noqa: F401 - registers what is replaced below
    cudaimpl,
    types,
)
from numba.cuda._internal import cuda_fp8
from numba.cuda.core.imputils import lower_constant
from numba.cuda.extending import as_numba_type, lower_builtin, lower_cast

I8, I16, I32, F32, F64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.DoubleType()
INTEGERS = (
    types.int8,
    types.int16,
    types.int32,
    types.int64,
    types.uint8,
    types.uint16,
    types.uint32,
    types.uint64,
)
_CONSTRAINTS = {8: "c", 16: "h", 32: "r", 64: "l"}


def asm(builder: ir.IRBuilder, result: ir.Type, text: str, constraints: str, *values: ir.Value) -> ir.Value:
    """The result of an instruction that does nothing but compute it."""
    signature = ir.FunctionType(result, [value.type for value in values])
    return builder.call(ir.InlineAsm(signature, text, constraints), values)


# ---- between 16 and 32 bits


def to_float32(builder: ir.IRBuilder, form: str, value: ir.Value) -> ir.Value:
    """The bits of a float16 ('f16') or bfloat16 ('bf16') as float32, exact."""
    if form == "f16":
        return asm(builder, F32, "cvt.f32.f16 $0, $1;", "=f,h", value)
    return builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), F32)


def from_float32(builder: ir.IRBuilder, form: str, value: ir.Value, mode: str = "rn") -> ir.Value:
    """A float32 in 16 bits, rounded: `mode` is rn, rz, rd (down) or ru (up), as in the names of CUDA's functions."""
    if mode == "rn":
        return asm(builder, I16, f"cvt.rn.{form}.f32 $0, $1;", "=h,f", value)
    nearer_zero = asm(builder, I16, f"cvt.rz.{form}.f32 $0, $1;", "=h,f", value)
    if mode == "rz":
        return nearer_zero
    # No instruction rounds to a bfloat16 up or down. The next number away from zero has the next bits.
    below = builder.fcmp_ordered("<" if mode == "ru" else ">", to_float32(builder, form, nearer_zero), value)
    return builder.add(nearer_zero, builder.zext(below, I16))


def _with_sticky_bit(builder: ir.IRBuilder, truncated: ir.Value, inexact: ir.Value) -> ir.Value:
    """Rounded to odd: a number rounded twice to nearest would go wrong just beside a tie."""
    return builder.bitcast(builder.or_(builder.bitcast(truncated, I32), builder.zext(inexact, I32)), F32)


def float64_to_odd(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A float64 as float32 such that rounding it again, to 16 bits or fewer, rounds the float64 itself."""
    truncated = asm(builder, F32, "cvt.rz.f32.f64 $0, $1;", "=f,d", value)
    return _with_sticky_bit(builder, truncated, builder.fcmp_unordered("!=", builder.fpext(truncated, F64), value))


def integer_to_odd(builder: ir.IRBuilder, numba_type: types.Integer, value: ir.Value) -> ir.Value:
    """An integer as float32 such that rounding it again, to 16 bits or fewer, rounds the integer itself."""
    signed, width = numba_type.signed, numba_type.bitwidth
    if width <= 16:  # exact
        return (builder.sitofp if signed else builder.uitofp)(value, F32)
    kind = f"{'s' if signed else 'u'}{width}"
    truncated = asm(builder, F32, f"cvt.rz.f32.{kind} $0, $1;", f"=f,{_CONSTRAINTS[width]}", value)
    back = (builder.fptosi if signed else builder.fptoui)(truncated, value.type)
    return _with_sticky_bit(builder, truncated, builder.icmp_unsigned("!=", back, value))


def to_integer(builder: ir.IRBuilder, numba_type: types.Integer, value: ir.Value, mode: str = "rz") -> ir.Value:
    """A float32 as an integer: rounded by rn, rz, rd or ru, saturated."""
    width = numba_type.bitwidth
    kind = f"{'s' if numba_type.signed else 'u'}{width}"
    whole = {"rn": "rni", "rz": "rzi", "rd": "rmi", "ru": "rpi"}[mode]
    return asm(builder, ir.IntType(width), f"cvt.{whole}.{kind}.f32 $0, $1;", f"={_CONSTRAINTS[width]},f", value)


def to_odd(context, builder: ir.IRBuilder, source: types.Type, value: ir.Value) -> ir.Value:
    """Any number as float32, exact or so that rounding it again rounds the number itself."""
    source = types.unliteral(source)
    if source == types.float64:
        return float64_to_odd(builder, value)
    if isinstance(source, types.Integer):
        return integer_to_odd(builder, source, value)
    return context.cast(builder, value, source, types.float32)


# ---- bfloat16


@lower_cast(types.bfloat16, types.float32)
def _widen(context, builder, source, target, value):
    return to_float32(builder, "bf16", value)


@lower_cast(types.bfloat16, types.float64)
@lower_cast(types.bfloat16, types.float16)
def _through_float32(context, builder, source, target, value):
    return context.cast(builder, to_float32(builder, "bf16", value), types.float32, target)


def _narrow(context, builder, source, target, value):
    return from_float32(builder, "bf16", to_odd(context, builder, source, value))


def _narrow_literal(context, builder, source, target, value):
    number = context.get_constant(source.literal_type, source.literal_value)
    return _narrow(context, builder, source.literal_type, target, number)


def _to_integer(context, builder, source, target, value):
    return to_integer(builder, target, to_float32(builder, "bf16", value))


lower_cast(types.IntegerLiteral, types.bfloat16)(_narrow_literal)
for _number in (types.float16, types.float32, types.float64, *INTEGERS):
    lower_cast(_number, types.bfloat16)(_narrow)
for _integer in INTEGERS:
    lower_cast(types.bfloat16, _integer)(_to_integer)


_unify_numbers = types.Number.unify


def _unify(self, context, other):
    # Of two numbers Numba asks NumPy, which does not know bfloat16, and bfloat16 asks itself for ever.
    if types.bfloat16 not in (self, other):
        return _unify_numbers(self, context, other)
    other = self if other == types.bfloat16 else other
    if isinstance(other, types.Float):
        return other if other.bitwidth >= 32 else types.float32
    return types.float64 if isinstance(other, types.Integer) else None


types.Number.unify = type(types.bfloat16).unify = _unify


# ---- constants, truth, arrays


@lower_constant(types.float16)
def _float16_constant(context, builder, numba_type, value):
    return I16(int(np.float16(value).view(np.uint16)))


@lower_constant(types.bfloat16)
def _bfloat16_constant(context, builder, numba_type, value):
    return I16(int(ml_dtypes.bfloat16(value).view(np.uint16)))


def _is_true(context, builder, signature, args):
    magnitude = builder.and_(args[0], I16(0x7FFF))
    return builder.icmp_unsigned("!=", magnitude, I16(0))


def _is_false(context, builder, signature, args):
    return builder.not_(_is_true(context, builder, signature, args))


for _type in (types.float16, types.bfloat16):
    lower_builtin(bool, _type)(_is_true)
    lower_builtin(operator.not_, _type)(_is_false)

FLOAT8 = {
    as_numba_type(cuda_fp8.fp8_e4m3): cuda_fp8.fp8_e4m3,
    as_numba_type(cuda_fp8.fp8_e5m2): cuda_fp8.fp8_e5m2,
}
# Numba-CUDA refuses local and shared arrays of these types, whose layout is that of an integer's.
_STORED_AS = {types.bfloat16: types.uint16, **dict.fromkeys(FLOAT8, types.uint8)}
_numba_array = cudaimpl._generic_array


@functools.wraps(_numba_array)
def _array(context, builder, *, dtype, **options):
    return _numba_array(context, builder, dtype=_STORED_AS.get(dtype, dtype), **options)


cudaimpl._generic_array = _array


# ---- 8 bits


@dataclass(frozen=True)
class _Float8:
    """A format: bits of the mantissa, exponent bias, largest number and its code."""

    mantissa: int
    bias: int
    largest: float
    largest_code: int


_E4M3 = _Float8(3, 7, 448.0, 0x7E)
_E5M2 = _Float8(2, 15, 57344.0, 0x7B)


def _float8_to_float16(builder: ir.IRBuilder, form: _Float8, value: ir.Value) -> ir.Value:
    bits = builder.shl(builder.zext(value, I16), I16(8))
    if form is _E5M2:  # the upper half of a float16
        return bits
    # The exponent read with float16's bias, subnormals too, is off by 2**8.
    sign = builder.and_(bits, I16(0x8000))
    magnitude = builder.lshr(builder.and_(bits, I16(0x7F00)), I16(1))
    scaled = asm(builder, I16, "mul.rn.f16 $0, $1, $2;", "=h,h,h", magnitude, I16(int(np.float16(256).view("u2"))))
    isnan = builder.icmp_unsigned("==", magnitude, I16(0x3F80))
    return builder.or_(sign, builder.select(isnan, I16(0x7E00), scaled))


def _float32_to_float8(builder: ir.IRBuilder, form: _Float8, value: ir.Value) -> ir.Value:
    def float_bits(number: float) -> ir.Constant:
        return I32(int(np.float32(number).view(np.uint32)))

    bits = builder.bitcast(value, I32)
    sign = builder.and_(builder.lshr(bits, I32(24)), I32(0x80))
    magnitude = builder.and_(bits, I32(0x7FFFFFFF))
    isnan = builder.icmp_unsigned(">", magnitude, float_bits(np.inf))
    over = builder.icmp_unsigned(">", magnitude, float_bits(form.largest))
    magnitude = builder.select(over, float_bits(form.largest), magnitude)

    dropped = 23 - form.mantissa
    odd = builder.and_(builder.lshr(magnitude, I32(dropped)), I32(1))
    rounded = builder.add(builder.add(magnitude, I32((1 << dropped - 1) - 1)), odd)
    normal = builder.sub(builder.lshr(rounded, I32(dropped)), I32((127 - form.bias) << form.mantissa))
    # The sum's last bit is worth the format's smallest number.
    smallest = 1 - form.bias - form.mantissa
    shifter = 2.0 ** (23 + smallest)
    total = asm(builder, F32, "add.rn.f32 $0, $1, $2;", "=f,f,f", builder.bitcast(magnitude, F32), F32(shifter))
    subnormal = builder.sub(builder.bitcast(total, I32), float_bits(shifter))

    small = builder.icmp_unsigned("<", magnitude, float_bits(2.0 ** (1 - form.bias)))
    code = builder.or_(builder.select(small, subnormal, normal), sign)
    return builder.trunc(builder.select(isnan, I32(0x7F), code), I8)


def _register_float8(numba_type: types.Type, constructor: type, form: _Float8) -> None:
    registry = cuda_fp8.target_registry

    def widen(context, builder, source, target, value):
        half = _float8_to_float16(builder, form, value)
        single = to_float32(builder, "f16", half)
        if isinstance(target, types.Integer):
            return to_integer(builder, target, single)
        return half if target == types.float16 else context.cast(builder, single, types.float32, target)

    def is_true(context, builder, source, target, value):
        return builder.icmp_unsigned("!=", builder.and_(value, I8(0x7F)), I8(0))

    def narrow(context, builder, signature, args):
        return _float32_to_float8(builder, form, to_odd(context, builder, signature.args[0], args[0]))

    floats = (types.float16, types.bfloat16, types.float32, types.float64)
    for target in (*floats, *INTEGERS):
        registry.lower_cast(numba_type, target)(widen)
    registry.lower_cast(numba_type, types.boolean)(is_true)
    registry.lower(constructor)(lambda context, builder, signature, args: I8(0))
    for source in (*floats, *(t for t in INTEGERS if t.bitwidth > 8)):
        registry.lower(constructor, source)(narrow)


for _type, _form in zip(FLOAT8, (_E4M3, _E5M2), strict=True):
    _register_float8(_type, FLOAT8[_type], _form)

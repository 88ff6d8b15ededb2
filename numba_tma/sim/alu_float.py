"""Floating-point arithmetic: f32, f64, f16, bf16 and their packed pairs.

add, sub, mul, fma, div.rn, rcp.rn, sqrt.rn and their .rz, .rm, .rp forms are correctly rounded, as on the
hardware (f64 in directed modes: alu_directed.py). The approximate ones are computed to about one unit in
the last place, so they agree with a GPU only within the manual's bounds:

=================================================  =====================================================
div.approx, div.full, rcp.approx, sqrt.approx f32   here correctly rounded; hardware 1 to 2 ulp
rsqrt.approx f32                                    here < 1 ulp; hardware 2 ulp (relative 2**-22.9)
ex2.approx, lg2.approx f32                          here 1 ulp; hardware 2 ulp, lg2 2**-22 absolute near 1
sin.approx, cos.approx f32                          here 1 ulp; hardware 2**-20.5 absolute in [-pi, pi]
tanh.approx f32                                     here 1 ulp; hardware relative 2**-11
ex2, tanh of f16, bf16                              here correctly rounded but for ties; hardware 2**-9.9 …
rcp, rsqrt.approx.ftz.f64                           the upper 32 bits of the result, as on hardware
=================================================  =====================================================

div.approx by |b| > 2**126 gives zero, of an infinite dividend NaN, as the manual says.

NaNs: where the operation is written here, NVIDIA's canonical NaN is given for min, max and relu, and for neg
and abs of half precision; the plain NumPy operations (add, sub, mul) hand on the host's NaN, whose sign and
payload differ from the GPU's.

Source: PTX ISA, "Floating Point Instructions", "Half Precision Floating Point Instructions", "Mixed Precision
Floating Point Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .alu_directed import directed, zero_of_rm
from .decode import DTYPES, ROUNDINGS, Alu, Decoder
from .formats import (
    LLVM,
    SMALL,
    clamp_01,
    constant,
    flush,
    nan,
    narrow,
    relu,
    to_odd,
    two_sum_error,
    widen,
)
from .native import Body, ufunc

FLOATS = ("f32", "f64", "f16", "bf16")
_PACKED = {"f16x2": ("f16", 16), "bf16x2": ("bf16", 16), "f32x2": ("f32", 32)}
_ARRAY = {
    "f32": "f32",
    "f64": "f64",
    "f16": "u16",
    "bf16": "u16",
    "f16x2": "u32",
    "bf16x2": "u32",
    "f32x2": "u64",
}
TINY = np.array(2.0**-126, np.float32)

Emit = Callable[[Body, str, list[str]], str]


def elementwise(name: str, kind: str, inputs: int, emit: Emit) -> np.ufunc:
    """The ufunc of ``emit(body, format, values)`` for a format or a packed pair of one."""
    b = Body()
    names = [f"%x{i}" for i in range(inputs)]
    if kind not in _PACKED:
        return ufunc(
            f"{name}.{kind}",
            (_ARRAY[kind],) * inputs,
            _ARRAY[kind],
            b.returns(LLVM[kind], emit(b, kind, names)),
        )
    element, width = _PACKED[kind]
    whole = 2 * width
    halves = []
    for shift in (0, width):
        parts = []
        for x in names:
            part = b(f"trunc i{whole} {b(f'lshr i{whole} {x}, {shift}')} to i{width}")
            parts.append(b(f"bitcast i{width} {part} to {LLVM[element]}") if element == "f32" else part)
        value = emit(b, element, parts)
        value = b(f"bitcast {LLVM[element]} {value} to i{width}") if element == "f32" else value
        halves.append(b(f"shl i{whole} {b(f'zext i{width} {value} to i{whole}')}, {shift}"))
    joined = b(f"or i{whole} {halves[0]}, {halves[1]}")
    return ufunc(f"{name}.{kind}", (_ARRAY[kind],) * inputs, _ARRAY[kind], b.returns(f"i{whole}", joined))


def _finish(d: Decoder, function: Any, kind: str, operands: tuple | None = None) -> Alu:
    operands = d.operands[1:] if operands is None else operands
    return d.finish(function, [(d.operands[0], kind)], [(x, kind) for x in operands])


# ---- add, sub, mul, fma


def add(d: Decoder) -> Alu:
    return _arithmetic(d, "add", 2)


def sub(d: Decoder) -> Alu:
    return _arithmetic(d, "sub", 2)


def mul(d: Decoder) -> Alu:
    return _arithmetic(d, "mul", 2)


def fma(d: Decoder) -> Alu:
    return _arithmetic(d, "fma", 3)


_SIMPLE = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _arithmetic(d: Decoder, operation: str, inputs: int) -> Alu:
    kind = d.type(*FLOATS, *_PACKED)
    second = d.type("f16", "bf16") if d.modifiers and d.modifiers[-1] in ("f16", "bf16") else ""
    mode = d.take(*ROUNDINGS, default="rn")
    ftz, sat, clamps = d.flag("ftz"), d.flag("sat"), d.flag("relu")
    d.flag("noftz")
    d.count(inputs + 1)
    if second:
        d.fail("with operands of two formats is not simulated")
    if mode == "rn" and not (ftz or sat or clamps) and kind in ("f32", "f64") and operation in _SIMPLE:
        return _finish(d, _SIMPLE[operation], kind)

    def emit(b: Body, form: str, values: list[str]) -> str:
        if ftz:
            values = [flush(b, form, x) for x in values]
        value = _compute(b, form, operation, mode, values)
        return _after(b, form, value, ftz, sat, clamps)

    name = ".".join((operation, mode, "ftz" * ftz, "sat" * sat, "relu" * clamps))
    return _finish(d, elementwise(name, kind, inputs, emit), kind)


def _after(b: Body, form: str, value: str, ftz: bool, sat: bool, clamps: bool) -> str:
    if ftz:
        value = flush(b, form, value)
    if sat:
        value = clamp_01(b, form, value)
    if clamps:
        value = relu(b, form, value)
    return value


def _compute(b: Body, form: str, operation: str, mode: str, values: list[str]) -> str:
    """The correctly rounded result of an operation on values of a format."""
    t = LLVM[form]
    if operation == "sub":
        operation = "add"
        values = [values[0], _negated(b, form, values[1])]
    if mode == "rn" and form in ("f32", "f64"):
        if operation == "fma":
            suffix = "f32" if form == "f32" else "f64"
            x, y, z = values
            return b(f"call {t} @llvm.fma.{suffix}({t} {x}, {t} {y}, {t} {z})")
        return b(f"f{operation} {t} {values[0]}, {values[1]}")
    if form == "f64":
        return directed(b, operation, mode, values)
    wide = [widen(b, form, x) for x in values]
    if operation == "mul":
        # 24 bits by 24 bits and the sum of two exponents fit a double.
        total, addends = b(f"fmul double {wide[0]}, {wide[1]}"), None
        rounded = total
    else:
        first = b(f"fmul double {wide[0]}, {wide[1]}") if operation == "fma" else wide[0]
        addends = (first, wide[-1])
        total = b(f"fadd double {addends[0]}, {addends[1]}")
        rounded = to_odd(b, total, two_sum_error(b, *addends, total))
    if mode == "rm" and addends is not None:
        rounded = zero_of_rm(b, rounded, total, *addends)
    return narrow(b, form, rounded, mode)


def _negated(b: Body, form: str, x: str) -> str:
    if form in SMALL:
        return b(f"xor i{SMALL[form].width} {x}, {-(1 << SMALL[form].width - 1)}")
    return b(f"fneg {LLVM[form]} {x}")


# ---- division and roots


def div(d: Decoder) -> Alu:
    kind = d.type("f32", "f64")
    mode = d.take(*ROUNDINGS, "approx", "full") or d.fail("needs .rn, .rz, .rm, .rp, .approx or .full")
    ftz = d.flag("ftz")
    d.count(3)
    if mode in ("approx", "full") and kind != "f32":
        d.fail(f".{mode} is defined for .f32 only")
    if mode == "approx":
        return _finish(d, _approximate_quotient(ftz), kind)
    if mode in ("full", "rn"):
        if not ftz:
            return _finish(d, np.divide, kind)
        mode = "rn"
    return _finish(d, _quotient(kind, mode, ftz), kind)


def _quotient(kind: str, mode: str, ftz: bool, reciprocal: bool = False) -> np.ufunc:
    def emit(b: Body, form: str, values: list[str]) -> str:
        if ftz:
            values = [flush(b, form, x) for x in values]
        if reciprocal:
            values = ["1.0", values[0]]
        t = LLVM[form]
        if mode == "rn":
            value = b(f"fdiv {t} {values[0]}, {values[1]}")
            return flush(b, form, value) if ftz else value
        if form == "f64":
            return directed(b, "div", mode, values)
        x, y = (x if x == "1.0" else widen(b, form, x) for x in values)
        nearest = b(f"fdiv double {x}, {y}")
        left = b(f"call double @llvm.fma.f64(double {b(f'fneg double {nearest}')}, double {y}, double {x})")
        # exact - nearest = left / y
        error = b(f"select i1 {b(f'fcmp olt double {y}, 0.0')}, double {b(f'fneg double {left}')}, double {left}")
        return _round_directed(b, form, nearest, error, mode, ftz)

    name = f"{'rcp' if reciprocal else 'div'}.{mode}{'.ftz' * ftz}"
    return elementwise(name, kind, 1 if reciprocal else 2, emit)


def _approximate_quotient(ftz: bool) -> np.ufunc:
    """a * (1 / b) where the reciprocal of |b| > 2**126, a subnormal number, counts as zero."""

    def emit(b: Body, form: str, values: list[str]) -> str:
        x, y = (flush(b, form, v) for v in values) if ftz else values
        size = b(f"call float @llvm.fabs.f32(float {y})")
        infinity = b(f"call float @llvm.copysign.f32(float {constant(float('inf'))}, float {y})")
        # False for NaN, which stays.
        large = b(f"fcmp ogt float {size}, {constant(2.0**126)}")
        value = b(f"fdiv float {x}, {b(f'select i1 {large}, float {infinity}, float {y}')}")
        return flush(b, form, value) if ftz else value

    return elementwise(f"div.approx{'.ftz' * ftz}", "f32", 2, emit)


def _round_directed(b: Body, form: str, nearest: str, error: str, mode: str, ftz: bool) -> str:
    value = narrow(b, form, to_odd(b, nearest, error), mode)
    return flush(b, form, value) if ftz else value


def rcp(d: Decoder) -> Alu:
    kind = d.type("f32", "f64")
    mode = d.take(*ROUNDINGS, "approx") or d.fail("needs .rn, .rz, .rm, .rp or .approx")
    ftz = d.flag("ftz")
    d.count(2)
    if mode == "approx" and kind == "f64":
        return _finish(d, lambda a: _upper_half(np.reciprocal(_flush_double(a))), kind)
    return _finish(d, _quotient(kind, "rn" if mode == "approx" else mode, ftz, reciprocal=True), kind)


def _flush_double(a: Any) -> Any:
    return a * (np.abs(a) >= 2.0**-1022)


def _upper_half(a: Any) -> Any:
    """The result of the f64 approximations: only the upper word is computed."""
    bits = np.asarray(_flush_double(a)).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
    return bits.view(np.float64)


def sqrt(d: Decoder) -> Alu:
    kind = d.type("f32", "f64")
    mode = d.take(*ROUNDINGS, "approx") or d.fail("needs .rn, .rz, .rm, .rp or .approx")
    ftz = d.flag("ftz")
    d.count(2)
    if mode == "approx":
        mode = "rn"
    if mode == "rn" and not ftz:
        return _finish(d, np.sqrt, kind)

    def emit(b: Body, form: str, values: list[str]) -> str:
        x = flush(b, form, values[0]) if ftz else values[0]
        if mode == "rn":
            suffix = "f32" if form == "f32" else "f64"
            return b(f"call {LLVM[form]} @llvm.sqrt.{suffix}({LLVM[form]} {x})")
        if form == "f64":
            return directed(b, "sqrt", mode, [x])
        x = widen(b, form, x)
        nearest = b(f"call double @llvm.sqrt.f64(double {x})")
        error = b(f"call double @llvm.fma.f64(double {b(f'fneg double {nearest}')}, double {nearest}, double {x})")
        return _round_directed(b, form, nearest, error, mode, ftz)

    return _finish(d, elementwise(f"sqrt.{mode}{'.ftz' * ftz}", kind, 1, emit), kind)


def rsqrt(d: Decoder) -> Alu:
    kind = d.type("f32", "f64")
    d.take("approx") or d.fail("needs .approx")
    ftz = d.flag("ftz")
    d.count(2)
    if kind == "f64":
        if ftz:
            return _finish(d, lambda a: _upper_half(1.0 / np.sqrt(_flush_double(a))), kind)
        return _finish(d, lambda a: 1.0 / np.sqrt(a), kind)

    def emit(b: Body, form: str, values: list[str]) -> str:
        x = flush(b, form, values[0]) if ftz else values[0]
        root = b(f"call double @llvm.sqrt.f64(double {widen(b, form, x)})")
        return narrow(b, form, b(f"fdiv double 1.0, {root}"))

    return _finish(d, elementwise(f"rsqrt{'.ftz' * ftz}", kind, 1, emit), kind)


# ---- transcendental functions


def ex2(d: Decoder) -> Alu:
    return _approximate(d, np.exp2, ("f32", "f16", "bf16", "f16x2", "bf16x2"))


def lg2(d: Decoder) -> Alu:
    return _approximate(d, np.log2, ("f32",))


def sin(d: Decoder) -> Alu:
    return _approximate(d, np.sin, ("f32",))


def cos(d: Decoder) -> Alu:
    return _approximate(d, np.cos, ("f32",))


def tanh(d: Decoder) -> Alu:
    return _approximate(d, np.tanh, ("f32", "f16", "bf16", "f16x2", "bf16x2"))


def flush_array(a: Any) -> Any:
    """float32 subnormals to zero of their sign (a product with False keeps the sign, and NaN stays)."""
    return a * (np.abs(a) >= TINY)


def _approximate(d: Decoder, function: np.ufunc, kinds: tuple[str, ...]) -> Alu:
    kind = d.type(*kinds)
    ftz = d.flag("ftz")
    d.flag("approx")
    d.count(2)
    if kind == "f32":
        return _finish(d, (lambda a: flush_array(function(flush_array(a)))) if ftz else function, kind)
    element = kind.removesuffix("x2")
    bits = DTYPES[kind]

    def small(a: Any) -> Any:
        halves = np.ascontiguousarray(a).view(np.uint16)
        return from_float32(element, function(to_float32(element, halves))).view(bits)

    return _finish(d, small, kind)


def to_float32(kind: str, a: Any) -> Any:
    """f16 or bf16 bits (uint16) as float32."""
    if kind == "f16":
        return a.view(np.float16).astype(np.float32)
    return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(kind: str, a: Any) -> Any:
    """float32 to the nearest f16 or bf16, as bits (uint16)."""
    b = Body()
    value = narrow(b, kind, widen(b, "f32", "%x0"))
    return ufunc(f"cvt.rn.{kind}.f32", ("f32",), "u16", b.returns("i16", value))(a)


# ---- sign, minimum, maximum, classes


def absolute(d: Decoder) -> Alu:
    return _sign(d, "and", np.abs)


def neg(d: Decoder) -> Alu:
    return _sign(d, "xor", np.negative)


def _sign(d: Decoder, change: str, simple: np.ufunc) -> Alu:
    """Half-precision signs are changed by an addition to zero, so a NaN becomes the canonical one."""
    kind = d.type(*FLOATS, "f16x2", "bf16x2")
    ftz = d.flag("ftz")
    d.count(2)
    if kind in ("f32", "f64"):
        return _finish(d, (lambda a: simple(flush_array(a))) if ftz else simple, kind)

    def emit(b: Body, form: str, values: list[str]) -> str:
        x = flush(b, form, values[0]) if ftz else values[0]
        value = b(f"{change} i16 {x}, {0x7FFF if change == 'and' else -0x8000}")
        isnan = b(f"icmp ugt i16 {b(f'and i16 {x}, {0x7FFF}')}, {SMALL[form].infinity}")
        return b(f"select i1 {isnan}, i16 {nan(form)}, i16 {value}")

    return _finish(d, elementwise(f"{d.opcode}{'.ftz' * ftz}", kind, 1, emit), kind)


def minimum(d: Decoder) -> Alu:
    return _extreme(d, "min")


def maximum(d: Decoder) -> Alu:
    return _extreme(d, "max")


def _extreme(d: Decoder, name: str) -> Alu:
    """NaN gives way to a number, but for .NaN; -0 is below +0; two NaNs give the canonical NaN."""
    kind = d.type(*FLOATS, "f16x2", "bf16x2")
    ftz, propagates, by_sign, clamps = (d.flag(x) for x in ("ftz", "NaN", "xorsign", "relu"))
    if by_sign:
        by_sign = d.flag("abs") or d.fail(".xorsign goes with .abs")
    magnitudes = by_sign or d.flag("abs")
    d.count(3, 4)
    inputs = len(d.operands) - 1

    def emit(b: Body, form: str, values: list[str]) -> str:
        if ftz:
            values = [flush(b, form, x) for x in values]
        value = values[0]
        for other in values[1:]:
            value = _extreme_of_two(b, form, name, value, other, propagates, magnitudes, by_sign)
        return relu(b, form, value) if clamps else value

    flags = (ftz, propagates, by_sign, magnitudes, clamps)
    full = f"{name}.{''.join('01'[bool(x)] for x in flags)}"
    return _finish(d, elementwise(full, kind, inputs, emit), kind)


def _extreme_of_two(
    b: Body, form: str, name: str, x: str, y: str, propagates: bool, magnitudes: bool, by_sign: bool
) -> str:
    t, width = LLVM[form], 8 * DTYPES[form].itemsize
    integer = f"i{width}"
    bits = [b(f"bitcast {t} {v} to {integer}") if form not in SMALL else v for v in (x, y)]
    sign = b(f"and {integer} {b(f'xor {integer} {bits[0]}, {bits[1]}')}, {-(1 << width - 1)}") if by_sign else ""
    if magnitudes:
        bits = [b(f"and {integer} {v}, {(1 << width - 1) - 1}") for v in bits]
    values = [b(f"bitcast {integer} {v} to {t}") if form not in SMALL else v for v in bits]
    wide = [widen(b, form, v) for v in values]
    # Bits as signed integers order numbers of one sign and put -0 below +0; the rest floats order.
    before = b(f"fcmp olt double {wide[0]}, {wide[1]}")
    equal = b(f"fcmp oeq double {wide[0]}, {wide[1]}")
    lower = b(f"icmp slt {integer} {bits[0]}, {bits[1]}")
    before = b(f"select i1 {equal}, i1 {lower}, i1 {before}")
    pick = bits if name == "min" else bits[::-1]
    value = b(f"select i1 {before}, {integer} {pick[0]}, {integer} {pick[1]}")
    isnan = [b(f"fcmp uno double {v}, 0.0") for v in wide]
    value = b(f"select i1 {isnan[0]}, {integer} {bits[1]}, {integer} {value}")
    value = b(f"select i1 {isnan[1]}, {integer} {bits[0]}, {integer} {value}")
    if by_sign:
        value = b(f"or {integer} {value}, {sign}")
    value = b(f"bitcast {integer} {value} to {t}") if form not in SMALL else value
    bad = b(f"{'or' if propagates else 'and'} i1 {isnan[0]}, {isnan[1]}")
    return b(f"select i1 {bad}, {t} {nan(form)}, {t} {value}")


def copysign(d: Decoder) -> Alu:
    """The magnitude of the second source with the sign of the first."""
    kind = d.type("f32", "f64")
    d.count(3)
    return _finish(d, lambda sign, value: np.copysign(value, sign), kind)


_CLASSES: dict[str, Callable[[Any], Any]] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "notanumber": np.isnan,
    "number": lambda a: np.logical_not(np.isnan(a)),
    "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
    "subnormal": lambda a: (np.abs(a) < np.finfo(a.dtype).tiny) & (a != 0),
}


def testp(d: Decoder) -> Alu:
    kind = d.type("f32", "f64")
    test = d.take(*_CLASSES) or d.fail("needs a class such as .finite")
    d.count(2)
    return d.finish(_CLASSES[test], [(d.operands[0], "pred")], [(d.operands[1], kind)])

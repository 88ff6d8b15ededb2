"""Conversion: cvt in all its forms, cvt.pack.

Float to integer saturates; NaN gives 0, but the most negative pattern (1 << width - 1) where the source
is f64 or the destination has 64 bits, as the manual says. NaN to a narrower float gives the format's
canonical NaN, but from f64 to f16 or bf16 the NaN shortened, as the GPU does.

Source: PTX ISA, "Data Movement and Conversion Instructions: cvt", "cvt.pack".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .decode import DTYPES, ROUNDINGS, Alu, Decoder
from .formats import (
    LLVM,
    SMALL,
    bits_of,
    clamp_01,
    constant,
    flush,
    narrow,
    relu,
    round_small,
    to_odd,
    towards,
    two_sum_error,
    widen,
)
from .native import Body, llvm_type, ufunc

_INTEGERS = tuple(f"{kind}{width}" for kind in "su" for width in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_TO_INTEGER = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def _width(kind: str) -> int:
    return int(kind[1:])


def _is_signed(kind: str) -> bool:
    return kind[0] == "s"


def cvt(d: Decoder) -> Alu:
    if d.flag("pack"):
        return _pack(d)
    source = d.type()
    target = d.type()
    if target == "tf32":
        return _to_tf32(d, source)
    if target in _PAIRS or source in _PAIRS:
        return _pair(d, target, source)
    known = (*_INTEGERS, *_FLOATS)
    if target not in known or source not in known:
        d.fail(f"from .{source} to .{target} is not simulated")
    d.count(2)
    if target in _INTEGERS:
        build = _integer_to_integer if source in _INTEGERS else _float_to_integer
    else:
        build = _integer_to_float if source in _INTEGERS else _float_to_float
    return d.finish(build(d, target, source), [(d.operands[0], target)], [(d.operands[1], source)])


def _integer_to_integer(d: Decoder, target: str, source: str) -> Any:
    wanted = DTYPES[target]
    if not d.flag("sat"):
        if wanted.itemsize == DTYPES[source].itemsize:
            return lambda a: a.view(wanted)
        return lambda a: a.astype(wanted)
    have, goal = np.iinfo(DTYPES[source]), np.iinfo(wanted)
    low = np.array(max(have.min, goal.min), DTYPES[source])
    high = np.array(min(have.max, goal.max), DTYPES[source])
    return lambda a: np.minimum(np.maximum(a, low), high).astype(wanted)


def _float_to_integer(d: Decoder, target: str, source: str) -> np.ufunc:
    mode = d.take(*_TO_INTEGER) or d.fail("needs .rni, .rzi, .rmi or .rpi")
    ftz = d.flag("ftz")
    d.flag("sat")
    b, t, width = Body(), llvm_type(target), _width(target)
    x = flush(b, source, "%x0") if ftz and source == "f32" else "%x0"
    wide = widen(b, source, x)
    rounded = b(f"call double @llvm.{_TO_INTEGER[mode]}.f64(double {wide})")
    sign = "s" if _is_signed(target) else "u"
    value = b(f"call {t} @llvm.fpto{sign}i.sat.{t}.f64(double {rounded})")
    if source == "f64" or width == 64:
        isnan = b(f"fcmp uno double {wide}, 0.0")
        value = b(f"select i1 {isnan}, {t} {-(1 << width - 1)}, {t} {value}")
    array = source if source not in SMALL else "u16"
    return ufunc(f"cvt.{mode}{'.ftz' * ftz}.{target}.{source}", (array,), target, b.returns(t, value))


def _integer_to_float(d: Decoder, target: str, source: str) -> np.ufunc:
    mode = d.take(*ROUNDINGS, default="rn")
    ftz, sat = d.flag("ftz"), d.flag("sat")
    del ftz  # no integer is subnormal
    b, t = Body(), llvm_type(source)
    sign = "s" if _is_signed(source) else "u"
    value = b(f"{sign}itofp {t} %x0 to double")
    error = "0.0"
    if _width(source) == 64:
        # Both halves are exact; the error of their sum is what the conversion to double loses.
        high = b(f"{'ashr' if _is_signed(source) else 'lshr'} i64 %x0, 32")
        upper = b(f"fmul double {b(f'{sign}itofp i64 {high} to double')}, {constant(2.0**32)}")
        lower = b(f"uitofp i64 {b(f'and i64 %x0, {0xFFFFFFFF}')} to double")
        error = two_sum_error(b, upper, lower, value)
    if target == "f64":
        if mode != "rn":
            value = b(f"bitcast i64 {towards(b, 64, bits_of(b, value), error, mode)} to double")
    else:
        value = narrow(b, target, to_odd(b, value, error), mode)
    if sat:
        value = clamp_01(b, target, value)
    array = target if target not in SMALL else "u16"
    name = f"cvt.{mode}{'.sat' * sat}.{target}.{source}"
    return ufunc(name, (source,), array, b.returns(LLVM[target], value))


def _float_to_float(d: Decoder, target: str, source: str) -> Any:
    mode = d.take(*ROUNDINGS)
    whole = d.take(*_TO_INTEGER)
    ftz, sat, clamps = d.flag("ftz"), d.flag("sat"), d.flag("relu")
    finite = d.flag("satfinite")
    if not (whole or sat or clamps or ftz or finite):
        if target == source:
            return lambda a: a
        if (source, target) == ("f32", "f64"):
            return lambda a: a.astype(np.float64)
    b = Body()
    # .ftz concerns f32 alone here.
    x = flush(b, source, "%x0") if ftz and source == "f32" else "%x0"
    wide = widen(b, source, x)
    if whole:
        wide = b(f"call double @llvm.{_TO_INTEGER[whole]}.f64(double {wide})")
    if target in SMALL and mode in ("rm", "rp"):
        d.fail(f"to .{target} rounds by .rn or .rz")
    value = narrow(b, target, wide, mode or "rn", finite)
    if source == "f64" and target in SMALL:
        value = _with_shortened_nan(b, target, wide, value)
    if ftz and target == "f32":
        value = flush(b, target, value)
    if sat:
        value = clamp_01(b, target, value)
    if clamps:
        value = relu(b, target, value)
    arrays = [kind if kind not in SMALL else "u16" for kind in (source, target)]
    flags = f"{mode}{whole}{'.ftz' * ftz}{'.sat' * sat}{'.relu' * clamps}{'.satfinite' * finite}"
    name = f"cvt.{flags}.{target}.{source}"
    return ufunc(name, (arrays[0],), arrays[1], b.returns(LLVM[target], value))


def _with_shortened_nan(b: Body, target: str, wide: str, value: str) -> str:
    """`value`, but of a NaN its sign and the upper bits of its mantissa, made quiet."""
    form, bits = SMALL[target], bits_of(b, wide)
    fraction = b(f"and i64 {b(f'lshr i64 {bits}, {52 - form.mantissa}')}, {(1 << form.mantissa) - 1}")
    sign = b(f"shl i64 {b(f'lshr i64 {bits}, 63')}, {form.width - 1}")
    quiet = b(f"or i64 {b(f'or i64 {fraction}, {sign}')}, {form.infinity | 1 << form.mantissa - 1}")
    isnan = b(f"fcmp uno double {wide}, 0.0")
    return b(f"select i1 {isnan}, i16 {b(f'trunc i64 {quiet} to i16')}, i16 {value}")


def _to_tf32(d: Decoder, source: str) -> Alu:
    """f32 with the lower 13 bits of the mantissa rounded away; .rna cuts those of a NaN off, too."""
    if source != "f32":
        d.fail("to .tf32 starts from .f32")
    mode = d.take("rna", "rn", "rz") or d.fail("needs .rna, .rn or .rz")
    clamps, finite = d.flag("relu"), d.flag("satfinite")
    d.count(2)
    b = Body()
    value = _tf32_ties_away(b, finite) if mode == "rna" else _tf32(b, mode, finite)
    if clamps:
        negative = b(f"icmp slt i32 {value}, 0")
        value = b(f"select i1 {negative}, i32 0, i32 {value}")
    name = f"cvt.{mode}{'.relu' * clamps}{'.satfinite' * finite}.tf32"
    function = ufunc(name, ("u32",), "u32", b.returns("i32", value))
    return d.finish(function, [(d.operands[0], "tf32")], [(d.operands[1], "b32")])


def _tf32_ties_away(b: Body, finite: bool) -> str:
    """The integer operations that ptxas makes of it: infinities and NaNs are cut only."""
    size = b(f"and i32 %x0, {0x7FFFFFFF}")
    number = b(f"icmp ult i32 {size}, {0x7F800000}")
    half = b(f"select i1 {number}, i32 4096, i32 0")
    value = b(f"and i32 {b(f'add i32 %x0, {half}')}, {-8192}")
    if not finite:
        return value
    over = b(f"icmp uge i32 {b(f'and i32 {value}, {0x7FFFFFFF}')}, {0x7F800000}")
    return b(f"sub i32 {value}, {b(f'select i1 {over}, i32 8192, i32 0')}")


def _tf32(b: Body, mode: str, finite: bool) -> str:
    """To nearest even or towards zero; NaN gives the canonical one."""
    add = "0" if mode == "rz" else _half_up(b, "%x0")
    size = b(f"and i32 %x0, {0x7FFFFFFF}")
    value = b(f"and i32 {b(f'add i32 {size}, {add}')}, {-8192}")
    value = b(f"select i1 {b(f'icmp eq i32 {size}, {0x7F800000}')}, i32 {0x7F800000}, i32 {value}")
    if finite:
        value = b(f"call i32 @llvm.umin.i32(i32 {value}, i32 {0x7F7FE000})")
    value = b(f"or i32 {value}, {b(f'and i32 %x0, {-(1 << 31)}')}")
    isnan = b(f"icmp ugt i32 {size}, {0x7F800000}")
    return b(f"select i1 {isnan}, i32 {0x7FFFFFFF}, i32 {value}")


def _half_up(b: Body, bits: str) -> str:
    """What to add so that cutting 13 bits rounds to nearest, ties to even."""
    last = b(f"and i32 {b(f'lshr i32 {bits}, 13')}, 1")
    return b(f"add i32 4095, {last}")


def _pair(d: Decoder, target: str, source: str) -> Alu:
    mode = d.take("rn", "rz", "rna") or d.fail("needs a rounding mode")
    clamps, finite = d.flag("relu"), d.flag("satfinite")
    name = f"cvt.{mode}{'.relu' * clamps}{'.satfinite' * finite}.{target}"
    if source == "f32" and target in _PAIRS:
        element = _PAIRS[target]
        width = SMALL[element].width
        d.count(3)
        b = Body()
        # The first source becomes the upper half.
        parts = [_small(b, element, widen(b, "f32", x), mode, clamps, finite) for x in ("%x1", "%x0")]
        function = ufunc(f"{name}.f32", ("f32", "f32"), f"u{2 * width}", _joined(b, parts, width))
        return d.finish(function, [(d.operands[0], target)], [(x, "f32") for x in d.operands[1:]])
    if source in ("f16x2", "bf16x2") and target in ("e4m3x2", "e5m2x2"):
        finite = True
    elif not (source in ("e4m3x2", "e5m2x2") and target in ("f16x2", "bf16x2")):
        d.fail(f"from .{source} to .{target} is not simulated")
    d.count(2)
    old, new = _PAIRS[source], _PAIRS[target]
    width = SMALL[old].width
    b = Body()
    parts = []
    for shift in (0, width):
        part = b(f"trunc i{2 * width} {b(f'lshr i{2 * width} %x0, {shift}')} to i{width}")
        parts.append(_small(b, new, widen(b, old, part), mode, clamps, finite))
    arrays = f"u{2 * width}", f"u{2 * SMALL[new].width}"
    function = ufunc(f"{name}.{source}", arrays[:1], arrays[1], _joined(b, parts, SMALL[new].width))
    return d.finish(function, [(d.operands[0], target)], [(d.operands[1], source)])


def _small(b: Body, kind: str, wide: str, mode: str, clamps: bool, finite: bool) -> str:
    if clamps:
        wide = relu(b, "f64", wide)
    return round_small(b, kind, wide, mode, finite)


def _joined(b: Body, parts: list[str], width: int) -> str:
    low, high = (b(f"zext i{width} {x} to i{2 * width}") for x in parts)
    return b.returns(f"i{2 * width}", b(f"or i{2 * width} {low}, {b(f'shl i{2 * width} {high}, {width}')}"))


def _pack(d: Decoder) -> Alu:
    """Two integers, saturated, above each other; a third source is shifted up to make room."""
    third = d.take("b32")
    d.flag("sat") or d.fail("needs .sat")
    source = d.modifiers.pop() if d.modifiers else ""
    target = d.modifiers.pop() if d.modifiers else ""
    if source != "s32" or target not in ("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"):
        d.fail(f"from .{source} to .{target} is not simulated")
    width = _width(target)
    d.count(4 if third else 3)
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if _is_signed(target) else (0, (1 << width) - 1)
    b = Body()
    total = b(f"shl i32 %x2, {2 * width}") if third else "0"
    for x, shift in (("%x0", width), ("%x1", 0)):
        value = b(f"call i32 @llvm.smax.i32(i32 {x}, i32 {low})")
        value = b(f"call i32 @llvm.smin.i32(i32 {value}, i32 {high})")
        field = b(f"and i32 {value}, {(1 << width) - 1}")
        total = b(f"or i32 {total}, {b(f'shl i32 {field}, {shift}')}")
    inputs = ("s32", "s32", "u32")[: 3 if third else 2]
    function = ufunc(f"cvt.pack.{target}", inputs, "u32", b.returns("i32", total))
    return d.finish(function, [(d.operands[0], "u32")], list(zip(d.operands[1:], inputs, strict=True)))

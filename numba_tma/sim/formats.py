"""Floating-point formats in LLVM IR: widening to double, rounding from double, directed rounding, flushing.

All arithmetic of the narrow formats is done in double. Where double is not exact, the error of the
operation is found too (two-sum), and the result is *rounded to odd*: if inexact, its last bit is set. A
value rounded to odd in 53 bits and then to 24 bits or fewer, in any direction, is the correctly rounded
result, because the odd bit keeps what was lost visible (S. Boldo, G. Melquiond, "Emulation of FMA and
correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4),
2008).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .native import Body


@dataclass(frozen=True, slots=True)
class Format:
    """A small format: `mantissa` bits, exponent `bias`, codes of its largest value, infinity and NaN."""

    width: int
    mantissa: int
    bias: int
    largest: int
    infinity: int | None
    nan: int


SMALL = {
    "f16": Format(16, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format(16, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
    "e4m3": Format(8, 3, 7, 0x7E, None, 0x7F),
    "e5m2": Format(8, 2, 15, 0x7B, 0x7C, 0x7F),
}
LLVM = {"f32": "float", "f64": "double", "f16": "i16", "bf16": "i16", "e4m3": "i8", "e5m2": "i8"}
_ROUND = {"rn": "roundeven", "rz": "trunc", "rna": "round"}


def constant(value: float) -> str:
    """A double as IR text, exact."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def nan(kind: str) -> str:
    """The NaN that NVIDIA GPUs produce, as IR text of the format's IR type."""
    if kind == "f64":
        return "0x7FFFFFFFFFFFFFFF"
    if kind == "f32":
        # IR writes a float by the double of the same value.
        return "0x7FFFFFFFE0000000"
    return str(SMALL[kind].nan)


def widen(b: Body, kind: str, x: str) -> str:
    """A value of a format as double, exactly."""
    if kind == "f64":
        return x
    if kind == "f32":
        return b(f"fpext float {x} to double")
    form = SMALL[kind]
    bits = b(f"zext i{form.width} {x} to i64")
    magnitude = b(f"and i64 {bits}, {(1 << form.width - 1) - 1}")
    moved = b(f"shl i64 {magnitude}, {52 - form.mantissa}")
    # The exponent field read with double's bias, subnormals too, is off by a power of two.
    value = b(f"fmul double {b(f'bitcast i64 {moved} to double')}, {constant(2.0 ** (1023 - form.bias))}")
    if form.infinity is not None:
        special = b(f"icmp uge i64 {magnitude}, {form.infinity}")
        full = b(f"bitcast i64 {b(f'or i64 {moved}, {0x7FF << 52}')} to double")
    else:
        special = b(f"icmp eq i64 {magnitude}, {form.nan}")
        full = constant(float("nan"))
    value = b(f"select i1 {special}, double {full}, double {value}")
    sign = b(f"shl i64 {b(f'lshr i64 {bits}, {form.width - 1}')}, 63")
    return b(f"bitcast i64 {b(f'or i64 {bits_of(b, value)}, {sign}')} to double")


def bits_of(b: Body, x: str) -> str:
    """The bits of a double."""
    return b(f"bitcast double {x} to i64")


def magnitude(b: Body, x: str) -> str:
    return b(f"call double @llvm.fabs.f64(double {x})")


def two_sum_error(b: Body, x: str, y: str, total: str) -> str:
    """The error of `total` = x + y: their exact sum is total + error."""
    x2 = b(f"fsub double {total}, {y}")
    y2 = b(f"fsub double {total}, {x2}")
    return b(f"fadd double {b(f'fsub double {x}, {x2}')}, {b(f'fsub double {y}, {y2}')}")


def to_odd(b: Body, value: str, error: str) -> str:
    """`value` + `error` rounded to odd, where `value` is their sum rounded to nearest."""
    bits = bits_of(b, value)
    inexact = b(f"fcmp one double {error}, 0.0")
    even = b(f"icmp eq i64 {b(f'and i64 {bits}, 1')}, 0")
    outwards = b(f"icmp eq i1 {b(f'fcmp ogt double {error}, 0.0')}, {b(f'fcmp ogt double {value}, 0.0')}")
    step = b(f"select i1 {outwards}, i64 1, i64 -1")
    changed = b(f"select i1 {b(f'and i1 {inexact}, {even}')}, i64 {step}, i64 0")
    return b(f"bitcast i64 {b(f'add i64 {bits}, {changed}')} to double")


def towards(b: Body, width: int, bits: str, error: str, mode: str) -> str:
    """Bits of a result rounded to nearest, corrected for rz, rm or rp; the exact value is result + error.

    Stepping the bits by one changes the magnitude by one unit, across zero's neighbour and infinity too.
    """
    t = f"i{width}"
    negative = b(f"icmp slt {t} {bits}, 0")
    above, below = b(f"fcmp ogt double {error}, 0.0"), b(f"fcmp olt double {error}, 0.0")
    # Does the exact value lie outwards (of larger magnitude) or inwards of the result?
    outwards = b(f"select i1 {negative}, i1 {below}, i1 {above}")
    inwards = b(f"select i1 {negative}, i1 {above}, i1 {below}")
    if mode == "rz":
        step = b(f"select i1 {inwards}, {t} -1, {t} 0")
    else:
        away = b(f"xor i1 {negative}, {'true' if mode == 'rp' else 'false'}")
        grow = b(f"select i1 {b(f'and i1 {outwards}, {away}')}, {t} 1, {t} 0")
        shrink = b(f"select i1 {away}, i1 false, i1 {inwards}")
        step = b(f"select i1 {shrink}, {t} -1, {t} {grow}")
    return b(f"add {t} {bits}, {step}")


def round_small(b: Body, kind: str, value: str, mode: str = "rn", saturate: bool = False) -> str:
    """A double, exact or rounded to odd, to a small format; gives its bits.

    `mode` is rn, rz or rna (ties away from zero). Beyond the largest finite value: infinity (rz: the
    largest), or the largest finite value where `saturate` or the format has no infinity.
    """
    form = SMALL[kind]
    t = f"i{form.width}"
    bits = bits_of(b, value)
    size = magnitude(b, value)
    lowest = 1 - form.bias + 1023
    exponent = b(f"and i64 {b(f'lshr i64 {bits}, 52')}, 2047")
    exponent = b(f"call i64 @llvm.umax.i64(i64 {exponent}, i64 {lowest})")
    exponent = b(f"call i64 @llvm.umin.i64(i64 {exponent}, i64 {form.bias + 1024})")
    scale = b(f"shl i64 {b(f'sub i64 {2046 + form.mantissa}, {exponent}')}, 52")
    scaled = b(f"fmul double {size}, {b(f'bitcast i64 {scale} to double')}")
    scaled = b(f"call double @llvm.{_ROUND[mode]}.f64(double {scaled})")
    # A format without infinities uses its highest exponent for numbers.
    beyond = form.bias + (1 if form.infinity is not None else 2)
    over = b(f"fcmp oge double {size}, {constant(2.0**beyond)}")
    steps = b(f"fptoui double {b(f'select i1 {over}, double 0.0, double {scaled}')} to i64")
    isnan = b(f"fcmp uno double {value}, 0.0")
    binades = b(f"sub i64 {exponent}, {lowest}")
    code = b(f"add i64 {b(f'shl i64 {binades}, {form.mantissa}')}, {steps}")
    top = form.largest
    over = b(f"or i1 {over}, {b(f'icmp ugt i64 {code}, {top}')}")
    limit = top
    if form.infinity is not None and not saturate:
        limit = form.infinity
        if mode == "rz":
            infinite = b(f"fcmp oeq double {size}, {constant(float('inf'))}")
            limit = b(f"select i1 {infinite}, i64 {form.infinity}, i64 {top}")
    code = b(f"select i1 {over}, i64 {limit}, i64 {code}")
    sign = b(f"shl i64 {b(f'lshr i64 {bits}, 63')}, {form.width - 1}")
    code = b(f"or i64 {code}, {sign}")
    code = b(f"select i1 {isnan}, i64 {form.nan}, i64 {code}")
    return b(f"trunc i64 {code} to {t}")


def narrow(b: Body, kind: str, value: str, mode: str = "rn", saturate: bool = False) -> str:
    """A double, exact or rounded to odd, to any format."""
    if kind == "f64":
        return value
    if kind in SMALL:
        return round_small(b, kind, value, mode, saturate)
    nearest = b(f"fptrunc double {value} to float")
    if mode == "rn":
        return nearest
    error = b(f"fsub double {value}, {b(f'fpext float {nearest} to double')}")
    # Rounded to infinity although finite: the exact value lies inwards.
    bits = b(f"bitcast float {nearest} to i32")
    return b(f"bitcast i32 {towards(b, 32, bits, error, mode)} to float")


def flush(b: Body, kind: str, x: str) -> str:
    """A subnormal as zero of its sign, in the formats that have .ftz: f32 and f16."""
    if kind == "f16":
        tiny = b(f"icmp ult i16 {b(f'and i16 {x}, {0x7FFF}')}, {0x0400}")
        return b(f"select i1 {tiny}, i16 {b(f'and i16 {x}, {-0x8000}')}, i16 {x}")
    if kind != "f32":
        return x
    size = b(f"call float @llvm.fabs.f32(float {x})")
    tiny = b(f"fcmp olt float {size}, {constant(2.0**-126)}")
    zero = b(f"call float @llvm.copysign.f32(float 0.0, float {x})")
    return b(f"select i1 {tiny}, float {zero}, float {x}")


def clamp_01(b: Body, kind: str, x: str) -> str:
    """.sat: into [0, 1], NaN and -0 to +0."""
    t = LLVM[kind]
    if kind in SMALL:
        wide = widen(b, kind, x)
        return round_small(b, kind, clamp_01(b, "f64", wide))
    positive = b(f"fcmp ogt {t} {x}, 0.0")
    x = b(f"select i1 {positive}, {t} {x}, {t} 0.0")
    above = b(f"fcmp ogt {t} {x}, 1.0")
    return b(f"select i1 {above}, {t} 1.0, {t} {x}")


def relu(b: Body, kind: str, x: str) -> str:
    """.relu: negative values to +0, NaN to the canonical NaN."""
    t = LLVM[kind]
    wide = widen(b, kind, x)
    keeps = b(f"fcmp ogt double {wide}, 0.0")
    isnan = b(f"fcmp uno double {wide}, 0.0")
    zero = "0" if kind in SMALL else "0.0"
    x = b(f"select i1 {keeps}, {t} {x}, {t} {zero}")
    return b(f"select i1 {isnan}, {t} {nan(kind)}, {t} {x}")

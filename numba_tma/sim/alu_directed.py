"""Double-precision add, mul, fma, div and sqrt rounded towards zero, minus or plus infinity, exactly.

The operation is done to nearest and its error found exactly; the error's sign tells whether the result must
move by one unit. An error can only be a double where nothing underflows, so operands are first brought
into [1, 2) with their exponents apart. Scaling the rounded result back rounds again, in the same direction,
where it becomes subnormal or overflows; two roundings in one direction onto ever coarser grids are one.

Zeros, infinities and NaNs go around all this: with them the operation to nearest is exact.

Source: IEEE 754-2008, 4.3.2; PTX ISA, "Rounding Modifiers".
"""

from __future__ import annotations

from .formats import bits_of, constant, magnitude, towards, two_sum_error
from .native import Body

_INFINITY = constant(float("inf"))
# Farther apart than this, in powers of two, the smaller addend of an fma only tells its sign.
_APART = 200


def directed(b: Body, operation: str, mode: str, values: list[str]) -> str:
    """`operation` (add, mul, fma, div, sqrt) of doubles, rounded by `mode` (rz, rm, rp)."""
    return {"add": _add, "mul": _mul, "fma": _fma, "div": _div, "sqrt": _sqrt}[operation](b, mode, *values)


def zero_of_rm(b: Body, value: str, total: str, x: str, y: str) -> str:
    """Towards minus infinity an exact zero sum is -0, unless both addends are +0."""
    signs = b(f"and i64 {b(f'or i64 {bits_of(b, x)}, {bits_of(b, y)}')}, {-(1 << 63)}")
    zero = b(f"bitcast i64 {signs} to double")
    return b(f"select i1 {b(f'fcmp oeq double {total}, 0.0')}, double {zero}, double {value}")


def _add(b: Body, mode: str, x: str, y: str) -> str:
    total = b(f"fadd double {x}, {y}")
    # The error of a sum never underflows. Taking the larger addend off first is exact and never overflows.
    swapped = b(f"fcmp olt double {magnitude(b, x)}, {magnitude(b, y)}")
    large, small = (b(f"select i1 {swapped}, double {p}, double {q}") for p, q in ((y, x), (x, y)))
    error = b(f"fsub double {small}, {b(f'fsub double {total}, {large}')}")
    # An infinite sum of finite addends was rounded outwards.
    over = b(f"and i1 {_is_finite(b, large)}, {b(f'fcmp oeq double {magnitude(b, total)}, {_INFINITY}')}")
    error = b(f"select i1 {over}, double {b(f'fneg double {total}')}, double {error}")
    value = _towards(b, total, error, mode)
    return zero_of_rm(b, value, total, x, y) if mode == "rm" else value


def _mul(b: Body, mode: str, x: str, y: str) -> str:
    (x1, ex), (y1, ey) = _split(b, x), _split(b, y)
    product = b(f"fmul double {x1}, {y1}")
    error = b(f"call double @llvm.fma.f64(double {x1}, double {y1}, double {b(f'fneg double {product}')})")
    value = _scaled(b, _towards(b, product, error, mode), b(f"add i64 {ex}, {ey}"), mode)
    usual = b(f"and i1 {_is_usual(b, x)}, {_is_usual(b, y)}")
    return b(f"select i1 {usual}, double {value}, double {b(f'fmul double {x}, {y}')}")


def _div(b: Body, mode: str, x: str, y: str) -> str:
    (x1, ex), (y1, ey) = _split(b, x), _split(b, y)
    quotient = b(f"fdiv double {x1}, {y1}")
    left = b(f"call double @llvm.fma.f64(double {b(f'fneg double {quotient}')}, double {y1}, double {x1})")
    # exact - quotient = left / y
    negative = b(f"fcmp olt double {y1}, 0.0")
    error = b(f"select i1 {negative}, double {b(f'fneg double {left}')}, double {left}")
    value = _scaled(b, _towards(b, quotient, error, mode), b(f"sub i64 {ex}, {ey}"), mode)
    usual = b(f"and i1 {_is_usual(b, x)}, {_is_usual(b, y)}")
    return b(f"select i1 {usual}, double {value}, double {b(f'fdiv double {x}, {y}')}")


def _sqrt(b: Body, mode: str, x: str) -> str:
    x1, ex = _split(b, x)
    odd = b(f"and i64 {ex}, 1")
    x1 = b(f"select i1 {b(f'icmp eq i64 {odd}, 0')}, double {x1}, double {b(f'fmul double {x1}, 2.0')}")
    root = b(f"call double @llvm.sqrt.f64(double {x1})")
    error = b(f"call double @llvm.fma.f64(double {b(f'fneg double {root}')}, double {root}, double {x1})")
    exponent = b(f"ashr i64 {b(f'sub i64 {ex}, {odd}')}, 1")
    value = _scaled(b, _towards(b, root, error, mode), exponent, mode)
    usual = b(f"and i1 {_is_usual(b, x)}, {b(f'fcmp ogt double {x}, 0.0')}")
    return b(f"select i1 {usual}, double {value}, double {b(f'call double @llvm.sqrt.f64(double {x})')}")


def _fma(b: Body, mode: str, x: str, y: str, z: str) -> str:
    (x1, ex), (y1, ey), (z1, ez) = _split(b, x), _split(b, y), _split(b, z)
    exponent = b(f"add i64 {ex}, {ey}")
    # The third operand beside the product, whose exponent is now 0: a zero as it is, else z1 * 2**apart.
    apart = b(f"sub i64 {ez}, {exponent}")
    within = b(f"call i64 @llvm.smin.i64(i64 {apart}, i64 {_APART})")
    within = b(f"call i64 @llvm.smax.i64(i64 {within}, i64 {-_APART})")
    beyond = b(f"call i64 @llvm.smax.i64(i64 {b(f'sub i64 {apart}, {_APART}')}, i64 0)")
    no_z = b(f"fcmp oeq double {z}, 0.0")
    beside = b(f"select i1 {no_z}, double {z}, double {b(f'fmul double {z1}, {_power(b, within)}')}")
    exponent = b(f"add i64 {exponent}, {b(f'select i1 {no_z}, i64 0, i64 {beyond}')}")
    total, error = _fma_error(b, x1, y1, beside)
    value = _scaled(b, _towards(b, total, error, mode), exponent, mode)
    cancels = b(f"fcmp oeq double {total}, 0.0")
    value = b(f"select i1 {cancels}, double 0.0, double {value}")
    usual = b(f"and i1 {b(f'and i1 {_is_usual(b, x)}, {_is_usual(b, y)}')}, {_is_finite(b, z)}")
    plain = b(f"call double @llvm.fma.f64(double {x}, double {y}, double {z})")
    value = b(f"select i1 {usual}, double {value}, double {plain}")
    if mode != "rm":
        return value
    total = b(f"select i1 {usual}, double {total}, double {plain}")
    return zero_of_rm(b, value, total, b(f"fmul double {x}, {y}"), z)


def _fma_error(b: Body, x: str, y: str, z: str) -> tuple[str, str]:
    """fma and a number of its error's sign (Boldo, Muller, Exact and approximated error of the FMA, 2011)."""
    nearest = b(f"call double @llvm.fma.f64(double {x}, double {y}, double {z})")
    product = b(f"fmul double {x}, {y}")
    rest = b(f"call double @llvm.fma.f64(double {x}, double {y}, double {b(f'fneg double {product}')})")
    small = b(f"fadd double {z}, {rest}")
    small_error = two_sum_error(b, z, rest, small)
    large = b(f"fadd double {product}, {small}")
    large_error = two_sum_error(b, product, small, large)
    gamma = b(f"fadd double {b(f'fsub double {large}, {nearest}')}, {large_error}")
    return nearest, b(f"fadd double {gamma}, {small_error}")


def _towards(b: Body, nearest: str, error: str, mode: str) -> str:
    return b(f"bitcast i64 {towards(b, 64, bits_of(b, nearest), error, mode)} to double")


def _is_finite(b: Body, x: str) -> str:
    return b(f"fcmp one double {magnitude(b, x)}, {_INFINITY}")


def _is_usual(b: Body, x: str) -> str:
    """Finite and not zero."""
    return b(f"and i1 {_is_finite(b, x)}, {b(f'fcmp one double {x}, 0.0')}")


def _split(b: Body, x: str) -> tuple[str, str]:
    """x as m * 2**e with 1 <= |m| < 2; of zeros, infinities and NaNs some finite numbers."""
    subnormal = b(f"fcmp olt double {magnitude(b, x)}, {constant(2.0**-1022)}")
    normal = b(f"select i1 {subnormal}, double {b(f'fmul double {x}, {constant(2.0**64)}')}, double {x}")
    bits = bits_of(b, normal)
    field = b(f"and i64 {b(f'lshr i64 {bits}, 52')}, 2047")
    exponent = b(f"sub i64 {field}, {b(f'select i1 {subnormal}, i64 {1023 + 64}, i64 1023')}")
    mantissa = b(f"or i64 {b(f'and i64 {bits}, {~(0x7FF << 52)}')}, {1023 << 52}")
    return b(f"bitcast i64 {mantissa} to double"), exponent


def _power(b: Body, exponent: str) -> str:
    """2**exponent, which must be a normal number."""
    field = b(f"add i64 {exponent}, 1023")
    return b(f"bitcast i64 {b(f'shl i64 {field}, 52')} to double")


def _scaled(b: Body, x: str, exponent: str, mode: str) -> str:
    """x * 2**exponent of a finite x, not zero, rounded by `mode`."""
    mantissa, own = _split(b, x)
    exponent = b(f"add i64 {exponent}, {own}")
    # Beyond these every result is infinite or less than half the smallest number.
    exponent = b(f"call i64 @llvm.smin.i64(i64 {exponent}, i64 1100)")
    exponent = b(f"call i64 @llvm.smax.i64(i64 {exponent}, i64 -1200)")
    # In two factors, each and its inverse normal; only the second multiplication rounds.
    first = b(f"call i64 @llvm.smin.i64(i64 {exponent}, i64 1022)")
    first = b(f"call i64 @llvm.smax.i64(i64 {first}, i64 -1022)")
    second = b(f"sub i64 {exponent}, {first}")
    value = b(f"fmul double {b(f'fmul double {mantissa}, {_power(b, first)}')}, {_power(b, second)}")
    back = b(f"fmul double {value}, {_power(b, b(f'sub i64 0, {second}'))}")
    back = b(f"fmul double {back}, {_power(b, b(f'sub i64 0, {first}'))}")
    # Exact, and infinite inwards where the value overflowed.
    return _towards(b, value, b(f"fsub double {mantissa}, {back}"), mode)

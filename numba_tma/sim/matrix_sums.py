"""How Hopper's tensor cores sum products of floating-point numbers, bit for bit.

A step takes products of elements of A and B and what the accumulator held:

- Products are exact. A product's exponent is the sum of its factors' exponents, so that its significand lies in [1, 4);
  a subnormal number has the exponent of the smallest normal one, and what is zero has none.
- All terms are cut off, towards zero, `fraction` bits below the largest exponent among them, and added exactly.
- An f32 result is cut off, towards zero, after `kept` bits of fraction; an f16 result is rounded to nearest, ties to
  even. A result of zero is +0, whatever came in.

`fraction` is 25; of wgmma with 8-bit floats it is 13, as is `kept`, which otherwise is 23. One step takes all products
of an instruction. Infinities and NaN are those of the plain sum; NaN results are the canonical NaN.

There is no mma.sync of 8-bit floats on Hopper: the assembler makes one of two f16 steps, products of the first two
bytes of every four along K and then those of the others, and a plain addition to the accumulator.

Found for Hopper by Khattak and Mikaitis (arXiv 2512.07004) and Xie et al. (arXiv 2511.10909); here it agrees with all
results recorded of an H200 (tests/agreement). The fp8 instructions of mma.sync are not theirs.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .native import compile_function

# The smallest normal exponent of each type.
LOWEST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "f32": -126}
_RESULTS = {"f32": np.float32, "f16": np.float16}
_NAN = {"f32": np.uint32(0x7FFFFFFF).view(np.float32), "f16": np.uint16(0x7FFF).view(np.float16)}
_EIGHT_BITS = frozenset(("e4m3", "e5m2"))


@dataclass(frozen=True)
class Precision:
    """Bits of fraction that a step keeps of its terms, and of its f32 result."""

    fraction: int
    kept: int


WIDE = Precision(25, 23)
NARROW = Precision(13, 13)


def of_wgmma(a_type: str) -> Precision:
    """The precision of wgmma's sums."""
    return NARROW if a_type in _EIGHT_BITS else WIDE


# Eight columns of a row at a time (there are never fewer): the largest exponent as a power of two, then the terms in
# units of the last bit that is kept. B lies with its columns (N) next to each other.
_TEXT = """
declare VD @llvm.trunc.v8f64(VD)
declare VI @llvm.umax.v8i64(VI, VI)

define void @lanes(ptr noalias %a, ptr noalias %pa, ptr noalias %b, ptr noalias %pb, ptr noalias %c, i64 %count,
                   i64 %next_a, i64 %next_b, i64 %m, i64 %n, i64 %k, double %unit, i64 %lowest, i64 %kept) {
entry:
  %mn = mul nuw nsw i64 %m, %n
  %unit0 = insertelement VD poison, double %unit, i64 0
  %units = shufflevector VD %unit0, VD poison, <8 x i32> zeroinitializer
  %lowest0 = insertelement VI poison, i64 %lowest, i64 0
  %lowests = shufflevector VI %lowest0, VI poison, <8 x i32> zeroinitializer
  %kept0 = insertelement VI poison, i64 %kept, i64 0
  %kepts = shufflevector VI %kept0, VI poison, <8 x i32> zeroinitializer
  br label %matrix
matrix:
  %p = phi i64 [0, %entry], [%p1, %matrix_end]
  %skip_a = mul nuw nsw i64 %p, %next_a
  %skip_b = mul nuw nsw i64 %p, %next_b
  %skip_c = mul nuw nsw i64 %p, %mn
  %ap = getelementptr double, ptr %a, i64 %skip_a
  %pap = getelementptr double, ptr %pa, i64 %skip_a
  %bp = getelementptr double, ptr %b, i64 %skip_b
  %pbp = getelementptr double, ptr %pb, i64 %skip_b
  %cp = getelementptr double, ptr %c, i64 %skip_c
  br label %row
row:
  %i = phi i64 [0, %matrix], [%i1, %row_end]
  %ik = mul nuw nsw i64 %i, %k
  %ai = getelementptr double, ptr %ap, i64 %ik
  %pai = getelementptr double, ptr %pap, i64 %ik
  %in = mul nuw nsw i64 %i, %n
  %ci = getelementptr double, ptr %cp, i64 %in
  br label %columns
columns:
  %j = phi i64 [0, %row], [%j1, %store]
  %bj = getelementptr double, ptr %bp, i64 %j
  %pbj = getelementptr double, ptr %pbp, i64 %j
  %place = getelementptr double, ptr %ci, i64 %j
  %held = load VD, ptr %place, align 8
  %bits = bitcast VD %held to VI
  %biased0 = lshr VI %bits, SPLAT(52)
  %biased1 = and VI %biased0, SPLAT(2047)
  %biased = call VI @llvm.umax.v8i64(VI %biased1, VI %lowests)
  %power0 = shl VI %biased, SPLAT(52)
  %power1 = bitcast VI %power0 to VD
  %none = fcmp oeq VD %held, zeroinitializer
  %power = select <8 x i1> %none, VD zeroinitializer, VD %power1
  br label %search
search:
  %s = phi i64 [0, %columns], [%s1, %search]
  %most = phi VD [%power, %columns], [%most1, %search]
  %sa = getelementptr double, ptr %pai, i64 %s
  %sa1 = load double, ptr %sa
  %sa2 = insertelement VD poison, double %sa1, i64 0
  %sa3 = shufflevector VD %sa2, VD poison, <8 x i32> zeroinitializer
  %sn = mul nuw nsw i64 %s, %n
  %sb = getelementptr double, ptr %pbj, i64 %sn
  %sb1 = load VD, ptr %sb, align 8
  %both = fmul VD %sa3, %sb1
  %more = fcmp ogt VD %both, %most
  %most1 = select <8 x i1> %more, VD %both, VD %most
  %s1 = add nuw nsw i64 %s, 1
  %s2 = icmp slt i64 %s1, %k
  br i1 %s2, label %search, label %found
found:
  %empty = fcmp oeq VD %most1, zeroinitializer
  %largest = select <8 x i1> %empty, VD %units, VD %most1
  %scale = fdiv VD %units, %largest
  %back = fdiv VD %largest, %units
  %held1 = fmul VD %held, %scale
  %first = call VD @llvm.trunc.v8f64(VD %held1)
  br label %add
add:
  %t = phi i64 [0, %found], [%t1, %add]
  %sum = phi VD [%first, %found], [%sum1, %add]
  %ta = getelementptr double, ptr %ai, i64 %t
  %ta1 = load double, ptr %ta
  %ta2 = insertelement VD poison, double %ta1, i64 0
  %ta3 = shufflevector VD %ta2, VD poison, <8 x i32> zeroinitializer
  %tn = mul nuw nsw i64 %t, %n
  %tb = getelementptr double, ptr %bj, i64 %tn
  %tb1 = load VD, ptr %tb, align 8
  %product = fmul VD %ta3, %tb1
  %scaled = fmul VD %product, %scale
  %cut = call VD @llvm.trunc.v8f64(VD %scaled)
  %sum1 = fadd VD %sum, %cut
  %t1 = add nuw nsw i64 %t, 1
  %t2 = icmp slt i64 %t1, %k
  br i1 %t2, label %add, label %store
store:
  %total = fmul VD %sum1, %back
  %rbits = bitcast VD %total to VI
  %rbiased0 = lshr VI %rbits, SPLAT(52)
  %rbiased1 = and VI %rbiased0, SPLAT(2047)
  %rbiased = call VI @llvm.umax.v8i64(VI %rbiased1, VI SPLAT(897))
  %down0 = sub VI %rbiased, %kepts
  %down1 = shl VI %down0, SPLAT(52)
  %down = bitcast VI %down1 to VD
  %up0 = sub VI SPLAT(2046), %down0
  %up1 = shl VI %up0, SPLAT(52)
  %up = bitcast VI %up1 to VD
  %raised = fmul VD %total, %up
  %whole = call VD @llvm.trunc.v8f64(VD %raised)
  %result = fmul VD %whole, %down
  store VD %result, ptr %place, align 8
  %j1 = add nuw nsw i64 %j, 8
  %j2 = icmp slt i64 %j1, %n
  br i1 %j2, label %columns, label %row_end
row_end:
  %i1 = add nuw nsw i64 %i, 1
  %i2 = icmp slt i64 %i1, %m
  br i1 %i2, label %row, label %matrix_end
matrix_end:
  %p1 = add nuw nsw i64 %p, 1
  %p2 = icmp slt i64 %p1, %count
  br i1 %p2, label %matrix, label %end
end:
  ret void
}
"""


def _vectors(text: str) -> str:
    """The text with its vector types and constants written out."""
    text = re.sub(r"SPLAT\((\d+)\)", lambda found: "<" + ", ".join([f"i64 {found[1]}"] * 8) + ">", text)
    return text.replace("VD", "<8 x double>").replace("VI", "<8 x i64>")


@lru_cache(maxsize=1)
def _function() -> ctypes._CFuncPtr:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    prototype = ctypes.CFUNCTYPE(
        *(None, pointer, pointer, pointer, pointer, pointer, integer, integer, integer),
        *(integer, integer, integer, ctypes.c_double, integer, integer),
    )
    return prototype(compile_function(_vectors(_TEXT)))


def _powers(values: np.ndarray, lowest: int) -> np.ndarray:
    """2 to the exponent of each number; 0 of zero."""
    exponents = values.view(np.uint64) & np.uint64(0x7FF << 52)
    np.maximum(exponents, np.uint64(1023 + lowest << 52), out=exponents)
    exponents[values == 0] = 0
    return exponents.view(np.float64)


# All bits of a sum: it has not more than these.
_ALL = 52


def step(
    precision: Precision,
    result: str,
    types: tuple[str, str],
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
) -> np.ndarray:
    """c + a b in one step of a tensor core: float32 or float16 (matrices, m, n), as `result` says.

    Takes a (matrices or 1, m, K), b (matrices or 1, n, K) in float64, and c of the result's type, None for zero.
    """
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b.transpose(0, 2, 1))
    count = max(len(a), len(b)) if c is None else len(c)
    m, k, n = a.shape[1], a.shape[2], b.shape[2]
    out = np.zeros((count, m, n)) if c is None else c.astype(np.float64)
    plain = None
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(out).all()):
        plain = np.matmul(a, b) + out
    powers_a, powers_b = _powers(a, LOWEST[types[0]]), _powers(b, LOWEST[types[1]])
    kept = precision.kept if result == "f32" else _ALL
    _function()(
        *(a.ctypes.data, powers_a.ctypes.data, b.ctypes.data, powers_b.ctypes.data, out.ctypes.data),
        *(count, m * k if len(a) > 1 else 0, n * k if len(b) > 1 else 0, m, n, k),
        *(2.0**precision.fraction, 1023 + LOWEST[result], kept),
    )
    if plain is not None:
        np.copyto(out, plain, where=~np.isfinite(plain))
    return _clean(out.astype(_RESULTS[result]), result)


def _clean(values: np.ndarray, result: str) -> np.ndarray:
    """Zeros without a sign, and the one NaN."""
    values += 0
    missing = np.isnan(values)
    if missing.any():
        values[missing] = _NAN[result]
    return values


def of_mma(result: str, types: tuple[str, str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """What mma.sync gives; arrays as in `step`."""
    if types[0] not in _EIGHT_BITS:
        return step(WIDE, result, types, a, b, c)
    part: np.ndarray | None = None
    for half in (slice(0, 2), slice(2, 4)):
        left, right = (
            matrix.reshape(*matrix.shape[:2], -1, 4)[..., half].reshape(*matrix.shape[:2], -1) for matrix in (a, b)
        )
        part = step(WIDE, result, ("f16", "f16"), left, right, part)
    return _clean(c + part, result)

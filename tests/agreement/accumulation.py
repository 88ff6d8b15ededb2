"""How tensor cores may sum: a family of models, of which the hardware's bits choose one.

A step takes `terms` products of elements and what was accumulated before. The exponent of a product is the sum of its
factors' exponents (its significand lies in [1, 4)); a subnormal number has the exponent of the smallest normal one. All
are shifted to the largest exponent of the step and cut off `fraction` bits below it, then added exactly; the sum
is rounded to the result's type, and zeros are positive. What the simulator does (numba_tma/sim/matrix_sums.py) is one
of them, written here a second time and plainly.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matrix_configurations import Configuration
from matrix_instructions import BITS, Instruction
from matrix_operands import operands

from numba_tma.sim.matrix_fragments import numbers

# The smallest normal exponent of each type.
LOWEST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14, "f32": -126}
_NO_EXPONENT = -10000


@dataclass(frozen=True)
class Model:
    """`terms` products a step (0: all of an instruction's), `fraction` bits kept below the largest exponent, `rounding`
    of an f32 result 'rz' or 'rn' to `kept` fraction bits; f16 results are rounded to nearest unless `rounding_f16`
    is 'rz'. `normalised`: a product's exponent is that of its value. `halves`: the first two of every four elements
    along K and then the others, as f16; and what was accumulated before is added at the end."""

    fraction: int = 25
    terms: int = 0
    rounding: str = "rz"
    kept: int = 23
    rounding_f16: str = "rn"
    normalised: bool = False
    halves: bool = False


def of(instruction: Instruction) -> Model:
    """What an H200 does."""
    if BITS[instruction.a] != 8:
        return Model()
    return Model(halves=True) if instruction.family == "mma" else Model(fraction=13, kept=13)


def candidates(instruction: Instruction) -> Iterator[Model]:
    """Models to try."""
    result = instruction.result
    if BITS[instruction.a] == 8:
        yield from (Model(fraction, halves=True) for fraction in (24, 25, 26))
    fractions = (13, 14, 22, 23, 24, 25, 26, 27, 60)
    for fraction, terms, normalised in itertools.product(fractions, (0, 4, 8, 16), (False, True)):
        if result == "f16":
            for rounding in ("rn", "rz"):
                yield Model(fraction, terms, rounding_f16=rounding, normalised=normalised)
        else:
            for rounding, kept in itertools.product(("rz", "rn"), (13, 23) if fraction < 20 else (23,)):
                yield Model(fraction, terms, rounding, kept, normalised=normalised)


def _exponent(values: np.ndarray, lowest: int) -> np.ndarray:
    """Exponents of finite numbers; of zeros, one below all others."""
    exponent = np.maximum(np.frexp(values)[1] - 1, lowest)
    return np.where(values == 0, _NO_EXPONENT, exponent)


def _towards_zero(values: np.ndarray, kept: int) -> np.ndarray:
    """Cut to f32's range and `kept` fraction bits."""
    exponent = np.maximum(np.frexp(values)[1] - 1, LOWEST["f32"])
    with np.errstate(invalid="ignore"):
        cut = np.ldexp(np.trunc(np.ldexp(values, kept - exponent)), exponent - kept)
    return np.where(np.isfinite(values), cut, values)


def _finish(model: Model, result: str, total: np.ndarray) -> np.ndarray:
    if result == "f16":
        if model.rounding_f16 == "rn":
            return total.astype(np.float16)
        exponent = np.maximum(np.frexp(total)[1] - 1, LOWEST["f16"])
        return np.where(
            np.isfinite(total), np.ldexp(np.trunc(np.ldexp(total, 10 - exponent)), exponent - 10), total
        ).astype(np.float16)
    if model.rounding == "rn":
        exponent = np.maximum(np.frexp(total)[1] - 1, LOWEST["f32"])
        near = np.ldexp(np.rint(np.ldexp(total, model.kept - exponent)), exponent - model.kept)
        return np.where(np.isfinite(total), near, total).astype(np.float32)
    return _towards_zero(total, model.kept).astype(np.float32)


def step(model: Model, result: str, kinds: tuple[str, str], a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One step: a (…, m, K) and b (…, n, K) in float64, c (…, m, n) of the result's type."""
    products = a[..., :, None, :] * b[..., None, :, :]
    held = c.astype(np.float64)
    plain = products.sum(axis=-1) + held
    if model.normalised:
        of_products = _exponent(products, -2000)
    else:
        of_products = _exponent(a, LOWEST[kinds[0]])[..., :, None, :] + _exponent(b, LOWEST[kinds[1]])[..., None, :, :]
    of_c = _exponent(held, LOWEST[result])
    largest = np.maximum(of_products.max(axis=-1), of_c)
    largest = np.maximum(largest, -400)  # all are zero
    shift = model.fraction - largest
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.trunc(np.ldexp(products, shift[..., None])).sum(axis=-1) + np.trunc(np.ldexp(held, shift))
        total = np.ldexp(total, -shift)
        return _finish(model, result, np.where(np.isfinite(plain), total, plain)) + 0


def apply(model: Model, configuration: Configuration) -> np.ndarray:
    """The result of a floating-point multiplication under a model: (problems, m, n) of the result's type."""
    i = configuration.instruction
    found = operands(configuration)
    held = found.c
    sign = i.signs[0] * i.signs[1]
    with np.errstate(all="ignore"):
        for use, a_bits, b_bits in zip(configuration.uses, found.a, found.b, strict=True):
            a, b = numbers(i.a, a_bits) * sign, numbers(i.b, b_bits)
            if not use.scale and i.family == "wgmma":
                held = np.zeros_like(held)
            if model.halves:
                part, first = np.zeros_like(held), np.arange(a.shape[-1]) % 4 < 2
                for chosen in (first, ~first):
                    part = step(model, i.result, ("f16", "f16"), a[..., chosen], b[..., chosen], part)
                held = held + part
                continue
            terms = model.terms or a.shape[-1]
            for begin in range(0, a.shape[-1], terms):
                some = slice(begin, begin + terms)
                held = step(model, i.result, (i.a, i.b), a[..., some], b[..., some], held)
    return held


def same(mine: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Which numbers agree: all NaN are one, zeros have signs."""
    unsigned = f"<u{mine.itemsize}"
    return (mine.view(unsigned) == other.view(unsigned)) | (np.isnan(mine) & np.isnan(other))

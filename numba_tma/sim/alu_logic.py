"""Comparison, selection, moves: setp, set, selp, slct, mov.

Source: PTX ISA, "Comparison and Selection Instructions", "Half Precision Comparison Instructions", "mov".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .decode import DTYPES, Alu, Decoder
from .formats import LLVM, SMALL, flush, widen
from .module import Immediate, Register, Sink, Symbol, Vector
from .native import Body, llvm_type, ufunc

_INTEGERS = ("b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
# PTX's comparisons as LLVM names them: ordered ones are false with a NaN, the others true.
_FLOAT_COMPARE = {
    **{name: f"o{name}" for name in ("eq", "lt", "le", "gt", "ge")},
    **{f"{name}u": f"u{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "ne": "one",
    "num": "ord",
    "nan": "uno",
}
# NumPy has these itself, in one call.
_NUMPY_FLOAT = {"oeq": np.equal, "une": np.not_equal, "olt": np.less, "ole": np.less_equal}
_NUMPY_FLOAT |= {"ogt": np.greater, "oge": np.greater_equal}
_JOIN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(d: Decoder, kind: str, name: str, ftz: bool) -> Any:
    if kind in _FLOATS:
        relation = _FLOAT_COMPARE.get(name) or d.fail(f"has no comparison .{name} of .{kind}")
        if kind in ("f32", "f64") and not ftz and relation in _NUMPY_FLOAT:
            return _NUMPY_FLOAT[relation]
        b = Body()
        values = [flush(b, kind, x) if ftz else x for x in ("%x0", "%x1")]
        wide = [widen(b, kind, x) for x in values]
        truth = b(f"zext i1 {b(f'fcmp {relation} double {wide[0]}, {wide[1]}')} to i8")
        array = "u16" if kind in SMALL else kind
        return ufunc(f"{relation}{'.ftz' * ftz}.{kind}", (array, array), "pred", b.returns("i8", truth))
    if kind[0] == "b" and name not in ("eq", "ne"):
        d.fail(f"compares .{kind} by .eq and .ne only")
    if name in _UNSIGNED_NAMES:
        if kind[0] != "u":
            d.fail(f"compares by .{name} only unsigned types")
        name = _UNSIGNED_NAMES[name]
    return _COMPARE.get(name) or d.fail(f"has no comparison .{name} of .{kind}")


def _relation(d: Decoder) -> str:
    return d.take(*_FLOAT_COMPARE, *_UNSIGNED_NAMES) or d.fail("needs a comparison such as .lt")


def setp(d: Decoder) -> Alu:
    """p = (a cmp b) op c, and q = !(a cmp b) op c."""
    kind = d.type(*_INTEGERS, *_FLOATS, "f16x2", "bf16x2")
    ftz = d.flag("ftz")
    join = _JOIN.get(d.take(*_JOIN))
    name = _relation(d)
    d.count(4 if join else 3)
    target, *operands = d.operands
    destinations = d.destinations(target, "pred", "pred")
    sources = [(x, kind) for x in operands[:2]]
    if join:
        sources.append((operands[2], "pred"))
    if kind in ("f16x2", "bf16x2"):
        return d.finish(_setp_packed(d, kind, name, ftz, join), destinations, sources)
    compare = _comparison(d, kind, name, ftz)
    if len(destinations) == 1:
        if join is None:
            return d.finish(compare, destinations, sources)
        return d.finish(lambda a, b, c: join(compare(a, b), c), destinations, sources)

    def both(a: Any, b: Any, c: Any = None) -> tuple:
        truth = compare(a, b)
        opposite = np.logical_not(truth)
        return (truth, opposite) if join is None else (join(truth, c), join(opposite, c))

    return d.finish(both, destinations, sources)


def _setp_packed(d: Decoder, kind: str, name: str, ftz: bool, join: Any) -> Any:
    """The two halves' comparisons go to the two predicates."""
    element = kind.removesuffix("x2")
    compare = _comparison(d, element, name, ftz)

    def both(a: Any, b: Any, c: Any = None) -> tuple:
        results = [
            compare((a >> np.uint32(shift)).astype(np.uint16), (b >> np.uint32(shift)).astype(np.uint16))
            for shift in (0, 16)
        ]
        return tuple(results if join is None else (join(x, c) for x in results))

    return both


def set_(d: Decoder) -> Alu:
    """All ones (integer destination) or 1.0 where the comparison holds, else zero."""
    kind = d.type(*_INTEGERS, *_FLOATS, "f16x2", "bf16x2")
    result = d.type("u32", "s32", "f32", "f16", "bf16", "u16", "s16", "f16x2", "bf16x2")
    ftz = d.flag("ftz")
    join = _JOIN.get(d.take(*_JOIN))
    name = _relation(d)
    d.count(4 if join else 3)
    target, *operands = d.operands
    sources = [(x, kind) for x in operands[:2]]
    if join:
        sources.append((operands[2], "pred"))
    dtype = DTYPES[result]
    if kind in ("f16x2", "bf16x2"):
        packed = _setp_packed(d, kind, name, ftz, join)
        one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(result, 0xFFFF)

        def halves(*arrays: Any) -> Any:
            low, high = packed(*arrays)
            return (low * np.uint32(one) | high * np.uint32(one << 16)).view(dtype)

        return d.finish(halves, [(target, result)], sources)
    one = {"f32": 1.0, "f16": 0x3C00, "bf16": 0x3F80}.get(
        result, -1 if result[0] == "s" else (1 << 8 * dtype.itemsize) - 1
    )
    yes = np.array(one, dtype)
    compare = _comparison(d, kind, name, ftz)

    def function(a: Any, b: Any, c: Any = None) -> Any:
        truth = compare(a, b)
        return np.multiply(truth if join is None else join(truth, c), yes)

    return d.finish(function, [(target, result)], sources)


def selp(d: Decoder) -> Alu:
    kind = d.type(*_INTEGERS, *_FLOATS)
    d.count(4)
    word = f"u{8 * DTYPES[kind].itemsize}"
    target, a, b, p = d.operands
    if kind in ("f32", "f64"):
        a, b = _as_bits(a, kind), _as_bits(b, kind)
    return d.finish(_select(word), [(target, word)], [(a, word), (b, word), (p, "pred")])


def _as_bits(operand: Any, kind: str) -> Any:
    """A floating-point immediate in the width of the type, so that only its bits matter from there on."""
    if not isinstance(operand, Immediate) or operand.kind == kind:
        return operand
    dtype = DTYPES[kind]
    bits = int(np.array(operand.value, np.float64).astype(dtype).view(f"u{dtype.itemsize}"))
    return Immediate(bits, "int", bits)


def _select(word: str) -> np.ufunc:
    b, t = Body(), llvm_type(word)
    chosen = b("icmp ne i8 %x2, 0")
    value = b(f"select i1 {chosen}, {t} %x0, {t} %x1")
    return ufunc(f"selp.{word}", (word, word, "pred"), word, b.returns(t, value))


def slct(d: Decoder) -> Alu:
    """The first source where the third is >= 0, else the second; NaN chooses the second, -0 the first."""
    kind = d.type("s32", "f32")
    value_kind = d.type(*_INTEGERS, "f32", "f64")
    ftz = d.flag("ftz")
    d.count(4)
    word = f"u{8 * DTYPES[value_kind].itemsize}"
    b, t = Body(), llvm_type(word)
    if kind == "f32":
        x = flush(b, "f32", "%x2") if ftz else "%x2"
        chosen = b(f"fcmp oge {LLVM['f32']} {x}, 0.0")
    else:
        chosen = b("icmp sge i32 %x2, 0")
    value = b(f"select i1 {chosen}, {t} %x0, {t} %x1")
    function = ufunc(f"slct.{word}.{kind}{'.ftz' * ftz}", (word, word, kind), word, b.returns(t, value))
    target, x, y, z = d.operands
    if value_kind in ("f32", "f64"):
        x, y = _as_bits(x, value_kind), _as_bits(y, value_kind)
    return d.finish(function, [(target, word)], [(x, word), (y, word), (z, kind)])


def mov(d: Decoder) -> Alu | None:
    """Copies, and vectors packed into or unpacked from one register."""
    kind = d.type("pred", *_INTEGERS, "f16", "bf16", "f32", "f64", "b8")
    d.count(2)
    target, source = d.operands
    if isinstance(source, Vector):
        return _pack(d, kind, target, source)
    if isinstance(target, Vector):
        return _unpack(d, kind, target, source)
    if not isinstance(source, (Register, Immediate, Symbol)):
        d.fail("moves a register, a constant or an address")
    return d.finish(lambda a: a, [(target, kind)], [(source, kind)])


def _pack(d: Decoder, kind: str, target: Any, source: Vector) -> Alu:
    size = DTYPES[kind].itemsize
    count = len(source.elements)
    if isinstance(target, Vector) or count not in (2, 4, 8) or size % count or size == count > 4:
        d.fail(f"cannot pack {count} elements into .{kind}")
    whole, part = f"u{8 * size}", f"u{8 * size // count}"
    b, t, p = Body(), llvm_type(whole), llvm_type(part)
    total = "0"
    for i in range(count):
        wide = b(f"zext {p} %x{i} to {t}")
        total = b(f"or {t} {total}, {b(f'shl {t} {wide}, {8 * size // count * i}')}")
    function = ufunc(f"pack.{whole}.{part}", (part,) * count, whole, b.returns(t, total))
    return d.finish(function, [(target, whole)], [(x, part) for x in source.elements])


def _unpack(d: Decoder, kind: str, target: Vector, source: Any) -> Alu:
    size = DTYPES[kind].itemsize
    count = len(target.elements)
    if isinstance(source, Vector) or count not in (2, 4, 8) or size % count:
        d.fail(f"cannot unpack .{kind} into {count} elements")
    whole, part = f"u{8 * size}", f"u{8 * size // count}"
    t, p = llvm_type(whole), llvm_type(part)
    functions = []
    for i, element in enumerate(target.elements):
        if isinstance(element, Sink):
            continue
        b = Body()
        value = b(f"trunc {t} {b(f'lshr {t} %x0, {8 * size // count * i}')} to {p}")
        functions.append(ufunc(f"unpack.{whole}.{part}.{i}", (whole,), part, b.returns(p, value)))
    kept = [(x, part) for x in target.elements if not isinstance(x, Sink)]
    if len(functions) == 1:
        return d.finish(functions[0], kept, [(source, whole)])
    return d.finish(lambda a: tuple(function(a) for function in functions), kept, [(source, whole)])

"""Integer arithmetic and bits: add … rem, carry chains, shifts, bit fields, permutations, dot products.

The condition code of the carry chains is a register of its own, ``%cc`` (a predicate). The carry-out of
``sub.cc`` is the borrow.

Division by zero is "machine-specific" in the manual; as on NVIDIA GPUs the quotient and the remainder
then have all bits set. The most negative number divided by -1 gives itself, remainder 0.

Source: PTX ISA, "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic Instructions",
"Logic and Shift Instructions", "Scalar Video Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .decode import Alu, Decoder
from .module import CONDITION_CODE, Immediate
from .native import Body, llvm_type, ufunc

_BITS = {f"{kind}{width}": width for kind in "bsu" for width in (8, 16, 32, 64)}
_UNSIGNED = {f"{kind}{width}": f"u{width}" for kind in "bsu" for width in (8, 16, 32, 64)}
_INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
_PAIRS = ("s16x2", "u16x2")


def _is_signed(kind: str) -> bool:
    return kind[0] == "s"


def _extend(b: Body, value: str, kind: str, wide: int) -> str:
    """A value of type `kind` as an integer of `wide` bits."""
    if _BITS[kind] == wide:
        return value
    return b(f"{'sext' if _is_signed(kind) else 'zext'} i{_BITS[kind]} {value} to i{wide}")


# ---- addition, subtraction


def add(d: Decoder) -> Alu:
    return _add_or_subtract(d, np.add, "add")


def sub(d: Decoder) -> Alu:
    return _add_or_subtract(d, np.subtract, "sub")


def _add_or_subtract(d: Decoder, simple: np.ufunc, name: str) -> Alu:
    kind = d.type(*_INTEGERS, "b32", "b64", *_PAIRS)
    d.count(3)
    target, a, b = d.operands
    if kind in _PAIRS:
        return d.finish(_pairwise(name, kind, f"{name} i16 {{0}}, {{1}}"), [(target, kind)], [(a, kind), (b, kind)])
    sources = [(a, kind), (b, kind)]
    if d.flag("sat"):
        function = _saturating(name, kind)
        return d.finish(function, [(target, kind)], sources)
    if d.flag("cc"):
        kind = _UNSIGNED[kind]
        function = _add_with_carry_out if name == "add" else _subtract_with_borrow_out
        return d.finish(function, [(target, kind), (CONDITION_CODE, "pred")], [(a, kind), (b, kind)])
    return d.finish(simple, [(target, kind)], sources)


def _saturating(name: str, kind: str) -> np.ufunc:
    b, t = Body(), llvm_type(kind)
    r = b(f"call {t} @llvm.{'s' if _is_signed(kind) else 'u'}{name}.sat.{t}({t} %x0, {t} %x1)")
    return ufunc(f"{name}.sat.{kind}", (kind, kind), kind, b.returns(t, r))


def _add_with_carry_out(a: Any, b: Any) -> tuple:
    total = np.add(a, b)
    return total, np.less(total, a)


def _subtract_with_borrow_out(a: Any, b: Any) -> tuple:
    return np.subtract(a, b), np.less(a, b)


def addc(d: Decoder) -> Alu:
    def function(a: Any, b: Any, carry: Any) -> tuple:
        partial = np.add(a, b)
        total = np.add(partial, carry)
        return total, np.less(partial, a) | np.less(total, partial)

    return _with_carry_in(d, function)


def subc(d: Decoder) -> Alu:
    def function(a: Any, b: Any, borrow: Any) -> tuple:
        partial = np.subtract(a, b)
        return np.subtract(partial, borrow), np.less(a, b) | np.less(partial, borrow)

    return _with_carry_in(d, function)


def _with_carry_in(d: Decoder, function: Callable) -> Alu:
    kind = _UNSIGNED[d.type("s32", "u32", "s64", "u64", "b32", "b64")]
    d.count(3)
    target, a, b = d.operands
    sources = [(a, kind), (b, kind), (CONDITION_CODE, "pred")]
    if d.flag("cc"):
        return d.finish(function, [(target, kind), (CONDITION_CODE, "pred")], sources)
    return d.finish(lambda *arrays: function(*arrays)[0], [(target, kind)], sources)


# ---- multiplication, division


def _product(b: Body, kind: str, part: str) -> tuple[str, int]:
    """The low or high half or the whole of %x0 * %x1, and its number of bits."""
    width = _BITS[kind]
    if part == "lo":
        return b(f"mul i{width} %x0, %x1"), width
    wide = 2 * width
    whole = b(f"mul i{wide} {_extend(b, '%x0', kind, wide)}, {_extend(b, '%x1', kind, wide)}")
    if part == "wide":
        return whole, wide
    return b(f"trunc i{wide} {b(f'lshr i{wide} {whole}, {width}')} to i{width}"), width


def mul(d: Decoder) -> Alu:
    kind = d.type(*_INTEGERS)
    part = d.take("lo", "hi", "wide") or d.fail("needs .lo, .hi or .wide")
    d.count(3)
    target, x, y = d.operands
    result = kind if part != "wide" else _wider(d, kind)
    if part == "lo":
        function = np.multiply
    else:
        b = Body()
        value, width = _product(b, kind, part)
        function = ufunc(f"mul.{part}.{kind}", (kind, kind), result, b.returns(f"i{width}", value))
    return d.finish(function, [(target, result)], [(x, kind), (y, kind)])


def _wider(d: Decoder, kind: str) -> str:
    if _BITS[kind] == 64:
        d.fail("has no .wide form for 64 bits")
    return f"{kind[0]}{2 * _BITS[kind]}"


def mad(d: Decoder) -> Alu:
    kind = d.type(*_INTEGERS)
    part = d.take("lo", "hi", "wide") or d.fail("needs .lo, .hi or .wide")
    d.count(4)
    target, x, y, z = d.operands
    result = kind if part != "wide" else _wider(d, kind)
    if d.flag("cc"):
        return _multiply_add_carry(d, kind, part, carry_in=False, carry_out=True)
    b = Body()
    value, width = _product(b, kind, part)
    if d.flag("sat"):
        total = b(f"call i{width} @llvm.sadd.sat.i{width}(i{width} {value}, i{width} %x2)")
        name = f"mad.{part}.sat.{kind}"
    else:
        total = b(f"add i{width} {value}, %x2")
        name = f"mad.{part}.{kind}"
    function = ufunc(name, (kind, kind, result), result, b.returns(f"i{width}", total))
    return d.finish(function, [(target, result)], [(x, kind), (y, kind), (z, result)])


def madc(d: Decoder) -> Alu:
    kind = d.type("s32", "u32", "s64", "u64")
    part = d.take("lo", "hi") or d.fail("needs .lo or .hi")
    return _multiply_add_carry(d, kind, part, carry_in=True, carry_out=d.flag("cc"))


def _multiply_add_carry(d: Decoder, kind: str, part: str, carry_in: bool, carry_out: bool) -> Alu:
    d.count(4)
    target, x, y, z = d.operands
    b = Body()
    value, width = _product(b, kind, part)
    product = ufunc(f"mul.{part}.{kind}", (kind, kind), kind, b.returns(f"i{width}", value))
    unsigned = np.dtype(f"u{width // 8}")

    def function(a: Any, b: Any, c: Any, carry: Any = False) -> Any:
        partial = product(a, b).view(unsigned)
        c = c.view(unsigned)
        total = np.add(partial, c)
        out = np.less(total, c)
        if carry_in:
            last = np.add(total, carry)
            out = out | np.less(last, total)
            total = last
        return (total, out) if carry_out else total

    sources = [(x, kind), (y, kind), (z, kind)]
    if carry_in:
        sources.append((CONDITION_CODE, "pred"))
    destinations = [(target, f"u{width}")]
    if carry_out:
        destinations.append((CONDITION_CODE, "pred"))
    return d.finish(function, destinations, sources)


def mul24(d: Decoder) -> Alu:
    return _multiply_24(d, False)


def mad24(d: Decoder) -> Alu:
    return _multiply_24(d, True)


def _multiply_24(d: Decoder, adds: bool) -> Alu:
    kind = d.type("s32", "u32")
    part = d.take("lo", "hi") or d.fail("needs .lo or .hi")
    saturates = d.flag("sat")
    d.count(4 if adds else 3)
    b = Body()
    shift = "ashr" if _is_signed(kind) else "lshr"
    narrow = [b(f"{shift} i32 {b(f'shl i32 %x{i}, 8')}, 8") for i in (0, 1)]
    whole = b(f"mul i64 {_extend(b, narrow[0], kind, 64)}, {_extend(b, narrow[1], kind, 64)}")
    if part == "hi":
        whole = b(f"lshr i64 {whole}, 16")
    value = b(f"trunc i64 {whole} to i32")
    if saturates:
        value = b(f"call i32 @llvm.sadd.sat.i32(i32 {value}, i32 %x2)")
    elif adds:
        value = b(f"add i32 {value}, %x2")
    inputs = (kind,) * (3 if adds else 2)
    name = f"{d.opcode}.{part}{'.sat' * saturates}.{kind}"
    function = ufunc(name, inputs, kind, b.returns("i32", value))
    return d.finish(function, [(d.operands[0], kind)], [(x, kind) for x in d.operands[1:]])


def div(d: Decoder) -> Alu:
    return _divide(d, "div")


def rem(d: Decoder) -> Alu:
    return _divide(d, "rem")


def _divide(d: Decoder, name: str) -> Alu:
    kind = d.type(*_INTEGERS)
    d.count(3)
    target, x, y = d.operands
    b, t = Body(), llvm_type(kind)
    zero = b(f"icmp eq {t} %x1, 0")
    bad = zero
    if _is_signed(kind):
        # The one quotient that does not fit would trap on the host.
        minus = b(f"icmp eq {t} %x1, -1")
        bad = b(f"or i1 {zero}, {minus}")
    divisor = b(f"select i1 {bad}, {t} 1, {t} %x1")
    value = b(f"{'s' if _is_signed(kind) else 'u'}{name} {t} %x0, {divisor}")
    if _is_signed(kind) and name == "div":
        value = b(f"select i1 {minus}, {t} {b(f'sub {t} 0, %x0')}, {t} {value}")
    value = b(f"select i1 {zero}, {t} -1, {t} {value}")
    function = ufunc(f"{name}.{kind}", (kind, kind), kind, b.returns(t, value))
    return d.finish(function, [(target, kind)], [(x, kind), (y, kind)])


# ---- absolute value, minimum, dot products


def absolute(d: Decoder) -> Alu:
    kind = d.type("s16", "s32", "s64")
    d.count(2)
    return d.finish(np.abs, [(d.operands[0], kind)], [(d.operands[1], kind)])


def neg(d: Decoder) -> Alu:
    kind = d.type("s16", "s32", "s64")
    d.count(2)
    return d.finish(np.negative, [(d.operands[0], kind)], [(d.operands[1], kind)])


def minimum(d: Decoder) -> Alu:
    return _extreme(d, "min", np.minimum)


def maximum(d: Decoder) -> Alu:
    return _extreme(d, "max", np.maximum)


def _extreme(d: Decoder, name: str, simple: np.ufunc) -> Alu:
    kind = d.type(*_INTEGERS, *_PAIRS)
    relu = d.flag("relu")
    d.count(3, 4)
    target, *operands = d.operands
    sources = [(x, kind) for x in operands]
    sign = "s" if _is_signed(kind) else "u"
    if kind in _PAIRS:
        if len(operands) != 2:
            d.fail("takes 3 operands")
        function = _pairwise(name, kind, f"call i16 @llvm.{sign}{name}.i16(i16 {{0}}, i16 {{1}})", relu)
        return d.finish(function, [(target, kind)], sources)
    if len(operands) == 3:
        function = _with_relu(lambda a, b, c: simple(simple(a, b), c), relu)
    else:
        function = _with_relu(simple, relu)
    return d.finish(function, [(target, kind)], sources)


def _with_relu(function: Callable, relu: bool) -> Callable:
    if not relu:
        return function
    return lambda *arrays: np.maximum(function(*arrays), 0)


def _pairwise(name: str, kind: str, text: str, relu: bool = False) -> np.ufunc:
    """An operation on both 16-bit halves; `text` is IR of two i16 values {0} and {1}."""
    b = Body()
    halves = []
    for shift in (0, 16):
        parts = [b(f"trunc i32 {b(f'lshr i32 %x{i}, {shift}')} to i16") for i in (0, 1)]
        value = b(text.format(*parts))
        if relu:
            value = b(f"call i16 @llvm.smax.i16(i16 {value}, i16 0)")
        halves.append(b(f"zext i16 {value} to i32"))
    joined = b(f"or i32 {halves[0]}, {b(f'shl i32 {halves[1]}, 16')}")
    return ufunc(f"{name}.{kind}{'.relu' * relu}", ("u32", "u32"), "u32", b.returns("i32", joined))


def sad(d: Decoder) -> Alu:
    kind = d.type(*_INTEGERS)
    d.count(4)
    b, t = Body(), llvm_type(kind)
    less = b(f"icmp {'slt' if _is_signed(kind) else 'ult'} {t} %x0, %x1")
    difference = b(f"select i1 {less}, {t} {b(f'sub {t} %x1, %x0')}, {t} {b(f'sub {t} %x0, %x1')}")
    total = b(f"add {t} {difference}, %x2")
    function = ufunc(f"sad.{kind}", (kind,) * 3, kind, b.returns(t, total))
    return d.finish(function, [(d.operands[0], kind)], [(x, kind) for x in d.operands[1:]])


def dp4a(d: Decoder) -> Alu:
    second, first = d.type("s32", "u32"), d.type("s32", "u32")
    return _dot(d, first, second, 8, 8, range(4))


def dp2a(d: Decoder) -> Alu:
    second, first = d.type("s32", "u32"), d.type("s32", "u32")
    part = d.take("lo", "hi") or d.fail("needs .lo or .hi")
    return _dot(d, first, second, 16, 8, range(2) if part == "lo" else range(2, 4), part)


def _dot(d: Decoder, first: str, second: str, width_a: int, width_b: int, bytes_of_b: range, part: str = "") -> Alu:
    d.count(4)
    b = Body()
    total = "%x2"
    for i, j in enumerate(bytes_of_b):
        x = b(f"trunc i32 {b(f'lshr i32 %x0, {i * width_a}')} to i{width_a}")
        y = b(f"trunc i32 {b(f'lshr i32 %x1, {j * width_b}')} to i{width_b}")
        x = b(f"{'sext' if _is_signed(first) else 'zext'} i{width_a} {x} to i32")
        y = b(f"{'sext' if _is_signed(second) else 'zext'} i{width_b} {y} to i32")
        total = b(f"add i32 {total}, {b(f'mul i32 {x}, {y}')}")
    function = ufunc(f"{d.opcode}{part}.{first}.{second}", ("u32",) * 3, "u32", b.returns("i32", total))
    return d.finish(function, [(d.operands[0], "u32")], [(x, "u32") for x in d.operands[1:]])


# ---- logic


def _logic(simple: np.ufunc) -> Callable[[Decoder], Alu]:
    def build(d: Decoder) -> Alu:
        kind = d.type("pred", "b16", "b32", "b64")
        d.count(3)
        return d.finish(simple, [(d.operands[0], kind)], [(x, kind) for x in d.operands[1:]])

    return build


bitwise_and = _logic(np.bitwise_and)
bitwise_or = _logic(np.bitwise_or)
bitwise_xor = _logic(np.bitwise_xor)


def bitwise_not(d: Decoder) -> Alu:
    kind = d.type("pred", "b16", "b32", "b64")
    d.count(2)
    return d.finish(np.bitwise_not, [(d.operands[0], kind)], [(d.operands[1], kind)])


def cnot(d: Decoder) -> Alu:
    kind = d.type("b16", "b32", "b64")
    d.count(2)
    return d.finish(lambda a: np.equal(a, 0).astype(a.dtype), [(d.operands[0], kind)], [(d.operands[1], kind)])


def lop3(d: Decoder) -> Alu:
    d.type("b32")
    combine = d.take("or", "and")
    d.count(6 if combine else 5)
    target, *operands = d.operands
    table = operands[3]
    if not isinstance(table, Immediate) or table.kind != "int":
        d.fail("the look-up table is a constant")
    function = ufunc(f"lop3.{table.bits & 255:02x}", ("u32",) * 3, "u32", _truth_table(table.bits & 255))
    sources = [(x, "u32") for x in operands[:3]]
    if not combine:
        return d.finish(function, [(target, "u32")], sources)
    join = np.logical_or if combine == "or" else np.logical_and

    def with_predicate(a: Any, b: Any, c: Any, q: Any) -> tuple:
        value = function(a, b, c)
        return value, join(np.not_equal(value, 0), q)

    return d.finish(with_predicate, d.destinations(target, "u32", "pred"), [*sources, (operands[4], "pred")])


def _truth_table(table: int) -> str:
    """Sum of the minterms of a truth table over a, b, c; LLVM finds the short form."""
    b = Body()
    straight = ["%x0", "%x1", "%x2"]
    inverted = [b(f"xor i32 {x}, -1") for x in straight]
    total = "0"
    for row in range(8):
        if table >> row & 1:
            chosen = [straight[i] if row >> (2 - i) & 1 else inverted[i] for i in range(3)]
            term = b(f"and i32 {b(f'and i32 {chosen[0]}, {chosen[1]}')}, {chosen[2]}")
            total = b(f"or i32 {total}, {term}")
    return b.returns("i32", total)


# ---- shifts and bit fields


def shl(d: Decoder) -> Alu:
    return _shift(d, d.type("b16", "b32", "b64"), np.left_shift, "shl")


def shr(d: Decoder) -> Alu:
    kind = d.type("b16", "b32", "b64", *_INTEGERS)
    return _shift(d, kind, np.right_shift, "ashr" if _is_signed(kind) else "lshr")


def _shift(d: Decoder, kind: str, simple: np.ufunc, instruction: str) -> Alu:
    """Shift by an unsigned 32-bit amount; amounts beyond the width act like the width."""
    d.count(3)
    target, x, amount = d.operands
    width, t = _BITS[kind], llvm_type(_UNSIGNED[kind])
    if isinstance(amount, Immediate):
        # NumPy, too, shifts everything out when the amount is the width.
        clamped = min(amount.bits & 0xFFFFFFFF, width)
        return d.finish(simple, [(target, kind)], [(x, kind), (Immediate(clamped, "int", clamped), kind)])
    b = Body()
    fits = b(f"icmp ult i32 %x1, {width}")
    n = b(f"select i1 {fits}, i32 %x1, i32 {width - 1}")
    n = n if width == 32 else b(f"{'zext' if width == 64 else 'trunc'} i32 {n} to {t}")
    value = b(f"{instruction} {t} %x0, {n}")
    if instruction != "ashr":
        value = b(f"select i1 {fits}, {t} {value}, {t} 0")
    unsigned = kind if instruction == "ashr" else _UNSIGNED[kind]
    function = ufunc(f"{instruction}.{unsigned}", (unsigned, "u32"), unsigned, b.returns(t, value))
    return d.finish(function, [(target, unsigned)], [(x, unsigned), (amount, "u32")])


def shf(d: Decoder) -> Alu:
    """Funnel shift of the 64-bit value whose low word is the first source."""
    d.type("b32")
    direction = d.take("l", "r") or d.fail("needs .l or .r")
    mode = d.take("wrap", "clamp") or d.fail("needs .wrap or .clamp")
    d.count(4)
    b = Body()
    whole = b(f"or i64 {b('zext i32 %x0 to i64')}, {b('shl i64 ' + b('zext i32 %x1 to i64') + ', 32')}")
    n = b("and i32 %x2, 31") if mode == "wrap" else b("call i32 @llvm.umin.i32(i32 %x2, i32 32)")
    n = b(f"zext i32 {n} to i64")
    if direction == "l":
        whole = b(f"lshr i64 {b(f'shl i64 {whole}, {n}')}, 32")
    else:
        whole = b(f"lshr i64 {whole}, {n}")
    function = ufunc(f"shf.{direction}.{mode}", ("u32",) * 3, "u32", b.returns("i32", b(f"trunc i64 {whole} to i32")))
    return d.finish(function, [(d.operands[0], "u32")], [(x, "u32") for x in d.operands[1:]])


def _clamped(b: Body, shift: str, t: str, value: str, amount: str) -> str:
    """A shift of `value` by `amount` of the same type; beyond the width zero, or for ashr all sign bits."""
    width = int(t[1:])
    last = b(f"call {t} @llvm.umin.{t}({t} {amount}, {t} {width - 1})")
    shifted = b(f"{shift} {t} {value}, {last}")
    if shift == "ashr":
        return shifted
    return b(f"select i1 {b(f'icmp ult {t} {amount}, {width}')}, {t} {shifted}, {t} 0")


def _field(b: Body, t: str, position: str, length: str) -> tuple[str, str, str]:
    """Position and length of a bit field in its type, and `length` ones.

    The manual limits both to 0 … 255. Beyond, the 32-bit instructions take the low 8 bits, as they have operands
    of a byte each; the 64-bit ones, which ptxas composes of shifts, take the whole number.
    """
    if t == "i32":
        position, length = (b(f"and i32 {x}, 255") for x in (position, length))
    else:
        position, length = (b(f"zext i32 {x} to i64") for x in (position, length))
    return position, length, b(f"sub {t} {_clamped(b, 'shl', t, '1', length)}, 1")


def bfe(d: Decoder) -> Alu:
    """Bit-field extract; a signed field fills with its top bit, which lies no higher than the value's."""
    kind = d.type("s32", "u32", "s64", "u64")
    d.count(4)
    b, t = Body(), llvm_type(kind)
    position, length, ones = _field(b, t, "%x1", "%x2")
    moved = _clamped(b, "ashr" if _is_signed(kind) else "lshr", t, "%x0", position)
    value = b(f"and {t} {moved}, {ones}")
    if _is_signed(kind):
        top = _clamped(b, "lshr", t, value, b(f"sub {t} {length}, 1"))
        filled = b(f"or {t} {value}, {b(f'xor {t} {ones}, -1')}")
        value = b(f"select i1 {b(f'icmp ne {t} {top}, 0')}, {t} {filled}, {t} {value}")
    function = ufunc(f"bfe.{kind}", (kind, "u32", "u32"), kind, b.returns(t, value))
    return d.finish(function, [(d.operands[0], kind)], list(zip(d.operands[1:], (kind, "u32", "u32"), strict=True)))


def bfi(d: Decoder) -> Alu:
    """Bit-field insert: the low bits of the first source into the second."""
    kind = d.type("b32", "b64")
    d.count(5)
    word = _UNSIGNED[kind]
    b, t = Body(), llvm_type(word)
    position, _, ones = _field(b, t, "%x2", "%x3")
    mask = _clamped(b, "shl", t, ones, position)
    moved = _clamped(b, "shl", t, b(f"and {t} %x0, {ones}"), position)
    kept = b(f"and {t} %x1, {b(f'xor {t} {mask}, -1')}")
    value = b(f"or {t} {moved}, {kept}")
    kinds = (word, word, "u32", "u32")
    function = ufunc(f"bfi.{kind}", kinds, word, b.returns(t, value))
    return d.finish(function, [(d.operands[0], word)], list(zip(d.operands[1:], kinds, strict=True)))


def bfind(d: Decoder) -> Alu:
    """Position of the most significant 1 (of the most significant non-sign bit for signed types)."""
    kind = d.type("s32", "u32", "s64", "u64")
    from_left = d.flag("shiftamt")
    d.count(2)
    b, t, width = Body(), llvm_type(kind), _BITS[kind]
    x = "%x0"
    if _is_signed(kind):
        x = b(f"xor {t} %x0, {b(f'ashr {t} %x0, {width - 1}')}")
    zeros = b(f"call {t} @llvm.ctlz.{t}({t} {x}, i1 false)")
    zeros = zeros if width == 32 else b(f"trunc i64 {zeros} to i32")
    place = zeros if from_left else b(f"sub i32 {width - 1}, {zeros}")
    none = b(f"icmp eq {t} {x}, 0")
    value = b(f"select i1 {none}, i32 -1, i32 {place}")
    function = ufunc(f"bfind{'.shiftamt' * from_left}.{kind}", (kind,), "u32", b.returns("i32", value))
    return d.finish(function, [(d.operands[0], "u32")], [(d.operands[1], kind)])


def _count_bits(intrinsic: str, extra: str) -> Callable[[Decoder], Alu]:
    def build(d: Decoder) -> Alu:
        kind = d.type("b32", "b64")
        d.count(2)
        b, t, word = Body(), llvm_type(_UNSIGNED[kind]), _UNSIGNED[kind]
        value = b(f"call {t} @llvm.{intrinsic}.{t}({t} %x0{extra})")
        value = value if kind == "b32" else b(f"trunc i64 {value} to i32")
        function = ufunc(f"{d.opcode}.{kind}", (word,), "u32", b.returns("i32", value))
        return d.finish(function, [(d.operands[0], "u32")], [(d.operands[1], word)])

    return build


popc = _count_bits("ctpop", "")
clz = _count_bits("ctlz", ", i1 false")


def brev(d: Decoder) -> Alu:
    kind = d.type("b32", "b64")
    d.count(2)
    b, t, word = Body(), llvm_type(_UNSIGNED[kind]), _UNSIGNED[kind]
    value = b(f"call {t} @llvm.bitreverse.{t}({t} %x0)")
    function = ufunc(f"brev.{kind}", (word,), word, b.returns(t, value))
    return d.finish(function, [(d.operands[0], word)], [(d.operands[1], word)])


def prmt(d: Decoder) -> Alu:
    """Pick four bytes of the eight of two sources."""
    mode = d.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    d.type("b32")
    d.count(4)
    b = Body()
    whole = b(f"or i64 {b('zext i32 %x0 to i64')}, {b('shl i64 ' + b('zext i32 %x1 to i64') + ', 32')}")
    total = "0"
    low = b("and i32 %x2, 3")
    for i in range(4):
        if mode == "f4e":
            index = b(f"add i32 {low}, {i}")
        elif mode == "b4e":
            index = b(f"and i32 {b(f'sub i32 {low}, {i}')}, 7")
        elif mode == "rc8":
            index = low
        elif mode == "ecl":
            index = b(f"call i32 @llvm.umax.i32(i32 {low}, i32 {i})")
        elif mode == "ecr":
            index = b(f"call i32 @llvm.umin.i32(i32 {low}, i32 {i})")
        elif mode == "rc16":
            half = b(f"and i32 {low}, 1")
            index = b(f"add i32 {b(f'shl i32 {half}, 1')}, {i % 2}")
        else:
            index = b(f"and i32 {b(f'lshr i32 %x2, {4 * i}')}, 7")
        place = b(f"zext i32 {b(f'shl i32 {index}, 3')} to i64")
        byte = b(f"trunc i64 {b(f'lshr i64 {whole}, {place}')} to i8")
        if not mode:
            sign = b(f"icmp ne i32 {b(f'and i32 %x2, {8 << 4 * i}')}, 0")
            byte = b(f"select i1 {sign}, i8 {b(f'ashr i8 {byte}, 7')}, i8 {byte}")
        wide = b(f"zext i8 {byte} to i32")
        total = b(f"or i32 {total}, {b(f'shl i32 {wide}, {8 * i}')}")
    function = ufunc(f"prmt.{mode}", ("u32",) * 3, "u32", b.returns("i32", total))
    return d.finish(function, [(d.operands[0], "u32")], [(x, "u32") for x in d.operands[1:]])


def fns(d: Decoder) -> Alu:
    """Position of the n-th set bit from a base upwards (n > 0) or downwards (n < 0); n = 0: the base."""
    d.type("b32")
    d.count(4)

    def function(mask: Any, base: Any, offset: Any) -> Any:
        mask, base, offset = np.broadcast_arrays(mask, base, offset)
        result = np.full(mask.shape, 0xFFFFFFFF, np.uint32)
        itself = (offset == 0) & (base < 32) & (mask >> np.minimum(base, 31) & 1 == 1)
        result[itself] = base[itself]
        start, wanted = base.astype(np.int64), np.abs(offset.astype(np.int64))
        seen = np.zeros(mask.shape, np.int64)
        for step in range(32):
            place = np.where(offset > 0, start + step, start - step)
            valid = (place >= 0) & (place < 32) & (offset != 0)
            bit = (mask >> np.clip(place, 0, 31).astype(np.uint32)) & 1
            found = valid & (bit == 1)
            seen += found
            hit = found & (seen == wanted)
            result[hit] = place[hit]
        return result

    kinds = ("b32", "b32", "s32")
    return d.finish(function, [(d.operands[0], "b32")], list(zip(d.operands[1:], kinds, strict=True)))


def bmsk(d: Decoder) -> Alu:
    """A mask of `length` ones from bit `position` upwards."""
    d.type("b32")
    mode = d.take("clamp", "wrap") or d.fail("needs .clamp or .wrap")
    d.count(3)
    b = Body()
    if mode == "wrap":
        start, length = b("and i32 %x0, 31"), b("and i32 %x1, 31")
    else:
        start, length = (b(f"call i32 @llvm.umin.i32(i32 %x{i}, i32 32)") for i in (0, 1))
    start, length = (b(f"zext i32 {x} to i64") for x in (start, length))
    ones = b(f"sub i64 {b(f'shl i64 1, {length}')}, 1")
    value = b(f"trunc i64 {b(f'shl i64 {ones}, {start}')} to i32")
    function = ufunc(f"bmsk.{mode}", ("u32", "u32"), "u32", b.returns("i32", value))
    return d.finish(function, [(d.operands[0], "u32")], [(x, "u32") for x in d.operands[1:]])


def szext(d: Decoder) -> Alu:
    """Sign- or zero-extend from the bit that the second source names: so many bits count."""
    kind = d.type("s32", "u32")
    mode = d.take("clamp", "wrap") or d.fail("needs .clamp or .wrap")
    d.count(3)
    b = Body()
    n = b("and i32 %x1, 31") if mode == "wrap" else b("call i32 @llvm.umin.i32(i32 %x1, i32 32)")
    drop = b(f"sub i32 32, {n}")
    none = b(f"icmp eq i32 {n}, 0")
    drop = b(f"select i1 {none}, i32 0, i32 {drop}")
    shift = "ashr" if _is_signed(kind) else "lshr"
    value = b(f"{shift} i32 {b(f'shl i32 %x0, {drop}')}, {drop}")
    value = b(f"select i1 {none}, i32 0, i32 {value}")
    function = ufunc(f"szext.{mode}.{kind}", (kind, "u32"), kind, b.returns("i32", value))
    return d.finish(function, [(d.operands[0], kind)], [(d.operands[1], kind), (d.operands[2], "u32")])


# ---- SIMD video instructions


def video(d: Decoder) -> Alu:
    """vadd2, vsub4, vabsdiff4 and so on, on all lanes of whole registers (no selectors, no lane mask)."""
    name, lanes = d.opcode[1:-1], int(d.opcode[-1])
    accumulates = d.flag("add")
    saturates = d.flag("sat")
    comparison = d.take("eq", "ne", "lt", "le", "gt", "ge") if name == "set" else ""
    second, first = d.type("s32", "u32"), d.type("s32", "u32")
    result = "u32" if name == "set" else d.type("s32", "u32")
    d.count(4)
    if first != second and name == "set":
        d.fail("compares lanes of one signedness")
    width = 32 // lanes
    b = Body()
    total = "%x2" if accumulates else "0"
    for i in range(lanes):
        parts = []
        for x, kind in (("%x0", first), ("%x1", second)):
            lane = b(f"trunc i32 {b(f'lshr i32 {x}, {i * width}')} to i{width}")
            parts.append(b(f"{'sext' if _is_signed(kind) else 'zext'} i{width} {lane} to i32"))
        value = _video_lane(b, name, comparison, *parts)
        if saturates:
            low, high = (-(1 << width - 1), (1 << width - 1) - 1) if _is_signed(result) else (0, (1 << width) - 1)
            value = b(f"call i32 @llvm.smax.i32(i32 {value}, i32 {low})")
            value = b(f"call i32 @llvm.smin.i32(i32 {value}, i32 {high})")
        if accumulates:
            total = b(f"add i32 {total}, {value}")
        else:
            low_bits = b(f"and i32 {value}, {(1 << width) - 1}")
            total = b(f"or i32 {total}, {b(f'shl i32 {low_bits}, {i * width}')}")
    function = ufunc(d.instruction.mnemonic, ("u32",) * 3, "u32", b.returns("i32", total))
    return d.finish(function, [(d.operands[0], "u32")], [(x, "u32") for x in d.operands[1:]])


def _video_lane(b: Body, name: str, comparison: str, x: str, y: str) -> str:
    if name in ("add", "sub"):
        return b(f"{name} i32 {x}, {y}")
    if name == "avrg":
        # The average is rounded away from zero.
        total = b(f"add i32 {x}, {y}")
        up = b(f"icmp sge i32 {total}, 0")
        total = b(f"select i1 {up}, i32 {b(f'add i32 {total}, 1')}, i32 {total}")
        return b(f"ashr i32 {total}, 1")
    if name == "absdiff":
        difference = b(f"sub i32 {x}, {y}")
        return b(f"call i32 @llvm.abs.i32(i32 {difference}, i1 false)")
    if name in ("min", "max"):
        return b(f"call i32 @llvm.s{name}.i32(i32 {x}, i32 {y})")
    relation = comparison if comparison in ("eq", "ne") else f"s{comparison}"
    return b(f"zext i1 {b(f'icmp {relation} i32 {x}, {y}')} to i32")

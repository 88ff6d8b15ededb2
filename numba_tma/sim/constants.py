"""Constant expressions of PTX: integers in 64 bits with C's operators and precedence, and symbol addresses.

Source: PTX ISA, "Constants": "Constant Expressions", "Integer Constant Expression Evaluation".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NoReturn

from .tokens import DOT, FLOAT, HEXFLOAT, INT, MAX_DIGITS, PUNCT, Tokens

MAX_NESTING = 100

# For Evaluator.evaluate: operators that bind less tightly than this are left alone.
ANY_OPERATOR = 0
ABOVE_COMPARISON = 8
NO_OPERATOR = 11

_PRECEDENCE = {
    **dict.fromkeys(("*", "/", "%"), 10),
    **dict.fromkeys(("+", "-"), 9),
    **dict.fromkeys(("<<", ">>"), 8),
    **dict.fromkeys(("<", "<=", ">", ">="), 7),
    **dict.fromkeys(("==", "!="), 6),
    "&": 5,
    "^": 4,
    "|": 3,
    "&&": 2,
    "||": 1,
}
_COMPARE = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


@dataclass(frozen=True, slots=True)
class Constant:
    """A value: integers as Python ints in range of their signedness, floats with their exact `bits`."""

    value: int | float
    kind: str = "int"
    unsigned: bool = False
    bits: int = 0

    @staticmethod
    def integer(value: int, unsigned: bool = False) -> Constant:
        value &= 0xFFFFFFFFFFFFFFFF
        bits = value
        if not unsigned and value >> 63:
            value -= 1 << 64
        return Constant(value, "int", unsigned, bits)


class Evaluator:
    """Evaluates a constant expression that starts at a token; `index` moves past it."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.index = 0

    def evaluate(self, index: int, *, minimum_precedence: int = ANY_OPERATOR) -> tuple[Constant, int]:
        """The constant at token `index` and the index after it."""
        self.index = index
        value = self._ternary(0) if minimum_precedence == ANY_OPERATOR else self._binary(minimum_precedence, 0)
        return value, self.index

    def _fail(self, message: str, index: int | None = None) -> NoReturn:
        place = self.tokens.starts[self.index if index is None else index]
        self.tokens.fail_at(place, message)

    def _punctuation(self) -> str:
        return self.tokens.texts[self.index] if self.tokens.kinds[self.index] == PUNCT else ""

    def _deeper(self, depth: int) -> int:
        if depth >= MAX_NESTING:
            self._fail(f"constant expression nested deeper than {MAX_NESTING}")
        return depth + 1

    def _ternary(self, depth: int) -> Constant:
        depth = self._deeper(depth)
        condition = self._binary(1, depth)
        if self._punctuation() != "?":
            return condition
        self.index += 1
        yes = self._ternary(depth)
        if self._punctuation() != ":":
            self._fail("expected ':' of a ?: expression")
        self.index += 1
        no = self._ternary(depth)
        return yes if condition.value else no

    def _binary(self, minimum: int, depth: int) -> Constant:
        depth = self._deeper(depth)
        left = self._unary(depth)
        while True:
            operator = self._punctuation()
            precedence = _PRECEDENCE.get(operator, 0)
            if precedence < minimum or precedence == 0:
                return left
            place = self.index
            self.index += 1
            left = self._apply(operator, left, self._binary(precedence + 1, depth), place)

    def _apply(self, operator: str, left: Constant, right: Constant, place: int) -> Constant:
        if left.kind != "int" or right.kind != "int":
            self._fail(f"operator {operator} of a constant expression takes integers", place)
        unsigned = left.unsigned or right.unsigned
        if operator in ("<<", ">>"):
            count = right.value & 63
            value = left.value << count if operator == "<<" else left.value >> count
            return Constant.integer(value, left.unsigned)
        if operator == "&&":
            return Constant.integer(int(bool(left.value and right.value)))
        if operator == "||":
            return Constant.integer(int(bool(left.value or right.value)))
        a = Constant.integer(left.value, unsigned).value
        b = Constant.integer(right.value, unsigned).value
        if operator in _COMPARE:
            return Constant.integer(int(_COMPARE[operator](a, b)))
        if operator in "/%":
            if b == 0:
                self._fail("division by zero in a constant expression", place)
            quotient = abs(a) // abs(b)
            if (a < 0) != (b < 0):
                quotient = -quotient
            return Constant.integer(quotient if operator == "/" else a - quotient * b, unsigned)
        simple = {"+": a + b, "-": a - b, "*": a * b, "&": a & b, "|": a | b, "^": a ^ b}
        return Constant.integer(simple[operator], unsigned)

    def _unary(self, depth: int) -> Constant:
        depth = self._deeper(depth)
        operator, place = self._punctuation(), self.index
        if operator in ("-", "+", "!", "~"):
            self.index += 1
            return self._negate(operator, self._unary(depth), place)
        if operator == "(":
            self.index += 1
            if self.tokens.kinds[self.index] == DOT:
                return self._cast(depth)
            value = self._ternary(depth)
            if self._punctuation() != ")":
                self._fail("expected ')' of a constant expression")
            self.index += 1
            return value
        return self._literal()

    def _cast(self, depth: int) -> Constant:
        name = self.tokens.texts[self.index]
        if name not in (".s64", ".u64"):
            self._fail("a constant is cast to .s64 or .u64 only")
        self.index += 1
        if self._punctuation() != ")":
            self._fail("expected ')' after the type of a cast")
        self.index += 1
        operand = self._unary(depth)
        if operand.kind != "int":
            self._fail("only integer constants can be cast")
        return Constant.integer(operand.value, name == ".u64")

    def _negate(self, operator: str, operand: Constant, place: int) -> Constant:
        if operator == "+":
            return operand
        if operand.kind == "int":
            if operator == "-":
                return Constant.integer(-operand.value, operand.unsigned)
            if operator == "~":
                return Constant.integer(~operand.value, operand.unsigned)
            return Constant.integer(int(not operand.value))
        if operator != "-":
            self._fail(f"operator {operator} of a constant expression takes integers", place)
        sign = 1 << (31 if operand.kind == "f32" else 63)
        return Constant(-operand.value, operand.kind, bits=operand.bits ^ sign)

    def _literal(self) -> Constant:
        kind, text, place = self.tokens.kinds[self.index], self.tokens.texts[self.index], self.index
        if kind not in (INT, FLOAT, HEXFLOAT):
            self._fail(f"expected a constant, found {text[:40]!r}")
        self.index += 1
        if kind == HEXFLOAT:
            bits = int(text[2:], 16)
            if text[1] in "fF":
                return Constant(struct.unpack("<f", bits.to_bytes(4, "little"))[0], "f32", bits=bits)
            return Constant(struct.unpack("<d", bits.to_bytes(8, "little"))[0], "f64", bits=bits)
        if len(text) > MAX_DIGITS:
            self._fail(f"number of {len(text)} digits; the limit is {MAX_DIGITS}", place)
        if kind == FLOAT:
            value = float(text)
            return Constant(value, "f64", bits=struct.unpack("<Q", struct.pack("<d", value))[0])
        digits = text.rstrip("U")
        if digits[:2] in ("0x", "0X"):
            value = int(digits, 16)
        elif digits[:2] in ("0b", "0B"):
            value = int(digits[2:], 2)
        elif digits[0] == "0" and len(digits) > 1:
            if digits.strip("01234567"):
                self._fail(f"octal number {digits} with a digit above 7", place)
            value = int(digits, 8)
        else:
            value = int(digits)
        if value >> 64:
            self._fail(f"integer constant {text} does not fit in 64 bits", place)
        return Constant.integer(value, text.endswith("U") or value >> 63 == 1)

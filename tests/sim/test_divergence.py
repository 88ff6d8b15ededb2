"""Random structured programs: every lane must compute what a plain interpreter computes for it alone."""

from __future__ import annotations

import numpy as np
import pytest
from simulate import run_ptx

from numba_tma.sim.schedules import WARP_ORDERS

MASK = 0xFFFFFFFF
REGISTERS = 6
OPERATIONS = {
    "add.u32": lambda a, b: (a + b) & MASK,
    "sub.u32": lambda a, b: (a - b) & MASK,
    "mul.lo.u32": lambda a, b: (a * b) & MASK,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "min.u32": min,
}
COMPARISONS = {"lt": lambda a, b: a < b, "eq": lambda a, b: a == b, "ge": lambda a, b: a >= b}


class Leave(Exception):
    """The lane exits, or leaves the function."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole


class Program:
    """A random program as PTX text and as a tree that `interpret` walks."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.labels = 0
        self.loops = 0

    def number(self, high: int) -> int:
        return int(self.rng.integers(high))

    def statements(self, depth: int, in_function: bool) -> list:
        return [self.statement(depth, in_function) for _ in range(1 + self.number(4))]

    def statement(self, depth: int, in_function: bool) -> tuple:
        kinds = ["assign", "assign", "guarded"]
        if depth:
            kinds += ["if", "if", "loop"]
            kinds += ["leave", "store"] if self.number(3) == 0 else []
            kinds += [] if in_function else ["call", "exit"] if self.number(2) == 0 else ["call"]
        kind = kinds[self.number(len(kinds))]
        compare = (list(COMPARISONS)[self.number(3)], self.number(REGISTERS), self.operand())
        if kind in ("assign", "guarded"):
            operation = list(OPERATIONS)[self.number(len(OPERATIONS))]
            action = (operation, self.number(REGISTERS), self.number(REGISTERS), self.operand())
            return (kind, action, compare)
        if kind == "if":
            other = self.statements(depth - 1, in_function) if self.number(2) else []
            return (kind, compare, self.statements(depth - 1, in_function), other)
        if kind == "loop":
            return (kind, self.number(REGISTERS), 1 + self.number(5), self.statements(depth - 1, in_function))
        return (kind, compare)

    def operand(self) -> tuple:
        return ("r", self.number(REGISTERS)) if self.number(2) else ("i", self.number(40))

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def text(self, statements: list, in_function: bool) -> str:
        return "\n".join(self.one(s, in_function) for s in statements)

    def one(self, statement: tuple, in_function: bool) -> str:
        kind = statement[0]

        def operand(o: tuple) -> str:
            return f"%v{o[1]}" if o[0] == "r" else str(o[1])

        def test(compare: tuple) -> str:
            return f"setp.{compare[0]}.u32 %p, %v{compare[1]}, {operand(compare[2])};"

        if kind in ("assign", "guarded"):
            operation, d, a, b = statement[1]
            guard, before = ("@%p ", test(statement[2])) if kind == "guarded" else ("", "")
            return f"{before} {guard}{operation} %v{d}, %v{a}, {operand(b)};"
        if kind == "if":
            other, end = self.label(), self.label()
            return (
                f"{test(statement[1])} @!%p bra {other};\n{self.text(statement[2], in_function)}\nbra {end};\n"
                f"{other}:\n{self.text(statement[3], in_function)}\n{end}:"
            )
        if kind == "loop":
            self.loops += 1
            counter, limit, top, end = f"%c{self.loops}", f"%d{self.loops}", self.label(), self.label()
            return (
                f"rem.u32 {limit}, %v{statement[1]}, {statement[2]}; mov.u32 {counter}, 0;\n{top}:\n"
                f"setp.ge.u32 %p, {counter}, {limit}; @%p bra {end};\n{self.text(statement[3], in_function)}\n"
                f"add.u32 {counter}, {counter}, 1; bra {top};\n{end}:"
            )
        if kind == "store":
            return f"{test(statement[1])} @%p st.global.u32 [%rd0+24], %v0;"
        if kind == "call":
            return (
                f"{test(statement[1])} @!%p bra {(end := self.label())};\n{{ .param .b32 a; .param .b32 b; "
                f"st.param.b32 [a], %v0; call (b), helper, (a); ld.param.b32 %v1, [b]; }}\n{end}:"
            )
        leave = "ret" if in_function and kind == "leave" else "bra END" if kind == "leave" else "exit"
        if in_function and kind == "leave":
            leave = "bra OUT"
        return f"{test(statement[1])} @%p {leave};"


def interpret(statements: list, v: list[int], helper: list, stored: list[int]) -> None:
    """Run one lane."""

    def operand(o: tuple) -> int:
        return v[o[1]] if o[0] == "r" else o[1]

    def holds(compare: tuple) -> bool:
        return COMPARISONS[compare[0]](v[compare[1]], operand(compare[2]))

    for statement in statements:
        kind = statement[0]
        if kind in ("assign", "guarded"):
            operation, d, a, b = statement[1]
            if kind == "assign" or holds(statement[2]):
                v[d] = OPERATIONS[operation](v[a], operand(b))
        elif kind == "if":
            interpret(statement[2] if holds(statement[1]) else statement[3], v, helper, stored)
        elif kind == "loop":
            for _ in range(v[statement[1]] % statement[2]):
                interpret(statement[3], v, helper, stored)
        elif kind == "store":
            if holds(statement[1]):
                stored[0] = v[0]
        elif kind == "call":
            if holds(statement[1]):
                inner = [v[0]] + [0] * (REGISTERS - 1)
                try:
                    interpret(helper, inner, [], stored)
                except Leave as leave:
                    if leave.whole:
                        raise
                v[1] = inner[2]
        elif holds(statement[1]):
            raise Leave(kind == "exit")


@pytest.mark.parametrize("part", range(12))
def test_random_programs(rng, part):
    for _ in range(4):
        program = Program(rng)
        helper = program.statements(2, in_function=True)
        body = program.statements(3, in_function=False)
        zero = " ".join(f"mov.u32 %v{i}, 0;" for i in range(1, REGISTERS))
        helper_text = program.text([s for s in helper if s[0] != "store"], True)
        helper = [s for s in helper if s[0] != "store"]
        stores = _contains(helper, "store")
        if stores:
            continue  # the helper has no address to store to
        main_text = program.text(body, False)
        names = f".reg .b32 %v<{REGISTERS}>; .reg .b32 %c<{program.loops + 1}>; .reg .b32 %d<{program.loops + 1}>;"
        declarations = f"""
            .func (.param .b32 out) helper(.param .b32 x)
            {{
                {names} .reg .pred %p;
                ld.param.u32 %v0, [x]; {zero}
                {helper_text}
                OUT: st.param.b32 [out], %v2; ret;
            }}
        """
        text = f"""
            {names} .reg .pred %p; .reg .b32 %t<4>; .reg .b64 %rd<4>;
            ld.param.u64 %rd0, [p0];
            mov.u32 %t0, %tid.x; mov.u32 %t1, %ctaid.x; mov.u32 %t2, %ntid.x; mad.lo.u32 %t3, %t1, %t2, %t0;
            mul.wide.u32 %rd1, %t3, 28; add.u64 %rd0, %rd0, %rd1;
            mov.u32 %v0, %t3; mul.lo.u32 %v1, %t3, 7; xor.b32 %v2, %t3, 13; mov.u32 %v3, %t1;
            mov.u32 %v4, 5; mov.u32 %v5, 0;
            {main_text}
            END:
            {" ".join(f"st.global.u32 [%rd0+{4 * i}], %v{i};" for i in range(REGISTERS))}
            ret;
        """
        blocks, threads = 3, 40
        out = np.full((blocks * threads, 7), 99, np.uint32)
        order = {"warp_order": WARP_ORDERS[int(rng.integers(len(WARP_ORDERS)))], "seed": int(rng.integers(1 << 30))}
        run_ptx(text, blocks, threads, out, declarations=declarations, **order)
        for lane in range(blocks * threads):
            v = [lane, lane * 7, lane ^ 13, lane // threads, 5, 0]
            stored = [99]
            expected = [99] * REGISTERS
            try:
                interpret(body, v, helper, stored)
                expected = v
            except Leave as leave:
                if not leave.whole:
                    expected = v
            assert out[lane].tolist() == [*expected, stored[0]], (lane, order, text)


def _contains(statements: list, kind: str) -> bool:
    return any(s[0] == kind or any(isinstance(part, list) and _contains(part, kind) for part in s) for s in statements)

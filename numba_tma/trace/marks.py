"""Marks: what a kernel says of itself to whoever traces it.

    trace.begin("load")
    …
    trace.end("load")

To the compiler a mark is the call of a function whose body is empty, which it inlines: nothing is left of it. When a
kernel is compiled to be traced, the body is replaced by a comment in the PTX that `instrument` turns into a stamp. So
the same Numba code serves both, also where Numba has compiled a device function before.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

_PREFIX = "numba_tma_trace"
# A line of PTX with this comment is a mark: what kind, and its name in hexadecimal.
COMMENT = re.compile(r"// numba_tma\.trace (begin|end|mark) ([0-9a-f]+)")
VALUE_REGISTER = "%trace_value"
_NAME = re.compile(r"[A-Za-z][\w .+-]{0,39}", re.ASCII)


def _emit(builder: ir.IRBuilder, kind: str, name: str, value: ir.Value) -> None:
    symbol = f"{_PREFIX}_{kind}_{name.encode().hex()}"
    function = builder.module.globals.get(symbol)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [ir.IntType(32)]), symbol)
        function.linkage = "linkonce_odr"
        function.attributes.add("alwaysinline")
        function.attributes.add("nounwind")
        function.attributes.add("readnone")
        ir.IRBuilder(function.append_basic_block("entry")).ret_void()
    builder.call(function, [value])


def _literal_name(kind: str, name: types.Type) -> str:
    if not isinstance(name, types.StringLiteral):
        raise TypingError(f"trace.{kind}: the name must be a string written there; found {name}")
    if not _NAME.fullmatch(name.literal_value):
        raise TypingError(
            f"trace.{kind}({name.literal_value!r}): a name is a letter and up to 39 letters, digits, spaces or _ . + -"
        )
    return name.literal_value


def _region(kind: str, name: types.Type) -> tuple[types.Type, Callable]:
    text = _literal_name(kind, name)

    def codegen(context, builder, sig, args):
        _emit(builder, kind, text, ir.IntType(32)(0))
        return context.get_dummy_value()

    return types.none(name), codegen


@intrinsic
def begin(typingctx, name):
    """A part of the kernel called `name` (a literal) begins in this warp: "load", "compute", or what it is.

    "compute" is what the share of hidden copies is reckoned with, "load" is a copy that the threads make themselves;
    any other name is yours. Parts may lie within parts of other names.
    """
    return _region("begin", name)


@intrinsic
def end(typingctx, name):
    """The part that `begin` opened under this name ends."""
    return _region("end", name)


@intrinsic
def mark(typingctx, name, value):
    """A moment called `name` (a literal), with an integer of which the timeline shows the low 32 bits."""
    text = _literal_name("mark", name)
    if not isinstance(value, types.Integer):
        raise TypingError(f"trace.mark({text!r}, …): the value must be an integer; found {value}")

    def codegen(context, builder, sig, args):
        _emit(builder, "mark", text, context.cast(builder, args[1], sig.args[1], types.uint32))
        return context.get_dummy_value()

    return types.none(name, value), codegen


_EMPTY = re.compile(
    rf'define linkonce_odr void @"?({_PREFIX}_(begin|end|mark)_([0-9a-f]+))"?\([^)]*\)[^{{]*\{{.*?\n\}}', re.S
)


def kept(llvm_ir: str) -> str:
    """NVVM IR in which the marks leave their comments in the PTX."""

    def with_body(found: re.Match) -> str:
        symbol, kind, name = found.groups()
        comment = f"// numba_tma.trace {kind} {name}"
        assembly = f"{{\\0A.reg .u32 {VALUE_REGISTER};\\0Amov.u32 {VALUE_REGISTER}, $0; {comment}\\0A}}"
        # It must neither move across memory accesses nor be executed by other threads than it was written for.
        return (
            f'define linkonce_odr void @"{symbol}"(i32 %value) alwaysinline nounwind convergent\n{{\nentry:\n'
            f'  call void asm sideeffect "{assembly}", "r,~{{memory}}"(i32 %value) nounwind convergent\n'
            f"  ret void\n}}"
        )

    return _EMPTY.sub(with_body, llvm_ir) if _PREFIX in llvm_ir else llvm_ir

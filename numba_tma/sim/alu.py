"""What each lane-wise instruction does to arrays of lanes.

``compile_alu(instruction)`` decodes once and gives an ``Alu`` (decode.py): which registers it reads and
writes, as which dtypes, and a function of a few array operations. Nothing here knows of threads, masks or
memory: results are computed for every lane given, and the machine keeps those of the lanes that execute.
Run it under ``numpy.errstate(all="ignore")``.

Some functions are ufuncs that LLVM compiles at decoding (native.py, some milliseconds for each kind of
instruction), so decode an instruction when it is first executed.

Left to the machine, for which ``compile_alu`` gives None: memory, control flow, barriers, warp-wide
operations, address conversion (cvta, isspacep, mapa), asynchronous copies, tensor cores, system
instructions.
"""

from __future__ import annotations

from collections.abc import Callable

from . import alu_convert, alu_float, alu_integer, alu_logic
from .decode import Alu, Decoder, immediate
from .module import Function, Instruction

_FLOAT_TYPES = frozenset(("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2"))

Builder = Callable[[Decoder], "Alu | None"]


def _by_type(integer: Builder, floating: Builder) -> Builder:
    """An opcode that integers and floats share; the last modifier is the type."""

    def build(d: Decoder) -> Alu | None:
        return floating(d) if d.modifiers and d.modifiers[-1] in _FLOAT_TYPES else integer(d)

    return build


_BUILDERS: dict[str, Builder] = {
    "add": _by_type(alu_integer.add, alu_float.add),
    "sub": _by_type(alu_integer.sub, alu_float.sub),
    "mul": _by_type(alu_integer.mul, alu_float.mul),
    "mad": _by_type(alu_integer.mad, alu_float.fma),
    "div": _by_type(alu_integer.div, alu_float.div),
    "abs": _by_type(alu_integer.absolute, alu_float.absolute),
    "neg": _by_type(alu_integer.neg, alu_float.neg),
    "min": _by_type(alu_integer.minimum, alu_float.minimum),
    "max": _by_type(alu_integer.maximum, alu_float.maximum),
    "fma": alu_float.fma,
    "rcp": alu_float.rcp,
    "sqrt": alu_float.sqrt,
    "rsqrt": alu_float.rsqrt,
    "sin": alu_float.sin,
    "cos": alu_float.cos,
    "ex2": alu_float.ex2,
    "lg2": alu_float.lg2,
    "tanh": alu_float.tanh,
    "copysign": alu_float.copysign,
    "testp": alu_float.testp,
    "rem": alu_integer.rem,
    "addc": alu_integer.addc,
    "subc": alu_integer.subc,
    "madc": alu_integer.madc,
    "mul24": alu_integer.mul24,
    "mad24": alu_integer.mad24,
    "sad": alu_integer.sad,
    "dp4a": alu_integer.dp4a,
    "dp2a": alu_integer.dp2a,
    "and": alu_integer.bitwise_and,
    "or": alu_integer.bitwise_or,
    "xor": alu_integer.bitwise_xor,
    "not": alu_integer.bitwise_not,
    "cnot": alu_integer.cnot,
    "lop3": alu_integer.lop3,
    "shl": alu_integer.shl,
    "shr": alu_integer.shr,
    "shf": alu_integer.shf,
    "bfe": alu_integer.bfe,
    "bfi": alu_integer.bfi,
    "bfind": alu_integer.bfind,
    "popc": alu_integer.popc,
    "clz": alu_integer.clz,
    "brev": alu_integer.brev,
    "prmt": alu_integer.prmt,
    "fns": alu_integer.fns,
    "bmsk": alu_integer.bmsk,
    "szext": alu_integer.szext,
    **{
        f"v{name}{lanes}": alu_integer.video
        for name in ("add", "sub", "avrg", "absdiff", "min", "max", "set")
        for lanes in (2, 4)
    },
    "cvt": alu_convert.cvt,
    "mov": alu_logic.mov,
    "selp": alu_logic.selp,
    "slct": alu_logic.slct,
    "set": alu_logic.set_,
    "setp": alu_logic.setp,
}


def compile_alu(instruction: Instruction, function: Function | None = None) -> Alu | None:
    """Decode a lane-wise instruction; None if it is not one.

    Raises UnknownInstruction for a lane-wise opcode with a type, modifier or operand that is not simulated.
    `function` is not needed: operands carry the types of their registers.
    """
    builder = _BUILDERS.get(instruction.opcode)
    return None if builder is None else builder(Decoder(instruction))


__all__ = ["Alu", "compile_alu", "immediate"]

"""PTX instructions as functions for Numba kernels, read from the files in ptx/.

Every function there is one instruction. In a kernel it is called by name:

    from numba_tma import ptx

    ptx.mbarrier_init(bar, 1)           # inlined: the instruction stands in the kernel itself
    ptx.linked.mbarrier_init(bar, 1)    # the same text, called as a function and linked as it stands

What may be passed: for an address an integer, or something that has one (a shared or device array, a tile,
a barrier, a tensor map); for a number an integer of any width, or a floating-point number where the
instruction takes one; for a truth value a bool; for an immediate a literal or a global constant. Several
results come back as a tuple. Anything else is a TypingError that names function, argument and expected type.

Sources: ptx_files.py says how the files are written; each function names its section of the PTX ISA.
"""

from __future__ import annotations

import functools
import re
import types as python_types
from collections.abc import Callable

from llvmlite import ir
from numba.core.errors import TypingError
from numba.cuda import types
from numba.cuda.cudadrv.linkable_code import PTXSource
from numba.cuda.extending import intrinsic, lower_builtin
from numba.cuda.typing.templates import AbstractTemplate, signature

from . import ptx_files
from .ptx_files import TYPES, Function, Operand, PtxFileError, Result, folder, functions

__all__ = [
    "DeviceFunction",
    "Function",
    "InlineOnlyError",
    "Operand",
    "PtxFileError",
    "Result",
    "accept",
    "advise",
    "check_call",
    "folder",
    "functions",
    "global_address",
    "link_files",
    "linked",
    "shared_address",
]


class InlineOnlyError(TypingError):
    """A kernel calls through `ptx.linked` an instruction that works only inlined."""


# ----------------------------------------------------------------------------------------------------
# Operands
# ----------------------------------------------------------------------------------------------------

Lower = Callable[[object, ir.IRBuilder, types.Type, ir.Value], ir.Value]
_accepted: dict[str, dict[type, Lower]] = {"shared": {}, "global": {}, "tensor_map": {}}
_PROTOCOL = {"shared": "shared", "cluster": "shared", "global": "global", "map": "tensor_map"}


def accept(kind: str, numba_type_class: type, lower: Lower) -> None:
    """Let values of a Numba type stand for an address.

    Args:
        kind: 'shared' (a 32-bit address, also taken where one in the cluster's shared memory is asked for),
            'global' or 'tensor_map' (64-bit addresses).
        numba_type_class: the Numba type's class; subclasses are accepted too.
        lower: `lower(context, builder, numba_type, value)`, which returns the address as an LLVM i32 or i64.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in _accepted:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(map(repr, _accepted))}")
    _accepted[kind][numba_type_class] = lower


Check = Callable[[Function, dict[str, types.Type]], None]
_call_checks: list[tuple[str, Check]] = []


def check_call(prefix: str, check: Check) -> None:
    """See more of each call of the functions whose names begin with `prefix`, once each argument is found right.

    Args:
        prefix: beginning of names, such as 'cp_async_bulk_tensor_'.
        check: `check(function, found)`, with the arguments' Numba types by operand name; it raises a TypingError where
            they do not go together.
    """
    _call_checks.append((prefix, check))


_advice: dict[type, str] = {}


def advise(numba_type_class: type, advice: str) -> None:
    """Add `advice` to the error for a value of this Numba type given for an address."""
    _advice[numba_type_class] = advice


def _lowering(kind: str, numba_type: types.Type) -> Lower | None:
    registered = _accepted.get(_PROTOCOL.get(kind, ""), {})
    for base in type(numba_type).__mro__:
        if base in registered:
            return registered[base]
    return None


def _array_address(space: int, bits: int) -> Lower:
    """Address of an array's first element in one state space; the array's pointer itself is generic.

    Numba's array type does not say where the array lives, so a global array given for a shared address is not
    an error here: the address is wrong, and the simulator reports the access.
    """

    def lower(context, builder, numba_type, value):
        data = context.make_array(numba_type)(context, builder, value).data
        pointer = builder.addrspacecast(data, ir.PointerType(data.type.pointee, addrspace=space))
        return builder.ptrtoint(pointer, ir.IntType(bits))

    return lower


accept("shared", types.Array, _array_address(3, 32))
accept("global", types.Array, _array_address(1, 64))


def _check(name: str, position: int, operand: Operand, found: types.Type) -> types.Type:
    """The type with which an argument enters the call.

    Raises:
        TypingError: the argument is of another kind.
    """
    what = f"ptx.{name}: argument {position + 1}, {operand.name!r},"
    wrong = TypingError(f"{what} must be {operand.expected}; found {found}{_hint(operand, found)}")
    plain = types.unliteral(found)
    if operand.kind == "immediate":
        if not isinstance(found, types.IntegerLiteral):
            raise wrong
        if found.literal_value not in operand.values:
            step = f" in steps of {operand.values.step}" if operand.values.step > 1 else ""
            raise TypingError(
                f"{what} is an immediate: {found.literal_value} is not in {operand.values[0]} to "
                f"{operand.values[-1]}{step}"
            )
        return found
    if operand.kind == "predicate":
        if not isinstance(plain, types.Boolean):
            raise wrong
        return types.boolean
    if operand.kind == "accumulator":
        element = getattr(types, TYPES[operand.type].numba)
        if not isinstance(plain, types.Array) or (plain.ndim, plain.layout, plain.dtype) != (1, "C", element):
            raise wrong
        return plain
    if _lowering(operand.kind, plain) is not None:
        return plain
    wanted = getattr(types, TYPES[operand.type].numba)
    if isinstance(wanted, types.Float):
        if not isinstance(plain, types.Float):
            raise wrong
    elif not isinstance(plain, types.Integer) or isinstance(plain, types.Boolean):
        raise wrong
    elif isinstance(found, types.IntegerLiteral):
        _check_width(what, operand.type, found.literal_value)
    return wanted


def _check_width(what: str, ptx_type: str, value: int) -> None:
    """See that a literal fits; unsigned numbers may be written as negative ones too, such as a mask of -1."""
    bits = TYPES[ptx_type].bits
    lowest, highest = -(1 << (bits - 1)), (1 << (bits - (ptx_type[0] == "s"))) - 1
    if not lowest <= value <= highest:
        raise TypingError(f"{what} is a {ptx_type}: {value} is not in {lowest} to {highest}")


def _hint(operand: Operand, found: types.Type) -> str:
    """The way out of a mistake that the type found tells, such as all barriers where one is meant."""
    advice = _advice.get(type(found))
    return f": {advice}" if advice and operand.kind in _PROTOCOL else ""


def _operand_value(context, builder, operand: Operand, numba_type: types.Type, value):
    lower = _lowering(operand.kind, numba_type)
    if lower is not None:
        return lower(context, builder, numba_type, value)
    if operand.kind == "predicate":
        return builder.zext(value, ir.IntType(32))
    return value


# ----------------------------------------------------------------------------------------------------
# Device functions
# ----------------------------------------------------------------------------------------------------


# What LLVM may assume of a call. Convergent: it must not depend on more or fewer threads than in the program. A
# function that reads memory is not marked `readonly`: NVVM then takes it for pure and hoists it across barriers and
# copies.
_ATTRIBUTE = {"pure": "readnone", "reads memory": "convergent", "any": "convergent"}


class DeviceFunction:
    """A function of ptx/ that a Numba kernel can call; `function` is its record."""

    def __init__(self, function: Function, *, linked: bool) -> None:
        self.function = function
        self.linked = linked
        self.__name__ = self.__qualname__ = function.name
        self.__module__ = __name__
        self.__doc__ = function.docstring
        self.__signature__ = function.signature
        template = {
            "key": self,
            "prefer_literal": True,  # immediates must be literals; of other literals it is seen that they fit
            "generic": lambda template, args, kws: self._type_once(template, args, kws),
            "get_template_info": lambda template: self._where(),
        }
        self._numba_type_ = types.Function(type(f"ptx_{function.name}", (AbstractTemplate,), template))
        lower_builtin(self, types.VarArg(types.Any))(self._lower)

    def __call__(self, *args: object, **kws: object) -> None:
        raise TypeError(
            f"ptx.{self.__name__} is a PTX instruction and works only inside a kernel: call it from a "
            "function that Numba compiles"
        )

    def __repr__(self) -> str:
        return f"<ptx{'.linked' if self.linked else ''}.{self.__name__}{self.__signature__}>"

    def __reduce__(self):
        return _device_function, (self.__name__, self.linked)

    def key(self) -> str:
        """What names it in the compile cache, beside the contents of ptx/."""
        return repr(self)

    def _type_once(self, template, args, kws):
        # One template object is asked for one call: with its literals, and where that fails, without them. Without
        # them a literal that does not fit would pass.
        refused = getattr(template, "refused", None)
        if refused is not None:
            raise refused
        try:
            return self._type(args, kws)
        except TypingError as error:
            template.refused = error
            raise

    def _type(self, args, kws):
        name, operands = self.function.name, self.function.operands
        if self.linked and self.function.inline_only:
            raise InlineOnlyError(
                f"ptx.linked.{name}: {name} works only inlined, as ptx.{name}: {self.function.inline_only}"
            )
        try:
            given = self.__signature__.bind(*args, **kws).args
        except TypeError as error:
            raise TypingError(f"ptx.{name}{self.__signature__}: {error}") from None
        checked = [_check(name, i, o, t) for i, (o, t) in enumerate(zip(operands, given, strict=True))]
        for prefix, check in _call_checks:
            if name.startswith(prefix):
                check(self.function, {o.name: t for o, t in zip(operands, given, strict=True)})
        return signature(_return_type(self.function), *checked).replace(pysig=self.__signature__)

    def _where(self) -> dict[str, object]:
        """What Numba's own error messages say about this function."""
        function = self.function
        return {
            "kind": "intrinsic",
            "name": f"ptx.{function.name}",
            "sig": str(self.__signature__),
            "filename": str(function.file),
            "lines": (function.line, function.line + function.text.count("\n")),
            "docstring": self.__doc__,
        }

    def _lower(self, context, builder, sig, args):
        function = self.function
        immediates, values, elements = {}, [], []
        for operand, numba_type, value in zip(function.operands, sig.args, args, strict=True):
            if operand.kind == "immediate":
                immediates[operand.name] = numba_type.literal_value
            elif operand.kind == "accumulator":
                data = context.make_array(numba_type)(context, builder, value).data
                elements += [builder.gep(data, [ir.IntType(32)(i)]) for i in range(operand.count)]
            else:
                values.append(_operand_value(context, builder, operand, numba_type, value))
        if self.linked:
            results = self._emit_call(context, builder, immediates, values)
        else:
            results = self._emit_inline(builder, immediates, values, elements)
        results = [
            builder.icmp_unsigned("!=", value, value.type(0)) if result.predicate else value
            for result, value in zip(function.results, results, strict=True)
        ]
        if not results:
            return context.get_dummy_value()
        return results[0] if len(results) == 1 else context.make_tuple(builder, sig.return_type, results)

    def _emit_inline(self, builder, immediates, values, elements) -> list[ir.Value]:
        """The inline assembly; `elements` points at an accumulator's, which are loaded, tied to results and stored.

        A local array that is only touched so, and at constant indices, becomes registers.
        """
        function = self.function
        kinds = [pointer.type.pointee for pointer in elements]
        kinds += [_llvm_type(result.type) for result in function.results]
        inputs = [operand for operand in function.operands if operand.kind not in ("immediate", "accumulator")]
        constraints = [
            f"={TYPES[operand.type].constraint}" for operand in function.operands for _ in range(operand.count)
        ]
        constraints += [f"={TYPES[result.type].constraint}" for result in function.results]
        constraints += [str(i) for i in range(len(elements))]
        constraints += [TYPES[operand.type].constraint for operand in inputs]
        values = [*map(builder.load, elements), *values]
        if function.effect == "any":
            constraints.append("~{memory}")
        returned = kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds) if kinds else ir.VoidType()
        asm = ir.InlineAsm(
            ir.FunctionType(returned, [value.type for value in values]),
            function.inline_text(immediates),
            ",".join(constraints),
            side_effect=function.effect != "pure",
        )
        call = builder.call(asm, values, attrs=("nounwind", _ATTRIBUTE[function.effect]))
        results = [call] if len(kinds) == 1 else [builder.extract_value(call, i) for i in range(len(kinds))]
        for result, pointer in zip(results, elements, strict=False):
            builder.store(result, pointer)
        return results[len(elements) :]

    def _emit_call(self, context, builder, immediates, values) -> list[ir.Value]:
        function = self.function
        symbol = function.symbol(immediates)
        kinds = [_llvm_type(result.type) for result in function.results]
        # A vector is returned in memory aligned to its size, which is how the .ptx files declare it.
        returned = kinds[0] if len(kinds) == 1 else ir.VectorType(kinds[0], len(kinds)) if kinds else ir.VoidType()
        declared = builder.module.globals.get(symbol)
        if declared is None:
            wanted = ir.FunctionType(returned, [value.type for value in values])
            declared = ir.Function(builder.module, wanted, symbol)
            declared.attributes.add("convergent")
        # For kernels that Numba links and launches itself; link_files finds the same module by the symbol.
        context.active_code_library.add_linking_file(_linkable(*function.module(symbol)))
        call = builder.call(declared, values)
        if len(kinds) == 1:
            return [call]
        return [builder.extract_element(call, ir.IntType(32)(i)) for i in range(len(kinds))]


def _return_type(function: Function) -> types.Type:
    members = [getattr(types, result.numba) for result in function.results]
    if not members:
        return types.none
    return members[0] if len(members) == 1 else types.BaseTuple.from_types(members)


def _llvm_type(ptx_type: str) -> ir.Type:
    if ptx_type[0] == "f":
        return ir.FloatType() if ptx_type == "f32" else ir.DoubleType()
    return ir.IntType(TYPES[ptx_type].bits)


@functools.cache
def _linkable(name: str, text: str) -> PTXSource:
    # One object a module: Numba collects them in a set, and a text given twice defines its functions twice.
    return PTXSource(text.encode(), name=name)


@functools.cache
def _device_function(name: str, linked: bool) -> DeviceFunction:
    return DeviceFunction(ptx_files.function(name), linked=linked)


def _address(name: str, operand: Operand, found: types.Type):
    def codegen(context, builder, sig, args):
        return _operand_value(context, builder, operand, sig.args[0], args[0])

    checked = _check(name, 0, operand, found)
    return signature(getattr(types, TYPES[operand.type].numba), checked), codegen


@intrinsic
def shared_address(typingctx, value):
    """The address of a shared array, tile or barrier as a uint32, in bytes, to do arithmetic on."""
    return _address("shared_address", Operand("value", "u32", "shared", ""), value)


@intrinsic
def global_address(typingctx, value):
    """The address of a device array's first element as a uint64, in bytes, to do arithmetic on."""
    return _address("global_address", Operand("value", "u64", "global", ""), value)


class _Linked(python_types.ModuleType):
    """The functions of ptx/ as calls: the kernel calls them, and their text is linked to it as it stands.

    A call costs registers and time; it is meant for reading, and for showing that the files are real modules.
    In a kernel that Numba itself launches it works too, but Numba cannot cache such a kernel (`cache=True`).
    """

    def __getattr__(self, name: str) -> DeviceFunction:
        if name not in ptx_files.names():
            raise AttributeError(f"ptx.linked has no function {name!r}{_similar(name)}")
        return _device_function(name, True)

    def __dir__(self) -> list[str]:
        return [name for name, function in functions().items() if function.inline_only is None]


linked = _Linked(f"{__name__}.linked", _Linked.__doc__)


def _similar(name: str) -> str:
    import difflib

    # Python and Numba ask every object for names with an underscore, and often: no search for those.
    close = [] if name.startswith("_") else difflib.get_close_matches(name, ptx_files.names(), n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def __getattr__(name: str) -> DeviceFunction:
    if name not in ptx_files.names():
        raise AttributeError(f"module {__name__!r} has no function {name!r}{_similar(name)}")
    return _device_function(name, False)


def __dir__() -> list[str]:
    return sorted([*__all__, *ptx_files.names()])


_EXTERN = re.compile(r"\.extern\s+\.func\s*(?:\([^)]*\))?\s*([\w$]+)")


def link_files(ptx_text: str) -> list[tuple[str, str]]:
    """The modules, as (name, PTX text), that a kernel's PTX needs because it calls their functions.

    A function as written brings its file as it stands; a variant, or one with immediates, a module of its
    own. All of them go to the linker beside the kernel's PTX.
    """
    modules: dict[str, str] = {}
    for symbol in _EXTERN.findall(ptx_text):
        name = symbol.split("$")[0]
        if name in ptx_files.names():
            module, text = ptx_files.function(name).module(symbol)
            modules[module] = text
    return list(modules.items())

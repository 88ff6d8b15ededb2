"""PTX text to a Module: a recursive descent parser without recursion where the text decides its depth.

A function is read twice. The first pass finds declarations, scopes, labels and where each instruction begins;
the second reads the operands, when every label and local name is known. Whatever the text is, the outcome is
a Module or a PtxSyntaxError that names file, line and what was expected, in time and memory linear in the
text: ``.reg .b32 %r<4000000000>`` and ``.shared .b8 x[1<<40]`` allocate nothing here.

Source: PTX ISA, "Syntax", "State Spaces, Types, and Variables", "Instruction Operands", "Directives".
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from typing import NoReturn

from .constants import ABOVE_COMPARISON, ANY_OPERATOR, MAX_NESTING, NO_OPERATOR, Constant, Evaluator
from .module import (
    CONDITION_CODE,
    SPECIAL_REGISTERS,
    SPECIAL_WITH_COMPONENTS,
    TYPE_BYTES,
    Address,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    PredicatePair,
    Prototype,
    Register,
    Relocation,
    Sink,
    SourceLocation,
    Symbol,
    TensorOperand,
    Variable,
    Vector,
)
from .tokens import DOT, END, FLOAT, HEXFLOAT, INT, PUNCT, STRING, WORD, Tokens

# Largest variable of a state space, in bytes. Shared, constant and local memory and parameters are smaller on
# every device; the limit on global memory keeps one declaration from asking for more than a machine has.
MAX_VARIABLE_BYTES = {
    "shared": 1 << 18,
    "const": 1 << 16,
    "local": 1 << 19,
    "param": 1 << 16,
    "global": 1 << 32,
    "tex": 8,
}
MAX_ALIGNMENT = 1 << 16
MAX_DIMENSIONS = 16
# Bytes that all initialisers together may leave out between their values, e.g. {{1}, {2}} of [2][1000000].
MAX_INITIALIZER_ZEROS = 1 << 24
# Chains of inlined calls are cut there; recursive .loc directives would grow them without end.
MAX_INLINE_DEPTH = 64

_SPACES = frozenset((".global", ".const", ".shared", ".shared::cta", ".local", ".param", ".tex"))
_LINKAGES = frozenset((".extern", ".visible", ".weak", ".common"))
_COMPONENTS = {"x": 0, "y": 1, "z": 2, "w": 3, "r": 0, "g": 1, "b": 2, "a": 3}
_STARTS_CONSTANT = frozenset(("-", "+", "~", "("))
_SIGNED_FLOATS = {"f32": "<f", "f64": "<d"}
_USES_CARRY = frozenset(("addc", "subc", "madc"))
_COMMENT = re.compile(r"//[^\n]*|/\*(?s:.*?)\*/")


def parse(text: str, filename: str = "<ptx>") -> Module:
    """Parse PTX text; `filename` is for messages. Raises PtxSyntaxError."""
    tokens = Tokens(text, filename)
    return _Parser(tokens).module()


@dataclass(slots=True)
class _Declared:
    """A register name of a scope: its unique name, type, and number of elements (0: no vector)."""

    name: str
    type: str
    elements: int


@dataclass(slots=True)
class _Scope:
    """Names declared between a pair of braces."""

    number: int
    parent: _Scope | None
    registers: dict[str, _Declared] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str, int]] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    def unique(self, name: str) -> str:
        return f"{name}#{self.number}" if self.number else name

    def find_register(self, name: str) -> _Declared | None:
        found = self.registers.get(name)
        if found is not None or not self.ranges:
            return found
        # A range may have a prefix that itself ends in digits: try each split between prefix and index.
        cut = len(name)
        while cut > 1 and len(name) - cut < 10 and "0" <= name[cut - 1] <= "9":
            cut -= 1
            known = self.ranges.get(name[:cut])
            if known is None:
                continue
            digits = name[cut:]
            if int(digits) < known[0] and (digits == "0" or digits[0] != "0"):
                found = _Declared(self.unique(name), known[1], known[2])
                self.registers[name] = found
                return found
        return None


@dataclass(slots=True)
class _Statement:
    """An instruction whose operands are still to be read."""

    start: int
    scope: _Scope
    location: SourceLocation | None


class _Parser:
    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.kinds, self.texts = tokens.kinds, tokens.texts
        self.index = 0
        self.constants = Evaluator(tokens)
        self.result = Module(tokens.filename)
        self.strings: dict[str, str] = {}
        self.places: dict[tuple, SourceLocation] = {}
        self.latest: dict[tuple[int, int, int], SourceLocation] = {}
        self.depths: dict[int, int] = {}
        self.location: SourceLocation | None = None
        self.function: Function | None = None
        self.skipped = 0
        self.registers: dict[tuple[str, str | None], Register] = {}

    # ---- tokens

    def fail(self, message: str, index: int | None = None) -> NoReturn:
        self.tokens.fail_at(self.tokens.starts[self.index if index is None else index], message)

    def expected(self, what: str) -> NoReturn:
        self.fail(f"expected {what}, found {self.texts[self.index][:60]!r}")

    def at(self, text: str) -> bool:
        return self.texts[self.index] == text and self.kinds[self.index] != STRING

    def accept(self, text: str) -> bool:
        if self.texts[self.index] == text and self.kinds[self.index] != STRING:
            self.index += 1
            return True
        return False

    def expect(self, text: str, what: str | None = None) -> None:
        if not self.accept(text):
            self.expected(what or repr(text))

    def word(self, what: str) -> str:
        if self.kinds[self.index] != WORD:
            self.expected(what)
        self.index += 1
        return self.texts[self.index - 1]

    def identifier(self, what: str) -> str:
        name = self.word(what)
        if "." in name or ":" in name:
            self.fail(f"expected {what}, found the dotted word {name!r}", self.index - 1)
        return name

    def integer(self, what: str) -> int:
        kind = self.kinds[self.index]
        if kind != INT and self.texts[self.index] not in _STARTS_CONSTANT:
            self.expected(what)
        constant = self.constant()
        if constant.kind != "int":
            self.expected(what)
        return constant.value

    def constant(self, minimum_precedence: int = ANY_OPERATOR) -> Constant:
        value, self.index = self.constants.evaluate(self.index, minimum_precedence=minimum_precedence)
        return value

    def skip_braces(self) -> None:
        """Skip a balanced { … }."""
        start = self.index
        self.expect("{")
        depth = 1
        while depth:
            text, kind = self.texts[self.index], self.kinds[self.index]
            if kind == END:
                self.fail("'{' without its closing '}'", start)
            if kind == PUNCT:
                depth += (text == "{") - (text == "}")
            self.index += 1

    # ---- module

    def module(self) -> Module:
        self.read_files_and_strings()
        result = self.result
        seen_version = False
        while self.kinds[self.index] != END:
            if self.accept(";"):
                continue
            if self.kinds[self.index] != DOT:
                self.expected("a directive")
            directive = self.texts[self.index]
            if directive == ".version":
                result.version = self.version()
                seen_version = True
                continue
            if not seen_version:
                self.expected(".version, the first directive of every PTX file")
            handler = self.TOP_LEVEL.get(directive)
            if handler is not None:
                self.index += 1
                handler(self)
            else:
                self.declaration()
        if not seen_version:
            self.expected(".version, the first directive of every PTX file")
        for name, target in result.aliases.items():
            self.resolve_alias(name, target)
        return result

    def resolve_alias(self, name: str, target: str) -> None:
        for table in (self.result.functions, self.result.entries):
            if target in table:
                table[name] = table[target]

    def version(self) -> tuple[int, int]:
        self.index += 1
        text = self.texts[self.index]
        parts = text.split(".")
        if self.kinds[self.index] != FLOAT or len(parts) != 2 or not all(p.isdigit() and len(p) < 5 for p in parts):
            self.expected("a version such as 8.0")
        self.index += 1
        return int(parts[0]), int(parts[1])

    def read_target(self) -> None:
        names = [self.word("a target such as sm_90a")]
        while self.accept(","):
            names.append(self.word("a target option"))
        if not self.result.target:
            self.result.target = names.pop(0)
        self.result.target_options += tuple(names)

    def read_address_size(self) -> None:
        size = self.integer("32 or 64")
        if size not in (32, 64):
            self.fail(f".address_size is 32 or 64, found {size}", self.index - 1)
        self.result.address_size = size

    def read_file(self) -> None:
        """A .file directive; its content was taken in the first sweep."""
        self.integer("the number of a file")
        if self.kinds[self.index] != STRING:
            self.expected("a file name in quotes")
        self.index += 1
        while self.accept(","):
            self.integer("a time stamp or size")

    def read_section(self) -> None:
        if self.kinds[self.index] not in (DOT, WORD):
            self.expected("a section's name")
        self.index += 1
        self.skip_braces()

    def read_pragma(self) -> None:
        while True:
            if self.kinds[self.index] != STRING:
                self.expected("a string after .pragma")
            self.index += 1
            if not self.accept(","):
                break
        self.expect(";")

    def read_alias(self) -> None:
        name = self.identifier("the name of an alias")
        self.expect(",")
        self.result.aliases[name] = self.identifier("the function that an alias stands for")
        self.expect(";")

    def read_loc(self) -> None:
        """`.loc file line column [, function_name label [+ n], inlined_at file line column]`"""
        key = (self.integer("a file number"), self.integer("a line"), self.integer("a column"))
        function, caller = None, None
        while self.at(",") and self.texts[self.index + 1] in ("function_name", "inlined_at"):
            attribute = self.texts[self.index + 1]
            self.index += 2
            if attribute == "function_name":
                function = self.strings.get(self.identifier("the label of a function's name"))
                if self.accept("+"):
                    function = None
                    self.integer("an offset")
            else:
                caller = (self.integer("a file number"), self.integer("a line"), self.integer("a column"))
        self.location = self.source_location(key, function, caller)

    def source_location(
        self, key: tuple[int, int, int], function: str | None, caller: tuple[int, int, int] | None
    ) -> SourceLocation | None:
        outer = None
        if caller is not None:
            outer = self.latest.get(caller)
            if outer is None:
                outer = SourceLocation(self.file_name(caller[0]), caller[1], caller[2])
        if key[1] == 0:
            # Line 0 is the compiler's own code: the best line to show is the call it was inlined at.
            return outer
        depth = 1 + (self.depths.get(id(outer), 1) if outer is not None else 0)
        if depth > MAX_INLINE_DEPTH:
            outer, depth = None, 1
        cache_key = (key, function, id(outer))
        place = self.places.get(cache_key)
        if place is None:
            place = SourceLocation(self.file_name(key[0]), key[1], key[2], function, outer)
            self.places[cache_key] = place
            self.depths[id(place)] = depth
        self.latest[key] = place
        return place

    def file_name(self, number: int) -> str:
        return self.result.files.get(number, f"<file {number}>")

    def read_files_and_strings(self) -> None:
        """Take .file and .debug_str first: compilers write them at the end, and every .loc refers to them."""
        for i, text in enumerate(self.texts):
            if text == ".file" and self.kinds[i] == DOT:
                number, name = self.texts[i + 1], self.texts[min(i + 2, len(self.texts) - 1)]
                if number.isdigit() and len(number) < 10 and name[:1] == '"':
                    self.result.files[int(number)] = name[1:-1].replace("\\\\", "\\")
            elif text == ".section" and self.texts[i + 1] == ".debug_str":
                self.read_debug_strings(i + 2)

    def read_debug_strings(self, index: int) -> None:
        """Sequences `label: .b8 97,98,0`; what does not look like one is left to the main pass to judge."""
        label, characters = None, bytearray()
        while self.texts[index] not in ("}", ".section") and self.kinds[index] != END:
            kind, text = self.kinds[index], self.texts[index]
            if kind == WORD and self.texts[index + 1] == ":":
                if label is not None:
                    self.strings[label] = characters.split(b"\0")[0].decode(errors="replace")
                label, characters = text, bytearray()
            elif kind == INT and len(text) < 4 and text.isdigit():
                characters.append(int(text) & 255)
            index += 1
        if label is not None:
            self.strings[label] = characters.split(b"\0")[0].decode(errors="replace")

    TOP_LEVEL = {
        ".target": read_target,
        ".address_size": read_address_size,
        ".file": read_file,
        ".section": read_section,
        ".pragma": read_pragma,
        ".alias": read_alias,
        ".loc": read_loc,
    }

    def declaration(self) -> None:
        """A function or a module-scope variable, with its linkage."""
        start = self.index
        linkage = None
        while self.texts[self.index] in _LINKAGES and self.kinds[self.index] == DOT:
            linkage = self.texts[self.index][1:]
            self.index += 1
        if self.accept(".entry"):
            self.read_function(True, linkage)
        elif self.accept(".func"):
            self.read_function(False, linkage)
        elif self.texts[self.index] in _SPACES and self.kinds[self.index] == DOT:
            for variable in self.variables(linkage):
                if not variable.name:
                    self.fail("a module-scope variable needs a name", start)
                known = self.result.globals.get(variable.name)
                if known is not None and "extern" not in (known.linkage, linkage):
                    self.fail(f"{variable.name} is declared twice", start)
                if known is None or known.linkage == "extern":
                    self.result.globals[variable.name] = variable
            self.expect(";")
        else:
            self.expected("a directive such as .entry, .func, .global or .file")

    # ---- variables

    def power_of_two(self, what: str) -> int:
        value = self.integer(what)
        if value < 1 or value & (value - 1) or value > MAX_ALIGNMENT:
            self.fail(f"{what} is a power of two up to {MAX_ALIGNMENT}, found {value}", self.index - 1)
        return value

    def variables(self, linkage: str | None = None) -> list[Variable]:
        """`.space [.align n] [.vN] .type name[…][= init] {, name…}`, from the space to the semicolon."""
        space = self.texts[self.index][1:].split("::")[0]
        self.index += 1
        # .const[2] selects a bank in old PTX.
        if space == "const" and self.accept("["):
            self.integer("a constant bank")
            self.expect("]")
        align, lanes, kind, pointer = self.type_specifier(space)
        found = [self.declarator(space, kind, lanes, align, linkage, pointer)]
        while self.accept(","):
            if space == "param" and self.kinds[self.index] == DOT:
                self.index -= 1
                break
            found.append(self.declarator(space, kind, lanes, align, linkage, pointer))
        return found

    def type_specifier(self, space: str) -> tuple[int, int, str, str | None]:
        """Alignment (0: the type's own), vector length, type, pointer's space."""
        align, lanes, kind, pointer = 0, 1, "", None
        while self.kinds[self.index] == DOT:
            text = self.texts[self.index]
            if text == ".align":
                self.index += 1
                align = self.power_of_two("an alignment")
            elif text in (".v2", ".v4", ".v8"):
                lanes = int(text[2:])
                self.index += 1
            elif text == ".ptr":
                pointer = "generic"
                self.index += 1
                if self.texts[self.index] in (".global", ".shared", ".const", ".local"):
                    pointer = self.texts[self.index][1:]
                    self.index += 1
                if self.accept(".align"):
                    self.power_of_two("an alignment")
            elif text == ".attribute":
                self.index += 1
                self.skip_parentheses()
            elif text[1:] in TYPE_BYTES:
                if kind:
                    self.fail(f"second type {text} in a declaration")
                kind = text[1:]
                self.index += 1
            else:
                self.fail(f"unknown type or attribute {text!r} in a .{space} declaration")
        if not kind:
            self.expected("a type such as .b32")
        if kind == "pred" and space != "reg":
            self.fail(f"predicates live in registers, not in .{space}")
        return align, lanes, kind, pointer

    def skip_parentheses(self) -> None:
        start = self.index
        self.expect("(")
        depth = 1
        while depth:
            if self.kinds[self.index] == END:
                self.fail("'(' without its closing ')'", start)
            if self.kinds[self.index] == PUNCT:
                depth += self.at("(") - self.at(")")
            self.index += 1

    def declarator(
        self, space: str, kind: str, lanes: int, align: int, linkage: str | None, pointer: str | None
    ) -> Variable:
        place = self.index
        name = self.identifier("a variable's name")
        shape: list[int] = []
        while self.accept("["):
            if self.at("]"):
                if shape:
                    self.fail("only the first extent of an array may be left out")
                shape.append(-1)
            else:
                extent = self.integer("the extent of an array")
                if extent < 0:
                    self.fail(f"an array has an extent of {extent}", place)
                shape.append(extent)
            self.expect("]")
            if len(shape) > MAX_DIMENSIONS:
                self.fail(f"array with more than {MAX_DIMENSIONS} dimensions", place)
        element = TYPE_BYTES[kind] * lanes
        variable = Variable(
            name, space, kind, align or element, 0, (), linkage, pointer_space=pointer, line=self.line(place)
        )
        self.check_size(variable, shape, element, place)
        if self.accept("="):
            self.initializer(variable, shape, kind, lanes, place)
        if shape and shape[0] < 0:
            shape[0] = 0
        variable.shape = tuple(shape)
        variable.size = self.check_size(variable, shape, element, place)
        return variable

    def line(self, index: int) -> int:
        return self.tokens.line_of(self.tokens.starts[index])

    def check_size(self, variable: Variable, shape: list[int], element: int, place: int) -> int:
        size = element
        for extent in shape:
            size *= max(extent, 0)
        limit = MAX_VARIABLE_BYTES.get(variable.space, 1 << 16)
        if size > limit:
            self.fail(f".{variable.space} variable {variable.name} of {size} bytes; the limit is {limit}", place)
        return size

    def initializer(self, variable: Variable, shape: list[int], kind: str, lanes: int, place: int) -> None:
        """Flatten a nested initialiser into bytes and relocations; what is left out stays zero."""
        width = TYPE_BYTES[kind]
        extents = [*shape, lanes] if lanes > 1 else list(shape)
        strides_from = 1 if extents and extents[0] < 0 else 0
        strides = [width] * len(extents)
        for i in range(len(extents) - 2, strides_from - 1, -1):
            strides[i] = strides[i + 1] * extents[i + 1]
        if extents and extents[0] < 0 and len(extents) > 1:
            strides[0] = strides[1] * extents[1]
        data = bytearray()
        relocations: list[Relocation] = []
        limit = MAX_VARIABLE_BYTES.get(variable.space, 1 << 16)
        # Positions of the open braces: (offset of the brace's first element, elements seen).
        offset, level, counts, bases = 0, 0, [], []
        while True:
            if self.accept("{"):
                if level >= len(extents):
                    self.fail(f"initialiser nested deeper than the {len(extents)} dimensions", self.index - 1)
                bases.append(offset)
                counts.append(0)
                level += 1
                if not self.at("}"):
                    continue
            elif not self.at("}"):
                if offset + width > limit:
                    self.fail(f"initialiser of more than {limit} bytes")
                self.initial_value(kind, width, offset, data, relocations)
            # A value or a closed brace ends here; find what follows it.
            while level:
                if self.at("}"):
                    self.index += 1
                    level -= 1
                    base, count = bases.pop(), counts.pop()
                    if count >= 0 and extents[level] < 0 and level == 0:
                        shape[0] = count + (0 if self.texts[self.index - 2] == "{" else 1)
                    offset = base
                    continue
                if not self.accept(","):
                    self.expected("',' or '}' in an initialiser")
                counts[-1] += 1
                extent = extents[level - 1]
                if 0 <= extent <= counts[-1]:
                    self.fail(f"initialiser of {variable.name} has more than {extent} elements", self.index - 1)
                offset = bases[-1] + counts[-1] * strides[level - 1]
                break
            else:
                break
        variable.init = bytes(data)
        variable.relocations = tuple(relocations)
        if not extents and len(data) > width:
            self.fail(f"{variable.name} is no array", place)

    def initial_value(self, kind: str, width: int, offset: int, data: bytearray, relocations: list[Relocation]) -> None:
        """One element: a number, `symbol[+n]`, `generic(symbol)[+n]`, or `mask(symbol)`."""
        self.skipped += max(0, offset - len(data))
        if self.skipped > MAX_INITIALIZER_ZEROS:
            self.fail(f"initialisers skip more than {MAX_INITIALIZER_ZEROS} bytes")
        data.extend(bytes(max(0, offset + width - len(data))))
        text, place = self.texts[self.index], self.index
        mask, generic = None, False
        if self.kinds[self.index] == INT and self.texts[self.index + 1] == "(":
            mask = self.constant(NO_OPERATOR).value
            self.expect("(")
        elif self.kinds[self.index] != WORD:
            self.store_constant(self.constant(), kind, width, offset, data)
            return
        if self.at("generic") and self.texts[self.index + 1] == "(":
            self.index += 2
            generic = True
        symbol = self.identifier("a symbol")
        if generic:
            self.expect(")")
        addend = 0
        if self.at("+") or self.at("-"):
            addend = self.integer("an offset")
        if mask is not None:
            self.expect(")")
        shift = 0
        if mask is not None:
            while mask > 0xFF and mask & 0xFF == 0:
                mask >>= 8
                shift += 8
            if mask != 0xFF:
                self.fail(f"{text} selects no byte of an address; masks are 0xFF, 0xFF00, …", place)
            width = 1
        relocations.append(Relocation(offset, width, symbol, addend, generic, shift))

    def store_constant(self, constant: Constant, kind: str, width: int, offset: int, data: bytearray) -> None:
        if kind in _SIGNED_FLOATS:
            if constant.kind == kind:
                raw = constant.bits.to_bytes(width, "little")
            else:
                value = float(constant.value)
                try:
                    raw = struct.pack(_SIGNED_FLOATS[kind], value)
                except OverflowError:
                    raw = struct.pack(_SIGNED_FLOATS[kind], float("inf") if value > 0 else float("-inf"))
        elif constant.kind == "int":
            raw = (constant.bits & ((1 << 8 * width) - 1)).to_bytes(max(width, 8), "little")[:width]
        else:
            self.fail(f"a floating-point constant cannot initialise a .{kind}", self.index - 1)
        data[offset : offset + width] = raw

    # ---- functions

    def read_function(self, entry: bool, linkage: str | None) -> None:
        start = self.index
        returns: list[Variable] = []
        if self.at(".attribute"):
            self.index += 1
            self.skip_parentheses()
        if not entry and self.at("("):
            returns = self.parameters("return parameter")
        name = self.identifier("a function's name")
        params = self.parameters("parameter") if self.at("(") else []
        function = Function(name, entry, params, returns, linkage=linkage, line=self.line(start))
        self.function_directives(function)
        table = self.result.entries if entry else self.result.functions
        known = table.get(name)
        if self.at("{"):
            if known is not None and known.defined:
                self.fail(f"{name} is defined twice", start)
            function.defined = True
            self.read_body(function)
            table[name] = function
            return
        self.expect(";", "'{' or ';' after a function's head")
        if known is None:
            table[name] = function

    def parameters(self, what: str) -> list[Variable]:
        self.expect("(")
        found: list[Variable] = []
        while not self.accept(")"):
            if found:
                self.expect(",", f"',' or ')' after a {what}")
            if self.at(".param") or self.at(".reg"):
                found.extend(self.variables())
            else:
                self.expected(f"a {what} that begins with .param or .reg")
        return found

    def function_directives(self, function: Function) -> None:
        while self.kinds[self.index] == DOT:
            name = self.texts[self.index][1:]
            self.index += 1
            if name in ("pragma", "loc"):
                self.read_pragma() if name == "pragma" else self.read_loc()
                continue
            values: list[int | str] = []
            while True:
                if self.kinds[self.index] == INT:
                    values.append(self.integer("a number"))
                elif self.kinds[self.index] == STRING:
                    values.append(self.texts[self.index][1:-1])
                    self.index += 1
                else:
                    break
                if not self.accept(","):
                    break
            function.directives[name] = tuple(values)

    def read_body(self, function: Function) -> None:
        self.function = function
        self.registers = {}
        self.location = None
        self.latest = {}
        statements: list[_Statement] = []
        tables: list[tuple[str, str, _Scope, list[int]]] = []
        top = _Scope(0, None)
        for variable in (*function.params, *function.returns):
            if variable.space == "reg":
                top.registers[variable.name] = _Declared(variable.name, variable.type, 0)
                function.registers[variable.name] = variable.type
            else:
                top.symbols[variable.name] = variable.name
        scope, opened, depth = top, 1, 1
        start = self.index
        self.expect("{")
        while True:
            kind, text = self.kinds[self.index], self.texts[self.index]
            if kind == WORD:
                if self.texts[self.index + 1] == ":":
                    self.read_label(function, scope, statements, tables)
                else:
                    self.skip_instruction(statements, scope)
            elif kind == DOT:
                self.body_directive(function, scope, tables)
            elif text == "@":
                self.skip_instruction(statements, scope)
            elif text == "{" and kind == PUNCT:
                self.index += 1
                depth += 1
                if depth > MAX_NESTING:
                    self.fail(f"scopes nested deeper than {MAX_NESTING}", self.index - 1)
                scope = _Scope(opened, scope)
                opened += 1
            elif text == "}" and kind == PUNCT:
                self.index += 1
                depth -= 1
                if depth == 0:
                    break
                scope = scope.parent
            elif text == ";" and kind == PUNCT:
                self.index += 1
            elif kind == END:
                self.fail(f"the body of {function.name} has no closing '}}'", start)
            else:
                self.expected("an instruction, a label or a directive")
        after = self.index
        for statement in statements:
            function.body.append(self.instruction(statement))
        for kind, name, table_scope, places in tables:
            self.read_table(function, kind, name, table_scope, places)
        self.index = after
        self.function = None

    def read_label(self, function: Function, scope: _Scope, statements: list, tables: list) -> None:
        name = self.identifier("a label")
        if name in scope.labels:
            self.fail(f"label {name} is defined twice in its scope", self.index - 1)
        self.index += 1
        unique = scope.unique(name)
        scope.labels[name] = unique
        if self.at(".callprototype"):
            self.index += 1
            function.prototypes[unique] = self.prototype()
        elif self.at(".branchtargets") or self.at(".calltargets"):
            kind = self.texts[self.index]
            places: list[int] = []
            while True:
                self.index += 1
                places.append(self.index)
                self.identifier("a label" if kind == ".branchtargets" else "a function")
                if not self.at(","):
                    break
            self.expect(";")
            tables.append((kind, unique, scope, places))
        else:
            function.labels[unique] = len(statements)

    def read_table(self, function: Function, kind: str, name: str, scope: _Scope, places: list[int]) -> None:
        if kind == ".calltargets":
            function.call_targets[name] = tuple(self.texts[place] for place in places)
            return
        targets = []
        for place in places:
            label = self.find_label(self.texts[place], scope)
            if label is None or label not in function.labels:
                self.fail(f"branch target {self.texts[place]} is no label of this function", place)
            targets.append(label)
        function.branch_targets[name] = tuple(targets)

    def prototype(self) -> Prototype:
        returns = self.parameters("return parameter") if self.at("(") else []
        self.expect("_", "'_' in place of a prototype's name")
        params = self.parameters("parameter") if self.at("(") else []
        while self.kinds[self.index] == DOT:
            self.index += 1
            if self.kinds[self.index] == INT:
                self.index += 1
        self.expect(";")
        return Prototype(returns, params)

    def body_directive(self, function: Function, scope: _Scope, tables: list) -> None:
        text = self.texts[self.index]
        if text == ".loc":
            self.index += 1
            self.read_loc()
        elif text == ".reg":
            self.index += 1
            self.read_registers(scope)
        elif text == ".pragma":
            self.index += 1
            self.read_pragma()
        elif text == ".file":
            self.index += 1
            self.read_file()
        elif text == ".section":
            self.index += 1
            self.read_section()
        elif text in _SPACES or text in _LINKAGES:
            linkage = None
            while self.texts[self.index] in _LINKAGES:
                linkage = self.texts[self.index][1:]
                self.index += 1
            if self.texts[self.index] not in _SPACES:
                self.expected("a state space such as .shared")
            place = self.index
            for variable in self.variables(linkage):
                if variable.name in scope.symbols:
                    self.fail(f"{variable.name} is declared twice in its scope", place)
                unique = scope.unique(variable.name)
                scope.symbols[variable.name] = unique
                variable.name = unique
                function.variables[unique] = variable
            self.expect(";")
        elif text[1:] in ("maxnreg", "maxntid", "reqntid", "minnctapersm"):
            self.fail(f"{text} belongs before the '{{' of the function")
        else:
            self.fail(f"directive {text} is not allowed in a function's body")

    def read_registers(self, scope: _Scope) -> None:
        _, lanes, kind, _ = self.type_specifier("reg")
        elements = lanes if lanes > 1 else 0
        while True:
            place = self.index
            name = self.identifier("a register's name")
            if self.accept("<"):
                # Above < and > enclose a count, so the constant must not take > for a comparison.
                count = self.constant(ABOVE_COMPARISON)
                if count.kind != "int" or count.value < 0:
                    self.fail("the number of registers is a non-negative integer", place)
                self.expect(">")
                if name in scope.ranges:
                    self.fail(f"registers {name}<…> are declared twice in their scope", place)
                scope.ranges[name] = (count.value, kind, elements)
            elif name in scope.registers:
                self.fail(f"register {name} is declared twice in its scope", place)
            else:
                scope.registers[name] = _Declared(scope.unique(name), kind, elements)
            if not self.accept(","):
                break
        self.expect(";")

    def skip_instruction(self, statements: list[_Statement], scope: _Scope) -> None:
        """Note where an instruction begins and move past its semicolon."""
        statements.append(_Statement(self.index, scope, self.location))
        kinds, texts = self.kinds, self.texts
        index = self.index
        while texts[index] != ";":
            if kinds[index] == END:
                self.fail("instruction without its ';'")
            # A directive that begins a line inside an instruction means that a semicolon is missing.
            if kinds[index] == DOT and texts[index] in (".loc", ".reg", ".entry", ".func", ".version"):
                self.fail(f"expected ';' before {texts[index]}", index)
            index += 1
        self.index = index + 1

    # ---- instructions

    def instruction(self, statement: _Statement) -> Instruction:
        self.index = start = statement.start
        scope = statement.scope
        guard = None
        if self.accept("@"):
            negated = self.accept("!")
            place = self.index
            register = self.register(self.word("the predicate of a guard"), scope, place)
            if not isinstance(register, Register) or register.type != "pred":
                self.fail("a guard is a predicate register", place)
            guard = (register, negated)
        place = self.index
        words = self.word("an instruction").split(".")
        while self.kinds[self.index] == DOT:
            words.append(self.texts[self.index][1:])
            self.index += 1
        if words[0][0] == "%":
            self.expected("an instruction")
        operands = self.call_operands(scope) if words[0] == "call" else self.operands(scope)
        if words[0] in _USES_CARRY or "cc" in words:
            self.function.registers[CONDITION_CODE.name] = CONDITION_CODE.type
        end = self.index
        self.expect(";", "',' or ';' after an operand")
        starts = self.tokens.starts
        text = self.tokens.text[starts[start] : starts[end] + 1]
        if "/" in text:
            text = _COMMENT.sub(" ", text)
        return Instruction(
            words[0],
            tuple(words[1:]),
            operands,
            " ".join(text.split()),
            self.tokens.line_of(starts[start]),
            guard,
            statement.location,
        )

    def operands(self, scope: _Scope) -> tuple[Operand, ...]:
        if self.at(";"):
            return ()
        found = [self.operand(scope)]
        while self.accept(","):
            found.append(self.operand(scope))
        return tuple(found)

    def call_operands(self, scope: _Scope) -> tuple[Operand | None, ...]:
        """`[(results),] target [, (arguments)] [, prototype or targets]`, always as four operands."""
        results, arguments, prototype = Vector(()), Vector(()), None
        if self.at("("):
            results = self.operand_list(scope)
            self.expect(",", "',' after the results of a call")
        target = self.operand(scope)
        if not isinstance(target, (Symbol, Register)):
            self.fail("a call goes to a function or to a register that holds its address", self.index - 1)
        while self.accept(","):
            if self.at("("):
                arguments = self.operand_list(scope)
                continue
            label = self.operand(scope)
            if not isinstance(label, Label):
                self.fail("expected a prototype or a table of call targets", self.index - 1)
            prototype = label
        return target, results, arguments, prototype

    def operand_list(self, scope: _Scope) -> Vector:
        self.expect("(")
        found: list[Operand] = []
        while not self.accept(")"):
            if found:
                self.expect(",", "',' or ')' in a list of arguments")
            found.append(self.operand(scope))
        return Vector(tuple(found))

    def operand(self, scope: _Scope, nested: bool = False) -> Operand:
        kind, text = self.kinds[self.index], self.texts[self.index]
        if kind == WORD:
            return self.named_operand(scope)
        if kind in (INT, FLOAT, HEXFLOAT) or (kind == PUNCT and text in _STARTS_CONSTANT):
            return _immediate(self.constant())
        if kind == PUNCT and not nested:
            if text == "[":
                return self.address(scope)
            if text == "{":
                return self.vector(scope)
        if text == "!" and kind == PUNCT:
            self.index += 1
            if self.kinds[self.index] != WORD:
                return _immediate(self.rewind_to_constant())
            place = self.index
            register = self.register(self.word("a predicate"), scope, place)
            if not isinstance(register, Register) or register.type != "pred":
                self.fail("only a predicate register can be negated by '!'", place)
            return Negated(register)
        self.expected("an operand")

    def rewind_to_constant(self) -> Constant:
        self.index -= 1
        return self.constant()

    def named_operand(self, scope: _Scope) -> Operand:
        place = self.index
        name = self.word("an operand")
        first = Sink() if name == "_" else self.name(name, scope, place)
        if self.at("|"):
            self.index += 1
            second_place = self.index
            second_name = self.word("the second destination")
            second = Sink() if second_name == "_" else self.register(second_name, scope, second_place)
            if not isinstance(first, (Register, Sink)) or not isinstance(second, (Register, Sink)):
                self.fail("both destinations around '|' are registers", place)
            return PredicatePair(first, second)
        if isinstance(first, Symbol) and (self.at("+") or self.at("-")):
            return Symbol(first.name, self.integer("an offset"))
        return first

    def name(self, name: str, scope: _Scope, place: int) -> Operand:
        """What a name means here: register, constant, variable, label or function."""
        head, dot, component = name.partition(".")
        found = self.find_register(head, scope)
        if found is not None:
            return self.declared_register(found, component if dot else None, place)
        if head in SPECIAL_REGISTERS:
            return self.special_register(head, component if dot else None, place)
        if dot:
            self.fail(f"unknown register {name!r}", place)
        if name == "WARP_SZ":
            return Immediate(32, "int", 32)
        inner: _Scope | None = scope
        while inner is not None:
            if name in inner.symbols:
                return Symbol(inner.symbols[name])
            if name in inner.labels:
                return Label(inner.labels[name])
            inner = inner.parent
        if name[0] == "%":
            self.fail(f"register {name} is not declared", place)
        result = self.result
        if name in result.globals or name in result.functions or name in result.entries:
            return Symbol(name)
        if name == self.function.name or name in result.aliases:
            return Symbol(name)
        self.fail(f"{name!r} is no register, variable, label or function declared before this line", place)

    def register(self, name: str, scope: _Scope, place: int) -> Operand:
        found = self.name(name, scope, place)
        if not isinstance(found, (Register, Vector)):
            self.fail(f"{name} is not a register", place)
        return found

    def find_register(self, name: str, scope: _Scope) -> _Declared | None:
        inner: _Scope | None = scope
        while inner is not None:
            found = inner.find_register(name)
            if found is not None:
                return found
            inner = inner.parent
        return None

    def find_label(self, name: str, scope: _Scope) -> str | None:
        inner: _Scope | None = scope
        while inner is not None:
            if name in inner.labels:
                return inner.labels[name]
            inner = inner.parent
        return None

    def declared_register(self, found: _Declared, component: str | None, place: int) -> Operand:
        if not found.elements:
            if component is not None:
                self.fail(f"{found.name} is no vector, so it has no component .{component}", place)
            return self.scalar(found.name, found.type)
        if component is None:
            names = [f"{found.name}.{'xyzw'[i]}" if i < 4 else f"{found.name}.{i}" for i in range(found.elements)]
            return Vector(tuple(self.scalar(name, found.type) for name in names))
        number = _COMPONENTS.get(component, 99)
        if number >= found.elements:
            self.fail(f"a vector of {found.elements} has no component .{component}", place)
        return self.scalar(f"{found.name}.{'xyzw'[number]}", found.type)

    def scalar(self, name: str, kind: str) -> Register:
        register = self.registers.get((name, None))
        if register is None:
            register = Register(name, kind)
            self.registers[(name, None)] = register
            self.function.registers[name] = kind
        return register

    def special_register(self, name: str, component: str | None, place: int) -> Operand:
        if component is None and name in SPECIAL_WITH_COMPONENTS:
            return Vector(tuple(self.special_register(name, axis, place) for axis in "xyz"))
        if component is not None and (name not in SPECIAL_WITH_COMPONENTS or component not in ("x", "y", "z", "w")):
            self.fail(f"special register {name} has no component .{component}", place)
        key = (name, component)
        register = self.registers.get(key)
        if register is None:
            register = Register(name, SPECIAL_REGISTERS[name], component, True)
            self.registers[key] = register
        return register

    def vector(self, scope: _Scope) -> Vector:
        self.expect("{")
        found: list[Operand] = []
        while not self.accept("}"):
            if found:
                self.expect(",", "',' or '}' in a vector")
            found.append(self.operand(scope, nested=True))
        return Vector(tuple(found))

    def address(self, scope: _Scope) -> Address | TensorOperand:
        self.expect("[")
        first = self.address_inside(scope)
        if not self.accept(","):
            self.expect("]", "']' of an address")
            return first
        sampler = None
        if not self.at("{"):
            sampler = self.address_inside(scope)
            self.expect(",", "',' before the coordinates")
        coordinates = self.vector(scope)
        self.expect("]", "']' after the coordinates")
        return TensorOperand(first, coordinates, sampler)

    def address_inside(self, scope: _Scope) -> Address:
        kind, place = self.kinds[self.index], self.index
        if kind != WORD:
            if kind != INT and self.texts[self.index] not in _STARTS_CONSTANT:
                self.expected("a register, a symbol or a number in an address")
            constant = self.constant()
            if constant.kind != "int":
                self.fail("an address is an integer", place)
            return Address(_immediate(constant))
        base = self.name(self.word("an address"), scope, place)
        if not isinstance(base, (Register, Symbol)):
            self.fail("an address begins with a register, a symbol or a number", place)
        offset = 0
        if self.at("+") or self.at("-"):
            # `reg+-4` and `reg-4`: the sign belongs to the constant.
            offset = self.integer("an offset")
        return Address(base, offset)


def _immediate(constant: Constant) -> Immediate:
    return Immediate(constant.value, constant.kind, constant.bits)

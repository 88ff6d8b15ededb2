"""Reading the files in ptx/: what each function there takes, returns and promises, and its text.

What a .ptx file says, besides being PTX that assembles as it stands:
  - The comment above a function is its documentation; its last line names the section of the PTX ISA.
  - A `.b32` or `.b64` parameter has the type with which it is loaded: compilers pass `.f32` as `.b32`, and
    the linker compares. `ld.param.u16` of a `.u32` parameter takes its lower half.
  - The comment beside a parameter says what it is. A word before a colon gives the operand's kind: `shared:`
    an address in this block's shared memory, `cluster:` one in the cluster's, `global:` a global address,
    `map:` the address of a tensor map, `predicate:` a truth value. Without one it is a number of the
    parameter's type.
  - `accumulator:` beside a `.b64` parameter `d` is a local array whose elements the function changes. The function
    loads them into `%d0`, `%d1` … with `ld.v4.f32 {%d0, …}, [%d]` and stores them so; inlined, they are registers
    that go in and come out. In a variant with a larger `n` in its shape there are more of them in proportion.
  - An operand that the instruction wants as a constant has a comment line of its own among the parameters,
    `// N: immediate 0 to 7: what it is`, and stands in the body as `/*N=*/0`. The kernel's constant takes
    the place of the 0.
  - `//: add -> min, max` makes further functions from the same text, with `.min` and `.max` in place of
    `.add` and `_min` and `_max` in place of `_add` (in names, dots and `::` are underscores).
    `//: 5d -> 2d without c2..c4` also leaves out operands. Several such lines combine.
  - `//: pure` promises that the result depends on the arguments alone, `//: reads memory` that nothing is
    written: the compiler may merge, move or drop such a call. All others stay where they are.
  - `//: inline only: reason` forbids linking.
  - A result made by `selp …, 1, 0, predicate` is a truth value.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path


class PtxFileError(ValueError):
    """A file in ptx/ that the loader cannot read; the message names file, line and what was expected."""


@dataclass(frozen=True)
class PtxType:
    """A type of parameters and results: its name in Numba, its letter in inline assembly, its bits."""

    numba: str
    constraint: str
    bits: int


TYPES = {
    "b32": PtxType("uint32", "r", 32),
    "u32": PtxType("uint32", "r", 32),
    "s32": PtxType("int32", "r", 32),
    "b64": PtxType("uint64", "l", 64),
    "u64": PtxType("uint64", "l", 64),
    "s64": PtxType("int64", "l", 64),
    "f32": PtxType("float32", "f", 32),
    "f64": PtxType("float64", "d", 64),
}
_KINDS = {
    "shared": "shared address",
    "cluster": "shared address in the cluster",
    "global": "global address",
    "map": "tensor map address",
    "predicate": "bool",
    "accumulator": "accumulator",
}
# What may be passed in place of an address that was computed.
_STAND_IN = {
    "shared": "a shared array, tile or barrier",
    "cluster": "a shared array, tile or barrier of this block",
    "global": "a device array, meaning its first element",
    "map": "a tensor map argument of the kernel",
}


@dataclass(frozen=True)
class Operand:
    """One argument of a function.

    `kind` is 'shared', 'cluster', 'global', 'map', 'predicate', 'number', 'accumulator' or 'immediate'; `type` the PTX
    type ('u32'), of an accumulator that of its elements; `values` the allowed values of an immediate, else None;
    `count` how many elements an accumulator has, else 0.
    """

    name: str
    type: str
    kind: str
    note: str
    values: range | None = None
    count: int = 0

    @property
    def takes(self) -> str:
        """What it is, in two or three words: 'shared address', 'u32', 'immediate 0 to 7' …"""
        if self.kind == "immediate":
            step = f" step {self.values.step}" if self.values.step > 1 else ""
            return f"immediate {self.values[0]} to {self.values[-1]}{step}"
        if self.kind == "accumulator":
            return f"array of {self.count} {TYPES[self.type].numba}"
        return _KINDS.get(self.kind, self.type)

    @property
    def expected(self) -> str:
        """What a kernel may pass, in words."""
        if self.kind == "immediate":
            return f"a constant that Numba can see, a literal or a global (no expression): {self.takes}"
        if self.kind == "predicate":
            return "a bool"
        if self.kind == "accumulator":
            return f"a local {self.takes}, one-dimensional"
        if self.kind == "number":
            return f"{'a floating-point number' if self.type[0] == 'f' else 'an integer'} ({self.type})"
        return f"a {self.takes}: an integer ({self.type}) or {_STAND_IN[self.kind]}"


@dataclass(frozen=True)
class Result:
    """One value that a function returns: its PTX type, and whether it is a truth value."""

    type: str
    predicate: bool

    @property
    def numba(self) -> str:
        """Name of the Numba type that a kernel sees."""
        return "boolean" if self.predicate else TYPES[self.type].numba


@dataclass(frozen=True)
class Function:
    """One function of ptx/: what it takes, returns and needs, and its text.

    `line` is where it, or the function that it is a variant of, begins in `file`. `standing` says whether it
    is written there as it is. `architecture` is the file's `.target`; `inline_only` the reason why it cannot
    be linked, or None; `effect` 'pure', 'reads memory' or 'any'; `text` the PTX of this function alone with
    its comment; `module_header` the directives that make a module of it; `body` its statements as inline
    assembly.
    """

    name: str
    file: Path
    line: int
    doc: str
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    result_note: str
    architecture: str
    inline_only: str | None
    effect: str
    text: str
    module_header: str
    standing: bool
    body: tuple[str, ...]

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The Python signature; every argument may be passed by name."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(operand.name, kind) for operand in self.operands])

    @property
    def docstring(self) -> str:
        """The comment above the function, its arguments and results, and where it stands."""
        parts = [self.doc]
        if self.operands:
            lines = (f"    {o.name} ({o.takes}): {o.note or 'see above'}." for o in self.operands)
            parts.append("Args:\n" + "\n".join(lines))
        if self.results:
            note = f": {self.result_note}" if self.result_note else ""
            kinds = ", ".join(result.numba for result in self.results)
            parts.append(f"Returns:\n    {kinds}{note}.")
        if self.inline_only:
            parts.append(f"Inline only: {self.inline_only}.")
        newer = "" if self.architecture.endswith("a") else " and newer"
        parts.append(f"ptx/{self.file.name}, line {self.line}; {self.architecture}{newer}.")
        return "\n\n".join(parts)

    def symbol(self, immediates: Mapping[str, int]) -> str:
        """Name of the linked function; one with immediates exists once for each of their values."""
        return "".join([self.name, *(f"${immediates[o.name]}" for o in self._immediates)])

    @property
    def _immediates(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.kind == "immediate"]

    def module(self, symbol: str) -> tuple[str, str]:
        """(name, text) of the module that defines `symbol`: the file as it stands, or this variant alone."""
        if self.standing and symbol == self.name:
            return self.file.name, _read(self.file)
        values = dict(zip((o.name for o in self._immediates), map(int, symbol.split("$")[1:]), strict=True))
        text = _with_immediates(self.text, values)
        text = re.sub(rf"\b{self.name}(?=\()", lambda _: symbol, text)
        return f"{self.file.name}:{symbol}", f"{self.module_header}\n{text}\n"

    def inline_text(self, immediates: Mapping[str, int]) -> str:
        """The body for inline assembly: `$0`, `$1` … stand for the results and then the arguments."""
        return "{\n\t" + "\n\t".join(_with_immediates(line, immediates) for line in self.body) + "\n\t}"


def _with_immediates(text: str, values: Mapping[str, int]) -> str:
    for name, value in values.items():
        text = re.sub(rf"/\*{name}=\*/\s*\d+", str(value), text)
    return text


# ----------------------------------------------------------------------------------------------------
# Reading the files
# ----------------------------------------------------------------------------------------------------


def folder() -> Path:
    """The folder of .ptx files: ptx/ of the repository, or its copy in an installed package."""
    here = Path(__file__).resolve().parent
    installed = here / "_ptx"
    return installed if installed.is_dir() else here.parent / "ptx"


@functools.cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class _Rule:
    """`//: key -> word without names, …`: what else the same text stands for."""

    key: str
    variants: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _Written:
    """One function as written: numbered lines of comment and code, and what its `//:` lines say."""

    file: Path
    header: str
    architecture: str
    name: str
    line: int
    lines: tuple[tuple[int, str], ...]
    rules: tuple[_Rule, ...]
    effect: str
    inline_only: str | None


def _underscored(mnemonic: str) -> str:
    return re.sub(r"\W+", "_", mnemonic).lower()


def _error(file: Path, line: int, message: str) -> PtxFileError:
    return PtxFileError(f"{file}:{line}: {message}")


def _scan(file: Path) -> Iterator[_Written]:
    """Cut a file into its functions."""
    header: dict[str, str] = {}
    comment: list[tuple[int, str]] = []
    lines = iter(enumerate(_read(file).splitlines(), 1))
    for number, raw in lines:
        line = raw.rstrip()
        if line.startswith("//"):
            comment.append((number, line))
        elif not line:
            comment = []
        elif directive := re.match(r"\.(version|target|address_size)\s+(\S+)$", line):
            header[directive[1]] = directive[2]
        elif line.startswith(".visible .func"):
            missing = [f".{name}" for name in ("version", "target", "address_size") if name not in header]
            if missing:
                raise _error(file, number, f"{', '.join(missing)} must stand before the first function")
            yield _cut(file, header, comment, number, line, lines)
            comment = []
        else:
            raise _error(file, number, f"expected a comment, a directive or `.visible .func`, found {line!r}")


def _cut(file, header, comment, number, line, lines) -> _Written:
    block, start = [(number, line)], number
    for number, raw in lines:
        line = raw.rstrip()
        if line.startswith((".visible", ".version", ".target")):
            break
        block.append((number, line))
        if line == "}":
            break
    if block[-1][1] != "}":
        raise _error(file, start, "the function has no closing `}` at the start of a line")
    code = " ".join(text.split("//")[0] for _, text in block)
    named = re.match(r"\.visible \.func\s*(?:\([^)]*\))?\s*(\w+)\s*\(", code)
    if named is None:
        raise _error(file, start, "expected `.visible .func (result) name(parameters)`")
    if not any(not text.startswith("//:") for _, text in comment):
        raise _error(file, start, f"{named[1]} has no comment above it that says what it does")
    rules: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    effect, inline_only = "any", None
    for number, text in comment:
        if not text.startswith("//:"):
            continue
        order = text[3:].strip()
        if order in ("pure", "reads memory"):
            effect = order
        elif order.startswith("inline only: "):
            inline_only = order.removeprefix("inline only: ").rstrip(".")
        elif " -> " in order:
            key, variants = _rule(file, number, order)
            rules.setdefault(key, []).extend(variants)
        else:
            raise _error(file, number, f"`//: {order}`: expected `pure`, `reads memory`, `inline only: …` or `a -> b`")
    described = tuple(entry for entry in comment if not entry[1].startswith("//:"))
    header_text = "".join(f".{key} {header[key]}\n" for key in ("version", "target", "address_size"))
    return _Written(
        file,
        header_text,
        header["target"],
        named[1],
        start,
        (*described, *block),
        tuple(_Rule(key, tuple(variants)) for key, variants in rules.items()),
        effect,
        inline_only,
    )


def _rule(file: Path, number: int, order: str) -> tuple[str, list[tuple[str, tuple[str, ...]]]]:
    """What `//: key -> word without operands, word` says: the key, each variant's word and omissions."""
    key, _, rest = order.partition(" -> ")
    variants = []
    for variant in rest.split(","):
        match = re.fullmatch(r"(\S+)(?: without (.+))?", variant.strip())
        if match is None:
            raise _error(file, number, f"`//: {order}`: expected `word` or `word without operands` between commas")
        variants.append((match[1], tuple(_expand(file, number, match[2] or ""))))
    return key.strip(), variants


def _expand(file: Path, number: int, names: str) -> Iterator[str]:
    """Names, `c2..c4` meaning c2, c3 and c4."""
    for name in names.split():
        span = re.fullmatch(r"([a-zA-Z_]+)(\d+)\.\.([a-zA-Z_]+)(\d+)", name)
        if span is None:
            yield name
        elif span[1] == span[3] and int(span[2]) <= int(span[4]):
            yield from (f"{span[1]}{i}" for i in range(int(span[2]), int(span[4]) + 1))
        else:
            raise _error(file, number, f"`{name}`: expected a range such as c2..c4")


@dataclass(frozen=True)
class _Member:
    """A function as written, or a variant: for each rule None, or its word and the operands left out."""

    written: _Written
    choice: tuple[tuple[str, tuple[str, ...]] | None, ...]

    @property
    def standing(self) -> bool:
        return all(chosen is None for chosen in self.choice)

    @property
    def name(self) -> str:
        return self._renamed(self.written.name)

    def _chosen(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        for rule, chosen in zip(self.written.rules, self.choice, strict=True):
            if chosen is not None:
                yield rule.key, *chosen

    def _renamed(self, name: str) -> str:
        for key, word, _ in self._chosen():
            name = re.sub(rf"(?<![a-zA-Z0-9]){_underscored(key)}(?![a-zA-Z0-9])", _underscored(word), name)
        return name

    def lines(self) -> list[tuple[int, str]]:
        """The member's own text, each line with its number in the file."""
        written = self.written
        if self.standing:
            return list(written.lines)
        result, name = [], self.name
        for number, line in written.lines:
            code, mark, comment = line.partition("//")
            comment = re.sub(r"`[^`]*`", lambda quoted: self._substituted(quoted[0]), comment)
            code = re.sub(rf"\b{written.name}(?=\()", name, self._substituted(code))
            dropped = [operand for _, _, operands in self._chosen() for operand in operands]
            if any(re.match(rf"\s*(\.param\s+\S+\s+{o}\b|ld\.param\S*\s.*\[{o}\])", code) for o in dropped):
                continue
            for operand in dropped:
                code = re.sub(rf",\s*%{operand}\b|%{operand}\b,?\s*", "", code)
            result.append((number, code + mark + comment))
        return self._widened(_without_last_comma(result))

    def _widened(self, lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
        """Accumulators of a variant with a larger n: longer lists, more loads and stores."""
        operand = next(
            (m[1] for _, line in lines if (m := re.search(r"\.b64\s+(\w+),?\s*// accumulator:", line))), None
        )
        shapes = [re.search(r"m\d+n(\d+)", name) for name in (self.written.name, self.name)]
        if operand is None or None in shapes:
            return lines
        factor = int(shapes[1][1]) // int(shapes[0][1])
        count = 1 + max(int(i) for _, line in lines for i in re.findall(rf"%{operand}(\d+)\b", line))
        names = [f"%{operand}{i}" for i in range(count * factor)]
        result = []
        for number, line in lines:
            if move := re.search(rf"\b(?:ld|st)\.v(\d)\.\w+ .*\[%{operand}\]", line):
                width = int(move[1])
                for i in range(0, len(names), width):
                    place = f"[%{operand}+{4 * i}]" if i else f"[%{operand}]"
                    changed = line.replace(f"[%{operand}]", place)
                    result.append((number, changed.replace(", ".join(names[:width]), ", ".join(names[i : i + width]))))
            else:
                result.append((number, line.replace(", ".join(names[:count]), ", ".join(names))))
        return result

    def _substituted(self, text: str) -> str:
        for key, word, _ in self._chosen():
            text = re.sub(rf"(?<![\w:]){re.escape(key)}(?![\w:])", word, text)
        return text


def _without_last_comma(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Where the last parameter was left out, the one before it must lose its comma."""
    close = next(i for i, (_, line) in enumerate(lines) if line.startswith(")") or line.endswith("()"))
    for i in range(close - 1, -1, -1):
        code, mark, comment = lines[i][1].partition("//")
        if code.strip():
            lines[i] = (lines[i][0], re.sub(r",(\s*)$", r" \1" if mark else "", code) + mark + comment)
            break
    return lines


def _members(file: Path) -> Iterator[_Member]:
    """Every function that a file stands for."""
    for written in _scan(file):
        for rule in written.rules:
            if not re.search(rf"(?<![a-zA-Z0-9]){_underscored(rule.key)}(?![a-zA-Z0-9])", written.name):
                raise _error(file, written.line, f"`//: {rule.key} -> …`: there is no `{rule.key}` in {written.name}")
        for choice in itertools.product(*((None, *rule.variants) for rule in written.rules)):
            yield _Member(written, choice)


# ----------------------------------------------------------------------------------------------------
# One function
# ----------------------------------------------------------------------------------------------------

_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(\w+)\s*,?\s*$")
_RESULT = re.compile(r"\(\s*\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+(\w+)(?:\[\d+\])?\s*\)\s*(?://\s*(.*))?")
_IMMEDIATE = re.compile(r"//\s*(\w+): immediate (\d+) to (\d+)(?: step (\d+))?(?:: (.*))?$")
_KIND = re.compile(r"(shared|cluster|global|map|predicate|accumulator):\s*")
# Registers that the compiler itself names so: one of ours would hide it inside the braces of the inline text.
_LABEL = re.compile(r"[A-Za-z]\w*:")
_RESERVED = re.compile(r"%((p|rs|r|rd|f|fd|rq|h|hh)\d+|SPL?)$")
_SPECIAL = re.compile(
    r"%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock64|globaltimer|tid|ntid|ctaid|nctaid"
    r"|lanemask_(eq|le|lt|ge|gt)|is_explicit_cluster|clusterid|nclusterid|cluster_(n?ctaid|n?ctarank)"
    r"|(dynamic|total|aggr)_smem_size)$"
)


class _Parser:
    """Reads one function; every complaint carries file and line."""

    def __init__(self, member: _Member) -> None:
        self.written = member.written
        self.member = member
        self.lines = member.lines()
        self.operands: list[Operand] = []
        self.results: list[Result] = []
        self.registers: dict[str, str] = {}

    def fail(self, line: int, message: str) -> PtxFileError:
        return _error(self.written.file, line, f"{self.member.name}: {message}")

    def function(self) -> Function:
        comment = list(itertools.takewhile(lambda entry: entry[1].startswith("//"), self.lines))
        code = self.lines[len(comment) :]
        opening = next((i for i, (_, line) in enumerate(code) if line == "{"), None)
        if opening is None:
            raise self.fail(code[0][0], "expected `{` on a line of its own after the parameters")
        declared, note = self._head(code[:opening])
        body = self._body(code[opening + 1 : -1], declared)
        return Function(
            name=self.member.name,
            file=self.written.file,
            line=self.written.line,
            doc="\n".join(line[2:].removeprefix(" ") for _, line in comment),
            operands=tuple(self.operands),
            results=tuple(self.results),
            result_note=note,
            architecture=self.written.architecture,
            inline_only=self.written.inline_only,
            effect=self.written.effect,
            text="\n".join(line for _, line in self.lines),
            module_header=self.written.header,
            standing=self.member.standing,
            body=tuple(body),
        )

    def _head(self, head: list[tuple[int, str]]) -> tuple[str | None, str]:
        """Read the parameters; returns the result's name (or None) and what is said about it."""
        declared, note = None, ""
        first = head[0][1].removeprefix(".visible .func").strip()
        result = _RESULT.match(first)
        if result:
            declared, note = result[1], (result[2] or "").strip()
        elif first.startswith("("):
            raise self.fail(
                head[0][0],
                f"cannot read the result in {first!r}; expected `(.param .u32 name)  // what it is`",
            )
        for number, line in head[1:]:
            text = line.strip()
            if text.startswith(self.member.name) or text in ("", ")"):
                continue
            self.operands.append(self._operand(number, text))
        return declared, note.rstrip(".")

    def _operand(self, number: int, text: str) -> Operand:
        if immediate := _IMMEDIATE.match(text):
            name, first, last, step, note = immediate.groups()
            values = range(int(first), int(last) + 1, int(step or 1))
            operand = Operand(name, "u32", "immediate", (note or "").rstrip("."), values)
        else:
            code, _, comment = text.partition("//")
            parameter = _PARAMETER.match(code.strip())
            if parameter is None:
                raise self.fail(
                    number,
                    f"expected `.param .u32 name,  // what` or `// N: immediate 0 to 7: what`, not {text!r}",
                )
            if parameter[1] not in TYPES or parameter[1].startswith("f"):
                raise self.fail(
                    number,
                    f".{parameter[1]} parameters are not supported; declare .b32 or .b64, load with the type",
                )
            comment = comment.strip()
            kind = _KIND.match(comment)
            note = (comment[kind.end() :] if kind else comment).rstrip(".")
            operand = Operand(parameter[2], parameter[1], kind[1] if kind else "number", note)
        if keyword.iskeyword(operand.name) or any(o.name == operand.name for o in self.operands):
            raise self.fail(number, f"the parameter name {operand.name!r} is a Python keyword or taken already")
        wide = {"global": 64, "map": 64, "accumulator": 64, "shared": 32, "cluster": 32, "predicate": 32}.get(
            operand.kind
        )
        if wide is not None and TYPES[operand.type].bits != wide:
            raise self.fail(
                number, f"{operand.name}: a {_KINDS[operand.kind]} has {wide} bits, .{operand.type} has not"
            )
        return operand

    def _body(self, lines: list[tuple[int, str]], declared: str | None) -> list[str]:
        """The instructions as inline text, loads of parameters and stores of results turned into moves."""
        statements = []
        for number, line in lines:
            statement = line.split("//")[0].strip()
            if statement:
                if not statement.endswith(";") and not _LABEL.fullmatch(statement):
                    raise self.fail(number, f"{statement!r} does not end with `;`, nor is it a label")
                statements.append((number, statement))
        if not statements or statements[-1][1] != "ret;":
            raise self.fail(lines[-1][0] if lines else self.written.line, "the last statement must be `ret;`")
        self._results(statements, declared)
        registers = self._accumulator(statements)
        loaded: set[str] = set()
        stored = itertools.count()
        body = []
        for number, statement in statements[:-1]:
            if register := re.match(r"\.reg\s+\.(\w+)\s+(.*);", statement):
                for name in (n.strip() for n in register[2].split(",")):
                    if _RESERVED.match(name):
                        raise self.fail(number, f"{name} is a name the compiler uses; give the register a telling one")
                    self.registers[name] = register[1]
                others = [name for name in map(str.strip, register[2].split(",")) if name not in registers]
                if others:
                    body.append(f".reg .{register[1]} {', '.join(others)};")
                continue
            for name in re.findall(r"%[a-zA-Z_]\w*", statement):
                if name not in self.registers and not _SPECIAL.match(name):
                    raise self.fail(number, f"{name} is neither declared with .reg nor a special register")
            load = re.match(r"ld\.param\.(\w+)\s+(%\w+),\s*\[(\w+)\];", statement)
            if load and load[2] in registers:
                loaded.add(load[3])
            elif re.match(r"(?:ld|st)\.v\d", statement) and (set(re.findall(r"%\w+", statement)) <= set(registers)):
                continue
            elif load:
                body.append(self._load(number, *load.groups()))
                loaded.add(load[3])
            elif store := re.match(r"st\.param(?:\.v\d)?\.(\w+)\s+\[[^]]+\],\s*\{?([^}]*)\}?;", statement):
                body += [f"mov.{store[1]} ${next(stored)}, {name.strip()};" for name in store[2].split(",")]
            else:
                body.append(re.sub(r"%\w+", lambda name: registers.get(name[0], name[0]), statement))
        for operand in self.operands:
            if operand.kind == "immediate":
                if not any(f"/*{operand.name}=*/" in statement for statement in body):
                    raise self.fail(self.written.line, f"no instruction has the immediate `/*{operand.name}=*/`")
            elif operand.name not in loaded:
                raise self.fail(self.written.line, f"the parameter {operand.name} is never loaded")
        return body

    def _load(self, number: int, kind: str, register: str, name: str) -> str:
        names = [operand.name for operand in self.operands if operand.kind not in ("immediate", "accumulator")]
        if name not in names:
            raise self.fail(number, f"[{name}] is no parameter of this function")
        # An accumulator's elements come first, as results and as arguments.
        place = len(self.results) + 2 * sum(operand.count for operand in self.operands) + names.index(name)
        position = next(i for i, operand in enumerate(self.operands) if operand.name == name)
        operand = self.operands[position]
        if kind == "u16" and operand.type == "u32":
            return f"cvt.u16.u32 {register}, ${place};"
        if kind not in TYPES or TYPES[kind].bits != TYPES[operand.type].bits:
            raise self.fail(number, f"ld.param.{kind} of {name}, which is declared .{operand.type}")
        if operand.type.startswith("b"):
            self.operands[position] = replace(operand, type=kind)
        return f"mov.{kind} {register}, ${place};"

    def _accumulator(self, statements: list[tuple[int, str]]) -> dict[str, str]:
        """What the accumulator's registers, and the one for its address, are inlined. Completes its operand."""
        position = next((i for i, operand in enumerate(self.operands) if operand.kind == "accumulator"), None)
        if position is None:
            return {}
        operand = self.operands[position]
        if self.results or self.written.inline_only is None:
            raise self.fail(
                self.written.line,
                f"{operand.name} is an accumulator: the function must be `//: inline only: …` and return nothing",
            )
        inlined, kind = {f"%{operand.name}": ""}, ""
        for _, statement in statements:
            load = re.match(rf"ld\.v\d\.(\w+)\s+\{{(.*)\}},\s*\[%{operand.name}(?:\+\d+)?\];", statement)
            if load is not None:
                kind = load[1]
                for name in load[2].split(","):
                    inlined[name.strip()] = f"${len(inlined) - 1}"
        if kind not in TYPES or TYPES[kind].bits != 32:
            raise self.fail(
                self.written.line,
                f"the accumulator {operand.name} is never loaded with `ld.v4.f32 {{…}}, [%{operand.name}]`",
            )
        self.operands[position] = replace(operand, type=kind, count=len(inlined) - 1)
        return inlined

    def _results(self, statements: list[tuple[int, str]], declared: str | None) -> None:
        for number, statement in statements:
            store = re.match(r"st\.param(?:\.v\d)?\.(\w+)\s+\[(\w+)[^]]*\],\s*\{?([^}]*)\}?;", statement)
            if store is None:
                continue
            if store[2] != declared:
                raise self.fail(number, f"[{store[2]}] is not the declared result ({declared})")
            if store[1] not in TYPES:
                raise self.fail(number, f".{store[1]} results are not supported; use one of {', '.join(TYPES)}")
            for register in (name.strip() for name in store[3].split(",")):
                chosen = re.compile(rf"selp\.\w+\s+{register},\s*1,\s*0,")
                predicate = any(chosen.match(text) for _, text in statements)
                self.results.append(Result(store[1], predicate))
        if declared is not None and not self.results:
            raise self.fail(self.written.line, f"the result {declared} is never stored with st.param")
        if len({result.type for result in self.results}) > 1 or len(self.results) not in (0, 1, 2, 4):
            raise self.fail(self.written.line, "results must be one, two or four values of one type")


# ----------------------------------------------------------------------------------------------------
# All functions
# ----------------------------------------------------------------------------------------------------


@functools.cache
def _index() -> dict[str, _Member]:
    """All functions by name; their bodies are read when first asked for, to keep the import quick."""
    index: dict[str, _Member] = {}
    for file in sorted(folder().glob("*.ptx")):
        for member in _members(file):
            if member.name in index:
                other = index[member.name].written
                raise _error(
                    file,
                    member.written.line,
                    f"{member.name} is also defined at {other.file.name}:{other.line}",
                )
            index[member.name] = member
    if not index:
        raise PtxFileError(f"no .ptx file in {folder()}")
    return index


def names() -> list[str]:
    """The names of all functions, file by file."""
    return list(_index())


@functools.cache
def function(name: str) -> Function:
    """The function of that name.

    Raises:
        KeyError: there is none.
        PtxFileError: its file cannot be read; the message names file and line.
    """
    return _Parser(_index()[name]).function()


def functions() -> dict[str, Function]:
    """All functions of ptx/ by name.

    Raises:
        PtxFileError: a file cannot be read; the message names file and line.
    """
    return {name: function(name) for name in names()}


def read(file: Path) -> dict[str, Function]:
    """The functions of one file by name, wherever the file is.

    Raises:
        PtxFileError: it cannot be read; the message names file and line.
    """
    return {member.name: _Parser(member).function() for member in _members(file)}

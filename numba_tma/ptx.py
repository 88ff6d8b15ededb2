"""PTX instructions as functions for Numba kernels, read from the files in ptx/.

Every function there is one instruction. In a kernel it is called by name:

    from numba_tma import ptx

    ptx.mbarrier_init(bar, 1)                   # inlined: the instruction stands in the kernel itself
    ptx.linked.mbarrier_init(bar, 1)            # the same text, called as a function and linked as it stands

How a .ptx file says what the loader needs to know
  - The comment above a function is its documentation; its last line names the section of the PTX ISA.
  - The comment beside a parameter says what it is. A word before a colon gives the operand's kind: `shared:` an
    address in this block's shared memory, `cluster:` one in the cluster's, `global:` a global address, `map:` a
    tensor map, `predicate:` a truth value. Without one it is a number of the parameter's own type.
  - An operand that the instruction wants as a constant has a comment line of its own among the parameters,
    `// N: immediate 0 to 7: …`, and stands in the body as `/*N=*/0`. The kernel's literal takes the 0's place.
  - `//: add -> min, max` makes further functions from the same text with `.min` and `.max` in place of `.add` (in
    names `_add` likewise, `::` and dots being underscores). `//: 5d -> 2d without c2..c4` also leaves out operands.
  - `//: pure` promises that the result depends on the arguments alone, `//: reads memory` that nothing is written:
    the compiler may merge, move or drop such a call. All others stay where they are.
  - `//: inline only: reason` forbids linking.

Source: the PTX ISA manual; each function names its section.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import keyword
import re
import types as python_types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llvmlite import ir
from numba.cuda import types
from numba.cuda.core.errors import TypingError
from numba.cuda.cudadrv.linkable_code import PTXSource
from numba.cuda.extending import lower_builtin
from numba.cuda.typing.templates import AbstractTemplate, signature

__all__ = [
    "DeviceFunction",
    "Function",
    "Operand",
    "PtxFileError",
    "Result",
    "accept",
    "folder",
    "functions",
    "global_address",
    "link_files",
    "linked",
    "shared_address",
]


class PtxFileError(ValueError):
    """A file in ptx/ that the loader cannot read; the message names file, line and what was expected."""


class InlineOnlyError(TypingError):
    """A kernel calls through `ptx.linked` an instruction that works only inlined."""


# PTX type -> (Numba type, LLVM constraint letter, bits)
_TYPES = {
    "b32": (types.uint32, "r", 32),
    "u32": (types.uint32, "r", 32),
    "s32": (types.int32, "r", 32),
    "b64": (types.uint64, "l", 64),
    "u64": (types.uint64, "l", 64),
    "s64": (types.int64, "l", 64),
    "f32": (types.float32, "f", 32),
    "f64": (types.float64, "d", 64),
}
_KINDS = {
    "shared": "a shared address",
    "cluster": "a shared address in the cluster",
    "global": "a global address",
    "map": "a tensor map",
    "predicate": "a bool",
}


@dataclass(frozen=True)
class Operand:
    """One argument of a function.

    `kind` is 'shared', 'cluster', 'global', 'map', 'predicate', 'number' or 'immediate'; `type` the PTX type ('u32').
    An immediate also has the range of its values, both ends included.
    """

    name: str
    type: str
    kind: str
    note: str
    values: range | None = None

    @property
    def expected(self) -> str:
        """What a kernel may pass, in words."""
        if self.kind == "immediate":
            step = f" in steps of {self.values.step}" if self.values.step > 1 else ""
            return f"a literal integer, {self.values[0]} to {self.values[-1]}{step}"
        if self.kind == "number":
            return (
                f"a floating-point number ({self.type})"
                if self.type[0] == "f"
                else f"an integer ({self.type})"
            )
        if self.kind == "predicate":
            return "a bool"
        also = {
            "shared": "a shared array, or anything placed in a shared-memory plan",
            "cluster": "what mapa_shared_cluster returns, a shared array, or anything placed in a shared-memory plan",
            "global": "a device array, meaning its first element",
            "map": "a TensorMap argument of the kernel",
        }[self.kind]
        return f"{_KINDS[self.kind]}: an integer ({self.type}), {also}"


@dataclass(frozen=True)
class Result:
    """One value that a function returns: PTX type, the register that holds it, and whether it is a truth value."""

    type: str
    register: str
    predicate: bool

    @property
    def numba_type(self) -> types.Type:
        """The Numba type that the kernel sees."""
        return types.boolean if self.predicate else _TYPES[self.type][0]


@dataclass(frozen=True)
class Function:
    """One function of ptx/: what it takes, returns and needs, and its text.

    `architecture` is its file's `.target`; `inline_only` the reason why it cannot be linked, or None; `effect` is 'pure',
    'reads memory' or 'any'; `text` the PTX of this function alone, comment included; `line` where it, or the function
    that it is a variant of, begins in `file`; `module_header` the directives that make `text` a module.
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

    @property
    def return_type(self) -> types.Type:
        """The Numba type of a call: none, one value, or a tuple."""
        members = [result.numba_type for result in self.results]
        if not members:
            return types.none
        return members[0] if len(members) == 1 else types.BaseTuple.from_types(members)

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
            lines = (
                f"    {o.name}: {o.note[:1].lower()}{o.note[1:]}{'; ' if o.note else ''}{o.expected}."
                for o in self.operands
            )
            parts.append("Args:\n" + "\n".join(lines))
        if self.results:
            note = f": {self.result_note}" if self.result_note else ""
            parts.append(f"Returns:\n    {self.return_type}{note}.")
        if self.inline_only:
            parts.append(f"Inline only: {self.inline_only}.")
        parts.append(f"ptx/{self.file.name}, line {self.line}; {self.architecture} and newer.")
        return "\n\n".join(parts)

    @property
    def linkable(self) -> bool:
        """Whether it may be called through `ptx.linked`."""
        return self.inline_only is None

    def symbol(self, immediates: Mapping[str, int]) -> str:
        """Name of the linked function; one with immediates exists once for each of their values."""
        return "".join([self.name, *(f"${immediates[o.name]}" for o in self._immediates)])

    @property
    def _immediates(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.kind == "immediate"]

    def module(self, symbol: str) -> tuple[str, str]:
        """(name, text) of the PTX module that defines `symbol`: the file as it stands, or this variant alone."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Reading the files
# ---------------------------------------------------------------------------------------------------------------------


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
            raise _error(
                file, number, f"`//: {order}`: expected `pure`, `reads memory`, `inline only: …` or `a -> b`"
            )
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
    """What `//: key -> word without operands, word` says: the key, and its variants' words and left-out operands."""
    key, _, rest = order.partition(" -> ")
    variants = []
    for variant in rest.split(","):
        match = re.fullmatch(r"(\S+)(?: without (.+))?", variant.strip())
        if match is None:
            raise _error(
                file, number, f"`//: {order}`: expected `word` or `word without operands` between commas"
            )
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
    """A function as written (no choice) or a variant of it: for each rule the word and the operands left out."""

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
        return _without_last_comma(result)

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


@functools.cache
def _index() -> dict[str, _Member]:
    """All functions by name; their bodies are read when first asked for."""
    index: dict[str, _Member] = {}
    where = folder()
    for file in sorted(where.glob("*.ptx")):
        for name, member in _members(file):
            if name in index:
                raise _error(
                    file, member.written.line, f"{name} is also defined in {index[name].written.file.name}"
                )
            index[name] = member
    if not index:
        raise PtxFileError(f"no .ptx file in {where}")
    return index


def _members(file: Path) -> Iterator[tuple[str, _Member]]:
    """Every function that a file stands for, by name."""
    for written in _scan(file):
        for choice in itertools.product(*((None, *rule.variants) for rule in written.rules)):
            member = _Member(written, choice)
            yield member.name, member
        for rule in written.rules:
            if not re.search(rf"(?<![a-zA-Z0-9]){_underscored(rule.key)}(?![a-zA-Z0-9])", written.name):
                raise _error(
                    file,
                    written.line,
                    f"`//: {rule.key} -> …`: {written.name} has no `{rule.key}` in its name",
                )


# ---------------------------------------------------------------------------------------------------------------------
# One function
# ---------------------------------------------------------------------------------------------------------------------

_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(\w+)\s*,?\s*$")
_IMMEDIATE = re.compile(r"//\s*(\w+): immediate (\d+) to (\d+)(?: step (\d+))?(?:: (.*))?$")
_KIND = re.compile(r"(shared|cluster|global|map|predicate):\s*")
# Registers that the compiler itself names so: one of ours would hide it inside the braces of the inline text.
_RESERVED = re.compile(r"%((p|rs|r|rd|f|fd|rq|h|hh)\d+|SPL?)$")
_SPECIAL = re.compile(
    r"%(laneid|warpid|nwarpid|smid|nsmid|gridid|clock|clock64|clock_hi|globaltimer|globaltimer_lo|globaltimer_hi|tid|ntid"
    r"|ctaid|nctaid|lanemask_(eq|le|lt|ge|gt)|is_explicit_cluster|clusterid|nclusterid|cluster_(n?ctaid|n?ctarank)"
    r"|dynamic_smem_size|total_smem_size|aggr_smem_size|envreg\d+|pm\d+)$"
)


def _parse(member: _Member) -> Function:
    return _Parser(member).function()


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
        result = re.match(
            r"\(\s*\.param\s+(?:\.align\s+\d+\s+)?\.\w+\s+(\w+)(?:\[\d+\])?\s*\)\s*(?://\s*(.*))?", first
        )
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
                    f"cannot read {text!r}; expected `.param .u32 name,  // what it is` or `// N: immediate 0 to 7: …`",
                )
            if parameter[1] not in _TYPES:
                raise self.fail(
                    number, f".{parameter[1]} parameters are not supported; use one of {', '.join(_TYPES)}"
                )
            comment = comment.strip()
            kind = _KIND.match(comment)
            note = (comment[kind.end() :] if kind else comment).rstrip(".")
            operand = Operand(parameter[2], parameter[1], kind[1] if kind else "number", note)
        if keyword.iskeyword(operand.name) or any(o.name == operand.name for o in self.operands):
            raise self.fail(
                number, f"the parameter name {operand.name!r} is a Python keyword or taken already"
            )
        wide = {"global": 64, "map": 64, "shared": 32, "cluster": 32, "predicate": 32}.get(operand.kind)
        if wide is not None and _TYPES[operand.type][2] != wide:
            raise self.fail(
                number, f"{operand.name}: {_KINDS[operand.kind]} has {wide} bits, .{operand.type} has not"
            )
        return operand

    def _body(self, lines: list[tuple[int, str]], declared: str | None) -> list[str]:
        """The instructions as inline text, loads of parameters and stores of results turned into moves."""
        statements = []
        for number, line in lines:
            statement = line.split("//")[0].strip()
            if statement:
                if not statement.endswith(";"):
                    raise self.fail(number, f"{statement!r} does not end with `;`")
                statements.append((number, statement))
        if not statements or statements[-1][1] != "ret;":
            raise self.fail(lines[-1][0] if lines else self.written.line, "the last statement must be `ret;`")
        self._results(statements, declared)
        loaded: set[str] = set()
        stored = itertools.count()
        body = []
        for number, statement in statements[:-1]:
            if register := re.match(r"\.reg\s+\.(\w+)\s+(.*);", statement):
                for name in (n.strip() for n in register[2].split(",")):
                    if _RESERVED.match(name):
                        raise self.fail(
                            number, f"{name} is a name the compiler uses; give the register a telling one"
                        )
                    self.registers[name] = register[1]
                body.append(statement)
                continue
            for name in re.findall(r"%[a-zA-Z_]\w*", statement):
                if name not in self.registers and not _SPECIAL.match(name):
                    raise self.fail(number, f"{name} is neither declared with .reg nor a special register")
            if load := re.match(r"ld\.param\.(\w+)\s+(%\w+),\s*\[(\w+)\];", statement):
                body.append(self._load(number, *load.groups()))
                loaded.add(load[3])
            elif store := re.match(r"st\.param(?:\.v\d)?\.(\w+)\s+\[[^]]+\],\s*\{?([^}]*)\}?;", statement):
                body += [f"mov.{store[1]} ${next(stored)}, {name.strip()};" for name in store[2].split(",")]
            else:
                body.append(statement)
        for operand in self.operands:
            if operand.kind == "immediate":
                if not any(f"/*{operand.name}=*/" in statement for statement in body):
                    raise self.fail(
                        self.written.line, f"no instruction has the immediate `/*{operand.name}=*/`"
                    )
            elif operand.name not in loaded:
                raise self.fail(self.written.line, f"the parameter {operand.name} is never loaded")
        return body

    def _load(self, number: int, kind: str, register: str, name: str) -> str:
        names = [operand.name for operand in self.operands if operand.kind != "immediate"]
        if name not in names:
            raise self.fail(number, f"[{name}] is no parameter of this function")
        place = len(self.results) + names.index(name)
        declared = next(operand.type for operand in self.operands if operand.name == name)
        if kind in ("u16", "b16", "s16"):
            return f"cvt.u16.u32 {register}, ${place};"
        if kind not in _TYPES or _TYPES[kind][2] != _TYPES[declared][2]:
            raise self.fail(number, f"ld.param.{kind} of {name}, which is declared .{declared}")
        return f"mov.{kind} {register}, ${place};"

    def _results(self, statements: list[tuple[int, str]], declared: str | None) -> None:
        for number, statement in statements:
            store = re.match(r"st\.param(?:\.v\d)?\.(\w+)\s+\[(\w+)[^]]*\],\s*\{?([^}]*)\}?;", statement)
            if store is None:
                continue
            if store[2] != declared:
                raise self.fail(number, f"[{store[2]}] is not the declared result ({declared})")
            if store[1] not in _TYPES:
                raise self.fail(
                    number, f".{store[1]} results are not supported; use one of {', '.join(_TYPES)}"
                )
            for register in (name.strip() for name in store[3].split(",")):
                chosen = re.compile(rf"selp\.\w+\s+{register},\s*1,\s*0,")
                predicate = any(chosen.match(text) for _, text in statements)
                self.results.append(Result(store[1], register, predicate))
        if declared is not None and not self.results:
            raise self.fail(self.written.line, f"the result {declared} is never stored with st.param")
        if len({result.type for result in self.results}) > 1 or len(self.results) not in (0, 1, 2, 4):
            raise self.fail(self.written.line, "results must be one, two or four values of one type")


@functools.cache
def _function(name: str) -> Function:
    return _parse(_index()[name])


def functions() -> dict[str, Function]:
    """All functions of ptx/ by name.

    Raises:
        PtxFileError: a file cannot be read; the message names file and line.
    """
    return {name: _function(name) for name in _index()}


# ---------------------------------------------------------------------------------------------------------------------
# Operands
# ---------------------------------------------------------------------------------------------------------------------

Lower = Callable[[object, ir.IRBuilder, types.Type, ir.Value], ir.Value]
_accepted: dict[str, dict[type, Lower]] = {"shared": {}, "global": {}, "tensor_map": {}}
_PROTOCOL = {"shared": "shared", "cluster": "shared", "global": "global", "map": "tensor_map"}


def accept(kind: str, numba_type_class: type, lower: Lower) -> None:
    """Let values of a Numba type stand for an address.

    Args:
        kind: 'shared' (a 32-bit address; also taken where an address in the cluster is asked for), 'global' or
            'tensor_map' (64-bit addresses).
        numba_type_class: the Numba type's class; subclasses are accepted too.
        lower: `lower(context, builder, numba_type, value)`, which returns the address as an LLVM i32 or i64.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in _accepted:
        raise ValueError(f"kind {kind!r}: expected one of {', '.join(map(repr, _accepted))}")
    _accepted[kind][numba_type_class] = lower


def _lowering(kind: str, numba_type: types.Type) -> Lower | None:
    registered = _accepted.get(_PROTOCOL.get(kind, ""), {})
    for base in type(numba_type).__mro__:
        if base in registered:
            return registered[base]
    return None


def _array_address(space: int, bits: int) -> Lower:
    """Address of an array's first element in one state space; the array's pointer itself is generic.

    Numba's array type does not say where the array lives, so a global array given for a shared address is not an
    error here: the address is wrong, and the simulator reports the access.
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
    wrong = TypingError(
        f"ptx.{name}: argument {position + 1}, {operand.name!r}, must be {operand.expected}; found {found}"
    )
    plain = types.unliteral(found)
    if operand.kind == "immediate":
        if not isinstance(found, types.IntegerLiteral) or found.literal_value not in operand.values:
            raise wrong
        return found
    if operand.kind == "predicate":
        if not isinstance(plain, types.Boolean):
            raise wrong
        return types.boolean
    if _lowering(operand.kind, plain) is not None:
        return plain
    wanted = _TYPES[operand.type][0]
    if isinstance(wanted, types.Float):
        if not isinstance(plain, types.Float):
            raise wrong
    elif not isinstance(plain, types.Integer) or isinstance(plain, types.Boolean):
        raise wrong
    return wanted


def _operand_value(context, builder, operand: Operand, numba_type: types.Type, value):
    lower = _lowering(operand.kind, numba_type)
    if lower is not None:
        return lower(context, builder, numba_type, value)
    if operand.kind == "predicate":
        return builder.zext(value, ir.IntType(32))
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Device functions
# ---------------------------------------------------------------------------------------------------------------------


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
            "prefer_literal": any(operand.kind == "immediate" for operand in function.operands),
            "generic": lambda template, args, kws: self._type(args, kws),
        }
        self._numba_type_ = types.Function(type(f"ptx_{function.name}", (AbstractTemplate,), template))
        lower_builtin(self, types.VarArg(types.Any))(self._lower)

    def __call__(self, *args: object, **kws: object) -> None:
        raise TypeError(
            f"ptx.{self.__name__} is one PTX instruction and works only inside a kernel: call it from a function that Numba "
            f"compiles"
        )

    def __repr__(self) -> str:
        return f"<ptx{'.linked' if self.linked else ''}.{self.__name__}{self.__signature__}>"

    def __reduce__(self):
        return _device_function, (self.__name__, self.linked)

    def _type(self, args, kws):
        name, operands = self.function.name, self.function.operands
        if self.linked and not self.function.linkable:
            raise InlineOnlyError(
                f"ptx.linked.{name}: {name} works only inlined, as ptx.{name}: {self.function.inline_only}"
            )
        try:
            given = self.__signature__.bind(*args, **kws).args
        except TypeError as error:
            raise TypingError(f"ptx.{name}{self.__signature__}: {error}") from None
        checked = [_check(name, i, o, t) for i, (o, t) in enumerate(zip(operands, given, strict=True))]
        return signature(self.function.return_type, *checked).replace(pysig=self.__signature__)

    def _lower(self, context, builder, sig, args):
        function = self.function
        immediates, values = {}, []
        for operand, numba_type, value in zip(function.operands, sig.args, args, strict=True):
            if operand.kind == "immediate":
                immediates[operand.name] = numba_type.literal_value
            else:
                values.append(_operand_value(context, builder, operand, numba_type, value))
        emit = self._emit_call if self.linked else self._emit_inline
        results = emit(context, builder, immediates, values)
        results = [
            builder.icmp_unsigned("!=", value, value.type(0)) if result.predicate else value
            for result, value in zip(function.results, results, strict=True)
        ]
        if not results:
            return context.get_dummy_value()
        return results[0] if len(results) == 1 else context.make_tuple(builder, sig.return_type, results)

    def _emit_inline(self, context, builder, immediates, values) -> list[ir.Value]:
        function = self.function
        kinds = [_llvm_type(result.type) for result in function.results]
        returned = (
            ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
        )
        inputs = [o for o in function.operands if o.kind != "immediate"]
        constraints = [f"={_TYPES[result.type][1]}" for result in function.results]
        constraints += [_TYPES[operand.type][1] for operand in inputs]
        attributes = {"pure": ("nounwind", "readnone"), "reads memory": ("nounwind", "readonly")}
        if function.effect == "any":
            constraints.append("~{memory}")
        asm = ir.InlineAsm(
            ir.FunctionType(returned, [value.type for value in values]),
            function.inline_text(immediates),
            ",".join(constraints),
            side_effect=function.effect == "any",
        )
        # Convergent: the compiler must not make the call depend on more or fewer threads than the program does.
        call = builder.call(asm, values, attrs=attributes.get(function.effect, ("nounwind", "convergent")))
        return [call] if len(kinds) == 1 else [builder.extract_value(call, i) for i in range(len(kinds))]

    def _emit_call(self, context, builder, immediates, values) -> list[ir.Value]:
        function = self.function
        symbol = function.symbol(immediates)
        kinds = [_llvm_type(result.type) for result in function.results]
        # A vector is returned in memory aligned to its size, which is how the .ptx files declare it.
        returned = (
            ir.VoidType()
            if not kinds
            else kinds[0]
            if len(kinds) == 1
            else ir.VectorType(kinds[0], len(kinds))
        )
        wanted = ir.FunctionType(returned, [value.type for value in values])
        declared = builder.module.globals.get(symbol)
        if declared is None:
            declared = ir.Function(builder.module, wanted, symbol)
            declared.attributes.add("convergent")
        # For kernels that Numba itself links and launches; compile.py finds the same module by the symbol.
        context.active_code_library.add_linking_file(_linkable(*function.module(symbol)))
        call = builder.call(declared, values)
        if len(kinds) == 1:
            return [call]
        return [builder.extract_element(call, ir.IntType(32)(i)) for i in range(len(kinds))]


def _llvm_type(ptx_type: str) -> ir.Type:
    if ptx_type[0] == "f":
        return ir.FloatType() if ptx_type == "f32" else ir.DoubleType()
    return ir.IntType(_TYPES[ptx_type][2])


@functools.cache
def _linkable(name: str, text: str) -> PTXSource:
    # One object a module: Numba collects them in a set, and the same text twice would define its functions twice.
    return PTXSource(text.encode(), name=name)


@functools.cache
def _device_function(name: str, linked: bool) -> DeviceFunction:
    return DeviceFunction(_function(name), linked=linked)


class _Address(DeviceFunction):
    """The address of an array, tile or barrier as a number, to do arithmetic on."""

    def __init__(self, kind: str, bits: int) -> None:
        operand = Operand("value", f"u{bits}", kind, "")
        function = Function(
            name=f"{kind}_address",
            file=Path(__file__),
            line=0,
            doc=f"The {kind} address of `value` as a uint{bits}.",
            operands=(operand,),
            results=(Result(f"u{bits}", "", False),),
            result_note="the address in bytes",
            architecture="sm_70",
            inline_only="it is no instruction",
            effect="pure",
            text="",
            module_header="",
            standing=True,
            body=(),
        )
        super().__init__(function, linked=False)
        self.__doc__ = f"{function.doc} `value` is {operand.expected}. Works only inside a kernel."

    def __reduce__(self):
        return self.__name__

    def _emit_inline(self, context, builder, immediates, values) -> list[ir.Value]:
        return values


shared_address = _Address("shared", 32)
global_address = _Address("global", 64)


class _Linked(python_types.ModuleType):
    """The functions of ptx/ as calls: the kernel calls them, and their text is linked to it as it stands.

    A call costs registers and time; it is meant for reading, and for showing that the files are real modules.
    """

    def __getattr__(self, name: str) -> DeviceFunction:
        if name.startswith("__") or name not in _index():
            raise AttributeError(f"ptx.linked has no function {name!r}{_similar(name)}")
        return _device_function(name, True)

    def __dir__(self) -> list[str]:
        return [name for name, member in _index().items() if member.written.inline_only is None]


linked = _Linked(f"{__name__}.linked", _Linked.__doc__)


def _similar(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, _index(), n=3)
    return f"; did you mean {', '.join(close)}?" if close else ""


def __getattr__(name: str) -> DeviceFunction:
    if name.startswith("__") or name not in _index():
        raise AttributeError(f"module {__name__!r} has no function {name!r}{_similar(name)}")
    return _device_function(name, False)


def __dir__() -> list[str]:
    return sorted([*__all__, *_index()])


_EXTERN = re.compile(r"\.extern\s+\.func\s*(?:\([^)]*\))?\s*([\w$]+)")


def link_files(ptx_text: str) -> list[tuple[str, str]]:
    """The modules, as (name, PTX text), that a kernel's PTX needs because it calls their functions.

    A function as written brings its file as it stands; a variant, or one with immediates, a module of its own. All
    of them go to the linker beside the kernel's PTX.
    """
    modules: dict[str, str] = {}
    for symbol in _EXTERN.findall(ptx_text):
        name = symbol.split("$")[0]
        if name in _index():
            module, text = _function(name).module(symbol)
            modules[module] = text
    return list(modules.items())

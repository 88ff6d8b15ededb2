"""A kernel's PTX line by line: what each line is, which Python lines it came from, and which function of ptx/ it is.

The compiler's `.loc` directives say of an instruction which Python line it is of, and where that was inlined. Of some
it says nothing, mostly of those that it moved out of a loop or made up: these get the lines of the first instruction
that uses their result, and are marked as such.
"""

from __future__ import annotations

import bisect
import dataclasses
import linecache
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from .. import ptx_files, sim
from ..compile import Compiled
from ..ptx_files import Function
from ..sim.module import Function as PtxFunction
from ..sim.module import Instruction, Register
from . import snippets

# Opcodes whose first operand is read, not written.
_NO_RESULT = frozenset(
    ("st", "red", "bra", "brx", "ret", "exit", "trap", "bar", "barrier", "fence", "membar", "cp", "prefetch", "wgmma")
    + ("setmaxnreg", "stmatrix", "tensormap", "griddepcontrol", "nanosleep", "multimem")
)
_MOVE = re.compile(r"mov\.\w+\s+(?:%[\w]+,\s*%(?:p|rs|r|rd|f|fd)\d+|%(?:p|rs|r|rd|f|fd)\d+,\s*%\w+);$")


@dataclass(frozen=True)
class Place:
    """A line of Python."""

    file: str
    line: int


@dataclass(frozen=True)
class Inlined:
    """A use of a function of ptx/: lines `first` to `last` are its text. `function` is None if it is not from there."""

    first: int
    last: int
    function: Function | None


@dataclass(frozen=True)
class PtxLine:
    """One line of PTX.

    `number` counts in the module's text from 1. `mnemonic` is '' where there is no instruction. `places` are the Python
    lines that it came from, the innermost first, then the calls around it; `by_use` says that the compiler named none,
    and that they are those of the line that uses the result. `inlined` is an index into the listing's `inlined`, or
    None. `is_move` is a move between the compiler's registers and those of an inlined function, or a declaration there.
    """

    number: int
    text: str
    mnemonic: str
    places: tuple[Place, ...] = ()
    by_use: bool = False
    inlined: int | None = None
    is_move: bool = False


@dataclass(frozen=True)
class PtxListing:
    """The PTX of one function: the kernel, or a function of ptx/ that it calls."""

    name: str
    title: str
    lines: tuple[PtxLine, ...]
    inlined: tuple[Inlined, ...]

    @property
    def instructions(self) -> tuple[PtxLine, ...]:
        """The lines that have an instruction."""
        return tuple(line for line in self.lines if line.mnemonic)


def listings(compiled: Compiled, entry: Place, named: Container[str] = ()) -> list[PtxListing]:
    """The kernel's PTX, then that of the functions of ptx/ that it calls.

    `entry` is the line of the kernel's `def`, to which its end belongs. `named` are functions of ptx/ that the kernel
    has under another name.
    """
    kernel = _kernel(compiled, entry, named)
    result, wanted = [kernel], _calls(kernel.lines)
    modules = [(name, text, sim.parse(text, name)) for name, text in compiled.modules]
    done: set[str] = set()
    while wanted:
        called, places = wanted.popitem()
        done.add(called)
        for name, text, module in modules:
            function = module.functions.get(called)
            if function is not None and function.defined:
                listing = _linked(name, text, function, places)
                result.append(listing)
                inner = _calls(listing.lines)
                wanted |= {callee: places for callee in inner if callee not in done}
    return result


def _calls(lines: Sequence[PtxLine]) -> dict[str, tuple[Place, ...]]:
    """Names of the functions called, with the Python lines of their calls."""
    found: dict[str, dict[Place, None]] = {}
    for number, line in enumerate(lines):
        if line.mnemonic.split(".")[0] == "call":
            text = " ".join(part.text for part in lines[number : number + 8])
            called = re.search(r"call[\w.]*\s+(?:\([^)]*\)\s*,\s*)?([\w$]+)", text)
            if called:
                found.setdefault(called[1], {}).update(dict.fromkeys(line.places))
    return {name: tuple(places) for name, places in found.items()}


def _kernel(compiled: Compiled, entry: Place, named: Container[str]) -> PtxListing:
    texts = compiled.ptx.split("\n")
    function = sim.parse(compiled.ptx, f"{compiled.name}.ptx").entries[compiled.name]
    places, guessed = _places(function.body, entry)
    found = list(snippets.find(texts))
    lines = list(_lines(texts, function, places, guessed, found))
    inlined = [Inlined(s.first, s.last, _chosen(s, lines, named)) for s in found]
    last = _closing(texts, function)
    first = next((n for n, text in enumerate(texts, 1) if text.startswith(".version")), 1)
    shown = [line for line in lines if first <= line.number <= last and _worth_showing(line.text)]
    # What opens and closes the function belongs to the `def`.
    brace = next(line.number for line in lines if line.number >= function.line and line.text == "{")
    shown = [dataclasses.replace(line, places=(entry,)) if line.number == brace else line for line in shown]
    return PtxListing(compiled.name, f"{compiled.name}.ptx", tuple(shown), tuple(inlined))


def _linked(name: str, text: str, function: PtxFunction, places: tuple[Place, ...]) -> PtxListing:
    """A function of ptx/ that is called; its lines belong to the Python lines that call it."""
    texts = text.split("\n")
    last = _closing(texts, function)
    first = function.line
    while first > 1 and texts[first - 2].startswith("//"):
        first -= 1
    known = ptx_files.function(function.name.split("$")[0])
    by_line = {instruction.line: instruction for instruction in function.body}
    lines = []
    for number in range(first, last + 1):
        instruction = by_line.get(number)
        lines.append(
            PtxLine(
                number,
                texts[number - 1].strip() if instruction else texts[number - 1].rstrip(),
                instruction.mnemonic if instruction else "",
                places if instruction else (),
                inlined=0,
            )
        )
    return PtxListing(function.name, f"ptx/{name}", tuple(lines), (Inlined(first, last, known),))


def _closing(texts: Sequence[str], function: PtxFunction) -> int:
    """The line of the function's last brace, which stands at the start of a line."""
    start = function.body[-1].line if function.body else function.line
    return next((n for n in range(start, len(texts) + 1) if texts[n - 1].startswith("}")), len(texts))


def _worth_showing(text: str) -> bool:
    return bool(text) and not text.startswith((".loc", ".file", "// .globl", snippets.BEGIN, snippets.END))


def _lines(
    texts: Sequence[str],
    function: PtxFunction,
    places: Sequence[tuple[Place, ...]],
    guessed: Sequence[bool],
    found: Sequence[snippets.Snippet],
) -> Iterator[PtxLine]:
    by_line = {instruction.line: index for index, instruction in enumerate(function.body)}
    starts = [snippet.first for snippet in found]
    previous: PtxLine | None = None
    for number, text in enumerate(texts, 1):
        text = text.strip()
        index = by_line.get(number)
        position = bisect.bisect_right(starts, number) - 1
        inside = position if position >= 0 and number <= found[position].last else None
        if index is not None:
            instruction = function.body[index]
            is_move = inside is not None and _MOVE.match(text) is not None
            line = PtxLine(number, text, instruction.mnemonic, places[index], guessed[index], inside, is_move)
        elif previous is not None and previous.text and not re.search(r"[;{}:]$", previous.text) and previous.places:
            # The instruction before goes on over this line.
            line = PtxLine(number, text, "", previous.places, previous.by_use, inside)
        else:
            line = PtxLine(number, text, "", inlined=inside, is_move=inside is not None and text[:1] in (".", "{", "}"))
        previous = line
        yield line


def _places(body: Sequence[Instruction], entry: Place) -> tuple[list[tuple[Place, ...]], list[bool]]:
    """The Python lines of each instruction, and whether they are those of the first that uses its result."""
    places: list[tuple[Place, ...]] = []
    for instruction in body:
        chain = instruction.location.chain() if instruction.location is not None else ()
        places.append(tuple(Place(place.file, place.line) for place in chain))
    unnamed = [not chain for chain in places]
    readers: dict[str, list[int]] = {}
    for index, instruction in enumerate(body):
        for name in _read(instruction):
            readers.setdefault(name, []).append(index)
    # From the end, so that a chain of such instructions resolves; what nobody reads later is read in the next turn of
    # a loop.
    for index in range(len(body) - 1, -1, -1):
        if places[index]:
            continue
        users = [user for name in _written(body[index]) for user in readers.get(name, ()) if user != index]
        users.sort(key=lambda user: (user < index, user))
        places[index] = next((places[user] for user in users if places[user]), ())
        if not places[index] and body[index].opcode in ("ret", "exit"):
            places[index] = (entry,)  # the end of the kernel
    return places, [bool(guess and chain) for guess, chain in zip(unnamed, places, strict=True)]


def _written(instruction: Instruction) -> set[str]:
    if instruction.opcode == "call":
        return _registers(instruction.operands[1])
    if instruction.opcode in _NO_RESULT or not instruction.operands:
        return set()
    return _registers(instruction.operands[0])


def _read(instruction: Instruction) -> set[str]:
    names = {instruction.guard[0].name} if instruction.guard else set()
    operands = instruction.operands if instruction.opcode in _NO_RESULT else instruction.operands[1:]
    return names.union(*(_registers(operand) for operand in operands))


def _registers(operand: object) -> set[str]:
    """Names of the registers in an operand, however deep."""
    if isinstance(operand, Register):
        return set() if operand.special else {operand.name}
    if isinstance(operand, tuple):
        return set().union(*(_registers(member) for member in operand))
    if dataclasses.is_dataclass(operand):
        return _registers(tuple(getattr(operand, field.name) for field in dataclasses.fields(operand)))
    return set()


def _chosen(snippet: snippets.Snippet, lines: Sequence[PtxLine], named: Container[str]) -> Function | None:
    """Of functions with the same text the one that the Python line names, else one that the kernel has, else any."""
    if len(snippet.candidates) < 2:
        return snippet.candidates[0] if snippet.candidates else None
    inside = lines[snippet.first : snippet.last]
    for place in dict.fromkeys(place for line in inside for place in line.places):
        words = set(re.findall(r"\w+", linecache.getline(place.file, place.line)))
        for function in snippet.candidates:
            if function.name in words:
                return function
    return next((function for function in snippet.candidates if function.name in named), snippet.candidates[0])

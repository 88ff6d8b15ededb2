"""A kernel explained as text: under each Python line the PTX that it became, and beside that the SASS."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterator, Sequence

from pygments.lexer import Lexer
from tabulate import tabulate

from . import lexers
from .explanation import Explanation
from .figures import figures
from .kinds import KINDS
from .ptx_listing import Place, PtxLine, PtxListing
from .python_source import Section
from .sass_listing import SassLine

# Codes of ECMA-48 for the classes of lexers.py.
_CODES = {"k": 35, "s": 32, "m": 33, "c": 90, "d": 90, "f": 34, "b": 36, "g": 31, "l": 33, "u": 36}
_MARGIN = 6  # of line numbers
_NARROWEST = 40


class _Painter:
    """Colours text, or leaves it as it is."""

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def code(self, code: int, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.colour and text else text

    def line(self, tokens: Sequence[tuple[str, str]]) -> str:
        return "".join(self.code(_CODES[kind], text) if kind in _CODES else text for kind, text in tokens)

    def text(self, text: str, lexer: Lexer) -> str:
        return self.line(lexers.lines(text, lexer)[0])


def text(explanation: Explanation, *, width: int = 160, colour: bool = False) -> str:
    """The explanation in lines of `width` characters (at least 100)."""
    painter = _Painter(colour)
    lines = [*_heading(explanation, painter), "", _counts([explanation])]
    if explanation.coverage.by_use:
        lines += ["", "~ marks PTX of which the compiler names no line: it stands where its result is used."]
    sass: dict[tuple[str, int | None], list[SassLine]] = {}
    for listing in explanation.sass:
        for line in listing.instructions:
            sass.setdefault((listing.name, line.ptx), []).append(line)
    origins = _origins(explanation, sass)
    half = max(width - _MARGIN, 2 * _NARROWEST) // 2
    for section in explanation.python:
        lines += ["", *_section_heading(section, painter)]
        coloured = lexers.lines("\n".join(section.lines), lexers.PythonLexer(stripnl=False))
        for number, tokens in enumerate(coloured, section.first):
            lines.append(f"{painter.code(90, f'{number:>{_MARGIN - 1}}')} {painter.line(tokens)}".rstrip())
            lines += _instructions(origins.pop(Place(section.file, number), []), sass, half, painter)
    homeless = [found for found in origins.values() if found]
    if homeless:
        lines += ["", painter.code(1, "of no Python line")]
        lines += [line for found in homeless for line in _instructions(found, sass, half, painter)]
    return "\n".join(lines) + "\n"


def comparison(explanation: Explanation, other: Explanation, *, colour: bool = False) -> str:
    """What differs between two kernels: their Python, then their instructions by kind."""
    painter = _Painter(colour)
    lines = [*_heading(explanation, painter), "", *_heading(other, painter), ""]
    old, new = (_source(side.python) for side in (explanation, other))
    for line in difflib.unified_diff(old, new, explanation.title, other.title, n=3, lineterm=""):
        lines.append(painter.code({"+": 32, "-": 31, "@": 36}.get(line[0], 0), line) if line[0] != " " else line)
    return "\n".join([*lines, "", _counts([explanation, other])]) + "\n"


def _source(sections: Sequence[Section]) -> list[str]:
    """All functions' lines; those after the kernel by name, so that what two kernels share is at one place."""
    ordered = [sections[0], *sorted(sections[1:], key=lambda section: section.name)]
    return [line for section in ordered for line in (*section.lines, "")]


def _heading(explanation: Explanation, painter: _Painter) -> Iterator[str]:
    yield painter.code(1, explanation.title) + (f"  {explanation.idea}" if explanation.idea else "")
    yield ", ".join(f"{name} {value}" for name, value, _ in figures(explanation))


def _section_heading(section: Section, painter: _Painter) -> Iterator[str]:
    yield f"{painter.code(1, section.name)}  {painter.code(90, section.shown_file)}"
    if section.constants:
        yield painter.code(90, ", ".join(f"{name} = {value}" for name, value in section.constants))


def _counts(sides: Sequence[Explanation]) -> str:
    counts = [side.counts for side in sides]
    names = [side.short_title for side in sides] if len(sides) > 1 else [""]
    headers = ["instructions", *(f"PTX {name}".strip() for name in names), *(f"SASS {name}".strip() for name in names)]
    kinds = [kind for kind in KINDS if any(kind in count for count in counts)]
    rows = [[kind, *(count.get(kind, (0, 0))[which] or "" for which in (0, 1) for count in counts)] for kind in kinds]
    return tabulate(rows, headers)


def _origins(
    explanation: Explanation, sass: Container[tuple[str, int | None]]
) -> dict[Place | None, list[tuple[PtxListing, PtxLine]]]:
    """The lines of PTX that are instructions, or became some, by the Python line that they came from, the innermost."""
    result: dict[Place | None, list[tuple[PtxListing, PtxLine]]] = {}
    for listing in explanation.ptx:
        for line in listing.lines:
            if line.mnemonic or (listing.name, line.number) in sass:
                result.setdefault(line.places[0] if line.places else None, []).append((listing, line))
    return result


def _instructions(
    found: Sequence[tuple[PtxListing, PtxLine]],
    sass: dict[tuple[str, int | None], list[SassLine]],
    half: int,
    painter: _Painter,
) -> Iterator[str]:
    opened = None
    for listing, line in found:
        name = ""
        if line.inlined is not None and (listing.name, line.inlined) != opened:
            function = listing.inlined[line.inlined].function
            name = f"ptx.{function.name}" if function else "inline PTX"
            opened = (listing.name, line.inlined)
            yield " " * _MARGIN + painter.code(1, name)
        became = sass.get((listing.name, line.number), [])
        if line.is_move and not became:
            continue
        left = _clipped(" ".join(line.text.split()), half - 8)
        for row in range(max(len(became), 1)):
            ptx = painter.text(left, lexers.PtxLexer(stripnl=False)) if row == 0 else ""
            number = painter.code(90, f"{line.number:>5}{'~' if line.by_use else ' '}" if row == 0 else " " * 6)
            machine = ""
            if became:
                address = painter.code(90, f"{became[row].address:04x} ")
                machine = address + painter.text(_clipped(became[row].text, half - 6), lexers.SassLexer(stripnl=False))
            padding = " " * (half - 6 - (len(left) if row == 0 else 0))
            yield f"{' ' * _MARGIN}{number}{ptx}{padding if machine else ''}{machine}"


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"

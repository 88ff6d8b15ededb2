"""The Python column of a page: the functions of one kernel, or the difference of those of two."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import lexers
from .explanation import Explanation
from .ptx_listing import Place
from .python_source import Section

HUES = 24
_Tokens = list[tuple[str, str]]


@dataclass(frozen=True)
class Row:
    """A line of the first kernel, of the second, or of both; or the head of a function, which has the function itself.

    `tokens` are its text without the `indentation`; `numbers` the line's number in each kernel, None where one has it
    not.
    """

    tokens: _Tokens
    indentation: int = 0
    numbers: tuple[int | None, ...] = ()
    head: tuple[Section, ...] = ()

    @property
    def constants(self) -> str:
        """Of a head: what the function takes from around it, and how that differs between two kernels."""
        values: dict[str, list[str]] = {}
        for section in self.head:
            for name, value in section.constants:
                values.setdefault(name, []).append(value)
        return ", ".join(f"{name} = {' → '.join(dict.fromkeys(found))}" for name, found in sorted(values.items()))


class Rows:
    """The rows of one kernel or two, and where among them a Python line stands."""

    def __init__(self, sides: Sequence[Explanation]) -> None:
        self.rows: list[Row] = []
        self.places: list[dict[Place, int]] = [{} for _ in sides]
        self.files: list[tuple[int, str]] = []  # the row from which on a file's lines stand
        self.hues: dict[int, int] = {}
        pairs = [(section,) for section in sides[0].python] if len(sides) == 1 else _paired(*sides)
        for pair in pairs:
            self._add(pair)

    def _add(self, pair: Sequence[Section | None]) -> None:
        head = tuple(section for section in pair if section is not None)
        self.files.append((len(self.rows), head[-1].shown_file))
        self.rows.append(Row([("", " → ".join(dict.fromkeys(section.name for section in head)))], head=head))
        for numbers, tokens in _merged(pair):
            for places, section, number in zip(self.places, pair, numbers, strict=True):
                if section is not None and number is not None:
                    places[Place(section.file, number)] = len(self.rows)
            self.rows.append(Row(*_stripped(tokens), numbers))

    def chain(self, side: int, places: Sequence[Place]) -> tuple[int, ...]:
        """The rows of a line's places, innermost first."""
        return tuple(self.places[side][place] for place in places if place in self.places[side])

    def hue(self, chain: Sequence[int]) -> int:
        """The colour of what belongs to a line of the kernel, the outermost of the chain: one of `HUES`."""
        return self.hues.setdefault(chain[-1], len(self.hues) % HUES)


def _stripped(tokens: _Tokens) -> tuple[_Tokens, int]:
    """A line without its indentation, and how much that is."""
    text = "".join(part for _, part in tokens)
    left = indentation = len(text) - len(text.lstrip())
    result = []
    for letter, part in tokens:
        kept = part[left:]
        left -= len(part) - len(kept)
        if kept:
            result.append((letter, kept))
    return result, indentation


def _merged(pair: Sequence[Section | None]) -> Iterator[tuple[tuple[int | None, ...], _Tokens]]:
    """The lines of one section, or the difference of two: the line's number in each, and its tokens."""
    coloured = [lexers.lines("\n".join(s.lines), lexers.PythonLexer(stripnl=False)) if s else [] for s in pair]
    if len(pair) == 1:
        for number, tokens in enumerate(coloured[0], pair[0].first):
            yield (number,), tokens
        return
    before, after = (s.lines if s else () for s in pair)
    first, second = (s.first if s else 0 for s in pair)
    for tag, a0, a1, b0, b1 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            for a, b in zip(range(a0, a1), range(b0, b1), strict=True):
                yield (first + a, second + b), coloured[1][b]
            continue
        for a in range(a0, a1):
            yield (first + a, None), coloured[0][a]
        for b in range(b0, b1):
            yield (None, second + b), coloured[1][b]


def _paired(first: Explanation, second: Explanation) -> list[tuple[Section | None, Section | None]]:
    """The functions of two kernels: kernel with kernel, then those of one name, what differs before what does not."""
    old, new = list(first.python), list(second.python)
    pairs: list[tuple[Section | None, Section | None]] = [(old.pop(0), new.pop(0))]
    for section in old:
        alike = [other for other in new if (other.file, other.name) == (section.file, section.name)]
        # Of several functions of this name rather the very same one.
        alike.sort(key=lambda other, section=section: other.first != section.first)
        if alike:
            new.remove(alike[0])
        pairs.append((section, alike[0] if alike else None))
    pairs += [(None, section) for section in new]
    return [pairs[0], *sorted(pairs[1:], key=lambda pair: None not in pair and pair[0].lines == pair[1].lines)]

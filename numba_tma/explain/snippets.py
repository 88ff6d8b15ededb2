"""Which function of ptx/ a stretch of inlined PTX is.

NVVM prints inline assembly as it was given, between two comments, with registers in place of `$0`, `$1` …; so a stretch
is recognised by its text: equal to a function's but for registers and the values of immediates.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import ptx_files
from ..ptx_files import Function

BEGIN, END = "// begin inline asm", "// end inline asm"
# What stands for an operand: in the file's text a place, in the compiler's one of its registers.
_OPERAND = re.compile(r"\$\d+|%(?:p|rs|r|rd|f|fd|rq|h|hh)\d+\b")
_IMMEDIATE = re.compile(r"/\*\w+=\*/\s*\d+")
_NUMBER = re.compile(r"(?<![\w%.:#])\d+\b")


@dataclass(frozen=True)
class Snippet:
    """Inlined PTX between the lines `first` and `last`, which carry the compiler's comments.

    `candidates` are the functions of ptx/ with just this text; none if it is somebody else's.
    """

    first: int
    last: int
    candidates: tuple[Function, ...]


def find(lines: Sequence[str]) -> Iterator[Snippet]:
    """The stretches of inlined PTX in a module's lines, whose numbers begin at 1."""
    first = None
    for number, line in enumerate(lines, 1):
        if line.strip() == BEGIN:
            first = number
        elif line.strip() == END and first is not None:
            yield Snippet(first, number, _recognised(lines[first : number - 1]))
            first = None


def _recognised(lines: Sequence[str]) -> tuple[Function, ...]:
    body = [line.strip() for line in lines if line.strip() not in ("{", "}", "")]
    form, numbers = _form("\n".join(body))
    return tuple(function for function, constants in _known().get(form, ()) if _agree(constants, numbers))


def _form(text: str) -> tuple[str, list[str]]:
    """The text without what may differ between two uses, and its numbers, '#' for those that may."""
    text = _IMMEDIATE.sub("#", _OPERAND.sub("·", text))
    numbers = re.findall(rf"#|{_NUMBER.pattern}", text)
    return _NUMBER.sub("#", text), numbers


def _agree(constants: Sequence[str], numbers: Sequence[str]) -> bool:
    return all(constant in ("#", number) for constant, number in zip(constants, numbers, strict=True))


@functools.cache
def _known() -> dict[str, list[tuple[Function, list[str]]]]:
    """All functions of ptx/ by the form of their text."""
    known: dict[str, list[tuple[Function, list[str]]]] = {}
    for function in ptx_files.functions().values():
        form, numbers = _form("\n".join(function.body))
        known.setdefault(form, []).append((function, numbers))
    return known

"""The Python functions that a kernel consists of, as source: the kernel, then what was inlined into it."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..ptx import DeviceFunction
from .ptx_listing import Place

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Section:
    """One function: lines `first` and on of `file`, without the indentation that all of them share.

    `constants` are the values that the function takes from around it, which the compiler treats as constants.
    """

    name: str
    file: str
    first: int
    lines: tuple[str, ...]
    constants: tuple[tuple[str, str], ...] = ()

    @property
    def last(self) -> int:
        """Number of the last line."""
        return self.first + len(self.lines) - 1

    @property
    def shown_file(self) -> str:
        """The file as one would name it: relative to this package's folder or the current one, else its name."""
        path = Path(self.file)
        for root in (Path(__file__).resolve().parents[2], Path.cwd()):
            if path.is_absolute() and path.is_relative_to(root):
                return path.relative_to(root).as_posix()
        return path.name

    def __contains__(self, place: Place) -> bool:
        return place.file == self.file and self.first <= place.line <= self.last


def entry(function: Callable) -> Place:
    """The line of a function's `def`."""
    code = function.__code__
    node = next((n for n in _defined(code.co_filename) if _first(n) == code.co_firstlineno), None)
    return Place(code.co_filename, node.lineno if node is not None else code.co_firstlineno)


def ptx_functions(function: Callable) -> set[str]:
    """Names of the functions of ptx/ that a kernel, or what it calls, has under a name of its own."""
    taken = (value for found in _reachable(function) for value in _taken(found).values())
    return {value.function.name for value in taken if isinstance(value, DeviceFunction)}


def sections(function: Callable, places: Iterable[Place]) -> list[Section]:
    """The kernel's section, then one for each further function that has a line in `places`, in that order."""
    constants = {(f.__code__.co_filename, f.__code__.co_firstlineno): _constants(f) for f in _reachable(function)}
    found: list[Section] = []
    for place in (entry(function), *places):
        if any(place in section for section in found):
            continue
        section = _section(place, constants)
        # A function inside another comes with that one.
        found = [s for s in found if not (s.file == section.file and section.first <= s.first <= section.last)]
        found.append(section)
    return found


def _section(place: Place, constants: dict[tuple[str, int], tuple[tuple[str, str], ...]]) -> Section:
    inside = [node for node in _defined(place.file) if _first(node) <= place.line <= node.end_lineno]
    source = linecache.getlines(place.file)
    if not inside or not source:
        text = linecache.getline(place.file, place.line).strip() or "(its source cannot be found)"
        return Section("", place.file, place.line, (text,))
    node = max(inside, key=_first)
    first = _first(node)
    lines = textwrap.dedent("".join(source[first - 1 : node.end_lineno])).rstrip().split("\n")
    return Section(
        getattr(node, "name", "lambda"), place.file, first, tuple(lines), constants.get((place.file, first), ())
    )


def _first(node: ast.AST) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


@functools.cache
def _defined(file: str) -> tuple[ast.AST, ...]:
    """All functions of a file, at any depth; none where it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS))


def _reachable(function: Callable) -> Iterator[types.FunctionType]:
    """The function, and the plain and device functions that it takes from around it, and so on."""
    waiting, seen = [function], set()
    while waiting:
        found = waiting.pop()
        found = getattr(found, "py_func", found)
        if not isinstance(found, types.FunctionType) or found in seen:
            continue
        seen.add(found)
        yield found
        waiting += _taken(found).values()


def _taken(function: types.FunctionType) -> dict[str, object]:
    """What a function takes from around it, by name."""
    try:
        variables = inspect.getclosurevars(function)
    except ValueError:  # a variable around it has no value yet
        return {}
    return {**variables.globals, **variables.nonlocals}


def _constants(function: types.FunctionType) -> tuple[tuple[str, str], ...]:
    shown = ((name, _shown(value)) for name, value in sorted(_taken(function).items()))
    return tuple((name, value) for name, value in shown if value)


def _shown(value: object) -> str:
    """A constant as text, or '' for what is none to a reader: functions, types, modules, plans."""
    if isinstance(value, (bool, int, float, str, np.number)):
        return repr(value) if isinstance(value, (str, bool)) else str(value)
    if isinstance(value, tuple) and value and all(_shown(member) for member in value):
        return f"({', '.join(map(_shown, value))})"
    return ""

"""Everything that ends a simulation, and everything wrong with PTX text: one hierarchy under ``SimError``.

An error knows the instruction it happened at and, through the instruction's ``.loc``, the line of Python (or
of any other source language). Code that has no instruction at hand (memory, the copy engine) raises with a
message only; whoever executes the instruction completes it by ``error.at(instruction)``.
"""

from __future__ import annotations

from typing import Any


class SimError(Exception):
    """Base of all of the simulator's errors.

    `message` names the rule, the value found and the way out. `instruction` is the parser's ``Instruction``
    (or a text) and `location` a ``SourceLocation`` (or a text); both may be added later by ``at``.
    """

    def __init__(self, message: str, instruction: Any = None, location: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.instruction = instruction
        self.location = location if location is not None else getattr(instruction, "location", None)
        # What was seen before, and may be the reason; printed with the error.
        self.hazards: list[Any] = []

    def at(self, instruction: Any, location: Any = None) -> SimError:
        """Record where it happened, unless that is known already; returns the error itself, to raise."""
        if self.instruction is None:
            self.instruction = instruction
        if self.location is None:
            self.location = location if location is not None else getattr(instruction, "location", None)
        return self

    def __str__(self) -> str:
        return "\n".join([*self._lines(), *map(str, self.hazards)])

    def _lines(self) -> list[str]:
        lines = [self.message]
        if self.instruction is not None:
            line = getattr(self.instruction, "line", None)
            where = f" (PTX line {line})" if line else ""
            lines.append(f"  at {getattr(self.instruction, 'text', self.instruction)}{where}")
        if self.location is not None:
            lines.append(f"  from {self.location}")
        return lines


class PtxSyntaxError(SimError):
    """PTX text that the grammar does not allow, or that declares more than the parser's limits.

    `filename`, `line` (from 1), `column` (from 1) and `text` (that line of the PTX) say where.
    """

    def __init__(self, message: str, filename: str, line: int, column: int, text: str) -> None:
        super().__init__(message)
        self.filename = filename
        self.line = line
        self.column = column
        self.text = text

    def __str__(self) -> str:
        shown = self.text.expandtabs(1)
        start = max(0, min(self.column - 41, len(shown) - 80))
        caret = " " * max(0, self.column - 1 - start) + "^"
        return f"{self.filename}:{self.line}: {self.message}\n  {shown[start : start + 80].rstrip()}\n  {caret}"


class UnknownInstruction(SimError):
    """An instruction, a modifier or a special register that the simulator does not execute."""


class LaunchError(SimError):
    """A launch that cannot begin: no such entry, wrong parameters, block or shared memory too large."""


class OutOfBounds(SimError):
    """An access outside the memory that exists: unmapped global, past the end of another space."""


class Misaligned(SimError):
    """An address that is no multiple of what the instruction asks for."""


class Trap(SimError):
    """The kernel stopped itself: ``trap``, a failed device assertion."""


class Deadlock(SimError):
    """No thread can go on and no copy is in flight. `report`: a line for each warp, what it waits for."""

    def __init__(self, message: str, report: str = "", instruction: Any = None, location: Any = None) -> None:
        super().__init__(message, instruction, location)
        self.report = report

    def _lines(self) -> list[str]:
        return [*super()._lines(), *([self.report] if self.report else [])]


class StepLimit(Deadlock):
    """The step limit was reached: most likely an endless loop; `report` says where each warp is."""

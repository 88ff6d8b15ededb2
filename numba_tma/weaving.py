"""Putting lines into a kernel's PTX: where they may go, and its operands as text.

Traces (`trace.instrument`) and watchdogs (`watchdog.weave`) are written into the PTX that Numba made, one instruction a
line, so that the kernel's Python is the same with and without them.
"""

from __future__ import annotations

from .compile import CompileError
from .sim.module import Address, Function, Immediate, Instruction, Register


def opening_line(lines: list[str], function: Function) -> int:
    """Number, from 1, of the line with the brace that opens a function's body.

    Raises:
        CompileError: the brace shares its line.
    """
    for number in range(function.line, len(lines) + 1):
        if lines[number - 1].strip() == "{":
            return number
    raise CompileError(f"{function.name}: its body does not begin with a brace on a line of its own")


def check_own_line(lines: list[str], instruction: Instruction, purpose: str) -> None:
    """See that an instruction has a line for itself; `purpose` is what that is needed for.

    Raises:
        CompileError: it has not.
    """
    line = lines[instruction.line - 1].split("//")[0].strip()
    if not line.endswith(";") or line.count(";") != 1:
        raise CompileError(
            f"PTX line {instruction.line}: {line!r}; {purpose}, write each instruction on a line of its own"
        )


def operand_text(operand: object) -> str:
    """A register or number as the PTX writes it: the parser adds the number of its scope.

    Raises:
        CompileError: it is neither.
    """
    if isinstance(operand, Register):
        return operand.name.split("#")[0] + (f".{operand.component}" if operand.component else "")
    if isinstance(operand, Immediate):
        return str(operand.value)
    raise CompileError(f"{operand}: a register or number was expected here")


def first_address(instruction: Instruction) -> Address:
    """The address that an instruction names first."""
    return next(operand for operand in instruction.operands if isinstance(operand, Address))

"""The machine code of a kernel as the simulator's model of time wants it: what each line of the PTX became.

The assembler writes into each instruction how many cycles the warp must let pass before its next one, in bits 105 to
108 of its 128. (Known from the work of others on the encodings of Volta and its successors; NVIDIA documents none.)
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from .compile import Compiled, CompileError, disassemble
from .sim.timing import MachineInstruction, ModelOptions

_SECTION = re.compile(r"^//-+ \.text\.(\S+)", re.M)
_LINE = re.compile(r'//## File "[^"]*", line (\d+)')
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*).*/\* 0x[0-9a-f]{16} \*/")
_SECOND_HALF = re.compile(r"^\s+/\* 0x([0-9a-f]{16}) \*/")
_STALL_SHIFT = 41
# Instructions behind which the warp may go elsewhere than to the next one.
_BRANCHES = ("BRA", "BRX", "JMP", "EXIT", "RET", "CALL", "BSYNC", "BREAK", "KILL")


def machine_code(compiled: Compiled) -> list[MachineInstruction]:
    """The instructions that a kernel's PTX became, in order; lines are those of its own PTX, not of linked files.

    Raises:
        CompileError: the PTX does not assemble, or nvdisasm is not installed.
    """
    return parse(disassemble(compiled.cubin, "ptx", encodings=True), compiled.name)


def parse(text: str, name: str) -> list[MachineInstruction]:
    """The instructions of kernel `name` in what nvdisasm says, with lines of the PTX and encodings."""
    sections = dict(zip(*(iter(_SECTION.split(text)[1:]),) * 2, strict=True))
    found: list[MachineInstruction] = []
    line = block = 0
    pending: str | None = None
    for row in sections.get(name, "").splitlines():
        named = _LINE.search(row)
        if named:
            line = int(named[1])
        elif row.startswith("."):  # a label
            block += 1
        elif pending is not None and (half := _SECOND_HALF.match(row)):
            stall = int(half[1], 16) >> _STALL_SHIFT & 0xF
            found.append(MachineInstruction(line, pending, stall, block))
            if pending.split(".")[0] in _BRANCHES:
                block += 1
            pending = None
        elif instruction := _INSTRUCTION.match(row):
            pending = instruction[1]
    return found


@functools.lru_cache(maxsize=64)
def _facts(compiled: Compiled) -> tuple[tuple[MachineInstruction, ...], int]:
    try:
        return tuple(machine_code(compiled)), compiled.resources.registers
    except (CompileError, ImportError):
        return (), 0


def with_machine_code(options: ModelOptions | bool, compiled: Compiled) -> ModelOptions | None:
    """A launch's options for the model, with what is known of the kernel's machine code; None if it asks for no model.

    Where the tools that make and read machine code are not installed, the model goes by the PTX.
    """
    if not options:
        return None
    chosen = ModelOptions() if options is True else options
    if chosen.machine_code:
        return chosen
    code, registers = _facts(compiled)
    return replace(chosen, machine_code=code, registers=chosen.registers or registers)

"""The machine code of a kernel: what each line of the PTX became, for the simulator's model of time; its main loop.

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
_MNEMONIC = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_BACK = re.compile(r"BRA\S* .*`\((\.L_\w+)\)")
# Instructions that multiply and add; each kind counts where there is none of those before it.
_PRODUCTS = (("HGMMA", "QGMMA"), ("HMMA",), ("FFMA",))


def mnemonics(sass: str) -> list[str]:
    """Of all instructions of a disassembly (`Compiled.sass`), in order: what stands behind their predicates."""
    return _MNEMONIC.findall(sass)


def main_loop(sass: str) -> list[str]:
    """Mnemonics of the loop that multiplies most, from a label to the branch back to it.

    By tensor cores, if there are any. Of loops with as many products it is the shortest: that around an inner one has
    its products too, and so has what a wait spans that is out of line, behind the loop, and branches back to before it.

    Raises:
        ValueError: nothing is multiplied in a loop.
    """
    lines = [line for line in sass.splitlines() if _MNEMONIC.search(line) or _LABEL.match(line)]
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    loops = []
    for end, line in enumerate(lines):
        back = _BACK.search(line)
        if back and labels.get(back[1], end) < end:
            loops.append(mnemonics("\n".join(lines[labels[back[1]] : end])))
    for kind in _PRODUCTS:
        counts = [sum(mnemonic.startswith(kind) for mnemonic in loop) for loop in loops]
        if any(counts):
            return min((loop for loop, count in zip(loops, counts, strict=True) if count == max(counts)), key=len)
    raise ValueError(f"none of {len(loops)} loops multiplies and adds, in floats")


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

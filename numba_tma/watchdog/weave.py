"""A watchdog in a kernel's PTX: loops that only wait give up after a time, leave a record and trap.

    $L: // entered here                     mov.u64 deadline, 0;
                                            bra begun;
                                        turn:                       // every further turn begins here
                                            now = %globaltimer; the first time, deadline = now + limit
                                            @now >= deadline: note what was waited for; bra gave_up;
                                        begun:
        try_wait …                          try_wait …
        @p bra $L;                          @p bra turn;

The clock is read only when a look was in vain, and a kernel without a watchdog has none of this. The time limit and
the record's address are in a variable of the module, which the host sets when it has loaded the kernel: so the code is
the same for all limits. As long as nobody sets it the limit is endless; so it is in the simulator, which names a hang
by itself.

One thread writes: the first to exchange the claim, also in the module's variable, since an atomic operation on memory
of the host need not be one. All others wait for its trap to end the kernel. Source: PTX ISA, "Special Registers:
%globaltimer", "atom", "membar/fence", "trap".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .. import arch as architectures
from ..compile import Compiled, CompileError
from ..shared import SYMBOL as SHARED_SYMBOL
from ..sim.module import TYPE_BYTES, Address, Function, Instruction, Register, SourceLocation, Symbol
from ..sim.parse import parse
from ..weaving import check_own_line, first_address, opening_line, operand_text
from . import spins
from .record import FIELDS, NO_PHASE, WRITTEN
from .spins import Spin

SYMBOL = "numba_tma_watchdog"
# The variable's words: where the record is, nanoseconds until a wait gives up, whether a thread has given up.
RECORD, LIMIT, CLAIM = 0, 8, 16
ENDLESS = 1 << 62  # 146 years
_DECLARED = f".visible .global .align 8 .u64 {SYMBOL}[3] ="
_PURPOSE = "to watch it"
_GAVE_UP = "$watchdog_gave_up"
_SITE = re.compile(r"// numba_tma\.watchdog (\d+)")


@dataclass(frozen=True)
class Site:
    """A place at which a kernel waits: the instruction that looks, its Python line, and its line in the PTX."""

    mnemonic: str
    location: SourceLocation | None
    line: int


def is_watched(compiled: Compiled) -> bool:
    """Whether a kernel has a watchdog."""
    return _DECLARED in compiled.ptx


def watch(compiled: Compiled) -> Compiled:
    """The kernel with a watchdog; one that nowhere waits in a loop, or has one, comes back as it is.

    Raises:
        CompileError: the PTX is not written one instruction a line, or enters such a loop by a table of branches.
    """
    if is_watched(compiled):
        return compiled
    module = parse(compiled.ptx)
    lines = compiled.ptx.split("\n")
    weaver = _Weaver(lines, architectures.parse(compiled.arch), SHARED_SYMBOL in module.globals)
    for function in (*module.entries.values(), *module.functions.values()):
        if function.defined:
            weaver.visit(function)
    if not weaver.sites:
        return compiled
    first = next(number for number, line in enumerate(lines, 1) if line.startswith(".address_size"))
    weaver.put_behind(first, [f"{_DECLARED} {{0, {ENDLESS}, 0}};"])
    return replace(compiled, ptx="\n".join(weaver.woven()))


def sites(compiled: Compiled) -> dict[int, Site]:
    """The places at which a watched kernel waits, by the numbers that its records have."""
    lines = compiled.ptx.split("\n")
    module = parse(compiled.ptx)
    found = {}
    for function in (*module.entries.values(), *module.functions.values()):
        number = None
        for instruction in function.body:
            mark = _SITE.search(lines[instruction.line - 1])
            if mark is not None:
                number = int(mark[1])
            elif number is not None and spins.is_look(instruction):
                found[number] = Site(instruction.mnemonic, instruction.location, instruction.line)
                number = None
    return found


class _Weaver:
    """Collects what is to be put before and behind lines of the PTX, and what becomes of branches."""

    def __init__(self, lines: list[str], capability: tuple, has_shared: bool) -> None:
        self.lines = lines
        self.sites = 0
        self._capability = capability
        self._has_shared = has_shared
        self._loops = 0
        self._before: dict[int, list[str]] = {}
        self._behind: dict[int, list[str]] = {}
        self._branches: dict[int, tuple[str, str]] = {}

    def woven(self) -> Iterator[str]:
        """The PTX's lines with all that was put in."""
        for number, line in enumerate(self.lines, 1):
            yield from self._before.get(number, ())
            if number in self._branches:
                old, new = self._branches[number]
                line = re.sub(rf"(?<![\w$]){re.escape(old)}(?=\s*;)", lambda _, new=new: new, line)
            yield line
            yield from self._behind.get(number, ())

    def put_behind(self, number: int, added: list[str]) -> None:
        """Put lines behind the line of this number."""
        self._behind.setdefault(number, []).extend(added)

    def visit(self, function: Function) -> None:
        """Watch the loops of one function."""
        found = spins.find(function)
        if not found:
            return
        opening = opening_line(self.lines, function)
        registers = [
            ".reg .pred %watchdog_p;",
            ".reg .b32 %watchdog_site, %watchdog_phase, %watchdog_a;",
            ".reg .b64 %watchdog_now, %watchdog_deadline, %watchdog_address, %watchdog_record;",
        ]
        for spin in found:
            registers += self._loop(function, spin)
        self.put_behind(opening, registers)
        ending = [] if not spins.falls_through(function.body[-1]) else ["ret;"]
        self._before.setdefault(self._closing_line(opening), []).extend([*ending, *self._gave_up()])

    def _loop(self, function: Function, spin: Spin) -> list[str]:
        """Watch one loop; returns the declarations of its registers."""
        self._loops += 1
        loop, body = self._loops, function.body
        for index in spin.looks:
            self._look(body[index], loop)
        # What is added has the line of the wait; the loop behind it keeps those it had.
        header_line = self._label_line(function, spin.header)
        here, around = self._place(body[spin.looks[0]].line), self._place(header_line)
        enter, turn, begun = (f"$watchdog_{what}_{loop}" for what in ("enter", "turn", "begun"))
        lines = []
        # The header may follow an instruction of the loop, or one outside it, or be branched to from both.
        if spin.header - 1 in spin.turns and spins.falls_through(body[spin.header - 1]):
            lines.append(f"bra {turn};")
        lines += [
            f"{enter}:",
            f"mov.u64 %watchdog_deadline_{loop}, 0;",
            f"bra {begun};",
            f"{turn}:",
            *(here if here != around else ()),
            "mov.u64 %watchdog_now, %globaltimer;",
            f"setp.eq.u64 %watchdog_p, %watchdog_deadline_{loop}, 0;",
            f"@%watchdog_p ld.volatile.global.u64 %watchdog_deadline_{loop}, [{SYMBOL}+{LIMIT}];",
            f"@%watchdog_p add.u64 %watchdog_deadline_{loop}, %watchdog_deadline_{loop}, %watchdog_now;",
            f"setp.lt.u64 %watchdog_p, %watchdog_now, %watchdog_deadline_{loop};",
            f"@%watchdog_p bra {begun};",
            *(
                f"mov.b{bits} %watchdog_{what}, %watchdog_{what}_{loop};"
                for what, bits in (("site", 32), ("phase", 32), ("address", 64), ("deadline", 64))
            ),
            f"bra {_GAVE_UP};",
            *(around if here != around else ()),
            f"{begun}:",
        ]
        self._before.setdefault(header_line, []).extend(lines)
        for indices, target in ((spin.enters, enter), (spin.turns, turn)):
            for index in indices:
                if index != spins.BEGINNING:
                    self._redirect(function, index, spin.header, target)
        return [
            f".reg .b32 %watchdog_site_{loop}, %watchdog_phase_{loop};",
            f".reg .b64 %watchdog_address_{loop}, %watchdog_deadline_{loop};",
        ]

    def _redirect(self, function: Function, index: int, header: int, target: str) -> None:
        """Have an instruction that branches to a loop's header branch to the label `target`."""
        branch = function.body[index]
        if branch.opcode == "brx":
            raise CompileError(
                f"PTX line {branch.line}: a loop that waits begins at one of the targets of {branch.text!r}; for a "
                f"watchdog it must begin behind a plain branch"
            )
        if branch.opcode == "bra" and function.labels[branch.operands[0].name] == header:
            check_own_line(self.lines, branch, _PURPOSE)
            self._branches[branch.line] = (branch.operands[0].name.split("#")[0], target)

    def _look(self, instruction: Instruction, loop: int) -> None:
        """Note what is looked at; once an mbarrier's phase is over, what comes is another wait."""
        check_own_line(self.lines, instruction, _PURPOSE)
        phase = str(NO_PHASE)
        if instruction.opcode == "mbarrier" and "parity" in instruction.modifiers:
            phase = operand_text(instruction.operands[2])
        note = [
            *_into(f"%watchdog_address_{loop}", first_address(instruction)),
            f"mov.b32 %watchdog_phase_{loop}, {phase};",
            f"mov.b32 %watchdog_site_{loop}, {self.sites}; // numba_tma.watchdog {self.sites}",
        ]
        self.sites += 1
        self._before.setdefault(instruction.line, []).extend(note)
        if instruction.opcode == "mbarrier":
            done = operand_text(instruction.operands[0])
            self.put_behind(instruction.line, [f"@{done} mov.u64 %watchdog_deadline_{loop}, 0;"])

    def _label_line(self, function: Function, index: int) -> int:
        """The line of an instruction's first label, or its own if it has none."""
        behind = function.body[index - 1].line if index else function.line
        names = {name.split("#")[0] for name, target in function.labels.items() if target == index}
        for number in range(behind + 1, function.body[index].line):
            if self.lines[number - 1].split("//")[0].strip().rstrip(":") in names:
                return number
        return function.body[index].line

    def _place(self, number: int) -> list[str]:
        """The line, if there is one, that says which line of Python the PTX line of this number comes from."""
        return next(([line] for line in reversed(self.lines[: number - 1]) if line.strip().startswith(".loc")), [])

    def _closing_line(self, opening: int) -> int:
        """Number of the line with the brace that closes the body opened in line `opening`."""
        depth = 0
        for number in range(opening, len(self.lines) + 1):
            code = self.lines[number - 1].split("//")[0]
            depth += code.count("{") - code.count("}")
            if depth == 0:
                return number
        raise CompileError(f"PTX line {opening}: the brace there is never closed")

    def _gave_up(self) -> Iterator[str]:
        """The first of all threads leaves the record and traps. No branch: its lane waits for no other."""
        yield f"{_GAVE_UP}:"
        yield f"ld.volatile.global.u64 %watchdog_record, [{SYMBOL}+{RECORD}];"
        yield f"atom.global.cas.b32 %watchdog_a, [{SYMBOL}+{CLAIM}], 0, 1;"
        yield "setp.eq.u32 %watchdog_p, %watchdog_a, 0;"
        for field, bits in (("site", 32), ("phase", 32), ("address", 64), ("deadline", 64), ("now", 64)):
            yield f"@%watchdog_p st.volatile.global.u{bits} [%watchdog_record+{FIELDS[field]}], %watchdog_{field};"
        has_clusters = self._capability >= (9, 0)
        known = {
            "shared_base": SHARED_SYMBOL if self._has_shared else "0",
            "cluster_rank": "%cluster_ctarank" if has_clusters else "0",
            "cluster_blocks": "%cluster_nctarank" if has_clusters else "1",
        }
        for field in ("block", "thread"):
            register = {"block": "%ctaid", "thread": "%tid"}[field]
            known |= {f"{field}_{axis}": f"{register}.{axis}" for axis in "xyz"}
        for field, source in known.items():
            yield f"mov.u32 %watchdog_a, {source};"
            yield f"@%watchdog_p st.volatile.global.u32 [%watchdog_record+{FIELDS[field]}], %watchdog_a;"
        yield "fence.sc.sys;"
        yield f"@%watchdog_p st.volatile.global.u32 [%watchdog_record+{FIELDS['state']}], {WRITTEN};"
        yield "fence.sc.sys;"
        yield "@%watchdog_p trap;"
        yield "$watchdog_ends:"
        yield "nanosleep.u32 1000000;"
        yield "bra $watchdog_ends;"


def _into(target: str, address: Address) -> list[str]:
    """An address as 64 bits in a register."""
    base, offset = address.base, address.offset
    if isinstance(base, Symbol):
        lines, offset = [f"mov.u64 {target}, {base.name};"], offset + base.offset
    elif isinstance(base, Register) and TYPE_BYTES[base.type] == 4:
        lines = [f"cvt.u64.u32 {target}, {operand_text(base)};"]
    else:
        lines = [f"mov.b64 {target}, {operand_text(base)};"]
    return [*lines, f"add.s64 {target}, {target}, {offset};"] if offset else lines

"""Stamps in a kernel's PTX: one thread of each warp writes down when the warp waits, copies, arrives and is marked.

The PTX is what Numba made of the kernel and what GPU and simulator run, so the stamps go in there: before and behind
the instructions at which asynchronous code waits or sets something going. The kernel's Python is the same with and
without, and a kernel that is not traced has no trace of this.

A record is 16 bytes: when something began and ended by the low half of the SM's clock, the number of the site, and a
detail such as the shared address of a barrier. Its slot is counted in a register. A block barrier has no end there: the
clock would be read before it blocks (the machine code's BAR.SYNC.DEFER_BLOCKING), and when it ends is known from when
the last warp came. Source of the instructions: PTX ISA; of `%clock` and `%globaltimer`: "Special Registers" there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ..compile import Compiled, CompileError, Parameter
from ..shared import SYMBOL as SHARED_SYMBOL
from ..sim.module import Address, Function, Immediate, Instruction, Register, SourceLocation, Symbol
from ..sim.parse import parse
from ..weaving import check_own_line, first_address, opening_line, operand_text
from . import marks
from .plan import HEADER_BYTES, RECORD_BYTES, Trace

PARAMETER = "numba_tma_trace"
SHARED_WINDOW = 1 << 20  # above it, an address says in which block of a cluster, or that it is a generic one
# Byte offsets in a ring's header.
BEGIN_TIME, BEGIN_CLOCK, END_TIME, END_CLOCK, COUNT, MULTIPROCESSOR, LANE, SHARED_BASE = 0, 8, 16, 24, 32, 36, 40, 44


@dataclass(frozen=True)
class Site:
    """A place in the kernel that leaves records.

    Attributes:
        kind: what happens there: "mbarrier" with wait or arrive; "issue to mbarrier", "issue in group"; "cp.async",
            "bulk" and "wgmma" with commit or wait, "cp.async arrive"; "block barrier" and "cluster barrier", alone or
            with arrive; "grid wait"; "part" and "mark" of the kernel's own.
        name: the instruction, or the name that a mark gives.
        count: of copies that are issued there, or, for a wait on groups, of those that may be incomplete behind it.
        location: the Python line, if the PTX has it.
        line: the line in the PTX of the kernel that is not traced, from 1.
    """

    kind: str
    name: str
    count: int = 0
    location: SourceLocation | None = None
    line: int = 0


@dataclass(frozen=True)
class Instrumented:
    """A kernel that writes records, what its sites are, and the functions it calls whose waits stay unseen."""

    compiled: Compiled
    sites: tuple[Site, ...]
    unseen: tuple[str, ...] = ()


def instrument(compiled: Compiled, plan: Trace) -> Instrumented:
    """The kernel with stamps; its last parameter is the address of the rings.

    Raises:
        CompileError: a mark stands in a function that was not inlined, or lacks its beginning or end; or the PTX is
            not written one instruction a line.
    """
    module = parse(compiled.ptx)
    function = module.entries[compiled.name]
    lines = compiled.ptx.split("\n")
    stamps = _Stamps(lines)
    stamps.visit_all(function)
    if not stamps.exits:
        raise CompileError(f"{compiled.name}: no ret in its PTX, at which the trace would be closed")
    unseen = []
    for name, other in module.functions.items():
        inside = _Stamps(lines)
        inside.visit_all(other)
        if inside.marked:
            raise CompileError(
                f"{compiled.name}: a trace mark stands in {name}, which the compiler did not inline; "
                f"write @cuda.jit(device=True, forceinline=True) above it"
            )
        if inside.sites:
            unseen.append(name)
    opening = opening_line(lines, function)
    prologue = _prologue(plan, len(stamps.parts), SHARED_SYMBOL in module.globals)
    text = "\n".join(_woven(lines, stamps, {opening: prologue}))
    text, parameter = _with_parameter(text, compiled)
    traced = replace(
        compiled,
        ptx=text,
        parameters=(*compiled.parameters, parameter),
        parameter_bytes=parameter.offset + parameter.size,
    )
    return Instrumented(traced, tuple(stamps.sites), tuple(unseen))


def _with_parameter(text: str, compiled: Compiled) -> tuple[str, Parameter]:
    """The PTX with the rings' address as the kernel's last parameter."""
    header = f".visible .entry {compiled.name}(\n"
    start = text.index(header) + len(header)
    end = text.index("\n)\n", start) if compiled.parameters else start
    declared = f"\t.param .u64 {PARAMETER}"
    text = text[:end] + (",\n" if compiled.parameters else "") + declared + text[end:]
    return text, Parameter(PARAMETER, "u64", 8, 8, -(-compiled.parameter_bytes // 8) * 8)


def _woven(lines: list[str], stamps: _Stamps, also_behind: dict[int, list[str]]) -> Iterator[str]:
    clocks = itertools.count()
    for number, line in enumerate(lines, 1):
        for added in stamps.before.get(number, ()):
            yield from _with_label(added, clocks)
        yield line
        for added in (*stamps.behind.get(number, ()), *also_behind.get(number, ())):
            yield from _with_label(added, clocks)


def _with_label(line: str, clocks: Iterator[int]) -> Iterator[str]:
    """The line, behind a label if it reads the clock.

    The simulator's clock stands still in a stretch of code without labels. To the assembler one that nobody jumps to
    is nothing.
    """
    if line.endswith("%clock;"):
        yield f"$trace_clock_{next(clocks)}:"
    yield line


_FLAGS = ("waiting", "copying", "multiplying")


def _prologue(plan: Trace, parts: int, has_shared: bool) -> list[str]:
    """Registers, this thread's ring, and the ring's header; runs once."""
    lines = [
        "// trace: where this thread's records go",
        f".reg .pred %trace_ok, {', '.join(f'%trace_{flag}' for flag in _FLAGS)};",
        ".reg .b32 %trace_count, %trace_limit, %trace_most, %trace_clock, %trace_a, %trace_b;",
        ".reg .b32 %trace_begin, %trace_end, %trace_site, %trace_detail;",
        ".reg .b32 %trace_wait, %trace_issue, %trace_copy, %trace_multiply, %trace_thread, %trace_block;",
        *(f".reg .b32 %trace_part_{number};" for number in range(parts)),
        ".reg .b64 %trace_ring, %trace_address, %trace_time;",
        *_linear("%trace_block", "%ctaid", "%nctaid"),
        *_linear("%trace_thread", "%tid", "%ntid"),
        f"mov.u32 %trace_most, {plan.capacity};",
    ]
    if plan.multiprocessors is not None:
        lines += ["mov.u32 %trace_a, %smid;", *_chosen("%trace_a", plan.multiprocessors)]
    if plan.blocks is not None:
        lines += [*_chosen("%trace_block", plan.blocks), "mov.u32 %trace_block, %trace_a;"]
    lines += [
        # Two rings for each warp of each block: the second is for lanes but the first.
        "mov.u32 %trace_a, %ntid.x;",
        "mov.u32 %trace_b, %ntid.y;",
        "mul.lo.u32 %trace_a, %trace_a, %trace_b;",
        "mov.u32 %trace_b, %ntid.z;",
        "mul.lo.u32 %trace_a, %trace_a, %trace_b;",
        "add.u32 %trace_a, %trace_a, 31;",
        "shr.u32 %trace_a, %trace_a, 5;",
        "shr.u32 %trace_b, %trace_thread, 5;",
        "mad.lo.u32 %trace_b, %trace_block, %trace_a, %trace_b;",
        "shl.b32 %trace_b, %trace_b, 1;",
        "and.b32 %trace_a, %trace_thread, 31;",
        "setp.ne.u32 %trace_ok, %trace_a, 0;",
        "selp.u32 %trace_limit, 0, %trace_most, %trace_ok;",
        "@%trace_ok add.u32 %trace_b, %trace_b, 1;",
        f"ld.param.u64 %trace_ring, [{PARAMETER}];",
        "cvta.to.global.u64 %trace_ring, %trace_ring;",
        f"mad.wide.u32 %trace_ring, %trace_b, {plan.ring_bytes}, %trace_ring;",
        "mov.u32 %trace_count, 0;",
        *(_flag(flag, False) for flag in _FLAGS),
        "setp.ne.u32 %trace_ok, %trace_limit, 0;",
        "mov.u32 %trace_a, %smid;",
        f"mov.u32 %trace_b, {SHARED_SYMBOL if has_shared else 0};",
        f"@%trace_ok st.global.u32 [%trace_ring+{MULTIPROCESSOR}], %trace_a;",
        f"@%trace_ok st.global.u32 [%trace_ring+{SHARED_BASE}], %trace_b;",
        *_times(BEGIN_TIME, BEGIN_CLOCK),
    ]
    return lines


def _linear(target: str, index: str, extent: str) -> list[str]:
    """A three-dimensional index as one number."""
    return [
        f"mov.u32 {target}, {index}.z;",
        f"mov.u32 %trace_a, {extent}.y;",
        f"mov.u32 %trace_b, {index}.y;",
        f"mad.lo.u32 {target}, {target}, %trace_a, %trace_b;",
        f"mov.u32 %trace_a, {extent}.x;",
        f"mov.u32 %trace_b, {index}.x;",
        f"mad.lo.u32 {target}, {target}, %trace_a, %trace_b;",
    ]


def _chosen(number: str, wanted: range) -> list[str]:
    """Which of `wanted` a number is, in %trace_a; if it is none, nothing is to be recorded."""
    return [
        f"sub.u32 %trace_a, {number}, {wanted.start};",
        f"rem.u32 %trace_b, %trace_a, {wanted.step};",
        f"div.u32 %trace_a, %trace_a, {wanted.step};",
        f"setp.lt.u32 %trace_ok, %trace_a, {len(wanted)};",
        "setp.eq.and.u32 %trace_ok, %trace_b, 0, %trace_ok;",
        "@!%trace_ok mov.u32 %trace_most, 0;",
    ]


def _times(time: int, clock: int) -> list[str]:
    """Both clocks into the header, if %trace_ok."""
    return [
        "mov.u64 %trace_time, %globaltimer;",
        f"@%trace_ok st.global.u64 [%trace_ring+{time}], %trace_time;",
        "mov.u64 %trace_time, %clock64;",
        f"@%trace_ok st.global.u64 [%trace_ring+{clock}], %trace_time;",
    ]


@dataclass
class _Run:
    """Copies issued one after another for one mbarrier, or into the bulk group, with the expect_tx before them."""

    target: object
    first: Instruction
    last: Instruction
    copies: list[Instruction] = field(default_factory=list)


@dataclass
class _Stamps:
    """The lines to put before and behind lines of the PTX, and the sites that they stand for.

    What is written down between a wait and the work behind it, or before others are let go on, delays the kernel. So a
    record is one store of 16 bytes under a predicate, without a branch; copies that are issued together are one record,
    written behind the last. `parts` are the names of the kernel's own parts.
    """

    lines: list[str]
    before: dict[int, list[str]] = field(default_factory=dict)
    behind: dict[int, list[str]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    exits: int = 0
    marked: bool = False
    parts: list[str] = field(default_factory=list)
    _numbers: dict[tuple, int] = field(default_factory=dict)
    _labels: int = 0
    # Of the stretch of instructions since the last label or branch:
    _run: _Run | None = None
    _copying: bool = False
    _copied: dict[str, object] = field(default_factory=dict)

    def visit_all(self, function: Function) -> None:
        """Stamp what matters of a function's instructions."""
        found = [mark for mark in map(self._mark_of, function.body) if mark]
        self.marked = bool(found)
        begun = dict.fromkeys(name for kind, name in found if kind == "begin")
        ended = {name for kind, name in found if kind == "end"}
        for name in {*begun} ^ ended:
            here, lacking = ("begin", "end") if name in begun else ("end", "begin")
            raise CompileError(f"trace.{here}({name!r}) without a trace.{lacking} of that name")
        self.parts = [*begun]
        labelled = set(function.labels.values())
        for index, instruction in enumerate(function.body):
            if index in labelled:
                self._new_stretch()
            self._visit(instruction)
        self._end_run()

    def _new_stretch(self) -> None:
        self._end_run()
        self._copying = False
        self._copied.clear()

    def _visit(self, instruction: Instruction) -> None:
        mnemonic, operands = instruction.mnemonic, instruction.operands
        mark = self._mark_of(instruction)
        if mark:
            self._mark(instruction, *mark)
        elif instruction.opcode == "mov" and instruction.guard is None and isinstance(operands[0], Register):
            self._copied[operands[0].name] = operands[1]
        elif instruction.opcode == "bra":
            self._new_stretch()
        elif instruction.opcode in ("ret", "exit"):
            self._exit(instruction)
        elif instruction.opcode == "mbarrier":
            self._mbarrier(instruction)
        elif mnemonic.startswith("cp.async.bulk.wait_group"):
            self._wait(instruction, "bulk wait", _number(operands[0]))
        elif mnemonic.startswith("cp.async.bulk.commit_group"):
            self._moment(instruction, "bulk commit")
        elif mnemonic.startswith(("cp.async.bulk", "cp.reduce.async.bulk")) and "prefetch" not in mnemonic:
            self._issue(instruction)
        elif mnemonic.startswith("cp.async.mbarrier.arrive"):
            self._copying = False
            self._commit(instruction, "cp.async arrive", "copying", "copy", operands[0])
        elif mnemonic.startswith("cp.async.commit_group"):
            self._copying = False
            self._commit(instruction, "cp.async commit", "copying", "copy")
        elif mnemonic.startswith("cp.async.wait"):
            self._wait(instruction, "cp.async wait", _number(operands[0]) if operands else 0)
        elif mnemonic.startswith(("cp.async.ca", "cp.async.cg")):
            if not self._copying:
                self._around(instruction, _since("copying", "copy"), [])
            self._copying = True
        elif mnemonic.startswith("wgmma.fence"):
            self._around(instruction, _since("multiplying", "multiply"), [])
        elif mnemonic.startswith("wgmma.commit_group"):
            self._commit(instruction, "wgmma commit", "multiplying", "multiply")
        elif mnemonic.startswith("wgmma.wait_group"):
            self._wait(instruction, "wgmma wait", _number(operands[0]))
        elif mnemonic.startswith("barrier.cluster.arrive"):
            self._moment(instruction, "cluster barrier arrive")
        elif mnemonic.startswith("barrier.cluster.wait"):
            self._wait(instruction, "cluster barrier")
        elif mnemonic.startswith("griddepcontrol.wait"):
            self._wait(instruction, "grid wait")
        elif instruction.opcode in ("bar", "barrier") and "warp" not in instruction.modifiers:
            which = next((o for o in operands if isinstance(o, (Register, Immediate))), None)
            if "arrive" in instruction.modifiers:
                self._moment(instruction, "block barrier arrive", which)
            else:
                self._block_barrier(instruction, which)

    def _mark_of(self, instruction: Instruction) -> tuple[str, str] | None:
        """Kind and name of a mark."""
        comment = marks.COMMENT.search(self.lines[instruction.line - 1])
        if comment is None or instruction.opcode != "mov":
            return None
        return comment[1], bytes.fromhex(comment[2]).decode()

    # What an instruction becomes.

    def _mark(self, instruction: Instruction, kind: str, name: str) -> None:
        self._end_run()
        if kind == "mark":
            self._moment(instruction, "mark", instruction.operands[0], name)
            return
        begun = f"%trace_part_{self.parts.index(name)}"
        if kind == "begin":
            self._around(instruction, [], [f"mov.u32 {begun}, %clock;"])
        else:
            self._around(instruction, [], _record(self._site("part", instruction, name), begun))

    def _mbarrier(self, instruction: Instruction) -> None:
        action = instruction.modifiers[0]
        if action in ("try_wait", "test_wait"):
            self._end_run()
            behind, done = self._label(), operand_text(instruction.operands[0])
            site = self._site("mbarrier wait", instruction)
            guard = [] if instruction.guard is None else [f"@{_guard(instruction, opposite=True)} bra {behind};"]
            self._around(
                instruction,
                _since("waiting", "wait"),
                # The branch sees to it that the clock is read when the answer is there, and it is yes.
                [
                    *guard,
                    f"@!{done} bra {behind};",
                    *_record(site, "%trace_wait", instruction.operands[1]),
                    _flag("waiting", False),
                    f"{behind}:",
                ],
            )
        elif "expect_tx" in instruction.modifiers:
            self._extend_run(instruction, self._origin(first_address(instruction)))
        elif action in ("arrive", "arrive_drop"):
            self._moment(instruction, "mbarrier arrive", first_address(instruction))

    def _issue(self, instruction: Instruction) -> None:
        target: object = "group"
        if any(modifier.startswith("mbarrier::complete_tx") for modifier in instruction.modifiers):
            target = self._origin(_last_address(instruction))
        self._extend_run(instruction, target)
        self._run.copies.append(instruction)

    def _extend_run(self, instruction: Instruction, target: object) -> None:
        if self._run is None or self._run.target != target or instruction.guard != self._run.first.guard:
            self._end_run()
            self._run = _Run(target, instruction, instruction)
        self._run.last = instruction

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        kind, detail = "issue in group", None
        if run.target != "group":
            kind = "issue to mbarrier"
            detail = _last_address(run.last) if run.copies else first_address(run.last)
        site = self._site(kind, (run.copies or [run.first])[0], count=len(run.copies))
        self._around(run.first, ["mov.u32 %trace_issue, %clock;"], [])
        self._around(
            run.last,
            [],
            [
                "mov.u32 %trace_end, %clock;",
                *_becomes_recorder(),
                *_guarded(run.last, _write(site, "%trace_issue", detail)),
            ],
        )

    def _exit(self, instruction: Instruction) -> None:
        self._end_run()
        self.exits += 1
        ended = ["setp.ne.u32 %trace_ok, %trace_limit, 0;"]
        if instruction.guard is not None:
            ended = [f"setp.ne.and.u32 %trace_ok, %trace_limit, 0, {_guard(instruction)};"]
        lines = [
            *ended,
            "and.b32 %trace_a, %trace_thread, 31;",
            f"@%trace_ok st.global.u32 [%trace_ring+{COUNT}], %trace_count;",
            f"@%trace_ok st.global.u32 [%trace_ring+{LANE}], %trace_a;",
            *_times(END_TIME, END_CLOCK),
        ]
        self._around(instruction, lines, [])

    def _moment(self, instruction: Instruction, kind: str, detail: object = None, name: str = "") -> None:
        self._end_run()
        site = self._site(kind, instruction, name)
        self._around(instruction, [], _guarded(instruction, _record(site, "%trace_end", detail)))

    def _wait(self, instruction: Instruction, kind: str, pending: int = 0) -> None:
        self._end_run()
        site = self._site(kind, instruction, count=pending)
        self._around(
            instruction,
            ["mov.u32 %trace_wait, %clock;"],
            _guarded(instruction, _record(site, "%trace_wait")),
        )

    def _block_barrier(self, instruction: Instruction, which: object) -> None:
        self._end_run()
        site = self._site("block barrier", instruction)
        self._around(instruction, _guarded(instruction, _record(site, "%trace_end", which)), [])

    def _commit(
        self, instruction: Instruction, kind: str, flag: str, clock: str, barrier: Address | None = None
    ) -> None:
        self._end_run()
        site = self._site(kind, instruction)
        lines = [
            f"selp.u32 %trace_a, 1, 0, %trace_{flag};",
            *_guarded(instruction, _record(site, f"%trace_{clock}", barrier or Register("%trace_a", "b32"))),
            _flag(flag, False),
        ]
        self._around(instruction, _since(flag, clock)[:2], lines)

    # Bookkeeping.

    def _label(self) -> str:
        self._labels += 1
        return f"$trace_{self._labels}"

    def _origin(self, address: Address) -> object:
        """What an address was copied from: inline PTX takes its operands into registers of its own."""
        base = address.base
        while isinstance(base, Register) and base.name in self._copied:
            base = self._copied[base.name]
        return base, address.offset

    def _site(self, kind: str, instruction: Instruction, name: str = "", count: int = 0) -> int:
        """The number that stands in the records; unrolled copies of an instruction share it."""
        key = (kind, name or instruction.mnemonic, count, instruction.location)
        if key not in self._numbers:
            self._numbers[key] = len(self.sites)
            self.sites.append(Site(*key, instruction.line))
        return self._numbers[key]

    def _around(self, instruction: Instruction, before: list[str], behind: list[str]) -> None:
        check_own_line(self.lines, instruction, "to trace it")
        self.before.setdefault(instruction.line, []).extend(before)
        self.behind.setdefault(instruction.line, []).extend(behind)


# Lines of PTX. %trace_ok holds where a record is to be written; a thread that keeps none has a limit of 0.


def _flag(name: str, value: bool) -> str:
    return f"setp.{'eq' if value else 'ne'}.u32 %trace_{name}, 0, 0;"


def _guarded(instruction: Instruction, lines: list[str]) -> list[str]:
    """The same under the instruction's own guard; where it is not executed, %trace_ok is false."""
    if instruction.guard is None:
        return lines
    guarded = [line if line.startswith("@") else f"@{_guard(instruction)} {line}" for line in lines]
    # The simulator does not read a clock under a guard; here none is needed.
    guarded = [line.split(" ", 1)[1] if "%clock" in line else line for line in guarded]
    return ["setp.ne.u32 %trace_ok, 0, 0;", *guarded]


def _guard(instruction: Instruction, opposite: bool = False) -> str:
    register, negated = instruction.guard
    return f"{'!' if negated != opposite else ''}{operand_text(register)}"


def _becomes_recorder() -> list[str]:
    """Lanes but the first keep records from the first copy on that they issue: the lowest of those that do."""
    return [
        "activemask.b32 %trace_a;",
        "mov.u32 %trace_b, %lanemask_lt;",
        "and.b32 %trace_a, %trace_a, %trace_b;",
        "setp.eq.u32 %trace_ok, %trace_a, 0;",
        "setp.eq.and.u32 %trace_ok, %trace_limit, 0, %trace_ok;",
        "@%trace_ok mov.u32 %trace_count, 0;",
        "@%trace_ok mov.u32 %trace_limit, %trace_most;",
    ]


def _record(site: int, begin: str, detail: object = None) -> list[str]:
    """A record of what ends now and began at `begin`, a register; %trace_end for a moment."""
    return ["mov.u32 %trace_end, %clock;", *_write(site, begin, detail)]


def _write(site: int, begin: str, detail: object) -> list[str]:
    """A record of what ended at %trace_end."""
    return [
        "setp.lt.u32 %trace_ok, %trace_count, %trace_limit;",
        f"mov.u32 %trace_begin, {begin};",
        f"mov.u32 %trace_site, {site};",
        *_detail("%trace_detail", detail),
        f"mad.wide.u32 %trace_address, %trace_count, {RECORD_BYTES}, %trace_ring;",
        f"@%trace_ok st.global.v4.b32 [%trace_address+{HEADER_BYTES}], "
        "{%trace_begin, %trace_end, %trace_site, %trace_detail};",
        "add.u32 %trace_count, %trace_count, 1;",
    ]


def _detail(target: str, detail: object) -> list[str]:
    """A number, or the low half of an address, which is a shared address's offset in the block's window."""
    if detail is None:
        return [f"mov.u32 {target}, 0;"]
    if isinstance(detail, Immediate):
        return [f"mov.u32 {target}, {int(detail.value) & 0xFFFFFFFF};"]
    base, offset = (detail.base, detail.offset) if isinstance(detail, Address) else (detail, 0)
    if isinstance(base, Register) and base.type in ("u64", "b64", "s64"):
        lines = [f"cvt.u32.u64 {target}, {operand_text(base)};"]
    elif isinstance(base, Symbol):
        lines, offset = [f"mov.u32 {target}, {base.name};"], offset + base.offset
    else:
        lines = [f"mov.u32 {target}, {operand_text(base)};"]
    if offset:
        lines.append(f"add.u32 {target}, {target}, {offset};")
    if isinstance(detail, Address):
        lines.append(f"and.b32 {target}, {target}, {SHARED_WINDOW - 1};")
    return lines


def _since(flag: str, clock: str) -> list[str]:
    """Now into %trace_<clock>, unless %trace_<flag> says that it is there already; and the flag is set."""
    return [
        "mov.u32 %trace_clock, %clock;",
        f"selp.b32 %trace_{clock}, %trace_{clock}, %trace_clock, %trace_{flag};",
        _flag(flag, True),
    ]


def _number(operand: object) -> int:
    return int(operand.value) if isinstance(operand, Immediate) else 0


def _last_address(instruction: Instruction) -> Address:
    """Of a copy: the mbarrier, behind which there are only numbers."""
    return [operand for operand in instruction.operands if isinstance(operand, Address)][-1]

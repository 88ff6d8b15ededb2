"""What one instruction is to the model: its kind, what it reads and writes, and what it costs a scheduler.

Where the machine code is known, that is taken from the instructions that the PTX line became: how many there are, how
long the assembler makes the warp wait after each, which pipes they keep, and where among the others they stand. The
assembler may have unrolled a loop: then every line of it has several copies, and an instruction costs what one copy
does. Otherwise it is estimated from the PTX.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..module import Address, Immediate, Instruction, Label, Negated, PredicatePair, Register, TensorOperand, Vector
from .device import Device
from .model import MachineInstruction

if TYPE_CHECKING:
    from ..program import Block

PIPES = ("fma", "imad", "alu", "half", "xu", "fp64")
# Kinds that hold a warp up until something else has happened, and so part what the assembler may exchange.
WAITS = frozenset(("block barrier", "mbarrier wait", "cp.async wait", "bulk wait", "wgmma wait", "cluster wait"))
# Kinds whose result comes later than the next instruction can be issued.
LATE = frozenset(("load", "atomic", "long", "mma"))

_NO_RESULT = frozenset(
    (
        "st",
        "red",
        "bar",
        "barrier",
        "membar",
        "fence",
        "cp",
        "bra",
        "brx",
        "ret",
        "exit",
        "trap",
        "prefetch",
        "prefetchu",
    )
    + (
        "discard",
        "applypriority",
        "nanosleep",
        "pmevent",
        "setmaxnreg",
        "griddepcontrol",
        "tensormap",
        "stmatrix",
        "call",
    )
)
_SHUFFLES = frozenset(("shfl", "vote", "match", "redux", "elect", "activemask"))
_SPECIAL_FUNCTIONS = frozenset(("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"))
_FREE = frozenset(("mov", "cvta", "pmevent", "brkpt"))


@dataclass(frozen=True)
class Op:
    """An instruction. `slots` issue slots, `cycles` until the warp may go on, `pipes` (number, cycles) that it keeps.

    `place` is where it stands in the machine code: (stretch, index); None if it left no trace there, or is not known.
    `width` is the bytes a lane that the machine code accesses, where it is known; the assembler makes one wide access
    of several, and then `joined` are the registers that the others load.
    """

    instruction: Instruction
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    slots: float
    cycles: float
    pipes: tuple[tuple[int, float], ...]
    place: tuple[int, int] | None = None
    width: int = 0
    joined: tuple[str, ...] = ()


def kind_of(instruction: Instruction) -> str:
    """What the model takes an instruction for."""
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if opcode in ("ld", "ldu", "ldmatrix"):
        return "free" if any(m.startswith(("param", "const")) for m in modifiers) else "load"
    if opcode in ("st", "stmatrix"):
        return "free" if any(m.startswith("param") for m in modifiers) else "store"
    simple = {"atom": "atomic", "red": "reduction", "mma": "mma", "call": "call", "ret": "ret"}
    if opcode in simple:
        return simple[opcode]
    if opcode in _SHUFFLES or opcode in _SPECIAL_FUNCTIONS:
        return "long"
    if opcode in _FREE:
        return "clock" if any(_is_clock(operand) for operand in instruction.operands[1:]) else "free"
    if opcode in ("fence", "membar"):
        return "fence"
    if opcode == "wgmma":
        return {"mma_async": "wgmma", "wait_group": "wgmma wait", "commit_group": "wgmma commit"}.get(
            modifiers[0], "run"
        )
    if opcode in ("bar", "barrier"):
        if "cluster" in modifiers:
            return "cluster arrive" if "arrive" in modifiers else "cluster wait"
        if "warp" in modifiers:
            return "warp barrier"
        return "block arrive" if "arrive" in modifiers else "block barrier"
    if opcode == "mbarrier":
        if modifiers[0] in ("test_wait", "try_wait"):
            return "mbarrier wait"
        return "mbarrier arrive" if modifiers[0] in ("arrive", "arrive_drop", "complete_tx") else "mbarrier"
    if opcode == "cp":
        return _copy_kind(modifiers)
    return "run"


def _is_clock(operand: Any) -> bool:
    return isinstance(operand, Register) and operand.special and operand.name.startswith(("%clock", "%globaltimer"))


def _copy_kind(modifiers: tuple[str, ...]) -> str:
    family = "bulk" if "bulk" in modifiers else "cp.async"
    if "commit_group" in modifiers:
        return f"{family} commit"
    if "wait_group" in modifiers or "wait_all" in modifiers:
        return f"{family} wait"
    if "mbarrier" in modifiers and family == "cp.async":
        return "cp.async arrive"
    if "prefetch" in modifiers:
        return "run"
    return "copy" if family == "bulk" else family


def late_latency(instruction: Instruction) -> str:
    """Which of the device's latencies a "long" instruction has."""
    return "shuffle" if instruction.opcode in _SHUFFLES else "xu"


def _names(operand: Any) -> Iterable[str]:
    if isinstance(operand, Register):
        if not operand.special:
            yield operand.name
    elif isinstance(operand, Negated):
        yield operand.register.name
    elif isinstance(operand, Address):
        yield from _names(operand.base)
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _names(element)
    elif isinstance(operand, PredicatePair):
        yield from _names(operand.first)
        yield from _names(operand.second)
    elif isinstance(operand, TensorOperand):
        yield from _names(operand.address)
        yield from _names(operand.coordinates)


def reads_and_writes(instruction: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the registers that an instruction reads, and of those that it writes."""
    operands = [operand for operand in instruction.operands if not isinstance(operand, (Immediate, Label, type(None)))]
    has_result = instruction.opcode not in _NO_RESULT
    if instruction.opcode == "mbarrier":
        has_result = instruction.modifiers[0] not in ("init", "inval", "expect_tx", "complete_tx")
        has_result &= not isinstance(operands[0], Address)
    if instruction.opcode == "wgmma":
        # The accumulators are not read by anything before the wait for the group.
        operands, has_result = operands[1:], False
    if instruction.opcode in ("bar", "barrier"):
        has_result = "red" in instruction.modifiers
    writes = tuple(_names(operands[0])) if has_result and operands else ()
    reads = [name for operand in operands[bool(has_result) :] for name in _names(operand)]
    if instruction.guard is not None:
        reads.append(instruction.guard[0].name)
    return tuple(dict.fromkeys(reads)), writes


# Pipes by the beginning of a mnemonic of the machine code; the first that fits. What is in none only takes a slot.
_MACHINE_PIPES = (
    (re.compile(r"IMAD|IDP"), "imad"),
    (re.compile(r"HFMA2\.MMA|F(FMA|MUL|ADD)"), "fma"),
    (re.compile(r"H(FMA2|ADD2|MUL2|SET2|SETP2|MNMX2)"), "half"),
    (re.compile(r"MUFU|F2F(?!P)|F2I|I2F(?!P)|POPC|FLO|BREV|FRND"), "xu"),
    (re.compile(r"D(FMA|MUL|ADD|SETP)"), "fp64"),
    (
        re.compile(
            r"IADD|LOP|SHF|LEA|ISETP|FSETP|SEL|FSEL|PRMT|VIADD|VIMNMX|FMNMX|IMNMX|MOV|PLOP|F2FP|I2FP|IABS|SGXT|BMSK"
        ),
        "alu",
    ),
)
# The one instruction of the machine code that a kind of PTX instruction surely has, by which copies are counted.
_MAIN = {
    "load": re.compile(r"LD[GSL]?\b|LDSM|LDG|LDS|LDL"),
    "store": re.compile(r"ST[GSL]?\b|STSM|STG|STS|STL"),
    "atomic": re.compile(r"ATOM|RED"),
    "reduction": re.compile(r"ATOM|RED"),
    "mma": re.compile(r"[HIQDB]MMA"),
    "wgmma": re.compile(r"[HIQB]GMMA"),
    "copy": re.compile(r"UTMA|UBLK"),
    "cp.async": re.compile(r"LDGSTS"),
    "block barrier": re.compile(r"BAR\b"),
    "mbarrier arrive": re.compile(r"SYNCS"),
    "mbarrier wait": re.compile(r"SYNCS"),
    "long": re.compile(r"SHFL|VOTE|MATCH|REDUX|ELECT|MUFU"),
}


def _machine_pipe(mnemonic: str) -> str | None:
    return next((pipe for pattern, pipe in _MACHINE_PIPES if pattern.match(mnemonic)), None)


# Estimates where there is no machine code: (slots, pipe) by opcode; twice the slots for 64 bits, but for those marked.
_ESTIMATES = {
    **dict.fromkeys(
        ("add", "sub", "and", "or", "xor", "not", "shl", "shr", "shf", "min", "max", "neg", "abs"), (1, "alu")
    ),
    **dict.fromkeys(("setp", "selp", "slct", "set", "lop3", "prmt", "bfe", "bfi", "bfind", "cnot", "dp4a"), (1, "alu")),
    **dict.fromkeys(("mul", "mad", "mul24", "mad24"), (1, "imad")),
    **dict.fromkeys(("popc", "clz", "brev"), (1, "xu")),
    **dict.fromkeys(("fma",), (1, "fma")),
    **dict.fromkeys(("cvt",), (1, "half")),
    **dict.fromkeys(("div", "rem"), (20, "imad")),
    **dict.fromkeys(("bra", "brx", "ret", "exit"), (1, None)),
}


def _estimate(instruction: Instruction, kind: str, device: Device) -> tuple[float, tuple[tuple[int, float], ...]]:
    opcode, modifiers = instruction.opcode, instruction.modifiers
    if kind == "free":
        return 0, ()
    slots, pipe = _ESTIMATES.get(opcode, (1, None))
    kind_of_value = modifiers[-1] if modifiers else ""
    wide = kind_of_value.endswith("64")
    if kind_of_value == "f64":
        pipe = "fp64"
    elif kind_of_value in ("f32", "f32x2") and pipe in ("alu", "imad"):
        pipe = "fma"
    elif kind_of_value.startswith(("f16", "bf16")) and opcode != "cvt":
        pipe = "half"
    elif opcode == "cvt" and not any(m.startswith(("f", "bf", "e4", "e5")) for m in modifiers):
        # Integers that become wider or narrower stay where they are.
        return 0, ()
    elif wide and opcode not in ("cvt",):
        slots *= 2 if "wide" not in modifiers else 1
    if opcode in _SPECIAL_FUNCTIONS:
        pipe = "xu"
    if opcode in _SHUFFLES or pipe is None:
        return slots, ()
    return slots, ((PIPES.index(pipe), slots * device.pipes[pipe]),)


class Costs:
    """The ops of a launch's instructions. `machine_code` as in ModelOptions."""

    def __init__(self, device: Device, machine_code: Sequence[MachineInstruction]) -> None:
        self.device = device
        self.known = bool(machine_code)
        self._lines: dict[int, list[tuple[int, MachineInstruction]]] = {}
        for index, machine in enumerate(machine_code):
            self._lines.setdefault(machine.line, []).append((index, machine))
        self._blocks: dict[int, list[Op]] = {}

    def of_block(self, block: Block) -> list[Op]:
        """The ops of a block of code, in the order of the PTX."""
        found = self._blocks.get(id(block))
        if found is None:
            instructions = [i for i in block.instructions if i is not None]
            last = block.end_instruction
            if last is not None and not _is_guard_of_next(block):
                instructions.append(last)
            # Machine code is known of the module's first part alone: linked functions have line numbers of their own.
            known = self.known and block.instance.function.entry
            copies = self._copies(instructions) if known else 1
            ops = [self._known(i, copies) if known else self._estimated(i) for i in instructions]
            found = self._blocks[id(block)] = _join(ops) if known else ops
        return found

    def _copies(self, instructions: list[Instruction]) -> int:
        counts = []
        for instruction in instructions:
            main = _MAIN.get(kind_of(instruction))
            if main is not None:
                count = sum(bool(main.match(m.mnemonic)) for _, m in self._lines.get(instruction.line, ()))
                counts += [count] if count else []
        return max(int(statistics.median_low(counts)), 1) if counts else 1

    def _known(self, instruction: Instruction, copies: int) -> Op:
        kind = kind_of(instruction)
        reads, writes = reads_and_writes(instruction)
        lines = self._lines.get(instruction.line, [])
        pipes = [0.0] * len(PIPES)
        for _, machine in lines:
            pipe = _machine_pipe(machine.mnemonic)
            if pipe is not None:
                pipes[PIPES.index(pipe)] += self.device.pipes[pipe] / copies
        place, width = None, 0
        if lines:
            main = _MAIN.get(kind)
            chosen = next((at for at in lines if main is not None and main.match(at[1].mnemonic)), None)
            chosen = chosen or lines[-(-len(lines) // copies) - 1]
            place = (chosen[1].block, chosen[0])
            width = _width(chosen[1].mnemonic)
        elif kind == "run":
            kind = "free"
        return Op(
            instruction,
            kind,
            reads,
            writes,
            len(lines) / copies,
            sum(max(machine.stall, 1) for _, machine in lines) / copies,
            tuple((i, cycles) for i, cycles in enumerate(pipes) if cycles),
            place,
            width,
        )

    def _estimated(self, instruction: Instruction) -> Op:
        kind = kind_of(instruction)
        reads, writes = reads_and_writes(instruction)
        slots, pipes = _estimate(instruction, kind, self.device)
        return Op(instruction, kind, reads, writes, slots, slots, pipes)


def _width(mnemonic: str) -> int:
    """Bytes a lane of an access, by its name in the machine code."""
    bits = [int(part) for part in mnemonic.split(".") if part in ("64", "128")]
    return bits[0] // 8 if bits else 4


def _join(ops: list[Op]) -> list[Op]:
    """Loads and stores that the machine code does not have are part of the nearest one with their address register."""
    joined: dict[int, list[str]] = {}
    for index, op in enumerate(ops):
        if op.kind not in ("load", "store") or op.place is not None:
            continue
        others = [
            i
            for i, other in enumerate(ops)
            if other.kind == op.kind and other.place is not None and _base(other) == _base(op)
        ]
        if others:
            nearest = min(others, key=lambda i: abs(i - index))
            joined.setdefault(nearest, []).extend(op.writes)
            ops[index] = replace(op, kind="free", reads=(), writes=())
    for index, names in joined.items():
        ops[index] = replace(ops[index], writes=(*ops[index].writes, *names), joined=tuple(names))
    return ops


def _base(op: Op) -> str:
    operands = op.instruction.operands
    address = operands[1 if op.kind == "load" else 0]
    return next(iter(_names(address)), "")


def _is_guard_of_next(block: Block) -> bool:
    """Whether a block ends with the test of a guard, whose instruction is in the block behind it."""
    last, following = block.end_instruction, block.next
    if last is None or last.guard is None or following is None:
        return False
    return following.end_instruction is last or any(i is last for i in following.instructions)

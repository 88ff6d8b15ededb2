"""Control flow: branches, calls, return, exit, traps, sleeping.

Source: PTX ISA, "Control Flow Instructions", "Miscellaneous Instructions".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import DTYPES
from .errors import SimError, Trap, UnknownInstruction
from .fragment import Fragment
from .module import Instruction, Label, Register, Symbol, Vector
from .program import BOOL, BUDGET, MAX_CALL_DEPTH, U32, Block, Builder, Instance, Reader, Step

if TYPE_CHECKING:
    from .machine import Machine

End = Callable[[Fragment, Block], "Block | None"]


class Control:
    """The ends of blocks. One for a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def skip_unless(self, guard: tuple[Reader, bool], after: Block) -> End:
        """Go on to the next block where the guard holds, else to `after`."""
        read, negated = guard
        machine = self.machine

        def end(fragment: Fragment, block: Block) -> Block | None:
            predicate = read(fragment)
            if predicate.size == 1:
                return block.next if bool(predicate[0]) != negated else after
            count = np.count_nonzero(predicate)
            if count == 0 or count == fragment.n:
                return block.next if bool(count) != negated else after
            machine.scheduler.split(fragment, ~predicate if negated else predicate, block.next, after)
            return None

        return end

    def leave_function(self, instance: Instance) -> End:
        """`ret`: back to the call, or out of the kernel."""
        machine = self.machine
        returns = [variable.name for variable in instance.function.returns]

        def end(fragment: Fragment, block: Block) -> Block | None:
            if not fragment.stack:
                machine.scheduler.exit(fragment)
                return None
            call = machine.program.blocks[fragment.stack[-1]]
            fragment.stack = fragment.stack[:-1]
            for name, target in zip(returns, machine.call_results[call.pc], strict=False):
                _copy_slots(fragment, instance, name, call.instance, target)
            return call.next

        return end


def _copy_slots(fragment: Fragment, source: Instance, name: str, target: Instance, target_name: str) -> None:
    """Copy a parameter's bytes from one instance's slots to another's."""
    wanted = target.slots.get(target_name)
    if not wanted:
        return
    given = source.slots.get(name, {})
    for offset, register in wanted.items():
        other = given.get(offset)
        if other is not None:
            widths = source.program.widths
            if widths[other] != widths[register]:
                raise SimError(
                    f"parameter {target_name}+{offset} is passed with {widths[other] // 8} bytes and read with "
                    f"{widths[register] // 8}"
                )
            fragment.set(register, fragment.get(other))


def _bra(d: Builder, instruction: Instruction) -> Step:
    name = instruction.operands[0].name
    blocks = d.label_blocks
    machine = d.machine
    if instruction.guard is None:
        d.branches([name], falls_through=False)
        return Step(end=lambda fragment, block: blocks[name])
    register, negated = instruction.guard
    d.guarded_inside = True
    d.branches([name], falls_through=True)
    read = d.reader(register, BOOL)

    def end(fragment: Fragment, block: Block) -> Block | None:
        predicate = read(fragment)
        if predicate.size == 1:
            return blocks[name] if bool(predicate[0]) != negated else block.next
        count = np.count_nonzero(predicate)
        if count == 0 or count == fragment.n:
            return blocks[name] if bool(count) != negated else block.next
        machine.scheduler.split(fragment, ~predicate if negated else predicate, blocks[name], block.next)
        return None

    return Step(end=end)


def _brx(d: Builder, instruction: Instruction) -> Step:
    if instruction.modifiers[:1] != ("idx",):
        raise UnknownInstruction("the simulator does not know this branch", instruction)
    index, table = instruction.operands
    names = d.function.branch_targets[table.name]
    d.branches(list(names), falls_through=False)
    read = d.reader(index, U32)
    blocks = d.label_blocks
    machine = d.machine

    def end(fragment: Fragment, block: Block) -> Block | None:
        choice = read(fragment)
        if int(choice.max()) >= len(names):
            raise SimError(f"index {int(choice.max())} is beyond the {len(names)} targets of {table.name}")
        if choice.size == 1 or (choice == choice[0]).all():
            return blocks[names[int(choice[0])]]
        machine.scheduler.spread(fragment, choice, [blocks[name] for name in names])
        return None

    return Step(end=end)


def _ret(d: Builder, instruction: Instruction) -> Step:
    d.branches([], falls_through=False)
    for variable in d.function.returns:
        for register in d.instance.slots.get(variable.name, {}).values():
            d.uses |= 1 << register
    return Step(end=d.machine.control.leave_function(d.instance))


def _exit(d: Builder, instruction: Instruction) -> Step:
    d.branches([], falls_through=False)
    machine = d.machine

    def end(fragment: Fragment, block: Block) -> None:
        machine.scheduler.exit(fragment)

    return Step(end=end)


def _trap(d: Builder, instruction: Instruction) -> Step:
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        raise Trap(f"the kernel executed {instruction.opcode}; {machine.lane_name(fragment, 0)}")

    return Step(run=run)


def _nanosleep(d: Builder, instruction: Instruction) -> Step:
    read = d.reader(instruction.operands[0], U32)
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        machine.clock_ns += int(read(fragment).max())

    return Step(run=run, cost=BUDGET)


def _call(d: Builder, instruction: Instruction) -> Step:
    target, results, arguments, _ = instruction.operands
    if not isinstance(target, Symbol | Label):
        raise UnknownInstruction("the simulator does not follow indirect calls", instruction)
    name = d.machine.module.aliases.get(target.name, target.name)
    function = d.machine.module.functions.get(name)
    if function is None:
        raise SimError(f"function {name} is not declared")
    given = [_slot_name(operand) for operand in _elements(arguments)]
    wanted = [_slot_name(operand) for operand in _elements(results)]
    for variable in given:
        for register in d.instance.slots.get(variable, {}).values():
            d.uses |= 1 << register
    if not function.defined:
        return _external(d, instruction, function, given, wanted)
    machine, program, caller = d.machine, d.program, d.instance
    depth = caller.depth + 1 if program.reaches(name, caller.function.name) else 0
    formals = [variable.name for variable in function.params]
    if len(formals) != len(given):
        raise SimError(f"{name} takes {len(formals)} arguments, {len(given)} are given")
    if depth > MAX_CALL_DEPTH:
        return Step(run=_too_deep(name))

    def end(fragment: Fragment, block: Block) -> Block:
        callee = program.instance(function, depth)
        machine.call_results[block.pc] = wanted
        program.extend(fragment)
        for variable, formal in zip(given, formals, strict=True):
            _copy_slots(fragment, caller, variable, callee, formal)
        fragment.stack = (*fragment.stack, block.pc)
        return callee.blocks[0]

    return Step(end=end)


def _too_deep(name: str) -> Any:
    def run(values: list, fragment: Fragment) -> None:
        raise SimError(f"{name} calls itself more than {MAX_CALL_DEPTH} deep")

    return run


def _external(d: Builder, instruction: Instruction, function: Any, given: list[str], wanted: list[str]) -> Step:
    """A function that the device's system provides: vprintf and the like."""
    action = d.machine.externals.get(function.name)
    if action is None:
        raise UnknownInstruction(
            f"function {function.name} is declared but not defined, and is none of "
            f"{', '.join(sorted(d.machine.externals))}",
            instruction,
        )
    instance = d.instance
    sources = [
        (instance.slot(variable, 0, DTYPES[formal.type]), DTYPES[formal.type])
        for variable, formal in zip(given, function.params, strict=True)
    ]
    for register, _ in sources:
        d.uses |= 1 << register
    target = None
    if wanted:
        dtype = DTYPES[function.returns[0].type]
        target = (instance.slot(wanted[0], 0, dtype), dtype)
        d.defs |= 1 << target[0]
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        result = action(machine, fragment, [fragment.full(register, dtype) for register, dtype in sources])
        if target is not None:
            register, dtype = target
            values[register] = np.atleast_1d(np.asarray(result)).astype(dtype)

    return Step(run=run)


def _elements(operand: Any) -> tuple:
    return operand.elements if isinstance(operand, Vector) else ()


def _slot_name(operand: Any) -> str:
    if isinstance(operand, Symbol | Label):
        return operand.name
    if isinstance(operand, Register):
        raise SimError(f"argument {operand.name} is a register; the simulator passes .param variables only")
    raise SimError(f"argument {operand} is no .param variable")


def _nothing(d: Builder, instruction: Instruction) -> Step:
    return Step(run=lambda values, fragment: None)


def _setmaxnreg(d: Builder, instruction: Instruction) -> Step:
    """Registers are not counted here; observers may."""
    machine = d.machine

    def run(values: list, fragment: Fragment) -> None:
        if machine.observer is not None:
            machine.observer.registers_changed(fragment, instruction)

    return Step(run=run)


HANDLERS: dict[str, Callable[[Builder, Instruction], Step | None]] = {
    "bra": _bra,
    "brx": _brx,
    "ret": _ret,
    "exit": _exit,
    "trap": _trap,
    "brkpt": _trap,
    "nanosleep": _nanosleep,
    "call": _call,
    "pmevent": _nothing,
    "setmaxnreg": _setmaxnreg,
    "griddepcontrol": _nothing,
}

__all__ = ["HANDLERS", "Control"]

"""From parsed functions to blocks of Python closures that execute them.

A function is decoded once a launch (and once more for each depth of recursion) into an `Instance`: its registers
get numbers in the wave's register file, its instructions become closures, straight-line stretches become blocks.
Instructions that may have to wait (barriers, warp collectives, mbarrier waits) are the only one of their block,
so a fragment always waits at a block's beginning.

A handler for an opcode takes ``(builder, instruction)`` and returns a `Step`, or None to leave the instruction to
the lane-wise ones (alu.py). It asks the builder for readers and writers of its operands; that is also how the
builder learns which registers the step uses and defines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .alu import compile_alu
from .decode import immediate
from .errors import SimError, UnknownInstruction
from .fragment import Fragment
from .module import (
    CONDITION_CODE,
    TYPE_BYTES,
    Address,
    Function,
    Immediate,
    Instruction,
    Negated,
    PredicatePair,
    Register,
    Sink,
    Symbol,
    Vector,
)
from .watch import RegisterWatch

if TYPE_CHECKING:
    from .machine import Machine

BOOL = np.dtype(np.bool_)
U32, U64, S32, S64 = (np.dtype(t) for t in (np.uint32, np.uint64, np.int32, np.int64))
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
SIGNED = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}

Run = Callable[[list, Fragment], None]
Reader = Callable[[Fragment], np.ndarray]
Writer = Callable[[Fragment, np.ndarray], None]

MAX_CALL_DEPTH = 64
# What a fragment may spend in one turn, in costs of blocks.
BUDGET = 4096
# Program counters of an instance begin at a multiple of this.
_PC_SPAN = 1 << 24


class Step(NamedTuple):
    """What an instruction became: `run(values, fragment)`, or `end(fragment, block)` for the end of a block.

    `end` returns the block to go on with, or None when the fragment has been parked, split or has exited.
    `cost` is large for instructions by which a thread looks for another's progress: a loop around one is run
    for a few rounds only before the others get their turn. `alone` steps may wait and sit in a block of their own.
    """

    run: Run | None = None
    end: Callable[[Fragment, Block], Block | None] | None = None
    cost: int = 1
    alone: bool = False


class Block:
    """A straight-line stretch of one instance. Registers are bits in `uses`, `writes` and `live_in`."""

    __slots__ = (
        "alone",
        "cost",
        "count",
        "end",
        "end_instruction",
        "instance",
        "instructions",
        "live_in",
        "next",
        "ops",
        "pc",
        "successors",
        "uses",
        "writes",
    )

    def __init__(self, instance: Instance, pc: int) -> None:
        self.instance = instance
        self.pc = pc
        self.ops: list[Run] = []
        self.instructions: list[Instruction | None] = []
        self.end: Callable[[Fragment, Block], Block | None] = _fall_through
        self.end_instruction: Instruction | None = None
        self.next: Block | None = None
        self.successors: list[Block] = []
        self.uses = 0
        self.writes = 0
        self.live_in = 0
        self.count = 0
        self.cost = 1
        # Whether it holds one step that may wait.
        self.alone = False

    def also(self, run: Run, instruction: Instruction) -> None:
        """Add an operation that is no instruction of its own."""
        self.ops.append(run)
        self.instructions.append(instruction)

    @property
    def first_instruction(self) -> Instruction | None:
        """Where the block is, for reports."""
        block: Block | None = self
        while block is not None:
            found = next((i for i in block.instructions if i is not None), None) or block.end_instruction
            if found is not None:
                return found
            block = block.next
        return None


def _fall_through(fragment: Fragment, block: Block) -> Block | None:
    return block.next


class Instance:
    """A function at one depth of recursion: its registers, parameter slots, local variables and blocks."""

    def __init__(self, program: Program, function: Function, depth: int, index: int) -> None:
        self.program = program
        self.function = function
        self.depth = depth
        self.index = index
        self.registers: dict[str, int] = {}
        # Call parameters are registers: {variable: {byte offset: register}}.
        self.slots: dict[str, dict[int, int]] = {}
        self.locals: dict[str, int] = {}
        self.blocks: list[Block] = []

    def slot(self, variable: str, offset: int, dtype: np.dtype) -> int:
        """The register that stands for bytes of a call parameter."""
        slots = self.slots.setdefault(variable, {})
        register = slots.get(offset)
        if register is None:
            register = slots[offset] = self.program.new_register(8 * dtype.itemsize)
        elif self.program.widths[register] != 8 * dtype.itemsize:
            raise SimError(
                f"parameter {variable}+{offset} is accessed with {dtype.itemsize} bytes here and with "
                f"{self.program.widths[register] // 8} bytes elsewhere"
            )
        return register


class Program:
    """All instances of one launch, and the register file they share."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.module = machine.module
        self.widths: list[int] = []
        # Registers that only the simulator writes: constants (an array) or special registers (a function of Root).
        self.statics: dict[int, Any] = {}
        self.blocks: dict[int, Block] = {}
        self._named: dict[Any, int] = {}
        self._instances: dict[tuple[str, int], Instance] = {}
        self._call_graph: dict[str, set[str]] = {}

    def new_register(self, width: int) -> int:
        """A new entry in the register file, of `width` bits."""
        self.widths.append(width)
        return len(self.widths) - 1

    def name_of(self, register: int) -> str:
        """The name of a register, without the mark of the scope that it is from."""
        names = (name for i in self._instances.values() for name, number in i.registers.items() if number == register)
        return next(names, "?").split("#")[0]

    def static(self, key: Any, value: Any, width: int) -> int:
        """The register that holds a constant (an array) or what a function of Root gives, one for each `key`."""
        register = self._named.get(key)
        if register is None:
            register = self._named[key] = self.new_register(width)
            self.statics[register] = value
        return register

    def constant(self, array: np.ndarray) -> int:
        """The register that holds a constant (0-d array)."""
        width = 1 if array.dtype is BOOL else 8 * array.dtype.itemsize
        return self.static((array.dtype.str, array.tobytes()), array, width)

    def fill(self, root: Any) -> None:
        """Give a root entries for all registers, and the statics their values."""
        values = root.values
        values.extend([None] * (len(self.widths) - len(values)))
        for register, static in self.statics.items():
            if values[register] is None:
                values[register] = static if isinstance(static, np.ndarray) else static(root)

    def extend(self, fragment: Fragment) -> None:
        """Make room in a fragment and its root for registers that were numbered after they were made."""
        root_values = fragment.root.values
        if len(root_values) < len(self.widths):
            self.fill(fragment.root)
        if fragment.values is not root_values:
            fragment.values.extend([None] * (len(root_values) - len(fragment.values)))

    def reaches(self, caller: str, callee: str) -> bool:
        """Whether calling `caller` can lead to a call of `callee`, through direct calls."""
        seen: set[str] = set()
        todo = [caller]
        while todo:
            name = todo.pop()
            if name == callee:
                return True
            if name not in seen:
                seen.add(name)
                todo.extend(self._calls(name))
        return False

    def _calls(self, name: str) -> set[str]:
        calls = self._call_graph.get(name)
        if calls is None:
            function = self.module.functions.get(name)
            body = function.body if function is not None else []
            targets = (i.operands[0] for i in body if i.opcode == "call")
            calls = self._call_graph[name] = {t.name for t in targets if isinstance(t, Symbol)}
        return calls

    def instance(self, function: Function, depth: int) -> Instance:
        """The function decoded; once for depth 0 and each depth of recursion."""
        key = (function.name, depth)
        found = self._instances.get(key)
        if found is None:
            found = self._instances[key] = Instance(self, function, depth, len(self._instances))
            Builder(self, found).decode()
        return found


class Builder:
    """Decodes one instance."""

    def __init__(self, program: Program, instance: Instance) -> None:
        self.program = program
        self.machine = program.machine
        self.instance = instance
        self.function = instance.function
        # Of the step being decoded: registers it reads and writes, labels it can go to.
        self.uses = 0
        self.defs = 0
        self.guarded_inside = False
        self._targets: list[str] = []
        self._falls_through = True
        # Complete when the function is decoded; branches look their targets up when they run.
        self.label_blocks: dict[str, Block] = {}

    # Operands

    def register(self, operand: Register) -> int:
        """The number of a register."""
        number = self.instance.registers.get(operand.name)
        if number is None:
            width = 1 if operand.type == "pred" else 8 * TYPE_BYTES[operand.type]
            number = self.instance.registers[operand.name] = self.program.new_register(width)
        return number

    def use(self, operand: Any, dtype: np.dtype) -> int:
        """The register behind a source operand; the one that holds its value when it is not a register."""
        if isinstance(operand, Register):
            if operand.special:
                return self.machine.special_register(self.program, operand)
            number = self.register(operand)
            self.uses |= 1 << number
            return number
        if isinstance(operand, Immediate):
            return self.program.constant(immediate(operand, dtype))
        if isinstance(operand, Symbol):
            return self.symbol(operand, dtype)
        if isinstance(operand, Address) and not operand.offset:
            return self.use(operand.base, dtype)
        raise SimError(f"operand {operand} cannot be read here")

    def symbol(self, operand: Symbol, dtype: np.dtype) -> int:
        """The register that holds a variable's address in its own state space."""
        name, machine = operand.name, self.machine
        if name in machine.shared_offsets:
            value = machine.shared_offsets[name] + operand.offset
            if machine.cluster_size > 1:
                return machine.shared_symbol(self.program, value, dtype)
        elif name in self.instance.locals:
            value = self.instance.locals[name] + operand.offset
        elif self.function.entry and name in machine.param_offsets:
            value = machine.param_offsets[name] + operand.offset
        elif name in machine.global_addresses:
            value = machine.global_addresses[name] + operand.offset
        else:
            raise SimError(f"the address of {name} cannot be taken here")
        size = dtype.itemsize
        return self.program.constant(np.array(value & ((1 << 8 * size) - 1), UNSIGNED[size]))

    def reader(self, operand: Any, dtype: np.dtype) -> Reader:
        """A function from a fragment to the operand's value: one element or one for each lane, never 0-d."""
        negate = isinstance(operand, Negated)
        number = self.use(operand.register if negate else operand, dtype)
        width = self.program.widths[number]
        if negate:
            return lambda fragment: np.logical_not(np.atleast_1d(fragment.get(number)))
        if dtype is BOOL or width == 8 * dtype.itemsize:

            def read(fragment: Fragment) -> np.ndarray:
                value = fragment.values[number]
                if value is None:
                    value = fragment.load(number)
                if value.dtype is not dtype:
                    value = value.view(dtype)
                return value if value.ndim else value.reshape(1)

            return read
        if width < 8 * dtype.itemsize:
            narrow = (SIGNED if dtype.kind == "i" else UNSIGNED)[width // 8]
            return lambda fragment: np.atleast_1d(fragment.get(number)).view(narrow).astype(dtype)
        bits, small = UNSIGNED[width // 8], UNSIGNED[dtype.itemsize]
        return lambda fragment: np.atleast_1d(fragment.get(number)).view(bits).astype(small).view(dtype)

    def define(self, operand: Any) -> int | None:
        """The register behind a destination operand; None for `_`."""
        if isinstance(operand, Sink):
            return None
        if not isinstance(operand, Register) or operand.special:
            raise SimError(f"operand {operand} cannot be written")
        number = self.register(operand)
        self.defs |= 1 << number
        return number

    def writer(self, operand: Any, dtype: np.dtype) -> Writer | None:
        """A function that writes a fragment's value; None for `_`. Narrower values are extended."""
        number = self.define(operand)
        if number is None:
            return None
        extend = widening(dtype, self.program.widths[number])
        if extend is None:

            def write(fragment: Fragment, value: np.ndarray) -> None:
                fragment.values[number] = value

            return write

        def write_wide(fragment: Fragment, value: np.ndarray) -> None:
            fragment.values[number] = extend(value)

        return write_wide

    def address(self, operand: Any, space: str) -> tuple[int, int, str]:
        """(register, offset, space) of an address operand. A variable's own space replaces "generic"."""
        base, offset = (operand.base, operand.offset) if isinstance(operand, Address) else (operand, 0)
        if isinstance(base, Register):
            return self.use(base, U64), offset, space
        if isinstance(base, Symbol):
            if space == "generic":
                space = self.machine.space_of(self.instance, base.name)
            return self.symbol(Symbol(base.name, base.offset + offset), U64), 0, space
        return self.program.constant(np.array((base.value + offset) & ((1 << 64) - 1), np.uint64)), 0, space

    def branches(self, names: list[str], falls_through: bool) -> None:
        """Tell the builder where the step being decoded can go."""
        self._targets = names
        self._falls_through = falls_through

    # Blocks

    def decode(self) -> None:
        """Fill the instance's blocks."""
        instance, function, program = self.instance, self.function, self.program
        for variable in function.variables.values():
            if variable.space == "local":
                instance.locals[variable.name] = self.machine.allocate_local(variable)
        self._base = instance.index * _PC_SPAN
        labels: dict[int, list[str]] = {}
        for name, index in function.labels.items():
            labels.setdefault(index, []).append(name)
        jumps: list[tuple[Block, list[str]]] = []
        watch = RegisterWatch(self) if self.machine.observer is not None else None
        current = self._new_block()
        for index, instruction in enumerate(function.body):
            if index in labels:
                current = self._fresh(current)
                self.label_blocks.update((name, current) for name in labels[index])
            self.uses = self.defs = 0
            self._targets, self._falls_through, self.guarded_inside = [], True, False
            step = self._step(instruction, current)
            guarded = instruction.guard is not None and not self.guarded_inside
            test = current
            if guarded:
                current = self._skip_over(current, instruction)
            elif step.alone:
                current = self._fresh(current)
            used = watch and watch.use(current, instruction, self.uses, self.defs)
            if used and step.end is not None:
                current.also(used, instruction)
            self._place(current, step, instruction)
            if used and step.end is None:
                current.also(used, instruction)
            jumps.append((current, self._targets))
            if guarded or step.end is not None:
                after = self._new_block()
                current.next = after
                if self._falls_through:
                    current.successors.append(after)
                if guarded:
                    test.successors.append(after)
                    test.end = self.machine.control.skip_unless(test.end, after)
                current = after
        if len(function.body) in labels:
            current = self._fresh(current)
            self.label_blocks.update((name, current) for name in labels[len(function.body)])
        current.end = self.machine.control.leave_function(instance)
        for block, names in jumps:
            block.successors.extend(self.label_blocks[name] for name in names)
        _liveness(instance.blocks)
        if watch is not None:
            watch.finish()
        for block in instance.blocks:
            program.blocks[block.pc] = block

    def _new_block(self) -> Block:
        block = Block(self.instance, self._base + len(self.instance.blocks))
        self.instance.blocks.append(block)
        return block

    def _fresh(self, current: Block) -> Block:
        """A block that nothing is in yet: the current one, or one after it."""
        if not current.ops:
            return current
        following = self._new_block()
        current.next = following
        current.successors.append(following)
        return following

    def _place(self, block: Block, step: Step, instruction: Instruction) -> None:
        block.uses |= self.uses & ~block.writes
        block.writes |= self.defs
        block.count += 1
        block.alone = step.alone
        block.cost = max(block.cost, step.cost)
        if step.end is not None:
            block.end = step.end
            block.end_instruction = instruction
        else:
            block.ops.append(step.run)
            block.instructions.append(instruction)

    def _skip_over(self, current: Block, instruction: Instruction) -> Block:
        """`@p op` that is not lane-wise arithmetic is a branch around a block of its own; returns that block."""
        uses, defs = self.uses, self.defs
        self.uses = self.defs = 0
        register, negated = instruction.guard
        # Completed with the block to skip to when that exists.
        current.end = (self.reader(register, BOOL), negated)
        current.end_instruction = instruction
        current.uses |= self.uses & ~current.writes
        body = self._new_block()
        current.next = body
        current.successors.append(body)
        self.uses, self.defs = uses, defs
        return body

    def _step(self, instruction: Instruction, current: Block) -> Step:
        try:
            handler = self.machine.handlers.get(instruction.opcode)
            step = handler(self, instruction) if handler is not None else None
            return step if step is not None else self._lane_wise(instruction, current)
        except SimError as error:
            # A mistake in code that is never reached is none.
            return Step(run=_raiser(error.at(instruction)))
        except Exception as error:
            # Operands that no assembler would accept: handlers expect what the manual promises.
            message = f"the simulator cannot decode this instruction ({type(error).__name__}: {error})"
            return Step(run=_raiser(UnknownInstruction(message, instruction)))

    def _lane_wise(self, instruction: Instruction, block: Block) -> Step:
        """Lane-wise arithmetic, compiled when it is first executed: a launch rarely reaches all of the text."""
        operands = instruction.operands
        for operand in _flat(operands[1:]):
            if isinstance(operand, Negated):
                operand = operand.register
            if isinstance(operand, Register):
                self.use(operand, U32)
            elif isinstance(operand, Symbol):
                # Registers must not be added later, when other fragments run: its address in both widths.
                for dtype in (U32, U64):
                    self.symbol(operand, dtype)
        for operand in _flat(operands[:1]):
            if isinstance(operand, Register) and not operand.special:
                self.defs |= 1 << self.register(operand)
        if CONDITION_CODE.name in self.function.registers:
            # Carry chains pass the carry on in a register that no instruction names.
            carry = 1 << self.register(CONDITION_CODE)
            if instruction.opcode in ("addc", "subc", "madc"):
                self.uses |= carry
            if "cc" in instruction.modifiers:
                self.defs |= carry
        if instruction.guard is not None:
            # Lanes where the guard does not hold keep what they have.
            self.uses |= self.defs | 1 << self.register(instruction.guard[0])
        self.guarded_inside = True
        index = len(block.ops)

        def first_time(values: list, fragment: Fragment) -> None:
            alu = compile_alu(instruction, self.function)
            if alu is None:
                raise UnknownInstruction("the simulator does not know this instruction", instruction)
            op = block.ops[index] = _operation(self, instruction, alu)
            op(values, fragment)

        return Step(run=first_time)


def _flat(operands: tuple) -> list:
    found: list[Any] = []
    for operand in operands:
        if isinstance(operand, Vector):
            found.extend(_flat(operand.elements))
        elif isinstance(operand, PredicatePair):
            found += [operand.first, operand.second]
        else:
            found.append(operand)
    return found


def _raiser(error: SimError) -> Run:
    def run(values: list, fragment: Fragment) -> None:
        raise error

    return run


def _liveness(blocks: list[Block]) -> None:
    """Fill `live_in`: registers that some path from the block's beginning reads before it writes them."""
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out = 0
            for successor in block.successors:
                out |= successor.live_in
            live = block.uses | (out & ~block.writes)
            if live != block.live_in:
                block.live_in = live
                changed = True


def widening(dtype: np.dtype, width: int) -> Callable[[np.ndarray], np.ndarray] | None:
    """How a value of `dtype` fills a register of `width` bits; None when it already does."""
    if dtype is BOOL or width == 8 * dtype.itemsize:
        return None
    if width < 8 * dtype.itemsize:
        raise SimError(f"a value of {8 * dtype.itemsize} bits does not fit in a register of {width} bits")
    wide = (SIGNED if dtype.kind == "i" else UNSIGNED)[width // 8]
    if dtype.kind in "iu":
        return lambda value: value.astype(wide)
    narrow = UNSIGNED[dtype.itemsize]
    return lambda value: value.view(narrow).astype(wide)


def _operation(builder: Builder, instruction: Instruction, alu: Any) -> Run:
    """The closure of a lane-wise instruction, with its guard."""
    numbers = [builder.use(operand, dtype) for operand, dtype in alu.sources]
    dtypes = [dtype for _, dtype in alu.sources]
    targets = [builder.define(operand) for operand, _ in alu.destinations]
    statics = [builder.program.statics.get(number) for number in numbers]
    apply = alu.apply
    if instruction.guard is not None:
        return _guarded(builder, instruction.guard, numbers, dtypes, targets, apply)
    if all(isinstance(static, np.ndarray) for static in statics):
        return _constant(statics, dtypes, targets, apply)
    if len(targets) == 1:
        return _single(numbers, dtypes, targets[0], apply)
    gather = _gatherer(numbers, dtypes)

    def run(values: list, fragment: Fragment) -> None:
        for target, result in zip(targets, apply(*gather(fragment)), strict=True):
            values[target] = result

    return run


def _gatherer(numbers: list[int], dtypes: list[np.dtype]) -> Callable[[Fragment], list[np.ndarray]]:
    pairs = list(zip(numbers, dtypes, strict=True))

    def gather(fragment: Fragment) -> list[np.ndarray]:
        arguments = []
        for number, dtype in pairs:
            value = fragment.values[number]
            if value is None:
                value = fragment.load(number)
            arguments.append(value if value.dtype is dtype else value.view(dtype))
        return arguments

    return gather


def _constant(statics: list, dtypes: list[np.dtype], targets: list[int], apply: Callable) -> Run:
    """All sources are constants: computed now."""
    results = apply(*[static.view(dtype) for static, dtype in zip(statics, dtypes, strict=True)])
    if not isinstance(results, tuple):
        results = (results,)
    stores = [(target, np.atleast_1d(result)) for target, result in zip(targets, results, strict=True)]

    def run(values: list, fragment: Fragment) -> None:
        for target, value in stores:
            values[target] = value

    return run


def _single(numbers: list[int], dtypes: list[np.dtype], target: int, apply: Callable) -> Run:
    """One destination: the common case, spelled out for up to three sources."""
    if len(numbers) == 1:
        (ra,), (ta,) = numbers, dtypes

        def run1(values: list, fragment: Fragment) -> None:
            a = values[ra]
            if a is None:
                a = fragment.load(ra)
            if a.dtype is not ta:
                a = a.view(ta)
            values[target] = apply(a)

        return run1
    if len(numbers) == 2:
        (ra, rb), (ta, tb) = numbers, dtypes

        def run2(values: list, fragment: Fragment) -> None:
            a = values[ra]
            if a is None:
                a = fragment.load(ra)
            if a.dtype is not ta:
                a = a.view(ta)
            b = values[rb]
            if b is None:
                b = fragment.load(rb)
            if b.dtype is not tb:
                b = b.view(tb)
            values[target] = apply(a, b)

        return run2
    if len(numbers) == 3:
        (ra, rb, rc), (ta, tb, tc) = numbers, dtypes

        def run3(values: list, fragment: Fragment) -> None:
            a = values[ra]
            if a is None:
                a = fragment.load(ra)
            if a.dtype is not ta:
                a = a.view(ta)
            b = values[rb]
            if b is None:
                b = fragment.load(rb)
            if b.dtype is not tb:
                b = b.view(tb)
            c = values[rc]
            if c is None:
                c = fragment.load(rc)
            if c.dtype is not tc:
                c = c.view(tc)
            values[target] = apply(a, b, c)

        return run3
    gather = _gatherer(numbers, dtypes)

    def run(values: list, fragment: Fragment) -> None:
        values[target] = apply(*gather(fragment))

    return run


def _guarded(
    builder: Builder,
    guard: tuple[Register, bool],
    numbers: list[int],
    dtypes: list[np.dtype],
    targets: list[int],
    apply: Callable,
) -> Run:
    """Computed for all lanes, kept where the guard holds."""
    register, negated = guard
    predicate = builder.reader(register, BOOL)
    gather = _gatherer(numbers, dtypes)

    def run(values: list, fragment: Fragment) -> None:
        mask = predicate(fragment)
        if mask.size == 1 and bool(mask[0]) == negated:
            return
        results = apply(*gather(fragment))
        if not isinstance(results, tuple):
            results = (results,)
        for target, result in zip(targets, results, strict=True):
            result = np.atleast_1d(result)
            if mask.size > 1:
                old = fragment.get(target)
                if old.dtype is not result.dtype:
                    old = old.view(result.dtype)
                result = np.where(mask, old, result) if negated else np.where(mask, result, old)
            values[target] = result

    return run

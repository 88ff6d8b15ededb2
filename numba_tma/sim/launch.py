"""Launching a kernel in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TextIO

from .errors import LaunchError
from .machine import Machine
from .memory import GlobalMemory
from .module import Module
from .parse import parse
from .report import Report
from .schedules import TOGETHER, WARP_ORDERS
from .timing import ModelOptions

MAX_STEPS = 50_000_000


@lru_cache(maxsize=64)
def parsed(text: str, filename: str = "<ptx>") -> Module:
    """The module of a PTX text, parsed once for equal texts."""
    return parse(text, filename)


def _extents(extents: int | tuple[int, ...]) -> tuple[int, int, int]:
    values = (extents,) if isinstance(extents, int) else tuple(int(extent) for extent in extents)
    if not 1 <= len(values) <= 3:
        raise LaunchError(f"extents {values}: one to three numbers")
    return (*values, 1, 1)[:3]


def launch(
    ptx: str | Module,
    entry: str | None = None,
    *,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    cluster: int | tuple[int, ...] = (1, 1, 1),
    shared_bytes: int = 0,
    params: list[bytes],
    memory: GlobalMemory,
    seed: int = 0,
    policy: str = "fifo",
    warp_order: str = TOGETHER,
    max_steps: int = MAX_STEPS,
    print_to: TextIO | None = None,
    observer: Any = None,
    hazards: bool = True,
    shared_names: Sequence[tuple[str, int, int, int]] = (),
    model: ModelOptions | bool = False,
    banks: bool = False,
) -> Report:
    """Run a kernel to its end.

    `ptx` is PTX text or a parsed module; `entry` names the kernel where there are several. `grid` counts blocks.
    `shared_bytes` is dynamic shared memory a block. `params` are the kernel parameters' bytes, in order. `memory`
    holds the arrays whose addresses are among them. `policy` says in which order copies complete ("fifo", "early",
    "late", "random"), `warp_order` which warps run first ("together", "ascending", "descending", "blocks", "random":
    see schedules.py); `seed` is that of what is random. What the kernel prints goes to Report.output and, at once, to
    `print_to`.

    `hazards` looks for races and their like in what the kernel does (Report.hazards), at the cost of some time.
    `shared_names` names parts of dynamic shared memory for the reports: (name, offset, bytes, bytes of each of its
    elements, which reports count, or 0).

    `model` asks for the model of time (Report.model), at the cost of some more; options say how. `banks` counts the
    wavefronts of accesses to shared memory (Report.banks).

    Raises a SimError: PtxSyntaxError, LaunchError, UnknownInstruction, OutOfBounds, Misaligned, Trap, Deadlock,
    StepLimit (`max_steps` counts executed steps; one step serves many lanes).
    """
    if warp_order not in WARP_ORDERS:
        raise ValueError(f"warp_order {warp_order!r} is none of {', '.join(WARP_ORDERS)}")
    module = parsed(ptx) if isinstance(ptx, str) else ptx
    if entry is None:
        if len(module.entries) != 1:
            raise LaunchError(f"the module has {len(module.entries)} kernels ({', '.join(module.entries)}); name one")
        entry = next(iter(module.entries))
    function = module.entries.get(entry)
    if function is None:
        raise LaunchError(f"the module has no kernel {entry}; it has {', '.join(module.entries) or 'none'}")
    required = function.directives.get("reqnctapercluster")
    cluster = _extents(cluster)
    if required and cluster == (1, 1, 1):
        cluster = _extents(tuple(required))
    machine = Machine(
        module,
        function,
        _extents(grid),
        _extents(block),
        cluster,
        shared_bytes,
        params,
        memory,
        seed,
        policy,
        observer,
        hazards,
        shared_names,
        warp_order,
        (ModelOptions() if model is True else model) or None,
        banks,
    )
    machine.output.echo = print_to
    return machine.run(max_steps)

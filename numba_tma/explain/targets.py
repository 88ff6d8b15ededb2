"""What to explain: PROBLEM.VARIANT of the suite, or FILE.py[:KERNEL]; compiled, never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.errors import NumbaError

from .. import check
from ..compile import DEFAULT_ARCH
from ..kernels import select
from ..kernels.problem import Case, Problem, Variant
from ..launch import Recorded, recording
from .explanation import Explanation


class TargetError(ValueError):
    """There is no such kernel; the message says what there is."""


def explain(
    target: str,
    *,
    arch: str = DEFAULT_ARCH,
    options: Mapping[str, Any] | None = None,
    arguments: str = "arguments",
) -> Explanation:
    """Compile the kernel that `target` names, with no GPU.

    Args:
        target: 'problem.variant' of the suite, or 'file.py' or 'file.py:kernel'; ':kernel' behind a variant chooses
            among several kernels that it launches.
        arch: 'sm_90a', 'sm_80', …
        options: for a variant, what to bind it with instead of the options of its smallest GPU case (`stages` …).
        arguments: for a file, the function that makes the kernel's arguments (`numba_tma.check`).

    Raises:
        TargetError: no such problem, variant or kernel, an option that the variant has not, or code that Numba refuses.
        CheckError: the file cannot be imported, or has no such function.
        CompileError: the kernel does not compile for `arch`.
    """
    name, _, kernel_name = target.partition(":")
    if name.endswith(".py"):
        if options:
            raise TargetError(f"{target}: options are for variants of the suite; write them into {name}")
        # Making the arguments may launch kernels too; the one that was asked for comes last.
        launch = _recorded(check.python_launch(Path(name), kernel_name or None, arguments), arch, name)[-1]
        kernel_name = kernel_name or launch.kernel.__name__
        return Explanation(f"{Path(name).name}:{kernel_name}", "", launch.kernel, launch.compiled)
    try:
        ((problem, variants),) = select([name])
    except KeyError as error:
        raise TargetError(f"{error.args[0]} (or name a file, FILE.py:KERNEL)") from None
    if len(variants) != 1 or "." not in name:
        known = ", ".join(f"{problem.name}.{variant.name}" for variant in problem.variants)
        raise TargetError(f"{name} has {len(variants)} variants; name one: {known}")
    launches = _of_variant(problem, variants[0], arch, options or {})
    names = list(dict.fromkeys(launch.kernel.__name__ for launch in launches))
    if kernel_name and kernel_name not in names:
        raise TargetError(f"{name} launches {', '.join(names)}, and no {kernel_name}")
    launch = next(launch for launch in launches if launch.kernel.__name__ == (kernel_name or names[0]))
    title = name if len(names) == 1 else f"{name}:{launch.kernel.__name__}"
    return Explanation(title, variants[0].idea, launch.kernel, launch.compiled)


def smallest_case(problem: Problem) -> Case:
    """The case to take options and types from: the smallest of those that a quick run on a GPU has."""
    cases = problem.cases.get(("quick", "gpu")) or next(iter(problem.cases.values()))
    return min(cases, key=lambda case: int(np.prod(case.shape, dtype=object)))


def _of_variant(problem: Problem, variant: Variant, arch: str, options: Mapping[str, Any]) -> list[Recorded]:
    case = smallest_case(problem)
    arrays = problem.inputs(case, np.random.default_rng(0))

    def launch() -> None:
        try:
            variant.bind(arrays, **{**case.options_of(variant.name), **options})()
        except (TypeError, ValueError) as error:
            if not options:
                raise
            raise TargetError(f"{problem.name}.{variant.name}: {error}") from None

    return _recorded(launch, arch, f"{problem.name}.{variant.name}")


def _recorded(launch: Callable[[], Any], arch: str, name: str) -> list[Recorded]:
    with recording(arch) as recorded:
        try:
            launch()
        except NumbaError as error:
            raise TargetError(f"{name} does not compile: {error}") from None
    if not recorded.launches:
        raise TargetError(f"{name} launches no kernel")
    return recorded.launches

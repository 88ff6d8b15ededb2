"""Problems that teach TMA: one file or folder each, its variants in teaching order, plain Numba first."""

from __future__ import annotations

from collections.abc import Sequence

from . import attention, copy, gemm, kv_stream, multicast, stencil3d, transpose
from .gather import paged, patches
from .problem import Case, Problem, UnknownNameError, Variant
from .reductions import column_sums, histogram, scatter_add
from .rows import rmsnorm, softmax

PROBLEMS: tuple[Problem, ...] = (
    copy.PROBLEM,
    kv_stream.PROBLEM,
    transpose.PROBLEM,
    stencil3d.PROBLEM,
    multicast.PROBLEM,
    softmax.PROBLEM,
    rmsnorm.PROBLEM,
    column_sums.PROBLEM,
    histogram.PROBLEM,
    scatter_add.PROBLEM,
    patches.PROBLEM,
    paged.PROBLEM,
    gemm.PROBLEM,
    attention.PROBLEM,
)

__all__ = ["PROBLEMS", "Case", "Problem", "Variant", "select"]


def select(names: Sequence[str] | None) -> list[tuple[Problem, tuple[Variant, ...]]]:
    """Problems with their variants, all or those named 'problem' or 'problem.variant'.

    Raises:
        UnknownNameError: no such problem or variant, a KeyError; the message lists what there is.
    """
    if not names:
        return [(problem, tuple(problem.variants)) for problem in PROBLEMS]
    by_name = {problem.name: problem for problem in PROBLEMS}
    chosen: dict[str, list[Variant]] = {}
    for name in names:
        problem_name, _, variant_name = name.partition(".")
        problem = by_name.get(problem_name)
        if problem is None:
            raise UnknownNameError(f"no problem {problem_name!r}; there are {', '.join(by_name)}")
        wanted = [problem.variant(variant_name)] if variant_name else list(problem.variants)
        known = chosen.setdefault(problem_name, [])
        known += [variant for variant in wanted if variant not in known]
    return [(by_name[name], tuple(variants)) for name, variants in chosen.items()]

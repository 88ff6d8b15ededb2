"""RMSNorm over the rows of a matrix.

The problem. For every row r of x, float32, float16 or bfloat16, and weights w for the columns:

    out[r, c] = x[r, c] / sqrt(mean over c of x[r, c]² + epsilon) · w[c]

computed in float32. It is the softmax's problem with one number for each row instead of two, and an operand more: the
weights, which every row needs, and which a block that stays can keep in its registers.

What moves the data: loads and stores (plain, online, registers), bulk copies by the copy engine (bulk, cluster, ring,
grid).

Costs: 2 · rows · columns elements moved, and 4 flops for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import dtypes
from ...pitch import pitched
from ..problem import Case, Problem
from . import binding, peers

EPSILON = 1e-6
# Of the largest result: a sum of up to 2^18 squares in float32, or half a unit in the last place of the type.
TOLERANCES = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 5e-3}


def reference(x: np.ndarray, weight: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    """float64 RMSNorm over the last axis."""
    x = x.astype(np.float64)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + epsilon) * weight.astype(np.float64)


def rmsnorm(
    x: Any, weight: Any, out: Any, *, epsilon: float = EPSILON, variant: str | None = None, **options: Any
) -> None:
    """out[r] = x[r] / sqrt(mean(x[r]²) + epsilon) · weight, for each row r.

    Args:
        x, out: matrices (rows, columns) of one shape and dtype, float32, float16 or bfloat16, on one device; any
            strides. The copy engine takes rows that are contiguous and start on multiples of 16 bytes. `out` may be
            `x`.
        weight: columns numbers of that dtype.
        epsilon: what is added to the mean of the squares.
        variant: plain, online, registers, bulk, cluster, ring or grid; by default one that the arrays allow.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes, layouts or options do not fit; the message says what would.
    """
    given = {"x": x, "out": out, "weight": weight}
    binding.run("rmsnorm", PROBLEM.variants, given, variant, {"epsilon": epsilon, **options})


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    dtype = dtypes.lookup(case.dtype).numpy
    x = pitched(case.shape, dtype)
    x[...] = rng.standard_normal(case.shape, np.float32) * 3
    weight = rng.standard_normal(case.shape[1]).astype(dtype)
    return {"x": x, "weight": weight, "out": pitched(case.shape, dtype)}


def _elements(case: Case) -> int:
    return case.shape[0] * case.shape[1]


def _case(rows: int, columns: int, dtype: str, **rest: Any) -> Case:
    return Case((rows, columns), dtype, {"epsilon": EPSILON}, **rest)


PROBLEM = Problem(
    name="rmsnorm",
    title="RMSNorm over the rows of a matrix",
    inputs=_inputs,
    outputs=("out",),
    reference=lambda arrays, case: {"out": reference(arrays["x"], arrays["weight"], case.options["epsilon"])},
    bytes_moved=lambda case: (2 * _elements(case) + case.shape[1]) * dtypes.lookup(case.dtype).numpy.itemsize,
    flops=lambda case: 4 * _elements(case),
    variants=binding.variants("rmsnorm"),
    cases={
        ("default", "sim"): [_case(16, 1024, "float32"), _case(3, 9001, "bfloat16")],
        ("quick", "sim"): [
            _case(7, 300, "float32", tuned=binding.SMALL),
            _case(7, 517, "bfloat16", tuned=binding.SMALL),
        ],
        ("default", "gpu"): binding.gpu_cases({"epsilon": EPSILON}),
        ("quick", "gpu"): [_case(1000, 4096, "float32"), _case(100, 33333, "bfloat16", without=("registers", "bulk"))],
    },
    tolerance=lambda case: TOLERANCES[case.dtype],
    peers={"torch": peers.torch_rms_norm},
)

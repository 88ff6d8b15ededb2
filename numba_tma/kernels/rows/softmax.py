"""Softmax over the rows of a matrix.

The problem. For every row r of x, float32, float16 or bfloat16:

    out[r, c] = exp(x[r, c] - max over c of x[r, c]) / sum over c of exp(x[r, c] - max)

computed in float32. Each element is needed three times (maximum, sum, result) and should cross the memory bus once in
and once out: what a row's length decides is where it waits meanwhile. In registers and shared memory of one block that
ends at 64 KB or so; beyond, a cluster of blocks holds it together.

What moves the data: loads and stores (plain, online, registers), bulk copies by the copy engine (bulk, cluster, ring,
grid).

Costs: 2 · rows · columns elements moved, and about 5 flops, one exponential among them, for each: memory decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import dtypes
from ...pitch import pitched
from ..problem import Case, Problem
from . import binding, peers

# Of the largest result: a sum of up to 2^18 terms in float32, or half a unit in the last place of the type.
TOLERANCES = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 5e-3}


def reference(x: np.ndarray) -> np.ndarray:
    """float64 softmax over the last axis."""
    x = x.astype(np.float64)
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def softmax(x: Any, out: Any, *, variant: str | None = None, **options: Any) -> None:
    """out[r] = softmax(x[r]) for each row r.

    A row with a NaN or an infinity, or of minus infinities alone, gives NaNs. `out` may be `x`.

    Args:
        x, out: matrices (rows, columns) of one shape and dtype, float32, float16 or bfloat16, on one device; any
            strides. The copy engine takes rows that are contiguous and start on multiples of 16 bytes.
        variant: plain, online, registers, bulk, cluster, ring or grid; by default one that the arrays allow.
        options: tuning parameters of the variant, and `stream`.

    Raises:
        KeyError: no such variant.
        TypeError: not an array, or an option that the variant has not.
        ValueError: shapes, dtypes, layouts or options do not fit; the message says what would.
    """
    binding.run("softmax", PROBLEM.variants, {"x": x, "out": out}, variant, options)


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    dtype = dtypes.lookup(case.dtype).numpy
    x = pitched(case.shape, dtype)
    x[...] = rng.standard_normal(case.shape, np.float32) * 3
    return {"x": x, "out": pitched(case.shape, dtype)}


def _elements(case: Case) -> int:
    return case.shape[0] * case.shape[1]


PROBLEM = Problem(
    name="softmax",
    title="softmax over the rows of a matrix",
    inputs=_inputs,
    outputs=("out",),
    reference=lambda arrays, case: {"out": reference(arrays["x"])},
    bytes_moved=lambda case: 2 * _elements(case) * dtypes.lookup(case.dtype).numpy.itemsize,
    flops=lambda case: 5 * _elements(case),
    variants=binding.variants("softmax"),
    cases={
        ("default", "sim"): [Case((16, 1024), "float32"), Case((3, 9001), "bfloat16")],
        ("quick", "sim"): [
            Case((7, 300), "float32", tuned=binding.SMALL),
            Case((7, 517), "bfloat16", tuned=binding.SMALL),
        ],
        ("default", "gpu"): binding.gpu_cases(),
        ("quick", "gpu"): [
            Case((1000, 4096), "float32"),
            Case((100, 33333), "bfloat16", without=("registers", "bulk")),
        ],
    },
    tolerance=lambda case: TOLERANCES[case.dtype],
    peers={"torch": peers.torch_softmax},
)

"""Matrix multiplication: `matmul` to use, and the ladder of kernels that leads to it to read.

Read `ladder` first, then plain, warp_mma, warpgroup, persistent and tuned, in this order. All steps share `operands`
(checks), `epilogue` (bias, activation, rounding) and `binding` (launches). `matmul` alone has `choice` (which kernel
for which shape), `autotune`, and `tuning`, which measures the table of `choice`.
"""

from .ladder import PROBLEM, gemm, reference
from .matmul import MatmulError, matmul

__all__ = ["PROBLEM", "MatmulError", "gemm", "matmul", "reference"]

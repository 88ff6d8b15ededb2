"""Matrix multiplication, the ladder: C = A Bᵀ (or A B), from one thread an element to the speed of the hardware.

The problem. A is M x K. B is stored N x K, its rows along K as weights usually are (`b_major` "k": C = A Bᵀ), or K x N
(`b_major` "n": C = A B). Both are float16 or bfloat16, products are summed in float32, and C is M x N:

    C[i, j] = activation(sum over k of A[i, k] · B[j, k]  +  bias[j])

Costs: 2·M·N·K flops on M·K + N·K + M·N elements. At M = N = K = 8192 and 16 bits that is 1.1 Tflop on 0.4 GB, 2730
flops a byte; an H200 does 206 tensor-core flops in the time of a byte (989 TFLOP/s, 4.8 TB/s). So bandwidth is no
excuse, if every element that is fetched is used often enough: a block that computes T x T of C uses each T times.

What an SM does in a cycle at best, measured (docs/results/h200_calibration.json): 4096 flops by wgmma, 2600 by
mma.sync; 128 bytes out of shared memory; some 40 bytes from the L2 cache while all other SMs ask too. For each 64 of
K a tile of 128 x 128 fetches 32 KB for 2.1 Mflop: 64 flops a byte; one of 128 x 256 has 87. And there is the power
limit: at 700 W an H200 lowers its clock, which leaves dense products some 700 TFLOP/s where one follows the other.

What each step changes, and what should come of it (docs/gemm.md has what did):

 1. naive         a thread an element of C: two loads and their addresses for each multiply-add
 2. tiled         128 x 128 tiles in shared memory, 8 x 8 of C in registers: four 16-byte loads for 64 multiply-adds,
                  so that the FP32 units (60 TFLOP/s) are the limit. The best of plain Numba
 3. mma_cp_async  mma.sync on fragments out of swizzled shared memory, copied by cp.async: 4096 flops an instruction.
                  An A100's kernel; a Hopper's tensor cores give mma.sync some 60 % of what they have
 4. mma_tma       the same products; the tiles come by TMA, edges included. 12 copies a thread and tile, their
                  addresses and predicates become one instruction of one thread: little is gained while mma.sync is
                  the limit
 5. wgmma         the tensor cores read both tiles out of shared memory themselves: no fragments, no limit of 60 %.
                  Tiles of 128 x 128 end at what L2 delivers, 64 flops for each of 40 bytes, which is 60 % again, but
                  all the time, as three blocks an SM take turns: 1.2 x
 6. ring          a warp of its own fetches, and the next product is queued before this one ends: no pause between K
                  blocks. A block alone would gain a quarter; where others fill its pauses, and L2 is the limit,
                  nothing
 7. warpgroups    128 x 256 a block, for two warpgroups, whose accumulators need registers that the producer gives up:
                  87 flops a byte, so that L2 allows 85 %, more than the power limit does: a tenth or more
 8. persistent    a block an SM for all tiles. The ring is filled once, not for each tile, 2 % of its time at 8192, 4
                  % at 4096; and tiles that are computed together lie together, so that they find in L2 what they read
 9. multicast     each of two blocks fetches half of the B that both need: 131 flops a byte. Up to a tenth if L2 was
                  the limit; but a block that is late now holds up the other
10. store         results leave by TMA in whole lines, while the next tile is multiplied: the end of a tile, 4 % of
                  its time at 8192, 8 % at 4096, costs the tensor cores nothing
11. tuned         as `matmul` does, of such kernels the one that suits the shape. At 8192 tiles of 128 x 256 leave
                  half of the 16th wave idle, 3 %; and of a few rows K is divided, where most SMs would have no tile
                  at all

What moves the data: ordinary loads and stores (1, 2), cp.async (3), TMA (4 and all that follow).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import dtypes
from ...pitch import pitched
from ..problem import Case, Problem, Variant, check_options
from . import binding, peers, plain, warpgroup
from .epilogue import activation_reference


def reference(
    a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None, *, b_major: str = "k", activation: str = "none"
) -> np.ndarray:
    """The product in float64: A (M, K) with B (N, K), or (K, N) for `b_major` "n"; bias (N,) and activation on top."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    product = a @ (b.T if b_major == "k" else b)
    if bias is not None:
        product += bias.astype(np.float64)
    return activation_reference(activation, product)


OPTIONS: dict[str, tuple[str, ...]] = {
    "naive": (),
    "tiled": (),
    "mma_cp_async": ("tile", "stages"),
    "mma_tma": ("tile", "stages"),
    "wgmma": ("columns", "stages"),
    "ring": ("columns", "stages"),
    "warpgroups": ("columns", "stages"),
    "persistent": ("columns", "stages", "band"),
    "multicast": ("columns", "stages", "band", "cluster"),
    "store": ("columns", "stages", "band", "cluster"),
    "tuned": ("configuration",),
}


def gemm(
    a: Any,
    b: Any,
    c: Any,
    *,
    variant: str = "tuned",
    bias: Any = None,
    b_major: str = "k",
    activation: str = "none",
    **options: Any,
) -> None:
    """C = activation(A Bᵀ + bias), or A B with `b_major` "n", by the step named.

    Args:
        a: (M, K), float16 or bfloat16, rows contiguous.
        b: of a's type, (N, K), or (K, N) with `b_major` "n".
        c: (M, N), float16, bfloat16 or float32, written. All arrays on one device (NumPy arrays run in the simulator,
            or are refused by `bind` on a GPU).
        variant: a step of the ladder. From mma_tma on the rows of A and B must start at multiples of 16 bytes
            (`numba_tma.pitched` makes such); "tuned" copies others first.
        bias: (N,), float32 or of c's type.
        activation: none, relu, gelu (with tanh) or silu.
        options: `stream`, and what the step has (`OPTIONS`): `tile`, rows and columns of C in a block, or `columns`
            alone, of 128 rows; `stages` of its ring; `band`, rows of tiles that are gone through together; `cluster`,
            blocks that share B; `configuration`, as `matmul` takes it.

    Raises:
        KeyError: no such step.
        TypeError: not an array, or an option that the step has not.
        ValueError: shapes, types, strides or the tile do not fit; the message says what would.
    """
    chosen = PROBLEM.variant(variant)
    check_options("gemm", chosen, options, OPTIONS[variant])
    given = {"a": a, "b": b, "c": c} | ({} if bias is None else {"bias": bias})
    chosen.bind(given, b_major=b_major, activation=activation, **options)()


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    m, n, k = case.shape
    dtype = dtypes.lookup(case.dtype).numpy
    b_shape = (n, k) if case.options.get("b_major", "k") == "k" else (k, n)
    arrays = {"a": pitched((m, k), dtype), "b": pitched(b_shape, dtype), "c": pitched((m, n), dtype)}
    for name in ("a", "b"):
        arrays[name][...] = rng.standard_normal(arrays[name].shape, np.float32)
    return arrays


def _expected(arrays: Mapping[str, np.ndarray], case: Case) -> dict[str, np.ndarray]:
    return {"c": reference(arrays["a"], arrays["b"], **case.options)}


def _tolerance(case: Case) -> float:
    """C's rounding, half a unit in the last place of the largest value, and the float32 sums of its K products.

    Tensor cores cut each of their sums, of 16 products here, to float32: one part in 2**23 of a partial sum at worst,
    and always downwards, so that the K / 16 of them add up.
    """
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[case.dtype]
    return rounding + max(case.shape[2] // 16, 1) * 2.0**-23


def _case(m: int, n: int, k: int, dtype: str = "float16", without: tuple[str, ...] = (), **options: Any) -> Case:
    return Case((m, n, k), dtype, options, without=without)


_ITEMSIZE = 2
# In the simulator, where B runs along N: other steps stand for these.
_LEFT_OUT = ("naive", "tiled", "mma_cp_async", "ring", "warpgroups", "persistent", "multicast")

PROBLEM = Problem(
    name="gemm",
    title="multiply matrices, C = A Bᵀ: the arithmetic is the limit, once every element fetched is used often enough",
    inputs=_inputs,
    outputs=("c",),
    reference=_expected,
    bytes_moved=lambda case: (
        _ITEMSIZE * (case.shape[0] * case.shape[2] + case.shape[1] * case.shape[2] + case.shape[0] * case.shape[1])
    ),
    flops=lambda case: 2 * case.shape[0] * case.shape[1] * case.shape[2],
    variants=(
        Variant(
            "naive", "ld/st", "a thread an element of C", binding.bind_plain(plain.make_naive, *plain.NAIVE_BLOCK[::-1])
        ),
        Variant(
            "tiled",
            "ld/st",
            "tiles in shared memory, 8 x 8 in registers: the best of plain Numba",
            binding.bind_plain(plain.make_tiled, plain.TILE, plain.TILE),
            baseline=True,
        ),
        Variant("mma_cp_async", "cp.async", "tensor cores, fragments by ldmatrix (A100)", binding.bind_mma_cp_async),
        Variant("mma_tma", "TMA", "the same, tiles by TMA", binding.bind_mma_tma),
        Variant(
            "wgmma",
            "TMA",
            "the warpgroup's tensor cores, which read shared memory themselves",
            binding.bind_warpgroups(warpgroup.make_wgmma, 128, 2),
        ),
        Variant(
            "ring",
            "TMA",
            "a producer warp, and a product always running",
            binding.bind_warpgroups(warpgroup.make_ring, 128, 3),
        ),
        Variant(
            "warpgroups",
            "TMA",
            "two consumer warpgroups, 256 columns, registers lent to them",
            binding.bind_warpgroups(warpgroup.make_warpgroups, 256, 4),
        ),
        Variant("persistent", "TMA", "blocks that stay, tiles in an order for L2", binding.bind_persistent),
        Variant("multicast", "TMA", "a cluster's blocks fetch B for each other", binding.bind_multicast),
        Variant("store", "TMA", "results leave by TMA, behind the next products", binding.bind_store),
        Variant("tuned", "TMA", "matmul: the kernel that suits the shape", binding.bind_tuned),
    ),
    cases={
        ("default", "sim"): [
            _case(130, 200, 96),
            _case(100, 152, 72, "bfloat16", _LEFT_OUT, b_major="n"),
        ],
        ("quick", "sim"): [_case(66, 136, 96)],
        ("default", "gpu"): [
            _case(4096, 4096, 4096, "bfloat16", ("naive",)),
            _case(8192, 8192, 8192, "bfloat16", ("naive",)),
            _case(1000, 3000, 777),
        ],
        ("quick", "gpu"): [_case(1024, 1024, 1024), _case(1000, 700, 333, "bfloat16", b_major="n")],
    },
    tolerance=_tolerance,
    peers={"cuBLAS": peers.cublas},
)

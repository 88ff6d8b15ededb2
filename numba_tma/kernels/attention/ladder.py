"""Attention, the ladder: O = softmax(scale · Q Kᵀ) V for each head, from three plain kernels on.

The problem. q is (B, Sq, Hq, D), k and v are (B, Skv, Hkv, D), of float16 or bfloat16, heads behind rows as projections
leave them. Each head of k and v serves Hq / Hkv neighbouring heads of q. For each head:

    S[i, j] = scale · sum over d of Q[i, d] · K[j, d]                   (or soft_cap · tanh(S / soft_cap))
    lse[i]  = log of the sum of exp(S[i, j]) over the keys j that query i sees
    O[i, d] = sum over j of exp(S[i, j] - lse[i]) · V[j, d]

Queries and keys are aligned at their ends: a causal query i sees the keys j <= i + Skv - Sq, and a window (left, right)
shows i + Skv - Sq - left <= j <= i + Skv - Sq + right. A query that sees no key gets zeros, and minus infinity in lse.

Costs: 4·B·Hq·Sq·Skv·D flops, half of it if causal, on (2·Hq·Sq + 2·Hkv·Skv)·B·D elements of 2 bytes. At S = 4096 that
is 2048 flops a byte, if K and V are fetched once a head; each tile of 128 queries fetches them again, mostly from L2:
then it is 128 flops a byte. Beside the products there is an exponential for each 4·D flops. In a cycle an SM of an H200
does 16 of these, and 4096 flops of wgmma, or some 60 % of that with mma.sync. At D = 128 a tile's exponentials take
half as long as wgmma's products, a third as long as mma.sync's, which is lost where one is done after the other.

What each step changes, and what should come of it:

 1. three_kernels  S in global memory: 4 bytes a score, moved five times, and FP32 products that use each element once.
                   1 TFLOP/s or so; at S = 131072 there is no room for S
 2. online         softmax as the keys come by, S a tile in registers: nothing but Q, K, V and O is moved. The FP32
                   units (60 TFLOP/s) are the limit; 20 to 30 TFLOP/s. The best of plain Numba
 3. mma_cp_async   mma.sync, P straight from S's registers, swizzled tiles in shared memory by cp.async: the way of
                   FlashAttention-2, an A100's kernel. 10 times step 2: on an H200 250 to 350 TFLOP/s
 4. mma_tma        the tiles come by TMA, edges included: no thread spends its time on addresses and predicates of
                   copies. These are few beside 128 products a warp and tile: 0 to 5 %, as nothing else changes
 5 wgmma           64 rows a block: Q, K and V stay in shared memory, where wgmma reads them, S and O in registers; a
                   producer warp fetches. The tensor cores' full rate, but they rest while the block's one consumer
                   does its softmax, and blocks are too large for two on an SM: 1 time step 4, or less
 6 warpgroups      two consumers with 64 rows each share K and V, and the producer gives them its registers: one's
                   softmax beside the other's products, as chance has it. 1.5 times step 5
 7 overlapped      each starts the next block's Q Kᵀ before this one's P V, and does the softmax of the former while the
                   latter runs: 1.2 to 1.4 times step 6
 8 ping_pong       the two take turns in starting products, by named barriers, instead of leaving it to chance: a few %
 9 persistent      a block an SM, which claims one tile after the other, the longest first: the next tile is fetched
                   while O leaves, and a causal mask's short tiles fill the gaps. 5 to 15 %, most for short sequences

Step 10, 8-bit floats, is `fp8`'s, since it rounds what it is given. `attention` is step 9 with what `choice` picks.
What moves the data: ordinary loads and stores (1, 2), cp.async (3), TMA (4 and all that follow).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import arrays, dtypes, sim
from ...launch import Kernel
from ...pitch import pitched
from ..calls import new_like
from ..problem import Case, Problem, Variant, check_options
from . import peers, plain, warp_mma, warpgroup
from .choice import Configuration
from .forward import bind_attention
from .masks import UNBOUNDED, Band
from .operands import Operands, operands


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """O (B, Sq, Hq, D) and lse (B, Hq, Sq) in float64; the arguments as `operands` takes them."""
    batch, sq, heads, head_dim = q.shape
    skv, kv_heads = k.shape[1:3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    seen = Band.of(causal, window).visible(sq, skv)
    o, lse = np.empty(q.shape), np.empty((batch, heads, sq))
    for b, h in np.ndindex(batch, heads):
        queries, keys, values = (
            x[b, :, head].astype(np.float64)
            for x, head in ((q, h), (k, h * kv_heads // heads), (v, h * kv_heads // heads))
        )
        s = queries @ keys.T
        s *= scale
        if soft_cap:
            s = soft_cap * np.tanh(s / soft_cap)
        s[~seen] = -np.inf
        most = s.max(axis=1, keepdims=True)
        zero = np.where(np.isfinite(most), most, 0)
        s -= zero
        p = np.exp(s, out=s)
        total = p.sum(axis=1, keepdims=True)
        o[b, :, h] = p @ values / np.where(total, total, 1)
        with np.errstate(divide="ignore"):
            lse[b, h] = (np.log(total) + zero)[:, 0]
    return o, lse


# ---------------------------------------------------------------------------------------------------------------------
# Host side. What binds a step takes the arrays "q", "k", "v", "o" and "lse", and what `operands` takes besides.

Launch = Callable[[], Any]
Bind = Callable[..., Launch]


def bind_three_kernels(arrays: Mapping[str, Any], *, stream: object = None, **asked: Any) -> Launch:
    """Bind step 1. S is allocated here, 4·B·Hq·Sq·Skv bytes."""
    o = operands(arrays, **asked)
    s = new_like((o.batch, o.heads, o.sq, o.skv), dtypes.float32, o.q)
    x, y = plain.TILE
    heads, group = o.heads * o.batch, np.uint32(o.group)
    scores = plain.make_scores(o.band.kind, o.scores.capped)[(-(-o.skv // x), -(-o.sq // y), heads), None, stream]
    softmax = plain.make_softmax_rows()[(-(-o.sq // plain.SOFTMAX_ROWS), o.heads, o.batch), None, stream]
    product = plain.make_product()[(-(-o.head_dim // x), -(-o.sq // y), heads), None, stream]
    return _in_turn(
        (
            scores.bind(o.q, o.k, s, group, *o.diagonals, o.scores.factor, o.scores.inner),
            softmax.bind(s, o.lse),
            product.bind(s, o.v, o.o, group),
        )
    )


def bind_online(arrays: Mapping[str, Any], *, stream: object = None, **asked: Any) -> Launch:
    """Bind step 2."""
    o = operands(arrays, **asked)
    kernel = plain.make_online(o.dtype, o.head_dim, o.band.kind, o.scores.capped)
    return _bind_arrays(o, kernel, plain.online_rows(o.head_dim), stream)


def bind_mma_cp_async(
    arrays: Mapping[str, Any],
    *,
    stream: object = None,
    tile: tuple[int, int] | None = None,
    warps: int | None = None,
    stages: int = 2,
    **asked: Any,
) -> Launch:
    """Bind step 3."""
    o = operands(arrays, **asked)
    o.check_rows()
    tiling = warp_mma.tiling_for(o.head_dim, tile, warps, stages)
    kernel = warp_mma.make_mma_cp_async(o.dtype, o.band.kind, o.scores.capped, tiling)
    return _bind_arrays(o, kernel, tiling.rows, stream)


def bind_mma_tma(
    arrays: Mapping[str, Any],
    *,
    stream: object = None,
    tile: tuple[int, int] | None = None,
    warps: int | None = None,
    stages: int = 2,
    **asked: Any,
) -> Launch:
    """Bind step 4."""
    o = operands(arrays, **asked)
    o.check_rows()
    tiling = warp_mma.tiling_for(o.head_dim, tile, warps, stages)
    kernel = warp_mma.make_mma_tma(o.dtype, o.band.kind, o.scores.capped, tiling)
    return kernel[o.grid(tiling.rows), None, stream].bind(
        *o.maps(tiling.rows, tiling.keys),
        o.o,
        o.lse,
        np.uint32(o.skv),
        np.uint32(o.group),
        *o.diagonals,
        o.scores.factor,
        o.scores.inner,
    )


def _bind_warpgroups(
    make: Callable[..., Kernel], consumers: int = 2, ping_pong: bool = False, persistent: bool = False
) -> Bind:
    """Bind one of steps 5 to 9."""
    default_consumers = consumers

    def bind(
        given: Mapping[str, Any],
        *,
        stream: object = None,
        keys: int | None = None,
        stages: int = 2,
        consumers: int = default_consumers,
        **asked: Any,
    ) -> Launch:
        q, k, v, o, lse = (given[name] for name in ("q", "k", "v", "o", "lse"))
        head_dim = arrays.view(q).shape[-1]
        if keys is None:
            keys = 128 if head_dim <= 128 else 96 if head_dim <= 192 else 80
        configuration = Configuration(consumers, keys, stages, head_dim > 128, ping_pong, persistent)
        return bind_attention(q, k, v, o, lse, stream=stream, make=make, configuration=configuration, **asked)

    return bind


def _bind_arrays(o: Operands, kernel: Kernel, rows: int, stream: object) -> Launch:
    """Bind a kernel of (q, k, v, o, lse, group, low, high, factor, inner), blocks of which compute `rows` rows of O."""
    launcher, group = kernel[o.grid(rows), None, stream], np.uint32(o.group)
    return launcher.bind(o.q, o.k, o.v, o.o, o.lse, group, *o.diagonals, o.scores.factor, o.scores.inner)


def _in_turn(launches: Sequence[Launch]) -> Launch:
    """One launch after the other; of the simulator's reports the sum, with the model of the one that takes longest."""

    def launch() -> sim.Report | None:
        reports = [run() for run in launches]
        if None in reports:
            return None
        moved = {kind: sum(report.bytes[kind] for report in reports) for kind in reports[0].bytes}
        models = [report.model for report in reports if report.model]
        return sim.Report(
            sum(report.instructions for report in reports),
            sum(report.lane_instructions for report in reports),
            sum(report.steps for report in reports),
            moved,
            [hazard for report in reports for hazard in report.hazards],
            "".join(report.output for report in reports),
            max(models, key=lambda model: model.seconds, default=None),
        )

    return launch


_WARPGROUPS, _OVERLAPPED = warpgroup.make_warpgroups, warpgroup.make_overlapped

OPTIONS: dict[str, tuple[str, ...]] = {
    "three_kernels": (),
    "online": (),
    "mma_cp_async": ("tile", "warps", "stages"),
    "mma_tma": ("tile", "warps", "stages"),
    **dict.fromkeys(("wgmma", "warpgroups", "overlapped", "ping_pong", "persistent"), ("keys", "stages", "consumers")),
}


def attend(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    variant: str = "mma_tma",
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    scale: float | None = None,
    soft_cap: float = 0.0,
    **options: Any,
) -> None:
    """O = softmax(scale · Q Kᵀ) V by the step named.

    Args:
        q: (B, Sq, Hq, D), float16 or bfloat16, D at most 256. Its last dimension is contiguous, as all arrays'.
        k, v: (B, Skv, Hkv, D), of q's type; Hq is a multiple of Hkv.
        o: as q, written.
        lse: (B, Hq, Sq), float32, written: the logarithm of each row's sum of exponentials. All arrays on one device
            (NumPy arrays run in the simulator, or are refused by `bind` on a GPU).
        variant: a step of the ladder. From mma_cp_async on D is a multiple of 8, and the rows of q, k, v and o start
            at multiples of 16 bytes.
        causal: query i sees the keys up to i + Skv - Sq.
        window: (left, right): it sees as many before and behind that one; -1 for all.
        scale: what the scores are multiplied by; 1 / sqrt(D) by default.
        soft_cap: bound of the scores, by a hyperbolic tangent; 0 for none.
        options: `tile` (queries of a block, keys of a tile), `warps`, `stages`, `keys` (of a tile), `consumers` (of 64
            queries each) and `stream` where the step has them.

    Raises:
        KeyError: no such step.
        TypeError: not an array, or an option that the step has not.
        ValueError: shapes, types, strides, the tile or a number do not fit; the message says what would.
    """
    chosen = PROBLEM.variant(variant)
    check_options("attention", chosen, options, OPTIONS[variant])
    given = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    chosen.bind(given, causal=causal, window=window, scale=scale, soft_cap=soft_cap, **options)()


def _inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    batch, sq, skv, heads, kv_heads, head_dim = case.shape
    dtype = dtypes.lookup(case.dtype).numpy
    shapes = {"q": (batch, sq, heads, head_dim), "k": (batch, skv, kv_heads, head_dim)}
    shapes |= {"v": shapes["k"], "o": shapes["q"]}
    made = {name: pitched(shape, dtype) for name, shape in shapes.items()}
    for name in ("q", "k", "v"):
        made[name][...] = rng.standard_normal(made[name].shape, np.float32)
    return made | {"lse": np.empty((batch, heads, sq), np.float32)}


def _expected(given: Mapping[str, np.ndarray], case: Case) -> dict[str, np.ndarray]:
    o, lse = reference(given["q"], given["k"], given["v"], **case.options)
    return {"o": o, "lse": lse}


def _tolerance(case: Case) -> float:
    """Twice half a unit in the last place: O is rounded to it, and so is each weight before it multiplies a value.

    The weights' errors are independent and tend to cancel as the values themselves do, so that they are to O's largest
    element what its own rounding is. Beside these, sums in float32 and exponentials 2**-22 off do not count.
    """
    return 2 * {"float16": 2.0**-11, "bfloat16": 2.0**-8}[case.dtype]


def _case(
    *shape: int, dtype: str = "bfloat16", without: tuple[str, ...] = (), tuned: Mapping | None = None, **options: Any
) -> Case:
    """A case of the shape (B, Sq, Skv, Hq, Hkv, D)."""
    return Case(shape, dtype, options, tuned or {}, without)


def _flops(case: Case) -> int:
    batch, sq, skv, heads, _, head_dim = case.shape
    return 4 * batch * heads * sq * skv * head_dim // (2 if case.options.get("causal") else 1)


def _bytes_moved(case: Case) -> int:
    batch, sq, skv, heads, kv_heads, head_dim = case.shape
    return batch * (4 * head_dim * (heads * sq + kv_heads * skv) + 4 * heads * sq)


# Small tiles, for small sizes, and blocks of several of them.
_SMALL: dict[str, dict[str, Any]] = {name: {"tile": (32, 16), "warps": 2} for name in ("mma_cp_async", "mma_tma")}
_SMALL |= {name: {"keys": 32} for name in ("wgmma", "warpgroups", "overlapped", "ping_pong", "persistent")}

PROBLEM = Problem(
    name="attention",
    title="attend: two products with a softmax between them, whose scores never leave the chip",
    inputs=_inputs,
    outputs=("o", "lse"),
    reference=_expected,
    bytes_moved=_bytes_moved,
    flops=_flops,
    variants=(
        Variant("three_kernels", "ld/st", "scores, softmax, product: S in global memory", bind_three_kernels),
        Variant("online", "ld/st", "softmax as the keys come by: the best of plain Numba", bind_online, baseline=True),
        Variant("mma_cp_async", "cp.async", "tensor cores, P from S's registers (A100)", bind_mma_cp_async),
        Variant("mma_tma", "TMA", "the same, tiles by TMA", bind_mma_tma),
        Variant("wgmma", "TMA", "wgmma: operands stay in shared memory", _bind_warpgroups(_WARPGROUPS, consumers=1)),
        Variant(
            "warpgroups", "TMA", "a producer and two consumers, with registers as needed", _bind_warpgroups(_WARPGROUPS)
        ),
        Variant("overlapped", "TMA", "softmax beside the last block's product", _bind_warpgroups(_OVERLAPPED)),
        Variant("ping_pong", "TMA", "the consumers take turns", _bind_warpgroups(_OVERLAPPED, ping_pong=True)),
        Variant("persistent", "TMA", "a block an SM, tiles claimed", _bind_warpgroups(_OVERLAPPED, persistent=True)),
    ),
    cases={
        ("default", "sim"): [
            _case(1, 70, 100, 2, 1, 64, causal=True, tuned=_SMALL),
            _case(1, 130, 130, 1, 1, 128, dtype="float16"),
        ],
        ("quick", "sim"): [_case(1, 40, 50, 2, 1, 64, causal=True, tuned=_SMALL)],
        ("default", "gpu"): [
            _case(16, 1024, 1024, 16, 16, 128),
            _case(4, 4096, 4096, 16, 16, 128),
            _case(4, 4096, 4096, 16, 16, 128, causal=True),
            _case(4, 4096, 4096, 32, 32, 64, dtype="float16", without=("three_kernels",)),
            _case(1, 8000, 8000, 16, 2, 128, dtype="float16", window=(1000, 0), without=("three_kernels",)),
        ],
        ("quick", "gpu"): [
            _case(2, 1024, 1024, 8, 8, 128),
            _case(1, 1000, 1333, 8, 2, 64, dtype="float16", causal=True),
        ],
    },
    tolerance=_tolerance,
    peers={"FlashAttention-2 (torch)": peers.flash_attention_2},
)

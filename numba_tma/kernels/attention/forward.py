"""`attention` and `attention_varlen`: for arrays of NumPy, CuPy, PyTorch or Numba, on the GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays, driver, dtypes
from ...arrays import ArrayView
from ...device_array import DeviceArray
from ...launch import Kernel, backend
from ...ragged import RaggedMap
from ...tensor_map import TensorMap
from ..calls import current_stream, layout, new_like, pointer
from ..gemm.warpgroup import GROUP_ROWS
from . import choice
from .choice import Configuration
from .kv_cache import seen
from .masks import UNBOUNDED
from .operands import BOX, Operands, operands
from .warpgroup import make_overlapped

_MOST_PLANS, _MOST_PLACES = 1024, 256  # kept for calls like one before
_HEAD_STEP = 16  # columns that the tensor cores take at once


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    scale: float | None = None,
    soft_cap: float = 0.0,
    out: Any = None,
    lse: Any = None,
    stream: object = None,
    configuration: Configuration | None = None,
) -> Any:
    """softmax(scale · Q Kᵀ) V for each head, with float32 sums.

    Queries and keys are aligned at their ends: query i of Sq is beside key i + Skv - Sq.

    Args:
        q: (B, Sq, Hq, D), float16 or bfloat16, D a multiple of 8 up to 256. Its rows of D elements are contiguous and
            begin at multiples of 16 bytes; otherwise any strides do, such as those of a slice of a fused projection.
        k, v: (B, Skv, Hkv, D), likewise, of q's type; Hq is a multiple of Hkv.
        causal: a query sees the keys up to the one beside it.
        window: (left, right): it sees as many keys before and behind that one; -1 for all.
        scale: what the scores are multiplied by; 1 / sqrt(D) by default.
        soft_cap: bound of the scores, by a hyperbolic tangent; 0 for none.
        out: as q, written; by default a new array of the kind of q.
        lse: (B, Hq, Sq), float32: written if given, the logarithm of each row's sum of exponentials.
        stream: a stream's handle or object; by default PyTorch's or CuPy's current one, or the default stream.
        configuration: how the kernel is cut; by default `choice.choose`'s.

    A query that sees no key gets zeros, and minus infinity in lse. Nothing waits for the GPU, except where arrays in
    host memory have to be copied there and back. For a few queries at the end of a long cache `decode` is faster.

    Returns:
        `out`.

    Raises:
        TypeError: not arrays.
        ValueError: shapes, types, strides or numbers do not fit; the message says what would.
        RuntimeError: a first call while the stream is captured into a graph.
    """
    options = Options(causal, tuple(window), scale, soft_cap, configuration)
    return _call("attention", (q, k, v, out, lse), None, options, stream)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    q_starts: Any,
    kv_starts: Any,
    longest_q: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    scale: float | None = None,
    soft_cap: float = 0.0,
    out: Any = None,
    lse: Any = None,
    stream: object = None,
    configuration: Configuration | None = None,
) -> Any:
    """`attention` of sequences of different lengths, packed one behind the other.

    Args:
        q: (rows of all sequences, Hq, D).
        k, v: (rows of all sequences, Hkv, D).
        q_starts, kv_starts: (sequences + 1,), int32, where q is: sequence b has the rows from starts[b] on and before
            starts[b + 1]. They are read on the GPU, and not checked: numbers must not fall, nor exceed the rows there
            are. A sequence may be empty.
        longest_q: the most rows of q that a sequence has; rows behind that many are not written.
        out: as q. lse: (Hq, rows of q). The rest as for `attention`.

    Returns:
        `out`.

    Raises:
        As `attention`.
    """
    options = Options(causal, tuple(window), scale, soft_cap, configuration)
    if not isinstance(longest_q, (int, np.integer)) or longest_q < 1:
        raise ValueError(f"attention_varlen: longest_q {longest_q!r}; a number of rows expected, 1 or more")
    return _call("attention_varlen", (q, k, v, out, lse), (q_starts, kv_starts, int(longest_q)), options, stream)


@dataclass(frozen=True)
class Options:
    """What is asked of a call, besides its arrays."""

    causal: bool = False
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    scale: float | None = None
    soft_cap: float = 0.0
    configuration: Configuration | None = None

    def operands(self, q: Any, k: Any, v: Any, o: Any, lse: Any) -> Operands:
        """The arrays and what is asked, checked."""
        given = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
        return operands(given, self.causal, self.window, self.scale, self.soft_cap)


class Workspace:
    """A counter, zero between launches, and a lse for callers who want none. One launch at a time may use it."""

    def __init__(self, lse_shape: tuple[int, ...], host: bool) -> None:
        counter = np.zeros(1, np.uint32)
        self.counter = counter if host else DeviceArray(counter)
        self.lse = (np.empty if host else DeviceArray.empty)(lse_shape, np.float32)


class Plan:
    """All of a call that does not depend on where its arrays lie.

    `make` is a maker of kernels as `warpgroup.make_overlapped`.

    Raises:
        TypeError: not arrays.
        ValueError: extents, types, strides or options do not fit.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        starts: tuple[Any, Any, int] | None,
        options: Options,
        make: Callable[..., Kernel] = make_overlapped,
    ) -> None:
        self._packed = packed = starts is not None
        found = arrays.view(q)
        self.host, self._shape, self._element = found.host, found.shape, dtypes.lookup(found.dtype)
        *batches, rows, heads, _ = found.shape if packed or len(found.shape) == 4 else (0, 0, 0, 0)
        self._lse_shape = (*batches, heads, rows)
        described = (q, k, v, q if out is None else out, np.empty(self._lse_shape, np.float32) if lse is None else lse)
        o = options.operands(*(_as_batch(x) for x in described) if packed else described)
        o.check_rows()
        columns = -(-o.head_dim // _HEAD_STEP) * _HEAD_STEP
        length = max(1, o.skv // max(arrays.view(starts[0]).shape[0] - 1, 1)) if packed else o.skv  # of a sequence
        chosen = options.configuration or choice.choose(columns, o.band.kind, length)
        self._boxes = [(GROUP_ROWS, 1, BOX), *[(chosen.keys, 1, BOX)] * 2, (GROUP_ROWS, 1, BOX)]
        kernel = make(columns, o.dtype, o.band.kind, o.scores.capped, packed=packed, **chosen.cut())
        batch, sq, skv = o.batch, o.sq, o.skv
        diagonals = o.diagonals
        if packed:
            batch, sq = arrays.view(starts[0]).shape[0] - 1, starts[2]
            diagonals = o.band.diagonals(0, 0)
        tiles_m = -(-sq // chosen.rows)
        tiles = tiles_m * o.heads * batch
        if tiles >= 1 << 31:
            raise ValueError(f"{tiles:,} tiles of {chosen.rows} queries: fewer than 2**31 expected; split the batch")
        together = choice.together(length, o.head_dim, o.group)
        counts = (tiles_m, o.heads, o.heads * batch, together, o.group)
        self._scalars = (np.uint32(sq), np.uint32(skv), *diagonals, *map(np.uint32, counts))
        self._scalars += (o.scores.factor, o.scores.inner)
        self._on = lambda stream: kernel[chosen.blocks(tiles), None, stream]
        self.empty = tiles == 0

    def new_output(self, q: Any) -> Any:
        """An array for the result, of the kind of q."""
        return new_like(self._shape, self._element, q)

    def workspace(self) -> Workspace:
        """A new one for this plan's launches."""
        return Workspace(self._lse_shape, self.host)

    def launcher(self, stream: int) -> Any:
        """The kernel on a stream: it takes `arguments`."""
        return self._on(stream)

    def arguments(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, starts: tuple[Any, Any, int] | None, workspace: Workspace
    ) -> tuple:
        """All arguments, for arrays where they are now; they keep the workspace alive, not the arrays."""
        lse = workspace.lse if lse is None else lse
        given = [seen(x) for x in (q, k, v, out)]
        if self._packed:
            maps = [
                RaggedMap(x, box, swizzle="128B", l2_promotion="128B")
                for x, box in zip(given, self._boxes, strict=True)
            ]
            lse, first, second = _as_batch(lse), *(seen(x) for x in starts[:2])
        else:
            pairs = zip(given, self._boxes, strict=True)
            maps = [TensorMap(x, (1, *box), swizzle="128B", l2_promotion="128B", store=False) for x, box in pairs]
            lse, first, second = seen(lse), workspace.counter, workspace.counter  # no starts are looked at
        return (*maps, lse, workspace.counter, first, second, *self._scalars)


_plans: dict[tuple, tuple[Plan, dict[tuple, Callable[[], Any]], dict[int, Workspace]]] = {}


def _call(
    caller: str,
    given: tuple[Any, Any, Any, Any, Any],
    starts: tuple[Any, Any, int] | None,
    options: Options,
    stream: object,
) -> Any:
    places_of = given if starts is None else (*given, *starts[:2])
    longest = 0 if starts is None else starts[2]
    key = (tuple([layout(array, caller) for array in places_of]), longest, options, backend())
    q, k, v, out, lse = given
    stream = current_stream(q) if stream is None else driver.stream_handle(stream)
    found = _plans.get(key)
    if found is None:
        _check_memories(caller, places_of)
        if starts is not None:
            _check_starts(q, starts)
        found = (Plan(*given, starts, options), {}, {})
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = found
    plan, places, workspaces = found
    if out is None:
        out = plan.new_output(q)
    if plan.empty:
        return out
    place = (*[x if x is None else pointer(x) for x in (q, k, v, out, lse, *(starts or ())[:2])], stream)
    bound = places.get(place)
    if bound is None:
        workspace = workspaces.get(stream)
        if workspace is None:
            _refuse_capture(caller, plan, stream)
            workspace = workspaces[stream] = plan.workspace()
        launcher, arguments = plan.launcher(stream), plan.arguments(q, k, v, out, lse, starts, workspace)
        if plan.host and backend() != "sim":
            launcher(*arguments)  # copied to the GPU and back
            return out
        if len(places) >= _MOST_PLACES:
            places.clear()
        bound = places[place] = launcher.bind(*arguments)
    bound()
    return out


def _check_memories(caller: str, given: tuple) -> None:
    views = [arrays.view(x) for x in given if x is not None]
    if len({view.host for view in views}) > 1:
        raise ValueError(f"{caller}: all arrays must lie in the same memory, a GPU's or the host's")


def _check_starts(q: Any, starts: tuple[Any, Any, int]) -> None:
    views = [arrays.view(x) for x in starts[:2]]
    if any(view.dtype != np.int32 or len(view.shape) != 1 for view in views) or views[0].shape != views[1].shape:
        found = ", ".join(f"{view.dtype} {view.shape}" for view in views)
        raise ValueError(f"attention_varlen: starts are {found}; int32 of shape (sequences + 1,) expected, both")
    if views[0].shape[0] < 2:
        raise ValueError("attention_varlen: starts of no sequence; at least two numbers expected, 0 and an end")
    if len(arrays.view(q).shape) != 3:
        raise ValueError(f"attention_varlen: q has the shape {arrays.view(q).shape}; (rows, Hq, D) expected")


def _refuse_capture(caller: str, plan: Plan, stream: int) -> None:
    if not plan.host and driver.is_capturing(stream):
        raise RuntimeError(
            f"{caller}: the first call with such arrays allocates its workspace, which cannot be captured into a "
            f"graph; call it once before on this stream, or capture what bind_attention gives"
        )


def bind_attention(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any = None,
    *,
    stream: object = None,
    make: Callable[..., Kernel] = make_overlapped,
    **options: Any,
) -> Callable[[], Any]:
    """`attention` for arrays that stay where they are: a function that launches it, and allocates nothing.

    It has a workspace of its own, and keeps the arrays alive. In the simulator it gives a report.

    Args:
        q, k, v, out, lse, stream: as `attention` takes them.
        make: what makes the kernel; `warpgroup.make_overlapped` or its like.
        options: `causal`, `window`, `scale`, `soft_cap` and `configuration` of `attention`.

    Raises:
        TypeError: not arrays, or no such option.
        ValueError: as `attention`.
    """
    stream = current_stream(q) if stream is None else driver.stream_handle(stream)
    given = (q, k, v, out, lse)
    _check_memories("bind_attention", given)
    plan = Plan(*given, None, Options(**options), make)
    bound = plan.launcher(stream).bind(*plan.arguments(*given, None, plan.workspace()))

    def launch() -> Any:
        return bound()

    launch.keeps = given
    return launch


def _as_batch(array: Any) -> Any:
    """The memory of an array with a dimension of one in front."""
    view: ArrayView = arrays.view(array)
    return seen(array, (1, *view.shape), (max(view.shape[0] * view.strides[0], 16), *view.strides))

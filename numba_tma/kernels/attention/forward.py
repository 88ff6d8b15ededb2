"""`attention` and `attention_varlen`: for arrays of NumPy, CuPy, PyTorch or Numba, on the GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays, driver, dtypes
from ...arrays import ArrayView
from ...launch import Kernel, Launcher, backend, watched
from ...ragged import RaggedMap
from ...tensor_map import TensorMap
from ..calls import current_stream, layout, new_like, pointer, recent_places, recent_plans, remembered, seen
from ..gemm.warpgroup import GROUP_ROWS
from . import choice
from .choice import Configuration
from .masks import UNBOUNDED, Band
from .operands import BOX, Operands, check_outputs, number, operands
from .tile_counters import tile_counter
from .warpgroup import make_overlapped

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
        out: as q, written; by default a new array of the kind of q. It may be q, and must not overlap k and v.
        lse: (B, Hq, Sq), float32: written if given, the logarithm of each row's sum of exponentials.
        stream: a stream's handle or object; by default PyTorch's or CuPy's current one, or the default stream.
        configuration: how the kernel is cut; by default `choice.choose`'s.

    A query that sees no key gets zeros, and minus infinity in lse. Scores are good for up to 10^8: beyond, float32's
    steps are so large that a row may come out as NaN. A NaN or an infinity among keys or values may spoil rows that do
    not see it, if they see others of its block of keys. Nothing waits for the GPU, except where arrays in host memory
    have to be copied there and back; the first call with arrays like these compiles, which takes seconds.
    For a few queries at the end of a long cache `decode` is faster.

    Returns:
        `out`.

    Raises:
        TypeError: not arrays.
        ValueError: shapes, types, strides or numbers do not fit; the message says what would.
        RuntimeError: the process' first call while a stream is captured into a graph.
    """
    options = _options(causal, window, scale, soft_cap, configuration)
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
            starts[b + 1]. Numbers must not fall, nor exceed the rows there are. On a GPU nobody looks at them before
            the kernel does, to which one that does counts as the nearest row. A sequence may be empty.
        longest_q: the most rows of q that a sequence has; of a longer one not all rows are written.
        out: as q. lse: (Hq, rows of q). The rest as for `attention`.

    Returns:
        `out`.

    Raises:
        As `attention`.
        ValueError: also starts in the host's memory that fall or exceed the rows.
    """
    options = _options(causal, window, scale, soft_cap, configuration)
    if not isinstance(longest_q, (int, np.integer)) or longest_q < 1:
        raise ValueError(f"attention_varlen: longest_q {longest_q!r}; a number of rows expected, 1 or more")
    return _call("attention_varlen", (q, k, v, out, lse), (q_starts, kv_starts, int(longest_q)), options, stream)


@dataclass(frozen=True)
class Options:
    """What is asked of a call, besides its arrays.

    Raises:
        TypeError: a scale or a soft cap that is no number, or a configuration that is none.
        ValueError: a window that is no pair of numbers of keys.
    """

    causal: bool = False
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    scale: float | None = None
    soft_cap: float = 0.0
    configuration: Configuration | None = None

    def __post_init__(self) -> None:
        if self.scale is not None:
            object.__setattr__(self, "scale", number("scale", self.scale))
        object.__setattr__(self, "soft_cap", number("soft_cap", self.soft_cap))
        if not isinstance(self.configuration, (Configuration, type(None))):
            raise TypeError(
                f"configuration is a {type(self.configuration).__name__}; a Configuration expected, or None"
            )
        band = Band.of(bool(self.causal), self.window)
        object.__setattr__(self, "window", (band.left, band.right))

    def operands(self, q: Any, k: Any, v: Any, o: Any, lse: Any) -> Operands:
        """The arrays and what is asked, checked."""
        given = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
        return operands(given, self.causal, self.window, self.scale, self.soft_cap)


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
        given = (q, k, v, out, lse)
        o = options.operands(*(x if x is None or not packed else _as_batch(x) for x in given))
        o.check_rows()
        columns = -(-o.head_dim // _HEAD_STEP) * _HEAD_STEP
        length = max(1, o.skv // max(arrays.view(starts[0]).shape[0] - 1, 1)) if packed else o.skv  # of a sequence
        chosen = options.configuration or choice.choose(columns, o.band.kind, length, None if packed else o.sq)
        self._boxes = [(GROUP_ROWS, 1, BOX), *[(chosen.keys, 1, BOX)] * 2, (GROUP_ROWS, 1, BOX)]
        kernel = make(columns, o.dtype, o.band.kind, o.scores.capped, packed=packed, **chosen.cut())
        batch, sq, skv = o.batch, o.sq, o.skv
        if packed:
            batch, sq = arrays.view(starts[0]).shape[0] - 1, min(starts[2], o.sq)
        diagonals = o.band.diagonals(0, 0) if packed else o.diagonals
        tiles_m = -(-sq // chosen.rows)
        if tiles_m % chosen.cluster:
            raise ValueError(
                f"{sq} queries are {tiles_m} tiles of {chosen.rows}, which a cluster of {chosen.cluster} does not "
                f"divide; choose a configuration with cluster=1"
            )
        tiles = tiles_m * o.heads * batch
        if tiles >= 1 << 31:
            raise ValueError(f"{tiles:,} tiles of {chosen.rows} queries: fewer than 2**31 expected; split the batch")
        together = min(choice.together(length, o.head_dim, o.group), o.heads * batch)
        counts = (tiles_m, o.heads, o.heads * batch, together, o.group)
        self._scalars = (np.uint32(sq), np.uint32(skv), *diagonals, *map(np.uint32, counts))
        self._scalars += (o.scores.factor, o.scores.inner)
        self._on = lambda stream: kernel[chosen.blocks(tiles), None, stream]

    def new_output(self, q: Any) -> Any:
        """An array for the result, of the kind of q."""
        return new_like(self._shape, self._element, q)

    def launcher(self, stream: int) -> Launcher:
        """The kernel on a stream: it takes `arguments`."""
        return self._on(stream)

    def check_outputs(self, caller: str, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
        """See that the arrays to be written, where they are now, overlap none that is read; `out` may be q.

        Raises:
            ValueError: they do, or are read-only.
        """
        given = {"q": q, "k": k, "v": v, "out": out, "lse": lse}
        views = {name: arrays.view(array) for name, array in given.items() if array is not None}
        check_outputs(caller, views, *(name for name in ("out", "lse") if name in views))

    def arguments(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, starts: tuple[Any, Any, int] | None, counter: Any
    ) -> tuple:
        """All arguments, for arrays where they are now; they keep no array on a GPU alive."""
        given = [seen(x) for x in (q, k, v, out)]
        shared = (True, True, True, False)  # what is only read may have dimensions that share memory
        layouts = zip(given, self._boxes, shared, strict=True)
        common = {"swizzle": "128B", "l2_promotion": "128B"}
        if self._packed:
            maps = [RaggedMap(x, box, overlap=overlap, **common) for x, box, overlap in layouts]
            first, second = (seen(x) for x in starts[:2])
        else:
            maps = [TensorMap(x, (1, *box), overlap=overlap, store=False, **common) for x, box, overlap in layouts]
            first = second = counter  # no starts are looked at
        if lse is None:
            lse = arrays.reinterpret(counter, np.float32, (1, 1, 0), (16, 16, 4))
        else:
            lse = _as_batch(lse) if self._packed else seen(lse)
        return (*maps, lse, counter, first, second, *self._scalars)


_options = remembered(Options)
_plans: dict[tuple, tuple[Plan, dict[tuple, Callable[[], Any]]]] = recent_plans()


def _call(
    caller: str,
    given: tuple[Any, Any, Any, Any, Any],
    starts: tuple[Any, Any, int] | None,
    options: Options,
    stream: object,
) -> Any:
    q, k, v, out, lse = given
    every = given if starts is None else (*given, *starts[:2])
    key = (tuple([layout(x, caller) for x in every]), starts and starts[2], options, backend())
    stream = current_stream(q) if stream is None else driver.stream_handle(stream)
    found = _plans.get(key)
    if found is None:
        _check_arrays(caller, given)
        if starts is not None:
            _check_packed(given, starts)
        found = (Plan(*given, starts, options), recent_places())
        _plans[key] = found
    plan, places = found
    if out is None:
        out = plan.new_output(q)
    if plan.host and starts is not None:
        _check_numbers(given, starts)
    if plan.host or watched():
        plan.check_outputs(caller, q, k, v, out, lse)
        counter = tile_counter(plan.host, caller, stream)
        plan.launcher(stream)(*plan.arguments(q, k, v, out, lse, starts, counter))
        return out
    place = (*[x if x is None else pointer(x) for x in (q, k, v, out, lse, *(starts or ())[:2])], stream)
    bound = places.get(place)
    if bound is None:
        plan.check_outputs(caller, q, k, v, out, lse)
        arguments = plan.arguments(q, k, v, out, lse, starts, tile_counter(plan.host, caller, stream))
        bound = places[place] = plan.launcher(stream).bind(*arguments)
    bound()
    return out


def _check_arrays(caller: str, given: tuple, optional: tuple[str, ...] = ("out", "lse")) -> None:
    hosts = set()
    for name, array in zip(("q", "k", "v", "out", "lse"), given, strict=True):
        if array is None and name in optional:
            continue
        view = arrays.view(array)
        if view is None:
            raise TypeError(f"{caller}: {name} is {type(array).__name__}; an array is expected")
        hosts.add(view.host)
    if len(hosts) > 1:
        raise ValueError(f"{caller}: all arrays must lie in the same memory, a GPU's or the host's")


_PACKED = {
    "q": "(rows, Hq, D)",
    "k": "(rows, Hkv, D)",
    "v": "(rows, Hkv, D)",
    "out": "(rows, Hq, D)",
    "lse": "(Hq, rows)",
}


def _check_packed(given: tuple, starts: tuple[Any, Any, int]) -> None:
    for (name, wanted), array in zip(_PACKED.items(), given, strict=True):
        view = arrays.view(array) if array is not None else None
        if view is not None and len(view.shape) != wanted.count(",") + 1:
            raise ValueError(f"attention_varlen: {name} has the shape {view.shape}; {wanted} expected")
    views = [arrays.view(x) for x in starts[:2]]
    if None in views:
        found = ", ".join(type(x).__name__ for x in starts[:2])
        raise TypeError(f"attention_varlen: starts are {found}; arrays of int32 expected, both")
    if any(view.dtype != np.int32 or len(view.shape) != 1 for view in views) or views[0].shape != views[1].shape:
        found = ", ".join(f"{view.dtype} {view.shape}" for view in views)
        raise ValueError(f"attention_varlen: starts are {found}; int32 of shape (sequences + 1,) expected, both")
    if views[0].shape[0] < 2:
        raise ValueError("attention_varlen: starts of no sequence; at least two numbers expected, 0 and an end")
    if any(view.host != arrays.view(given[0]).host for view in views):
        raise ValueError("attention_varlen: starts must lie in the same memory as q")


def _check_numbers(given: tuple, starts: tuple[Any, Any, int]) -> None:
    for name, rows, array in zip(("q", "kv"), given, starts[:2], strict=False):
        numbers, most = seen(array), arrays.view(rows).shape[0]
        least = np.concatenate(([0], numbers[:-1]))
        wrong = np.nonzero((numbers < least) | (numbers > most))[0]
        if wrong.size:
            i = int(wrong[0])
            raise ValueError(
                f"attention_varlen: {name}_starts[{i}] is {numbers[i]}; {least[i]} to {most} expected: starts do not "
                f"fall, and there are {most} rows"
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

    It keeps the arrays alive. In the simulator it gives a report.

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
    _check_arrays("bind_attention", given, optional=("lse",))
    for name in options:
        if name not in Options.__dataclass_fields__:
            raise TypeError(f"bind_attention has no option {name!r}; it has {', '.join(Options.__dataclass_fields__)}")
    plan = Plan(*given, None, Options(**options), make)
    plan.check_outputs("bind_attention", *given)
    counter = tile_counter(plan.host, "bind_attention", stream)
    bound = plan.launcher(stream).bind(*plan.arguments(*given, None, counter))

    def launch() -> Any:
        return bound()

    launch.keeps = given
    return launch


def _as_batch(array: Any) -> Any:
    """The memory of an array with a dimension of one in front."""
    view: ArrayView = arrays.view(array)
    return seen(array, (1, *view.shape), (max(view.shape[0] * view.strides[0], 16), *view.strides))

"""`matmul`: a matrix product on the GPU for arrays of NumPy, CuPy, PyTorch or Numba, or in the simulator."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import arrays, bench, driver, dtypes
from ...arrays import ArrayView, DeviceView
from ...dtypes import ElementType
from ...launch import Launcher, backend, gpu_refusal, watched
from ...pitch import pitched_copy
from ...tensor_map import TensorMap
from ...warpgroup import k_elements
from ..calls import current_stream, layout, new_like, pointer, recent_places, recent_plans
from . import choice
from .autotune import AutotuneError, Product, fastest
from .choice import Configuration, Shape, Types
from .epilogue import check_activation
from .warpgroup import GROUP_ROWS, b_box

_INPUTS = ("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2")
_OUTPUTS = ("float16", "bfloat16", "float32")
AUTOTUNE = "autotune"
_REPEATS = 15


class MatmulError(ValueError):
    """Operands that do not fit each other, or `matmul`; the message says what would."""


def matmul(
    a: Any,
    b: Any,
    *,
    out: Any = None,
    out_dtype: object = None,
    bias: Any = None,
    activation: str = "none",
    accumulate: bool = False,
    stream: object = None,
    configuration: Configuration | str | None = None,
) -> Any:
    """activation(a @ b + bias), with float32 sums, for matrices or batches of matrices.

    Args:
        a: (M, K) or (batch, M, K), of float16, bfloat16, float32 (multiplied as tf32), float8_e4m3fn or float8_e5m2.
        b: (K, N) or (batch, K, N), of the same type. Of arrays with two dimensions one serves the whole batch.
            A transposed view, such as a weight's `w.T`, is taken as it lies; so is a row-major one of 16-bit elements.
        out: where to write, of shape (M, N) or (batch, M, N); by default a new array of the kind of `a`.
        out_dtype: float16, bfloat16 or float32; by default `a`'s type, or bfloat16 for 8-bit types.
        bias: (N,), float32 or of the output's type.
        activation: "none", "relu", "gelu" (with tanh) or "silu".
        accumulate: add to what `out` holds, as a residual connection does. Where TMA can write `out` it adds in the L2
            cache, rounding the product to the output's type first; elsewhere the sum alone is rounded.
        stream: a stream's handle or object; by default PyTorch's or CuPy's current one, or the default stream.
        configuration: by default the table's choice for a product of this shape; "autotune" for the fastest kernel by
            measuring some ten on these operands, which takes half a minute of compiling at the first call and nothing
            at later ones, in this process or another; or a `numba_tma.kernels.gemm.choice.Configuration`.

    Nothing waits for the GPU, except where arrays in host memory have to be copied there and back. Operands whose rows
    do not begin at multiples of 16 bytes, or lie in an order that the tensor cores cannot read (row-major `b` of 8 or
    32 bits, column-major `a`), are copied first, at the price of reading and writing them once.

    Returns:
        `out`.

    Raises:
        TypeError: not arrays, or of types that there is no product of.
        MatmulError: shapes that do not fit.
        AutotuneError: "autotune" without a GPU, for operands in host memory, or while the stream is captured.
    """
    layouts = tuple([layout(array, "matmul") for array in (a, b, out, bias)])
    key = (layouts, out_dtype, activation, accumulate, configuration, backend())
    stream = current_stream(a) if stream is None else driver.stream_handle(stream)
    planned = _plans.get(key)
    if planned is None:
        planned = plan(a, b, out, bias, out_dtype, activation, accumulate, configuration, stream)
        _plans[key] = planned
    if out is None:
        out = planned.new_output(a)
    if planned.launch is not None:
        planned.launch(a, b, bias, out, stream)
    return out


@dataclass(frozen=True)
class Plan:
    """All that does not depend on where the arrays lie.

    `launch(a, b, bias, out, stream)` gives the simulator's report, or None on a GPU; it is itself None where there is
    nothing to compute. `new_output(a)` makes an array for the result.
    """

    new_output: Callable[[Any], Any]
    launch: Callable[[Any, Any, Any, Any, int], Any] | None


_plans: dict[tuple, Plan] = recent_plans()


def plan(
    a: Any,
    b: Any,
    out: Any,
    bias: Any,
    out_dtype: object,
    activation: str,
    accumulate: bool,
    configuration: Configuration | str | None,
    stream: int,
) -> Plan:
    """What `matmul` does for operands like these, checked; the parameters and what is raised are `matmul`'s.

    Nothing is launched, but for "autotune", which measures on `stream` and leaves the product in `out`, or with
    `accumulate` in an array of its own.
    """
    a_view, b_view = _viewed("a", a), _viewed("b", b)
    element = dtypes.lookup(a_view.dtype)
    if element.name not in _INPUTS or dtypes.lookup(b_view.dtype) is not element:
        raise TypeError(
            f"matmul: a is {a_view.dtype}, b {b_view.dtype}; expected one type for both, of {', '.join(_INPUTS)}"
        )
    check_activation(activation)
    shape = _shape(a_view.shape, b_view.shape)
    out_shape = (shape.batch, shape.m, shape.n) if len(a_view.shape) + len(b_view.shape) > 4 else (shape.m, shape.n)
    out_view = _viewed("out", out) if out is not None else None
    out_element = _output_element(element, out_view, out_dtype)
    _check_output(out_view, out_element, out_shape)
    _check_bias(bias, shape, out_element)
    _check_configuration(configuration)
    if accumulate and out is None:
        raise MatmulError("matmul: accumulate=True adds to what `out` holds: give `out`")
    new_output = functools.partial(new_like, out_shape, out_element)
    if 0 in out_shape:
        return Plan(new_output, None)
    if shape.k == 0:
        raise MatmulError("matmul: K is 0, there is nothing to add up; an empty sum is zero: fill `out` yourself")

    a_way = _way(a_view, element, ("k",))
    b_way = _way(b_view, element, ("n", "k") if element.size == 2 else ("k",), transposed=True)
    # TMA writes whole 16 bytes: also beyond a row that ends between two.
    steps = out_view.strides[:-1] if out_view else ()
    by_tma = all(step % 16 == 0 for step in (*steps, shape.n * out_element.size, out_view.pointer if out_view else 0))
    types = Types(element.name, out_element.name, b_way.major, by_tma)
    sms = choice.multiprocessors()
    batched = tuple(len(view.shape) == 3 and view.shape[0] > 1 for view in (a_view, b_view))
    work = _Work(types, shape, activation, bias is not None, accumulate, batched, sms)
    on_gpu = not any(view.host for view in (a_view, b_view))
    if configuration == AUTOTUNE:

        def measured_on() -> tuple:
            return a_way.ready(a), b_way.ready(b), bias, new_output(a) if out is None or accumulate else out

        chosen = _autotuned(work, measured_on, stream, on_gpu)
    else:
        chosen = configuration or choice.choose(types, shape, sms)
    if not chosen.fits(types):
        raise MatmulError(f"matmul: {chosen} does not fit {types}: no such tile, or no room for two stages of it")
    kernel = _Kernel(work, chosen)
    places: dict[tuple, Callable[[], object]] = recent_places()
    ready = on_gpu and a_way.ready is b_way.ready is _itself

    def launch(a: Any, b: Any, bias: Any, out: Any, stream: int) -> Any:
        if not ready or watched():
            return kernel.on(stream)(*kernel.arguments(a_way.ready(a), b_way.ready(b), bias, out))
        key = (pointer(a), pointer(b), pointer(out), bias if bias is None else pointer(bias), stream)
        bound = places.get(key)
        if bound is None:
            bound = places[key] = kernel.on(stream).bind(*kernel.arguments(a, b, bias, out))
        return bound()

    return Plan(new_output, launch)


@dataclass(frozen=True)
class _Work:
    """What a kernel is to do. `batched`: whether A and B are batches themselves, rather than one for all."""

    types: Types
    shape: Shape
    activation: str
    has_bias: bool
    accumulate: bool
    batched: tuple[bool, bool]
    sms: int


class _Kernel:
    """The kernel of a configuration with all of its arguments but the arrays."""

    def __init__(self, work: _Work, chosen: Configuration) -> None:
        shape = work.shape
        self._kernel = chosen.kernel(work.types, work.activation, work.has_bias, work.accumulate)
        self._grid = chosen.grid(shape, work.sms)
        self._maps = _Maps(work.types, chosen)
        self._c_by_tma = work.types.by_tma and chosen.splits == 1
        k_blocks = -(-shape.k // k_elements(work.types.dtype))
        counts = (shape.n, *chosen.tiles(shape), shape.batch, k_blocks, *work.batched)
        self._scalars = tuple(np.uint32(count) for count in counts)

    def on(self, stream: int) -> Launcher:
        """The kernel on a stream."""
        return self._kernel[self._grid, None, stream]

    def arguments(self, a: Any, b: Any, bias: Any, out: Any) -> tuple:
        """All arguments, for operands that TMA can read."""
        maps = self._maps
        c = maps.matrices(out)
        target = maps.c(out) if self._c_by_tma else c
        return (maps.a(a), maps.b(b), target, c if bias is None else maps.bias(bias), *self._scalars)


def _check_configuration(configuration: Configuration | str | None) -> None:
    if isinstance(configuration, str) and configuration != AUTOTUNE:
        raise MatmulError(f"matmul: configuration {configuration!r}; expected {AUTOTUNE!r}, a Configuration, or None")


def _autotuned(work: _Work, operands: Callable[[], tuple], stream: int, on_gpu: bool) -> Configuration:
    """The fastest configuration, measured on (a, b, bias, out) unless it is known; the inputs not in the L2 cache."""
    refusal = "the backend in force is the simulator" if backend() == "sim" else gpu_refusal()
    if refusal or not on_gpu:
        raise AutotuneError(
            f"matmul: configuration {AUTOTUNE!r} measures kernels on a GPU, but "
            f"{refusal or 'these operands lie in host memory'}; leave it out to have one chosen by the table"
        )

    def measure(candidates: Sequence[Configuration]) -> Mapping[Configuration, float]:
        if driver.is_capturing(stream):
            raise AutotuneError(
                f"matmul: configuration {AUTOTUNE!r} cannot measure while its stream is captured into a graph; call it "
                f"once with such operands before"
            )
        a, b, bias, out = operands()
        launches = {}
        for candidate in candidates:
            kernel = _Kernel(work, candidate)
            launches[str(candidate)] = kernel.on(stream).bind(*kernel.arguments(a, b, bias, out))
        timings = bench.time_launches(launches, repeats=_REPEATS, stream=stream)
        return {candidate: timings[str(candidate)].median for candidate in candidates}

    device = driver.device_name(driver.current_device())
    product = Product(device, work.sms, work.types, work.shape, work.activation, work.has_bias)
    return fastest(product, measure)


def _viewed(name: str, array: Any) -> ArrayView:
    view = arrays.view(array)
    if view is None:
        raise TypeError(f"matmul: {name} is a {type(array).__name__}; an array is expected")
    return view


def _shape(a: tuple[int, ...], b: tuple[int, ...]) -> Shape:
    if not (2 <= len(a) <= 3 and 2 <= len(b) <= 3):
        raise MatmulError(f"matmul: a {a} and b {b}; each must have two dimensions, or three with the batch in front")
    if a[-1] != b[-2]:
        raise MatmulError(f"matmul: a {a} has {a[-1]} columns, b {b} has {b[-2]} rows; both are K and must be equal")
    batches = {shape[0] for shape in (a, b) if len(shape) == 3}
    if len(batches - {1}) > 1:
        raise MatmulError(f"matmul: a {a} and b {b} have batches of different sizes")
    return Shape(max(batches, default=1) if 0 not in batches else 0, a[-2], b[-1], a[-1])


def _output_element(element: ElementType, out: ArrayView | None, out_dtype: object) -> ElementType:
    if out_dtype is not None:
        found = dtypes.lookup(out_dtype)
    elif out is not None:
        found = dtypes.lookup(out.dtype)
    else:
        found = dtypes.lookup("bfloat16") if element.size == 1 else element
    if found.name not in _OUTPUTS:
        raise TypeError(f"matmul: output of {found}; there are {', '.join(_OUTPUTS)}")
    return found


def _check_output(out: ArrayView | None, element: ElementType, shape: tuple[int, ...]) -> None:
    if out is None:
        return
    if out.shape != shape or dtypes.lookup(out.dtype) is not element:
        raise MatmulError(f"matmul: out is {out.dtype} of shape {out.shape}; expected {element} of shape {shape}")
    if shape[-1] > 1 and out.strides[-1] != element.size:
        raise MatmulError(f"matmul: out has strides of {out.strides} B; its rows must be contiguous")
    if out.readonly:
        raise MatmulError("matmul: out is read-only")


def _check_bias(bias: Any, shape: Shape, out: ElementType) -> None:
    if bias is None:
        return
    view = _viewed("bias", bias)
    if view.shape != (shape.n,) or dtypes.lookup(view.dtype).name not in ("float32", out.name):
        raise MatmulError(
            f"matmul: bias is {view.dtype} of shape {view.shape}; expected float32 or {out} of shape ({shape.n},)"
        )


@dataclass(frozen=True)
class _Way:
    """How an operand gets to the tensor cores: `ready(array)` is it, or a copy that TMA can read; `major` is the
    dimension that its rows then run along."""

    ready: Callable[[Any], Any]
    major: str


def _way(view: ArrayView, element: ElementType, majors: tuple[str, ...], transposed: bool = False) -> _Way:
    """`majors` are the orders that the kernel can read. A's rows run along K as it is, those of B (`transposed`) when
    its last two dimensions change places."""
    straight, turned = ("n", "k") if transposed else ("k", "m")
    for major, axis in ((straight, -1), (turned, -2)):
        contiguous = view.strides[axis] == element.size or view.shape[axis] == 1
        others = [view.strides[i] for i in range(-len(view.shape), 0) if i != axis and view.shape[i] > 1]
        aligned = view.pointer % 16 == 0 and not any(stride % 16 or stride <= 0 for stride in others)
        if major in majors and contiguous and aligned:
            return _Way(_itself, major)
    if straight in majors:
        return _Way(_copied, straight)
    return _Way(_turned_copy, turned)


def _itself(array: Any) -> Any:
    return array


def _copied(array: Any) -> Any:
    return pitched_copy(array, empty=_allocator(array))


def _turned_copy(array: Any) -> Any:
    """A copy whose last but one dimension is contiguous, seen with its dimensions as before."""
    return _swapped(pitched_copy(_swapped(array), empty=_allocator(array)))


def _swapped(array: Any) -> Any:
    return array.transpose(-1, -2) if arrays.is_torch(array) else array.swapaxes(-1, -2)


def _allocator(array: Any) -> Callable[..., Any]:
    """How the array's library makes an array of undefined contents, on the same device."""
    if arrays.is_torch(array):
        return functools.partial(sys.modules["torch"].empty, device=array.device)
    library = type(array).__module__.split(".")[0]
    if library == "cupy":
        return sys.modules["cupy"].empty
    if isinstance(array, np.ndarray):
        return np.empty
    raise MatmulError(
        f"matmul: a {type(array).__module__}.{type(array).__name__} whose rows are not contiguous or do not begin at "
        f"multiples of 16 bytes cannot be copied here; make it with numba_tma.pitched, or as a PyTorch or CuPy array"
    )


class _Maps:
    """Tensor maps of the operands of one plan.

    Of arrays on a GPU they have the addresses alone, and keep no array alive: a launch is enqueued before `matmul`
    returns, and the library that frees the memory afterwards does it in the stream's order.
    """

    def __init__(self, types: Types, configuration: Configuration) -> None:
        self._types = types
        depth = k_elements(types.dtype)
        self._boxes = {
            "a": (1, configuration.a_rows, depth),
            "b": (1, *b_box(configuration.b_columns, types.dtype, types.b_major)),
            "c": (1, GROUP_ROWS, 128 // dtypes.lookup(types.out_dtype).size),
        }

    def a(self, array: Any) -> TensorMap:
        """A's map."""
        return self._map("a", _as_batch(array, self._types.dtype), self._types.dtype)

    def b(self, array: Any) -> TensorMap:
        """B's map, of its transpose where its rows run along K."""
        return self._map("b", _as_batch(array, self._types.dtype, self._types.b_major == "k"), self._types.dtype)

    def c(self, array: Any) -> TensorMap:
        """The output's map."""
        return self._map("c", self.matrices(array), self._types.out_dtype)

    def matrices(self, array: Any) -> Any:
        """The output with a dimension for the batch."""
        return _as_batch(array, self._types.out_dtype)

    def bias(self, array: Any) -> Any:
        """The bias as an array of the kernel."""
        view = arrays.view(array)
        return array if view.host else DeviceView(None, view.pointer, view.shape, view.strides, view.dtype)

    def _map(self, which: str, batch: Any, dtype: str) -> TensorMap:
        return TensorMap(batch, self._boxes[which], swizzle="128B", dtype=dtype, store=False)


def _as_batch(array: Any, dtype: str, turned: bool = False) -> Any:
    """The memory of a matrix, or of a batch of them, under three dimensions, the last two in turn if `turned`."""
    view, element = arrays.view(array), dtypes.lookup(dtype)
    shape, strides = view.shape, view.strides
    if turned:
        shape, strides = (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2])
    if len(shape) == 2:
        shape, strides = (1, *shape), (max(shape[0] * strides[0], element.size), *strides)
    if view.host:
        return arrays.reinterpret(array, element.numpy, shape, strides)
    return DeviceView(None, view.pointer, shape, strides, element.numpy)

"""Run, check and measure the suite's problems: what `scripts/run_all.py` shows.

Every run draws fresh inputs, poisons the outputs and compares with the problem's reference. A variant that raises is
a failed check like a wrong number; one that the device cannot run is reported with the reason.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from . import bench, driver, launch
from .device_array import DeviceArray
from .kernels.problem import Case, Problem, Variant

SIMULATOR = "PTX simulator"
_PIECE = 1 << 18  # elements


@dataclass
class Record:
    """One variant at one size on one backend. A GPU gives times, the simulator counts of instructions and bytes."""

    problem: str
    variant: str
    moves: str
    backend: str
    device: str
    shape: tuple[int, ...]
    dtype: str
    options: dict[str, Any]
    ok: bool
    error: float | None = None
    tolerance: float = 0.0
    reason: str = ""
    skipped: bool = False
    hazards: list[str] = field(default_factory=list)
    seconds: float | None = None
    seconds_fastest: float | None = None
    samples: int | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    share_of_device_copy: float | None = None
    ratio_to_baseline: float | None = None
    peer: str | None = None
    ratio_to_peer: float | None = None
    instructions: int | None = None
    bytes_moved: dict[str, int] = field(default_factory=dict)
    modelled_seconds: float | None = None
    model: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as the JSON file keeps them."""
        return asdict(self)


def run_case(
    problem: Problem,
    case: Case,
    variants: Iterable[Variant],
    backend: str,
    *,
    seed: int,
    measure: bool = True,
    device_copy_rate: float | None = None,
    repeats: int = 30,
    schedules: int = 1,
    model: bool = False,
) -> Iterator[Record]:
    """Run the variants of one case; records come one by one in the simulator, together after timing on a GPU.

    `schedules` is how many of the simulator's orders of copies and warps to try; the check of a variant ends with the
    first that goes wrong. `model` asks the simulator for its model of time, under the first of the orders.
    """
    variants = [variant for variant in variants if variant.name not in case.without]
    rng = np.random.default_rng(seed)
    host = problem.inputs(case, rng)
    expected = problem.reference(host, case)
    if backend == "sim":
        for variant in variants:
            orders = launch.sim.first_schedules(schedules, seed)
            first = record = _simulated(problem, case, variant, host, expected, {**orders[0], "model": model})
            for schedule in orders[1:]:
                if record.ok:
                    record = _simulated(problem, case, variant, host, expected, schedule)
            record.modelled_seconds, record.model = first.modelled_seconds, first.model
            yield record
        return
    records, launches = [], {}
    device = {name: DeviceArray(array) for name, array in host.items()}
    for variant in variants:
        record, bound = _checked_on_gpu(problem, case, variant, device, expected)
        records.append(record)
        if bound is not None and record.ok:
            launches[variant.name] = bound
    if measure and launches:
        _measure(problem, case, records, launches, _peer(problem, case, device), device_copy_rate, repeats)
    yield from records


def worst_error(tolerance: float, actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Largest deviation over all outputs, relative to the largest reference value; counts of unequal elements where
    the tolerance is 0. NaN anywhere it should not be counts as infinite."""
    worst = 0.0
    for name, reference in expected.items():
        got = actual[name]
        if got.shape != reference.shape:
            return float("inf")
        if tolerance == 0:
            worst = max(worst, float(_unequal_bytes(got, reference)))
            continue
        worst = max(worst, _relative_error(got.reshape(-1), reference.reshape(-1)))
    return worst


def _relative_error(got: np.ndarray, reference: np.ndarray) -> float:
    """Largest deviation over the largest reference value; in pieces whose temporary arrays stay in the CPU's caches."""
    deviation, scale = 0.0, float(np.finfo(np.float32).tiny)
    for start in range(0, got.size, _PIECE):
        a, b = got[start : start + _PIECE].astype(np.float64), reference[start : start + _PIECE]
        finite = np.isfinite(b)
        if not finite.all():  # where it is not, as in the logarithm of nothing, it must be the same
            if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
                return float("inf")
            a, b = a[finite], b[finite]
        largest = float(np.max(np.abs(a - b), initial=0.0))
        if not np.isfinite(largest):
            return float("inf")
        deviation, scale = max(deviation, largest), max(scale, float(np.max(np.abs(b), initial=0.0)))
    return deviation / scale


def _unequal_bytes(got: np.ndarray, reference: np.ndarray) -> int:
    """How many bytes differ; equal arrays, of which there are large ones, are told by eight bytes at a time."""
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (got, reference))
    whole = a.size // 8 * 8
    if np.array_equal(a[:whole].view(np.uint64), b[:whole].view(np.uint64)) and np.array_equal(a[whole:], b[whole:]):
        return 0
    return int(np.count_nonzero(a != b))


def _record(problem: Problem, case: Case, variant: Variant, backend: str, device: str) -> Record:
    return Record(
        problem.name,
        variant.name,
        variant.moves,
        backend,
        device,
        case.shape,
        case.dtype,
        case.options_of(variant.name),
        ok=False,
        tolerance=problem.tolerance_of(case),
    )


def _simulated(
    problem: Problem,
    case: Case,
    variant: Variant,
    host: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    schedule: Mapping[str, Any],
) -> Record:
    record = _record(problem, case, variant, "sim", SIMULATOR)
    under = f" ({launch.sim.named(schedule)})" if "warp_order" in schedule or schedule["policy"] != "fifo" else ""
    for name in problem.outputs:
        _poison(host[name])
    try:
        with launch.use_backend("sim", **schedule), warnings.catch_warnings():
            warnings.simplefilter("ignore", launch.HazardWarning)  # the record names them
            report = variant.bind(host, **case.options_of(variant.name))()
    except Exception as error:
        record.reason = f"{type(error).__name__}: {error}{under}"
        return record
    record.error = worst_error(record.tolerance, host, expected)
    record.ok = record.error <= record.tolerance
    if not record.ok:
        record.reason = f"error {record.error:.3g} above {record.tolerance:.3g}{under}"
    record.hazards = [str(hazard) for hazard in report.hazards]
    wrong = [hazard for hazard in report.hazards if hazard.severity == "error"]
    if wrong and record.ok:
        record.ok, record.reason = False, f"right, but by luck: {wrong[0]}"
    if report.model is not None:
        record.modelled_seconds, record.model = report.model.seconds, report.model.as_dict()
    record.instructions = report.instructions
    record.bytes_moved = {kind: count for kind, count in report.bytes.items() if count}
    return record


def _checked_on_gpu(
    problem: Problem,
    case: Case,
    variant: Variant,
    device: Mapping[str, DeviceArray],
    expected: Mapping[str, np.ndarray],
) -> tuple[Record, Callable[[], Any] | None]:
    record = _record(problem, case, variant, "gpu", driver.device_name(driver.current_device()))
    for name in problem.outputs:
        device[name].poison()
    try:
        with launch.use_backend("gpu"):
            bound = variant.bind(device, **case.options_of(variant.name))
            bound()
        driver.synchronize()
    except launch.LaunchError as error:
        record.reason, record.skipped = str(error), "needs sm_" in str(error) or "exists on sm_" in str(error)
        return record, None
    except Exception as error:
        record.reason = f"{type(error).__name__}: {error}"
        return record, None
    record.error = worst_error(record.tolerance, {name: device[name].to_host() for name in problem.outputs}, expected)
    record.ok = record.error <= record.tolerance
    if not record.ok:
        record.reason = f"error {record.error:.3g} above {record.tolerance:.3g}"
    return record, bound


def _peer(problem: Problem, case: Case, device: Mapping[str, DeviceArray]) -> tuple[str, Callable[[], Any]] | None:
    """Name and launch of the first peer that is here and does this case."""
    for name, bind in problem.peers.items():
        bound = bind(device, **case.options)
        if bound is not None:
            return name, bound
    return None


def _measure(
    problem: Problem,
    case: Case,
    records: list[Record],
    launches: dict[str, Callable[[], Any]],
    peer: tuple[str, Callable[[], Any]] | None,
    device_copy_rate: float | None,
    repeats: int,
) -> None:
    beside = {f"peer {peer[0]}": peer[1]} if peer else {}
    timings = bench.time_launches({**launches, **beside}, repeats=repeats)
    baseline = next((v.name for v in problem.variants if v.baseline and v.name in timings), None)
    for record in records:
        timing = timings.get(record.variant)
        if timing is None:
            continue
        record.seconds, record.seconds_fastest, record.samples = timing.median, timing.fastest, timing.samples
        record.gb_per_s = problem.bytes_moved(case) / timing.median / 1e9
        record.tflop_per_s = problem.flops(case) / timing.median / 1e12
        if device_copy_rate:
            record.share_of_device_copy = record.gb_per_s / device_copy_rate
        if baseline:
            record.ratio_to_baseline = timings[baseline].median / timing.median
        if peer:
            record.peer = peer[0]
            record.ratio_to_peer = timings[f"peer {peer[0]}"].median / timing.median


def device_copy_rate(nbytes: int = 1 << 30, repeats: int = 20) -> float:
    """GB/s of the driver's device-to-device copy, bytes read plus bytes written."""
    copy, free = bench.device_copy(nbytes)
    try:
        timing = bench.time_launches({"copy": copy}, repeats=repeats)["copy"]
    finally:
        free()
    return 2 * nbytes / timing.median / 1e9


def circumstances() -> dict[str, Any]:
    """What a measurement depends on: device, driver, versions, date."""
    import importlib.metadata
    import platform

    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
    }
    for name in ("numba-tma", "numba", "numba-cuda", "numpy", "llvmlite", "cuda-bindings"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if driver.device_count():
        from cuda.bindings import driver as cu

        ordinal = driver.current_device()
        facts["device"] = driver.device_name(ordinal)
        facts["multiprocessors"] = driver.attribute("MULTIPROCESSOR_COUNT", ordinal)
        facts["clock_mhz"] = driver.attribute("CLOCK_RATE", ordinal) // 1000
        facts["memory_clock_mhz"] = driver.attribute("MEMORY_CLOCK_RATE", ordinal) // 1000
        facts["l2_bytes"] = driver.attribute("L2_CACHE_SIZE", ordinal)
        facts["driver_cuda"] = driver.check(cu.cuDriverGetVersion(), "cuDriverGetVersion")
    else:
        facts["device"] = SIMULATOR
    return facts


def _poison(array: np.ndarray) -> None:
    """Fill with 0xFF bytes: NaN in every floating-point type."""
    array[...] = np.frombuffer(b"\xff" * array.itemsize, array.dtype)[0]

"""Check a kernel in the simulator: a kernel of a Python file, or PTX from any compiler with a launch description.

Each launch is repeated under several schedules (in which order copies complete, and which warps run first). A finding
is an error that ended a launch, or a hazard that its report names.

A launch description is a JSON object:

    {"entry": "kernel_name",                           optional where the file has one kernel
     "grid": [4], "block": [128], "cluster": [1],      block is needed; the others are 1 if left out
     "shared_bytes": 0,                                dynamic shared memory
     "arrays": {"x": {"shape": [64, 64], "dtype": "float16", "fill": "random"},
                "y": {"file": "y.npy"}},               what is in global memory
     "params": [{"array": "x"},
                {"tensor_map": {"of": "x", "box": [64, 64], "swizzle": "128B"}},
                {"u32": 5}, {"f32": 0.5}, {"bytes": "00ff…"}],
     "expect": {"y": {"file": "wanted.npy", "rtol": 1e-3, "atol": 0}}}

`fill` is "random" (the default), "zeros", "poison", "arange" or a number. Files are NumPy's, beside the description; a
`dtype` of the same size says what their elements are ("bfloat16" of uint16). An array parameter is its address, and may
describe an array of its own, {"array": {…}, "name": "z"}; with "bytes" any by-value structure can be given in
hexadecimal. What an array holds afterwards is compared with what is expected of it: `rtol` and `atol` are NumPy's, 0 if
left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import dtypes, sim
from .launch import HazardWarning, Kernel, use_backend
from .tensor_map import TensorMap

_PLACE = re.compile(r"(?:at|from|inlined at) (\S+:\d+)")
_SCALARS = {
    f"{kind}{bits}": (code if kind != "s" else code.lower(), bits // 8)
    for bits, code in ((8, "B"), (16, "H"), (32, "I"), (64, "Q"))
    for kind in ("u", "s", "b")
} | {"f32": ("f", 4), "f64": ("d", 8), "f16": ("e", 2)}


class CheckError(ValueError):
    """What was given to check cannot be launched: the message says what is missing or wrong."""


class WrongNumbers(sim.SimError):
    """An array does not hold what the launch description expects of it."""


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a kernel: `identifier` is a hazard's, or the name of the error that ended the launch.

    `alike` counts further ones that differ in addresses and PTX lines only, as an unrolled loop has them.
    """

    identifier: str
    severity: str
    message: str
    schedule: str
    alike: int = 0


def check(launch: Callable[..., sim.Report], count: int = 1, seed: int = 0) -> list[Finding]:
    """Run `launch(**schedule)` under the first `count` of `sim.schedules`; findings that repeat are reported once."""
    messages: set[tuple[str, str]] = set()
    warned: set[tuple] = set()
    found: dict[tuple, Finding] = {}

    def note(finding: Finding) -> None:
        if (finding.identifier, finding.message) in messages:
            return
        messages.add((finding.identifier, finding.message))
        key = (finding.identifier, *_PLACE.findall(finding.message))
        first = found.setdefault(key, finding)
        if first is not finding:
            found[key] = replace(first, alike=first.alike + 1)

    for schedule in sim.first_schedules(count, seed):
        name = sim.named(schedule)
        try:
            with _once(warned):
                report = launch(**schedule)
            hazards = report.hazards
        except sim.SimError as error:
            hazards, text = error.hazards, str(error)
            for hazard in hazards:  # they are findings of their own
                text = text.replace(f"\n{hazard}", "")
            note(Finding(_kebab(type(error).__name__), "error", text, name))
        for hazard in hazards:
            note(Finding(hazard.identifier, hazard.severity, str(hazard), name))
    return list(found.values())


@contextlib.contextmanager
def _once(warned: set[tuple]) -> Iterator[None]:
    """Let through warnings that are not among `warned` yet, and no hazards, which are findings."""
    caught: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore", HazardWarning)
            yield
    finally:
        for warning in caught:
            key = (str(warning.message), warning.category, warning.filename, warning.lineno)
            if key not in warned:
                warned.add(key)
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def python_launch(file: Path, kernel_name: str | None, arguments_name: str) -> Callable[..., sim.Report]:
    """A launch of a kernel in a Python file.

    The file has a function, `arguments` by default, that returns (grid, arguments) or (grid, block, arguments); it is
    called anew for each schedule.

    Raises:
        CheckError: no such file, kernel or function, or several kernels and no name.
    """
    module = _import(file)
    kernels = {name: value for name, value in vars(module).items() if isinstance(value, Kernel)}
    if kernel_name is None:
        if len(kernels) != 1:
            raise CheckError(
                f"{file} has {len(kernels)} kernels ({', '.join(kernels) or 'none'}); name one: {file}:NAME"
            )
        kernel_name = next(iter(kernels))
    if kernel_name not in kernels:
        raise CheckError(f"{file} has no kernel {kernel_name!r}; it has {', '.join(kernels) or 'none'}")
    make = getattr(module, arguments_name, None)
    if not callable(make):
        raise CheckError(
            f"{file} has no function {arguments_name!r}; write one that returns (grid, arguments) or "
            f"(grid, block, arguments), or name another with --arguments"
        )

    def launch(**schedule: Any) -> sim.Report:
        made = make()
        if not isinstance(made, tuple) or not 2 <= len(made) <= 3 or not isinstance(made[-1], (tuple, list)):
            raise CheckError(f"{arguments_name}() must return (grid, arguments) or (grid, block, arguments)")
        grid, block = (made[0], None) if len(made) == 2 else made[:2]
        with use_backend("sim", **schedule):
            return kernels[kernel_name][grid, block](*made[-1])

    return launch


def _import(file: Path) -> Any:
    if not file.is_file():
        raise CheckError(f"{file}: no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CheckError(f"{file}: {type(error).__name__} while importing it: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def ptx_launch(file: Path, description: Path, seed: int = 0) -> Callable[..., sim.Report]:
    """A launch of a PTX file with a launch description; arrays are made anew for each schedule.

    Raises:
        CheckError: the description is not as documented; its message names the field.
        sim.PtxSyntaxError: the file is not PTX.
    """
    try:
        text = file.read_text(errors="replace")
        fields = json.loads(description.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckError(f"{error}") from None
    if not isinstance(fields, dict) or "block" not in fields:
        raise CheckError(f"{description}: a JSON object with at least 'block' is expected")
    unknown = set(fields) - {"entry", "grid", "block", "cluster", "shared_bytes", "arrays", "params", "expect"}
    if unknown:
        raise CheckError(f"{description}: unknown fields {', '.join(sorted(unknown))}")
    module = sim.parse(text, str(file))

    def launch(**schedule: Any) -> sim.Report:
        memory = _Arrays(np.random.default_rng(seed), description)
        memory.add_all(fields.get("arrays", {}))
        params = _parameters(fields.get("params", []), memory)
        report = sim.launch(
            module,
            fields.get("entry"),
            grid=_extents(fields.get("grid", [1]), "grid", description),
            block=_extents(fields["block"], "block", description),
            cluster=_extents(fields.get("cluster", [1]), "cluster", description),
            shared_bytes=int(fields.get("shared_bytes", 0)),
            params=params,
            memory=memory.memory,
            **schedule,
        )
        try:
            memory.compare(fields.get("expect", {}))
        except WrongNumbers as error:
            error.hazards = report.hazards
            raise
        return report

    return launch


def _extents(value: Any, what: str, description: Path) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if not 1 <= len(values) <= 3 or not all(isinstance(v, int) and v >= 1 for v in values):
        raise CheckError(f"{description}: {what} is {value!r}; one to three positive integers are expected")
    return tuple(values)


class _Arrays:
    """The arrays of a launch description, in the simulator's memory by their names."""

    def __init__(self, rng: np.random.Generator, description: Path) -> None:
        self.memory = sim.GlobalMemory()
        self.description = description
        self._rng = rng
        self._arrays: dict[str, tuple[np.ndarray, int]] = {}

    def add_all(self, described: Any) -> None:
        """Make the arrays of the field `arrays`."""
        for name, item in self._object(described, "arrays").items():
            with _telling(f"{self.description}: arrays[{name!r}]"):
                self.add(name, item)

    def add(self, name: str, described: Any) -> int:
        """Make an array and give its address."""
        array = self._array(described)
        self._arrays[name] = (array, self.memory.map(array, name))
        return self._arrays[name][1]

    def find(self, name: str) -> tuple[np.ndarray, int]:
        """An array and its address."""
        if name not in self._arrays:
            raise CheckError(f"there is no array {name!r}; arrays come before what refers to them")
        return self._arrays[name]

    def compare(self, expected: Any) -> None:
        """Raise WrongNumbers if an array differs from what the field `expect` says."""
        for name, item in self._object(expected, "expect").items():
            with _telling(f"{self.description}: expect[{name!r}]"):
                array, _ = self.find(name)
                wanted = self._array(item)
                if wanted.shape != array.shape:
                    raise CheckError(f"shape {wanted.shape}; the array's is {array.shape}")
                got, want = (values.astype(np.float64) for values in (array, wanted))
                tolerances = {key: float(item.get(key, 0)) for key in ("rtol", "atol")}
            wrong = np.argwhere(~np.isclose(got, want, equal_nan=True, **tolerances))
            if len(wrong):
                place = tuple(wrong[0].tolist())
                raise WrongNumbers(
                    f"{name}: {len(wrong)} of {array.size} elements are not as expected, the first at {place}: "
                    f"{array[place]} instead of {wanted[place]}"
                )

    def _object(self, value: Any, what: str) -> dict:
        if not isinstance(value, dict):
            raise CheckError(f"{self.description}: '{what}' must be an object")
        return value

    def _array(self, described: Any) -> np.ndarray:
        element = dtypes.lookup(described["dtype"]).numpy if "dtype" in described else None
        if "file" in described:
            array = np.load(self.description.parent / described["file"], allow_pickle=False)
            if element is not None and element.itemsize != array.itemsize:
                raise ValueError(f"elements of {array.itemsize} bytes in {described['file']} are no {element}")
            return np.ascontiguousarray(array).view(array.dtype if element is None else element)
        if element is None:
            raise KeyError("dtype")
        return _filled(element, described, self._rng)


@contextlib.contextmanager
def _telling(where: str) -> Iterator[None]:
    """Turn what a wrong description raises into a CheckError that says where in it."""
    try:
        yield
    except CheckError as error:
        raise CheckError(f"{where}: {error}") from None
    except KeyError as error:
        raise CheckError(f"{where}: missing or unknown {error}") from None
    except (TypeError, ValueError, struct.error, OverflowError, OSError, EOFError) as error:
        raise CheckError(f"{where}: {error}") from None


def _parameters(described: Any, arrays: _Arrays) -> list[bytes]:
    if not isinstance(described, list):
        raise CheckError(f"{arrays.description}: 'params' must be a list")
    params = []
    for number, item in enumerate(described):
        with _telling(f"{arrays.description}: params[{number}]"):
            params.append(_parameter(item, arrays, f"param {number}"))
    return params


def _parameter(item: Any, arrays: _Arrays, name: str) -> bytes:
    if not isinstance(item, dict):
        raise CheckError("it is no object")
    kinds = [key for key in item if key != "name"]
    if len(kinds) != 1:
        raise CheckError(f"one of array, tensor_map, bytes, {', '.join(_SCALARS)} is expected, got {kinds}")
    kind, value = kinds[0], item[kinds[0]]
    if kind == "array":
        address = arrays.find(value)[1] if isinstance(value, str) else arrays.add(item.get("name", name), value)
        return struct.pack("<Q", address)
    if kind == "tensor_map":
        array, address = arrays.find(value["of"])
        options = {key: v for key, v in value.items() if key not in ("of", "box")}
        return TensorMap(array, value["box"], **options).encode_sim(address)
    if kind == "bytes":
        return bytes.fromhex(value)
    if kind not in _SCALARS:
        raise CheckError(f"unknown kind {kind!r}")
    return struct.pack("<" + _SCALARS[kind][0], value)


_MOST_BYTES = 1 << 31


def _filled(element: np.dtype, described: Any, rng: np.random.Generator) -> np.ndarray:
    shape = tuple(int(extent) for extent in described["shape"])
    if any(extent < 0 for extent in shape) or np.prod(shape, dtype=object) * element.itemsize > _MOST_BYTES:
        raise ValueError(f"an array of shape {shape} is empty or beyond {_MOST_BYTES} bytes")
    fill = described.get("fill", "random")
    if fill == "random":
        if element.kind in "iu":
            return rng.integers(0, 100, shape).astype(element)
        return rng.standard_normal(shape).astype(element)
    if fill == "arange":
        return np.arange(int(np.prod(shape))).reshape(shape).astype(element)
    if fill == "poison":
        return np.frombuffer(b"\xff" * (int(np.prod(shape)) * element.itemsize), element).reshape(shape).copy()
    return np.full(shape, 0 if fill == "zeros" else fill, element)


def as_json(findings: list[Finding]) -> str:
    """Findings as a JSON list."""
    return json.dumps([asdict(finding) for finding in findings], indent=1)


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")

"""Check a kernel in the simulator: a kernel of a Python file, or PTX from any compiler with a launch description.

Each launch is repeated under several schedules (in which order copies complete, and which warps run first). A finding
is an error that ended a launch, or a hazard that its report names.

A launch description is a JSON object:

    {"entry": "kernel_name",                           optional where the file has one kernel
     "grid": [4], "block": [128], "cluster": [1],      block is needed; the others are 1 if left out
     "shared_bytes": 0,                                dynamic shared memory
     "params": [{"array": {"shape": [64, 64], "dtype": "float16", "fill": "random"}, "name": "x"},
                {"tensor_map": {"of": "x", "box": [64, 64], "swizzle": "128B"}},
                {"u32": 5}, {"f32": 0.5}, {"bytes": "00ff…"}]}

`fill` is "random" (the default), "zeros", "poison", "arange" or a number. An array parameter is its address; with
"bytes" any by-value structure can be given in hexadecimal.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import sys
import warnings
from collections.abc import Callable
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HazardWarning)  # they are among the findings
                report = launch(**schedule)
        except sim.SimError as error:
            note(Finding(_kebab(type(error).__name__), "error", str(error), name))
            continue
        for hazard in report.hazards:
            note(Finding(hazard.identifier, getattr(hazard, "severity", "error"), str(hazard), name))
    return list(found.values())


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
    unknown = set(fields) - {"entry", "grid", "block", "cluster", "shared_bytes", "params"}
    if unknown:
        raise CheckError(f"{description}: unknown fields {', '.join(sorted(unknown))}")
    module = sim.parse(text, str(file))

    def launch(**schedule: Any) -> sim.Report:
        memory = sim.GlobalMemory()
        params = _parameters(fields.get("params", []), memory, np.random.default_rng(seed), description)
        return sim.launch(
            module,
            fields.get("entry"),
            grid=_extents(fields.get("grid", [1]), "grid", description),
            block=_extents(fields["block"], "block", description),
            cluster=_extents(fields.get("cluster", [1]), "cluster", description),
            shared_bytes=int(fields.get("shared_bytes", 0)),
            params=params,
            memory=memory,
            **schedule,
        )

    return launch


def _extents(value: Any, what: str, description: Path) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if not 1 <= len(values) <= 3 or not all(isinstance(v, int) and v >= 1 for v in values):
        raise CheckError(f"{description}: {what} is {value!r}; one to three positive integers are expected")
    return tuple(values)


def _parameters(described: Any, memory: sim.GlobalMemory, rng: np.random.Generator, description: Path) -> list[bytes]:
    if not isinstance(described, list):
        raise CheckError(f"{description}: 'params' must be a list")
    arrays: dict[str, tuple[np.ndarray, int]] = {}
    params = []
    for number, item in enumerate(described):
        where = f"{description}: params[{number}]"
        if not isinstance(item, dict):
            raise CheckError(f"{where} is no object")
        kinds = [key for key in item if key != "name"]
        if len(kinds) != 1:
            raise CheckError(
                f"{where}: one of array, tensor_map, bytes, {', '.join(_SCALARS)} is expected, got {kinds}"
            )
        kind, value = kinds[0], item[kinds[0]]
        try:
            if kind == "array":
                array = _array(value, rng)
                name = item.get("name", f"param {number}")
                arrays[name] = (array, memory.map(array, name))
                params.append(struct.pack("<Q", arrays[name][1]))
            elif kind == "tensor_map":
                array, address = arrays[value["of"]]
                options = {key: v for key, v in value.items() if key not in ("of", "box")}
                params.append(TensorMap(array, value["box"], **options).encode_sim(address))
            elif kind == "bytes":
                params.append(bytes.fromhex(value))
            elif kind in _SCALARS:
                params.append(struct.pack("<" + _SCALARS[kind][0], value))
            else:
                raise CheckError(f"{where}: unknown kind {kind!r}")
        except CheckError:
            raise
        except KeyError as error:
            raise CheckError(f"{where}: missing or unknown {error}; arrays come before the maps of them") from None
        except (TypeError, ValueError, struct.error, OverflowError) as error:
            raise CheckError(f"{where}: {error}") from None
    return params


_MOST_BYTES = 1 << 31


def _array(described: Any, rng: np.random.Generator) -> np.ndarray:
    element = dtypes.lookup(described["dtype"]).numpy
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

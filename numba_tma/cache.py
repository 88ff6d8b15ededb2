"""Disk cache for compiled kernels, keyed by everything that the PTX depends on.

Numba's own cache looks at the file that holds the kernel and misses edits elsewhere. Here the key is made of the
bytecode and constants of every function that the kernel can reach, the files in ptx/, this package's code
generators, the versions of the compilers and the architecture. What cannot be described is not cached.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

_PACKAGE = Path(__file__).parent
# Modules whose text decides what code is generated, besides the functions of the kernel itself.
_GENERATORS = (
    "cache.py",
    "compile.py",
    "conversions.py",
    "dtypes.py",
    "half.py",
    "pipeline.py",
    "ptx.py",
    "ptx_files.py",
    "shared.py",
    "tensor_map.py",
)
_COMPILERS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc")


class Uncacheable(Exception):
    """A value that the kernel uses has no stable description, so its PTX must not be reused."""


def directory() -> Path | None:
    """Where compiled kernels are kept: $NUMBA_TMA_CACHE_DIR, else the user's cache folder; None if set to ''."""
    configured = os.environ.get("NUMBA_TMA_CACHE_DIR")
    if configured is not None:
        return Path(configured) if configured else None
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "numba_tma"


def read(key: str, suffix: str) -> bytes | None:
    """The bytes kept under `key`, or None. A file that was cut short fails its checksum and counts as absent."""
    folder = directory()
    if folder is None:
        return None
    try:
        data = (folder / f"{key}{suffix}").read_bytes()
    except OSError:
        return None
    checksum, body = data[:32], data[32:]
    return body if hashlib.sha256(body).digest() == checksum else None


def write(key: str, suffix: str, body: bytes) -> None:
    """Keep `body` under `key`; readers see the whole file or none. A folder that cannot be written is no error."""
    folder = directory()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(body).digest() + body)
        os.replace(name, folder / f"{key}{suffix}")
    except OSError:
        return


def digest(parts: Iterable[str | bytes]) -> str:
    """One hexadecimal digest of `parts`, in order."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()[:40]


@functools.cache
def environment(ptx_folder: Path) -> str:
    """Digest of the versions, the files in ptx/ and this package's code generators."""
    parts: list[str | bytes] = [sys.version]
    for name in _COMPILERS:
        try:
            parts.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    for path in [_PACKAGE / name for name in _GENERATORS] + sorted(ptx_folder.glob("*.ptx")):
        parts += [path.name, path.read_bytes()]
    return digest(parts)


def fingerprint(function: Callable) -> str:
    """Digest of a Python function and of every function and constant that it reaches.

    Raises:
        Uncacheable: it uses a value (an open file, say) whose contents have no stable description.
    """
    parts: list[str | bytes] = []
    _describe(function, parts, set(), ())
    return digest(parts)


def _describe(value: object, parts: list[str | bytes], seen: set[int], names: tuple[str, ...]) -> None:
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, slice)):
        parts.append(f"{type(value).__name__} {value!r}")
        return
    if id(value) in seen:
        parts.append("seen")
        return
    seen.add(id(value))
    if isinstance(value, types.CodeType):
        _describe_code(value, parts, seen)
    elif isinstance(value, types.FunctionType):
        _describe_function(value, parts, seen)
    elif isinstance(value, types.ModuleType):
        parts.append(f"module {value.__name__}")
        # A module stands for those of its members that the code may name.
        for name in names:
            member = value.__dict__.get(name)
            if member is not None and not _is_foreign(member):
                parts.append(name)
                _describe(member, parts, seen, names)
    elif isinstance(value, np.ndarray):
        parts += [f"array {value.dtype} {value.shape}", np.ascontiguousarray(value).tobytes()]
    elif isinstance(value, (tuple, list, set, frozenset)):
        members = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        parts.append(f"{type(value).__name__} {len(members)}")
        for member in members:
            _describe(member, parts, seen, names)
    elif isinstance(value, dict):
        parts.append(f"dict {len(value)}")
        for key, member in value.items():
            _describe(key, parts, seen, names)
            _describe(member, parts, seen, names)
    elif callable(getattr(value, "key", None)):
        parts.append(value.key())
    elif isinstance(getattr(value, "py_func", None), types.FunctionType):
        _describe_function(value.py_func, parts, seen)
    elif isinstance(getattr(value, "_defn", None), types.FunctionType):
        parts.append(f"intrinsic {getattr(value, '__name__', '')}")
        if not value._defn.__module__.startswith("numba_tma."):
            _describe_function(value._defn, parts, seen)
    elif isinstance(value, (type, types.BuiltinFunctionType)) or _is_foreign(value):
        parts.append(f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}")
    else:
        raise Uncacheable(f"{type(value).__module__}.{type(value).__qualname__}")


def _is_foreign(value: object) -> bool:
    """Whether `value` belongs to Numba, NumPy or Python itself, whose versions are part of the key."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    module = module or type(value).__module__
    return module.split(".")[0] in {
        "numba",
        "numba_cuda",
        "numpy",
        "math",
        "builtins",
        "operator",
        "ml_dtypes",
    }


def _describe_function(function: types.FunctionType, parts: list[str | bytes], seen: set[int]) -> None:
    parts.append(f"function {function.__qualname__}")
    code = function.__code__
    _describe_code(code, parts, seen)
    for default in function.__defaults__ or ():
        _describe(default, parts, seen, ())
    names = tuple(sorted(_all_names(code)))
    for name in names:
        if name in function.__globals__:
            parts.append(name)
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType) and _is_foreign(value):
                parts.append(value.__name__)
            else:
                _describe(value, parts, seen, names)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        parts.append(name)
        try:
            content = cell.cell_contents
        except ValueError:  # a cell that is not filled yet
            continue
        _describe(content, parts, seen, names)


def _describe_code(code: types.CodeType, parts: list[str | bytes], seen: set[int]) -> None:
    # The line table counts: the PTX carries the Python lines.
    parts += [code.co_code, code.co_filename, str(code.co_firstlineno), code.co_linetable]
    parts += [" ".join(code.co_names), " ".join(code.co_varnames)]
    for constant in code.co_consts:
        _describe(constant, parts, seen, ())


def _all_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _all_names(constant)
    return names

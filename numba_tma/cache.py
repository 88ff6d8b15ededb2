"""Disk cache for compiled kernels, keyed by everything that the PTX depends on.

Numba's own cache looks at the file that holds the kernel and misses edits elsewhere. Here the key is made of the
bytecode and constants of every function that the kernel can reach, the files in ptx/, this package's code
generators, the versions of the compilers and the architecture. What cannot be described is not cached.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.metadata
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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
    "trace/marks.py",
    "unroll.py",
)
_COMPILERS = ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc")


class Uncacheable(Exception):
    """A value that the kernel uses has no stable description, so its PTX must not be reused."""


def directory() -> Path | None:
    """Where compiled kernels are kept: $NUMBA_TMA_CACHE_DIR, else the user's cache folder; None if set to ''."""
    configured = os.environ.get("NUMBA_TMA_CACHE_DIR")
    if configured is not None:
        return Path(configured).expanduser() if configured else None
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
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(name, folder / f"{key}{suffix}")
        except BaseException:
            os.unlink(name)
            raise
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
    description = _Description()
    description.add_function(function)
    description.add_overloads()
    return digest(description.parts)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, slice)
_FOREIGN = {"numba", "numba_cuda", "numpy", "math", "builtins", "operator", "_operator", "ml_dtypes"}
_ABSENT = object()
_SHORT_TUPLE = 64


class _Description:
    """The parts of a fingerprint: values described in the order in which they are reached, each object once."""

    def __init__(self) -> None:
        self.parts: list[str | bytes] = []
        # An object met again is named by its ordinal. It is kept, so that no other object gets its id meanwhile.
        self._seen: dict[tuple, tuple[int, object]] = {}
        self._names: set[str] = set()

    def add(self, value: object, names: tuple[str, ...]) -> None:
        """Describe `value`; `names` are those in the code that refers to it: what it may ask a module for."""
        parts = self.parts
        if isinstance(value, enum.Enum):
            parts.append(f"{_qualified(type(value))}.{value.name}")
            self.add(value.value, names)
        elif isinstance(value, _PLAIN):
            parts.append(f"{type(value).__name__} {value!r}")
        elif isinstance(value, types.ModuleType):
            self._add_module(value, names)
        elif isinstance(value, tuple):
            # Whether two equal tuples are one object is the interpreter's affair: short ones are told in full.
            short = len(value) <= _SHORT_TUPLE and all(isinstance(member, _PLAIN) for member in value)
            if short or self._first(value, names):
                fields = getattr(value, "_fields", "")
                parts.append(f"{type(value).__qualname__} {len(value)} {fields}")
                for member in value:
                    self.add(member, names)
        elif self._first(value, names):
            self._add_object(value, names)

    def add_function(self, function: types.FunctionType) -> None:
        """Describe a function's code, defaults, globals and closure."""
        self.parts.append(f"function {function.__qualname__}")
        code = function.__code__
        self._add_code(code)
        for default in function.__defaults__ or ():
            self.add(default, ())
        for name, default in (function.__kwdefaults__ or {}).items():
            self.parts.append(name)
            self.add(default, ())
        names = tuple(sorted(_all_names(code)))
        self._names.update(names)
        for name in names:
            if name in function.__globals__:
                self.parts.append(name)
                self.add(function.__globals__[name], names)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.parts.append(name)
            try:
                content = cell.cell_contents
            except ValueError:  # a cell that is not filled yet
                continue
            self.add(content, names)

    def add_overloads(self) -> None:
        """Describe the implementations that @overload and its kin give to the names in the code described so far."""
        waiting = list(_own_overloads())
        while True:
            reached = [entry for entry in waiting if not entry[0] or entry[0] in self._names]
            if not reached:
                return
            waiting = [entry for entry in waiting if entry not in reached]
            for name, function in reached:
                self.parts.append(f"overload {name}")
                self.add(function, ())

    def _first(self, value: object, names: tuple[str, ...]) -> bool:
        """Whether `value` has not been met with these names; if it has, say which it was."""
        key = (id(value), names)
        if key in self._seen:
            self.parts.append(f"seen {self._seen[key][0]}")
            return False
        self._seen[key] = (len(self._seen), value)
        return True

    def _add_module(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        self.parts.append(f"module {module.__name__}")
        if _is_foreign(module):
            return
        # A module stands for those of its members that the code may name; another function may name others.
        for name in names:
            member = getattr(module, name, _ABSENT)
            if member is not _ABSENT:
                self.parts.append(name)
                if self._first(module, (name, *names)):
                    self.add(member, names)

    def _add_object(self, value: Any, names: tuple[str, ...]) -> None:
        parts = self.parts
        if isinstance(value, types.CodeType):
            self._add_code(value)
        elif isinstance(value, types.FunctionType) and not _is_foreign(value):
            self.add_function(value)
        elif isinstance(value, np.ndarray):
            parts += [f"array {value.dtype} {value.shape}", np.ascontiguousarray(value).tobytes()]
        elif isinstance(value, (list, set, frozenset)):
            members = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
            parts.append(f"{type(value).__name__} {len(members)}")
            for member in members:
                self.add(member, names)
        elif isinstance(value, dict):
            parts.append(f"dict {len(value)}")
            for key, member in value.items():
                self.add(key, names)
                self.add(member, names)
        elif isinstance(value, enum.EnumMeta):
            parts.append(f"enum {_qualified(value)} {len(value.__members__)}")
            for name, member in value.__members__.items():
                parts.append(name)
                self.add(member.value, names)
        elif isinstance(value, type):
            parts.append(f"{_qualified(value)} {getattr(value, '_fields', '')}")
        elif callable(getattr(value, "key", None)):
            parts.append(value.key())
        elif isinstance(getattr(value, "py_func", None), types.FunctionType):
            self._add_dispatcher(value)
        elif isinstance(getattr(value, "_defn", None), types.FunctionType):
            parts.append(f"intrinsic {getattr(value, '__name__', '')}")
            if not value._defn.__module__.startswith("numba_tma."):
                self.add_function(value._defn)
        elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) or _is_foreign(value):
            parts.append(_qualified(value))
        else:
            raise Uncacheable(f"{type(value).__module__}.{type(value).__qualname__}")

    def _add_dispatcher(self, dispatcher: Any) -> None:
        options = getattr(dispatcher, "targetoptions", {})
        self.parts.append(f"dispatcher {len(options)}")
        for name in sorted(options):
            self.parts.append(name)
            self.add(options[name], ())
        if not getattr(dispatcher, "_can_compile", True):  # its decorator gave the signatures
            self.parts.append(" ".join(map(str, dispatcher.overloads)))
        self.add(dispatcher.py_func, ())

    def _add_code(self, code: types.CodeType) -> None:
        # The line table counts: the PTX carries the Python lines.
        self.parts += [code.co_code, code.co_filename, str(code.co_firstlineno), code.co_linetable]
        self.parts += [" ".join(code.co_names), " ".join(code.co_varnames)]
        self.parts += [" ".join(code.co_freevars), " ".join(code.co_cellvars)]
        for constant in code.co_consts:
            self.add(constant, ())


def _is_foreign(value: object) -> bool:
    """Whether `value` belongs to Numba, NumPy or Python itself, whose versions are part of the key."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if module is None and isinstance(value, types.FunctionType):  # made by exec in a nameless namespace
        return False
    module = module or type(value).__module__
    return module.split(".")[0] in _FOREIGN


def _own_overloads() -> Iterator[tuple[str, types.FunctionType]]:
    """What the program has registered for CUDA with @overload, @overload_method and @overload_attribute.

    Each comes with the name that code must have to reach it: '' where an operator reaches it.
    """
    from numba.core.typing import templates as core
    from numba.cuda.typing import templates

    registries = (templates.builtin_registry, core.builtin_registry)
    for template in [entry for registry in registries for entry in (*registry.functions, *registry.attributes)]:
        function = getattr(template, "_overload_func", None)
        if not isinstance(function, types.FunctionType) or _is_foreign(function):
            continue
        if (function.__module__ or "").split(".")[0] == __package__:  # read as a file of the generators
            continue
        key = getattr(template, "key", None)
        name = getattr(template, "_attr", None) or getattr(key, "__name__", "")
        yield "" if getattr(key, "__module__", "") == "_operator" else name, function


def _qualified(value: object) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', repr(value))}"


def _all_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _all_names(constant)
    return names

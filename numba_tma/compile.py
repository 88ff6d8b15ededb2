"""From a Python kernel to PTX, cubin, SASS and resource figures, with or without a GPU.

The one road: Numba's front end writes PTX for a named architecture; that text, its mangled names made readable and
its tensor-map parameters made by-value, is what the simulator executes and what nvJitLink turns into a cubin.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import tempfile
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numba import cuda, types
from numba.cuda import debuginfo as numba_debuginfo
from numba.cuda import dispatcher as numba_dispatcher
from numba.cuda import lowering as numba_lowering
from numba.cuda.core import errors
from numba.cuda.cudadrv import nvvm

from . import arch as architectures
from . import cache, ptx
from .tensor_map import TensorMapType
from .trace import marks as trace_marks
from .unroll import apply_marks, without_marks

DEFAULT_ARCH = "sm_90a"
_TENSOR_MAP_BYTES = 128
_compile_lock = threading.RLock()


class CompileError(Exception):
    """The PTX calls what is not linked, ptxas or nvJitLink refused it, or a tool that reads a cubin is missing."""


@dataclass(frozen=True)
class Parameter:
    """One `.param` of the kernel: the argument's name or a part of it (`k_data`), PTX type, size, offset in bytes."""

    name: str
    type: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Resources:
    """What a thread takes in registers, stack, spills and local memory, and a block in static shared memory."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    local_bytes: int
    barriers: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one architecture and one tuple of argument types."""

    name: str
    arch: str
    ptx: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    modules: tuple[tuple[str, str], ...] = field(repr=False, default=())

    @functools.cached_property
    def requirement(self) -> architectures.Requirement:
        """The most demanding instruction in the PTX."""
        return architectures.requirement("\n".join([self.ptx, *(text for _, text in self.modules)]))

    @functools.cached_property
    def _linked(self) -> tuple[bytes, str]:
        key = cache.digest(["cubin", self.arch, self.ptx, *(text for _, text in self.modules), _assemblers()])
        kept, log = cache.read(key, ".cubin"), cache.read(key, ".log")
        if kept is not None and log is not None:
            return kept, log.decode()
        cubin, text = link([(self.name, self.ptx), *self.modules], self.arch)
        cache.write(key, ".cubin", cubin)
        cache.write(key, ".log", text.encode())
        return cubin, text

    @property
    def cubin(self) -> bytes:
        """The machine code, as an ELF image.

        Raises:
            CompileError: nvJitLink refused the PTX; the message quotes its log.
        """
        return self._linked[0]

    @property
    def resources(self) -> Resources:
        """Registers, spills, shared and local bytes, as ptxas reported them."""
        return _parse_resources(self._linked[1], self.name, self.arch)

    @functools.cached_property
    def sass(self) -> str:
        """The cubin disassembled by nvdisasm, with the Python file and line above the instructions they became.

        Raises:
            CompileError: nvdisasm is not installed.
        """
        return disassemble(self.cubin)


def compile_kernel(
    function: Callable,
    argument_types: Sequence[types.Type],
    *,
    arch: str = DEFAULT_ARCH,
    threads: int | None = None,
    min_blocks: int = 1,
    cluster: tuple[int, int, int] | None = None,
    fastmath: bool = False,
    marked: bool = False,
) -> Compiled:
    """Compile a Python kernel for argument types; needs no GPU and no driver.

    Args:
        function: a plain Python function; its device functions may be `@cuda.jit(device=True)` ones.
        argument_types: Numba types in order; an array is `types.Array`, a tensor map `TensorMapType`.
        arch: 'sm_80', 'sm_90', 'sm_90a', …
        threads: most threads a block will have (`.maxntid`); with it, `min_blocks` (`.minnctapersm`) takes effect.
        cluster: fixed cluster shape (`.reqnctapercluster`), or None.
        fastmath: NVVM's fast-math flags.
        marked: keep the kernel's trace marks, as comments in the PTX; otherwise nothing is left of them.

    Raises:
        numba's TypingError, LoweringError: the kernel does not type or lower.
        CompileError: the kernel calls a function that is not linked here, named in the message; or the PTX does not
            have the parameters that its types promise.
    """
    options = (arch, threads, min_blocks, cluster, fastmath, marked)
    try:
        key = cache.digest(
            [
                cache.environment(ptx.folder()),
                cache.fingerprint(function),
                repr(options),
                *(str(t) for t in argument_types),
            ]
        )
    except cache.Uncacheable:
        key = None
    kept = cache.read(key, ".json") if key else None
    found = _from_json(kept) if kept is not None else None
    if found is not None:
        return found
    text = _numba_ptx(function, argument_types, arch, threads, min_blocks, fastmath, marked)
    names = list(inspect.signature(function).parameters)
    compiled = _tidy(text, function.__name__, names, argument_types, arch, cluster)
    if key:
        cache.write(key, ".json", _to_json(compiled))
    return compiled


def link(modules: Sequence[tuple[str, str]], arch: str) -> tuple[bytes, str]:
    """Assemble and link PTX modules, given as (name, text), into a cubin; returns it with the assembler's log.

    nvJitLink does it, as for Numba itself, with one exception: it assembles for linking and so leaves `setmaxnreg` out
    (a note in its log says so). A module that stands alone and has that instruction goes to ptxas, where there is one
    that knows the module's PTX version.

    Raises:
        CompileError: quoting the assembler's own message.
    """
    tool = _tool("ptxas") if len(modules) == 1 and "setmaxnreg" in modules[0][1] else None
    if tool is not None:
        assembled = _assemble(tool, modules[0], arch)
        if assembled is not None:
            return assembled
    from cuda.bindings import nvjitlink

    options = [f"-arch={arch}", "-Xptxas=-v", "-verbose", "-lineinfo"]
    try:
        handle = nvjitlink.create(len(options), options)
    except nvjitlink.nvJitLinkError as error:
        version = ".".join(map(str, nvjitlink.version()))
        raise CompileError(
            f"nvJitLink {version} cannot compile for {arch}: {error}; name an architecture that it knows, such as "
            f"sm_80, sm_90, sm_90a, sm_100a or sm_120"
        ) from None
    try:
        for name, text in modules:
            data = text.encode()
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), name)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        return bytes(cubin), _log(nvjitlink.get_info_log_size, nvjitlink.get_info_log, handle)
    except nvjitlink.nvJitLinkError as error:
        log = _log(nvjitlink.get_error_log_size, nvjitlink.get_error_log, handle)
        log += _log(nvjitlink.get_info_log_size, nvjitlink.get_info_log, handle)
        raise _refusal(modules, arch, f"{error}\n{log}") from None
    finally:
        nvjitlink.destroy(handle)


def _refusal(modules: Sequence[tuple[str, str]], arch: str, log: str) -> CompileError:
    """The assembler's log as an error, headed by the instruction that `arch` lacks if that is the reason."""
    names = ", ".join(name for name, _ in modules)
    needed = architectures.requirement("\n".join(text for _, text in modules))
    capability = architectures.parse(arch)
    if capability[0] * 10 + capability[1] < needed.capability or (needed.only_90a and arch != "sm_90a"):
        required = f"sm_{needed.capability}{'a' if needed.only_90a else ''}"
        log = (
            f"{needed.mnemonic} (PTX line {needed.line}) needs {required}; compile for it (arch={required!r}), "
            f"or give {arch} a kernel without that instruction\n{log}"
        )
    return CompileError(f"{names} for {arch}: {log}")


def _assemble(tool: str, module: tuple[str, str], arch: str) -> tuple[bytes, str] | None:
    """cubin and log by ptxas, or None if it is too old for the PTX version."""
    name, text = module
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / f"{name}.ptx", Path(folder) / f"{name}.cubin"
        source.write_text(text)
        run = subprocess.run(
            [tool, f"-arch={arch}", "-v", "-lineinfo", str(source), "-o", str(target)],
            capture_output=True,
            text=True,
            check=False,
        )
        log = (run.stderr + run.stdout).replace(f"{folder}/", "")
        if run.returncode == 0:
            return target.read_bytes(), log
    if "Unsupported .version" in log:
        return None
    raise _refusal([module], arch, f"ptxas failed\n{log}")


def disassemble(cubin: bytes, lines: str = "python", encodings: bool = False) -> str:
    """SASS of a cubin, by nvdisasm from its wheel or the CUDA toolkit.

    Args:
        lines: what stands above the instructions: the 'python' lines that they became, with the calls around them, or
            the lines of the 'ptx' (of each module, from 1).
        encodings: write each instruction's 128 bits beside it.

    Raises:
        CompileError: there is no nvdisasm; the message says which package brings it.
    """
    options = ["-c", {"python": "-gi", "ptx": "-gp"}[lines], *(["-hex"] if encodings else [])]
    tool = _tool("nvdisasm")
    if tool is None:
        raise CompileError(
            "nvdisasm is not installed: pip install nvidia-cuda-nvdisasm, or put a CUDA toolkit on the PATH"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, *options, "-sf", file.name], capture_output=True, text=True, check=False)
        if run.returncode:  # older releases lack -sf
            run = subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=False)
    if run.returncode:
        raise CompileError(f"{tool} failed: {run.stderr.strip()}")
    return run.stdout


@functools.cache
def _tool(name: str) -> str | None:
    """Path of one of the CUDA toolkit's programs: from NVIDIA's wheels, else from a toolkit on the PATH."""
    try:
        roots = [Path(root) for root in importlib.util.find_spec("nvidia").submodule_search_locations]
    except (AttributeError, ModuleNotFoundError):
        roots = []
    for root in roots:
        for found in sorted(root.glob(f"**/bin/{name}")):
            return str(found)
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")


def _log(size: Callable, get: Callable, handle: int) -> str:
    text = bytearray(size(handle))
    if not text:
        return ""
    get(handle, text)
    return bytes(text).rstrip(b"\0").decode(errors="replace")


@functools.cache
def _assemblers() -> str:
    """What the machine code depends on besides the PTX."""
    from cuda.bindings import nvjitlink

    tool = _tool("ptxas")
    return f"{nvjitlink.version()} {tool} {Path(tool).stat().st_size if tool else 0}"


class _NamedDevice:
    def __init__(self, capability: tuple) -> None:
        self.compute_capability = capability


@contextlib.contextmanager
def _compiling_for(capability: tuple, marked: bool) -> Iterator[None]:
    """Adapt numba-cuda while it compiles for `capability`, with the trace marks kept if `marked`.

    It would ask the driver for the current GPU when it meets a nested device function, keep such a function's lines
    only if its own decorator asks for them, drop NVVM's explanation of an error, warn that a kernel whose source
    cannot be found (from `python -c`, exec or a prompt) has no `def` line, and fail where the source cannot be parsed
    by itself (a lambda amid a longer statement). Besides the lines it would describe variables to a debugger, of which
    NVVM makes labels that it then rejects ("Symbol name with unsupported characters") in some loops. And it has no
    way to ask for a loop to be unrolled: `unroll` leaves marks, which are turned into metadata on the way to NVVM.
    """

    @functools.wraps(numba_dispatcher.compile_cuda)
    def with_lines(*args: Any, **options: Any) -> Any:
        return compile_cuda(*args, **{**options, "lineinfo": True})

    def with_log(unit: nvvm.CompilationUnit) -> bytes:
        try:
            return compile_unit(unit)
        except Exception as error:
            raise CompileError(f"NVVM: {error}: {unit.get_log().strip()}") from None

    def with_marks(unit: nvvm.CompilationUnit, module: bytes) -> None:
        text = apply_marks(module.decode())
        add_module(unit, (trace_marks.kept(text) if marked else text).encode())

    def line_of_def(function: Callable) -> int | None:
        try:
            return find_line(function)
        except SyntaxError:
            return None

    def no_variable(*args: Any, **options: Any) -> None:
        """Describe nothing."""

    with _compile_lock, contextlib.ExitStack() as restore:
        compile_cuda = numba_dispatcher.compile_cuda
        compile_unit = nvvm.CompilationUnit.compile
        add_module = nvvm.CompilationUnit.add_module
        find_line = numba_lowering.get_func_def_lineno
        for owner, name, adapted in (
            (numba_dispatcher, "get_current_device", lambda: _NamedDevice(capability)),
            (numba_dispatcher, "compile_cuda", with_lines),
            (nvvm.CompilationUnit, "compile", with_log),
            (nvvm.CompilationUnit, "add_module", with_marks),
            (numba_lowering, "get_func_def_lineno", line_of_def),
            (numba_debuginfo.CUDADIBuilder, "mark_variable", no_variable),
            (numba_debuginfo.CUDADIBuilder, "update_variable", no_variable),
        ):
            restore.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, adapted)
        restore.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", errors.NumbaDebugInfoWarning)
        yield


def _numba_ptx(
    function: Callable,
    argument_types: Sequence[types.Type],
    arch: str,
    threads: int | None,
    min_blocks: int,
    fastmath: bool,
    marked: bool,
) -> str:
    capability = architectures.parse(arch)
    with _compiling_for(capability, marked):
        text, _ = cuda.compile(
            function,
            types.void(*argument_types),
            cc=capability,
            device=False,
            abi="numba",
            lineinfo=True,
            fastmath=fastmath,
            launch_bounds=(threads, min_blocks) if threads else None,
        )
    return text


# Numba's flattening of an array argument, in order; shape and strides follow, one word a dimension each.
_ARRAY_WORDS = ("meminfo", "parent", "size", "itemsize", "data")


def _flatten(name: str, argument: types.Type) -> list[tuple[str, bool]]:
    """Names of the `.param`s that one argument becomes, and whether each is a tensor map."""
    if isinstance(argument, TensorMapType):
        return [(name, True)]
    if isinstance(argument, types.Array):
        words = [*_ARRAY_WORDS]
        words += [f"shape_{i}" for i in range(argument.ndim)] + [f"stride_{i}" for i in range(argument.ndim)]
        return [(f"{name}_{word}", False) for word in words]
    if isinstance(argument, types.BaseTuple):
        return [leaf for i, member in enumerate(argument) for leaf in _flatten(f"{name}_{i}", member)]
    return [(name, False)]


_ENTRY = re.compile(r"\.visible \.entry ([\w$]+)\(\n?(.*?)\)\n", re.S)
# From sm_100 on NVVM says of a pointer what it points to: `.param .u64 .ptr .align 1 name`.
_DECLARED = re.compile(r"\.param\s+(?:\.align \d+\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+(?:\d+\s+)?)*)?([\w$]+)")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_WORD = re.compile(r"[\w$]+")
# Declarations of the module and its functions, and the names in them that are no directive, type or register.
_DIRECTIVE = re.compile(r"^[ \t]*\.[^\n]*", re.M)
_STRING = re.compile(r'"[^"\n]*"')
_SYMBOL = re.compile(r"(?<![\w$.%])[\w$]+")
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_$]*|[_$][A-Za-z0-9_$]+")
_RESERVED = {"WARP_SZ"}


def _ptx_name(wanted: str, taken: set[str]) -> str:
    """`wanted` in the letters that a PTX identifier may have, different from all in `taken`, to which it is added."""
    letters = []
    for letter in unicodedata.normalize("NFKD", wanted):
        if letter.isascii():
            letters.append(letter if letter.isalnum() or letter in "_$" else "")
        elif not unicodedata.combining(letter):
            # A Greek alpha becomes 'alpha', the last word of its name.
            words = unicodedata.name(letter, f"u{ord(letter):x}").lower().split()
            letters.append(re.sub(r"\W", "_", words[-1]))
    base = "".join(letters)
    if not _IDENTIFIER.fullmatch(base):
        base = f"_{base}_"
    new, count = base, 0
    while new in taken or new in _RESERVED:
        count += 1
        new = f"{base}_{count}"
    taken.add(new)
    return new


def _parameter_names(
    arguments: Sequence[str], flattened: Sequence[list[tuple[str, bool]]], taken: set[str]
) -> list[str]:
    """Names for the `.param`s. An argument keeps its name where a part of another would be called the same."""
    whole = {
        argument: _ptx_name(argument, taken)
        for argument, leaves in zip(arguments, flattened, strict=True)
        if any(leaf == argument for leaf, _ in leaves)
    }
    return [
        whole[argument] if leaf == argument else _ptx_name(leaf, taken)
        for argument, leaves in zip(arguments, flattened, strict=True)
        for leaf, _ in leaves
    ]


def _tidy(
    text: str,
    name: str,
    argument_names: Sequence[str],
    argument_types: Sequence[types.Type],
    arch: str,
    cluster: tuple[int, int, int] | None,
) -> Compiled:
    """Give the entry and its parameters readable names and turn tensor maps into by-value parameters."""
    entry = _ENTRY.search(text)
    if entry is None:
        raise CompileError(f"{name}: the PTX has no entry")
    mangled = entry[1]
    flattened = [_flatten(n, t) for n, t in zip(argument_names, argument_types, strict=True)]
    leaves = [leaf for argument in flattened for leaf in argument]
    declared = _DECLARED.findall(entry[2])
    if len(declared) != len(leaves):
        raise CompileError(f"{name}: {len(declared)} parameters in the PTX, {len(leaves)} expected from its types")

    text = without_marks(text)
    # The environment object serves Numba's CPU calling convention only; nothing refers to it.
    text = re.sub(r"^\.common \.global[^\n]*NumbaEnv[^\n]*\n", "", text, flags=re.M)
    taken = {word for line in _DIRECTIVE.findall(_STRING.sub("", text)) for word in _SYMBOL.findall(line)}
    name = _ptx_name(name, taken)
    names = _parameter_names(argument_names, flattened, taken)
    renamed = {mangled: name} | {old: new for (_, old), new in zip(declared, names, strict=True)}
    parameters, lines, offset = [], [], 0
    for (kind, old), new, (_, is_map) in zip(declared, names, leaves, strict=True):
        if is_map:
            size, align = _TENSOR_MAP_BYTES, 64
            lines.append(f"\t.param .align 64 .b8 {new}[{size}]")
            text = re.sub(
                rf"ld\.param\.[ub]64\s+(%\w+), \[{re.escape(old)}\];",
                rf"mov.b64 \t\1, {old};\n\tcvta.param.u64 \t\1, \1;",
                text,
            )
            if re.search(rf"\[{re.escape(old)}(?![\w$])", text):
                raise CompileError(f"{name}: the PTX reads the tensor map {new} in a way that is not known here")
        else:
            size = align = _SIZES[kind.lstrip("usbf")]
            lines.append(f"\t.param .{kind} {new}")
        offset = (offset + align - 1) // align * align
        parameters.append(Parameter(new, kind, size, align, offset))
        offset += size
    header = f".visible .entry {name}(\n" + ",\n".join(lines) + "\n)\n"
    if cluster and cluster != (1, 1, 1):
        header += ".explicitcluster\n.reqnctapercluster {}, {}, {}\n".format(*cluster)
    text = _ENTRY.sub(lambda _: header, text, count=1)
    # All at once: a new name may be another parameter's old one.
    text = _WORD.sub(lambda word: renamed.get(word[0], word[0]), text)
    modules = ptx.link_files(text)
    _check_externals(name, text, modules)
    return Compiled(name, arch, text, tuple(parameters), offset, tuple(modules))


_EXTERNAL = re.compile(r"\.extern\s+\.func\s*(?:\([^)]*\))?\s*([\w$]+)")
_DEFINED = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?\.func\s*(?:\([^)]*\))?\s*([\w$]+)", re.M)
# What the driver gives to every kernel (CUDA C++ Programming Guide, "Formatted Output", "Dynamic Global Memory …").
_SYSTEM_CALLS = {"vprintf", "__assertfail", "malloc", "free"}
_COMMENT = re.compile(r"//[^\n]*")
_SHIM = re.compile(r"_ZL?(\d+)(\w+)_nbst")


def _check_externals(name: str, text: str, modules: Sequence[tuple[str, str]]) -> None:
    """Refuse calls of functions that neither ptx/ nor the driver has, with their names: a linker says less.

    Raises:
        CompileError: there is such a call.
    """
    known = _SYSTEM_CALLS.union(*(_DEFINED.findall(_COMMENT.sub("", module)) for _, module in modules))
    missing = sorted(set(_EXTERNAL.findall(text)) - known)
    if not missing:
        return
    shims = [_SHIM.fullmatch(symbol) for symbol in missing]
    called = ", ".join(s[2][: int(s[1])] if s else m for s, m in zip(shims, missing, strict=True))
    way_out = "express it with `numba_tma.ptx` or a @cuda.jit(device=True) function in Python"
    if any(symbol.endswith("_nbst") for symbol in missing):
        way_out = f"convert to float32, or {way_out}"
    raise CompileError(
        f"{name} calls {called} ({', '.join(missing)}), whose code Numba-CUDA would compile from CUDA C++ or "
        f"link from a file at launch; here only functions of ptx/ and {', '.join(sorted(_SYSTEM_CALLS))} are "
        f"linked: {way_out}"
    )


def _to_json(compiled: Compiled) -> bytes:
    return json.dumps(
        {
            "name": compiled.name,
            "arch": compiled.arch,
            "ptx": compiled.ptx,
            "parameters": [vars(p) for p in compiled.parameters],
            "parameter_bytes": compiled.parameter_bytes,
            "modules": compiled.modules,
        }
    ).encode()


def _from_json(data: bytes) -> Compiled | None:
    """What `_to_json` wrote, or None if it was something else that wrote `data`."""
    try:
        fields = json.loads(data)
        fields["parameters"] = tuple(Parameter(**p) for p in fields["parameters"])
        fields["modules"] = tuple((name, text) for name, text in fields["modules"])
        return Compiled(**fields)
    except (ValueError, TypeError, KeyError):
        return None


_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_LINKED = re.compile(r"info\s*: used \d+ registers(.*)")
# From sm_90 on nvJitLink counts in the kilobyte that the system keeps in each block that has shared memory.
_RESERVED_SHARED = 1024
_AMOUNTS = {name: re.compile(rf"(\d+) {name}|used (\d+) {name}") for name in ("barriers", "bytes smem", "bytes lmem")}


def _parse_resources(log: str, name: str, arch: str) -> Resources:
    start = log.find(f"Compiling entry function '{name}'")
    own = log[max(start, 0) :]
    stack, used = _STACK.search(own), _USED.search(own)
    if used is None:
        raise CompileError(f"no resource report for {name} in the assembler's log:\n{log}")

    def amount(what: str, line: str) -> int:
        found = _AMOUNTS[what].search(line)
        return int(found[1] or found[2]) if found else 0

    linked = _LINKED.search(log)
    shared = amount("bytes smem", used[2])
    if linked:
        reserved = _RESERVED_SHARED if architectures.parse(arch)[0] >= 9 else 0
        shared = max(amount("bytes smem", linked[1]) - reserved, 0)

    frame = tuple(int(v) for v in stack.groups()) if stack else (0, 0, 0)
    return Resources(
        registers=int(used[1]),
        stack_bytes=frame[0],
        spill_store_bytes=frame[1],
        spill_load_bytes=frame[2],
        shared_bytes=shared,
        local_bytes=amount("bytes lmem", used[2]),
        barriers=amount("barriers", used[2]),
        warnings=tuple(line.strip() for line in log.splitlines() if "warning" in line.lower() or "C75" in line),
    )

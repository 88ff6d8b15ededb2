"""NumPy ufuncs whose scalar body is LLVM IR: for operations that NumPy lacks, or has only in many calls.

A ufunc so made broadcasts, takes strides and 0-d arrays like any other, never warns, and costs about a
microsecond a call. It is compiled at its first use (some milliseconds) and kept for the life of the process.

A body is the IR text of a function of ``%x0``, ``%x1``, … up to its ``ret``; ``Body`` helps to write one.
Array types are given by PTX name (``s32``, ``f64``); predicates are ``pred``, an ``i8`` of 0 or 1.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache, lru_cache
from itertools import count
from typing import Any

import llvmlite.binding as llvm
import numpy as np

_LLVM = {
    "pred": "i8",
    **dict.fromkeys(("s8", "u8"), "i8"),
    **dict.fromkeys(("s16", "u16"), "i16"),
    **dict.fromkeys(("s32", "u32"), "i32"),
    **dict.fromkeys(("s64", "u64"), "i64"),
    "f32": "float",
    "f64": "double",
}
_NUMPY = {
    "pred": np.bool_,
    "s8": np.int8,
    "u8": np.uint8,
    "s16": np.int16,
    "u16": np.uint16,
    "s32": np.int32,
    "u32": np.uint32,
    "s64": np.int64,
    "u64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
}
_CALL = re.compile(r"call (\S+) (@llvm\.[\w.]+)\(([^()]*)\)")
# Position of PyUFunc_FromFuncAndData in NumPy's table of C functions, part of its stable binary interface.
_FROM_FUNC_AND_DATA = 1
_IDENTITY_NONE = -1
# NumPy keeps pointers to these for as long as a ufunc lives, which is for ever.
_kept: list[Any] = []
_numbers = count()


def llvm_type(name: str) -> str:
    """LLVM's name of a PTX type."""
    return _LLVM[name]


class Body:
    """Lines of IR: ``b("fadd double %x0, %x1")`` names the new value, ``b.returns("double", v)`` ends."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, text: str) -> str:
        name = f"%t{len(self._lines)}"
        self._lines.append(f"  {name} = {text}")
        return name

    def returns(self, kind: str, value: str) -> str:
        return "\n".join([*self._lines, f"  ret {kind} {value}"])


@cache
def ufunc(name: str, inputs: tuple[str, ...], output: str, body: str) -> np.ufunc:
    """The ufunc `name` from arrays of the PTX types `inputs` to `output`; equal arguments give one object."""
    address = compile_function(_module_text(inputs, output, body))
    return _wrap(name, address, [np.dtype(_NUMPY[kind]) for kind in (*inputs, output)])


def _module_text(inputs: tuple[str, ...], output: str, body: str) -> str:
    kinds = [_LLVM[kind] for kind in (*inputs, output)]
    sizes = [np.dtype(_NUMPY[kind]).itemsize for kind in (*inputs, output)]
    places = range(len(kinds))
    last = len(inputs)
    declarations = {
        f"declare {found[1]} {found[2]}({', '.join(argument.split()[0] for argument in found[3].split(','))})"
        for found in _CALL.finditer(body)
    }
    arguments = ", ".join(f"{kinds[i]} %x{i}" for i in range(last))
    passed = ", ".join(f"{kinds[i]} %v{i}" for i in range(last))

    def loop(label: str, offset: str, metadata: int) -> list[str]:
        """One loop; `offset` computes a lane's byte offset %o{i} from the lane's number and the step."""
        lines = [f"{label}:", f"  %i = phi i64 [0, %entry], [%next, %{label}]"]
        for i in places:
            lines.append("  " + offset.format(i=i, size=sizes[i]))
            lines.append(f"  %p{i} = getelementptr i8, ptr %a{i}, i64 %o{i}")
        for i in range(last):
            lines.append(f"  %v{i} = load {kinds[i]}, ptr %p{i}, !llvm.access.group !0")
        lines.append(f"  %value = call {kinds[last]} @scalar({passed})")
        lines.append(f"  store {kinds[last]} %value, ptr %p{last}, !llvm.access.group !0")
        lines.append("  %next = add nuw nsw i64 %i, 1")
        lines.append("  %more = icmp slt i64 %next, %n")
        lines.append(f"  br i1 %more, label %{label}, label %end, !llvm.loop !{metadata}")
        return [re.sub(r"%(i|o\d|p\d|v\d|value|next|more)\b", rf"%{label}.\1", line) for line in lines]

    lines = [
        *sorted(declarations),
        f"define internal {kinds[last]} @scalar({arguments}) alwaysinline {{",
        body,
        "}",
        "define void @lanes(ptr %args, ptr %dims, ptr %steps, ptr %data) {",
        "entry:",
        "  %n = load i64, ptr %dims",
    ]
    for i in places:
        lines += [
            f"  %aa{i} = getelementptr ptr, ptr %args, i64 {i}",
            f"  %a{i} = load ptr, ptr %aa{i}",
            f"  %ss{i} = getelementptr i64, ptr %steps, i64 {i}",
            f"  %s{i} = load i64, ptr %ss{i}",
            f"  %c{i} = icmp eq i64 %s{i}, {sizes[i]}",
        ]
    lines.append("  %d0 = and i1 %c0, true")
    lines += [f"  %d{i} = and i1 %d{i - 1}, %c{i}" for i in places[1:]]
    lines.append("  %some = icmp sgt i64 %n, 0")
    lines.append("  br i1 %some, label %choose, label %end")
    lines.append("choose:")
    lines.append(f"  br i1 %d{last}, label %dense, label %strided")
    dense = loop("dense", "%o{i} = mul nuw nsw i64 %i, {size}", 1)
    strided = loop("strided", "%o{i} = mul i64 %i, %s{i}", 3)
    lines += [line.replace("%entry", "%choose") for line in (*dense, *strided)]
    lines += ["end:", "  ret void", "}"]
    # NumPy copies operands that overlap other than lane by lane, so the lanes are independent.
    lines += [
        "!0 = distinct !{}",
        "!1 = distinct !{!1, !2}",
        '!2 = !{!"llvm.loop.parallel_accesses", !0}',
        "!3 = distinct !{!3, !4}",
        '!4 = !{!"llvm.loop.vectorize.enable", i1 false}',
    ]
    return "\n".join(lines)


@lru_cache(maxsize=1)
def _engine() -> tuple[Any, Any]:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=2, jit=True
    )
    empty = llvm.parse_assembly(f'target triple = "{target.triple}"')
    return target, llvm.create_mcjit_compiler(empty, target)


def compile_function(text: str) -> int:
    target, engine = _engine()
    # The engine has one name space, so every function gets a name of its own.
    name = f"lanes_{next(_numbers)}"
    module = llvm.parse_assembly(text.replace("@lanes(", f"@{name}("))
    module.triple = target.triple
    module.data_layout = str(target.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = True
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    engine.add_module(module)
    engine.finalize_object()
    return engine.get_function_address(name)


def _wrap(name: str, address: int, dtypes: list[np.dtype]) -> np.ufunc:
    """PyUFunc_FromFuncAndData: a ufunc with one inner loop."""
    core = getattr(np, "_core", None) or np.core
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(pointer_of(core._multiarray_umath._UFUNC_API, None), ctypes.POINTER(ctypes.c_void_p))
    make = ctypes.PYFUNCTYPE(
        ctypes.py_object,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        *([ctypes.c_int] * 4),
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
    )(table[_FROM_FUNC_AND_DATA])
    functions = (ctypes.c_void_p * 1)(address)
    data = (ctypes.c_void_p * 1)(None)
    kinds = ctypes.create_string_buffer(bytes(dtype.num for dtype in dtypes))
    label = name.encode()
    _kept.append((functions, data, kinds, label))
    inputs = len(dtypes) - 1
    pointers = (ctypes.addressof(functions), ctypes.addressof(data), ctypes.addressof(kinds))
    return make(*pointers, 1, inputs, 1, _IDENTITY_NONE, label, None, 0)

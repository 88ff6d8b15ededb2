"""Marks are nothing where a kernel is not traced: the same machine code, to the instruction, as without them."""

from __future__ import annotations

import re
import sys
import types

import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError

from numba_tma import kernel, trace
from numba_tma.kernels import kv_stream
from numba_tma.launch import recording, tracing, use_backend

_MARK = re.compile(r"^ *trace\.(begin|end|mark)\(.*\)\n", re.M)
CASE = kv_stream.PROBLEM.cases["quick", "sim"][0]


def machine_code(sass: str) -> list[str]:
    """The instructions, without the comments that say from which line they come."""
    return [line for line in sass.splitlines() if line.strip() and not line.strip().startswith("//")]


def compiled(module, variant):
    arrays = kv_stream.PROBLEM.inputs(CASE, np.random.default_rng(0))
    with recording() as recorded:
        module.PROBLEM.variant(variant).bind(arrays)()
    return recorded.launches[0].compiled


@pytest.fixture(scope="module")
def without_marks():
    """The very file of kv_stream, with its marks struck out."""
    with open(kv_stream.__file__) as file:
        text = file.read()
    struck, count = _MARK.subn("\n", text)
    assert count >= 10
    module = types.ModuleType("numba_tma.kernels.kv_stream_without_marks")
    module.__package__ = "numba_tma.kernels"
    sys.modules[module.__name__] = module
    exec(compile(struck, kv_stream.__file__, "exec"), module.__dict__)
    yield module
    del sys.modules[module.__name__]


@pytest.mark.parametrize("variant", [variant.name for variant in kv_stream.PROBLEM.variants])
def test_a_kernel_that_is_not_traced_is_as_without_marks(variant, without_marks):
    with_marks = compiled(kv_stream, variant)
    assert "trace" not in with_marks.ptx.replace("numba_tma_trace.py", "")
    assert machine_code(with_marks.sass) == machine_code(compiled(without_marks, variant).sass)


def test_tracing_leaves_nothing_in_a_kernel_compiled_afterwards(without_marks):
    # The device functions are compiled once and used for both.
    arrays = kv_stream.PROBLEM.inputs(CASE, np.random.default_rng(0))
    with use_backend("sim"), tracing() as traced:
        kv_stream.PROBLEM.variant("tma").bind(arrays)()
    stamped = traced.launches[0].instrumented.compiled
    assert "%clock" in stamped.ptx and "SR_CLOCKLO" in stamped.sass
    plain = compiled(kv_stream, "tma")
    assert "%clock" not in plain.ptx
    assert machine_code(plain.sass) == machine_code(compiled(without_marks, "tma").sass)


def test_marks_work_in_a_kernel_that_numba_compiles():
    def marked(x):
        trace.begin("add")
        x[cuda.threadIdx.x] += 1
        trace.end("add")

    def plain(x):
        x[cuda.threadIdx.x] += 1

    texts = [cuda.compile(f, types_of_array(), cc=(9, 0))[0] for f in (marked, plain)]
    bodies = [re.sub(r"_Z\w+|\.loc[^\n]*|//[^\n]*", "", text) for text in texts]
    assert "call" not in bodies[0]
    assert bodies[0].count(";") == bodies[1].count(";")


def types_of_array():
    from numba import types as numba_types

    return numba_types.void(numba_types.float32[::1])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("trace.begin(x)", "must be a string written there"),
        ("trace.begin('')", "a name is a letter and"),
        ("trace.begin('a\"b')", "a name is a letter and"),
        ("trace.end('é')", "a name is a letter and"),
        ("trace.mark('here', 1.5)", "must be an integer"),
    ],
)
def test_marks_that_cannot_be(body, says):
    space = {"trace": trace}
    exec(f"def wrong(x):\n    {body}\n", space)
    with pytest.raises(TypingError, match=says):
        kernel(threads=32)(space["wrong"]).compile(np.int32(3))

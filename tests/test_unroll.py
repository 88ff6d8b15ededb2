"""`unroll()`: loops over local arrays become straight code, however large they are, and only those."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda.types import float32

from numba_tma import kernel, use_backend
from numba_tma.unroll import apply_marks, unroll

X = np.zeros(64, np.float32)


@cuda.jit(device=True, forceinline=True)
def large(x):
    return cuda.libdevice.sinf(x) + cuda.libdevice.tanf(x) * cuda.libdevice.expf(x)


def make(mark):
    """A kernel whose second loop is too large for NVVM to unroll by itself; `mark` is called in it."""

    @kernel(threads=32)
    def sums(x, y):
        totals = cuda.local.array(32, float32)
        for i in range(32):
            totals[i] = x[i]
        for i in range(32):
            mark()
            if i == 3:
                continue
            y[i] = large(totals[i]) + large(-totals[31 - i])

    return sums


@cuda.jit(device=True, forceinline=True)
def nothing():
    pass


def local_accesses(compiled):
    sass = compiled.sass
    return sass.count(" STL") + sass.count(" LDL")


def test_a_marked_loop_is_unrolled():
    marked, plain = make(unroll).compile(X, X), make(nothing).compile(X, X)
    assert marked.ptx.count("st.global.f32") == 31
    assert plain.ptx.count("st.global.f32") < 31
    assert "// unroll" not in marked.ptx
    # sinf and tanf have a slow path with a local array of their own, in each of the copies.
    assert marked.resources.stack_bytes < plain.resources.stack_bytes
    assert local_accesses(plain) > 0


def test_a_loop_is_kept_as_it_is():
    def copy(x, y):
        for i in range(8):
            unroll(1)
            y[i] = x[i]

    def four_at_a_time(x, y):
        for i in range(64):
            unroll(4)
            y[i] = x[i]

    assert kernel(threads=32)(copy).compile(X, X).ptx.count("st.global.f32") == 1
    assert kernel(threads=32)(four_at_a_time).compile(X, X).ptx.count("st.global.f32") == 4


def test_numbers(rng):
    x, y = rng.standard_normal(64).astype(np.float32), np.zeros(64, np.float32)
    with use_backend("sim"):
        make(unroll)[1](x, y)
    a, b = x[:32].astype(np.float64), -x[31::-1].astype(np.float64)
    expected = np.sin(a) + np.tan(a) * np.exp(a) + np.sin(b) + np.tan(b) * np.exp(b)
    expected[3] = 0
    np.testing.assert_allclose(y[:32], expected, rtol=1e-4, atol=1e-4)


def test_the_inner_loop_is_meant():
    """Blocks of two nested loops: the mark is in the inner one, whose branch alone is annotated."""
    text = """define void @"f"() {
entry:
  br label %"outer"
"outer":
  br label %"inner"
inner:
  call void asm sideeffect "// unroll 0", ""(), !dbg !3
  br i1 %"x", label %"inner", label %"end" , !dbg !4
end:
  br i1 %"y", label %"outer", label %"out"
out:
  ret void
}
"""
    annotated = apply_marks(text)
    lines = [line for line in annotated.splitlines() if "!llvm.loop !" in line]
    assert len(lines) == 1
    assert lines[0].startswith('  br i1 %"x"')
    assert "llvm.loop.unroll.full" in annotated
    assert "// unroll 0" not in annotated
    assert apply_marks(text.replace("// unroll 0", "// other")) == text.replace("// unroll 0", "// other")


def test_mistakes_are_named():
    def outside(x, y):
        unroll()
        y[0] = x[0]

    def not_literal(x, y):
        for i in range(8):
            unroll(x.size)
            y[i] = x[i]

    with pytest.raises(ValueError, match="stands in no loop"):
        kernel(threads=32)(outside).compile(X, X)
    with pytest.raises(TypingError, match="must be a literal from 1 to 4096"):
        kernel(threads=32)(not_literal).compile(X, X)

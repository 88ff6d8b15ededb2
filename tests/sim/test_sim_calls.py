"""Functions: parameters, results, recursion, divergent calls; and what the device's system provides."""

from __future__ import annotations

import numpy as np
import pytest
from simulate import run_ptx

from numba_tma import sim
from numba_tma.sim.printf import format_text

START = """
    .reg .b32 %r<9>; .reg .b64 %rd<6>; .reg .pred %p<3>;
    ld.param.u64 %rd0, [p0];
    mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4; add.u64 %rd0, %rd0, %rd1;
"""


def call(name: str, argument: str, result: str) -> str:
    """A call of a function of one u32 with one u32 result."""
    return f"""
    {{
        .param .b32 param0; .param .b32 retval0;
        st.param.b32 [param0+0], {argument};
        call.uni (retval0), {name}, (param0);
        ld.param.b32 {result}, [retval0+0];
    }}
    """


def test_a_function_with_a_struct():
    declarations = """
        .func (.param .align 8 .b8 out[16]) swap_add(.param .align 8 .b8 pair[16], .param .b32 plus)
        {
            .reg .b64 %rd<4>; .reg .b32 %r<2>;
            ld.param.v2.u64 {%rd0, %rd1}, [pair];
            ld.param.u32 %r0, [plus];
            cvt.u64.u32 %rd2, %r0;
            add.u64 %rd0, %rd0, %rd2;
            st.param.b64 [out+0], %rd1;
            st.param.b64 [out+8], %rd0;
            ret;
        }
    """
    body = (
        START
        + """
        cvt.u64.u32 %rd2, %r0; mov.u64 %rd3, 1000;
        {
            .param .align 8 .b8 a[16]; .param .b32 b; .param .align 8 .b8 c[16];
            st.param.v2.b64 [a], {%rd2, %rd3};
            st.param.b32 [b], 7;
            call (c), swap_add, (a, b);
            ld.param.v2.b64 {%rd4, %rd5}, [c];
        }
        mad.lo.u64 %rd4, %rd4, 1000, %rd5;
        cvt.u32.u64 %r1, %rd4; st.global.u32 [%rd0], %r1; ret;
    """
    )
    out = np.zeros(40, np.uint32)
    run_ptx(body, 1, 40, out, declarations=declarations)
    np.testing.assert_array_equal(out, 1_000_000 + np.arange(40) + 7)


def test_recursion():
    declarations = (
        """
        .func (.param .b32 out) fibonacci(.param .b32 n)
        {
            .reg .b32 %r<6>; .reg .pred %p;
            ld.param.u32 %r0, [n];
            setp.lt.u32 %p, %r0, 2;
            @%p bra BASE;
            sub.u32 %r1, %r0, 1; sub.u32 %r2, %r0, 2;
    """
        + call("fibonacci", "%r1", "%r3")
        + call("fibonacci", "%r2", "%r4")
        + """
            add.u32 %r5, %r3, %r4;
            st.param.b32 [out], %r5;
            ret;
            BASE:
            st.param.b32 [out], %r0;
            ret;
        }
    """
    )
    body = START + "and.b32 %r1, %r0, 7;" + call("fibonacci", "%r1", "%r2") + "st.global.u32 [%rd0], %r2; ret;"
    out = np.zeros(32, np.uint32)
    run_ptx(body, 1, 32, out, declarations=declarations)
    assert out.tolist() == [0, 1, 1, 2, 3, 5, 8, 13] * 4
    endless = declarations.replace("lt.u32 %p, %r0, 2", "lt.u32 %p, %r0, 0")
    with pytest.raises(sim.SimError, match="fibonacci calls itself more than 64 deep"):
        run_ptx(body, 1, 1, out, declarations=endless)


def test_lanes_call_different_functions_and_one_exits_inside():
    declarations = (
        """
        .func (.param .b32 out) twice(.param .b32 x)
        { .reg .b32 %r<3>; ld.param.u32 %r0, [x]; add.u32 %r1, %r0, %r0; st.param.b32 [out], %r1; ret; }
        .func (.param .b32 out) picky(.param .b32 x)
        {
            .reg .b32 %r<3>; .reg .pred %p;
            ld.param.u32 %r0, [x]; setp.eq.u32 %p, %r0, 5;
            @%p exit;
    """
        + call("twice", "%r0", "%r1")
        + """
            add.u32 %r1, %r1, 100; st.param.b32 [out], %r1; ret;
        }
    """
    )
    body = START + "and.b32 %r1, %r0, 1; setp.eq.u32 %p0, %r1, 0; @%p0 bra EVEN;" + call("picky", "%r0", "%r2")
    body += (
        "bra.uni JOIN; EVEN:"
        + call("twice", "%r0", "%r2")
        + "JOIN: add.u32 %r2, %r2, 1; st.global.u32 [%rd0], %r2; ret;"
    )
    out = np.zeros(32, np.uint32)
    run_ptx(body, 1, 32, out, declarations=declarations)
    i = np.arange(32)
    np.testing.assert_array_equal(out, np.where(i % 2 == 0, 2 * i + 1, np.where(i == 5, 0, 2 * i + 101)))


def test_branch_tables():
    body = (
        START
        + """
        .branchtargets_placeholder
        rem.u32 %r1, %r0, 3;
        TABLE: .branchtargets A, B, C;
        brx.idx %r1, TABLE;
        A: mov.u32 %r2, 10; bra END;
        B: mov.u32 %r2, 20; bra END;
        C: mov.u32 %r2, 30;
        END: st.global.u32 [%rd0], %r2; ret;
    """.replace(".branchtargets_placeholder", "")
    )
    out = np.zeros(40, np.uint32)
    run_ptx(body, 1, 40, out)
    np.testing.assert_array_equal(out, np.choose(np.arange(40) % 3, [10, 20, 30]))


def test_guarded_instructions():
    body = (
        START
        + """
        setp.lt.u32 %p0, %r0, 10; setp.lt.u32 %p1, %r0, 20;
        mov.u32 %r1, 1;
        @%p0 mov.u32 %r1, 2;
        @!%p1 add.u32 %r1, %r1, 4;
        @%p1 ld.global.u32 %r1, [%rd0];
        @%p0 st.global.u32 [%rd0], 77;
        @!%p0 st.global.u32 [%rd0], %r1;
        @%p0 ret;
        @!%p1 bra END;
        add.u32 %r1, %r1, 1000; st.global.u32 [%rd0], %r1;
        END: ret;
    """
    )
    out = np.arange(40, dtype=np.uint32) + 500
    run_ptx(body, 1, 40, out)
    i = np.arange(40)
    np.testing.assert_array_equal(out, np.select([i < 10, i < 20], [77, i + 1500], 5))


def test_traps_and_assertions():
    with pytest.raises(sim.Trap, match="executed trap; block 0, thread 3"):
        run_ptx(START + "setp.ne.u32 %p0, %r0, 3; @%p0 ret; trap;", 1, 8, np.zeros(8, np.uint32))
    declarations = """
        .extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 c);
        .global .align 1 .b8 message[6] = {97, 32, 60, 32, 98, 0};
        .global .align 1 .b8 file[5] = {107, 46, 112, 121, 0};
        .global .align 1 .b8 name[2] = {107, 0};
    """
    body = """
        .reg .b64 %rd<4>;
        mov.u64 %rd0, message; mov.u64 %rd1, file; mov.u64 %rd2, name;
        {
            .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;
            st.param.b64 [a], %rd0; st.param.b64 [b], %rd1; st.param.b32 [c], 12; st.param.b64 [d], %rd2;
            st.param.b64 [e], 1;
            call.uni __assertfail, (a, b, c, d, e);
        }
        ret;
    """
    with pytest.raises(sim.Trap, match=r"assertion failed: a < b \(k.py:12, k\)"):
        run_ptx(body, 1, 1, declarations=declarations)


def test_a_heap():
    declarations = """
        .extern .func (.param .b64 p) malloc(.param .b64 n);
        .extern .func free(.param .b64 p);
    """
    body = (
        START
        + """
        {
            .param .b64 n; .param .b64 p;
            st.param.b64 [n], 8;
            call.uni (p), malloc, (n);
            ld.param.b64 %rd2, [p];
        }
        st.u32 [%rd2+4], %r0; ld.u32 %r1, [%rd2+4]; add.u32 %r1, %r1, 1; st.global.u32 [%rd0], %r1;
        { .param .b64 p; st.param.b64 [p], %rd2; call.uni free, (p); }
        setp.ne.u32 %p0, %r0, 2;
        @%p0 bra END;
        st.u32 [%rd2], %r0;
        END: ret;
    """
    )
    out = np.zeros(4, np.uint32)
    with pytest.raises(sim.OutOfBounds, match="thread 2"):
        run_ptx(body, 1, 4, out, declarations=declarations)
    assert out.tolist() == [1, 2, 3, 4]


def test_formats():
    values = [
        np.array([-5], np.int32),
        np.array([4_000_000_000], np.uint32),
        np.array([2.5], np.float64),
        np.array([0x1234], np.uint64),
        np.array([-(2**40)], np.int64),
        np.array([65], np.uint32),
        np.array([255], np.uint32),
        np.array([1e-7], np.float64),
        np.array([-1], np.int32),
    ]
    arguments = iter(values)
    template = b"%d|%u|%8.3f|%s|%lld|%c|%#x|%g|%hhd|100%%"
    text = format_text(template, lambda size: next(arguments).view(np.uint8), lambda address: b"text %d")
    assert text == "-5|4000000000|   2.500|text %d|-1099511627776|A|0xff|1e-07|-1|100%"


def test_an_undefined_function():
    declarations = ".extern .func mystery();"
    with pytest.raises(sim.UnknownInstruction, match="mystery is declared but not defined"):
        run_ptx("call.uni mystery; ret;", 1, 1, declarations=declarations)

"""The PTX parser: what compilers write, what the grammar allows, and what nobody should write."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import re
import time
import tracemalloc

import pytest
from numba import cuda, float32, float64, int32

from numba_tma.sim.errors import PtxSyntaxError, SimError
from numba_tma.sim.module import (
    Address,
    Immediate,
    Label,
    Negated,
    PredicatePair,
    Register,
    Relocation,
    Sink,
    Symbol,
    TensorOperand,
    Vector,
)
from numba_tma.sim.parse import parse

HEAD = ".version 8.6\n.target sm_90a, debug\n.address_size 64\n"
REGISTERS = ".reg .b32 %r<100>; .reg .b64 %rd<20>; .reg .f32 %f<20>; .reg .pred %p<8>; .reg .b16 %rs<8>;\n"


def kernel(body: str, before: str = "", head: str = ""):
    """The parsed kernel `k` with this body, and its module."""
    module = parse(f"{HEAD}{before}\n.visible .entry k({head})\n{{\n{REGISTERS}{body}\n}}\n", "test.ptx")
    return module.entries["k"], module


def operands(text: str, before: str = ""):
    return kernel(text, before)[0].body[0].operands


def register(name: str) -> Register:
    kind = {"%rd": "b64", "%rs": "b16", "%r": "b32", "%f": "f32", "%p": "pred"}
    return Register(name, kind[name.rstrip("0123456789")])


# ---- the module


def test_head():
    _, module = kernel("ret;")
    assert (module.version, module.target, module.target_options) == ((8, 6), "sm_90a", ("debug",))
    assert module.address_size == 64 and module.filename == "test.ptx"


def test_parameters_and_directives():
    function, _ = kernel("ret;", head=".param .u64 .ptr .global .align 16 a, .param .align 64 .b8 map[128]")
    a, box = function.params
    assert (a.type, a.size, a.align, a.pointer_space, a.shape) == ("u64", 8, 8, "global", ())
    assert (box.type, box.size, box.align, box.shape, box.space) == ("b8", 128, 64, (128,), "param")
    text = (
        f"{HEAD}.weak .entry k .maxntid 256, 1, 1 .minnctapersm 2\n.maxnreg 128 .reqnctapercluster 2, 1, 1\n"
        '.explicitcluster .maxclusterrank 8 .pragma "nounroll"; { ret; }'
    )
    function = parse(text).entries["k"]
    assert function.linkage == "weak" and function.entry and function.defined
    assert function.directives == {
        "maxntid": (256, 1, 1),
        "minnctapersm": (2,),
        "maxnreg": (128,),
        "reqnctapercluster": (2, 1, 1),
        "explicitcluster": (),
        "maxclusterrank": (8,),
    }


def test_functions_and_declarations():
    text = (
        HEAD
        + """
    .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b) ;
    .func (.param .align 16 .b8 r[16]) later (.param .b32 a);
    .visible .func .attribute(.unified(1, 2)) stop () .noreturn ;
    .func (.param .align 16 .b8 r[16]) later (.param .b32 a) { ret; }
    .func bare { ret; }
    .alias other, later;
    """
    )
    module = parse(text)
    assert not module.functions["vprintf"].defined and module.functions["vprintf"].linkage == "extern"
    assert module.functions["later"].defined and module.functions["later"].returns[0].size == 16
    assert module.functions["stop"].directives == {"noreturn": ()}
    assert module.functions["other"] is module.functions["later"]
    assert module.functions["bare"].params == []


def test_initialisers():
    _, module = kernel(
        "ret;",
        """.func f () { ret; }
        .global .align 4 .b8 a[16] = {1, 0x2, 0377, -1, 2};
        .global .align 8 .u64 b = generic(a)+8;
        .global .u64 c[3] = {f, generic(a), a-4};
        .global .b8 d[] = {1, 0xFF(a), 0xFF00(a), 0xFF0000(a+16)};
        .const .f32 e[2][3] = {{1.0, 0f40000000}, {-3.0}};
        .global .f64 f64 = 0d3FF8000000000000;
        .global .v4 .u32 v = {1, 2, 3, 4};
        .global .u32 g[(1 << 2) | 1] = {};
        .extern .shared .align 1024 .b8 h[];
        .shared .align 8 .b64 i, j;
        .global .u32 k2[][2] = {{1, 2}, {3, 4}, {5}};""",
    )
    found = module.globals
    assert found["a"].init == bytes([1, 2, 255, 255, 2]) and found["a"].size == 16
    assert found["b"].relocations == (Relocation(0, 8, "a", 8, True),)
    assert found["c"].relocations == (
        Relocation(0, 8, "f"),
        Relocation(8, 8, "a", 0, True),
        Relocation(16, 8, "a", -4),
    )
    assert found["d"].size == 4 and found["d"].init == bytes([1, 0, 0, 0])
    assert [(x.offset, x.shift, x.addend) for x in found["d"].relocations] == [
        (1, 0, 0),
        (2, 8, 0),
        (3, 16, 16),
    ]
    assert found["e"].init.hex() == "0000803f" + "00000040" + "00000000" + "000040c0" and found["e"].size == 24
    assert found["f64"].init.hex() == "000000000000f83f"
    assert found["v"].init.hex() == "01000000020000000300000004000000" and found["v"].align == 16
    assert found["g"].shape == (5,) and found["g"].size == 20
    assert (found["h"].size, found["h"].align, found["h"].linkage, found["h"].shape) == (
        0,
        1024,
        "extern",
        (0,),
    )
    assert found["i"].size == found["j"].size == 8 and found["j"].space == "shared"
    assert found["k2"].shape == (3, 2) and found["k2"].init.hex() == "".join(f"0{i}000000" for i in range(1, 6))


# ---- operands


def test_immediates():
    texts = {
        "10": 10,
        "-10": -10,
        "0x1F": 31,
        "017": 15,
        "0b101": 5,
        "7U": 7,
        "(1<<4)|3": 19,
        "-(2+3)*4": -20,
        "~0": -1,
        "5 > 3 ? 2 : 9": 2,
        "17 % 5 / 2": 1,
        "-7 / 2": -3,
        "!0 + (3 == 3)": 2,
        "(.u64) -1 >> 63": 1,
        "0xFFFFFFFFFFFFFFFF": (1 << 64) - 1,
        "1 || 0 && 0": 1,
        "6 ^ 3 & 2": 4,
    }
    for text, value in texts.items():
        assert operands(f"mov.u64 %rd1, {text};")[1].value == value, text
    assert operands("mov.f32 %f1, 0f7FC00001;")[1].bits == 0x7FC00001
    assert operands("mov.f32 %f1, 0f3FC00000;")[1] == Immediate(1.5, "f32", 0x3FC00000)
    assert operands("mov.f32 %f1, -0f3FC00000;")[1] == Immediate(-1.5, "f32", 0xBFC00000)
    assert operands("mov.f64 %rd1, 1.5e1;")[1].value == 15.0
    assert operands("mov.f64 %rd1, -.5;")[1].value == -0.5
    assert operands("mov.u32 %r1, WARP_SZ;")[1].value == 32


def test_every_kind_of_operand():
    before = ".shared .align 8 .b8 buffer[64];"
    assert operands("mov.u32 %r1, %tid.x;")[1] == Register("%tid", "u32", "x", True)
    assert operands("mov.u64 %rd1, %clock64;")[1] == Register("%clock64", "u64", None, True)
    assert operands("mov.u64 %rd1, buffer+8;", before)[1] == Symbol("buffer", 8)
    assert operands("ld.shared.u32 %r1, [%r2+-16];")[1] == Address(register("%r2"), -16)
    assert operands("ld.shared.u32 %r1, [ %r2 - 16 ];")[1] == Address(register("%r2"), -16)
    assert operands("ld.shared.u32 %r1, [buffer+4];", before)[1] == Address(Symbol("buffer"), 4)
    assert operands("ld.shared.u32 %r1, [256];")[1] == Address(Immediate(256, "int", 256))
    assert operands("ld.global.b32 { %r1 }, [%rd1];")[0] == Vector((register("%r1"),))
    assert operands("mov.b64 {%r1, _}, %rd1;")[0] == Vector((register("%r1"), Sink()))
    assert operands("setp.lt.and.s32 %p1|%p2, %r1, 3, !%p3;") == (
        PredicatePair(register("%p1"), register("%p2")),
        register("%r1"),
        Immediate(3, "int", 3),
        Negated(register("%p3")),
    )
    assert operands("elect.sync _|%p1, -1;")[0] == PredicatePair(Sink(), register("%p1"))
    copy = operands(
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%r1], [%rd1, {%r2, %r3, 0}], [buffer], {%rs1};",
        before,
    )
    coordinates = Vector((register("%r2"), register("%r3"), Immediate(0, "int", 0)))
    assert copy[1] == TensorOperand(Address(register("%rd1")), coordinates)
    assert copy[2:] == (Address(Symbol("buffer")), Vector((register("%rs1"),)))
    texture = operands("tex.2d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [buffer, %rd1, {%r1, %r2}];", before)[1]
    assert texture.sampler == Address(register("%rd1"))


def test_mnemonics_and_guards():
    function, _ = kernel("@!%p1 st.shared .v2\n.u32 [%r1], {%r2, %r3}; @%p2 bra.uni END; END:")
    store, branch = function.body
    assert (store.opcode, store.modifiers, store.mnemonic) == (
        "st",
        ("shared", "v2", "u32"),
        "st.shared.v2.u32",
    )
    assert store.guard == (register("%p1"), True) and branch.guard == (register("%p2"), False)
    assert store.text == "@!%p1 st.shared .v2 .u32 [%r1], {%r2, %r3};"
    assert branch.operands == (Label("END"),) and function.labels == {"END": 2}
    mnemonic = kernel("fence.proxy.async.shared::cta;")[0].body[0]
    assert mnemonic.modifiers == ("proxy", "async", "shared::cta")


def test_vector_registers():
    function, _ = kernel(".reg .v4 .f32 v; mov.f32 v.y, v.x; ld.global.v4.f32 v, [%rd1]; mov.f32 %f1, v.b;")
    names = [Register(f"v.{c}", "f32") for c in "xyzw"]
    assert function.body[0].operands == (names[1], names[0])
    assert function.body[1].operands[0] == Vector(tuple(names))
    assert function.body[2].operands[1] == names[2]
    assert function.registers["v.w"] == "f32"


def test_calls():
    before = """.extern .func (.param .b32 r) f (.param .b32 a, .param .b64 b);
    .func g () { ret; }"""
    function, _ = kernel(
        """{ .param .b32 a; .param .b64 b; .param .b32 r;
        call.uni (r), f, (a, b); }
        call g;
        { .param .b32 a; .param .b32 r;
        shape : .callprototype (.param .b32 _) _ (.param .b32 _, .param .align 8 .b8 _[16]);
        call (r), %rd1, (a, %r1), shape; }
        set: .calltargets f, g;
        call (%r1), %rd1, (%r2, 3), set;""",
        before,
    )
    direct, bare, indirect, listed = function.body
    assert direct.operands == (
        Symbol("f"),
        Vector((Symbol("r#1"),)),
        Vector((Symbol("a#1"), Symbol("b#1"))),
        None,
    )
    assert bare.operands == (Symbol("g"), Vector(()), Vector(()), None)
    assert indirect.operands == (
        register("%rd1"),
        Vector((Symbol("r#2"),)),
        Vector((Symbol("a#2"), register("%r1"))),
        Label("shape#2"),
    )
    prototype = function.prototypes["shape#2"]
    assert [x.size for x in prototype.params] == [4, 16] and len(prototype.returns) == 1
    assert listed.operands[3] == Label("set") and function.call_targets == {"set": ("f", "g")}
    assert function.variables["b#1"].size == 8


def test_branch_targets():
    function, _ = kernel("table: .branchtargets A, B, A; brx.idx %r1, table; A: ret; B:")
    assert function.branch_targets == {"table": ("A", "B", "A")}
    assert function.body[0].operands == (register("%r1"), Label("table"))
    assert function.labels == {"A": 1, "B": 2}


def test_scopes_of_inline_assembly():
    """The same local names at several places, one hides an outer register; labels used before they appear."""
    piece = "{ .reg .pred p; .reg .b32 x; setp.ne.u32 p, %r1, 0; @p bra DONE; mov.b32 x, y; DONE: }\n"
    function, _ = kernel(".reg .b32 x, y; mov.b32 x, 1;\n" + piece + piece + "{ { .reg .b32 x; mov.b32 x, 2; } }")
    assert function.labels == {"DONE#1": 4, "DONE#2": 7}
    assert [i.operands[0] for i in function.body if i.opcode == "bra"] == [Label("DONE#1"), Label("DONE#2")]
    moves = [i.operands[0].name for i in function.body if i.opcode == "mov"]
    assert moves == ["x", "x#1", "x#2", "x#4"]
    assert function.registers["p#1"] == function.registers["p#2"] == "pred"


def test_carry_chains_declare_their_condition_code():
    assert "%cc" in kernel("add.cc.u32 %r1, %r2, %r3;")[0].registers
    assert "%cc" not in kernel("add.u32 %r1, %r2, %r3;")[0].registers


# ---- source locations


def test_inlined_locations():
    function, module = kernel(
        """.loc 1 10 2
        mov.b32 %r1, 1;
        .loc 2 5 1, function_name $L__info_string0, inlined_at 1 10 2
        mov.b32 %r1, 2;
        .loc 2 9 1, function_name $L__info_string1, inlined_at 2 5 1
        mov.b32 %r1, 3;
        .loc 2 0 1, function_name $L__info_string1, inlined_at 2 5 1
        mov.b32 %r1, 4;
        .loc 1 0 0
        mov.b32 %r1, 5;
        .file 1 "kernel.py"
        .file 2 "C:\\\\helper.py", 123, 456
        .section .debug_str { $L__info_string0:
        .b8 119,97,105,116
        .b8 0
        $L__info_string1: .b8 112,111,108,108,0 }"""
    )
    assert module.files == {1: "kernel.py", 2: "C:\\helper.py"}
    first, second, third, fourth, fifth = (i.location for i in function.body)
    assert (first.file, first.line, first.column, first.inlined_at) == ("kernel.py", 10, 2, None)
    assert second.function == "wait" and second.inlined_at is first
    assert [place.line for place in third.chain()] == [9, 5, 10] and third.outermost is first
    assert str(third) == "C:\\helper.py:9, inlined at C:\\helper.py:5, inlined at kernel.py:10"
    assert fourth is second and fifth is None
    lines = [i.line for i in function.body]
    assert lines == [9, 11, 13, 15, 17]


def test_recursive_inlining_stays_short():
    body = ".loc 1 5 5, function_name $F, inlined_at 1 5 5\nmov.b32 %r1, 1;\n" * 3000
    function, _ = kernel(body)
    assert max(len(list(i.location.chain())) for i in function.body) < 100


# ---- Numba


@cuda.jit(device=True, lineinfo=True)
def divided(a, b):
    return a / b


def reduction(values, out):
    shared = cuda.shared.array(128, float32)
    thread = cuda.threadIdx.x
    shared[thread] = divided(values[cuda.grid(1)], float32(3))
    cuda.syncthreads()
    step = 64
    while step > 0:
        if thread < step:
            shared[thread] += shared[thread + step]
        cuda.syncthreads()
        step //= 2
    if thread == 0:
        cuda.atomic.add(out, 0, shared[0])


def printing(values, out):
    i = cuda.grid(1)
    local = cuda.local.array(8, int32)
    for j in range(8):
        local[j] = values[i + j]
    print("value", i, local[values[i] & 7])
    out[i] = local[i % 8]


def mathematics(values, out):
    i = cuda.grid(1)
    x = values[i]
    out[i] = x**1.5 / (1.0 + x * x)


@pytest.fixture(scope="module")
def numba_ptx():
    """PTX of a few kernels by name, with line tables, and one with full debug information."""
    from numba.cuda import dispatcher

    class Hopper:
        compute_capability = (9, 0)

    original = dispatcher.get_current_device
    dispatcher.get_current_device = Hopper
    options = {"cc": (9, 0, "a"), "device": False, "abi": "numba"}
    try:
        return {
            "reduction": cuda.compile(reduction, (float32[::1], float32[::1]), lineinfo=True, **options)[0],
            "printing": cuda.compile(printing, (int32[::1], int32[::1]), lineinfo=True, **options)[0],
            "mathematics": cuda.compile(mathematics, (float64[::1], float64[::1]), lineinfo=True, **options)[0],
            "debug": cuda.compile(printing, (int32[::1], int32[::1]), debug=True, opt=False, **options)[0],
        }
    finally:
        dispatcher.get_current_device = original


def test_numba_kernels(numba_ptx):
    for name, text in numba_ptx.items():
        module = parse(text, name)
        functions = (*module.entries.values(), *module.functions.values())
        body = [item for function in functions for item in function.body]
        # One statement a line, and directives begin with a dot.
        statements = [line.strip() for line in text.splitlines() if ";" in line.split("//")[0]]
        assert len(body) == sum(line[0] != "." and line != ";" for line in statements)
        for item in body:
            for operand in item.operands:
                if isinstance(operand, Register) and not operand.special:
                    assert operand.type in ("pred", "b16", "b32", "b64", "f32", "f64")


def test_numba_lines(numba_ptx):
    """Instructions carry the Python lines they came from, through an inlined function to the kernel."""
    (function,) = parse(numba_ptx["reduction"]).entries.values()
    source, first = inspect.getsourcelines(reduction)
    line = first + next(i for i, text in enumerate(source) if "atomic.add" in text)
    atomic = next(i for i in function.body if i.opcode in ("atom", "red"))
    assert (os.path.basename(atomic.location.file), atomic.location.outermost.line) == ("test_parse.py", line)
    barriers = {i.location.outermost.line for i in function.body if i.opcode == "bar"}
    assert barriers <= {first + i for i, text in enumerate(source) if "syncthreads" in text} and barriers
    inner = inspect.getsourcelines(divided.py_func)[1] + 2
    call = first + next(i for i, text in enumerate(source) if "divided(" in text)
    chains = [[place.line for place in i.location.chain()] for i in function.body if i.location]
    assert [inner, call] in chains


def test_numba_print(numba_ptx):
    module = parse(numba_ptx["printing"])
    assert not module.functions["vprintf"].defined
    assert any(b"value" in variable.init for variable in module.globals.values())


# ---- errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("add.s32 %r1, %r2 %r3;", "expected ',' or ';'"),
        ("add.s32 %r1, %r2, %r500;", "%r500 is not declared"),
        ("bra NOWHERE;", "'NOWHERE' is no register"),
        ("mov.u32 %r1, %bogus;", "%bogus is not declared"),
        ("mov.u32 %r1, 0x;", "malformed number"),
        ("mov.u32 %r1, 12abc;", "malformed number"),
        ("mov.u32 %r1, 089;", "octal"),
        ("mov.u32 %r1, 1/0;", "division by zero"),
        ("mov.u64 %rd1, 0x1FFFFFFFFFFFFFFFF;", "64 bits"),
        ("mov.u32 %r1, " + "9" * 5000 + ";", "5000 digits"),
        ("mov.u32 %r1, " + "(" * 5000 + "1" + ")" * 5000 + ";", "nested deeper"),
        ("mov.u32 %r1, " + "- " * 5000 + "1;", "nested deeper"),
        ("{" * 500 + "}" * 500, "nested deeper"),
        ("L: L: ret;", "label L is defined twice"),
        (".reg .b32 x, x;", "declared twice"),
        (".reg .b99 x;", "unknown type"),
        (".shared .b8 x[1<<60];", "the limit is"),
        (".shared .b8 x[-1];", "extent of -1"),
        (".shared .align 3 .b8 x;", "power of two"),
        ("@%r1 bra L; L:", "guard is a predicate"),
        ("ld.global.u32 %r1, [%rd1;", "']' of an address"),
        ("mov.b64 {%r1, %rd1;", "',' or '}'"),
        ("mov.u32 %r1, %tid.q;", "no component .q"),
        ("/* no end", "closing */"),
        ('.pragma "no end', "closing quote"),
        ("add.s32 %r1, %r2, ~;", "expected a constant"),
        ("ret", "without its ';'"),
        ("add.s32 %r1, \x00, 1;", "unexpected character"),
        ("T: .branchtargets L9; brx.idx %r1, T;", "no label"),
        ("call 3, (%r1);", "a call goes to"),
        (".entry", "not allowed in a function's body"),
        ("#include <x>", "preprocessor"),
    ],
)
def test_errors_name_the_line(text, message):
    with pytest.raises(PtxSyntaxError, match=re.escape(message)) as caught:
        kernel("ret;\n" + text)
    assert caught.value.filename == "test.ptx"
    assert caught.value.line >= 7 and len(str(caught.value)) < 400
    assert str(caught.value).startswith(f"test.ptx:{caught.value.line}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ".version"),
        (".target sm_90", ".version"),
        ("hello", "a directive"),
        (".version 8", "a version such as"),
        (HEAD + ".entry k() { ret; ", "closing"),
        (HEAD + ".entry k(.param .u32 a .param .u32 b) {}", "',' or ')'"),
        (HEAD + ".entry k() {} .entry k() {}", "defined twice"),
        (HEAD + ".global .u32 a; .global .u32 a;", "declared twice"),
        (HEAD + ".global .u32 a[2] = {1, 2, 3};", "more than 2 elements"),
        (HEAD + ".global .u32 a[2] = {{{{{1}}}}};", "nested deeper than the 1 dimensions"),
        (HEAD + ".global .u32 a = {1};", "nested deeper"),
        (HEAD + ".global .u8 a[1<<31][4] = {{1}, {2}};", "limit"),
        (HEAD + ".global .u8 a[2][1 << 28] = {{1}, {2}};", "skip more than"),
        (HEAD + ".global .u32 a = 1.5;", "floating-point"),
        (HEAD + ".section .debug_info { .b8 1", "closing"),
        (HEAD + ".global .pred p;", "predicates live in registers"),
    ],
)
def test_errors_of_the_module(text, message):
    with pytest.raises(PtxSyntaxError, match=re.escape(message)):
        parse(text)


def test_hostile_sizes_allocate_nothing():
    body = ".reg .b32 %r<4000000000>; mov.u32 %r3999999999, 1;"
    text = f"{HEAD}.global .b8 big[1 << 32];\n.entry k() {{ {body} }}"
    tracemalloc.start()
    module = parse(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert module.entries["k"].registers == {"%r3999999999": "b32"}
    assert module.globals["big"].size == 1 << 32


@pytest.mark.parametrize(
    "piece",
    [
        "add.s32 %r1, %r2, 0x10;\n",
        ".section .debug_str ",
        "/*/ ",
        "{ .reg .b32 q; }",
        ".loc 1 2 3, function_name $a, inlined_at 1 2 3\n",
        "L: .branchtargets ",
        '.pragma "a", ',
        "mov.u32 %r1, 1+1+1+1+1+1;",
    ],
)
def test_time_is_linear(piece):
    def seconds(count: int) -> float:
        text = HEAD + ".entry k() {\n" + REGISTERS + piece * count + "}"
        start = time.perf_counter()
        with contextlib.suppress(PtxSyntaxError):
            parse(text)
        return time.perf_counter() - start

    seconds(1000)
    small = min(seconds(1000) for _ in range(5))
    assert min(seconds(10000) for _ in range(2)) < 40 * small + 0.1


def test_many_sparse_initialisers():
    text = HEAD + "".join(f".global .b8 x{i}[2][1 << 23] = {{{{1}}, {{2}}}};\n" for i in range(50))
    with pytest.raises(PtxSyntaxError, match="skip more than"):
        parse(text)


def test_fuzz(numba_ptx, seed):
    """Whatever happens to a valid text, it parses or ends in a PtxSyntaxError, and soon."""
    rng = random.Random(seed)
    texts = [numba_ptx["reduction"], numba_ptx["printing"]]
    snippets = [
        "{",
        "}",
        "(",
        ")",
        "[",
        "]",
        ";",
        ",",
        ".",
        "%",
        "@",
        "!",
        "|",
        "-",
        "<",
        ">",
        "::",
        '"',
        "/*",
        "//",
    ]
    snippets += [
        "0x",
        "0f",
        "1e9",
        "99999999999999999999",
        ".reg .b32 %r<9>;",
        ".loc 1 2 3",
        "$L",
        "_",
        "\x00",
        "é",
    ]
    snippets += [
        ".global .b8 x[4] = {1,2,3,4,5};",
        "call (",
        ".entry",
        "{{{{",
        "?",
        "<<",
        "L:",
        ".section .x {",
    ]
    outcomes = {True: 0, False: 0}
    for _ in range(1200):
        text = rng.choice(texts)
        for _ in range(rng.randint(1, 3)):
            a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            b = min(b, a + rng.choice([1, 2, 5, 40]))
            kind = rng.randrange(5)
            if kind == 0:
                text = text[:a] + text[b:]
            elif kind == 1:
                text = text[:a] + rng.choice(snippets) + text[a:]
            elif kind == 2:
                text = text[:a]
            elif kind == 3:
                text = text[:a] + text[a:b] * 3 + text[b:]
            else:
                text = text[:a] + chr(rng.randrange(32, 127)) + text[a + 1 :]
        start = time.perf_counter()
        try:
            parse(text)
            outcomes[True] += 1
        except PtxSyntaxError as error:
            assert error.line >= 1 and error.message
            outcomes[False] += 1
        assert time.perf_counter() - start < 5
    assert outcomes[True] and outcomes[False]


def test_errors_know_their_instruction():
    function, _ = kernel('.loc 1 7 1\nadd.s32 %r1, %r2, %r3;\n.file 1 "a.py"')
    error = SimError("rule, value, way out").at(function.body[0])
    assert str(error).splitlines() == [
        "rule, value, way out",
        "  at add.s32 %r1, %r2, %r3; (PTX line 9)",
        "  from a.py:7",
    ]

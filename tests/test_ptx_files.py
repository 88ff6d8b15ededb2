"""The files in ptx/: each is a module by itself, documented; a slip in one is reported with its line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from numba_tma import ptx_files
from numba_tma.compile import link
from numba_tma.ptx_files import PtxFileError

FILES = sorted(ptx_files.folder().glob("*.ptx"))
FUNCTIONS = ptx_files.functions()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_assembles_by_itself(file):
    text = file.read_text(encoding="utf-8")
    target = re.search(r"^\.target (\S+)$", text, re.M)[1]
    cubin, _ = link([(file.name, text)], target)
    standing = [f.name for f in FUNCTIONS.values() if f.file == file and f.standing]
    assert standing
    for name in standing:
        assert name.encode() in cubin


def _differs(function):
    """Accumulators of all widths take ptxas long and are alike: narrow ones and the widest stand for all."""
    return all(operand.count <= 16 or operand.count == 128 for operand in function.operands)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_variant_assembles_beside_what_is_written(file):
    """All that a file stands for, in one module: variants are PTX as well, and no name comes twice."""
    functions = [f for f in FUNCTIONS.values() if f.file == file and _differs(f)]
    text = functions[0].module_header + "\n".join(f.text for f in functions)
    link([(file.name, text)], functions[0].architecture)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_function_says_what_it_does_and_where_the_manual_does(file):
    for function in (f for f in FUNCTIONS.values() if f.file == file):
        lines = function.doc.splitlines()
        assert len(lines) >= 2, f"{function.name}: a description and a source"
        assert re.fullmatch(r"PTX ISA: [A-Z][\w /-]+( Instructions| Registers), .+\.", lines[-1]), function.name
        for operand in function.operands:
            assert operand.note, f"{function.name}: {operand.name} is not described"
        if function.results:
            assert function.result_note, f"{function.name}: the result is not described"


def test_the_lines_point_at_the_functions():
    for function in FUNCTIONS.values():
        line = function.file.read_text(encoding="utf-8").splitlines()[function.line - 1]
        assert line.startswith(".visible .func")


# bfloat16 needs no conversion instruction: it is the upper half of a float32.
_NOT_BY_MNEMONIC = {"cvt_f32_bf16x2", "mbarrier_wait_parity"}


def test_a_function_has_the_name_of_its_instruction():
    for function in FUNCTIONS.values():
        statements = [s.split() for s in function.body if not s.startswith((".reg", "mov.", "cvt.u16", "selp", "setp"))]
        special = re.search(r"mov\.u\d+ %\w+, %([\w.]+);", " ".join(function.body))
        if special and not statements:
            assert function.name == special[1].replace(".", "_")
        elif not statements:
            assert function.name == "mov_b32"
        elif function.name not in _NOT_BY_MNEMONIC:
            start = "_".join(re.sub("::", "_", statements[0][0].rstrip(";")).split(".")[:2])
            assert function.name.startswith(start)


def test_signature_and_record_of_a_function():
    function = FUNCTIONS["mbarrier_try_wait_parity"]
    assert str(function.signature) == "(addr, phaseParity)"
    assert [(o.name, o.type, o.kind) for o in function.operands] == [
        ("addr", "u32", "shared"),
        ("phaseParity", "u32", "number"),
    ]
    assert [(r.numba, r.predicate) for r in function.results] == [("boolean", True)]
    assert (function.file.name, function.architecture, function.effect) == ("mbarrier.ptx", "sm_90", "any")
    assert "addr (shared address): the barrier" in function.docstring
    assert "Returns:\n    boolean: whether the phase has completed." in function.docstring
    assert f"ptx/mbarrier.ptx, line {function.line}; sm_90 and newer." in function.docstring


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_ranks_differ_in_their_coordinates_alone(rank):
    function = FUNCTIONS[f"cp_async_bulk_tensor_{rank}d_shared_global"]
    coordinates = [f"c{i}" for i in range(rank)]
    assert list(function.signature.parameters) == ["dstMem", "tensorMap", *coordinates, "mbar"]
    vector = ", ".join(f"%{c}" for c in coordinates)
    assert f"cp.async.bulk.tensor.{rank}d." in function.text
    assert f"[%tensorMap, {{{vector}}}], [%mbar];" in function.text


def test_reductions_come_from_one_text():
    bulk = [f.name for f in FUNCTIONS.values() if f.name.startswith("cp_reduce_async_bulk_global_shared_")]
    for operation in (
        "add_f32",
        "add_f64",
        "add_noftz_f16",
        "add_noftz_bf16",
        "min_s64",
        "max_bf16",
        "inc_u32",
        "xor_b64",
    ):
        assert f"cp_reduce_async_bulk_global_shared_{operation}" in bulk
        assert f"cp_reduce_async_bulk_global_shared_{operation}_l2_hint" in bulk
    function = FUNCTIONS["cp_reduce_async_bulk_global_shared_add_noftz_bf16"]
    assert ".bulk_group.add.noftz.bf16 [%dstMem]" in function.text
    assert not function.standing
    assert "by `.add.noftz.bf16`" in function.doc


def test_immediates_have_ranges():
    (operand,) = FUNCTIONS["setmaxnreg_dec"].operands
    assert operand.kind == "immediate"
    assert list(operand.values) == list(range(24, 257, 8))
    function = FUNCTIONS["tensormap_replace_global_stride_shared"]
    assert list(function.signature.parameters) == ["addr", "ord", "new_val"]
    assert function.operands[1].values == range(4)


# ----------------------------------------------------------------------------------------------------
# Slips
# ----------------------------------------------------------------------------------------------------

GOOD = """\
.version 8.0
.target sm_90
.address_size 64

// Add.
// PTX ISA: Integer Arithmetic Instructions, add.
//: pure
.visible .func (.param .u32 d)   // the sum
add_u32(
    .param .u32 a,   // a summand
    // N: immediate 0 to 7: a summand
    .param .u32 b    // a summand
)
{
    .reg .u32 %a, %b, %d;
    ld.param.u32 %a, [a];
    ld.param.u32 %b, [b];
    add.u32 %d, %a, %b;
    add.u32 %d, %d, /*N=*/0;
    st.param.u32 [d], %d;
    ret;
}
"""


def _line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_a_new_function_is_read_from_its_file_alone(tmp_path):
    file = tmp_path / "add.ptx"
    file.write_text(GOOD)
    (function,) = ptx_files.read(file).values()
    assert (function.name, function.effect, function.results[0].numba) == ("add_u32", "pure", "uint32")
    assert str(function.signature) == "(a, N, b)"
    assert function.inline_text({"N": 5}).count("add.u32 %d, %d, 5;") == 1
    assert function.symbol({"N": 5}) == "add_u32$5"
    assert "add_u32$5(" in function.module("add_u32$5")[1]


@pytest.mark.parametrize(
    "old, new, at, message",
    [
        (".version 8.0\n", "", ".visible", r"\.version must stand before the first function"),
        (
            "// Add.\n// PTX ISA: Integer Arithmetic Instructions, add.\n",
            "",
            ".visible",
            "no comment above it",
        ),
        ("//: pure", "//: pur", "//: pur", "expected `pure`, `reads memory`"),
        ("//: pure", "//: sub -> mul", ".visible", "there is no `sub` in add_u32"),
        ("//: pure", "//: add -> mul without c3..b1", "//: add", "expected a range such as c2..c4"),
        ("a,   // a summand", "a      a summand", ".param .u32 a ", "expected `.param .u32 name"),
        (".param .u32 b ", ".param .f32 b ", ".param .f32 b", r"\.f32 parameters are not supported"),
        (".param .u32 b ", ".param .u32 lambda ", ".param .u32 lambda", "Python keyword or taken already"),
        (".param .u32 b ", ".param .u32 a ", ".param .u32 a    //", "Python keyword or taken already"),
        (
            "// a summand\n)",
            "// global: a summand\n)",
            ".param .u32 b",
            "a global address has 64 bits, .u32 has not",
        ),
        ("{\n", "  {\n", ".visible", "expected `{` on a line of its own"),
        ("    ld.param.u32 %b, [b];\n", "", ".visible", "the parameter b is never loaded"),
        ("[b];", "[c];", "[c];", r"\[c\] is no parameter"),
        ("ld.param.u32 %b", "ld.param.u64 %b", "ld.param.u64", "which is declared .u32"),
        (
            "%a, %b, %d;",
            "%a, %d;",
            "ld.param.u32 %b",
            "%b is neither declared with .reg nor a special register",
        ),
        (", %d;\n    ld", ", %d, %r1;\n    ld", ".reg", "%r1 is a name the compiler uses"),
        ("add.u32 %d, %a, %b;", "add.u32 %d, %a, %b", "add.u32 %d, %a, %b", "does not end with `;`"),
        ("/*N=*/0", "0", ".visible", r"no instruction has the immediate `/\*N=\*/`"),
        ("[d], %d;", "[e], %d;", "[e], %d;", r"\[e\] is not the declared result \(d\)"),
        ("    st.param.u32 [d], %d;\n", "", ".visible", "the result d is never stored"),
        ("    ret;\n", "", "st.param", "the last statement must be `ret;`"),
        ("    ret;\n}", "    ret;", ".visible", "no closing `}`"),
        (".visible .func", ".func", ".func", "expected a comment, a directive or `.visible .func`"),
    ],
)
def test_a_slip_is_an_error_with_file_and_line(tmp_path, old, new, at, message):
    assert GOOD.count(old) == 1, "the slip must be one place"
    text = GOOD.replace(old, new)
    file = tmp_path / "slip.ptx"
    file.write_text(text)
    with pytest.raises(PtxFileError, match=message) as caught:
        ptx_files.read(file)
    assert f"{file}:{_line_of(text, at)}: " in str(caught.value)


def test_the_reader_needs_no_numba():
    """Documentation and other tools can list the functions without a compiler."""
    tree = ast.parse(Path(ptx_files.__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in imports for alias in node.names]
    names += [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    assert names
    assert not [name for name in names if name.split(".")[0] in ("numba", "llvmlite")]


ACCUMULATOR = """\
.version 8.0
.target sm_90a
.address_size 64

// Multiply.
// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions, wgmma.mma_async.
//: m64n8k8 -> m64n24k8
//: inline only: the accumulator is in registers
.visible .func wgmma_mma_async_m64n8k8_f32_tf32_tf32(
    .param .b64 d,   // accumulator: D
    .param .b64 b    // B's descriptor
)
{
    .reg .u64 %d, %b;
    .reg .f32 %d0, %d1, %d2, %d3;
    ld.param.u64 %d, [d];
    ld.param.u64 %b, [b];
    ld.v4.f32 {%d0, %d1, %d2, %d3}, [%d];
    wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%d0, %d1, %d2, %d3}, %b, %b, 1, 1, 1;
    st.v4.f32 [%d], {%d0, %d1, %d2, %d3};
    ret;
}
"""


def test_an_accumulator_grows_with_n(tmp_path):
    file = tmp_path / "wgmma.ptx"
    file.write_text(ACCUMULATOR)
    written, wide = ptx_files.read(file).values()
    assert [(o.name, o.kind, o.type, o.count) for o in written.operands] == [
        ("d", "accumulator", "f32", 4),
        ("b", "number", "u64", 0),
    ]
    # Twelve results, twelve arguments tied to them, then B.
    assert (wide.name, wide.operands[0].count) == ("wgmma_mma_async_m64n24k8_f32_tf32_tf32", 12)
    registers = ", ".join(f"${i}" for i in range(12))
    assert wide.body == (
        ".reg .u64 %b;",
        "mov.u64 %b, $24;",
        f"wgmma.mma_async.sync.aligned.m64n24k8.f32.tf32.tf32 {{{registers}}}, %b, %b, 1, 1, 1;",
    )
    link([("wgmma", wide.module_header + written.text + "\n" + wide.text)], "sm_90a")


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("//: inline only: the accumulator is in registers\n", "", "must be `//: inline only"),
        ("    ld.v4.f32 {%d0, %d1, %d2, %d3}, [%d];\n", "", "the accumulator d is never loaded"),
        (".param .b64 d,", ".param .b32 d,", "accumulator has 64 bits, .b32 has not"),
        ("    ld.param.u64 %d, [d];\n", "", "the parameter d is never loaded"),
    ],
)
def test_a_slip_with_an_accumulator(tmp_path, old, new, message):
    file = tmp_path / "slip.ptx"
    file.write_text(ACCUMULATOR.replace(old, new))
    with pytest.raises(PtxFileError, match=message):
        ptx_files.read(file)

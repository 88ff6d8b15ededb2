"""Which Python line became which PTX and SASS, of kernels whose answer is known, and of every kernel of the suite."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from numba_tma import ptx_files
from numba_tma.explain import Explanation, TargetError, explain, snippets
from numba_tma.explain.glossary import ptx_meaning, sass_meaning
from numba_tma.explain.kinds import OTHER, ptx_kind, sass_kind
from numba_tma.explain.ptx_listing import Place
from numba_tma.explain.sass_listing import parse
from numba_tma.kernels import PROBLEMS

FILE = Path(__file__).parent / "kernels.py"
# One of each problem by default, the last and usually the largest; the others where all is asked for.
SUITE = [
    pytest.param(f"{problem.name}.{variant.name}", marks=() if variant is problem.variants[-1] else pytest.mark.full)
    for problem in PROBLEMS
    for variant in problem.variants
]

# SASS that comes from one PTX instruction and no other, by the start of the PTX mnemonic.
DISTINCT = {
    "UTMALDG": "cp.async.bulk.tensor",
    "UTMASTG": "cp.async.bulk.tensor",
    "UBLKCP": "cp.async.bulk",
    "UTMACMDFLUSH": "cp.async.bulk.commit_group",
    "SYNCS": "mbarrier",
    "LDGSTS": "cp.async",
    "LDS": "ld.shared",
    "STS": "st.shared",
    "LDG": ("ld.global", "ld.acquire.gpu.global"),
    "STG": "st.global",
    "BAR": "bar",
    "SHFL": "shfl",
    "HMMA": "mma",
    "HGMMA": "wgmma.mma_async",
    "WARPGROUP": "wgmma",
    "LDSM": "ldmatrix",
    "STSM": "stmatrix",
    "USETMAXREG": "setmaxnreg",
}


@functools.cache
def explained(name: str, arguments: str = "arguments") -> Explanation:
    return explain(f"{FILE}:{name}", arguments=arguments)


def place(mark: str) -> Place:
    """The line of kernels.py with this remark."""
    lines = FILE.read_text().split("\n")
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return Place(str(FILE), number)


def ptx_of(explanation: Explanation, mark: str, depth: int = 0) -> list[str]:
    """Mnemonics of the PTX that came from the line with this remark, `depth` calls inside it."""
    where = place(mark)
    return [
        line.mnemonic
        for listing in explanation.ptx
        for line in listing.instructions
        if len(line.places) > depth and line.places[depth] == where
    ]


def sass_of(explanation: Explanation, mark: str) -> list[str]:
    where = place(mark)
    numbers = {
        (listing.name, line.number)
        for listing in explanation.ptx
        for line in listing.instructions
        if where in line.places
    }
    return [
        line.mnemonic
        for listing in explanation.sass
        for line in listing.instructions
        if (listing.name, line.ptx) in numbers
    ]


def test_lines_of_a_known_kernel():
    load = explained("load")
    assert "mbarrier.init.shared::cta.b64" in ptx_of(load, "load: init")
    copies = [name for name in ptx_of(load, "load: copy") if name.startswith("cp.async")]
    assert copies == ["cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"]
    assert ptx_of(load, "load: barrier") == ["bar.sync"]
    assert "mbarrier.try_wait.parity.shared::cta.b64" in ptx_of(load, "load: wait", depth=1)
    assert ptx_of(load, "scaled: product") == ["mul.f32"]
    assert "mul.f32" in ptx_of(load, "load: store", depth=1) and "st.global.f32" in ptx_of(load, "load: store")

    assert "UTMALDG.2D" in sass_of(load, "load: copy") and "UTMALDG.2D" not in sass_of(load, "load: store")
    assert "SYNCS.EXCH.64" in sass_of(load, "load: init")
    assert sass_of(load, "load: barrier") == ["BAR.SYNC.DEFER_BLOCKING"]
    assert sass_of(load, "scaled: product") == ["FMUL"]
    assert {"FMUL", "STG.E", "LDS"} <= set(sass_of(load, "load: store"))


def test_inlined_functions_are_recognised():
    load = explained("load")
    found = [inlined.function.name for inlined in load.ptx[0].inlined]
    assert found[:4] == [
        "mbarrier_init",
        "fence_mbarrier_init",
        "mbarrier_arrive_expect_tx",
        "cp_async_bulk_tensor_2d_shared_global",
    ]
    assert set(found[4:]) == {"mbarrier_try_wait_parity"}
    copy = next(line for line in load.ptx[0].instructions if line.mnemonic.startswith("cp.async.bulk"))
    function = load.ptx[0].inlined[copy.inlined].function
    assert (function.file.name, function.name) == ("tma.ptx", "cp_async_bulk_tensor_2d_shared_global")
    assert not copy.is_move
    moves = [line.text for line in load.ptx[0].lines if line.is_move and line.inlined == copy.inlined]
    assert any("%mbar" in text for text in moves)


def test_every_function_of_ptx_is_recognised(rng):
    """As NVVM prints it: `$n` became a register of the compiler's, immediates constants of the kernel's."""
    for function in ptx_files.functions().values():
        immediates = {o.name: int(rng.choice(o.values)) for o in function.operands if o.kind == "immediate"}
        registers = rng.integers(1, 10_000, 1000)
        text = re.sub(r"\$(\d+)", lambda n, r=registers: f"%rd{r[int(n[1])]}", function.inline_text(immediates))
        lines = ["// before", f"\t{snippets.BEGIN}", *(f"\t{line}" for line in text.split("\n")), f"\t{snippets.END}"]
        (found,) = snippets.find(lines)
        assert function.name in [candidate.name for candidate in found.candidates]
        # Fences and waits for an accumulator name it, which the instruction itself does not.
        assert len(found.candidates) == 1 or function.name.startswith(("wgmma_wait_group", "wgmma_fence"))
        assert (found.first, found.last) == (2, len(lines))


def test_foreign_inline_ptx_is_nobodys():
    lines = [snippets.BEGIN, "{", "mov.u32 %r1, %laneid;", "add.u32 %r1, %r1, 1;", "}", snippets.END]
    (found,) = snippets.find(lines)
    assert found.candidates == ()


def test_of_functions_with_one_text_the_line_decides():
    product = explained("product", "of_product")
    names = [inlined.function.name for inlined in product.ptx[0].inlined]
    # Its text is that of wgmma_wait_group and of every other shape. One line names it, one has it by another name.
    waits = [name for name in names if "wait_group" in name]
    assert len(waits) >= 2 and set(waits) == {"wgmma_wait_group_m64n32_f32"}


def test_wgmma_is_placed_by_its_order():
    product = explained("product", "of_product")
    for mark in ("product: first", "product: second"):
        assert "HGMMA.64x32x16.F32" in sass_of(product, mark)
    by_number = {line.number: line for line in product.ptx[0].lines}
    tensor = [line for line in product.sass[0].instructions if line.mnemonic.startswith("HGMMA")]
    assert len(tensor) >= 2 and all(line.by_order for line in tensor)
    assert all(by_number[line.ptx].mnemonic.startswith("wgmma.mma_async.") for line in tensor if line.ptx)


def test_called_functions_belong_to_the_lines_that_call_them():
    called = explained("called", "of_called")
    kernel, function = called.ptx
    assert (kernel.name, function.name, function.title) == ("called", "laneid", "ptx/special_registers.ptx")
    assert {line.places for line in function.instructions} == {(place("called: call"),)}
    assert function.inlined[0].function.name == "laneid"
    assert [listing.name for listing in called.sass] == ["called", "laneid"]
    assert "S2R" in [line.mnemonic for line in called.sass[1].instructions]
    numbers = {line.number for line in function.instructions}
    assert all(line.ptx in numbers for line in called.sass[1].instructions)


def test_sections_and_constants():
    load = explained("load")
    names = [section.name for section in load.python]
    assert names[0] == "load" and set(names[1:]) == {"scaled", "mbarrier_wait"}
    for section in load.python:
        source = Path(section.file).read_text().split("\n")
        assert [line.strip() for line in section.lines] == [
            line.strip() for line in source[section.first - 1 : section.last]
        ]
    scaled = next(section for section in load.python if section.name == "scaled")
    assert ("FACTOR", "3.0") in scaled.constants
    tma = explain("kv_stream.tma", options={"stages": 3})
    assert ("stages", "3") in tma.python[0].constants
    assert tma.python[0].lines[0].startswith("@kernel(")  # the indentation of the factory is gone


def test_by_use_and_the_kernels_end():
    ring = explain("kv_stream.tma_ring")
    guessed = [line for line in ring.ptx[0].instructions if line.by_use]
    assert guessed and ring.coverage.by_use == len(guessed)
    texts = ring.compiled.ptx.split("\n")
    for line in guessed:
        # What the compiler names no line for stands under a `.loc` of line 0, or before the first.
        above = [text for text in texts[: line.number - 1] if text.strip().startswith(".loc")]
        assert not above or re.match(r"\s*\.loc\s+\d+ 0 ", above[-1]), line
    ends = [line for line in ring.ptx[0].instructions if line.mnemonic == "ret"]
    assert ends and all(line.places for line in ends)


def test_padding_and_labels_of_sass():
    text = """
//--------------------- .text.k --------------------------
	.section	.text.k,"ax",@progbits
k:
.text.k:
	//## File ".nv_debug_ptx_txt.1", line 7
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
	//## File ".nv_debug_ptx_txt.1", line 9
        /*0010*/              @!P0 BRA `(.L_x_1) ;
.L_x_3:
        /*0020*/                   EXIT ;
.L_x_2:
        /*0030*/                   BRA `(.L_x_2);
        /*0040*/                   NOP;
        /*0050*/                   NOP;
.L_x_4:
//--------------------- SYMBOLS --------------------------
"""
    (listing,) = parse(text)
    assert [(line.text, line.ptx) for line in listing.lines] == [
        ("MOV R1, c[0x0][0x28]", 7),
        (".L_x_1:", None),
        ("@!P0 BRA .L_x_1", 9),
        ("EXIT", 9),
    ]
    assert listing.padding == 3 and [line.address for line in listing.instructions] == [0, 16, 32]


@pytest.mark.parametrize("name", SUITE)
def test_the_suite_is_linked(name, record_property):
    explanation = explain(name)
    coverage = explanation.coverage
    for what in ("instructions", "named", "by_use", "inlined_only", "share"):
        record_property(what, getattr(coverage, what))
    print(f"{name}: {coverage.share:.2%} of {coverage.instructions} PTX instructions linked ({coverage})")
    assert coverage.share >= 0.98
    assert coverage.named >= 0.8 * coverage.instructions

    ptx = {(listing.name, line.number): line for listing in explanation.ptx for line in listing.lines}
    for listing in explanation.sass:
        for line in listing.instructions:
            wanted = DISTINCT.get(line.mnemonic.split(".")[0])
            if wanted and not line.text.startswith("@!PT"):
                assert ptx[listing.name, line.ptx].mnemonic.startswith(wanted), line

    sass = [line for listing in explanation.sass for line in listing.instructions]
    assert sum(line.ptx is not None for line in sass) >= 0.98 * len(sass)
    unknown = {line.mnemonic for line in sass if sass_kind(line.mnemonic) == OTHER or not sass_meaning(line.mnemonic)}
    assert not unknown, f"give {unknown} a kind in explain/kinds.py and a sentence in explain/glossary.py"
    others = [line for listing in explanation.ptx for line in listing.instructions if line.inlined is None]
    unknown = {line.mnemonic for line in others if not ptx_meaning(line.mnemonic)}
    assert not unknown, f"give {unknown} a sentence in explain/glossary.py"


@pytest.mark.parametrize(
    "mnemonic",
    ["UTMALDG", "UTMASTG", "UTMAREDG", "UTMACMDFLUSH", "UBLKCP", "SYNCS", "LDGSTS", "DEPBAR", "HGMMA", "HMMA"]
    + ["WARPGROUP", "LDSM", "STSM", "R2UR", "ELECT", "BAR", "MEMBAR", "FENCE", "WARPSYNC", "UCGABAR_ARV"]
    + ["UCGABAR_WAIT", "USETMAXREG", "MUFU", "LDL", "STL"],
)
def test_what_matters_is_explained(mnemonic):
    assert sass_meaning(mnemonic) and sass_kind(mnemonic) != OTHER
    assert sass_meaning(f"{mnemonic}.SOMETHING.NEW") == sass_meaning(mnemonic)


@pytest.mark.parametrize(
    ("mnemonic", "kind"),
    [
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes", "copy engine"),
        ("cp.async.cg.shared.global", "cp.async"),
        ("cp.async.mbarrier.arrive.noinc.shared::cta.b64", "mbarrier"),
        ("ld.shared.v4.u32", "shared memory"),
        ("ld.global.nc.v4.u32", "global memory"),
        ("ld.local.f32", "local memory"),
        ("ld.f32", "global memory"),
        ("atom.shared::cta.add.u32", "shared memory"),
        ("fma.rn.f32", "floating point"),
        ("setp.lt.f32", "floating point"),
        ("setp.ge.u64", "integer, logic"),
        ("cvt.f32.f16", "moves, conversions"),
        ("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16", "tensor core"),
        ("fence.proxy.tensormap::generic.acquire.gpu", "barriers, fences"),
    ],
)
def test_kinds_of_ptx(mnemonic, kind):
    assert ptx_kind(mnemonic) == kind


@pytest.mark.parametrize(
    ("mnemonic", "kind"),
    [
        ("UTMALDG.2D", "copy engine"),
        ("UIADD3", "uniform unit"),
        ("ULDC.64", "parameters"),
        ("HADD2.F32", "moves, conversions"),
        ("HADD2", "floating point"),
        ("IMAD.MOV.U32", "moves, conversions"),
        ("IMAD.WIDE", "integer, logic"),
        ("NOTHING", "other"),
    ],
)
def test_kinds_of_sass(mnemonic, kind):
    assert sass_kind(mnemonic) == kind


def test_the_kernel_asked_for_is_the_last_that_a_file_launches():
    explanation = explain(f"{FILE}:load", arguments="of_two")
    assert explanation.title == "kernels.py:load" and explanation.kernel.__name__ == "load"
    renamed = explain(f"{FILE}:by_another_name", arguments="of_called")
    assert renamed.title == "kernels.py:by_another_name" and renamed.compiled.name == "called"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "no problem 'nothing'; there are .*kv_stream"),
        ("kv_stream", r"has \d+ variants; name one: kv_stream.plain"),
        ("kv_stream.nothing", "no variant 'nothing'"),
        ("kv_stream.tma:other", "launches kv_stream_tma, and no other"),
    ],
)
def test_no_such_kernel(target, message):
    with pytest.raises(TargetError, match=message):
        explain(target)


def test_options_that_do_not_fit():
    with pytest.raises(TargetError, match="nothing"):
        explain("kv_stream.tma", options={"nothing": 1})
    with pytest.raises(TargetError, match="columns must be"):
        explain("kv_stream.plain", options={"tile": (64, 12)})
    with pytest.raises(TargetError, match="options are for variants"):
        explain(f"{FILE}:load", options={"stages": 2})


def test_code_that_numba_refuses(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(
        "import numpy as np\nfrom numba_tma import kernel\n\n\n@kernel(threads=32)\ndef wrong(x):\n    x[0] = id(x)\n"
        "\n\ndef arguments():\n    return 1, (np.zeros(1),)\n"
    )
    with pytest.raises(TargetError, match="does not compile"):
        explain(str(file))

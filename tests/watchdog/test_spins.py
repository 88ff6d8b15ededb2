"""Which loops only wait."""

from __future__ import annotations

import pytest

from numba_tma.sim.parse import parse
from numba_tma.watchdog import spins

TRY = "mbarrier.try_wait.parity.shared::cta.b64 %p, [%r1], %r2;"
ADD_UP = "ld.acquire.gpu.global.u32 %r1, [%rd1];\nadd.u64 %rd1, %rd1, 4;\nadd.u32 %r2, %r2, %r1;"
HEAD = ".version 8.0\n.target sm_90\n.address_size 64\n"
DECLARED = ".reg .pred %p, %q;\n.reg .b32 %r<9>;\n.reg .f32 %f<4>;\n.reg .b64 %rd<9>;\n"


def found(body: str):
    module = parse(f"{HEAD}.visible .entry k()\n{{\n{DECLARED}{body}\n}}\n")
    function = module.entries["k"]
    return [[function.body[index].mnemonic for index in spin.looks] for spin in spins.find(function)]


@pytest.mark.parametrize(
    ("loop", "looks"),
    [
        (f"L: {TRY}\n@!%p bra L;", ["try_wait"]),
        (f"L: mov.u32 %r1, %r3;\n{TRY}\nselp.u32 %r4, 1, 0, %p;\nsetp.eq.u32 %q, %r4, 0;\n@%q bra L;", ["try_wait"]),
        (f"bra M;\nL: nanosleep.u32 20;\nM: {TRY}\n@!%p bra L;", ["try_wait"]),
        ("L: mbarrier.test_wait.shared::cta.b64 %p, [%r1], %rd1;\n@!%p bra L;", ["test_wait"]),
        (
            f"L: {TRY}\n@%p bra E;\nmbarrier.test_wait.parity.shared::cta.b64 %p, [%r3], 0;\n@!%p bra L;\nE:",
            ["try", "te"],
        ),
        ("L: ld.acquire.gpu.global.u32 %r1, [%rd1];\nsetp.lt.u32 %p, %r1, 5;\n@%p bra L;", ["ld.acquire"]),
        ("L: ld.volatile.global.u32 %r1, [%rd1];\nsetp.eq.u32 %p, %r1, 5;\n@%p bra L;", ["ld.volatile"]),
        ("L: atom.global.cas.b32 %r1, [%rd1], 0, 1;\nsetp.ne.u32 %p, %r1, 0;\n@%p bra L;", ["atom.global.cas"]),
        (f"L: {TRY}\nbar.warp.sync -1;\n@!%p bra L;", ["try_wait"]),
        # What works between its looks, or looks at nothing that others change, is not waiting.
        (f"L: {TRY}\nst.global.u32 [%rd1], %r2;\n@!%p bra L;", None),
        (f"L: {TRY}\nfma.rn.f32 %f1, %f1, %f1, %f1;\n@!%p bra L;", None),
        (f"L: {TRY}\nbar.sync 0;\n@!%p bra L;", None),
        ("L: ld.global.u32 %r1, [%rd1];\nsetp.eq.u32 %p, %r1, 5;\n@%p bra L;", None),
        ("L: atom.global.add.u32 %r1, [%rd1], 1;\nsetp.ne.u32 %p, %r1, 9;\n@%p bra L;", None),
        ("L: add.u32 %r1, %r1, 1;\nsetp.ne.u32 %p, %r1, 9;\n@%p bra L;", None),
        (TRY, None),
        # What goes on whatever it sees is not waiting either.
        (f"L: {ADD_UP}\nadd.u32 %r3, %r3, 1;\nsetp.lt.u32 %p, %r3, 9;\n@%p bra L;", None),
        (f"L: {ADD_UP}\nmov.u64 %rd2, %clock64;\nsetp.lt.u64 %p, %rd2, %rd3;\n@%p bra L;", None),
        (f"L: {ADD_UP}\nsetp.lt.u32 %p, %r2, 9;\n@%p bra L;", ["ld.acquire"]),
        (f"L: {ADD_UP}\n@%q bra E;\nsetp.lt.u32 %p, %r2, 9;\n@%p bra L;\nE:", ["ld.acquire"]),
        (
            "L: ld.volatile.global.v2.u32 {%r1, %r2}, [%rd1];\nadd.cc.u32 %r3, %r2, %r2;\naddc.u32 %r4, 0, 0;\n"
            "setp.eq.u32 %p|%q, %r4, 5;\nand.pred %p, %q, %q;\n@!%p bra L;",
            ["ld.volatile"],
        ),
        (
            "L: ld.volatile.global.u32 %r1, [%rd1];\nsetp.eq.u32 %p, %r1, 5;\nmov.u32 %r2, 0;\n@%p mov.u32 %r2, 1;\n"
            "setp.eq.u32 %q, %r2, 0;\n@%q bra L;",
            ["ld.volatile"],
        ),
        # Entered in two places: it has no beginning.
        (f"@%q bra M;\nL: nanosleep.u32 20;\nM: {TRY}\n@!%p bra L;", None),
        (f"@%q bra M;\nL: {TRY}\n@%p bra E;\nM: nanosleep.u32 20;\nbra L;\nE:", None),
    ],
)
def test_loops(loop, looks):
    expected = [] if looks is None else [looks]
    (*got,) = found(f"{loop}\nret;")
    assert len(got) == len(expected)
    for mnemonics, parts in zip(got, expected, strict=True):
        assert len(mnemonics) == len(parts)
        assert all(part in mnemonic for part, mnemonic in zip(parts, mnemonics, strict=True))


def test_the_innermost_loop_is_the_wait():
    """A loop over steps that does nothing but wait begins anew at each step."""
    body = f"mov.u32 %r3, 0;\nL: {TRY}\n@%p bra N;\nM: {TRY}\n@!%p bra M;\n"
    body += "N: add.u32 %r3, %r3, 1;\nsetp.lt.u32 %q, %r3, 9;\n@%q bra L;\nret;"
    function = parse(f"{HEAD}.visible .entry k()\n{{\n{DECLARED}{body}\n}}\n").entries["k"]
    (spin,) = spins.find(function)
    assert spin == spins.Spin(header=3, looks=(3,), enters=(2,), turns=(4,))


def test_where_a_loop_is_entered():
    body = f"@%q bra L;\nmov.u32 %r1, 0;\nL: {TRY}\n@!%p bra L;\nret;"
    function = parse(f"{HEAD}.visible .entry k()\n{{\n{DECLARED}{body}\n}}\n").entries["k"]
    assert spins.find(function) == [spins.Spin(header=2, looks=(2,), enters=(0, 1), turns=(3,))]


def test_a_function_may_begin_with_its_loop():
    function = parse(f"{HEAD}.visible .entry k()\n{{\n{DECLARED}L: {TRY}\n@!%p bra L;\nret;\n}}\n").entries["k"]
    assert spins.find(function) == [spins.Spin(header=0, looks=(0,), enters=(spins.BEGINNING,), turns=(1,))]

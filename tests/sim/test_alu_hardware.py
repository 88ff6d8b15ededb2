"""The same instructions through ptxas and on a GPU: the simulator must give the GPU's bits.

Without a GPU the module is still assembled, which proves that every form tested here is PTX.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

from numba_tma import driver
from numba_tma.compile import link
from numba_tma.sim.alu import compile_alu
from numba_tma.sim.parse import parse

LANES = 4096
_WIDTHS = {"h": 16, "w": 32, "l": 64, "f": 32, "g": 64}
# A register is a letter for its type (h 16, w 32, l 64 bits, f float32, g float64), then a, b, c or d.
_TYPES = {"h": "b16", "w": "b32", "l": "b64", "f": "f32", "g": "f64"}


def _integer_cases() -> list[str]:
    cases = []
    for kind, r in (("s16", "h"), ("u16", "h"), ("s32", "w"), ("u32", "w"), ("s64", "l"), ("u64", "l")):
        for name in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
            cases.append(f"{name}.{kind} {r}d, {r}a, {r}b;")
        for name in ("mad.lo", "mad.hi", "sad"):
            cases.append(f"{name}.{kind} {r}d, {r}a, {r}b, {r}c;")
        cases.append(f"shr.{kind} {r}d, {r}a, wb;")
        cases.append(f"set.le.u32.{kind} wd, {r}a, {r}b;")
    for kind, r in (("s32", "w"), ("u32", "w"), ("s64", "l"), ("u64", "l")):
        cases += [
            f"bfe.{kind} {r}d, {r}a, wb, wc;",
            f"bfind.{kind} wd, {r}a;",
            f"bfind.shiftamt.{kind} wd, {r}a;",
        ]
    for kind, r in (("b32", "w"), ("b64", "l")):
        cases += [
            f"bfi.{kind} {r}d, {r}a, {r}b, wb, wc;",
            f"brev.{kind} {r}d, {r}a;",
            f"shl.{kind} {r}d, {r}a, wb;",
        ]
        cases += [f"popc.{kind} wd, {r}a;", f"clz.{kind} wd, {r}a;", f"cnot.{kind} {r}d, {r}a;"]
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        cases.append(f"prmt.b32{mode} wd, wa, wb, wc;")
    for mode in ("wrap", "clamp"):
        cases += [f"shf.l.{mode}.b32 wd, wa, wb, wc;", f"shf.r.{mode}.b32 wd, wa, wb, wc;"]
        cases += [
            f"bmsk.{mode}.b32 wd, wa, wb;",
            f"szext.{mode}.s32 wd, wa, wb;",
            f"szext.{mode}.u32 wd, wa, wb;",
        ]
    for part in ("lo", "hi"):
        cases += [f"mul24.{part}.s32 wd, wa, wb;", f"mad24.{part}.u32 wd, wa, wb, wc;"]
        cases += [f"dp2a.{part}.s32.u32 wd, wa, wb, wc;"]
    cases += ["dp4a.u32.s32 wd, wa, wb, wc;", "add.sat.s32 wd, wa, wb;", "sub.sat.s32 wd, wa, wb;"]
    cases += ["mad.hi.sat.s32 wd, wa, wb, wc;", "mul.wide.s32 ld, wa, wb;", "mad.wide.u16 wd, ha, hb, wc;"]
    cases += ["lop3.b32 wd, wa, wb, wc, 0xB8;", "add.u16x2 wd, wa, wb;", "min.relu.s16x2 wd, wa, wb;"]
    cases += [f"v{name}.u32.u32.u32 wd, wa, wb, wc;" for name in ("absdiff4", "avrg2", "add4", "max2")]
    cases += ["vabsdiff4.s32.s32.s32.add wd, wa, wb, wc;", "cvt.pack.sat.u8.s32.b32 wd, wa, wb, wc;"]
    cases += [
        "cvt.s32.s8 wd, wa;",
        "cvt.sat.s16.s32 wd, wa;",
        "cvt.sat.u8.s64 wd, la;",
        "slct.u32.s32 wd, wa, wb, wc;",
    ]
    return cases


def _float_cases() -> list[str]:
    cases = []
    for kind, r in (("f32", "f"), ("f64", "g")):
        for mode in ("rn", "rz", "rm", "rp"):
            cases += [f"{name}.{mode}.{kind} {r}d, {r}a, {r}b;" for name in ("add", "sub", "mul", "div")]
            cases += [f"fma.{mode}.{kind} {r}d, {r}a, {r}b, {r}c;", f"rcp.{mode}.{kind} {r}d, {r}a;"]
            cases.append(f"sqrt.{mode}.{kind} {r}d, {r}a;")
            cases += [f"cvt.{mode}.{kind}.{i} {r}d, {s}a;" for i, s in (("s64", "l"), ("u64", "l"))]
        cases += [f"{name}.{kind} {r}d, {r}a, {r}b;" for name in ("min", "max", "copysign")]
        cases += [f"set.{name}.u32.{kind} wd, {r}a, {r}b;" for name in ("eq", "ne", "ltu", "geu", "equ", "neu", "nan")]
        for mode in ("rni", "rzi", "rmi", "rpi"):
            for target, t in (("s16", "h"), ("s32", "w"), ("u32", "w"), ("s64", "l"), ("u64", "l")):
                cases.append(f"cvt.{mode}.{target}.{kind} {t}d, {r}a;")
            cases.append(f"cvt.{mode}.{kind}.{kind} {r}d, {r}a;")
        cases += [f"cvt.rn.f16.{kind} hd, {r}a;", f"cvt.sat.{kind}.{kind} {r}d, {r}a;"]
    for name in ("add", "sub", "mul", "min", "max"):
        cases.append(f"{name}.ftz.f32 fd, fa, fb;")
    cases += ["fma.rn.ftz.f32 fd, fa, fb, fc;", "add.sat.f32 fd, fa, fb;", "min.NaN.f32 fd, fa, fb;"]
    cases += [
        "max.xorsign.abs.f32 fd, fa, fb;",
        "fma.rn.sat.f32 fd, fa, fb, fc;",
        "cvt.rzi.ftz.s32.f32 wd, fa;",
    ]
    cases += [f"cvt.{mode}.f32.f64 fd, ga;" for mode in ("rn", "rz", "rm", "rp")]
    cases += [
        "cvt.rz.f16.f32 hd, fa;",
        "cvt.rn.bf16.f32 hd, fa;",
        "cvt.rz.bf16.f32 hd, fa;",
        "cvt.f32.f16 fd, ha;",
    ]
    cases += ["cvt.f32.bf16 fd, ha;", "cvt.rna.tf32.f32 wd, fa;", "cvt.rn.relu.bf16.f32 hd, fa;"]
    for kind in ("f16", "bf16"):
        cases += [f"fma.rn.{kind} hd, ha, hb, hc;", f"min.{kind} hd, ha, hb;", f"max.NaN.{kind} hd, ha, hb;"]
        cases += [
            f"fma.rn.relu.{kind}x2 wd, wa, wb, wc;",
            f"set.gt.u32.{kind} wd, ha, hb;",
            f"neg.{kind}x2 wd, wa;",
            f"abs.{kind}x2 wd, wa;",
        ]
        cases += [f"{name}.{kind}x2 wd, wa, wb;" for name in ("add", "sub", "mul")]
        cases += [f"cvt.rn.relu.{kind}x2.f32 wd, fa, fb;", f"cvt.rn.{kind}x2.f32 wd, fa, fb;"]
        cases += [f"cvt.rni.s32.{kind} wd, ha;", f"cvt.rn.{kind}.s32 hd, wa;", f"cvt.rn.{kind}.u64 hd, la;"]
    cases += ["neg.ftz.f16 hd, ha;", "add.ftz.f16x2 wd, wa, wb;", "mul.ftz.f16 hd, ha, hb;", "cvt.rn.bf16.f64 hd, ga;"]
    cases += ["fma.rn.sat.f16 hd, ha, hb, hc;", "slct.f32.f32 fd, fa, fb, fc;"]
    for kind in ("e4m3x2", "e5m2x2"):
        cases += [f"cvt.rn.satfinite.{kind}.f32 hd, fa, fb;", f"cvt.rn.f16x2.{kind} wd, ha;"]
        cases.append(f"cvt.rn.satfinite.{kind}.f16x2 hd, wa;")
    return cases


# Computed otherwise than on the hardware: relative error beside max(|result|, floor).
APPROXIMATE = {
    "ex2.approx.f32 fd, fa;": (2**-21, 2.0**-126),
    "ex2.approx.ftz.f32 fd, fa;": (2**-21, 2.0**-126),
    "lg2.approx.f32 fd, fa;": (2**-20, 1.0),
    "tanh.approx.f32 fd, fa;": (2**-10, 2.0**-126),
    "rsqrt.approx.f32 fd, fa;": (2**-21, 2.0**-126),
    "div.approx.f32 fd, fa, fb;": (2**-21, 2.0**-126),
    "div.approx.ftz.f32 fd, fa, fb;": (2**-21, 2.0**-126),
    "div.full.f32 fd, fa, fb;": (2**-21, 2.0**-126),
    "rcp.approx.ftz.f32 fd, fa;": (2**-22, 2.0**-126),
    "sqrt.approx.f32 fd, fa;": (2**-22, 2.0**-126),
    "rcp.approx.ftz.f64 gd, ga;": (2**-19, 2.0**-1022),
}
CASES = [*_integer_cases(), *_float_cases(), *APPROXIMATE]


def _module(cases: list[str]) -> str:
    """One kernel that runs every case on 4096 lanes; each operand and result has 8 bytes a lane."""
    registers = "\n".join(f"  .reg .{kind} {letter}{name};" for letter, kind in _TYPES.items() for name in "abcd")
    lines = [
        ".version 8.6\n.target sm_90a\n.address_size 64",
        ".visible .entry cases(.param .u64 inputs, .param .u64 results)\n{",
        registers,
        "  .reg .b32 tid, block, size; .reg .b64 inputs_at, results_at, lane;",
        "  ld.param.u64 inputs_at, [inputs]; ld.param.u64 results_at, [results];",
        "  mov.u32 tid, %tid.x; mov.u32 block, %ctaid.x; mov.u32 size, %ntid.x;",
        "  mad.lo.u32 tid, block, size, tid; mul.wide.u32 lane, tid, 8;",
        "  add.u64 inputs_at, inputs_at, lane; add.u64 results_at, results_at, lane;",
    ]
    for case in cases:
        words = case.replace(",", " ").replace(";", " ").split()[1:]
        for word in dict.fromkeys(words[1:]):
            if word[0] in _WIDTHS and word[1:] in ("a", "b", "c"):
                lines.append(f"  ld.global.b{_WIDTHS[word[0]]} {word}, [inputs_at+{'abc'.index(word[1]) * 8 * LANES}];")
        lines.append(f"  {case}")
        lines.append(f"  st.global.b{_WIDTHS[words[0][0]]} [results_at], {words[0]};")
        lines.append(f"  add.u64 inputs_at, inputs_at, {3 * 8 * LANES}; add.u64 results_at, results_at, {8 * LANES};")
    return "\n".join([*lines, "  ret;\n}\n"])


def _inputs(case: str, rng: np.random.Generator) -> np.ndarray:
    """Three operands of 64 bits a lane: random bits, numbers near one, small integers, and edges."""
    bits = rng.integers(0, 1 << 64, (3, LANES), dtype=np.uint64)
    letter = next(word[0] for word in case.replace(",", " ").split()[2:] if word[1] in "abc")
    near = rng.standard_normal((3, LANES)) * 2.0 ** rng.integers(-12, 12, (3, LANES))
    if letter == "f":
        near = near.astype(np.float32).view(np.uint32).astype(np.uint64)
        edges = [
            0,
            1 << 31,
            0x3F800000,
            0x7F800000,
            0xFF800000,
            0x7FC00000,
            1,
            0x80000001,
            0x7FFFFF,
            0x7F7FFFFF,
            0x4F000000,
            0xFFC12345,
        ]
    elif letter == "g":
        near = near.view(np.uint64)
        edges = [
            struct.unpack("<Q", struct.pack("<d", x))[0]
            for x in (0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 2.0**31, 2.0**63)
        ]
        edges += [1, (1 << 63) + 1, 0x7FEFFFFFFFFFFFFF, 0xFFF8123456789ABC]
    elif "16" in case:
        half = near.astype(np.float16).view(np.uint16).astype(np.uint64)
        near = half | half[::-1] << np.uint64(16)
        edges = [
            0,
            0x80008000,
            0x3C003C00,
            0x7C007C00,
            0xFC00FC00,
            0x7E007E00,
            0x00010001,
            0x7BFF7BFF,
            0x3F803F80,
            0x7F807F80,
        ]
    else:
        near = rng.integers(0, 70, (3, LANES), dtype=np.uint64)
        edges = [
            0,
            1,
            31,
            32,
            33,
            63,
            64,
            0x7FFF,
            0x8000,
            0xFFFF,
            0x7FFFFFFF,
            0x80000000,
            0xFFFFFFFF,
            1 << 63,
            (1 << 64) - 1,
        ]
    chosen = rng.integers(0, 4, (3, LANES))
    special = rng.choice(np.array(edges, np.uint64), (3, LANES))
    return np.where(chosen == 0, special, np.where(chosen == 1, bits, near))


def _simulate(case: str, inputs: np.ndarray) -> np.ndarray:
    """The simulator's results in the layout of the kernel: 8 bytes a lane, unused bytes zero."""
    module = parse(_module([case]))
    item = next(i for i in module.entries["cases"].body if i.text == case)
    alu = compile_alu(item, module.entries["cases"])
    arrays = []
    for operand, dtype in alu.sources:
        words = inputs["abc".index(operand.name[1])].astype(f"u{dtype.itemsize}")
        arrays.append(words.view(dtype))
    with np.errstate(all="ignore"):
        result = alu.apply(*arrays)
    return result.view(f"u{result.itemsize}").astype(np.uint64)


def test_every_case_assembles():
    cubin, _ = link([("cases", _module(CASES))], "sm_90a")
    assert len(cubin) > 10_000


def test_every_case_simulates(rng):
    for case in CASES:
        assert _simulate(case, _inputs(case, rng)).shape == (LANES,)


@pytest.mark.gpu
def test_simulator_agrees_with_the_gpu(rng):
    inputs = np.stack([_inputs(case, rng) for case in CASES])
    results = _run_on_gpu(inputs)
    wrong = []
    for case, given, hardware in zip(CASES, inputs, results, strict=True):
        simulated = _simulate(case, given)
        bad = ~_same(case, simulated, hardware)
        if bad.any():
            lane = int(np.argmax(bad))
            operands = ", ".join(f"{int(x[lane]):#x}" for x in given)
            values = f"GPU {int(hardware[lane]):#x}, here {int(simulated[lane]):#x}"
            wrong.append(f"{case} {int(bad.sum())} lanes; ({operands}): {values}")
    assert not wrong, f"{len(wrong)} of {len(CASES)}:\n" + "\n".join(wrong)


def _run_on_gpu(inputs: np.ndarray) -> np.ndarray:
    cubin, _ = link([("cases", _module(CASES))], "sm_90a")
    kernel = driver.LoadedKernel(cubin, "cases", 0)
    results = np.zeros((len(CASES), LANES), np.uint64)
    addresses = [driver.allocate(inputs.nbytes), driver.allocate(results.nbytes)]
    try:
        driver.copy_to_device(addresses[0], np.ascontiguousarray(inputs))
        driver.copy_to_device(addresses[1], results)
        buffer = driver.ArgumentBuffer(16, [0, 8])
        buffer.view[:16] = struct.pack("<QQ", *addresses)
        driver.Launch(driver.launch_config((LANES // 256, 1, 1), (256, 1, 1), 0, 0, None), kernel, buffer)()
        driver.synchronize()
        return driver.copy_to_host(addresses[1], results.nbytes).view(np.uint64).reshape(results.shape)
    finally:
        for address in addresses:
            driver.free(address)


def _same(case: str, simulated: np.ndarray, hardware: np.ndarray) -> np.ndarray:
    """Equal bits; any NaN equals any NaN; approximations within their error."""
    same = simulated == hardware
    target = case.replace(",", " ").split()[1]
    if target[0] not in "fg":
        return same
    word, dtype = ("u4", "f4") if target[0] == "f" else ("u8", "f8")
    a, b = (x.astype(word).view(dtype).astype(np.float64) for x in (simulated, hardware))
    same |= np.isnan(a) & np.isnan(b)
    if case in APPROXIMATE:
        relative, floor = APPROXIMATE[case]
        with np.errstate(all="ignore"):
            same |= np.abs(a - b) <= relative * np.maximum(np.abs(b), floor)
    return same

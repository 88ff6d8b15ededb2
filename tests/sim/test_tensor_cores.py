"""mma.sync, ldmatrix, stmatrix, movmatrix: layouts element by element by the manual's formulas, numbers in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from simulate import HEADER, run_ptx

from numba_tma import sim
from numba_tma.compile import link
from numba_tma.sim.access import SHARED
from numba_tma.sim.observer import Observer

# Element i of a lane's fragment: its place in the matrix, as the PTX ISA's tables say. g = lane // 4, t = lane % 4.
A_PLACE = {
    ("m16n8k8", 16): lambda i, g, t: (g + 8 * (i >= 2), 2 * t + i % 2),
    ("m16n8k16", 16): lambda i, g, t: (g if i in (0, 1, 4, 5) else g + 8, 2 * t + i % 2 + (8 if i >= 4 else 0)),
    ("m16n8k4", 32): lambda i, g, t: ((g, t), (g + 8, t))[i],
    ("m16n8k8", 32): lambda i, g, t: ((g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4))[i],
    ("m8n8k16", 8): lambda i, g, t: (g, 4 * t + i),
    ("m16n8k16", 8): lambda i, g, t: (g + (i >= 4) * 8, 4 * t + i % 4),
    ("m16n8k32", 8): lambda i, g, t: (g if i < 4 or 8 <= i < 12 else g + 8, 4 * t + i % 4 + (16 if i >= 8 else 0)),
    ("m8n8k32", 4): lambda i, g, t: (g, 8 * t + i),
    ("m16n8k32", 4): lambda i, g, t: (g + (i >= 8) * 8, 8 * t + i % 8),
    ("m16n8k64", 4): lambda i, g, t: (g if i < 8 or 16 <= i < 24 else g + 8, 8 * t + i % 8 + (32 if i >= 16 else 0)),
}
B_PLACE = {
    ("m16n8k8", 16): lambda i, g, t: (2 * t + i, g),
    ("m16n8k16", 16): lambda i, g, t: (2 * t + i % 2 + (8 if i >= 2 else 0), g),
    ("m16n8k4", 32): lambda i, g, t: (t, g),
    ("m16n8k8", 32): lambda i, g, t: (t + 4 * i, g),
    ("m8n8k16", 8): lambda i, g, t: (4 * t + i, g),
    ("m16n8k16", 8): lambda i, g, t: (4 * t + i, g),
    ("m16n8k32", 8): lambda i, g, t: (4 * t + i % 4 + (16 if i >= 4 else 0), g),
    ("m8n8k32", 4): lambda i, g, t: (8 * t + i, g),
    ("m16n8k32", 4): lambda i, g, t: (8 * t + i, g),
    ("m16n8k64", 4): lambda i, g, t: (8 * t + i % 8 + (32 if i >= 8 else 0), g),
}
KINDS = {
    "f16": (16, np.float16),
    "bf16": (16, ml_dtypes.bfloat16),
    "tf32": (32, np.float32),
    "e4m3": (8, ml_dtypes.float8_e4m3fn),
    "e5m2": (8, ml_dtypes.float8_e5m2),
    "s8": (8, np.int8),
    "u8": (8, np.uint8),
    "s4": (4, np.int8),
    "u4": (4, np.uint8),
}
SHAPES = {16: ("m16n8k8", "m16n8k16"), 32: ("m16n8k4", "m16n8k8"), 8: ("m8n8k16", "m16n8k16", "m16n8k32")}
SHAPES[4] = ("m8n8k32", "m16n8k32", "m16n8k64")


def cases():
    for kind in ("f16", "bf16", "tf32"):
        for shape in SHAPES[KINDS[kind][0]]:
            if (kind, shape) != ("bf16", "m16n8k4"):
                yield shape, "f32", kind, kind, "f32"
    for shape in SHAPES[16]:
        yield shape, "f16", "f16", "f16", "f16"
    for a, b in (("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2")):
        yield "m16n8k32", "f32", a, b, "f32"
    yield "m16n8k32", "f16", "e5m2", "e4m3", "f16"
    for bits, kinds in ((8, ("s8", "u8")), (4, ("s4", "u4"))):
        for shape in SHAPES[bits]:
            for a in kinds:
                for b in kinds:
                    yield shape, "s32", a, b, "s32"


CASES = list(cases())


def random_matrix(rng, kind, shape):
    """Values of a type, as that type's array (4-bit ones in bytes)."""
    if kind in ("s8", "u8", "s4", "u4"):
        bits = KINDS[kind][0]
        low, high = (-(1 << bits - 1), 1 << bits - 1) if kind[0] == "s" else (0, 1 << bits)
        return rng.integers(low, high, shape).astype(KINDS[kind][1])
    values = rng.standard_normal(shape)
    if kind == "tf32":
        return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return values.astype(KINDS[kind][1])


def lane_words(matrix, place, kind):
    """The 32-bit registers of each lane, (warps, 32, registers)."""
    bits, _ = KINDS[kind]
    warps = matrix.shape[0]
    count = matrix[0].size // 32
    raw = matrix.view({32: np.uint32, 16: np.uint16, 8: np.uint8, 4: np.uint8}[bits]).astype(np.uint64)
    words = np.zeros((warps, 32, count * bits // 32), np.uint64)
    for lane in range(32):
        for i in range(count):
            row, column = place(i, lane // 4, lane % 4)
            element = raw[:, row, column] & np.uint64((1 << bits) - 1)
            words[:, lane, i * bits // 32] |= element << np.uint64(i * bits % 32)
    return words.astype(np.uint32)


def accumulator_place(i, g, t):
    return g + 8 * (i // 2), 2 * t + i % 2


def accumulator_words(matrix, kind):
    if kind == "f16":
        count = matrix[0].size // 64
        halves = np.zeros((matrix.shape[0], 32, 2 * count), np.float16)
    else:
        halves = np.zeros((matrix.shape[0], 32, matrix[0].size // 32), matrix.dtype)
    for lane in range(32):
        for i in range(halves.shape[2]):
            halves[:, lane, i] = matrix[(slice(None), *accumulator_place(i, lane // 4, lane % 4))]
    return halves.view(np.uint32)


def accumulator_matrix(words, kind, rows):
    values = words.view({"f16": np.float16, "f32": np.float32, "s32": np.int32}[kind])
    matrix = np.zeros((words.shape[0], rows, 8), values.dtype)
    for lane in range(32):
        for i in range(values.shape[2]):
            matrix[(slice(None), *accumulator_place(i, lane // 4, lane % 4))] = values[:, lane, i]
    return matrix


def registers(prefix, count):
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def mma_body(shape, d, a, b, c, extra=""):
    """A kernel's body: each lane's words of A, B and C in p0, p1, p2, of D in p3."""
    m, k = int(shape[1 : shape.index("n")]), int(shape.split("k")[1])
    counts = {
        "a": m * k * KINDS[a][0] // 1024,
        "b": 8 * k * KINDS[b][0] // 1024,
        "c": m * 8 // 32 // (2 if c == "f16" else 1),
        "d": m * 8 // 32 // (2 if d == "f16" else 1),
    }
    types = {name: "f32" if kind == "f32" else "b32" for name, kind in zip("abcd", ("", "", c, d), strict=True)}
    lines = [f".reg .{types[name]} %{name}<{count}>;" for name, count in counts.items()]
    lines.append(".reg .b32 %x, %y, %z; .reg .b64 %at, %w;")
    lines.append("mov.u32 %x, %tid.x; mov.u32 %y, %ctaid.x; mov.u32 %z, %ntid.x; mad.lo.u32 %x, %y, %z, %x;")
    for p, name in enumerate("abc"):
        lines.append(f"ld.param.u64 %at, [p{p}]; mul.wide.u32 %w, %x, {4 * counts[name]}; add.u64 %at, %at, %w;")
        lines += [f"ld.global.{types[name]} %{name}{i}, [%at+{4 * i}];" for i in range(counts[name])]
    lists = ", ".join(registers(name, counts[name]) for name in "dabc")
    lines.append(f"mma.sync.aligned.{shape}.row.col{extra}.{d}.{a}.{b}.{c} {lists};")
    lines.append(f"ld.param.u64 %at, [p3]; mul.wide.u32 %w, %x, {4 * counts['d']}; add.u64 %at, %at, %w;")
    lines += [f"st.global.{types['d']} [%at+{4 * i}], %d{i};" for i in range(counts["d"])]
    return "\n".join([*lines, "ret;"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
def test_mma(rng, case):
    shape, d, a, b, c = case
    m, k = int(shape[1 : shape.index("n")]), int(shape.split("k")[1])
    warps = 6
    left, right = random_matrix(rng, a, (warps, m, k)), random_matrix(rng, b, (warps, k, 8))
    dtypes = {"f16": np.float16, "f32": np.float32, "s32": np.int32}
    before = rng.integers(-1000, 1000, (warps, m, 8)) / (1 if c == "s32" else 256)
    before = before.astype(dtypes[c])
    a_words = lane_words(left, A_PLACE[shape, KINDS[a][0]], a)
    b_words = lane_words(right, B_PLACE[shape, KINDS[b][0]], b)
    c_words = accumulator_words(before, c)
    out = np.zeros((warps, 32, m * 8 // 32 // (2 if d == "f16" else 1)), np.uint32)
    run_ptx(mma_body(*case), 3, 64, a_words, b_words, c_words, out)
    exact = left.astype(np.float64) @ right.astype(np.float64) + before.astype(np.float64)
    got = accumulator_matrix(out, d, m)
    if d == "s32":
        np.testing.assert_array_equal(got, exact)
    else:
        # Terms are cut off below the largest and the sum is rounded; of 8-bit floats three times.
        sizes = [np.abs(matrix.astype(np.float64)) for matrix in (left, right, before)]
        size = sizes[0] @ sizes[1] + sizes[2]
        largest = sizes[0].max(axis=2)[:, :, None] * sizes[1].max(axis=1)[:, None, :]
        rounding = 2.0**-11 if d == "f16" else 2.0**-23
        bound = (3 if a[0] == "e" else 1) * rounding * size + 2.0**-25 * (k * largest + size) + 2.0**-25 * (d == "f16")
        assert (np.abs(got - exact) <= bound).all()


def test_the_assembler_knows_every_mma_tested():
    entries = []
    for i, case in enumerate(CASES):
        params = ", ".join(f".param .u64 p{p}" for p in range(4))
        entries.append(f".visible .entry k{i}({params})\n{{\n{mma_body(*case)}\n}}\n")
    header = HEADER.replace("8.3", "8.7")
    link([("mma", header + "\n".join(entries))], "sm_90a")


def test_integers_wrap_or_saturate():
    shape, case = "m16n8k32", ("m16n8k32", "s32", "u8", "u8", "s32")
    left, right = np.full((1, 16, 32), 255, np.uint8), np.full((1, 32, 8), 255, np.uint8)
    before = np.full((1, 16, 8), 2**31 - 10, np.int32)
    words = (
        lane_words(left, A_PLACE[shape, 8], "u8"),
        lane_words(right, B_PLACE[shape, 8], "u8"),
        accumulator_words(before, "s32"),
    )
    exact = 2**31 - 10 + 32 * 255 * 255
    for extra, expected in (("", exact - 2**32), (".satfinite", 2**31 - 1)):
        out = np.zeros((1, 32, 4), np.uint32)
        run_ptx(mma_body(*case, extra=extra), 1, 32, *words, out)
        assert (out.view(np.int32) == expected).all()


def test_special_values():
    case = ("m16n8k16", "f32", "f16", "f16", "f32")
    left, right = np.zeros((1, 16, 16), np.float16), np.ones((1, 16, 8), np.float16)
    left[0, 0, 0], left[0, 1, 0], left[0, 2, 0], left[0, 2, 1] = np.inf, np.nan, np.inf, -np.inf
    left[0, 3, 0] = 2.0**-24
    words = (
        lane_words(left, A_PLACE["m16n8k16", 16], "f16"),
        lane_words(right, B_PLACE["m16n8k16", 16], "f16"),
        accumulator_words(np.zeros((1, 16, 8), np.float32), "f32"),
    )
    out = np.zeros((1, 32, 4), np.uint32)
    run_ptx(mma_body(*case), 1, 32, *words, out)
    got = accumulator_matrix(out, "f32", 16)[0]
    assert np.isposinf(got[0]).all()
    assert (got[1:3].view(np.uint32) == 0x7FFFFFFF).all()
    assert (got[3] == 2.0**-24).all()
    assert (got[4:] == 0).all()


def test_lanes_meet_at_mma_after_diverging(rng):
    # Odd lanes arrive later; and the second warp's lanes have gone another way before.
    case = ("m16n8k16", "f32", "bf16", "bf16", "f32")
    body = mma_body(*case).replace(
        "mma.sync",
        """
        .reg .pred %odd; .reg .b32 %lane; and.b32 %lane, %x, 33; setp.eq.u32 %odd, %lane, 33;
        @!%odd bra MEET;
        { .reg .pred %again; .reg .b32 %i; mov.u32 %i, 5;
        LOOP: sub.u32 %i, %i, 1; setp.ne.u32 %again, %i, 0; @%again bra LOOP; }
        MEET: mma.sync""",
    )
    left, right = random_matrix(rng, "bf16", (2, 16, 16)), random_matrix(rng, "bf16", (2, 16, 8))
    before = np.zeros((2, 16, 8), np.float32)
    words = (
        lane_words(left, A_PLACE["m16n8k16", 16], "bf16"),
        lane_words(right, B_PLACE["m16n8k16", 16], "bf16"),
        accumulator_words(before, "f32"),
    )
    out = np.zeros((2, 32, 4), np.uint32)
    run_ptx(body, 1, 64, *words, out)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    np.testing.assert_allclose(accumulator_matrix(out, "f32", 16), exact, rtol=1e-6, atol=1e-6)


def test_part_of_a_warp_is_an_error():
    body = mma_body("m16n8k8", "f32", "tf32", "tf32", "f32").replace("mma.sync", "exit_odd mma.sync")
    odd = ".reg .pred %odd; .reg .b32 %lane; and.b32 %lane, %x, 1; setp.eq.u32 %odd, %lane, 1; @%odd ret;"
    words = [np.zeros((1, 32, n), np.uint32) for n in (4, 2, 4, 4)]
    with pytest.raises(sim.SimError, match=r"all 32 threads of a warp .* warp 0 of block 0 has only 16"):
        run_ptx(body.replace("exit_odd", odd), 1, 32, *words)
    words = [np.zeros((1, 32, n), np.uint32) for n in (4, 2, 4, 4)]
    with pytest.raises(sim.SimError, match="has only 24"):
        run_ptx(body.replace("exit_odd", ""), 1, 24, *words)


@pytest.mark.parametrize(
    "instruction",
    [
        "mma.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%a, %a, %a, %a}, {%b}, {%b}, {%a, %a, %a, %a};",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.f16.f32 {%a, %a, %a, %a}, {%b, %b}, {%b}, {%a, %a, %a, %a};",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%a, %a, %a, %a}, {%b}, {%b}, {%a, %a, %a, %a};",
        "mma.sp.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%a, %a}, {%b, %b}, {%b, %b}, {%a, %a}, %b, 0;",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%b}, [%b];",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%b, %b}, [%b];",
        "movmatrix.sync.aligned.m8n8.b16 %b, %b;",
    ],
)
def test_what_does_not_exist_is_refused(instruction):
    with pytest.raises(sim.SimError, match="no shape|does not know|registers, this shape|knows 8x8"):
        run_ptx(f".reg .f32 %a; .reg .b32 %b; {instruction} ret;", 1, 32)


# ldmatrix, stmatrix, movmatrix


def matrix_body(move, count, space="shared"):
    """Copies 4 KiB of p0 to shared memory and moves matrices by lane addresses from p1; p2 is for each lane's words."""
    words = registers("m", count)
    window = "" if space == "shared" else "cvta.shared.u64 %row, %row;"
    dot = "" if space == "generic" else f".{space}"
    return f"""
        .reg .b32 %x, %v, %s, %o, %m<4>; .reg .b64 %in, %at, %to, %row, %w; .reg .pred %again;
        .shared .align 1024 .b8 tile[4096];
        mov.u32 %x, %tid.x; ld.param.u64 %in, [p0]; mov.u32 %s, tile;
        mul.wide.u32 %w, %x, 4; add.u64 %in, %in, %w; shl.b32 %o, %x, 2; add.u32 %s, %s, %o;
        mov.u32 %o, 0;
        LOOP: ld.global.u32 %v, [%in]; st.shared.u32 [%s], %v;
        add.u64 %in, %in, 256; add.u32 %s, %s, 256; add.u32 %o, %o, 1;
        setp.lt.u32 %again, %o, 16; @%again bra LOOP;
        bar.sync 0;
        ld.param.u64 %at, [p1]; add.u64 %at, %at, %w; ld.global.u32 %o, [%at];
        mov.u64 %row, tile; cvt.u64.u32 %w, %o; add.u64 %row, %row, %w; {window}
        ld.param.u64 %to, [p2]; mul.wide.u32 %w, %x, 16; add.u64 %to, %to, %w;
        {move.format(words=words, dot=dot)}
    """


STORE_WORDS = "".join(f"st.global.u32 [%to+{4 * i}], %m{i};" for i in range(4))
LOAD_WORDS = "".join(f"ld.global.u32 %m{i}, [%to+{4 * i}];" for i in range(4))


@pytest.mark.parametrize("space", ["shared", "shared::cta", "generic"])
@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(rng, count, trans, space):
    data = rng.integers(0, 1 << 16, (256, 8)).astype(np.uint16)
    rows = rng.integers(0, 256, (2, 32))
    given = (16 * rows).astype(np.uint32)
    # Lanes that name no row may hold anything.
    given[:, 8 * count :] = 0xFFFFFFF3
    move = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}{{dot}}.b16 {{words}}, [%row];"
    body = matrix_body(move, count, "shared" if space == "shared" else space)
    if space == "shared::cta":
        body = body.replace("cvta.shared.u64 %row, %row;", "")
    out = np.zeros((2, 32, 4), np.uint32)
    run_ptx(body + STORE_WORDS + "ret;", 1, 64, data, given, out)
    for warp in range(2):
        for j in range(count):
            matrix = data[rows[warp, 8 * j : 8 * j + 8]]
            matrix = matrix.T if trans else matrix
            for lane in range(32):
                low, high = (int(matrix[lane // 4, 2 * (lane % 4) + half]) for half in (0, 1))
                assert out[warp, lane, j] == low | high << 16


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(rng, count, trans):
    values = rng.integers(0, 1 << 32, (2, 32, 4)).astype(np.uint32)
    rows = rng.permutation(256)[:64].reshape(2, 32)
    given = (16 * rows).astype(np.uint32)
    given[:, 8 * count :] = 0
    data = np.zeros((256, 8), np.uint16)
    move = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}{{dot}}.b16 [%row], {{words}};"
    dump = """
        bar.sync 0; mov.u32 %s, tile; shl.b32 %o, %x, 2; add.u32 %s, %s, %o;
        ld.param.u64 %in, [p0]; mul.wide.u32 %w, %x, 4; add.u64 %in, %in, %w; mov.u32 %o, 0;
        BACK: ld.shared.u32 %v, [%s]; st.global.u32 [%in], %v;
        add.u64 %in, %in, 256; add.u32 %s, %s, 256; add.u32 %o, %o, 1;
        setp.lt.u32 %again, %o, 16; @%again bra BACK;
        ret;
    """
    run_ptx(matrix_body(LOAD_WORDS + move, count) + dump, 1, 64, data, given, values)
    expected = np.zeros_like(data)
    for warp in range(2):
        for j in range(count):
            halves = values[warp, :, j].reshape(8, 4).copy().view(np.uint16)
            expected[rows[warp, 8 * j : 8 * j + 8]] = halves.T if trans else halves
    np.testing.assert_array_equal(data, expected)


def test_movmatrix(rng):
    values = rng.integers(0, 1 << 16, (3, 8, 8)).astype(np.uint16)
    out = np.zeros_like(values)
    body = """
        .reg .b32 %x, %v; .reg .b64 %in, %to, %w;
        mov.u32 %x, %tid.x; ld.param.u64 %in, [p0]; ld.param.u64 %to, [p1];
        mul.wide.u32 %w, %x, 4; add.u64 %in, %in, %w; add.u64 %to, %to, %w;
        ld.global.u32 %v, [%in]; movmatrix.sync.aligned.m8n8.trans.b16 %v, %v; st.global.u32 [%to], %v; ret;
    """
    run_ptx(body, 1, 96, values, out)
    np.testing.assert_array_equal(out, values.transpose(0, 2, 1))


def test_a_row_out_of_shared_memory_or_misaligned():
    move = "ldmatrix.sync.aligned.m8n8.x1{dot}.b16 {words}, [%row];"
    for offset, error in ((4096, sim.OutOfBounds), (8, sim.Misaligned)):
        given = np.full((2, 32), offset, np.uint32)
        with pytest.raises(error):
            run_ptx(
                matrix_body(move, 1) + "ret;", 1, 64, np.zeros((256, 8), np.uint16), given, np.zeros((64, 4), np.uint32)
            )


def test_the_assembler_knows_the_matrix_moves():
    entries = []
    for name, move in (
        ("load", "ldmatrix.sync.aligned.m8n8.x4.trans{dot}.b16 {words}, [%row];"),
        ("store", "stmatrix.sync.aligned.m8n8.x4.trans{dot}.b16 [%row], {words};"),
    ):
        params = ", ".join(f".param .u64 p{p}" for p in range(3))
        for space in ("shared", "generic", "shared::cta"):
            text = matrix_body(LOAD_WORDS + move, 4, space) + STORE_WORDS + "ret;"
            entries.append(f".visible .entry {name}_{space.replace('::', '_')}({params})\n{{\n{text}\n}}\n")
    entries.append(
        ".visible .entry transpose() { .reg .b32 %a; mov.u32 %a, %tid.x; "
        "movmatrix.sync.aligned.m8n8.trans.b16 %a, %a; ret; }\n"
    )
    link([("moves", HEADER + "\n".join(entries))], "sm_90a")


def test_an_observer_sees_the_rows(rng):
    class Log(Observer):
        def __init__(self):
            self.seen = []

        def access(self, fragment, instruction, kind, view, index, count, action, values=()):
            if instruction.opcode == "ldmatrix":
                self.seen.append((fragment.thread.tolist(), kind, view.itemsize, index.tolist(), count, action))

    rows = rng.integers(0, 256, (2, 32))
    log = Log()
    move = "ldmatrix.sync.aligned.m8n8.x2{dot}.b16 {words}, [%row];"
    arguments = (np.zeros((256, 8), np.uint16), (16 * rows).astype(np.uint32), np.zeros((64, 4), np.uint32))
    run_ptx(matrix_body(move, 2) + "ret;", 1, 64, *arguments, observer=log)
    threads = [thread for thread in range(64) if thread % 32 < 16]
    index = [256 + 4 * int(row) for row in rows[:, :16].ravel()]
    assert log.seen == [(threads, SHARED, 4, index, 4, "read")]

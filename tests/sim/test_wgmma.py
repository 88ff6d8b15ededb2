"""wgmma.mma_async: every N, type, majorness and swizzle against float64; the asynchronous part; a GEMM with copies."""

from __future__ import annotations

import struct
import time

import ml_dtypes
import numpy as np
import pytest
from simulate import HEADER, run_ptx

from numba_tma import sim
from numba_tma.compile import link
from numba_tma.sim import descriptor
from numba_tma.sim.matrix_descriptor import MatrixDescriptor, addresses, decode
from numba_tma.sim.observer import Observer

DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
}
# How the swizzle moves 16-byte chunks: by the row (of span bytes) within the pattern.
ROTATION = {16: lambda row: 0, 32: lambda row: row // 4 % 2, 64: lambda row: row // 2 % 4, 128: lambda row: row % 8}


def random_matrix(rng, kind, shape):
    if kind in ("s8", "u8"):
        return rng.integers(np.iinfo(DTYPES[kind]).min, np.iinfo(DTYPES[kind]).max + 1, shape).astype(DTYPES[kind])
    values = rng.standard_normal(shape)
    if kind == "tf32":
        return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return values.astype(DTYPES[kind])


class Placed:
    """A matrix laid out for wgmma: bytes, and the descriptor fields of each step along K."""

    def __init__(self, data, fields):
        self.data = data
        self.fields = fields

    def descriptors(self, start):
        return [
            MatrixDescriptor(start + offset, leading, stride, 0, span) for offset, leading, stride, span in self.fields
        ]


def chunks_of(rows):
    return np.ascontiguousarray(rows).view(np.uint8).reshape(rows.shape[0], -1, 16)


def k_major(matrix, span, rng):
    """(rows, K) with K contiguous: panels of `span` bytes along K, or core matrices of 8 rows by 16 bytes."""
    chunks = chunks_of(matrix)
    rows, count, _ = chunks.shape
    if span == 16:
        # Core matrices: those along K or those along the rows next to each other.
        core = chunks.reshape(rows // 8, 8, count, 16)
        if rng.integers(2):
            data, leading, stride = core.transpose(0, 2, 1, 3), 128, 128 * count
        else:
            data, leading, stride = core.transpose(2, 0, 1, 3), 16 * rows, 128
        return Placed(data.tobytes(), [(2 * step * leading, leading, stride, span) for step in range(count // 2)])
    per = span // 16
    panels = np.zeros((count // per, rows, per, 16), np.uint8)
    for row in range(rows):
        for chunk in range(count):
            panels[chunk // per, row, chunk % per ^ ROTATION[span](row)] = chunks[row, chunk]
    steps = [(2 * step // per * rows * span + 2 * step % per * 16, 16, 8 * span, span) for step in range(count // 2)]
    return Placed(panels.tobytes(), steps)


def mn_major(matrix, span, rng):
    """(rows, K) of 16-bit elements with the rows contiguous: boxes of `span` bytes of rows, one line for each K."""
    chunks = chunks_of(matrix.T)
    depth, count, _ = chunks.shape
    per = span // 16
    boxes = -(-count // per)
    data = np.zeros((boxes, depth, per, 16), np.uint8)
    for k in range(depth):
        for chunk in range(count):
            data[chunk // per, k, chunk % per ^ ROTATION[span](k)] = chunks[k, chunk]
    box, eight = depth * span, 8 * span
    leading, stride = (eight, box) if span == 16 else (box, eight)
    return Placed(data.tobytes(), [(2 * step * eight, leading, stride, span) for step in range(depth // 16)])


def a_fragment(matrix):
    """Words of A in registers, (128, 4), of one step: the manual's a0 … in steps of 4 bytes."""
    raw = np.ascontiguousarray(matrix).view(np.uint32)
    out = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        warp, group, part = thread // 32, thread % 32 // 4, thread % 4
        top, bottom = 16 * warp + group, 16 * warp + group + 8
        out[thread] = raw[top, part], raw[bottom, part], raw[top, part + 4], raw[bottom, part + 4]
    return out


def accumulator_index(n):
    """(128, n / 2) rows and columns of element d0, d1, … of each thread."""
    thread, i = np.arange(128)[:, None], np.arange(n // 2)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    return row, 8 * (i // 4) + 2 * (thread % 4) + i % 2


def names(prefix, count):
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def instruction(n, d, a, b, source, majors, signs, index):
    """One wgmma; A's registers of step `index` are %a<4 index>, descriptors %da<index>, %db<index>."""
    k = 32 // np.dtype(DTYPES[a]).itemsize
    count = n // 4 if d == "f16" else n // 2
    left = "{" + ", ".join(f"%a{4 * index + i}" for i in range(4)) + "}" if source == "registers" else f"%da{index}"
    operands = [names("d", count), left, f"%db{index}", "%p"]
    if d != "s32":
        operands += [str(sign) for sign in signs]
    if a in ("f16", "bf16"):
        operands += [str(int(major)) for major in (majors if source == "shared" else majors[1:])]
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{d}.{a}.{b} {', '.join(operands)};"


def kernel_body(n, d, a, b, source, majors, signs, steps, nbytes, between=""):
    """p0: image of shared memory; p1: descriptors of A and B by step; p2: A's registers; p3: C; p4: D; p5: scale-d."""
    count = n // 4 if d == "f16" else n // 2
    kind = "f32" if d == "f32" else "b32"
    lines = [
        f".shared .align 1024 .b8 tile[{nbytes}];",
        f".reg .{kind} %d<{count}>; .reg .b32 %a<{4 * steps}>; .reg .b64 %da<{steps}>, %db<{steps}>;",
        ".reg .b32 %x, %o, %s, %v, %g, %m; .reg .b64 %in, %at, %w; .reg .pred %again, %p;",
        "mov.u32 %x, %tid.x; mov.u32 %o, %ctaid.x; mov.u32 %m, %ntid.x; mad.lo.u32 %g, %o, %m, %x;",
        f"ld.param.u64 %in, [p0]; mul.wide.u32 %w, %o, {nbytes}; add.u64 %in, %in, %w;",
        "shl.b32 %o, %x, 2; cvt.u64.u32 %w, %o; add.u64 %in, %in, %w; mov.u32 %s, tile; add.u32 %s, %s, %o;",
        "shl.b32 %m, %m, 2; cvt.u64.u32 %w, %m;",
        "LOOP: ld.global.u32 %v, [%in]; st.shared.u32 [%s], %v; add.u64 %in, %in, %w; add.u32 %s, %s, %m;",
        f"add.u32 %o, %o, %m; setp.lt.u32 %again, %o, {nbytes}; @%again bra LOOP;",
        "fence.proxy.async.shared::cta; bar.sync 0;",
        f"shr.u32 %o, %g, 7; ld.param.u64 %at, [p1]; mul.wide.u32 %w, %o, {16 * steps}; add.u64 %at, %at, %w;",
    ]
    for step in range(steps):
        lines.append(f"ld.global.v2.u64 {{%da{step}, %db{step}}}, [%at+{16 * step}];")
    lines.append(f"ld.param.u64 %at, [p2]; mul.wide.u32 %w, %g, {16 * steps}; add.u64 %at, %at, %w;")
    if source == "registers":
        lines += [f"ld.global.u32 %a{i}, [%at+{4 * i}];" for i in range(4 * steps)]
    lines.append(f"ld.param.u64 %at, [p3]; mul.wide.u32 %w, %g, {4 * count}; add.u64 %at, %at, %w;")
    lines += [f"ld.global.{kind} %d{i}, [%at+{4 * i}];" for i in range(count)]
    lines.append("ld.param.u32 %o, [p5]; setp.ne.u32 %p, %o, 0; wgmma.fence.sync.aligned;")
    for step in range(steps):
        lines.append(instruction(n, d, a, b, source, majors, signs, step))
        lines.append("setp.eq.u32 %p, %o, %o;")
    lines += ["wgmma.commit_group.sync.aligned;", between, "wgmma.wait_group.sync.aligned 0;"]
    lines.append(f"ld.param.u64 %at, [p4]; mul.wide.u32 %w, %g, {4 * count}; add.u64 %at, %at, %w;")
    lines += [f"st.global.{kind} [%at+{4 * i}], %d{i};" for i in range(count)]
    return "\n".join([*lines, "ret;"])


PARAMETERS = ", ".join([*(f".param .u64 p{p}" for p in range(5)), ".param .b32 p5"])
ARRANGE = {False: k_major, True: mn_major}


class Problem:
    """Random A (64, K), B (N, K), C (64, N) of some warpgroups, placed in shared memory, and what must come out."""

    def __init__(self, rng, n, d, a, b, source="shared", majors=(0, 0), spans=(128, 128), signs=(1, 1), groups=1):
        self.config = (n, d, a, b, source, majors, signs)
        self.n, self.d, self.groups = n, d, groups
        k = 128 // np.dtype(DTYPES[a]).itemsize
        self.steps = 4
        self.left = [random_matrix(rng, a, (64, k)) for _ in range(groups)]
        self.right = random_matrix(rng, b, (n, k))
        dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[d]
        self.before = (rng.integers(-4000, 4000, (groups, 64, n)) / (1 if d == "s32" else 256)).astype(dtype)
        placed_b = ARRANGE[bool(majors[1])](self.right, spans[1], rng)
        image, starts = bytearray(), []
        placed_a = [ARRANGE[bool(majors[0])](matrix, spans[0], rng) for matrix in self.left]
        for placed in (placed_b, *(placed_a if source == "shared" else ())):
            image += bytes(-len(image) % 1024)
            starts.append(1024 + len(image))
            image += placed.data
        # A whole number of words for every thread of a block.
        image += bytes(-len(image) % (512 * groups))
        self.image = np.frombuffer(bytes(image), np.uint8)
        table = np.zeros((groups, self.steps, 2), np.uint64)
        table[:, :, 1] = [each.encode() for each in placed_b.descriptors(starts[0])]
        if source == "shared":
            for group, placed in enumerate(placed_a):
                table[group, :, 0] = [each.encode() for each in placed.descriptors(starts[1 + group])]
        self.descriptors = table
        width = k // self.steps
        self.fragments = np.concatenate(
            [
                np.concatenate([a_fragment(m[:, width * s : width * (s + 1)]) for s in range(self.steps)], axis=1)
                for m in self.left
            ]
        )
        row, column = accumulator_index(n)
        self.held = np.ascontiguousarray(self.before[:, row, column]).view(np.uint32)
        self.place = row, column

    def body(self, between=""):
        return kernel_body(*self.config, self.steps, self.image.size, between)

    def run(self, scale=1, between="", **options):
        out = np.zeros_like(self.held)
        arguments = (self.image, self.descriptors, self.fragments, self.held, out, np.uint32(scale))
        report = run_ptx(self.body(between), 1, 128 * self.groups, *arguments, **options)
        values = out.view(self.before.dtype)
        got = np.zeros(self.before.shape, self.before.dtype)
        got[:, self.place[0], self.place[1]] = values
        return got, report

    def check(self, got, scale=1):
        sign = self.config[6][0] * self.config[6][1]
        left = np.stack(self.left).astype(np.float64)
        right = self.right.astype(np.float64).T
        before = self.before.astype(np.float64) * scale
        exact = before + sign * (left @ right)
        if self.d == "s32":
            np.testing.assert_array_equal(got, exact)
            return
        # Each step cuts its terms off below the largest, and rounds the accumulator.
        narrow = self.config[2][0] == "e"
        fraction, rounding = (13, 2.0**-13) if narrow else (25, 2.0**-23)
        rounding = 2.0**-11 if self.d == "f16" else rounding
        size = np.abs(before) + np.abs(left) @ np.abs(right)
        largest = np.abs(left).max(axis=2)[:, :, None] * np.abs(right).max(axis=0)
        depth = left.shape[2] / self.steps
        error = np.abs(got.astype(np.float64) - exact)
        bound = self.steps * (rounding * size + 2.0**-fraction * (depth * largest + size))
        assert (error <= bound).all(), (error / bound).max()


TYPES = [
    ("f32", "bf16", "bf16"),
    ("f32", "f16", "f16"),
    ("f16", "f16", "f16"),
    ("f32", "tf32", "tf32"),
    ("f32", "e4m3", "e4m3"),
    ("f32", "e4m3", "e5m2"),
    ("f16", "e5m2", "e4m3"),
    ("f32", "e5m2", "e5m2"),
    ("s32", "s8", "s8"),
    ("s32", "u8", "u8"),
    ("s32", "s8", "u8"),
    ("s32", "u8", "s8"),
]


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(rng, n):
    problem = Problem(rng, n, "f32", "bf16", "bf16", majors=(0, int(rng.integers(2))))
    problem.check(problem.run()[0])
    if n <= 32 or n % 16 == 0:
        problem = Problem(rng, n, "s32", "s8", "u8")
        problem.check(problem.run()[0])


@pytest.mark.parametrize("spans", [(16, 16), (32, 32), (64, 64), (128, 128), (128, 16), (32, 64)])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_types_swizzles_and_majors(rng, types, spans):
    sixteen_bits = types[1] in ("f16", "bf16")
    for majors in [(0, 0), (0, 1), (1, 0), (1, 1)] if sixteen_bits else [(0, 0)]:
        n = int(rng.choice([8, 16, 24, 32, 48, 64, 96, 128, 192, 256]))
        problem = Problem(rng, n, *types, majors=majors, spans=spans)
        problem.check(problem.run()[0])


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_a_in_registers(rng, types):
    major = int(types[1] in ("f16", "bf16") and rng.integers(2))
    problem = Problem(rng, int(rng.choice([8, 32, 80])) * 2, *types, source="registers", majors=(0, major))
    problem.check(problem.run()[0])


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
def test_signs_and_scale(rng, signs):
    problem = Problem(rng, 40, "f32", "f16", "f16", signs=signs)
    problem.check(problem.run()[0])
    # A NaN that does not count does no harm.
    problem.held[:] = 0x7FFFFFFF
    problem.check(problem.run(scale=0)[0], scale=0)


@pytest.mark.parametrize("policy", ["early", "late", "random"])
def test_warpgroups_and_times(rng, policy):
    problem = Problem(rng, 64, "f32", "bf16", "bf16", groups=3)
    # Warpgroups part, and some threads do something else, before the wait.
    between = """
        .reg .pred %other; .reg .b32 %part;
        and.b32 %part, %x, 127; setp.eq.u32 %other, %part, 5; @!%other bra ON; st.shared.u32 [tile], %part; ON:
    """
    if policy == "late":
        between = ""
    problem.check(problem.run(policy=policy, between=between.replace("st.shared.u32 [tile], %part;", ""))[0])


def test_late_results_are_late(rng):
    problem = Problem(rng, 16, "f32", "f16", "f16")
    # Moved before the wait: no harm. Used, or operands overwritten: wrong, where the multiplication takes its time.
    moved = "".join(f"mov.b32 %e{i}, %d{i};" for i in range(8)) + "wgmma.wait_group.sync.aligned 0;"
    moved = ".reg .b32 %e<8>;" + moved + "".join(f"mov.b32 %d{i}, %e{i};" for i in range(8))
    used = "add.f32 %d0, %d0, 0f00000000;"
    overwritten = "mov.u32 %s, tile; mov.u32 %v, 0; mad.lo.u32 %s, %x, 4, %s; st.shared.u32 [%s], %v;"
    for policy in ("early", "late"):
        problem.check(problem.run(policy=policy, between=moved)[0])
    problem.check(problem.run(policy="early", between=used)[0])
    problem.check(problem.run(policy="early", between=overwritten)[0])
    got, _ = problem.run(policy="late", between=used)
    rows, columns = (index[:, 0] for index in problem.place)
    assert np.isnan(got[0, rows, columns]).all()
    with pytest.raises(AssertionError):
        problem.check(problem.run(policy="late", between=overwritten)[0])


def test_wait_for_all_but_the_latest_groups(rng):
    # Two instructions in groups of their own: after wait_group 1 the first is done and the second may not be.
    problem = Problem(rng, 8, "f32", "bf16", "bf16")
    first = instruction(*problem.config, 0)
    body = problem.body()
    start = body.index(first)
    tail = body[body.index("ld.param.u64 %at, [p4]") :]
    second = instruction(*problem.config, 0).replace("%d0, %d1, %d2, %d3", "%e0, %e1, %e2, %e3")
    group = "wgmma.commit_group.sync.aligned;"
    text = (
        ".reg .f32 %e<4>;"
        + body[:start].replace("wgmma.fence", "".join(f"mov.f32 %e{i}, %d{i};" for i in range(4)) + "wgmma.fence")
        + first
        + group
        + second
        + group
        + "wgmma.wait_group.sync.aligned 1; {late} mov.f32 %d1, %e1; wgmma.wait_group.sync.aligned 0;"
        + tail
    )
    out = {}
    for late in ("", "add.f32 %e1, %e1, 0f00000000;"):
        result = np.zeros_like(problem.held)
        arguments = (problem.image, problem.descriptors, problem.fragments, problem.held, result, np.uint32(1))
        run_ptx(text.replace("{late}", late), 1, 128, *arguments, policy="late")
        out[late] = result.view(np.float32)
    held, late = out.values()
    assert np.isfinite(held).all()
    np.testing.assert_array_equal(late[..., [0, 2, 3]], held[..., [0, 2, 3]])
    assert np.isnan(late[..., 1]).all()


def test_base_offset_shifts_the_pattern(rng):
    # The same bytes 128 * base further on, where the swizzle's pattern begins at no multiple of its length.
    for span, bases in ((128, 8), (64, 4), (32, 2)):
        rows = rng.integers(0, 1 << 16, (16, span // 2)).astype(np.uint16)
        placed = k_major(rows, span, rng)
        for base in range(bases):
            memory = np.zeros(8192, np.uint8)
            memory[1024 + 128 * base :][: len(placed.data)] = np.frombuffer(placed.data, np.uint8)
            for step, field in enumerate(placed.fields):
                offset, leading, stride, _ = field
                units = addresses(
                    MatrixDescriptor(1024 + 128 * base + offset, leading, stride, base, span), 16, 16, False
                )
                read = memory[units[..., None] + np.arange(16)].reshape(16, 32).view(np.uint16)
                np.testing.assert_array_equal(read, rows[:, 16 * step : 16 * step + 16])


def test_descriptor_fields():
    value = MatrixDescriptor(0x2A3C0, 0x10, 0x400, 5, 64)
    assert value.encode() == 0x2A3C | 1 << 16 | 0x40 << 32 | 5 << 49 | 2 << 62
    assert decode(value.encode()) == value
    # Bits without a meaning, and those above 18 of an address, are dropped.
    assert decode(value.encode() | 3 << 14 | 3 << 30 | 7 << 46 | 0x3FF << 52) == value
    assert decode(MatrixDescriptor(0x1000400, 16, 1024, 0, 128).encode()).start == 0x400


def test_operands_out_of_shared_memory(rng):
    problem = Problem(rng, 8, "f32", "bf16", "bf16")
    problem.descriptors[0, 2, 1] = MatrixDescriptor(1024 + problem.image.size - 512, 16, 1024, 0, 128).encode()
    with pytest.raises(sim.OutOfBounds, match="mma_async"):
        problem.run()


def test_descriptors_must_agree(rng):
    problem = Problem(rng, 8, "f32", "bf16", "bf16")
    body = problem.body().replace("wgmma.fence", "cvt.u64.u32 %w, %x; add.u64 %db0, %db0, %w; wgmma.fence")
    out = np.zeros_like(problem.held)
    arguments = (problem.image, problem.descriptors, problem.fragments, problem.held, out, np.uint32(1))
    with pytest.raises(sim.SimError, match="descriptor of B differs among the threads of a warpgroup"):
        run_ptx(body, 1, 128, *arguments)


def test_part_of_a_warpgroup_is_an_error(rng):
    problem = Problem(rng, 8, "f32", "bf16", "bf16")
    body = problem.body().replace("wgmma.fence", "setp.gt.u32 %again, %x, 95; @%again ret; wgmma.fence")
    out = np.zeros_like(problem.held)
    arguments = (problem.image, problem.descriptors, problem.fragments, problem.held, out, np.uint32(1))
    with pytest.raises(sim.SimError, match="warpgroup 0 of block 0 has only 96"):
        run_ptx(body, 1, 128, *arguments)


@pytest.mark.parametrize(
    ("mnemonic", "operands"),
    [
        ("m64n12k16.f32.bf16.bf16", "1, 1, 0, 0"),
        ("m64n264k16.f32.bf16.bf16", "1, 1, 0, 0"),
        ("m64n8k8.f32.bf16.bf16", "1, 1, 0, 0"),
        ("m64n8k16.f32.bf16.f16", "1, 1, 0, 0"),
        ("m64n8k16.f16.bf16.bf16", "1, 1, 0, 0"),
        ("m64n40k32.s32.s8.s8", ""),
        ("m64n8k8.f32.tf32.tf32", "1, 1, 0, 0"),
        ("m64n8k16.f32.bf16.bf16", "2, 1, 0, 0"),
        ("m64n8k64.s32.s4.s4", ""),
    ],
)
def test_what_does_not_exist_is_refused(mnemonic, operands):
    n = int(mnemonic[4 : mnemonic.index("k")])
    more = f", {operands}" if operands else ""
    text = f"wgmma.mma_async.sync.aligned.{mnemonic} {names('d', n // 2)}, %w, %w, %p{more};"
    with pytest.raises(sim.SimError, match="no shape|too many operands|imm-scale|does not know|registers"):
        run_ptx(f".reg .f32 %d<{n // 2}>; .reg .b64 %w; .reg .pred %p; {text} ret;", 1, 128)


def entry(name, problem):
    return f".visible .entry {name}({PARAMETERS})\n{{\n{problem.body()}\n}}\n"


def test_the_assembler_knows_what_is_tested(rng):
    entries = []
    for types in TYPES:
        for source in ("shared", "registers"):
            majors = (1 if source == "shared" else 0, 1) if types[1] in ("f16", "bf16") else (0, 0)
            signs = (1, 1) if types[0] == "s32" else (-1, 1)
            problem = Problem(rng, 16, *types, source=source, majors=majors, spans=(64, 32), signs=signs)
            entries.append(entry(f"k{len(entries)}", problem))
    # Widths: one instruction each is enough, without what feeds it.
    widths = [
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {names('d', n // 2)}, %w, %w, 1, 1, 1, 0, 0;"
        for n in range(8, 257, 8)
    ]
    body = "\n".join(widths)
    entries.append(f".visible .entry widths() {{ .reg .f32 %d<128>; .reg .b64 %w; mov.u64 %w, 0;\n{body}\nret; }}\n")
    link([("wgmma", HEADER.replace("8.3", "8.4") + "\n".join(entries))], "sm_90a")


# A GEMM: tensor copies fill two stages, two warpgroups multiply


def gemm_body(k, n_major, arrivals=256):
    """C = A B in tiles of 128 x 128 x 64: A (M, K), B (N, K) or, `n_major`, (K, N). p0, p1: their maps, p2: C.

    A stage is free when `arrivals` threads say so: all, or one of each warpgroup (2), which counts on wgmma to keep a
    warpgroup's warps together.
    """
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    # B's descriptor, and how far a step of 16 along K moves its start, in 16 bytes.
    b_fields = MatrixDescriptor(0, 8192, 1024, 0, 128) if n_major else MatrixDescriptor(0, 16, 1024, 0, 128)
    b_step = 128 if n_major else 2
    b_loads = f"{load} [%tile+16384], [%mb, {{{'%n0, %k0' if n_major else '%k0, %n0'}}}], [%bar];"
    if n_major:
        b_loads += f"add.u32 %v, %n0, 64; {load} [%tile+24576], [%mb, {{%v, %k0}}], [%bar];"
    multiply = f"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {names('d', 64)}"
    products = "\n".join(
        f"add.u64 %da1, %da, {2 * step}; add.u64 %db1, %db, {b_step * step};"
        f"{multiply}, %da1, %db1, %p, 1, 1, 0, {int(n_major)};"
        "setp.eq.u32 %p, %x, %x;"
        for step in range(4)
    )
    stores = "\n".join(
        f"st.global.v2.f32 [%{row}+{32 * j}], {{%d{4 * j + i}, %d{4 * j + i + 1}}};"
        for j in range(16)
        for row, i in (("c", 0), ("c8", 2))
    )
    return f"""
        .shared .align 1024 .b8 ring[65536]; .shared .align 8 .b64 bars[4];
        .reg .f32 %d<64>; .reg .pred %p, %q, %done; .reg .b64 %ma, %mb, %c, %c8, %da, %db, %da1, %db1, %w;
        .reg .b32 %x, %v, %i, %s, %phase, %tile, %bar, %bars, %m0, %n0, %k0, %group, %lane;
        mov.b64 %ma, p0; cvta.param.u64 %ma, %ma; mov.b64 %mb, p1; cvta.param.u64 %mb, %mb; ld.param.u64 %c, [p2];
        mov.u32 %x, %tid.x; mov.u32 %bars, bars;
        mov.u32 %m0, %ctaid.y; shl.b32 %m0, %m0, 7; mov.u32 %n0, %ctaid.x; shl.b32 %n0, %n0, 7;
        setp.ne.u32 %p, %x, 0; @%p bra READY;
        mbarrier.init.shared.b64 [%bars], 1; mbarrier.init.shared.b64 [%bars+8], 1;
        mbarrier.init.shared.b64 [%bars+16], {arrivals}; mbarrier.init.shared.b64 [%bars+24], {arrivals};
        fence.mbarrier_init.release.cluster;
        READY: bar.sync 0;
        mov.u32 %i, 0;
        setp.lt.u32 %p, %x, 256; @%p bra CONSUMER;
        setp.ne.u32 %p, %x, 256; @%p ret;
        PRODUCER:
        and.b32 %s, %i, 1; shr.u32 %phase, %i, 1; and.b32 %phase, %phase, 1; xor.b32 %phase, %phase, 1;
        shl.b32 %bar, %s, 3; add.u32 %bar, %bar, %bars;
        FREE: mbarrier.try_wait.parity.shared.b64 %done, [%bar+16], %phase; @!%done bra FREE;
        mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 32768;
        shl.b32 %tile, %s, 15; mov.u32 %v, ring; add.u32 %tile, %tile, %v; shl.b32 %k0, %i, 6;
        {load} [%tile], [%ma, {{%k0, %m0}}], [%bar];
        {b_loads}
        add.u32 %i, %i, 1; setp.lt.u32 %p, %i, {k // 64}; @%p bra PRODUCER;
        ret;
        CONSUMER:
        shr.u32 %group, %x, 7; and.b32 %lane, %x, 31;
        MULTIPLY:
        and.b32 %s, %i, 1; shr.u32 %phase, %i, 1; and.b32 %phase, %phase, 1;
        shl.b32 %bar, %s, 3; add.u32 %bar, %bar, %bars;
        FULL: mbarrier.try_wait.parity.shared.b64 %done, [%bar], %phase; @!%done bra FULL;
        shl.b32 %tile, %s, 15; mov.u32 %v, ring; add.u32 %tile, %tile, %v;
        shl.b32 %v, %group, 13; add.u32 %v, %v, %tile; and.b32 %v, %v, 0x3ffff; shr.u32 %v, %v, 4;
        cvt.u64.u32 %da, %v; or.b64 %da, %da, {MatrixDescriptor(0, 16, 1024, 0, 128).encode():#x};
        add.u32 %v, %tile, 16384; and.b32 %v, %v, 0x3ffff; shr.u32 %v, %v, 4;
        cvt.u64.u32 %db, %v; or.b64 %db, %db, {b_fields.encode():#x};
        setp.ne.u32 %p, %i, 0;
        wgmma.fence.sync.aligned;
        {products}
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 1;
        and.b32 %v, %x, {256 // arrivals - 1}; setp.eq.u32 %p, %v, 0; setp.ne.u32 %q, %i, 0; and.pred %p, %p, %q;
        xor.b32 %v, %s, 1; shl.b32 %v, %v, 3; add.u32 %v, %v, %bars;
        @%p mbarrier.arrive.shared.b64 _, [%v+16];
        add.u32 %i, %i, 1; setp.lt.u32 %p, %i, {k // 64}; @%p bra MULTIPLY;
        wgmma.wait_group.sync.aligned 0;
        shr.u32 %v, %x, 5; shl.b32 %v, %v, 4; add.u32 %m0, %m0, %v; shr.u32 %v, %lane, 2; add.u32 %m0, %m0, %v;
        and.b32 %v, %lane, 3; shl.b32 %v, %v, 1; add.u32 %n0, %n0, %v;
        mov.u32 %v, %nctaid.x; shl.b32 %v, %v, 7; mad.lo.u32 %m0, %m0, %v, %n0;
        mul.wide.u32 %w, %m0, 4; add.u64 %c, %c, %w; mul.wide.u32 %w, %v, 32; add.u64 %c8, %c, %w;
        {stores}
        ret;
    """


GEMM_PARAMETERS = ".param .align 64 .b8 p0[128], .param .align 64 .b8 p1[128], .param .u64 p2"


def gemm_text(k, n_major, arrivals=256):
    return f"{HEADER}.visible .entry kernel({GEMM_PARAMETERS})\n{{\n{gemm_body(k, n_major, arrivals)}\n}}\n"


def run_gemm(a, b, n_major, arrivals, **options):
    memory = sim.GlobalMemory()
    m, k = a.shape
    n = b.shape[1] if n_major else b.shape[0]
    c = np.full((m, n), np.nan, np.float32)

    def tensor_map(array, box):
        rows, columns = array.shape
        return descriptor.encode(
            descriptor.Descriptor(
                dtype=descriptor.DataType.BFLOAT16,
                address=memory.map(array),
                sizes=(columns, rows),
                strides=(2 * columns,),
                box=box,
                element_strides=(1, 1),
                swizzle=descriptor.Swizzle.B128,
            )
        )

    maps = [tensor_map(a, (64, 128)), tensor_map(b, (64, 64) if n_major else (64, 128))]
    params = [*maps, struct.pack("<Q", memory.map(c))]
    report = sim.launch(
        gemm_text(k, n_major, arrivals), grid=(n // 128, m // 128), block=288, params=params, memory=memory, **options
    )
    return c, report


@pytest.mark.parametrize("policy", ["fifo", "early", "late", "random"])
@pytest.mark.parametrize("n_major", [False, True])
@pytest.mark.parametrize("arrivals", [256, 2])
def test_gemm(rng, arrivals, n_major, policy):
    m, n, k = 256, 384, 320
    a = rng.standard_normal((m, k)).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal((k, n) if n_major else (n, k)).astype(ml_dtypes.bfloat16)
    c, report = run_gemm(a, b, n_major, arrivals, policy=policy, seed=int(rng.integers(1 << 30)))
    right = b.astype(np.float64) if n_major else b.astype(np.float64).T
    np.testing.assert_allclose(c, a.astype(np.float64) @ right, rtol=1e-5, atol=1e-4)
    if arrivals == 256:
        assert not report.hazards
    assert report.bytes["tma_load"] == m // 128 * (n // 128) * k * 256 * 2


def test_the_assembler_knows_the_gemm():
    for n_major in (False, True):
        link([("gemm", gemm_text(256, n_major))], "sm_90a")


def test_speed(rng):
    # A 128 x 256 x 64 tile step: two warpgroups, four instructions. CPU time, for other processes run too.
    problem = Problem(rng, 256, "f32", "bf16", "bf16", groups=2)
    one = instruction(*problem.config, 3)

    def seconds(rounds):
        loop = f"mov.u32 %v, {rounds}; TOP: {4 * one} sub.u32 %v, %v, 1; setp.ne.u32 %again, %v, 0; @%again bra TOP;"
        out = np.zeros_like(problem.held)
        arguments = (problem.image, problem.descriptors, problem.fragments, problem.held, out, np.uint32(1))
        begin = time.process_time()
        run_ptx(problem.body().replace(one, loop), 1, 256, *arguments)
        return time.process_time() - begin

    step = (min(seconds(31) for _ in range(3)) - min(seconds(1) for _ in range(3))) / 30
    print(f"{1e3 * step:.2f} ms a step")
    assert step < 0.01


def test_an_observer_sees_what_is_read_and_when(rng):
    class Log(Observer):
        def __init__(self):
            self.orders, self.reads, self.accumulators = [], [], []

        def wgmma_issued(self, fragment, instruction, accumulators, multiplicand, reads):
            self.accumulators.append(accumulators)
            self.reads.append([units[which] for units, which in reads])

        def wgmma_ordered(self, fragment, instruction, what, pending):
            self.orders.append((what, pending, fragment.n))

    problem = Problem(rng, 16, "f32", "bf16", "bf16", spans=(128, 32), groups=2)
    log = Log()
    problem.check(problem.run(observer=log)[0])
    assert log.orders == [("fence", 0, 256), ("commit_group", 0, 256), ("wait_group", 0, 256)]
    assert len({tuple(each) for each in log.accumulators}) == 1
    assert len(log.accumulators[0]) == 8
    # Together the four steps read every byte of both A and of B once.
    first, second = (np.unique(np.concatenate([step[0][i].ravel() for step in log.reads])) for i in (0, 1))
    both = np.unique(np.concatenate([step[1].ravel() for step in log.reads]))
    b_units = 16 * 128 // 16
    np.testing.assert_array_equal(both, 64 + np.arange(b_units))
    np.testing.assert_array_equal(first, 64 + b_units + np.arange(512))
    np.testing.assert_array_equal(second, 64 + b_units + 512 + np.arange(512))

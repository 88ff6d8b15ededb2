"""The shared-memory plan: layout, its rules, and the PTX that tiles, barriers and buffers become."""

import itertools
import random
import re

import numpy as np
import pytest
from numba import cuda, types
from numba.core import errors
from numba.cuda.core import errors as cuda_errors

from numba_tma import dtypes
from numba_tma.compile import compile_kernel
from numba_tma.shared import CAPACITY, SWIZZLES, Barriers, Buffer, Shared, SharedMemoryError, Tiles

# Which of the two a compilation ends with depends on the versions of Numba and Numba-CUDA.
TypingError = (errors.TypingError, cuda_errors.TypingError)
LoweringError = (errors.LoweringError, cuda_errors.LoweringError)
ALIGNMENT = {"none": 128, "32B": 256, "64B": 512, "128B": 1024}


def ptx_of(function, *argument_types):
    text, _ = cuda.compile(function, types.void(*argument_types), cc=(9, 0, "a"), device=False, abi="numba")
    return text


def body(ptx):
    """The kernel's instructions, with single spaces and without mangled names."""
    return re.sub(r"_Z\w+", "name", re.sub(r"[ \t]+", " ", ptx[ptx.index("ld.param") :]))


def array(numba_type, ndim=1):
    return types.Array(numba_type, ndim, "C")


# Layout


@pytest.mark.parametrize("swizzle", ALIGNMENT)
def test_every_stage_starts_at_its_alignment(swizzle):
    columns = (SWIZZLES[swizzle].span or 40) // 2
    tiles = Tiles(3, (5, columns), "float16", swizzle=swizzle)
    smem = Shared(odd=Buffer((3,), "uint8"), barriers=Barriers(1), tiles=tiles)
    assert tiles.alignment == ALIGNMENT[swizzle]
    assert tiles.tile_bytes == 5 * columns * 2
    assert tiles.stage_stride % ALIGNMENT[swizzle] == 0
    assert tiles.stage_stride - tiles.tile_bytes < ALIGNMENT[swizzle]
    assert smem.offsets["tiles"] % ALIGNMENT[swizzle] == 0
    assert smem.offsets["barriers"] % 8 == 0


def test_layout_by_hand():
    smem = Shared(
        full=Barriers(2),
        scratch=Buffer((4, 8), "float32"),
        small=Tiles(3, (33,), "uint8"),
        k=Tiles(2, (64, 64), "float16", swizzle="128B"),
    )
    assert smem.offsets == {"full": 16896, "scratch": 16768, "small": 16384, "k": 0}
    assert list(smem.offsets) == ["full", "scratch", "small", "k"]
    assert smem.nbytes == 16912


def random_member(rng):
    kind = rng.randrange(4)
    if kind == 0:
        return Barriers(rng.randint(1, 9))
    entry = rng.choice(dtypes.TABLE)
    if kind == 1:
        return Buffer([rng.randint(1, 7) for _ in range(rng.randint(1, 3))], entry)
    swizzle = rng.choice(list(ALIGNMENT))
    row = (SWIZZLES[swizzle].span or 16 * rng.randint(1, 9)) // entry.size
    return Tiles(rng.randint(1, 4), (*[rng.randint(1, 12) for _ in range(rng.randint(0, 2))], row), entry, swizzle)


def test_random_plans_are_aligned_and_do_not_overlap():
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        members = {f"m{i}": random_member(rng) for i in range(rng.randint(1, 6))}
        smem = Shared(**members)
        spans = sorted((smem.offsets[n], smem.offsets[n] + m.nbytes, m.alignment) for n, m in members.items())
        for (_, end, _), (start, _, _) in itertools.pairwise(spans):
            assert end <= start
        assert spans[0][0] == 0 and spans[-1][1] == smem.nbytes
        assert all(start % alignment == 0 for start, _, alignment in spans)
        assert smem.nbytes <= sum(-(-m.nbytes // m.alignment) * m.alignment for m in members.values())


def test_members_on_the_host():
    smem = Shared(k=Tiles(2, (8, 64), np.float16, swizzle="128B"), full=Barriers(2))
    assert smem.k.shape == (8, 64) and smem.k.swizzle == "128B" and smem.k.dtype is dtypes.float16
    assert smem.full.count == 2
    with pytest.raises(AttributeError, match="no member 'v'; it has k, full"):
        _ = smem.v


def test_key_tells_plans_apart():
    def plan(stages=2, swizzle="128B", name="k"):
        return Shared(**{name: Tiles(stages, (8, 64), "float16", swizzle), "full": Barriers(2)})

    assert plan().key() == plan().key()
    assert plan().numba_type == plan().numba_type
    keys = {plan().key(), plan(stages=3).key(), plan(swizzle="none").key(), plan(name="v").key()}
    assert len(keys) == 4


def test_table_shows_members_padding_and_total():
    smem = Shared(t=Tiles(1, (100,), "uint8"), u=Tiles(2, (3, 64), "float16", swizzle="128B"), b=Barriers(3))
    lines = smem.table().splitlines()
    assert [line.split()[0] for line in lines] == ["member", "u", "t", "b", "total"]
    assert lines[-1].split() == ["total", f"{smem.nbytes:,}"]
    padded = Shared(
        a=Tiles(1, (8, 16), "uint8"),
        u=Tiles(1, (1, 32), "uint8", swizzle="32B"),
        b=Buffer((3,), "uint8"),
        c=Barriers(1),
    )
    assert "padding" in padded.table()


# Rules


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tiles(0, (8,), "uint8"), "stages 0"),
        (lambda: Tiles(2.0, (8,), "uint8"), "stages 2.0"),
        (lambda: Tiles(1, (), "uint8"), "shape"),
        (lambda: Tiles(1, (8, 0), "uint8"), "shape"),
        (lambda: Barriers(0), "count 0"),
        (lambda: Buffer((-1,), "uint8"), "shape"),
        (lambda: Tiles(1, (8, 32), "float16", swizzle="32B"), "64 B under the 32B swizzle.*16 elements"),
        (lambda: Tiles(1, (8, 128), "float16", swizzle="128B"), "256 B under the 128B swizzle.*64 elements"),
        (lambda: Tiles(1, (8, 16), "float16", swizzle="64B"), "32 B under the 64B swizzle"),
        (lambda: Shared(), "no members"),
        (lambda: Shared(nbytes=Barriers(1)), "itself uses this name"),
        (lambda: Shared(table=Barriers(1)), "itself uses this name"),
        (lambda: Shared(_k=Barriers(1)), "itself uses this name"),
        (lambda: Shared(**{"lambda": Barriers(1)}), "itself uses this name"),
        (lambda: Shared(k=(8, 8)), "expected Tiles"),
    ],
)
def test_broken_rules_are_named(make, message):
    with pytest.raises(SharedMemoryError, match=message):
        make()


def test_unknown_swizzle_and_dtype():
    with pytest.raises(ValueError, match="'256B': choose one of 'none', '32B', '64B', '128B'"):
        Tiles(1, (8, 64), "float16", swizzle="256B")
    with pytest.raises(TypeError, match="choose one of"):
        Tiles(1, (8, 64), "complex64")


@pytest.mark.parametrize("swizzle", ["32B", "64B", "128B"])
def test_a_row_that_fills_the_span_is_legal(swizzle):
    for entry in dtypes.TABLE:
        Tiles(1, (8, SWIZZLES[swizzle].span // entry.size), entry, swizzle=swizzle)


def test_capacity():
    limit = CAPACITY["sm_90"]
    assert limit == 227 * 1024
    just = Shared(k=Tiles(1, (limit,), "uint8"))
    just.check("sm_90a")
    with pytest.raises(SharedMemoryError, match=r"8 B more than the 166,912 B .*sm_80") as error:
        Shared(k=Tiles(1, (CAPACITY["sm_80"],), "uint8"), full=Barriers(1)).check("sm_80")
    assert "Barriers(1)" in str(error.value) and "total" in str(error.value)
    with pytest.raises(SharedMemoryError, match=r"232,456 B of shared memory, 8 B more") as error:
        Shared(k=Tiles(1, (limit,), "uint8"), full=Barriers(1))
    assert "Barriers(1)" in str(error.value)
    with pytest.raises(SharedMemoryError, match="sm_42"):
        just.check("sm_42")


# In a kernel

PLAN = Shared(
    k=Tiles(2, (64, 64), "float16", swizzle="128B"),
    plain=Tiles(3, (32,), "float32"),
    full=Barriers(2),
    scratch=Buffer((4, 8), "float32"),
)
I32 = types.int32


def test_the_plan_is_one_aligned_external_symbol():
    def k(out, i):
        out[0] = PLAN.scratch[1, i]

    text = ptx_of(k, array(types.float32), I32)
    declared = re.findall(r"\.extern \.shared \.align (\d+) \.b8 (\w+)\[\];", text)
    assert declared == [("1024", "numba_tma_shared")]
    assert ".local" not in text


def test_constant_indices_fold_into_the_instruction():
    def k(out):
        out[0] = PLAN.k[1][9, 13]
        PLAN.scratch[3, 5] = np.float32(1.0)

    text = body(ptx_of(k, array(types.float16)))
    linear = 9 * 128 + 13 * 2
    swizzled = linear ^ ((linear >> 3) & 0x70)
    assert f"ld.shared.u16 %rs1, [numba_tma_shared+{8192 + swizzled}]" in text
    assert f"[numba_tma_shared+{PLAN.offsets['scratch'] + 3 * 32 + 5 * 4}]" in text
    assert "xor" not in text


def test_a_dynamic_access_has_no_wraparound_and_no_call():
    def k(out, i, j, stage):
        tile = PLAN.k[stage]
        tile[i, j] = tile[j, i]

    text = body(ptx_of(k, array(types.float16), I32, I32, I32))
    assert "ld.shared.u16" in text and "st.shared.u16" in text
    assert not re.search(r"setp|selp|call|local", text)


@pytest.mark.parametrize("entry", dtypes.TABLE, ids=str)
def test_every_element_type_loads_and_stores(entry):
    plan = Shared(lead=Tiles(1, (16,), "uint8"), t=Tiles(2, (4, 16), entry), b=Buffer((8,), entry))

    def k(out, i, stage):
        plan.t[stage][1, i] = out[0]
        plan.b[i] = plan.t[stage][i, 2]

    text = body(ptx_of(k, array(entry.numba_type), I32, I32))
    width = 8 * entry.size
    assert len(re.findall(rf"ld\.shared\.[usfb]{width} ", text)) == 1
    assert len(re.findall(rf"st\.shared\.[usfb]{width} ", text)) == 2


def test_constants_in_a_kernel():
    def k(out):
        out[0] = PLAN.k[0].nbytes
        out[1] = len(PLAN.k) * 10 + PLAN.k.stages
        out[2] = len(PLAN.full) * 10 + PLAN.full.count
        out[3] = PLAN.k[1].shape[0] * 1000 + PLAN.k.shape[1]
        out[4] = PLAN.nbytes
        out[5] = PLAN.scratch.ndim * 100 + len(PLAN.scratch)
        out[6] = PLAN.k[1].offset(9, 13)

    linear = 9 * 128 + 26
    expected = [8192, 22, 22, 64064, PLAN.nbytes, 204, linear ^ ((linear >> 3) & 0x70)]
    text = body(ptx_of(k, array(types.uint32)))
    stored = []
    values = dict(re.findall(r"mov\.u32 (%r\d+), (\d+);", text))
    for register in re.findall(r"st\.global\.u32 \[%rd\d+(?:\+\d+)?\], (%r\d+);", text):
        stored.append(int(values[register]))
    assert stored == expected


def test_literal_shapes_size_local_arrays():
    def k(out, i):
        sums = cuda.local.array(PLAN.k.stages, types.float32)
        for stage in range(PLAN.k.stages):
            sums[stage] = PLAN.k[stage][i, 0]
        out[0] = sums[0] + sums[1]

    text = body(ptx_of(k, array(types.float32), I32))
    assert text.count("ld.shared.u16") == 2 and "local" not in text


def test_addresses():
    def k(out, stage, i):
        out[0] = PLAN.k[1].address
        out[1] = PLAN.full[stage].address
        out[2] = PLAN.k[stage].address_of(i, 8)

    text = body(ptx_of(k, array(types.uint32), I32, I32))
    assert re.search(r"add\.s64 %rd\d+, %rd\d+, 8192;", text)
    assert f", {PLAN.offsets['full']};" in text
    assert text.count("st.global.u32") == 3


def test_tiles_and_barriers_go_to_device_functions():
    @cuda.jit(device=True, forceinline=True)
    def swap(tile, bar, i):
        tile[i, 0] = tile[0, i]
        return bar.address

    def inlined(out, stage, i):
        out[0] = swap(PLAN.k[stage], PLAN.full[stage], i)

    def direct(out, stage, i):
        tile = PLAN.k[stage]
        tile[i, 0] = tile[0, i]
        out[0] = PLAN.full[stage].address

    def accesses(function):
        text = compile_kernel(function, (array(types.uint32), I32, I32)).ptx
        assert "call" not in text
        return re.findall(r"(?:ld|st)\.shared\.\w+", text)

    assert accesses(inlined) == accesses(direct) == ["ld.shared.u16", "st.shared.u16"]


def reference_swizzle(offset, swizzle):
    """Chunk number within the span XORed with the 128-byte line's number, as the manual's tables list it."""
    chunks = {"none": 1, "32B": 2, "64B": 4, "128B": 8}[swizzle]
    line, chunk, byte = offset // 128, offset % 128 // 16, offset % 16
    return line * 128 + (chunk ^ (line % chunks)) * 16 + byte


@pytest.mark.parametrize("swizzle", ALIGNMENT)
def test_offsets_against_the_manuals_pattern(swizzle):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    columns = (SWIZZLES[swizzle].span or 96) // 4
    plan = Shared(t=Tiles(1, (3, 40, columns), "float32", swizzle=swizzle))
    places = [(rng.randrange(3), rng.randrange(40), rng.randrange(columns)) for _ in range(24)]
    lines = [f"    out[{i}] = plan.t[0].offset({a}, {b}, {c})" for i, (a, b, c) in enumerate(places)]
    namespace = {"plan": plan}
    exec("def k(out):\n" + "\n".join(lines), namespace)
    text = body(ptx_of(namespace["k"], array(types.uint32)))
    values = dict(re.findall(r"mov\.u32 (%r\d+), (\d+);", text))
    stored = {
        int(place or 0) // 4: int(values[register])
        for place, register in re.findall(r"st\.global\.u32 \[%rd\d+(?:\+(\d+))?\], (%r\d+);", text)
    }
    expected = [reference_swizzle(((a * 40 + b) * columns + c) * 4, swizzle) for a, b, c in places]
    assert [stored[i] for i in range(24)] == expected


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("PLAN.v[0]", TypingError, "no attribute 'v'; it has k, plain, full, scratch, nbytes"),
        ("PLAN.k[0].size", TypingError, "no attribute 'size'; it has shape, ndim, nbytes"),
        ("PLAN.k.tile", TypingError, "no attribute 'tile'; it has stages"),
        ("PLAN.k[0][1]", TypingError, "2 dimensions; it was indexed with 1"),
        ("PLAN.k[0][1.5, 0]", TypingError, "indices must be integers"),
        ("PLAN.k[0.5]", TypingError, "must be one integer"),
        ("PLAN.full[0, 1].address", TypingError, "must be one integer"),
        ("PLAN.k[0].offset(1)", TypingError, "2 dimensions; it was indexed with 1"),
        ("PLAN.k[2][0, 0]", LoweringError, "index 2 is not in 0 … 1"),
        ("PLAN.k[-1][0, 0]", LoweringError, "index -1 is not in 0 … 1"),
        ("PLAN.k[0][0, 64]", LoweringError, "index 64 is not in 0 … 63"),
        ("PLAN.full[2].address", LoweringError, "index 2 is not in 0 … 1"),
    ],
)
def test_mistakes_in_a_kernel_are_named(source, error, message):
    namespace = {"PLAN": PLAN}
    exec(f"def k(out):\n    out[0] = {source}", namespace)
    with pytest.raises(error, match=re.escape(message)):
        ptx_of(namespace["k"], array(types.float32))


def test_a_value_that_does_not_convert_is_refused():
    def k(out):
        PLAN.scratch[0, 0] = "text"

    with pytest.raises(TypingError, match="does not convert to float32"):
        ptx_of(k, array(types.float32))

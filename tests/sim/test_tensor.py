"""Index arithmetic of tensor copies against the manual's tables and loops over single elements."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from numba_tma.sim import tensor
from numba_tma.sim.descriptor import DataType, Descriptor, Fill, Swizzle
from numba_tma.sim.errors import SimError

# PTX ISA, "Swizzling Modes": where the 16-byte chunks 0 to 7 of each 128-byte line go, line by line.
SWIZZLE_TABLES = {
    Swizzle.NONE: ["01234567"],
    Swizzle.B32: ["01234567", "10325476"],
    Swizzle.B64: ["01234567", "10325476", "23016745", "32107654"],
    Swizzle.B128: [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
}


@pytest.mark.parametrize("swizzle", list(Swizzle))
def test_swizzle_follows_the_manual(swizzle):
    table = SWIZZLE_TABLES[swizzle]
    for address in range(0, 4096, 4):
        line, chunk, byte = address // 128, address % 128 // 16, address % 16
        expected = line * 128 + int(table[line % len(table)][chunk]) * 16 + byte
        assert tensor.swizzled(address, swizzle) == expected
    addresses = np.arange(0, 4096)
    assert np.array_equal(tensor.swizzled(addresses, swizzle), [tensor.swizzled(int(a), swizzle) for a in addresses])


def test_geometry_with_element_strides():
    geo = tensor.geometry(Descriptor(DataType.FLOAT32, 0, (100, 100, 100), (400, 40000), (8, 9, 10), (3, 2, 5)))
    # dimension 0 ignores its element stride; the others take every second and fifth element
    assert geo.extents == (8, 5, 2)
    assert geo.steps == (4, 800, 200000)
    assert (geo.row_bytes, geo.row_pitch, geo.rows, geo.nbytes) == (32, 32, 10, 320)


def test_narrow_rows_lie_a_swizzle_span_apart():
    desc = Descriptor(DataType.FLOAT16, 0, (64, 64), (128,), (16, 4), swizzle=Swizzle.B128)
    geo = tensor.geometry(desc)
    assert (geo.row_bytes, geo.row_pitch, geo.nbytes) == (32, 128, 128)
    chunks = tensor.shared_addresses(2048, geo, tensor.whole(geo))
    assert chunks.tolist() == [2048, 2064, 2192, 2176, 2336, 2352, 2480, 2464]
    assert tensor.shared_extent(geo, 2048) == 2480 + 16 - 2048


def test_shared_addresses_of_an_unaligned_tile():
    # A tile at 128 B past the pattern's begin starts in the pattern's second line.
    desc = Descriptor(DataType.UINT8, 0, (128, 8), (128,), (128, 2), swizzle=Swizzle.B128)
    geo = tensor.geometry(desc)
    lines = tensor.shared_addresses(1024 + 128, geo, tensor.whole(geo)).reshape(2, 8)
    assert (lines % 128 // 16).tolist() == [[1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5]]
    assert (lines // 128).tolist() == [[9] * 8, [10] * 8]


def random_box(rng: np.random.Generator) -> tuple[Descriptor, tuple[int, ...]]:
    dtype = DataType(int(rng.integers(13)))
    rank = int(rng.integers(1, 6))
    most = (0, 48, 9, 6, 4, 3)[rank]
    swizzle = Swizzle(int(rng.integers(4)))
    row = 16 * int(rng.integers(1, min(swizzle.span, 64) // 16 + 1)) if swizzle else 16 * int(rng.integers(1, 9))
    sizes = (int(rng.integers(1, 120)), *(int(n) for n in rng.integers(1, most + 4, rank - 1)))
    strides, stride = [], sizes[0] * dtype.nbytes
    for size in sizes[1:]:
        stride = -(-stride // 16) * 16 + 16 * int(rng.integers(3))
        strides.append(stride)
        stride *= size
    box = (row // dtype.nbytes, *(int(n) for n in rng.integers(1, most + 1, rank - 1)))
    coords = tuple(
        int(rng.integers(-extent - 2, size + 3)) if rng.integers(2) else int(rng.integers(0, max(1, size - extent)))
        for extent, size in zip(box, sizes, strict=True)
    )
    steps = tuple(int(n) for n in rng.integers(1, 4, rank))
    return Descriptor(dtype, 4096, sizes, tuple(strides), box, steps, swizzle=swizzle), coords


def elements(desc: Descriptor, coords: tuple[int, ...]):
    """Yield (payload byte, tensor position) of every element of the box, in traversal order."""
    steps = (1, *desc.element_strides[1:])
    counts = (desc.box[0], *(len(range(0, b, s)) for b, s in zip(desc.box[1:], steps[1:], strict=True)))
    for number, index in enumerate(itertools.product(*(range(n) for n in reversed(counts)))):
        position = tuple(c + i * s for c, i, s in zip(coords, reversed(index), steps, strict=True))
        yield number * DataType(desc.dtype).nbytes, position


def test_inside_and_overhang_against_loops():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    partly = 0
    for _ in range(300):
        desc, coords = random_box(rng)
        geo = tensor.geometry(desc)
        expected, beyond = {}, {}
        rows_inside = set()
        for _, position in elements(desc, coords):
            if all(0 <= p < n for p, n in zip(position, desc.sizes, strict=True)):
                rows_inside.add(position[1:])
        for payload, position in elements(desc, coords):
            address = desc.address + position[0] * geo.element_bytes
            address += sum(p * s for p, s in zip(position[1:], desc.strides, strict=True))
            row_end = desc.sizes[0] * geo.element_bytes
            if all(0 <= p < n for p, n in zip(position, desc.sizes, strict=True)):
                expected[payload] = address
            elif position[1:] in rows_inside and row_end <= position[0] * geo.element_bytes < -(-row_end // 16) * 16:
                beyond[payload] = address
        partly += 0 < len(expected) < geo.nbytes // geo.element_bytes
        for find, wanted in ((tensor.inside, expected), (tensor.overhang, beyond)):
            whole = find(desc, coords, tensor.whole(geo))
            found, parts = {}, set()
            for number, window in enumerate((tensor.whole(geo), *tensor.split(geo, 3))):
                region = find(desc, coords, window)
                if region is None:
                    continue
                assert whole.address <= region.address
                assert region.address + region.nbytes <= whole.address + whole.nbytes
                # the addresses that the strides give, and the payload bytes at the region's index
                addresses = np.full(region.shape, region.address)
                for axis, stride in enumerate(region.strides):
                    shape = [1] * len(region.shape)
                    shape[axis] = -1
                    addresses = addresses + (np.arange(region.shape[axis]) * stride).reshape(shape)
                assert addresses.max() + 1 == region.address + region.nbytes
                first = sum(
                    start * int(np.prod(geo.extents[:dim])) * geo.element_bytes
                    for dim, start in enumerate(window.start)
                )
                shape = tensor.payload_shape(geo, window)
                payload = first + np.arange(np.prod(shape)).reshape(shape)[region.index]
                for a, p in zip(addresses.ravel().tolist(), payload.ravel().tolist(), strict=True):
                    assert found.setdefault(p, a) == a
                if number > 0:
                    parts.update(payload.ravel().tolist())
            assert found == {p + b: a + b for p, a in wanted.items() for b in range(geo.element_bytes)}
            assert parts == set(found)
    assert partly > 20


def test_split_covers_the_box_once():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(60):
        desc, _ = random_box(rng)
        geo = tensor.geometry(desc)
        parts = int(rng.integers(1, 6))
        windows = tensor.split(geo, parts)
        assert 1 <= len(windows) <= parts
        seen = np.zeros(geo.extents[::-1], int)
        for window in windows:
            seen[
                tuple(slice(a, a + n) for a, n in zip(reversed(window.start), reversed(window.count), strict=True))
            ] += 1
        assert (seen == 1).all()
        chunks = np.concatenate([tensor.shared_addresses(1152, geo, w) for w in windows])
        assert chunks.tolist() == tensor.shared_addresses(1152, geo, tensor.whole(geo)).tolist()


@pytest.mark.parametrize("swizzle", list(Swizzle))
@pytest.mark.parametrize("dst", [1024, 1152, 1920])
def test_shared_write_and_read_are_inverse(swizzle, dst):
    rng = np.random.default_rng(1)
    desc = Descriptor(DataType.UINT8, 0, (256, 64), (256,), (32, 13), swizzle=swizzle)
    geo = tensor.geometry(desc)
    shared = np.zeros(8192, np.uint8)
    payload = rng.integers(1, 256, (13, 32), dtype=np.uint8)
    tensor.write_shared(shared, dst, geo, tensor.whole(geo), payload)
    assert np.count_nonzero(shared) == payload.size
    assert np.flatnonzero(shared).max() < dst + tensor.shared_extent(geo, dst)
    back = tensor.read_shared(shared, dst, geo, tensor.whole(geo))
    assert np.array_equal(back, payload)
    shared[:] = 0
    assert np.array_equal(back, payload)  # a copy, not a view


def test_fill():
    desc = Descriptor(DataType.FLOAT32, 0, (8, 8), (32,), (4, 2), fill=Fill.NAN)
    window = tensor.whole(tensor.geometry(desc))
    filled = tensor.fill_payload(desc, window)
    assert filled.view(np.uint32).tolist() == [[0x7FF77FF7] * 4] * 2
    assert np.isnan(filled.view(np.float32)).all()
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        assert np.isnan(filled.view(dtype).astype(np.float64)).all()
    zeros = tensor.fill_payload(Descriptor(DataType.UINT8, 0, (64,), (), (32,)), tensor.Window((0,), (16,)))
    assert zeros.tolist() == [0] * 16


def test_tf32_rounds_to_nearest_even():
    desc = Descriptor(DataType.TFLOAT32, 0, (64,), (), (32,))
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, 4000, dtype=np.uint32)
    bits[:6] = [0x3F801000, 0x3F803000, 0x3F801001, 0x7F800000, 0x7FC01234, 0x00000FFF]
    got = tensor.loaded(desc, bits.view(np.uint8)).view(np.uint32)
    for value, result in zip(bits.tolist(), got.tolist(), strict=True):
        as_float = np.uint32(value).view(np.float32)
        if np.isnan(as_float):
            assert result == 0x7FFFE000
        elif np.isinf(as_float):
            assert result == value
        else:
            below = value & 0xFFFFE000
            rest = value - below
            up = rest > 0x1000 or (rest == 0x1000 and below >> 13 & 1)
            assert result == below + (0x2000 if up else 0)
    assert got[:3].tolist() == [0x3F800000, 0x3F804000, 0x3F802000]
    flushing = Descriptor(DataType.FLOAT32_FTZ, 0, (64,), (), (32,))
    assert tensor.loaded(flushing, bits.view(np.uint8)).tobytes() == bits.tobytes()


def integer_reduction(op: str, old: int, new: int) -> int:
    return {
        "add": lambda: old + new,
        "min": lambda: min(old, new),
        "max": lambda: max(old, new),
        "inc": lambda: 0 if old >= new else old + 1,
        "dec": lambda: new if old == 0 or old > new else old - 1,
        "and": lambda: old & new,
        "or": lambda: old | new,
        "xor": lambda: old ^ new,
    }[op]()


@pytest.mark.parametrize(
    ("op", "name"),
    [("add", t) for t in ("u32", "s32", "u64")]
    + [(op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64")]
    + [("inc", "u32"), ("dec", "u32")]
    + [(op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")],
)
def test_integer_reductions(op, name):
    dtype = np.dtype(("i" if name[0] == "s" else "u") + str(int(name[1:]) // 8))
    rng = np.random.default_rng(3)
    info = np.iinfo(dtype)
    old, new = rng.integers(info.min, info.max, (2, 500), dtype=dtype, endpoint=True)
    old[:50] = new[:50]
    old[50:60] = 0
    if op in ("inc", "dec"):
        old[100:], new[100:] = old[100:] % 8, new[100:] % 8
    got = tensor.reduce(op, name, old.view(np.uint8), new.view(np.uint8)).view(dtype)
    modulus = 1 << dtype.itemsize * 8
    for a, b, c in zip(old.tolist(), new.tolist(), got.tolist(), strict=True):
        assert (integer_reduction(op, a, b) - c) % modulus == 0


@pytest.mark.parametrize(("name", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_half_reductions(name, dtype):
    rng = np.random.default_rng(4)
    old = (rng.standard_normal(2000) * 10.0 ** rng.integers(-6, 4, 2000)).astype(dtype)
    new = (rng.standard_normal(2000) * 10.0 ** rng.integers(-6, 4, 2000)).astype(dtype)
    a, b = old.astype(np.float64), new.astype(np.float64)
    raw = old.view(np.uint8), new.view(np.uint8)
    assert np.array_equal(tensor.reduce("add", name, *raw).view(dtype), (a + b).astype(dtype))
    assert np.array_equal(tensor.reduce("min", name, *raw).view(dtype), np.minimum(a, b).astype(dtype))
    assert np.array_equal(tensor.reduce("max", name, *raw).view(dtype), np.maximum(a, b).astype(dtype))
    nan, one = np.array([np.nan], dtype).view(np.uint8), np.array([1], dtype).view(np.uint8)
    assert tensor.reduce("add", name, nan, one).view(np.uint16) == 0x7FFF
    assert tensor.reduce("max", name, nan, one).view(dtype) == 1
    assert tensor.reduce("min", name, nan, nan).view(np.uint16) == 0x7FFF
    zeros = np.array([0x0000, 0x8000, 0x0000, 0x8000], np.uint16), np.array([0x8000, 0x0000, 0x0000, 0x8000], np.uint16)
    lesser, greater = (tensor.reduce(op, name, *(z.view(np.uint8) for z in zeros)) for op in ("min", "max"))
    assert lesser.view(np.uint16).tolist() == [0x8000, 0x8000, 0x0000, 0x8000]
    assert greater.view(np.uint16).tolist() == [0x0000, 0x0000, 0x0000, 0x8000]


def test_float_reductions_and_flushing():
    tiny = np.float32(1e-39)  # subnormal, and so are the last two sums
    old = np.array([1.5, -0.0, tiny, -tiny, -tiny, 1.3e-38, -1.3e-38], np.float32)
    new = np.array([2.25, -0.0, tiny, 0.0, -0.0, -1.2e-38, 1.2e-38], np.float32)
    raw = old.view(np.uint8), new.view(np.uint8)
    assert tensor.reduce("add", "f32", *raw).tobytes() == (old + new).tobytes()
    flushed = tensor.reduce("add", "f32", *raw, flush=True).view(np.uint32)
    assert flushed.tolist() == [0x40700000, 0x80000000, 0, 0, 0x80000000, 0, 0x80000000]
    doubles = np.array([1e300, 2.0]), np.array([1.0, 0.5])
    got = tensor.reduce("add", "f64", *(d.view(np.uint8) for d in doubles)).view(np.float64)
    assert got.tolist() == [1e300, 2.5]


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("add", DataType.INT64), ("min", DataType.FLOAT64), ("min", DataType.TFLOAT32), ("inc", DataType.INT32)]
    + [("add", DataType.UINT8), ("and", DataType.FLOAT16), ("xor", DataType.UINT16)],
)
def test_reductions_that_do_not_exist(op, dtype):
    with pytest.raises(SimError, match=f"reduction \\.{op}"):
        tensor.tensor_reduction_type(op, dtype)


def test_tensor_reduction_types():
    assert tensor.tensor_reduction_type("max", DataType.INT32) == "s32"
    assert tensor.tensor_reduction_type("max", DataType.UINT32) == "u32"
    assert tensor.tensor_reduction_type("or", DataType.UINT64) == "b64"
    assert tensor.tensor_reduction_type("add", DataType.BFLOAT16) == "bf16"
    assert tensor.tensor_reduction_type("add", DataType.FLOAT64) == "f64"
    assert tensor.tensor_reduction_type("add", DataType.TFLOAT32) == "f32"
    with pytest.raises(SimError, match="no operation .mul"):
        tensor.check_reduction("mul", "u32")

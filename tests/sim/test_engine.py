"""The copy engine: every byte against loops over single elements, groups, barriers, policies, errors."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from numba_tma.sim import descriptor
from numba_tma.sim.descriptor import DataType, Descriptor, Fill, Swizzle, TensorMapError
from numba_tma.sim.engine import POLICIES, AsyncEngine, GroupTracker
from numba_tma.sim.errors import Misaligned, OutOfBounds, SimError

THREADS = 64
SHARED = 16384
BASE = 0x1000_0000


class FakeMemory:
    """One array at BASE."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)

    def global_view(self, address: int, nbytes: int, what: str) -> np.ndarray:
        if address < BASE or address + nbytes > BASE + self.array.size:
            raise OutOfBounds(f"{what}: {nbytes} B at {address:#x}")
        return self.array[address - BASE : address - BASE + nbytes]

    def gather(self, addresses: np.ndarray, nbytes: int, what: str) -> np.ndarray:
        return np.stack([self.global_view(int(a), nbytes, what) for a in addresses])


class FakeBarriers:
    """Counts bytes and arrivals by (slot, address)."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[int, int], int] = {}
        self.arrivals: dict[tuple[int, int], int] = {}
        self.pending: dict[tuple[int, int], int] = {}

    def complete_tx(self, slot: int, address: int, nbytes: int) -> None:
        self.bytes[slot, address] = self.bytes.get((slot, address), 0) + nbytes

    def arrive(self, slot: int, address: int, count: int) -> None:
        self.arrivals[slot, address] = self.arrivals.get((slot, address), 0) + count

    def add_pending(self, slot: int, address: int, count: int) -> None:
        self.pending[slot, address] = self.pending.get((slot, address), 0) + count


class Bench:
    """An engine with everything around it faked: four slots of shared memory, one global array."""

    def __init__(self, policy: str = "fifo", nbytes: int = 1 << 16, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.shared = self.rng.integers(0, 256, (4, SHARED), np.uint8)
        self.memory = FakeMemory(nbytes)
        self.memory.array[:] = self.rng.integers(0, 256, nbytes, np.uint8)
        self.barriers = FakeBarriers()
        self.hazards: list[tuple[str, str, object]] = []
        self.engine = AsyncEngine(
            shared=self.shared,
            threads_per_block=THREADS,
            memory=self.memory,
            barriers=self.barriers,
            report=lambda *hazard: self.hazards.append(hazard),
            policy=policy,
            rng=np.random.default_rng(seed),
        )

    def settle(self) -> None:
        while self.engine.pump(stalled=True):
            pass
        assert self.engine.idle


def fresh_seed() -> int:
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print("seed", seed)
    return seed


# -- tensor copies against loops ---------------------------------------------------------------------------


# The manual's tables in one formula: the chunk's number in its 128-byte line XOR so many bits of the line's.
def swizzled(address: int, swizzle: int) -> int:
    lines = {0: 1, 1: 2, 2: 4, 3: 8}[swizzle]
    chunk = address % 128 // 16 ^ address // 128 % lines
    return address // 128 * 128 + chunk * 16 + address % 16


def random_tensor(rng: np.random.Generator, dtype: DataType | None = None) -> tuple[Descriptor, tuple[int, ...]]:
    dtype = DataType(int(rng.integers(13))) if dtype is None else dtype
    rank = int(rng.integers(1, 6))
    most = (0, 64, 12, 6, 4, 3)[rank]
    swizzle = Swizzle(int(rng.integers(4)))
    row = 16 * int(rng.integers(1, (swizzle.span if swizzle else 128) // 16 + 1))
    sizes = (int(rng.integers(1, 100)), *(int(n) for n in rng.integers(1, most + 4, rank - 1)))
    strides, stride = [], sizes[0] * dtype.nbytes
    for size in sizes[1:]:
        stride = -(-stride // 16) * 16 + 16 * int(rng.integers(3))
        strides.append(stride)
        stride *= size
    box = (row // dtype.nbytes, *(int(n) for n in rng.integers(1, most + 1, rank - 1)))
    coords = tuple(
        int(rng.integers(-extent - 1, size + 2)) if rng.integers(3) == 0 else int(rng.integers(0, size))
        for extent, size in zip(box, sizes, strict=True)
    )
    fill = Fill(int(rng.integers(2))) if dtype.is_float else Fill.ZERO
    steps = tuple(int(n) for n in rng.integers(1, 3, rank))
    return Descriptor(dtype, BASE + 4096, sizes, tuple(strides), box, steps, swizzle=swizzle, fill=fill), coords


def elements(desc: Descriptor, coords: tuple[int, ...], shared: int):
    """Yield (shared offset, global offset or None, whether on the 16-byte overhang) of every element."""
    nbytes = DataType(desc.dtype).nbytes
    steps = (1, *desc.element_strides[1:])
    counts = [-(-extent // step) for extent, step in zip(desc.box, steps, strict=True)]
    pitch = counts[0] * nbytes
    if desc.swizzle:
        pitch = max(pitch, 16 << desc.swizzle)
    row_end = desc.sizes[0] * nbytes
    crosses = coords[0] < desc.sizes[0] and coords[0] + counts[0] > 0
    for row, outer in enumerate(itertools.product(*(range(n) for n in counts[:0:-1]))):
        outer = outer[::-1]
        place = [c + i * s for c, i, s in zip(coords[1:], outer, steps[1:], strict=True)]
        row_inside = all(0 <= p < n for p, n in zip(place, desc.sizes[1:], strict=True))
        start = desc.address - BASE + sum(p * s for p, s in zip(place, desc.strides, strict=True))
        for i in range(counts[0]):
            position = coords[0] + i
            offset = swizzled(shared + row * pitch + i * nbytes, desc.swizzle)
            if not row_inside or position < 0:
                yield offset, None, False
            elif position < desc.sizes[0]:
                yield offset, start + position * nbytes, False
            elif crosses and position * nbytes < -(-row_end // 16) * 16:
                yield offset, start + position * nbytes, True
            else:
                yield offset, None, False


def tf32(raw: bytes) -> bytes:
    value = int.from_bytes(raw, "little")
    exponent, mantissa = value >> 23 & 255, value & 0x7FFFFF
    if exponent == 255:
        return (0x7FFFE000 if mantissa else value).to_bytes(4, "little")
    below, rest = value >> 13, value & 0x1FFF
    below += rest > 0x1000 or (rest == 0x1000 and below & 1)
    return (below << 13).to_bytes(4, "little")


def between_chunks(desc: Descriptor, coords: tuple[int, ...]) -> tuple[int, ...]:
    """Coordinates near `coords` that begin at a multiple of 16 B in the innermost dimension."""
    grain = 16 // DataType(desc.dtype).nbytes
    return (coords[0] // grain * grain, *coords[1:])


def storable(desc: Descriptor, coords: tuple[int, ...]) -> tuple[int, ...]:
    """Coordinates near `coords` at which a store may begin."""
    return between_chunks(desc, tuple(max(c, 0) for c in coords))


@pytest.mark.parametrize("policy", POLICIES)
def test_tensor_loads(policy):
    rng = np.random.default_rng(fresh_seed())
    filled = copied = 0
    for trial in range(60):
        desc, coords = random_tensor(rng)
        coords = between_chunks(desc, coords)
        bench = Bench(policy, nbytes=1 << 21, seed=trial)
        nbytes = DataType(desc.dtype).nbytes
        dst = 128 * int(rng.integers(16))
        expected = bench.shared.copy()
        total = 0
        for offset, source, beyond in elements(desc, coords, dst):
            if source is None or beyond:
                value = (b"\xf7\x7f" * 4)[:nbytes] if desc.fill else bytes(nbytes)
                filled += 1
            else:
                value = bench.memory.array[source : source + nbytes].tobytes()
                if desc.dtype in (DataType.TFLOAT32, DataType.TFLOAT32_FTZ):
                    value = tf32(value)
                copied += 1
            expected[1, offset : offset + nbytes] = np.frombuffer(value, np.uint8)
            total += nbytes
        bench.engine.issue_tensor_load(THREADS + 3, descriptor.encode(desc), coords, dst, SHARED - 8)
        bench.settle()
        assert np.array_equal(bench.shared, expected), (desc, coords, dst)
        assert bench.barriers.bytes == {(1, SHARED - 8): total}
        assert bench.engine.bytes["tma_load"] == total
        assert not bench.hazards
    assert filled > 500 and copied > 500


@pytest.mark.parametrize("policy", POLICIES)
def test_tensor_stores(policy):
    rng = np.random.default_rng(fresh_seed())
    overhangs = 0
    for trial in range(60):
        desc, coords = random_tensor(rng)
        if trial % 3 == 0:  # the tensor's inner edge
            coords = (desc.sizes[0] - 1, *(0 for _ in coords[1:]))
        coords = storable(desc, coords)
        bench = Bench(policy, nbytes=1 << 21, seed=trial)
        nbytes = DataType(desc.dtype).nbytes
        src = 128 * int(rng.integers(16))
        expected = bench.memory.array.copy()
        total, over = 0, False
        for offset, target, beyond in elements(desc, coords, src):
            if target is not None:
                expected[target : target + nbytes] = bench.shared[2, offset : offset + nbytes]
                total += nbytes
                over |= beyond
        before = bench.shared.copy()
        bench.engine.issue_tensor_store(2 * THREADS, descriptor.encode(desc), coords, src, origin="the store")
        bench.settle()
        assert np.array_equal(bench.memory.array, expected), (desc, coords, src)
        assert np.array_equal(bench.shared, before)
        assert bench.engine.bytes["tma_store"] == total
        names = [name for name, _, _ in bench.hazards]
        assert ("tma-store-overhang" in names) == over
        assert all(origin == "the store" for _, _, origin in bench.hazards)
        overhangs += over
    assert overhangs > 3


REDUCTIONS = [
    (DataType.UINT32, "add inc dec min max and or xor"),
    (DataType.INT32, "add min max and or xor"),
    (DataType.UINT64, "add min max and or xor"),
    (DataType.INT64, "min max"),
    (DataType.FLOAT16, "add min max"),
    (DataType.BFLOAT16, "add min max"),
    (DataType.FLOAT32, "add"),
    (DataType.FLOAT32_FTZ, "add"),
]
NUMPY = {
    DataType.UINT32: np.uint32,
    DataType.INT32: np.int32,
    DataType.UINT64: np.uint64,
    DataType.INT64: np.int64,
    DataType.FLOAT16: np.float16,
    DataType.BFLOAT16: ml_dtypes.bfloat16,
    DataType.FLOAT32: np.float32,
    DataType.FLOAT32_FTZ: np.float32,
}


def reduced(op: str, dtype: type, old: bytes, new: bytes) -> bytes:
    a, b = (np.frombuffer(raw, dtype)[0] for raw in (old, new))
    if np.dtype(dtype).kind in "iu":
        a, b = int(a), int(b)
        value = {
            "add": a + b,
            "inc": 0 if a >= b else a + 1,
            "dec": b if a == 0 or a > b else a - 1,
            "min": min(a, b),
            "max": max(a, b),
            "and": a & b,
            "or": a | b,
            "xor": a ^ b,
        }[op]
        return (value % (1 << 8 * len(old))).to_bytes(len(old), "little")
    a, b = float(a), float(b)
    return np.array({"add": a + b, "min": min(a, b), "max": max(a, b)}[op], np.float64).astype(dtype).tobytes()


@pytest.mark.parametrize(("dtype", "ops"), REDUCTIONS)
def test_tensor_reductions(dtype, ops):
    rng = np.random.default_rng(fresh_seed())
    for trial, op in enumerate(ops.split() * 4):
        desc, coords = random_tensor(rng, dtype)
        coords = storable(desc, coords)
        bench = Bench(POLICIES[trial % len(POLICIES)], nbytes=1 << 21, seed=trial)
        nbytes = dtype.nbytes
        if dtype.is_float:
            for memory in (bench.memory.array, bench.shared):
                values = memory.view(NUMPY[dtype])
                values[:] = rng.integers(-200, 200, values.shape) / 8
        src = 128 * int(rng.integers(16))
        expected = bench.memory.array.copy()
        for offset, target, _ in elements(desc, coords, src):
            if target is not None:
                old = expected[target : target + nbytes].tobytes()
                new = bench.shared[0, offset : offset + nbytes].tobytes()
                expected[target : target + nbytes] = np.frombuffer(reduced(op, NUMPY[dtype], old, new), np.uint8)
        bench.engine.issue_tensor_reduce(5, descriptor.encode(desc), coords, src, op)
        bench.settle()
        assert np.array_equal(bench.memory.array, expected), (desc, coords, src, op)
        assert {k for k, n in bench.engine.bytes.items() if n} <= {"tma_reduce"}


@pytest.mark.parametrize(
    ("coords", "error", "message"),
    [
        ((-8, 0), OutOfBounds, r"\(-8, 0\): a box that is stored must not begin before the tensor"),
        ((0, -1), OutOfBounds, "must not begin before"),
        ((-64, 0), OutOfBounds, "must not begin before"),  # wholly outside
        ((1, 0), Misaligned, "begins 2 B into a row, which is not a multiple of 16 B; .* multiple of 8"),
        ((68, 0), Misaligned, "begins 136 B into a row"),
    ],
)
def test_where_a_store_must_not_begin(coords, error, message):
    halves = descriptor.encode(Descriptor(DataType.FLOAT16, BASE, (64, 8), (128,), (32, 4)))
    with pytest.raises(error, match=message):
        Bench().engine.issue_tensor_store(0, halves, coords, 0)
    with pytest.raises(error, match=message):
        Bench().engine.issue_tensor_reduce(0, halves, coords, 0, "add")


@pytest.mark.parametrize("steps", [(1, 1), (2, 1)])
def test_a_load_may_begin_before_the_tensor_but_not_within_a_chunk(steps):
    halves = descriptor.encode(Descriptor(DataType.FLOAT16, BASE, (64, 8), (128,), (16, 4), steps))
    for start in (1, -1):
        with pytest.raises(Misaligned, match=f"begins {2 * start} B into a row, .* multiple of 8"):
            Bench().engine.issue_tensor_load(0, halves, (start, 0), 0, 8)
    Bench().engine.issue_tensor_load(0, halves, (-8, -3), 0, 8)


def test_a_bitwise_reduction_needs_an_unsigned_map():
    bits = [descriptor.encode(Descriptor(t, BASE, (8, 8), (64,), (8, 4))) for t in (DataType.INT64, DataType.UINT64)]
    with pytest.raises(SimError, match="map of INT64 elements faults .* UINT64"):
        Bench().engine.issue_tensor_reduce(0, bits[0], (0, 0), 0, "xor")
    Bench().engine.issue_tensor_reduce(0, bits[1], (0, 0), 0, "xor")


def test_a_store_past_ragged_rows():
    """An int8 tensor of 466 columns in rows of 512: columns 466 to 479 are overwritten, 480 on are not."""
    bench = Bench(nbytes=8 * 512)
    bench.memory.array[:] = 7
    bench.shared[:] = 1
    ragged = Descriptor(DataType.UINT8, BASE, (466, 8), (512,), (128, 8))
    bench.engine.issue_tensor_store(0, descriptor.encode(ragged), (384, 0), 0)
    bench.settle()
    table = bench.memory.array.reshape(8, 512)
    assert (table[:, 384:480] == 1).all()
    assert (table[:, :384] == 7).all() and (table[:, 480:] == 7).all()
    [(name, message, _)] = bench.hazards
    assert name == "tma-store-overhang"
    assert "14 B beyond" in message and "466 B" in message


def test_the_overhang_of_the_last_row_may_lie_outside_the_array():
    bench = Bench(nbytes=7 * 512 + 466)  # as a slice [:, :466] of the pitched array is mapped
    bench.memory.array[:] = 7
    bench.shared[:] = 1
    ragged = Descriptor(DataType.UINT8, BASE, (466, 8), (512,), (128, 8))
    bench.engine.issue_tensor_store(0, descriptor.encode(ragged), (384, 0), 0)
    bench.settle()
    rows = bench.memory.array[: 7 * 512].reshape(7, 512)
    assert (rows[:, 384:480] == 1).all()
    assert (bench.memory.array[7 * 512 + 384 :] == 1).all()


def test_multicast():
    bench = Bench()
    desc = Descriptor(DataType.FLOAT16, BASE, (64, 64), (128,), (64, 8), swizzle=Swizzle.B128)
    bench.engine.issue_tensor_load(0, descriptor.encode(desc), (0, 8), 1024, 64, targets=(0, 2, 3))
    untouched = bench.shared[1].copy()
    bench.settle()
    assert np.array_equal(bench.shared[1], untouched)
    for slot in (0, 2, 3):
        assert np.array_equal(bench.shared[slot, 1024:2048], bench.shared[0, 1024:2048])
    assert np.array_equal(bench.shared[3, 1024:1152], bench.memory.array[1024:1152])
    assert bench.barriers.bytes == {(0, 64): 1024, (2, 64): 1024, (3, 64): 1024}
    assert bench.engine.bytes["tma_load"] == 3 * 1024


# -- bulk copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_bulk_copies(policy):
    bench = Bench(policy)
    shared, memory = bench.shared.copy(), bench.memory.array.copy()
    engine = bench.engine
    engine.issue_bulk_load(0, 256, BASE + 48, 4096, 8, targets=(0, 1))
    engine.issue_bulk_store(2 * THREADS, BASE + 16384, 512, 2048)
    engine.issue_bulk_to_cluster(3 * THREADS, 2, 8192, 4096, 1024, 16)
    engine.issue_bulk_reduce(1 * THREADS, BASE + 32768, 8192, 800, "xor", "b32")
    engine.issue_bulk_reduce(1 * THREADS, BASE + 40960, 8192, 800, "max", "s64")
    engine.issue_bulk_to_cluster(3 * THREADS, 0, 12288, 4096, 512, 24, "add", "u32")
    engine.issue_bulk_prefetch(0, BASE, 1024)
    bench.settle()
    add = shared[0, 12288:12800].view(np.uint32) + shared[3, 4096:4608].view(np.uint32)
    shared[:2, 256 : 256 + 4096] = memory[48 : 48 + 4096]
    shared[2, 8192:9216] = shared[3, 4096:5120]
    shared[0, 12288:12800] = add.view(np.uint8)
    memory[16384 : 16384 + 2048] = shared[2, 512 : 512 + 2048]
    memory[32768 : 32768 + 800] ^= shared[1, 8192 : 8192 + 800]
    largest = np.maximum(memory[40960 : 40960 + 800].view(np.int64), shared[1, 8192 : 8192 + 800].view(np.int64))
    memory[40960 : 40960 + 800] = largest.view(np.uint8)
    assert np.array_equal(bench.shared, shared)
    assert np.array_equal(bench.memory.array, memory)
    assert bench.barriers.bytes == {(0, 8): 4096, (1, 8): 4096, (2, 16): 1024, (0, 24): 512}
    assert {k: n for k, n in engine.bytes.items() if n} == {
        "bulk_load": 8192,
        "bulk_store": 2048,
        "bulk_cluster": 1536,
        "bulk_reduce": 1600,
    }


def test_bulk_float_addition_keeps_subnormals():
    bench = Bench()
    bench.shared[0, :16].view(np.float32)[:] = [1e-39, 1.5, 1e-39, -1e-39]
    bench.memory.array[:16].view(np.float32)[:] = [1e-39, 2.0, 0.0, -0.0]
    bench.engine.issue_bulk_reduce(0, BASE, 0, 16, "add", "f32")
    bench.settle()
    tiny = 0x000AE398  # 1e-39
    assert bench.memory.array[:16].view(np.uint32).tolist() == [2 * tiny, 0x40600000, tiny, 1 << 31 | tiny]


def test_an_empty_copy_completes():
    bench = Bench()
    bench.engine.issue_bulk_load(0, 0, BASE, 0, 8)
    bench.engine.issue_bulk_store(0, BASE, 0, 0)
    bench.engine.bulk_commit_group(np.array([0]))
    bench.settle()
    assert bench.engine.bulk_wait_ready(np.array([0]), 0, read=False).all()
    assert sum(bench.engine.bytes.values()) == 0


# -- time --------------------------------------------------------------------------------------------------


def test_fifo_waits_then_keeps_the_order():
    bench = Bench("fifo")
    order = []
    bench.barriers.complete_tx = lambda slot, address, nbytes: order.append(address)
    for number in range(5):
        bench.engine.issue_bulk_load(0, 1024 * number, BASE, 64, 8 * number)
    assert not bench.engine.pump()
    assert not order
    pumps = 1
    while not order:
        bench.engine.pump()
        pumps += 1
    assert pumps == 4  # the latency
    assert order == [0, 8, 16, 24, 32]
    assert not bench.engine.pump()


def test_a_stall_cuts_the_latency_short():
    bench = Bench("fifo")
    bench.engine.issue_bulk_load(0, 0, BASE, 64, 8)
    assert bench.engine.pump(stalled=True)
    assert bench.barriers.bytes == {(0, 8): 64}
    assert not bench.engine.pump(stalled=True)


def test_early_is_at_once():
    bench = Bench("early")
    bench.engine.issue_bulk_load(0, 0, BASE, 64, 8)
    bench.engine.issue_bulk_store(0, BASE + 4096, 128, 64)
    assert bench.engine.idle
    assert np.array_equal(bench.memory.array[4096:4160], bench.shared[0, 128:192])


def test_late_reads_its_source_when_nothing_else_can_run():
    bench = Bench("late")
    bench.engine.issue_bulk_load(0, 0, BASE, 64, 8)
    bench.engine.issue_bulk_load(0, 64, BASE, 64, 16)
    for _ in range(100):
        assert not bench.engine.pump()
    bench.memory.array[:64] = 99
    assert bench.engine.pump(stalled=True)
    assert bench.barriers.bytes == {(0, 8): 64}
    assert (bench.shared[0, :64] == 99).all()
    bench.memory.array[:64] = 98
    bench.settle()
    assert (bench.shared[0, 64:128] == 98).all()


def test_random_moves_in_pieces_and_out_of_order():
    orders, pieces = set(), set()
    for seed in range(40):
        bench = Bench("random", seed=seed)
        credits = []
        bench.barriers.complete_tx = lambda slot, address, nbytes, credits=credits: credits.append(address)
        for number in range(3):
            bench.engine.issue_bulk_load(0, 4096 * number, BASE, 4096, 8 * number)
        bench.settle()
        orders.add(tuple(sorted(range(3), key=lambda n: len(credits) - credits[::-1].index(8 * n))))
        pieces.add(len(credits))
    assert len(orders) == 6
    assert max(pieces) > 4


def test_random_is_reproducible():
    def run() -> list[int]:
        bench = Bench("random", seed=5)
        credits = []
        bench.barriers.complete_tx = lambda slot, address, nbytes: credits.append((address, nbytes))
        for number in range(4):
            bench.engine.issue_bulk_load(0, 2048 * number, BASE, 2048, 8 * number)
        bench.settle()
        return credits

    assert run() == run()


# -- groups ------------------------------------------------------------------------------------------------


class Model:
    """Groups of one thread as lists."""

    def __init__(self) -> None:
        self.closed: list[int] = []
        self.open = 0


def test_group_tracker_against_a_model():
    rng = np.random.default_rng(fresh_seed())
    tracker = GroupTracker(6)
    models = [Model() for _ in range(6)]
    pending = []
    for _ in range(3000):
        threads = np.flatnonzero(rng.integers(2, size=6))
        action = rng.integers(4)
        if action == 0:
            groups = tracker.add(threads)
            for thread in threads:
                models[thread].open += 1
            pending.append((threads, groups, [len(models[t].closed) for t in threads]))
        elif action == 1:
            tracker.commit(threads)
            for thread in threads:
                models[thread].closed.append(models[thread].open)
                models[thread].open = 0
        elif action == 2 and pending and rng.integers(3):
            threads, groups, numbers = pending.pop(int(rng.integers(len(pending))))
            tracker.finish(threads, groups)
            for thread, number in zip(threads, numbers, strict=True):
                if number == len(models[thread].closed):
                    models[thread].open -= 1
                else:
                    models[thread].closed[number] -= 1
        n = int(rng.integers(6))
        every = np.arange(6)
        closed = [[count > 0 for count in m.closed] for m in models]
        expected = [not any(c[: max(len(c) - n, 0)]) for c in closed]
        assert tracker.ready(every, n).tolist() == expected
        nothing = [not any(c) and m.open == 0 for c, m in zip(closed, models, strict=True)]
        assert tracker.ready(every, None).tolist() == nothing
        assert bool(tracker.ready(3, n)) == expected[3]


def test_bulk_wait_group():
    bench = Bench("late")
    engine, me = bench.engine, np.array([7])
    other = np.array([8])
    for number in range(3):
        engine.issue_bulk_store(7, BASE + 1024 * number, 0, 64)
        engine.bulk_commit_group(me)

    def waits(read: bool) -> list[bool]:
        return [bool(engine.bulk_wait_ready(me, n, read)[0]) for n in range(4)]

    assert waits(True) == waits(False) == [False, False, False, True]
    assert engine.bulk_wait_ready(other, 0, False).all()  # a thread that issued nothing waits for nothing
    seen = []
    while True:
        seen.append((waits(True), waits(False)))
        if not engine.pump(stalled=True):
            break
    done = [False, False, False, True], [False, False, True, True], [False, True, True, True], [True] * 4
    assert seen == [(r, done[0]) for r in done] + [(done[3], w) for w in done[1:]]


def test_an_uncommitted_copy_is_in_no_group():
    bench = Bench("late")
    engine, me = bench.engine, np.array([7])
    engine.issue_bulk_store(7, BASE, 0, 64)
    assert engine.bulk_wait_ready(me, 0, False).all()
    engine.bulk_commit_group(me)
    assert not engine.bulk_wait_ready(me, 0, False).any()


def test_reading_the_source_frees_the_buffer_before_the_write():
    bench = Bench("late")
    engine, me = bench.engine, np.array([0])
    engine.issue_bulk_store(0, BASE, 0, 64)
    engine.bulk_commit_group(me)
    while not engine.bulk_wait_ready(me, 0, True).all():
        engine.pump(stalled=True)
    kept = bench.shared[0, :64].copy()
    before = bench.memory.array[:64].copy()
    bench.shared[0, :64] = 0
    assert np.array_equal(bench.memory.array[:64], before)
    bench.settle()
    assert np.array_equal(bench.memory.array[:64], kept)


# -- cp.async ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_cp_async(policy, size):
    rng = np.random.default_rng(fresh_seed())
    bench = Bench(policy)
    expected = bench.shared.copy()
    moved = 0
    for trial in range(12):
        threads = np.sort(rng.choice(4 * THREADS, int(rng.integers(1, 150)), replace=False))
        # each trial has shared memory of its own, so that the order of trials does not matter
        dst = (trial * THREADS + threads % THREADS) * 16
        src = (BASE + size * rng.integers(0, (1 << 16) // size, len(threads))).astype(np.uint64)
        sizes = rng.integers(0, size + 1, len(threads)) if trial % 2 else None
        if sizes is not None:
            src[sizes == 0] = 12345677  # not read, so neither its bounds nor its alignment matter
        for lane, thread in enumerate(threads.tolist()):
            count = size if sizes is None else int(sizes[lane])
            place = expected[thread // THREADS, dst[lane] : dst[lane] + size]
            place[:] = 0
            start = int(src[lane]) - BASE
            if count:
                place[:count] = bench.memory.array[start : start + count]
        moved += size * len(threads)
        bench.engine.issue_cp_async(threads, dst, src, size, sizes)
        bench.engine.cp_async_commit_group(threads)
    bench.settle()
    assert np.array_equal(bench.shared, expected)
    assert bench.engine.bytes["cp_async"] == moved
    assert bench.engine.cp_async_wait_ready(np.arange(4 * THREADS), 0).all()


def test_cp_async_wait_group_and_wait_all():
    bench = Bench("late")
    engine = bench.engine
    threads = np.arange(32)
    odd = threads[1::2]
    for stage in range(3):
        engine.issue_cp_async(odd, odd * 16 + 1024 * stage, (BASE + odd * 16).astype(np.uint64), 16)
        engine.cp_async_commit_group(threads)
    engine.issue_cp_async(threads, threads * 4, (BASE + threads * 4).astype(np.uint64), 4)

    def ready(n):
        return engine.cp_async_wait_ready(threads, n)

    assert ready(3).all()
    assert ready(2).tolist() == [True, False] * 16  # the even threads' groups are empty
    assert engine.pump(stalled=True)
    assert ready(2).all() and not ready(1)[1]
    engine.pump(stalled=True)
    engine.pump(stalled=True)
    assert ready(0).all()
    assert not ready(None).any()  # the copy that is in no group yet
    engine.pump(stalled=True)
    assert ready(None).all()


@pytest.mark.parametrize("noinc", [True, False])
def test_cp_async_mbarrier_arrive(noinc):
    bench = Bench("late")
    engine = bench.engine
    threads = np.arange(THREADS - 8, THREADS + 24)  # of two blocks
    src = np.full(32, BASE, np.uint64)
    engine.issue_cp_async(threads, np.arange(32) * 16, src, 16)
    engine.issue_cp_async(threads[:4], np.arange(4) * 16 + 1024, src[:4], 16)
    engine.cp_async_mbarrier_arrive(threads, 40, noinc)
    engine.issue_cp_async(threads, np.arange(32) * 16 + 2048, src, 16)
    assert bench.barriers.pending == ({} if noinc else {(0, 40): 8, (1, 40): 24})
    engine.pump(stalled=True)
    assert not bench.barriers.arrivals
    engine.pump(stalled=True)
    assert bench.barriers.arrivals == {(0, 40): 8, (1, 40): 24}  # the later copies are not waited for
    engine.cp_async_mbarrier_arrive(np.array([3 * THREADS]), 48, noinc)
    assert bench.barriers.arrivals[3, 48] == 1  # nothing under way: at once
    bench.settle()
    assert sum(bench.barriers.arrivals.values()) == 33


# -- ends --------------------------------------------------------------------------------------------------


def test_outstanding_and_drain():
    bench = Bench("late")
    engine = bench.engine
    engine.issue_bulk_load(THREADS + 5, 0, BASE, 64, 1024, targets=(1, 3))
    engine.issue_bulk_store(2 * THREADS, BASE + 512, 128, 64)
    threads = np.array([5, THREADS])
    engine.issue_cp_async(threads, np.array([256, 256]), np.full(2, BASE, np.uint64), 16)
    assert len(engine.outstanding()) == 3
    assert [len(engine.outstanding(slot)) for slot in range(4)] == [1, 2, 1, 1]
    [line] = engine.outstanding(3)
    assert "cp.async.bulk.shared::cluster.global, 64 B, issued by thread 5 of slot 1" in line
    engine.drain()
    assert engine.idle and not engine.outstanding()
    assert np.array_equal(bench.shared[3, :64], bench.memory.array[:64])
    assert np.array_equal(bench.memory.array[512:576], bench.shared[2, 128:192])


def test_retiring_a_block():
    bench = Bench("late")
    engine, me = bench.engine, np.array([THREADS])
    engine.issue_bulk_store(THREADS, BASE + 512, 128, 64)
    engine.bulk_commit_group(me)
    engine.issue_bulk_load(0, 4096, BASE, 64, 1024)
    kept = bench.shared[1, 128:192].copy()
    lines = engine.retire_block(1)
    assert len(lines) == 1 and "cp.async.bulk.global.shared::cta" in lines[0]
    bench.shared[1] = 0
    # The slot's next block starts with no groups, and the old block's write does not disturb them.
    engine.issue_bulk_store(THREADS, BASE + 1024, 128, 64)
    engine.bulk_commit_group(me)
    assert not engine.bulk_wait_ready(me, 0, False).any()
    bench.settle()
    assert engine.bulk_wait_ready(me, 0, False).all()
    assert np.array_equal(bench.memory.array[512:576], kept)
    assert not bench.memory.array[1024:1088].any()
    assert engine.retire_block(1) == []


# -- errors ------------------------------------------------------------------------------------------------

GOOD = descriptor.encode(Descriptor(DataType.FLOAT16, BASE, (64, 64), (128,), (64, 8)))
BIG = descriptor.encode(Descriptor(DataType.FLOAT16, BASE, (64, 64), (128,), (64, 256)))
BEYOND = descriptor.encode(Descriptor(DataType.FLOAT16, BASE, (64, 4096), (128,), (64, 8)))
LANES = np.arange(4)


@pytest.mark.parametrize(
    ("method", "arguments", "error", "message"),
    [
        ("bulk_load", (0, 0, BASE, 508, 8), Misaligned, "size 508 B is not a multiple of 16 B; copy 496 B"),
        ("bulk_load", (0, 8, BASE, 64, 8), Misaligned, "shared address 0x8 is not a multiple of 16 B"),
        ("bulk_load", (0, 0, BASE + 4, 64, 8), Misaligned, "is not a multiple of 16 B; it is 4 B past one"),
        ("bulk_load", (0, 0, BASE, 64, 12), Misaligned, "mbarrier at 0xc is not a multiple of 8 B"),
        ("bulk_load", (0, SHARED - 32, BASE, 64, 8), OutOfBounds, "not within the block's 16384 B"),
        ("bulk_load", (0, 0, BASE, 64, SHARED), OutOfBounds, "mbarrier: "),
        ("bulk_load", (0, 0, BASE + 65504, 64, 8), OutOfBounds, "source of cp.async.bulk.shared::cluster"),
        ("bulk_store", (0, BASE + 65504, 0, 64), OutOfBounds, "destination of cp.async.bulk.global"),
        ("bulk_store", (0, BASE, 0, 63), Misaligned, "size 63 B"),
        ("bulk_reduce", (0, BASE, 0, 64, "add", "s64"), SimError, "reduction .add has no type .s64"),
        ("bulk_to_cluster", (0, 1, 0, 0, 64, 8, "and", "b64"), SimError, "has no .and.b64"),
        ("bulk_to_cluster", (0, 1, 0, SHARED, 64, 8), OutOfBounds, "not within the block's"),
        ("bulk_prefetch", (0, BASE, 20), Misaligned, "size 20 B"),
        ("bulk_prefetch", (0, 64, 64), OutOfBounds, "prefetch"),
        ("tensor_load", (0, GOOD, (0,), 0, 8), SimError, "1 coordinates for a tensor map of rank 2"),
        ("tensor_load", (0, GOOD, (0, 0), 64, 8), Misaligned, "0x40 is not a multiple of 128 B"),
        ("tensor_load", (0, BIG, (0, 0), 0, 8), OutOfBounds, "is not within the block's 16384 B"),
        ("tensor_load", (0, GOOD, (0, 0), 0, 4), Misaligned, "mbarrier"),
        ("tensor_load", (0, bytes(range(128)), (0, 0), 0, 8), TensorMapError, "no tensor map"),
        ("tensor_load", (0, BEYOND, (0, 1000), 0, 8), OutOfBounds, "source of cp.async.bulk.tensor.2d"),
        ("tensor_store", (0, BEYOND, (0, 1000), 0), OutOfBounds, "destination of cp.async.bulk.tensor.2d"),
        ("tensor_reduce", (0, GOOD, (0, 0), 0, "and"), SimError, "reduction .and on FLOAT16"),
        ("tensor_prefetch", (0, GOOD, (0, 0, 0)), SimError, "3 coordinates for a tensor map of rank 2"),
        (
            "cp_async",
            (LANES, LANES * 16, np.full(4, BASE, np.uint64), 12),
            SimError,
            "4, 8 or 16 bytes, not 12",
        ),
        ("cp_async", (LANES, LANES * 8, np.full(4, BASE, np.uint64), 16), Misaligned, "shared address 0x8"),
        ("cp_async", (LANES, LANES * 16, np.full(4, BASE + 2, np.uint64), 4), Misaligned, "global address"),
        ("cp_async", (LANES, LANES * 8192, np.full(4, BASE, np.uint64), 16), OutOfBounds, "16384 B"),
        (
            "cp_async",
            (LANES, LANES * 16, np.full(4, BASE, np.uint64), 8, LANES * 4),
            SimError,
            "not all in 0 to 8",
        ),
    ],
)
def test_rules(method, arguments, error, message):
    bench = Bench()
    with pytest.raises(error, match=message):
        getattr(bench.engine, f"issue_{method}")(*arguments)
    assert bench.engine.idle
    bench.settle()
    assert sum(bench.engine.bytes.values()) == 0


def test_a_box_outside_the_tensor_reads_nothing():
    bench = Bench()
    bench.engine.issue_tensor_load(0, BEYOND, (0, 5000), 0, 8192)
    bench.settle()
    assert not bench.shared[0, :1024].any()
    assert bench.barriers.bytes == {(0, 8192): 1024}


def test_a_large_box_may_be_prefetched():
    bench = Bench()
    bench.engine.issue_tensor_prefetch(0, BIG, (0, 0))
    assert bench.engine.idle


def test_errors_of_cp_async_name_the_instruction():
    bench = Bench()
    bench.engine.issue_cp_async(LANES, LANES * 16, np.full(4, 4096, np.uint64), 16, origin="cp.async here")
    with pytest.raises(OutOfBounds, match="source of cp.async.shared.global of 16 B") as caught:
        bench.settle()
    assert caught.value.instruction == "cp.async here"


def test_read_only_memory():
    bench = Bench()
    bench.memory.array.flags.writeable = False
    bench.engine.issue_bulk_load(0, 0, BASE, 64, 8)
    with pytest.raises(SimError, match="read-only"):
        bench.engine.issue_bulk_store(0, BASE, 0, 64)
    with pytest.raises(SimError, match="read-only"):
        bench.engine.issue_tensor_store(0, GOOD, (0, 0), 0)


def test_construction():
    bench = Bench()
    rest = {"threads_per_block": 32, "memory": bench.memory, "barriers": bench.barriers, "report": print}
    with pytest.raises(ValueError, match="policy 'lazy'"):
        AsyncEngine(shared=bench.shared, policy="lazy", **rest)
    with pytest.raises(ValueError, match="multiple of 128"):
        AsyncEngine(shared=np.zeros((2, 1000), np.uint8), **rest)

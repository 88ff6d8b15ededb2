"""Questions that the manuals leave open, each answered by a copy or two on the GPU beside the simulator.

`EXPERIMENTS` maps a name to its question and its cases. A case runs on either side and knows how to show its result.
Cases of an `isolated` experiment may fault and get a process each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from configurations import LOAD, SHARED_BYTES, STORE, Configuration, special_bits
from execution import (
    THREADS,
    Result,
    aligned,
    dump_shared,
    execute,
    fill_shared,
    initial,
    missing_bytes,
    sleep,
    tensor_offset,
    wait_a_while,
)
from numba import cuda
from numba.cuda.types import uint32, uint64

from numba_tma import Barriers, Kernel, Shared, TensorMap, Tiles, kernel, ptx

_OVEREXPECTED = 8192  # more bytes than any box here has: what is missing then tells what was credited


@dataclass(frozen=True)
class Case:
    """One copy of an experiment: `run(side)` gives its result, `show(result, other)` lines of text about it.

    `other` is the result of the other side, or None: long tables are cut to where the two differ.
    """

    label: str
    run: Callable[[type], Result]
    show: Callable[[Result, Result | None], list[str]]
    before: Result = Result()


@dataclass(frozen=True)
class Experiment:
    """A question and the cases that answer it."""

    question: str
    cases: tuple[Case, ...]
    isolated: bool = False


def _case(
    label: str, configuration: Configuration, show: Callable[[Configuration, Result, Result | None], list[str]]
) -> Case:
    return Case(
        label,
        lambda side: execute([configuration], side)[0],
        lambda result, other: show(configuration, result, other),
        initial(configuration),
    )


# -- showing results ---------------------------------------------------------------------------------------------------


def _status(configuration: Configuration, result: Result) -> str:
    if configuration.operation != LOAD:
        return ""
    if configuration.expected == _OVEREXPECTED:
        return f"credited {_OVEREXPECTED - result.missing} B{'' if result.clean else ' and more later'}"
    if result.complete and result.clean:
        return "credited as expected"
    return f"complete {result.complete}, missing {result.missing} B, clean {result.clean}"


def _pitch(configuration: Configuration) -> int:
    return dict(configuration.forced).get("strides", configuration.strides or (1 << 20,))[0] or 1 << 20


def _place(configuration: Configuration, offset: int) -> str:
    """A byte offset from the tensor's begin as row and byte."""
    row, byte = divmod(offset, _pitch(configuration))
    return f"{row}:{byte}"


def show_chunks(configuration: Configuration, result: Result, other: Result | None) -> list[str]:
    """For a numbered tensor: the row and byte that each 16-byte chunk of shared memory came from, a line each 128 B.

    '.' is untouched memory, '0' zeros, '?' anything else.
    """
    shared = np.frombuffer(result.shared, np.uint8).reshape(-1, 16)
    untouched = initial(configuration).shared[-1]
    names = []
    for chunk in shared:
        words = chunk.view("<u2").astype(int)
        if (chunk == untouched).all():
            names.append(".")
        elif not chunk.any():
            names.append("0")
        elif (np.diff(words) == 1).all():
            names.append(_place(configuration, int(words[0]) * 2 - tensor_offset(configuration)))
        else:
            names.append("?" + chunk.tobytes().hex())
    last = max((i for i, name in enumerate(names) if name != "."), default=-1)
    first = min((i for i, name in enumerate(names) if name != "."), default=0)
    lines = [_status(configuration, result)]
    for start in range(first // 8 * 8, min(last + 1, first + 160), 8):
        lines.append(f"{start * 16:5}: " + " ".join(f"{name:>6}" for name in names[start : start + 8]))
    return lines


def show_written(configuration: Configuration, result: Result, other: Result | None) -> list[str]:
    """For a tensor of zeros: the runs of bytes that changed, by row and byte, and the first value of each.

    The value less one is the offset in shared memory modulo 251, where a store wrote it.
    """
    tensor = np.frombuffer(result.tensor, np.uint8)
    changed = np.flatnonzero(np.concatenate(([False], tensor != 0, [False]))[1:] != 0)
    if not len(changed):
        return ["nothing written"]
    cuts = np.flatnonzero(np.diff(changed) > 1)
    starts = changed[np.concatenate(([0], cuts + 1))]
    ends = changed[np.concatenate((cuts, [len(changed) - 1]))]
    origin = tensor_offset(configuration)
    lines = [f"{len(changed)} bytes in {len(starts)} runs"]
    for start, end in list(zip(starts.tolist(), ends.tolist(), strict=True))[:14]:
        lines.append(
            f"{_place(configuration, start - origin)} to {_place(configuration, end - origin)}, "
            f"first value {int(tensor[start])}"
        )
    return lines


def _values(configuration: Configuration, result: Result, count: int) -> np.ndarray:
    unsigned = f"<u{configuration.element.size}"
    if configuration.operation == LOAD:
        return np.frombuffer(result.shared, unsigned, count, configuration.place)
    return np.frombuffer(result.tensor, unsigned, count, tensor_offset(configuration))


def show_values(configuration: Configuration, result: Result, other: Result | None) -> list[str]:
    """Old and new elements and what came of them, in hexadecimal; of many only those in which the sides differ."""
    size = configuration.element.size
    count = min(configuration.sizes[0], configuration.box[0])
    after = _values(configuration, result, count)
    theirs = after if other is None or other.refused else _values(configuration, other, count)
    old = np.frombuffer(configuration.given[0], f"<u{size}", count)
    new = np.frombuffer(configuration.given[1], f"<u{size}", count) if configuration.given[1] else None
    chosen = range(count) if count <= 32 else np.flatnonzero(after != theirs)
    lines = [_status(configuration, result)] if configuration.operation == LOAD else []
    if count > 32:
        lines.append(f"{count} elements, {len(chosen)} of them differ")
    digits = 2 * size
    for i in list(chosen)[:40]:
        source = f"{old[i]:0{digits}x}"
        if new is not None:
            source += f" {configuration.operation} {new[i]:0{digits}x}"
        lines.append(f"{source} = {after[i]:0{digits}x}")
    return lines


def show_fill(configuration: Configuration, result: Result, other: Result | None) -> list[str]:
    """The distinct values of the box's elements outside the tensor."""
    rows = np.frombuffer(result.shared, f"<u{configuration.element.size}", configuration.box[0], configuration.place)
    outside = rows[configuration.sizes[0] - configuration.coordinates[0] :]
    return [" ".join(f"{v:0{2 * configuration.element.size}x}" for v in np.unique(outside).tolist())]


def show_meaning(configuration: Configuration, result: Result, other: Result | None) -> list[str]:
    """Which operations on which types explain the result."""
    numpy_dtype = configuration.element.numpy
    size = configuration.element.size
    count = configuration.box[0]
    after = _values(configuration, result, count)
    before = initial(configuration)
    old = _values(configuration, before, count)
    new = np.frombuffer(before.shared, f"<u{size}", count, configuration.place)
    types = {"unsigned": f"<u{size}", "signed": f"<i{size}"}
    if configuration.element.floating:
        types["float"] = numpy_dtype
    meanings = {"unchanged": old, "stored": new, "and": old & new, "or": old | new, "xor": old ^ new}
    with np.errstate(all="ignore"):
        for name, dtype in types.items():
            a, b = old.view(dtype), new.view(dtype)
            meanings[f"{name} add"] = a + b
            meanings[f"{name} min"], meanings[f"{name} max"] = np.minimum(a, b), np.maximum(a, b)
        meanings["unsigned inc"] = np.where(old >= new, 0, old + 1).astype(old.dtype)
        meanings["unsigned dec"] = np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)
    found = [name for name, values in meanings.items() if values.tobytes() == after.tobytes()]
    first = f"{old[0]:0{2 * size}x}, {new[0]:0{2 * size}x} -> {after[0]:0{2 * size}x}"
    return [f"{' = '.join(found) or 'none of those known'}; first element {first}"]


# -- (a) to (l), (o): tensor copies ------------------------------------------------------------------------------------


def _narrow_rows() -> Iterable[Case]:
    for swizzle, span in (("32B", 32), ("64B", 64), ("128B", 128)):
        for row in (16, 32, 48, 64, 96):
            if row >= span:
                continue
            for place in (0, 128):
                shape = Configuration(
                    *(LOAD, "float16", (64, 16), (128,), (row // 2, 8), (8, 2)),
                    swizzle=swizzle,
                    place=place,
                    values="numbered",
                    expected=_OVEREXPECTED,
                )
                yield _case(f"{row} B rows under {swizzle}, at {place}", shape, show_chunks)
    deep = Configuration(
        *(LOAD, "float16", (64, 8, 4), (128, 1024), (16, 3, 3), (0, 0, 0)),
        swizzle="128B",
        values="numbered",
        expected=_OVEREXPECTED,
    )
    yield _case("32 B rows under 128B, 3-D", deep, show_chunks)
    back = Configuration(*(STORE, "float16", (64, 16), (128,), (16, 8), (0, 0)), swizzle="128B", values="numbered")
    yield _case("store of 32 B rows under 128B", back, show_written)


def _nan_fill() -> Iterable[Case]:
    for dtype in ("float16", "bfloat16", "float32", "float32_ftz", "tfloat32", "tfloat32_ftz", "float64"):
        for fill in ("nan", "zero"):
            c = Configuration(LOAD, dtype, (32,), (), (32,), (16,), fill=fill)
            yield _case(f"{dtype}, {fill} fill", c, show_fill)


def _bytes(values: Iterable[int], size: int) -> bytes:
    return b"".join(value.to_bytes(size, "little") for value in values)


_TF32 = [
    *(0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F802000, 0x3F803000, 0x3F803001, 0x3F802FFF, 0xBF801000),
    *(0x7F7FFFFF, 0x7F7FE000, 0x7F7FF000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001),
    *(0x7FFFFFFF, 0xFF801234, 0x7F802000, 0x00000001, 0x00000FFF, 0x00001000, 0x00001001, 0x007FFFFF),
    *(0x007FF000, 0x80001000, 0x80003000, 0x00800000, 0x00800FFF, 0x00801000, 0x80000000, 0x00000000),
]


def _listed(operation: str, dtype: str, old: list[int], new: list[int] | None = None, **more: object) -> Configuration:
    """A 1-D tensor and a box of the same elements."""
    size = Configuration(LOAD, dtype, (4,), (), (4,), (0,)).element.size
    given = (_bytes(old, size), _bytes(new or [], size))
    return Configuration(operation, dtype, (len(old),), (), (len(old),), (0,), given=given, **more)


def _tf32() -> Iterable[Case]:
    for dtype in ("tfloat32", "tfloat32_ftz"):
        yield _case(f"load {dtype}", _listed(LOAD, dtype, _TF32), show_values)
        yield _case(f"store {dtype}", _listed(STORE, dtype, [0] * len(_TF32), _TF32), show_values)


def _ftz() -> Iterable[Case]:
    for dtype in ("float32_ftz", "float32"):
        yield _case(f"load {dtype}", _listed(LOAD, dtype, _TF32), show_values)
        yield _case(f"store {dtype}", _listed(STORE, dtype, [0] * len(_TF32), _TF32), show_values)


def _overhang(operation: str, cases: Iterable[tuple[str, int, int, int, int]]) -> Iterable[Case]:
    for dtype, columns, pitch, box, start in cases:
        c = Configuration(*(operation, dtype, (columns, 4), (pitch,), (box, 2), (start, 1)), values="numbered", lead=0)
        yield _case(f"{operation} {dtype}, {columns} columns, pitch {pitch} B, box {box} at {start}", c, show_written)


_STORE_OVERHANG = (
    *(("uint8", 466, 512, 256, 256), ("uint8", 466, 480, 256, 256), ("uint8", 466, 512, 256, 250)),
    *(("uint8", 466, 512, 256, 255), ("uint8", 466, 512, 16, 450), ("uint8", 466, 512, 16, 455)),
    *(("uint8", 466, 512, 16, 463), ("uint8", 466, 512, 16, 464), ("uint8", 466, 512, 16, 465)),
    *(("uint8", 466, 512, 32, 450), ("uint8", 466, 512, 32, 449), ("uint16", 233, 512, 128, 128)),
    *(("uint16", 233, 512, 128, 125), ("uint32", 117, 512, 64, 64), ("uint32", 117, 512, 64, 63)),
    *(("float64", 59, 512, 32, 32), ("float64", 59, 512, 32, 31)),
)
_REDUCE_OVERHANG = (
    *(("uint32", 466, 2048, 128, 400), ("uint32", 466, 1872, 128, 400), ("uint32", 466, 2048, 128, 401)),
    *(("uint32", 466, 2048, 4, 463), ("uint32", 466, 2048, 4, 465), ("uint64", 59, 512, 32, 32)),
    *(("float16", 233, 512, 128, 128), ("float32", 117, 512, 64, 64)),
)


def _flat_overhang() -> Iterable[Case]:
    for box, start in ((256, 256), (256, 250), (16, 450), (32, 450), (32, 455), (16, 465)):
        c = Configuration(STORE, "uint8", (466,), (), (box,), (start,), values="numbered")
        yield _case(f"1-D store uint8, 466 elements, box {box} at {start}", c, show_written)


def _store_overhang() -> Iterable[Case]:
    yield from _overhang(STORE, _STORE_OVERHANG)
    yield from _flat_overhang()


def _reduce_overhang() -> Iterable[Case]:
    yield from _overhang("add", _REDUCE_OVERHANG)
    yield from _overhang("or", _REDUCE_OVERHANG[:1])
    yield from _overhang("max", _REDUCE_OVERHANG[:1])


def _negative_stores() -> Iterable[Case]:
    starts = ((-1, 0), (-4, 0), (-8, 0), (-16, 0), (-32, 0), (0, -1), (0, -3), (-8, -2), (0, -4))
    for operation, dtype in ((STORE, "uint16"), ("add", "float16")):
        for at in starts if operation == STORE else starts[:1] + starts[5:6]:
            c = Configuration(operation, dtype, (64, 8), (128,), (32, 4), at, values="numbered")
            yield _case(f"{operation} {dtype} at {at}", c, show_written)
    flat = Configuration(STORE, "uint16", (64,), (), (32,), (-8,), values="numbered")
    yield _case("1-D store at -8", flat, show_written)


_SUBNORMAL_PAIRS = {
    "float32": (
        [0x00000001, 0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x80000001, 0x3F800000, 0x00000000],
        [0x00000000, 0x00000001, 0x00000001, 0x80000001, 0x80800000, 0x80000000, 0x00000001, 0x80000000],
    ),
    "float16": ([0x0001, 0x0001, 0x03FF, 0x0400, 0x0401, 0x8001, 0x0000, 0x3C00], [0, 1, 1, 0x8001, 0x8400, 0, 0, 1]),
    "bfloat16": ([0x0001, 0x0001, 0x007F, 0x0080, 0x0081, 0x8001, 0, 0x3F80], [0, 1, 1, 0x8001, 0x8080, 0, 0, 1]),
}


def _subnormals() -> Iterable[Case]:
    for dtype in ("float32", "float32_ftz", "float16", "bfloat16"):
        old, new = _SUBNORMAL_PAIRS[dtype.removesuffix("_ftz")]
        yield _case(f"tensor add {dtype}", _listed("add", dtype, old, new), show_values)
    for dtype in ("float32", "float16", "bfloat16"):
        yield _bulk_case(f"bulk add {dtype}", _listed("add", dtype, *_SUBNORMAL_PAIRS[dtype]))
    old, new = _pairs("float32")
    yield _bulk_case("bulk add float32, special values", _listed("add", "float32", old[:248], new[:248]))


def _pairs(dtype: str) -> tuple[list[int], list[int]]:
    bits = special_bits(dtype)
    bits = bits[:4] + bits[9:13]  # zeros, infinities and two NaNs of either sign
    bits += [{"float32": 0x3F800000, "float16": 0x3C00, "bfloat16": 0x3F80}[dtype], special_bits(dtype)[5]]
    pairs = [(a, b) for a in bits for b in bits]
    pairs += pairs[: -len(pairs) % 8]
    return [a for a, _ in pairs], [b for _, b in pairs]


def _specials() -> Iterable[Case]:
    for dtype in ("float16", "bfloat16", "float32"):
        old, new = _pairs(dtype)
        for operation in ("add", "min", "max") if dtype != "float32" else ("add",):
            yield _case(f"{operation} {dtype}", _listed(operation, dtype, old, new), show_values)
    # the same few in full, also where the sides agree
    for operation in ("add", "min", "max"):
        old = [0x7E00, 0x7C01, 0xFE00, 0x3C00, 0x3C00, 0x0000, 0x8000, 0x7C00]
        new = [0x3C00, 0x3C00, 0x3C00, 0x7E01, 0xFFFF, 0x8000, 0x0000, 0xFC00]
        yield _case(f"{operation} float16, a few", _listed(operation, "float16", old, new), show_values)


def _undocumented() -> Iterable[Case]:
    floats = ("float32", "float64", "tfloat32", "float32_ftz")
    for operation, names in {
        "add": ("int64", "float64", "tfloat32", "tfloat32_ftz", "uint8", "uint16"),
        "min": (*floats, "uint8", "uint16"),
        "max": ("float32", "float64"),
        "inc": ("int32", "uint64", "float32"),
        "dec": ("int32",),
        "and": ("float32", "float64", "float16", "bfloat16", "uint8", "uint16"),
        "or": ("float32",),
        "xor": ("float32", "uint8"),
    }.items():
        for dtype in names:
            floating = "float" in dtype
            c = Configuration(
                operation, dtype, (64,), (), (16,), (0,), values="numbers" if floating else "bytes", index=7
            )
            yield _case(f"{operation} {dtype}", c, show_meaning)


def _element_strides() -> Iterable[Case]:
    def one(box: tuple[int, ...], steps: tuple[int, ...], at: tuple[int, ...], **more: object) -> Case:
        sizes, strides = ((64, 20), (128,)) if len(box) == 2 else ((64, 8, 6), (128, 1024))
        c = Configuration(
            *(LOAD, "uint16", sizes, strides, box, at, steps),
            **dict(values="numbered", expected=_OVEREXPECTED, **more),
        )
        return _case(f"box {box} step {steps} at {at}", c, show_chunks)

    for rows, step in ((8, 2), (7, 2), (5, 3), (7, 3), (3, 8), (1, 4)):
        yield one((16, rows), (1, step), (8, 1))
    for start in (-1, -2, -3, -4, 17, 18, 19):
        yield one((16, 6), (1, 2), (0, start))
        yield one((16, 7), (1, 3), (0, start))
    yield one((16, 3, 4), (1, 2, 3), (0, 1, -1))
    yield one((16, 5, 5), (1, 2, 2), (8, 0, 0))
    yield one((16, 5), (1, 2), (-8, -1), swizzle="32B")
    for box in (16, 32, 24):
        for start in (0, 1, -1, 56):
            c = Configuration(
                *(LOAD, "uint16", (64, 8), (128,), (box, 3), (start, 0)),
                values="numbered",
                expected=_OVEREXPECTED,
                forced=(("element_strides", (2, 1)),),
            )
            yield _case(f"box ({box}, 3) step 2 in dimension 0 at {start}", c, show_chunks)


def _unaligned_loads() -> Iterable[Case]:
    for swizzle in ("none", "128B"):
        for start in (1, 3, 7, -1, -8, 57):
            c = Configuration(
                *(LOAD, "uint16", (64, 8), (128,), (64, 3), (start, 0)),
                values="numbered",
                swizzle=swizzle,
                expected=_OVEREXPECTED,
            )
            yield _case(f"load at {start}, swizzle {swizzle}", c, show_chunks)


def _strided_stores() -> Iterable[Case]:
    for operation, dtype in ((STORE, "uint16"), ("add", "uint32")):
        for start in (0, 1, -1, -2, 17):
            c = Configuration(*(operation, dtype, (32, 20), (128,), (16, 5), (0, start), (1, 2)), values="numbered")
            yield _case(f"{operation} {dtype}, box (16, 5) step 2 at {start}", c, show_written)
    c = Configuration(
        *(STORE, "uint16", (64, 8), (128,), (16, 3), (0, 0)),
        values="numbered",
        forced=(("element_strides", (2, 1)),),
    )
    yield _case("store, box (16, 3) step 2 in dimension 0", c, show_written)


def _shared_alignment() -> Iterable[Case]:
    for place in (16, 32, 64, 128):
        for swizzle in ("none", "128B"):
            common = {"place": place, "values": "numbered", "swizzle": swizzle}
            load = Configuration(LOAD, "uint16", (64, 8), (128,), (64, 4), (0, 0), **common)
            yield _case(f"load to +{place}, swizzle {swizzle}", load, show_chunks)
            store = replace(load, operation=STORE)
            yield _case(f"store from +{place}, swizzle {swizzle}", store, show_written)


def _zero_strides() -> Iterable[Case]:
    cases = {
        "2-D, stride 0": ((64, 8), (0,), (64, 8), (0, 0)),
        "2-D, stride 0, over the end": ((64, 8), (0,), (64, 8), (0, 4)),
        "3-D, inner stride 0": ((64, 4, 3), (0, 128), (32, 4, 3), (0, 0, 0)),
        "3-D, outer stride 0": ((64, 4, 3), (128, 0), (32, 4, 3), (0, 0, 0)),
        "2-D, stride 16": ((64, 8), (16,), (64, 8), (0, 0)),
    }
    for label, (sizes, strides, box, at) in cases.items():
        c = Configuration(LOAD, "uint16", sizes, strides, box, at, values="numbered")
        yield _case(label, c, show_chunks)
    store = Configuration(
        STORE, "uint16", (64, 8), (128,), (64, 1), (0, 3), values="numbered", forced=(("strides", (0,)),)
    )
    yield _case("store of one row, stride 0", store, show_written)


# -- kernels of their own ----------------------------------------------------------------------------------------------

smem = Shared(
    box=Tiles(1, (SHARED_BYTES // 128, 128), np.uint8, swizzle="128B"), map=Tiles(1, (128,), np.uint8), full=Barriers(1)
)


@kernel(threads=THREADS, shared=smem)
def bulk_add(destination, before, nbytes, size):
    """Bulk reduction .add of `nbytes` bytes, in elements of float32 (size 4), float16 (2) or bfloat16 (3)."""
    base = ptx.shared_address(smem.box[0])
    fill_shared(base, before)
    ptx.fence_proxy_async()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        if size == 4:
            ptx.cp_reduce_async_bulk_global_shared_add_f32(destination, base, uint32(nbytes))
        elif size == 2:
            ptx.cp_reduce_async_bulk_global_shared_add_noftz_f16(destination, base, uint32(nbytes))
        else:
            ptx.cp_reduce_async_bulk_global_shared_add_noftz_bf16(destination, base, uint32(nbytes))
        ptx.cp_async_bulk_commit_group()
        ptx.cp_async_bulk_wait_group(0)


def _bulk_case(label: str, configuration: Configuration) -> Case:
    before = initial(configuration)

    def run(side: type) -> Result:
        arrays = {"tensor": aligned(len(before.tensor)), "before": aligned(SHARED_BYTES)}
        arrays["tensor"][:] = np.frombuffer(before.tensor, np.uint8)
        arrays["before"][:] = np.frombuffer(before.shared, np.uint8)
        memory = side(arrays)
        destination = memory.address("tensor") + tensor_offset(configuration)
        size = 3 if configuration.dtype == "bfloat16" else configuration.element.size
        nbytes = configuration.box[0] * configuration.element.size
        memory.launch(bulk_add, 1, destination, memory.address("before"), nbytes, size)
        return Result(tensor=memory.read("tensor").tobytes())

    return Case(label, run, lambda result, other: show_values(configuration, result, other), before)


@cuda.jit(device=True)
def _publish_and_load(published, after, outcome, wait_ns):
    """All threads: publish the map in shared memory, load a box at (0, 0) through it, dump the buffer."""
    ptx.fence_proxy_async()
    cuda.syncthreads()
    if cuda.threadIdx.x < 32:
        ptx.tensormap_cp_fenceproxy_gpu(published, smem.map[0])
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        ptx.fence_proxy_tensormap_acquire_gpu(published)
        ptx.mbarrier_arrive_expect_tx(smem.full[0], uint32(_OVEREXPECTED))
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.box[0], published, 0, 0, smem.full[0])
        complete = wait_a_while(smem.full[0], wait_ns)
        missing = missing_bytes(smem.full[0])
        ptx.st_global_v4_u32(outcome, uint32(complete), missing, uint32(0), uint32(1))
    cuda.syncthreads()
    dump_shared(ptx.shared_address(smem.box[0]), after)


@kernel(threads=THREADS, shared=smem)
def replaced_stride(template, published, before, after, outcome, wait_ns, stride):
    """A copy of the map at `template` with another stride of dimension 1."""
    fill_shared(ptx.shared_address(smem.box[0]), before)
    if cuda.threadIdx.x < 8:
        offset = uint32(cuda.threadIdx.x * 16)
        a, b, c, d = ptx.ld_global_v4_u32(template + uint64(offset))
        ptx.st_shared_v4_u32(uint32(ptx.shared_address(smem.map[0]) + offset), a, b, c, d)
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        ptx.tensormap_replace_global_stride_shared(smem.map[0], 0, stride)
    _publish_and_load(published, after, outcome, wait_ns)


@kernel(threads=THREADS, shared=smem)
def map_from_nothing(tensor, published, before, after, outcome, wait_ns, stride):
    """A map of uint16, 64 × 8 elements, box 16 × 4, built in zeroed shared memory."""
    fill_shared(ptx.shared_address(smem.box[0]), before)
    if cuda.threadIdx.x < 8:
        offset = uint32(cuda.threadIdx.x * 16)
        zero = uint32(0)
        ptx.st_shared_v4_u32(uint32(ptx.shared_address(smem.map[0]) + offset), zero, zero, zero, zero)
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        ptx.tensormap_replace_global_address_shared(smem.map[0], tensor)
        ptx.tensormap_replace_rank_shared(smem.map[0], 1)
        ptx.tensormap_replace_box_dim_shared(smem.map[0], 0, 16)
        ptx.tensormap_replace_box_dim_shared(smem.map[0], 1, 4)
        ptx.tensormap_replace_global_dim_shared(smem.map[0], 0, 64)
        ptx.tensormap_replace_global_dim_shared(smem.map[0], 1, 8)
        ptx.tensormap_replace_global_stride_shared(smem.map[0], 0, stride)
        ptx.tensormap_replace_element_stride_shared(smem.map[0], 0, 1)
        ptx.tensormap_replace_element_stride_shared(smem.map[0], 1, 1)
        ptx.tensormap_replace_elemtype_shared(smem.map[0], 1)
        ptx.tensormap_replace_interleave_layout_shared(smem.map[0], 0)
        ptx.tensormap_replace_swizzle_mode_shared(smem.map[0], 0)
        ptx.tensormap_replace_fill_mode_shared(smem.map[0], 0)
    _publish_and_load(published, after, outcome, wait_ns)


def _edited_map(label: str, which: Kernel, stride: int) -> Case:
    shape = Configuration(
        *(LOAD, "uint16", (64, 8), (256,), (16, 4), (0, 0)), values="numbered", expected=_OVEREXPECTED
    )
    before = initial(shape)

    def run(side: type) -> Result:
        arrays = {
            "tensor": aligned(len(before.tensor) + 8192),
            "template": aligned(128),
            "published": aligned(128),
            "before": aligned(SHARED_BYTES),
            "after": aligned(SHARED_BYTES),
            "outcome": aligned(16).view(np.uint32),
        }
        words = arrays["tensor"].view(np.uint16)
        words[:] = np.arange(words.size)
        arrays["before"][:] = np.frombuffer(before.shared, np.uint8)
        memory = side(arrays)
        origin = tensor_offset(shape)
        tensor = memory.address("tensor") + origin
        view = np.ndarray((8, 64), np.uint16, arrays["tensor"].data, origin, (256, 2))
        template = memory.encode(TensorMap(view, (4, 16), l2_promotion="none", store=False), tensor)
        memory.write("template", np.frombuffer(template, np.uint8))
        first = tensor if which is map_from_nothing else memory.address("template")
        names = ("published", "before", "after", "outcome")
        memory.launch(which, 1, first, *map(memory.address, names), memory.times[0], stride)
        published, outcome = memory.read("published"), memory.read("outcome")
        places = np.flatnonzero(published != np.frombuffer(template, np.uint8)).tolist()
        note = "; ".join(f"byte {i}: {template[i]:02x} -> {published[i]:02x}" for i in places[:24])
        return Result(
            memory.read("after").tobytes(),
            complete=bool(outcome[0]),
            missing=int(outcome[1]),
            note=f"the map differs from the driver's of stride 256 in {len(places)} bytes: {note}",
        )

    def show(result: Result, other: Result | None) -> list[str]:
        return [*show_chunks(shape, result, other), result.note]

    return Case(label, run, show, before)


def _edited_maps() -> Iterable[Case]:
    for stride in (512, 32):
        yield _edited_map(f"copied map, stride replaced by {stride}", replaced_stride, stride)
    for stride in (256, 16):
        yield _edited_map(f"map from zeroed memory, stride {stride}", map_from_nothing, stride)


@kernel(threads=THREADS, shared=smem)
def empty_copies(source, before, after, outcome, wait_ns, kind, nbytes):
    """Copies of nothing: a bulk load (kind 0) or store (1), cp.async with src-size 0 (2) or ignoring its source (3)."""
    base = ptx.shared_address(smem.box[0])
    fill_shared(base, before)
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.fence_mbarrier_init()
    ptx.fence_proxy_async()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        complete, missing = True, uint32(0)
        if kind == 0:
            ptx.mbarrier_expect_tx(smem.full[0], uint32(_OVEREXPECTED))
            ptx.cp_async_bulk_shared_global(base, source, uint32(nbytes), smem.full[0])
            ptx.mbarrier_arrive(smem.full[0])
            complete = wait_a_while(smem.full[0], wait_ns)
            missing = missing_bytes(smem.full[0])
        elif kind == 1:
            ptx.cp_async_bulk_global_shared(source, base, uint32(nbytes))
            ptx.cp_async_bulk_commit_group()
            ptx.cp_async_bulk_wait_group(0)
        elif kind == 2:
            ptx.cp_async_ca_16_zfill(base, source, uint32(nbytes))
            ptx.cp_async_wait_all()
        else:
            ptx.cp_async_ca_16_ignore_src(base, source, nbytes == 0)
            ptx.cp_async_wait_all()
        sleep(uint64(2000))
        ptx.st_global_v4_u32(outcome, uint32(complete), missing, uint32(0), uint32(1))
    cuda.syncthreads()
    dump_shared(base, after)


def _empty_case(label: str, kind: int, nbytes: int, address: int | None) -> Case:
    def run(side: type) -> Result:
        arrays = {
            "source": np.frombuffer(bytes(range(256)) * 4, np.uint8).copy(),
            "before": aligned(SHARED_BYTES),
            "after": aligned(SHARED_BYTES),
            "outcome": aligned(16).view(np.uint32),
        }
        arrays["before"][:] = 0xAB
        memory = side(arrays)
        source = memory.address("source") if address is None else address
        names = ("before", "after", "outcome")
        memory.launch(empty_copies, 1, source, *map(memory.address, names), memory.times[0], kind, nbytes)
        outcome = memory.read("outcome")
        return Result(
            memory.read("after").tobytes(), memory.read("source").tobytes(), bool(outcome[0]), int(outcome[1])
        )

    def show(result: Result, other: Result | None) -> list[str]:
        shared = result.shared
        credit = f"credited {_OVEREXPECTED - result.missing} B, " if kind == 0 else ""
        rest = "untouched" if set(shared[32:]) == {0xAB} else "changed"
        return [f"finished; {credit}first 32 bytes {shared[:32].hex()}, the rest {rest}"]

    return Case(label, run, show)


def _empty() -> Iterable[Case]:
    yield _empty_case("bulk load of 16 B", 0, 16, None)
    yield _empty_case("bulk load of 0 B", 0, 0, None)
    yield _empty_case("bulk load of 0 B from address 16", 0, 0, 16)
    yield _empty_case("bulk load of 8 B", 0, 8, None)
    yield _empty_case("bulk store of 0 B", 1, 0, None)
    yield _empty_case("bulk store of 0 B to address 16", 1, 0, 16)
    yield _empty_case("cp.async, src-size 16", 2, 16, None)
    yield _empty_case("cp.async, src-size 0", 2, 0, None)
    yield _empty_case("cp.async, src-size 0, address 16", 2, 0, 16)
    yield _empty_case("cp.async, src-size 0, address 17", 2, 0, 17)
    yield _empty_case("cp.async, source ignored, address 16", 3, 0, 16)


KERNELS: dict[Kernel, int] = {bulk_add: 4, replaced_stride: 7, map_from_nothing: 7, empty_copies: 7}  # and parameters

EXPERIMENTS: dict[str, Experiment] = {
    "narrow-rows": Experiment(
        "(a) How far apart do rows narrower than the swizzle's span lie, and what do they credit?",
        tuple(_narrow_rows()),
    ),
    "nan-fill": Experiment("(b) Which bits does the fill have?", tuple(_nan_fill())),
    "tf32": Experiment("(c) How do TF32 maps round?", tuple(_tf32())),
    "ftz": Experiment("(d) Do FLOAT32_FTZ maps change what they copy?", tuple(_ftz())),
    "store-overhang": Experiment("(e) What does a store write past a row's end?", tuple(_store_overhang())),
    "reduce-overhang": Experiment("(f) And a reduction?", tuple(_reduce_overhang())),
    "negative-stores": Experiment(
        "(g) What do stores do that begin before the tensor?", tuple(_negative_stores()), isolated=True
    ),
    "subnormals": Experiment("(h) Do reductions flush subnormals?", tuple(_subnormals())),
    "special-values": Experiment("(i) Reductions of NaN, infinities and zeros", tuple(_specials())),
    "undocumented": Experiment(
        "(j) What do reductions do that no manual has for the type?", tuple(_undocumented()), isolated=True
    ),
    "element-strides": Experiment("(k) Which elements do element strides choose?", tuple(_element_strides())),
    "strided-stores": Experiment("(k) And in stores?", tuple(_strided_stores()), isolated=True),
    "shared-alignment": Experiment(
        "(l) Where must a box lie in shared memory?", tuple(_shared_alignment()), isolated=True
    ),
    "edited-maps": Experiment(
        "(m) In what unit does tensormap.replace take a stride?", tuple(_edited_maps()), isolated=True
    ),
    "empty-copies": Experiment("(n) Do copies of nothing read, complete, fault?", tuple(_empty()), isolated=True),
    "unaligned-loads": Experiment(
        "(p) May a load begin between two chunks of a row?", tuple(_unaligned_loads()), isolated=True
    ),
    "zero-strides": Experiment("(o) Does the engine take stride 0?", tuple(_zero_strides()), isolated=True),
}


def run_cases(name: str, labels: tuple[str, ...], side: type) -> list[Result]:
    """Results of an experiment's cases, in the order of `labels`."""
    cases = {case.label: case for case in EXPERIMENTS[name].cases}
    return [cases[label].run(side) for label in labels]

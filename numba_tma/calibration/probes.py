"""Kernels that each repeat one thing, in PTX: what a GPU takes for it is a constant of the model of time, or follows
from its constants.

A kernel's loop runs `count` times between two readings of the clock. Run with two counts, the difference is what the
iterations cost, without whatever comes before and after. Every wait on an mbarrier gives up after `_PATIENCE` tries,
and the kernel then leaves with all bits set in its result, so a mistake cannot hang a GPU.

Parameters of every kernel: `out` (the clock cycles of each block, uint64), `data` (global memory), `span` (its size in
bytes, a power of two), `count`, `zero` (which is 0, as the compiler cannot know), `map` (a tensor map over `data`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

HEADER = ".version 8.3\n.target sm_90a\n.address_size 64\n"
MULTIPROCESSORS = 132
_PATIENCE = 4096
# So much dynamic shared memory leaves room for one block on an SM.
WHOLE_SM = 120 * 1024
SMALL, IN_L2, BEYOND_L2 = 1 << 16, 1 << 24, 1 << 30


@dataclass(frozen=True)
class TensorBox:
    """A tensor map over all of `data` as a matrix of 2-byte elements, and the box that is copied: rows, columns."""

    columns: int
    box: tuple[int, int]
    swizzle: str = "none"
    promotion: str = "256B"


@dataclass(frozen=True)
class Probe:
    """One kernel and how to launch it.

    An iteration of its loop does `per_iteration` of what is measured in each block: instructions of a warp, bytes,
    round trips, as `unit` says. `cold` asks that `data` is not in the L2 cache; otherwise a first launch has brought it
    there.
    """

    name: str
    text: str
    unit: str
    per_iteration: int
    counts: tuple[int, int]
    threads: int = 32
    blocks: int = 1
    cluster: int = 1
    shared_bytes: int = 0
    span: int = SMALL
    cold: bool = False
    box: TensorBox | None = None
    # The first bytes of `data`, given its address; zeros if there is none.
    contents: Callable[[int], np.ndarray] | None = None


_REGISTERS = """
    .reg .pred %p<16>; .reg .b16 %h<64>; .reg .b32 %r<160>; .reg .b64 %rd<64>; .reg .f32 %f<160>; .reg .f64 %fd<32>;
    .reg .pred %go, %leader, %never; .reg .b32 %lane, %count, %zero, %smem, %parity, %tries;
    .reg .b64 %out, %data, %mask, %begin, %end, %at, %map;
"""


def _by_line(text: str) -> str:
    """One statement a line: the machine code refers to lines."""
    return "\n".join(line.strip() for line in text.replace(";", ";\n").splitlines() if line.strip()) + "\n"


def _kernel(name: str, setup: str, body: str, finish: str = "", after: str = "", only: str = "") -> str:
    """The text of a kernel. `body` is the loop's; `finish` comes after it, before the clock; `after` behind that.

    `only` is the predicate of the threads that run the loop; the others wait for them behind it.
    """
    return _by_line(f"""
.visible .entry {name}(.param .u64 out, .param .u64 data, .param .u64 span, .param .u32 count, .param .u32 zero,
    .param .align 64 .b8 map[128])
{{
    {_REGISTERS}
    ld.param.u64 %out, [out]; ld.param.u64 %data, [data]; ld.param.u64 %mask, [span]; sub.u64 %mask, %mask, 1;
    ld.param.u32 %count, [count]; ld.param.u32 %zero, [zero];
    mov.u64 %map, map; cvta.param.u64 %map, %map;
    mov.u32 %lane, %tid.x; mov.u32 %smem, smem; setp.eq.u32 %leader, %lane, 0; setp.eq.u32 %never, %zero, 1;
    {setup}
    bar.sync 0;
    {f"@!{only} bra AFTER;" if only else ""}
    mov.u64 %begin, %clock64;
LOOP:
    .pragma "nounroll";
    {body}
    sub.u32 %count, %count, 1;
    setp.ne.u32 %go, %count, 0;
    @%go bra LOOP;
    {finish}
AFTER:
    barrier.sync 0;
    mov.u64 %end, %clock64;
    sub.u64 %end, %end, %begin;
    bra STORE;
FAILED:
    mov.u64 %end, -1;
STORE:
    mov.u32 %tries, %ctaid.x; mul.wide.u32 %at, %tries, 8; add.u64 %out, %out, %at;
    @%leader st.global.u64 [%out], %end;
    {after}
    ret;
}}
""")


MODULE_VARIABLES = ".extern .shared .align 1024 .b8 smem[];\n"


def _wait(barrier: str, parity: str, label: str) -> str:
    """Wait for an mbarrier's phase, with an end to patience."""
    return f"""
    mov.u32 %tries, {_PATIENCE};
WAIT{label}:
    mbarrier.try_wait.parity.shared::cta.b64 %p15, [{barrier}], {parity};
    @%p15 bra PASSED{label};
    sub.u32 %tries, %tries, 1; setp.ne.u32 %p15, %tries, 0; @%p15 bra WAIT{label};
    bra FAILED;
PASSED{label}:
"""


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic: chains of one warp for latencies, many chains of many warps for rates.

# Registers a chain's link works on, and the instructions of a link (%d: its register, %x to %w loop constants).
_LINKS: dict[str, tuple[str, str, int]] = {
    "fma_f32": ("f", "fma.rn.f32 {d}, {d}, %f150, %f151;", 1),
    "add_lop_b32": ("r", "add.u32 {d}, {d}, %r150; xor.b32 {d}, {d}, %r151;", 2),
    "lop_b32": (
        "r",
        "lop3.b32 {d}, {d}, %r150, %r151, 0xe8; lop3.b32 {d}, {d}, %r152, %r153, 0xca;",
        2,
    ),
    "mad_s32": ("r", "mad.lo.s32 {d}, {d}, %r150, %r151;", 1),
    "fma_f16x2": ("r", "fma.rn.f16x2 {d}, {d}, %r150, %r151;", 1),
    "ex2_f32": ("f", "ex2.approx.ftz.f32 {d}, {d};", 1),
    "fma_f64": ("fd", "fma.rn.f64 {d}, {d}, %fd30, %fd31;", 1),
    "shfl_b32": ("r", "shfl.sync.bfly.b32 {d}, {d}, 1, 31, -1;", 1),
    "cvt_f16_f32_f16": ("f", "cvt.rn.f16.f32 %h{i}, {d}; cvt.f32.f16 {d}, %h{i};", 2),
    "unpack_f16x2": (
        "r",
        "add.u32 {d}, {d}, %r150; mov.b32 {{%h{i}, %h3{i}}}, {d}; cvt.f32.f16 %f{i}, %h{i}; cvt.f32.f16 %f1{i}, %h3{i};"
        "add.f32 %f2{i}, %f2{i}, %f{i}; add.f32 %f3{i}, %f3{i}, %f1{i};",
        5,
    ),
}
_CONSTANTS = """
    cvt.rn.f32.u32 %f150, %zero; cvt.rn.f32.u32 %f151, %lane; mov.u32 %r150, %zero; add.u32 %r151, %lane, %zero;
    xor.b32 %r152, %lane, 5; xor.b32 %r153, %lane, 21;
    cvt.rn.f64.u32 %fd30, %zero; cvt.rn.f64.u32 %fd31, %lane;
"""


def _arithmetic(name: str, chains: int, threads: int, links: int) -> Probe:
    kind, link, instructions = _LINKS[name]
    registers = [f"%{kind}{i}" for i in range(chains)]
    width = {"f": "f32", "r": "u32", "fd": "f64"}[kind]
    convert = f"cvt{'.rn' if kind[0] == 'f' else ''}.{width}.u32" if kind != "r" else "mov.u32"
    setup = _CONSTANTS + "".join(f"{convert} {register}, %lane;" for register in registers)
    if name == "unpack_f16x2":
        setup += "".join(f"mov.f32 %f2{i}, 0f00000000; mov.f32 %f3{i}, 0f00000000;" for i in range(chains))
    body = "".join(link.format(d=register, i=i) for _ in range(links) for i, register in enumerate(registers))
    sunk = [f"%f2{i}" for i in range(chains)] + [f"%f3{i}" for i in range(chains)] if "unpack" in name else registers
    kept = "f32" if "unpack" in name else width
    after = "".join(f"@%never st.global.{kept} [%data], {register};" for register in sunk)
    what = "latency" if chains == 1 else "rate"
    return Probe(
        f"{name}_{what}",
        _kernel(f"{name}_{what}", setup, body, after=after),
        "instructions of a warp",
        instructions * links * chains,
        (64, 192),
        threads,
    )


def _arithmetic_probes() -> Iterable[Probe]:
    for name in _LINKS:
        yield _arithmetic(name, 1, 32, 16)
        yield _arithmetic(name, 8, 512, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Shared memory.


def _shared_latency(name: str, load: str) -> Probe:
    setup = """
    add.u32 %smem, %smem, %zero; mov.u32 %r0, %smem;
    st.shared.v4.u32 [%smem], {%smem, %smem, %smem, %smem};
    """
    return Probe(
        f"shared_latency_{name}",
        _kernel(f"shared_latency_{name}", setup, load * 8, after="@%never st.global.u32 [%data], %r0;"),
        "loads",
        8,
        (64, 192),
        shared_bytes=1024,
    )


def _shared_rate(name: str, instruction: str, nbytes: int, stride: int, threads: int = 512) -> Probe:
    """A warp's lanes access `nbytes` each, `stride` bytes apart; warps all touch the same 4 KB."""
    setup = f"and.b32 %r100, %lane, 31; mad.lo.u32 %smem, %r100, {stride}, %smem; mov.u32 %r99, 0;"
    body = "".join(instruction.format(*(f"%r{4 * k + i}" for i in range(4))) for k in range(8))
    return Probe(
        name,
        _kernel(name, setup, body),
        "instructions of a warp",
        8 * threads // 32,
        (32, 96),
        threads,
        shared_bytes=32 * max(stride, nbytes) + 1024,
    )


def _shared_probes() -> Iterable[Probe]:
    yield _shared_latency("b32", "ld.shared.u32 %r0, [%r0];")
    yield _shared_latency("b64", "ld.shared.v2.u32 {%r0, %r1}, [%r0];")
    yield _shared_latency("b128", "ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [%r0];")
    yield _shared_latency(
        "atom", "atom.shared.add.u32 %r1, [%r0], %zero; and.b32 %r1, %r1, %zero; add.u32 %r0, %r0, %r1;"
    )
    load32, load64 = "ld.volatile.shared.u32 {0}, [%smem];", "ld.volatile.shared.v2.u32 {{{0}, {1}}}, [%smem];"
    load128 = "ld.volatile.shared.v4.u32 {{{0}, {1}, {2}, {3}}}, [%smem];"
    for ways in (1, 2, 4, 8, 16, 32):
        yield _shared_rate(f"shared_load_b32_{ways}way", load32, 4, 4 * ways)
    yield _shared_rate("shared_load_b32_broadcast", load32, 4, 0)
    yield _shared_rate("shared_load_b32_one_warp", load32, 4, 4, 32)
    yield _shared_rate("shared_load_b64", load64, 8, 8)
    yield _shared_rate("shared_load_b128", load128, 16, 16)
    yield _shared_rate("shared_load_b128_2way", load128, 16, 32)
    store32 = "st.volatile.shared.u32 [%smem], %r99;"
    for ways in (1, 2, 8, 32):
        yield _shared_rate(f"shared_store_b32_{ways}way", store32, 4, 4 * ways)
    yield _shared_rate("shared_store_b128", "st.volatile.shared.v4.u32 [%smem], {{%r99, %r99, %r99, %r99}};", 16, 16)
    # The address of each depends on what it loaded before, which is zero: or else none would be repeated.
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r{0}, %r{1}, %r{2}, %r{3}}}, [%r10{4}];"
    load += "add.u32 %r10{4}, %r10{4}, %r{0};"
    setup = "and.b32 %r100, %lane, 31; mad.lo.u32 %smem, %r100, 16, %smem;"
    setup += "st.shared.v4.u32 [%smem], {%zero, %zero, %zero, %zero}; bar.sync 0;"
    setup += "".join(f"mov.u32 %r10{k}, %smem;" for k in range(8))
    for chains, threads, what in ((1, 32, "latency"), (8, 512, "rate")):
        name = f"ldmatrix_x4_{what}"
        loads = "".join(load.format(*range(4 * k, 4 * k + 4), k) for k in range(chains))
        after = "".join(f"@%never st.global.u32 [%data], %r10{k};" for k in range(chains))
        text = _kernel(name, setup, loads * (8 // chains), after=after)
        yield Probe(name, text, "instructions of a warp", 8 * threads // 32, (32, 96), threads, shared_bytes=1024)


# ---------------------------------------------------------------------------------------------------------------------
# Global memory.


def _chain(nodes: int, stride: int) -> Callable[[int], np.ndarray]:
    """Pointers to pointers: a ring of `nodes`, `stride` bytes apart."""

    def contents(address: int) -> np.ndarray:
        words = np.zeros(nodes * stride // 8, np.uint64)
        words[:: stride // 8] = address + (np.arange(1, nodes + 1, dtype=np.uint64) % np.uint64(nodes)) * np.uint64(
            stride
        )
        return words

    return contents


def _global_latency(
    name: str, load: str, nodes: int, stride: int, counts: tuple[int, int], cold: bool = False
) -> Probe:
    body = f"{load} %data, [%data];" * 4
    return Probe(
        name,
        _kernel(name, "", body, after="@%never st.global.u64 [%out], %data;"),
        "loads",
        4,
        counts,
        1,
        span=1 << 24,
        cold=cold,
        contents=_chain(nodes, stride),
    )


def _stream(
    name: str, access: str, threads: int, unroll: int, blocks: int, span: int, counts: tuple[int, int], ahead: str = ""
) -> Probe:
    """Every thread accesses `unroll` times 16 bytes, and uses what it loaded before it goes on.

    Blocks go through `data` side by side, wrapping at its end.
    """
    step = 16 * threads
    setup = f"""
    mov.u32 %r100, %ctaid.x; mov.u32 %r101, 0; mov.u32 %r102, 0;
    mul.wide.u32 %rd0, %r100, {step * unroll}; mul.wide.u32 %rd1, %lane, 16; add.u64 %rd0, %rd0, %rd1;
    """
    body = "and.b64 %rd2, %rd0, %mask; add.u64 %rd2, %rd2, %data;"
    for k in range(unroll):
        registers = ", ".join(f"%r{4 * k + i}" for i in range(4))
        body += access.format(registers=f"{{{registers}}}", offset=k * step)
    if "ld." in access:
        body += "".join(f"xor.b32 %r101, %r101, %r{i};" for i in range(4 * unroll))
    body += f"add.u64 %rd0, %rd0, {blocks * step * unroll};"
    return Probe(
        name,
        _kernel(name, setup + ahead, body, after="@%never st.global.u32 [%data], %r101;"),
        "bytes",
        step * unroll,
        counts,
        threads,
        blocks,
        shared_bytes=WHOLE_SM,
        span=span,
        cold=span > IN_L2,
    )


_LOAD = "ld.global.cg.v4.u32 {registers}, [%rd2+{offset}];"
_STORE = "st.global.v4.u32 [%rd2+{offset}], {{%r100, %r100, %r100, %r100}};"
# (threads, loads each): 2 to 128 KB in flight on an SM.
_IN_FLIGHT = ((128, 1), (256, 1), (512, 1), (512, 2), (1024, 2), (1024, 4), (1024, 8))


def _global_probes() -> Iterable[Probe]:
    yield _global_latency("global_latency_l1", "ld.global.ca.u64", 32, 128, (32, 96))
    yield _global_latency("global_latency_l2", "ld.global.cg.u64", 4096, 256, (1100, 2124))
    yield _global_latency("global_latency_memory", "ld.global.cg.u64", 3900, 4224, (64, 564), cold=True)
    yield Probe(
        "global_atom_latency",
        _kernel("global_atom_latency", "mov.u32 %r0, 0;", "atom.global.exch.b32 %r0, [%data], %r0;" * 4),
        "atomics",
        4,
        (32, 96),
        1,
    )
    yield Probe(
        "global_red_rate",
        _kernel(
            "global_red_rate",
            "mul.wide.u32 %rd0, %lane, 4; add.u64 %data, %data, %rd0;",
            "red.global.add.u32 [%data], %zero;" * 4,
        ),
        "instructions of a warp",
        4 * 512 // 32,
        (32, 96),
        512,
    )
    yield from _width_probes()
    yield from _line_probes()
    for threads, unroll in _IN_FLIGHT:
        nbytes = 16 * threads * unroll
        for blocks, sms in ((1, "one"), (MULTIPROCESSORS, "all")):
            many = min(max((1 << 21) // nbytes, 8), 256)
            for span, where in ((IN_L2, "l2"), (BEYOND_L2, "memory")):
                yield _stream(
                    f"load_{where}_{sms}_{nbytes >> 10}k", _LOAD, threads, unroll, blocks, span, (many, 3 * many)
                )
    for blocks, sms in ((1, "one"), (MULTIPROCESSORS, "all")):
        for span, where in ((IN_L2, "l2"), (BEYOND_L2, "memory")):
            yield _stream(f"store_{where}_{sms}", _STORE, 1024, 4, blocks, span, (64, 192))
    yield _copy_stream("copy_memory_all", MULTIPROCESSORS)
    for threads, unroll in _IN_FLIGHT[:5]:
        name = f"copy_memory_all_{16 * threads * unroll >> 10}k"
        yield _copy_stream(name, MULTIPROCESSORS, threads, unroll, (64, 192))
    for blocks in (1, 64, MULTIPROCESSORS):
        for width in ("b16", "b64"):
            yield _rows(f"load_rows_{width}_{blocks}", width, blocks)


# By width: bytes a lane, the destination of the k-th load, what a store writes, and the register type of one of them.
_WIDTHS = {
    "b8": (1, "u8 %h{0}", "u8 {1}, %h50", "h"),
    "b16": (2, "u16 %h{0}", "u16 {1}, %h50", "h"),
    "b32": (4, "u32 %r{0}", "u32 {1}, %r50", "r"),
    "b64": (8, "v2.u32 {{%r{0}, %r1{0}}}", "v2.u32 {1}, {{%r50, %r50}}", "r"),
    "b128": (16, "v4.u32 {{%r{0}, %r1{0}, %r2{0}, %r3{0}}}", "v4.u32 {1}, {{%r50, %r50, %r50, %r50}}", "r"),
}


def _width_probes() -> Iterable[Probe]:
    """Warps access 1 to 16 bytes a lane, side by side: the same few KB again and again."""
    for width, (nbytes, load, store, letter) in _WIDTHS.items():
        bits = {"h": 16, "r": 32}[letter]
        setup = f"""
        mul.wide.u32 %rd0, %lane, {nbytes}; add.u64 %rd0, %rd0, %data; mov.u32 %r50, %zero; cvt.u16.u32 %h50, %r50;
        cvt.u64.u32 %rd2, %zero;
        """
        places = [f"[%rd0+{k * nbytes * 512}]" for k in range(8)]
        loads = "".join(f"ld.global.ca.{load.format(k)}, {place};" for k, place in enumerate(places))
        # The next address depends on what was loaded, and yet is the same: or else it would not be loaded again.
        loads += "".join(f"xor.b{bits} %{letter}50, %{letter}50, %{letter}{k};" for k in range(8))
        loads += f"cvt.u64.u{bits} %rd1, %{letter}50; and.b64 %rd1, %rd1, %rd2; add.u64 %rd0, %rd0, %rd1;"
        stores = "".join(f"st.volatile.global.{store.format(k, place)};" for k, place in enumerate(places))
        for name, body in ((f"load_l1_{width}", loads), (f"store_{width}", stores)):
            text = _kernel(name, setup, body, after="@%never st.global.u64 [%out], %rd0;")
            yield Probe(name, text, "instructions of a warp", 8 * 512 // 32, (32, 96), 512)


def _line_probes() -> Iterable[Probe]:
    """Warps load 4 bytes a lane that lie in so many lines of L1, again and again."""
    for lines in (2, 4, 8, 16, 32):
        setup = f"""
        and.b32 %r100, %lane, 31; and.b32 %r101, %r100, {lines - 1}; shr.u32 %r102, %r100, {lines.bit_length() - 1};
        mul.wide.u32 %rd0, %r101, 128; mul.wide.u32 %rd1, %r102, 4; add.u64 %rd0, %rd0, %rd1; add.u64 %rd0, %rd0, %data;
        mov.u32 %r50, %zero; cvt.u64.u32 %rd2, %zero;
        """
        body = "".join(f"ld.global.ca.u32 %r{k}, [%rd0+{4096 * k}];" for k in range(8))
        body += "".join(f"xor.b32 %r50, %r50, %r{k};" for k in range(8))
        body += "cvt.u64.u32 %rd1, %r50; and.b64 %rd1, %rd1, %rd2; add.u64 %rd0, %rd0, %rd1;"
        name = f"load_l1_{lines}_lines"
        text = _kernel(name, setup, body, after="@%never st.global.u64 [%out], %rd0;")
        yield Probe(name, text, "instructions of a warp", 8 * 512 // 32, (32, 96), 512)


def _rows(name: str, width: str, blocks: int) -> Probe:
    """Each of four warps loads from eight rows, 8 KB apart, and goes on to the right: 2 or 8 bytes a lane.

    The way of a kernel that walks a strip of a matrix.
    """
    nbytes, load, _, letter = _WIDTHS[width]
    row, rows = 8192, 32
    setup = f"""
    mov.u32 %r100, %ctaid.x; mul.wide.u32 %rd0, %r100, {rows * row}; add.u64 %rd0, %rd0, %data;
    shr.u32 %r101, %lane, 5; mul.wide.u32 %rd1, %r101, {row}; add.u64 %rd0, %rd0, %rd1;
    and.b32 %r101, %lane, 31; mul.wide.u32 %rd1, %r101, {nbytes}; add.u64 %rd0, %rd0, %rd1;
    mov.u32 %r50, %zero; cvt.u16.u32 %h50, %r50;
    """
    body = "".join(f"ld.global.{load.format(k)}, [%rd0+{4 * k * row}];" for k in range(8))
    bits = {"h": 16, "r": 32}[letter]
    body += "".join(f"xor.b{bits} %{letter}50, %{letter}50, %{letter}{k};" for k in range(8))
    body += f"add.u64 %rd0, %rd0, {32 * nbytes};"
    text = _kernel(name, setup, body, after=f"@%never st.global.u{bits} [%out], %{letter}50;")
    moved = 8 * 4 * 32 * nbytes
    counts = (8, 32) if nbytes == 8 else (32, 128)
    return Probe(name, text, "bytes", moved, counts, 128, blocks, shared_bytes=WHOLE_SM, span=BEYOND_L2, cold=True)


def _copy_stream(
    name: str, blocks: int, threads: int = 1024, unroll: int = 4, counts: tuple[int, int] = (32, 96)
) -> Probe:
    """Half of `data` is copied to the other half."""
    step = 16 * threads
    setup = f"""
    mov.u32 %r100, %ctaid.x; mul.wide.u32 %rd0, %r100, {step * unroll}; mul.wide.u32 %rd1, %lane, 16;
    add.u64 %rd0, %rd0, %rd1; shr.u64 %mask, %mask, 1; add.u64 %rd3, %data, %mask; add.u64 %rd3, %rd3, 1;
    """
    body = "and.b64 %rd4, %rd0, %mask; add.u64 %rd2, %rd4, %data; add.u64 %rd5, %rd4, %rd3;"
    groups = [", ".join(f"%r{4 * k + i}" for i in range(4)) for k in range(unroll)]
    body += "".join(f"ld.global.cg.v4.u32 {{{g}}}, [%rd2+{k * step}];" for k, g in enumerate(groups))
    body += "".join(f"st.global.v4.u32 [%rd5+{k * step}], {{{g}}};" for k, g in enumerate(groups))
    body += f"add.u64 %rd0, %rd0, {blocks * step * unroll};"
    return Probe(
        name,
        _kernel(name, setup, body),
        "bytes read and written",
        2 * step * unroll,
        counts,
        threads,
        blocks,
        shared_bytes=WHOLE_SM,
        span=BEYOND_L2,
        cold=True,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Asynchronous copies.


def _cp_async(
    name: str, threads: int, copies: int, groups: int, blocks: int, span: int, counts: tuple[int, int]
) -> Probe:
    """Each iteration issues one group of `copies` 16-byte copies a thread, and waits for all but `groups - 1`."""
    step = 16 * threads
    stage = step * copies
    setup = f"""
    mov.u32 %r100, %ctaid.x; mul.wide.u32 %rd0, %r100, {stage}; mul.wide.u32 %rd1, %lane, 16; add.u64 %rd0, %rd0, %rd1;
    mad.lo.u32 %r0, %lane, 16, %smem; mov.u32 %r1, 0;
    """
    body = "and.b64 %rd2, %rd0, %mask; add.u64 %rd2, %rd2, %data; add.u32 %r2, %r0, %r1;"
    body += "".join(f"cp.async.cg.shared.global [%r2+{k * step}], [%rd2+{k * step}], 16;" for k in range(copies))
    body += f"""
    cp.async.commit_group; cp.async.wait_group {groups - 1};
    add.u64 %rd0, %rd0, {blocks * stage};
    add.u32 %r1, %r1, {stage}; setp.eq.u32 %p0, %r1, {stage * groups}; selp.b32 %r1, 0, %r1, %p0;
    """
    return Probe(
        name,
        _kernel(name, setup, body, "cp.async.wait_all;"),
        "bytes",
        stage,
        counts,
        threads,
        blocks,
        shared_bytes=max(WHOLE_SM, stage * groups),
        span=span,
        cold=span > IN_L2,
    )


def _barriers(stages: int, offset: int) -> str:
    """Barriers of `stages` stages, and their initialisation."""
    lines = [f"add.u32 %r90, %smem, {offset}; mov.u32 %parity, 0;"]
    lines += [f"@%leader mbarrier.init.shared::cta.b64 [%r90+{8 * s}], 1;" for s in range(stages)]
    return "\n".join([*lines, "fence.mbarrier_init.release.cluster;"])


def _copy_engine(
    name: str,
    nbytes: int,
    stages: int,
    blocks: int,
    span: int,
    counts: tuple[int, int],
    box: TensorBox | None = None,
) -> Probe:
    """One thread keeps `stages` copies of `nbytes` bytes each on their way; an iteration awaits and reissues each."""
    offset = stages * nbytes
    rows = box.box[0] if box else 0
    setup = _barriers(stages, offset)
    setup += f"""
    mov.u32 %r100, %ctaid.x; mul.wide.u32 %rd0, %r100, {stages * nbytes}; mul.lo.u32 %r91, %r100, {stages * rows};
    cvt.u32.u64 %r92, %mask; shr.u32 %r92, %r92, {(2 * box.columns).bit_length() - 1 if box else 0}; mov.u32 %r93, 0;
    """

    def issue(s: int) -> str:
        barrier = f"[%r90+{8 * s}]"
        if box is None:
            copy = f"""
            add.u64 %rd2, %rd0, {s * nbytes}; and.b64 %rd2, %rd2, %mask; add.u64 %rd2, %rd2, %data;
            cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
                [%smem+{s * nbytes}], [%rd2], {nbytes}, {barrier};
            """
        else:
            copy = f"""
            add.u32 %r94, %r91, {s * rows}; and.b32 %r94, %r94, %r92; add.u32 %r95, %smem, {s * nbytes};
            cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
                [%r95], [%map, {{%r93, %r94}}], {barrier};
            """
        return f"mbarrier.arrive.expect_tx.shared::cta.b64 _, {barrier}, {nbytes};" + copy

    advance = f"add.u64 %rd0, %rd0, {blocks * stages * nbytes}; add.u32 %r91, %r91, {blocks * stages * rows};"
    setup += "bar.sync 0; @!%leader bra ISSUED;" + "".join(issue(s) for s in range(stages)) + f"{advance} ISSUED:"
    body = "".join(_wait(f"%r90+{8 * s}", "%parity", f"S{s}") + issue(s) for s in range(stages))
    body += f"xor.b32 %parity, %parity, 1; {advance}"
    finish = "".join(_wait(f"%r90+{8 * s}", "%parity", f"F{s}") for s in range(stages))
    return Probe(
        name,
        _kernel(name, setup, body, finish, only="%leader"),
        "bytes",
        stages * nbytes,
        counts,
        32,
        blocks,
        shared_bytes=max(WHOLE_SM, offset + 8 * stages),
        span=span,
        cold=span > IN_L2,
        box=box,
    )


def _bulk_store(
    name: str, nbytes: int, stages: int, read: bool, blocks: int, span: int, counts: tuple[int, int]
) -> Probe:
    """One thread stores `nbytes` in a group an iteration, and waits for all but the latest `stages - 1` groups."""
    setup = f"""
    mov.u32 %r100, %ctaid.x; mul.wide.u32 %rd0, %r100, {nbytes}; mov.u32 %r1, 0;
    """
    body = f"""
    and.b64 %rd2, %rd0, %mask; add.u64 %rd2, %rd2, %data; add.u32 %r2, %smem, %r1;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], {nbytes};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group{".read" if read else ""} {stages - 1};
    add.u64 %rd0, %rd0, {blocks * nbytes};
    add.u32 %r1, %r1, {nbytes}; setp.eq.u32 %p0, %r1, {nbytes * stages}; selp.b32 %r1, 0, %r1, %p0;
    """
    return Probe(
        name,
        _kernel(name, setup, body, "cp.async.bulk.wait_group 0;", only="%leader"),
        "bytes",
        nbytes,
        counts,
        32,
        blocks,
        shared_bytes=max(WHOLE_SM, nbytes * stages),
        span=span,
        cold=span > IN_L2,
    )


def _copy_burst(name: str, nbytes: int, copies: int, box: TensorBox | None = None) -> Probe:
    """An iteration issues `copies` copies that signal one barrier, and waits for them; data is in L2."""
    rows = box.box[0] if box else 0
    setup = _barriers(1, nbytes * copies) + "mov.u32 %r93, 0; mov.u32 %r94, 0; bar.sync 0;"

    def issue(k: int) -> str:
        if box is None:
            source = f"[%smem+{k * nbytes}], [%data+{k * nbytes}], {nbytes}, [%r90];"
            return f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {source}"
        place = f"add.u32 %r94, %zero, {k * rows}; add.u32 %r95, %smem, {k * nbytes};"
        load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        return f"{place} {load} [%r95], [%map, {{%r93, %r94}}], [%r90];"

    body = f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r90], {copies * nbytes};"
    body += "".join(issue(k) for k in range(copies)) + _wait("%r90", "%parity", "B") + "xor.b32 %parity, %parity, 1;"
    return Probe(
        name,
        _kernel(name, setup, body, only="%leader"),
        "bytes",
        copies * nbytes,
        (64, 192),
        shared_bytes=max(WHOLE_SM, copies * nbytes + 8),
        span=IN_L2,
        box=box,
    )


def _store_burst(name: str, nbytes: int, copies: int) -> Probe:
    """An iteration issues `copies` bulk stores in one group, and waits for it."""
    body = "".join(
        f"cp.async.bulk.global.shared::cta.bulk_group [%data+{k * nbytes}], [%smem+{k * nbytes}], {nbytes};"
        for k in range(copies)
    )
    body += "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    text = _kernel(name, "", body, only="%leader")
    shared = max(WHOLE_SM, copies * nbytes)
    return Probe(name, text, "bytes", copies * nbytes, (64, 192), shared_bytes=shared, span=IN_L2)


# Inner extents of tensor boxes in bytes: (rows, columns of 2-byte elements); 8 KB each but for the narrowest.
_BOXES = ((256, 8), (256, 16), (128, 32), (64, 64), (32, 128), (16, 256))


def _copy_probes() -> Iterable[Probe]:
    yield _cp_async("cp_async_latency_l2", 32, 1, 1, 1, IN_L2, (64, 192))
    yield _cp_async("cp_async_latency_memory", 32, 1, 1, 1, BEYOND_L2, (64, 192))
    for span, where in ((IN_L2, "l2"), (BEYOND_L2, "memory")):
        for blocks, sms in ((1, "one"), (MULTIPROCESSORS, "all")):
            yield _cp_async(f"cp_async_{where}_{sms}", 256, 4, 4, blocks, span, (64, 192))
            for nbytes, stages in ((4096, 2), (8192, 2), (16384, 2), (16384, 4), (16384, 6)):
                yield _copy_engine(
                    f"bulk_{where}_{sms}_{nbytes >> 10}k_{stages}", nbytes, stages, blocks, span, (32, 96)
                )
            yield _bulk_store(f"bulk_store_{where}_{sms}", 16384, 4, True, blocks, span, (64, 192))
    for nbytes in (128, 1024, 4096, 16384):
        yield _copy_engine(f"bulk_latency_l2_{nbytes}", nbytes, 1, 1, IN_L2, (64, 192))
    yield _copy_engine("bulk_latency_memory_1024", 1024, 1, 1, BEYOND_L2, (64, 192))
    yield _copy_engine("bulk_latency_memory_16384", 16384, 1, 1, BEYOND_L2, (64, 192))
    yield _copy_engine("bulk_rate_l2_128", 128, 16, 1, IN_L2, (32, 96))
    yield _copy_engine("bulk_rate_l2_1024", 1024, 8, 1, IN_L2, (32, 96))
    for rows, columns in _BOXES:
        nbytes = 2 * rows * columns
        for stages, what in ((1, "latency"), (4, "rate")):
            yield _copy_engine(
                f"tensor_{what}_l2_{rows}x{2 * columns}",
                nbytes,
                stages,
                1,
                IN_L2,
                (32, 96),
                TensorBox(256, (rows, columns)),
            )
    swizzled = TensorBox(256, (64, 64), "128B")
    yield _copy_engine("tensor_rate_l2_64x128_swizzled", 8192, 4, 1, IN_L2, (32, 96), swizzled)
    yield _copy_engine("tensor_latency_memory_64x128", 8192, 1, 1, BEYOND_L2, (32, 96), TensorBox(256, (64, 64)))
    for stages in (2, 4, 8):
        yield _copy_engine(
            f"tensor_memory_all_64x128_{stages}",
            8192,
            stages,
            MULTIPROCESSORS,
            BEYOND_L2,
            (32, 96),
            TensorBox(256, (64, 64)),
        )
    promoted_not = TensorBox(256, (64, 64), promotion="none")
    yield _copy_engine(
        "tensor_memory_all_64x128_not_promoted", 8192, 4, MULTIPROCESSORS, BEYOND_L2, (32, 96), promoted_not
    )
    whole_rows = TensorBox(256, (16, 256))
    yield _copy_engine("tensor_memory_all_16x512", 8192, 4, MULTIPROCESSORS, BEYOND_L2, (32, 96), whole_rows)
    for copies in (1, 4, 8):
        for nbytes in (128, 1024, 4096, 16384):
            if copies * nbytes <= 1 << 17:
                yield _copy_burst(f"bulk_burst_{nbytes}_{copies}", nbytes, copies)
                yield _store_burst(f"bulk_store_burst_{nbytes}_{copies}", nbytes, copies)
        for rows, columns in (*_BOXES, (8, 64), (32, 256)):
            box = TensorBox(256, (rows, columns))
            name = f"tensor_burst_{rows}x{2 * columns}_{copies}"
            yield _copy_burst(name, 2 * rows * columns, copies, box)
    for nbytes in (1024, 16384):
        yield _bulk_store(f"bulk_store_latency_{nbytes}", nbytes, 1, False, 1, IN_L2, (64, 192))
        yield _bulk_store(f"bulk_store_read_latency_{nbytes}", nbytes, 1, True, 1, IN_L2, (64, 192))


# ---------------------------------------------------------------------------------------------------------------------
# Barriers and fences.


def _repeated(name: str, instructions: str, repeats: int, threads: int, unit: str, cluster: int = 1) -> Probe:
    return Probe(
        name, _kernel(name, "", instructions * repeats), unit, repeats, (32, 96), threads, cluster, cluster=cluster
    )


def _barrier_probes() -> Iterable[Probe]:
    for warps in (1, 2, 4, 8, 16, 32):
        yield _repeated(f"bar_sync_{warps}", "bar.sync 0;", 8, 32 * warps, "barriers")
    yield _repeated("bar_warp_sync", "bar.warp.sync -1;", 8, 32, "barriers")
    yield _repeated("fence_proxy_async", "fence.proxy.async.shared::cta;", 8, 128, "fences")
    yield _repeated("membar_cta", "membar.cta;", 8, 128, "fences")
    yield _repeated("membar_gl", "membar.gl;", 4, 128, "fences")
    for cluster in (2, 4):
        pair = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        yield _repeated(f"barrier_cluster_{cluster}", pair, 4, 128, "barriers", cluster)
    init = "@%leader mbarrier.init.shared::cta.b64 [%smem], 1; @%leader mbarrier.init.shared::cta.b64 [%smem+8], 1;"
    init += "mov.u32 %parity, 0;"
    flip = "xor.b32 %parity, %parity, 1;"
    alone = "mbarrier.arrive.shared::cta.b64 _, [%smem];" + _wait("%smem", "%parity", "A") + flip
    yield _round_trips("mbarrier_alone", init, alone, 1, "%leader")
    # The first thread of each of two warps: one arrives where the other waits, in turn.
    setup = f"""
    {init} and.b32 %r0, %lane, 31; setp.eq.u32 %p0, %r0, 0; add.u32 %r1, %smem, 8;
    selp.b32 %r2, %smem, %r1, %leader; selp.b32 %r3, %r1, %smem, %leader;
    """
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%r2];"
    first, second = arrive + _wait("%r3", "%parity", "A"), _wait("%r3", "%parity", "B") + arrive
    body = f"@!%leader bra SECOND; {first} bra NEXT; SECOND: {second} NEXT: {flip}"
    yield _round_trips("mbarrier_ping_pong", setup, body, 64, "%p0")

    yield from _ready_probes(init)
    for links in (4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96):
        # The first side takes its time before it arrives: how soon does the other know?
        wait_first, wait_second = _wait("%r3", "%parity", "A"), _wait("%r3", "%parity", "B")
        first = (
            "mad.lo.u32 %r10, %r10, %r10, %zero;" * links + "add.u32 %r11, %r2, %r10;" + arrive.replace("%r2", "%r11")
        )
        body = f"@!%leader bra SECOND; {first} {wait_first} bra NEXT; SECOND: {wait_second} {arrive} NEXT: {flip}"
        name = f"mbarrier_late_{links}"
        yield _round_trips(name, setup + "mov.u32 %r10, %zero;", body, 64, "%p0")


def _ready_probes(init: str) -> Iterable[Probe]:
    """What an mbarrier costs that nobody waits for."""
    # The phase before the first one counts as complete.
    ready = _wait("%smem", "1", "{k}")
    body = "".join(ready.replace("{k}", f"R{k}") for k in range(8))
    yield _round_trips("mbarrier_try_ready", init, body, 1, "%leader", 8)
    many = init.replace("[%smem], 1;", "[%smem], 1000000;")
    yield _round_trips("mbarrier_arrive", many, "mbarrier.arrive.shared::cta.b64 _, [%smem];" * 8, 1, "%leader", 8)
    expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem], 0;" * 8
    yield _round_trips("mbarrier_arrive_expect", many, expect, 1, "%leader", 8)
    one = "mbarrier.arrive.shared::cta.b64 _, [%smem];" * 4
    yield Probe(
        "mbarrier_arrive_warps", _kernel("mbarrier_arrive_warps", many, one), "arrivals of a warp", 64, (8, 24), 512,
        shared_bytes=1024,
    )  # fmt: skip


def _round_trips(name: str, setup: str, body: str, threads: int, only: str, each: int = 1) -> Probe:
    text = _kernel(name, setup, body, only=only)
    return Probe(
        name, text, "round trips" if each == 1 else "instructions", each, (64, 192), threads, shared_bytes=1024
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tensor cores.


def _mma(name: str, chains: int, threads: int) -> Probe:
    setup = "".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(4 * chains))
    setup += "".join(f"mov.u32 %r{i}, %zero;" for i in range(6))
    body = "".join(
        f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{d}}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{{d}}};"
        for _ in range(2)
        for d in (", ".join(f"%f{4 * c + i}" for i in range(4)) for c in range(chains))
    )
    after = "".join(f"@%never st.global.f32 [%data], %f{i};" for i in range(4 * chains))
    return Probe(
        name,
        _kernel(name, setup, body, after=after),
        "instructions of a warp",
        2 * chains * threads // 32,
        (32, 96),
        threads,
    )


def _wgmma(n: int, steps: int, threads: int, registers: bool = False) -> Probe:
    """An iteration is a group of `steps` instructions m64nNk16, and the wait for it."""
    name = f"wgmma_n{n}_{steps}_{threads // 128}{'_registers' if registers else ''}"
    accumulators = ", ".join(f"%f{i}" for i in range(n // 2))
    setup = "".join(f"mov.f32 %f{i}, 0f00000000;" for i in range(n // 2))
    # K-major without swizzle: rows of eight in 128 bytes, 128 bytes apart, the two halves of K 16 KB apart.
    setup += f"""
    {"".join(f"mov.u32 %r{i}, %zero;" for i in range(4))}
    add.u32 %r10, %smem, 0; shr.u32 %r10, %r10, 4; cvt.u64.u32 %rd10, %r10;
    or.b64 %rd10, %rd10, {(16384 >> 4) << 16 | (128 >> 4) << 32}; add.u64 %rd11, %rd10, {32768 >> 4};
    setp.eq.u32 %p0, %zero, 0;
    """
    a = "{%r0, %r1, %r2, %r3}" if registers else "%rd10"
    flags = "1, 1, 0" if registers else "1, 1, 0, 0"
    step = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{accumulators}}}, {a}, %rd11, %p0, {flags};"
    body = f"wgmma.fence.sync.aligned; {step * steps} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    after = "".join(f"@%never st.global.f32 [%data], %f{i};" for i in range(n // 2))
    return Probe(
        name,
        _kernel(name, setup, body, after=after),
        "instructions of a warpgroup",
        steps * threads // 128,
        (16, 48),
        threads,
        shared_bytes=96 * 1024,
    )


def _tensor_core_probes() -> Iterable[Probe]:
    yield _mma("mma_m16n8k16_latency", 1, 32)
    for warps in (1, 4, 8, 16):
        yield _mma(f"mma_m16n8k16_rate_{warps}", 4, 32 * warps)
    for n in (8, 64, 128, 256):
        yield _wgmma(n, 1, 128)
        yield _wgmma(n, 16, 128)
    yield _wgmma(128, 16, 256)
    yield _wgmma(256, 16, 256)
    yield _wgmma(128, 16, 128, registers=True)


# ---------------------------------------------------------------------------------------------------------------------
# The clock, and blocks that come and go.


def _clock() -> Probe:
    """A loop of arithmetic, of which both clocks are read: the result is nanoseconds << 32 | cycles."""
    setup = "mov.u32 %r0, %lane; mov.u64 %rd0, %globaltimer;"
    finish = """
    mov.u64 %rd1, %globaltimer; sub.u64 %rd1, %rd1, %rd0; shl.b64 %rd1, %rd1, 32; sub.u64 %begin, %begin, %rd1;
    """
    body = "mad.lo.s32 %r0, %r0, %lane, %zero;" * 16
    return Probe(
        "clock",
        _kernel("clock", setup, body, finish, "@%never st.global.u32 [%data], %r0;"),
        "clocks",
        1,
        (20000, 60000),
    )


def _probes() -> Iterable[Probe]:
    yield _clock()
    yield from _arithmetic_probes()
    yield from _shared_probes()
    yield from _global_probes()
    yield from _copy_probes()
    yield from _barrier_probes()
    yield from _tensor_core_probes()


PROBES: dict[str, Probe] = {probe.name: probe for probe in _probes()}
# A kernel that does nothing, for the time of a launch; and one whose blocks take so long, for what comes between two.
EMPTY = f"{HEADER}.visible .entry empty()\n{{ ret; }}\n"
SPIN_CYCLES = 4000
SPIN = f"""{HEADER}{MODULE_VARIABLES}.visible .entry spin()
{{
    .reg .b64 %rd<3>; .reg .pred %p;
    mov.u64 %rd0, %clock64;
AGAIN:
    mov.u64 %rd1, %clock64; sub.u64 %rd1, %rd1, %rd0; setp.lt.u64 %p, %rd1, {SPIN_CYCLES}; @%p bra AGAIN;
    ret;
}}
"""


def module(probes: Iterable[Probe] = ()) -> str:
    """One PTX module with the kernels of `probes`, or all."""
    chosen = list(probes) or list(PROBES.values())
    return HEADER + MODULE_VARIABLES + "\n".join(probe.text for probe in chosen)

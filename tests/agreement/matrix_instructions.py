"""The tensor cores' instructions as small PTX kernels: a block multiplies, or moves, one set of matrices.

Each kernel takes four addresses: `jobs` (what a block does: how often, and the matrix descriptors), `image` (the
initial bytes of a block's shared memory), `inputs` and `outputs` (32-bit words of each of its 128 threads). The same
text runs on a GPU and in the simulator. A module holds the kernels of many instructions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

THREADS = 128
# A's part of the shared buffer, then B's: together what a block may declare.
A_BYTES, B_BYTES = 12288, 32768
IMAGE_BYTES = A_BYTES + B_BYTES
# What stmatrix may write to, and what is read back of it: 16 bytes for each of 256 rows.
WRITTEN_BYTES = 4096
STEP_BYTES = 32  # of a job, for each of its steps, behind as many for their number
MOST_STEPS = 4

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
_HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"


@dataclass(frozen=True)
class Instruction:
    """One instruction with all that is fixed in its text.

    `family` is wgmma, mma, ldmatrix, stmatrix or movmatrix. Of a multiplication: its shape `m`, `n`, `k`; `result`, `a`
    and `b` its types; `registers` where wgmma takes A from them; `majors` (of A and B) 1 for MN-major; `signs`
    imm-scale-a and -b. `count` is how many matrices are moved, `trans` whether transposed.
    """

    family: str
    m: int = 0
    n: int = 0
    k: int = 0
    result: str = ""
    a: str = ""
    b: str = ""
    registers: bool = False
    majors: tuple[int, int] = (0, 0)
    signs: tuple[int, int] = (1, 1)
    saturate: bool = False
    count: int = 0
    trans: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether it is a multiplication."""
        return self.family in ("wgmma", "mma")

    @property
    def name(self) -> str:
        """A name for its kernel."""
        if not self.multiplies:
            return f"{self.family}_x{self.count}{'_trans' * self.trans}"
        parts = [self.family, f"m{self.m}n{self.n}k{self.k}", self.result, self.a, self.b]
        parts += ["rs"] * self.registers + [f"major{self.majors[0]}{self.majors[1]}"] * (self.majors != (0, 0))
        parts += ["negative_" + "".join("np"[sign > 0] for sign in self.signs)] * (self.signs != (1, 1))
        return "_".join(parts + ["sat"] * self.saturate)

    @property
    def d_count(self) -> int:
        """Registers of the accumulator in a thread."""
        lanes = THREADS if self.family == "wgmma" else 32
        return self.m * self.n // lanes // (2 if self.result == "f16" else 1)

    @property
    def a_count(self) -> int:
        """Registers of A in a thread."""
        if self.family == "wgmma":
            return 4 if self.registers else 0
        return self.m * self.k * BITS[self.a] // 1024

    @property
    def b_count(self) -> int:
        """Registers of B in a thread."""
        return 0 if self.family == "wgmma" else 8 * self.k * BITS[self.b] // 1024

    @property
    def inputs(self) -> int:
        """32-bit words that a thread reads: C, then of each step A and B; addresses and what is moved."""
        if self.multiplies:
            return self.d_count + MOST_STEPS * (self.a_count + self.b_count)
        return {"ldmatrix": 1, "stmatrix": 1 + self.count, "movmatrix": 1}[self.family]

    @property
    def outputs(self) -> int:
        """32-bit words that a thread writes; for stmatrix its part of the memory written."""
        if self.multiplies:
            return self.d_count
        return {"ldmatrix": self.count, "stmatrix": WRITTEN_BYTES // 4 // THREADS, "movmatrix": 1}[self.family]


def _names(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def _load(prefix: str, count: int, kind: str, address: str, offset: int = 0) -> list[str]:
    return [f"ld.global.{kind} %{prefix}{i}, [{address}+{offset + 4 * i}];" for i in range(count)]


_PARAMETERS = ", ".join(f".param .u64 {name}" for name in ("jobs", "image", "inputs", "outputs"))


def _start(instruction: Instruction) -> list[str]:
    """Registers, and the addresses of this block's and this thread's data: %job, %image, %in and %out."""
    place = [
        ".reg .b32 %thread, %block, %all, %tile, %word, %offset, %steps, %scale;",
        ".reg .b64 %job, %image, %in, %out, %wide;",
        ".reg .pred %more, %keep;",
        "mov.u32 %thread, %tid.x; mov.u32 %block, %ctaid.x;",
        f"mad.lo.u32 %all, %block, {THREADS}, %thread;",
        f"ld.param.u64 %job, [jobs]; mul.wide.u32 %wide, %block, {(MOST_STEPS + 1) * STEP_BYTES};",
        "add.u64 %job, %job, %wide; ld.global.u32 %steps, [%job];",
        f"ld.param.u64 %image, [image]; mul.wide.u32 %wide, %block, {IMAGE_BYTES}; add.u64 %image, %image, %wide;",
        f"ld.param.u64 %in, [inputs]; mul.wide.u32 %wide, %all, {4 * instruction.inputs}; add.u64 %in, %in, %wide;",
        f"ld.param.u64 %out, [outputs]; mul.wide.u32 %wide, %all, {4 * instruction.outputs};",
        "add.u64 %out, %out, %wide;",
    ]
    if instruction.family in ("mma", "movmatrix"):
        return place
    return [
        f".shared .align 1024 .b8 tile[{IMAGE_BYTES}];",
        *place,
        "mov.u32 %tile, tile; shl.b32 %offset, %thread, 2;",
        "FILL: cvt.u64.u32 %wide, %offset; add.u64 %wide, %image, %wide; ld.global.u32 %word, [%wide];",
        "add.u32 %all, %tile, %offset; st.shared.u32 [%all], %word;",
        f"add.u32 %offset, %offset, {4 * THREADS}; setp.lt.u32 %more, %offset, {IMAGE_BYTES}; @%more bra FILL;",
        "fence.proxy.async.shared::cta; bar.sync 0;",
    ]


def _descriptor(name: str, offset: int) -> list[str]:
    """Load a descriptor whose start is relative to the tile, and make it absolute within its 14 bits."""
    return [
        f"ld.global.u64 %{name}, [%job+{offset}]; and.b64 %low, %{name}, 0x3FFF; sub.u64 %{name}, %{name}, %low;",
        f"add.u64 %low, %low, %base; and.b64 %low, %low, 0x3FFF; or.b64 %{name}, %{name}, %low;",
    ]


def _wgmma(instruction: Instruction) -> list[str]:
    i, count = instruction, instruction.d_count
    kind = "f32" if i.result == "f32" else "b32"
    operands = [_names("d", count), _names("a", 4) if i.registers else "%da", "%db", "%keep"]
    if i.result != "s32":
        operands += [str(sign) for sign in i.signs]
    if BITS[i.a] == 16:
        operands += [str(major) for major in (i.majors[1:] if i.registers else i.majors)]
    saturate = ".satfinite" * i.saturate
    shape = f"m64n{i.n}k{i.k}.{i.result}.{i.a}.{i.b}{saturate}"
    return [
        f".reg .{kind} %d<{count}>; .reg .b32 %a<4>; .reg .b64 %da, %db, %low, %base;",
        "cvt.u64.u32 %base, %tile; shr.u64 %base, %base, 4;",
        *_load("d", count, kind, "%in"),
        "STEP:",
        f"add.u64 %job, %job, {STEP_BYTES}; ld.global.u32 %scale, [%job+16]; setp.ne.u32 %keep, %scale, 0;",
        *([] if i.registers else _descriptor("da", 0)),
        *_descriptor("db", 8),
        *(_load("a", 4, "b32", "%in", 4 * count) if i.registers else []),
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.{shape} {', '.join(operands)};",
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        *(["add.u64 %in, %in, 16;"] * i.registers),
        "sub.u32 %steps, %steps, 1; setp.ne.u32 %more, %steps, 0; @%more bra STEP;",
        *(f"st.global.{kind} [%out+{4 * j}], %d{j};" for j in range(count)),
    ]


def _mma(instruction: Instruction) -> list[str]:
    i, count = instruction, instruction.d_count
    kind = "f32" if i.result == "f32" else "b32"
    saturate = ".satfinite" * i.saturate
    accumulator = _names("d", count)
    return [
        f".reg .{kind} %d<{count}>; .reg .b32 %a<{i.a_count}>, %b<{i.b_count}>;",
        *_load("d", count, kind, "%in"),
        "STEP:",
        *_load("a", i.a_count, "b32", "%in", 4 * count),
        *_load("b", i.b_count, "b32", "%in", 4 * (count + i.a_count)),
        f"mma.sync.aligned.m{i.m}n8k{i.k}.row.col{saturate}.{i.result}.{i.a}.{i.b}.{i.result} {accumulator}, "
        f"{_names('a', i.a_count)}, {_names('b', i.b_count)}, {accumulator};",
        f"add.u64 %in, %in, {4 * (i.a_count + i.b_count)};",
        "sub.u32 %steps, %steps, 1; setp.ne.u32 %more, %steps, 0; @%more bra STEP;",
        *(f"st.global.{kind} [%out+{4 * j}], %d{j};" for j in range(count)),
    ]


def _move(instruction: Instruction) -> list[str]:
    i = instruction
    if i.family == "movmatrix":
        return [
            ".reg .b32 %x; ld.global.b32 %x, [%in];",
            "movmatrix.sync.aligned.m8n8.trans.b16 %x, %x; st.global.b32 [%out], %x;",
        ]
    words, trans = _names("x", i.count), ".trans" * i.trans
    shape = f"sync.aligned.m8n8.x{i.count}{trans}.shared.b16"
    address = "ld.global.u32 %offset, [%in]; add.u32 %offset, %tile, %offset;"
    if i.family == "ldmatrix":
        return [
            f".reg .b32 %x<{i.count}>; {address}",
            f"ldmatrix.{shape} {words}, [%offset];",
            *(f"st.global.b32 [%out+{4 * j}], %x{j};" for j in range(i.count)),
        ]
    return [
        f".reg .b32 %x<{i.count}>; {address}",
        *_load("x", i.count, "b32", "%in", 4),
        f"stmatrix.{shape} [%offset], {words}; bar.sync 0;",
        f"mad.lo.u32 %offset, %thread, {4 * i.outputs}, %tile;",
        *(f"ld.shared.u32 %word, [%offset+{4 * j}]; st.global.u32 [%out+{4 * j}], %word;" for j in range(i.outputs)),
    ]


def _entry(instruction: Instruction) -> str:
    body = {"wgmma": _wgmma, "mma": _mma}.get(instruction.family, _move)(instruction)
    lines = "\n".join([*_start(instruction), *body, "ret;"])
    return f".visible .entry {instruction.name}({_PARAMETERS})\n.maxntid {THREADS}, 1, 1\n{{\n{lines}\n}}\n"


def module(instructions: Iterable[Instruction]) -> str:
    """The PTX of a module with a kernel for each instruction."""
    return _HEADER + "".join(_entry(instruction) for instruction in instructions)

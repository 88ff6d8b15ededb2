"""wgmma instruction by instruction: what its registers and operands may be used for, and when."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import sim
from numba_tma.sim.matrix_descriptor import MatrixDescriptor

SCHEDULES = sim.schedules(random=2)
# Core matrices of 8 rows of 16 bytes, those along K next to each other.
A, B = (MatrixDescriptor(start, 128, 256).encode() for start in (1024, 1024 + 2048))
D = "{%d0, %d1, %d2, %d3}"
E = D.replace("d", "e")
WIDE = "{%d0, %d1, %d2, %d3, %e0, %e1, %e2, %e3}"


def mma(accumulators=D, a="%da", n=8, scale="%p"):
    majors = "0, 0" if a == "%da" else "0"
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {accumulators}, {a}, %db, {scale}, 1, 1, {majors};"


FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"
REGISTERS = "{%a0, %a1, %a2, %a3}"


def store(*names):
    return "".join(f"st.global.f32 [%out+{4 * i}], %{name};" for i, name in enumerate(names))


KERNEL = """
.version 8.3
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p0)
{{
    .shared .align 1024 .b8 tile[4096];
    .reg .f32 %d<4>, %e<4>, %f<4>; .reg .b32 %a<4>, %x, %at, %v; .reg .b64 %out, %w, %da, %db; .reg .pred %p, %q;
    mov.u32 %x, %tid.x; ld.param.u64 %out, [p0]; mul.wide.u32 %w, %x, 32; add.u64 %out, %out, %w;
    mov.u32 %at, tile; mad.lo.u32 %at, %x, 32, %at; mov.u32 %v, 0;
    st.shared.v4.u32 [%at], {{%v, %v, %v, %v}}; st.shared.v4.u32 [%at+16], {{%v, %v, %v, %v}};
    fence.proxy.async.shared::cta; bar.sync 0;
    mov.b64 %da, {a}; mov.b64 %db, {b}; setp.eq.u32 %p, %x, %x;
    cvt.rn.f32.u32 %d0, %x; mov.f32 %d1, %d0; mov.f32 %d2, %d0; mov.f32 %d3, %d0;
    cvt.rn.f32.u32 %e0, %x; mov.f32 %e1, %e0; mov.f32 %e2, %e0; mov.f32 %e3, %e0;
    mov.b32 %a0, %x; mov.b32 %a1, %x; mov.b32 %a2, %x; mov.b32 %a3, %x;
    {body}
    ret;
}}
"""
REGISTERS_EARLY, NO_FENCE = {"wgmma-registers-before-wait"}, {"wgmma-fence-missing"}
OVERWRITTEN, RACE = {"wgmma-operands-overwritten"}, {"shared-memory-race"}
ADD = "add.f32 %d0, %d0, %d0;"

BODIES = {
    "in order": (FENCE + mma() + COMMIT + WAIT + store("d0", "d3"), set()),
    "several in a group": (FENCE + mma() + mma() + mma() + COMMIT + WAIT + store("d0"), set()),
    "several groups in sequence": (FENCE + (mma() + COMMIT) * 3 + WAIT + store("d0"), set()),
    "two accumulators": (
        FENCE
        + mma()
        + COMMIT
        + mma(E)
        + COMMIT
        + "wgmma.wait_group.sync.aligned 1;"
        + store("d0")
        + WAIT
        + store("e0"),
        set(),
    ),
    "the later of two accumulators": (
        FENCE + mma() + COMMIT + mma(E) + COMMIT + "wgmma.wait_group.sync.aligned 1;" + store("e0") + WAIT,
        REGISTERS_EARLY,
    ),
    "no wait": (FENCE + mma() + COMMIT + store("d0") + WAIT, REGISTERS_EARLY),
    "no commit": (FENCE + mma() + WAIT + store("d0") + COMMIT + WAIT, REGISTERS_EARLY),
    "written before the wait": (FENCE + mma() + COMMIT + "mov.f32 %d0, 0f00000000;" + WAIT, REGISTERS_EARLY),
    "renamed": (FENCE + mma() + COMMIT + "mov.f32 %f0, %d0;" + WAIT + store("f0", "d1"), set()),
    "copied": (FENCE + mma() + COMMIT + "mov.f32 %f0, %d0;" + WAIT + store("f0", "d0"), REGISTERS_EARLY),
    "renamed and used": (FENCE + mma() + COMMIT + "mov.f32 %f0, %d0;" + store("f0") + WAIT, REGISTERS_EARLY),
    "no fence": (mma() + COMMIT + WAIT + store("d0"), NO_FENCE),
    "no fence since they were computed": (FENCE + ADD + mma() + COMMIT + WAIT, NO_FENCE),
    "no fence since they were read": (FENCE + mma() + COMMIT + WAIT + store("d0") + mma() + COMMIT + WAIT, NO_FENCE),
    "fences between": (FENCE + (mma() + COMMIT + WAIT + ADD + FENCE) * 3 + store("d0"), set()),
    "a constant behind the fence": (
        FENCE + "mov.f32 %d0, 0f00000000; mov.f32 %d1, %d0;" + mma() + COMMIT + WAIT + store("d0"),
        set(),
    ),
    "another shape": (FENCE + mma() + mma(WIDE, n=16) + COMMIT + WAIT + store("d0"), NO_FENCE),
    "another shape behind a fence": (
        FENCE + mma() + COMMIT + WAIT + FENCE + mma(WIDE, n=16) + COMMIT + WAIT + store("d0"),
        set(),
    ),
    "A in registers": (FENCE + mma(a=REGISTERS) + COMMIT + WAIT + "add.u32 %a0, %a0, 1;" + store("d0"), set()),
    "A written before the wait": (FENCE + mma(a=REGISTERS) + COMMIT + "add.u32 %a0, %x, 1;" + WAIT, REGISTERS_EARLY),
    "A written behind the fence": (FENCE + "add.u32 %a0, %x, 1;" + mma(a=REGISTERS) + COMMIT + WAIT, NO_FENCE),
    "A renamed behind the fence": (FENCE + "mov.b32 %a0, %a1;" + mma(a=REGISTERS) + COMMIT + WAIT, set()),
    "operands overwritten": (FENCE + mma() + COMMIT + "st.shared.u32 [%at], %v;" + WAIT, OVERWRITTEN),
    "operands overwritten after the wait": (
        FENCE + mma() + COMMIT + WAIT + "st.shared.u32 [%at], %v;" + store("d0"),
        set(),
    ),
    "operands overwritten by who has waited for another group": (
        FENCE + mma() + COMMIT + mma() + COMMIT + "wgmma.wait_group.sync.aligned 1; st.shared.u32 [%at], %v;" + WAIT,
        OVERWRITTEN,
    ),
    # B's rows are at the end of the tile: warp 2 stores there.
    "B stored by another warp": (
        "setp.eq.u32 %q, %x, 64; @!%q bra ON; st.shared.u32 [%at], %x; fence.proxy.async.shared::cta; ON: "
        + FENCE
        + mma()
        + COMMIT
        + WAIT
        + store("d0"),
        RACE,
    ),
    "A stored by the warp that multiplies it": (
        "setp.lt.u32 %q, %x, 16; @!%q bra ON; st.shared.u32 [%at], %x; fence.proxy.async.shared::cta; ON: "
        + "bar.warp.sync 0xffffffff;"
        + FENCE
        + mma()
        + COMMIT
        + WAIT
        + store("d0"),
        set(),
    ),
    "stored, no proxy fence": (
        "st.shared.u32 [%at], %x; bar.sync 0;" + FENCE + mma() + COMMIT + WAIT + store("d0"),
        {"wgmma-operands-not-fenced"},
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_one_warpgroup(name):
    body, identifiers = BODIES[name]
    text = KERNEL.format(a=A, b=B, body=body)
    for schedule in SCHEDULES:
        memory = sim.GlobalMemory()
        out = memory.map(np.zeros((128, 8), np.float32))
        report = sim.launch(text, grid=2, block=128, params=[out.to_bytes(8, "little")], memory=memory, **schedule)
        found = {hazard.identifier for hazard in report.hazards} - {"blocks-write-same-bytes"}
        assert found == identifiers, f"{sim.named(schedule)}: {[str(hazard) for hazard in report.hazards]}"

"""Tensor maps in global memory that the kernel itself makes: which fences they take."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import sim
from numba_tma.sim import descriptor

SCHEDULES = sim.schedules(random=2)
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%map], 128;"
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
# Thread x copies word x of the map's image; threads beyond the map's 32 words have nothing to do.
STORES = "ld.global.u32 %v, [%image]; st.global.u32 [%place], %v;"
USE = """
    setp.ne.u32 %other, %x, 0; @%other bra DONE;
    mbarrier.init.shared.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%bar], 1024;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes
        [%tile], [%map, {%zero, %zero}], [%bar];
    WAIT: mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0; @!%done bra WAIT;
    DONE: ret;
"""
HEAD = """
.version 8.3
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{
    .shared .align 128 .b8 tile[1024]; .shared .align 128 .b8 draft[128]; .shared .align 8 .b64 bar;
    .reg .b64 %map, %image, %place, %flag, %w; .reg .b32 %tile, %bar, %draft, %at, %zero, %x, %v, %block;
    .reg .pred %done, %other, %first;
    ld.param.u64 %map, [p0]; ld.param.u64 %image, [p1]; ld.param.u64 %flag, [p2];
    mov.u32 %x, %tid.x; mov.u32 %block, %ctaid.x; mov.u32 %zero, 0;
    mul.wide.u32 %w, %x, 4; add.u64 %image, %image, %w; add.u64 %place, %map, %w;
    mov.u32 %tile, tile; mov.u32 %bar, bar; mov.u32 %draft, draft; shl.b32 %at, %x, 2; add.u32 %at, %at, %draft;
"""


def run(body, grid=1, **schedule):
    memory = sim.GlobalMemory()
    x = memory.map(np.ones((8, 32), np.float32))
    box = descriptor.Descriptor(
        dtype=descriptor.DataType.FLOAT32,
        address=x,
        sizes=(32, 8),
        strides=(128,),
        box=(32, 8),
        element_strides=(1, 1),
    )
    image = np.frombuffer(bytearray(descriptor.encode(box)), np.uint8)
    addresses = [memory.map(array) for array in (image.copy(), image, np.zeros(1, np.uint32))]
    params = [address.to_bytes(8, "little") for address in addresses]
    report = sim.launch(HEAD + body + "}\n", grid=grid, block=32, params=params, memory=memory, **schedule)
    return {hazard.identifier for hazard in report.hazards}


def found(body, grid=1):
    """What every schedule finds."""
    results = [run(body, grid, **schedule) for schedule in SCHEDULES]
    assert all(result == results[0] for result in results), results
    return results[0]


WRITTEN = {
    "no fence": (f"{STORES} bar.sync 0; {USE}", {"tensor-map-changed-without-fence"}),
    "acquired before it was written": (
        f"{ACQUIRE} bar.sync 0; {STORES} {RELEASE} bar.sync 0; {USE}",
        {"tensor-map-changed-without-fence"},
    ),
    "acquired, never released": (f"{STORES} bar.sync 0; {ACQUIRE} {USE}", {"tensor-map-changed-without-fence"}),
    "released before it was written": (
        f"{RELEASE} {STORES} bar.sync 0; {ACQUIRE} {USE}",
        {"tensor-map-changed-without-fence"},
    ),
    "released and acquired": (f"{STORES} {RELEASE} bar.sync 0; {ACQUIRE} bar.sync 0; {USE}", set()),
    "acquired by another thread of the block": (
        f"{STORES} {RELEASE} bar.sync 0; setp.ne.u32 %other, %x, 9; @%other bra ON; {ACQUIRE} ON: bar.sync 0; {USE}",
        set(),
    ),
    "copied by a warp": (
        f"ld.global.u32 %v, [%image]; st.shared.u32 [%at], %v; bar.warp.sync 0xffffffff;"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%map], [%draft], 128;"
        f"bar.sync 0; {ACQUIRE} {USE}",
        set(),
    ),
    "copied by a warp, not acquired": (
        f"ld.global.u32 %v, [%image]; st.shared.u32 [%at], %v; bar.warp.sync 0xffffffff;"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%map], [%draft], 128;"
        f"bar.sync 0; {USE}",
        {"tensor-map-changed-without-fence"},
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_map_that_the_block_writes(name):
    body, identifiers = WRITTEN[name]
    assert found(body) == identifiers


# Block 0 makes the map, block 1 uses it once a flag says so
SET = "setp.ne.u32 %other, %x, 0; @%other bra NEXT; st.release.gpu.global.u32 [%flag], 1; NEXT: ret;"
SEE = """
    ld.acquire.gpu.global.u32 %v, [%flag]; setp.eq.u32 %first, %v, 0; @%first bra READER;
"""
BETWEEN_BLOCKS = {
    "released and acquired": (RELEASE, ACQUIRE, set()),
    "not acquired": (RELEASE, "", {"tensor-map-changed-without-fence"}),
    "not released": ("", ACQUIRE, {"tensor-map-changed-without-fence"}),
}


@pytest.mark.parametrize("name", BETWEEN_BLOCKS)
def test_a_map_that_another_block_writes(name):
    release, acquire, identifiers = BETWEEN_BLOCKS[name]
    body = f"""
        setp.ne.u32 %first, %block, 0; @%first bra READER;
        {STORES} {release} bar.sync 0; {SET}
        READER: {SEE} {acquire} {USE}
    """
    assert found(body, grid=2) == identifiers


def test_a_field_replaced_by_a_thread_nobody_waits_for():
    body = f"""
        ld.global.u32 %v, [%image]; st.shared.u32 [%at], %v;
        setp.ne.u32 %other, %x, 5; @%other bra ON;
        tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%draft], 1, 4; ON: {ACQUIRE} ret;
    """
    assert "shared-memory-race" in found(body)

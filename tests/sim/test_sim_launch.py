"""Launching: which kernel, what comes back, sizes, interruption."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32
from simulate import HEADER, numba_ptx, pack, run_ptx

from numba_tma import sim
from numba_tma.sim.launch import parsed
from numba_tma.sim.observer import Observer

TWO_KERNELS = HEADER + ".visible .entry first() { ret; }\n.visible .entry second() { trap; }\n"


def test_which_kernel():
    options = {"grid": 1, "block": 1, "params": [], "memory": sim.GlobalMemory()}
    sim.launch(TWO_KERNELS, "first", **options)
    with pytest.raises(sim.Trap):
        sim.launch(TWO_KERNELS, "second", **options)
    with pytest.raises(sim.LaunchError, match="2 kernels .first, second.; name one"):
        sim.launch(TWO_KERNELS, **options)
    with pytest.raises(sim.PtxSyntaxError):
        sim.launch("no PTX", **options)


def test_equal_texts_are_parsed_once():
    assert parsed(TWO_KERNELS) is parsed(str(TWO_KERNELS))
    module = sim.parse(TWO_KERNELS)
    report = sim.launch(module, "first", grid=(2, 3), block=(4, 5), params=[], memory=sim.GlobalMemory())
    assert (report.instructions, report.lane_instructions, report.steps) == (6, 120, 1)


def test_instructions_are_counted_by_warp_and_by_lane():
    body = """
        .reg .b32 %r<3>; .reg .pred %p;
        mov.u32 %r0, %tid.x;
        setp.lt.u32 %p, %r0, 40;
        @!%p bra END;
        add.u32 %r1, %r0, 1;
        add.u32 %r1, %r1, 1;
        END: ret;
    """
    report = run_ptx(body, 3, 96)
    # Three warps of each block run three instructions and the end, two of them also the two in between.
    assert report.instructions == 3 * (3 * 4 + 2 * 2)
    assert report.lane_instructions == 3 * (96 * 4 + 40 * 2)


def test_much_shared_memory_and_many_blocks(rng):
    def far_apart(a, out):
        buffer = cuda.shared.array(0, float32)
        t = cuda.threadIdx.x
        buffer[t * 1700] = a[cuda.blockIdx.x]
        cuda.syncthreads()
        out[cuda.blockIdx.x, t] = buffer[(31 - t) * 1700] + t

    blocks = 3000
    a = rng.standard_normal(blocks, dtype=np.float32)
    out = np.zeros((blocks, 32), np.float32)
    memory = sim.GlobalMemory()
    ptx = numba_ptx(far_apart, float32[:], float32[:, :])
    params = pack(memory, a, out)
    sim.launch(ptx, grid=blocks, block=32, shared_bytes=227 * 1024, params=params, memory=memory)
    np.testing.assert_array_equal(out, a[:, None] + np.arange(32, dtype=np.float32))


def test_an_interruption_passes_and_leaves_memory_as_it_was():
    class Interrupt(Observer):
        def access(self, *arguments):
            raise KeyboardInterrupt

    declarations = ".global .align 4 .u32 word;"
    body = "ld.param.u64 %rd0, [p0]; st.global.u32 [word], 1; ret;"
    a = np.zeros(1, np.uint32)
    memory = sim.GlobalMemory()
    text = f"{HEADER}{declarations}\n.entry k(.param .u64 p0) {{ .reg .b64 %rd<1>; {body} }}"
    address = memory.map(a)
    params = [np.uint64(address).tobytes()]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sim.launch(text, grid=1, block=1, params=params, memory=memory, observer=Interrupt())
    sim.launch(text, grid=1, block=1, params=params, memory=memory)
    assert memory.find(address).owner is a
    assert [segment.name for segment in memory._segments] == ["array 0"]


def test_extents():
    with pytest.raises(sim.LaunchError, match="one to three numbers"):
        run_ptx("ret;", (1, 1, 1, 1), 1)
    with pytest.raises(sim.LaunchError, match="at least 1"):
        run_ptx("ret;", (1, 0), 1)
    with pytest.raises(sim.LaunchError, match="17 blocks; at most 16"):
        run_ptx("ret;", 17, 1, cluster=17)

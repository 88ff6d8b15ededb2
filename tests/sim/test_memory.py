"""Global memory: mapping NumPy buffers, finding what an address belongs to. Then accesses of kernels, good and bad."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int32
from simulate import run, run_ptx

from numba_tma import sim
from numba_tma.sim.memory import SHARED_BASE


def test_a_mapped_array_is_the_kernels_memory():
    memory = sim.GlobalMemory()
    a = np.arange(100, dtype=np.int32)
    address = memory.map(a, "a")
    assert address % 256 == 0
    view = memory.global_view(address + 40, 8)
    assert view.view(np.int32).tolist() == [10, 11]
    view.view(np.int32)[:] = -1
    assert a[10] == a[11] == -1


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[::2, ::-3], np.s_[1:4, 5:9], np.s_[:, ::-1]])
def test_strided_arrays(index):
    memory = sim.GlobalMemory()
    a = np.arange(60, dtype=np.int16).reshape(6, 10)[index]
    address = memory.map(a)
    for place in np.ndindex(a.shape):
        at = address + sum(i * s for i, s in zip(place, a.strides, strict=True))
        assert memory.global_view(at, 2).view(np.int16)[0] == a[place]


def test_gaps_between_arrays():
    memory = sim.GlobalMemory()
    first, second = memory.map(np.zeros(1000, np.uint8), "first"), memory.map(np.zeros(8, np.uint8), "second")
    with pytest.raises(sim.OutOfBounds, match="1 bytes past first"):
        memory.global_view(first + 999, 2)
    with pytest.raises(sim.OutOfBounds, match="0 bytes past the end of first"):
        memory.global_view(first + 1000, 1)
    with pytest.raises(sim.OutOfBounds, match="6 bytes before second"):
        memory.global_view(second - 6, 1)
    memory.unmap(first)
    with pytest.raises(sim.OutOfBounds, match="before second"):
        memory.global_view(first, 1)


def test_gather_reads_across_segments():
    memory = sim.GlobalMemory()
    a, b = np.arange(16, dtype=np.uint8), np.arange(100, 116, dtype=np.uint8)
    addresses = np.array([memory.map(a) + 3, memory.map(b) + 4], np.uint64)
    assert memory.gather(addresses, 2).tolist() == [[3, 4], [104, 105]]


def test_module_variables():
    declarations = """
        .global .align 4 .u32 counter = 40;
        .const .align 4 .u32 table[4] = {1, 20, 300, 4000};
        .global .align 8 .u64 pointer = generic(counter);
    """
    body = """
        .reg .b32 %r<4>; .reg .b64 %rd<4>;
        ld.const.u32 %r1, [table+8];
        atom.global.add.u32 %r2, [counter], 2;
        ld.global.u64 %rd2, [pointer];
        ld.u32 %r3, [%rd2];
        ld.param.u64 %rd1, [p0];
        st.global.u32 [%rd1], %r1;
        st.global.u32 [%rd1+4], %r3;
        ret;
    """
    out = np.zeros(2, np.uint32)
    run_ptx(body, 1, 1, out, declarations=declarations)
    assert out.tolist() == [300, 42]


def test_sub_word_and_vector_accesses():
    body = """
        .reg .b16 %h<4>; .reg .b32 %r<9>; .reg .b64 %rd<3>; .reg .f32 %f<5>;
        .shared .align 16 .b8 buffer[16];
        ld.param.u64 %rd1, [p0];
        ld.param.u64 %rd2, [p1];
        ld.global.s8 %r1, [%rd1];
        ld.global.u8 %r2, [%rd1];
        ld.global.s16 %r3, [%rd1+2];
        ld.global.v4.u32 {%r4, %r5, _, %r6}, [%rd1];
        st.shared.v2.b32 [buffer+8], {%r1, %r2};
        ld.shared.v2.b32 {%r7, %r8}, [buffer+8];
        st.global.v4.u32 [%rd2], {%r7, %r8, %r3, %r4};
        st.global.u8 [%rd2+16], %r5;
        st.global.u16 [%rd2+18], %r6;
        ret;
    """
    source = np.arange(200, 216, dtype=np.uint8)
    out = np.zeros(20, np.uint8)
    run_ptx(body, 1, 1, source, out)
    words = source.view(np.uint32)
    assert out[:16].view(np.int32).tolist() == [200 - 256, 200, int(source.view(np.int16)[1]), words.view(np.int32)[0]]
    assert out[16] == words[1] & 0xFF
    assert out[18:20].view(np.uint16)[0] == words[3] & 0xFFFF


def test_generic_addresses_reach_every_memory():
    body = """
        .local .align 8 .b8 mine[8];
        .shared .align 8 .b8 ours[8];
        .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;
        mov.u32 %r1, %tid.x;
        mov.u64 %rd1, mine;
        cvta.local.u64 %rd2, %rd1;
        st.local.u32 [%rd1], %r1;
        mov.u64 %rd3, ours;
        cvta.shared.u64 %rd4, %rd3;
        st.u32 [%rd4], 77;
        bar.sync 0;
        isspacep.shared %p1, %rd4;
        isspacep.shared %p2, %rd2;
        isspacep.local %p3, %rd2;
        ld.param.u64 %rd5, [p0];
        isspacep.global %p4, %rd5;
        setp.eq.u32 %p5, %r1, 0;
        selp.u64 %rd6, %rd2, %rd4, %p5;    // lane 0 reads local, the others shared memory
        ld.u32 %r2, [%rd6];
        cvta.to.shared.u64 %rd7, %rd4;
        setp.eq.u64 %p6, %rd7, %rd3;
        selp.u32 %r3, 1, 0, %p1;
        selp.u32 %r4, 2, 0, %p2;
        selp.u32 %r5, 4, 0, %p3;
        selp.u32 %r6, 8, 0, %p4;
        selp.u32 %r7, 16, 0, %p6;
        add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r5; add.u32 %r3, %r3, %r6; add.u32 %r3, %r3, %r7;
        mul.wide.u32 %rd8, %r1, 8;
        add.u64 %rd8, %rd8, %rd5;
        st.global.v2.u32 [%rd8], {%r2, %r3};
        ret;
    """
    out = np.zeros((40, 2), np.uint32)
    run_ptx(body, 1, 40, out)
    assert out[:, 0].tolist() == [0] + [77] * 39
    assert (out[:, 1] == 1 + 4 + 8 + 16).all()


def test_shared_memory_starts_as_poison():
    body = """
        .shared .align 4 .b8 buffer[4];
        .reg .f32 %f<2>; .reg .b64 %rd<2>;
        ld.shared.f32 %f1, [buffer];
        ld.param.u64 %rd1, [p0];
        st.global.f32 [%rd1], %f1;
        ret;
    """
    out = np.zeros(1, np.float32)
    run_ptx(body, 1, 1, out)
    assert np.isnan(out[0])


def test_out_of_bounds_names_array_thread_and_line():
    def overrun(a):
        i = cuda.grid(1)
        a[i + 1] = 1.0

    a = np.zeros(64, np.float32)
    with pytest.raises(sim.OutOfBounds) as caught:
        run(overrun, (float32[:],), 2, 32, a)
    text = str(caught.value)
    assert "0 bytes past the end of array 0" in text
    assert "block 1, thread 31" in text
    assert f"{__file__}:{overrun.__code__.co_firstlineno + 2}" in text
    assert "st" in text


def test_shared_out_of_bounds():
    def overrun(out):
        buffer = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        buffer[i + 5] = i
        out[i] = buffer[i]

    with pytest.raises(sim.OutOfBounds, match=r"outside \[0x400, 0x480\).*128 bytes.*thread 27.*4 other lanes"):
        run(overrun, (int32[:],), 1, 32, np.zeros(32, np.int32))


def test_misaligned_access():
    body = """
        .reg .b32 %r<2>; .reg .b64 %rd<2>;
        ld.param.u64 %rd1, [p0];
        ld.global.u32 %r1, [%rd1+2];
        ret;
    """
    with pytest.raises(sim.Misaligned, match="not a multiple of 4 bytes"):
        run_ptx(body, 1, 1, np.zeros(4, np.uint32))


def test_read_only_arrays():
    def write(a):
        a[0] = 1

    a = np.zeros(4, np.int32)
    a.flags.writeable = False
    with pytest.raises(sim.OutOfBounds, match="read-only"):
        run(write, (int32[:],), 1, 1, a)


def test_an_unknown_instruction_is_an_error_only_when_reached():
    body = """
        .reg .pred %p; .reg .b32 %r<2>; .reg .b64 %rd<2>;
        ld.param.u32 %r0, [p0];
        setp.eq.u32 %p, %r0, 0;
        @%p bra DONE;
        frobnicate.u32 %r1, %r0;
        DONE: ret;
    """
    run_ptx(body, 1, 1, np.uint32(0))
    with pytest.raises(sim.UnknownInstruction, match=r"frobnicate.u32 %r1, %r0; \(PTX line"):
        run_ptx(body, 1, 1, np.uint32(1))


def test_launches_that_cannot_begin():
    body = "ret;"
    with pytest.raises(sim.LaunchError, match="1025 threads"):
        run_ptx(body, 1, 1025)
    with pytest.raises(sim.LaunchError, match="shared memory"):
        run_ptx(body, 1, 1, shared_bytes=228 * 1024)
    with pytest.raises(sim.LaunchError, match="not a multiple of cluster"):
        run_ptx(body, 3, 1, cluster=2)
    memory = sim.GlobalMemory()
    text = ".version 8.0\n.target sm_90\n.address_size 64\n.entry k(.param .u64 x) { ret; }"
    with pytest.raises(sim.LaunchError, match="1 parameters, 0 are given"):
        sim.launch(text, grid=1, block=1, params=[], memory=memory)
    with pytest.raises(sim.LaunchError, match="8 bytes, not 4"):
        sim.launch(text, grid=1, block=1, params=[bytes(4)], memory=memory)
    with pytest.raises(sim.LaunchError, match="no kernel nothing"):
        sim.launch(text, "nothing", grid=1, block=1, params=[], memory=memory)


def test_dynamic_shared_memory_follows_static():
    declarations = ".extern .shared .align 1024 .b8 dynamic[];\n.shared .align 4 .b8 fixed[12];"
    body = """
        .reg .b32 %r<4>; .reg .b64 %rd<2>;
        mov.u32 %r1, fixed;
        mov.u32 %r2, dynamic;
        mov.u32 %r3, %dynamic_smem_size;
        st.shared.u32 [dynamic+96], %r1;
        ld.param.u64 %rd1, [p0];
        st.global.v2.u32 [%rd1], {%r1, %r2};
        st.global.u32 [%rd1+8], %r3;
        ret;
    """
    out = np.zeros(3, np.uint32)
    run_ptx(body, 1, 1, out, declarations=declarations, shared_bytes=100)
    assert out.tolist() == [SHARED_BASE, 2048, 100]

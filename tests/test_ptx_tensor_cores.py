"""Tensor-core instructions in Numba kernels: numbers in the simulator, and that accumulators stay in registers."""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda import types

from numba_tma import ptx, sim
from numba_tma.compile import disassemble, link

FUNCTIONS = ptx.functions()


def to_ptx(function, *argument_types, **options):
    return cuda.compile(function, types.void(*argument_types), cc=(9, 0, "a"), device=False, abi="numba", **options)[0]


def simulate(text, block, *arguments, **options):
    """Run in one block; arrays in Numba's convention, scalars as they are."""
    memory, params = sim.GlobalMemory(), []
    for argument in arguments:
        words = [0, 0, argument.size, argument.itemsize, memory.map(argument), *argument.shape, *argument.strides]
        params += [struct.pack("<q", word) for word in words]
    return sim.launch(text, grid=1, block=block, params=params, memory=memory, **options)


U16, F32, U32, S32 = types.uint16[:, ::1], types.float32[:, ::1], types.uint32[:, ::1], types.int32[:, ::1]


def warp_product(a, b, out):
    """out = a b of one warp: a 16 x 16, b 8 x 16 (its transpose)."""
    tile = cuda.shared.array(16 * 16 + 8 * 16, types.uint16)
    lane = cuda.threadIdx.x
    for i in range(lane, 256, 32):
        tile[i] = a[i // 16, i % 16]
    for i in range(lane, 128, 32):
        tile[256 + i] = b[i // 16, i % 16]
    cuda.syncwarp()
    base = ptx.shared_address(tile)
    row = types.uint32(lane % 16 * 32 + lane // 16 * 16)
    a0, a1, a2, a3 = ptx.ldmatrix_sync_x4(base + row)
    b0, b1 = ptx.ldmatrix_sync_x2(base + types.uint32(512 + lane % 8 * 32 + lane // 8 % 2 * 16))
    zero = types.float32(0)
    d0, d1, d2, d3 = ptx.mma_sync_m16n8k16_f32_bf16_bf16_f32(a0, a1, a2, a3, b0, b1, zero, zero, zero, zero)
    column = 2 * (lane % 4)
    out[lane // 4, column], out[lane // 4, column + 1] = d0, d1
    out[lane // 4 + 8, column], out[lane // 4 + 8, column + 1] = d2, d3


def test_a_warp_multiplies(rng):
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((16, 16), (8, 16)))
    out = np.zeros((16, 8), np.float32)
    text = to_ptx(warp_product, U16, U16, F32)
    simulate(text, 32, a.view(np.uint16), b.view(np.uint16), out)
    np.testing.assert_allclose(out, a.astype(float) @ b.astype(float).T, rtol=1e-5, atol=1e-6)
    sass = disassemble(link([("kernel", text)], "sm_90a")[0])
    assert "HMMA.16816.F32.BF16" in sass
    assert "LDSM.16.M88.4" in sass


# K-major rows of 128 bytes, swizzled: eight of them take 1024 bytes.
SWIZZLED = 64 << 32 | 1 << 62


def warpgroup_product(a, b, out, c):
    """out = c + a b: a 64 x 64, b 64 x 64 (its transpose), both float16 and swizzled into shared memory by hand."""
    tile = cuda.shared.array(0, types.uint16)
    thread = cuda.threadIdx.x
    for i in range(thread, 4096, 128):
        row, column = i // 64, i % 64
        place = row * 64 + ((column // 8) ^ (row % 8)) * 8 + column % 8
        tile[place] = a[row, column]
        tile[4096 + place] = b[row, column]
    acc = cuda.local.array(32, types.float32)
    row, column = thread // 32 * 16 + thread % 32 // 4, 2 * (thread % 4)
    for j in range(8):
        acc[4 * j], acc[4 * j + 1] = c[row, column + 8 * j], c[row, column + 8 * j + 1]
        acc[4 * j + 2], acc[4 * j + 3] = c[row + 8, column + 8 * j], c[row + 8, column + 8 * j + 1]
    ptx.fence_proxy_async_shared_cta()
    cuda.syncthreads()
    base = ptx.shared_address(tile)
    da = types.uint64((base & types.uint32(0x3FFFF)) >> types.uint32(4)) | types.uint64(SWIZZLED)
    db = da + types.uint64(8192 >> 4)
    step = types.uint64(2)
    ptx.wgmma_fence()
    ptx.wgmma_mma_async_m64n64k16_f32_f16_f16(acc, da, db, True, 0, 0)
    ptx.wgmma_mma_async_m64n64k16_f32_f16_f16(acc, da + step, db + step, True, 0, 0)
    ptx.wgmma_mma_async_m64n64k16_f32_f16_f16(acc, da + step + step, db + step + step, True, 0, 0)
    ptx.wgmma_mma_async_m64n64k16_f32_f16_f16(acc, da + step + step + step, db + step + step + step, True, 0, 0)
    ptx.wgmma_commit_group()
    ptx.wgmma_wait_group_m64n64_f32(acc, 0)
    for j in range(8):
        out[row, column + 8 * j], out[row, column + 8 * j + 1] = acc[4 * j], acc[4 * j + 1]
        out[row + 8, column + 8 * j], out[row + 8, column + 8 * j + 1] = acc[4 * j + 2], acc[4 * j + 3]


@pytest.mark.parametrize("policy", ["early", "late"])
def test_a_warpgroup_multiplies(rng, policy):
    a, b = (rng.standard_normal((64, 64)).astype(np.float16) for _ in range(2))
    c, out = rng.standard_normal((64, 64)).astype(np.float32), np.full((64, 64), np.nan, np.float32)
    text = to_ptx(warpgroup_product, U16, U16, F32, F32)
    report = simulate(text, 128, a.view(np.uint16), b.view(np.uint16), out, c, shared_bytes=16384, policy=policy)
    assert not report.hazards
    np.testing.assert_allclose(out, c + a.astype(float) @ b.astype(float).T, rtol=1e-5, atol=1e-5)


def test_the_accumulator_stays_in_registers():
    cubin, log = link([("kernel", to_ptx(warpgroup_product, U16, U16, F32, F32))], "sm_90a")
    sass = disassemble(cubin)
    assert sass.count("HGMMA.64x64x16.F32") == 4
    assert " STL" not in sass
    assert " LDL" not in sass
    # ptxas says so when it has to make the instructions wait for each other.
    assert "wgmma" not in log.lower(), log


def register_product(a, b, out):
    """out = a b of 8-bit integers: a 64 x 32 in registers, b 16 x 32 (its transpose), not swizzled."""
    tile = cuda.shared.array(0, types.uint32)
    thread = cuda.threadIdx.x
    # Core matrices of 8 rows of 16 bytes: the two along K first.
    row, word = thread // 8, thread % 8
    tile[row // 8 * 64 + word // 4 * 32 + row % 8 * 4 + word % 4] = b[row, word]
    acc = cuda.local.array(8, types.int32)
    ptx.fence_proxy_async_shared_cta()
    cuda.syncthreads()
    start = types.uint64(ptx.shared_address(tile) >> types.uint32(4))
    db = start | types.uint64(8 << 16) | types.uint64(16 << 32)
    top, part = thread // 32 * 16 + thread % 32 // 4, thread % 4
    # The fence is for A's registers too: they are loaded before it.
    a0, a1, a2, a3 = a[top, part], a[top + 8, part], a[top, part + 4], a[top + 8, part + 4]
    ptx.wgmma_fence()
    ptx.wgmma_mma_async_m64n16k32_s32_s8_s8_rs(acc, a0, a1, a2, a3, db, False)
    ptx.wgmma_commit_group()
    ptx.wgmma_wait_group_m64n16_s32(acc, 0)
    for j in range(2):
        out[top, 8 * j + 2 * part], out[top, 8 * j + 2 * part + 1] = acc[4 * j], acc[4 * j + 1]
        out[top + 8, 8 * j + 2 * part], out[top + 8, 8 * j + 2 * part + 1] = acc[4 * j + 2], acc[4 * j + 3]


def test_a_in_registers(rng):
    a, b = rng.integers(-128, 128, (64, 32)).astype(np.int8), rng.integers(-128, 128, (16, 32)).astype(np.int8)
    out = np.zeros((64, 16), np.int32)
    text = to_ptx(register_product, U32, U32, S32)
    report = simulate(text, 128, a.view(np.uint32), b.view(np.uint32), out, shared_bytes=512, policy="late")
    assert not report.hazards
    np.testing.assert_array_equal(out, a.astype(int) @ b.astype(int).T)
    sass = disassemble(link([("kernel", text)], "sm_90a")[0])
    assert "IGMMA.64x16x32.S8.S8" in sass
    assert " STL" not in sass


def test_accumulators_of_every_shape():
    for name, function in FUNCTIONS.items():
        if not name.startswith("wgmma") or "_m64n" not in name:
            continue
        n = int(name.split("_m64n")[1].split("k")[0].split("_")[0])
        operand = function.operands[0]
        assert (operand.name, operand.kind, operand.count) == ("d", "accumulator", n // 2), name
        assert operand.type == ("s32" if "_s32" in name else "f32")
        assert function.inline_only
    widths = {name for name in FUNCTIONS if name.startswith("wgmma_mma_async") and name.endswith("f32_bf16_bf16")}
    assert {f"wgmma_mma_async_m64n{n}k16_f32_bf16_bf16" for n in (8, 24, 128, 176, 256)} <= widths


def test_what_is_no_accumulator_is_refused():
    def doubles():
        ptx.wgmma_wait_group_m64n8_f32(cuda.local.array(4, types.float64), 0)

    def number():
        ptx.wgmma_wait_group_m64n8_f32(1.0, 0)

    def called():
        ptx.linked.wgmma_wait_group_m64n8_f32(cuda.local.array(4, types.float32), 0)

    for kernel in (doubles, number):
        with pytest.raises(TypingError, match=r"argument 1, 'd', must be a local array of 4 float32"):
            to_ptx(kernel)
    with pytest.raises(TypingError, match="works only inlined"):
        to_ptx(called)

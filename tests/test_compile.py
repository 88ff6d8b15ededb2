"""PTX, cubin, SASS and resource figures without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import float32, uint32

from numba_tma import Barriers, Shared, TensorMap, Tiles, kernel, ptx
from numba_tma.compile import CompileError, compile_kernel, disassemble, link

X = np.zeros((8, 64), np.float32)


@cuda.jit(device=True)
def doubled(x):
    return x * float32(2)


@kernel(threads=64)
def scale(x, y, factor):
    i = cuda.threadIdx.x
    y[i] = doubled(x[i]) * factor


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TMA_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_names_are_readable():
    compiled = scale.compile(X[0], X[0], np.float32(1))
    assert compiled.name == "scale" and ".visible .entry scale(" in compiled.ptx
    assert [p.name for p in compiled.parameters[4:7]] == ["x_data", "x_shape_0", "x_stride_0"]
    assert compiled.parameters[-1].name == "factor" and compiled.parameters[-1].size == 4
    assert "_ZN" not in compiled.ptx.split(".section")[0].replace("$L__info_string", "")


def test_device_functions_keep_their_lines():
    compiled = scale.compile(X[0], X[0], np.float32(1))
    line = doubled.py_func.__code__.co_firstlineno + 2
    assert f".loc\t1 {line} " in compiled.ptx and "inlined_at" in compiled.ptx


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_architectures(arch):
    compiled = scale.compile(X[0], X[0], np.float32(1), arch=arch)
    assert f".target {arch}" in compiled.ptx
    assert compiled.cubin[:4] == b"\x7fELF"
    assert "FMUL" in compiled.sass
    resources = compiled.resources
    assert 0 < resources.registers <= 64 and resources.spill_store_bytes == 0 and resources.local_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_resources_see_shared_and_local_memory(arch):
    @kernel(threads=32)
    def wasteful(out, n):
        tile = cuda.shared.array((64, 8), float32)
        own = cuda.local.array(100, float32)
        for i in range(100):
            own[i] = out[i]
        tile[cuda.threadIdx.x, 0] = own[n]
        cuda.syncthreads()
        out[0] = tile[n, 0]

    resources = wasteful.compile(X[0], np.int32(1), arch=arch).resources
    assert resources.shared_bytes == 64 * 8 * 4
    assert resources.stack_bytes >= 400
    assert resources.barriers == 1


def test_tensor_maps_are_grid_constant_parameters():
    smem = Shared(tile=Tiles(1, (8, 64), np.float32), full=Barriers(1))

    @kernel(threads=32, shared=smem)
    def load(n, x_map, out):
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, n, 0, smem.full[0])
        out[cuda.threadIdx.x] = smem.tile[0][0, cuda.threadIdx.x]

    compiled = load.compile(np.int32(0), TensorMap(X, smem.tile), X[0])
    assert ".param .align 64 .b8 x_map[128]" in compiled.ptx
    assert compiled.parameters[1].offset == 64  # 64-byte aligned behind the int32
    assert "UTMALDG.2D" in compiled.sass
    assert compiled.requirement.capability == 90


def test_cluster_is_in_the_ptx():
    @kernel(threads=32, cluster=2)
    def ranks(out):
        out[cuda.blockIdx.x] = ptx.cluster_ctarank()

    compiled = ranks.compile(np.zeros(2, np.uint32))
    assert ".reqnctapercluster 2, 1, 1" in compiled.ptx
    assert compiled.cubin


def test_setmaxnreg_survives():
    @kernel(threads=384)
    def registers(out):
        if cuda.threadIdx.x < 128:
            ptx.setmaxnreg_dec(40)
            out[0] = 1
        else:
            ptx.setmaxnreg_inc(232)
            out[1] = 2

    assert "USETMAXREG" in registers.compile(np.zeros(2, np.int32)).sass


def test_linked_functions_bring_their_modules():
    @kernel(threads=32)
    def lane(out):
        out[cuda.threadIdx.x] = ptx.linked.laneid()

    compiled = lane.compile(np.zeros(32, np.int32))
    assert [name for name, _ in compiled.modules] == ["special_registers.ptx"]
    assert "CALL" in compiled.sass or "SR_LANEID" in compiled.sass


def test_the_cache_serves_the_second_compile(own_cache, monkeypatch):
    first = kernel(scale.function, threads=64).compile(X[0], X[0], np.float32(1))
    cubin = first.cubin

    def refuse(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(cuda, "compile", refuse)
    monkeypatch.setattr("numba_tma.compile.link", refuse)
    again = kernel(scale.function, threads=64).compile(X[0], X[0], np.float32(1))
    assert again.ptx == first.ptx and again.parameters == first.parameters and again.cubin == cubin
    with pytest.raises(AssertionError, match="compiled again"):
        kernel(scale.function, threads=32).compile(X[0], X[0], np.float32(1))


def test_a_damaged_cache_file_is_made_anew(own_cache):
    first = kernel(scale.function, threads=64).compile(X[0], X[0], np.float32(1))
    assert list(own_cache.iterdir())
    for path in own_cache.iterdir():
        path.write_bytes(b"damaged")
    assert kernel(scale.function, threads=64).compile(X[0], X[0], np.float32(1)).ptx == first.ptx


def test_errors_quote_the_assembler():
    with pytest.raises(CompileError, match="broken.*ptxas|broken.*nvJitLink|broken for sm_90a"):
        link([("broken", ".version 8.0\n.target sm_90a\n.address_size 64\n.entry k() { nonsense; }\n")], "sm_90a")
    with pytest.raises(CompileError, match="nvdisasm"):
        disassemble(b"no cubin")


def test_numba_types_serve_as_examples():
    by_value = compile_kernel(scale.function, (float32[::1], float32[::1], uint32))
    assert by_value.parameters[-1].type == "u32"

"""PTX, cubin, SASS and resource figures without a GPU."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from numba import cuda
from numba.cuda.types import float32, uint32

from numba_tma import Barriers, Shared, TensorMap, Tiles, cache, kernel, ptx, use_backend
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


def test_sass_carries_python_lines_or_ptx_lines():
    compiled = scale.compile(X[0], X[0], np.float32(1))
    by_python, by_ptx = disassemble(compiled.cubin), disassemble(compiled.cubin, lines="ptx")

    def code(sass):
        return [line for line in sass.splitlines() if "//##" not in line]

    assert code(by_python) == code(by_ptx) and any("FMUL" in line for line in code(by_ptx))
    lines = compiled.ptx.splitlines()
    above = re.findall(r'File "\.nv_debug_ptx_txt[^"]*", line (\d+)\n[^\n]*\bFMUL\b', by_ptx)
    assert above and all(lines[int(number) - 1].strip().startswith("mul.f32") for number in above)
    assert "test_compile.py" in by_python and "test_compile.py" not in by_ptx


def test_errors_quote_the_assembler():
    with pytest.raises(CompileError, match="broken.*ptxas|broken.*nvJitLink|broken for sm_90a"):
        link([("broken", ".version 8.0\n.target sm_90a\n.address_size 64\n.entry k() { nonsense; }\n")], "sm_90a")
    with pytest.raises(CompileError, match="nvdisasm"):
        disassemble(b"no cubin")


def test_numba_types_serve_as_examples():
    by_value = compile_kernel(scale.function, (float32[::1], float32[::1], uint32))
    assert by_value.parameters[-1].type == "u32"


smem = Shared(tile=Tiles(1, (8, 64), np.float32), full=Barriers(1))


@kernel(threads=32, shared=smem)
def load(n, x_map, out):
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_init(smem.full[0], 1)
        ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
        ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, n, 0, smem.full[0])
    out[cuda.threadIdx.x] = smem.tile[0][0, cuda.threadIdx.x]


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120"])
def test_blackwell(arch):
    # NVVM writes another dialect for these: `.param .u64 .ptr .align 1`, `ld.param.b64`.
    plain = scale.compile(X[0], X[0], np.float32(1), arch=arch)
    assert [(p.name, p.type) for p in plain.parameters[4:6]] == [("x_data", "u64"), ("x_shape_0", "u64")]
    assert plain.cubin[:4] == b"\x7fELF" and "FMUL" in plain.sass
    tensor = load.compile(np.int32(0), TensorMap(X, smem.tile), X[0], arch=arch)
    assert ".param .align 64 .b8 x_map[128]" in tensor.ptx and "[x_map]" not in tensor.ptx
    assert f".target {arch}" in tensor.ptx and "UTMALDG.2D" in tensor.sass


def test_the_assembler_is_not_left_to_say_what_is_missing():
    older = load.compile(np.int32(0), TensorMap(X, smem.tile), X[0], arch="sm_80")
    with pytest.raises(
        CompileError, match=r"load for sm_80: mbarrier\.arrive\.expect_tx\S* \(PTX line \d+\) needs sm_90"
    ):
        _ = older.cubin
    with pytest.raises(CompileError, match="cannot compile for sm_130.*sm_90a"):
        link([("k", ".version 8.0\n.target sm_80\n.address_size 64\n.entry k() { ret; }\n")], "sm_130")


def simulate(function, *arguments):
    with use_backend("sim"):
        kernel(threads=1)(function)[1](*arguments)
    return kernel(threads=1)(function).compile(*arguments)


def test_parts_of_arguments_and_arguments_of_the_same_name():
    def parts(x, x_0, x_1, y):
        y[0] = x[0]
        y[1] = x[1]
        y[2] = x_0
        y[3] = x_1

    y = np.zeros(4, np.int64)
    compiled = simulate(parts, (10, 20), 30, 40, y)
    assert y.tolist() == [10, 20, 30, 40]
    names = [p.name for p in compiled.parameters]
    assert len(set(names)) == len(names) and names[2:4] == ["x_0", "x_1"]

    def words(x, x_size, x_data, x_shape_0):
        x[0] = x_size
        x[1] = x_data
        x[2] = x_shape_0
        x[3] = x.size

    simulate(words, y, 5, 6, 7)
    assert y.tolist() == [5, 6, 7, 4]


def test_names_that_ptx_cannot_have():
    def größer(α, größe, _, WARP_SZ):
        α[0] = größe + _ + WARP_SZ

    y = np.zeros(1, np.int64)
    compiled = simulate(größer, y, 1, 2, 3)
    assert y[0] == 6 and compiled.cubin and compiled.name == "groser"
    assert [p.name for p in compiled.parameters[4:5]] == ["alpha_data"]
    assert compiled.parameters[-3].name == "grose"
    assert len({p.name for p in compiled.parameters}) == len(compiled.parameters)

    lambdas = [
        lambda x: None,
        lambda x: None,
    ]
    assert simulate(lambdas[1], y).name == "lambda"
    assert all("lambda(" in simulate(function, y).ptx for function in lambdas)
    assert compile_kernel(lambdas[0], (float32[::1],)).cubin

    def vprintf(numba_tma_shared, out):
        print(numba_tma_shared)

    compiled = kernel(threads=1)(vprintf).compile(1, y)
    assert compiled.name != "vprintf" and compiled.cubin


def test_no_warning_where_there_is_no_source():
    names = {}
    exec("def typed_in(x):\n    x[0] = 1", names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel(threads=1)(names["typed_in"]).compile(X[0]).ptx


@pytest.mark.parametrize("foreign", [b"[]", b"{}", b"null", b"\xff", b'{"parameters": [1], "modules": []}'])
def test_a_whole_cache_file_of_another_kind_is_made_anew(own_cache, foreign):
    first = kernel(scale.function, threads=64).compile(X[0], X[0], np.float32(1))
    (kept,) = own_cache.glob("*.json")
    cache.write(kept.stem, ".json", foreign)
    assert kernel(scale.function, threads=64).compile(X[0], X[0], np.float32(1)).ptx == first.ptx


def test_variables_get_no_labels_that_nvvm_rejects():
    smem = Shared(tile=Tiles(1, (64, 64), np.float16), full=Barriers(1))

    @kernel(threads=64, shared=smem)
    def fifteenth_rows(tensor_map, out):
        lane = cuda.threadIdx.x
        if lane == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        for i in range(4):
            if lane == 0:
                ptx.mbarrier_arrive_expect_tx(smem.full[0], 8192)
                ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], tensor_map, 0, i * 64, smem.full[0])
            while not ptx.mbarrier_try_wait_parity(smem.full[0], i & 1):
                pass
            out[lane] += smem.tile[0][15, lane]
            ptx.fence_proxy_async()
            cuda.syncthreads()

    x, out = np.random.default_rng().random((256, 64)).astype(np.float16), np.zeros(64, np.float32)
    with use_backend("sim"):
        fifteenth_rows[1](TensorMap(x, smem.tile), out)
    np.testing.assert_allclose(out, x[15::64].astype(np.float64).sum(axis=0), rtol=1e-6)

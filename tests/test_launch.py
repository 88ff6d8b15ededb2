"""Launching: arguments, configurations, choice of backend. What needs a GPU is marked so."""

from __future__ import annotations

import enum
import subprocess
import sys
import threading
import types

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda.core.errors import TypingError as CudaTypingError

from numba_tma import (
    Barriers,
    Buffer,
    HazardWarning,
    LaunchError,
    Shared,
    TensorMap,
    Tiles,
    driver,
    kernel,
    ptx,
    use_backend,
)
from numba_tma.launch import gpu_refusal, recording

needs_no_gpu = pytest.mark.skipif(driver.device_count() > 0, reason="there is a GPU here")


@kernel(threads=64)
def axpy(a, x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] += a * x[i]


@kernel(threads=32)
def write_extents(out):
    if cuda.threadIdx.x == 0 and cuda.threadIdx.y == 0:
        block = (cuda.blockIdx.z * cuda.gridDim.y + cuda.blockIdx.y) * cuda.gridDim.x + cuda.blockIdx.x
        out[block] = cuda.blockDim.x * 1000 + cuda.blockDim.y


class FakeDeviceArray:
    """64 elements of device memory that nobody looks at."""

    def __init__(self, dtype):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (64,), "typestr": np.dtype(dtype).str, "data": (1 << 32, False), "strides": None
        }  # fmt: skip


def test_a_launch_in_the_simulator(rng, in_simulator):
    x, y = rng.standard_normal(100, np.float32), rng.standard_normal(100, np.float32)
    exact = y.astype(np.float64) + 2.5 * x.astype(np.float64)
    report = axpy[2](np.float32(2.5), x, y)
    np.testing.assert_allclose(y, exact, rtol=2**-24 * 1.01)  # a fused multiply-add, rounded once
    assert report.bytes["st_global"] == 400 and report.instructions > 0


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64, np.float16, np.float32, np.float64]
)
def test_element_types(dtype, rng, in_simulator):
    @kernel(threads=32)
    def copy(x, y):
        y[cuda.threadIdx.x] = x[cuda.threadIdx.x]

    x = rng.integers(0, 100, 32).astype(dtype)
    y = np.zeros_like(x)
    copy[1](x, y)
    np.testing.assert_array_equal(x, y)


def test_bfloat16_arrays(rng, in_simulator):
    @kernel(threads=32)
    def widen(x, y):
        y[cuda.threadIdx.x] = np.float32(x[cuda.threadIdx.x])

    x = rng.standard_normal(32).astype(ml_dtypes.bfloat16)
    y = np.zeros(32, np.float32)
    widen[1](x, y)
    np.testing.assert_array_equal(y, x.astype(np.float32))


@pytest.mark.parametrize("layout", ["transposed", "strided", "reversed", "offset"])
def test_views(layout, rng, in_simulator):
    @kernel(threads=32)
    def negate(x):
        for i in range(cuda.threadIdx.x, x.shape[0], 32):
            for j in range(x.shape[1]):
                x[i, j] = -x[i, j]

    base = rng.standard_normal((12, 20))
    before = base.copy()
    make = {
        "transposed": lambda a: a.T,
        "strided": lambda a: a[1::3, ::2],
        "reversed": lambda a: a[::-1, ::-1],
        "offset": lambda a: a[5:, 3:],
    }[layout]
    negate[1](make(base))
    make(before)[...] *= -1
    np.testing.assert_array_equal(base, before)


def test_arguments_that_share_memory_stay_shared(in_simulator):
    @kernel(threads=32)
    def shift(x, y):
        i = cuda.threadIdx.x
        value = x[i]
        cuda.syncthreads()
        y[i] = value

    base = np.arange(33)
    shift[1](base[:-1], base[1:])
    assert base.tolist() == [0, *range(32)]


def test_scalars_and_tuples(in_simulator):
    @kernel(threads=1)
    def scalars(out, i, f, flag, small, pair):
        out[0] = i
        out[1] = f
        out[2] = 1 if flag else 0
        out[3] = small
        out[4] = pair[0] + pair[1]

    out = np.zeros(5)
    scalars[1](out, -7, 2.5, True, np.uint8(200), (3, 0.5))
    assert out.tolist() == [-7, 2.5, 1, 200, 3.5]


def test_extents(in_simulator):
    out = np.zeros(24, np.int64)
    write_extents[(2, 3, 4), (8, 4)](out)
    assert (out == 8004).all()
    write_extents[24, 32](out)
    assert (out == 32001).all()


def test_equal_configurations_of_other_types_are_still_refused(in_simulator):
    @kernel(threads=32)
    def nothing(x):
        pass

    assert nothing[1] is nothing[1] is nothing[np.int64(1), None] is nothing[(1, 1), None, 0]
    assert nothing[2, 32] is nothing[(2,), (32, 1), 0]
    for configuration in (1.0, True, (1.0, None), ((1, True), 32), ((2.0,), None)):
        with pytest.raises(ValueError, match="expected one to three positive integers"):
            nothing[configuration]
    nothing[1, 32, 1 << 40]  # a pointer
    with pytest.raises(ValueError, match="no handle of a stream"):
        nothing[1, 32, 4095]


class Color(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2], ids=lambda d: d.__name__
)
def test_narrow_floating_point_scalars(dtype, in_simulator):
    @kernel(threads=32)
    def widen(out, x, pair):
        if cuda.threadIdx.x == 0:
            out[0] = np.float32(x)
            out[1] = np.float32(pair[0])
            out[2] = pair[1]

    out = np.zeros(3, np.float32)
    widen[1](out, dtype(-1.5), (dtype(0.75), 7))
    assert out.tolist() == [-1.5, 0.75, 7]


def test_subclasses_of_int_and_float_are_numbers(in_simulator):
    class Meters(float):
        pass

    @kernel(threads=32)
    def add(out, x, y):
        out[0] = x + y

    out = np.zeros(1)
    add[1](out, Color.RED, Meters(0.5))
    assert out[0] == 3.5


def test_a_hazard_is_a_warning_at_the_launch(in_simulator):
    smem = Shared(tile=Tiles(1, (16, 16), np.float32), full=Barriers(1))

    @kernel(threads=32, shared=smem)
    def careless(x_map, out):
        if cuda.threadIdx.x == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
            out[0] = smem.tile[0][0, 0]  # nobody has waited

    x, out = np.ones((16, 16), np.float32), np.zeros(1, np.float32)
    for launch in (lambda: careless[1](TensorMap(x, smem.tile), out), careless[1].bind(TensorMap(x, smem.tile), out)):
        with pytest.warns(HazardWarning, match="careless: ") as caught:
            report = launch()
        identifiers = {hazard.identifier for hazard in report.hazards}
        assert identifiers and len(caught) == len(identifiers)
        assert caught[0].filename == __file__


def test_a_typing_error_says_where_in_the_kernel(in_simulator):
    smem = Shared(full=Barriers(1))

    @kernel(threads=32, shared=smem)
    def wrong(x):
        ptx.mbarrier_init(smem.full[0], 1.5)

    line = wrong.function.__code__.co_firstlineno + 2
    expected = f"{__file__}:{line}: ptx.mbarrier_init: argument 2, 'count', must be an integer (u32); found float64\n"
    with pytest.raises(TypingError) as caught:
        wrong[1](np.zeros(1))
    assert str(caught.value).startswith(expected)


def test_read_only_arrays_stay_so(in_simulator):
    x = np.ones(64, np.float32)
    x.flags.writeable = False
    with pytest.raises(Exception, match="read-only|readonly"):
        axpy[1](np.float32(1), x, x)


def test_empty_arrays(in_simulator):
    axpy[1](np.float32(1), np.zeros(0, np.float32), np.zeros(0, np.float32))


async def coroutine(x):
    pass


def generator(x):
    yield x


@pytest.mark.parametrize(
    ("launch", "error", "message"),
    [
        (lambda: axpy(1), TypeError, "is a kernel: launch it"),
        (lambda: axpy[0](1), ValueError, "grid 0; expected one to three positive integers"),
        (lambda: axpy[(1, 2, 3, 4), None], ValueError, "expected one to three"),
        (lambda: axpy[1, 65], ValueError, "65 threads a block, but it was compiled for at most 64"),
        (lambda: axpy[1, 64, None, 100], ValueError, "shared memory comes from the kernel's plan"),
        (lambda: axpy[1, 64, "stream"], TypeError, "str is no CUDA stream"),
        (lambda: kernel(lambda x: None)[1], ValueError, "no block size"),
        (lambda: kernel(lambda x: None)[1, 2048], ValueError, "the limit is 1024"),
        (lambda: kernel(lambda x: None, threads=2048), ValueError, "the limit is 1024"),
        (lambda: kernel(lambda x: None, threads=32, cluster=32), ValueError, "Hopper's limit is 16"),
        (lambda: kernel(lambda x: None, threads=32, cluster=2)[3], ValueError, "round the grid up to 4"),
        (lambda: axpy[1](1.0, np.zeros(1)), TypeError, r"axpy\(a, x, y\): 3 arguments expected, 2 given"),
        (lambda: axpy[1]("text", np.zeros(1), np.zeros(1)), TypeError, "argument a: str cannot be passed"),
        (lambda: axpy[1](1 << 70, np.zeros(1), np.zeros(1)), TypeError, "does not fit 64 bits"),
        (lambda: axpy[1]((np.zeros(1),), 1, 2), TypeError, "a tuple may hold numbers only"),
        (lambda: axpy[3, 2, 5], ValueError, r"no handle of a stream; .* is written axpy\[\(x, y\), None\]"),
        (lambda: axpy[2, 2], ValueError, r"blocks of 2 threads are neither .* is written axpy\[\(x, y\), None\]"),
        (lambda: axpy[1, 64, -1], ValueError, "no handle of a stream"),
        (lambda: axpy[1, 64, True], ValueError, "no handle of a stream"),
        (lambda: axpy[1.0], ValueError, "grid 1.0; expected one to three positive integers"),
        (lambda: axpy[True], ValueError, "grid True; expected"),
        (lambda: axpy[(2.0,), 64], ValueError, r"grid \(2.0,\); expected"),
        (lambda: axpy[1, 64.0], ValueError, "block 64.0; expected"),
        (lambda: axpy[1, (True, 64)], ValueError, r"block \(True, 64\); expected"),
        (lambda: axpy[[2, 3]], ValueError, r"grid \[2, 3\] is a list; write a number or a tuple"),
        (lambda: axpy[np.array([2, 3])], ValueError, "is a ndarray; write a number or a tuple"),
        (lambda: axpy[1, [64]], ValueError, r"block \[64\] is a list"),
        (lambda: axpy[()], ValueError, r"axpy\[\(\)\]: no grid"),
        (lambda: axpy[None], ValueError, "grid None; expected"),
        (lambda: axpy[1 << 31], ValueError, "grid x of 2,147,483,648 blocks; the limit is 2,147,483,647"),
        (lambda: axpy[(1, 65536), None], ValueError, "grid y of 65,536 blocks; the limit is 65,535"),
        (lambda: axpy[(1, 1, 65536), None], ValueError, "grid z of 65,536"),
        (lambda: kernel(lambda x: None)[1, (1, 1, 128)], ValueError, "block z of 128 threads; the limit is 64"),
        (lambda: kernel(lambda x: None, threads=(1, 1, 128)), ValueError, "block z of 128 threads; the limit is 64"),
        (lambda: kernel(64), TypeError, r"@kernel of 64, a int; .* write @kernel\(threads=64\)"),
        (lambda: kernel(len), TypeError, "a builtin_function_or_method; expected a function written in Python"),
        (lambda: kernel(Shared), TypeError, "a type; expected a function"),
        (lambda: kernel(coroutine), TypeError, "coroutine is an `async def`"),
        (lambda: kernel(generator), TypeError, "generator has a `yield`"),
        (lambda: kernel(lambda *x: None), TypeError, r"parameter \*x is variadic positional"),
        (lambda: kernel(lambda *, x: None), TypeError, "parameter x is keyword-only"),
        (lambda: kernel(lambda x=1: None), TypeError, "parameter x=1 has a default"),
        (lambda: kernel(lambda x: None, shared=4096), TypeError, "shared=4096; expected a plan"),
        (lambda: kernel(lambda x: None, min_blocks=0), ValueError, "min_blocks 0; expected an integer of 1 or more"),
        (lambda: kernel(lambda x: None, min_blocks=2.0), ValueError, "min_blocks 2.0"),
        (lambda: axpy[1](a=1, x=2, y=3), TypeError, r"kernel\[grid, block\]\(\) got an unexpected keyword argument"),
        (lambda: axpy[1](1, np.array([None]), np.zeros(1)), TypeError, "elements are Python objects"),
        (lambda: axpy[1](1, np.zeros(1, ">f4"), np.zeros(1)), TypeError, "bytes are in the other order"),
    ],
)
def test_mistakes_are_named(launch, error, message, in_simulator):
    with pytest.raises(error, match=message):
        launch()


def test_a_plan_beyond_the_device_is_refused_with_its_table():
    with pytest.raises(ValueError, match="227 KB|232,?448"):
        kernel(lambda x: None, threads=32, shared=Shared(tile=Tiles(8, (128, 128), np.float32)))[1](np.zeros(1))


@needs_no_gpu
def test_asking_for_a_gpu_that_is_not_there():
    with use_backend("gpu"), pytest.raises(LaunchError, match="no CUDA GPU"):
        axpy[1](1.0, np.zeros(1), np.zeros(1))
    assert gpu_refusal() is not None


def test_backends_are_checked():
    with pytest.raises(ValueError, match="choose one of auto, gpu, sim"), use_backend("cpu"):
        pass
    run = subprocess.run(
        [sys.executable, "-c", "import numba_tma.launch as l; l.backend()"],
        env={"NUMBA_TMA_BACKEND": "cpu", "PATH": "", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0 and "NUMBA_TMA_BACKEND='cpu'" in run.stderr


def test_bound_launches_repeat(rng):
    x, y = np.ones(64, np.float32), np.zeros(64, np.float32)
    with use_backend("sim"):
        add = axpy[1].bind(np.float32(1), x, y)
    add()
    add()
    assert (y == 2).all()


def test_each_gpu_has_its_own(monkeypatch):
    """A kernel is loaded, and its shared memory granted, for a GPU: of two, each needs that done."""
    current, loaded = [0], []

    monkeypatch.setattr(driver, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "current_device", lambda: current[0])
    monkeypatch.setattr(driver, "capability", lambda ordinal=0: (9, 0))
    monkeypatch.setattr(type(axpy), "load", lambda self, compiled: loaded.append(current[0]))
    monkeypatch.setattr(driver, "launch_config", lambda *_: None)
    monkeypatch.setattr("numba_tma.launch._Variant.submit", lambda self, words: None)
    launcher = axpy[1]
    device = FakeDeviceArray(np.float32)
    with use_backend("gpu"):
        for gpu in (0, 1, 0, 1):
            current[0] = gpu
            launcher(np.float32(2), device, device)
    assert loaded == [0, 1]


def test_what_was_bound_belongs_to_a_gpu(monkeypatch):
    current, launched = [1], []

    class Launch:
        def __init__(self):
            self.buffer = types.SimpleNamespace(view=bytearray(1024))
            self.gpu = current[0]

        def __call__(self):
            launched.append(self.gpu)

    monkeypatch.setattr(driver, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "current_device", lambda: current[0])
    monkeypatch.setattr(driver, "capability", lambda ordinal=0: (9, 0))
    monkeypatch.setattr(driver, "launch_config", lambda *_: None)
    monkeypatch.setattr(type(axpy), "load", lambda self, compiled: None)
    monkeypatch.setattr("numba_tma.launch._Variant._new_launch", lambda self, keep=None: Launch())
    device, bound = FakeDeviceArray(np.float32), []
    with use_backend("gpu"):
        for current[0] in (1, 0):
            bound.append(axpy[1].bind(np.float32(2), device, device))
    for current[0] in (0, 1):
        bound[1 - current[0]]()
        with pytest.raises(LaunchError, match=f"axpy: bound on GPU {1 - current[0]}, and GPU {current[0]} is this"):
            bound[current[0]]()
    assert launched == [0, 1]


def test_memory_is_asked_for_with_a_context(monkeypatch):
    """The driver answers that of a context only, and a process may have made none yet."""
    asked = []

    class Driver:
        def cuMemGetInfo(self):
            asked.append("memory")
            return 0, 5, 9

    monkeypatch.setattr(driver, "current_device", lambda: asked.append("context"))
    monkeypatch.setattr(driver, "_driver", Driver)
    assert driver.memory() == (5, 9) and asked == ["context", "memory"]


def test_launches_from_threads(rng):
    outputs = [np.zeros(64, np.float32) for _ in range(4)]

    def work(n: int) -> None:
        with use_backend("sim"):
            axpy[1](np.float32(n), np.ones(64, np.float32), outputs[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [out[0] for out in outputs] == [0, 1, 2, 3]


def test_big_shared_memory_and_a_tensor_map_over_an_argument(rng, in_simulator):
    smem = Shared(tile=Tiles(1, (256, 128), np.float32), full=Barriers(1))  # 128 KB
    assert smem.nbytes > 48 * 1024

    @kernel(threads=128, shared=smem)
    def double_in_place(x_map, x):
        column = cuda.threadIdx.x
        if column == 0:
            ptx.mbarrier_init(smem.full[0], 1)
            ptx.fence_mbarrier_init()
            ptx.mbarrier_arrive_expect_tx(smem.full[0], x_map.box_bytes)
            ptx.cp_async_bulk_tensor_2d_shared_global(smem.tile[0], x_map, 0, 0, smem.full[0])
        cuda.syncthreads()
        while not ptx.mbarrier_try_wait_parity(smem.full[0], 0):
            pass
        for row in range(256):
            x[row, column] = smem.tile[0][row, column] * np.float32(2)

    x = rng.standard_normal((256, 128), np.float32)
    expected = 2 * x
    double_in_place[1](TensorMap(x, smem.tile), x)
    np.testing.assert_array_equal(x, expected)


def test_recording_compiles_and_runs_nothing():
    x, y = np.ones(100, np.float32), np.zeros(100, np.float32)
    with recording("sm_80") as recorded:
        assert axpy[2](np.float32(2), x, y) is None
        with use_backend("sim"):
            axpy[2].bind(np.float32(2), x, y)()
    assert not y.any()
    assert [(launch.kernel, launch.compiled.arch) for launch in recorded.launches] == [(axpy, "sm_80")] * 2
    with use_backend("sim"):
        axpy[2](np.float32(2), x, y)
    assert (y == 2).all() and len(recorded.launches) == 2


def test_recording_may_compile_later():
    def wrong(x):
        x[0] = x.there_is_none

    with recording(later=True) as recorded:
        kernel(wrong, threads=32)[1](np.zeros(1, np.float32))
    with pytest.raises((TypingError, CudaTypingError), match="there_is_none"):
        _ = recorded.launches[0].compiled


@pytest.mark.gpu
def test_on_the_gpu(rng):
    x, y = rng.standard_normal(1000, np.float32), rng.standard_normal(1000, np.float32)
    expected = y + 3 * x
    with use_backend("gpu"):
        axpy[16](np.float32(3), x, y)  # NumPy arrays travel there and back
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)  # the GPU rounds once where NumPy rounds twice
        device = cuda.to_device(x), cuda.to_device(y)
        for _ in range(3):
            axpy[16](np.float32(3), *device)
        bound = axpy[16].bind(np.float32(3), *device)
        bound()
    np.testing.assert_allclose(device[1].copy_to_host(), expected + 4 * 3 * x, rtol=1e-5, atol=1e-5)
    with use_backend("gpu"), pytest.raises(TypeError, match="in host memory; bind device arrays"):
        axpy[16].bind(np.float32(3), x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy", "numba"])
def test_array_libraries_on_the_gpu(library, rng):
    host = rng.standard_normal(100, np.float32)
    if library == "numba":
        make, back = cuda.to_device, lambda a: a.copy_to_host()
    else:
        module = pytest.importorskip(library)
        if library == "torch":
            make, back = (lambda a: module.from_numpy(a).cuda()), (lambda a: a.cpu().numpy())
        else:
            make, back = module.asarray, module.asnumpy
    x, y = make(host), make(np.zeros(100, np.float32))
    with use_backend("gpu"):
        axpy[2](np.float32(2), x, y)
        axpy[2](np.float32(2), x, y)
    driver.synchronize()
    np.testing.assert_allclose(back(y), 4 * host, rtol=1e-6)
    with use_backend("sim"):  # device arrays are copied to the simulator and back
        axpy[2](np.float32(2), x, y)
    np.testing.assert_allclose(back(y), 6 * host, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(driver.device_count() < 2, reason="needs two GPUs")
def test_one_launcher_on_two_gpus(rng):
    """More shared memory than a kernel has unasked: it is granted on each GPU."""
    smem = Shared(words=Buffer((32768,), np.float32))

    @kernel(threads=32, shared=smem)
    def through(x, y):
        i = cuda.threadIdx.x
        smem.words[i + 32000] = x[i]
        y[i] = smem.words[i + 32000] + 1

    host = rng.standard_normal(32, np.float32)
    for gpu in (0, 1, 0):
        with cuda.gpus[gpu], use_backend("gpu"):
            x, y = cuda.to_device(host), cuda.to_device(np.zeros_like(host))
            through[1](x, y)
            assert (y.copy_to_host() == host + 1).all()


@pytest.mark.gpu
def test_clusters_on_the_gpu():
    @kernel(threads=32, cluster=2)
    def ranks(out):
        if cuda.threadIdx.x == 0:
            out[cuda.blockIdx.x] = ptx.cluster_ctarank()

    out = np.full(8, 9, np.uint32)
    with use_backend("gpu"):
        ranks[8](out)
    assert out.tolist() == [0, 1] * 4


@pytest.mark.gpu
def test_capture_into_a_graph():
    from numba_tma import bench

    x, y = cuda.to_device(np.ones(64, np.float32)), cuda.to_device(np.zeros(64, np.float32))
    with use_backend("gpu"):
        timing = bench.time_graph(lambda stream: axpy[1, None, stream](np.float32(1), x, y), launches=5, repeats=3)
    assert timing.samples == 3
    # One launch before the capture, then 3 + 2 replays of 5.
    assert (y.copy_to_host() == 1 + 5 * 5).all()

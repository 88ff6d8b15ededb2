"""`configuration="autotune"`: measured once for each product, kept in memory and on disk, refused with a reason."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from numba_tma import bench, driver, use_backend
from numba_tma.kernels.gemm import autotune, choice, matmul
from numba_tma.kernels.gemm.autotune import AutotuneError, Product, fastest
from numba_tma.kernels.gemm.choice import Shape, Types
from numba_tma.kernels.gemm.matmul import _plans

PRODUCT = Product("a GPU", 132, Types("bfloat16", "bfloat16", "k", True), Shape(1, 512, 1024, 256))


@pytest.fixture(autouse=True)
def nothing_known(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_TMA_CACHE_DIR", str(tmp_path))
    forget(monkeypatch)


def forget(monkeypatch):
    """What a new process would not know."""
    monkeypatch.setattr(autotune, "_winners", {})
    _plans.clear()


class Stopwatch:
    """Finds the candidate of this number the fastest, and counts how often it is asked."""

    def __init__(self, number=3):
        self.number, self.asked = number, []

    def __call__(self, candidates):
        self.asked.append(list(candidates))
        return {candidate: 1.0 + abs(i - self.number) for i, candidate in enumerate(candidates)}


def never(candidates):
    raise AssertionError("measured again")


def test_measured_once_and_kept(monkeypatch):
    watch = Stopwatch()
    winner = fastest(PRODUCT, watch)
    assert watch.asked == [choice.best_candidates(PRODUCT.types, PRODUCT.shape, autotune.CANDIDATES, 132)]
    assert winner == watch.asked[0][3]
    assert fastest(PRODUCT, never) == winner
    forget(monkeypatch)
    assert fastest(PRODUCT, never) == winner


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another GPU"},
        {"sms": 114},
        {"types": Types("float16", "float16", "k", True)},
        {"types": Types("bfloat16", "bfloat16", "k", False)},
        {"shape": Shape(1, 512, 1024, 257)},
        {"activation": "gelu"},
        {"has_bias": True},
    ],
    ids=str,
)
def test_another_product_is_measured_for_itself(change):
    fastest(PRODUCT, Stopwatch())
    watch = Stopwatch(1)
    assert fastest(dataclasses.replace(PRODUCT, **change), watch) == watch.asked[0][1]


def test_another_version_of_the_kernels_is_measured_anew(tmp_path, monkeypatch):
    folder = tmp_path / "package" / "kernels" / "gemm"
    folder.mkdir(parents=True)
    (tmp_path / "package" / "warpgroup.py").write_text("")
    (folder / "tuned.py").write_text("a = 1")
    monkeypatch.setattr(autotune, "_FOLDER", folder)
    fastest(PRODUCT, Stopwatch())
    forget(monkeypatch)
    fastest(PRODUCT, never)
    (folder / "tuned.py").write_text("a = 2")
    forget(monkeypatch)
    watch = Stopwatch()
    fastest(PRODUCT, watch)
    assert watch.asked


def test_a_damaged_file_and_no_folder_at_all(tmp_path, monkeypatch):
    fastest(PRODUCT, Stopwatch())
    (kept,) = tmp_path.glob("*.gemm.json")
    kept.write_bytes(kept.read_bytes()[:-1])
    forget(monkeypatch)
    watch = Stopwatch()
    winner = fastest(PRODUCT, watch)
    assert watch.asked

    monkeypatch.setenv("NUMBA_TMA_CACHE_DIR", "")
    assert fastest(PRODUCT, never) == winner
    forget(monkeypatch)
    fastest(PRODUCT, watch)
    assert len(watch.asked) == 2


def test_refused_without_a_gpu():
    a = np.zeros((16, 16), np.float16)
    with use_backend("sim"), pytest.raises(AutotuneError, match="backend in force is the simulator; leave it out"):
        matmul(a, a, configuration="autotune")
    if not driver.device_count():
        with pytest.raises(AutotuneError, match="there is no CUDA GPU .* leave it out"):
            matmul(a, a, configuration="autotune")


@pytest.mark.gpu
def test_refused_for_host_memory():
    a = np.zeros((16, 16), np.float16)
    with pytest.raises(AutotuneError, match="these operands lie in host memory"):
        matmul(a, a, configuration="autotune")


@pytest.mark.gpu
def test_tuned_on_the_gpu(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(autotune, "CANDIDATES", 2)
    a = torch.randn(300, 520, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(400, 520, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(400, device="cuda")
    reference = a.double() @ w.T.double() + bias.double()

    def check(out):
        assert ((out.double() - reference).abs().max() / reference.abs().max()).item() < 2**-8 * 1.1

    out = torch.full((300, 400), float("nan"), device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    stream = driver.check(cu().cuStreamCreate(1), "cuStreamCreate")
    driver.check(cu().cuStreamBeginCapture(stream, capture_mode()), "cuStreamBeginCapture")
    with pytest.raises(AutotuneError, match="captured into a graph"):
        matmul(a, w.T, bias=bias, out=out, configuration="autotune", stream=int(stream))
    driver.check(cu().cuStreamEndCapture(stream), "cuStreamEndCapture")

    assert matmul(a, w.T, bias=bias, out=out, configuration="autotune") is out
    check(out)
    monkeypatch.setattr(bench, "time_launches", never)
    check(matmul(a, w.T, bias=bias, configuration="autotune"))
    forget(monkeypatch)
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    matmul(a, w.T, bias=bias, out=out, configuration="autotune", stream=int(stream))
    driver.synchronize(int(stream))
    check(out)


def cu():
    from cuda.bindings import driver as bindings

    return bindings


def capture_mode():
    return cu().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

"""Batches that lie on a GPU: the pipeline's own, or another one, which takes a machine with two."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest

from numba_tma import driver
from numba_tma.device_array import DeviceArray
from numba_tma.overlap import MODES, BatchError, Pipeline, exercise, peers
from numba_tma.overlap.gpu import GpuEngines, can_access_peer, device_of
from numba_tma.overlap.rates import measure_peer_rates, stages_alone

WORDS, ROUNDS = 1 << 18, 6
SPIN = 50_000_000  # cycles: a writer that nobody awaits is found out
two_gpus = pytest.mark.skipif(driver.device_count() < 2, reason="needs two GPUs")
pytestmark = pytest.mark.gpu


@pytest.fixture(params=["own", pytest.param("peer", marks=two_gpus)])
def places(request):
    """The GPU that computes, and the one where batches lie, which is the current one for a test's own work."""
    owner = 0
    GpuEngines(owner).make_current()
    yield (owner if request.param == "own" else 1), owner
    GpuEngines(0).make_current()


@contextlib.contextmanager
def poisoned(device, **options):
    """A pipeline whose buffers hold nothing of use, on a GPU that is not left the current one."""
    before = driver.current_device()
    with exercise.make_pipeline(WORDS, ROUNDS, device=device, **options) as p:
        for slot in p._ring._all:
            for array in (*slot.inputs.values(), *slot.outputs.values()):
                array.poison()
            for array in (*slot.host_inputs.values(), *slot.host_outputs.values()):
                array.fill(0xFFFFFFFF)
        driver.synchronize()
        GpuEngines(before).make_current()
        yield p
    GpuEngines(before).make_current()


def check(pipeline, batches, hosts, **options):
    """Every batch's results, in order."""
    seen = -1
    for seen, result in enumerate(pipeline.run(batches, **options)):
        np.testing.assert_array_equal(result["words"], exercise.reference(hosts[seen % len(hosts)], ROUNDS))
        assert result.index == seen
        del result
    assert seen + 1 == pipeline.report.batches > 0
    gc.collect()
    assert pipeline.free_slots == pipeline.depth


@pytest.fixture
def hosts(rng):
    return [rng.integers(0, 2**32, WORDS, np.uint32) for _ in range(5)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("copy", [True, False])
def test_every_mode(places, mode, copy, hosts):
    device, _ = places
    arrays = [DeviceArray(host) for host in hosts]
    with poisoned(device, mode=mode) as p:
        check(p, arrays * 4, hosts, copy=copy)
        check(p, [array if i % 2 else host for i, (array, host) in enumerate(zip(arrays, hosts, strict=True))], hosts)


def _numba(host):
    from numba import cuda

    return cuda.to_device(host)


def _cupy(host):
    return pytest.importorskip("cupy").asarray(host)


def _torch(host):
    return pytest.importorskip("torch").from_numpy(host).to("cuda:0")


class _DlpackAlone:
    """A CuPy array without its other interfaces."""

    def __init__(self, host):
        self._array = _cupy(host)

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("made", [DeviceArray, _numba, _cupy, _torch, _DlpackAlone])
def test_everybodys_arrays(places, made, hosts):
    device, _ = places
    arrays = [made(host) for host in hosts]
    with poisoned(device) as p:
        check(p, arrays * 3, hosts)
        check(p, [{"words": array} for array in arrays], hosts)


def test_other_types_and_shapes(places, rng):
    torch = pytest.importorskip("torch")
    device, _ = places
    import ml_dtypes

    described = {"x": ((3, 5), ml_dtypes.bfloat16), "flag": ((), np.bool_), "none": ((0, 4), np.float32)}
    eight = {"e": ((16,), ml_dtypes.float8_e4m3fn)}

    def compute(inputs, outputs, stream):
        from cuda.bindings import driver as cu

        for name, array in inputs.items():
            nbytes = array.dtype.itemsize * int(np.prod(array.shape))
            if nbytes:
                cu.cuMemcpyDtoDAsync(outputs[name].pointer, array.pointer, nbytes, stream.handle)

    x, e = torch.rand(3, 5, dtype=torch.bfloat16), torch.rand(16).to(torch.float8_e4m3fn)
    with Pipeline(compute, described | eight, described | eight, device=device) as p:
        batch = {"x": x.cuda(0), "flag": torch.tensor(True).cuda(0), "none": torch.empty(0, 4).cuda(0), "e": e.cuda(0)}
        (result,) = p.run([batch])
    assert result["none"].shape == (0, 4) and result["flag"] == True  # noqa: E712
    np.testing.assert_array_equal(result["x"].astype(np.float32), x.float().numpy())
    np.testing.assert_array_equal(result["e"].astype(np.float32), e.float().numpy())


@pytest.mark.parametrize("mode", ["three_streams", "producer"])
@pytest.mark.parametrize("how", ["torch", "interface", "default stream", "dlpack"])
def test_writers_are_awaited(places, mode, how, hosts):
    """Each batch is written behind a long wait on a stream of the library's, over what is not to be seen."""
    torch = pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    device, owner = places
    wrong = [np.full(WORDS, 0xABCDEF, np.uint32) for _ in hosts]
    with torch.cuda.device(owner), cupy.cuda.Device(owner):
        side = torch.cuda.Stream(owner)
        fresh = [torch.from_numpy(host).to(f"cuda:{owner}") for host in hosts]
        memory = [DeviceArray(array) for array in wrong]
        torch.cuda.synchronize(owner)

    def source():
        with torch.cuda.device(owner), cupy.cuda.Device(owner):
            for array, new in zip(memory, fresh, strict=True):
                on = torch.cuda.default_stream(owner) if how == "default stream" else side
                with torch.cuda.stream(on), cupy.cuda.ExternalStream(on.cuda_stream):
                    torch.cuda._sleep(SPIN)
                    target = torch.as_tensor(array, device=f"cuda:{owner}")
                    target.copy_(new)
                    as_cupy = cupy.asarray(array)
                    alone = _DlpackAlone.__new__(_DlpackAlone)
                    alone._array = as_cupy
                    yield {"torch": target, "interface": as_cupy, "default stream": array, "dlpack": alone}[how]

    with poisoned(device, mode=mode) as p:
        check(p, source(), hosts)


@pytest.mark.parametrize("mode", ["three_streams", "producer"])
def test_memory_is_kept_until_it_has_been_copied(places, mode, hosts):
    """PyTorch uses the memory of a tensor that nobody holds for the next one."""
    torch = pytest.importorskip("torch")
    device, owner = places
    pinned = [torch.from_numpy(host).pin_memory() for host in hosts]

    def source():
        for number in range(40):
            yield pinned[number % len(pinned)].to(f"cuda:{owner}", non_blocking=True)

    with poisoned(device, mode=mode) as p:
        check(p, source(), hosts)


@two_gpus
@pytest.mark.parametrize("mode", ["three_streams", "producer"])
def test_others_may_make_another_gpu_current(mode, hosts):
    def source():
        for host in hosts * 4:
            GpuEngines(0).make_current()
            yield DeviceArray(host)

    with poisoned(1, mode=mode) as p:
        for result in p.run(source()):
            GpuEngines(result.index % 2).make_current()
            np.testing.assert_array_equal(result["words"], exercise.reference(hosts[result.index % 5], ROUNDS))


def test_what_does_not_fit_is_named(places):
    device, _ = places
    torch = pytest.importorskip("torch")
    good = torch.from_numpy(np.zeros(WORDS, np.uint32)).cuda(0)
    with poisoned(device) as p:
        for bad, message in (
            (torch.from_numpy(np.zeros(2 * WORDS, np.uint32)).cuda(0)[::2], "strides .8,. B of shape .* on a GPU"),
            (torch.zeros(WORDS, device="cuda:0"), "float32 of shape"),
            (good[1:], "uint32 of shape"),
        ):
            with pytest.raises(BatchError, match=f"batch 1: prepare failed: ValueError: input 'words'.*{message}"):
                list(p.run([good, bad]))
        assert len(list(p.run([good]))) == 1


@two_gpus
def test_memory_of_another_gpu_comes_back():
    GpuEngines(0).make_current()
    array = DeviceArray.empty((256 << 20,), np.dtype(np.uint8))
    pointer = array.pointer
    assert device_of(pointer) == 0
    GpuEngines(1).make_current()
    assert device_of(pointer) == 0
    del array
    gc.collect()
    with pytest.raises(driver.LaunchError, match="asking whose memory"):
        device_of(pointer)
    GpuEngines(0).make_current()


def test_stages_alone_of_what_lies_on_a_gpu(places, hosts):
    device, _ = places
    array = DeviceArray(hosts[0])
    with poisoned(device) as p:
        alone = stages_alone(p, array)
        check(p, [array], hosts)
    assert alone.h2d > 0 and alone.compute > 0 and alone.d2h > 0


@two_gpus
def test_rates_between_gpus():
    found = measure_peer_rates(32 << 20)
    assert [rates.access for rates in found] == [False, True][: 1 + (can_access_peer(0, 1) and can_access_peer(1, 0))]
    for rates in found:
        assert min(rates.to_device_alone, rates.to_peer_alone, rates.to_device, rates.to_peer) > 1e9
    for pair in ((0, 0), (0, driver.device_count()), (-1, 0)):
        with pytest.raises(driver.LaunchError, match="they take two different ones"):
            measure_peer_rates(1 << 20, *pair)


@two_gpus
def test_feeding():
    found = peers.fed_from(WORDS, ROUNDS, 8, device=1, peer=0)
    assert list(found) == [peers.HOST, peers.OWN, peers.PEER]
    assert all(row["batches"] == 8 and 0 < row["share_of_ideal"] < 1.5 for row in found.values())


def _make_pipeline():
    return exercise.make_pipeline(WORDS, ROUNDS)


def _gpu():
    """In a worker: the GPU that it sees, and how many."""
    from cuda.core import Device

    device = Device(driver.current_device())
    device.set_current()
    return device.uuid, driver.device_count()


def _batches():
    """In a worker: how many it had in its last chunk."""
    from numba_tma.overlap import shards

    return [pipeline.report.batches for pipeline in shards._pipelines.values()]


def test_a_worker_for_each_gpu(hosts):
    distributed = pytest.importorskip("distributed")
    from numba_tma.overlap.shards import Sharded, gpu_cluster

    count = driver.device_count()
    with gpu_cluster() as cluster, distributed.Client(cluster, direct_to_workers=True) as client:
        seen = client.run(_gpu)
        assert len(seen) == len({uuid for uuid, _ in seen.values()}) == count
        assert {visible for _, visible in seen.values()} == {1}
        with Sharded(_make_pipeline, client, chunk=4) as sharded:
            sharded.start()
            assert all(made == [0] for made in client.run(_batches).values())
            results = list(sharded.run(hosts[i % len(hosts)] for i in range(16 * count)))
            assert all(made[0] > 0 for made in client.run(_batches).values())
        assert all(made == [] for made in client.run(_batches).values())
    assert [result.index for result in results] == list(range(16 * count))
    for result in results:
        np.testing.assert_array_equal(result["words"], exercise.reference(hosts[result.index % 5], ROUNDS))

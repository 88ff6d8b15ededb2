"""A GPU's engines through cuda.core: streams, events, page-locked memory, copies, graphs."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arrays, driver
from ..device_array import DeviceArray
from ..driver import check
from .windows import window


@dataclass(frozen=True)
class OnDevice:
    """An array in a GPU's memory for a copy in to read.

    Attributes:
        array: whoever owns the memory, kept alive.
        pointer, nbytes: where it lies, and how much there is.
        ordinal: of that GPU.
        written: an event behind all that may still write the array; None where there is nothing to copy.
    """

    array: Any
    pointer: int
    nbytes: int
    ordinal: int
    written: Any


class GpuEngines:
    """What a pipeline asks of a GPU. The engines of a model (`ModelEngines`) answer to the same names.

    Args:
        ordinal: which GPU; by default the current one.

    Raises:
        LaunchError: there is none, or none of that number.
    """

    modelled = False

    def __init__(self, ordinal: int | None = None) -> None:
        count = driver.device_count()
        if not count:
            raise driver.LaunchError("there is no CUDA GPU (or no driver) here; pass a Model(…) to run without one")
        if ordinal is not None and not 0 <= ordinal < count:
            raise driver.LaunchError(f"device {ordinal}: there is no such GPU; the {count} here are 0 to {count - 1}")
        from cuda.core import Device, EventOptions, LegacyPinnedMemoryResource, StreamOptions

        self.ordinal = driver.current_device() if ordinal is None else ordinal
        self._device = Device(self.ordinal)
        self._device.set_current()
        self._stream_options = StreamOptions(nonblocking=True)
        self._event_options = EventOptions(timing_enabled=True)
        self._pinned = LegacyPinnedMemoryResource()
        self.name = driver.device_name(self.ordinal)
        self._origin: Any = None
        self._host_origin = 0.0
        self._arrivals: dict[int, Any] = {}  # of each GPU that arrays came from, a stream that waits for their writers

    def enter_thread(self) -> None:
        """Make the GPU this thread's current one."""
        self.make_current()

    def make_current(self) -> None:
        """The same, after others' code may have made another GPU current."""
        self._device.set_current()

    # Host time, which a model keeps for each thread by itself.

    def now(self) -> float:
        """The host's clock in seconds since `begin`."""
        return time.perf_counter() - self._host_origin

    def catch_up(self, stamp: float) -> None:
        """A thread takes over what another had ready at `stamp`: real time needs no telling."""

    def host_work(self, work: Callable[[], None]) -> tuple[float, float]:
        """Do something on the host; when it began and ended."""
        begin = self.now()
        work()
        return begin, self.now()

    # Streams and events.

    def stream(self) -> Any:
        """A new stream that does not wait for the default stream."""
        return self._device.create_stream(options=self._stream_options)

    def adopt(self, stream: Any) -> Any:
        """Somebody else's stream (PyTorch's, CuPy's, Numba's, a handle), which has to outlive the pipeline."""
        from cuda.core import LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM, Stream

        handle = driver.stream_handle(stream)
        named = {0: LEGACY_DEFAULT_STREAM, 1: LEGACY_DEFAULT_STREAM, 2: PER_THREAD_DEFAULT_STREAM}
        return named[handle] if handle in named else Stream.from_handle(handle)

    def close_stream(self, stream: Any) -> None:
        """Give a stream of `stream` back."""
        stream.close()

    def event(self) -> Any:
        """A new event, with a time."""
        return self._device.create_event(self._event_options)

    def record(self, event: Any, stream: Any) -> None:
        """The event happens when all that is on the stream now has been done."""
        stream.record(event)

    def wait(self, stream: Any, event: Any) -> None:
        """What comes on the stream from now on waits for the event."""
        stream.wait(event)

    def synchronize(self, event: Any) -> None:
        """The host waits for an event."""
        event.sync()

    def drain(self, streams: Sequence[Any]) -> None:
        """The host waits for everything on the streams."""
        for stream in streams:
            stream.sync()

    def begin(self) -> None:
        """Time counts from here: `now`'s, and that of events."""
        stream = self.stream()
        self._origin = stream.record(options=self._event_options)
        self._origin.sync()
        self._host_origin = time.perf_counter()
        stream.close()

    def seconds(self, event: Any) -> float:
        """When an event happened, since `begin`."""
        return (event - self._origin) * 1e-3

    # Memory.

    def host_array(self, shape: tuple[int, ...], dtype: np.dtype, pinned: bool) -> np.ndarray:
        """Zeroed host memory. The pages are there: no first touch is left for the timed part."""
        if not pinned or not math.prod(shape):
            made = np.empty(shape, dtype)
            made.fill(0)
            return made
        made = self.pinned_empty(shape, dtype)
        made.fill(0)
        return made

    def pinned_empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Page-locked memory, not initialised."""
        return pinned_array(self._pinned, shape, dtype)

    def device_array(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """Zeroed device memory: a graph is captured before any batch has come, and zeros are valid as indices."""
        from cuda.bindings import driver as cu

        made = DeviceArray.empty(shape, dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes:
            check(cu.cuMemsetD8(made.pointer, 0, nbytes), "cuMemsetD8")
            driver.synchronize()  # our streams do not wait for the default stream
        return made

    def is_pinned(self, array: np.ndarray) -> bool:
        """Whether a host array lies in page-locked memory, whoever locked it."""
        return is_pinned(array)

    def on_device(self, array: Any, view: arrays.ArrayView) -> OnDevice:
        """A contiguous array in the memory of this GPU or another for `copy_in`, which will wait for its writers: for
        PyTorch's current stream, the `stream` of a CUDA array interface, or what DLPack has a consumer wait for. Where
        an interface names no stream, for the default stream, which is where Numba's and this package's arrays are
        written unless somebody says otherwise.
        """
        nbytes = view.size * view.dtype.itemsize
        if not nbytes:
            return OnDevice(array, 0, 0, self.ordinal, None)
        from cuda.core import Device

        ordinal = device_of(view.pointer)
        device = Device(ordinal)
        device.set_current()  # an event, the default stream, and what a library calls current are each GPU's own
        try:
            arrivals = self._arrivals.get(ordinal)
            if arrivals is None:
                if ordinal != self.ordinal:
                    enable_peer_access(self.ordinal, ordinal)
                    device.set_current()
                arrivals = self._arrivals[ordinal] = device.create_stream(options=self._stream_options)
            if arrays.is_torch(array):
                arrivals.wait(self.adopt(sys.modules["torch"].cuda.current_stream(ordinal)))
            elif hasattr(array, "__cuda_array_interface__"):
                arrivals.wait(self.adopt(array.__cuda_array_interface__.get("stream")))
            else:
                from cuda.core.utils import StridedMemoryView

                StridedMemoryView.from_dlpack(array, stream_ptr=int(arrivals.handle))
            return OnDevice(array, view.pointer, nbytes, ordinal, arrivals.record())
        finally:
            self.make_current()

    # Work.

    def copy_in(self, target: DeviceArray, source: np.ndarray | OnDevice, stream: Any) -> None:
        """Enqueue a copy to the device, from the host, the same GPU or another; both are contiguous.

        From another GPU the copy is direct if `enable_peer_access` could make it so; else the driver takes the bytes
        through the host's memory.
        """
        if not source.nbytes:
            return
        from cuda.bindings import driver as cu

        to, nbytes, handle = target.pointer, source.nbytes, stream.handle
        if not isinstance(source, OnDevice):
            check(cu.cuMemcpyHtoDAsync(to, source.ctypes.data, nbytes, handle), "cuMemcpyHtoDAsync")
            return
        stream.wait(source.written)
        if source.ordinal == self.ordinal:
            check(cu.cuMemcpyDtoDAsync(to, source.pointer, nbytes, handle), "cuMemcpyDtoDAsync")
        else:  # not cuMemcpyAsync: that refuses memory of another GPU's pool (cudaMallocAsync)
            here, there = primary_context(self.ordinal), primary_context(source.ordinal)
            check(cu.cuMemcpyPeerAsync(to, here, source.pointer, there, nbytes, handle), "cuMemcpyPeerAsync")

    def copy_out(self, target: np.ndarray, source: DeviceArray, stream: Any) -> None:
        """Enqueue a copy from the device; both are contiguous."""
        if target.nbytes:
            from cuda.bindings import driver as cu

            address = target.ctypes.data
            check(cu.cuMemcpyDtoHAsync(address, source.pointer, target.nbytes, stream.handle), "cuMemcpyDtoHAsync")

    def compute(
        self,
        function: Callable | Graph,
        inputs: Mapping[str, DeviceArray],
        outputs: Mapping[str, DeviceArray],
        stream: Any,
        argument: Any,
        failed: Callable[[Exception], None],
    ) -> None:
        """Have `function` enqueue its work; it gets `argument` for its stream."""
        if isinstance(function, Graph):
            function.launch(stream)
        else:
            function(inputs, outputs, argument)

    def graph(self, function: Callable, inputs: Mapping, outputs: Mapping, stream: Any, argument: Any) -> Graph:
        """What `function` enqueues, as a graph to launch again and again.

        It is called twice: first for what cannot be captured, such as loading its kernels.
        """
        function(inputs, outputs, argument)
        stream.sync()
        return Graph(function, inputs, outputs, stream, argument)


class Graph:
    """Captured work of a function."""

    def __init__(self, function: Callable, inputs: Mapping, outputs: Mapping, stream: Any, argument: Any) -> None:
        from cuda.bindings import driver as cu

        # Other threads may go on allocating and synchronising meanwhile.
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(stream.handle, mode), "cuStreamBeginCapture")
        try:
            function(inputs, outputs, argument)
        except BaseException:
            _, graph = cu.cuStreamEndCapture(stream.handle)
            if graph is not None and int(graph):
                cu.cuGraphDestroy(graph)
            raise
        graph = check(cu.cuStreamEndCapture(stream.handle), "cuStreamEndCapture")
        self._executable = check(cu.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")
        check(cu.cuGraphDestroy(graph), "cuGraphDestroy")

    def launch(self, stream: Any) -> None:
        """Enqueue it."""
        from cuda.bindings import driver as cu

        check(cu.cuGraphLaunch(self._executable, stream.handle), "cuGraphLaunch")

    def close(self) -> None:
        """Give it back."""
        from cuda.bindings import driver as cu

        if self._executable is not None:
            cu.cuGraphExecDestroy(self._executable)
            self._executable = None


class _Closing:
    """Gives a cuda.core buffer back when nobody looks at it any more."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the driver may already be gone at interpreter exit
            self._buffer.close()


def pinned_array(resource: Any, shape: Sequence[int], dtype: np.dtype | type | str) -> np.ndarray:
    """A NumPy array in page-locked memory of a cuda.core memory resource, not initialised."""
    buffer = resource.allocate(math.prod(shape) * np.dtype(dtype).itemsize)
    return window(_Closing(buffer), int(buffer.handle), shape, dtype)


def is_pinned(array: np.ndarray) -> bool:
    """Whether the driver knows the array's memory as host memory, which is to say that its pages are locked."""
    from cuda.bindings import driver as cu

    key = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, kind = cu.cuPointerGetAttribute(key, array.ctypes.data)
    return int(status) == 0 and int(kind) == int(cu.CUmemorytype.CU_MEMORYTYPE_HOST)


def device_of(pointer: int) -> int:
    """Ordinal of the GPU that an address in device memory belongs to."""
    from cuda.bindings import driver as cu

    key = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(cu.cuPointerGetAttribute(key, pointer), f"asking whose memory {pointer:#x} is"))


@functools.cache
def primary_context(ordinal: int) -> Any:
    """The context that everybody who uses a GPU by way of CUDA's runtime shares."""
    from cuda.bindings import driver as cu

    device = check(cu.cuDeviceGet(ordinal), "cuDeviceGet")
    return check(cu.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")


def can_access_peer(ordinal: int, peer: int) -> bool:
    """Whether GPU `ordinal` can read another's memory directly, over NVLink or PCIe."""
    from cuda.bindings import driver as cu

    return bool(check(cu.cuDeviceCanAccessPeer(ordinal, peer), "cuDeviceCanAccessPeer"))


def enable_peer_access(ordinal: int, peer: int) -> bool:
    """Let GPU `ordinal`, which becomes the current one, read `peer`'s memory directly from now on, where it can.

    Returns: whether it can.
    """
    from cuda.bindings import driver as cu

    if not can_access_peer(ordinal, peer):
        return False
    check(cu.cuCtxSetCurrent(primary_context(ordinal)), "cuCtxSetCurrent")
    status = cu.cuCtxEnablePeerAccess(primary_context(peer), 0)[0]
    if status == cu.CUresult.CUDA_ERROR_TOO_MANY_PEERS:
        return False
    if status != cu.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:  # by another pipeline, or another library
        check(status, f"cuCtxEnablePeerAccess of GPU {peer} for GPU {ordinal}")
    return True


def disable_peer_access(ordinal: int, peer: int) -> None:
    """Take that back, for a measurement: others in this process may count on it."""
    from cuda.bindings import driver as cu

    check(cu.cuCtxSetCurrent(primary_context(ordinal)), "cuCtxSetCurrent")
    status = cu.cuCtxDisablePeerAccess(primary_context(peer))[0]
    if status != cu.CUresult.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED:
        check(status, f"cuCtxDisablePeerAccess of GPU {peer} for GPU {ordinal}")

"""A GPU's engines through cuda.core: streams, events, page-locked memory, copies, graphs."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import driver
from ..device_array import DeviceArray
from ..driver import check
from .windows import window


class GpuEngines:
    """What a pipeline asks of a GPU. The engines of a model (`ModelEngines`) answer to the same names.

    Args:
        ordinal: which GPU; by default the current one.

    Raises:
        LaunchError: there is none.
    """

    modelled = False

    def __init__(self, ordinal: int | None = None) -> None:
        if not driver.device_count():
            raise driver.LaunchError("there is no CUDA GPU (or no driver) here; pass a Model(…) to run without one")
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

    def enter_thread(self) -> None:
        """Make the GPU this thread's current one."""
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

    # Work.

    def copy_in(self, target: DeviceArray, source: np.ndarray, stream: Any) -> None:
        """Enqueue a copy to the device; both are contiguous."""
        if source.nbytes:
            from cuda.bindings import driver as cu

            address = source.ctypes.data
            check(cu.cuMemcpyHtoDAsync(target.pointer, address, source.nbytes, stream.handle), "cuMemcpyHtoDAsync")

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

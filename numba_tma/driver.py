"""The CUDA driver, for launching: devices, streams, loaded kernels, staging copies. Nothing here runs without a GPU."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

# The opt-in limit of shared memory a block is a device attribute; above this much a kernel has to ask for it.
DEFAULT_SHARED_LIMIT = 48 * 1024
_local = threading.local()


class LaunchError(Exception):
    """The driver refused a launch or an allocation; the message has its own name for the reason."""


@functools.cache
def _driver() -> ModuleType:
    """cuda.bindings' driver module, with the driver initialised (where there is one)."""
    from cuda.bindings import driver

    driver.cuInit(0)
    return driver


_explanations: list[Callable[[], LaunchError | None]] = []


def explain_failures(explain: Callable[[], LaunchError | None]) -> None:
    """Ask `explain` at each call that fails: it may know an error that says more than the driver's code."""
    _explanations.append(explain)


def failure(status: object, what: str) -> LaunchError:
    """The error for a call that failed, naming `what` and the driver's error code, unless more is known."""
    for explain in _explanations:
        explained = explain()
        if explained is not None:
            return explained
    return LaunchError(f"{what}: {getattr(status, 'name', status)}")


def check(result: tuple | object, what: str) -> object:
    """The value of a cuda.bindings call.

    Raises:
        LaunchError: naming `what` and the driver's error code, or what is known to be the reason.
    """
    status, *values = result if isinstance(result, tuple) else (result,)
    if int(status) != 0:
        raise failure(status, what)
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def device_count() -> int:
    """Number of CUDA GPUs; 0 where there is no driver."""
    try:
        status, count = _driver().cuDeviceGetCount()
    except (ImportError, RuntimeError, OSError):
        return 0
    return count if int(status) == 0 else 0


def current_device() -> int:
    """Ordinal of the GPU whose context is current in this thread; GPU 0's primary context is made so if none is."""
    driver = _driver()
    status, device = driver.cuCtxGetDevice()
    if int(status) == 0:
        return int(device)
    device = check(driver.cuDeviceGet(0), "cuDeviceGet")
    context = check(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain")
    check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return 0


def ensure_context() -> None:
    """Make a context current in this thread, once; cheap from then on."""
    if not getattr(_local, "ready", False):
        current_device()
        _local.ready = True


@functools.cache
def attribute(name: str, ordinal: int = 0) -> int:
    """A device attribute by the last part of its CU_DEVICE_ATTRIBUTE_ name."""
    driver = _driver()
    key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return check(driver.cuDeviceGetAttribute(key, check(driver.cuDeviceGet(ordinal), "cuDeviceGet")), name)


def capability(ordinal: int = 0) -> tuple[int, int]:
    """Compute capability, (9, 0) for Hopper."""
    return attribute("COMPUTE_CAPABILITY_MAJOR", ordinal), attribute("COMPUTE_CAPABILITY_MINOR", ordinal)


@functools.cache
def device_name(ordinal: int = 0) -> str:
    """The GPU's product name."""
    driver = _driver()
    name = check(driver.cuDeviceGetName(128, check(driver.cuDeviceGet(ordinal), "cuDeviceGet")), "cuDeviceGetName")
    return name.split(b"\0")[0].decode()


def stream_handle(stream: object) -> int:
    """The CUstream of a stream: an int, a Numba, CuPy, PyTorch or cuda.core stream, or None (default stream).

    Raises:
        TypeError: the object is none of these.
    """
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    for attribute_name in ("cuda_stream", "ptr"):  # PyTorch, CuPy
        handle = getattr(stream, attribute_name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    handle = getattr(stream, "handle", None)
    if handle is not None:  # Numba: an int, or a ctypes pointer whose value is None for the default stream
        return int(getattr(handle, "value", handle) or 0)
    raise TypeError(
        f"stream: {type(stream).__name__} is no CUDA stream; pass an int handle or a Numba, CuPy, PyTorch or "
        f"cuda.core stream"
    )


def is_capturing(stream: int) -> bool:
    """Whether a stream's work is being captured into a graph, rather than run."""
    driver = _driver()
    status = check(driver.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
    return status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE


class LoadedKernel:
    """A cubin loaded on a device, with its limits raised to what its launches ask for."""

    def __init__(self, cubin: bytes, name: str, ordinal: int, cluster_blocks: int = 1) -> None:
        driver = _driver()
        self._image = cubin
        self._ordinal = ordinal
        self._shared = 0
        self.name = name
        self._library = check(
            driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0), f"{name}: cuLibraryLoadData"
        )
        self.kernel = check(driver.cuLibraryGetKernel(self._library, name.encode()), f"{name}: cuLibraryGetKernel")
        self.function = driver.CUfunction(int(self.kernel))
        if cluster_blocks > 8:
            self._set("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)

    def _set(self, attribute_name: str, value: int) -> None:
        driver = _driver()
        key = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute_name}")
        device = check(driver.cuDeviceGet(self._ordinal), "cuDeviceGet")
        check(
            driver.cuKernelSetAttribute(key, value, self.kernel, device),
            f"{self.name}: {attribute_name} {value}",
        )

    def allow_shared(self, shared_bytes: int) -> None:
        """Opt in to `shared_bytes` of dynamic shared memory a block.

        Raises:
            LaunchError: the device has less.
        """
        if shared_bytes <= max(self._shared, DEFAULT_SHARED_LIMIT):
            return
        limit = attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", self._ordinal)
        if shared_bytes > limit:
            raise LaunchError(
                f"{self.name}: {shared_bytes} B of shared memory a block, {device_name(self._ordinal)} has {limit} B; "
                f"take fewer stages or smaller tiles"
            )
        self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_bytes)
        self._shared = shared_bytes

    def variable(self, name: str) -> int:
        """Address of a variable of the module on the current GPU."""
        address, _ = check(
            _driver().cuLibraryGetGlobal(self._library, name.encode()), f"{self.name}: cuLibraryGetGlobal {name}"
        )
        return int(address)

    def blocks_per_multiprocessor(self, threads: int, shared_bytes: int) -> int:
        """How many blocks of this size an SM holds at once (the driver's occupancy calculation)."""
        self.allow_shared(shared_bytes)
        driver = _driver()
        return check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared_bytes),
            "occupancy",
        )

    def resident_blocks(self, block: Sequence[int], shared_bytes: int, cluster: Sequence[int] | None = None) -> int:
        """How many blocks of this size the whole device holds at once, in clusters if they form some: a cluster needs
        a group of neighbouring SMs (a GPC) with room for all of its blocks."""
        self.allow_shared(shared_bytes)
        if not cluster or tuple(cluster) == (1, 1, 1):
            threads = block[0] * block[1] * block[2]
            return self.blocks_per_multiprocessor(threads, shared_bytes) * attribute(
                "MULTIPROCESSOR_COUNT", self._ordinal
            )
        config = launch_config(cluster, block, shared_bytes, 0, cluster)
        clusters = check(_driver().cuOccupancyMaxActiveClusters(self.function, config), "cuOccupancyMaxActiveClusters")
        return clusters * cluster[0] * cluster[1] * cluster[2]


def launch_config(
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    stream: int,
    cluster: Sequence[int] | None,
    programmatic: bool = False,
) -> object:
    """A CUlaunchConfig; `grid` counts blocks, also when they form clusters. `programmatic` allows the kernel to start
    before the one in front of it has ended."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    attributes = []
    if cluster and tuple(cluster) != (1, 1, 1):
        entry = driver.CUlaunchAttribute()
        entry.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = entry.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster
        entry.value.clusterDim = dimension
        attributes.append(entry)
    if programmatic:
        entry = driver.CUlaunchAttribute()
        entry.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        entry.value.programmaticStreamSerializationAllowed = 1
        attributes.append(entry)
    if attributes:
        config.attrs = attributes
        config.numAttrs = len(attributes)
    return config


def allocate(nbytes: int) -> int:
    """Address of `nbytes` of device memory, aligned to at least 256 B."""
    current_device()
    return int(check(_driver().cuMemAlloc(max(nbytes, 1)), f"allocating {nbytes} B on the device"))


def free(address: int) -> None:
    """Give device memory back."""
    check(_driver().cuMemFree(address), "cuMemFree")


def memory() -> tuple[int, int]:
    """Bytes of the current GPU's memory that are free, and all of them."""
    current_device()  # the driver asks for a context
    available, total = check(_driver().cuMemGetInfo(), "cuMemGetInfo")
    return int(available), int(total)


def mapped_memory(nbytes: int) -> tuple[np.ndarray, int]:
    """Host memory that GPUs can write, zeroed: as a NumPy uint8 array, and its address for kernels.

    It outlives a context that a kernel's fault has taken down, and is not given back.
    """
    driver = _driver()
    current_device()
    flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
    address = int(check(driver.cuMemHostAlloc(nbytes, flags), f"allocating {nbytes} B of mapped host memory"))
    memory = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
    memory[:] = 0
    return memory, int(check(driver.cuMemHostGetDevicePointer(address, 0), "cuMemHostGetDevicePointer"))


def copy_to_host(pointer: int, nbytes: int) -> np.ndarray:
    """Bytes of device memory as a NumPy uint8 array (synchronous)."""
    target = np.empty(nbytes, np.uint8)
    if nbytes:
        check(_driver().cuMemcpyDtoH(target.ctypes.data, pointer, nbytes), "copying from the device")
    return target


def copy_to_device(pointer: int, source: np.ndarray) -> None:
    """Write a contiguous NumPy array to device memory (synchronous)."""
    if source.nbytes:
        check(_driver().cuMemcpyHtoD(pointer, source.ctypes.data, source.nbytes), "copying to the device")


def fill(pointer: int, value: int, nbytes: int) -> None:
    """Set each of `nbytes` bytes of device memory to `value` (0 to 255)."""
    check(_driver().cuMemsetD8(pointer, value, nbytes), "filling device memory")


def synchronize(stream: int = 0) -> None:
    """Wait for everything enqueued on `stream`."""
    check(_driver().cuStreamSynchronize(stream), "cuStreamSynchronize")


class ArgumentBuffer:
    """A kernel's parameters packed one after another, and the array of pointers to them that cuLaunchKernelEx reads.

    The driver could take the packed buffer as it is (`extra`), but where a parameter goes in it is the compiler's
    choice: ptxas puts a 64-byte aligned one 48 bytes behind the start.
    """

    def __init__(self, nbytes: int, offsets: Sequence[int]) -> None:
        # The tensor maps inside want 64-byte alignment, which ctypes does not promise.
        self._raw = ctypes.create_string_buffer(nbytes + 64)
        start = -ctypes.addressof(self._raw) % 64
        self.view = memoryview(self._raw).cast("B")[start : start + nbytes]
        first = ctypes.addressof(self._raw) + start
        self._pointers = (ctypes.c_void_p * max(len(offsets), 1))(*(first + offset for offset in offsets))
        self.address = ctypes.addressof(self._pointers)


@functools.cache
def _launch_function() -> Callable[[int, int, int, None], int]:
    """cuLaunchKernelEx itself: called by address it costs a microsecond less than through its wrapper."""
    driver = _driver()
    pointer, _ = check(driver.cuGetProcAddress(b"cuLaunchKernelEx", 12000, 0), "cuGetProcAddress cuLaunchKernelEx")
    address = ctypes.c_void_p
    return ctypes.CFUNCTYPE(ctypes.c_int, address, address, address, address)(int(pointer))


class Launch:
    """A kernel, its launch configuration and a buffer for its parameters; calling it enqueues one launch.

    The parameters are what `buffer.view` holds at that moment: the driver copies them before the call returns.
    """

    def __init__(self, config: object, loaded: LoadedKernel, buffer: ArgumentBuffer, keep: object = None) -> None:
        self.buffer = buffer
        self._name = loaded.name
        self._alive = (config, loaded, keep)
        self._submit = _launch_function()
        self._addresses = (int(config.getPtr()), int(loaded.kernel), buffer.address, None)

    def __call__(self) -> None:
        """Enqueue; returns before the kernel has run.

        Raises:
            LaunchError: the driver refused it.
        """
        status = self._submit(*self._addresses)
        if status:
            raise failure(_driver().CUresult(status), f"{self._name}: cuLaunchKernelEx")

"""The parts of an SM that things queue for, and the timed intervals they leave."""

from __future__ import annotations

from collections import deque

from .device import Device
from .model import Interval
from .ops import PIPES


class Timeline:
    """Collects intervals, in cycles, up to a number; `rows` joins those of one row that follow each other."""

    def __init__(self, device: Device, most: int) -> None:
        self._ns = 1e3 / device.clock_mhz
        self._most = most
        self.intervals: list[Interval] = []
        self.truncated = False

    def add(self, row: str, start: float, end: float, kind: str, detail: str = "") -> None:
        """Note an interval."""
        if end <= start:
            return
        if len(self.intervals) >= self._most:
            self.truncated = True
            return
        self.intervals.append(Interval(row, start * self._ns, end * self._ns, kind, detail))


class Server:
    """Serves one after the other; `busy` sums the time."""

    def __init__(self, timeline: Timeline, row: str = "") -> None:
        self.free = 0.0
        self.busy = 0.0
        self._timeline = timeline
        self._row = row
        self._begun = 0.0

    def serve(self, time: float, cycles: float) -> float:
        """When what comes at `time` and takes so many cycles is done."""
        if self.free < time:
            self.flush()
            self._begun = self.free = time
        self.free += cycles
        self.busy += cycles
        return self.free

    def flush(self) -> None:
        """Note the latest stretch in which it was never idle."""
        if self._row:
            self._timeline.add(self._row, self._begun, self.free, "busy")


class Scheduler:
    """A quarter of an SM: issues an instruction a cycle, and has a pipe of each kind and a tensor core."""

    def __init__(self, timeline: Timeline, row: str) -> None:
        self.slots = 0.0
        self.pipes = [0.0] * len(PIPES)
        self.issued = 0.0
        self.tensor = Server(timeline, f"{row}/tensor core")

    def run(self, time: float, slots: float, cycles: float, pipes: tuple[tuple[int, float], ...]) -> float:
        """When a warp that comes at `time` is through with a stretch that takes it so many cycles alone."""
        self.issued += slots
        # Others' instructions go in between, so a stretch reserves its slots from now on, not a stretch of time.
        self.slots = max(self.slots, time) + slots
        end = max(time + cycles, self.slots)
        for pipe, busy in pipes:
            self.pipes[pipe] = max(self.pipes[pipe], time) + busy
            end = max(end, self.pipes[pipe])
        return end


class Memory:
    """The way from L2 and memory to one SM. Bytes come in the order in which they were asked for.

    `share` is the SM's part of what all have together on average, of which it takes `stretch` times as much while it
    asks for something: the others are idle at times, as it is.
    """

    def __init__(
        self, device: Device, share: float, active: float, stretch: float, timeline: Timeline, row: str
    ) -> None:
        self._device = device
        self._active = active
        self._means = (device.memory_total * share, device.l2_total * share, device.store_total * share)
        # No more than one SM can have.
        ports = (device.memory_port, device.l2_port, device.store_port)
        rates = [min(port, mean * stretch) for port, mean in zip(ports, self._means, strict=True)]
        self._rate, self._port_rate, self._store_rate = rates
        self.port = Server(timeline, f"{row}/from L2")
        self.memory = Server(timeline, f"{row}/from memory")
        self.stores = Server(timeline, f"{row}/to L2")
        self._flying: deque[tuple[float, float]] = deque()
        self._in_flight = 0.0

    def used(self, cycles: float) -> float:
        """How much was asked for of what there is, in that many cycles: of memory, L2 or stores, whichever is most."""
        servers = (self.memory, self.port, self.stores)
        rates = (self._rate, self._port_rate, self._store_rate)
        return max(s.busy * r / mean for s, r, mean in zip(servers, rates, self._means, strict=True)) / max(cycles, 1.0)

    def load(self, time: float, nbytes: float, missing: float, latency: float) -> float:
        """When so many bytes that are asked for at `time` are there; the part `missing` of them is not in L2.

        `latency` is that of L2, for the first bytes.
        """
        device = self._device
        end = self.port.serve(time, nbytes / self._port_rate) + latency
        if missing:
            extra = min(missing, 1.0) * (device.latencies["memory"] - device.latencies["l2"])
            end = max(end + extra, self._from_memory(time, nbytes * missing) + latency + extra)
        return end

    def _from_memory(self, time: float, nbytes: float) -> float:
        flying = self._flying
        while flying and flying[0][0] <= time:
            self._in_flight -= flying.popleft()[1]
        end = self.memory.serve(time, nbytes / self._rate)
        self._in_flight += nbytes
        late = end + self._device.latencies["memory"]
        flying.append((late, nbytes))
        return max(end, time + self._knee(self._in_flight * self._active))

    def _knee(self, in_flight: float) -> float:
        """Latency that comes on top when so much is under way to every SM."""
        points = self._device.memory_knee
        below = points[0]
        for point in points[1:]:
            if in_flight < point[0]:
                part = (in_flight - below[0]) / (point[0] - below[0])
                return below[1] + part * (point[1] - below[1])
            below = point
        return below[1]

    def store(self, time: float, nbytes: float, spilled: float) -> tuple[float, float]:
        """When the warp may go on, and when the bytes are written; the part `spilled` has to go on to memory."""
        device = self._device
        end = self.stores.serve(time, nbytes / self._store_rate)
        if spilled:
            # Memory that is written to is slow to read.
            end = max(end, self._from_memory(time, nbytes * spilled * device.memory_write))
        return max(time, end - device.store_buffer / self._store_rate), end

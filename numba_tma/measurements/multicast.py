"""Benchmark of multicast for docs/multicast.md: what it does to the traffic that the GPU's counters see."""

from __future__ import annotations

import numpy as np

from .. import bench, counters
from ..device_array import DeviceArray
from ..kernels import Case, multicast
from .timing import Record

_SHAPE = (64, 1024, 4096)
_TRAFFIC = {
    "l2_sectors_read": "lts__t_sectors_op_read.sum",
    "l2_sectors_read_by_sms": "lts__t_sectors_srcunit_tex_op_read.sum",
    "bytes_into_sms": "l1tex__m_xbar2l1tex_read_bytes.sum",
    "dram_bytes_read": "dram__bytes_read.sum",
}


def multicast_traffic(clusters: tuple[int, ...] = (2, 4, 8)) -> list[Record]:
    """What multicast does to the traffic between L2 and the SMs, and to the time, for clusters of several sizes."""
    ways: list[tuple[str, str, Record]] = [("each block for itself", "tma", {})]
    ways += [(f"clusters of {cluster}", "multicast", {"cluster": cluster}) for cluster in clusters]
    targets = [counters.Target("multicast", name, _SHAPE, "float32", options) for _, name, options in ways]
    counted = counters.read(targets, list(_TRAFFIC.values()))
    case = Case(_SHAPE, "float32")
    host = multicast.PROBLEM.inputs(case, np.random.default_rng(0))
    arrays = {name: DeviceArray(array) for name, array in host.items()}
    launches = {
        str(number): multicast.PROBLEM.variant(name).bind(arrays, **options)
        for number, (_, name, options) in enumerate(ways)
    }
    timings = bench.time_launches(launches, repeats=21, flush=False)  # x fits in the L2 cache, and stays there
    records = []
    for number, ((what, _, _), found) in enumerate(zip(ways, counted, strict=True)):
        records.append(
            {
                "what": what,
                "shape": list(_SHAPE),
                "seconds": timings[str(number)].median,
                "bytes_into_shared_memory": multicast.PROBLEM.bytes_moved(case),
                **{what: found[metric] for what, metric in _TRAFFIC.items()},
            }
        )
    return records

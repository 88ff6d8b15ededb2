"""What the benchmarks of several pages have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import bench, suite

Record = dict[str, Any]


def timed(
    launches: dict[str, Callable[[], object]], rows: list[tuple[str, Record]], common: Record, nbytes: int
) -> list[Record]:
    """A record for each launch: what it is, its time and rate, and the share of the driver's copy."""
    timings = bench.time_launches(launches, repeats=7, warm_up=1)
    rate = suite.device_copy_rate()
    records = []
    for (name, options), timing in zip(rows, timings.values(), strict=True):
        gb_per_s = nbytes / timing.median / 1e9
        record = {"variant": name, **common, "options": options, "seconds": timing.median}
        records.append({**record, "gb_per_s": gb_per_s, "share_of_device_copy": gb_per_s / rate})
    return records

"""Table of docs/multicast.md beyond the suite's: traffic between L2 and the SMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..report import markdown, seconds
from .records import MOVEMENT, Record, load

_SECTOR = 32  # bytes


def traffic(records: Sequence[Record]) -> str:
    """What a cluster saves between L2 and the SMs: what all SMs received, over what L2 was read for it."""
    rows = []
    for record in records:
        read = _SECTOR * record["l2_sectors_read_by_sms"]
        rows.append(
            [
                record["what"],
                f"{record['bytes_into_sms'] / 1e6:,.0f}",
                f"{read / 1e6:,.0f}",
                f"{record['bytes_into_sms'] / read:.2f}×",
                seconds(record["seconds"]),
            ]
        )
    return markdown(rows, ["", "MB into SMs", "MB read from L2", "fewer by", "time"])


TABLES: dict[str, Callable[[Path], str]] = {
    "multicast traffic": lambda results: traffic(load(results, MOVEMENT)["multicast_traffic"]),
}

"""Table of what multicast saves, made of records like those measured."""

from __future__ import annotations

from cells import row

from numba_tma.tables import multicast as tables_multicast


def test_traffic():
    def measured(what, sectors, seconds):
        return {
            "what": what,
            "l2_sectors_read_by_sms": sectors,
            "bytes_into_sms": 1_080_000_000.0,
            "seconds": seconds,
        }

    made = tables_multicast.traffic(
        [measured("alone", 33_750_000.0, 200e-6), measured("clusters of 4", 8_437_500.0, 80e-6)]
    )
    assert row(made, "alone") == ["alone", "1,080", "1,080", "1.00×", "200 µs"]
    assert row(made, "clusters") == ["clusters of 4", "1,080", "270", "4.00×", "80 µs"]

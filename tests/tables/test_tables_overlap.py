"""Tables of docs/overlap.md and docs/overlap_pitfalls.md from data of known content."""

from __future__ import annotations

import json

import pytest
from cells import row, rows

from numba_tma.overlap import soak
from numba_tma.overlap.pitfalls import PITFALLS as DEMONSTRATIONS
from numba_tma.tables.overlap import PEER_RESULTS, PITFALLS, RESULTS, TABLES, fault_rows

PINNING = {
    "bytes": 8 << 20,
    "pageable_copy_seconds": 10e-3,
    "pinned_copy_seconds": 2e-3,
    "pin_seconds": 20e-3,
    "fill_seconds": 9e-3,
}
CALLS = {
    f"{kind}_{way}_{what}_seconds": 1e-3
    for kind in ("pinned", "pageable")
    for way in ("h2d", "d2h")
    for what in ("call", "done")
}
EACH_RUN = {"bytes_each_way": 1 << 20, "pinned_seconds": 12.5e-3, "pageable_seconds": 0.04}


def test_all_demonstrations_have_a_table():
    assert PITFALLS.keys() == DEMONSTRATIONS.keys()


@pytest.mark.parametrize(
    ("name", "found", "row"),
    [
        ("pageable", EACH_RUN, ["eight batches on three streams, pinned", "12.5 ms"]),
        ("pageable", EACH_RUN | CALLS, ["eight batches on three streams, pinned", "", "12.5 ms"]),
        ("pageable", EACH_RUN | CALLS, ["pageable, from the device", "1 ms", "1 ms"]),
        ("pinning_once", PINNING, ["copies until the allocation has paid, without filling", "2.5"]),
        ("pinning_once", PINNING, ["the same, filled from pageable memory for each copy", "never"]),
        (
            "pinning_once",
            PINNING | {"fill_seconds": 4e-3},
            ["the same, filled from pageable memory for each copy", "5.0"],
        ),
        ("many_streams", {"bytes_each_way": 1 << 24, "seconds_by_streams": {"2": 1.5e-3}}, ["2", "1.5 ms"]),
        ("loop", {"batches": 3, "as_written_wrong": [0, 2], "mended_wrong": []}, ["as written", "0, 2"]),
    ],
)
def test_pitfalls(tmp_path, name, found, row):
    """The same rows for the terminal and, out of the results' file, for the page."""
    assert row in PITFALLS[name](found)[0]
    (tmp_path / RESULTS).write_text(json.dumps({"pitfalls": {name: found}}))
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TABLES[f"pitfall {name}"](tmp_path).splitlines()
    ]
    assert row in lines


def test_short_kernels_are_timed_by_the_batch(tmp_path):
    kinds = ("launches_three_streams", "launches_producer", "graph_three_streams", "graph_producer")
    kinds += ("one_kernel_launches", "one_kernel_graph")
    times = {f"{kind}_seconds": 1e-3 * (number + 1) for number, kind in enumerate(kinds)}
    (tmp_path / RESULTS).write_text(json.dumps({"sweeps": {"graphs": {"batches": 10, "launches": 64} | times}}))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in TABLES["overlap graphs"](tmp_path).splitlines()
    ]
    assert rows[2:] == [
        ["64 kernels, caller's thread", "100 µs", "300 µs"],
        ["64 kernels, producer", "200 µs", "400 µs"],
        ["one kernel, caller's thread", "500 µs", "600 µs"],
    ]


def test_a_fault_that_nothing_noticed_shows():
    fault = {"mode": "producer", "stage": soak.COMPUTE, "batch": 5, "delivered": 12, "right": 11, "error": None}
    ((_, where, error, delivered, back, _),) = fault_rows([fault | {"slots_back": False, "right_afterwards": 12}])[0]
    assert (where, error, delivered, back) == ("compute, batch 5", "none", "12, 11 right", "NO")


def _made(tmp_path, name: str, found: dict) -> list[list[str]]:
    (tmp_path / PEER_RESULTS).write_text(json.dumps(found))
    return rows(TABLES[name](tmp_path))


def test_copies_between_gpus(tmp_path):
    rates = {"device": 0, "peer": 1, "to_device_alone": 4e11, "to_peer_alone": 3e11, "to_device": 2e11, "to_peer": 1e11}
    found = {"peer": {"rates": [rates | {"access": False}, rates | {"access": True, "to_peer": 1.5e11}]}}
    assert _made(tmp_path, "overlap peer", found) == [
        ["through the host, the other direction idle", "400.0", "300.0"],
        ["through the host, the other direction busy", "200.0", "100.0"],
        ["direct, the other direction idle", "400.0", "300.0"],
        ["direct, the other direction busy", "200.0", "150.0"],
    ]
    assert row(TABLES["overlap peer"](tmp_path), "GB/s") == ["GB/s", "GPU 1 to GPU 0", "GPU 0 to GPU 1"]


def test_pipelines_fed_from_elsewhere(tmp_path):
    ran = {
        "batches": 32,
        "bytes": 64 << 20,
        "seconds": 0.05,
        "copy_in_alone_seconds": 2e-4,
        "share_of_ideal": 0.981,
        "utilisation": {"H2D": 0.1, "compute": 0.9, "D2H": 0.95},
    }
    made = _made(tmp_path, "overlap fed", {"peer": {"pipeline": {"another GPU": ran}}})
    assert made == [["another GPU", "200 µs", "50 ms", "10%", "90%", "95%", "98.1%"]]
    assert row(TABLES["overlap fed"](tmp_path), "batches of")[:3] == [
        "batches of 64 MiB in",
        "a copy in, alone",
        "32 batches",
    ]


def test_batches_over_gpus_and_what_transfers_take(tmp_path):
    kind = {"every": 0, "batches": 100, "bytes_out": 1.6e6}
    found = [
        kind | {"gpus": 0, "seconds": 0.5, "copied_seconds": 1.0},
        kind | {"gpus": 1, "seconds": 2.0, "transfer_seconds": {"straight": 1e-3, "through the scheduler": 4e-3}},
        kind | {"gpus": 2, "batches": 200, "seconds": 2.5},
    ]
    assert _made(tmp_path, "overlap shards", {"shards": found}) == [
        ["one process, one GPU", "1.6 MB", "200", ""],
        ["one process, one GPU, results copied", "1.6 MB", "100", ""],
        ["Dask, 1 GPU", "1.6 MB", "50", "1.00×"],
        ["Dask, 2 GPUs", "1.6 MB", "80", "1.60×"],
    ]
    assert _made(tmp_path, "overlap transfers", {"shards": found}) == [
        ["1.6 MB, straight", "1 ms", "1.60"],
        ["1.6 MB, through the scheduler", "4 ms", "0.40"],
    ]

"""Tables of docs/overlap.md and docs/overlap_pitfalls.md, and what they answer in docs/claims.md.

`PITFALLS`, `SWEEPS` and the functions of a name in `_rows` make rows of what a run has found, which scripts/overlap.py
prints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..report import markdown, seconds
from .records import load

Rows = tuple[list[list[Any]], list[str]]  # and the columns' names

RESULTS = "h200_overlap.json"
PEER_RESULTS = "h200_peer.json"
_MODES = {
    "serial_pageable": "serial, pageable memory",
    "serial_pinned": "serial, pinned memory",
    "two_streams": "two streams in turn",
    "three_streams": "three streams, one an engine",
    "producer": "three streams and a producer thread",
}


def _runs(results: Path) -> dict[tuple[str, int], dict[str, Any]]:
    return {(run["mode"], run["batches"]): run for run in load(results, RESULTS)["modes"]["runs"]}


def _rates(results: Path) -> str:
    rates = load(results, RESULTS)["balance"]["rates"]
    rows = [["pinned, the other direction idle", f"{rates['h2d_alone'] / 1e9:.1f}", f"{rates['d2h_alone'] / 1e9:.1f}"]]
    rows += [["pinned, the other direction busy", *(f"{rate:.1f}" for rate in _busy_rates(results))]]
    rows += [["pageable", f"{rates['h2d_pageable'] / 1e9:.1f}", f"{rates['d2h_pageable'] / 1e9:.1f}"]]
    return markdown(rows, ["GB/s", "to the device", "from the device"])


def _busy_rates(results: Path) -> tuple[float, float]:
    """GB/s in and out, of the copies that make the ideal: with the other direction busy."""
    found = load(results, RESULTS)
    nbytes, alone = 4 * found["balance"]["words"], found["modes"]["alone_seconds"]
    return nbytes / alone["h2d"] / 1e9, nbytes / alone["d2h"] / 1e9


def _modes(results: Path) -> str:
    runs = _runs(results)
    counts = sorted({count for _, count in runs})
    rows = []
    for mode, words in _MODES.items():
        row = [words]
        for count in counts:
            run = runs[mode, count]
            row += [seconds(run["seconds"]), f"{run['times_serial_pinned']:.2f}×", f"{run['share_of_ideal']:.1%}"]
        rows.append(row)
    headers = [word for count in counts for word in (f"{count} batches", "vs serial, pinned", "of ideal")]
    return markdown(rows, ["", *headers])


def _use(results: Path) -> str:
    runs = _runs(results)
    count = max(count for _, count in runs)
    rows = [
        [words, *(f"{runs[mode, count]['utilisation'][stage]:.0%}" for stage in ("H2D", "compute", "D2H"))]
        for mode, words in _MODES.items()
    ]
    return markdown(rows, [f"busy, of {count} batches", "copy in", "compute", "copy out"])


def _shares(found: list[dict[str, Any]]) -> Rows:
    rows = [
        [
            f"{row['kernel_over_copy']:.2f}",
            seconds(row["seconds"]),
            seconds(row["kernels_seconds"]),
            f"{row['copying_hidden']:.0%}",
        ]
        for row in found
    ]
    return rows, ["kernel / copy", "16 batches", "kernels alone", "copying hidden"]


def _depths(found: dict[str, float]) -> Rows:
    best = min(found.values())
    rows = [[depth, seconds(value), f"{value / best:.2f}"] for depth, value in found.items()]
    return rows, ["slots", "16 batches", "relative"]


def _graphs(found: dict[str, Any]) -> Rows:
    kinds = (
        (f"{found['launches']} kernels, caller's thread", "{}_three_streams_seconds"),
        (f"{found['launches']} kernels, producer", "{}_producer_seconds"),
        ("one kernel, caller's thread", "one_kernel_{}_seconds"),
    )
    rows = [
        [words, *(seconds(found[key.format(how)] / found["batches"]) for how in ("launches", "graph"))]
        for words, key in kinds
    ]
    return rows, ["time of a batch of", "launched", "as a graph"]


def _preparing(found: dict[str, Any]) -> Rows:
    rows = [
        [
            _MODES[mode],
            seconds(row["prepare_seconds"]),
            seconds(row["seconds"]),
            *(f"{row['utilisation'][stage]:.0%}" for stage in ("prepare", "H2D", "compute", "D2H")),
        ]
        for mode, row in found.items()
    ]
    return rows, ["", "copying a batch on the host", "16 batches", "host", "copy in", "compute", "copy out"]


def soak_rows(runs: list[dict[str, Any]]) -> Rows:
    """Of runs of `soak.soak`."""
    rows = [
        [
            _MODES[run["mode"]],
            f"{run['batches']:,}",
            run["misplaced"],
            run["corrupt"],
            f"{round(run['host_growth_bytes'] / 2**20, 1) + 0.0} MiB",
            f"{round(run['device_growth_bytes'] / 2**20, 1) + 0.0} MiB",
            seconds(run["seconds"]),
        ]
        for run in runs
    ]
    return rows, ["", "batches", "out of order", "wrong", "host memory grew", "device memory grew", "time"]


def fault_rows(faults: list[dict[str, Any]]) -> Rows:
    """Of runs of `soak.with_fault`."""
    rows = [
        [
            _MODES[fault["mode"]],
            f"{fault['stage']}, batch {fault['batch']}",
            f"{fault['error']['stage']}, batch {fault['error']['batch']}" if fault["error"] else "none",
            f"{fault['delivered']}, {fault['right']} right",
            "yes" if fault["slots_back"] else "NO",
            fault["right_afterwards"],
        ]
        for fault in faults
    ]
    return rows, ["", "fault put into", "error names", "delivered before", "slots back", "right in a second run"]


def peer_rows(found: list[dict[str, Any]]) -> Rows:
    """Of `rates.measure_peer_rates`."""
    rows = []
    for rates in found:
        how = "direct" if rates["access"] else "through the host"
        for other, suffix in (("idle", "_alone"), ("busy", "")):
            there, back = (f"{rates[f'to_{end}{suffix}'] / 1e9:.1f}" for end in ("device", "peer"))
            rows.append([f"{how}, the other direction {other}", there, back])
    ends = found[0]["peer"], found[0]["device"]
    return rows, ["GB/s", *("GPU {} to GPU {}".format(*way) for way in (ends, ends[::-1]))]


def fed_rows(found: dict[str, dict[str, Any]]) -> Rows:
    """Of `peers.fed_from`."""
    rows = [
        [
            place,
            seconds(row["copy_in_alone_seconds"]),
            seconds(row["seconds"]),
            *(f"{row['utilisation'][stage]:.0%}" for stage in ("H2D", "compute", "D2H")),
            f"{row['share_of_ideal']:.1%}",
        ]
        for place, row in found.items()
    ]
    row = next(iter(found.values()))
    runs = f"{row['batches']} batches"
    where = f"batches of {_mib(row['bytes'])} in"
    return rows, [where, "a copy in, alone", runs, "copy in busy", "compute busy", "copy out busy", "of ideal"]


def shard_rows(found: list[dict[str, Any]]) -> Rows:
    """Of `gpt2.benchmark_shards.by_gpus`."""
    rows = []
    for every in dict.fromkeys(row["every"] for row in found):
        of_kind = [row for row in found if row["every"] == every]
        one = next((row for row in of_kind if row["gpus"] == 1), None)
        for row in of_kind:
            rate = row["batches"] / row["seconds"]
            to_one = rate * one["seconds"] / one["batches"] if one is not None and row["gpus"] else None
            where = f"Dask, {row['gpus']} GPU{'s' * (row['gpus'] > 1)}" if row["gpus"] else "one process, one GPU"
            size = f"{row['bytes_out'] / 1e6:.3g} MB"
            rows.append([where, size, f"{rate:.3g}", f"{to_one:.2f}×" if to_one else ""])
            if not row["gpus"]:
                copied = row["batches"] / row["copied_seconds"]
                rows.append([f"{where}, results copied", size, f"{copied:.3g}", ""])
    return rows, ["8 × 1024 tokens a batch", "a batch's results", "batches a second", "to Dask on one GPU"]


def transfer_rows(found: list[dict[str, Any]]) -> Rows:
    """Of the same: what Dask's transfers take."""
    rows = []
    for row in found:
        for way, taken in row.get("transfer_seconds", {}).items():
            size = f"{row['bytes_out'] / 1e6:.3g} MB"
            rows.append([f"{size}, {way}", seconds(taken), f"{row['bytes_out'] / taken / 1e9:.2f}"])
    return rows, ["a batch's results from a worker", "time", "GB/s"]


def _pageable(found: dict[str, Any]) -> Rows:
    kinds = ("pinned", "pageable")
    runs = [[f"eight batches on three streams, {kind}", seconds(found[f"{kind}_seconds"])] for kind in kinds]
    if "pinned_h2d_call_seconds" not in found:  # a model's copies have no calls
        return runs, ["", "done after"]
    calls = []
    for way, words in (("h2d", "to the device"), ("d2h", "from the device")):
        for kind in kinds:
            call, done = (found[f"{kind}_{way}_{what}_seconds"] for what in ("call", "done"))
            calls.append([f"{kind}, {words}", seconds(call), seconds(done)])
    return [*calls, *([words, "", took] for words, took in runs)], ["", "the call returns after", "done after"]


def _default_stream(found: dict[str, Any]) -> Rows:
    rows = [
        ["three streams of its own", seconds(found["own_streams_seconds"])],
        ["the default stream three times", seconds(found["default_stream_seconds"])],
    ]
    return rows, ["eight batches on", "time"]


def _no_wait(found: dict[str, Any]) -> Rows:
    rows = [["at once", f"{found['wrong_at_once']:,}"], ["after waiting", f"{found['wrong_when_awaited']:,}"]]
    return rows, [f"of {found['words']:,} words, read", "wrong"]


def _pinning(found: dict[str, Any]) -> Rows:
    size = _mib(found["bytes"])
    pageable, pinned, fill = (found[f"{what}_seconds"] for what in ("pageable_copy", "pinned_copy", "fill"))

    def copies_to_pay(each: float) -> str:
        return f"{found['pin_seconds'] / (pageable - each):.1f}" if each < pageable else "never"

    rows = [
        [f"copy of {size}, pageable", seconds(pageable)],
        [f"copy of {size}, pinned", seconds(pinned)],
        [f"allocate {size} of pinned memory", seconds(found["pin_seconds"])],
        ["fill it from pageable memory", seconds(fill)],
        ["copies until the allocation has paid, without filling", copies_to_pay(pinned)],
        ["the same, filled from pageable memory for each copy", copies_to_pay(fill + pinned)],
    ]
    return rows, ["", ""]


def _streams(found: dict[str, Any]) -> Rows:
    rows = [[streams, seconds(value)] for streams, value in found["seconds_by_streams"].items()]
    return rows, ["streams in turn", f"eight batches of {_mib(found['bytes_each_way'])}"]


def _loop(found: dict[str, Any]) -> Rows:
    rows = []
    for name, words in (("as_written", "as written"), ("mended", "with events")):
        wrong = ", ".join(map(str, found[f"{name}_wrong"])) or "none"
        rows.append([words, wrong])
    return rows, [f"the loop over {found['batches']} batches", "wrong results"]


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.3g} MiB"


PITFALLS: dict[str, Callable[[dict[str, Any]], Rows]] = {  # of `pitfalls.PITFALLS`, what each found
    "pageable": _pageable,
    "default_stream": _default_stream,
    "no_wait": _no_wait,
    "pinning_once": _pinning,
    "many_streams": _streams,
    "loop": _loop,
}
SWEEPS: dict[str, Callable[[Any], Rows]] = {
    "shares": _shares,
    "depths": _depths,
    "preparing": _preparing,
    "graphs": _graphs,
}


def claims(results: Path) -> list[list[str]]:
    """Rows for the table of docs/claims.md."""
    found, runs = load(results, RESULTS), _runs(results)
    rates, pageable = found["balance"]["rates"], found["pitfalls"]["pageable"]
    longer = [row for row in found["sweeps"]["shares"] if row["kernel_over_copy"] >= 1]
    hidden = min(longer, key=lambda row: row["kernel_over_copy"])
    streams = found["pitfalls"]["many_streams"]["seconds_by_streams"]
    loop = found["pitfalls"]["loop"]
    gains = [f"{runs['three_streams', count]['times_serial_pinned']:.2f} ×" for count in (4, 8)]
    return [
        ["16", "copy engines that the driver names", str(found["balance"]["copy_engines"])],
        [
            "16",
            "to and from the device: alone, and both at once",
            f"{rates['h2d_alone'] / 1e9:.0f} and {rates['d2h_alone'] / 1e9:.0f}; {{:.0f}} and {{:.0f}} GB/s".format(
                *_busy_rates(results)
            ),
        ],
        [
            "17",
            f"the call of a {pageable['bytes_each_way'] >> 20} MiB copy to the device returns after: pinned, pageable",
            f"{seconds(pageable['pinned_h2d_call_seconds'])}, {seconds(pageable['pageable_h2d_call_seconds'])}",
        ],
        [
            "19",
            f"kernel {hidden['kernel_over_copy']:.2f} × a copy, 16 batches: copying hidden",
            f"{hidden['copying_hidden']:.0%}",
        ],
        ["21", "three streams beside serial, balanced stages, 4 and 8 batches", " and ".join(gains)],
        ["22", "eight batches on 1, 2, 4, 32 streams", ", ".join(seconds(streams[n]) for n in ("1", "2", "4", "32"))],
        [
            "24",
            f"the loop as written: wrong of {loop['batches']} batches; with events",
            f"{len(loop['as_written_wrong'])}; {len(loop['mended_wrong'])}",
        ],
    ]


def headline(results: Path) -> list[list[str]]:
    """The row for the README."""
    run = _runs(results)["three_streams", 8]
    gain = f"{run['times_serial_pinned']:.2f} × one after another, {run['share_of_ideal']:.0%} of the ideal"
    return [["pipeline of copies and kernels, 8 batches of equal stages", gain]]


def _page(path: tuple[str, ...], rows_of: Callable[[Any], Rows], results_in: str = RESULTS) -> Callable[[Path], str]:
    """The table for a page out of the results that lie at `path` in a file."""

    def made(results: Path) -> str:
        found = load(results, results_in)
        for name in path:
            found = found[name]
        return markdown(*rows_of(found))

    return made


TABLES: dict[str, Callable[[Path], str]] = {
    "overlap rates": _rates,
    "overlap modes": _modes,
    "overlap use": _use,
    **{f"overlap {name}": _page(("sweeps", name), rows_of) for name, rows_of in SWEEPS.items()},
    "overlap peer": _page(("peer", "rates"), peer_rows, PEER_RESULTS),
    "overlap fed": _page(("peer", "pipeline"), fed_rows, PEER_RESULTS),
    "overlap shards": _page(("shards",), shard_rows, PEER_RESULTS),
    "overlap transfers": _page(("shards",), transfer_rows, PEER_RESULTS),
    "overlap soak": _page(("soak", "runs"), soak_rows),
    **{f"pitfall {name}": _page(("pitfalls", name), rows_of) for name, rows_of in PITFALLS.items()},
}

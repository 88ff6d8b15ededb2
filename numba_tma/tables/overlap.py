"""Tables of docs/overlap.md and docs/overlap_pitfalls.md, and what they answer in docs/claims.md."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..report import markdown, seconds

RESULTS = "h200_overlap.json"
_MODES = {
    "serial_pageable": "serial, pageable memory",
    "serial_pinned": "serial, pinned memory",
    "two_streams": "two streams in turn",
    "three_streams": "three streams, one an engine",
    "producer": "three streams and a producer thread",
}


def _load(results: Path) -> dict[str, Any]:
    return json.loads((results / RESULTS).read_text())


def _runs(results: Path) -> dict[tuple[str, int], dict[str, Any]]:
    return {(run["mode"], run["batches"]): run for run in _load(results)["modes"]["runs"]}


def _rates(results: Path) -> str:
    rates = _load(results)["balance"]["rates"]
    rows = [["pinned, the other direction idle", f"{rates['h2d_alone'] / 1e9:.1f}", f"{rates['d2h_alone'] / 1e9:.1f}"]]
    rows += [["pinned, the other direction busy", *(f"{rate:.1f}" for rate in _busy_rates(results))]]
    rows += [["pageable", f"{rates['h2d_pageable'] / 1e9:.1f}", f"{rates['d2h_pageable'] / 1e9:.1f}"]]
    return markdown(rows, ["GB/s", "to the device", "from the device"])


def _busy_rates(results: Path) -> tuple[float, float]:
    """GB/s in and out, of the copies that make the ideal: with the other direction busy."""
    found = _load(results)
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


def _shares(results: Path) -> str:
    rows = [
        [
            f"{row['kernel_over_copy']:.2f}",
            seconds(row["seconds"]),
            seconds(row["kernels_seconds"]),
            f"{row['copying_hidden']:.0%}",
        ]
        for row in _load(results)["sweeps"]["shares"]
    ]
    return markdown(rows, ["kernel / copy", "16 batches", "kernels alone", "copying hidden"])


def _depths(results: Path) -> str:
    depths = _load(results)["sweeps"]["depths"]
    best = min(depths.values())
    rows = [[depth, seconds(value), f"{value / best:.2f}"] for depth, value in depths.items()]
    return markdown(rows, ["slots", "16 batches", "relative"])


def _graphs(results: Path) -> str:
    found = _load(results)["sweeps"]["graphs"]
    each = found["batches"]
    rows = [
        [
            f"{found['launches']} kernels, caller's thread",
            *(seconds(found[f"{how}_three_streams_seconds"] / each) for how in ("launches", "graph")),
        ],
        [
            f"{found['launches']} kernels, producer",
            *(seconds(found[f"{how}_producer_seconds"] / each) for how in ("launches", "graph")),
        ],
        [
            "one kernel, caller's thread",
            *(seconds(found[f"one_kernel_{how}_seconds"] / each) for how in ("launches", "graph")),
        ],
    ]
    return markdown(rows, ["a batch of", "launched", "as a graph"])


def _preparing(results: Path) -> str:
    found = _load(results)["sweeps"]["preparing"]
    rows = [
        [
            _MODES[mode],
            seconds(row["prepare_seconds"]),
            seconds(row["seconds"]),
            *(f"{row['utilisation'][stage]:.0%}" for stage in ("prepare", "H2D", "compute", "D2H")),
        ]
        for mode, row in found.items()
    ]
    return markdown(rows, ["", "copying a batch on the host", "16 batches", "host", "copy in", "compute", "copy out"])


def _soak(results: Path) -> str:
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
        for run in _load(results)["soak"]["runs"]
    ]
    return markdown(rows, ["", "batches", "out of order", "wrong", "host memory grew", "device memory grew", "time"])


def _pageable(results: Path) -> str:
    found = _load(results)["pitfalls"]["pageable"]
    rows = []
    for way, words in (("h2d", "to the device"), ("d2h", "from the device")):
        for kind in ("pinned", "pageable"):
            call, done = (found[f"{kind}_{way}_{what}_seconds"] for what in ("call", "done"))
            rows.append([f"{kind}, {words}", seconds(call), seconds(done)])
    rows.append(["eight batches on three streams, pinned", "", seconds(found["pinned_seconds"])])
    rows.append(["eight batches on three streams, pageable", "", seconds(found["pageable_seconds"])])
    return markdown(rows, ["", "the call returns after", "done after"])


def _default_stream(results: Path) -> str:
    found = _load(results)["pitfalls"]["default_stream"]
    rows = [
        ["three streams of its own", seconds(found["own_streams_seconds"])],
        ["the default stream three times", seconds(found["default_stream_seconds"])],
    ]
    return markdown(rows, ["eight batches on", "time"])


def _no_wait(results: Path) -> str:
    found = _load(results)["pitfalls"]["no_wait"]
    rows = [["at once", f"{found['wrong_at_once']:,}"], ["after waiting", f"{found['wrong_when_awaited']:,}"]]
    return markdown(rows, [f"of {found['words']:,} words, read", "wrong"])


def _pinning(results: Path) -> str:
    found = _load(results)["pitfalls"]["pinning_once"]
    size = f"{found['bytes'] / 2**20:.0f} MiB"
    rows = [
        [f"copy of {size}, pageable", seconds(found["pageable_copy_seconds"])],
        [f"copy of {size}, pinned", seconds(found["pinned_copy_seconds"])],
        [f"allocate {size} of pinned memory", seconds(found["pin_seconds"])],
        ["fill it from pageable memory", seconds(found["fill_seconds"])],
    ]
    if found["copies_to_pay_for_pinning"]:
        rows.append(["copies until the allocation has paid", f"{found['copies_to_pay_for_pinning']:.1f}"])
    return markdown(rows, ["", ""])


def _streams(results: Path) -> str:
    found = _load(results)["pitfalls"]["many_streams"]
    rows = [[streams, seconds(value)] for streams, value in found["seconds_by_streams"].items()]
    return markdown(rows, ["streams in turn", f"eight batches of {found['bytes_each_way'] >> 20} MiB"])


def _loop(results: Path) -> str:
    found = _load(results)["pitfalls"]["loop"]
    rows = []
    for name, words in (("as_written", "as written"), ("mended", "with events")):
        wrong = ", ".join(map(str, found[f"{name}_wrong"])) or "none"
        rows.append([words, wrong])
    return markdown(rows, [f"the loop over {found['batches']} batches", "wrong results"])


def claims(results: Path) -> list[list[str]]:
    """Rows for the table of docs/claims.md."""
    found, runs = _load(results), _runs(results)
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


TABLES: dict[str, Callable[[Path], str]] = {
    "overlap rates": _rates,
    "overlap modes": _modes,
    "overlap use": _use,
    "overlap shares": _shares,
    "overlap depths": _depths,
    "overlap graphs": _graphs,
    "overlap preparing": _preparing,
    "overlap soak": _soak,
    "pitfall pageable": _pageable,
    "pitfall default stream": _default_stream,
    "pitfall no wait": _no_wait,
    "pitfall pinning": _pinning,
    "pitfall streams": _streams,
    "pitfall loop": _loop,
}

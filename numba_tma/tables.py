"""Tables of the documentation, made from the data in docs/results/.

A page holds `<!-- table: NAME -->` and `<!-- end -->`; what stands between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .report import seconds

_REGION = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.S)


def update(text: str, results: Path) -> str:
    """`text` with its tables made anew from the JSON files in `results`.

    Raises:
        KeyError: the page asks for a table that does not exist.
    """

    def fill(match: re.Match) -> str:
        table = TABLES[match[2]](results)
        return f"{match[1]}\n{table}\n\n{match[3]}"

    return _REGION.sub(fill, text)


def _load(results: Path, name: str) -> Any:
    return json.loads((results / name).read_text())


def _table(rows: list[list[Any]], headers: list[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _records(results: Path, problem: str | None = None) -> list[dict]:
    records = _load(results, "h200_run_all.json")
    return [record for record in records if problem in (None, record["problem"])]


def options_in_words(options: Mapping[str, Any]) -> str:
    """Options as a reader would write them: tiles as 16×128."""
    return ", ".join(f"{k} {'×'.join(map(str, v)) if isinstance(v, list) else v}" for k, v in options.items())


def cases(records: Iterable[dict]) -> list[list[dict]]:
    """Records of one problem by case: those of one shape and type that were run together, each variant once."""
    groups: list[list[dict]] = []
    for record in records:
        alike = groups and all(groups[-1][0][key] == record[key] for key in ("shape", "dtype"))
        if not alike or record["variant"] in [other["variant"] for other in groups[-1]]:
            groups.append([])
        groups[-1].append(record)
    return groups


def _speed(problem: str) -> Callable[[Path], str]:
    def make(results: Path) -> str:
        rows = []
        for r in _records(results, problem):
            if r["seconds"] is None:
                continue
            rows.append(
                [
                    "×".join(map(str, r["shape"])),
                    r["dtype"],
                    f"`{r['variant']}`",
                    options_in_words(r["options"]),
                    seconds(r["seconds"]),
                    f"{r['gb_per_s']:,.0f}",
                    f"{r['share_of_device_copy']:.1%}",
                    f"{r['ratio_to_baseline']:.2f}×" if r["ratio_to_baseline"] else "",
                ]
            )
        return _table(rows, ["shape", "type", "variant", "options", "time", "GB/s", "of device copy", "vs `plain`"])

    return make


def _all_records(results: Path) -> str:
    rows = []
    for r in _records(results):
        rows.append(
            [
                f"{r['problem']}.{r['variant']}",
                "×".join(map(str, r["shape"])),
                r["dtype"],
                options_in_words(r["options"]),
                "yes" if r["ok"] else r["reason"],
                "" if r["error"] is None else f"{r['error']:.1e}" if r["error"] else "0",
                seconds(r["seconds"]),
                f"{r['gb_per_s']:,.0f}" if r["gb_per_s"] else "",
            ]
        )
    return _table(rows, ["kernel", "shape", "type", "options", "correct", "error", "time", "GB/s"])


def _circumstances(results: Path) -> str:
    rows = [[name, str(value)] for name, value in _records(results)[0]["circumstances"].items()]
    return _table(rows, ["", ""])


def _overlap(results: Path) -> str:
    rows = []
    for r in _load(results, "h200_measurements.json")["overlap"]:
        t = {name: value * 1e6 for name, value in r["seconds"].items()}
        longer = max(t["copy alone"], t["compute alone"])
        rows.append(
            [
                r["work"],
                *(f"{t[name]:.0f}" for name in ("copy alone", "compute alone", "one buffer", "two buffers", "plain")),
                f"{t['one buffer'] / t['two buffers']:.2f}×",
                f"{t['two buffers'] / longer:.2f}",
            ]
        )
    headers = ["work", "copy alone, µs", "compute alone", "one buffer", "two buffers", "plain"]
    return _table(rows, [*headers, "two vs one", "two / longer of the two alone"])


def _sweep(results: Path) -> str:
    best: dict[str, dict] = {}
    for r in _load(results, "h200_measurements.json")["tile_sweep_16384"]:
        best.setdefault(r["variant"], r)
    rows = []
    for variant, r in best.items():
        rows.append(
            [f"`{variant}`", options_in_words(r["options"]), seconds(r["seconds"]), f"{r['share_of_device_copy']:.1%}"]
        )
    return _table(rows, ["variant", "best of the sweep at 16384²", "time", "of device copy"])


def _small(results: Path) -> str:
    rows = [
        [f"`{r['variant']}`", seconds(r["seconds"]), f"{r['gb_per_s']:,.0f}"]
        for r in _load(results, "h200_measurements.json")["small_in_a_graph"]
    ]
    return _table(rows, ["1024², in a CUDA graph, 8 splits", "time", "GB/s"])


def _launch_overhead(results: Path) -> str:
    rows = [
        [r["what"], f"{r['seconds'] * 1e6:.1f} µs", f"{r['seconds_fastest'] * 1e6:.1f} µs"]
        for r in _load(results, "h200_measurements.json")["launch_overhead"]
    ]
    return _table(rows, ["", "median", "fastest"])


def _descriptor_place(results: Path) -> str:
    rows = [
        [r["descriptor"], r["boxes_per_block"], seconds(r["seconds"])]
        for r in _load(results, "h200_measurements.json")["descriptor_place"]
    ]
    return _table(rows, ["tensor map", "boxes a block", "time"])


def _simulator(results: Path) -> str:
    r = _load(results, "simulator_speed.json")
    rows = [
        ["this simulator", f"{r['seconds']['ours']:.2f} s"],
        ["`NUMBA_ENABLE_CUDASIM=1`", f"{r['seconds']['numba']:.2f} s"],
    ]
    return _table(rows, [f"{r['kernel']}, {r['shape'][0]}²", "time"])


def _headline(results: Path) -> str:
    records = _records(results)

    def best(problem: str, shape: list[int], *variants: str) -> dict:
        fitting = [r for r in records if r["problem"] == problem and r["shape"] == shape and r["variant"] in variants]
        return min(fitting, key=lambda r: r["seconds"])

    copied = best("copy", [16384, 16384], "bulk", "tensor")
    rows = [
        [
            "copy of 1 GiB by TMA",
            f"{copied['gb_per_s']:,.0f} GB/s, {copied['share_of_device_copy']:.0%} of the driver's",
        ]
    ]
    for size in (4096, 16384):
        tma = best("kv_stream", [size, size], "tma", "tma_ring")
        plain = [r for r in records if r["problem"] == "kv_stream" and r["shape"] == [size, size]]
        first = next(r for r in plain if r["variant"] == "plain")
        vector = best("kv_stream", [size, size], "plain_vector")
        rows.append(
            [
                f"K/V stream at {size}², TMA",
                f"{seconds(tma['seconds'])}; {first['seconds'] / tma['seconds']:.1f} × the plain exercise, "
                f"{vector['seconds'] / tma['seconds']:.2f} × the best plain Numba",
            ]
        )
    overlapped = _load(results, "h200_measurements.json")["overlap"]
    gains = [r["seconds"]["one buffer"] / r["seconds"]["two buffers"] for r in overlapped]
    rows.append(["two buffers instead of one, a block per SM, copy and compute balanced", f"{max(gains):.2f} ×"])
    simulated = _load(results, "simulator_speed.json")["seconds"]
    rows.append(
        [
            "simulator, 2 × 1024² elements, no GPU",
            f"{simulated['ours']:.2f} s; Numba's own takes {simulated['numba']:.1f} s",
        ]
    )
    return _table(rows, ["", ""])


TABLES: dict[str, Callable[[Path], str]] = {
    "all records": _all_records,
    "circumstances": _circumstances,
    "copy speed": _speed("copy"),
    "descriptor place": _descriptor_place,
    "headline": _headline,
    "kv_stream overlap": _overlap,
    "kv_stream small": _small,
    "kv_stream speed": _speed("kv_stream"),
    "kv_stream sweep": _sweep,
    "launch overhead": _launch_overhead,
    "simulator speed": _simulator,
}

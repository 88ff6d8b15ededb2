"""Tables of the documentation, made from the data in docs/results/.

A page holds `<!-- table: NAME -->` and `<!-- end -->`; what stands between them is replaced.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import accuracy
from ..report import markdown, seconds
from . import attention, attention_fp8, decode, gemm, gpt2, memory, movement, overlap, timelines

_COMPUTE_BOUND = 50  # flops a byte from which a problem's rate is given in TFLOP/s
PICTURES = "../pictures"  # as docs/results sees them
# Problems that share a page.
PAGES = {
    "rmsnorm": "softmax",
    **dict.fromkeys(("column_sums", "histogram", "scatter_add"), "reductions"),
    **dict.fromkeys(("patches", "paged"), "gather"),
}
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


def load_records(results: Path) -> list[dict]:
    """All records of `run_all.py --json` in a folder: of the files whose names have run_all in them, in their order.

    Raises:
        ValueError: two files have the same problem on the same device; the message names them.
    """
    found: dict[tuple[str, str], Path] = {}
    records = []
    for file in sorted(results.glob("*run_all*.json")):
        for record in json.loads(file.read_text()):
            key = record["problem"], record["device"]
            if found.setdefault(key, file) != file:
                raise ValueError(f"{found[key].name} and {file.name} both have {key[0]} on {key[1]}; keep one of them")
            records.append(record)
    return records


def runs(records: Iterable[dict]) -> dict[str, list[dict]]:
    """Records by problem, those of further devices under 'problem, device'."""
    groups: dict[str, list[dict]] = {}
    for record in records:
        first = groups.get(record["problem"])
        alone = first is None or first[0]["device"] == record["device"]
        groups.setdefault(record["problem"] if alone else f"{record['problem']}, {record['device']}", []).append(record)
    return groups


def rate(records: Iterable[dict]) -> tuple[str, str]:
    """In which unit to give a problem's rates and the records' key for it: TFLOP/s where arithmetic is the limit."""
    timed = [record for record in records if record["seconds"]]
    if max(record["tflop_per_s"] * 1e3 / record["gb_per_s"] for record in timed) > _COMPUTE_BOUND:
        return "TFLOP/s", "tflop_per_s"
    return "GB/s", "gb_per_s"


def baseline(records: Iterable[dict]) -> str:
    """Name of the variant that the others are compared with."""
    return next((record["variant"] for record in records if record["ratio_to_baseline"] == 1), "baseline")


def circumstances_in_words(circumstances: Mapping[str, Any]) -> str:
    """Where and with what something was measured, in a line."""
    driver = circumstances["driver_cuda"]
    versions = [f"{name} {circumstances[name]}" for name in ("numba", "numba-cuda", "cuda-bindings")]
    return ", ".join(
        [
            circumstances["device"],
            f"driver for CUDA {driver // 1000}.{driver % 1000 // 10}",
            *versions,
            circumstances["date"],
        ]
    )


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
        return _speed_table(runs(load_records(results))[problem])

    return make


def _speed_table(records: list[dict], correctness: bool = False) -> str:
    """Time and rate of each record beside baseline, limit and peer; the columns that have nothing are left out."""
    (unit, key), first = rate(records), baseline(records)
    rows = []
    for r in records:
        if r["seconds"] is None and not correctness:
            continue
        rows.append(
            {
                "shape": "×".join(map(str, r["shape"])),
                "type": r["dtype"],
                "variant": f"`{r['variant']}`",
                "options": options_in_words(r["options"]),
                **({"correct": "yes" if r["ok"] else r["reason"], "error": _error(r["error"])} if correctness else {}),
                "time": seconds(r["seconds"]),
                unit: f"{r[key]:,.0f}" if r[key] else "",
                "of device copy": f"{r['share_of_device_copy']:.1%}" if r["share_of_device_copy"] else "",
                f"vs `{first}`": f"{r['ratio_to_baseline']:.2f}×" if r["ratio_to_baseline"] else "",
                f"vs {r['peer'] or 'peer'}": f"{r['ratio_to_peer']:.2f}×" if r["ratio_to_peer"] else "",
            }
        )
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if unit != "GB/s":
        columns.remove("of device copy")
    columns = [column for column in columns if column == "options" or any(row.get(column) for row in rows)]
    return markdown([[row.get(column, "") for column in columns] for row in rows], columns)


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}" if error else "0"


def _problems(results: Path) -> str:
    """A section for each problem: where it was measured, its picture and its table."""
    parts = []
    for name, records in runs(load_records(results)).items():
        problem = records[0]["problem"]
        page = f"[{name}](../{PAGES.get(problem, problem)}.md)" if name == problem else name
        parts += [
            f"### {name}",
            f"{page} on {circumstances_in_words(records[0]['circumstances'])}.",
            f"![Rates of each variant of {name} beside the limit]({PICTURES}/{picture_name(name)})",
            _speed_table(records, correctness=True),
        ]
    return "\n\n".join(parts)


def picture_name(run: str) -> str:
    """File name of the picture of one of the `runs`."""
    return re.sub(r"\W+", "_", run) + ".svg"


def _circumstances(results: Path) -> str:
    rows = [[name, str(value)] for name, value in load_records(results)[0]["circumstances"].items()]
    return markdown(rows, ["", ""])


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
    return markdown(rows, [*headers, "two vs one", "two / longer of the two alone"])


def _sweep(results: Path) -> str:
    best: dict[str, dict] = {}
    for r in _load(results, "h200_measurements.json")["tile_sweep_16384"]:
        best.setdefault(r["variant"], r)
    rows = []
    for variant, r in best.items():
        rows.append(
            [f"`{variant}`", options_in_words(r["options"]), seconds(r["seconds"]), f"{r['share_of_device_copy']:.1%}"]
        )
    return markdown(rows, ["variant", "best of the sweep at 16384²", "time", "of device copy"])


def _small(results: Path) -> str:
    rows = [
        [f"`{r['variant']}`", seconds(r["seconds"]), f"{r['gb_per_s']:,.0f}"]
        for r in _load(results, "h200_measurements.json")["small_in_a_graph"]
    ]
    return markdown(rows, ["1024², in a CUDA graph, 8 splits", "time", "GB/s"])


def _launch_overhead(results: Path) -> str:
    rows = [
        [r["what"], f"{r['seconds'] * 1e6:.1f} µs", f"{r['seconds_fastest'] * 1e6:.1f} µs"]
        for r in _load(results, "h200_measurements.json")["launch_overhead"]
    ]
    return markdown(rows, ["", "median", "fastest"])


def _descriptor_place(results: Path) -> str:
    rows = [
        [r["descriptor"], r["boxes_per_block"], seconds(r["seconds"])]
        for r in _load(results, "h200_measurements.json")["descriptor_place"]
    ]
    return markdown(rows, ["tensor map", "boxes a block", "time"])


def _simulator(results: Path) -> str:
    r = _load(results, "simulator_speed.json")
    rows = [
        ["this simulator", f"{r['seconds']['ours']:.2f} s"],
        ["`NUMBA_ENABLE_CUDASIM=1`", f"{r['seconds']['numba']:.2f} s"],
    ]
    return markdown(rows, [f"{r['kernel']}, {r['shape'][0]}²", "time"])


def _claims(results: Path) -> str:
    """What was measured on the claims of docs/claims.md, by their numbers there."""
    records = load_records(results)
    measurements = _load(results, "h200_measurements.json")

    def fastest(problem: str, side: int, variant: str) -> dict:
        fitting = [r for r in records if (r["problem"], r["shape"], r["variant"]) == (problem, [side, side], variant)]
        return min(fitting, key=lambda record: record["seconds"])

    small = {name: fastest("kv_stream", 1024, name)["seconds"] for name in ("plain", "plain_vector", "cp_async", "tma")}
    graph = {record["variant"]: record["seconds"] for record in measurements["small_in_a_graph"]}
    large = {name: fastest("kv_stream", 16384, name)["seconds"] for name in ("plain_vector", "cp_async", "tma")}
    alone = next(record["seconds"] for record in measurements["overlap"] if record["work"] == 1)
    sweep = next(record for record in measurements["tile_sweep_16384"] if record["variant"] == "tma")
    tile = [int(extent) for extent in sweep["options"]["tile"]]
    copied = records[0]["gb_per_s"] / records[0]["share_of_device_copy"]
    rows = [
        [
            "4",
            f"the driver's copy on an H200 with {records[0]['circumstances']['multiprocessors']} SMs",
            f"{copied:,.0f} GB/s",
        ],
        [
            "7",
            "one block per SM, one multiply-add a pair: plain Numba, TMA with one buffer, with two",
            ", ".join(seconds(alone[name]) for name in ("plain", "one buffer", "two buffers")),
        ],
        [
            "11",
            f"best tile of `kv_stream.tma` at 16384²: {tile[0]}×{tile[1]} fp16, {2 * math.prod(tile) / 1024:.0f} KB",
            f"{sweep['share_of_device_copy']:.0%} of the driver's copy",
        ],
        [
            "13",
            "1024², TMA against plain Numba, its best form, `cp.async`",
            ", ".join(f"{small[name] / small['tma']:.2f} ×" for name in ("plain", "plain_vector", "cp_async")),
        ],
        [
            "13",
            "the same in a CUDA graph, without the launch",
            ", ".join(f"{graph[name] / graph['tma']:.2f} ×" for name in ("plain", "plain_vector", "cp_async")),
        ],
        [
            "14",
            "16384², each at its best: plain Numba's best form, `cp.async`, TMA",
            ", ".join(seconds(value) for value in large.values()),
        ],
        *attention.claims(results),
        *overlap.claims(results),
        *gpt2.claims(results),
    ]
    rows.sort(key=lambda row: int(row[0]))
    return markdown(rows, ["claim", "measured", ""])


def _headline(results: Path) -> str:
    records = load_records(results)

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
    rows += gemm.headline(results)
    rows += attention.headline(results)
    rows += gpt2.headline(results)
    rows += overlap.headline(results)
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
    return markdown(rows, ["", ""])


def _accuracy(results: Path) -> str:
    made = _load(results, "model.json")
    rows = []
    for r in accuracy.compared(load_records(results), made["records"]):
        error = r["model_ratio"] / r["gpu_ratio"] - 1
        rows.append(
            [
                f"{r['problem']}.{r['variant']}",
                "×".join(map(str, r["shape"])),
                r["dtype"],
                options_in_words(r["options"]),
                seconds(r["gpu"]),
                seconds(r["model"]),
                f"{r['model'] / r['gpu'] - 1:+.0%}",
                f"{r['gpu_ratio']:.2f}×",
                f"{r['model_ratio']:.2f}×",
                f"{error:+.0%}",
            ]
        )
    times = ["GPU", "model", "off by"]
    ratios = ["ratio, GPU", "ratio, model", "off by"]
    return markdown(rows, ["kernel", "shape", "type", "options", *times, *ratios])


def _accuracy_overlap(results: Path) -> str:
    measured = {r["work"]: r["seconds"] for r in _load(results, "h200_measurements.json")["overlap"]}
    rows = []
    for r in _load(results, "model.json")["overlap"]:
        gpu, model = measured[r["work"]], r["seconds"]
        rows.append(
            [
                r["work"],
                *(f"{gpu[name] * 1e6:.0f} / {seconds_ * 1e6:.0f} µs" for name, seconds_ in model.items()),
                f"{gpu['one buffer'] / gpu['two buffers']:.2f}× / {model['one buffer'] / model['two buffers']:.2f}×",
            ]
        )
    return markdown(rows, ["work; GPU / model", "one buffer", "two buffers", "compute alone", "two vs one"])


def _gemm_ladder(results: Path) -> str:
    return gemm.ladder(runs(load_records(results))["gemm"])


MEMORY_PROBLEMS = ("softmax", "rmsnorm", "column_sums", "histogram", "scatter_add", "patches", "paged")
TABLES: dict[str, Callable[[Path], str]] = {
    "circumstances": _circumstances,
    "claims": _claims,
    "copy speed": _speed("copy"),
    "multicast speed": _speed("multicast"),
    "descriptor place": _descriptor_place,
    "gemm ladder": _gemm_ladder,
    "headline": _headline,
    "kv_stream overlap": _overlap,
    "kv_stream small": _small,
    "kv_stream speed": _speed("kv_stream"),
    "kv_stream sweep": _sweep,
    "launch overhead": _launch_overhead,
    "model accuracy": _accuracy,
    "model overlap": _accuracy_overlap,
    "problems": _problems,
    "simulator speed": _simulator,
    **gemm.TABLES,
    **attention.TABLES,
    **attention_fp8.TABLES,
    **decode.TABLES,
    **gpt2.TABLES,
    **{f"{name} speed": _speed(name) for name in MEMORY_PROBLEMS},
    **memory.TABLES,
    **movement.TABLES,
    **overlap.TABLES,
    **timelines.TABLES,
}

"""Tables of docs/simulator.md: how fast the simulator is, and how far its model of time is from a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .. import accuracy
from ..report import markdown, seconds
from .records import MEASUREMENTS, load, load_records, options_in_words


def _simulator(results: Path) -> str:
    r = load(results, "simulator_speed.json")
    rows = [
        ["this simulator", f"{r['seconds']['ours']:.2f} s"],
        ["`NUMBA_ENABLE_CUDASIM=1`", f"{r['seconds']['numba']:.2f} s"],
    ]
    return markdown(rows, [f"{r['kernel']}, {r['shape'][0]}²", "time"])


def _accuracy(results: Path) -> str:
    made = load(results, "model.json")
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
    measured = {r["work"]: r["seconds"] for r in load(results, MEASUREMENTS)["overlap"]}
    rows = []
    for r in load(results, "model.json")["overlap"]:
        gpu, model = measured[r["work"]], r["seconds"]
        rows.append(
            [
                r["work"],
                *(f"{gpu[name] * 1e6:.0f} / {seconds_ * 1e6:.0f} µs" for name, seconds_ in model.items()),
                f"{gpu['one buffer'] / gpu['two buffers']:.2f}× / {model['one buffer'] / model['two buffers']:.2f}×",
            ]
        )
    return markdown(rows, ["work; GPU / model", "one buffer", "two buffers", "compute alone", "two vs one"])


TABLES: dict[str, Callable[[Path], str]] = {
    "model accuracy": _accuracy,
    "model overlap": _accuracy_overlap,
    "simulator speed": _simulator,
}

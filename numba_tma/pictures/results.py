"""Measured results as pictures: a problem's variants beside their limit and their peer, overlap, and a roofline."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..tables.records import baseline, cases, load_records, options_in_words, picture_name, rate, runs
from .svg import Picture

Record = dict[str, Any]

_CLASSES = {"ld/st": "threads", "cp.async": "cp_async", "TMA": "tma"}
_LANES = 128  # fp32 multiply-adds that an SM of Hopper begins in a cycle


def draw(folder: Path) -> dict[str, str]:
    """The pictures of the results in `folder` as SVG by file name: one for each problem, overlap.svg, roofline.svg."""
    records = [record for record in load_records(folder) if record["seconds"]]
    measurements = json.loads((folder / "h200_measurements.json").read_text())
    made = {picture_name(name): bars(run) for name, run in runs(records).items()}
    copy_rate = next(
        _copy_rate(record) for record in records if record["device"] == measurements["circumstances"]["device"]
    )
    return {
        **made,
        "overlap.svg": overlap(measurements["overlap"], measurements["circumstances"]),
        "roofline.svg": roofline(measurements["overlap"], measurements["circumstances"], copy_rate),
    }


def bars(records: Sequence[Record]) -> str:
    """The speed of one problem's variants, case by case, with the limit and the peer where there are any."""
    groups = cases(records)
    unit, key = rate(records)
    limit = _copy_rate(records[0]) if unit == "GB/s" else None
    peers = [record[key] / record["ratio_to_peer"] for record in records if record["ratio_to_peer"]]
    most = max([record[key] for record in records] + peers + ([limit] if limit else []))
    left, right, step = 288, 700, 19
    scale = (right - left) / most
    height = 104 + sum(34 + step * len(group) for group in groups)
    device, date = (records[0]["circumstances"][name] for name in ("device", "date"))
    name = records[0]["problem"]
    picture = Picture(
        860, height, f"{name}: measured {unit}", f"Bars for each variant of {name} at each size, measured on {device}."
    )
    picture.text(24, 34, f"{name}, {unit}", "ink head")
    picture.text(836, 34, f"{device}, {date}, medians", "muted", "end")
    kinds = dict.fromkeys(record["moves"] for record in records)
    legend = [(_CLASSES.get(kind, "compute"), f"moved by {kind}") for kind in kinds]
    picture.legend(24, 58, legend + [("peer", f"peer: {record['peer']}") for record in records if record["peer"]][:1])
    y = 82
    if limit:
        x = left + limit * scale
        picture.line([(x, 70), (x, height - 22)], "limit dashed")
        picture.text(x, 62, f"driver's copy {limit:,.0f}", "warning small", "middle")
    for group in groups:
        shared = {k: v for k, v in group[0]["options"].items() if all(r["options"].get(k) == v for r in group)}
        title = f"{'×'.join(map(str, group[0]['shape']))} {group[0]['dtype']}"
        picture.text(24, y + 12, title, "ink bold")
        picture.text(24 + 7.4 * len(title) + 12, y + 12, options_in_words(shared), "muted")
        y += 22
        for record in group:
            own = {k: v for k, v in record["options"].items() if k not in shared}
            picture.text(40, y + 11, record["variant"], "ink mono")
            picture.text(left - 10, y + 11, options_in_words(own), "muted small", "end")
            picture.rect(left, y, max(record[key] * scale, 1), step - 5, _CLASSES.get(record["moves"], "compute"), 2)
            if record["ratio_to_peer"]:
                x = left + record[key] / record["ratio_to_peer"] * scale
                picture.rect(x - 1.5, y - 2, 3, step - 1, "peer", 1)
            ratio = f"{record['ratio_to_baseline']:.2f} ×" if record["ratio_to_baseline"] else ""
            picture.text(770, y + 11, f"{record[key]:,.0f}", "ink", "end")
            picture.text(836, y + 11, ratio, "muted", "end")
            y += step
        y += 12
    picture.text(836, 62, f"vs {baseline(records)}", "muted small", "end")
    return picture.svg()


def overlap(records: Sequence[Record], circumstances: Record) -> str:
    """Time over work: copying and computing alone, with one buffer and with two."""
    work = [record["work"] for record in records]
    series = {
        name: [record["seconds"][name] * 1e6 for record in records]
        for name in ("copy alone", "compute alone", "one buffer", "two buffers")
    }
    together = [a + b for a, b in zip(series["copy alone"], series["compute alone"], strict=True)]
    picture = Picture(
        860,
        430,
        "Two buffers hide the shorter of copy and compute",
        "Time over arithmetic per element. With two buffers it follows the longer of copying and computing alone, with "
        "one buffer their sum.",
    )
    picture.text(24, 34, "kv_stream, a block per SM: time over arithmetic", "ink head")
    picture.text(836, 34, f"{circumstances['device']}, {circumstances['date']}, medians", "muted", "end")
    axes = Axes(picture, (76, 690), (370, 66), (0, max(work)), (0, 50 * math.ceil(max(together) / 50)))
    axes.frame([*range(0, max(work) + 1, 4)], [*range(0, int(axes.y_range[1]) + 1, 50)])
    picture.text(383, 414, "multiply-adds for each pair of K and V", "muted", "middle")
    picture.text(28, 218, "µs", "muted", "middle")
    styles = {
        "copy alone": "peer line",
        "compute alone": "compute line",
        "one buffer": "cp_async line thick",
        "two buffers": "tma line thick",
    }
    for name, values in series.items():
        axes.curve(work, values, styles[name], dots="buffer" in name)
    axes.curve(work, together, "threads line dashed")
    _label(picture, axes, [(name, styles[name], values[-1]) for name, values in series.items()])
    picture.text(*axes.at(work[-4], together[-4] + 12), "copy + compute", "muted small", "end")
    return picture.svg()


def roofline(records: Sequence[Record], circumstances: Record, gb_per_s: float) -> str:
    """Arithmetic rate over arithmetic intensity, under the memory's and the arithmetic's limit."""
    peak = circumstances["multiprocessors"] * _LANES * 2 * circumstances["clock_mhz"] / 1e6
    ridge = peak * 1e3 / gb_per_s
    worked = [record for record in records if record["work"]]
    intensity = [record["work"] / 2 for record in worked]  # 2 flops a multiply-add, 4 bytes a pair of fp16
    picture = Picture(
        860,
        450,
        "Roofline of kv_stream",
        "Arithmetic rate over arithmetic intensity: with two buffers the kernel follows the memory's roof.",
    )
    picture.text(24, 34, "kv_stream, a block per SM: roofline", "ink head")
    picture.text(836, 34, f"{circumstances['device']}, {circumstances['date']}, medians", "muted", "end")
    axes = Axes(picture, (76, 690), (386, 66), (0.25, 64), (0.1, 100), logarithmic=True)
    axes.frame([0.25, 0.5, 1, 2, 4, 8, 16, 32, 64], [0.1, 1, 10, 100])
    picture.text(383, 430, "flop for each byte of K and V", "muted", "middle")
    picture.text(24, 56, "TFLOP/s", "muted")
    axes.curve([0.25, ridge, 64], [0.25 * gb_per_s / 1e3, peak, peak], "limit")
    picture.text(*axes.at(0.42, 0.42 * gb_per_s / 1e3 * 1.3), f"{gb_per_s:,.0f} GB/s", "warning small", "end")
    picture.text(698, axes.at(64, peak)[1] + 4, f"{peak:.0f} TFLOP/s fp32", "warning small")
    styles = {
        "plain": ("threads line", "plain Numba"),
        "one buffer": ("cp_async line thick", "one buffer"),
        "two buffers": ("tma line thick", "two buffers"),
    }
    ends = []
    for name, (classes, label) in styles.items():
        pairs = [record["shape"][0] * record["shape"][1] * record["work"] for record in worked]
        rates = [2 * n / record["seconds"][name] / 1e12 for n, record in zip(pairs, worked, strict=True)]
        axes.curve(intensity, rates, classes, dots=True)
        ends.append((label, classes, rates[-1]))
    _label(picture, axes, ends, intensity[-1])
    return picture.svg()


class Axes:
    """A plot's place on a picture: `x` and `y` give pixels from and to, the ranges the values there."""

    def __init__(
        self,
        picture: Picture,
        x: tuple[float, float],
        y: tuple[float, float],
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        logarithmic: bool = False,
    ) -> None:
        self.picture, self.x, self.y = picture, x, y
        self.x_range, self.y_range, self.logarithmic = x_range, y_range, logarithmic

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a value."""
        return self._place(x, self.x, self.x_range), self._place(y, self.y, self.y_range)

    def frame(self, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> None:
        """Grid lines with their numbers."""
        for value in y_ticks:
            y = self.at(self.x_range[0], value)[1]
            self.picture.line([(self.x[0], y), (self.x[1], y)], "grid")
            self.picture.text(self.x[0] - 8, y + 4, f"{value:g}", "muted small", "end")
        for value in x_ticks:
            x = self.at(value, self.y_range[0])[0]
            self.picture.line([(x, self.y[0]), (x, self.y[0] + 5)], "grid")
            self.picture.text(x, self.y[0] + 18, f"{value:g}", "muted small", "middle")

    def curve(self, x: Sequence[float], y: Sequence[float], classes: str, dots: bool = False) -> None:
        """A line through values, and a dot at each."""
        points = [self.at(*point) for point in zip(x, y, strict=True)]
        self.picture.line(points, classes)
        for point in points if dots else []:
            self.picture.dot(*point, 3.2, classes.split()[0])

    def _place(self, value: float, pixels: tuple[float, float], values: tuple[float, float]) -> float:
        low, high = values
        if self.logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return pixels[0] + (value - low) / (high - low) * (pixels[1] - pixels[0])


def _label(picture: Picture, axes: Axes, ends: Sequence[tuple[str, str, float]], x: float | None = None) -> None:
    """Names at the ends of curves, moved apart where they would touch."""
    last = x if x is not None else axes.x_range[1]
    places = sorted((axes.at(last, value)[1], name, classes) for name, classes, value in ends)
    free = -math.inf
    for y, name, classes in places:
        y = max(y, free)
        at = axes.at(last, axes.y_range[0])[0] + 12
        picture.dot(at + 4, y, 4, classes.split()[0])
        picture.text(at + 14, y + 4, name, "ink")
        free = y + 17


def _copy_rate(record: Record) -> float:
    """GB/s of the driver's copy in the run that a record comes from."""
    return record["gb_per_s"] / record["share_of_device_copy"]

"""When attention's warpgroups multiply and when they do their softmax: steps 6 to 8 by the simulator's model of time.

What the model says depends on the machine code, so on versions of compilers. So it is kept as data, which `model` makes
anew, and the picture is drawn from that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels.attention import PROBLEM
from ..kernels.problem import Case
from ..launch import use_backend
from ..sim.timing import ModelOptions
from ..timeline import model as timelines
from ..timeline import of_model
from ..timeline.overlap import length, union
from .svg import Picture

FILE = "attention_turns.json"
STEPS = {
    "warpgroups": "6 warpgroups: as chance has it",
    "overlapped": "7 overlapped: softmax beside the last block's product",
    "ping_pong": "8 ping_pong: the warpgroups take turns",
}
KEYS, BLOCKS = 128, 5  # keys of a block, and how many blocks
CASE = Case((1, 128, KEYS * BLOCKS, 1, 1, 128), "bfloat16")
_FIRST_WARPS = {"warp 4": "A", "warp 8": "B"}
_PRODUCTS = {"wgmma of warps 4-7": "A", "wgmma of warps 8-11": "B"}
_LOOKS = {"scores": "c0", "weighted": "c4", "softmax": "c1", "k": "tma", "v": "c5"}


@dataclass(frozen=True)
class Span:
    """Something in modelled nanoseconds. `what` is scores or weighted (products of warpgroup `who`, A or B), softmax
    (its own instructions), or k or v (a copy, without `who`); `number` counts those of a kind."""

    what: str
    who: str
    number: int
    start: float
    end: float


def modelled(step: str) -> list[Span]:
    """What one block does in a step of the ladder, from the beginning of its first product or copy of K on."""
    arrays = PROBLEM.inputs(CASE, np.random.default_rng(0))
    with use_backend("sim", model=ModelOptions(warm=True)):
        report = PROBLEM.variant(step).bind(arrays, keys=KEYS)()
    spans: list[Span] = []
    counts: dict[tuple[str, str], int] = {}
    for interval in sorted(of_model(report.model, step).intervals, key=lambda i: (i.start, i.end)):
        kind, row = interval.kind, interval.row.name
        if kind == timelines.TENSOR:
            what, who = "weighted" if interval.detail.endswith("registers") else "scores", _PRODUCTS[row]
        elif kind == timelines.COMPUTE and row in _FIRST_WARPS:
            what, who = "softmax", _FIRST_WARPS[row]
            if not counts.get(("scores", who)):
                continue  # before its first product it sets itself up
        elif kind == timelines.COPY and row.startswith(("copies for k_full", "copies for v_full")):
            what, who = row.removeprefix("copies for ")[0], ""
        else:
            continue
        number = counts.get((what, who), 0)
        counts[what, who] = number + 1
        spans.append(Span(what, who, number, interval.start, interval.end))
    origin = min(span.start for span in spans)
    return [replace(span, start=round(span.start - origin, 1), end=round(span.end - origin, 1)) for span in spans]


def model(folder: Path) -> None:
    """Model the steps anew and keep what comes of it in the results' folder."""
    steps = {step: [asdict(span) for span in modelled(step)] for step in STEPS}
    (folder / FILE).write_text(json.dumps({"shape": CASE.shape, "dtype": CASE.dtype, "steps": steps}, indent=1) + "\n")


def kept(folder: Path) -> dict[str, list[Span]]:
    """What is kept of each step."""
    return {step: [Span(**span) for span in spans] for step, spans in _read(folder)["steps"].items()}


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


def busy(spans: Sequence[Span]) -> float:
    """The part of the time from the first product to the last during which the tensor cores have one."""
    products = union((s.start, s.end) for s in spans if s.what in ("scores", "weighted"))
    return length(products) / (products[-1][1] - products[0][0])


def draw(folder: Path) -> str:
    """The picture of what the results' `folder` keeps."""
    steps = kept(folder)
    ends = {step: max(span.end for span in spans) for step, spans in steps.items()}
    left, scale = 132, 704 / max(ends.values())
    panel, top = 142, 92
    bottom = top + panel * len(steps)
    picture = Picture(
        860,
        bottom + 32,
        "What tensor cores and warpgroups do in steps 6, 7 and 8",
        "For each step rows of the tensor cores' products, of both warpgroups' softmax and of the copies of K and V, "
        "over modelled time. In step 6 the tensor cores rest while both warpgroups do their softmax; in step 7 "
        "products run beside softmax; in step 8 the warpgroups take turns in starting them.",
    )
    sq, skv, head_dim = (_read(folder)["shape"][i] for i in (1, 2, 5))
    picture.text(24, 34, "Products, softmax and copies of a block", "ink head")
    picture.text(836, 34, "a model's times, not a measurement's", "warning", "end")
    shape = f"{sq} queries and {skv} keys, D = {head_dim}, on a modelled H200. Numbers count blocks of {KEYS} keys."
    picture.text(24, 54, shape, "muted")
    words = {
        "scores": "S = Q Kᵀ",
        "weighted": "O += P V",
        "softmax": "softmax",
        "k": "K on its way",
        "v": "V on its way",
    }
    picture.legend(24, 78, [(_LOOKS[what], word) for what, word in words.items()])
    for number, (step, spans) in enumerate(steps.items()):
        _panel(picture, left, top + panel * number, scale, STEPS[step], spans)
    for tick in range(int(max(ends.values()) / 1000) + 1):
        picture.text(left + tick * 1000 * scale, bottom + 14, f"{tick}", "muted small", "middle")
    picture.text(left - 12, bottom + 14, "µs", "muted small", "end")
    return picture.svg()


def _panel(picture: Picture, left: float, top: float, scale: float, title: str, spans: Sequence[Span]) -> None:
    picture.text(24, top + 18, title, "ink bold")
    share = f"tensor cores busy {busy(spans):.0%} of the time from the first product to the last"
    picture.text(836, top + 18, share, "muted", "end")
    last = max(span.end for span in spans)
    rows = {"A": (top + 28, 15), "B": (top + 44, 15)}
    own = {"A": (top + 66, 17), "B": (top + 86, 17)}
    copies = {"k": (top + 110, 8), "v": (top + 120, 8)}
    for name, y in (
        ("products of A", 39),
        ("products of B", 56),
        ("warpgroup A", 79),
        ("warpgroup B", 99),
        ("copies", 123),
    ):
        picture.text(24, top + y, name, "ink")
    for y, height in (*rows.values(), *own.values()):
        picture.rect(left, y, last * scale, height, "empty")
    for tick in range(int(last / 1000) + 1):
        x = left + tick * 1000 * scale
        picture.line([(x, top + 28), (x, top + 132)], "grid")
    for span in spans:
        y, height = own[span.who] if span.what == "softmax" else rows[span.who] if span.who else copies[span.what]
        x, width = left + span.start * scale, (span.end - span.start) * scale
        picture.rect(x, y, max(width - 0.4, 0.4), height, _LOOKS[span.what], 1)
        if span.what in ("scores", "weighted"):
            picture.text(x + width / 2, y + 11, f"{span.number}", "ink small", "middle")

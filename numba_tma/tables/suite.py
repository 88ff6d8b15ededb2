"""Tables of `run_all`: docs/results/README.md's, and `NAME speed` on the page of each problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..report import markdown, seconds
from .records import (
    Record,
    baseline,
    circumstances_in_words,
    load_records,
    options_in_words,
    picture_name,
    rate,
    runs,
)

PICTURES = "../pictures"  # as docs/results sees them
# Problems that share a page.
PAGES = {
    "rmsnorm": "softmax",
    **dict.fromkeys(("column_sums", "histogram", "scatter_add"), "reductions"),
    **dict.fromkeys(("patches", "paged"), "gather"),
}
# Those whose page has the suite's own table; others' pages have tables of measurements of their own.
SPEED = (
    "kv_stream",
    "copy",
    "multicast",
    "softmax",
    "rmsnorm",
    "column_sums",
    "histogram",
    "scatter_add",
    "patches",
    "paged",
)


def _speed(problem: str) -> Callable[[Path], str]:
    def make(results: Path) -> str:
        return _speed_table(runs(load_records(results))[problem])

    return make


def _speed_table(records: list[Record], correctness: bool = False) -> str:
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


def _circumstances(results: Path) -> str:
    rows = [[name, str(value)] for name, value in load_records(results)[0]["circumstances"].items()]
    return markdown(rows, ["", ""])


TABLES: dict[str, Callable[[Path], str]] = {
    "circumstances": _circumstances,
    "problems": _problems,
    **{f"{name} speed": _speed(name) for name in SPEED},
}

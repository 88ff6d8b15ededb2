"""The page in a real browser: marks, keys, widths and colour schemes. Needs the extra `browser`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from numba_tma.explain import explain, write_page

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("PySide6") is None, reason="needs a browser: pip install 'numba-tma[browser]'"
)
HERE = Path(__file__).parent
SIZES = [(800, 900), (1280, 800), (1920, 1080)]
MARKED = """Object.fromEntries([...document.querySelectorAll(".pane")].map(pane => [
    pane.classList[1] + pane.dataset.side,
    Object.fromEntries(["mark", "weak", "active"].map(name =>
        [name, [...pane.querySelectorAll("li." + name)].map(line => line.textContent)]))]))"""


def browse(steps: list[dict[str, Any]], *, dark: bool = False) -> list[Any]:
    """Carry out the steps; their results. Whatever the page writes to the console is an error."""
    done = subprocess.run(
        [sys.executable, str(HERE / "browser.py")],
        input=json.dumps({"dark": dark, "steps": steps}),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *results, end = json.loads(done.stdout)
    assert end["console"] == []
    return results


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    explanation = explain(f"{HERE / 'kernels.py'}:load")
    path = tmp_path_factory.mktemp("page") / "load.html"
    write_page(path, explanation)
    return explanation, str(path)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    old, new = explain("kv_stream.cp_async"), explain("kv_stream.tma")
    write_page(folder / "one.html", new)
    write_page(folder / "two.html", old, new)
    return [str(folder / "one.html"), str(folder / "two.html")]


def selectors(path: str, *wanted: tuple[str, str]) -> list[str]:
    """Selectors of the first lines of a column with a text in them, given as (column, text)."""
    script = "'#' + [...document.querySelectorAll('.{} li')].find(line => line.textContent.includes({!r})).id"
    return browse([{"open": path, "size": SIZES[1]}, *({"js": script.format(*line)} for line in wanted)])[1:]


def test_the_mouse_marks_what_became_of_a_line(load):
    explanation, path = load
    copy, fence, barrier, utmaldg, opening = selectors(
        path,
        ("python", "cp_async_bulk_tensor_2d_shared_global(smem"),
        ("python", "fence_mbarrier_init"),
        ("ptx", "bar.sync"),
        ("sass", "UTMALDG"),
        ("ptx", "mbarrier_arrive_expect_tx"),
    )
    _, _, python, _, again, _, ptx, _, sass, words, _, doc, docs, _, pointed, _, left = browse(
        [
            {"open": path, "size": SIZES[1]},
            {"click": copy},
            {"js": MARKED},
            {"click": copy},
            {"js": MARKED},
            {"click": barrier},
            {"js": MARKED},
            {"click": utmaldg},
            {"js": MARKED},
            {"js": "document.getElementById('inspector').innerText"},
            {"click": opening},
            {"js": "document.getElementById('inspector').innerText"},
            {"js": MARKED},
            {"keys": ["Escape"]},
            {"js": MARKED},
            {"point": fence},
            {"js": MARKED},
        ]
    )
    # From Python on: every instruction of the line, in both columns, and nothing else.
    where = next(
        p for line in explanation.ptx[0].instructions if line.mnemonic.startswith("cp.async") for p in line.places
    )
    lines = [line for line in explanation.ptx[0].instructions if where in line.places]
    shown = [" ".join(line.text.split()) for line in lines]
    assert python["ptx0"]["mark"] == shown
    numbers = {line.number for line in lines}
    assert python["sass0"]["mark"] == [s.text for s in explanation.sass[0].instructions if s.ptx in numbers]
    assert any(text.startswith("UTMALDG.2D") for text in python["sass0"]["mark"])
    assert len(python["python0"]["mark"]) == 1 and "cp_async_bulk_tensor" in python["python0"]["active"][0]
    # A second click lets go.
    assert not any(lines for column in again.values() for lines in column.values())
    # From PTX and from SASS back.
    assert ["syncthreads" in line for line in ptx["python0"]["mark"]] == [True]
    assert [line.split(".")[0] for line in ptx["sass0"]["mark"]] == ["BAR"]
    assert ["cp_async_bulk_tensor" in line for line in sass["python0"]["mark"]] == [True]
    assert ["cp.async.bulk.tensor" in line for line in sass["ptx0"]["mark"]] == [True]
    assert sass["sass0"]["active"][0].startswith("UTMALDG")
    # What is said: of SASS a line, of ptx/ its documentation.
    assert "copy engine" in words and "tensor map" in words and "PTX line" in words and "kernels.py:" in words
    assert "ptx.mbarrier_arrive_expect_tx(" in doc and "ptx/mbarrier.ptx" in doc
    assert any("mbarrier.arrive.expect_tx" in line for line in docs["ptx0"]["mark"])
    assert not any(lines for column in pointed.values() for lines in column.values())
    # Pointing marks too, and keeps nothing.
    assert ["fence.mbarrier_init" in line for line in left["ptx0"]["mark"]] == [True] and not left["python0"]["active"]


# Whether the column that has the keyboard names the line that it is at, for those who listen to the page.
NAMED = "document.activeElement.getAttribute('aria-activedescendant') === document.querySelector('.active').id"


def test_keys(load):
    _, path = load
    focus = "document.activeElement.getAttribute('aria-label')"
    seen = "document.querySelector('.active')?.textContent"
    results = browse(
        [
            {"open": path, "size": SIZES[1]},
            {"js": "document.querySelector('.python .code').focus()"},
            {"keys": ["Down"] * 8},  # to the line that initialises the barrier
            {"js": seen},
            {"js": MARKED},
            {"keys": ["Right"]},
            {"js": focus},
            {"js": seen},
            {"keys": ["Right"]},
            {"js": focus},
            {"js": seen},
            {"keys": ["Left"]},
            {"js": focus},
            {"keys": ["End"]},
            {"js": "document.querySelector('.ptx .active').textContent"},
            {
                "js": "(() => { const a = document.querySelector('.active').getBoundingClientRect(), p = "
                "document.querySelector('.ptx .scroll').getBoundingClientRect(); return a.top >= p.top && a.bottom <= "
                "p.bottom + 1; })()"
            },
            {"js": NAMED},
            {"keys": ["Escape"]},
            {"js": "document.querySelectorAll('.mark, .weak, .active').length"},
            {"keys": ["Tab"]},
            {"js": focus},
            {"keys": ["Home", "Enter"]},
            {"js": seen},
        ]
    )
    assert "mbarrier_init" in results[3] and any("mbarrier.init" in line for line in results[4]["ptx0"]["mark"])
    assert results[6] == "PTX" and results[7] == results[4]["ptx0"]["mark"][0]
    assert results[9] == "SASS" and results[10]
    assert results[12] == "PTX" and results[14] == "}"
    assert results[15] is True and results[16] is True and results[18] == 0
    assert results[20] == "SASS" and results[22].startswith("LDC R1")


def test_kinds_and_all_lines(load):
    explanation, path = load
    _, _, marked, pressed, _, left, hidden, _, shown = browse(
        [
            {"open": path, "size": SIZES[1]},
            {"click": "[data-kind='mbarrier']"},
            {"js": MARKED},
            {"js": "document.querySelector('[data-kind=mbarrier]').ariaPressed"},
            {"click": "[data-kind='mbarrier']"},
            {"js": "document.querySelectorAll('.mark').length"},
            {"js": "[...document.querySelectorAll('.ptx .move')].filter(l => l.offsetParent !== null).length"},
            {"click": ".brief"},
            {"js": "[...document.querySelectorAll('.ptx .move')].filter(l => l.offsetParent !== null).length"},
        ]
    )
    ptx, sass = explanation.counts["mbarrier"]
    assert (len(marked["ptx0"]["mark"]), len(marked["sass0"]["mark"])) == (ptx, sass)
    assert pressed == "true" and left == 0 and hidden == 0
    assert shown == sum(line.is_move for line in explanation.ptx[0].lines)


# Of every line: whether its text stays inside its column. Of the page: whether it stays inside the window.
OVERFLOW = """(() => {
    const lines = [...document.querySelectorAll("li, h1, dl, .kinds, #inspector > *, td, th")];
    const wide = lines.filter(line => line.offsetParent && line.scrollWidth > line.clientWidth + 1);
    const panes = [...document.querySelectorAll(".pane")];
    return {
        page: document.documentElement.scrollWidth - innerWidth,
        lines: wide.map(line => line.textContent).slice(0, 5),
        heights: [...document.querySelectorAll(".scroll")].map(scroll => scroll.clientHeight),
        covered: panes.filter(pane => pane.getBoundingClientRect().right > innerWidth).length,
    };
})()"""

# The contrast of every colour of text with what is behind it (WCAG 2), lowest first.
CONTRAST = """(() => {
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const behind = e => {
        for (; e; e = e.parentElement) {
            const colour = numbers(getComputedStyle(e).backgroundColor);
            if (colour.length < 4 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    const found = {};
    const text = "li:not(.plain) span, li:not(.plain), dd, dt, h1, h2, #inspector *, button, td";
    for (const e of document.querySelectorAll(text)) {
        const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
        const name = e.tagName + "." + e.className;
        found[name] = Math.min(found[name] ?? 21, (a + 0.05) / (b + 0.05));
    }
    return found;
})()"""
LINE = "(document.querySelector('.python li.h3') ?? document.querySelector('.python li[class^=h]'))"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_fits_and_is_legible(pages, dark):
    steps = []
    for path in pages:
        for size in SIZES:
            steps += [
                {"open": path, "size": size},
                {"js": f"{LINE}.click()"},
                {"js": OVERFLOW},
                {"js": CONTRAST},
                {"js": "matchMedia('(prefers-color-scheme: dark)').matches"},
            ]
    results = browse(steps, dark=dark)
    for place in range(0, len(results), 5):
        where = f"{steps[place]}"
        _, _, overflow, contrast, scheme = results[place : place + 5]
        assert scheme == dark
        assert overflow["page"] <= 0 and overflow["covered"] == 0 and overflow["lines"] == [], where
        assert min(overflow["heights"]) >= 150, where
        assert contrast and min(contrast.values()) >= 4.5, (where, sorted(contrast.items(), key=lambda c: c[1])[:4])

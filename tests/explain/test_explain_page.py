"""The page and the text: complete, self-contained, and saying what the explanation says."""

from __future__ import annotations

import html
import json
import os
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from numba_tma.explain import comparison, explain, page, text, write_page
from numba_tma.explain.lexers import PtxLexer, PythonLexer, SassLexer, lines
from numba_tma.kernels import PROBLEMS

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "kernels.py"
VOID = {"meta", "wbr"}


class Parsed(HTMLParser):
    """The page's columns as lists of (number, text), and whether all elements are closed."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.columns: list[list[tuple[str, str]]] = []
        self.names: list[str] = []
        self.links: dict = {}
        self.script = ""
        self.attributes: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.attributes += [(name, value or "") for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "ol":
            self.columns.append([])
            self.names.append(values["aria-label"])
        elif tag == "li":
            self.columns[-1].append((values.get("data-n", ""), ""))
        self.is_links = values.get("id") == "links"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "li" in self.open:
            number, before = self.columns[-1][-1]
            self.columns[-1][-1] = (number, before + data)
        elif self.open[-1:] == ["script"] and self.is_links:
            self.links = json.loads(data)


@pytest.fixture(scope="module")
def load():
    return explain(f"{FILE}:load")


@pytest.fixture(scope="module")
def steps():
    return explain("kv_stream.cp_async"), explain("kv_stream.tma")


def test_nothing_comes_from_elsewhere(load):
    source = page(load)
    parsed = Parsed(source)
    assert not [value for name, value in parsed.attributes if name in ("src", "href")]
    assert "http://" not in source and "https://" not in source and "@import" not in source and "url(" not in source
    assert str(Path.cwd()) not in source  # nor does it tell where it was made


def test_the_columns_hold_every_line(load):
    python, ptx, sass = Parsed(page(load)).columns
    source = FILE.read_text().split("\n")
    function = load.python[0]
    for number in range(function.first, function.last + 1):
        assert (str(number), source[number - 1].strip()) in python
    texts = load.compiled.ptx.split("\n")
    for line in load.ptx[0].instructions:
        assert (str(line.number), " ".join(texts[line.number - 1].split())) in ptx
    assert [t for n, t in sass if n] == [line.text for line in load.sass[0].instructions]


def test_what_looks_like_html_is_text(load):
    source = page(load)
    assert "<b>Not bold</b>" not in source and html.escape("<b>Not bold</b> </script>", quote=False) in source
    script = re.search(r'id="links">(.*?)</script>', source, re.S)[1]
    assert json.loads(script)["sides"]


def test_the_links_are_those_of_the_explanation(load):
    parsed = Parsed(page(load))
    python, ptx, sass = parsed.columns
    links = parsed.links
    (side,) = links["sides"]
    assert len(side["chain"]) == len(side["word"]) == len(side["inlined"]) == len(ptx)
    assert len(side["sass"]) == len(side["sassWord"]) == len(sass)
    by_number = {str(line.number): line for line in load.ptx[0].instructions}
    for (number, _), chain, word in zip(ptx, side["chain"], side["word"], strict=True):
        if word >= 0:
            line = by_number[number]
            assert [int(python[row][0]) for row in links["chains"][chain]] == [place.line for place in line.places]
            assert links["words"][word][0] == line.mnemonic
    numbers = [number for number, _ in ptx]
    for line, origin in zip([t for t in sass if t[0]], [o for o in side["sass"] if o >= 0], strict=True):
        known = next(s for s in load.sass[0].instructions if f"{s.address:04x}" == line[0])
        assert numbers[origin] == str(known.ptx)
    assert "Start copying a box" in links["docs"]["cp_async_bulk_tensor_2d_shared_global"][1]


@pytest.mark.parametrize("name", [f"{p.name}.{p.variants[-1].name}" for p in PROBLEMS])
def test_quick_and_small(name, tmp_path):
    explanation = explain(name)
    _ = explanation.compiled.cubin
    started = os.times()
    write_page(tmp_path / "page.html", explanation)
    spent = [after - before for before, after in zip(started, os.times(), strict=True)][:4]
    assert sum(spent) < 3  # seconds of this process and of nvdisasm, whatever else the machine does
    assert (tmp_path / "page.html").stat().st_size < 2e6


def test_two_kernels_beside_each_other(steps):
    old, new = steps
    source = page(old, new)
    parsed = Parsed(source)
    names = ["Python", "PTX of kv_stream.cp_async", "PTX of kv_stream.tma"]
    assert parsed.names == [*names, "SASS of kv_stream.cp_async", "SASS of kv_stream.tma"]
    python = parsed.columns[0]
    texts = [text for _, text in python]
    assert any("cp_async_commit_group" in text for text in texts)
    assert any("release()" in text for text in texts)
    # What both have is there once.
    assert sum("thread = uint32(cuda.threadIdx.x)" in text for text in texts) == 1
    for number, side in enumerate((old, new)):
        data = parsed.links["sides"][number]
        # Every line of Python that the PTX names is there, also where several functions have one name.
        linked = [parsed.links["chains"][c] for c, w in zip(data["chain"], data["word"], strict=True) if w >= 0]
        assert list(map(len, linked)) == [len(line.places) for line in side.ptx[0].instructions]
        rows = {row for chain in data["chain"] for row in parsed.links["chains"][chain]}
        written = " ".join(texts[row] for row in rows)
        assert ("cp_async_wait_group" in written) == (side is old)
        assert ("release()" in written) == (side is new)
    row = re.search(r'data-kind="copy engine".*?</tr>', source)[0]
    assert re.findall(r"<td>(\d*)</td>", row) == ["", "6", "", "6"]


def test_long_lists_of_registers_are_cut():
    product = explain(f"{FILE}:product", arguments="of_product")
    parsed = Parsed(page(product))
    shown = [text for _, text in parsed.columns[1] if "wgmma.mma_async" in text]
    whole = [value for name, value in parsed.attributes if name == "title" and "wgmma.mma_async" in value]
    assert shown and len(shown) == len(whole)
    assert all("…" in text and text.count("%f") == 3 for text in shown)
    assert all("…" not in text and text.count("%f") == 16 for text in whole)


def test_text_says_the_same(load):
    plain = text(load, width=160)
    assert "\033" not in plain and max(map(len, plain.split("\n"))) <= 175
    assert "\nof no Python line" not in plain
    for line in load.sass[0].instructions:
        assert f"{line.address:04x} " in plain
    for line in load.ptx[0].instructions:
        became = any(s.ptx == line.number for s in load.sass[0].instructions)
        assert line.is_move and not became or f"{line.number:>5}" in plain
    coloured = text(load, width=160, colour=True)
    assert re.sub(r"\033\[\d+m", "", coloured) == plain and coloured != plain
    narrow = text(load, width=20)
    assert "…" in narrow


def test_comparison_as_text(steps):
    old, new = steps
    plain = comparison(old, new)
    assert "-def kv_stream_cp_async(" in plain and "+def kv_stream_tma(" in plain
    assert "tile_sum(" in plain and "PTX cp_async" in plain and "SASS tma" in plain
    assert re.sub(r"\033\[\d+m", "", comparison(old, new, colour=True)) == plain


@pytest.mark.parametrize(
    ("lexer", "text", "expected"),
    [
        (PtxLexer, "@%p2 bra $L__BB0_2;", [("g", "@%p2"), ("f", "bra"), ("l", "$L__BB0_2")]),
        (PtxLexer, "mov.u32 %r1, %tid.x;", [("f", "mov.u32")]),
        (PtxLexer, "cp.async.bulk.commit_group;", [("f", "cp.async.bulk.commit_group")]),
        (PtxLexer, ".reg .pred %p<3>;", [("d", ".reg"), ("d", ".pred"), ("m", "3")]),
        (SassLexer, "@!P0 R2UR UR4, R18", [("g", "@!P0"), ("f", "R2UR"), ("u", "UR4")]),
        (
            SassLexer,
            "SYNCS.EXCH.64 URZ, [UR8], UR4",
            [("f", "SYNCS.EXCH.64"), ("u", "URZ"), ("u", "UR8"), ("u", "UR4")],
        ),
        (PythonLexer, "def f(x):", [("k", "def"), ("f", "f")]),
    ],
)
def test_colours(lexer, text, expected):
    (found,) = lines(text, lexer(stripnl=False))
    assert "".join(part for _, part in found) == text
    assert [(letter, part.strip()) for letter, part in found if letter] == expected


def test_lines_stay_lines():
    source = '\n\n"""one\ntwo"""\n\nx = 1'
    found = lines(source, PythonLexer(stripnl=False))
    assert ["".join(part for _, part in line) for line in found] == source.split("\n")
    assert found[3] == [("s", 'two"""')]


def run(*arguments: str) -> int:
    main = runpy.run_path(str(ROOT / "scripts" / "explain.py"))["main"]
    return main(list(arguments))


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("kv_stream.tma", "--option", "stages=3", "--option", "tile=(16, 128)") == 0
    source = (tmp_path / "kv_stream.tma.html").read_text()
    assert "stages = 3" in source and capsys.readouterr().out.strip() == "kv_stream.tma.html"
    assert run(f"{FILE}:load", "--diff", f"{FILE}:load", "--output", "both.html") == 0
    assert (tmp_path / "both.html").exists()
    assert run(f"{FILE}:load", "--text") == 0
    assert "UTMALDG.2D" in capsys.readouterr().out
    assert run(f"{FILE}:called", "--arguments", "of_called") == 0
    assert (tmp_path / "kernels-called.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no problem 'nothing'"),
        (["nothing.py"], "nothing.py: no such file"),
        ([f"{FILE}:nothing"], "has no kernel 'nothing'"),
        ([f"{FILE}:load", "--arguments", "nothing"], "no function 'nothing'"),
        (["kv_stream.tma", "--arch", "sm_80"], "needs sm_90"),
        (["kv_stream.tma", "--output", "/nowhere/page.html"], "/nowhere/page.html"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message, capsys):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err


def test_an_option_without_a_value(capsys):
    with pytest.raises(SystemExit):
        run("kv_stream.tma", "--option", "stages")
    assert "NAME=VALUE" in capsys.readouterr().err


def test_open(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert run(f"{FILE}:load", "--open", "--output", str(tmp_path / "page.html")) == 0
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert "numba_tma.explain" in sys.modules

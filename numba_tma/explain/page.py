"""A kernel as one HTML page that needs nothing else: Python, PTX and SASS side by side, their lines linked.

Two kernels make the same page with more columns: the difference of their Python, PTX and SASS of both.
"""

from __future__ import annotations

import html
import json
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from . import figures, lexers
from .explanation import Explanation
from .glossary import ptx_meaning, sass_meaning
from .kinds import KINDS, ptx_kind, sass_kind
from .ptx_listing import Inlined
from .rows import HUES, Row, Rows

# A longer list of registers, such as an accumulator's, is shown by its ends.
_LONGEST_LIST = 10
_LONGEST_WORD = 24
_LIST = re.compile(r"\{([^{}]*)\}")
_NEVER = "Never executed: @!PT is never true. It takes the place of an instruction for its timing alone."


def write_page(path: Path | str, explanation: Explanation, other: Explanation | None = None) -> None:
    """Write the page of one kernel, or of two beside each other: `explanation`, and `other`, which builds on it."""
    Path(path).write_text(page(explanation, other), encoding="utf-8")


def page(explanation: Explanation, other: Explanation | None = None) -> str:
    """The page as text."""
    sides = [explanation] if other is None else [explanation, other]
    rows = Rows(sides)
    links = _Links()
    code = [_side(side, rows, index, links) for index, side in enumerate(sides)]
    title = " → ".join(side.title for side in sides)
    return string.Template(_asset("page.html")).substitute(
        title=html.escape(title),
        css=_asset("page.css").replace("$hues", _hue_rules()),
        js=_asset("page.js"),
        layout="two" if other else "one",
        heads="".join(_head(side) for side in sides) + (_kind_buttons(sides[0]) if other is None else ""),
        kinds=_kind_table(sides) if other else "",
        columns=_columns(sides, rows, code),
        links=_json(links.as_dict(rows)),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    # Inside a script element only this could end it.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")


# ----------------------------------------------------------------------------------------------------
# Links
# ----------------------------------------------------------------------------------------------------


@dataclass
class _Links:
    """What the page's program needs: for each line the lines of the other columns, and what is said about it."""

    chains: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    words: dict[tuple[str, str, str], int] = field(default_factory=dict)
    docs: dict[str, list[str]] = field(default_factory=dict)
    sides: list[dict[str, list]] = field(default_factory=list)

    def chain(self, rows: tuple[int, ...]) -> int:
        return self.chains.setdefault(rows, len(self.chains))

    def word(self, mnemonic: str, kind: str, meaning: str) -> int:
        return self.words.setdefault((mnemonic, kind, meaning), len(self.words))

    def as_dict(self, rows: Rows) -> dict[str, Any]:
        return {
            "files": rows.files,
            "chains": list(self.chains),
            "words": list(self.words),
            "docs": self.docs,
            "sides": self.sides,
        }


def _side(explanation: Explanation, rows: Rows, side: int, links: _Links) -> tuple[str, str]:
    """PTX and SASS of one kernel as list items; its links are added to `links`."""
    data: dict[str, list] = {
        name: [] for name in ("chain", "word", "inlined", "guessed", "names", "sass", "sassWord", "ordered")
    }
    links.sides.append(data)
    items: list[str] = []
    where: dict[tuple[str, int], int] = {}
    for listing in explanation.ptx:
        shown = [_shortened(" ".join(line.text.split())) for line in listing.lines]
        coloured = lexers.lines("\n".join(shown), lexers.PtxLexer(stripnl=False))
        if len(explanation.ptx) > 1:
            items.append(_item("", f"<b>{html.escape(listing.title)}</b>", "file"))
            _add_ptx(data, 0, -1, -1)
        offset, opened = len(data["names"]), None
        data["names"] += [_name(inlined, links) for inlined in listing.inlined]
        for line, tokens, text in zip(listing.lines, coloured, shown, strict=True):
            number = offset + line.inlined if line.inlined is not None else -1
            if number >= 0 and number != opened and line.text:
                opened = number
                inside = (other for other in listing.lines if other.inlined == line.inlined and other.places)
                chain = rows.chain(side, next(inside, line).places)
                items.append(_opening(listing.inlined[line.inlined], _hue(chain, rows)))
                _add_ptx(data, links.chain(chain), -1, number)
            chain = rows.chain(side, line.places)
            where[listing.name, line.number] = len(items)
            if line.by_use:
                data["guessed"].append(len(items))
            word = -1
            if line.mnemonic:
                word = links.word(line.mnemonic, ptx_kind(line.mnemonic), ptx_meaning(line.mnemonic))
            classes = [_hue(chain, rows), "in" if number >= 0 else "", "move" if line.is_move else ""]
            classes.append("label" if re.match(r"\$[\w$]+:", line.text) else "" if line.mnemonic else "plain")
            title = f' title="{html.escape(line.text)}"' if "…" in text else ""
            items.append(_item(line.number, _spans(tokens), *classes, more=title))
            _add_ptx(data, links.chain(chain), word, number)
    return "".join(items), "".join(_sass(explanation, data, where, rows, links))


def _add_ptx(data: dict[str, list], chain: int, word: int, inlined: int) -> None:
    data["chain"].append(chain)
    data["word"].append(word)
    data["inlined"].append(inlined)


def _opening(inlined: Inlined, hue: str) -> str:
    """The line above an inlined function of ptx/: its name and file."""
    if inlined.function is None:
        return _item("", "<b>inline PTX</b>", "opening", hue)
    function = inlined.function
    text = f"<b>{function.name}</b> <i>ptx/{function.file.name}:{function.line}</i>"
    return _item("", text, "opening", hue)


def _name(inlined: Inlined, links: _Links) -> str:
    """The name of an inlined function; what it says of itself goes to `links`."""
    function = inlined.function
    if function is None:
        return ""
    if function.name not in links.docs:
        arguments = ", ".join(operand.name for operand in function.operands)
        links.docs[function.name] = [f"ptx.{function.name}({arguments})", function.docstring]
    return function.name


def _sass(
    explanation: Explanation, data: dict[str, list], where: dict[tuple[str, int], int], rows: Rows, links: _Links
) -> Iterator[str]:
    chains = list(links.chains)
    for listing in explanation.sass:
        if len(explanation.sass) > 1:
            yield _item("", f"<b>{html.escape(listing.name)}</b>", "file")
            data["sass"].append(-1)
            data["sassWord"].append(-1)
        coloured = lexers.lines("\n".join(line.text for line in listing.lines), lexers.SassLexer(stripnl=False))
        for line, tokens in zip(listing.lines, coloured, strict=True):
            origin = where.get((listing.name, line.ptx), -1) if line.ptx is not None else -1
            chain = chains[data["chain"][origin]] if origin >= 0 and line.mnemonic else ()
            word = -1
            if line.mnemonic:
                meaning = _NEVER if line.text.startswith("@!PT") else sass_meaning(line.mnemonic)
                word = links.word(line.mnemonic, sass_kind(line.mnemonic), meaning)
            if line.by_order:
                data["ordered"].append(len(data["sass"]))
            data["sass"].append(origin if line.mnemonic else -1)
            data["sassWord"].append(word)
            address = f"{line.address:04x}" if line.mnemonic else ""
            yield _item(address, _spans(tokens), _hue(chain, rows), "" if line.mnemonic else "label")


# ----------------------------------------------------------------------------------------------------
# HTML
# ----------------------------------------------------------------------------------------------------


def _item(number: object, content: str, *classes: str, more: str = "") -> str:
    named = " ".join(filter(None, classes))
    named = f' class="{named}"' if named else ""
    numbered = f' data-n="{number}"' if number != "" else ""
    return f"<li{named}{numbered}{more}>{content}</li>"


def _spans(tokens: Sequence[tuple[str, str]]) -> str:
    return "".join(
        f"<span class={letter}>{_breakable(text)}</span>" if letter else html.escape(text, quote=False)
        for letter, text in tokens
    )


def _breakable(text: str) -> str:
    """Escaped; a long mnemonic may wrap between its words."""
    escaped = html.escape(text, quote=False)
    return escaped.replace(".", "<wbr>.") if len(text) > _LONGEST_WORD and " " not in text else escaped


def _hue(chain: Sequence[int], rows: Rows) -> str:
    """The class that colours what belongs to a line of the kernel."""
    return f"h{rows.hue(chain)}" if chain else ""


def _shortened(text: str) -> str:
    """A line with its longest lists of registers shown by their ends; the whole line is its tooltip."""

    def ends(found: re.Match) -> str:
        members = [member.strip() for member in found[1].split(",")]
        if len(members) <= _LONGEST_LIST:
            return found[0]
        return f"{{{members[0]}, {members[1]}, … {members[-1]}}}"

    return _LIST.sub(ends, text)


def _head(explanation: Explanation) -> str:
    """Name, idea and figures of one kernel."""
    numbers = "".join(
        f'<div title="{html.escape(note)}"><dt>{name}</dt><dd>{html.escape(value)}</dd></div>'
        for name, value, note in figures.figures(explanation)
    )
    idea = f"<p>{html.escape(explanation.idea)}</p>" if explanation.idea else ""
    return f"<div class=head><h1>{html.escape(explanation.title)}</h1>{idea}<dl>{numbers}</dl></div>"


def _kind_buttons(explanation: Explanation) -> str:
    """Instructions by kind, as buttons that mark them."""
    buttons = "".join(
        f'<button type=button data-kind="{kind}" aria-pressed=false>{kind}<b>{ptx}</b><b>{sass}</b></button>'
        for kind, (ptx, sass) in explanation.counts.items()
    )
    return f"<div class=kinds><span>instructions, PTX → SASS</span>{buttons}</div>"


def _kind_table(sides: Sequence[Explanation]) -> str:
    """Instructions by kind of two kernels beside each other."""
    counts = [side.counts for side in sides]
    rows = []
    for kind in (kind for kind in KINDS if any(kind in count for count in counts)):
        cells = [count.get(kind, (0, 0)) for count in counts]
        button = f'<button type=button data-kind="{kind}" aria-pressed=false>{kind}</button>'
        changed = " class=changed" if cells[0] != cells[1] else ""
        rows.append(f"<tr{changed}><th scope=row>{button}</th>{_numbers(cells)}</tr>")
    total = [tuple(sum(cell[which] for cell in count.values()) for which in (0, 1)) for count in counts]
    rows.append(f"<tr class=total><th scope=row>all</th>{_numbers(total)}</tr>")
    names = "".join(f"<th scope=col>{html.escape(side.short_title)}</th>" for side in sides)
    heads = "<tr><th></th><th colspan=2>PTX</th><th colspan=2>SASS</th></tr>"
    return (
        f'<section id=kinds aria-label="instructions by kind"><table><thead>{heads}<tr><th></th>{names}{names}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></section>"
    )


def _numbers(cells: Sequence[tuple[int, int]]) -> str:
    """PTX of each kernel, then SASS of each."""
    return "".join(f"<td>{cell[which] or ''}</td>" for which in (0, 1) for cell in cells)


def _hue_rules() -> str:
    """Colours of the kernel's lines: each turns the hue by the golden angle, so that neighbours differ."""
    return "\n".join(
        f".h{i} {{ border-left-color: hsl({round(i * 137.508) % 360} var(--saturation) var(--lightness)) !important; }}"
        for i in range(HUES)
    )


def _columns(sides: Sequence[Explanation], rows: Rows, code: Sequence[tuple[str, str]]) -> str:
    reached = {row for chain in _chains(sides, rows) for row in chain}
    python = "".join(_python_item(index, row, index in reached, rows) for index, row in enumerate(rows.rows))
    result = [_pane("python", 0, "Python", python)]
    for which, kind in enumerate(("ptx", "sass")):
        for side, (explanation, texts) in enumerate(zip(sides, code, strict=True)):
            name = f"{kind.upper()} of {explanation.title}" if len(sides) > 1 else kind.upper()
            result.append(_pane(kind, side, name, texts[which]))
    return "".join(result)


def _chains(sides: Sequence[Explanation], rows: Rows) -> Iterator[tuple[int, ...]]:
    for index, side in enumerate(sides):
        for listing in side.ptx:
            for line in listing.lines:
                yield rows.chain(index, line.places)


def _python_item(index: int, row: Row, reached: bool, rows: Rows) -> str:
    if row.head:
        files = " → ".join(dict.fromkeys(section.shown_file for section in row.head))
        name = "".join(text for _, text in row.tokens)
        constants = f"<small>{html.escape(row.constants)}</small>" if row.constants else ""
        return _item("", f"<b>{html.escape(name)}</b> <i>{html.escape(files)}</i>{constants}", "opening")
    classes = [f"h{rows.hues[index]}" if index in rows.hues else "", "" if reached else "plain"]
    if len(row.numbers) == 2:
        removed, added = row.numbers[1] is None, row.numbers[0] is None
        classes.append("removed" if removed else "added" if added else "")
    more = f' data-m="{row.numbers[1] or ""}"' if len(row.numbers) == 2 else ""
    # The indentation is the style's, so that a line that wraps is indented as a whole.
    more += f' style="--i:{row.indentation}"' if row.indentation else ""
    return _item(row.numbers[0] or "", _spans(row.tokens), *classes, more=more)


def _pane(kind: str, side: int, name: str, items: str) -> str:
    title = "show declarations and moves of inlined PTX too"
    brief = f"<button type=button class=brief aria-pressed=false title='{title}'>all lines</button>"
    return (
        f'<section class="pane {kind}" data-side={side}><h2>{html.escape(name)}{brief if kind == "ptx" else ""}'
        f"<span class=runs hidden><button type=button class=previous aria-label='previous marked lines'>‹</button>"
        f"<output></output><button type=button class=next aria-label='next marked lines'>›</button></span></h2>"
        f'<div class=scroll><ol class=code role=listbox tabindex=0 aria-label="{html.escape(name)}">{items}</ol></div>'
        f"<div class=rail aria-hidden=true></div></section>"
    )

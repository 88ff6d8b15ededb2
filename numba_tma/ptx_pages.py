"""The PTX reference of the documentation, made from the comments in ptx/: one page a file, and an index.

A page has a section for each function as it is written; variants made from the same text are named there. Names of
functions in the prose become links, and so does the section of the PTX ISA that ends each comment.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import ptx_files
from .ptx_files import Function

_ISA = "https://docs.nvidia.com/cuda/parallel-thread-execution/"
_SECTION = re.compile(r"PTX ISA: (?P<chapter>[^,]+), (?P<instruction>.+?)\.?$", re.M)
# The manual's anchors are chapter and instruction in lower case with hyphens, but for these.
_CHAPTER_ANCHORS = {
    "Matrix Multiply-Accumulate Instructions": "warp-level-matrix-instructions",
    "Warp Level Matrix Load Instructions": "warp-level-matrix-instructions",
    "Warp Level Matrix Store Instructions": "warp-level-matrix-instructions",
    "Warp Level Matrix Transpose Instructions": "warp-level-matrix-instructions",
}
_INSTRUCTION_ANCHORS = {
    "add, sub and mul": "add",
    "bar / barrier": "bar",
    "cp.async.wait_all": "cp-async-wait-group",
    "ld and ld.global.nc": "ld",
    "max and min": "max",
    "mbarrier.test_wait": "mbarrier-test-wait-try-wait",
    "mbarrier.try_wait": "mbarrier-test-wait-try-wait",
    "membar / fence": "membar",
    "prefetch": "prefetch-prefetchu",
    "wgmma.mma_async": "wgmma-mma",
}


@dataclass(frozen=True)
class Section:
    """What one text in a .ptx file stands for: the function as written, and all names made from it, itself first."""

    function: Function
    names: tuple[str, ...]


def pages(folder: Path) -> dict[Path, str]:
    """All pages by their path in `folder`: index.md and one for each .ptx file."""
    files = sections()
    places = {
        name: (file, section.function.name) for file in files for section in files[file] for name in section.names
    }
    made = {folder / f"{file.stem}.md": _page(file, files[file], places) for file in files}
    return {folder / "index.md": _index(files), **made}


def sections() -> dict[Path, list[Section]]:
    """The sections of each file of ptx/, in the order in which they are written."""
    written: dict[tuple[Path, int], list[Function]] = {}
    for function in ptx_files.functions().values():
        written.setdefault((function.file, function.line), []).append(function)
    files: dict[Path, list[Section]] = {}
    for (file, _), functions in sorted(written.items(), key=lambda item: item[0]):
        standing = next(function for function in functions if function.standing)
        names = tuple(function.name for function in functions)
        files.setdefault(file, []).append(Section(standing, names))
    return files


def isa_link(chapter: str, instruction: str) -> str:
    """Address of the section of the PTX ISA manual on an instruction, in a chapter as ptx/ names it."""
    chapter = _CHAPTER_ANCHORS.get(chapter) or _hyphenated(chapter)
    return f"{_ISA}#{chapter}-{_INSTRUCTION_ANCHORS.get(instruction) or _hyphenated(instruction)}"


def folded(names: Iterable[str]) -> list[str]:
    """Names in short: those that differ in some of their words alone become one, `ld_shared_v{2,4}_u32`."""
    by_length: dict[int, list[list[str]]] = {}
    for name in names:
        words = name.split("_")
        by_length.setdefault(len(words), []).append(words)
    return [short for group in by_length.values() for short in _folded(group)]


def _folded(group: list[list[str]]) -> list[str]:
    """Names of equally many words in short."""
    columns = [tuple(dict.fromkeys(column)) for column in zip(*group, strict=True)]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    if math.prod(len(column) for column in columns) == len(group):
        return ["_".join(map(_alternatives, columns))]
    for left, right in itertools.pairwise(varying):  # two words that vary together, such as bf16_bf16 and f16_f16
        joined = [[*words[:left], "_".join(words[left : right + 1]), *words[right + 1 :]] for words in group]
        if math.prod(len(set(column)) for column in zip(*joined, strict=True)) == len(group):
            return _folded(joined)
    return [
        short
        for word in columns[varying[0]]
        for short in _folded([words for words in group if words[varying[0]] == word])
    ]


def _alternatives(words: tuple[str, ...]) -> str:
    if len(words) < 8:
        return words[0] if len(words) == 1 else "{" + ",".join(words) + "}"
    begin = os.path.commonprefix(words)
    end = os.path.commonprefix([word[::-1] for word in words])[::-1]
    return begin + "{" + ",".join(word[len(begin) : len(word) - len(end)] for word in words) + "}" + end


def _hyphenated(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _index(files: dict[Path, list[Section]]) -> str:
    rows = []
    for file, written in files.items():
        count = sum(len(section.names) for section in written)
        summary = re.split(r"\.(?=\s|$)", _head(file))[0].replace("\n", " ")
        rows.append(f"| [{file.stem}]({file.stem}.md) | {summary} | {count} |")
    table = "\n".join(rows)
    return f"""# PTX reference

Every function of `ptx` is one instruction, written out in a file of [`ptx/`](../../ptx/). These pages are made from the
comments there by `python scripts/ptx_pages.py`; `help(ptx.mbarrier_init)` shows the same text in Python.

In a kernel a function is called by name: `ptx.mbarrier_init(bar, 1)`. Where it takes an address, it takes also what has
one: a tile, a barrier, a shared or global array, a tensor map. An *immediate* is a literal or a global constant.

| file | what | functions |
|---|---|---|
{table}
"""


def _page(file: Path, written: list[Section], places: dict[str, tuple[Path, str]]) -> str:
    parts = [
        f"# {file.stem}",
        _linked(_head(file), file, places),
        f"The file: [`ptx/{file.name}`](../../ptx/{file.name}).",
    ]
    parts += [_section(section, file, places) for section in written]
    return "\n\n".join(parts) + "\n"


def _head(file: Path) -> str:
    """The comment at the file's beginning, as paragraphs."""
    comment = itertools.takewhile(lambda line: line.startswith("//"), file.read_text(encoding="utf-8").splitlines())
    return "\n".join(line[2:].removeprefix(" ") for line in comment)


def _section(section: Section, file: Path, places: dict[str, tuple[Path, str]]) -> str:
    function = section.function
    link = _SECTION.search(function.doc)
    doc = _SECTION.sub("", function.doc).strip()
    results = f" → {', '.join(result.numba for result in function.results)}" if function.results else ""
    parts = [
        f"## {function.name}",
        f"`ptx.{function.name}{function.signature}`{results}",
        _linked(doc, file, places, but=function.name),
    ]
    if function.operands:
        rows = [f"| `{o.name}` | {o.takes} | {_linked(o.note, file, places)} |" for o in function.operands]
        parts.append("\n".join(["| operand | takes | what |", "|---|---|---|", *rows]))
    if function.result_note:
        parts.append(f"Returns {_linked(function.result_note, file, places)}.")
    parts.append("```ptx\n" + "\n".join(_instructions(function)) + "\n```")
    if len(section.names) > 1:
        parts.append("Written once for " + ", ".join(f"`{name}`" for name in folded(section.names)) + ".")
    facts = [function.architecture + ("" if function.architecture.endswith("a") else " and newer")]
    if function.inline_only:
        facts.append(f"inline only: {function.inline_only}")
    if function.effect != "any":
        facts.append("the compiler may merge or move it" if function.effect == "pure" else "it writes nothing")
    if link is not None:
        title = f"{link['chapter']}, {link['instruction']}"
        facts.append(f"PTX ISA: [{title}]({isa_link(link['chapter'], link['instruction'])})")
    parts.append(". ".join(fact[0].upper() + fact[1:] if i else fact for i, fact in enumerate(facts)) + ".")
    return "\n\n".join(parts)


def _instructions(function: Function) -> Iterator[str]:
    """The statements of the function without those that take parameters apart and hand results back."""
    for line in function.text.split("\n{\n")[1].splitlines():
        statement = line.strip()
        if statement not in ("", "}", "ret;") and not re.match(r"\.reg|ld\.param|st\.param|//", statement):
            yield statement


def _linked(text: str, file: Path, places: dict[str, tuple[Path, str]], but: str = "") -> str:
    """`text` with the names of functions as links, those in code quotes too, and Markdown's signs made plain."""

    def link(match: re.Match) -> str:
        name = match["name"]
        if name not in places:
            return match[0]
        place, heading = places[name]
        if heading == but:
            return f"`{name}`"
        return f"[`{name}`]({'' if place == file else f'{place.stem}.md'}#{heading})"

    parts = re.split(r"(`[^`]*`)", text)
    for i, part in enumerate(parts):
        if part.startswith("`"):
            parts[i] = re.sub(r"^`(?P<name>\w+)`$", link, part)
        else:
            plain = re.sub(r"([*<|])", r"\\\1", part)
            parts[i] = re.sub(r"\b(?P<name>[a-z]\w*_\w+)\b", link, plain)
    return "".join(parts)

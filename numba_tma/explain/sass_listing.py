"""A cubin's SASS line by line, each instruction with the PTX line that it came from.

With line information the assembler keeps the PTX's own text and lines in the cubin, beside those of Python; nvdisasm
prints them above the instructions. Of wgmma it keeps none (what is printed is that of the instruction before): these
are placed by their order after the wgmma.fence, where their shape agrees.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..compile import Compiled, disassemble
from .ptx_listing import PtxListing

_SECTION = re.compile(r"//-+ \.text\.(\S+)\s+-+$")
_LINE = re.compile(r'\s*//## File "\.nv_debug_ptx_txt[^"]*", line (\d+)')
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*$")
_LABEL = re.compile(r"(\.L\w+|\$\S+):\s*$")
_WGMMA = ("HGMMA", "IGMMA", "QGMMA", "BGMMA")
_TARGET = re.compile(r"\.L\w+|\$\S+")
_MNEMONIC = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass(frozen=True)
class SassLine:
    """One line of SASS: an instruction at `address`, or a label, which has no mnemonic.

    `ptx` is the line of PTX that it came from, in the module that has the function; None where it is not known.
    `by_order` says that the assembler does not name it.
    """

    text: str
    mnemonic: str = ""
    address: int = 0
    ptx: int | None = None
    by_order: bool = False


@dataclass(frozen=True)
class SassListing:
    """The SASS of one function; `padding` counts the instructions behind its end, which are not executed."""

    name: str
    lines: tuple[SassLine, ...]
    padding: int

    @property
    def instructions(self) -> tuple[SassLine, ...]:
        """The lines that have an instruction."""
        return tuple(line for line in self.lines if line.mnemonic)


def listings(compiled: Compiled, ptx: Sequence[PtxListing]) -> list[SassListing]:
    """The kernel's SASS, then that of the functions that are linked to it, with the lines of `ptx`."""
    found = parse(disassemble(compiled.cubin, lines="ptx"))
    by_name = {listing.name: listing for listing in ptx}
    found = [_with_wgmma(listing, by_name[listing.name]) if listing.name in by_name else listing for listing in found]
    return sorted(found, key=lambda listing: listing.name != compiled.name)


def _with_wgmma(sass: SassListing, ptx: PtxListing) -> SassListing:
    """With the PTX lines of wgmma.mma_async: the first after a fence in SASS is the first after it in PTX …"""
    shapes = {
        line.number: "x".join(found.groups())
        for line in ptx.instructions
        if (found := re.match(r"wgmma\.mma_async\..*\bm(\d+)n(\d+)k(\d+)", line.mnemonic))
    }
    following: list[int] = []
    lines = []
    for line in sass.lines:
        name = line.mnemonic.split(".")[0]
        if line.mnemonic.startswith("WARPGROUP.ARRIVE"):
            # Of a fence; or of a wgmma, where the assembler puts one before each that has operand A in registers.
            following = [number for number in shapes if line.ptx is not None and number >= line.ptx]
        elif name in _WGMMA:
            number = following.pop(0) if following else None
            agrees = number is not None and f".{shapes[number]}." in f"{line.mnemonic}."
            line = replace(line, ptx=number if agrees else None, by_order=True)
        lines.append(line)
    return replace(sass, lines=tuple(lines))


def parse(text: str) -> list[SassListing]:
    """nvdisasm's text as listings, in its order."""
    result: list[SassListing] = []
    name, lines, ptx = "", [], None
    for raw in [*text.split("\n"), "//--- .text.end ---"]:
        section = _SECTION.match(raw)
        if section:
            if lines:
                result.append(_listing(name, lines))
            name, lines, ptx = section[1], [], None
        elif raw.startswith("//-"):
            if lines:
                result.append(_listing(name, lines))
            name, lines = "", []
        elif not name:
            continue
        elif line := _LINE.match(raw):
            ptx = int(line[1])
        elif instruction := _INSTRUCTION.match(raw):
            written = re.sub(r"`\(([^)]*)\)", r"\1", instruction[2])
            mnemonic = _MNEMONIC.match(written)
            lines.append(SassLine(written, mnemonic[1] if mnemonic else "", int(instruction[1], 16), ptx))
        elif label := _LABEL.match(raw):
            lines.append(SassLine(f"{label[1]}:"))
    return result


def _listing(name: str, lines: list[SassLine]) -> SassListing:
    """Without what fills the section up (a branch to itself, instructions that do nothing), nor unused labels."""
    end = len(lines)
    while end and lines[end - 1].mnemonic in ("NOP", ""):
        end -= 1
    if end > 1 and lines[end - 1].mnemonic == "BRA" and lines[end - 2].text == f"{lines[end - 1].text.split()[-1]}:":
        end -= 2
    targets = {word for line in lines[:end] if line.mnemonic for word in _TARGET.findall(line.text)}
    kept = tuple(line for line in lines[:end] if line.mnemonic or line.text[:-1] in targets)
    return SassListing(name, kept, sum(1 for line in lines[end:] if line.mnemonic))

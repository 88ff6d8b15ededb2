"""A kernel explained: its Python, PTX and SASS with the links between their lines, and what it takes and counts."""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass

from ..compile import Compiled
from ..launch import Kernel
from . import ptx_listing, python_source, sass_listing
from .kinds import KINDS, ptx_kind, sass_kind
from .ptx_listing import Place, PtxListing
from .python_source import Section
from .sass_listing import SassListing


@dataclass(frozen=True)
class Coverage:
    """How the `instructions` of the PTX are linked: to Python lines by the compiler (`named`), to those that use their
    result where it names none (`by_use`), or to none, but as the text of a function of ptx/ (`inlined_only`)."""

    instructions: int
    named: int
    by_use: int
    inlined_only: int

    @property
    def share(self) -> float:
        """Share of the instructions that are linked in one of these ways."""
        return (self.named + self.by_use + self.inlined_only) / self.instructions if self.instructions else 1.0


@dataclass(frozen=True)
class Explanation:
    """A kernel compiled for one architecture; `idea` is what a variant of the suite adds, '' elsewhere."""

    title: str
    idea: str
    kernel: Kernel
    compiled: Compiled

    @property
    def short_title(self) -> str:
        """Its last part: the variant, or the kernel of a file."""
        return re.split(r"[.:]", self.title)[-1]

    @functools.cached_property
    def entry(self) -> Place:
        """The line of the kernel's `def`."""
        return python_source.entry(self.kernel.function)

    @functools.cached_property
    def ptx(self) -> tuple[PtxListing, ...]:
        """The kernel's PTX, then that of the functions of ptx/ that it calls."""
        named = python_source.ptx_functions(self.kernel.function)
        return tuple(ptx_listing.listings(self.compiled, self.entry, named))

    @functools.cached_property
    def python(self) -> tuple[Section, ...]:
        """The kernel's source, then that of the functions inlined into it."""
        # Outermost first: a function comes after the one that calls it.
        places = [place for listing in self.ptx for line in listing.lines for place in reversed(line.places)]
        return tuple(python_source.sections(self.kernel.function, dict.fromkeys(places)))

    @functools.cached_property
    def sass(self) -> tuple[SassListing, ...]:
        """The kernel's SASS, then that of linked functions.

        Raises:
            CompileError: nvdisasm is not installed, or the assembler refused the PTX.
        """
        return tuple(sass_listing.listings(self.compiled, self.ptx))

    @functools.cached_property
    def coverage(self) -> Coverage:
        """How much of the PTX is linked."""
        lines = [line for listing in self.ptx for line in listing.instructions]
        return Coverage(
            len(lines),
            sum(bool(line.places) and not line.by_use for line in lines),
            sum(line.by_use for line in lines),
            sum(line.inlined is not None and not line.places for line in lines),
        )

    @functools.cached_property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Instructions of PTX and of SASS by kind, as they stand in the text; kinds that occur in neither left out."""
        ptx = Counter(ptx_kind(line.mnemonic) for listing in self.ptx for line in listing.instructions)
        sass = Counter(sass_kind(line.mnemonic) for listing in self.sass for line in listing.instructions)
        return {kind: (ptx[kind], sass[kind]) for kind in KINDS if ptx[kind] or sass[kind]}

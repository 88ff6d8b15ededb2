"""docs/glossary.md: what it links to exists, and speaks of the term."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
ENTRIES = re.findall(r"^- (.*?)(?=^- |^#|\Z)", (DOCS / "glossary.md").read_text(), re.S | re.M)


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", (DOCS / page).read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_terms():
    assert len(ENTRIES) >= 30


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: re.findall(r"\*\*(.*?)\*\*", entry)[0])
def test_links_lead_to_the_term(entry):
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]*))?\)", entry)
    assert links, entry
    for page, anchor in links:
        assert not anchor or anchor in anchors(page), f"{page} has no #{anchor}"
    text = " ".join(" ".join((DOCS / page).read_text().split()) for page, _ in links).lower()
    terms = [term.lower() for term in re.findall(r"\*\*(.*?)\*\*", entry)]
    for term in terms:
        words = {"swizzle atom": "pattern", "grouped heads": "grouped-query"}.get(term, term)
        assert re.search(rf"\b{re.escape(words)}", text), f"{term!r} is not on {[page for page, _ in links]}"

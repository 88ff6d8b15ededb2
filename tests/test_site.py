"""The site's pages: links out of docs/ become pages, and the generator finds nothing to complain about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from numba_tma import site

ROOT = Path(__file__).parents[1]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for path, text in {
        "docs/index.md": "[code](../code/a.py), [again](../code/a.py#L3), [all](../code/), [page](deep/page.md)\n",
        "docs/deep/page.md": "[code](../../code/a.py) [far](https://example.org/x.py)\n\n```text\n[x](../../code/a.py)\n```\n",
        "code/a.py": "a = '```'\n",
        "code/b.txt": "b\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_files_that_pages_link_to_become_pages(repository, tmp_path):
    target = tmp_path / "pages"
    made = site.assemble(repository, target)
    assert made == [Path("code"), Path("code/a.py"), Path("code/b.txt")]
    index = (target / "index.md").read_text()
    assert index.count("(source/code/a.py.md)") == 2 and "(source/code/index.md)" in index and "(deep/page.md)" in index
    page = (target / "deep/page.md").read_text()
    assert "[code](../source/code/a.py.md)" in page and "[x](../../code/a.py)" in page and "example.org" in page
    assert "a = '```'" in (target / "source/code/a.py.md").read_text()
    assert "(b.txt.md)" in (target / "source/code/index.md").read_text()


def test_what_was_there_before_goes(repository, tmp_path):
    target = tmp_path / "pages"
    site.assemble(repository, target)
    (repository / "docs/deep/page.md").unlink()
    (repository / "docs/index.md").write_text("nothing\n")
    assert site.assemble(repository, target) == []
    assert sorted(path.name for path in target.rglob("*.md")) == ["index.md"]


def test_a_dead_link_is_named(repository, tmp_path):
    (repository / "docs/index.md").write_text("[gone](../code/gone.py)\n")
    with pytest.raises(FileNotFoundError, match=r"docs/index\.md links to \.\./code/gone\.py"):
        site.assemble(repository, tmp_path / "pages")


def test_the_site_builds(tmp_path):
    """Strictly: a link that leads nowhere or a page that cannot be read ends the build."""
    pytest.importorskip("zensical", reason="needs the extra `docs`")
    command = [sys.executable, str(ROOT / "scripts" / "build_site.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    built = ROOT / "build" / "site"
    assert (built / "index.html").exists() and (built / "source/numba_tma/kernels/copy.py/index.html").exists()
    for page in built.rglob("*.html"):  # nothing is fetched from elsewhere
        text = page.read_text()
        for address in ("fonts.googleapis", "cdn.", "unpkg.com", "jsdelivr"):
            assert address not in text, f"{page.relative_to(built)} fetches from {address}"

"""The documentation as a site generator wants it: the pages of docs/, and a page for each file that they link to.

On the pages of docs/ a link to a file of the repository, such as `../numba_tma/kernels/copy.py`, leads out of the
folder, where a built site ends. `assemble` copies the folder and gives each such file or folder a page under source/.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.S | re.M)
_LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
_LANGUAGES = {".py": "python", ".ptx": "ptx", ".json": "json", ".toml": "toml", ".md": "markdown"}


def assemble(root: Path, target: Path) -> list[Path]:
    """Fill `target`, which is made anew, with what the site of the repository at `root` is built from.

    Returns the files and folders that got pages of their own, relative to `root`.

    Raises:
        FileNotFoundError: a page links to something that does not exist; the message names both.
    """
    docs = root / "docs"
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(docs, target)
    sources: set[Path] = set()
    for page in sorted(docs.rglob("*.md")):
        copy = target / page.relative_to(docs)
        text = page.read_text(encoding="utf-8")

        def redirect(link: re.Match, page: Path = page, copy: Path = copy) -> str:
            path = _outside(link["target"], page, root)
            if path is None:
                return link[0]
            sources.add(path)
            return f"]({os.path.relpath(target / _page_of(root, path), copy.parent)})"

        parts = _CODE.split(text)
        parts[::2] = [_LINK.sub(redirect, part) for part in parts[::2]]
        copy.write_text("".join(parts), encoding="utf-8")
    for path in sorted(sources):
        if (root / path).is_dir():
            sources |= {file.relative_to(root) for file in (root / path).iterdir() if file.is_file()}
    for path in sources:
        page = target / _page_of(root, path)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_source_page(root, path), encoding="utf-8")
    return sorted(sources)


def _outside(link: str, page: Path, root: Path) -> Path | None:
    """What a link leads to, relative to `root`, if that is a file of the repository outside docs/, else None."""
    if re.match(r"\w+:", link):
        return None
    path = (page.parent / link).resolve()
    if not path.is_relative_to(root.resolve()) or path.is_relative_to((root / "docs").resolve()):
        return None
    if not path.exists():
        raise FileNotFoundError(f"{page.relative_to(root)} links to {link}, which does not exist")
    return path.relative_to(root.resolve())


def _page_of(root: Path, path: Path) -> Path:
    """The page of a file or folder of the repository, relative to the site's pages."""
    if (root / path).is_dir():
        return Path("source") / path / "index.md"
    return Path("source") / path.parent / f"{path.name}.md"


def _source_page(root: Path, path: Path) -> str:
    if (root / path).is_dir():
        files = sorted(file.name for file in (root / path).iterdir() if file.is_file())
        return f"# {path}/\n\n" + "\n".join(f"- [{name}]({name}.md)" for name in files) + "\n"
    text = (root / path).read_text(encoding="utf-8")
    return f"# {path}\n\n~~~~ {{.{_LANGUAGES.get(path.suffix, 'text')} linenums=1}}\n{text.rstrip()}\n~~~~\n"

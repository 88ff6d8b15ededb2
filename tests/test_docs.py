"""Every Python block and every command in README and docs does what it says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        if page.parent.name == "hazards":
            continue  # tests/hazards runs them, in one process: there are more than seventy
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)):
            found.append((f"{page.relative_to(ROOT)}#{number}", text))
    return found


@pytest.mark.parametrize(("name", "text"), blocks("python"), ids=lambda value: value if ".md#" in value else "")
def test_python_blocks_run(name, text, tmp_path):
    program = tmp_path / "block.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, f"{name}:\n{done.stderr}"


def commands() -> list[tuple[str, str]]:
    found = []
    for name, text in blocks("sh"):
        found += [(name, line) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return found


@pytest.mark.parametrize(("name", "line"), commands(), ids=lambda value: value if ".md#" in value else "")
def test_commands_exist(name, line):
    """Installing and the tests themselves cannot run within the tests; their parts are checked. The rest is run."""
    words = [word for word in shlex.split(line) if "=" not in word or word.startswith("-")]
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(.*?)\]", words[2])
        known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
        assert set(extras[0].split(",")) <= set(known)
    elif words[:3] == ["python", "-m", "pytest"]:
        assert "-n" in words, "the tests take minutes on one core"
    else:
        assert words[0] == "python" and (ROOT / words[1]).exists(), line
        arguments = words[2:] if "--json" not in words else ["--help"]
        if words[1] == "scripts/run_all.py" and "--list" not in arguments:
            arguments = [*arguments, "--quick"]
        if words[1] == "scripts/measure.py":
            arguments = ["--help"]  # it needs a GPU
        done = subprocess.run(
            [sys.executable, str(ROOT / words[1]), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_tables_are_made_from_the_results():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "update_tables.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run scripts/update_tables.py: {done.stdout}{done.stderr}"

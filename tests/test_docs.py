"""Every Python block and every command in README and docs does what it says."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from numba_tma import ptx_files

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("sh", "bash", "shell", "console")
TESTED = {"python", "ptx", "text", *SHELLS}  # of these, ptx and text are there to be read
NEEDS_GPU = "# needs a GPU"


def blocks(*languages: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        if page.parent.name == "hazards":
            continue  # tests/hazards runs them, in one process: there are more than seventy
        pattern = rf"^```(?:{'|'.join(languages)})\n(.*?)^```"
        for number, text in enumerate(re.findall(pattern, page.read_text(), re.S | re.M)):
            found.append((f"{page.relative_to(ROOT)}#{number}", text))
    return found


def named(value: str) -> str:
    return value if ".md#" in value else ""


def run(*command: str, cwd: Path = ROOT, timeout: int = 120) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=timeout, cwd=cwd
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(("name", "text"), blocks("python"), ids=named)
def test_python_blocks_run(name, text, tmp_path, monkeypatch):
    """In this process, each as a program of its own: importing Numba anew for each would take longer than they do."""
    program = tmp_path / "block.py"
    program.write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(program), run_name="__main__")


def test_every_block_says_what_it_is():
    """A block without a language, or of one that nothing here runs, would go untested."""
    for page in PAGES:
        for language in re.findall(r"^```([^\n]*)\n.*?^```", page.read_text(), re.S | re.M):
            assert language in TESTED, f"{page.relative_to(ROOT)} has a block of {language or 'no language'!r}"


def commands() -> list:
    """The lines of all shell blocks; those marked as needing a GPU are skipped where there is none."""
    found = []
    for name, text in blocks(*SHELLS):
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                marks = [pytest.mark.gpu] if NEEDS_GPU in line else []
                found.append(pytest.param(name, line, marks=marks))
    return found


@pytest.mark.parametrize(("name", "line"), commands(), ids=named)
def test_commands_run(name, line, tmp_path):
    """Installing, and the tests themselves, cannot run within the tests: their parts are checked."""
    words = [word for word in shlex.split(line, comments=True) if "=" not in word or word.startswith("-")]
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[(.*?)\]", words[2])
        known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
        assert set(extras[0].split(",")) <= set(known)
    elif words[:3] == ["python", "-m", "pytest"]:
        assert "-n" in words, "the tests take minutes on one core"
    elif words[:3] == ["python", "-m", "http.server"]:
        assert words[3] == "-d", "it would serve the repository"  # and go on for ever
    elif words in (["python", "scripts/build_site.py"], ["python", "scripts/run_all.py"]):
        check_options(words)  # test_site.py builds it, and two cannot at once; .ci/run runs all
    else:
        assert words[0] == "python", line
        check_options(words)
        if "--json" in words:  # not over the results that are kept
            words[words.index("--json") + 1] = str(tmp_path / "results.json")
        if "--output" in words:
            words[words.index("--output") + 1] = str(tmp_path / "output")
        # The suite's problems are run by .ci/run all at once: here it is seen that they have these names.
        listed = ["--list"] if words[1] == "scripts/run_all.py" and "--list" not in words else []
        run(*words[1:], *listed, timeout=600)


def check_options(words: list[str]) -> None:
    """See that the script exists and declares the options."""
    script = ROOT / words[1]
    assert script.exists(), f"there is no {words[1]}"
    for option in words[2:]:
        if option.startswith("-"):
            assert f'"{option}"' in script.read_text(), f"{words[1]} has no option {option}"


def test_commands_in_the_text_exist():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for command in re.findall(r"`(python scripts/[^`]*)`", prose):
            check_options(command.split())


def test_instructions_named_in_the_text_exist():
    """`ptx.name` anywhere, and the names in the first column of a table headed `ptx.`."""
    known = set(ptx_files.names())
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"\bptx\.((?:mbarrier|cp_|fence|cluster|barrier|wgmma|setmaxnreg)\w+)", text))
        for table in re.findall(r"^\| `ptx\.` \|.*?(?=^$)", text, re.S | re.M):
            for row in table.splitlines()[2:]:
                named |= set(
                    re.findall(r"\b([a-z]\w*_\w+)\b(?!\.md)", re.sub(r"\(.*?\)|in a loop.*", "", row.split("|")[1]))
                )
        unknown = {name for name in named if name not in known and not any(k.startswith(name) for k in known)}
        assert not unknown, f"{page.relative_to(ROOT)}: {sorted(unknown)}"


def test_links_lead_somewhere():
    for page in PAGES:
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("script", ["update_tables", "ptx_pages"])
def test_what_is_made_is_up_to_date(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
    assert end.value.code == 0, f"run scripts/{script}.py: {capsys.readouterr().out}"

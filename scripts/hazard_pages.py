"""Make docs/hazards from tests/hazards/cases.py and the rules. --check: only say whether they are up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "hazards"))

from cases import CASES, Case  # noqa: E402

from numba_tma.sim.hazards import RULES  # noqa: E402

FOLDER = ROOT / "docs" / "hazards"
_CATCH = """
with use_backend("sim"):
    try:
        hazards = run().hazards
    except sim.SimError as error:  # a hang or a fault ends the launch; the hazards come with it
        hazards = error.hazards
for hazard in hazards:
    print(hazard)
assert "{name}" in [hazard.identifier for hazard in hazards]
"""
_CLEAN = """
with use_backend("sim"):
    assert not run().hazards
"""


def page(name: str, case: Case) -> str:
    """The page of a hazard."""
    rule = RULES[name]
    bad = case.source(mended=False) + "\n" + _CATCH.format(name=name)
    good = case.source(mended=True).replace(", sim, use_backend", ", use_backend") + "\n" + _CLEAN
    if "sim.launch(" in good:
        good = good.replace("import use_backend", "import sim, use_backend")
    return f"""# {name}

**{case.title}.** Severity: {rule.severity}.

{case.happens}
{on_hardware(name)}
**The rule.** {_sentence(rule.rule)} (PTX ISA: {rule.section}.)

**The way out.** {_sentence(rule.remedy)}

## The smallest kernel that has it

```python
{bad.strip()}
```

## Mended

```python
{good.strip()}
```
"""


def on_hardware(name: str) -> str:
    """A paragraph on what happened when the two kernels ran on a GPU; nothing where they changed since or never ran."""
    sys.path.insert(0, str(ROOT / "tests" / "agreement"))
    import hazard_runs
    import records

    record = records.load(hazard_runs.RECORD)
    found = record["hazards"].get(name) if record else None
    if found is None or found["fingerprint"] != hazard_runs.fingerprint(name):
        return ""
    device = record["circumstances"]["device"].removeprefix("NVIDIA ")
    bad, mended = (hazard_runs.describe(found[twin]) for twin in ("bad", "mended"))
    return f"\n**On an {device}**, all shared memory filled with ones before each launch: {bad}. Mended: {mended}.\n"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def index() -> str:
    """The list of all hazards."""
    rows = "\n".join(f"| [{n}]({n}.md) | {RULES[n].severity} | {case.title} |" for n, case in CASES.items())
    return f"""# Hazards

The simulator names these mistakes with both Python lines, whatever order things happened to take in the run: it tracks
which accesses are ordered before which, and does not wait for a wrong number. They are in a launch's report
(`report.hazards`); a launch that hangs or faults has them in its error (`error.hazards`).

An *error* is wrong. A *warning* is where the manual and common practice part, or where it depends on what else the
kernel does. Reporting costs time, up to about three times the simulator's own: `use_backend("sim", hazards=False)` does
without.

| identifier | severity | what |
|---|---|---|
{rows}
"""


def pages() -> dict[Path, str]:
    """All pages by path."""
    return {FOLDER / "index.md": index(), **{FOLDER / f"{name}.md": page(name, case) for name, case in CASES.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    wanted = pages()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    extra = [path for path in FOLDER.glob("*.md") if path not in wanted]
    for path in stale if not check else []:
        path.write_text(wanted[path])
    for path in [*stale, *extra]:
        print(path.relative_to(ROOT))
    return 1 if extra or (check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())

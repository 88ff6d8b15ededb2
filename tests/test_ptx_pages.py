"""The PTX reference says what the files in ptx/ say."""

from __future__ import annotations

import re
from pathlib import Path

from numba_tma import ptx_files, ptx_pages

PAGES = ptx_pages.pages(Path("made"))


def test_every_function_has_its_place():
    """Unfolding the names on a file's page gives the functions of that file again."""
    for file in sorted(ptx_files.folder().glob("*.ptx")):
        page = PAGES[Path("made") / f"{file.stem}.md"]
        names = set(re.findall(r"^## (\w+)$", page, re.M))
        for line in re.findall(r"^Written once for (.*)\.$", page, re.M):
            for short in re.findall(r"`([^`]*)`", line):
                names |= unfolded(short)
        assert names == set(ptx_files.read(file))


def unfolded(short: str) -> set[str]:
    brace = re.search(r"\{([^{}]*)\}", short)
    if brace is None:
        return {short}
    return {
        name for word in brace[1].split(",") for name in unfolded(short[: brace.start()] + word + short[brace.end() :])
    }


def test_names_fold_only_into_what_there_is():
    assert ptx_pages.folded(["a_x_1", "a_x_2", "a_y_1", "a_y_2"]) == ["a_{x,y}_{1,2}"]
    assert ptx_pages.folded(["a_x_1", "a_y_2"]) == ["a_{x_1,y_2}"]
    assert ptx_pages.folded(["add_f_1", "add_g_1", "sub_f_2"]) != ["{add,sub}_{f,g}_{1,2}"]
    assert ptx_pages.folded(["one", "one_more"]) == ["one", "one_more"]
    many = [f"m64n{n}k16" for n in range(8, 80, 8)]
    assert ptx_pages.folded(many) == ["m64n{" + ",".join(str(n) for n in range(8, 80, 8)) + "}k16"]


def test_a_section_has_the_instruction_its_operands_and_the_manual():
    page = PAGES[Path("made/mbarrier.md")]
    section = page.split("## mbarrier_arrive_expect_tx\n")[1].split("\n## ")[0]
    assert "mbarrier.arrive.expect_tx" in section
    assert re.search(r"\| `addr` \| shared address \| .+ \|", section)
    anchor = "parallel-synchronization-and-communication-instructions-mbarrier-arrive"
    assert f"(https://docs.nvidia.com/cuda/parallel-thread-execution/#{anchor})" in section
    assert "ld.param" not in section and "st.param" not in section


def test_addresses_of_the_manual():
    base = "https://docs.nvidia.com/cuda/parallel-thread-execution/#"
    data = "Data Movement and Conversion Instructions"
    assert ptx_pages.isa_link(data, "cp.async.bulk.tensor") == (
        f"{base}data-movement-and-conversion-instructions-cp-async-bulk-tensor"
    )
    assert ptx_pages.isa_link("Special Registers", "%smid") == f"{base}special-registers-smid"
    # These differ from the rule, as the manual has them.
    assert ptx_pages.isa_link("Warp Level Matrix Load Instructions", "ldmatrix").endswith(
        "#warp-level-matrix-instructions-ldmatrix"
    )
    assert ptx_pages.isa_link("Parallel Synchronization and Communication Instructions", "membar / fence").endswith(
        "-communication-instructions-membar"
    )


def test_links_between_functions_lead_to_headings():
    headings = {path.name: set(re.findall(r"^## (\w+)$", page, re.M)) for path, page in PAGES.items()}
    for path, page in PAGES.items():
        for place, heading in re.findall(r"\]\(([\w.]*)#(\w+)\)", page):
            assert heading in headings[place or path.name], f"{path.name} links to {place}#{heading}"

"""Timelines as pictures and as traces for viewers."""

from __future__ import annotations

import json
import re
import sys
from xml.etree import ElementTree

import pytest

from numba_tma.timeline import model
from numba_tma.timeline.model import Block, Flow, Interval, Row, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def made(steps=6, blocks=1):
    """Two warps and a copy row; copies of 700 ns, computation of 300."""
    timeline = Timeline("made <kernel> & co", "by hand")
    for number in range(blocks):
        block = Block(number, number % 3)
        warps = [Row(block, model.WARP, f"warp {w}", "consumer") for w in range(2)]
        copies, phases = Row(block, model.COPY_ROW, "copies for full[0]"), Row(block, model.BARRIER_ROW, "full[0]")
        timeline.rows += [*warps, copies, phases]
        for step in range(steps):
            at = 1000.0 * step
            timeline.intervals += [
                Interval(warps[0], at, at + 20, model.ISSUE, "issue to full[0]", "2 copies"),
                Interval(copies, at + 10, at + 700, model.COPY, "copy for full[0]", "", step % 2 == 0),
                Interval(phases, at, at + 1000, model.PHASE, f"phase {step}", f"parity {step % 2}"),
                Interval(warps[1], at + 990, at + 990, model.MARK, "arrive"),
            ]
            for warp in warps:
                timeline.intervals += [
                    Interval(warp, at + 30, at + 700, model.WAIT, "wait full[0]", "at <kernel>.py:3"),
                    Interval(warp, at + 700, at + 980, model.COMPUTE, "compute"),
                ]
                timeline.flows.append(Flow(copies, at + 700, warp, at + 700, "arrived"))
    return timeline


def shapes(text, element):
    return ElementTree.fromstring(text).iter(f"{SVG}{element}")


def test_a_picture_is_xml_with_every_row_and_interval():
    text = made().svg()
    root = ElementTree.fromstring(text)
    words = [element.text for element in root.iter(f"{SVG}text")]
    for word in ("warp 0", "warp 1", "copies for full[0]", "full[0]", "made <kernel> & co", "phase 5", "compute"):
        assert word in words
    tips = [element.find(f"{SVG}title") for element in root.iter(f"{SVG}rect")]
    tips = [tip.text for tip in tips if tip is not None]
    assert len(tips) == 6 * 4 + 6 * 4
    assert any(tip.startswith("wait full[0]: 670 ns") and "at <kernel>.py:3" in tip for tip in tips)
    assert sum("nobody was waiting" in tip for tip in tips) == 3


def test_places_are_to_scale():
    text = made(steps=1).svg()
    places = {}
    for rect in shapes(text, "rect"):
        tip = rect.find(f"{SVG}title")
        if tip is not None:
            places[tip.text.split(":")[0]] = float(rect.get("x")), float(rect.get("width"))
    start, width = places["phase 0"]
    assert places["compute"][0] - start == pytest.approx(0.7 * width, abs=0.15)
    assert places["compute"][1] == pytest.approx(0.28 * width, abs=0.15)


def test_light_and_dark():
    text = made().svg()
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for name in ("compute", "tma", "empty", "card", "ink"):
        assert f".{name}{{" in light and f".{name}{{" in dark


def test_a_long_block_is_shown_in_its_middle():
    text = made(steps=200).svg(copies=10)
    copies = [
        rect
        for rect in shapes(text, "rect")
        if "tma" in (rect.get("class") or "") and rect.find(f"{SVG}title") is not None
    ]
    assert 9 <= len(copies) <= 11
    assert "from 95,010 ns" in text
    assert len(text) < 60_000


def test_chosen_times():
    tips = [rect.find(f"{SVG}title") for rect in shapes(made().svg(start=1000, end=2000), "rect")]
    assert sum(tip is not None and tip.text.startswith("compute") for tip in tips) == 2
    with pytest.raises(ValueError, match="the end must be behind the start"):
        made().svg(start=5, end=5)


def test_a_block_that_is_not_there():
    with pytest.raises(ValueError, match="block 9 on SM 0 is not in the timeline"):
        made().svg(block=Block(9))
    with pytest.raises(ValueError, match="has no block"):
        Timeline("empty", "by hand").svg()


def test_saving(tmp_path, monkeypatch):
    timeline = made(blocks=2)
    timeline.save(tmp_path / "a.svg", block=Block(1, 1))
    assert "block 1 on SM 1" in (tmp_path / "a.svg").read_text()
    timeline.save(tmp_path / "a.json")
    assert check_trace(json.loads((tmp_path / "a.json").read_text()))
    with pytest.raises(ValueError, match=r"written as \.svg, \.png"):
        timeline.save(tmp_path / "a.gif")
    monkeypatch.setitem(sys.modules, "cairosvg", None)  # as if it were not installed
    with pytest.raises(ImportError, match="pip install cairosvg"):
        timeline.save(tmp_path / "a.png")


def test_notes_are_shown():
    timeline = made()
    timeline.notes.append("7 records had no room")
    assert "7 records had no room" in timeline.svg()


def test_what_is_too_narrow_to_see_is_joined():
    timeline = made(steps=3000)
    text = timeline.svg(start=0, end=3e6)
    assert text.count("<rect") < 6 * 1100


def test_notebooks_show_it():
    assert made()._repr_svg_().startswith("<svg")


# The Trace Event Format: what each phase of an event must have.
REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "pid", "tid", "s", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}


def check_trace(trace):
    """Raise for what is not a JSON object of the Trace Event Format, or would not show as meant."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    flows = {}
    for event in events:
        assert REQUIRED[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["pid"] in processes
        if event["ph"] == "M":
            continue
        assert isinstance(event["ts"], (int, float)) and event.get("dur", 0) >= 0
        assert (event["pid"], event["tid"]) in named
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
    for id_, ends in flows.items():
        assert [end["ph"] for end in ends] == ["s", "f"], id_
        assert ends[0]["ts"] <= ends[1]["ts"] and ends[1]["bp"] == "e"
    return events


def test_a_trace_for_perfetto():
    timeline = made(blocks=3)
    events = check_trace(timeline.trace_events())
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [f"made <kernel> & co, block {i} on SM {i}" for i in range(3)]
    computing = [e for e in events if e.get("cat") == "compute"]
    assert len(computing) == 3 * 6 * 2
    assert computing[0]["ts"] == 0.7 and computing[0]["dur"] == 0.28
    assert sum(e["ph"] == "f" for e in events) == 3 * 6 * 2


def test_flows_lie_within_slices():
    """A viewer drops those that do not."""
    events = made(blocks=2).trace_events()["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    flows = [e for e in events if e["ph"] in "sf"]
    assert len(flows) == 2 * 2 * 6 * 2
    for flow in flows:
        inside = [
            s["cat"]
            for s in slices
            if (s["pid"], s["tid"]) == (flow["pid"], flow["tid"]) and s["ts"] <= flow["ts"] < s["ts"] + s["dur"]
        ]
        assert inside == ["copy" if flow["ph"] == "s" else "wait"]


def test_slices_of_a_thread_nest():
    """Viewers stack what lies within another; what half overlaps they cannot show."""
    open_until = {}
    events = made(blocks=2).trace_events()["traceEvents"]
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        stack = open_until.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= event["ts"] + 1e-9:
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1] + 1e-9
        stack.append(event["ts"] + event["dur"])

"""A run's timeline as picture and trace, its ranges for Nsight Systems, and scripts/overlap.py."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from numba_tma import driver
from numba_tma.overlap import Model, Pipeline, pitfalls, ranges
from numba_tma.overlap.report import Report, Span

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("overlap_script", ROOT / "scripts" / "overlap.py")
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)

SPEC = {"x": ((8,), np.float32)}


@pytest.fixture
def ran():
    """Four batches; copies in 2 ms, kernels 1 ms, copies out 2 ms."""
    rate = 32 / 2e-3
    model = Model(h2d=rate, d2h=rate, latency=0, compute=1e-3)
    with Pipeline(lambda i, o, s: None, SPEC, SPEC, record=True, model=model) as pipeline:
        list(pipeline.run([np.zeros(8, np.float32)] * 4))
        yield pipeline


def test_trace_for_perfetto(ran, tmp_path):
    ran.save_timeline(tmp_path / "a.json")
    trace = json.loads((tmp_path / "a.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert list(names.values()) == ["copy in (H2D)", "compute (compute)", "copy out (D2H)"]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    starts = {(names[e["tid"]].split(" (")[0], e["name"]): (e["ts"], e["dur"]) for e in slices}
    assert len(starts) == 12
    for batch in range(4):
        assert starts["copy in", f"batch {batch}"] == pytest.approx((2000 * batch, 2000))
        assert starts["compute", f"batch {batch}"] == pytest.approx((2000 * (batch + 1), 1000))
        assert starts["copy out", f"batch {batch}"] == pytest.approx((2000 * (batch + 1) + 1000, 2000))
    assert "model" in trace["otherData"]["device"]


def test_picture(ran, tmp_path):
    ran.save_timeline(tmp_path / "a.svg", batches=3)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]
    assert {"copy in", "compute", "copy out", "modelled, not measured"} <= set(texts)
    tips = [
        element.text for element in root.iter() if element.tag.endswith("title") and "batch" in (element.text or "")
    ]
    assert len(tips) == 9 and "batch 1, compute: 1.000 ms" in tips
    assert "busy 73%" in texts  # 8 of 11 ms, either copy engine


def test_what_cannot_be_drawn(ran, tmp_path):
    with pytest.raises(ValueError, match=r"\.svg or \.json"):
        ran.save_timeline(tmp_path / "a.txt")
    with Pipeline(lambda i, o, s: None, SPEC, SPEC, model=Model()) as pipeline:
        list(pipeline.run([np.zeros(8, np.float32)]))
        with pytest.raises(ValueError, match="record=True"):
            pipeline.save_timeline(tmp_path / "a.svg")


@pytest.mark.parametrize(
    ("nbytes", "words"), [(999, "999 bytes"), (33_500, "33.5 KB"), (1_600_000, "1.6 MB"), (2 * 10**9, "2.0 GB")]
)
def test_sizes_have_a_unit_that_shows_them(nbytes, words):
    assert f" {words} in, 0 bytes out" in Report("made", "by hand", False, bytes_in=nbytes).text()


def test_an_engine_that_two_batches_wait_for_is_busy_once():
    report = Report("made", "by hand", False, 2, 4.0, spans=[Span("H2D", 0, 0.0, 2.0), Span("H2D", 1, 0.5, 4.0)])
    assert report.engine("H2D") == [Span("H2D", 0, 0.0, 2.0), Span("H2D", 1, 2.0, 4.0)]
    assert report.busy()["H2D"] == 4.0 and report.utilisation()["H2D"] == 1.0


def test_ranges_name_stage_and_batch(monkeypatch):
    entered = []

    class Nvtx:
        @staticmethod
        def annotate(message, *, color, domain):
            entered.append((message, domain))
            return ranges.contextlib.nullcontext()

    monkeypatch.setattr(ranges, "_nvtx", lambda: Nvtx)
    with Pipeline(lambda i, o, s: None, SPEC, SPEC, model=Model()) as pipeline:
        list(pipeline.run([np.zeros(8, np.float32)] * 2))
    wanted = [f"{stage} {batch}" for batch in (0, 1) for stage in ("prepare", "H2D", "compute", "D2H")]
    assert entered == [(message, "numba_tma.overlap") for message in wanted]


@pytest.mark.skipif(driver.device_count() > 0, reason="is about a machine without a GPU")
def test_script(tmp_path, capsys):
    found = tmp_path / "found.json"
    command = [
        "modes",
        "loop",
        "soak",
        "--batches",
        "4",
        "--soak-batches",
        "30",
        "--output",
        str(tmp_path / "pictures"),
    ]
    assert script.main([*command, "--json", str(found)]) == 0
    printed = capsys.readouterr().out
    assert "no GPU is used" in printed and "times are of a model" in printed
    assert "vs serial_pinned" in printed and "with events                none" in printed
    data = json.loads(found.read_text())
    modes = {run["mode"]: run for run in data["modes"]["runs"]}
    assert modes["three_streams"]["times_serial_pinned"] > 1.5 and modes["three_streams"]["modelled"]
    assert modes["three_streams"]["share_of_ideal"] == pytest.approx(1, abs=0.01)
    assert data["loop"]["mended_wrong"] == [] and data["loop"]["as_written_wrong"]
    assert all(run["corrupt"] == run["misplaced"] == 0 for run in data["soak"]["runs"])
    assert len(list((tmp_path / "pictures").iterdir())) == 10


def test_script_prints_pitfalls_as_the_page_does(capsys):
    assert script.main(["pageable", "many_streams", "--model"]) == 0
    printed = capsys.readouterr().out
    assert "eight batches on three streams, pinned    13.4 ms" in printed
    assert "eight batches of 64 MiB" in printed
    assert "_seconds" not in printed and "{" not in printed


def test_script_names_the_pitfalls(capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    printed = capsys.readouterr().out
    for name, demonstration in pitfalls.PITFALLS.items():
        assert name in printed and demonstration.__doc__.splitlines()[0] in printed


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nonsense"], "nonsense: choose of modes"),
        (["modes", "--batches", "0"], "--batches 0"),
        (["sweeps", "--model"], "sweeps: measurements need a GPU, and here none is used"),
        (["peer", "--model"], "peer: copies from GPU to GPU need 2 GPUs"),
        (["shards", "--model"], "shards: workers with a GPU each need a GPU"),
        (["pinning_once", "--model"], "needs a GPU"),
        (["modes", "--model", "--h2d", "-5"], "h2d"),
    ],
)
def test_script_refuses(command, message, capsys):
    assert script.main(command) == 2
    assert message in capsys.readouterr().err

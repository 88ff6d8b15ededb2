"""scripts/timeline.py: what it prints, writes and refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("timeline_script", ROOT / "scripts" / "timeline.py")
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


def test_a_table_and_files(tmp_path, capsys):
    folder = tmp_path / "out"
    assert script.main(["kv_stream.plain", "kv_stream.tma", "--backend", "sim", "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line.startswith("kv_stream.")}
    assert " 0% " in rows["kv_stream.plain"] and "%" in rows["kv_stream.tma"]
    assert sorted(path.name for path in folder.iterdir()) == [
        f"kv_stream.{name}.{end}" for name in ("plain", "tma") for end in ("json", "svg")
    ]
    assert json.loads((folder / "kv_stream.tma.json").read_text())["traceEvents"]
    assert (folder / "kv_stream.tma.svg").read_text().startswith("<svg")


def test_one_file_of_one_block(tmp_path):
    path = tmp_path / "a.svg"
    assert script.main(["kv_stream.tma", "--backend", "sim", "--output", str(path), "--block", "0"]) == 0
    assert "block 0 on SM 0" in path.read_text()


def test_one_buffer_hides_less_than_two(capsys):
    shares = []
    for stages in (1, 2):
        assert script.main(["kv_stream.tma", "--backend", "sim", "--set", "stages", str(stages)]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("kv_stream.tma"))
        shares.append(int(row.split("%")[0].split()[-1]))
    assert 2 * shares[0] < shares[1]


def test_warpgroups_of_another_shape(tmp_path):
    path = tmp_path / "a.svg"
    shape = ["--shape", "1,100,96,1,1,64"]
    assert script.main(["attention.ping_pong", "--backend", "sim", *shape, "--output", str(path)]) == 0
    text = path.read_text()
    assert "attention.ping_pong 1×100×96×1×1×64" in text and "modelled: " in text
    assert "wgmma of warps 4-7" in text and "wgmma of warps 8-11" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "no problem 'nothing'"),
        (["kv_stream.tma", "--case", "99"], "--case 99: there are 0: 1024×1024"),
        (["kv_stream.tma", "--shape", "128"], "--shape 128: expected 2 positive numbers, such as 1024,1024"),
        (["kv_stream.tma", "--shape", "128,big"], "expected 2 positive numbers"),
        (["kv_stream.tma", "--shape", "128,0"], "expected 2 positive numbers"),
        (["kv_stream.tma", "--set", "stages", "a b"], "expected a value such as 1"),
        (["kv_stream.tma", "--set", "colour", "1"], "colour"),
        (["kv_stream.tma", "--between", "early:late"], "two numbers of nanoseconds"),
        (["kv_stream.tma", "--block", "70", "--output", "x.svg"], "block 70 is not in the timeline; it has 0"),
        (["kv_stream.tma", "--output", "x.gif"], "written as .svg, .png"),
        (["kv_stream", "--output", "x.svg"], "several variants are chosen; name a folder"),
        (["kv_stream.tma", "--every", "0"], "--every 0: 1 or more"),
        (["kv_stream.tma", "--overhead"], "it needs a GPU"),
        (["kv_stream.tma", "--capacity", "0"], "a warp keeps 1 to"),
    ],
)
def test_what_cannot_be_is_refused(arguments, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert script.main([*arguments, "--backend", "sim"]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_on_the_gpu(capsys):
    assert script.main(["kv_stream.tma", "--backend", "gpu", "--overhead"]) == 0
    assert "slowdown" in capsys.readouterr().out

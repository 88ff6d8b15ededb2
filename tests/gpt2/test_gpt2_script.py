"""scripts/gpt2.py: what is asked for is done or refused, never passed over."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("gpt2_script", ROOT / "scripts" / "gpt2.py")
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)


def test_a_prompt_without_a_checkpoint_is_refused(capsys):
    assert script.main(["generate", "--prompt", "Hello world"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "--prompt needs --checkpoint: 'Hello world' is text" in printed.err
    assert "--checkpoint FOLDER, or leave --prompt out" in printed.err


def test_a_checkpoint_that_is_not_there(tmp_path, capsys):
    assert script.main(["generate", "--checkpoint", str(tmp_path), "--prompt", "Hello"]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["batches", "--checkpoint", "folder"], "unrecognized arguments: --checkpoint"),
        (["retrieval", "--prompt", "Hello"], "unrecognized arguments: --prompt"),
        (["measure", "--tokens", "3"], "unrecognized arguments: --tokens"),
        (["generate", "--mode", "producer"], "unrecognized arguments: --mode"),
        (["generate", "--tokens", "0"], "'0': a whole number expected, 1 or more"),
        (["batches", "--batches", "-1"], "'-1': a whole number expected, 1 or more"),
        ([], "required: what"),
    ],
)
def test_options_of_another_command_are_refused(command, message, capsys):
    with pytest.raises(SystemExit) as end:
        script.main(command)
    assert end.value.code == 2
    assert message in capsys.readouterr().err

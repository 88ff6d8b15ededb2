"""The tokenizer: text there and back through a tokenizer.json."""

from __future__ import annotations

import pytest

from numba_tma.gpt2.tokenizer import Tokenizer


def test_text_there_and_back(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    # GPT-2's own kind, with no merges: a token is a byte.
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "Tensor Memory Accelerator, µs"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text


def test_no_file(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(FileNotFoundError, match="token numbers"):
        Tokenizer(tmp_path)

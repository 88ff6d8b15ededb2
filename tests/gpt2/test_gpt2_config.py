"""Configurations: what is read, what is refused, and how the refusal helps."""

from __future__ import annotations

import json

import pytest

from numba_tma.gpt2 import config
from numba_tma.gpt2.config import Config, UnsupportedModel

GPT2 = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "n_ctx": 1024,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-05,
    "eos_token_id": 50256,
    "resid_pdrop": 0.1,
}


def test_the_published_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    found = config.from_folder(tmp_path)
    assert found == Config(eos_token_id=50256)
    assert (found.head_dim, found.inner, found.parameters) == (64, 3072, 124_439_808)


def test_other_names_and_sizes():
    raw = {key: value for key, value in GPT2.items() if key != "n_positions"} | {"n_ctx": 512, "n_inner": 800}
    found = config.from_mapping(raw | {"activation_function": "gelu_pytorch_tanh"})
    assert (found.n_positions, found.inner) == (512, 800)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama': supported is 'gpt2'"),
        ({"activation_function": "relu"}, "activation_function 'relu': supported is 'gelu_new'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"n_head": 7}, "does not divide"),
        ({"n_head": 8}, "heads of 96"),
        ({"n_embd": 8192, "n_head": 128}, "4096 at most"),
        ({"n_inner": 1001}, "multiple of 8"),
        ({"n_layer": 0}, "n_layer 0: a positive integer"),
        ({"vocab_size": True}, "vocab_size True"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon"),
    ],
)
def test_what_is_not_computed(changed, message):
    with pytest.raises(UnsupportedModel, match=message):
        config.from_mapping(GPT2 | changed)


def test_missing_entries():
    with pytest.raises(UnsupportedModel, match="no n_layer, n_embd"):
        config.from_mapping({"n_head": 12, "vocab_size": 5})

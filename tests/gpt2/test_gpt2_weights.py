"""Weights: checkpoint folders of every kind there is, and what is wrong with others."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from numba_tma.gpt2 import weights
from numba_tma.gpt2.config import Config, UnsupportedModel
from numba_tma.gpt2.weights import from_tensors, random_tensors, random_weights

CONFIG = Config(n_layer=2, n_head=1, n_embd=16, n_positions=8, vocab_size=11)


@pytest.fixture
def tensors(rng):
    return random_tensors(CONFIG, rng)


def same(found, tensors):
    np.testing.assert_array_equal(found.wte, tensors["wte.weight"])
    np.testing.assert_array_equal(found.layers[1].mlp_proj.weight, tensors["h.1.mlp.c_proj.weight"].T)
    np.testing.assert_array_equal(found.layers[0].c_attn.bias, tensors["h.0.attn.c_attn.bias"])
    np.testing.assert_array_equal(found.ln_f.weight, tensors["ln_f.weight"])


def test_every_weight_is_counted_and_drawn(tensors):
    assert sum(tensor.size for tensor in tensors.values()) == CONFIG.parameters
    assert all(tensor.std() > 0 for tensor in tensors.values())
    assert np.array_equal(random_weights(CONFIG, 5).wte, random_weights(CONFIG, 5).wte)


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_folder(tensors, tmp_path, prefix, parts):
    numpy = pytest.importorskip("safetensors.numpy")
    named = {prefix + name: tensor for name, tensor in tensors.items()} | {"h.0.attn.bias": np.ones(1, np.float32)}
    if parts == 1:
        numpy.save_file(named, tmp_path / "model.safetensors")
    else:
        place = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(named)}
        for file in set(place.values()):
            numpy.save_file({name: named[name] for name in named if place[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    same(weights.from_folder(CONFIG, tmp_path), tensors)


def test_half_precision_is_widened(tensors):
    half = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    assert from_tensors(CONFIG, half).wte.dtype == np.float32


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="safetensors"):
        weights.from_folder(CONFIG, tmp_path)


def test_what_does_not_fit(tensors):
    with pytest.raises(UnsupportedModel, match=r"no tensor h\.1\.ln_2\.bias"):
        from_tensors(CONFIG, {name: tensor for name, tensor in tensors.items() if name != "h.1.ln_2.bias"})
    with pytest.raises(UnsupportedModel, match=r"wpe.weight has the shape \(9, 16\)"):
        from_tensors(CONFIG, tensors | {"wpe.weight": np.ones((9, 16))})

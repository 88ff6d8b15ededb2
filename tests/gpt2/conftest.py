"""A GPT-2 small enough for the simulator; all tests share its kernels."""

from __future__ import annotations

import pytest

from numba_tma import use_backend
from numba_tma.gpt2.config import Config
from numba_tma.gpt2.model import Model
from numba_tma.gpt2.weights import Weights, random_weights
from numba_tma.kernels.attention import choice as attention_choice
from numba_tma.kernels.gemm import choice

CONFIG = Config(n_layer=2, n_head=2, n_embd=64, n_positions=48, vocab_size=211)


# The tiles that take the shortest to compile.
PRODUCT = choice.Configuration(1, 64, 1, "m", 2)
ATTENTION = attention_choice.Configuration(consumers=1, keys=32)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch):
    """Launch in the simulator, by few kernels: which ones would be chosen on a GPU is not the matter here."""
    monkeypatch.setattr(choice, "choose", lambda *_: PRODUCT)
    monkeypatch.setattr(attention_choice, "choose", lambda *_: ATTENTION)
    with use_backend("sim"):
        yield


@pytest.fixture
def weights(seed: int) -> Weights:
    return random_weights(CONFIG, seed)


@pytest.fixture
def model(weights: Weights, simulated: None) -> Model:
    return Model(weights)

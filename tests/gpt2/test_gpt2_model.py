"""The whole model in the simulator against float64, and against transformers on a GPU.

Tolerance: weights, residual stream, cache and activations have a bfloat16's 8 bits of fraction. Roundings of some ten
tensors a layer add up at random: half a percent of the logits' spread here, where two layers are summed.
"""

from __future__ import annotations

import numpy as np
import pytest

from numba_tma import use_backend
from numba_tma.gpt2 import reference
from numba_tma.gpt2.config import Config
from numba_tma.gpt2.model import Model, PromptError, Session, padded, unpadded
from numba_tma.gpt2.weights import random_weights

pytestmark = pytest.mark.filterwarnings("error")  # a hazard
TOLERANCE = 0.04  # of the logits' standard deviation


def close(found, expected):
    assert np.abs(found - expected).max() <= TOLERANCE * expected.std()


def likeliest(weights, sequence, start):
    """For each token from `start` on: whether float64 chooses it too, or hesitates by less than the tolerance."""
    logits = reference.logits(weights, sequence)[start - 1 : -1]
    chosen = np.take_along_axis(logits, sequence[start:, None], 1)[:, 0]
    return logits.max(axis=1) - chosen <= 2 * TOLERANCE * logits.std(axis=1)


def prompts_of(rng, lengths, vocabulary=211):
    return [rng.integers(0, vocabulary, n) for n in lengths]


def test_prompts_of_different_lengths_and_what_follows(rng, weights, model):
    prompts = prompts_of(rng, (5, 20, 1))
    session = Session(model, 3, prompt=20)
    for prompt, found in zip(prompts, session.prefill(prompts), strict=True):
        close(found, reference.logits(weights, prompt)[-1])
    session.decode(3)
    for prompt, row, found in zip(prompts, session.sequence, session.last_logits(), strict=True):
        sequence = row[: len(prompt) + 4]
        np.testing.assert_array_equal(sequence[: len(prompt)], prompt)
        assert likeliest(weights, sequence, len(prompt)).all()
        close(found, reference.logits(weights, sequence[:-1])[-1])


def test_logits_of_every_position(rng, weights, model):
    prompts = prompts_of(rng, (12, 7))
    found = Session(model, 2, positions=20).prompt_logits(prompts)
    assert found.shape == (2, 12, 211)
    for prompt, rows in zip(prompts, found, strict=True):
        close(rows[: len(prompt)], reference.logits(weights, prompt))


def test_a_prompt_in_two_parts(rng, weights, model):
    """The second part finds the first in the cache."""
    whole = rng.integers(0, 211, (2, 17))
    session = Session(model, 2, prompt=12)
    session.prefill(whole[:, :9])
    found = session.prefill([whole[0, 9:], whole[1, 9:14]], past=9)
    close(found[0], reference.logits(weights, whole[0])[-1])
    close(found[1], reference.logits(weights, whole[1, :14])[-1])


def test_generation_ends_with_the_text(rng, weights, simulated):
    prompt = rng.integers(0, 211, 6)
    expected = Session(Model(weights), 1, positions=20).generate([prompt], 1)[0]
    ending = Config(**{**vars(weights.config), "eos_token_id": int(expected[0])})
    model = Model(type(weights)(ending, weights.wte, weights.wpe, weights.layers, weights.ln_f))
    answers = Session(model, 1, positions=20).generate([prompt], 3)
    assert answers[0].tolist() == expected.tolist()


@pytest.mark.full
def test_residual_of_float32_is_nearer(rng, weights, simulated):
    prompts = prompts_of(rng, (20, 20))
    expected = np.stack([reference.logits(weights, prompt)[-1] for prompt in prompts])
    errors = {}
    for residual in ("bfloat16", "float32"):
        found = Session(Model(weights, residual=residual), 2, positions=20).prefill(prompts)
        errors[residual] = np.sqrt(((found - expected) ** 2).mean())
    assert errors["float32"] < errors["bfloat16"]
    with pytest.raises(ValueError, match="residual 'float16'"):
        Model(weights, residual="float16")


def test_wrong_prompts(rng, model):
    session = Session(model, 2, positions=20, prompt=10)
    with pytest.raises(PromptError, match="decode before prefill"):
        session.decode(1)
    for prompts, message in [
        ([[1, 2]], "1 prompts for a session of 2"),
        ([[1], []], "prompt 1 has 0 tokens; expected 1 to 10"),
        ([[1], [1] * 11], "prompt 1 has 11"),
        ([[1], [211]], "0 to 210"),
        ([[1], [-1]], "prompt 1: tokens"),
        ([[1], [0.5]], "integers"),
        ([], "no prompts"),
    ]:
        with pytest.raises(PromptError, match=message):
            session.prefill(prompts)
    with pytest.raises(PromptError, match="positions 49"):
        Session(model, 1, positions=49)
    with pytest.raises(PromptError, match="0 tokens to generate"):
        session.generate([[1], [2]], 0)
    session.prefill(prompts_of(rng, (10, 4)))
    with pytest.raises(PromptError, match="11 steps after 10 tokens: the session has 20"):
        session.decode(11)


def test_padding_on_either_side():
    left = unpadded(np.array([[0, 0, 5, 6], [1, 2, 3, 4]]), np.array([[0, 0, 1, 1], [1, 1, 1, 1]]))
    tokens, lengths = padded(left, Config(), 10)
    assert tokens.tolist() == [[5, 6, 0, 0], [1, 2, 3, 4]]
    assert lengths.tolist() == [2, 4]
    with pytest.raises(PromptError, match="mask 0 has gaps"):
        unpadded(np.ones((1, 3)), np.array([[1, 0, 1]]))


def test_reference_is_causal_and_knows_its_definition(rng):
    """Without layers the logits are the normalised embeddings times the embeddings; later tokens change nothing."""
    weights = random_weights(Config(n_layer=1, n_head=2, n_embd=32, n_positions=9, vocab_size=50), 1)
    tokens = rng.integers(0, 50, 9)
    whole = reference.logits(weights, tokens)
    np.testing.assert_allclose(reference.logits(weights, tokens[:4]), whole[:4], rtol=1e-12)
    bare = type(weights)(weights.config, weights.wte, weights.wpe, (), weights.ln_f)
    x = weights.wte[tokens].astype(np.float64) + weights.wpe
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    expected = (x * weights.ln_f.weight + weights.ln_f.bias) @ weights.wte.astype(np.float64).T
    np.testing.assert_allclose(reference.logits(bare, tokens), expected, rtol=1e-9)


def test_reference_against_transformers(rng, weights):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from numba_tma.gpt2.peers import transformers_model

    tokens = rng.integers(0, 211, 30)
    with torch.inference_mode():
        expected = transformers_model(weights, "float64", "cpu")(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(reference.logits(weights, tokens), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_124_million_against_transformers(seed):
    """Logits within a tolerance twice transformers' own error in bfloat16; tokens equal where float32 is sure."""
    pytest.importorskip("transformers")
    from numba_tma.gpt2.benchmark import agreement

    with use_backend("gpu"):
        weights = random_weights(Config(), seed)
        found = agreement(Model(weights), weights, seed)
    assert found["largest error of a logit"] <= 2 * found["the same of transformers in bfloat16"]
    assert found["tokens_wrong"] == 0


@pytest.mark.gpu
def test_graphs_repeat_what_launches_do(rng):
    """The second prefill and the later steps are CUDA graphs."""
    weights = random_weights(Config(n_layer=2, n_head=2, n_embd=128, n_positions=256, vocab_size=1013), 3)
    with use_backend("gpu"):
        session = Session(Model(weights), 3)
        prompts = prompts_of(rng, (200, 5, 77), 1013)
        first = session.generate(prompts, 12)
        second = session.generate(prompts, 12)
    for prompt, one, two in zip(prompts, first, second, strict=True):
        np.testing.assert_array_equal(one, two)
        assert likeliest(weights, np.concatenate([prompt, one]), len(prompt)).all()

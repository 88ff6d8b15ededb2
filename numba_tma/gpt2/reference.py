"""GPT-2 in NumPy and float64, step by step as the model is defined: what the kernels are compared with.

Radford et al., "Language Models are Unsupervised Multitask Learners"; names as in the checkpoint.
"""

from __future__ import annotations

import numpy as np

from .weights import Layer, Linear, Norm, Weights


def logits(weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """Logits (S, vocabulary) in float64 for one sequence of tokens (S,)."""
    config = weights.config
    x = weights.wte[tokens].astype(np.float64) + weights.wpe[: len(tokens)]
    for layer in weights.layers:
        x = x + _attention(layer, _norm(layer.ln_1, x, config.layer_norm_epsilon), config.n_head)
        hidden = _gelu(_linear(layer.c_fc, _norm(layer.ln_2, x, config.layer_norm_epsilon)))
        x = x + _linear(layer.mlp_proj, hidden)
    return _norm(weights.ln_f, x, config.layer_norm_epsilon) @ weights.wte.astype(np.float64).T


def _norm(norm: Norm, x: np.ndarray, epsilon: float) -> np.ndarray:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon) * norm.weight + norm.bias


def _linear(linear: Linear, x: np.ndarray) -> np.ndarray:
    return x @ linear.weight.astype(np.float64).T + linear.bias


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _attention(layer: Layer, x: np.ndarray, heads: int) -> np.ndarray:
    rows, width = x.shape
    q, k, v = _linear(layer.c_attn, x).reshape(rows, 3, heads, width // heads).transpose(1, 2, 0, 3)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(width // heads)
    scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = scores / scores.sum(axis=-1, keepdims=True) @ v
    return _linear(layer.c_proj, mixed.transpose(1, 0, 2).reshape(rows, width))

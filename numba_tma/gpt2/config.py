"""The shape of a GPT-2, and what of a checkpoint's config.json this package can run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")  # two names of one function
_ROW = 8  # elements of 2 bytes in 16 bytes, where rows have to begin
_MOST_COLUMNS = 4096  # a warp keeps a row in registers while it normalises it
_HEAD_DIMS = (16, 32, 64, 128, 256)


class UnsupportedModel(ValueError):
    """A model that this GPT-2 does not compute; the message names the entry of config.json and what would do."""


@dataclass(frozen=True)
class Config:
    """A GPT-2's extents under the names of its config.json; the defaults are the 124M parameters of "gpt2".

    Raises:
        UnsupportedModel: an extent that the kernels cannot take.
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_positions: int = 1024
    vocab_size: int = 50257
    layer_norm_epsilon: float = 1e-5
    n_inner: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModel(f"{name} {value!r}: a positive integer expected")
        if self.n_embd % self.n_head:
            raise UnsupportedModel(f"n_embd {self.n_embd} does not divide into n_head {self.n_head} heads")
        if self.head_dim not in _HEAD_DIMS:
            raise UnsupportedModel(
                f"n_embd {self.n_embd} / n_head {self.n_head}: heads of {self.head_dim}; the attention kernels take "
                f"{', '.join(map(str, _HEAD_DIMS))}"
            )
        if self.n_embd > _MOST_COLUMNS:
            raise UnsupportedModel(
                f"n_embd {self.n_embd}: {_MOST_COLUMNS} at most, a row is kept in a warp's registers"
            )
        if self.inner < 1 or self.inner % _ROW:
            raise UnsupportedModel(f"n_inner {self.inner}: a multiple of {_ROW} expected, rows begin at 16 bytes")
        if not 0 < self.layer_norm_epsilon < 1:
            raise UnsupportedModel(f"layer_norm_epsilon {self.layer_norm_epsilon}: a small positive number expected")

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.n_embd // self.n_head

    @property
    def inner(self) -> int:
        """Columns between the two layers of the feed-forward part."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def parameters(self) -> int:
        """Number of weights, the LM head's being the embedding's."""
        width = self.n_embd
        layer = width * (4 * width + 2 * self.inner) + 3 * width + 2 * width + self.inner + 4 * width
        return (self.vocab_size + self.n_positions) * width + self.n_layer * layer + 2 * width


def from_mapping(raw: Mapping[str, Any]) -> Config:
    """The configuration in a config.json that was read.

    Raises:
        UnsupportedModel: not a GPT-2, an extent missing, or a variant of it that is not computed here.
    """
    _expect(raw, "model_type", ("gpt2",), "gpt2")
    _expect(raw, "activation_function", _GELU_TANH, "gelu_new")
    _expect(raw, "scale_attn_weights", (True,), True)
    _expect(raw, "scale_attn_by_inverse_layer_idx", (False,), False)
    _expect(raw, "add_cross_attention", (False,), False)
    _expect(raw, "tie_word_embeddings", (True,), True)
    named = {name: raw[name] for name in Config.__dataclass_fields__ if name in raw}
    if "n_ctx" in raw:
        named.setdefault("n_positions", raw["n_ctx"])
    missing = [name for name in ("n_layer", "n_head", "n_embd", "vocab_size") if name not in named]
    if missing:
        raise UnsupportedModel(f"config.json has no {', '.join(missing)}")
    return Config(**named)


def from_folder(folder: str | Path) -> Config:
    """The configuration of a checkpoint folder.

    Raises:
        FileNotFoundError: there is no config.json in it.
        UnsupportedModel: as `from_mapping`.
    """
    return from_mapping(json.loads((Path(folder) / "config.json").read_text()))


def _expect(raw: Mapping[str, Any], name: str, supported: tuple, default: Any) -> None:
    found = raw.get(name, default)
    if found not in supported:
        raise UnsupportedModel(f"{name} {found!r}: supported is {' or '.join(map(repr, supported))}")

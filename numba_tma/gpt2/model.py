"""A GPT-2 on the GPU: its weights, and what a batch of sequences needs besides.

    model = Model(random_weights(Config()))
    session = Session(model, batch=8)
    tokens = session.generate(prompts, 32)

The residual stream, the weights, the cache and all activations are bfloat16 (the residual float32 if asked for); every
sum is float32: of products, in the normalisation and the softmax. Biases are float32. A normalisation's gain and shift
are part of the weight and bias that follow it.

Prompts of different lengths are padded on the right. A query sees no key behind it, so that padding changes nothing of
what comes before it, and positions need no correction; the cache holds it until new tokens overwrite it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import driver
from ..arrays import part
from ..kernels.attention import bind_attention
from ..kernels.gemm.matmul import matmul
from ..launch import Kernel
from ..overlap.gpu import GpuEngines
from . import config as configuration
from . import memory
from . import weights as checkpoint
from .attend import make_decode
from .config import Config
from .kernels import APPEND_THREADS, ROWS, gpt2_append, make_embed, make_normalise_rows
from .launches import Launches
from .linear import Shape, grid, make_linear
from .weights import Linear, Norm, Weights

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Launch = Callable[[], Any]
RESIDUALS = {"bfloat16": BFLOAT16, "float32": np.dtype(np.float32)}
_VOCABULARY_STEP = 128  # rows of the LM head are padded to a multiple: rows of logits then begin at 16 bytes


@dataclass(frozen=True)
class _Product:
    """A `Linear` where kernels run: weight (N, K) bfloat16, bias (N,) float32, and sums (N,) float32 of the weight's
    rows. The gain and shift of a normalisation in front are part of weight and bias."""

    weight: Any
    bias: Any
    sums: Any


@dataclass(frozen=True)
class _Layer:
    """A layer's products; those of c_attn and c_fc are with normalised rows."""

    c_attn: _Product
    c_proj: _Product
    c_fc: _Product
    mlp_proj: _Product


class Model:
    """Weights where kernels run; any number of sessions share them.

    Args:
        weights: in host memory.
        residual: "bfloat16", or "float32" for smaller errors and 25 % more bytes between the products.

    Raises:
        ValueError: no such type of residual.
    """

    def __init__(self, weights: Weights, *, residual: str = "bfloat16") -> None:
        if residual not in RESIDUALS:
            raise ValueError(f"residual {residual!r}: choose one of {', '.join(map(repr, RESIDUALS))}")
        self.config = weights.config
        self.residual = residual
        self.vocabulary = -(-self.config.vocab_size // _VOCABULARY_STEP) * _VOCABULARY_STEP
        self.wte = memory.upload(weights.wte.astype(BFLOAT16))
        self.wpe = memory.upload(weights.wpe.astype(BFLOAT16))
        self.layers = tuple(
            _Layer(
                _product(layer.c_attn, layer.ln_1),
                _product(layer.c_proj),
                _product(layer.c_fc, layer.ln_2),
                _product(layer.mlp_proj),
            )
            for layer in weights.layers
        )
        head = np.zeros((self.vocabulary, self.config.n_embd), np.float32)
        head[: self.config.vocab_size] = weights.wte
        self.head = _product(Linear(head, np.zeros(self.vocabulary, np.float32)), weights.ln_f)

    @staticmethod
    def from_folder(folder: str | Path, **options: Any) -> Model:
        """The model of a checkpoint folder (config.json, model.safetensors).

        Raises:
            FileNotFoundError, ImportError, UnsupportedModel: as `config.from_folder` and `weights.from_folder`.
        """
        found = configuration.from_folder(folder)
        return Model(checkpoint.from_folder(found, folder), **options)


def _product(linear: Linear, norm: Norm | None = None) -> _Product:
    """weight · (gain · x + shift) + bias = (weight · gain) · x + (weight · shift + bias)."""
    weight, bias = linear.weight, linear.bias
    if norm is not None:
        bias = bias + weight @ norm.bias
        weight = weight * norm.weight
    weight = weight.astype(BFLOAT16)
    sums = weight.astype(np.float32).sum(axis=1, dtype=np.float64).astype(np.float32)
    return _Product(memory.upload(weight), memory.upload(bias), memory.upload(sums))


class PromptError(ValueError):
    """Prompts that do not fit the model or the session; the message names the prompt and the limit."""


class Session:
    """A batch of sequences on a model: the cache of keys and values, and room for activations.

    Args:
        model: the weights.
        batch: number of sequences, always all of them at once.
        positions: the most tokens a sequence can have, prompt included; by default the model's.
        prompt: the most tokens of a prompt, by default `positions`; activations take room for so many.
        stream: where to enqueue (a handle or any library's stream); by default a stream of its own, on which
            work that repeats is captured into CUDA graphs. A stream that is given is left to its owner: there, launches
            are enqueued one by one, and may be captured by the owner.

    The cache is one array, (layers, batch, positions, 3, heads, D) bfloat16: rows as the product with c_attn leaves
    them, queries included, so that nothing has to be moved; a third of it is not needed later.
    """

    def __init__(
        self, model: Model, batch: int, *, positions: int | None = None, prompt: int | None = None, stream: Any = None
    ) -> None:
        config = model.config
        positions = config.n_positions if positions is None else positions
        prompt = positions if prompt is None else prompt
        if batch < 1 or not 1 <= positions <= config.n_positions or not 1 <= prompt <= positions:
            raise PromptError(
                f"batch {batch}, positions {positions}, prompt {prompt}: expected 1 or more sequences, at most "
                f"{config.n_positions} positions (n_positions), and prompts of no more than those"
            )
        self.model, self.batch, self.positions, self.prompt = model, batch, positions, prompt
        self.own_stream = GpuEngines().stream() if stream is None and memory.on_gpu() else None
        self.stream = driver.stream_handle(self.own_stream or stream) if memory.on_gpu() else 0
        width, rows = config.n_embd, batch * prompt
        self.cache = memory.empty((config.n_layer, batch, positions, 3 * width), BFLOAT16)
        self._x = memory.empty((rows, width), RESIDUALS[model.residual])
        self._normed = memory.empty((rows, width), BFLOAT16)
        self._attended = memory.empty((rows, width), BFLOAT16)
        self._hidden = memory.empty((rows, config.inner), BFLOAT16)
        self._lse = memory.empty((batch * config.n_head * prompt,), np.float32)
        self.logits = memory.empty((batch, model.vocabulary), np.float32)
        self.sequence = memory.zeros((batch, positions + 1), np.int32)
        self.lengths = memory.zeros((batch,), np.int32)
        self._picked = memory.zeros((batch,), np.int32)
        self._best = memory.zeros((batch,), np.uint64)
        self._each = memory.upload(np.arange(batch, dtype=np.int32))
        self._longest = 0  # on the host: what `lengths` has at most
        self._prefills: dict[tuple[int, int], Launches] = {}
        self._decode: Launches | None = None

    # What a caller does.

    def prefill(self, prompts: Sequence[Sequence[int]], *, past: int = 0) -> np.ndarray:
        """Put prompts into the cache, and choose the first new token of each.

        Args:
            prompts: token numbers, one prompt for each sequence of the batch; lengths may differ.
            past: positions of the cache that are filled already, in every sequence; the prompts follow there.

        Returns:
            Logits (batch, vocabulary) float32 for the token after each prompt.

        Raises:
            PromptError: another number of prompts, an empty or too long one, or a token outside the vocabulary.
        """
        tokens, lengths = padded(prompts, self.model.config, self.positions - past, self.prompt)
        if len(tokens) != self.batch:
            raise PromptError(f"{len(tokens)} prompts for a session of {self.batch} sequences")
        sequence = np.zeros((self.batch, self.positions + 1), np.int32)
        sequence[:, past : past + tokens.shape[1]] = tokens
        memory.write(self.sequence, sequence, self.stream)
        memory.write(self.lengths, lengths + past, self.stream)
        self._longest = int(lengths.max()) + past
        key = (tokens.shape[1], past)
        if key not in self._prefills:
            launches = [
                *self.context_launches(self.sequence, self.lengths, tokens.shape[1], past),
                self.head_launch(self.logits),
                self.choose_launch(),
            ]
            self._prefills[key] = Launches(launches, self.own_stream)
        self._prefills[key]()
        return self.last_logits()

    def decode(self, steps: int) -> None:
        """Take the token chosen last into each sequence and choose the next, `steps` times; nothing is waited for.

        Raises:
            PromptError: the cache has no room for so many tokens, or there was no `prefill`.
        """
        if not self._longest:
            raise PromptError("decode before prefill: there is no token to go on from")
        if self._longest + steps > self.positions:
            raise PromptError(f"{steps} steps after {self._longest} tokens: the session has {self.positions} positions")
        if self._decode is None:
            self._decode = Launches(self.decode_launches(), self.own_stream)
        for _ in range(steps):
            self._decode()
        self._longest += steps

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[np.ndarray]:
        """The `count` likeliest tokens after each prompt, one after the other; fewer where the model ends the text
        (`eos_token_id`, which is then the last).

        Raises:
            PromptError: as `prefill` and `decode`.
        """
        if count < 1:
            raise PromptError(f"{count} tokens to generate: 1 or more expected")
        self.prefill(prompts)
        self.decode(count - 1)
        sequence = memory.to_host(self.sequence, self.stream)
        end = self.model.config.eos_token_id
        answers = []
        for prompt, row in zip(prompts, sequence, strict=True):
            answer = row[len(prompt) : len(prompt) + count]
            ends = np.flatnonzero(answer == end) if end is not None else ()
            answers.append(answer[: ends[0] + 1] if len(ends) else answer)
        return answers

    def last_logits(self) -> np.ndarray:
        """Logits (batch, vocabulary) float32 that the last token was chosen by; waits for the stream."""
        return memory.to_host(self.logits, self.stream)[:, : self.model.config.vocab_size]

    def prompt_logits(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """`prefill`, and the logits (batch, S, vocabulary) of all positions, rounded to bfloat16; those behind a
        prompt's end mean nothing.

        Raises:
            PromptError: as `prefill`.
        """
        self.prefill(prompts)
        length = max(map(len, prompts))
        every = memory.empty((self.batch, length, self.model.vocabulary), BFLOAT16)
        for launch in self.every_head_launches(length, every):
            launch()
        return memory.to_host(every, self.stream)[..., : self.model.config.vocab_size].astype(np.float32)

    def sync(self) -> None:
        """Wait for the stream."""
        if memory.on_gpu():
            driver.synchronize(self.stream)

    # What it consists of.

    def context_launches(self, tokens: Any, lengths: Any, length: int, past: int = 0) -> list[Launch]:
        """Launches that take `length` tokens of each sequence into the cache.

        Args:
            tokens: (batch, `past` + `length` or more) int32 on the device, the prompts from position `past` on.
            lengths: (batch,) int32 on the device, of the sequences, `past` included.
            length: rows of a sequence that are computed; padded ones among them.
            past: positions that the cache has already.
        """
        model, config, batch = self.model, self.model.config, self.batch
        width, heads, rows = config.n_embd, config.n_head, batch * length
        x, normed, attended, hidden = (
            part(array, slice(0, rows)) for array in (self._x, self._normed, self._attended, self._hidden)
        )
        by_batch = memory.reshaped(normed, (batch, length, width))
        o = memory.reshaped(attended, (batch, length, heads, config.head_dim))
        lse = memory.reshaped(part(self._lse, slice(0, rows * heads)), (batch, heads, length))
        cache = memory.reshaped(self.cache, (*np.shape(self.cache)[:3], 3, heads, config.head_dim))
        new = slice(past, past + length)
        embed = make_embed(width, model.residual, False)[(-(-length // ROWS), batch), None, self.stream]
        launches: list[Launch] = [
            embed.bind(
                tokens,
                lengths,
                model.wte,
                model.wpe,
                x,
                self._picked,
                np.uint32(past),
                np.uint32(length),
                np.int32(config.vocab_size),
            )
        ]
        for i, layer in enumerate(model.layers):
            qkv = part(self.cache, (i, slice(None), new))
            q = part(cache, (i, slice(None), new, 0))
            k, v = (part(cache, (i, slice(None), slice(0, past + length), j)) for j in (1, 2))
            launches += [
                self._normalise(x, normed, rows),
                self._matmul(layer.c_attn, by_batch, qkv),
                bind_attention(q, k, v, o, lse, causal=True, stream=self.stream),
                self._matmul(layer.c_proj, attended, x, accumulate=True),
                self._normalise(x, normed, rows),
                self._matmul(layer.c_fc, normed, hidden, activation="gelu"),
                self._matmul(layer.mlp_proj, hidden, x, accumulate=True),
            ]
        return launches

    def head_launch(self, logits: Any) -> Launch:
        """What follows: logits for the token behind each sequence, to `logits` (batch, padded vocabulary) float32."""
        return self._head(self._x, self._picked, logits)

    def choose_launch(self, grow: int = 0) -> Launch:
        """Append the likeliest token of the last `head_launch` to each sequence, whose length then grows by `grow`."""
        blocks = -(-self.batch // APPEND_THREADS)
        return gpt2_append[blocks, None, self.stream].bind(
            self._best, self.sequence, self.lengths, np.uint32(self.batch), np.uint32(grow)
        )

    def every_head_launches(self, length: int, every: Any) -> list[Launch]:
        """In place of `head_launch`: the logits of the last n of `length` rows a sequence, to `every` (batch, n, padded
        vocabulary) bfloat16."""
        rows, count = self.batch * length, np.shape(every)[1]
        x, normed = part(self._x, slice(0, rows)), part(self._normed, slice(0, rows))
        by_batch = memory.reshaped(normed, (self.batch, length, self.model.config.n_embd))
        wanted = part(by_batch, (slice(None), slice(length - count, None)))
        if count == length:
            wanted, every = normed, memory.reshaped(every, (rows, self.model.vocabulary))
        return [self._normalise(x, normed, rows), self._matmul(self.model.head, wanted, every)]

    def decode_launches(self, attention: Kernel | None = None) -> list[Launch]:
        """Launches of one step: the token chosen last into each sequence, and the next chosen. `attention` is
        `make_decode`'s, by default with what suits an H200."""
        model, config, batch = self.model, self.model.config, self.batch
        heads, width = config.n_head, config.n_embd
        x, attended, hidden = (part(array, slice(0, batch)) for array in (self._x, self._attended, self._hidden))
        cache = memory.reshaped(self.cache, (*np.shape(self.cache)[:3], 3, heads, config.head_dim))
        o = memory.reshaped(attended, (batch, heads, config.head_dim))
        attention = attention or make_decode(config.head_dim)
        attend = attention[(heads * attention.cluster[0], batch), None, self.stream]
        embed = make_embed(width, model.residual, True)[(1, batch), None, self.stream]
        launches: list[Launch] = [
            embed.bind(
                self.sequence,
                self.lengths,
                model.wte,
                model.wpe,
                x,
                self._picked,
                np.uint32(0),
                np.uint32(1),
                np.int32(config.vocab_size),
            )
        ]
        for i, layer in enumerate(model.layers):
            qkv = part(self.cache, i)
            launches += [
                self._few_rows(layer.c_attn, x, qkv, normalised=True, at_length=True),
                attend.bind(part(cache, i), self.lengths, o),
                self._few_rows(layer.c_proj, attended, x, accumulate=True),
                self._few_rows(layer.c_fc, x, hidden, normalised=True, activation="gelu"),
                self._few_rows(layer.mlp_proj, hidden, x, accumulate=True),
            ]
        return [*launches, self._head(x, self._each, self.logits), self.choose_launch(1)]

    def _head(self, x: Any, picked: Any, logits: Any) -> Launch:
        head, known = self.model.head, slice(0, self.model.config.vocab_size)
        without_padding = _Product(part(head.weight, known), part(head.bias, known), part(head.sums, known))
        shape = Shape.of_head(self.model.config.n_embd)
        return self._few_rows(without_padding, x, logits, normalised=True, picked=picked, shape=shape, choose=True)

    def _normalise(self, x: Any, y: Any, rows: int) -> Launch:
        config = self.model.config
        kernel = make_normalise_rows(config.n_embd, config.layer_norm_epsilon, self.model.residual)
        return kernel[-(-rows // ROWS), None, self.stream].bind(x, y, np.uint32(rows))

    def _matmul(self, product: _Product, x: Any, y: Any, **options: Any) -> Launch:
        return functools.partial(
            matmul, x, _turned(product.weight), bias=product.bias, out=y, stream=self.stream, **options
        )

    def _few_rows(
        self,
        product: _Product,
        x: Any,
        y: Any,
        *,
        normalised: bool = False,
        picked: Any = None,
        shape: Shape | None = None,
        **options: Any,
    ) -> Launch:
        columns, depth = product.weight.shape
        shape = shape or Shape.of(columns, depth)
        if normalised:
            options |= {"norm": self.model.config.layer_norm_epsilon, "x_dtype": self.model.residual}
        kernel = make_linear(shape, rows_16=self.batch > 8, **options)
        return kernel[grid(shape, columns, self.batch), None, self.stream].bind(
            x,
            product.weight,
            product.sums,
            product.bias,
            y,
            self._each if picked is None else picked,
            self.lengths,
            self._best,
            np.uint32(self.batch),
        )


def _turned(weight: Any) -> Any:
    """A weight (N, K) as the matrix (K, N) that rows are multiplied by, as it lies."""
    columns, depth = weight.shape
    return memory.strided(weight, (depth, columns), (1, depth))


def padded(
    prompts: Sequence[Sequence[int]], config: Config, positions: int, longest: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows of an array, padded with zeros on the right, and their lengths, both int32.

    Raises:
        PromptError: none, an empty or too long one, or a token outside the vocabulary.
    """
    if not len(prompts):
        raise PromptError("no prompts")
    limit = min(positions, positions if longest is None else longest)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    for i, length in enumerate(lengths):
        if not 1 <= length <= limit:
            raise PromptError(f"prompt {i} has {length} tokens; expected 1 to {limit}")
    tokens = np.zeros((len(prompts), int(lengths.max())), np.int32)
    for i, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        if row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= config.vocab_size:
            raise PromptError(f"prompt {i}: tokens are integers from 0 to {config.vocab_size - 1} (vocab_size)")
        tokens[i, : len(row)] = row
    return tokens, lengths


def unpadded(tokens: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Prompts out of an array padded on either side, given the attention mask (1 for a token) that goes with it.

    Raises:
        PromptError: the mask has gaps, or another shape.
    """
    tokens, mask = np.asarray(tokens), np.asarray(mask).astype(bool)
    if tokens.shape != mask.shape or tokens.ndim != 2:
        raise PromptError(f"tokens {tokens.shape}, mask {mask.shape}: both (batch, S) expected")
    for i, row in enumerate(mask):
        where = np.flatnonzero(row)
        if len(where) and where[-1] - where[0] + 1 != len(where):
            raise PromptError(f"mask {i} has gaps: padding stands in front of a prompt or behind it")
    return [row[seen] for row, seen in zip(tokens, mask, strict=True)]

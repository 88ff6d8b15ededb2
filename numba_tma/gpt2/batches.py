"""Batches of prompts through the copy engines and the model at once: tokens in, logits out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import driver
from ..overlap import Pipeline
from . import memory
from .model import BFLOAT16, Launch, Model, PromptError, Session, padded


def stream_of(stream: Any) -> int:
    """The handle of the stream that a pipeline computes on; the simulator has none."""
    return driver.stream_handle(stream) if memory.on_gpu() else 0


class BatchInference:
    """A pipeline whose batches are lists of prompts, and whose results are their logits.

        with BatchInference(model, 8, 1024) as inference:
            for logits in inference.run(batches):
                …

    Prompts are padded into page-locked memory, copied, put through the model as one CUDA graph, and their logits are
    copied back, while the batches before and after are in other stages. Activations and the cache exist once, as one
    batch is computed after the other; a slot of the ring has tokens and logits of its own.

    Args:
        model: the weights.
        batch: prompts in a batch.
        length: the most tokens of a prompt; all are padded to it.
        every: the logits of the last `every` of the `length` positions, bfloat16, whatever the prompt has there, rather
            than those behind each prompt's last token, float32.
        options: the pipeline's: mode, depth, record, model (of the machine, where there is no GPU), …

    Raises:
        PromptError: `length` is more than the model has positions, or `every` more than `length`.
    """

    def __init__(self, model: Model, batch: int, length: int, /, *, every: int = 0, **options: Any) -> None:
        self.model, self.batch, self.length, self.every = model, batch, length, every
        self._session: Session | None = None
        self._work: dict[int, list[Launch]] = {}  # of each slot, by its tokens' array
        if not 0 <= every <= length <= model.config.n_positions:
            raise PromptError(
                f"logits of {every} positions, prompts of {length}: 0 to all of them, and {model.config.n_positions} "
                f"at most (n_positions)"
            )
        shape = (batch, every, model.vocabulary) if every else (batch, model.vocabulary)
        self.pipeline = Pipeline(
            self._compute,
            inputs={"tokens": ((batch, length), np.int32), "lengths": ((batch,), np.int32)},
            outputs={"logits": (shape, BFLOAT16 if every else np.dtype(np.float32))},
            prepare=self._prepare,
            graph=memory.on_gpu(),
            **options,
        )

    def run(self, batches: Iterable[Sequence[Sequence[int]]]) -> Iterator[np.ndarray]:
        """Logits of each batch of prompts, in order: (batch, vocabulary), or with `every` (batch, every, vocabulary).

        They are views of the slot that they lie in, which is used again when they are gone: `depth` of them at most can
        be held.

        Raises:
            BatchError: naming the batch; its cause is a `PromptError` where the prompts do not fit.
        """
        vocabulary = self.model.config.vocab_size
        for result in self.pipeline.run(batches, copy=False):
            yield result["logits"][..., :vocabulary]
            del result

    def close(self) -> None:
        """Give buffers and streams back."""
        self.pipeline.close()

    def __enter__(self) -> BatchInference:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, prompts: Sequence[Sequence[int]], buffers: dict[str, np.ndarray]) -> None:
        if len(prompts) != self.batch:
            raise ValueError(f"{len(prompts)} prompts in a batch of {self.batch}")
        tokens, lengths = padded(prompts, self.model.config, self.length)
        buffers["tokens"][:] = 0
        buffers["tokens"][:, : tokens.shape[1]] = tokens
        buffers["lengths"][:] = lengths

    def _compute(self, inputs: dict[str, Any], outputs: dict[str, Any], stream: Any) -> None:
        if self._session is None:
            self._session = Session(self.model, self.batch, positions=self.length, stream=stream_of(stream))
        key = id(inputs["tokens"])
        if key not in self._work:
            session, logits = self._session, outputs["logits"]
            context = session.context_launches(inputs["tokens"], inputs["lengths"], self.length)
            head = session.every_head_launches(self.length, logits) if self.every else [session.head_launch(logits)]
            self._work[key] = [*context, *head]
        for launch in self._work[key]:
            launch()

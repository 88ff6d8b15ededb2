"""All kernels of what is measured, compiled beforehand by many processes: one after the other takes minutes."""

from __future__ import annotations

import functools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from ..launch import Recorded, recording
from .attend import VARIANTS, make_decode
from .config import Config
from .kernels import gpt2_move
from .model import BFLOAT16, Model, Session
from .weights import Weights, from_tensors, shapes

ARCH = "sm_90a"


def compile_all(config: Config, contexts: tuple[tuple[int, int, int, int], ...], workers: int) -> list[str]:
    """Compile into the cache on disk what prefills and decoding steps of a model launch, each kernel once.

    Args:
        config: the model's shape; its layers are alike, so that one is enough.
        contexts: of each prefill the sequences, the tokens that each has, how many its cache has before these, and how
            many positions at its end get logits (0: the last alone).
        workers: processes, which need neither a GPU nor each other.

    Returns:
        Names of the kernels.
    """
    kernels: dict[tuple, int] = {}
    for number, launch in enumerate(_launches(config, contexts)):
        kernels.setdefault((launch.kernel, launch.numba_types), number)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(functools.partial(_compile, config, contexts), kernels.values()))


def _compile(config: Config, contexts: tuple, number: int) -> str:
    launch = _launches(config, contexts)[number]
    _ = launch.compiled.cubin
    return launch.kernel.__name__


@functools.cache
def _launches(config: Config, contexts: tuple) -> list[Recorded]:
    """In the same order in each process."""
    with recording(ARCH, later=True) as recorded:
        model = Model(_no_weights(config))
        for batch, length, past, every in contexts:
            session = Session(model, batch, positions=past + length)
            launches = session.context_launches(session.sequence, session.lengths, length, past)
            logits = np.empty((batch, every, model.vocabulary), BFLOAT16)
            launches += session.every_head_launches(length, logits) if every else [session.head_launch(session.logits)]
            launches += [session.choose_launch(), *session.decode_launches()]
            for variant in VARIANTS:
                launches += session.decode_launches(make_decode(config.head_dim, **variant))
            for launch in launches:
                launch()
        width = 2 * config.n_embd
        prefix, cache = np.empty((1, 8, width), BFLOAT16), np.empty((1, 8, 3 * config.n_embd), BFLOAT16)[..., -width:]
        gpt2_move[8](prefix, cache)
        gpt2_move[8](cache, prefix)
    return recorded.launches


def _no_weights(config: Config) -> Weights:
    """Of one layer, zeros."""
    one = Config(**{**vars(config), "n_layer": 1})
    return from_tensors(one, {name: np.zeros(shape, np.float32) for name, shape in shapes(one).items()})

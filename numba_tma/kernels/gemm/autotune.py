"""The fastest kernel for a product by measuring it here, once: winners are kept in memory and on disk.

The file is one of `numba_tma.cache`, under a key of the GPU's name, the product, and everything that decides what the
candidates compile to; so a new version of a kernel is measured anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ... import cache, ptx
from . import choice
from .choice import Configuration, Shape, Types

CANDIDATES = 5  # of the model's favourites; with their variations some ten kernels
_FOLDER = Path(__file__).parent
_SUFFIX = ".gemm.json"

Measure = Callable[[Sequence[Configuration]], Mapping[Configuration, float]]


class AutotuneError(RuntimeError):
    """There is nothing here to measure with or on; the message says what to do instead."""


@dataclass(frozen=True)
class Product:
    """What is tuned for: one product on one kind of GPU."""

    device: str
    sms: int
    types: Types
    shape: Shape
    activation: str = "none"
    has_bias: bool = False

    def key(self) -> str:
        """Its name in the cache on disk."""
        sources = [*sorted(_FOLDER.glob("*.py")), _FOLDER.parents[1] / "warpgroup.py"]
        return cache.digest(["gemm", repr(self), cache.environment(ptx.folder()), *(p.read_bytes() for p in sources)])


_winners: dict[Product, Configuration] = {}


def fastest(product: Product, measure: Measure) -> Configuration:
    """The winner for a product: remembered, or else the fastest of `choice.best_candidates` by `measure`, which gives
    seconds for each configuration that it is handed."""
    if product not in _winners:
        key = product.key()
        winner = _kept(key, product.types)
        if winner is None:
            seconds = measure(choice.best_candidates(product.types, product.shape, CANDIDATES, product.sms))
            winner = min(seconds, key=seconds.__getitem__)
            cache.write(key, _SUFFIX, json.dumps({"configuration": asdict(winner)}).encode())
        _winners[product] = winner
    return _winners[product]


def _kept(key: str, types: Types) -> Configuration | None:
    """The winner on disk."""
    body = cache.read(key, _SUFFIX)
    if body is None:
        return None
    found = Configuration(**json.loads(body)["configuration"])
    return found if found.fits(types) else None

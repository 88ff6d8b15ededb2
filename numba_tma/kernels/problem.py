"""What a problem of the suite consists of, so that one script can list, run, check and measure them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class UnknownNameError(KeyError):
    """There is no problem or variant of a name. As text it is its message, which a KeyError would put in quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Variant:
    """One step of a problem's ladder: the idea it adds and how to launch it.

    `bind(arrays, **options)` takes the problem's arrays by name, on the GPU or in host memory, and gives a function
    of no arguments that launches the kernel once.
    """

    name: str
    moves: str
    idea: str
    bind: Callable[..., Callable[[], Any]]
    baseline: bool = False


@dataclass(frozen=True)
class Case:
    """One size to run: the shape, the element type, the options of all variants and, by name, of single ones.

    `without` names variants that would take too long at this size.
    """

    shape: tuple[int, ...]
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def options_of(self, variant: str) -> dict[str, Any]:
        """What the variant of this name is bound with."""
        return {**self.options, **self.tuned.get(variant, {})}


@dataclass(frozen=True)
class Problem:
    """A problem: inputs, NumPy reference, costs and its variants in teaching order.

    `inputs(case, rng)` makes host arrays by name. `outputs` names those that the kernels write, which are poisoned
    before each run. `reference(arrays, case)` gives what each output should hold, in float64 where it is computed.
    `tolerance`, a number or one for each case, bounds the error relative to the largest reference value; 0 asks for
    equal bits. `peers` are libraries to be measured beside, by name: bound like a variant, on device arrays, they give
    a launch, or None where the library is absent or cannot do the case.
    """

    name: str
    title: str
    inputs: Callable[[Case, np.random.Generator], dict[str, np.ndarray]]
    outputs: Sequence[str]
    reference: Callable[[Mapping[str, np.ndarray], Case], dict[str, np.ndarray]]
    bytes_moved: Callable[[Case], int]
    flops: Callable[[Case], int]
    variants: Sequence[Variant]
    cases: Mapping[str, Sequence[Case]]
    tolerance: float | Callable[[Case], float] = 0.0
    peers: Mapping[str, Callable[..., Callable[[], Any] | None]] = field(default_factory=dict)

    def tolerance_of(self, case: Case) -> float:
        """The largest error allowed in a case."""
        return self.tolerance(case) if callable(self.tolerance) else self.tolerance

    def variant(self, name: str) -> Variant:
        """The variant of that name.

        Raises:
            UnknownNameError: there is none; the message lists those there are.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise UnknownNameError(
            f"{self.name} has no variant {name!r}; it has {', '.join(v.name for v in self.variants)}"
        )


_NO_COUNTS = ("stream", "l2_promotion", "configuration")
_FROM_ZERO = ("lag",)


def check_options(problem: str, variant: Variant, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """See that a variant has the options that it is called with, and that those that count things are counts.

    All variants have `stream`; None stands for a default, and a bool for itself.

    Raises:
        TypeError: it lacks one; the message lists those that there are.
        ValueError: no positive integer, or a tile that is no two of them.
    """
    for name, value in options.items():
        if name != "stream" and name not in known:
            raise TypeError(
                f"{problem}: variant {variant.name!r} has no option {name!r}; it has {', '.join((*known, 'stream'))}"
            )
        if name in _NO_COUNTS or value is None or isinstance(value, (bool, np.bool_)):
            continue
        least, counts = int(name not in _FROM_ZERO), value if isinstance(value, tuple) else (value,)
        right = all(isinstance(count, (int, np.integer)) and count >= least for count in counts)
        if not right or (name == "tile" and len(counts) != 2):
            expected = "a tuple of two positive integers" if name == "tile" else f"an integer of {least} or more"
            raise ValueError(f"{problem}: {name} {value!r} of variant {variant.name!r}: {expected} expected")

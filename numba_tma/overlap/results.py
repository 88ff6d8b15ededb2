"""What comes out of a pipeline: a batch's outputs, or an error that names the batch and its stage."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .ring import Lease

SOURCE, RESULT = "source", "result"  # where an error may come from, besides the stages


class BatchError(RuntimeError):
    """A stage of a batch failed; the cause is what it raised.

    Attributes:
        batch: the batch's number, from 0.
        stage: "source" (the iterable of batches), "prepare", "H2D", "compute", "D2H", or "result" where the driver
            tells of an error only when the batch is awaited.
    """

    def __init__(self, batch: int, stage: str, cause: BaseException) -> None:
        super().__init__(f"batch {batch}: {stage} failed: {type(cause).__name__}: {cause}")
        self.batch, self.stage = batch, stage
        self.__cause__ = cause

    def __reduce__(self) -> tuple:
        return BatchError, (self.batch, self.stage, self.__cause__)


class SlotsHeldError(RuntimeError):
    """Every slot is held by results that the caller has not let go of, so no batch can go on."""


@dataclass
class Result:
    """Outputs of a batch: `result["name"]`, a NumPy array.

    Attributes:
        index: the batch's number, from 0.
        outputs: by name.
    """

    index: int
    outputs: dict[str, np.ndarray]
    _lease: Lease | None = None
    _released: bool = field(default=False, init=False, repr=False)

    def __getitem__(self, name: str) -> np.ndarray:
        if self._released:
            raise RuntimeError(
                f"batch {self.index}: its result was released, and its slot may hold another one: read it before, or "
                f"use run(…, copy=True)"
            )
        return self.outputs[name]

    def release(self) -> None:
        """Let go of the slot that the outputs lie in (`copy=False`): they are not to be looked at any more."""
        if self._lease is not None:
            self.outputs, self._released = {}, True
            self._lease.release()
            self._lease = None

"""The ways in which a pipeline may use streams, from nothing at once to everything."""

from __future__ import annotations

from dataclasses import dataclass

# Stages of a batch, in order. A copy stage and the computing have an engine each; preparing is the host's.
PREPARE, H2D, COMPUTE, D2H = "prepare", "H2D", "compute", "D2H"
STAGES = (PREPARE, H2D, COMPUTE, D2H)

ROTATING, ENGINES = "rotating", "engines"


@dataclass(frozen=True)
class Mode:
    """How batches go through the engines.

    Attributes:
        name: for tables.
        pinned: host buffers are page-locked. Without it a copy holds the host until it is done.
        streams: how many.
        layout: `ROTATING`: batch i takes stream i mod `streams` for all it does; `ENGINES`: one stream for the copies
            in, one for the computing, one for the copies out, ordered by events.
        overlapping: False: the host waits for a batch's end before it submits the next.
        producer: a host thread prepares batches, another submits them; otherwise the caller's thread does both.
    """

    name: str
    pinned: bool = True
    streams: int = 1
    layout: str = ROTATING
    overlapping: bool = True
    producer: bool = False

    def __post_init__(self) -> None:
        if self.layout not in (ROTATING, ENGINES):
            raise ValueError(f"mode {self.name}: layout {self.layout!r}; choose {ROTATING!r} or {ENGINES!r}")
        if self.streams < 1:
            raise ValueError(f"mode {self.name}: {self.streams} streams; 1 or more")
        if self.layout == ENGINES and self.streams != 3:
            raise ValueError(f"mode {self.name}: {self.streams} streams; a stream an engine makes three")
        if self.producer and not self.overlapping:
            raise ValueError(f"mode {self.name}: a producer thread has nothing to do where each batch is awaited")

    def stream_of(self, stage: str, batch: int) -> int:
        """Which of the streams a stage of a batch is submitted to."""
        if self.layout == ENGINES:
            return (H2D, COMPUTE, D2H).index(stage)
        return batch % self.streams


SERIAL_PAGEABLE = Mode("serial_pageable", pinned=False, overlapping=False)
SERIAL_PINNED = Mode("serial_pinned", overlapping=False)
TWO_STREAMS = Mode("two_streams", streams=2)
THREE_STREAMS = Mode("three_streams", streams=3, layout=ENGINES)
PRODUCER = Mode("producer", streams=3, layout=ENGINES, producer=True)
MODES = {mode.name: mode for mode in (SERIAL_PAGEABLE, SERIAL_PINNED, TWO_STREAMS, THREE_STREAMS, PRODUCER)}


def mode_of(mode: str | Mode) -> Mode:
    """A mode by name, or as it is.

    Raises:
        ValueError: no mode has that name.
    """
    if isinstance(mode, Mode):
        return mode
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: choose one of {', '.join(MODES)}, or make a Mode(…)")
    return MODES[mode]

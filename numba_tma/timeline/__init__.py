"""Timelines of kernels: what each warp, the copy engine and the barriers did when, and who waited for what.

    from numba_tma import tracing
    from numba_tma.timeline import of_trace

    with tracing() as traced:
        kernel[grid](…)
    timeline = of_trace(traced.launches[0])

In the simulator, `of_model` makes one of a launch's modelled times: those of `report.model`, where it was launched with
`use_backend("sim", model=True)`.

`timeline.svg()` is a picture of a block, `timeline.trace_events()` what ui.perfetto.dev opens, and `overlap` says how
much of the copying was hidden under computation.
"""

from . import overlap
from .from_model import of_model
from .from_trace import of_trace
from .model import Block, Flow, Interval, Row, Timeline

__all__ = ["Block", "Flow", "Interval", "Row", "Timeline", "of_model", "of_trace", "overlap"]

"""What a kernel does when: stamps of each warp, written by the kernel itself, on a GPU or in the simulator.

A kernel is traced by launching it inside `numba_tma.tracing()`; it needs no change for that, for the stamps go into its
PTX, where it waits, copies and arrives. Marks of its own are optional, and nothing where it is not traced:

    from numba_tma import trace

    trace.begin("load")
    …
    trace.end("load")
"""

from .marks import begin, end, mark
from .plan import Trace

__all__ = ["Trace", "begin", "end", "mark"]

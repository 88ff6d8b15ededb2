"""Copy engines against compute: batches to the GPU, through a computation and back, all engines busy at once.

    from numba_tma.overlap import Pipeline

    def compute(inputs, outputs, stream):
        double[blocks, None, stream](inputs["x"], outputs["y"])

    with Pipeline(compute, inputs={"x": ((n,), np.float32)}, outputs={"y": ((n,), np.float32)}) as pipeline:
        for result in pipeline.run(batches):
            use(result["y"])

Without a GPU the same program runs on a `Model` of the engines, with kernels in the simulator.
"""

from .model import Model
from .modes import MODES, Mode
from .pipeline import Pipeline
from .report import Alone, Report, Span, ideal, serial, table
from .results import BatchError, Result, SlotsHeldError

__all__ = [
    "MODES",
    "Alone",
    "BatchError",
    "Mode",
    "Model",
    "Pipeline",
    "Report",
    "Result",
    "SlotsHeldError",
    "Span",
    "ideal",
    "serial",
    "table",
]

"""The model of time: what a launch would take on a GPU, as far as a model knows.

The simulator executes a kernel without time. Where a launch asks for the model, it writes down what some of the warps
did (`record`): those of the blocks that one SM would get. Then they are played once more against a clock (`replay`), on
an SM whose schedulers, pipes, copy engine and paths to memory take the time that micro-benchmarks found (`device`).
What comes out is a `Model`: cycles, who waited for whom, what was busy when.

A model, and called one everywhere: figures of it are not measurements.
"""

from .device import Device, default_device
from .model import Interval, MachineInstruction, Model, ModelOptions, Stall, WarpTime
from .modelled import Modelled

__all__ = [
    "Device",
    "Interval",
    "MachineInstruction",
    "Model",
    "ModelOptions",
    "Modelled",
    "Stall",
    "WarpTime",
    "default_device",
]

"""A simulator of Hopper GPUs on the level of PTX, in NumPy.

memory = GlobalMemory()
address = memory.map(array)
report = launch(ptx_text, grid=8, block=128, params=[struct.pack("<Q", address)], memory=memory)
"""

from .errors import (
    Deadlock,
    LaunchError,
    Misaligned,
    OutOfBounds,
    PtxSyntaxError,
    SimError,
    StepLimit,
    Trap,
    UnknownInstruction,
)
from .launch import launch
from .memory import GlobalMemory
from .module import Module
from .parse import parse
from .report import Hazard, Report
from .schedules import first_schedules, named, schedules

__all__ = [
    "Deadlock",
    "GlobalMemory",
    "Hazard",
    "LaunchError",
    "Misaligned",
    "Module",
    "OutOfBounds",
    "PtxSyntaxError",
    "Report",
    "SimError",
    "StepLimit",
    "Trap",
    "UnknownInstruction",
    "first_schedules",
    "launch",
    "named",
    "parse",
    "schedules",
]

"""Hopper's Tensor Memory Accelerator for Numba-CUDA kernels, on a GPU or in a PTX simulator.

from numba_tma import Barriers, Shared, TensorMap, Tiles, kernel, ptx
"""

from . import ptx, trace
from .launch import HazardWarning, Kernel, LaunchError, kernel, tracing, use_backend
from .pitch import pitched, pitched_copy
from .shared import Barriers, Buffer, Shared, Tiles
from .tensor_map import StoreOverrunWarning, TensorMap, TensorMapError
from .watchdog import WatchdogError

__version__ = "0.1.0"

__all__ = [
    "Barriers",
    "Buffer",
    "HazardWarning",
    "Kernel",
    "LaunchError",
    "Shared",
    "StoreOverrunWarning",
    "TensorMap",
    "TensorMapError",
    "Tiles",
    "WatchdogError",
    "kernel",
    "pitched",
    "pitched_copy",
    "ptx",
    "trace",
    "tracing",
    "use_backend",
]

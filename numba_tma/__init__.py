"""Hopper's Tensor Memory Accelerator for Numba-CUDA kernels, on a GPU or in a PTX simulator."""

__version__ = "0.1.0"

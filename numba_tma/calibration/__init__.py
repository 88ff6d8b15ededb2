"""Micro-benchmarks of the parts of a GPU that the simulator's model of time speaks of, and the constants made of them.

`probes` has the kernels, in PTX; `run` runs them on a GPU, or in the simulator under the model; `fit` turns what a GPU
took into the file of constants that the model reads.
"""

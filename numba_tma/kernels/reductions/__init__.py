"""Many writers, one place: sums into global memory by atomics, and by the copy engine's reductions."""

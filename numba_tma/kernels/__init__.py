"""Problems that teach TMA: one file each, its variants in teaching order, plain Numba first."""

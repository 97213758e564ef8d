"""CPU kernels compiled by numba and called by XLA, for what XLA:CPU has no fast form."""

"""The kernels themselves, which numba compiles."""

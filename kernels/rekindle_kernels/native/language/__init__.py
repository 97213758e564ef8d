"""What kernels are written in: numba's Python, with memory, vectors, records and XLA's threads."""

"""The language of kernels: numba's Python, with memory, vectors, records and XLA's threads."""

"""Pallas kernels for GPUs, lowered through Triton."""

"""Attention over pages as Pallas kernels, for GPUs and for TPUs."""

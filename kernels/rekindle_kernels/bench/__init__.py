"""Benchmarks of the kernels: paged attention anywhere, GPU kernels beside others, and the search for block sizes."""

"""Benchmarks of the kernels and the search for block sizes, for a clone: no installation contains them."""

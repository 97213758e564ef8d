"""Which request computes which tokens in each step: pure host code, no JAX."""

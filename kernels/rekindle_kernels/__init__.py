"""Paged attention for JAX on CPU, GPU and TPU behind one call."""

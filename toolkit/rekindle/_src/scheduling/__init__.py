"""Scheduling: decides which request computes which tokens in each step. Pure host code, no JAX."""

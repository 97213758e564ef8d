"""Scheduling: decides what each step computes. Pure host code, no JAX."""

"""Offline simulations of cache policies on made-up traces."""

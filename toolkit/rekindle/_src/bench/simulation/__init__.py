"""Offline simulations of cache policies on synthetic traces."""

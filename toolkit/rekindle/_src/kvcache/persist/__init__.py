"""Cached pages beyond the process: segments, snapshots, exported prefixes."""

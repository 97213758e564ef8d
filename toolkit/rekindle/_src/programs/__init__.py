"""Compiled programs: buckets, the fused step, sampling, keys, the executable store, warming."""

"""The benchmark: typical workloads, model shapes with random weights, and the limits of this machine."""

"""The benchmark: model shapes with random weights, workloads that users recognise, and this machine's own limits."""

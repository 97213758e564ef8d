"""Opening a model: what will be done as a value, the owners that do it, and the one place that knows their order."""

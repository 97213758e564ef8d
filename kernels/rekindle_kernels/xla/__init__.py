"""Every operation in plain JAX, in the forms that XLA runs fast: the implementation that any platform has."""

"""Every operation in plain JAX, in the forms that XLA runs fast: the implementation for any platform."""

"""Rounding a model's weights to four bits for the activations that they multiply."""

"""Rounding a model's weights to four bits by what they are multiplied with."""

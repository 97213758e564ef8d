"""Measures of texts and models: scores of choices, rollouts for a trainer, the inside of a model, and its parity."""

"""Typed decisions: questions with a few possible answers, and the probability that the model gives to each of them."""

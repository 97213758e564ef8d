"""Hugging Face checkpoints that are quantised already: their `quantization_config`, and the numbers they stand for."""

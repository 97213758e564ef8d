"""One module per model family, named by its model_type: config, weights, and its form as a GGUF file."""

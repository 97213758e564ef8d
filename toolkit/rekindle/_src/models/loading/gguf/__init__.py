"""Checkpoints in GGUF, llama.cpp's format: one file that holds weights, config, tokenizer and chat template."""

"""The tokenizer, chat template and defaults of sampling of a GGUF file, read and written."""

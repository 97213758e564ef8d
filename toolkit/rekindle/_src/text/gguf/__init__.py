"""What text needs of a GGUF file: its tokenizer, chat template and defaults of sampling, read and written."""

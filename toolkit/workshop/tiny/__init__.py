"""The training of the embedded model: its corpus, its tokenizer and its weights."""

"""The making of the embedded model: its corpus, its tokenizer and its training."""

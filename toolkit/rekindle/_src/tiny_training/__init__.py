"""How the embedded model is made: its corpus, its tokenizer, its training."""

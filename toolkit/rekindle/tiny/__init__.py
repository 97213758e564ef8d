"""The embedded model: its corpus, its training script and its weights."""

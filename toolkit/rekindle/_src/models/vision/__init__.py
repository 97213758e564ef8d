"""The encoders of pictures: from patches of pixels to embeddings that a language model reads in the place of tokens."""

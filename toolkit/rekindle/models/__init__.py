"""Model families as flax.nnx modules over shared layers, loaded from Hugging Face folders."""

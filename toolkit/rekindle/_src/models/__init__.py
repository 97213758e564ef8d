"""Model families, their weights and their checkpoints."""

"""One module per model family: the reader of its config.json, its layers, and its checkpoint manifest."""

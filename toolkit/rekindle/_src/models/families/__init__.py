"""One module per model family: how its config.json is read, its layers, and its checkpoint manifest."""

"""One module per model family: its part of config.json, its layers, its checkpoint manifest."""

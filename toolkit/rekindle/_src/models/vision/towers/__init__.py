"""The encoder of each family of models that reads pictures: its config, its module, and the origin of its weights."""

"""Tools: Python functions, or JSON schemas of anything else, that a model may call."""

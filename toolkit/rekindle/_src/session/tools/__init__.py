"""Tools: Python functions, or JSON schemas of anything else, that a model may ask to be called."""
